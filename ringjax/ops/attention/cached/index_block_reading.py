"""Attention over the blocks of a cache that an index scores best.

Guarantees: with `IndexBlockReading` the query heads of each kv head read what
`TopIndexBlocks` chooses for it where keys travel: the last blocks up to the
query's own, and of the others those whose best visible key has the largest
score, the lowest position first among equal ones. With `PooledBlockReading` all
heads read what `TopPooledBlocks` chooses. Blocks are of positions, so the
choice does not depend on views, shards or chunks of queries, but for pooled
keys whose scores differ by less than the rounding of their sums.
Cost: the index's keys are read; of pooled ones only the pooled keys, where a
cache keeps them. A few queries then read the keys and values of
their blocks alone; where these would be more than half of the slots, all keys
and values are read and those of other blocks masked, see `reads_fewer`.
Memory: scores of some queries and all keys of a shard; the pooled keys of all
blocks.

Ref: MiniMax 2026, MiniMax-M3 (MSA); Zhipu AI 2026, GLM-5.3-Flash; Qwen Team
2026, Qwen4-Exp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.cached.block_reading import (
  BlockChoice,
  read_blocks,
)
from ringjax.ops.attention.cached.selection import by_chunks
from ringjax.ops.attention.cached.summaries.summary_view import SummaryView
from ringjax.ops.attention.cached.views import (
  KVView,
  fold_tiles,
  tile_slots,
  tiled,
)
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.sparse.sparse_api import (
  sparse_attention,
  sparse_latent_attention,
)
from ringjax.ops.attention.sparse.top_index_blocks import (
  TopIndexBlocks,
  chosen_blocks,
)
from ringjax.ops.attention.sparse.top_pooled_blocks import (
  TopPooledBlocks,
  best_pooled,
  finished,
  pooled_scores,
)
from ringjax.ops.attention.sparse.top_tokens import ranked
from ringjax.ops.mask import Coords, visible
from ringjax.ops.rope import Rope
from ringjax.ops.softmax import Partial, merge, wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit

# Most scores of pairs of all heads that are in memory at once.
_SCORES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexBlockReading(BlockChoice):
  """Index queries by which the queries of a call choose blocks; a pytree.

  Attributes:
    q: Queries of the index, rotated, one for each kv head, [B, T, K, E].
    local: Number of blocks, up to the query's own, that are always read.
    keys: Index keys of the call's own tokens, where keys travel; else None.
    views: Views of the index's keys, slot by slot those of the layer's views;
      () where keys travel.
  """

  q: Float[Array, "B T K E"]
  local: int
  keys: Float[Array, "B S E"] | None = None
  views: tuple[KVView, ...] = ()

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> IndexBlockReading:
    """Return the same tree of PartitionSpecs for these mesh axes."""
    return tree.with_leaves(self, q=P(batch, tokens))

  def visited(self) -> tuple[KVView, ...]:
    return self.views

  def without_keys(self) -> IndexBlockReading:
    """Drop `keys` and `views`, for keys that are passed besides."""
    return dataclasses.replace(self, keys=None, views=())

  def block_selection(self) -> TopIndexBlocks:
    """The selection that chooses these blocks where keys travel."""
    assert self.keys is not None
    return TopIndexBlocks(
      q=self.q,
      keys=self.keys.astype(self.q.dtype),
      count=self.count,
      block=self.block,
      local=self.local,
    )

  def index_selection(self, length: int) -> TopIndexBlocks:
    selection = self.block_selection()
    count = min(self.count, -(-length // self.block))
    # Which blocks are best does not depend on a scale, but how sure the index
    # is does: that of attention.
    scale = self.q.shape[3] ** -0.5
    return dataclasses.replace(
      selection,
      q=selection.q * scale,
      count=count,
      local=min(self.local, count),
    )

  def partial(
    self, visit: CacheVisit, views: Sequence[KVView]
  ) -> Partial | None:
    """Partial of this shard's keys; None where all keys are read.

    Args:
      visit: Queries of a call.
      views: Views of the layer.
    """
    axis = visit.axis
    shards = 1 if axis is None else collectives.axis_size(axis)
    slots = sum(view.shape[2] for view in views)
    if not self.chooses(slots * shards):
      return None
    blocks = -(-slots * shards // self.block)
    in_basis = lambda view: view.aligned(visit.q, keys=False).view
    index_views = tuple(map(in_basis, visit.index_views))
    b, heads = visit.q.shape[:2]
    index_q = self.q
    if heads < index_q.shape[2]:
      # Those of the heads of this shard.
      first = collectives.axis_index(visit.head_axes) * heads
      index_q = lax.dynamic_slice_in_dim(index_q, first, heads, 2)
    with_batch = lambda x: jnp.broadcast_to(x, (b, *x.shape[1:]))
    coords = [
      Coords(*map(with_batch, visit.at if x.queries is None else x.queries))
      for x in views
    ]
    at = Coords(*map(with_batch, visit.at))
    operands = jnp.moveaxis(visit.q, 3, 1), with_batch(index_q), at, coords

    def read_chunk(chunk: PyTree) -> Partial:
      q, index_q, at, coords = chunk
      scores = functools.reduce(
        jnp.maximum,
        [
          self._scores(view, keys, index_q, Coords(*q_at), blocks, visit)
          for view, keys, q_at in zip(views, index_views, coords, strict=True)
        ],
      )
      if axis is not None:
        scores = collectives.largest(scores, axis)
      best = chosen_blocks(
        scores, at.pos[..., None], self.count, self.block, self.local
      )
      q = jnp.moveaxis(q, 1, 3)
      best = jnp.moveaxis(best, 1, 2)[:, :, None]
      partials = [
        read_blocks([view], q, Coords(*q_at), best, self.block, blocks, visit)
        for view, q_at in zip(views, coords, strict=True)
      ]
      partial = functools.reduce(merge, partials)
      return jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), partial)

    parts = -(-visit.q.size // visit.q.shape[-1] * slots // _SCORES)
    partial = by_chunks(read_chunk, operands, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), partial)

  def _scores(
    self,
    view: KVView,
    keys: KVView,
    q: Float[Array, "B t K E"],
    q_at: Coords,
    blocks: int,
    visit: CacheVisit,
  ) -> Float[Array, "B t K C"]:
    """Best score in each block of a view's visible keys; -inf without one.

    Args:
      view: View of the layer.
      keys: View of the index's keys.
      q: Queries of the index.
      q_at: Coordinates of the queries.
      blocks: Number of blocks, C.
      visit: Queries of a call.
    """
    b, t, heads, _ = q.shape
    size = tile_slots(keys, visit.platform)
    k_at = tiled(view.at, size)
    k_at = Coords(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in k_at))
    # Empty slots are of no block.
    number = jnp.where(k_at.seg != 0, k_at.pos // self.block, blocks)
    mask = view.mask or visit.mask

    def step(
      start: Index, k: jax.Array, v: jax.Array, best: jax.Array
    ) -> jax.Array:
      del v
      cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, 1)
      tile_at = Coords(*(cut(x)[:, None] for x in k_at))
      scores = product("btke,bse->bstk", q, k[:, 0].astype(q.dtype))
      row_at = Coords(*(x[..., None] for x in q_at))
      allowed = jnp.moveaxis(visible(mask, row_at, tile_at), 2, 1)
      scores = ranked(scores, allowed[..., None])
      put = lambda best, number, x: best.at[number].max(x, mode="drop")
      return jax.vmap(put)(best, cut(number), scores)

    dtype = wide_dtype(q.dtype)
    empty = collectives.full(
      (b, blocks, t, heads), -jnp.inf, dtype, (q, view, keys, q_at)
    )
    tiles = jnp.arange(number.shape[1] // size, dtype=jnp.int32)
    count = jnp.asarray(tiles.size, jnp.int32)
    best = fold_tiles(keys, size, tiles, count, step, empty)
    return jnp.moveaxis(best, 1, 3)


tree.register(
  IndexBlockReading, ("q", "keys", "views"), ("count", "block", "local")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledBlockReading(BlockChoice):
  """Index queries by which the queries of a call choose pooled blocks.

  A pytree. `count` does not include the query's own block.

  Attributes:
    q: Queries of the index, [B, T, I, E].
    weights: Weights of the index's heads, with all scales, [B, T, I].
    bias: Bias of the gates by the place in a block, [block, E].
    keys: Index keys and gates of the call's own tokens, where keys travel;
      else None.
    views: Views of the index's keys and gates, slot by slot those of the
      layer's views; () where keys travel.
    norm: Weight of the norm of pooled keys, [E], or None.
    eps: Epsilon of that norm.
    rope: Rotation of pooled keys by the first position of a block, or None.
    summaries: Pooled keys of blocks that have ended, which are then read in
      place of `views`; None where a cache keeps none, and in a visit.
    positions: Positions of the call's own tokens in their documents, int32,
      where keys travel and pooled keys are rotated; else None.
    scale: Factor on the scores in the loss of the index. Which are the best
      does not depend on it.
  """

  q: Float[Array, "B T I E"]
  weights: Float[Array, "B T I"]
  bias: Float[Array, "m E"]
  keys: Float[Array, "B S X"] | None = None
  views: tuple[KVView, ...] = ()
  norm: Float[Array, " E"] | None = None
  eps: float = 1e-6
  rope: Rope | None = None
  summaries: SummaryView | None = None
  positions: Int[Array, "#B S"] | None = None
  scale: float = 1.0

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> PooledBlockReading:
    """Return the same tree of PartitionSpecs for these mesh axes."""
    of_tokens = P(batch, tokens)
    specs: Any = dict(q=of_tokens, weights=of_tokens, bias=P())
    if self.norm is not None:
      specs["norm"] = P()
    return tree.with_leaves(self, **specs)

  def visited(self) -> tuple[Any, ...]:
    return self.views if self.summaries is None else (self.summaries,)

  def without_keys(self) -> PooledBlockReading:
    """Drop keys, their views and positions, which are passed besides."""
    return dataclasses.replace(
      self, keys=None, views=(), summaries=None, positions=None
    )

  def chooses(self, tokens: int) -> bool:
    """Whether a query may read fewer than `tokens` keys."""
    return (self.count + 1) * self.block < tokens

  def block_selection(self) -> TopPooledBlocks:
    """The selection that chooses these blocks where keys travel."""
    assert self.keys is not None
    positions = self.positions
    if positions is not None:
      positions = jnp.broadcast_to(positions, self.keys.shape[:2])
    return TopPooledBlocks(
      q=self.q,
      weights=self.weights,
      keys=self.keys.astype(self.q.dtype),
      bias=self.bias,
      count=self.count,
      norm=self.norm,
      eps=self.eps,
      rope=self.rope,
      positions=positions,
    )

  def index_selection(self, length: int) -> TopPooledBlocks:
    selection = self.block_selection()
    return dataclasses.replace(
      selection,
      weights=selection.weights * self.scale,
      count=min(self.count, -(-length // self.block)),
    )

  def over_shards(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K X"],
    v: Float[Array, "B T K Z"],
    segments: Int[Array, "#B T"] | None,
    up: Float[Array, "C N Y"] | None = None,
    **options: Any,
  ) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"], GivenBlocks]:
    """Attention to the call's own keys, or rows of latents that `up` expands.

    The other arguments are those of `PositionChoice.over_shards`.
    """
    options |= dict(
      q_segment_ids=segments, return_residual=True, return_selection=True
    )
    selection = self.block_selection()
    if up is None:
      return sparse_attention(q, k, v, selection, **options)
    return sparse_latent_attention(q, k[:, :, 0], up, selection, **options)

  def partial(
    self, visit: CacheVisit, views: Sequence[KVView]
  ) -> Partial | None:
    """Partial of this shard's keys; None where all keys are read.

    Args:
      visit: Queries of a call.
      views: Views of the layer.
    """
    axis = visit.axis
    shards = 1 if axis is None else collectives.axis_size(axis)
    slots = sum(view.shape[2] for view in views)
    if not self.chooses(slots * shards):
      return None
    blocks = -(-slots * shards // self.block)
    in_basis = lambda view: view.aligned(visit.q, keys=False).view
    number = jnp.arange(blocks, dtype=jnp.int32)
    end = number * self.block + self.block - 1
    kept = None
    if isinstance(visit.index_views[0], SummaryView):
      kept = visit.index_views[0].of_shard(axis)
      pooled, number = kept.keys[:, :, 0], kept.number
    else:
      index_views = tuple(map(in_basis, visit.index_views))
      pooled = self._pooled(views, index_views, blocks, visit)
    has_ended = self._ended(views, blocks, visit)
    first = (number * self.block)[None]
    pooled = finished(pooled, self.norm, self.eps, self.rope, first)
    pooled = pooled.astype(self.q.dtype)
    b = visit.q.shape[0]
    with_batch = lambda x: jnp.broadcast_to(x, (b, *x.shape[1:]))
    index_q, weights = with_batch(self.q), with_batch(self.weights)
    at = Coords(*map(with_batch, visit.at))
    operands = jnp.moveaxis(visit.q, 3, 1), index_q, weights, at

    def read_chunk(chunk: PyTree) -> Partial:
      q, index_q, weights, q_at = chunk
      q_at = Coords(*q_at)
      scores = pooled_scores(index_q, weights, pooled)
      if kept is not None:
        scores = kept.everywhere(scores, 0, blocks, axis)
      seen = end[None, None] <= q_at.pos[..., None]
      allowed = seen & has_ended[:, None] & (q_at.seg > 0)[..., None]
      best = best_pooled(scores, allowed, q_at.pos, self.count, self.block)
      # All kv heads of this shard read the same blocks.
      heads = b, visit.q.shape[1], 1, *best.shape[1:]
      best = jnp.broadcast_to(best[:, None, None], heads)
      partial = read_blocks(
        views,
        jnp.moveaxis(q, 1, 3),
        q_at,
        best,
        self.block,
        blocks,
        visit,
      )
      return jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), partial)

    parts = -(-visit.q.size // visit.q.shape[-1] * slots // _SCORES)
    partial = by_chunks(read_chunk, operands, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), partial)

  def _pooled(
    self,
    views: Sequence[KVView],
    index_views: Sequence[KVView],
    blocks: int,
    visit: CacheVisit,
  ) -> Float[Array, "B C E"]:
    """Pooled keys of all blocks of all shards, of which all keys are read."""
    b, dims = visit.q.shape[0], self.q.shape[-1]
    dtype = wide_dtype(self.q.dtype)
    like = visit.q, self.q, self.bias, tuple(views), tuple(index_views)
    shape = (b, blocks, dims)
    sums = (
      collectives.full(shape, -jnp.inf, dtype, like),
      collectives.zeros(shape, dtype, like),
      collectives.zeros(shape, dtype, like),
    )
    bias = self.bias.astype(dtype)
    for view, keys in zip(views, index_views, strict=True):
      size = tile_slots(keys, visit.platform)
      at = tiled(view.at, size)
      at = Coords(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in at))
      # Empty slots are of no block.
      number = jnp.where(at.seg != 0, at.pos // self.block, blocks)
      place_bias = bias[at.pos % self.block]

      def add(
        start: Index,
        k: Array,
        v: Array,
        sums: tuple[Array, Array, Array],
        number: Array = number,
        place_bias: Array = place_bias,
        size: int = size,
      ) -> tuple[Array, Array, Array]:
        del v
        cut = functools.partial(
          lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1
        )
        keys = k[:, 0].astype(dtype)
        gates = jnp.zeros_like(keys)
        if keys.shape[-1] > dims:
          keys, gates = jnp.split(keys, 2, -1)
          gates = gates + cut(place_bias)
        return jax.vmap(_added)(sums, cut(number), keys, gates)

      tiles = jnp.arange(at.pos.shape[1] // size, dtype=jnp.int32)
      count = jnp.asarray(tiles.size, jnp.int32)
      sums = fold_tiles(keys, size, tiles, count, add, sums)
    largest, total, weighted = sums
    if visit.axis is not None:
      overall = collectives.largest(largest, visit.axis)
      factor = _ratio(largest, overall)
      total, weighted = collectives.total(
        (total * factor, weighted * factor), visit.axis
      )
    return weighted / jnp.where(total == 0, 1, total)

  def _ended(
    self, views: Sequence[KVView], blocks: int, visit: CacheVisit
  ) -> Bool[Array, "B C"]:
    """Whether all tokens of each block of all shards exist."""
    b = visit.q.shape[0]
    sizes = collectives.zeros((b, blocks), jnp.int32, (visit.q, tuple(views)))
    put = lambda sizes, index: sizes.at[index].add(1, mode="drop")
    for view in views:
      number = jnp.where(view.at.seg != 0, view.at.pos // self.block, blocks)
      number = jnp.broadcast_to(number, (b, number.shape[1]))
      sizes = jax.vmap(put)(sizes, number)
    if visit.axis is not None:
      sizes = collectives.total(sizes, visit.axis)
    return sizes == self.block


def _ratio(smaller: Array, larger: Array) -> Array:
  """exp(smaller - larger), 0 where the smaller one is -inf."""
  return jnp.where(smaller == -jnp.inf, 0, jnp.exp(smaller - larger))


def _added(
  sums: tuple[Array, Array, Array],
  number: Int[Array, " S"],
  keys: Float[Array, "S E"],
  gates: Float[Array, "S E"],
) -> tuple[Array, Array, Array]:
  """Sums of blocks with further keys.

  Args:
    sums: Largest gate of each block, sum of the weights, and weighted sum of
      the keys, [C, E] each; weights are relative to the largest gate.
    number: Block of each key; too large for none.
    keys: Keys.
    gates: Gates of the keys.
  """
  largest, total, weighted = sums
  new_largest = largest.at[number].max(gates, mode="drop")
  factor = _ratio(largest, new_largest)
  weights = jnp.exp(gates - new_largest.at[number].get(mode="clip"))
  return (
    new_largest,
    (total * factor).at[number].add(weights, mode="drop"),
    (weighted * factor).at[number].add(weights * keys, mode="drop"),
  )


tree.register(
  PooledBlockReading,
  ("q", "weights", "bias", "keys", "views", "norm", "summaries", "positions"),
  ("count", "block", "eps", "rope", "scale"),
)
