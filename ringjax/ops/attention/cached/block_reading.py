"""Attention over the blocks with the best mean keys of a cache (MoBA).

Guarantees: each query head reads what `TopBlocks` chooses for it where keys
travel: its own block and, of the earlier ones, those with the best products
with their mean keys, the lowest position first among equal ones. Blocks are of
positions, so the choice does not depend on views, shards or chunks of queries,
but for blocks whose scores differ by less than the rounding of their sums.
Cost: all keys are read twice, for their means and masked for the products.
Memory: means of all blocks, and which keys some queries read.

Ref: Lu et al. 2025, MoBA, arXiv 2502.13189.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.cached.selection import by_chunks
from ringjax.ops.attention.cached.views import (
  KVView,
  decode_attention,
  fold_tiles,
  in_tiles,
  tile_slots,
  tiled,
)
from ringjax.ops.attention.scores import Context, ScoreArgs
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
class BlockReading:
  """Choice of blocks by the queries of a call; a pytree without arrays.

  Attributes:
    count: Most blocks that a query reads, its own among them.
    block: Number of positions of a block.
  """

  count: int
  block: int

  @property
  def views(self) -> tuple[KVView, ...]:
    """Views of keys besides those of the layer: none."""
    return ()

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> BlockReading:
    """Return the same tree of PartitionSpecs for these mesh axes."""
    del batch, tokens
    return self

  def without_keys(self) -> BlockReading:
    """Return the choice itself, which has no arrays."""
    return self

  def chooses(self, tokens: int) -> bool:
    """Whether a query may read fewer than `tokens` keys."""
    return self.count * self.block < tokens

  def top_blocks(self) -> TopBlocks:
    """The selection that chooses these blocks where keys travel."""
    return TopBlocks(count=self.count, block=self.block)

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
    # Means are of keys in the basis of the caller.
    plain = [view.aligned(visit.q, keys=False).view for view in views]
    means, extent = self._means(plain, blocks, visit)
    b, heads, groups, t, _ = visit.q.shape
    rows = lambda x: jnp.broadcast_to(x, (b, t))
    operands = jnp.moveaxis(visit.q, 3, 1), Coords(*map(rows, visit.at))

    def read_chunk(chunk: PyTree) -> Partial:
      q, q_at = chunk
      chosen = self._chosen(q, Coords(*q_at), means, extent, visit)
      q = jnp.moveaxis(q, 1, 3)
      partials = [
        _read(view, q, Coords(*q_at), chosen, self.block, visit)
        for view in views
      ]
      partial = functools.reduce(merge, partials)
      return jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), partial)

    parts = -(-b * heads * groups * t * slots // _PAIRS)
    partial = by_chunks(read_chunk, operands, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), partial)

  def _means(
    self, views: Sequence[KVView], blocks: int, visit: CacheVisit
  ) -> tuple[Float[Array, "B C K H"], Extent]:
    """Mean keys of all blocks of all shards, and the blocks' coordinates."""
    b, heads, _, _, dims = visit.q.shape
    dtype = wide_dtype(visit.q.dtype)
    like = visit.q, tuple(views)
    sums = collectives.zeros((b, blocks, heads, dims), dtype, like)
    sizes = collectives.zeros((b, blocks), dtype, like)
    first = collectives.full((b, blocks), -_LAST, jnp.int32, like)
    last = collectives.full((b, blocks), -1, jnp.int32, like)
    for view in views:
      size = tile_slots(view, visit.platform)
      at = tiled(view.at, size)
      at = Coords(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in at))
      # Empty slots are of no block.
      number = jnp.where(at.seg != 0, at.pos // self.block, blocks)

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

      tiles = jnp.arange(at.pos.shape[1] // size, dtype=jnp.int32)
      count = jnp.asarray(tiles.size, jnp.int32)
      sums = fold_tiles(view, size, tiles, count, add, sums)
      sizes = jax.vmap(_counted)(sizes, number)
      first = jax.vmap(_largest)(first, number, -at.pos)
      last = jax.vmap(_largest)(last, number, at.pos)
    if visit.axis is not None:
      sums, sizes = collectives.total((sums, sizes), visit.axis)
      first, last = (collectives.largest(x, visit.axis) for x in (first, last))
    means = sums / jnp.maximum(sizes, 1)[..., None, None]
    has_keys = last >= 0
    segment = has_keys.astype(jnp.int32)
    coords = -first, last, segment, segment, has_keys, has_keys
    return means, Extent(*(x[:, None] for x in coords))

  def _chosen(
    self,
    q: Float[Array, "B t K G H"],
    q_at: Coords,
    means: Float[Array, "B C K H"],
    extent: Extent,
    visit: CacheVisit,
  ) -> Bool[Array, "B K G t C"]:
    """Mark the blocks that each query reads."""
    blocks = means.shape[1]
    scores = product("btkgh,bckh->bkgtc", q.astype(means.dtype), means)
    candidates = causal_candidates(visit.mask, q_at, extent, self.block)
    number = jnp.arange(blocks, dtype=jnp.int32)
    own_block = q_at.pos[..., None] // self.block == number[None, None]
    own_block &= (q_at.seg != 0)[..., None]
    scores = ranked(scores, candidates[:, None, None])
    scores = jnp.where(own_block[:, None, None], jnp.inf, scores)
    scores, best = lax.top_k(scores, min(self.count, blocks))
    best = jnp.where(scores > -jnp.inf, best, -1)
    return jnp.any(best[..., None] == number.reshape(1, 1, 1, 1, 1, -1), -2)


tree.register(BlockReading, (), ("count", "block"))


def _counted(sizes: jax.Array, number: jax.Array) -> jax.Array:
  """Sizes [C] of blocks with slots of these numbers added."""
  return sizes.at[number].add(jnp.ones((), sizes.dtype), mode="drop")


def _largest(values: jax.Array, number: jax.Array, new: jax.Array) -> jax.Array:
  """Largest value [C] of each block, with those of slots."""
  return values.at[number].max(new, mode="drop")


def _read(
  view: KVView,
  q: Float[Array, "B K G t H"],
  q_at: Coords,
  chosen: Bool[Array, "B K G t C"],
  block: int,
  visit: CacheVisit,
) -> Partial:
  """Partial of the keys of a view that are in chosen blocks."""
  number: Int[Array, "B S"] = jnp.broadcast_to(
    view.at.pos // block, (q.shape[0], view.shape[2])
  )
  number = jnp.clip(number, 0, chosen.shape[-1] - 1)
  allow = jnp.take_along_axis(chosen, number[:, None, None, None], -1)
  allow = in_tiles(allow, tile_slots(view, visit.platform))
  context = Context(q_at, view.at, view.mask or visit.mask, allow)
  args: Any = ScoreArgs(visit.scores, visit.terms, context)
  aligned, aligned_q, restore_basis, _ = view.aligned(q)
  partial = decode_attention(aligned_q, aligned, args, visit.platform)
  return partial._replace(acc=restore_basis(partial.acc))
