"""Elastic groups: batches against brute force, and simulated clusters."""

from __future__ import annotations

import dataclasses
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ringjax.errors import OptionError
from ringjax.serve.cluster import (
  ClusterSimulator,
  ClusterView,
  DecodeGroup,
  ElasticOptions,
  ElasticRequest,
  ElasticScheduler,
  FixedGroups,
  GroupMachine,
  QuadraticTimes,
  ScaledLimits,
  ShortestQueue,
  SimulatedInstance,
  answer_lengths,
  attainment,
  batch_cost,
  best_batches,
  compared_systems,
  even_parts,
  fewest_instances,
  mixed_lengths,
  random_trace,
  simulate_elastic,
  zipf_lengths,
)
from ringjax.serve.traces import TraceRequest
from tests.helpers import refused


def _times(instances):
  return QuadraticTimes(
    prefill_fixed_s=0.01 * instances,
    prefill_token_s=1e-3 / instances,
    prefill_pair_s=1e-6 / instances,
    decode_fixed_s=0.01,
    decode_row_s=1e-4 / instances,
    decode_token_s=1e-7 / instances,
  )


def _all_cuts(lengths, free):
  """The least cost of every way to cut both orders; infinite if none fits."""
  n, m, least = len(lengths), len(free), math.inf
  for parts in range(1, min(n, m) + 1):
    for cut in itertools.combinations(range(1, n), parts - 1):
      rows = [0, *cut, n]
      for edges in itertools.combinations(range(m + 1), parts + 1):
        cost = 0.0
        for p in range(parts):
          batch = lengths[rows[p] : rows[p + 1]]
          if sum(batch) > sum(free[edges[p] : edges[p + 1]]):
            cost = math.inf
            break
          cost += batch_cost(batch, edges[p + 1] - edges[p], _times)
        least = min(least, cost)
  return least


@hypothesis.settings(max_examples=50)
@hypothesis.given(
  st.lists(st.integers(1, 400), min_size=1, max_size=6),
  st.lists(st.integers(0, 500), min_size=1, max_size=4),
)
def test_batches_cost_what_the_best_of_all_cuts_does(lengths, free):
  lengths.sort(reverse=True)
  cost, batches = best_batches(lengths, free, _times)
  want = _all_cuts(lengths, free)
  assert cost == pytest.approx(want)
  if want == math.inf:
    assert not batches
    return
  # The batches are all requests, in order, where they fit, and cost that.
  assert [n for rows, _ in batches for n in rows] == [*range(len(lengths))]
  taken = [n for _, group in batches for n in group]
  assert taken == sorted({*taken})
  total = 0.0
  for rows, group in batches:
    batch = [lengths[n] for n in rows]
    assert sum(batch) <= sum(free[n] for n in group)
    total += batch_cost(batch, len(group), _times)
  assert total == pytest.approx(cost)


@hypothesis.given(
  st.lists(st.integers(1, 300), min_size=1, max_size=4),
  st.lists(st.integers(0, 400), min_size=1, max_size=4),
  st.randoms(use_true_random=False),
)
def test_no_fewer_instances_would_do(lengths, free, random):
  used = [random.randint(0, 100) for _ in free]
  kept = fewest_instances(lengths, free, used)
  fits = lambda group: sum(free[n] for n in group) >= sum(lengths)
  groups = [
    group
    for size in range(1, len(free) + 1)
    for group in itertools.combinations(range(len(free)), size)
    if fits(group)
  ]
  if not groups:
    assert kept is None
    return
  assert [sum(row) for row in kept] == lengths
  loads = [sum(column) for column in zip(*kept, strict=True)]
  assert all(have <= room for have, room in zip(loads, free, strict=True))
  assert sum(n > 0 for n in loads) == min(map(len, groups))


