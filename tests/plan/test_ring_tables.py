"""Tables of the Ring Attention paper, and the formulas behind ours."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from ringjax.errors import OptionError
from ringjax.plan.kv_runahead import ring_tables
from ringjax.plan.kv_runahead.ring_tables import WAYS, TrainedModel


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


SMALL = TrainedModel(
  layers=5, width=64, hidden=160, heads=4, weights=1e6, vocab=300
)


def test_longest_contexts_fill_the_memory():
  for way in WAYS:
    tokens = ring_tables.longest(way, SMALL, devices=4, memory_bytes=1e9)
    need = lambda n, way=way: ring_tables.step_bytes(way, SMALL, n, 4)
    assert need(tokens) <= 1e9 < need(tokens + 1)
  alone = ring_tables.longest(
    "ring", SMALL, devices=4, ring=1, memory_bytes=1e9
  )
  four = ring_tables.longest("ring", SMALL, devices=4, memory_bytes=1e9)
  assert four // 4 == alone
  large = dataclasses.replace(SMALL, weights=1e9)
  assert ring_tables.longest("ring", large, devices=1, memory_bytes=1e9) == 0


def test_what_a_step_holds():
  # By hand: 16 bytes a weight over 4 devices, a layer of 5 gathered, its
  # gradient too; of a token five inputs, 9 + 4 widths, the logits twice.
  states = 16 * 1e6 / 4 + 4 * 2 * 1e6 / 5
  token = 4 * (5 * 64 + 13 * 64 + 2 * 300)
  assert ring_tables.step_bytes("blockwise", SMALL, 7, 4) == states + 7 * token
  # Of a row of 8 a device of 4 has 2, with keys and values that come.
  ring = states + 2 * (token + 4 * 4 * 64)
  assert ring_tables.step_bytes("ring", SMALL, 8, 4) == ring
  whole = states + 7 * (token + 4 * (6 * 160 - 4 * 64))
  assert ring_tables.step_bytes("memory-efficient", SMALL, 7, 4) == whole
  plain = whole + 4 * 2 * 4 * 7**2
  assert ring_tables.step_bytes("plain", SMALL, 7, 4) == plain


def test_contexts_that_are_tried():
  tokens = (0, 1023, 1024, 2047, 2048, 5000, 1 << 20)
  found = [ring_tables.tried(n) for n in tokens]
  assert found == [0, 0, 1024, 1024, 2048, 4096, 1 << 20]


def test_ours_beside_the_paper():
  rows = list(ring_tables.context_rows())
  assert len(rows) == 13
  for row in rows:
    assert list(row.ours) == sorted(row.ours)
    # A ring of all devices, with a little more for what travels.
    assert row.longest[3] > 0.9 * row.devices * row.longest[2]
  ratios = [
    ours / paper
    for row in rows
    for paper, ours in zip(row.published, row.ours, strict=True)
  ]
  # What is said of it; nothing here is fitted to the paper.
  assert (sum(x == 1 for x in ratios), len(ratios)) == (20, 52)
  assert sum(0.5 <= x <= 2 for x in ratios) == 46
  assert min(ratios) >= 0.5 and max(ratios) <= 4


def test_ours_do_not_move_with_what_was_published(monkeypatch):
  given = copy.deepcopy(ring_tables._GIVEN)
  before = list(ring_tables.context_rows()), list(ring_tables.hiding_rows())
  for row in given["contexts"]:
    for model, tokens in row["tokens"].items():
      row["tokens"][model] = [3 * n + k for k, n in enumerate(tokens)]
  for row in given["hides"]:
    row["block"], row["sequence"] = 7 * row["block"], 5 * row["sequence"]
  monkeypatch.setattr(ring_tables, "_GIVEN", given)
  after = list(ring_tables.context_rows()), list(ring_tables.hiding_rows())
  for old, new in zip(*(x[0] for x in (before, after)), strict=True):
    assert old.published != new.published
    plain = dataclasses.replace(new, published=old.published)
    assert plain == old
  for old, new in zip(*(x[1] for x in (before, after)), strict=True):
    assert old.block != new.block and old.sequence != new.sequence
    assert new.our_block == old.our_block
    assert new.our_sequence == old.our_sequence


def test_no_bytes_of_tokens_and_weights_give_the_published_rows():
  """Of three rows: what fits, and that twice as much does not."""
  rows = {(x.machine[:2], x.model): x for x in ring_tables.context_rows()}
  few, many = rows["8x", "7B"], rows["32", "7B"]
  weights = ring_tables.MODELS["7B"].weights
  room = 80e9
  # 2 few m + weights w / 8 > room and many m + weights w / 32 <= room, where
  # many is 4 few: twice the first less the second.
  assert many.published[2] == 4 * few.published[2]
  least = (2 * room - room) / (2 * weights / 8 - weights / 32)
  assert 54 < least < 55
  assert rows["8x", "13B"].published[2] > 0
  assert least * ring_tables.MODELS["13B"].weights / 8 > room


def test_refusals():
  with pytest.raises(OptionError, match="bandwidth"):
    ring_tables.least_block(1e12, 0)
  with pytest.raises(OptionError, match="way"):
    ring_tables.layer_bytes("sparse", 1, 1, 1)
