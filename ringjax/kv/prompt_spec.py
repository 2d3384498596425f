"""Shapes of a cache that evicts, after a prompt of so many tokens.

Guarantees: the shapes are those that the programs of an eviction make, on one
device. Where the text decides how much stays, the most that it may be.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ringjax.kv.cache import model_layers
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.evicting import (
  EvictingCache,
  first_sizes,
  open_slots,
  with_paged_sums,
)
from ringjax.kv.eviction import grown, repacked
from ringjax.kv.pages import few_sizes


class PromptSpec(NamedTuple):
  """Shapes and dtypes of a cache while a prompt is read and after it.

  Fields:
    reading: Cache that holds the whole prompt, before the eviction.
    cache: Cache after the eviction.
    held: Tokens of all rows, heads and layers, by the number of the kind.
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
  kind: CacheKind,
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
    room = few_sizes(tokens)
    reading = jax.eval_shape(lambda cache: grown(cache, room), reading)
    slots = room
  stays = _open_tokens(kind, tokens)
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
  everything = [tokens] * model_layers(shapes)
  heads = reading._competing()
  counts = everything if policy is None else policy.expected(tokens, heads)
  sizes, held = [(0, 0)] * len(shapes), {}
  like, masses = {}, {}
  for n, (shape, pages) in enumerate(zip(shapes, reading.pages, strict=True)):
    if pages is None:
      continue
    each = [max(stays, counts[layer]) for layer in shape.which]
    if reading.windowed(n):
      near = max(0, tokens - shape.reach)
      if kind.grouped:
        # Groups that the window reaches stay whole.
        near = near // kind.page * kind.page
      newest = tokens - (stays - kind.first)
      some = max(0, newest - max(near, kind.first))
      each = [stays + some] * shape.layers
    in_pages = [math.ceil((count - stays) / pages.slots) for count in each]
    whole = batch * shape.heads * sum(in_pages)
    sizes[n] = first_sizes(whole, max(in_pages))
    held[n] = batch * shape.heads * sum(each)
    lead = (shape.layers, batch, shape.heads)
    size = slots + pages.table.shape[3] * pages.slots
    like[n] = jax.ShapeDtypeStruct((*lead, size), jnp.bool_)
    sums = policy is not None and policy.sums
    masses[n] = (
      jax.ShapeDtypeStruct((*lead, size), jnp.float32) if sums else None
    )
  rows = jax.ShapeDtypeStruct((batch,), jnp.bool_)
  # Programs do not depend on the budget; the kind is put back.
  local = open_slots(kind, stays, 1)
  cache = jax.eval_shape(
    lambda *given: repacked(*given, tuple(sizes), local, False),
    *(reading, like, masses, rows),
  )
  return PromptSpec(reading, dataclasses.replace(cache, kind=kind), held)


def _open_tokens(kind: CacheKind, tokens: int) -> int:
  """Return how many tokens of a row an eviction leaves open."""
  leaves = max(0, tokens - kind.first - kind.recent)
  if kind.grouped:
    leaves = leaves // kind.page * kind.page
  exact = kind.first or kind.recent
  return tokens - leaves if exact else 0
