"""Score function: from dot products to scores, one tile at a time, and back.

Guarantees: for a tile of queries and keys the score is

  s = cap * tanh(scale * q.k / cap) - slope * |p_q - p_k| + bias

(without a soft cap: scale * q.k), and `Context` decides which pairs count.
No array is T x S except those of the caller (bias, a boolean mask). Dropout is
a pure function of (seed, head, position of q, position of k), independent of
tiles, layouts, devices and strategies.

Tiles come in two orientations. Forward: [B, K, G, q, k], so that a softmax
row is contiguous. Backward: [B, K, k, G, q], so that no matrix product needs
its left operand transposed. `Orientation` places every operand in either.

Ref: soft cap: Gemma 2, arXiv 2408.00118; ALiBi: arXiv 2108.12409.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from ringjax.ops.mask import Coords, Mask, distance, visible
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """Static part of the score function."""

  scale: float
  soft_cap: float | None = None
  dropout_rate: float = 0.0


class Terms(NamedTuple):
  """Differentiable arrays of the score function; None where absent.

  Fields:
    bias: Score bias, [B or 1, K or 1, G or 1, T or 1, S or 1]; S counts all
      keys of the sequence, in layout order, T the local queries.
    slopes: ALiBi slopes, [K, G]; [B, K, G] if they differ.
    sinks: Scores of one more key per head, whose value is zero, [K, G].
    up: Up-projection of latents, [C, N, P + J], where the keys of a call are
      rows of latent attention, see `strategies/latents.py`.
  """

  bias: jax.Array | None = None
  slopes: jax.Array | None = None
  sinks: jax.Array | None = None
  up: jax.Array | None = None


class Context(NamedTuple):
  """Coordinates and masks that decide which pairs count; not differentiable.

  Fields:
    q: Coordinates of the local queries.
    k: Coordinates of the local keys.
    mask: Mask over coordinates.
    allow: Boolean mask, shaped like `Terms.bias`, or None.
    heads: Indices of the query heads (for dropout), int32 [K, G], or None.
    seed: Dropout seed, uint32 [B or 1], or None.
    chosen: Blocks of positions that each query reads, int32 [B, T, M, n],
      -1 for none, for sparse attention; else None.
    number: Index of each local key in the whole sequence, int32 [S], for sparse
      attention; else None.
  """

  q: Coords
  k: Coords
  mask: Mask
  allow: jax.Array | None = None
  heads: jax.Array | None = None
  seed: jax.Array | None = None
  chosen: jax.Array | None = None
  number: jax.Array | None = None


class ScoreArgs(NamedTuple):
  """Score function of a call: everything but queries and keys.

  Fields:
    scores: Static part of the score function.
    terms: Differentiable arrays of it.
    context: Coordinates and masks that decide which pairs count.
    column: Index of the call's first key in the whole sequence, of which bias
      and boolean masks have all columns.
  """

  scores: Scores
  terms: Terms
  context: Context
  column: Index = 0

  @property
  def plain(self) -> bool:
    """Whether scores are a positive multiple of the dot products."""
    extras = (self.scores.soft_cap, self.terms.bias, self.terms.slopes)
    return self.scores.scale > 0 and all(x is None for x in extras)

  def of_keys(self, k: Coords, column: Index) -> ScoreArgs:
    """Replace the keys by others with these coordinates."""
    return self._replace(context=self.context._replace(k=k), column=column)


@dataclasses.dataclass(frozen=True)
class Orientation:
  """Order of a tile's axes: [B, K, G, q, k], or keys_first [B, K, k, G, q]."""

  keys_first: bool

  def query(self, x: Shaped[Array, "B q"]) -> Shaped[Array, "_ _ _ _ _"]:
    """Expand [B, q] to broadcast with the tile."""
    return (
      x[:, None, None, None] if self.keys_first else x[:, None, None, :, None]
    )

  def key(self, x: Shaped[Array, "B k"]) -> Shaped[Array, "_ _ _ _ _"]:
    """Expand [B, k] to broadcast with the tile."""
    return (
      x[:, None, :, None, None] if self.keys_first else x[:, None, None, None]
    )

  def head_key(self, x: Shaped[Array, "B K k"]) -> Shaped[Array, "_ _ _ _ _"]:
    """Expand [B, K, k] to broadcast with the tile."""
    return x[:, :, :, None, None] if self.keys_first else x[:, :, None, None]

  def head(self, x: Shaped[Array, "*B K G"]) -> Shaped[Array, "_ _ _ _ _"]:
    """Expand [K, G] or [B, K, G] to broadcast with the tile."""
    x = x[None] if x.ndim == 2 else x
    return x[:, :, None, :, None] if self.keys_first else x[..., None, None]

  def row(self, x: Shaped[Array, "B K G q"]) -> Shaped[Array, "_ _ _ _ _"]:
    """Expand [B, K, G, q] to broadcast with the tile."""
    return x[:, :, None] if self.keys_first else x[..., None]

  def pair(self, x: Shaped[Array, "B K G q k"]) -> Shaped[Array, "B K _ _ _"]:
    """Transpose [B, K, G, q, k] to the tile's order of axes."""
    return jnp.transpose(x, (0, 1, 4, 2, 3)) if self.keys_first else x

  def unpair(self, x: Shaped[Array, " ..."]) -> Shaped[Array, "_ _ _ _ _"]:
    """Transpose the tile's order of axes to [B, K, G, q, k]."""
    return jnp.transpose(x, (0, 1, 3, 4, 2)) if self.keys_first else x


FORWARD, BACKWARD = Orientation(keys_first=False), Orientation(keys_first=True)


