"""Attention of a prompt over chosen tiles of queries and keys."""
