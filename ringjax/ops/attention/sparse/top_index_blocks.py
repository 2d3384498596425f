"""The blocks whose best key has the best score of an index (MiniMax-M3).

Guarantees: for each kv head k a query t reads its last `local` blocks, its own
among them, and of the other blocks those with the largest

  I(t, k, block) = max over visible keys s of the block of q[t, k] . keys[s]

`count` in all, and among equal ones those at the lowest positions. The query
heads of a kv head read the same blocks. A score that is not a number is the
best. The choice is the same in all layouts and on all meshes.
Cost: products of T S pairs per kv head; the index's keys are gathered once,
each shard's from all others.
Memory: the index's keys of the whole sequence, and the scores of one chunk of
queries.

Ref: MiniMax 2026, MiniMax-M3 (MSA).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.checks import as_array, positive_int
from ringjax.errors import DtypeError, OptionError, ShapeError
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.sparse.block_selection import (
  Dimensions,
  ScoredBlocks,
  ShardTokens,
  check_shape,
  keys_by_position,
)
from ringjax.ops.attention.sparse.gathered import scan_queries
from ringjax.ops.attention.sparse.top_tokens import check_count, ranked
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.parallel import collectives

# Most scores of pairs that are in memory at once.
_SCORES = 1 << 24


class KeyUnits(NamedTuple):
  """Blocks of a sequence.

  Fields:
    keys: Keys of the index, [B, C, m, E].
    seg: Documents of the tokens, int32 [B, C, m]; 0 for none.
  """

  keys: jax.Array
  seg: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopIndexBlocks(ScoredBlocks):
  """The blocks whose best key has the best score of an index, per kv head.

  Attributes:
    q: Queries of the index, one for each kv head, [B, T, K, E].
    keys: Keys of the index, [B, S, E].
    count: Most blocks that a query reads, the local ones among them.
    block: Number of positions of a block.
    local: Number of blocks, up to the query's own, that are always read.
  """

  q: Float[Array, "B T K E"]
  keys: Float[Array, "B S E"]
  count: int
  block: int
  local: int = 1

  dimensions: ClassVar[Dimensions] = {
    "q": ("B", "T", "K?"),
    "keys": ("B", "S"),
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
    del mask
    index_q = as_array("selection.q", self.q)
    keys = as_array("selection.keys", self.keys)
    expected = (*q[:2], k[2], None)
    check_shape("selection.q", index_q, expected, "a query for each kv head")
    if (
      keys.ndim != 3
      or keys.shape[0] != q[0]
      or (keys.shape[2] != index_q.shape[3])
    ):
      raise ShapeError(
        "selection.keys",
        f"shape {keys.shape}",
        f"[{q[0]}, S, {index_q.shape[3]}], one index key for each key",
        "pass the index's keys in the order of `key`",
      )
    if index_q.dtype != keys.dtype:
      raise DtypeError(
        "selection.keys",
        keys.dtype,
        f"{index_q.dtype}, as selection.q has",
        "convert one of them to the other's dtype",
      )
    positive_int("block", self.block)
    check_count(self.count, -(-k[1] // self.block), "blocks")
    if not 0 <= self.local <= self.count:
      raise OptionError(
        "local",
        f"{self.local} of {self.count} blocks",
        f"a number from 0 to {self.count}",
        "pass local=1: a query reads its own block",
      )

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T K n"]:
    b, _, heads, _ = self.q.shape
    length = -(-tokens.length // self.block) * self.block
    keys, seg = keys_by_position(tokens, self.keys, length)
    k_at = Coords(jnp.arange(length, dtype=jnp.int32)[None, None], seg[:, None])

    def fold(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      q, pos, row_seg = rows
      scores = product("btke,bse->btks", q, keys)
      q_at = Coords(pos[..., None], row_seg[..., None])
      allowed = visible(tokens.mask, q_at, k_at)[:, :, None]
      scores = ranked(scores, allowed)
      scores = scores.reshape(*scores.shape[:3], -1, self.block).max(-1)
      chosen = chosen_blocks(
        scores, pos[..., None], self.count, self.block, self.local
      )
      return (), chosen

    inputs = self.q, *tokens.q_at
    axes = collectives.varying_axes(inputs, keys, seg)
    inputs = collectives.vary(inputs, axes)
    chunk = max(1, _SCORES // (b * heads * length))
    return scan_queries(fold, (), inputs, chunk)[1]

  @property
  def queries(self) -> tuple[Any, ...]:
    return (self.q,)

  def scores_per_query(self, blocks: int) -> int:
    return self.q.shape[2] * blocks * self.block

  def units(self, tokens: ShardTokens) -> KeyUnits:
    blocks = -(-tokens.length // self.block)
    keys, seg = keys_by_position(tokens, self.keys, blocks * self.block)
    by_block = lambda x: x.reshape(-1, blocks, self.block, *x.shape[2:])
    return KeyUnits(by_block(keys), by_block(seg))

  def unit_scores(
    self,
    queries: tuple[Any, ...],
    q_at: Coords,
    units: PyTree,
    mask: Mask,
    blocks: Int[Array, "B q M n"] | None = None,
  ) -> tuple[Float[Array, "B q M c"], Bool[Array, "B q M c"]]:
    (q,) = queries
    keys, seg = units
    if blocks is None:
      scores = product("bqke,bcme->bqkcm", q, keys)
      number = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None, None]
      seg = seg[:, None, None]
    else:
      real = blocks >= 0
      number = jnp.where(real, blocks, 0)
      row = jnp.arange(q.shape[0])[:, None, None, None]
      scores = product("bqke,bqkcme->bqkcm", q, keys[row, number])
      seg = jnp.where(real[..., None], seg[row, number], 0)
    offsets = jnp.arange(self.block, dtype=jnp.int32)[None, None, None, None]
    k_at = Coords(number[..., None] * self.block + offsets, seg)
    per_key = lambda x: x[:, :, None, None, None]
    allowed = visible(mask, Coords(*map(per_key, q_at)), k_at)
    scores = jnp.max(jnp.where(allowed, scores, -jnp.inf), -1)
    offered = jnp.any(allowed, -1)
    distance = q_at.pos[:, :, None, None] // self.block - number
    offered &= (distance < 0) | (distance >= self.local)
    return scores, jnp.broadcast_to(offered, scores.shape)


def chosen_blocks(
  scores: Float[Array, "B T K C"],
  pos: Int[Array, "#B T 1"],
  count: int,
  block: int,
  local: int,
) -> Int[Array, "B T K n"]:
  """Numbers of the blocks with the best scores, -1 for none.

  Args:
    scores: Score of each block; -inf for blocks without a visible key.
    pos: Positions of the queries.
    count: Most blocks of a query.
    block: Number of positions of a block.
    local: Number of blocks, up to the query's own, that come first.
  """
  number = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None, None]
  distance = pos[..., None] // block - number
  is_local: Bool[Array, "#B T #K C"] = (distance >= 0) & (distance < local)
  scores = jnp.where(is_local & (scores > -jnp.inf), jnp.inf, scores)
  scores, chosen = lax.top_k(scores, min(count, scores.shape[-1]))
  return jnp.where(scores > -jnp.inf, chosen, -1)


tree.register(TopIndexBlocks, ("q", "keys"), ("count", "block", "local"))
