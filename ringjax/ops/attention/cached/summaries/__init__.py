"""Vectors that stand for windows of a cache's keys, and how they are read."""
