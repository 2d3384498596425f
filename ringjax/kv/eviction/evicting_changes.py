"""Changes of an evicting cache between calls: its pages, records and marks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ringjax.errors import OptionError
from ringjax.kv.cache import KVCache
from ringjax.kv.model_cache import ModelCache
from ringjax.kv.storage.pages import Pages, host, joined

if TYPE_CHECKING:
  from ringjax.kv.eviction.evicting import EvictingCache


def truncated(
  cache: EvictingCache, open_cache: KVCache, end: Int[Array, " B"]
) -> EvictingCache:
  """Drop positions from `end` on of all but the open cache."""
  gone = lambda pos: pos >= end[None, :, None, None, None]
  # New tokens will use the freed slots, so their sums restart at 0.
  real = (open_cache.at.seg > 0)[None, :, None]
  has_tokens = (end > 0)[None, :, None]
  return dataclasses.replace(
    cache,
    open=open_cache,
    noted=tuple(
      x if x.fixed is None else x._replace(fixed=x.fixed & has_tokens)
      for x in cache.with_scores(lambda x: jnp.where(real, x, 0))
    ),
    pages=tuple(x and x.without(gone) for x in cache.pages),
    watch=cache.watch.truncated(end),
    ends=jnp.minimum(cache.ends, end),
    stayed=jnp.minimum(cache.stayed, open_cache.held.tokens()),
  )


def emptied(
  cache: EvictingCache, open_cache: KVCache, rows: Int[np.ndarray, " n"]
) -> EvictingCache:
  """Empty rows of all but the open cache."""
  index = jnp.asarray(rows)
  gone = jnp.zeros((cache.batch,), bool).at[index].set(True)
  empty = lambda x: (
    x and x.with_table(jnp.where(gone[None, :, None, None], -1, x.table))
  )
  # Rows that begin again may need more queries than those that stay.
  noted_cache = cache._noting_at_least(cache._whole_window or 0)
  watch = noted_cache.watch.truncated(
    jnp.where(gone, 0, np.iinfo(np.int32).max)
  )
  if watch.count is not None:
    watch = dataclasses.replace(watch, count=jnp.where(gone, 0, watch.count))
  clear = lambda x: jnp.where(
    gone.reshape(1, -1, *(1,) * (x.ndim - 2)), jnp.zeros((), x.dtype), x
  )
  return cache._placed(
    dataclasses.replace(
      cache,
      open=open_cache,
      pages=tuple(map(empty, cache.pages)),
      noted=jax.tree.map(clear, noted_cache.noted),
      watch=watch,
      ends=jnp.where(gone, 0, cache.ends),
      stayed=jnp.where(gone, 0, cache.stayed),
      marks=cache.marks
      if cache.marks is None
      else cache.marks & ~gone[:, None],
    )
  )


def of_one_size(
  cache: EvictingCache, other: ModelCache
) -> tuple[EvictingCache, EvictingCache]:
  """Two caches with open caches, and records of queries, of one size."""
  this, that = cache.with_slack(0)._same_size(other.with_slack(0))
  num_queries = max(this._noted_now, that._noted_now)
  this, that = (
    _without_paged_sums(x)._noting_at_least(num_queries) for x in (this, that)
  )
  return this, that


def inserted(
  cache: EvictingCache,
  changed: EvictingCache,
  rows: Int[np.ndarray, " n"],
  other: EvictingCache,
) -> EvictingCache:
  """Put rows of pages of another cache into `changed`, which has the rest."""
  pairs = zip(cache.pages, other.pages, strict=True)
  pages = tuple(
    None if x is None or y is None else joined(x, y, rows) for x, y in pairs
  )
  return cache._placed(dataclasses.replace(changed, pages=pages))


def _without_paged_sums(cache: EvictingCache) -> EvictingCache:
  """Drop paged sums; refused if a prompt has read pages since an eviction."""
  if all(x.paged is None for x in cache.noted):
    return cache
  if host(cache.ends).any():
    raise OptionError(
      "cache",
      f"insert with the policy {cache.kind.policy}, between a prompt that saw "
      "pages and its eviction",
      "a cache that was evicted after its prompt",
      "call evict() or flush() before insert",
    )
  noted = tuple(x._replace(paged=None) for x in cache.noted)
  return dataclasses.replace(cache, noted=noted)


def taken_pages(
  cache: EvictingCache, rows: Int[Array, " _"]
) -> tuple[Pages | None, ...]:
  """Pages of these rows, which share them with the rows of this cache."""
  if any(x is not None and x.places.batch for x in cache.pages):
    raise OptionError(
      "cache",
      "take of rows that are sharded over the mesh",
      "a mesh that shards the sequence alone",
      "make the cache with a batch that does not divide over the data axis",
    )
  index = jnp.asarray(rows, jnp.int32)
  return tuple(x and x.take(index) for x in cache.pages)
