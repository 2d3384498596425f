"""Tokens with the best scores of an index, of the blocks with the best ones.

Guarantees: stage 1 scores blocks of neighbouring keys by the mean of their
index keys,

  I(t, block) = sum_i weights[t, i] relu(q[t, i] . mean(block))

and keeps the query's own block and the best earlier ones, `blocks` in all.
Stage 2 is `TopTokens` among the visible keys of these blocks. Of the keys that
`TopTokens` chooses it chooses all that are in a kept block; where a query sees
`blocks` blocks or fewer, the choices are equal. Means of blocks say little of
single keys: how many of the chosen keys are the same depends on the model. In
packed documents a mean is over the document of the block's last token.
Cost: products of T (S / block + blocks * block) pairs, not T S; the index's
keys are gathered once, each shard's from all others.
Memory: the index's keys of the whole sequence, and the gathered keys and the
scores of one chunk of queries.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax import tree
from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.sparse.block_selection import (
  ShardTokens,
  keys_by_position,
)
from ringjax.ops.attention.sparse.gathered import scan_queries
from ringjax.ops.attention.sparse.top_blocks import (
  causal_candidates,
  is_causal,
)
from ringjax.ops.attention.sparse.top_tokens import (
  TopTokens,
  check_count,
  ranked,
)
from ringjax.ops.mask import Coords, Extent, Mask, visible
from ringjax.parallel import collectives

# Most numbers of gathered index keys, and most scores of single heads, that are
# in memory at once.
_NUMBERS = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopTokensOfBlocks(TopTokens):
  """The tokens with the best scores of an index, of few blocks.

  Attributes:
    block: Number of positions of a block.
    blocks: Number of blocks whose tokens are scored, the query's own among
      them.
  """

  block: int
  blocks: int

  dimensions = TopTokens.dimensions

  @property
  def by_position(self) -> bool:
    return True

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    super().check(q, k, mask)
    positive_int("block", self.block)
    check_count(self.blocks, -(-k[1] // self.block), "blocks")
    if self.count > self.blocks * self.block:
      raise OptionError(
        "count",
        f"{self.count} of {self.blocks} blocks of {self.block} tokens",
        f"at most {self.blocks * self.block}",
        f"pass blocks={-(-self.count // self.block)} or more",
      )
    if not is_causal(mask):
      raise OptionError(
        "selection",
        f"TopTokensOfBlocks with the mask {mask!r}",
        "a mask that shows no later keys",
        "pass is_causal=True, or choose with TopTokens",
      )

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T 1 n"]:
    b, _, heads, dims = self.q.shape
    num_blocks = -(-tokens.length // self.block)
    keys, seg = keys_by_position(tokens, self.keys, num_blocks * self.block)
    pooled, extent = self._pooled(keys, seg)
    offsets = jnp.arange(self.block, dtype=jnp.int32)[None, None, None]
    row = jnp.arange(b)[:, None, None]
    number = jnp.arange(num_blocks, dtype=jnp.int32)[None, None]

    def fold(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      q, weights, pos, row_seg = rows
      t = q.shape[1]
      dots = product("btie,bce->btic", q, pooled.astype(q.dtype))
      weights = weights.astype(dots.dtype)
      scores = product("btic,bti->btc", jnp.maximum(dots, 0), weights)
      own_block = (pos // self.block)[..., None] == number
      real = (row_seg != 0)[..., None]
      candidate = causal_candidates(
        tokens.mask, Coords(pos, row_seg), extent, self.block
      )
      scores = ranked(scores, candidate)
      scores = jnp.where(own_block & real, jnp.inf, scores)
      scores, best_blocks = lax.top_k(scores, self.blocks)
      # By position, so that `top_k` prefers lower positions among equals.
      best_blocks = jnp.sort(
        jnp.where(scores > -jnp.inf, best_blocks, num_blocks), -1
      )
      at = (best_blocks[..., None] * self.block + offsets).reshape(b, t, -1)
      in_range = at < keys.shape[1]
      column = jnp.where(in_range, at, 0)
      dots = product("btie,btne->btin", q, keys[row, column].astype(q.dtype))
      scores = product("btin,bti->btn", jnp.maximum(dots, 0), weights)
      k_at = Coords(at, jnp.where(in_range, seg[row, column], 0))
      q_at = Coords(pos[..., None], row_seg[..., None])
      scores = ranked(scores, visible(tokens.mask, q_at, k_at))
      scores, best = lax.top_k(scores, self.count)
      chosen = jnp.take_along_axis(at, best, -1)
      return (), jnp.where(scores > -jnp.inf, chosen, -1)

    candidates = self.blocks * self.block
    numbers = b * max(candidates * max(dims, heads), heads * num_blocks)
    inputs = self.q, self.weights, *tokens.q_at
    axes = collectives.varying_axes(inputs, keys, seg)
    inputs = collectives.vary(inputs, axes)
    chunk = max(1, _NUMBERS // numbers)
    return scan_queries(fold, (), inputs, chunk)[1][:, :, None]

  def _pooled(
    self, keys: Float[Array, "B S E"], seg: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B c E"], Extent]:
    """Mean index keys of all blocks, and the blocks' coordinates."""
    b, length, _ = keys.shape
    by_block = lambda x: x.reshape(b, -1, self.block, *x.shape[2:])
    seg, pos = by_block(seg), jnp.arange(length, dtype=jnp.int32)
    pos = pos.reshape(1, -1, self.block)
    last = jnp.max(jnp.where(seg != 0, pos, -1), -1)
    last_seg = jnp.max(jnp.where(pos == last[..., None], seg, 0), -1)
    pooled = (seg != 0) & (seg == last_seg[..., None])
    float_keys = by_block(keys).astype(
      jnp.promote_types(keys.dtype, jnp.float32)
    )
    sums = jnp.sum(jnp.where(pooled[..., None], float_keys, 0), 2)
    size = jnp.sum(pooled, -1, dtype=float_keys.dtype)
    first = jnp.min(jnp.where(pooled, pos, 2**31 - 1), -1)
    has_keys = last >= 0
    coords = first, last, last_seg, last_seg, has_keys, has_keys
    extent = Extent(*(x[:, None] for x in coords))
    return sums / jnp.maximum(size, 1)[..., None], extent


tree.register(
  TopTokensOfBlocks, ("q", "weights", "keys"), ("count", "block", "blocks")
)
