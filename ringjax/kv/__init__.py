"""Caches of keys and values on devices: pytrees that can be traced."""

from ringjax.kv.cache import Blocks, KVCache, Snapshot
from ringjax.kv.cache_kind import KINDS, CacheKind

__all__ = ["KINDS", "Blocks", "CacheKind", "KVCache", "Snapshot"]
