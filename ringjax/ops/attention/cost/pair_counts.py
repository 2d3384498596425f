"""Numbers of query-key pairs that shards compute with each other's keys.

Guarantees: counts the tiles that the loops of `Blockwise` run, by the same
bounds (`mask.bound`) on the same positions, without arrays as long as the
sequence and without JAX: a cell of tiles of which all or none count is settled
as a whole, another is split in four, down to single tiles.
Cost: bounded for every length. At most `_GROUPS` shards are sampled for all
where a layout makes neighbours alike (striped: 8), and at most `_CELLS` cells
are examined in a round; cells that are then still open count as half of their
tiles and half of a diagonal, which is what a causal mask leaves of a square.

Documents are not known here: `SameSegment` bounds nothing; where the longest
document is known, a window of its length approximates it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from ringjax.ops.mask import And, Everything, Extent, Mask, Or, Prefix
from ringjax.parallel.layout import Layout, Striped

_GROUPS = 256
_CELLS = 1 << 18


def pairs(
  layout: Layout,
  mask: Mask,
  shards: int,
  lengths: tuple[int, int],
  blocks: tuple[int, int],
  offset: int = 0,
) -> Float[np.ndarray, "R R"]:
  """Count pairs in the tiles that count, of shards with shards: float64 [R, R].

  Entry [i, j] is of the queries of shard i and the keys of shard j. A tile that
  reaches beyond a shard's slots counts as a whole, as it is computed.

  Args:
    layout: Layout of both queries and keys.
    mask: Mask over positions.
    shards: Number of shards, R.
    lengths: Tokens of the whole sequences, (T, S).
    blocks: Tile sizes, (q_block, kv_block).
    offset: Position of the first query.
  """
  try:
    hash(mask)
  except TypeError:
    return _pairs(layout, mask, shards, lengths, blocks, offset)
  return _cached(layout, mask, shards, lengths, blocks, offset)


@functools.lru_cache(maxsize=256)
def _cached(*arguments: Any) -> np.ndarray:
  counts = _pairs(*arguments)
  counts.flags.writeable = False
  return counts


def _pairs(
  layout: Layout,
  mask: Mask,
  shards: int,
  lengths: tuple[int, int],
  blocks: tuple[int, int],
  offset: int,
) -> np.ndarray:
  queries = _Side(layout, shards, lengths[0], blocks[0], offset)
  keys = _Side(layout, shards, lengths[1], blocks[1], 0)
  sample = _stand_ins(layout, mask, shards)
  counts = np.zeros((sample.size, sample.size))
  rows = max(1, _CELLS // (4 * sample.size))
  for first in range(0, sample.size, rows):
    sample_rows = np.arange(first, min(first + rows, sample.size))
    q, k = (
      a.reshape(-1) for a in np.meshgrid(sample_rows, np.arange(sample.size))
    )
    _count(counts, mask, queries, keys, sample, q, k)
  nearest = np.abs(np.arange(shards)[:, None] - sample).argmin(1)
  return counts[np.ix_(nearest, nearest)]


class _Side:
  """Tiles of the queries, or those of the keys."""

  def __init__(
    self, layout: Layout, shards: int, length: int, block: int, offset: int
  ):
    self.layout, self.shards, self.offset = layout, shards, offset
    self.local = layout.local_length(length, shards)
    self.block = min(block, self.local)
    self.tiles = -(-self.local // self.block)
    self.real = layout.real_tokens(length, shards)

  def extent(
    self, shard: np.ndarray, start: np.ndarray, stop: np.ndarray
  ) -> Extent:
    low = start * self.block
    high = np.minimum(stop * self.block, self.real[shard])
    at = lambda local: (
      self.offset
      + self.layout.position_of(shard, local, self.shards, self.local)
    )
    has_real = high > low
    first, last = at(low), at(np.maximum(high - 1, low))
    ones = np.ones_like(first)
    # A tile that reaches beyond the real tokens is computed nevertheless.
    no_padding = (stop - 1) * self.block < self.real[shard]
    fields: tuple[Any, ...] = (first, last, ones, ones, has_real, no_padding)
    return Extent(*fields)


def _count(
  counts: np.ndarray,
  mask: Mask,
  queries: _Side,
  keys: _Side,
  sample: np.ndarray,
  q: np.ndarray,
  k: np.ndarray,
) -> None:
  """Add to `counts` the pairs of shards `sample[q]` with `sample[k]`'s keys."""
  zero = np.zeros_like(q)
  cells = (q, k, zero, zero + queries.tiles, zero, zero + keys.tiles)

  def add(cells: tuple, share: float | np.ndarray) -> None:
    q, k, q0, q1, k0, k1 = cells
    tiles = (q1 - q0) * (k1 - k0).astype(float)
    np.add.at(counts, (q, k), tiles * share * queries.block * keys.block)

  while cells[0].size:
    q, k, q0, q1, k0, k1 = cells
    rows = queries.extent(sample[q], q0, q1)
    cols = keys.extent(sample[k], k0, k1)
    any_allowed, all_allowed = bound(mask, rows, cols)
    any_allowed = any_allowed & np.asarray(rows.some & cols.some)
    all_allowed = all_allowed & any_allowed & np.asarray(rows.all & cols.all)
    single = (q1 - q0 == 1) & (k1 - k0 == 1)
    settled = any_allowed & (all_allowed | single)
    add(tuple(c[settled] for c in cells), 1.0)
    q, k, q0, q1, k0, k1 = cells = tuple(
      c[any_allowed & ~settled] for c in cells
    )
    if 4 * q.size > _CELLS:
      longer = np.maximum(q1 - q0, k1 - k0)
      # Of n x n tiles, n (n + 1) / 2 are on or below the diagonal.
      add(cells, (1 + longer / ((q1 - q0) * (k1 - k0))) / 2)
      return
    q_mid, k_mid = (q0 + q1 + 1) // 2, (k0 + k1 + 1) // 2
    quarters = [
      (q, k, a, b, c, d)
      for a, b in ((q0, q_mid), (q_mid, q1))
      for c, d in ((k0, k_mid), (k_mid, k1))
    ]
    joined = tuple(np.concatenate(x) for x in zip(*quarters, strict=True))
    real = (joined[2] < joined[3]) & (joined[4] < joined[5])
    cells = tuple(c[real] for c in joined)


