"""Tiles of pages that several running rows share.

Plain NumPy: it compares the tables of the rows, so it needs no tree, and finds
pages that are shared for any reason.
"""

from __future__ import annotations

import numpy as np

from ringjax.ops.attention.cached.pooled import SharedTiles


def shared_tiles(
  table: np.ndarray, ready: np.ndarray, page: int, tile: int, most: int
) -> SharedTiles:
  """Find tiles that at least two rows share, with all tiles before them.

  Args:
    table: Page table, int32 [B, R, m], see `PagePool.call`.
    ready: Number of computed tokens of each row, int [B]; 0 for slots without a
      row.
    page: Number of token slots of a page.
    tile: Number of token slots of a tile, a multiple of `page`.
    most: Maximum number of tiles.

  Returns:
    Arrays on the host; see `SharedTiles`.
  """
  rows, shards, num_pages = table.shape
  tile_pages = tile // page
  row = np.zeros((shards, most), np.int32)
  tile_number = np.zeros((shards, most), np.int32)
  cover = np.zeros((shards, most, rows), bool)
  count = np.zeros(shards, np.int32)
  num_shared = np.zeros((shards, rows), np.int32)
  for shard in range(shards):
    # The last page of tile n is number (n + 1) tile_pages - 1 of this shard.
    last = (
      np.arange(1, num_pages // tile_pages + 1) * tile_pages - 1
    ) * shards + shard
    is_ready = ready[:, None] >= (last[None] + 1) * page
    groups = [np.flatnonzero(is_ready[:, 0])] if is_ready.size else []
    n = 0
    while groups and n < is_ready.shape[1]:
      next_groups = []
      for group in groups:
        alike: dict[bytes, list[int]] = {}
        for b in group:
          pages = table[b, shard, n * tile_pages : (n + 1) * tile_pages]
          if is_ready[b, n] and pages.min() >= 0:
            alike.setdefault(pages.tobytes(), []).append(int(b))
        for sharing in alike.values():
          if len(sharing) > 1 and count[shard] < most:
            at = count[shard]
            row[shard, at], tile_number[shard, at] = sharing[0], n
            cover[shard, at, sharing] = True
            num_shared[shard, sharing] = n + 1
            count[shard] += 1
            next_groups.append(np.asarray(sharing))
      groups, n = next_groups, n + 1
  return SharedTiles(row, tile_number, cover, count, num_shared)