def test_a_long_prompt_fits_between_what_others_left():
  free = (100_000, 200_000, 400_000)
  # Keys that stay where they are computed need equal room, and then no other
  # instance has it.
  assert even_parts([600_000], free) is None
  assert fewest_instances([600_000], free) == ((0, 200_000, 400_000),)
  assert fewest_instances([650_000], free) == ((100_000, 200_000, 350_000),)
  assert fewest_instances([700_001], free) is None
  # Two prompts that hold three instances unevenly, then one of 600k.
  options = ElasticOptions(slots=400_000, most_moved_tokens=1)
  times = [GroupMachine().times(2, n) for n in range(1, 4)]
  policy = ElasticScheduler(times, options)
  wait = 2_000
  trace = [
    TraceRequest(arrival=at, prompt_tokens=prompt - wait, new_tokens=wait + 1)
    for at, prompt in ((0.0, 300_000), (0.1, 200_000), (0.2, 602_000))
  ]
  ran = simulate_elastic(trace, policy, 3)
  assert ran.moved_tokens == 0
  assert not any(one.rejected for one in ran.served)
  long = ran.served[2]
  assert all(one.last_token_s > long.first_token_s for one in ran.served)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
  st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(1, 40)),
    min_size=1,
    max_size=25,
  ),
  st.integers(1, 4),
  st.sampled_from(["elastic", "one", "each"]),
  st.integers(1, 9),
  st.integers(0, 2),
)
def test_every_request_ends_and_slots_are_never_exceeded(
  asked, instances, kind, window, spare
):
  options = ElasticOptions(
    slots=500,
    window=window,
    spare=spare,
    wide_rows=3,
    steps=4,
    most_moved_tokens=200,
    longest_prefill_s=1.0,
    answer_tokens=20,
  )
  policy = ElasticScheduler(
    [_times(n) for n in range(1, instances + 1)], options
  )
  if kind != "elastic":
    groups = [[*range(instances)]]
    if kind == "each":
      groups = [[n] for n in range(instances)]
    policy = FixedGroups(_times(len(groups[0])), groups, options)
  trace = [
    TraceRequest(arrival=at, prompt_tokens=prompt, new_tokens=new)
    for at, prompt, new in asked
  ]
  ran = simulate_elastic(trace, policy, instances)
  assert ran.most_used <= 500
  room = 500 * (instances if kind != "each" else 1)
  for one, want in zip(ran.served, trace, strict=True):
    fits = want.prompt_tokens + want.new_tokens - 1 <= room
    assert bool(one.rejected) == (not fits)
    if fits:
      assert one.arrival_s <= one.prefill_start_s < one.first_token_s
      assert one.first_token_s <= one.last_token_s <= ran.seconds
  if kind != "elastic":
    assert ran.moved_tokens == ran.shrinks == ran.grows == 0


def test_one_request_takes_what_its_group_takes():
  alone = [TraceRequest(arrival=1.0, prompt_tokens=300, new_tokens=11)]
  policy = ElasticScheduler([_times(n) for n in range(1, 5)])
  (one,) = simulate_elastic(alone, policy, 4).served
  assert one.ttft_s == pytest.approx(_times(4).prefill_s([(300, 0)]))
  assert one.prefill == "0+1+2+3"
  # One instance has all of its keys: it answers by itself.
  assert one.decode in "0123"
  steps = sum(_times(1).decode_s(1, 301 + n) for n in range(10))
  assert one.tpot_s * 10 == pytest.approx(steps)


def test_fixed_groups_are_what_the_simulator_of_engines_has():
  """One engine, prompts before answers, apart from each other."""
  trace = [
    TraceRequest(arrival=9.0 * n, prompt_tokens=100 + n, new_tokens=5, number=n)
    for n in range(4)
  ]
  times = _times(1)
  engine = SimulatedInstance(name="one", times=times, capacity_tokens=10_000)
  want = ClusterSimulator(instances=[engine], policy=ShortestQueue()).run(trace)
  ran = simulate_elastic(trace, FixedGroups(times, [[0]]), 1)
  for one, other in zip(ran.served, want.served, strict=True):
    assert one.ttft_s == pytest.approx(other.ttft_s)
    assert one.tpot_s == pytest.approx(other.tpot_s)


def test_rows_beyond_a_master_bring_idle_instances_in():
  policy = ElasticScheduler(
    [_times(n) for n in range(1, 5)], ElasticOptions(wide_rows=4)
  )
  rows = [
    ElasticRequest(number=n, arrival_s=0.0, prompt_tokens=9, new_tokens=9)
    for n in range(11)
  ]
  group = DecodeGroup(requests=rows[:9], instances=[1])
  other = DecodeGroup(requests=rows[9:], instances=[3])
  view = ClusterView(
    now_s=1.0,
    waiting=[],
    groups=[group, other],
    reading=frozenset(),
    used=[0, 81, 0, 18],
  )
  assert policy.grown(group, view) == (0, 2)
  assert policy.grown(other, view) == ()
  # Prompts that wait come first, and what reads is not idle.
  reading = dataclasses.replace(view, reading=frozenset([0]))
  assert policy.grown(group, reading) == (2,)
  waiting = dataclasses.replace(view, waiting=rows)
  assert policy.grown(group, waiting) == ()


