"""Partitions: the closed form, the search, rounding, tables, the rules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import cost, profiles
from ringjax.plan.cost import Prompt
from ringjax.plan.kv_runahead import balance, grid, partition, schedules
from ringjax.plan.kv_runahead.table import PartitionTable, TableKey

A100 = profiles.STATED["llama7b-a100"]
FAST = Link(bandwidth=300e9)
KEY = TableKey(model="m", hardware="h", ranks=2, bandwidth=1e9)
TABLE = PartitionTable(KEY, {100: (0.6, 0.4), 200: (0.8, 0.2)})


def near(a, b, tol=1e-9):
  return np.allclose(a, b, rtol=tol, atol=0)


# ---------------------------------------------------------------------------
# Closed form
# ---------------------------------------------------------------------------


@pytest.mark.long
@given(
  st.integers(1, 100_000),
  st.integers(1, 9),
  st.sampled_from([0, 1000]),
  st.sampled_from([None, 1, 700]),
  st.sampled_from(cost.KERNELS),
  st.sampled_from([(7.7e-5, 2e-8), (0.0, 1.0), (1.0, 0.0)]),
)
@settings(max_examples=20)
def test_balanced_ranks_compute_equally_long(
  tokens, ranks, prefix, window, kernel, ab
):
  profile = dataclasses.replace(
    A100, token_s=ab[0], pair_s=ab[1], kernel=kernel
  )
  prompt = Prompt(tokens=tokens, prefix=prefix, window=window)
  found = balance.balanced(profile, prompt, ranks)
  assert found.shape == (ranks,) and (found > 0).all()
  assert math.isclose(found.sum(), tokens, rel_tol=1e-9)
  times = cost.compute_s(profile, prompt, found)
  assert near(times, times.mean(), 1e-6)


def test_balanced_shares():
  shares = balance.balanced(A100, Prompt(tokens=16384), 4) / 16384
  assert near(shares, (0.363, 0.255, 0.206, 0.176), 3e-3)
  shares = balance.balanced(A100, Prompt(tokens=16384), 8) / 16384
  want = (0.220, 0.163, 0.134, 0.116, 0.104, 0.094, 0.087, 0.082)
  assert near(shares, want, 8e-3)


@given(st.integers(1, 9))
def test_balanced_attention_alone(ranks):
  """Causal tiles: boundaries at C sqrt((i + 1) / p)."""
  only = dataclasses.replace(A100, token_s=0.0, kernel="causal")
  found = balance.balanced(only, Prompt(tokens=10_000), ranks)
  want = 10_000 * np.sqrt(np.arange(1, ranks + 1) / ranks)
  assert near(np.cumsum(found), want)


def test_linear_work_alone_is_even():
  only = dataclasses.replace(A100, pair_s=0.0)
  found = balance.balanced(only, Prompt(tokens=1000), 4)
  assert near(found, 250)


def test_a_long_prefix_evens_the_shares():
  spread = lambda prefix: np.ptp(
    balance.balanced(A100, Prompt(tokens=8192, prefix=prefix), 4)
  )
  assert spread(0) > spread(8192) > spread(65536)


# ---------------------------------------------------------------------------
# Rounding
# ---------------------------------------------------------------------------


@pytest.mark.smoke
@given(
  st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(
    lambda x: sum(x) > 0
  ),
  st.integers(1, 3000),
  st.sampled_from([1, 7, 128]),
)
def test_rounding(shares, tokens, tile):
  tiles = -(-tokens // tile)
  if tiles < len(shares):
    with pytest.raises(OptionError, match="ranks"):
      balance.round_to_tiles(shares, tokens, tile)
    return
  found = balance.round_to_tiles(shares, tokens, tile)
  assert sum(found) == tokens and min(found) >= 1
  assert all(n % tile == 0 for n in found[:-1])
  exact = np.asarray(shares) / sum(shares) * tiles
  if (exact >= 1).all():
    counts = -(-np.asarray(found) // tile)
    assert (np.abs(counts - exact) < 1 + 1e-6).all()


def test_rounding_by_largest_remainder():
  assert balance.round_to_tiles((2.5, 3.7, 3.8), 10) == (2, 4, 4)
  assert balance.round_to_tiles((1, 1, 1), 10) == (4, 3, 3)
  assert balance.round_to_tiles((1, 1, 1), 1000, 128) == (384, 384, 232)
  assert balance.round_to_tiles((1, 0, 0), 10) == (8, 1, 1)
  assert balance.round_to_tiles((0.001, 1, 1), 1024, 128) == (128, 512, 384)


@pytest.mark.parametrize(
  "shares", [(), (1, -1), (0, 0), (1, math.nan), (math.inf, 1), [[1, 2]]]
)
def test_shares_that_are_none(shares):
  with pytest.raises(OptionError, match="shares"):
    balance.round_to_tiles(np.asarray(shares, float), 10)


@pytest.mark.parametrize(
  ("tokens", "ranks", "tile", "want"),
  [(10, 4, 1, 4), (3, 4, 1, 3), (1024, 4, 128, 4), (1023, 4, 128, 3),
   (1, 8, 128, 1), (300, 8, 128, 1), (512, 8, 128, 2)],
)  # fmt: skip
def test_ranks_for_a_tiny_prompt(tokens, ranks, tile, want):
  assert balance.most_ranks(tokens, ranks, tile) == want


# ---------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------


def bowl(target):
  """An objective whose minimum lies at inner boundaries `target`."""

  def objective(partitions):
    ends = np.cumsum(partitions, axis=1)[:, :-1]
    return ((ends - np.asarray(target)) ** 2).sum(1).astype(float)

  return objective


@given(st.integers(2, 5), st.data())
@settings(max_examples=40)
def test_search_finds_the_minimum_wherever_it_lies(ranks, data):
  tokens = 96
  inner = st.lists(
    st.integers(1, tokens - 1),
    min_size=ranks - 1,
    max_size=ranks - 1,
    unique=True,
  )
  target = sorted(data.draw(inner))
  found = grid.search(bowl(target), [cost.even(tokens, ranks)])
  assert np.cumsum(found.lengths)[:-1].tolist() == target
  assert found.seconds == 0


def test_search_of_a_small_figure():
  """96 tokens in three: from 32, 64 to 28, 70 by strides of 8, 4 and 2."""
  found = grid.search(bowl((28, 70)), [(32, 32, 32)], stride=8, smallest=2)
  assert np.cumsum(found.lengths).tolist() == [28, 70, 96]
  assert [level.stride for level in found.levels] == [8, 4, 2]
  assert found.tried == 1 + sum(level.tried for level in found.levels)


@pytest.mark.parametrize("ranks", [1, 3, 7, 8, 10])
def test_search_asks_about_nothing_twice(ranks):
  asked = []
  simulate = grid.simulated(A100, Prompt(tokens=8192), FAST)

  def objective(partitions):
    asked.extend(tuple(row) for row in partitions.tolist())
    return simulate(partitions)

  found = grid.search(objective, [cost.even(8192, ranks)], smallest=64)
  assert len(asked) == len(set(asked)) == found.tried
  assert all(sum(x) == 8192 and min(x) > 0 for x in asked)
  seconds = simulate(np.asarray(asked)).tolist()
  assert found.seconds == min(seconds)
  assert found.seconds == seconds[asked.index(found.lengths)]


@pytest.mark.parametrize("tile", [128, 100])
def test_search_keeps_whole_tiles(tile):
  tokens = 5000
  start = balance.round_to_tiles([1, 1, 1], tokens, tile)
  found = grid.search(
    grid.simulated(A100, Prompt(tokens=tokens), FAST), [start], tile=tile
  )
  assert sum(found.lengths) == tokens
  assert all(n % tile == 0 for n in found.lengths[:-1])
  assert found.lengths[0] > start[0]


def test_search_stops_in_the_noise():
  even = [cost.even(8192, 4)]
  objective = grid.simulated(A100, Prompt(tokens=8192), FAST)
  fine = grid.search(objective, even)
  rough = grid.search(objective, even, least_gain=0.02)
  assert len(rough.levels) < len(fine.levels)
  assert rough.seconds < 1.03 * fine.seconds


def test_search_leaves_the_even_split_of_eight():
  """One boundary at a time gets stuck here, above 0.6 s."""
  prompt = Prompt(tokens=16384)
  objective = grid.simulated(A100, prompt, FAST)
  found = grid.search(objective, [cost.even(16384, 8)], smallest=32)
  balanced = balance.round_to_tiles(balance.balanced(A100, prompt, 8), 16384)
  goal = objective(np.asarray([balanced]))[0]
  assert math.isclose(goal, 0.542, rel_tol=0.01)
  assert found.seconds < 1.03 * goal


def test_search_with_more_ranks_than_a_grid_bears():
  prompt = Prompt(tokens=32768)
  found = partition.find(A100, prompt, 16, FAST, tile=64)
  bound = cost.lower_bound_s(A100, prompt, 16)
  assert found.seconds < 1.1 * bound


def test_balance_is_best_until_a_link_binds():
  prompt = Prompt(tokens=16384)
  start = balance.round_to_tiles(balance.balanced(A100, prompt, 4), 16384)
  seconds = lambda network, lengths: float(
    schedules.kvr_seconds(A100, prompt, [lengths], network)[0]
  )
  for bandwidth in (300e9, 10e9):
    network = Link(bandwidth=bandwidth)
    found = partition.find(A100, prompt, 4, network)
    assert found.seconds > 0.99 * seconds(network, start)
  slow = Link(bandwidth=3e9)
  found = partition.find(A100, prompt, 4, slow)
  assert math.isclose(seconds(slow, start), 2.49, rel_tol=0.01)
  assert found.seconds < 2.09
  assert found.lengths[0] < 0.1 * 16384


@pytest.mark.parametrize(
  ("bandwidth", "want"), [(300e9, 9784), (2e9, 9792), (1e9, 7104)]
)
def test_two_ranks_over_slower_links(bandwidth, want):
  network = Link(bandwidth=bandwidth)
  found = partition.find(A100, Prompt(tokens=16384), 2, network)
  assert math.isclose(found.lengths[0], want, rel_tol=0.01)


def test_search_against_all_partitions():
  tokens = 24
  profile = dataclasses.replace(A100, floor_s=0.0, pair_s=1e-5)
  prompt = Prompt(tokens=tokens)
  for bandwidth in (300e9, 1e9, 1e8):
    network = Link(bandwidth=bandwidth)
    every = [
      (a, b - a, tokens - b)
      for a, b in itertools.combinations(range(1, tokens), 2)
    ]
    best = schedules.kvr_seconds(profile, prompt, every, network).min()
    found = partition.find(profile, prompt, 3, network)
    assert found.seconds <= 1.02 * best


def test_measured_takes_medians_and_warms_up():
  calls = []
  noise = itertools.cycle([9.0, 1.0, 5.0, 1.0, 2.0, 100.0])

  def measure(lengths):
    calls.append(lengths)
    return abs(lengths[0] - 6) + next(noise)

  objective = grid.measured(measure, repeats=5, warmup=1)
  found = objective(np.asarray([(6, 4), (5, 5)]))
  assert found.tolist() == [2.0, 3.0]
  assert calls == [(6, 4)] * 6 + [(5, 5)] * 6
  best = grid.search(objective, [(5, 5)])
  assert best.lengths == (6, 4)


def test_levels_are_reported():
  seen = []
  found = grid.search(bowl((28, 70)), [(32, 32, 32)], on_level=seen.append)
  assert tuple(seen) == found.levels
  assert all(
    a.seconds >= b.seconds for a, b in itertools.pairwise(found.levels)
  )


def test_the_best_start_is_taken():
  objective = bowl((28, 70))
  found = grid.search(
    objective, [(32, 32, 32), (28, 42, 26)], stride=1, smallest=1
  )
  assert found.lengths == (28, 42, 26)
  # Where nothing matters the first start stays.
  flat = lambda partitions: np.zeros(len(partitions))
  found = grid.search(flat, [(40, 32, 24), (32, 32, 32)])
  assert found.lengths == (40, 32, 24)


@pytest.mark.parametrize(
  "wrong",
  [
    lambda f: grid.search(f, []),
    lambda f: grid.search(f, [(3, 0)]),
    lambda f: grid.search(f, [(4, 4), (4, 5)]),
    lambda f: grid.search(f, [(4, 4), (4, 2, 2)]),
    lambda f: grid.search(f, [(5, 3)], tile=2),
    lambda f: grid.search(f, [(4, 4)], stride=-1),
    lambda f: grid.search(f, [(4, 4)], smallest=-1),
    lambda f: grid.search(f, [(4, 4)], tile=0),
    lambda f: grid.search(lambda x: np.full(len(x), np.nan), [(4, 4)]),
    lambda f: grid.search(lambda x: np.zeros(1), [(4, 4)]),
    lambda f: grid.measured(len, repeats=0),
    lambda f: grid.measured(len, warmup=-1),
    lambda f: balance.balanced(A100, Prompt(tokens=4), 0),
    lambda f: partition.find(A100, Prompt(tokens=4), 5, FAST),
    lambda f: partition.plan(A100, Prompt(tokens=4), 0, FAST),
    lambda f: partition.plan(A100, Prompt(tokens=4), 2, FAST, least_gain=-0.1),
    lambda f: partition.neighbours(10, 8, 1000),
  ],
)
def test_refusals(wrong):
  with pytest.raises(OptionError) as caught:
    wrong(bowl((4,)))
  assert len(str(caught.value)) < 400


# ---------------------------------------------------------------------------
# Table
# ---------------------------------------------------------------------------


@pytest.mark.smoke
def test_interpolation():
  assert TABLE.shares(100) == (0.6, 0.4)
  assert near(TABLE.shares(150), (0.7, 0.3))
  assert near(TABLE.shares(175), (0.75, 0.25))
  assert TABLE.shares(1) == (0.6, 0.4)
  assert TABLE.shares(5000) == (0.8, 0.2)
  assert TABLE.lengths(150) == (105, 45)
  assert TABLE.lengths(150, tile=20) == (120, 30)


def test_a_tabled_length_is_what_was_found():
  table = partition.tabulate(A100, [4096, 8192], 4, FAST)
  for tokens in (4096, 8192):
    bare = dataclasses.replace(A100, floor_s=0.0)
    found = partition.find(bare, Prompt(tokens=tokens), 4, FAST)
    assert table.lengths(tokens) == found.lengths


@given(st.integers(1, 60_000), st.integers(1, 8))
def test_neighbours(tokens, ranks):
  found = partition.neighbours(tokens, ranks)
  assert all(n % 4096 == 0 for n in found) and tokens not in found
  assert max(found) > tokens
  if tokens > 4096:
    assert len(found) == 2 and found[0] < tokens


def test_save_and_load(tmp_path):
  path = str(tmp_path / "folder" / "table.json")
  table = PartitionTable(KEY, {200: (0.8, 0.2), 100: (1 / 3, 2 / 3)})
  table.save(path)
  assert PartitionTable.load(path) == PartitionTable.load(path, KEY) == table
  joined = table.joined(TABLE)
  assert joined.entries[100] == (0.6, 0.4)
  joined.save(path)
  assert PartitionTable.load(path) == joined
  assert os.listdir(tmp_path / "folder") == ["table.json"]


def test_a_save_that_fails_leaves_what_was(tmp_path, monkeypatch):
  path = str(tmp_path / "table.json")
  TABLE.save(path)

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OptionError, match="No space"):
    PartitionTable(KEY, {5: (0.5, 0.5)}).save(path)
  monkeypatch.undo()
  assert PartitionTable.load(path) == TABLE
  assert os.listdir(tmp_path) == ["table.json"]


@pytest.mark.parametrize(
  ("field", "value"),
  [("model", "n"), ("hardware", "i"), ("ranks", 3), ("bandwidth", 2e9)],
)
def test_a_table_for_something_else(field, value, tmp_path):
  path = str(tmp_path / "table.json")
  TABLE.save(path)
  other = dataclasses.replace(KEY, **{field: value})
  with pytest.raises(OptionError, match=field):
    PartitionTable.load(path, other)
  with pytest.raises(OptionError, match=field):
    TABLE.joined(PartitionTable(other, {5: (1 / other.ranks,) * other.ranks}))


def body(**changes):
  good = {
    "format": "ringjax.kvr-table",
    "version": 1,
    "key": dataclasses.asdict(KEY),
    "entries": [{"tokens": 100, "shares": [0.6, 0.4]}],
  }
  return json.dumps({**good, **changes})


@pytest.mark.parametrize(
  "text",
  [
    "",
    "{",
    "[]",
    "null",
    "[" * 100_000,
    body(format="ringjax.profile"),
    body(version=2),
    body(version=True),
    body(key={}),
    body(key=None),
    body(key={**dataclasses.asdict(KEY), "more": 1}),
    body(key={**dataclasses.asdict(KEY), "ranks": "2"}),
    body(key={**dataclasses.asdict(KEY), "model": 5}),
    body(key={**dataclasses.asdict(KEY), "bandwidth": None}),
    body(entries=[]),
    body(entries=5),
    body(entries=[{"tokens": 0, "shares": [0.6, 0.4]}]),
    body(entries=[{"tokens": 1.5, "shares": [0.6, 0.4]}]),
    body(entries=[{"tokens": 100, "shares": [0.6, 0.3]}]),
    body(entries=[{"tokens": 100, "shares": [1.4, -0.4]}]),
    body(entries=[{"tokens": 100, "shares": [1.0, 0.0]}]),
    body(entries=[{"tokens": 100, "shares": [0.4, 0.3, 0.3]}]),
    body(entries=[{"tokens": 100, "shares": ["0.6", "0.4"]}]),
    body(entries=[{"shares": [0.6, 0.4]}]),
    body(entries=[{"tokens": 100, "shares": [0.6, 0.4]}] * 2),
    body(entries=[{"tokens": 100, "shares": [math.nan, 0.4]}]),
  ],
)
def test_files_that_are_no_tables(text, tmp_path):
  path = tmp_path / "table.json"
  path.write_text(text)
  with pytest.raises(CheckpointFormatError) as caught:
    PartitionTable.load(str(path))
  assert len(str(caught.value)) < 400 and "table.json" in str(caught.value)
  # The good one is good.
  path.write_text(body())
  assert PartitionTable.load(str(path)).entries == {100: (0.6, 0.4)}


def test_no_file(tmp_path):
  for path in (tmp_path / "none.json", tmp_path):
    with pytest.raises(OptionError):
      PartitionTable.load(str(path))
  with pytest.raises(OptionError):
    TABLE.save(str(tmp_path))


# ---------------------------------------------------------------------------
# The rules
# ---------------------------------------------------------------------------


def test_a_long_prompt_uses_all_ranks():
  found = partition.plan(A100, Prompt(tokens=16384), 4, FAST)
  assert found.ranks == 4
  assert "4 ranks" in found.why[0] and "compute binds" in " ".join(found.why)


def test_a_prompt_below_the_floor_uses_one():
  found = partition.plan(A100, Prompt(tokens=1024), 8, FAST)
  assert found.ranks == 1 and found.found.lengths == (1024,)
  assert "5.0 %" in found.why[0] and "nothing is sent" in found.why[-1]
  all_of_them = partition.plan(
    A100, Prompt(tokens=1024), 8, FAST, least_gain=0.0
  )
  assert all_of_them.ranks == 8


def test_a_slow_link_uses_one():
  found = partition.plan(A100, Prompt(tokens=2048), 4, Link(bandwidth=1e8))
  assert found.ranks == 1


def test_few_tiles_use_few_ranks():
  bare = dataclasses.replace(A100, floor_s=0.0)
  found = partition.plan(bare, Prompt(tokens=1000), 8, FAST, tile=128)
  assert found.ranks == 3
  assert "two tiles" in found.why[0]
  assert all(n % 128 == 0 for n in found.found.lengths[:-1])


def test_a_link_that_binds_is_named():
  found = partition.plan(A100, Prompt(tokens=16384), 4, Link(bandwidth=3e9))
  assert "a link binds" in " ".join(found.why)


def test_windows_and_prefixes():
  long = Prompt(tokens=16384)
  window = dataclasses.replace(long, window=1024)
  prefix = dataclasses.replace(long, prefix=16384)
  plain, few, more = (
    partition.find(A100, p, 4, FAST, tile=64) for p in (long, window, prefix)
  )
  assert few.seconds < plain.seconds < more.seconds
  # With a window late ranks see no more than early ones.
  assert max(few.shares[1:]) - min(few.shares[1:]) < 0.02


def test_the_same_each_time():
  args = (A100, Prompt(tokens=10240), 4, Link(bandwidth=3e9))
  assert partition.plan(*args) == partition.plan(*args)
