"""Starts that keep the cached tokens level, and how many CPUs attend."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.serve.cluster import (
  LoadControl,
  SequenceGroup,
  StageTimes,
  TokenLimit,
  choose_workers,
  joint_starts,
  level_peak,
  loads,
  simulate_stages,
  staggered_starts,
  swept_cpus,
)
from tests.helpers import refused

B, S, F = 1024, 256, 16
TIMES = StageTimes(fixed_s=1e-3, row_s=1e-5, token_s=2e-6)


def peak(groups):
  return max(tokens for _, tokens in loads(groups))


def started(limit, rows, steps, count):
  """Groups that start one behind another, each as early as it may."""
  control, found, now = LoadControl(limit), [], 0
  for _ in range(count):
    now = control.start(rows, steps, now)
    found.append(SequenceGroup(rows, now, steps))
  return found


def test_the_peaks_of_joint_and_of_staggered_starts():
  assert level_peak(B, S, F) == B * (S + F) // 2 == 139_264
  assert peak(joint_starts(B, S, 3)) == B * S == 262_144
  level = staggered_starts(B, S, F, 64)
  assert peak(level) == 139_264
  # As many rows, from when the first group ends.
  assert {rows for rows, _ in itertools.islice(loads(level), S, 900)} == {B}


def test_a_limit_that_rises_starts_a_group_each_f_steps():
  limit = TokenLimit.level(B, S, F)
  groups = started(limit, 64, S, 40)
  assert [g.start for g in groups] == [F * n for n in range(40)]
  assert peak(groups) == limit.tokens == 139_264


def test_a_limit_that_does_not_rise_lets_groups_start_at_once():
  groups = started(139_264, 64, S, 12)
  assert [g.start for g in groups[:10]] == [0] * 8 + [128, 256]
  assert peak(groups) <= 139_264


@pytest.mark.parametrize("longest", [0, 60])
@pytest.mark.parametrize("seed", range(6))
def test_starts_are_the_earliest_under_the_limit(seed, longest):
  """Against trying each step with the load of all steps."""
  draw = np.random.default_rng(seed)
  limit, now, all_groups = 400, 0, []
  control = LoadControl(limit)
  for _ in range(14):
    rows, steps = int(draw.integers(1, 9)), int(draw.integers(1, 30))
    prompts = int(draw.integers(0, longest, endpoint=True))
    now += int(draw.integers(0, 5))
    want = next(
      t
      for t in itertools.count(now)
      if peak([*all_groups, SequenceGroup(rows, t, steps, prompts)]) <= limit
    )
    assert control.earliest(rows, steps, now, prompts=prompts) == want
    # They start when they may, not before: later ones come behind.
    now = control.start(rows, steps, now, prompts=prompts)
    all_groups.append(SequenceGroup(rows, now, steps, prompts))
    assert control.tokens(now) == sum(g.tokens(now) for g in all_groups)
  assert limit / 2 < peak(all_groups) <= limit


@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals_never_exceed_the_limit(seed):
  """By counting each token that is cached, step by step."""
  draw = np.random.default_rng(seed)
  limit = int(draw.integers(200, 500))
  control, now, cached = LoadControl(limit), 0, {}
  for _ in range(40):
    rows, steps = int(draw.integers(1, 6)), int(draw.integers(1, 30))
    sizes = draw.integers(1, 25, rows)
    now += int(draw.integers(0, 8))
    if sizes.sum() + rows * steps > limit:
      with pytest.raises(OptionError):
        control.check(rows, steps, prompts=int(sizes.sum()))
      continue
    now = control.start(rows, steps, now, prompts=int(sizes.sum()))
    for step in range(steps):
      # A prompt, and what was generated up to this step.
      here = sum(int(size) + step + 1 for size in sizes)
      cached[now + step] = cached.get(now + step, 0) + here
  assert limit / 2 < max(cached.values()) <= limit


@pytest.mark.parametrize("prompt", [0, 100])
def test_a_level_limit_has_room_for_prompts(prompt):
  limit = TokenLimit.level(8, 16, 2, prompt=prompt)
  control = LoadControl(limit)
  starts = [control.start(1, 16, prompts=prompt)]
  for _ in range(19):
    starts.append(control.start(1, 16, starts[-1], prompts=prompt))
  assert starts == [2 * n for n in range(20)]
  groups = [SequenceGroup(1, n, 16, prompt) for n in starts]
  assert peak(groups) == limit.tokens == level_peak(8, 16, 2) + 8 * prompt
  refused(
    OptionError,
    lambda: LoadControl(30).start(1, 16, prompts=100),
    "100 of prompts",
    "30",
  )


def test_level_starts_keep_both_stages_busy():
  rows = 64
  cpus = math.ceil(S * TIMES.token_s * TIMES.rate(rows) / 2)
  joint = simulate_stages(TIMES, cpus, (joint_starts(rows, S, 3),) * 2)
  level = simulate_stages(
    TIMES, cpus, (staggered_starts(rows, S, F, 48),) * 2, first_step=S - F
  )
  assert joint.tokens == 2 * rows * S * 3
  assert joint.peak_tokens == 2 * rows * S
  assert level.peak_tokens == rows * (S + F)
  for stage in ("weights_busy", "workers_busy"):
    assert getattr(level, stage) > 1.1 * getattr(joint, stage)
  assert level.weights_busy > 0.95
  assert level.tokens_s > 1.1 * joint.tokens_s


@pytest.mark.parametrize(
  ("rows", "steps", "every"),
  [
    (32, 32, 4),
    pytest.param(64, 128, 8, marks=pytest.mark.slow),
    pytest.param(128, 64, 2, marks=pytest.mark.slow),
  ],
)
def test_the_formula_is_what_a_sweep_finds(rows, steps, every):
  plan = choose_workers(TIMES, steps, answer_s=1e9, every=every, most_rows=rows)
  assert plan.rows == rows
  near = range(max(1, plan.cpus - 2), plan.cpus + 3)
  assert abs(swept_cpus(TIMES, rows, steps, every, near) - plan.cpus) <= 1


def test_cpus_of_a_plan_attend_to_prompts_too():
  rows, steps, every, prompt = 16, 16, 4, 40
  plan = choose_workers(
    TIMES, steps, answer_s=1e9, every=every, most_rows=rows, prompt=prompt
  )
  without = choose_workers(
    TIMES, steps, answer_s=1e9, every=every, most_rows=rows
  )
  # Half of an answer is cached on average, and the whole prompt.
  assert plan.balanced_cpus == pytest.approx(
    without.balanced_cpus * (steps / 2 + prompt) / (steps / 2)
  )
  near = range(max(1, plan.cpus - 2), plan.cpus + 3)
  swept = swept_cpus(TIMES, rows, steps, every, near, prompt=prompt)
  assert abs(swept - plan.cpus) <= 1
  # The plan's tokens are those of the schedule that it is made for.
  groups = staggered_starts(
    rows, steps, every, 2 * steps // every, prompt=prompt
  )
  outcome = simulate_stages(TIMES, plan.cpus, (groups, groups))
  assert outcome.peak_tokens == plan.tokens == rows * (20 + 80)
  held = choose_workers(
    TIMES, steps, answer_s=1e9, every=every, most_rows=rows, prompt=prompt,
    cpu_tokens=100,
  )  # fmt: skip
  assert held.cpus == math.ceil(plan.tokens / 100) > plan.cpus
  refused(
    OptionError, lambda: choose_workers(TIMES, S, answer_s=9, prompt=-1), "-1"
  )


def test_what_bounds_the_rows():
  free = choose_workers(TIMES, S, answer_s=1e9)
  # A doubling of 512 rows gains 9 % of 1e5 rows a second.
  assert (free.rows, free.bound) == (512, "rate")
  assert free.cpus == math.ceil(free.balanced_cpus) == 22
  tight = choose_workers(TIMES, S, answer_s=1.5)
  assert tight.bound == "latency"
  takes = lambda rows: 2 * S * TIMES.weights_s(rows)
  assert takes(tight.rows) <= 1.5 < takes(tight.rows + 1)
  assert tight.answer_s == pytest.approx(takes(tight.rows))
  wide = StageTimes(fixed_s=1e-3, row_s=1e-5, token_s=1e-6)
  assert choose_workers(wide, S, answer_s=1.5).cpus < tight.cpus
  small = choose_workers(TIMES, S, answer_s=1.5, cpu_tokens=1000, every=F)
  assert small.tokens == small.rows * (S + F)
  assert small.cpus == math.ceil(small.tokens / 1000) > tight.cpus
  assert small.bound == "latency and memory"


def test_bad_input():
  refused(OptionError, lambda: level_peak(100, 256, 3), "every")
  refused(
    OptionError, lambda: LoadControl(100).earliest(11, 10), "11 x 10", "100"
  )
  refused(OptionError, lambda: LoadControl(100).earliest(0, 10), "rows")
  refused(OptionError, lambda: TokenLimit(tokens=10, first=11), "first")
  refused(OptionError, lambda: choose_workers(TIMES, S, answer_s=0.1), "0.1 s")
  one = joint_starts(4, 4, 1)
  refused(
    OptionError,
    lambda: simulate_stages(TIMES, 1, (one, one), first_step=4),
    "first_step",
  )
