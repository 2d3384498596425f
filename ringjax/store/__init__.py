"""Tiers of blocks of bytes in host memory and on disk, and their policies."""

from ringjax.store.disk_tier import DiskTier
from ringjax.store.host_tier import HostTier
from ringjax.store.impress.importance import (
  Impress,
  ImpressCounters,
  KeptTokens,
  MissingChunk,
  NodeChain,
  StoredNode,
  mean_jaccard,
  overlap_threshold,
  vectors_of_all,
  vectors_of_probes,
)
from ringjax.store.impress.scored_tiers import ScoredTiers
from ringjax.store.object_tier import ObjectTier
from ringjax.store.predicted_reuse import PredictedReuse
from ringjax.store.prefix_store import Store, StoreCounters, StoreFetch
from ringjax.store.replay import (
  PolicyReplay,
  most_hits,
  read_trace,
  replay,
)
from ringjax.store.tier_policies import (
  LFU,
  LRU,
  Belady,
  BlockUse,
  OnceUsedFirst,
  SecondHit,
  TierPolicy,
  tier_policy,
)

__all__ = [
  "LFU",
  "LRU",
  "Belady",
  "BlockUse",
  "DiskTier",
  "HostTier",
  "Impress",
  "ImpressCounters",
  "KeptTokens",
  "MissingChunk",
  "NodeChain",
  "ObjectTier",
  "OnceUsedFirst",
  "PolicyReplay",
  "PredictedReuse",
  "ScoredTiers",
  "SecondHit",
  "Store",
  "StoreCounters",
  "StoreFetch",
  "StoredNode",
  "TierPolicy",
  "mean_jaccard",
  "most_hits",
  "overlap_threshold",
  "read_trace",
  "replay",
  "tier_policy",
  "vectors_of_all",
  "vectors_of_probes",
]
