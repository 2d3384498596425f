"""How much keys are looked at while the model repeats its context.

Guarantees: the same numbers however the tokens lie over devices.
Cost: two passes of a call's queries over the keys of a chunk, in each layer.
Memory: during such a call its queries, L B T N H numbers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from ringjax.kv.eviction import (
  _Part,
  layer_views,
  paged_parts,
  part_specs,
  visit_of,
)
from ringjax.kv.watch import Noted, QueryWatch
from ringjax.ops.attention.mass import column_peak
from ringjax.ops.mask import Coords

if TYPE_CHECKING:
  from ringjax.kv.evicting import EvictingCache


class Chunk(NamedTuple):
  """Tokens of each row that a call repeats.

  Fields:
    start: int32 [B], the position of the first.
    end: int32 [B], the position behind the last; as `start` if there is none.
    length: int32 [B], the position behind the row's last token.
  """

  start: Int[Array, " B"]
  end: Int[Array, " B"]
  length: Int[Array, " B"]


class Repeated(NamedTuple):
  """What repetitions have found, for `EvictingCache.evict`.

  Fields:
    scores: by kind of layer float32 [L, B, K, S], over the slots of pages and
      of the open cache: the largest weight of a query.
    rows: bool [B], NumPy, which rows were repeated; the others keep all.
  """

  scores: dict[int, Any]
  rows: Bool[np.ndarray, " B"]


def watching(cache: EvictingCache, tokens: int) -> EvictingCache:
  """The cache with room for the queries of a call of so many tokens."""
  zeros = lambda *shape: jnp.zeros((cache.batch, *shape), jnp.int32)
  watch = QueryWatch(
    at=Coords(zeros(tokens), zeros(tokens)), mesh=cache.mesh, axis=cache.axis
  )
  noted = [Noted()] * len(cache.shapes)
  for n in repeated_kinds(cache):
    shape = cache.shapes[n]
    lead = (shape.layers, cache.batch, tokens)
    heads = shape.heads * shape.reading.groups
    newest = jnp.zeros((*lead, heads, shape.key), cache.open.dtype)
    noted[n] = Noted(newest=newest)
  return dataclasses.replace(cache, watch=watch, noted=tuple(noted))


def repeated_kinds(cache: EvictingCache) -> list[int]:
  """Kinds of layers whose tokens a repetition scores."""
  return [n for n in paged_parts(cache) if not cache.windowed(n)]


def of_chunk(cache: EvictingCache, chunk: Chunk) -> dict[int, jax.Array]:
  """Scores of a chunk's tokens, behind the call that has repeated it.

  A query sees the first tokens, the chunk and what was repeated before it.

  Args:
    cache: after a call of a cache that `watching` made.
    chunk: what was repeated.

  Returns:
    see `Repeated`; 0 of tokens that are not in the chunk.
  """
  parts = {n: paged_parts(cache)[n] for n in repeated_kinds(cache)}
  policy: Any = cache.kind.policy
  places, sinks = cache.places, policy.sinks

  def local(
    parts: Any, at: Coords, watch_at: Coords, chunk: Chunk
  ) -> dict[int, jax.Array]:
    return {
      n: _of_kind(cache, n, part, Coords(*at), watch_at, Chunk(*chunk), sinks)
      for n, part in parts.items()
    }

  by_head = dict.fromkeys(parts, places.by_head)
  each = P(places.batch or None)
  return places.local(
    local,
    (
      {n: part_specs(part) for n, part in parts.items()},
      places.by_example,
      each,
      each,
    ),
    by_head,
  )(parts, cache.open.at, cache.watch.at, chunk)


def _of_kind(
  cache: EvictingCache,
  kind: int,
  part: _Part,
  at: Coords,
  watch_at: Coords,
  chunk: Chunk,
  sinks: int,
) -> jax.Array:
  """The scores [L, B, K, s] of one kind of layers on a device."""
  shape, heads = cache.shapes[kind], part.k.shape[2]
  column = lambda x: x[:, None, None]

  def one(layer: jax.Array) -> jax.Array:
    views, slots = layer_views(cache, kind, layer, part, at)
    inside = (slots.pos >= column(chunk.start)) & (
      slots.pos < column(chunk.end)
    )
    first = slots.pos < column(jnp.minimum(chunk.start, sinks))
    own = slots.pos >= column(chunk.length)
    seen = (slots.seg > 0) & (inside | first | own)
    among, start = [], 0
    for view in views:
      among.append(seen[..., start : start + view.shape[2]])
      start += view.shape[2]
    q = lax.dynamic_index_in_dim(part.noted.newest, layer, 0, keepdims=False)
    visit = visit_of(cache, kind, heads, q, watch_at)
    peak = jnp.concatenate(column_peak(visit, views, among), 3)
    peak = jnp.max(peak, 2).astype(jnp.float32)
    return jnp.where(inside & (slots.seg > 0), peak, 0)

  return lax.map(one, jnp.arange(shape.layers, dtype=jnp.int32))
