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
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ringjax.checks import integer
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.tiles.lines import (
  ChosenLines,
  LineMass,
  largest_lines,
  line_mass,
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
  without_padding,
)
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import finite_max, wide_dtype


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
    mass = line_mass(x, block)
    choose = lambda a: largest_lines(a, self.gamma, self.least_tokens)
    lines = ChosenLines.of(
      x, mass, choose(mass.vertical), choose(mass.slash), block
    )
    pooled = _mean(x.k, x.k_at, block)
    return lines, pooled, self._distance(x, mass, pooled) < self.tau

  def choose(
    self, x: PromptTiles, prepared: PyTree, rows: QueryBlocks
  ) -> Bool[Array, "B K G m n"]:
    lines, pooled, by_pooled = prepared
    q = _mean(rows.q, rows.at, self.block)
    s = _scores(x, q, pooled)
    weights = _softmax(jnp.where(rows.visible[:, None, None], s, -jnp.inf))
    min_tiles = -(-self.least_tokens // self.block)
    tiles = largest_first(weights, rows, self.gamma, min_tiles)
    crossed = lines.crossed(tile_extent(rows.at, self.block))
    return jnp.where(by_pooled[..., None, None], tiles, crossed)

  def _distance(
    self, x: PromptTiles, mass: LineMass, pooled: Float[Array, "B K n H"]
  ) -> Float[Array, "B K G"]:
    """Jensen-Shannon distance of pooled and exact attention to blocks."""
    q, at, real = last_queries(x, self.block)
    pos, seg = (jnp.take_along_axis(a, at, 1) for a in x.q_at)
    q_at = Coords(pos, jnp.where(real, seg, 0))
    any_pairs, _ = tile_bounds(
      x.mask, tile_extent(q_at, self.block), tile_extent(x.k_at, self.block)
    )
    s = _scores(x, _mean(q, q_at, self.block), pooled)
    estimate = _softmax(jnp.where(any_pairs[:, None, None], s, -jnp.inf))[
      ..., 0, :
    ]
    vertical = mass.vertical
    exact = vertical.reshape(*vertical.shape[:3], -1, self.block).sum(-1)
    count = jnp.maximum(mass.queries, 1)[:, None, None, None]
    exact = exact / count.astype(exact.dtype)
    middle = (exact + estimate) / 2
    kl = lambda p: jnp.sum(
      jnp.where(p > 0, p * jnp.log(p / jnp.where(p > 0, middle, 1)), 0), -1
    )
    divergence = (kl(exact) + kl(estimate)) / 2
    return jnp.sqrt(jnp.maximum(divergence, 0))


def _mean(
  x: Float[Array, "B *heads T H"], at: Coords, block: int
) -> Float[Array, "B *heads n H"]:
  """Means of blocks of vectors, without padding."""
  x = without_padding(x, at).astype(wide_dtype(x.dtype))
  sums = x.reshape(*x.shape[:-2], -1, block, x.shape[-1]).sum(-2)
  count = (at.seg != 0).reshape(at.seg.shape[0], -1, block).sum(-1)
  shape = count.shape[0], *(1,) * (sums.ndim - 3), count.shape[1], 1
  return sums / jnp.maximum(count, 1).reshape(shape).astype(sums.dtype)


def _scores(
  x: PromptTiles, q: Float[Array, "B K G m H"], k: Float[Array, "B K n H"]
) -> Float[Array, "B K G m n"]:
  """Scores of pooled queries and keys."""
  s = product("bkgqh,bkth->bkgqt", q, k)
  s = s * jnp.asarray(x.scores.scale, s.dtype)
  if x.scores.soft_cap is not None:
    s = x.scores.soft_cap * jnp.tanh(s / x.scores.soft_cap)
  return s


def _softmax(s: Float[Array, "*B n"]) -> Float[Array, "*B n"]:
  """Softmax that is 0 where no key is seen."""
  p: Any = jnp.exp(s - finite_max(jnp.max(s, -1, keepdims=True)))
  total: jax.Array = jnp.sum(p, -1, keepdims=True)
  return p / jnp.where(total == 0, 1, total)
