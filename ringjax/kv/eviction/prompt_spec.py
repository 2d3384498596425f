"""Shapes of a cache that evicts, after a prompt of a given number of tokens.

Guarantees: the shapes are those that the programs of an eviction make, on one
device. If the text decides how much stays, the shapes are upper bounds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.eviction.evicting import EvictingCache
from ringjax.kv.eviction.evicting_layer import with_paged_sums
from ringjax.kv.eviction.page_sizes import first_sizes, open_slots
from ringjax.kv.eviction.repacking import grown, repacked
from ringjax.kv.storage.pages import few_sizes


class PromptSpec(NamedTuple):
  """Shapes and dtypes of a cache while a prompt is read and after it.

  Fields:
    reading: Cache that holds the whole prompt, before the eviction.
    cache: Cache after the eviction.
    held: Tokens of all rows, heads and layers, by the index of the kind.
  """

  reading: EvictingCache
  cache: EvictingCache
  held: dict[int, int | float]


def prompt_spec(
  shapes: tuple[Any, ...],
  batch: int,
  tokens: int,
  dtype: DTypeLike,
  *,
  kind: CacheConfig,
  platform: str | None = None,
) -> PromptSpec:
  """Describe the cache of a session that reads a prompt at once.

  Args:
    shapes: Shapes of the model's layers, see `KVCache.spec`.
    batch: Rows.
    tokens: Tokens of each prompt.
    dtype: Dtype of keys and values.
    kind: Kind of cache, one that evicts.
    platform: Platform of the devices; None is that of the process.
  """
  empty = EvictingCache.spec(
    shapes, batch, kind.least, dtype, kind=kind, platform=platform
  )
  reading = jax.eval_shape(lambda cache: cache.limited(tokens), empty)
  slots = reading.open.held.local
  if tokens > slots:
    few_slots = few_sizes(tokens)
    reading = jax.eval_shape(lambda cache: grown(cache, few_slots), reading)
    slots = few_slots
  open_tokens = _open_tokens(kind, tokens)
  policy = kind.policy
  window = 0 if policy is None else policy.queries
  if policy is not None and policy.choices and tokens >= (window or 0):
    # Heads keep their choices from here on, by fewer queries.
    reading = jax.eval_shape(EvictingCache.with_few_queries, reading)
  if policy is not None and policy.sums_prompts:
    noted = jax.eval_shape(
      lambda cache: tuple(map(with_paged_sums, cache.noted, cache.pages)),
      reading,
    )
    reading = dataclasses.replace(reading, noted=noted)
  competing = reading._competing()
  counts = kind.counts(tokens, competing, expected=True)
  sizes, held_tokens = [(0, 0)] * len(shapes), {}
  like, masses = {}, {}
  for n, (shape, pages) in enumerate(zip(shapes, reading.pages, strict=True)):
    if pages is None:
      continue
    layer_tokens = [max(open_tokens, counts[layer]) for layer in shape.which]
    if reading.windowed(n):
      window_start = max(0, tokens - shape.reach)
      if kind.grouped:
        # A group is kept whole if any of its tokens is in the window.
        window_start = window_start // kind.layout.page * kind.layout.page
      newest = tokens - (open_tokens - kind.exact.first)
      paged_tokens = max(0, newest - max(window_start, kind.exact.first))
      layer_tokens = [open_tokens + paged_tokens] * shape.layers
    in_pages = [
      math.ceil((count - open_tokens) / pages.slots) for count in layer_tokens
    ]
    num_pages = batch * shape.heads * sum(in_pages)
    heads = batch * shape.heads * shape.layers
    sizes[n] = first_sizes(num_pages, max(in_pages), heads)
    held_tokens[n] = batch * shape.heads * sum(layer_tokens)
    lead = (shape.layers, batch, shape.heads)
    size = slots + pages.table.shape[3] * pages.slots
    like[n] = jax.ShapeDtypeStruct((*lead, size), jnp.bool_)
    sums = policy is not None and policy.sums
    masses[n] = (
      jax.ShapeDtypeStruct((*lead, size), jnp.float32) if sums else None
    )
  rows = jax.ShapeDtypeStruct((batch,), jnp.bool_)
  # Eviction programs run without the policy's budget: set the kind again.
  local = open_slots(kind, open_tokens, 1)
  cache = jax.eval_shape(
    lambda *args: repacked(*args, tuple(sizes), local, False),
    *(reading, like, masses, rows),
  )
  return PromptSpec(reading, dataclasses.replace(cache, kind=kind), held_tokens)


def _open_tokens(kind: CacheConfig, tokens: int) -> int:
  """Number of a row's tokens that an eviction leaves in the open cache."""
  leaves = max(0, tokens - kind.exact.first - kind.exact.recent)
  if kind.grouped:
    leaves = leaves // kind.layout.page * kind.layout.page
  exact = kind.exact.first or kind.exact.recent
  return tokens - leaves if exact else 0
