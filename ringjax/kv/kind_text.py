"""Kinds of caches as text, for flags."""

from __future__ import annotations

from ringjax.kv.cache_kind import CacheConfig, cache_kind


def parse(text: str, name: str = "cache kind") -> CacheConfig:
  """Return the kind of cache that a text names; see `cache_kind`."""
  return cache_kind(text, name)
