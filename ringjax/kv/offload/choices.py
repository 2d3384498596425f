"""The choices of pages in host memory, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringjax.kv.offload.mean_pages import Means
from ringjax.kv.offload.page_choice import Bounds, PageChoice

if TYPE_CHECKING:
  from ringjax.kv.cache_kind import CacheConfig


def choice_of(kind: CacheConfig) -> PageChoice:
  """Choice of pages of a kind of cache with a policy and `hot`."""
  if kind.tier.landmarks == "means":
    return Means(kind.tier.outlier_pages)
  return Bounds()


def pages_read(kind: CacheConfig, count: int) -> int:
  """Number of pages that a query reads of a head with `count` pages."""
  assert kind.policy is not None
  pages = kind.policy.pages(count, kind.tier.block)
  return max(1, min(count, pages + choice_of(kind).extra_pages))
