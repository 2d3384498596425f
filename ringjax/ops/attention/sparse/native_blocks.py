"""The blocks that attention to compressed keys weighs most (NSA).

Guarantees: the score of block j for a query is

  sum_c |block_c and block_j| / stride * p(c)

over the compressed keys c, where p is the softmax of the query's products with
the visible ones, summed over the query heads of a kv head, and |.| counts the
tokens that both blocks hold: equation 9 of the paper. A query reads its own
block and those before it, `local` in all, the first `initial` ones and the
others with the best scores, `count` in all; among equal ones those at the
lowest positions. A score that is not a number is the best.
Cost: products of T C pairs; the compressed keys are gathered once.
Memory: the compressed keys of all shards, scores of one chunk of queries.

Ref: Yuan et al. 2025, Native Sparse Attention, arXiv 2502.11089.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax import tree
from ringjax.checks import as_array
from ringjax.errors import DtypeError, OptionError
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  Dimensions,
  ShardTokens,
  check_shape,
)
from ringjax.ops.attention.sparse.gathered import scan_queries
from ringjax.ops.attention.sparse.top_tokens import check_count, ranked
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import finite_max, wide_dtype
from ringjax.parallel import collectives

# Most scores of compressed keys that are in memory at once.
_SCORES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeBlocks(BlockSelection):
  """Blocks by the attention to compressed keys, in causal calls.

  Attributes:
    keys: Compressed keys in natural order, [B, C, K, H], C over the mesh axis
      of the sequence.
    segments: Document of each compressed key, int32 [B, C]; 0 for one that
      belongs to no single document.
    length: Number of tokens of a compressed key.
    stride: Number of tokens from one compressed key's first token to the next
      one's.
    block: Number of tokens of a block.
    count: Most blocks that a query reads.
    initial: Number of first blocks of the sequence among them.
    local: Number of blocks up to the query's own among them.
    scale: Factor on the products.
  """

  keys: Float[Array, "B C K H"]
  segments: Int[Array, "B C"]
  length: int
  stride: int
  block: int
  count: int
  initial: int
  local: int
  scale: float

  dimensions: ClassVar[Dimensions] = {
    "keys": ("B", "Z", "K?"),
    "segments": ("B", "Z"),
  }

  @property
  def block_size(self) -> int:
    return self.block

  @property
  def sums_heads(self) -> bool:
    return True

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    del heads
    return kv_heads

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    keys = as_array("compressed_key", self.keys)
    check_shape(
      "compressed_key", keys, (k[0], None, k[2], k[3]), "compressed keys"
    )
    check_shape(
      "segments", self.segments, keys.shape[:2], "documents of compressed keys"
    )
    if not jnp.issubdtype(keys.dtype, jnp.floating):
      raise DtypeError(
        "compressed_key", keys.dtype, "a dtype of floats", "cast it"
      )
    check_count(self.count, -(-k[1] // self.block), "blocks")
    if mask.reach[1] != 0:
      raise OptionError(
        "selection",
        f"NativeBlocks with the mask {mask!r}",
        "a mask that shows no later keys",
        "pass is_causal=True",
      )

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T K n"]:
    keys, seg = self.keys, self.segments
    if tokens.axis is not None:
      keys, seg = collectives.gather((keys, seg), tokens.axis, 1)
    b, _, heads, _ = tokens.q.shape
    compressed, kv_heads = keys.shape[1:3]
    blocks = -(-tokens.length // self.block)
    last = jnp.arange(compressed, dtype=jnp.int32) * self.stride
    k_at = Coords(last[None, None] + self.length - 1, seg[:, None])
    dtype = wide_dtype(tokens.q.dtype)

    def fold(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      q, pos, seg = rows
      t = q.shape[1]
      q = q.reshape(b, t, kv_heads, heads // kv_heads, -1)
      s = product("btkgh,bckh->btkgc", q, keys.astype(q.dtype))
      s = s.astype(dtype) * self.scale
      q_at = Coords(pos[..., None], seg[..., None])
      seen = visible(tokens.mask, q_at, k_at)[:, :, None, None]
      s = jnp.where(seen, s, -jnp.inf)
      p = jnp.exp(s - finite_max(jnp.max(s, -1, keepdims=True)))
      total = jnp.sum(p, -1, keepdims=True)
      p = jnp.sum(p / jnp.where(total == 0, 1, total), 3)
      return (), self.best(p, Coords(pos, seg), blocks)

    chunk = max(1, _SCORES // (b * heads * compressed))
    axes = collectives.varying_axes(tokens.q, tokens.q_at, keys)
    rows = collectives.vary((tokens.q, *tokens.q_at), axes)
    return scan_queries(fold, (), rows, chunk)[1]

  def best(
    self, p: Float[Array, "B T K C"], q_at: Coords, blocks: int
  ) -> Int[Array, "B T K n"]:
    """Blocks that queries read, -1 for none.

    Args:
      p: Probabilities of the compressed keys, summed over the query heads of a
        kv head.
      q_at: Coordinates of the queries, [B or 1, T].
      blocks: Number of blocks of the sequence.
    """
    number = jnp.arange(blocks, dtype=jnp.int32)[None, None, None]
    own_block = q_at.pos[..., None, None] // self.block
    real = q_at.seg[..., None, None] != 0
    fixed = (number < self.initial) | (number > own_block - self.local)
    scores = ranked(self._of_blocks(p, blocks), (number <= own_block) & real)
    scores = jnp.where(fixed & (scores > -jnp.inf), jnp.inf, scores)
    scores, chosen = lax.top_k(scores, self.count)
    return jnp.where(scores > -jnp.inf, chosen, -1)

  def _of_blocks(
    self, p: Float[Array, "B T K C"], blocks: int
  ) -> Float[Array, "B T K c"]:
    """Scores of blocks from the probabilities of compressed keys."""
    step = self.block // self.stride
    # Compressed key `step * j + shift` holds tokens of block j.
    shifts = range(1 - self.length // self.stride, step)
    keys_before, width = -shifts[0], blocks * step
    keys_after = max(0, width + keys_before + step - p.shape[3])
    p = jnp.pad(p, [(0, 0)] * 3 + [(keys_before, keys_after)])
    scores = jnp.zeros((*p.shape[:3], blocks), p.dtype)
    for shift in shifts:
      first = max(0, shift * self.stride)
      end = min(self.block, shift * self.stride + self.length)
      part = p[..., keys_before + shift :][..., :width:step]
      scores += part * ((end - first) / self.stride)
    return scores


tree.register(
  NativeBlocks,
  ("keys", "segments"),
  ("length", "stride", "block", "count", "initial", "local", "scale"),
)
