"""Tiles by pooled queries, or by the lines of the last queries (FlexPrefill).

Guarantees: each head decides for a prompt. If the attention of the last block
of queries to blocks of keys is like the attention of their mean to mean keys (a
Jensen-Shannon distance below `tau`), each block of queries reads the tiles
whose pooled attention reaches `gamma`. Else it reads the tiles that vertical
and slash lines cross, which reach `gamma` of the last queries' attention each.
Cost: products of the last queries with all keys, and of pooled ones.

In the paper pooled tiles reach `gamma` in sum over all blocks of queries; here
they do for each block.

Ref: Lai et al. 2025, FlexPrefill, arXiv 2502.20766, algorithms 1 to 3.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ringjax.checks import integer
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
  share,
  tile_bounds,
  tile_extent,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexPrefill(TilePattern):
  """Tiles by pooled attention, or by lines of the last queries.

  Attributes:
    gamma: Part of the estimated attention that is read, 0 to 1; 1 reads all
      tiles.
    tau: Jensen-Shannon distance, 0 to 1, below which a head's tiles are chosen
      by pooled attention; 0: never.
    least_tokens: Number of keys that are chosen at least of each kind of line,
      or of tiles, in tokens.
  """

  gamma: int | float = 0.9
  tau: int | float = 0.1
  least_tokens: int = 1024

  def __post_init__(self) -> None:
    super().__post_init__()
    share("gamma", self.gamma)
    share("tau", self.tau)
    integer("least_tokens", self.least_tokens, least=0)

  @property
  def keeps_all(self) -> bool:
    return self.gamma >= 1

  def prepare(self, x: PromptTiles) -> PyTree:
    block = self.block
    mass = line_mass(x, block, block)
    choose = lambda a: largest_lines(a, self.gamma, self.least_tokens)
    lines = ChosenLines.of(
      x, mass, choose(mass.vertical), choose(mass.slash), block
    )
    pooled = x.gather(block_means(x.k, x.k_at, block), 2)
    return lines, pooled, self._distance(x, mass, pooled) < self.tau

  def choose(
    self, x: PromptTiles, prepared: PyTree, rows: QueryBlocks, estimate: PyTree
  ) -> Bool[Array, "B K G m n"]:
    del estimate
    lines, pooled, by_pooled = prepared
    q = block_means(rows.q, rows.at, self.block)
    s = pooled_scores(x, q, pooled)
    weights = masked_softmax(
      jnp.where(rows.visible[:, None, None], s, -jnp.inf)
    )
    min_tiles = -(-self.least_tokens // self.block)
    tiles = largest_first(weights, rows, self.gamma, min_tiles)
    crossed = lines.crossed(tile_extent(rows.at, self.block))
    return jnp.where(by_pooled[..., None, None], tiles, crossed)

  def _distance(
    self, x: PromptTiles, mass: LineMass, pooled: Float[Array, "B K n H"]
  ) -> Float[Array, "B K G"]:
    """Jensen-Shannon distance of pooled and exact attention to blocks."""
    q, q_at = last_queries(x, self.block)
    any_pairs, _ = tile_bounds(
      x.mask, tile_extent(q_at, self.block), x.tile_extent(self.block)
    )
    s = pooled_scores(x, block_means(q, q_at, self.block), pooled)
    estimate = masked_softmax(jnp.where(any_pairs[:, None, None], s, -jnp.inf))[
      ..., 0, :
    ]
    exact = mass.of_tiles(self.block)
    middle = (exact + estimate) / 2
    kl = lambda p: jnp.sum(
      jnp.where(p > 0, p * jnp.log(p / jnp.where(p > 0, middle, 1)), 0), -1
    )
    divergence = (kl(exact) + kl(estimate)) / 2
    return jnp.sqrt(jnp.maximum(divergence, 0))
