"""From a dot product to a score, one tile at a time, and back.

Law: for a tile of queries and keys the score is

  s = cap * tanh(scale * q.k / cap) - slope * |p_q - p_k| + bias

(without a soft cap: scale * q.k), and `Context` says which pairs count.
Nothing is held that is T x S but what the caller brought (bias, a boolean
mask). Dropout is a pure function of (seed, head, position of q, position of
k), so it does not know about tiles, layouts, devices or strategies.

Tiles come in two orientations. Forward: [B, K, G, q, k], so that a softmax
row is contiguous. Backward: [B, K, k, G, q], so that no matrix product needs
its left operand transposed. `Orientation` places every operand in either.

Ref: soft cap: Gemma 2, arXiv 2408.00118; ALiBi: arXiv 2108.12409.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringjax.ops.mask import Coords, Mask, visible


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """The static part of the score function."""

  scale: float
  soft_cap: float | None = None
  dropout_rate: float = 0.0


class Terms(NamedTuple):
  """The differentiable extras of the scores; None where absent.

  Fields:
    bias: [B or 1, K or 1, G or 1, T or 1, S or 1]; S counts all keys of the
      sequence, in layout order, T the local queries.
    slopes: [K, G], ALiBi slopes.
    sinks: [K, G], scores of one more key per head, whose value is zero.
  """

  bias: jax.Array | None = None
  slopes: jax.Array | None = None
  sinks: jax.Array | None = None


class Context(NamedTuple):
  """What decides which pairs count; no gradient flows here.

  Fields:
    q: coordinates of the local queries.
    k: coordinates of the local keys.
    mask: predicate over coordinates.
    allow: bool, shaped like `Terms.bias`, or None.
    heads: int32 [K, G], numbers of the query heads (for dropout), or None.
    seed: uint32 [B or 1], dropout seed, or None.
  """

  q: Coords
  k: Coords
  mask: Mask
  allow: jax.Array | None = None
  heads: jax.Array | None = None
  seed: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Orientation:
  """Order of a tile's axes: [B, K, G, q, k], or keys_first [B, K, k, G, q]."""

  keys_first: bool

  def query(self, x: jax.Array) -> jax.Array:
    """[B, q] -> broadcastable to the tile."""
    return (
      x[:, None, None, None] if self.keys_first else x[:, None, None, :, None]
    )

  def key(self, x: jax.Array) -> jax.Array:
    """[B, k] -> broadcastable to the tile."""
    return (
      x[:, None, :, None, None] if self.keys_first else x[:, None, None, None]
    )

  def head_key(self, x: jax.Array) -> jax.Array:
    """[B, K, k] -> broadcastable to the tile."""
    return x[:, :, :, None, None] if self.keys_first else x[:, :, None, None]

  def head(self, x: jax.Array) -> jax.Array:
    """[K, G] -> broadcastable to the tile."""
    return (
      x[None, :, None, :, None]
      if self.keys_first
      else x[None, :, :, None, None]
    )

  def row(self, x: jax.Array) -> jax.Array:
    """[B, K, G, q] -> broadcastable to the tile."""
    return x[:, :, None] if self.keys_first else x[..., None]

  def pair(self, x: jax.Array) -> jax.Array:
    """[B, K, G, q, k] -> the tile's order of axes."""
    return jnp.transpose(x, (0, 1, 4, 2, 3)) if self.keys_first else x

  def unpair(self, x: jax.Array) -> jax.Array:
    """The tile's order of axes -> [B, K, G, q, k]."""
    return jnp.transpose(x, (0, 1, 3, 4, 2)) if self.keys_first else x


