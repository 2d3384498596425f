"""The tokens with the best scores of an index (DeepSeek Sparse Attention).

Guarantees: among the keys that the mask lets a query t see, it reads the
`count` with the largest

  I(t, s) = sum_i weights[t, i] relu(q[t, i] . k[s])

and among equal ones those at the lowest positions; all of them if there are no
more. A score that is not a number is the best. The choice is the same in all
layouts and on all meshes.
Cost: the index's products of all pairs, whose keys go around the ring once.
Memory: the choice, and float32 scores of one chunk of queries and the keys of
one shard.

Ref: DeepSeek-AI 2025, DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.checks import as_array, positive_int
from ringjax.errors import DtypeError, OptionError, ShapeError
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  Dimensions,
  ShardTokens,
  check_shape,
)
from ringjax.ops.attention.sparse.gathered import scan_queries
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives
from ringjax.typing import Index

# Most scores of single heads of an index that are in memory at once.
_HEAD_SCORES = 1 << 24
_LAST = 2**31 - 1


def check_count(count: int, keys: int, unit: str) -> None:
  """Raise OptionError unless `count` of `keys` may be chosen."""
  positive_int("count", count, remedy=f"pass the number of {unit} to read")
  if count > keys:
    raise OptionError(
      "count",
      f"{count} of {keys} {unit}",
      f"at most {keys}: with all {unit} attention is dense",
      f"pass count=min(count, {keys}), or call rj.ring_attention",
    )


def ranked(
  scores: Float[Array, " ..."], allowed: Bool[Array, " ..."]
) -> Float[Array, " ..."]:
  """Scores for `top_k`: -inf where not allowed, the largest for NaN.

  Otherwise `top_k` would rank NaN first and no comparison would find it. It
  also ranks 0 before -0, of which this makes equals.
  """
  best = jnp.finfo(scores.dtype).max
  scores = jnp.where(jnp.isnan(scores), best, scores)
  return jnp.where(allowed, jnp.where(scores == 0, 0, scores), -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopTokens(BlockSelection):
  """The tokens with the best scores of a lightning indexer, for all heads.

  Attributes:
    q: Queries of the index, [B, T, I, E].
    weights: Weights of the index's heads, with all scales, [B, T, I].
    keys: Keys of the index, [B, S, E].
    count: Most keys that a query reads.
  """

  q: Float[Array, "B T I E"]
  weights: Float[Array, "B T I"]
  keys: Float[Array, "B S E"]
  count: int

  dimensions: ClassVar[Dimensions] = {
    "q": ("B", "T"),
    "weights": ("B", "T"),
    "keys": ("B", "S"),
  }

  @property
  def by_position(self) -> bool:
    return False

  @property
  def block_size(self) -> int:
    return 1

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    del heads, kv_heads
    return 1

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    del mask
    index_q, weights, keys = (
      as_array(f"selection.{name}", getattr(self, name))
      for name in ("q", "weights", "keys")
    )
    check_shape("selection.q", index_q, (*q[:2], None, None), "index queries")
    heads, dims = index_q.shape[2:]
    check_shape("selection.weights", weights, (*q[:2], heads), "head weights")
    if keys.ndim != 3 or keys.shape[0] != q[0] or keys.shape[2] != dims:
      raise ShapeError(
        "selection.keys",
        f"shape {keys.shape}",
        f"[{q[0]}, S, {dims}], one index key for each key",
        "pass the index's keys in the order of `key`",
      )
    if index_q.dtype != keys.dtype:
      raise DtypeError(
        "selection.keys",
        keys.dtype,
        f"{index_q.dtype}, as selection.q has",
        "convert one of them to the other's dtype",
      )
    check_count(self.count, k[1], "keys")

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T 1 n"]:
    b, t, heads, _ = self.q.shape
    size = self.keys.shape[1]
    chunk = max(1, _HEAD_SCORES // (b * heads * size))
    dtype = wide_dtype(self.q.dtype)
    like = self, tokens.q_at, tokens.k_at, tokens.mask
    shape = b, t, self.count
    best = (
      collectives.full(shape, jnp.inf, dtype, like),
      collectives.full(shape, _LAST, jnp.int32, like),
      collectives.full(shape, -1, jnp.int32, like),
    )
    inputs = self.q, self.weights, *tokens.q_at

    def hop(state: tuple, best: tuple) -> tuple:
      keys, pos, seg, number = state
      # By position, so that `top_k` prefers lower positions among equals.
      order = jnp.argsort(pos, -1)
      in_order = lambda x: jnp.take_along_axis(x, order, 1)
      keys = jnp.take_along_axis(keys, order[..., None], 1)
      pos, seg, number = in_order(pos), in_order(seg), number[order]
      by_row = lambda x: jnp.broadcast_to(x, (b, size))
      row = jnp.arange(b)[:, None, None]

      def fold(_: tuple, rows: tuple) -> tuple[tuple, tuple]:
        (q, weights, q_pos, q_seg), (worse, best_pos, best_number) = rows
        dots = product("btie,bse->btis", q, keys)
        weights = weights.astype(dots.dtype)
        scores = product("btis,bti->bts", jnp.maximum(dots, 0), weights)
        q_at = Coords(q_pos[:, :, None], q_seg[:, :, None])
        allowed = visible(tokens.mask, q_at, Coords(pos[:, None], seg[:, None]))
        scores, column = lax.top_k(
          ranked(scores, allowed), min(self.count, size)
        )
        at = jnp.where(scores > -jnp.inf, by_row(pos)[row, column], _LAST)
        merged = (
          jnp.concatenate([worse, -scores], -1),
          jnp.concatenate([best_pos, at], -1),
          jnp.concatenate([best_number, by_row(number)[row, column]], -1),
        )
        merged = lax.sort(merged, num_keys=2)
        return (), tuple(x[..., : self.count] for x in merged)

      return scan_queries(fold, (), (inputs, best), chunk)[1]

    axes = collectives.varying_axes(like)
    state = self.keys, *tokens.k_at, tokens.number
    state = collectives.vary(state, axes)
    inputs = collectives.vary(inputs, axes)
    best = hop(state, best)
    if tokens.axis is not None:
      axis = tokens.axis

      def step(_: Index, carry: tuple) -> tuple:
        state, best = carry
        state = collectives.rotate(state, axis, 1)
        return state, hop(state, best)

      num_shards = collectives.axis_size(axis)
      best = lax.fori_loop(1, num_shards, step, (state, best))[1]
    worse, _, number = best
    return jnp.where(worse < jnp.inf, number, -1)[:, :, None]


tree.register(TopTokens, ("q", "weights", "keys"), ("count",))
