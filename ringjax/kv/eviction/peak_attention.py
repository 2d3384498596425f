"""Largest attention weight of each key while the model repeats its context.

Guarantees: the numbers do not depend on how tokens are sharded.
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
from jaxtyping import Array, Bool, Float, Int

from ringjax.kv.eviction.eviction import (
  PagedPart,
  layer_views,
  paged_parts,
  part_specs,
  visit_of,
)
from ringjax.kv.eviction.recorded_queries import Noted, QueryWatch
from ringjax.ops.attention.attention_mass import column_peak
from ringjax.ops.mask import Coords

if TYPE_CHECKING:
  from ringjax.kv.eviction.evicting import EvictingCache


class Chunk(NamedTuple):
  """Tokens of each row that a call repeats.

  Fields:
    start: Position of the first token, int32 [B].
    end: Position after the last token, int32 [B]; `start` if there is no token.
    length: Position after the row's last token, int32 [B].
  """

  start: Int[Array, " B"]
  end: Int[Array, " B"]
  length: Int[Array, " B"]


class Repeated(NamedTuple):
  """Scores of tokens by the repetition of a context, for `EvictingCache.evict`.

  Fields:
    scores: Largest attention weight over all queries, by kind of layer, float32
      [L, B, K, S], for the slots of pages and of the open cache.
    rows: Whether a row was repeated, NumPy bool [B]; other rows keep all.
  """

  scores: dict[int, Float[Array, "_ B _ _"]]
  rows: Bool[np.ndarray, " B"]


def watching(cache: EvictingCache, tokens: int) -> EvictingCache:
  """Make room to record the queries of a call of `tokens` tokens."""
  zeros = lambda *shape: jnp.zeros((cache.batch, *shape), jnp.int32)
  watch = QueryWatch(
    at=Coords(zeros(tokens), zeros(tokens)), mesh=cache.mesh, axis=cache.axis
  )
  noted = [Noted()] * len(cache.shapes)
  for kind in repeated_kinds(cache):
    shape = cache.shapes[kind]
    lead = (shape.layers, cache.batch, tokens)
    heads = shape.heads * shape.reading.groups
    newest = jnp.zeros((*lead, heads, shape.key), cache.open.dtype)
    noted[kind] = Noted(newest=newest)
  return dataclasses.replace(cache, watch=watch, noted=tuple(noted))


def repeated_kinds(cache: EvictingCache) -> list[int]:
  """Indices of the kinds of layers whose tokens a repetition scores."""
  return [n for n in paged_parts(cache) if not cache.windowed(n)]


def of_chunk(
  cache: EvictingCache, chunk: Chunk
) -> dict[int, Float[Array, "_ B _ _"]]:
  """Score a chunk's tokens after the call that has repeated it.

  A query sees the first tokens, the chunk and the tokens repeated before it.

  Args:
    cache: Cache after the call, made by `watching` before it.
    chunk: Tokens that were repeated.

  Returns:
    Scores as in `Repeated`; 0 for tokens outside the chunk.
  """
  parts = {kind: paged_parts(cache)[kind] for kind in repeated_kinds(cache)}
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
  by_row = P(places.batch or None)
  return places.local(
    local,
    (
      {n: part_specs(part) for n, part in parts.items()},
      places.by_example,
      by_row,
      by_row,
    ),
    by_head,
  )(parts, cache.open.at, cache.watch.at, chunk)


def _of_kind(
  cache: EvictingCache,
  kind: int,
  part: PagedPart,
  at: Coords,
  watch_at: Coords,
  chunk: Chunk,
  sinks: int,
) -> jax.Array:
  """Scores [L, B, K, s] of one kind of layers on a device."""
  shape, heads = cache.shapes[kind], part.k.shape[2]
  column = lambda x: x[:, None, None]

  def layer_scores(layer: jax.Array) -> jax.Array:
    views, slots = layer_views(cache, kind, layer, part, at)
    inside = (slots.pos >= column(chunk.start)) & (
      slots.pos < column(chunk.end)
    )
    is_sink = slots.pos < column(jnp.minimum(chunk.start, sinks))
    in_repetition = slots.pos >= column(chunk.length)
    visible = (slots.seg > 0) & (inside | is_sink | in_repetition)
    masks, start = [], 0
    for view in views:
      masks.append(visible[..., start : start + view.shape[2]])
      start += view.shape[2]
    q = lax.dynamic_index_in_dim(part.noted.newest, layer, 0, keepdims=False)
    visit = visit_of(cache, kind, heads, q, watch_at)
    peak = jnp.concatenate(column_peak(visit, views, masks), 3)
    peak = jnp.max(peak, 2).astype(jnp.float32)
    return jnp.where(inside & (slots.seg > 0), peak, 0)

  return lax.map(layer_scores, jnp.arange(shape.layers, dtype=jnp.int32))
