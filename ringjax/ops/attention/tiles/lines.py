"""ChosenLines of keys that the last queries of a prompt attend to.

A vertical line is a key, which all later queries read; a slash line is a
distance, at which each query reads one key. A tile is read if a chosen line
crosses it.

Guarantees: lines are measured at each row's last real queries, whatever its
padding. Positions decide distances.
Cost: products of the last queries with all keys.
Memory: scores of the last queries of one kv head's query heads. Over a sharded
sequence the sums of all keys, 4 bytes for each key and query head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.tiles.tile_pattern import (
  PromptTiles,
  last_queries,
)
from ringjax.ops.mask import Coords, Extent, visible
from ringjax.ops.softmax import finite_max
from ringjax.parallel import collectives


class LineMass(NamedTuple):
  """Attention of the last queries by lines.

  Fields:
    vertical: Sum over the queries at each key, [B, K, G, S].
    slash: Sum at each distance, [B, K, G, S + c] for c queries.
    nearest: Distance that is first in `slash`, int32 [B].
    queries: Number of queries in the sums, int32 [B].
  """

  vertical: Float[Array, "B K G S"]
  slash: Float[Array, "B K G O"]
  nearest: Int[Array, " B"]
  queries: Int[Array, " B"]

  def of_tiles(self, block: int) -> Float[Array, "B K G n"]:
    """Mean attention of the queries to each tile of `block` keys."""
    sums = self.vertical
    sums = sums.reshape(*sums.shape[:3], -1, block).sum(-1)
    count = jnp.maximum(self.queries, 1)[:, None, None, None]
    return sums / count.astype(sums.dtype)


def line_mass(x: PromptTiles, count: int, block: int) -> LineMass:
  """Measure the lines of a call by the last `count` queries of each row."""
  q, q_at = last_queries(x, count)
  b, _, group, _, _ = q.shape
  keys = x.k.shape[2] * (1 if x.shards is None else x.shards.size)
  column = lambda a: Coords(*(c[:, :, None] for c in a))
  row = lambda a: Coords(*(c[:, None] for c in a))
  seen = visible(x.mask, column(q_at), row(x.k_at))
  distance = q_at.pos[:, :, None] - x.k_at.pos[:, None]
  no_distance = jnp.iinfo(jnp.int32).max
  nearest = jnp.min(jnp.where(seen, distance, no_distance), (1, 2))
  nearest = -x.largest(-nearest)
  nearest = jnp.where(nearest == no_distance, 0, nearest)
  size = keys + count
  line = jnp.clip(distance - nearest[:, None, None], 0, size - 1)

  def of_head(operands: tuple[jax.Array, jax.Array]) -> tuple:
    q, k = operands
    s = product("bgqh,bth->bgqt", q, k)
    s = s * jnp.asarray(x.scores.scale, s.dtype)
    if x.scores.soft_cap is not None:
      s = x.scores.soft_cap * jnp.tanh(s / x.scores.soft_cap)
    s = jnp.where(seen[:, None], s, -jnp.inf)
    top = x.largest(jnp.max(s, -1, keepdims=True))
    p = jnp.exp(s - finite_max(top))
    total = x.total(jnp.sum(p, -1, keepdims=True))
    p = p / jnp.where(total == 0, 1, total)
    zeros = collectives.zeros((b, group, size), p.dtype, (q, k, line))
    add = jax.vmap(
      jax.vmap(lambda sums, p, at: sums.at[at].add(p), (0, 0, None)), (0, 0, 0)
    )
    return jnp.sum(p, 2), x.total(add(zeros, p, line))

  by_head = lambda a: jnp.moveaxis(a, 1, 0)
  vertical, slash = lax.map(of_head, (by_head(q), by_head(x.k)))
  vertical = jnp.moveaxis(vertical, 0, 1)
  by_tile = vertical.reshape(*vertical.shape[:3], -1, block)
  return LineMass(
    x.gather(by_tile, 3).reshape(*vertical.shape[:3], -1),
    jnp.moveaxis(slash, 0, 1),
    nearest,
    jnp.sum(q_at.seg != 0, 1, dtype=jnp.int32),
  )


def largest_lines(
  mass: Float[Array, "*B n"], part: float | None, count: int
) -> Bool[Array, "*B n"]:
  """Choose the lines with the most attention.

  Args:
    mass: Attention of each line.
    part: Part of the attention that they reach; None: `count` lines.
    count: Number of lines, at least, of those with any attention.
  """
  order = jnp.argsort(-mass, -1)
  ordered = jnp.take_along_axis(mass, order, -1)
  number = jnp.arange(mass.shape[-1]).reshape((1,) * (mass.ndim - 1) + (-1,))
  chosen = number < count
  if part is not None:
    mass_before = jnp.cumsum(ordered, -1) - ordered
    chosen |= mass_before < part * jnp.sum(ordered, -1, keepdims=True)
  # ChosenLines that are no numbers are chosen: the result is no number either.
  chosen = (chosen & (ordered > 0)) | jnp.isnan(ordered)
  return jnp.take_along_axis(chosen, jnp.argsort(order, -1), -1)


class ChosenLines(NamedTuple):
  """Chosen lines, in a form in which a tile is looked up.

  Fields:
    columns: Tiles of keys with a vertical line, bool [B, K, G, n].
    slashes: Number of slash lines before each distance, int32 [B, K, G, O + 1].
    nearest: Distance of the first of these, int32 [B].
    k_extent: Coordinates of the tiles of keys, [B, n].
  """

  columns: Bool[Array, "B K G n"]
  slashes: Int[Array, "B K G O"]
  nearest: Int[Array, " B"]
  k_extent: Extent

  @classmethod
  def of(
    cls,
    x: PromptTiles,
    mass: LineMass,
    vertical: Bool[Array, "B K G S"],
    slash: Bool[Array, "B K G O"],
    block: int,
  ) -> ChosenLines:
    """Prepare chosen lines for tiles of `block` tokens."""
    columns = vertical.reshape(*vertical.shape[:3], -1, block).any(-1)
    counts = jnp.cumsum(slash.astype(jnp.int32), -1)
    counts = jnp.pad(counts, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return cls(columns, counts, mass.nearest, x.tile_extent(block))

  def crossed(self, q: Extent) -> Bool[Array, "B K G m n"]:
    """Tiles that a line crosses, for blocks of queries with extents [B, m]."""
    size = self.slashes.shape[-1] - 1
    start = self.nearest[:, None, None]
    k = self.k_extent
    first = q.first[:, :, None] - k.last[:, None] - start
    last = q.last[:, :, None] - k.first[:, None] - start
    b, m, n = first.shape
    take = lambda at: jnp.take_along_axis(
      self.slashes,
      at.reshape(b, 1, 1, m * n),
      -1,
    ).reshape(*self.slashes.shape[:3], m, n)
    # The last line stands for all distances from there on.
    first = jnp.clip(first, 0, size - 1)
    crossed = take(jnp.clip(last + 1, 0, size)) > take(first)
    return crossed | self.columns[:, :, :, None]
