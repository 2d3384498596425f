"""Attention's mass: how much of it keys get, without a T x S array.

Guarantees: equals sums of the softmax over all keys of all views and shards.
Cost: two passes over the keys, the first for the log-sum-exp of each query.
Memory: the products of a block of queries and a tile of keys.

What policies of eviction look at. Inside of a shard_map `axis` shards the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from ringjax.ops.attention.blockwise import cut_coords, loop, product
from ringjax.ops.attention.paged import heads_as_examples
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  Scores,
  ScoreTile,
  Terms,
)
from ringjax.ops.attention.views import KVView, tile_slots, tiled
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import finite_max, wide_dtype
from ringjax.parallel import collectives
from ringjax.typing import Index

# Queries that visit a tile of keys together.
_BLOCK = 64


class Visit(NamedTuple):
  """Queries, and how they score the keys of a layer.

  Fields:
    q: [B, K, G, T, H].
    at: their coordinates [B, T]; those of segment 0 see nothing.
    scores: the static part of the score function.
    mask: who sees whom.
    slopes: [K, G], or None.
    axis: the mesh axis that shards the keys, inside of a shard_map.
  """

  q: Float[Array, "B K G T H"]
  at: Coords
  scores: Scores
  mask: Mask
  slopes: Float[Array, "K G"] | None = None
  axis: str | None = None

  def block(self, n: Index, size: int) -> Visit:
    """Queries from n size on, `size` of them."""
    return self._replace(
      q=lax.dynamic_slice_in_dim(self.q, n * size, size, 3),
      at=cut_coords(self.at, n * size, size),
    )


def column_mass(
  visit: Visit, views: Sequence[KVView]
) -> tuple[Float[Array, "B K G _"], ...]:
  """What each key of each view gets from all queries together."""

  def add(block: Visit, carry: PyTree) -> PyTree:
    log = log_mass(block, views)

    def one(view: KVView, sums: jax.Array) -> jax.Array:
      def step(s: jax.Array, start: Index, sums: jax.Array) -> jax.Array:
        mass = jnp.sum(jnp.exp(s - log[..., None]), 3)
        there = lax.dynamic_slice_in_dim(sums, start, mass.shape[3], 3)
        return lax.dynamic_update_slice_in_dim(sums, there + mass, start, 3)

      return _tiles(block, view, step, sums)

    return tuple(map(one, views, carry))

  shape = visit.q.shape[:3]
  zeros = tuple(
    jnp.zeros((*shape, view.shape[2]), wide_dtype(visit.q.dtype))
    for view in views
  )
  return _blocks(visit, add, zeros)


def column_peak(
  visit: Visit, views: Sequence[KVView], among: Sequence[Bool[Array, "B K _"]]
) -> tuple[Float[Array, "B K G _"], ...]:
  """The largest weight of a query that each key of each view gets.

  Args:
    visit: the queries.
    views: the keys.
    among: of each view the keys that there are: weights are shares of these.
  """

  def add(block: Visit, carry: PyTree) -> PyTree:
    log = log_mass(block, views, among)

    def one(view: KVView, mine: jax.Array, peaks: jax.Array) -> jax.Array:
      def step(s: jax.Array, start: Index, peaks: jax.Array) -> jax.Array:
        peak = jnp.max(jnp.exp(s - log[..., None]), 3)
        there = lax.dynamic_slice_in_dim(peaks, start, peak.shape[3], 3)
        peak = jnp.maximum(there, peak)
        return lax.dynamic_update_slice_in_dim(peaks, peak, start, 3)

      return _tiles(block, view, step, peaks, mine)

    return tuple(map(one, views, among, carry))

  shape = visit.q.shape[:3]
  zeros = tuple(
    jnp.zeros((*shape, view.shape[2]), wide_dtype(visit.q.dtype))
    for view in views
  )
  return _blocks(visit, add, zeros)


def kept_mass(
  visit: Visit,
  views: Sequence[KVView],
  keep: Sequence[Bool[Array, "C B K _"]],
) -> Float[Array, "C B K G"]:
  """What keys that are kept get of a query, the mean over the queries.

  Args:
    visit: the queries.
    views: the keys.
    keep: of each view, for each of C choices.
  """

  def add(block: Visit, carry: PyTree) -> PyTree:
    log = log_mass(block, views)
    for view, kept in zip(views, keep, strict=True):

      def step(
        s: jax.Array, start: Index, sums: jax.Array, kept: jax.Array = kept
      ) -> jax.Array:
        mine = lax.dynamic_slice_in_dim(kept, start, s.shape[4], 3)
        mass = jnp.exp(s - log[..., None])
        mass = jnp.sum(mass, 3)
        return sums + jnp.einsum("bkgs,cbks->cbkg", mass, mine.astype(s.dtype))

      carry = _tiles(block, view, step, carry)
    return carry

  count = keep[0].shape[0]
  wide = wide_dtype(visit.q.dtype)
  total = _blocks(visit, add, jnp.zeros((count, *visit.q.shape[:3]), wide))
  if visit.axis is not None:
    total = collectives.total(total, visit.axis)
  queries = jnp.sum(visit.at.seg > 0, 1).astype(wide)
  return total / jnp.maximum(queries, 1)[None, :, None, None]


def log_mass(
  visit: Visit, views: Sequence[KVView], among: Sequence[Any] | None = None
) -> Float[Array, "B K G T"]:
  """The log-sum-exp of queries over all keys; 0 where they see none.

  `among`: of each view bool [B, K, s], which keys there are; None: all.
  """
  wide = wide_dtype(visit.q.dtype)
  shape = visit.q.shape[:4]
  carry = (jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide))

  def step(s: jax.Array, start: Index, carry: PyTree) -> PyTree:
    del start
    top, total = carry
    new = jnp.maximum(top, jnp.max(s, -1))
    safe = finite_max(new)
    mass = jnp.sum(jnp.exp(s - safe[..., None]), -1)
    return new, total * jnp.exp(top - safe) + mass

  for n, view in enumerate(views):
    mine = None if among is None else among[n]
    carry = _tiles(visit, view, step, carry, mine)
  top, total = carry
  if visit.axis is not None:
    new = collectives.largest(top, visit.axis)
    total = collectives.total(
      total * jnp.exp(top - finite_max(new)), visit.axis
    )
    top = new
  return jnp.where(
    total > 0, finite_max(top) + jnp.log(jnp.maximum(total, 1e-30)), 0
  )


def _blocks(visit: Visit, add: Callable[..., Any], carry: PyTree) -> PyTree:
  """`add` of one block of queries after another."""
  count = visit.q.shape[3]
  size = min(count, _BLOCK)
  over = -count % size
  if over:
    wide = lambda x, axis: jnp.pad(
      x, [(0, over * (n == axis)) for n in range(x.ndim)]
    )
    visit = visit._replace(
      q=wide(visit.q, 3), at=Coords(*(wide(x, 1) for x in visit.at))
    )
  return loop(
    (count + over) // size, lambda n, c: add(visit.block(n, size), c), carry
  )


def _tiles(
  visit: Visit,
  view: KVView,
  step: Callable[..., Any],
  carry: PyTree,
  among: Bool[Array, "B K _"] | None = None,
) -> PyTree:
  """step(scores [B, K, G, T, S], start, carry) of tile after tile.

  Tiles in which no key is `among` are left out.
  """
  b, heads, groups, rows, _ = visit.q.shape
  terms = Terms(slopes=visit.slopes)
  view, q, _, by_head = view.aligned(visit.q)
  context = Context(visit.at, view.at, visit.mask)
  if by_head:
    q, context, terms = heads_as_examples(q, context, terms)
  length, size = view.shape[2], tile_slots(view)
  at = tiled(view.at, size)
  args = ScoreArgs(visit.scores, terms, context)

  def one(n: Index, carry: PyTree) -> PyTree:
    first = n * size
    start = jnp.minimum(first, length - size)

    def visited(carry: PyTree) -> PyTree:
      k, _ = view.tile(start, size)
      s = product("bkgqh,bkth->bkgqt", q, k.astype(q.dtype))
      k_at = cut_coords(at, first, size)
      tile = ScoreTile(args, FORWARD, 0, first, context.q, k_at)
      s, _ = tile.scores_of(s)
      s = jnp.where(tile.allowed(), s, -jnp.inf)
      s = s.reshape(b, heads, groups, rows, size)
      if mine is not None:
        s = jnp.where(mine[:, :, None, None], s, -jnp.inf)
      return step(s, start, carry)

    if among is None:
      mine = None
      return visited(carry)
    mine = lax.dynamic_slice_in_dim(among, start, size, 2)
    return lax.cond(jnp.any(mine), visited, lambda carry: carry, carry)

  return loop(-(-length // size), one, carry)
