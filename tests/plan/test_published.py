"""The simulated numbers beside the published ones.

The bounds are what the model reaches; a change that widens a gap fails.
"""

from __future__ import annotations

import numpy as np
import pytest

from ringjax.plan import profiles
from ringjax.plan.cost import Prompt
from ringjax.plan.kv_runahead import partition, published, schedules
from ringjax.plan.kv_runahead.schedules import Noise

A100 = profiles.STATED["llama7b-a100"]
FAST = published.NETWORK


def speeds(tokens, ranks):
  prompt = Prompt(tokens=tokens)
  tsp = schedules.tsp(A100, prompt, ranks, FAST).seconds
  kvr = partition.find(A100, prompt, ranks, FAST, tile=16).seconds
  return tsp, kvr, tsp / kvr


@pytest.mark.smoke
@pytest.mark.parametrize("tokens", [8192, 12288, 16384])
def test_four_gpus(tokens):
  tsp, kvr, faster = speeds(tokens, 4)
  want = published.TABLE["llama7b-a100"][tokens][0]
  assert abs(tsp / want[0] - 1) < 0.10
  assert abs(kvr / want[1] - 1) < 0.10
  assert abs(faster - want[2]) < 0.06


@pytest.mark.parametrize("tokens", [8192, 12288, 16384])
def test_eight_gpus(tokens):
  """Optimistic: the model knows no part that does not parallelise."""
  tsp, kvr, _ = speeds(tokens, 8)
  want = published.TABLE["llama7b-a100"][tokens][1]
  assert -0.15 < tsp / want[0] - 1 < 0
  assert -0.21 < kvr / want[1] - 1 < 0


def test_the_split_of_10k():
  found = partition.find(A100, Prompt(tokens=10240), 4, FAST)
  assert np.abs(np.subtract(found.shares, published.SHARES_10K_4)).max() < 0.006


def test_the_boundary_of_two():
  found = partition.find(A100, Prompt(tokens=16384), 2, FAST)
  assert abs(found.lengths[0] / published.BOUNDARY_16K_2 - 1) < 0.01


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [6144, 10240, 14336])
def test_interpolated_partitions(tokens, ranks):
  prompt = Prompt(tokens=tokens)
  near = partition.neighbours(tokens, ranks)
  table = partition.tabulate(A100, near, ranks, FAST, tile=16)
  seconds = lambda lengths: float(
    schedules.kvr_seconds(A100, prompt, [lengths], FAST)[0]
  )
  best = partition.find(A100, prompt, ranks, FAST, tile=16).seconds
  found = seconds(table.lengths(tokens, tile=16))
  assert 0.999 * best < found < 1.015 * best


def test_a_coarse_table_is_worse():
  prompt = Prompt(tokens=10240)
  table = partition.tabulate(A100, (4096, 16384), 4, FAST)
  found = schedules.kvr_seconds(A100, prompt, [table.lengths(10240)], FAST)
  best = partition.find(A100, prompt, 4, FAST).seconds
  assert 1.015 * best < float(found[0]) < 1.05 * best


def test_the_simulated_table():
  """Seconds at 300 GB/s, as worked out by hand from the model."""
  want = {
    2: {4: (0.33, 0.28), 8: (0.99, 0.82), 12: (1.98, 1.61), 16: (3.30, 2.65)},
    4: {4: (0.17, 0.13), 8: (0.50, 0.37), 12: (1.00, 0.71), 16: (1.67, 1.16)},
    8: {12: (0.52, 0.33)},
  }
  for ranks, rows in want.items():
    for k, (tsp, kvr) in rows.items():
      found = speeds(1024 * k, ranks)
      assert abs(found[0] - tsp) < 0.0101 and abs(found[1] - kvr) < 0.0101


def test_even_splits_gain_nothing_in_this_model():
  """Their last rank computes what each of TSP's does."""
  for tokens in (8192, 16384):
    prompt = Prompt(tokens=tokens)
    tsp = schedules.tsp(A100, prompt, 4, FAST).seconds
    even = schedules.kvr(A100, prompt, (tokens // 4,) * 4, FAST).seconds
    assert 0.97 < even / tsp < 1


def test_noise():
  """One link a layer 21 times slower: 43, 32, 26 % against 3 to 4 %."""
  for tokens, want in ((8192, 0.43), (12288, 0.32), (16384, 0.26)):
    prompt = Prompt(tokens=tokens)
    lengths = partition.find(A100, prompt, 4, FAST, tile=16).lengths
    worse = {"tsp": [], "kvr": []}
    base = (
      schedules.tsp(A100, prompt, 4, FAST).seconds,
      schedules.kvr_seconds(A100, prompt, [lengths], FAST)[0],
    )
    for seed in range(2):
      noise = Noise(slower=20, seed=seed)
      tsp = schedules.tsp(A100, prompt, 4, FAST, noise=noise).seconds
      kvr = schedules.kvr_seconds(A100, prompt, [lengths], FAST, noise=noise)
      worse["tsp"].append(tsp / base[0] - 1)
      worse["kvr"].append(float(kvr[0]) / base[1] - 1)
    assert abs(np.mean(worse["tsp"]) - want) < 0.02
    assert max(worse["kvr"]) <= min(worse["tsp"]) / 5


def test_rows_are_all_there():
  jobs = list(published.rows())
  rows = sum(len(x) for x in published.TABLE.values())
  assert len(jobs) == 2 * rows + 5 * len(published.SLOW) + 1
  first = jobs[0][1]()
  assert [row.what for row in first] == ["TSP", "KVR-S", "speed-up"]
  assert jobs[-1][1]()[-1].what == "boundary"
  for name, table in published.TABLE.items():
    assert name in profiles.STATED
    for both in table.values():
      for tsp, kvr, faster in both:
        # What was printed is rounded.
        assert abs(tsp / kvr - faster) < 0.17


def test_rows_that_were_fitted_say_so(monkeypatch):
  def some():
    return [
      *published._slow(8192, 0),
      *published._slow(8192, 2),
      *published._speeds(published._MAIN, 1024, 4, (0.107, 0.097, 1.11)),
      *published._speeds(published._MAIN, 8192, 4, (0.54, 0.41, 1.3)),
      *published._speeds("llama13b-a100", 1024, 4, (0.14, 0.126, 1.12)),
    ]

  found = some()
  kinds = [(x.profile, x.tokens, x.what) for x in found if x.fitted]
  main = published._MAIN
  assert (main, 8192, "alone") in kinds and (main, 1024, "KVR-S") in kinds
  assert {x.fitted for x in found if x.what != "alone" and x.tokens > 1024} == {
    False
  }
  assert not any(x.fitted for x in found if x.profile != main)
  # No published number is an input of ours.
  more = {n: tuple(3 * x for x in row) for n, row in published.SLOW.items()}
  monkeypatch.setattr(published, "SLOW", more)
  again = some()
  assert again[0].paper == 3 * found[0].paper
  assert [x.ours for x in again] == [x.ours for x in found]
