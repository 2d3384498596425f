"""Eviction policies that are a score of each token."""
