"""Caches that are made of other caches."""
