"""The blocks with the best scores of pooled keys (MoBA, Quest).

Guarantees: a query reads its own block and, of the other blocks, the
`count` - 1 with the best scores; among equal ones those at the lowest
positions. A score that is not a number is the best, so that the query's result
is not a number either. In a causal call only earlier blocks are candidates, so
that no choice depends on later tokens. In packed documents a block is pooled
over the document of its last token, the only one that queries of later blocks
see.
Cost: products of T * S / block pairs; the sum of the pooled keys over shards.
Memory: pooled keys of the whole sequence, and scores of one chunk of queries.

Pooled means are sums over shards: two blocks whose scores differ by less than
the rounding of such a sum may be ranked differently on another mesh. Equal
keys have equal means on every mesh.

Ref: Lu et al. 2025, MoBA, arXiv 2502.13189; Tang et al. 2024, Quest, arXiv
2406.10774.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  ShardTokens,
)
from ringjax.ops.attention.sparse.gathered import scan_queries
from ringjax.ops.attention.sparse.top_tokens import check_count, ranked
from ringjax.ops.mask import Coords, Everything, Extent, Mask, Window
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives

# Most scores of blocks that are in memory at once.
_SCORES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopBlocks(BlockSelection):
  """The blocks whose pooled keys have the best scores with a query.

  Attributes:
    count: Most blocks that a query reads, its own among them.
    block: Number of positions of a block.
    heads: "query" if each query head chooses, "kv" if the query heads of a kv
      head choose together, by the sum of their scores.
    pooling: "mean": the score is the product with the mean of the block's keys;
      "bounds": the largest product that a key within the block's extremes
      could have.
  """

  count: int
  block: int
  heads: Literal["query", "kv"] = "query"
  pooling: Literal["mean", "bounds"] = "mean"

  @property
  def block_size(self) -> int:
    return self.block

  @property
  def sums_heads(self) -> bool:
    return self.heads == "kv"

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    return heads if self.heads == "query" else kv_heads

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    positive_int("block", self.block)
    one_of("heads", self.heads, ("query", "kv"))
    one_of("pooling", self.pooling, ("mean", "bounds"))
    check_count(self.count, -(-k[1] // self.block), "blocks")
    if not is_causal(mask) and not isinstance(mask, Everything | Window):
      raise OptionError(
        "selection",
        f"TopBlocks with the mask {mask!r}, which may show a part of a block",
        "a mask that shows no later keys",
        "pass is_causal=True, or choose tokens with TopTokens",
      )

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T M n"]:
    b, _, n, _ = tokens.q.shape
    kv_heads = tokens.k.shape[2]
    blocks = -(-tokens.length // self.block)
    low, high, extent = self._pooled(tokens, blocks)
    causal = is_causal(tokens.mask)
    number = jnp.arange(blocks, dtype=jnp.int32)[None, None, None]
    dtype = wide_dtype(tokens.q.dtype)

    def fold(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      q, pos, seg = rows
      t = q.shape[1]
      q = q.reshape(b, t, kv_heads, n // kv_heads, -1).astype(dtype)
      if self.pooling == "mean":
        scores = product("btkgh,bckh->btkgc", q, high)
      else:
        scores = product("btkgh,bckh->btkgc", jnp.maximum(q, 0), high)
        scores += product("btkgh,bckh->btkgc", jnp.minimum(q, 0), low)
      if self.heads == "kv":
        scores = jnp.sum(scores, 3)
      scores = scores.reshape(b, t, -1, blocks)
      own_block = pos[..., None, None] // self.block == number
      real = (seg != 0)[..., None, None]
      q_at = Coords(pos[..., None], seg[..., None])
      if causal:
        candidate = causal_candidates(tokens.mask, q_at, extent, self.block)
      else:
        candidate = _candidates(tokens.mask, q_at, extent)
      scores = ranked(scores, candidate)
      scores = jnp.where(own_block & real, jnp.inf, scores)
      scores, chosen = lax.top_k(scores, self.count)
      return (), jnp.where(scores > -jnp.inf, chosen, -1)

    chunk = max(1, _SCORES // (b * n * blocks))
    rows = collectives.vary(
      (tokens.q, *tokens.q_at), collectives.varying_axes(tokens.q, tokens.q_at)
    )
    return scan_queries(fold, (), rows, chunk)[1]

  def _pooled(
    self, tokens: ShardTokens, blocks: int
  ) -> tuple[Float[Array, "B c K H"], Float[Array, "B c K H"], Extent]:
    """Pooled keys (low, high) of all blocks, and the blocks' coordinates."""
    k = jnp.swapaxes(tokens.k, 0, 1).astype(wide_dtype(tokens.k.dtype))
    b = tokens.k.shape[0]
    rows = lambda x: jnp.broadcast_to(x, (b, x.shape[1])).T
    pos, seg = map(rows, tokens.k_at)
    block = tokens.k_at.pos[0] // self.block
    axis = tokens.axis
    largest = lambda x: x if axis is None else collectives.largest(x, axis)
    total = lambda x: x if axis is None else collectives.total(x, axis)
    segment = lambda f, x: f(x, block, num_segments=blocks)
    first_pos = jnp.where(seg != 0, -pos, -(2**31 - 1))
    last_pos = jnp.where(seg != 0, pos, -1)
    last = largest(segment(jax.ops.segment_max, last_pos))
    last = jnp.maximum(last, -1)
    is_last = (pos == last[block]) & (seg != 0)
    last_seg = largest(segment(jax.ops.segment_max, jnp.where(is_last, seg, 0)))
    last_seg = jnp.maximum(last_seg, 0)
    if is_causal(tokens.mask):
      pooled = (seg != 0) & (seg == last_seg[block])
    else:
      pooled = seg != 0
    first_pos = jnp.where(pooled, first_pos, -(2**31 - 1))
    first = -largest(segment(jax.ops.segment_max, first_pos))
    take = pooled[..., None, None]
    if self.pooling == "mean":
      sums = total(segment(jax.ops.segment_sum, jnp.where(take, k, 0)))
      size = total(segment(jax.ops.segment_sum, pooled.astype(k.dtype)))
      low = high = sums / jnp.maximum(size, 1)[..., None, None]
    else:
      bound = lambda x: largest(
        segment(jax.ops.segment_max, jnp.where(take, x, -jnp.inf))
      )
      finite = lambda x: jnp.where(jnp.isfinite(x), x, 0)
      low, high = finite(-bound(-k)), finite(bound(k))
    has_keys = last >= 0
    batch_first = lambda x: jnp.swapaxes(x, 0, 1)
    place = lambda x: batch_first(x)[:, None, None]
    coords = (first, last, last_seg, last_seg, has_keys, has_keys)
    extent = Extent(*(place(x) for x in coords))
    return batch_first(low), batch_first(high), extent


def is_causal(mask: Mask) -> bool:
  """Whether no query sees a later key."""
  return mask.reach[1] == 0


def causal_candidates(
  mask: Mask, q_at: Coords, extent: Extent, block: int
) -> Bool[Array, "*B c"]:
  """Mark the blocks before each query's own that it may see.

  Args:
    mask: Pairs that are visible.
    q_at: Coordinates of the queries, [*B].
    extent: Coordinates of the blocks, which broadcast against [*B, c].
    block: Number of positions of a block.
  """
  number = jnp.arange(extent.some.shape[-1], dtype=jnp.int32)
  number = number.reshape((1,) * q_at.pos.ndim + (-1,))
  return _candidates(mask, q_at, extent) & (
    number < q_at.pos[..., None] // block
  )


def _candidates(
  mask: Mask, q_at: Coords, extent: Extent
) -> Bool[Array, "*B c"]:
  """Mark the blocks of which each query may see a key."""
  pos, seg = (x[..., None] for x in q_at)
  real = seg != 0
  rows = Extent(pos, pos, seg, seg, real, real)
  return mask.bound(rows, extent)[0] & extent.some & real


tree.register(TopBlocks, (), ("count", "block", "heads", "pooling"))
