"""Tiles by sums of antidiagonals of products (XAttention).

Guarantees: a block of queries reads the smallest set of tiles whose estimated
attention reaches `threshold`, its own and the first tile among them. The score
of a square of `stride` queries and keys is the mean of its antidiagonal, so
that each query and each key counts once; the softmax over the squares that the
mask shows gives a tile's attention as the sum over its squares.
Cost: 1 / stride of the products of queries and keys.
Memory: scores of some blocks of queries and 1 / stride of the keys.

Ref: Xu et al. 2025, XAttention, arXiv 2503.16428, algorithm 1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import loop, product
from ringjax.ops.attention.tiles.tile_pattern import (
  PromptTiles,
  QueryBlocks,
  TilePattern,
  largest_first,
  share,
  tile_bounds,
  tile_extent,
  without_padding,
)
from ringjax.ops.mask import Extent
from ringjax.ops.softmax import finite_max, wide_dtype
from ringjax.parallel import collectives

# Blocks of keys whose squares are multiplied at once.
_COLUMNS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class XAttention(TilePattern):
  """Tiles with the largest sums of antidiagonals.

  Attributes:
    threshold: Part of the estimated attention that is read, 0 to 1; 1 reads
      all tiles.
    stride: Number of queries and keys of a square, of which the antidiagonal
      is summed; it divides the block.
  """

  threshold: int | float = 0.9
  stride: int = 8

  def __post_init__(self) -> None:
    super().__post_init__()
    share("threshold", self.threshold)
    positive_int("stride", self.stride)
    if self.block % self.stride:
      raise OptionError(
        "stride",
        self.stride,
        f"a number that divides block={self.block}",
        "pass stride=8 or stride=16",
      )

  @property
  def keeps_all(self) -> bool:
    return self.threshold >= 1

  def keys(self, x: PromptTiles) -> PyTree:
    k = without_padding(x.k, x.k_at)
    squares = k.reshape(*k.shape[:2], -1, self.stride * k.shape[3])
    return squares, tile_extent(x.k_at, self.stride)

  def choose(
    self, x: PromptTiles, prepared: PyTree, rows: QueryBlocks, estimate: PyTree
  ) -> Bool[Array, "B K G m n"]:
    del x, prepared
    top, part = estimate
    largest = finite_max(jnp.max(top, -1, keepdims=True))
    weights = part * jnp.exp(top - largest)
    total = jnp.sum(weights, -1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    per_block, tiles = self.block // self.stride, weights.shape[-1]
    shape = *weights.shape[:3], -1, per_block, tiles
    mass = jnp.sum(weights.reshape(shape), 4)
    return largest_first(mass, rows, self.threshold)

  def estimate(
    self, x: PromptTiles, keys: PyTree, rows: QueryBlocks
  ) -> tuple[Float[Array, "B K G r n"], Float[Array, "B K G r n"]]:
    """Largest score of each row of squares in each tile, and sums of weights.

    The weights are relative to the largest score.
    """
    k_squares, k_extent = keys
    stride, per_block = self.stride, self.block // self.stride
    q = without_padding(rows.q, rows.at)
    # The queries of a square in reverse order meet its antidiagonal.
    q = q.reshape(*q.shape[:3], -1, stride, q.shape[4])[..., ::-1, :]
    q = q.reshape(*q.shape[:4], -1)
    q_extent = tile_extent(rows.at, stride)
    b, kv_heads, group, r, _ = q.shape
    tiles = rows.visible.shape[2]
    columns = min(_COLUMNS, tiles)
    scale = jnp.asarray(x.scores.scale / stride, wide_dtype(q.dtype))

    def add(n: jax.Array, sums: tuple) -> tuple:
      # The last columns begin early rather than end late.
      first = jnp.minimum(n * columns, tiles - columns)
      cut = lambda a, axis: lax.dynamic_slice_in_dim(
        a, first * per_block, columns * per_block, axis
      )
      s = product("bkgqh,bkth->bkgqt", q, cut(k_squares, 2)) * scale
      if x.scores.soft_cap is not None:
        s = x.scores.soft_cap * jnp.tanh(s / x.scores.soft_cap)
      k_at = Extent(*(cut(a, 1) for a in k_extent))
      any_pairs, _ = tile_bounds(x.mask, q_extent, k_at)
      s = jnp.where(any_pairs[:, None, None], s, -jnp.inf)
      s = s.reshape(b, kv_heads, group, r, columns, per_block)
      top = jnp.max(s, -1)
      part = jnp.sum(jnp.exp(s - finite_max(top)[..., None]), -1)
      put = lambda all_, new: lax.dynamic_update_slice_in_dim(
        all_, new, first, 4
      )
      return put(sums[0], top), put(sums[1], part)

    shape, like = (b, kv_heads, group, r, tiles), (q, k_squares, rows)
    start = (
      collectives.full(shape, -jnp.inf, scale.dtype, like),
      collectives.zeros(shape, scale.dtype, like),
    )
    seen = jnp.any(rows.visible, (0, 1))
    last = jnp.max(jnp.where(seen, jnp.arange(tiles, dtype=jnp.int32) + 1, 0))
    return loop(-(-last // columns), add, start)
