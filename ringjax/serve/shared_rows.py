"""Which tiles of pages several running rows have in common.

Plain NumPy: it compares the tables of the rows, so it needs no tree, and finds
what was shared for whatever reason.
"""

from __future__ import annotations

import numpy as np

from ringjax.ops.attention.pooled import SharedTiles


def shared_tiles(
  table: np.ndarray, ready: np.ndarray, page: int, tile: int, most: int
) -> SharedTiles:
  """The tiles that at least two rows share, with all tiles before them.

  Args:
    table: int32 [B, R, m], see `PagePool.call`.
    ready: int [B], tokens of each row that are computed; 0 where there is none.
    page: slots of a page.
    tile: slots of a tile, a multiple.
    most: how many tiles there may be.

  Returns:
    arrays on the host; see `SharedTiles`.
  """
  rows, shards, many = table.shape
  each = tile // page
  row = np.zeros((shards, most), np.int32)
  which = np.zeros((shards, most), np.int32)
  cover = np.zeros((shards, most, rows), bool)
  count = np.zeros(shards, np.int32)
  done = np.zeros((shards, rows), np.int32)
  for shard in range(shards):
    # The last page of a tile is number (n + 1) each - 1 of this shard.
    last = (np.arange(1, many // each + 1) * each - 1) * shards + shard
    whole = ready[:, None] >= (last[None] + 1) * page
    groups = [np.flatnonzero(whole[:, 0])] if whole.size else []
    n = 0
    while groups and n < whole.shape[1]:
      after = []
      for group in groups:
        alike: dict[bytes, list[int]] = {}
        for b in group:
          pages = table[b, shard, n * each : (n + 1) * each]
          if whole[b, n] and pages.min() >= 0:
            alike.setdefault(pages.tobytes(), []).append(int(b))
        for found in alike.values():
          if len(found) > 1 and count[shard] < most:
            at = count[shard]
            row[shard, at], which[shard, at] = found[0], n
            cover[shard, at, found] = True
            done[shard, found] = n + 1
            count[shard] += 1
            after.append(np.asarray(found))
      groups, n = after, n + 1
  return SharedTiles(row, which, cover, count, done)
