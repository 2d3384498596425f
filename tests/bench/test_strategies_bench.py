"""Strategies side by side: right, counted, and beside what was predicted."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ringjax as rj
from benchmarks.attention import strategies
from benchmarks.attention.strategies import StrategyBenchmark, StrategySettings
from ringjax.errors import OptionError
from ringjax.ops.attention.cost.schedule import tile_counts
from ringjax.ops.attention.strategies import nesting
from ringjax.parallel import chips

TINY = StrategySettings(
  machine=next(name for name in chips.MACHINES if "cpu" in name),
  devices=4,
  tokens=(64,),
  heads=4,
  kv_heads=2,
  head_dim=8,
  window=9,
  passes=("fwd",),
  rounds=1,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
  folder = tmp_path_factory.mktemp("strategies")
  StrategyBenchmark.run(
    TINY,
    json=str(folder / "a.json"),
    plot=str(folder / "a.png"),
  )
  picture = (folder / "a.png").read_bytes()
  assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
  return json.loads((folder / "a.json").read_text())


@pytest.mark.slow
def test_every_strategy_is_right_and_timed(result):
  (row,) = result["rows"]
  assert {*row["results"]} == {*TINY.names} >= {"halo", "two_level:2", "ring"}
  for name, one in row["results"].items():
    assert one["reason"] is None, name
    assert one["median_s"] > 0 and one["predicted_s"] > 0
  assert result["complete"] and result["summary"]["rows"]


@pytest.mark.long
def test_hops_and_bytes_are_those_of_the_program(result):
  found = result["rows"][0]["results"]
  block = 2 * 2 * 16 * 8 * 4  # K and V of 2 heads, 16 tokens, float32.
  # In stripes every shard is wanted; the coordinates ride along.
  assert found["ring"]["sent_bytes"] == 3 * (block + 2 * 16 * 4)
  # A window of 9 looks back into one shard: 8 tokens of it.
  assert found["halo"]["sent_bytes"] == (block + 2 * 16 * 4) // 2
  assert found["gather"]["hops"] == 0
  assert found["gather"]["other_bytes"] >= 4 * block
  assert found["ulysses"]["other_bytes"] > 0


def test_scores_are_those_of_the_tiles():
  mask = rj.Causal()
  for layout in (rj.Contiguous(), rj.Striped()):
    tiles = rj.Blockwise(8, 8)
    counts = tile_counts(layout, mask, 4, 128, 8, 8)
    for strategy in (rj.Ring(tiles), rj.RingQ(tiles), rj.Gather(tiles)):
      computed = strategies.scores(strategy, layout, mask, 4, 128, 2)
      assert computed == counts.sum() * 64
  # What one device has of all tokens, in order, is what is needed and halves
  # of tiles on the diagonal.
  alone = strategies.scores(
    rj.Ulysses(rj.Blockwise(8, 8)), rj.Contiguous(), mask, 4, 128, 4
  )
  assert alone == 16 * 17 // 2 * 64
  window = rj.Causal() & rj.Window(9)
  halo = strategies.scores(
    rj.Halo(rj.Blockwise(8, 8)), rj.Contiguous(), window, 4, 128, 2
  )
  q, k = np.arange(128), np.arange(128)
  seen = (k <= q[:, None]) & (q[:, None] - k < 9)
  assert seen.sum() <= halo <= 3 * 16 * 64


def test_pairs():
  for tokens, window in ((7, None), (7, 3), (7, 9)):
    q, k = np.arange(tokens)[:, None], np.arange(tokens)
    seen = (k <= q) & (q - k < (window or tokens))
    case = strategies.StrategyCase(
      dtype="float32",
      head_dim=8,
      tokens=tokens,
      passes="fwd",
      heads=2,
      kv_heads=2,
      window=window,
    )
    assert case.pairs == seen.sum()


@pytest.mark.parametrize(
  "options",
  [
    dict(strategies=("rings",)),
    dict(passes=("bwd",)),
    dict(dtype="float64"),
    dict(rounds=0),
    dict(kv_heads=0),
  ],
)
def test_settings_that_are_none(options):
  with pytest.raises(OptionError):
    StrategySettings(**options)


def test_groups_are_as_large_as_heads_can_share():
  assert nesting.group_of(rj.Ulysses(rj.Ring()), 8, 4) == 4
  assert nesting.group_of(rj.Ulysses(rj.Ring(), inner=2), 8, 4) == 2
  with pytest.raises(OptionError, match="share the heads evenly"):
    nesting.group_of(rj.Ulysses(rj.Ring()), 8, 3)
