"""Attention mass of keys: their share of the attention, without a T x S array.

Guarantees: equals sums of the softmax over all keys of all views and shards.
Cost: two passes over the keys, the first for the log-sum-exp of each query.
Memory: the products of a block of queries and a tile of keys.

Eviction policies use it. Inside a shard_map `axis` shards the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from ringjax.ops.attention.blockwise import cut_coords, loop, product
from ringjax.ops.attention.cached.paged import heads_as_examples
from ringjax.ops.attention.cached.views import KVView, tile_slots, tiled
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  Scores,
  ScoreTile,
  Terms,
)
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import finite_max, wide_dtype
from ringjax.parallel import collectives
from ringjax.typing import Index

# Queries that are multiplied with a tile of keys at once.
_BLOCK = 64


class Visit(NamedTuple):
  """Queries, and how they score the keys of a layer.

  Fields:
    q: Queries, [B, K, G, T, H].
    at: Coordinates of the queries, [B, T]; those of segment 0 see nothing.
    scores: Static part of the score function.
    mask: Pairs that are visible.
    slopes: ALiBi slopes, [K, G], or None.
    axis: Mesh axis that shards the keys, inside a shard_map.
  """

  q: Float[Array, "B K G T H"]
  at: Coords
  scores: Scores
  mask: Mask
  slopes: Float[Array, "K G"] | None = None
  axis: str | None = None

  def block(self, n: Index, size: int) -> Visit:
    """Slice `size` queries from n size on."""
    return self._replace(
      q=lax.dynamic_slice_in_dim(self.q, n * size, size, 3),
      at=cut_coords(self.at, n * size, size),
    )


def column_mass(
  visit: Visit, views: Sequence[KVView]
) -> tuple[Float[Array, "B K G _"], ...]:
  """Sum the attention that each key of each view gets from all queries."""

  def add(block: Visit, carry: PyTree) -> PyTree:
    log = log_mass(block, views)

    def add_view(view: KVView, sums: jax.Array) -> jax.Array:
      def step(s: jax.Array, start: Index, sums: jax.Array) -> jax.Array:
        mass = jnp.sum(jnp.exp(s - log[..., None]), 3)
        previous = lax.dynamic_slice_in_dim(sums, start, mass.shape[3], 3)
        return lax.dynamic_update_slice_in_dim(sums, previous + mass, start, 3)

      return _tiles(block, view, step, sums)

    return tuple(map(add_view, views, carry))

  shape = visit.q.shape[:3]
  zeros = tuple(
    jnp.zeros((*shape, view.shape[2]), wide_dtype(visit.q.dtype))
    for view in views
  )
  return _blocks(visit, add, zeros)


def column_peak(
  visit: Visit, views: Sequence[KVView], among: Sequence[Bool[Array, "B K _"]]
) -> tuple[Float[Array, "B K G _"], ...]:
  """Find the largest attention that each key gets from any query.

  Args:
    visit: Queries.
    views: Views of the keys.
    among: Keys of each view to normalize over: weights are shares of these.
  """

  def add(block: Visit, carry: PyTree) -> PyTree:
    log = log_mass(block, views, among)

    def peak_of_view(
      view: KVView, present: jax.Array, peaks: jax.Array
    ) -> jax.Array:
      def step(s: jax.Array, start: Index, peaks: jax.Array) -> jax.Array:
        peak = jnp.max(jnp.exp(s - log[..., None]), 3)
        previous = lax.dynamic_slice_in_dim(peaks, start, peak.shape[3], 3)
        peak = jnp.maximum(previous, peak)
        return lax.dynamic_update_slice_in_dim(peaks, peak, start, 3)

      return _tiles(block, view, step, peaks, present)

    return tuple(map(peak_of_view, views, among, carry))

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
  """Attention that the kept keys get of a query, averaged over queries.

  Args:
    visit: Queries.
    views: Views of the keys.
    keep: Kept keys of each view, for each of C choices.
  """

  def add(block: Visit, carry: PyTree) -> PyTree:
    log = log_mass(block, views)
    for view, view_keep in zip(views, keep, strict=True):

      def step(
        s: jax.Array,
        start: Index,
        sums: jax.Array,
        keep_array: jax.Array = view_keep,
      ) -> jax.Array:
        tile_slice = lax.dynamic_slice_in_dim(keep_array, start, s.shape[4], 3)
        mass = jnp.exp(s - log[..., None])
        mass = jnp.sum(mass, 3)
        return sums + jnp.einsum(
          "bkgs,cbks->cbkg", mass, tile_slice.astype(s.dtype)
        )

      carry = _tiles(block, view, step, carry)
    return carry

  count = keep[0].shape[0]
  dtype = wide_dtype(visit.q.dtype)
  total = _blocks(visit, add, jnp.zeros((count, *visit.q.shape[:3]), dtype))
  if visit.axis is not None:
    total = collectives.total(total, visit.axis)
  queries = jnp.sum(visit.at.seg > 0, 1).astype(dtype)
  return total / jnp.maximum(queries, 1)[None, :, None, None]


def log_mass(
  visit: Visit, views: Sequence[KVView], among: Sequence[Any] | None = None
) -> Float[Array, "B K G T"]:
  """Log-sum-exp of queries over all keys; 0 for queries that see none.

  `among`: keys of each view to include, bool [B, K, s]; None: all.
  """
  dtype = wide_dtype(visit.q.dtype)
  shape = visit.q.shape[:4]
  carry = (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))

  def step(s: jax.Array, start: Index, carry: PyTree) -> PyTree:
    del start
    top, total = carry
    new_top = jnp.maximum(top, jnp.max(s, -1))
    safe = finite_max(new_top)
    mass = jnp.sum(jnp.exp(s - safe[..., None]), -1)
    return new_top, total * jnp.exp(top - safe) + mass

  for n, view in enumerate(views):
    present = None if among is None else among[n]
    carry = _tiles(visit, view, step, carry, present)
  top, total = carry
  if visit.axis is not None:
    global_top = collectives.largest(top, visit.axis)
    total = collectives.total(
      total * jnp.exp(top - finite_max(global_top)), visit.axis
    )
    top = global_top
  return jnp.where(
    total > 0, finite_max(top) + jnp.log(jnp.maximum(total, 1e-30)), 0
  )


def _blocks(visit: Visit, add: Callable[..., Any], carry: PyTree) -> PyTree:
  """Apply `add` to one block of queries after another."""
  count = visit.q.shape[3]
  size = min(count, _BLOCK)
  padding = -count % size
  if padding:
    pad = lambda x, axis: jnp.pad(
      x, [(0, padding * (n == axis)) for n in range(x.ndim)]
    )
    visit = visit._replace(
      q=pad(visit.q, 3), at=Coords(*(pad(x, 1) for x in visit.at))
    )
  return loop(
    (count + padding) // size, lambda n, c: add(visit.block(n, size), c), carry
  )


def _tiles(
  visit: Visit,
  view: KVView,
  step: Callable[..., Any],
  carry: PyTree,
  among: Bool[Array, "B K _"] | None = None,
) -> PyTree:
  """Run step(scores [B, K, G, T, S], start, carry) on tile after tile.

  Tiles without a key of `among` are skipped.
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

  def fold_tile(n: Index, carry: PyTree) -> PyTree:
    first = n * size
    start = jnp.minimum(first, length - size)

    def run_step(carry: PyTree) -> PyTree:
      k, _ = view.tile(start, size)
      s = product("bkgqh,bkth->bkgqt", q, k.astype(q.dtype))
      k_at = cut_coords(at, first, size)
      tile = ScoreTile(args, FORWARD, 0, first, context.q, k_at)
      s, _ = tile.scores_of(s)
      s = jnp.where(tile.allowed(), s, -jnp.inf)
      s = s.reshape(b, heads, groups, rows, size)
      if present is not None:
        s = jnp.where(present[:, :, None, None], s, -jnp.inf)
      return step(s, start, carry)

    if among is None:
      present = None
      return run_step(carry)
    present = lax.dynamic_slice_in_dim(among, start, size, 2)
    return lax.cond(jnp.any(present), run_step, lambda carry: carry, carry)

  return loop(-(-length // size), fold_tile, carry)
