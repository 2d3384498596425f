"""Attention over the keys with the best scores of an index (sparse attention).

Guarantees: among the keys that its mask lets a query t see, it reads the
`count` with the largest

  I(t, s) = sum_i weights[t, i] relu(q[t, i] . k[s])

and among equal ones those at the lowest positions; all of them if there are no
more. The choice does not depend on layouts, shards, views or chunks of queries.
No gradient flows through the choice.
Cost: the index reads its part of every key. The chosen keys alone are then
gathered out of a cache of plain numbers with twice as many slots on a shard
as a query reads, or more; keys beside those of an index, if a few queries read
at most half of the slots (`chosen_slots`). Other queries read all keys again,
masking those that were not chosen. Each shard sends the other shards its
`count` best scores and their positions, 8 bytes each per query.
Memory: float32 scores of some queries and all keys of a shard.

Ref: DeepSeek-AI 2025, DeepSeek-V3.2-Exp (lightning indexer, DSA).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import product, tile_kinds, tile_lists
from ringjax.ops.attention.cached.cached_choice import CachedChoice
from ringjax.ops.attention.cached.chosen_slots import read_slots, reads_fewer
from ringjax.ops.attention.cached.paged import selecting
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  KVView,
  decode_attention,
  fold_tiles,
  in_tiles,
  tile_slots,
  tiled,
)
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.sparse.gathered import (
  ChosenColumns,
  fold_chosen,
  piece_keys,
)
from ringjax.ops.attention.sparse.top_tokens import TopTokens, ranked
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import Partial, merge, wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit

# Most scores of pairs that are in memory at once, for more than a few queries.
_SCORES = 1 << 24
# Most rows of a product with a tile of keys.
_ROWS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySelection(CachedChoice):
  """Index queries by which the queries of a call choose their keys; a pytree.

  Attributes:
    q: Queries of the index, rotated, [B, T, I, E].
    weights: Weights of the index's heads, with all scales; float32 or wider.
    count: Most keys that a query reads.
    first: Offset in a stored key at which the index's key begins.
    keys: Index keys of the call's own tokens, where keys travel; else None.
    views: Views of the index's keys, slot by slot those of the layer's views,
      where these do not hold them; else ().
  """

  q: Float[Array, "B T I E"]
  weights: Float[Array, "B T I"]
  count: int
  first: int
  keys: Float[Array, "B S E"] | None = None
  views: tuple[KVView, ...] = ()

  def visited(self) -> tuple[Any, ...]:
    return self.views

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> KeySelection:
    """Return the same tree of PartitionSpecs for these mesh axes."""
    tokens_spec = P(batch, tokens)
    return tree.with_leaves(self, q=tokens_spec, weights=tokens_spec)

  def without_keys(self) -> KeySelection:
    """Drop `keys` and `views`, for keys that are passed besides."""
    return dataclasses.replace(self, keys=None, views=())

  def chooses(self, tokens: int) -> bool:
    """Whether a query may read fewer than `tokens` keys."""
    return self.count < tokens

  def index_selection(self, length: int) -> TopTokens:
    assert self.keys is not None
    return TopTokens(
      q=self.q,
      weights=self.weights,
      keys=self.keys.astype(self.q.dtype),
      count=min(self.count, length),
    )

  def partial(
    self, visit: CacheVisit, views: Sequence[KVView]
  ) -> Partial | None:
    # Keys stay in the basis in which the index's keys are.
    in_basis = lambda view: view.aligned(visit.q, keys=False).view
    index_views = tuple(map(in_basis, visit.index_views))
    read_views = list(views) if index_views else list(map(in_basis, views))
    selective = SelectiveVisit(
      selection=self,
      scores=visit.scores,
      terms=visit.terms,
      at=visit.at,
      mask=visit.mask,
      axis=visit.axis,
      platform=visit.platform,
      index_views=index_views,
    )
    if not selective.chooses(read_views):
      return None
    return selective.partial(visit.q, read_views)

  def scores(self, keys: Float[Array, "B S E"]) -> Float[Array, "B T S"]:
    """Index scores I(t, s) of all pairs."""
    dots = product("btie,bse->btis", self.q, keys.astype(self.q.dtype))
    # As a matrix product, also with one head.
    weights = self.weights.astype(dots.dtype)
    return product("btis,bti->bts", jnp.maximum(dots, 0), weights)


tree.register(
  KeySelection, ("q", "weights", "keys", "views"), ("count", "first")
)


class _Last(NamedTuple):
  """Last of the keys that each query reads, in order of scores.

  Fields:
    score: Score of the key, [B, T, 1]; -inf: all visible keys are read.
    pos: Position of the key, int32 [B, T, 1].
  """

  score: jax.Array
  pos: jax.Array

  def reads(
    self, scores: Float[Array, "B T S"], pos: Int[Array, "#B #T S"]
  ) -> Bool[Array, "B T S"]:
    """Mark the keys that are read; scores are -inf for invisible keys."""
    tied = (scores == self.score) & (pos <= self.pos)
    return (scores > -jnp.inf) & ((scores > self.score) | tied)


class _Ranked(NamedTuple):
  """A shard's best keys for each query, best first.

  Fields:
    score: Their scores, [B, T, n]; -inf for none.
    pos: Their positions, int32 [B, T, n].
    column: Their columns among the shard's keys, int32 [B, T, n].
  """

  score: jax.Array
  pos: jax.Array
  column: jax.Array

  @classmethod
  def of(
    cls, scores: Float[Array, "B T S"], pos: Int[Array, "B S"], count: int
  ) -> _Ranked:
    """Rank at most `count` keys; scores are -inf for invisible keys."""
    # By position, so that `top_k` prefers lower positions among equals.
    order = jnp.argsort(pos, -1).astype(jnp.int32)
    scores = jnp.take_along_axis(scores, order[:, None], -1)
    score, at = lax.top_k(scores, min(count, pos.shape[1]))
    row = jnp.arange(pos.shape[0], dtype=jnp.int32)[:, None, None]
    column = order[row, at]
    return cls(score, pos[row, column], column)

  def last(self, count: int, axis: str | None = None) -> _Last:
    """Find the last of the best `count` keys of all shards of a manual axis."""
    best = -self.score, self.pos
    if axis is not None:
      best = lax.sort(collectives.gather(best, axis, 2), num_keys=2)
    at = min(count, best[0].shape[2])
    worse, pos = (x[..., at - 1 : at] for x in best)
    if at < count:
      worse = jnp.full_like(worse, jnp.inf)
    return _Last(-worse, pos)


def by_chunks(
  f: Callable[[PyTree], PyTree], x: PyTree, least: int, shards: int = 1
) -> PyTree:
  """Apply f to arrays [B, T, ...], a part of each shard's tokens at a time.

  Args:
    f: Function that treats each token separately.
    x: Arrays.
    least: Least number of parts; the next divisor of a shard's tokens is used.
    shards: Number of shards of T, one after another.
  """
  shard_tokens = jax.tree.leaves(x)[0].shape[1] // shards
  parts = next(
    n
    for n in range(max(1, min(least, shard_tokens)), shard_tokens + 1)
    if not shard_tokens % n
  )
  if parts == 1:
    return f(x)

  def split(x: jax.Array) -> jax.Array:
    b, t, *trailing = x.shape
    x = jnp.moveaxis(
      x.reshape(b, shards, parts, shard_tokens // parts, *trailing), 2, 0
    )
    return x.reshape(parts, b, t // parts, *trailing)

  def join(x: jax.Array) -> jax.Array:
    _, b, n, *trailing = x.shape
    x = jnp.moveaxis(x.reshape(parts, b, shards, n // shards, *trailing), 0, 2)
    return x.reshape(b, n * parts, *trailing)

  return jax.tree.map(join, lax.map(f, jax.tree.map(split, x)))


def _gatherable_view(
  views: Sequence[KVView], count: int
) -> ContiguousView | None:
  """The only view, if the chosen keys can be gathered out of it; else None.

  Args:
    views: Views of a layer.
    count: Most keys that a query reads.
  """
  view = views[0]
  unsupported = len(views) > 1 or not isinstance(view, ContiguousView)
  return None if unsupported or 2 * count > view.shape[2] else view


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveVisit:
  """Attention of one device's queries over the keys they choose from views.

  Attributes:
    selection: Index queries of these queries.
    scores: Static part of the score function.
    terms: Arrays of the score function; without sinks.
    at: Coordinates of the queries [B or 1, T].
    mask: Visible pairs, for views without a mask.
    axis: Manual axis that shards the keys, or None.
    platform: Platform of the device.
    index_views: Views of the index's keys, for each view one; (): the views
      hold them.
  """

  selection: KeySelection
  scores: Scores
  terms: Terms
  at: Coords
  mask: Mask
  axis: str | None
  platform: str
  index_views: tuple[KVView, ...] = ()

  def chooses(self, views: Sequence[KVView]) -> bool:
    """Whether there may be more keys than a query reads."""
    shards = 1 if self.axis is None else collectives.axis_size(self.axis)
    slots = sum(view.shape[2] for view in views)
    return self.selection.chooses(slots * shards)

  def partial(
    self, q: Float[Array, "B K G T H"], views: Sequence[KVView]
  ) -> Partial:
    """Partial of this shard's keys, computed for some queries at a time."""
    b, heads, groups, t, _ = q.shape
    slots = b * sum(view.shape[2] for view in views)
    fitting_queries = min(_ROWS // (heads * groups), _SCORES // slots)
    size = min(t, max(16, fitting_queries))
    parts = -(-t // size)
    padding = parts * size - t
    with_batch = lambda x: jnp.broadcast_to(x, (b, *x.shape[1:]))

    def split(x: jax.Array) -> jax.Array:
      x = jnp.pad(
        with_batch(x), [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
      )
      return jnp.moveaxis(x.reshape(b, parts, size, *x.shape[2:]), 1, 0)

    coords = tuple(self._coords(view) for view in views)
    operands = (jnp.moveaxis(q, 3, 1), self.selection.without_keys(), coords)
    run_chunk = functools.partial(self._partial_of_chunk, views)
    if parts == 1:
      operands = jax.tree.map(lambda x: with_batch(x), operands)
      return run_chunk(operands)
    partials = lax.map(run_chunk, jax.tree.map(split, operands))

    def join(x: Float[Array, "n B K G t *J"]) -> jax.Array:
      x = jnp.moveaxis(x, 0, 3)
      return x.reshape(*x.shape[:3], parts * size, *x.shape[5:])[:, :, :, :t]

    return jax.tree.map(join, partials)

  def _coords(self, view: KVView) -> Coords:
    return self.at if view.queries is None else view.queries

  def _partial_of_chunk(
    self, views: Sequence[KVView], operands: PyTree
  ) -> Partial:
    """Partial of one chunk of the queries."""
    q, selection, coords = operands
    q = jnp.moveaxis(q, 1, 3)
    scored = [
      self._scored(view, keys, q, selection, at)
      for view, keys, at in zip(
        views, self.index_views or views, coords, strict=True
      )
    ]
    concat = lambda xs: jnp.concatenate([*xs], -1)
    place = lambda x: jnp.broadcast_to(x, (q.shape[0], x.shape[1]))
    count = selection.count
    keys = _Ranked.of(
      concat(view_scores for view_scores, _ in scored),
      concat(place(at.pos) for _, at in scored),
      count,
    )
    last = keys.last(count, self.axis)
    plain_view = None
    if not self.index_views:
      plain_view = _gatherable_view(views, count)
    elif reads_fewer(views, q.shape[3], count):
      return self._of_slots(views, q, keys, last)
    if plain_view is not None:
      context = Context(coords[0], scored[0][1], plain_view.mask or self.mask)
      return self._of_chosen(plain_view, q, keys, last, context)
    partials = []
    for view, q_at, (view_scores, k_at) in zip(
      views, coords, scored, strict=True
    ):
      allow = last.reads(view_scores, k_at.pos[:, None])[:, None, None]
      context = Context(q_at, view.at, view.mask or self.mask, allow)
      args = ScoreArgs(self.scores, self.terms, context)
      if not self.index_views:
        partials.append(decode_attention(q, view, args, self.platform))
        continue
      aligned, aligned_q, restore_basis, _ = view.aligned(q)
      partial = decode_attention(aligned_q, aligned, args, self.platform)
      partials.append(partial._replace(acc=restore_basis(partial.acc)))
    return functools.reduce(merge, partials)

  def _of_chosen(
    self,
    view: ContiguousView,
    q: Float[Array, "B 1 G t H"],
    keys: _Ranked,
    last: _Last,
    context: Context,
  ) -> Partial:
    """Partial of the keys that each query reads, gathered out of a view."""
    slots, width = view.shape[2], view.dims[0]
    block = tile_slots(view, self.platform)
    layer = jnp.asarray(view.layer, jnp.int32)
    # Keys that are read are the first ones of a list.
    read = last.reads(keys.score, keys.pos)
    first = jnp.minimum(keys.column // block * block, slots - block)
    slot = jnp.where(read, first + keys.column % block, slots)

    def take(
      row: jax.Array, head: jax.Array, column: jax.Array
    ) -> tuple[jax.Array, None]:
      k = view.k[layer, row, head, column][..., :width]
      return k.astype(q.dtype), None

    shards = 1 if self.axis is None else collectives.axis_size(self.axis)
    piece = piece_keys(self.selection.count, shards)
    columns = ChosenColumns.of(slot[:, :, None], slots, 1, piece)
    queries = jnp.moveaxis(q, 3, 1)
    dtype = wide_dtype(q.dtype)
    empty = Partial.empty(queries.shape[:4], width, dtype, (q, view))
    args = ScoreArgs(self.scores, self.terms, context)
    partial = fold_chosen(queries, columns, take, args, empty)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), partial)

  def _of_slots(
    self,
    views: Sequence[KVView],
    q: Float[Array, "B K G t H"],
    keys: _Ranked,
    last: _Last,
  ) -> Partial:
    """Partial of the keys that each query reads, of views beside an index."""
    read = last.reads(keys.score, keys.pos)
    partials, first = [], 0
    for view in views:
      slots, block = view.shape[2], tile_slots(view, self.platform)
      width = -(-slots // block) * block
      # Scores are of whole tiles, of which the last one ends with the slots.
      column = keys.column - first
      tile = jnp.minimum(column // block * block, slots - block)
      inside = read & (column >= 0) & (column < width)
      slot = jnp.where(inside, tile + column % block, slots)
      slot = jnp.sort(slot, -1)[:, None]
      context = Context(self._coords(view), view.at, self.mask)
      args = ScoreArgs(self.scores, self.terms, context)
      count = self.selection.count
      partials.append(read_slots(view, q, slot, count, args, self.axis))
      first += width
    return functools.reduce(merge, partials)

  def _scored(
    self,
    view: KVView,
    keys: KVView,
    q: Float[Array, "B K G t H"],
    selection: KeySelection,
    q_at: Coords,
  ) -> tuple[Float[Array, "B t S"], Coords]:
    """Scores of a view's keys, in whole tiles, and their coordinates.

    `keys` is the view that holds the index's keys.
    """
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
      tile_scores = selection.scores(k[:, 0, :, first : first + dims])
      return lax.dynamic_update_slice_in_dim(carry, tile_scores, start, 2)

    dtype = wide_dtype(selection.q.dtype)
    empty = collectives.zeros(
      (b, rows, k_at.pos.shape[1]), dtype, (selection, keys)
    )
    scores = fold_tiles(
      keys, block, lists.masked[0], lists.masked_count[0], step, empty
    )
    expand = lambda at, axis: Coords(*(jnp.expand_dims(x, axis) for x in at))
    allowed = visible(mask, expand(q_at, 2), expand(k_at, 1))
    if (pages := selecting(view)) is not None:
      # The index chooses among the keys of the pages that a query reads.
      allowed &= in_tiles(pages.chosen(q)[:, 0], block)
    return ranked(scores, allowed), k_at
