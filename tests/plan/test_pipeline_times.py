"""Makespans of chunked pipelines: the formula, a simulation, by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ringjax import plan
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan.cost import Profile, Prompt
from tests.helpers import refused

PROFILE = Profile(
  name="test",
  model="test",
  hardware="test",
  layers=32,
  token_s=4e-5,
  pair_s=2e-9,
  kv_bytes=4096,
  fixed_s=2e-3,
  kernel="causal",
)


def makespan(times, shares, sends):
  """When the last chunk leaves the last stage, chunk by chunk."""
  free = [0.0] * len(shares)
  links = [0.0] * len(shares)
  for seconds, send in zip(times, sends, strict=True):
    ready = 0.0
    for x, share in enumerate(shares):
      free[x] = max(free[x], ready) + seconds * share
      ready = links[x] = max(links[x], free[x]) + send
  return free[-1]


def test_the_worked_example():
  times = [1.0, 1.3, 1.6, 1.9, 2.2]
  assert plan.pipeline_seconds(times, 4) == pytest.approx(3.65)
  assert plan.pipeline_seconds(times, 1) == pytest.approx(8.0)
  timeline = plan.pipeline_timeline(times, [0.25] * 4)
  assert timeline.finish_s == pytest.approx(3.65)


@pytest.mark.parametrize("seed", range(6))
def test_the_formula_is_the_simulation(seed):
  rng = np.random.default_rng(seed)
  times = rng.uniform(0.1, 3.0, int(rng.integers(1, 9)))
  stages = int(rng.integers(1, 6))
  found = plan.pipeline_timeline(times, [1 / stages] * stages)
  want = plan.pipeline_seconds(times, stages)
  assert float(found.finish_s) == pytest.approx(want)
  assert found.busy_s("stage 0") == pytest.approx(times.sum() / stages)
  # Stages that differ, and links that take their time.
  shares = rng.dirichlet(np.ones(stages))
  sends = rng.uniform(0, 1.0, times.size)
  found = plan.pipeline_timeline(
    times,
    shares.tolist(),
    link=Link(bandwidth=10.0),
    chunk_bytes=(10 * sends).tolist(),
  )
  want = makespan(times, shares, sends)
  assert float(found.finish_s) == pytest.approx(want)
  sent = found.sent_bytes()
  assert all(
    sent[f"{x}-{x + 1}"] == pytest.approx(10 * sends.sum())
    for x in range(stages - 1)
  )


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_equal_times_are_faster_than_equal_tokens(stages):
  prompt = Prompt(tokens=65_536)
  even = plan.chunk_seconds(PROFILE, prompt, [8192] * 8)
  lengths = plan.equal_times(PROFILE, prompt, 8, 64)
  alike = plan.chunk_seconds(PROFILE, prompt, lengths)
  assert lengths[0] > lengths[-1]
  assert alike.max() / alike.min() < 1.05 < even.max() / even.min()
  assert alike.sum() == pytest.approx(even.sum())
  seconds = [plan.pipeline_seconds(x, stages) for x in (alike, even)]
  assert seconds[0] < seconds[1]


def test_the_best_number_of_chunks():
  prompt = Prompt(tokens=4096)
  lengths = plan.best_chunks(PROFILE, prompt, 4, most=40, tile=8)
  takes = lambda x: plan.pipeline_seconds(
    plan.chunk_seconds(PROFILE, prompt, x), 4
  )
  # Not the most, as each costs a call; not one, as stages would wait.
  assert 1 < len(lengths) < 40
  for count in (1, 2, 4, 40):
    assert takes(lengths) <= takes(plan.equal_times(PROFILE, prompt, count, 8))
  # No cut of three chunks is better than equal times, but for the rounding.
  three = plan.equal_times(PROFILE, Prompt(tokens=96), 3, 8)
  cuts = itertools.combinations(range(8, 96, 8), 2)
  small = Prompt(tokens=96)
  best = min(
    plan.pipeline_seconds(
      plan.chunk_seconds(PROFILE, small, (a, b - a, 96 - b)), 4
    )
    for a, b in cuts
  )
  assert plan.pipeline_seconds(
    plan.chunk_seconds(PROFILE, small, three), 4
  ) == pytest.approx(best, rel=1e-6)


def test_refusals():
  times = [1.0, 2.0]
  refused(OptionError, lambda: plan.pipeline_seconds([], 2), "chunk_s")
  refused(OptionError, lambda: plan.pipeline_timeline(times, [0.5]), "shares")
  refused(
    OptionError,
    lambda: plan.pipeline_timeline(
      times, [0.5, 0.5], link=Link(bandwidth=1), chunk_bytes=[1]
    ),
    "chunk_bytes",
    "2 chunks",
  )
  refused(
    OptionError,
    lambda: plan.chunk_seconds(PROFILE, Prompt(tokens=9), [4, 4]),
    "partition",
  )
