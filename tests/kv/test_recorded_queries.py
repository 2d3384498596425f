"""Recorded queries against lists of them, row by row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.kv.eviction.recorded_queries import Noted, QueryWatch
from ringjax.ops.mask import Coords

LAYERS, WINDOW = 2, 6


def started():
  empty = jnp.zeros((2, WINDOW), jnp.int32)
  newest = jnp.zeros((LAYERS, 2, WINDOW, 1, 2), jnp.float32)
  return QueryWatch(at=Coords(empty, empty), source=empty), Noted(newest=newest)


def query(layer, pos):
  """A query that tells its layer and its position."""
  return np.stack([100.0 * (layer + 1) + pos, -1.0 * pos], -1)[..., None, :]


def call(watch, noted, pos, seg):
  at = Coords(jnp.asarray(pos, jnp.int32), jnp.asarray(seg, jnp.int32))
  watch = watch.started(at, sharded=False, from_empty=False)
  for layer in range(LAYERS):
    rotated = lambda layer=layer: jnp.asarray(query(layer, np.asarray(pos)))
    noted = watch.note(noted, jnp.int32(layer), rotated, rotated, False)
  return watch, noted


def recorded(watch, noted):
  """Positions of each row's queries, in the order in which they came."""
  order = watch.order(WINDOW)
  seg, pos = (
    np.take_along_axis(np.asarray(x), np.asarray(order), 1)
    for x in (watch.at.seg, watch.at.pos)
  )
  newest = np.asarray(noted.ordered(order).newest)
  rows = []
  for row in range(2):
    is_real = seg[row] > 0
    # Empty places come first.
    assert np.array_equal(is_real, np.sort(is_real))
    for layer in range(LAYERS):
      want = query(layer, pos[row, is_real].astype(np.float32))
      assert np.array_equal(newest[layer, row, is_real], want)
    rows.append([int(x) for x in pos[row, is_real]])
  return rows


@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 4, 2), (9, 1, 2)])
def test_the_newest_are_kept_in_order_and_in_place(sizes):
  """The second row gets every other token; a call's tokens come reversed."""
  watch, noted = started()
  lists, begin = [[], []], 0
  for size in sizes:
    pos = np.arange(begin, begin + size)[::-1]
    begin += size
    seg = np.stack([np.ones(size, int), pos % 2])
    before = np.asarray(watch.at.pos), np.asarray(watch.at.seg)
    watch, noted = call(watch, noted, np.stack([pos, pos]), seg)
    for row in range(2):
      lists[row] += sorted(int(x) for x in pos[seg[row] > 0])
      lists[row] = lists[row][-WINDOW:]
      stays = np.isin(before[0][row], lists[row]) & (before[1][row] > 0)
      after = np.asarray(watch.at.pos)[row]
      assert np.array_equal(after[stays], before[0][row][stays])
    watch = watch.committed()
    assert watch.places is None
    assert recorded(watch, noted) == lists


def test_refused_drafts_free_their_places():
  watch, noted = started()
  rows = lambda *pos: np.stack([pos, pos])
  watch, noted = call(watch, noted, rows(0, 1, 2), np.ones((2, 3), int))
  watch = watch.committed()
  watch, noted = call(watch, noted, rows(3, 4), np.ones((2, 2), int))
  watch = watch.keep_queries(np.array([[True, False], [True, True]]))
  watch = watch.committed()
  assert recorded(watch, noted) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
  watch = watch.truncated(jnp.asarray([2, 5]))
  watch, noted = call(watch, noted, rows(5, 6), np.ones((2, 2), int))
  assert recorded(watch, noted) == [[0, 1, 5, 6], [1, 2, 3, 4, 5, 6]]
