"""Caches of keys and values on devices: pytrees that can be traced."""

from ringjax.kv.bits.allocation import Allocation, allocate_bits
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import (
  KINDS,
  CacheConfig,
  CacheKind,
  ExactConfig,
  LayoutConfig,
  TierConfig,
)
from ringjax.kv.cache_report import CacheReport
from ringjax.kv.codecs import (
  Allocated,
  Calibrated,
  Calibration,
  ChannelGroups,
  CodeBook,
  Codec,
  Floats,
  Hadamard,
  Integers,
  PerHead,
)
from ringjax.kv.eviction.evicting import EvictingCache
from ringjax.kv.offload.cache_files import CacheFiles, TransferEvent
from ringjax.kv.offload.chosen_tiered import ChosenTieredCache
from ringjax.kv.offload.hot_pages import PageFetches
from ringjax.kv.offload.layer_offload import OffloadedCache
from ringjax.kv.offload.tiered import TieredCache
from ringjax.kv.policies import (
  AdaKV,
  Duo,
  ExpectedAttention,
  FastGen,
  HeavyHitters,
  KeyDiff,
  KeyNorm,
  KVzip,
  LagKV,
  Policy,
  PyramidKV,
  Select,
  Sinks,
  SnapKV,
  Tova,
)
from ringjax.kv.simulated import SimulatedCache
from ringjax.kv.storage.exported_blocks import Blocks
from ringjax.kv.storage.saved_fields import Snapshot

__all__ = [
  "KINDS",
  "AdaKV",
  "Allocated",
  "Allocation",
  "Blocks",
  "CacheConfig",
  "CacheFiles",
  "CacheKind",
  "CacheReport",
  "Calibrated",
  "Calibration",
  "ChannelGroups",
  "ChosenTieredCache",
  "CodeBook",
  "Codec",
  "Duo",
  "EvictingCache",
  "ExactConfig",
  "ExpectedAttention",
  "FastGen",
  "Floats",
  "Hadamard",
  "HeavyHitters",
  "Integers",
  "KVCache",
  "KVzip",
  "KeyDiff",
  "KeyNorm",
  "LagKV",
  "LayoutConfig",
  "OffloadedCache",
  "PageFetches",
  "PerHead",
  "Policy",
  "PyramidKV",
  "Select",
  "SimulatedCache",
  "Sinks",
  "SnapKV",
  "Snapshot",
  "TierConfig",
  "TieredCache",
  "Tova",
  "TransferEvent",
  "allocate_bits",
]
