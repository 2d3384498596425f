"""Queries that read only the keys with the best scores of an index.

Guarantees: of the keys that its mask lets a query t see it reads the `count`
with the largest

  I(t, s) = sum_i weights[t, i] relu(q[t, i] . k[s])

and of equal ones those at the lowest positions; all of them where there are no
more. Which these are does not depend on layouts, shards, views or chunks of
queries. No gradient flows through the choice.
Cost: the index reads its part of every key and sorts the scores. One query a
row then reads the chosen keys alone, out of a cache of plain numbers with twice
as many slots on a shard or more. More queries, and those of other caches, read
all keys again, those that were not chosen behind a mask. Over shards each sends
its `count` best scores and their positions, 8 bytes each for a query.
Memory: the scores of some queries and all keys of a shard, float32; what
chooses the queries at a time is the caller.

Ref: DeepSeek-AI 2025, DeepSeek-V3.2-Exp (lightning indexer, DSA).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import product, tile_kinds, tile_lists
from ringjax.ops.attention.paged import selecting
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.views import (
  ContiguousView,
  KVView,
  decode_attention,
  fold_tiles,
  in_tiles,
  tile_slots,
  tiled,
)
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import Partial, merge, wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.place import MeshAxes
from ringjax.typing import Index

# Scores of single heads of an index that are there at once.
_HEAD_SCORES = 1 << 27
# Rows of a product with a tile of keys.
_ROWS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySelection:
  """By what the queries of a call choose their keys; a pytree.

  Attributes:
    q: queries of the index, rotated.
    weights: of the index's heads, with all scales; float32 or wider.
    count: how many keys a query reads at most.
    first: where in a stored key that of the index begins.
    keys: those of the call's own tokens, where keys travel; else None.
  """

  q: Float[Array, "B T I E"]
  weights: Float[Array, "B T I"]
  count: int
  first: int
  keys: Float[Array, "B S E"] | None = None

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> KeySelection:
    """The same tree, of PartitionSpecs of these mesh axes."""
    own = P(batch, tokens)
    return tree.with_leaves(self, q=own, weights=own)

  def without_keys(self) -> KeySelection:
    """The same of keys that are in a cache."""
    return dataclasses.replace(self, keys=None)

  def scores(self, keys: Float[Array, "B S E"]) -> Float[Array, "B T S"]:
    """I(t, s) of all pairs."""
    dots = product("btie,bse->btis", self.q, keys.astype(self.q.dtype))
    # Rows of a matrix, also where there is one head.
    weights = self.weights.astype(dots.dtype)
    return product("btis,bti->bts", jnp.maximum(dots, 0), weights)


tree.register(KeySelection, ("q", "weights", "keys"), ("count", "first"))


class _Last(NamedTuple):
  """The last of the keys that each query reads.

  Fields:
    score: [B, T, 1], its score; -inf: all that are seen are read.
    pos: int32 [B, T, 1], its position.
  """

  score: jax.Array
  pos: jax.Array

  def reads(
    self, scores: Float[Array, "B T S"], pos: Int[Array, "#B #T S"]
  ) -> Bool[Array, "B T S"]:
    """Which keys are read, of scores that are -inf for those not seen."""
    tied = (scores == self.score) & (pos <= self.pos)
    return (scores > -jnp.inf) & ((scores > self.score) | tied)


class _Ranked(NamedTuple):
  """A shard's best keys for each query, from the best on.

  Fields:
    worse: [B, T, n], their scores times -1.
    pos: int32 [B, T, n], their positions.
    column: int32 [B, T, n], where they are among the shard's.
  """

  worse: jax.Array
  pos: jax.Array
  column: jax.Array

  @classmethod
  def of(
    cls, scores: Float[Array, "B T S"], pos: Int[Array, "#B S"], count: int
  ) -> _Ranked:
    """At most `count`, of scores that are -inf for keys not seen."""
    place = lambda x: jnp.broadcast_to(x[:, None], scores.shape)
    column = place(jnp.arange(scores.shape[2], dtype=jnp.int32)[None])
    found = lax.sort((-scores, place(pos), column), num_keys=2)
    return cls(*(x[..., :count] for x in found))

  def last(self, count: int, axis: str | None = None) -> _Last:
    """Of the best `count` of all shards of a manual axis, which have more."""
    best = self.worse, self.pos
    if axis is not None:
      best = lax.sort(collectives.gather(best, axis, 2), num_keys=2)
    score, pos = (x[..., count - 1 : count] for x in best)
    return _Last(-score, pos)

  def alone(
    self, view: ContiguousView, at: Coords, last: _Last, block: int
  ) -> ContiguousView:
    """A view of the keys that one query of each row reads, in their order.

    Args:
      view: of all keys, one head's.
      at: their coordinates, by column.
      last: the last that is read.
      block: slots of a tile of the columns.
    """
    column = self.column[:, 0]
    first = jnp.minimum(column // block * block, view.shape[2] - block)
    row = jnp.arange(column.shape[0], dtype=jnp.int32)[:, None]
    layer = jnp.asarray(view.layer, jnp.int32)
    k = view.k[layer, row, 0, first + column % block][None, :, None]
    seg = jnp.broadcast_to(at.seg, (column.shape[0], at.seg.shape[1]))
    seg = jnp.take_along_axis(seg, column, 1)
    read = last.reads(-self.worse, self.pos)[:, 0]
    at = Coords(self.pos[:, 0], jnp.where(read, seg, 0))
    made = dataclasses.replace(view, k=k, v=k, at=at, layer=jnp.int32(0))
    return made.keys_alone()


def chosen_pairs(
  selection: KeySelection,
  q_at: Coords,
  keys: Float[Array, "B S E"],
  k_at: Coords,
  mask: Mask,
  shards: int = 1,
) -> Bool[Array, "B T S"]:
  """Which pairs of queries and keys are read, of keys that are all here.

  Args:
    selection: of the queries; T may be sharded in as many parts as `shards`.
    q_at: coordinates of the queries.
    keys: of the index.
    k_at: their coordinates.
    mask: who sees whom.
    shards: of T.
  """
  queries = selection.without_keys()
  b, t, heads, _ = queries.q.shape

  def some(each: PyTree) -> jax.Array:
    queries, at = each
    scores = queries.scores(keys)
    place = lambda x, axis: jnp.expand_dims(x, axis)
    seen = visible(
      mask,
      Coords(*(place(x, 2) for x in at)),
      Coords(*(place(x, 1) for x in k_at)),
    )
    scores = jnp.where(seen, scores, -jnp.inf)
    last = _Ranked.of(scores, k_at.pos, queries.count).last(queries.count)
    return last.reads(scores, k_at.pos[:, None])

  many = b * (t // shards) * heads * keys.shape[1]
  q_at = Coords(*(jnp.broadcast_to(x, (b, t)) for x in q_at))
  return by_chunks(some, (queries, q_at), -(-many // _HEAD_SCORES), shards)


def by_chunks(
  f: Callable[[PyTree], PyTree], x: PyTree, least: int, shards: int = 1
) -> PyTree:
  """f of arrays [B, T, ...], a part of each shard's tokens at a time.

  Args:
    f: treats each token alone.
    x: the arrays.
    least: of how many parts, or the next number that divides a shard's tokens.
    shards: of T, which lie one behind another.
  """
  own = jax.tree.leaves(x)[0].shape[1] // shards
  parts = next(
    n for n in range(max(1, min(least, own)), own + 1) if not own % n
  )
  if parts == 1:
    return f(x)

  def cut(x: jax.Array) -> jax.Array:
    b, t, *rest = x.shape
    x = jnp.moveaxis(x.reshape(b, shards, parts, own // parts, *rest), 2, 0)
    return x.reshape(parts, b, t // parts, *rest)

  def joined(x: jax.Array) -> jax.Array:
    _, b, n, *rest = x.shape
    x = jnp.moveaxis(x.reshape(parts, b, shards, n // shards, *rest), 0, 2)
    return x.reshape(b, n * parts, *rest)

  return jax.tree.map(joined, lax.map(f, jax.tree.map(cut, x)))


def _plain(views: Sequence[KVView], count: int) -> ContiguousView | None:
  """The only view, if the keys that are read are taken out of it."""
  one = views[0]
  many = len(views) > 1 or not isinstance(one, ContiguousView)
  return None if many or 2 * count > one.shape[2] else one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveVisit:
  """Queries on one device that read the keys they choose out of views.

  Attributes:
    selection: of these queries.
    scores: the static part of the score function.
    terms: of the scores; without sinks.
    at: coordinates of the queries [B or 1, T].
    mask: who sees whom, of views without a mask of their own.
    axis: the manual axis that shards the keys, or None.
    platform: of the device.
  """

  selection: KeySelection
  scores: Scores
  terms: Terms
  at: Coords
  mask: Mask
  axis: str | None
  platform: str

  def chooses(self, views: Sequence[KVView]) -> bool:
    """Whether there may be more keys than a query reads."""
    shards = 1 if self.axis is None else collectives.axis_size(self.axis)
    slots = sum(view.shape[2] for view in views)
    return self.selection.count < slots * shards

  def partial(
    self, q: Float[Array, "B K G T H"], views: Sequence[KVView]
  ) -> Partial:
    """The partial of this shard's keys, some queries at a time."""
    b, heads, groups, t, _ = q.shape
    size = min(t, max(16, _ROWS // (heads * groups)))
    parts = -(-t // size)
    over = parts * size - t
    wide = lambda x: jnp.broadcast_to(x, (b, *x.shape[1:]))

    def cut(x: jax.Array) -> jax.Array:
      x = jnp.pad(wide(x), [(0, 0), (0, over)] + [(0, 0)] * (x.ndim - 2))
      return jnp.moveaxis(x.reshape(b, parts, size, *x.shape[2:]), 1, 0)

    own = tuple(self._coords(view) for view in views)
    given = (jnp.moveaxis(q, 3, 1), self.selection.without_keys(), own)
    one = functools.partial(self._some, views)
    if parts == 1:
      given = jax.tree.map(lambda x: wide(x), given)
      return one(given)
    found = lax.map(one, jax.tree.map(cut, given))

    def joined(x: Float[Array, "n B K G t *J"]) -> jax.Array:
      x = jnp.moveaxis(x, 0, 3)
      return x.reshape(*x.shape[:3], parts * size, *x.shape[5:])[:, :, :, :t]

    return jax.tree.map(joined, found)

  def _coords(self, view: KVView) -> Coords:
    return self.at if view.queries is None else view.queries

  def _some(self, views: Sequence[KVView], given: PyTree) -> Partial:
    """The partial of some of the queries."""
    q, selection, own = given
    q = jnp.moveaxis(q, 1, 3)
    each = [
      self._scored(view, q, selection, at)
      for view, at in zip(views, own, strict=True)
    ]
    joined = lambda xs: jnp.concatenate([*xs], -1)
    rows = max(at.pos.shape[0] for _, at in each)
    place = lambda x: jnp.broadcast_to(x, (rows, x.shape[1]))
    count = selection.count
    ranked = _Ranked.of(
      joined(found for found, _ in each),
      joined(place(at.pos) for _, at in each),
      count,
    )
    last = ranked.last(count, self.axis)
    whole = _plain(views, count)
    if q.shape[3] == 1 and whole is not None:
      block, (q_at,) = tile_slots(whole, self.platform), own
      view = ranked.alone(whole, each[0][1], last, block)
      context = Context(q_at, view.at, view.mask or self.mask)
      args = ScoreArgs(self.scores, self.terms, context)
      return decode_attention(q, view, args, self.platform)
    partials = []
    for view, q_at, (found, k_at) in zip(views, own, each, strict=True):
      allow = last.reads(found, k_at.pos[:, None])[:, None, None]
      context = Context(q_at, view.at, view.mask or self.mask, allow)
      args = ScoreArgs(self.scores, self.terms, context)
      partials.append(decode_attention(q, view, args, self.platform))
    return functools.reduce(merge, partials)

  def _scored(
    self,
    view: KVView,
    q: Float[Array, "B 1 G t H"],
    selection: KeySelection,
    q_at: Coords,
  ) -> tuple[Float[Array, "B t S"], Coords]:
    """Scores of a view's keys, in whole tiles, and their coordinates."""
    block = tile_slots(view, self.platform)
    mask, k_at = view.mask or self.mask, tiled(view.at, block)
    b, rows, _, dims = selection.q.shape
    kinds = tile_kinds(mask, q_at, k_at, rows, block)
    lists = tile_lists(kinds, masked=True)
    first = selection.first

    def step(
      start: Index, k: jax.Array, v: jax.Array, carry: jax.Array
    ) -> jax.Array:
      del v
      found = selection.scores(k[:, 0, :, first : first + dims])
      return lax.dynamic_update_slice_in_dim(carry, found, start, 2)

    dtype = wide_dtype(selection.q.dtype)
    empty = collectives.zeros(
      (b, rows, k_at.pos.shape[1]), dtype, (selection, view)
    )
    found = fold_tiles(
      view, block, lists.masked[0], lists.masked_count[0], step, empty
    )
    over = lambda at, axis: Coords(*(jnp.expand_dims(x, axis) for x in at))
    seen = visible(mask, over(q_at, 2), over(k_at, 1))
    if (pages := selecting(view)) is not None:
      # The index chooses among the keys of the pages that a query reads.
      seen &= in_tiles(pages.chosen(q)[:, 0], block)
    return jnp.where(seen, found, -jnp.inf), k_at
