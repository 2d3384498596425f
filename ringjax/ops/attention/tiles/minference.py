"""A given number of tiles, in the shape that fits each head (MInference).

Guarantees: a block of queries reads the tiles of one of three shapes: the first
tokens and a window ("a_shape"), the tiles that the heaviest vertical and slash
lines of the last queries cross ("vertical_slash"), or the tiles with the
largest pooled attention ("blocks"). With `shape="auto"` each head of a prompt
takes the shape whose tiles hold the most attention of the last queries; of
shapes within .01 of each other the one with the fewest tiles.
Cost: products of the last 64 queries with all keys, and of pooled ones. The
tiles of a block of queries do not grow with the prompt.

In the paper the shape of each head is searched for once, on a prompt that
stands for all others; here it is chosen for the prompt in hand.

Ref: Jiang et al. 2024, MInference 1.0, arXiv 2407.02490, algorithms 1 to 4.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax.checks import integer, one_of
from ringjax.ops.attention.tiles.lines import (
  ChosenLines,
  LineMass,
  largest_lines,
  line_mass,
)
from ringjax.ops.attention.tiles.pooled_blocks import (
  block_means,
  masked_softmax,
  pooled_scores,
)
from ringjax.ops.attention.tiles.tile_pattern import (
  PromptTiles,
  QueryBlocks,
  TilePattern,
  largest_first,
  last_queries,
  required_tiles,
  tile_bounds,
  tile_extent,
)

# Shapes that a head can have, in the order of `MInference._shapes`.
SHAPES = ("a_shape", "vertical_slash", "blocks")
# Queries whose attention is measured.
_LAST = 64
# Attention by which two shapes are taken for equal.
_EQUAL = 0.01


class _Prepared(NamedTuple):
  """Arrays of a call.

  Fields:
    lines: Chosen vertical and slash lines.
    pooled: Mean keys of the tiles.
    shape: Index of each head's shape in `SHAPES`.
  """

  lines: ChosenLines
  pooled: Float[Array, "B K n H"]
  shape: Int[Array, "B K G"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MInference(TilePattern):
  """A given number of tiles, in the shape that fits each head.

  Attributes:
    shape: "a_shape", "vertical_slash" or "blocks" for all heads, or "auto".
    first: Number of first tokens of "a_shape".
    window: Number of last tokens of "a_shape".
    vertical: Number of vertical lines.
    slash: Number of slash lines.
    tokens: Number of keys of "blocks", in whole tiles.
  """

  shape: str = "auto"
  first: int = 1024
  window: int = 4096
  vertical: int = 1000
  slash: int = 6096
  tokens: int = 6400

  def __post_init__(self) -> None:
    super().__post_init__()
    one_of("shape", self.shape, ("auto", *SHAPES))
    for name in ("first", "window", "vertical", "slash", "tokens"):
      integer(name, getattr(self, name), least=0)

  @property
  def keeps_all(self) -> bool:
    return False

  def prepare(self, x: PromptTiles) -> PyTree:
    mass = line_mass(x, _LAST, self.block)
    lines = ChosenLines.of(
      x,
      mass,
      largest_lines(mass.vertical, None, self.vertical),
      largest_lines(mass.slash, None, self.slash),
      self.block,
    )
    pooled = x.gather(block_means(x.k, x.k_at, self.block), 2)
    if self.shape == "auto":
      shape = self._best_shape(x, mass, lines, pooled)
    else:
      shape = jnp.full(x.q.shape[:3], SHAPES.index(self.shape), jnp.int32)
    return _Prepared(lines, pooled, shape)

  def choose(
    self, x: PromptTiles, prepared: PyTree, rows: QueryBlocks, estimate: PyTree
  ) -> Bool[Array, "B K G m n"]:
    del estimate
    lines, pooled, shape = prepared
    tiles = self._shapes(x, lines, pooled, rows, self.block)
    return jnp.take_along_axis(tiles, shape[None, ..., None, None], 0)[0]

  def _shapes(
    self,
    x: PromptTiles,
    lines: ChosenLines,
    pooled: Float[Array, "B K n H"],
    rows: QueryBlocks,
    size: int,
  ) -> Bool[Array, "3 B K G m n"]:
    """Tiles of the three shapes, for blocks of `size` queries."""
    q_extent = tile_extent(rows.at, size)
    s = pooled_scores(x, block_means(rows.q, rows.at, size), pooled)
    weights = masked_softmax(
      jnp.where(rows.visible[:, None, None], s, -jnp.inf)
    )
    blocks = largest_first(weights, rows, 0.0, -(-self.tokens // self.block))
    k_first, k_last = (
      a[:, None] for a in (lines.k_extent.first, lines.k_extent.last)
    )
    no_tile = jnp.iinfo(jnp.int32).max
    start = jnp.where(rows.visible, k_first, no_tile).min(2, keepdims=True)
    a_shape = (k_first - start < self.first) | (
      q_extent.first[:, :, None] - k_last < self.window
    )
    a_shape = jnp.broadcast_to(a_shape[:, None, None], blocks.shape)
    return jnp.stack([a_shape, lines.crossed(q_extent), blocks])

  def _best_shape(
    self,
    x: PromptTiles,
    mass: LineMass,
    lines: ChosenLines,
    pooled: Float[Array, "B K n H"],
  ) -> Int[Array, "B K G"]:
    """Shape of each head that holds the most of the last queries' attention."""
    q, q_at = last_queries(x, _LAST)
    q_extent, k_extent = tile_extent(q_at, _LAST), lines.k_extent
    any_pairs, _ = tile_bounds(x.mask, q_extent, k_extent)
    required = required_tiles(any_pairs, q_extent, k_extent)
    rows = QueryBlocks(q, q_at, any_pairs, required)
    tiles = self._shapes(x, lines, pooled, rows, _LAST)
    # Of the only block of queries, [3, B, K, G, n].
    heads = lambda a: a[None, :, None, None, 0]
    tiles = (tiles[..., 0, :] & heads(any_pairs)) | heads(required)
    attention = mass.of_tiles(self.block)[None]
    reached = jnp.sum(jnp.where(tiles, attention, 0), -1)
    count = jnp.sum(tiles, -1, dtype=jnp.int32)
    best = reached >= reached.max(0, keepdims=True) - _EQUAL
    count = jnp.where(best, count, jnp.iinfo(jnp.int32).max)
    return jnp.argmin(count, 0).astype(jnp.int32)