@dataclasses.dataclass(frozen=True)
class Tile:
  """One tile of the score matrix: which rows, which columns.

  `q_start` counts local queries, `k_start` keys of the visiting shard;
  `column` is where that shard's keys begin in the whole sequence's order.
  """

  q_start: Any
  k_start: Any
  q_block: int
  k_block: int
  column: Any

  def cut_q(self, x: jax.Array, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, self.q_start, self.q_block, axis)

  def cut_k(self, x: jax.Array, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, self.k_start, self.k_block, axis)

  def corner(self, pair: jax.Array) -> tuple[Any, ...]:
    """Start indices of this tile in a [B|1, K|1, G|1, T|1, S|1] array."""
    zero = jnp.zeros((), jnp.int32)
    return (
      zero,
      zero,
      zero,
      zero if pair.shape[3] == 1 else self.q_start,
      zero if pair.shape[4] == 1 else self.column + self.k_start,
    )

  def cut_pair(self, pair: jax.Array) -> jax.Array:
    sizes = (
      *pair.shape[:3],
      1 if pair.shape[3] == 1 else self.q_block,
      1 if pair.shape[4] == 1 else self.k_block,
    )
    return lax.dynamic_slice(pair, _int32(self.corner(pair)), sizes)


def _int32(index: tuple[Any, ...]) -> tuple[jax.Array, ...]:
  return tuple(jnp.asarray(i, jnp.int32) for i in index)


def scores_of(
  scores: Scores,
  terms: Terms,
  way: Orientation,
  tile: Tile,
  q: Coords,
  k: Coords,
  dot: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
  """(scores, tanh of the soft cap or None) from the raw dot products.

  `q` and `k` are the tile's coordinates.
  """
  s, tanh = dot * _const(scores.scale, dot), None
  if scores.soft_cap is not None:
    tanh = jnp.tanh(s * _const(1 / scores.soft_cap, s))
    s = tanh * _const(scores.soft_cap, s)
  if terms.slopes is not None:
    slopes = way.head(terms.slopes).astype(s.dtype)
    s = s - slopes * distance(way, q, k, s.dtype)
  if terms.bias is not None:
    s = s + way.pair(tile.cut_pair(terms.bias)).astype(s.dtype)
  return s, tanh


def is_plain(scores: Scores, terms: Terms) -> bool:
  """Whether scores are a positive multiple of the dot products."""
  extras = (scores.soft_cap, terms.bias, terms.slopes)
  return scores.scale > 0 and all(x is None for x in extras)


def distance(way: Orientation, q: Coords, k: Coords, dtype: Any) -> jax.Array:
  """|position of q - position of k|, broadcastable to the tile."""
  return jnp.abs(way.query(q.pos) - way.key(k.pos)).astype(dtype)


def allowed_in(
  context: Context, way: Orientation, tile: Tile, q: Coords, k: Coords
) -> jax.Array:
  """Which pairs of the tile count; broadcastable to the tile."""
  place = lambda f, at: Coords(f(at.pos), f(at.seg))
  yes = visible(context.mask, place(way.query, q), place(way.key, k))
  if context.allow is not None:
    yes = yes & way.pair(tile.cut_pair(context.allow))
  return yes


def dropout_weight(
  scores: Scores,
  context: Context,
  way: Orientation,
  q: Coords,
  k: Coords,
  dtype: Any,
) -> jax.Array:
  """0 or 1 / (1 - rate) for each pair of the tile."""
  assert context.seed is not None and context.heads is not None
  return kept(
    scores.dropout_rate,
    context.seed[:, None, None, None, None],
    way.head(context.heads.astype(jnp.uint32)),
    way.query(q.pos.astype(jnp.uint32)),
    way.key(k.pos.astype(jnp.uint32)),
    dtype,
  )


def kept(
  rate: float,
  seed: jax.Array,
  head: jax.Array,
  row: jax.Array,
  column: jax.Array,
  dtype: Any,
) -> jax.Array:
  """0 or 1 / (1 - rate), from uint32 that broadcast to the tile."""
  # Odd constants, so that seed, head and position 0 are nothing special.
  seed = _mix(seed + jnp.uint32(0x9E3779B9))
  head = _mix(head + seed)
  row = _mix(row + head)
  column = _mix(column + jnp.uint32(0x85EBCA77))
  bits = _mix(row ^ column)
  keep = bits >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
  return jnp.where(keep, _const(1 / (1 - rate), dtype), _const(0.0, dtype))


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of uint32 in which every input bit moves every output bit."""
  # MurmurHash3's finaliser.
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _const(value: float, like: Any) -> jax.Array:
  return jnp.asarray(value, getattr(like, "dtype", like))