def bound(
  mask: Mask, q: Extent, k: Extent
) -> tuple[Bool[np.ndarray, " ..."], Bool[np.ndarray, " ..."]]:
  """Evaluate `mask.bound` on NumPy arrays, also while JAX traces."""
  if isinstance(mask, And | Or):
    left_bounds, right_bounds = bound(mask.left, q, k), bound(mask.right, q, k)
    join = np.logical_and if isinstance(mask, And) else np.logical_or
    return join(left_bounds[0], right_bounds[0]), join(
      left_bounds[1], right_bounds[1]
    )
  shape = np.broadcast_shapes(np.shape(q.first), np.shape(k.first))
  if isinstance(mask, Everything):
    return np.ones(shape, bool), np.ones(shape, bool)
  if isinstance(mask, Prefix):
    try:
      length = int(np.max(np.asarray(mask.length)))
    except jax.errors.TracerArrayConversionError:
      # Known only when the program runs: any key may be in the prefix.
      return np.ones(shape, bool), np.zeros(shape, bool)
    return (
      np.broadcast_to(np.asarray(k.first) < length, shape),
      np.broadcast_to(np.asarray(k.last) < length, shape),
    )
  with jax.ensure_compile_time_eval():
    any_allowed, all_allowed = mask.bound(q, k)
    return (
      np.broadcast_to(np.asarray(any_allowed), shape),
      np.broadcast_to(np.asarray(all_allowed), shape),
    )


def _stand_ins(layout: Layout, mask: Mask, shards: int) -> np.ndarray:
  """Sampled shards; every other counts as the nearest of them."""
  max_shards = _GROUPS
  if isinstance(layout, Striped) and layout.block * shards <= 1 << 16:
    # Within a tile a shard differs from the next by one row.
    max_shards = 8
  elif None not in mask.reach:
    max_shards = shards
  if shards <= max_shards:
    return np.arange(shards)
  return np.unique(
    np.linspace(0, shards - 1, max_shards).round().astype(np.int64)
  )
