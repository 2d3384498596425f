"""Prefixes that requests share: tree, store, transfer."""