def test_machines_and_workloads():
  machine = GroupMachine()
  read = lambda chips, n: machine.times(chips, n).prefill_s([(100_000, 0)])
  assert read(2, 1) > 3.5 * read(2, 4)
  # The same eight chips: sequence parallelism sends no sums of eight.
  assert read(8, 1) > read(2, 4)
  step = lambda chips, n: machine.times(chips, n).decode_s(1, 1000)
  assert step(8, 1) < step(2, 4)
  for exponent in (1.0, 1.4):
    lengths = zipf_lengths(4000, exponent, seed=3)
    assert lengths.min() >= 10 and lengths.max() <= 199_999
    # The share of short texts, by the sum of the weights.
    weights = (np.arange(10, 200_000) + 10.0) ** -exponent
    short = weights[: 1000 - 10].sum() / weights.sum()
    assert (lengths < 1000).mean() == pytest.approx(short, abs=0.03)
  prompts, answers = mixed_lengths(3000, seed=2)
  assert prompts.max() > 400_000 and answers.min() >= 1
  assert (prompts < 2_300).mean() == pytest.approx(1 / 3, abs=0.1)
  slow, fast = (random_trace(prompts, answers, r, seed=1) for r in (1.0, 2.0))
  assert slow[7].arrival == pytest.approx(2 * fast[7].arrival)


def test_short_prompts_read_beside_a_long_one_that_leaves_an_instance():
  """A text of 400,000 tokens takes three of four, and a chat the fourth."""
  times = [GroupMachine().times(2, n) for n in range(1, 5)]
  ask = lambda at, prompt: TraceRequest(
    arrival=at, prompt_tokens=prompt, new_tokens=4
  )
  trace = [ask(0.0, 400_000), ask(1.0, 300), ask(2.0, 380_000), ask(3.0, 200)]
  found = {}
  for spare in (0, 1):
    options = ElasticOptions(spare=spare, window=8)
    policy = ElasticScheduler(times, options)
    found[spare] = simulate_elastic(trace, policy, 4).served
  paper, ours = found[0], found[1]
  assert paper[0].prefill == "0+1+2+3"
  assert min(paper[1].ttft_s, paper[3].ttft_s) > 15
  assert len(ours[0].prefill) == len("0+1+2")
  assert max(ours[1].ttft_s, ours[3].ttft_s) < 1
  # The second long one does not take the fourth instance.
  assert ours[2].prefill_start_s >= ours[0].first_token_s
  # What three instances have no room for takes all.
  policy = ElasticScheduler(times, ElasticOptions(spare=1))
  (one,) = simulate_elastic([ask(0.0, 700_000)], policy, 4).served
  assert one.prefill == "0+1+2+3"


@pytest.mark.long
@pytest.mark.parametrize(
  ("load", "rate"),
  # Of the last, replicas have no room for the longest texts.
  [("zipf:1.0", 0.8), ("mixed:199999", 0.3), ("mixed", 0.08)],
)
def test_elastic_groups_serve_what_fixed_ones_do_not(load, rate):
  count, share = 150, 0.94
  kind, _, option = load.partition(":")
  if kind == "mixed":
    most = int(option) if option else None
    prompts, answers = mixed_lengths(count, seed=1, most=most)
  else:
    prompts = zipf_lengths(count, float(option), seed=1)
    answers = answer_lengths(count, seed=2)
  limits = ScaledLimits(alone=GroupMachine().times(2, 4))
  trace = random_trace(prompts, answers, rate, seed=3)
  elastic, *fixed, spare = (
    attainment(system.run(trace).served, limits)
    for system in compared_systems()
  )
  assert min(elastic, spare) >= share
  assert len(fixed) == 3 and max(fixed) < share


def test_refusals():
  policy = ElasticScheduler([_times(1)])
  ask = lambda **one: TraceRequest(**dict(arrival=0.0) | one)
  none = [ask(prompt_tokens=0, new_tokens=3)]
  refused(OptionError, lambda: simulate_elastic(none, policy, 1), "trace")
  refused(OptionError, lambda: simulate_elastic([], policy, 0), "instances")
  refused(OptionError, lambda: ElasticScheduler([]), "times")
  refused(OptionError, lambda: FixedGroups(_times(1), [[0], [1, 2]]), "groups")
  refused(OptionError, lambda: ElasticOptions(slots=0), "slots")
  refused(OptionError, lambda: GroupMachine(parameters=0.0), "parameters")
  long = [ask(prompt_tokens=210_001, new_tokens=1)]
  (one,) = simulate_elastic(long, policy, 1).served
  assert "210001 tokens for 210000 slots" in one.rejected
  assert not one.meets(ScaledLimits(alone=_times(1)))
  assert dataclasses.replace(policy.options, slots=5).slots == 5


@pytest.mark.usefixtures("unchecked")
def test_links_and_machines_are_no_numbers():
  with pytest.raises(OptionError, match="link: got 100000000000.0"):
    ElasticOptions(link=1e11)
  with pytest.raises(OptionError, match="machine: got 'a800'"):
    GroupMachine(machine="a800")
