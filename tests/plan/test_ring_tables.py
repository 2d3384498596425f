"""Tables of the Ring Attention paper, and the formulas behind ours."""

from __future__ import annotations

import pytest

from ringjax.errors import OptionError
from ringjax.plan import ring_tables
from ringjax.plan.ring_tables import WAYS


def test_blocks_that_hide_a_hop():
  rows = list(ring_tables.hiding_rows())
  assert len(rows) == 5
  for row in rows:
    # Published with a digit behind the point, of thousands.
    assert row.our_block == pytest.approx(row.block, rel=0.03, abs=50)
    assert row.our_sequence == pytest.approx(row.sequence, rel=0.03)
  # At the smallest block, of width 128, work and hop take the same time.
  row = rows[1]
  c = row.our_block
  work, hop = 4 * c**2 * 128 / row.flops, 4 * c * 128 / row.bandwidth
  assert work == pytest.approx(hop)


def test_bytes_of_a_layer():
  given = dict(rows=3, tokens=500, width=64)
  found = {way: ring_tables.layer_bytes(way, **given) for way in WAYS}
  assert found == {
    "plain": 2 * 3 * 64 * 500**2,
    "memory-efficient": 8 * 3 * 500 * 64,
    "blockwise": 2 * 3 * 500 * 64,
    "ring": 6 * 3 * 500 * 64,
  }


def test_longest_contexts_fill_the_memory():
  sizes = dict(layers=5, width=64, weights=1e6, memory_bytes=1e9)
  room = 1e9 - 16 * 1e6 / 4
  for way in WAYS[:3]:
    tokens = ring_tables.longest(way, devices=4, **sizes)
    need = lambda n, way=way: (
      4 * 5 * 64 * n + 2 * ring_tables.layer_bytes(way, 1, n, 64)
    )
    assert need(tokens) <= room < need(tokens + 1)
  alone = ring_tables.longest("ring", devices=4, ring=1, **sizes)
  assert ring_tables.longest("ring", devices=4, **sizes) == 4 * alone
  assert (
    ring_tables.longest("ring", devices=1, **{**sizes, "weights": 1e9}) == 0
  )


def test_the_order_of_the_paper():
  """Ours is by formula: the same order and growth, no more."""
  rows = list(ring_tables.context_rows())
  assert len(rows) == 13
  for row in rows:
    assert list(row.ours) == sorted(row.ours)
    assert row.ours[3] > 0.6 * row.ring * row.ours[2]
    # What ran is not more than what the formula lets fit.
    assert all(
      paper < 1.05 * ours
      for paper, ours in zip(row.published[1:], row.ours[1:], strict=True)
    )
  first = rows[0]
  assert (first.model, first.ring) == ("3B", 8)


def test_refusals():
  with pytest.raises(OptionError, match="bandwidth"):
    ring_tables.least_block(1e12, 0)
  with pytest.raises(OptionError, match="way"):
    ring_tables.layer_bytes("sparse", 1, 1, 1)
