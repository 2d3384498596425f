"""Vectors that stand for windows of keys, as a part of a cache."""
