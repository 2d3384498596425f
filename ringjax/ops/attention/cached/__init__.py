"""Attention of a few queries over a cache's views."""
