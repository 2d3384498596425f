"""The blocks whose pooled key has the best score of an index.

Guarantees: of the blocks of `block` tokens that end at or before a query t, it
reads the `count` with the largest

  I(t, block) = sum_i weights[t, i] relu(q[t, i] . pooled[block]),

and among equal ones those at the lowest positions; and the tokens up to itself
of its own block, if that has not ended. A pooled key is a sum of the keys of a
block's tokens,

  pooled = sum_j softmax_j(gate_j + bias_j) key_j,

with a softmax over the tokens for each dim (GLM-5.3); without gates it is the
mean of the keys. It may be normed, and rotated by the position of the block's
first token (Qwen4-Exp). A block is of one document; tokens
of blocks that two documents share are read by queries of these blocks alone.
All heads read the same tokens. A score that is not a number is the best. The
choice is the same in all layouts and on all meshes.
Cost: products of T S / `block` pairs per query head of the index; its keys and
gates are gathered once, each shard's from all others.
Memory: keys and gates of the whole sequence, and the scores of one chunk of
queries.

Ref: Zhipu AI 2026, GLM-5.3-Flash; Qwen Team 2026, Qwen4-Exp.
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
from ringjax.ops.norm import rms_norm
from ringjax.ops.rope import Rope, Rotation
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives

# Most scores of single heads of an index that are in memory at once.
_HEAD_SCORES = 1 << 24


class PooledUnits(NamedTuple):
  """Blocks of a sequence.

  Fields:
    pooled: Pooled key of each block, in the queries' dtype, [B, C, E].
    seg: Document of each block, int32 [B, C]; 0 if it has not ended, or has
      tokens of several.
  """

  pooled: jax.Array
  seg: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopPooledBlocks(ScoredBlocks):
  """The blocks whose pooled key has the best score of an index.

  Attributes:
    q: Queries of the index, [B, T, I, E].
    weights: Weights of the index's heads, with all scales, [B, T, I].
    keys: Keys of the index and, after them, gates, [B, S, 2 E]; or keys alone,
      [B, S, E], whose means are pooled keys.
    bias: Bias of the gates by the place in a block, [block, E]; without gates
      it only says how large a block is.
    count: Most blocks that a query reads besides its own.
    norm: Weight of an RMSNorm of pooled keys, [E], or None.
    eps: Epsilon of that norm.
    rope: Rotation of pooled keys after that, or None.
    positions: Positions of the keys in their documents, int32 [B, S], by which
      pooled keys are rotated; None: those of the layout.
  """

  q: Float[Array, "B T I E"]
  weights: Float[Array, "B T I"]
  keys: Float[Array, "B S X"]
  bias: Float[Array, "m E"]
  count: int
  norm: Float[Array, " E"] | None = None
  eps: float = 1e-6
  rope: Rope | None = None
  positions: Int[Array, "B S"] | None = None

  dimensions: ClassVar[Dimensions] = {
    "q": ("B", "T"),
    "weights": ("B", "T"),
    "keys": ("B", "S"),
    "bias": (),
    "norm": (),
    "positions": ("B", "S"),
  }

  @property
  def block_size(self) -> int:
    return self.bias.shape[0]

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    del heads, kv_heads
    return 1

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    del mask
    index_q, weights, keys, bias = (
      as_array(f"selection.{name}", getattr(self, name))
      for name in ("q", "weights", "keys", "bias")
    )
    check_shape("selection.q", index_q, (*q[:2], None, None), "index queries")
    heads, dims = index_q.shape[2:]
    check_shape("selection.weights", weights, (*q[:2], heads), "head weights")
    check_shape("selection.bias", bias, (None, dims), "a bias for each place")
    widths = dims, 2 * dims
    if keys.ndim != 3 or keys.shape[0] != q[0] or keys.shape[2] not in widths:
      raise ShapeError(
        "selection.keys",
        f"shape {keys.shape}",
        f"[{q[0]}, S, {2 * dims}], an index key and a gate for each key, or "
        f"[{q[0]}, S, {dims}], keys alone",
        "concatenate both in the order of `key`",
      )
    if self.norm is not None:
      norm = as_array("selection.norm", self.norm)
      check_shape("selection.norm", norm, (dims,), "a weight for each dim")
    check_rotation(self.rope, dims)
    if self.positions is not None and self.rope is None:
      raise OptionError(
        "selection.positions",
        "positions without a rope",
        "a rope, by which pooled keys are rotated",
        "pass rope too, or leave positions out",
      )
    if index_q.dtype != keys.dtype:
      raise DtypeError(
        "selection.keys",
        keys.dtype,
        f"{index_q.dtype}, as selection.q has",
        "convert one of them to the other's dtype",
      )
    positive_int("selection.bias", bias.shape[0])
    check_count(self.count, -(-k[1] // bias.shape[0]), "blocks")

  @property
  def queries(self) -> tuple[Any, ...]:
    return self.q, self.weights

  def scores_per_query(self, blocks: int) -> int:
    return self.q.shape[2] * blocks

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T 1 n"]:
    b = self.q.shape[0]
    units = self.units(tokens)

    def fold(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      *queries, pos, row_seg = rows
      q_at = Coords(pos, row_seg)
      scores, allowed = self.unit_scores(
        tuple(queries), q_at, units, tokens.mask
      )
      scores, allowed = scores[:, :, 0], allowed[:, :, 0]
      chosen = best_pooled(scores, allowed, pos, self.count, self.block_size)
      return (), chosen[:, :, None]

    inputs = *self.queries, *tokens.q_at
    axes = collectives.varying_axes(inputs, units)
    inputs = collectives.vary(inputs, axes)
    blocks = units.pooled.shape[1]
    chunk = max(1, _HEAD_SCORES // (b * self.scores_per_query(blocks)))
    return scan_queries(fold, (), inputs, chunk)[1]

  def units(self, tokens: ShardTokens) -> PooledUnits:
    b, block = self.q.shape[0], self.block_size
    blocks = -(-tokens.length // block)
    keys, seg = keys_by_position(tokens, self.keys, blocks * block)
    pooled = _pooled(keys.reshape(b, blocks, block, -1), self.bias)
    first = None
    if self.rope is not None:
      pos = tokens.k_at.pos if self.positions is None else self.positions
      pos = jnp.broadcast_to(pos, self.keys.shape[:2])
      pos, _ = keys_by_position(tokens, pos[..., None], blocks * block)
      first = pos.reshape(b, blocks, block)[..., 0]
    pooled = finished(pooled, self.norm, self.eps, self.rope, first)
    pooled = pooled.astype(self.q.dtype)
    seg = seg.reshape(b, blocks, block)
    # Of one document.
    ends = (seg[..., 0] > 0) & jnp.all(seg == seg[..., :1], -1)
    return PooledUnits(pooled, jnp.where(ends, seg[..., 0], 0))

  def unit_scores(
    self,
    queries: tuple[Any, ...],
    q_at: Coords,
    units: PyTree,
    mask: Mask,
    blocks: Int[Array, "B q 1 n"] | None = None,
  ) -> tuple[Float[Array, "B q 1 c"], Bool[Array, "B q 1 c"]]:
    q, weights = queries
    pooled, seg = units
    if blocks is None:
      scores = pooled_scores(q, weights, pooled)
      number = jnp.arange(pooled.shape[1], dtype=jnp.int32)[None, None]
      seg = seg[:, None]
    else:
      real = blocks[:, :, 0] >= 0
      number = jnp.where(real, blocks[:, :, 0], 0)
      row = jnp.arange(q.shape[0])[:, None, None]
      dots = product("bqie,bqce->bqic", q, pooled[row, number])
      weights = weights.astype(dots.dtype)
      scores = product("bqic,bqi->bqc", jnp.maximum(dots, 0), weights)
      seg = jnp.where(real, seg[row, number], 0)
    q_at = Coords(*(x[..., None] for x in q_at))
    last = number * self.block_size + (self.block_size - 1)
    offered = visible(mask, q_at, Coords(last, seg))
    return scores[:, :, None], offered[:, :, None]


def _pooled(
  keys: Float[Array, "B C m X"], bias: Float[Array, "m E"]
) -> Float[Array, "B C E"]:
  """Pooled key of each block of keys and gates: float32 or wider."""
  dtype = wide_dtype(keys.dtype)
  keys = keys.astype(dtype)
  if keys.shape[-1] == bias.shape[-1]:
    return jnp.mean(keys, 2)
  keys, gates = jnp.split(keys, 2, -1)
  weights = jax.nn.softmax(gates + bias.astype(dtype)[None, None], 2)
  return jnp.sum(weights * keys, 2)


def finished(
  pooled: Float[Array, "B C E"],
  norm: Float[Array, " E"] | None,
  eps: float,
  rope: Rope | None,
  first: Int[Array, "#B C"] | None,
) -> Float[Array, "B C E"]:
  """Pooled keys after their norm and their rotation.

  Args:
    pooled: Pooled key of each block.
    norm: Weight of the norm, or None.
    eps: Epsilon of the norm.
    rope: Rotation, or None.
    first: Position of the first token of each block; None without a rotation.
  """
  if norm is not None:
    pooled = rms_norm(pooled, norm, eps)
  if rope is None:
    return pooled
  assert first is not None
  return Rotation(rope=rope).anywhere(pooled[:, None], first)[:, 0]


def check_rotation(rope: Rope | None, dims: int) -> None:
  """Refuse a rotation that pooled keys of so many dims cannot have.

  Raises:
    OptionError: If it depends on the text's length, is learned or too wide.
  """
  if rope is None:
    return
  if rope.scaling.by_length or rope.learned or rope.dims > dims:
    kind = type(rope.scaling).__name__
    raise OptionError(
      "selection.rope",
      f"{rope.dims} dims, scaled by {kind}, learned: {rope.learned}",
      f"at most {dims} dims, frequencies that are the same for all texts",
      "choose another scaling, such as linear, ntk or yarn",
    )


def pooled_scores(
  q: Float[Array, "B T I E"],
  weights: Float[Array, "B T I"],
  pooled: Float[Array, "B C E"],
) -> Float[Array, "B T C"]:
  """Scores I(t, block) of all pairs."""
  dots = product("btie,bce->btic", q, pooled)
  weights = weights.astype(dots.dtype)
  return product("btic,bti->btc", jnp.maximum(dots, 0), weights)


def best_pooled(
  scores: Float[Array, "B T C"],
  allowed: Bool[Array, "#B T C"],
  pos: Int[Array, "#B T"],
  count: int,
  block: int,
) -> Int[Array, "B T n"]:
  """Distinct blocks that each query reads, -1 for none; its own is the last.

  Args:
    scores: Scores of the blocks.
    allowed: Whether the query sees all tokens of the block.
    pos: Positions of the queries.
    count: Most blocks besides the query's own.
    block: Number of positions of a block.
  """
  blocks = scores.shape[-1]
  scores, chosen = lax.top_k(ranked(scores, allowed), min(count, blocks))
  chosen = jnp.where(scores > -jnp.inf, chosen, -1)
  local = jnp.minimum(pos // block, blocks - 1)[..., None]
  allowed = jnp.broadcast_to(allowed, (*scores.shape[:2], blocks))
  local = jnp.broadcast_to(local, (*scores.shape[:2], 1))
  has_ended = jnp.take_along_axis(allowed, local, -1)
  local = jnp.where(has_ended, -1, local)
  return jnp.concatenate([chosen, local], -1)


tree.register(
  TopPooledBlocks,
  ("q", "weights", "keys", "bias", "norm", "positions"),
  ("count", "eps", "rope"),
)
