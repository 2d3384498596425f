"""The choices of keys in host memory, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringjax.kv.offload.clustered_keys import Clusters
from ringjax.kv.offload.hashed_keys import Hashes
from ringjax.kv.offload.mean_pages import Means
from ringjax.kv.offload.page_choice import Bounds, PageChoice

if TYPE_CHECKING:
  from ringjax.kv.cache_kind import CacheConfig


def choice_of(kind: CacheConfig) -> PageChoice:
  """Choice of keys of a kind of cache with a policy and `hot`."""
  tier = kind.tier
  if tier.landmarks == "means":
    return Means(tier.outlier_pages)
  if tier.landmarks == "hashes":
    return Hashes(
      tier.hash_bits, tier.hash_tables, tier.sink_tokens, tier.hash_seed
    )
  if tier.landmarks == "clusters":
    return Clusters(tier.cluster_tokens)
  return Bounds()


def unit_of(kind: CacheConfig) -> int:
  """Number of adjacent tokens that are copied together from host memory."""
  if kind.policy is None:
    # The index of a layer chooses pages.
    return kind.tier.block
  return choice_of(kind).unit(kind.tier.block)


def units_read(kind: CacheConfig, pages: int) -> int:
  """Number of units that a query reads of a head with `pages` pages."""
  assert kind.policy is not None
  return choice_of(kind).units_read(kind.policy, pages, kind.tier.block)
