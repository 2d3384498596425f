"""Attention over the blocks with the best mean keys of a cache (MoBA).

Guarantees: each query head reads what `TopBlocks` chooses for it where keys
travel: its own block and, of the earlier ones, those with the best products
with their mean keys, the lowest position first among equal ones. Blocks are of
positions, so the choice does not depend on views, shards or chunks of queries,
but for blocks whose scores differ by less than the rounding of their sums.
Cost: the means that a cache keeps are read, or else all keys for their means,
and no value. Then a few queries read the keys and values of their blocks alone;
where these would be more than half of the slots, all keys and values are read
and those of other blocks masked. On shards the scores of all blocks are sent.
Memory: means of all blocks; the gathered keys of one piece, or which keys some
queries read.

Ref: Lu et al. 2025, MoBA, arXiv 2502.13189.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.cached.cached_choice import PositionChoice
from ringjax.ops.attention.cached.chosen_slots import (
  read_chosen_blocks,
  reads_fewer,
)
from ringjax.ops.attention.cached.selection import by_chunks
from ringjax.ops.attention.cached.summaries.summary_view import (
  ShardSummaries,
  SummaryView,
)
from ringjax.ops.attention.cached.views import (
  KVView,
  decode_attention,
  fold_tiles,
  in_tiles,
  tile_slots,
  tiled,
)
from ringjax.ops.attention.scores import Context, ScoreArgs
from ringjax.ops.attention.sparse.block_selection import BlockSelection
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.sparse.sparse_api import sparse_attention
from ringjax.ops.attention.sparse.top_blocks import TopBlocks, causal_candidates
from ringjax.ops.attention.sparse.top_tokens import ranked
from ringjax.ops.mask import Coords, Extent
from ringjax.ops.softmax import Partial, merge, wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit

# Most pairs of queries and keys of all heads that are marked at once.
_PAIRS = 1 << 24
_LAST = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockChoice(PositionChoice):
  """Base class of choices of blocks by the queries of a call.

  Attributes:
    count: Most blocks that a query reads, its own among them.
    block: Number of positions of a block.
  """

  count: int
  block: int

  def chooses(self, tokens: int) -> bool:
    """Whether a query may read fewer than `tokens` keys."""
    return self.count * self.block < tokens

  @abc.abstractmethod
  def block_selection(self) -> BlockSelection:
    """The selection that chooses these blocks where keys travel."""

  def over_shards(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    segments: Int[Array, "#B T"] | None,
    **options: Any,
  ) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"], GivenBlocks]:
    return sparse_attention(
      q,
      k,
      v,
      self.block_selection(),
      q_segment_ids=segments,
      return_residual=True,
      return_selection=True,
      **options,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockReading(BlockChoice):
  """Choice of blocks by their mean keys; a pytree.

  Attributes:
    summaries: Means of whole blocks; None where a cache keeps none, and in a
      visit, which gets them by `visited`.
  """

  summaries: SummaryView | None = None

  def visited(self) -> tuple[Any, ...]:
    return () if self.summaries is None else (self.summaries,)

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> BlockReading:
    """Return the same tree of PartitionSpecs for these mesh axes."""
    del batch, tokens
    return self

  def without_keys(self) -> BlockReading:
    """Return the sizes alone."""
    return BlockReading(count=self.count, block=self.block)

  def block_selection(self) -> BlockSelection:
    """The selection that chooses these blocks where keys travel."""
    return TopBlocks(count=self.count, block=self.block)

  def partial(
    self, visit: CacheVisit, views: Sequence[KVView]
  ) -> Partial | None:
    axis = visit.axis
    shards = 1 if axis is None else collectives.axis_size(axis)
    slots = sum(view.shape[2] for view in views)
    if not self.chooses(slots * shards):
      return None
    blocks = -(-slots * shards // self.block)
    extent = self._extent(views, blocks, visit)
    if visit.index_views:
      (summaries,) = visit.index_views
      of_shard = summaries.of_shard(axis)
    else:
      of_shard = self._means(views, blocks, visit)
    b, heads, groups, t, _ = visit.q.shape
    rows = lambda x: jnp.broadcast_to(x, (b, t))
    operands = jnp.moveaxis(visit.q, 3, 1), Coords(*map(rows, visit.at))

    def read_chunk(chunk: PyTree) -> Partial:
      q, q_at = chunk
      best = self._chosen(q, Coords(*q_at), of_shard, extent, visit)
      q = jnp.moveaxis(q, 1, 3)
      partial = read_blocks(
        views, q, Coords(*q_at), best, self.block, blocks, visit
      )
      return jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), partial)

    parts = -(-b * heads * groups * t * slots // _PAIRS)
    partial = by_chunks(read_chunk, operands, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), partial)

  def _extent(
    self, views: Sequence[KVView], blocks: int, visit: CacheVisit
  ) -> Extent:
    """Coordinates of the blocks of all shards."""
    b = visit.q.shape[0]
    like = visit.q, tuple(views)
    first = collectives.full((b, blocks), -_LAST, jnp.int32, like)
    last = collectives.full((b, blocks), -1, jnp.int32, like)
    for view in views:
      number, at = self._numbers(view, b, blocks)
      first = jax.vmap(_largest)(first, number, -at.pos)
      last = jax.vmap(_largest)(last, number, at.pos)
    if visit.axis is not None:
      first, last = (collectives.largest(x, visit.axis) for x in (first, last))
    has_keys = last >= 0
    segment = has_keys.astype(jnp.int32)
    coords = -first, last, segment, segment, has_keys, has_keys
    return Extent(*(x[:, None] for x in coords))

  def _numbers(
    self, view: KVView, batch: int, blocks: int, tile: int = 1
  ) -> tuple[Int[Array, "B S"], Coords]:
    """Block of each slot, `blocks` for an empty one, and its coordinates.

    Slots are those of whole tiles of `tile` slots.
    """
    at = tiled(view.at, tile)
    at = Coords(*(jnp.broadcast_to(x, (batch, x.shape[1])) for x in at))
    return jnp.where(at.seg != 0, at.pos // self.block, blocks), at

  def _means(
    self, views: Sequence[KVView], blocks: int, visit: CacheVisit
  ) -> ShardSummaries:
    """Mean keys of all blocks of all shards, of which all keys are read."""
    # Means are of keys in the basis of the caller.
    plain: Any = [view.aligned(visit.q, keys=False).view for view in views]
    plain = [view.keys_alone() for view in plain]
    b, heads, _, _, dims = visit.q.shape
    dtype = wide_dtype(visit.q.dtype)
    like = visit.q, tuple(plain)
    sums = collectives.zeros((b, blocks, heads, dims), dtype, like)
    sizes = collectives.zeros((b, blocks), dtype, like)
    for view in plain:
      size = tile_slots(view, visit.platform)
      number, _ = self._numbers(view, b, blocks, size)

      def add(
        start: Index,
        k: Array,
        v: Array,
        sums: Array,
        number: Array = number,
        size: int = size,
      ) -> Array:
        del v
        tile_blocks = lax.dynamic_slice_in_dim(number, start, size, 1)
        k = jnp.swapaxes(k, 1, 2).astype(dtype)
        put = lambda sums, index, k: sums.at[index].add(k, mode="drop")
        return jax.vmap(put)(sums, tile_blocks, k)

      tiles = jnp.arange(number.shape[1] // size, dtype=jnp.int32)
      count = jnp.asarray(tiles.size, jnp.int32)
      sums = fold_tiles(view, size, tiles, count, add, sums)
      sizes = jax.vmap(_counted)(sizes, number)
    if visit.axis is not None:
      sums, sizes = collectives.total((sums, sizes), visit.axis)
    means = sums / jnp.maximum(sizes, 1)[..., None, None]
    every = jnp.arange(blocks, dtype=jnp.int32)
    return ShardSummaries(means, means[..., :0], every, every >= 0)

  def _chosen(
    self,
    q: Float[Array, "B t K G H"],
    q_at: Coords,
    means: ShardSummaries,
    extent: Extent,
    visit: CacheVisit,
  ) -> Int[Array, "B K G t n"]:
    """Blocks that each query reads, -1 for none."""
    blocks = extent.some.shape[-1]
    keys = means.keys
    scores = product("btkgh,bckh->bkgtc", q.astype(keys.dtype), keys)
    # Means of all keys are on all shards.
    axis = visit.axis if visit.index_views else None
    scores = means.everywhere(scores, 0, blocks, axis)
    candidates = causal_candidates(visit.mask, q_at, extent, self.block)
    number = jnp.arange(blocks, dtype=jnp.int32)
    own_block = q_at.pos[..., None] // self.block == number[None, None]
    own_block &= (q_at.seg != 0)[..., None]
    scores = ranked(scores, candidates[:, None, None])
    scores = jnp.where(own_block[:, None, None], jnp.inf, scores)
    scores, best = lax.top_k(scores, min(self.count, blocks))
    return jnp.where(scores > -jnp.inf, best, -1)


tree.register(BlockReading, ("summaries",), ("count", "block"))


def _counted(sizes: jax.Array, number: jax.Array) -> jax.Array:
  """Sizes [C] of blocks with slots of these numbers added."""
  return sizes.at[number].add(jnp.ones((), sizes.dtype), mode="drop")


def _largest(values: jax.Array, number: jax.Array, new: jax.Array) -> jax.Array:
  """Largest value [C] of each block, with those of slots."""
  return values.at[number].max(new, mode="drop")


def read_blocks(
  views: Sequence[KVView],
  q: Float[Array, "B K G t H"],
  q_at: Coords,
  best: Int[Array, "B K #G t n"],
  block: int,
  blocks: int,
  visit: CacheVisit,
) -> Partial:
  """Partial of the keys of views in the blocks that each query reads.

  They are gathered where that reads fewer keys, else the others are masked.

  Args:
    views: Views of a layer's keys.
    q: Queries.
    q_at: Coordinates of the queries, [B, t].
    best: Distinct blocks of each query head, or of those of a kv head; -1 for
      none.
    block: Number of positions of a block.
    blocks: Number of blocks of all keys of the layer, of other views and
      shards, too.
    visit: Call to which the queries belong.
  """
  read = _read_masked
  if reads_fewer(views, q.shape[3], best.shape[-1] * block):
    read = read_chosen_blocks
  partials = [read(view, q, q_at, best, block, blocks, visit) for view in views]
  return functools.reduce(merge, partials)


def _read_masked(
  view: KVView,
  q: Float[Array, "B K G t H"],
  q_at: Coords,
  best: Int[Array, "B K #G t n"],
  block: int,
  blocks: int,
  visit: CacheVisit,
) -> Partial:
  """Partial of all keys of a view, with those of other blocks masked."""
  number = jnp.arange(blocks, dtype=jnp.int32)
  chosen = jnp.any(best[..., None] == number.reshape(1, 1, 1, 1, 1, -1), -2)
  number: Int[Array, "B S"] = jnp.broadcast_to(
    view.at.pos // block, (q.shape[0], view.shape[2])
  )
  number = jnp.clip(number, 0, blocks - 1)
  allow = jnp.take_along_axis(chosen, number[:, None, None, None], -1)
  allow = in_tiles(allow, tile_slots(view, visit.platform))
  context = Context(q_at, view.at, view.mask or visit.mask, allow)
  args: Any = ScoreArgs(visit.scores, visit.terms, context)
  aligned, aligned_q, restore_basis, _ = view.aligned(q)
  partial = decode_attention(aligned_q, aligned, args, visit.platform)
  return partial._replace(acc=restore_basis(partial.acc))
