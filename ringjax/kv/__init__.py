"""Caches of keys and values on devices: pytrees that can be traced."""

from ringjax.kv.cache import Blocks, KVCache, Snapshot
from ringjax.kv.cache_kind import KINDS, CacheKind
from ringjax.kv.codecs import (
  Calibrated,
  Calibration,
  CodeBook,
  Codec,
  Floats,
  Hadamard,
  Integers,
)
from ringjax.kv.simulated import SimulatedCache

__all__ = [
  "KINDS",
  "Blocks",
  "CacheKind",
  "Calibrated",
  "Calibration",
  "CodeBook",
  "Codec",
  "Floats",
  "Hadamard",
  "Integers",
  "KVCache",
  "SimulatedCache",
  "Snapshot",
]