@dataclasses.dataclass(frozen=True)
class ScoreTile:
  """One tile of the score matrix: its rows and columns, and its scores.

  Attributes:
    args: Score function of the call.
    way: Order of the tile's axes.
    q_start: Index of its first query among the local ones.
    k_start: Index of its first key among the call's.
    q_at: Coordinates of its queries, [B or 1, q].
    k_at: Coordinates of its keys, [B or 1, k].
  """

  args: ScoreArgs
  way: Orientation
  q_start: Index
  k_start: Index
  q_at: Coords
  k_at: Coords

  @property
  def q_block(self) -> int:
    return self.q_at.pos.shape[1]

  @property
  def k_block(self) -> int:
    return self.k_at.pos.shape[1]

  def cut_q(self, x: Shaped[Array, " ..."], axis: int) -> Shaped[Array, " ..."]:
    """Slice this tile's queries, which are dimension `axis`."""
    return lax.dynamic_slice_in_dim(x, self.q_start, self.q_block, axis)

  def cut_k(self, x: Shaped[Array, " ..."], axis: int) -> Shaped[Array, " ..."]:
    """Slice this tile's keys, which are dimension `axis`."""
    return lax.dynamic_slice_in_dim(x, self.k_start, self.k_block, axis)

  def corner(
    self, pair: Shaped[Array, "B K G T S"]
  ) -> tuple[Int[Array, ""], ...]:
    """Start indices of this tile in a [B|1, K|1, G|1, T|1, S|1] array."""
    start = (0, 0, 0, self.q_start, self.args.column + self.k_start)
    return tuple(
      jnp.asarray(0 if n == 1 and axis > 2 else first, jnp.int32)
      for axis, (n, first) in enumerate(zip(pair.shape, start, strict=True))
    )

  def cut_pair(
    self, pair: Shaped[Array, "B K G T S"]
  ) -> Shaped[Array, "B K G _ _"]:
    """Slice this tile from such an array."""
    *leading, rows, columns = pair.shape
    sizes = (
      *leading,
      1 if rows == 1 else self.q_block,
      1 if columns == 1 else self.k_block,
    )
    return lax.dynamic_slice(pair, self.corner(pair), sizes)

  def scores_of(
    self, dot: Float[Array, " ..."]
  ) -> tuple[Float[Array, " ..."], Float[Array, " ..."] | None]:
    """Compute (scores, tanh of the soft cap or None) from dot products."""
    scores, terms = self.args.scores, self.args.terms
    s, tanh = dot * _const(scores.scale, dot), None
    if scores.soft_cap is not None:
      tanh = jnp.tanh(s * _const(1 / scores.soft_cap, s))
      s = tanh * _const(scores.soft_cap, s)
    if terms.slopes is not None:
      slopes = self.way.head(terms.slopes).astype(s.dtype)
      s = s - slopes * self.distance(s.dtype)
    if terms.bias is not None:
      s = s + self.way.pair(self.cut_pair(terms.bias)).astype(s.dtype)
    return s, tanh

  def distance(self, dtype: DTypeLike) -> Shaped[Array, " ..."]:
    """Distance of the positions of q and k, broadcastable to the tile."""
    way = self.way
    return distance(way.query(self.q_at.pos), way.key(self.k_at.pos), dtype)

  def allowed(self) -> Bool[Array, " ..."]:
    """Mark the pairs of the tile that count; broadcastable to the tile."""
    context, way = self.args.context, self.way
    expand = lambda f, at: Coords(f(at.pos), f(at.seg))
    q, k = expand(way.query, self.q_at), expand(way.key, self.k_at)
    allowed_pairs = visible(context.mask, q, k)
    if context.allow is not None:
      allowed_pairs = allowed_pairs & way.pair(self.cut_pair(context.allow))
    return allowed_pairs

  def dropout_weight(self, dtype: DTypeLike) -> Float[Array, " ..."]:
    """Dropout weight of each pair of the tile: 0 or 1 / (1 - rate)."""
    context, way = self.args.context, self.way
    assert context.seed is not None and context.heads is not None
    return dropout_weights(
      self.args.scores.dropout_rate,
      context.seed[:, None, None, None, None],
      way.head(context.heads.astype(jnp.uint32)),
      way.query(self.q_at.pos.astype(jnp.uint32)),
      way.key(self.k_at.pos.astype(jnp.uint32)),
      dtype,
    )


def dropout_weights(
  rate: float,
  seed: UInt[Array, " ..."],
  head: UInt[Array, " ..."],
  row: UInt[Array, " ..."],
  column: UInt[Array, " ..."],
  dtype: DTypeLike,
) -> Float[Array, " ..."]:
  """Draw 0 or 1 / (1 - rate), from uint32 that broadcast to the tile."""
  # Odd constants, so that seed, head and position 0 are not special.
  seed = mixed_bits(seed + jnp.uint32(0x9E3779B9))
  head = mixed_bits(head + seed)
  row = mixed_bits(row + head)
  column = mixed_bits(column + jnp.uint32(0x85EBCA77))
  bits = mixed_bits(row ^ column)
  keep = bits >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
  return jnp.where(keep, _const(1 / (1 - rate), dtype), _const(0.0, dtype))


def mixed_bits(x: UInt[Array, " ..."]) -> UInt[Array, " ..."]:
  """A bijection of uint32 in which every input bit moves every output bit."""
  # MurmurHash3's finaliser.
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _const(value: float, like: DTypeLike) -> jax.Array:
  return jnp.asarray(value, getattr(like, "dtype", like))
