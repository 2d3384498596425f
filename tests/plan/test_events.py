"""The simulator against closed forms, and what holds of every timeline."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.errors import OptionError
from ringjax.plan.events import Simulator

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = st.integers(0, 20).map(float)


def close(a: float, b: float) -> bool:
  return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


# ---------------------------------------------------------------------------
# Closed forms
# ---------------------------------------------------------------------------


def test_nothing():
  timeline = Simulator().run()
  assert timeline.spans == () and timeline.finish_s == 0
  assert timeline.idle("device") == 1


@pytest.mark.smoke
@given(st.lists(SECONDS, min_size=1, max_size=8))
def test_one_device_does_one_thing_at_a_time(times):
  sim = Simulator()
  device = sim.device("d")
  ops = [sim.op(f"{i}", device, t) for i, t in enumerate(times)]
  timeline = sim.run()
  assert timeline.finish_s == timeline.busy_s("d") == sum(times)
  for i, op in enumerate(ops):
    assert timeline[op].start_s == sum(times[:i])


@given(st.integers(1, 12), st.integers(1, 5))
def test_slots(count, slots):
  sim = Simulator()
  device = sim.device("d", slots=slots)
  for i in range(count):
    sim.op(f"{i}", device, 2.0)
  assert sim.run().finish_s == 2.0 * math.ceil(count / slots)


@given(st.lists(st.lists(SECONDS, min_size=1, max_size=4), min_size=1))
def test_fork_and_join(branches):
  sim = Simulator()
  first = sim.op("fork", None, 1.0)
  ends = []
  for b, times in enumerate(branches):
    device, last = sim.device(f"d{b}"), first
    for i, t in enumerate(times):
      last = sim.op(f"{b}.{i}", device, t, after=[last])
    ends.append(last)
  join = sim.op("join", after=ends)
  assert sim.run()[join].done_s == 1.0 + max(sum(b) for b in branches)


@given(
  st.lists(st.integers(0, 1000), min_size=1, max_size=6),
  st.sampled_from([1.0, 8.0, 100.0]),
  st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_link_sends_in_turn_and_latency_overlaps(sizes, bandwidth, latency):
  sim = Simulator()
  link = sim.link("l", bandwidth, latency)
  ops = [sim.send(f"{i}", link, n) for i, n in enumerate(sizes)]
  timeline = sim.run()
  assert close(timeline.finish_s, sum(sizes) / bandwidth + latency)
  assert close(timeline.busy_s("l"), sum(sizes) / bandwidth)
  for i, op in enumerate(ops):
    assert close(timeline[op].done_s, sum(sizes[: i + 1]) / bandwidth + latency)
  assert timeline.sent_bytes() == ({"l": sum(sizes)} if sum(sizes) else {})


def test_slowdown_divides_the_bandwidth_of_one_message():
  sim = Simulator()
  link = sim.link("l", 10.0, 0.5)
  slow = sim.send("slow", link, 20, slowdown=3)
  fast = sim.send("fast", link, 20)
  timeline = sim.run()
  assert timeline[slow].done_s == 6.5
  assert timeline[fast].done_s == 8.5


def flow_shop(jobs: int, stages: list[float], buffers: int | None = None):
  sim = Simulator()
  devices = [sim.device(f"d{s}") for s in range(len(stages))]
  pool = None if buffers is None else sim.pool("buffers", buffers)
  ops = []
  for j in range(jobs):
    row = []
    for s, t in enumerate(stages):
      row.append(
        sim.op(
          f"{j}.{s}",
          devices[s],
          t,
          after=row[-1:],
          take={pool: 1} if pool and not s else None,
          give={pool: 1} if pool and s == len(stages) - 1 else None,
        )
      )
    ops.append(row)
  return sim.run(), ops


@pytest.mark.smoke
@given(st.integers(1, 6), st.lists(SECONDS, min_size=1, max_size=4))
def test_equal_jobs_through_a_pipeline(jobs, stages):
  timeline, _ = flow_shop(jobs, stages)
  assert timeline.finish_s == sum(stages) + (jobs - 1) * max(stages)


@given(
  st.integers(1, 6),
  st.lists(st.integers(1, 9).map(float), min_size=1, max_size=4),
  st.integers(1, 5),
)
def test_buffers_bound_what_is_under_way(jobs, stages, buffers):
  timeline, ops = flow_shop(jobs, stages, buffers)
  # The job `buffers` before must have left the last stage.
  for j in range(buffers, jobs):
    start = timeline[ops[j][0]].start_s
    assert start >= timeline[ops[j - buffers][-1]].done_s
  if buffers == 1:
    assert timeline.finish_s == jobs * sum(stages)
  if buffers >= jobs:
    assert timeline.finish_s == sum(stages) + (jobs - 1) * max(stages)


# ---------------------------------------------------------------------------
# Order
# ---------------------------------------------------------------------------


def test_the_most_urgent_goes_first_and_nothing_is_interrupted():
  sim = Simulator()
  device = sim.device("d")
  first = sim.op("first", device, 4.0)
  low = sim.op("low", device, 1.0)
  high = sim.op("high", device, 1.0, priority=1)
  late = sim.op("late", device, 1.0, priority=9, release_s=4.5)
  timeline = sim.run()
  order = [s.name for s in timeline.of("d")]
  assert order == ["high", "first", "late", "low"]
  assert timeline[high].start_s == 0
  assert timeline[first].start_s == 1
  assert timeline[late].start_s == 5 and timeline[late].ready_s == 4.5
  assert timeline[low].start_s == 6


def test_equals_go_in_the_order_of_description():
  sim = Simulator()
  device = sim.device("d")
  for name in "cab":
    sim.op(name, device, 1.0)
  assert [s.name for s in sim.run().of("d")] == ["c", "a", "b"]


@pytest.mark.parametrize("urgent_first", [True, False])
def test_who_ends_first_in_one_instant_does_not_matter(urgent_first):
  sim = Simulator()
  device = sim.device("d")
  busy = sim.op("busy", device, 2.0)
  if urgent_first:
    gate = sim.op("gate", None, 2.0)
    plain = sim.op("plain", device, 1.0, after=[busy])
  else:
    plain = sim.op("plain", device, 1.0, after=[busy])
    gate = sim.op("gate", None, 2.0)
  urgent = sim.op("urgent", device, 1.0, after=[gate], priority=1)
  timeline = sim.run()
  assert timeline[urgent].start_s == 2 and timeline[plain].start_s == 3


def test_one_that_lacks_a_buffer_lets_others_pass():
  sim = Simulator()
  device, pool = sim.device("d"), sim.pool("p", 1)
  holder = sim.op("holder", None, 5.0, take={pool: 1}, give={pool: 1})
  first = sim.op("first", device, 1.0, take={pool: 1}, give={pool: 1})
  second = sim.op("second", device, 1.0)
  timeline = sim.run()
  assert timeline[holder].start_s == 0
  assert timeline[second].start_s == 0
  assert timeline[first].start_s == 5


def test_time_of_start_can_decide_the_duration():
  sim = Simulator()
  device = sim.device("d")
  slow_after = lambda start: 1.0 if start < 2 else 10.0
  for i in range(3):
    sim.op(f"{i}", device, slow_after)
  assert sim.run().finish_s == 12


def test_a_scheduler_adds_work_while_time_passes():
  sim = Simulator()
  device = sim.device("d")
  seen = []

  def done(span):
    seen.append((span.name, sim.now_s))
    if len(seen) < 3:
      sim.op(f"next {len(seen)}", device, 2.0, then=done)

  sim.op("first", device, 1.0, then=done)
  sim.at(10.0, lambda: sim.op("late", device, 1.0))
  timeline = sim.run()
  assert seen == [("first", 1), ("next 1", 3), ("next 2", 5)]
  assert [s.start_s for s in timeline.of("d")] == [0, 1, 3, 10]
  assert timeline.finish_s == 11


def test_work_added_later_may_follow_what_is_done():
  sim = Simulator()
  first = sim.op("first", None, 1.0)
  made = []
  sim.at(5.0, lambda: made.append(sim.op("more", None, 1.0, after=[first])))
  timeline = sim.run()
  assert timeline[made[0]].start_s == 5


# ---------------------------------------------------------------------------
# Every timeline
# ---------------------------------------------------------------------------


@st.composite
def graphs(draw):
  """(seconds, place, dependencies, priority) of each operation."""
  count = draw(st.integers(1, 14))
  ops = []
  for i in range(count):
    after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
    ops.append(
      (
        draw(SECONDS),
        draw(st.integers(0, 2)),
        sorted(after),
        draw(st.integers(0, 2)),
      )
    )
  return ops


def simulate(graph):
  sim = Simulator()
  places = [sim.device("a"), sim.device("b"), sim.link("c", 2.0)]
  ops = []
  for i, (seconds, place, after, priority) in enumerate(graph):
    more = dict(after=[ops[j] for j in after], priority=priority)
    if place == 2:
      ops.append(sim.send(f"{i}", places[2], 2 * seconds, **more))
    else:
      ops.append(sim.op(f"{i}", places[place], seconds, **more))
  return sim.run()


@given(graphs())
def test_what_holds_of_every_timeline(graph):
  timeline = simulate(graph)
  spans = timeline.spans
  critical: list[float] = []
  for i, (seconds, _, after, _) in enumerate(graph):
    ready = max((spans[j].done_s for j in after), default=0.0)
    assert spans[i].ready_s == ready
    assert spans[i].start_s >= ready
    assert spans[i].end_s == spans[i].start_s + seconds
    critical.append(seconds + max((critical[j] for j in after), default=0.0))
  assert max(critical) <= timeline.finish_s <= sum(g[0] for g in graph)
  for name in "abc":
    mine = timeline.of(name)
    for one, two in itertools.pairwise(mine):
      assert one.end_s <= two.start_s
    # Nobody waits for a place that is free.
    for s in mine:
      waited = [
        o
        for o in mine
        if o.start_s < s.start_s and o.end_s > s.ready_s and o is not s
      ]
      covered = math.fsum(
        min(o.end_s, s.start_s) - max(o.start_s, s.ready_s) for o in waited
      )
      assert close(covered, s.start_s - s.ready_s)
  assert simulate(graph) == timeline


@pytest.mark.long
def test_the_same_in_every_process():
  code = (
    "import json, sys; sys.path.insert(0, '.')\n"
    "from tests.plan.test_events import simulate\n"
    "graph = [(i * 7 % 5 / 3, i % 3, [j for j in (i - 2, i - 5) if j >= 0],"
    " i % 2) for i in range(40)]\n"
    "print(json.dumps([(s.name, s.start_s) for s in simulate(graph).spans]))"
  )
  found = []
  for seed in ("1", "77"):
    done = subprocess.run(
      [sys.executable, "-c", code],
      cwd=ROOT,
      env={**os.environ, "PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    found.append(json.loads(done.stdout))
  assert found[0] == found[1] and len(found[0]) == 40


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------


def test_what_can_never_start_is_named():
  sim = Simulator()
  pool = sim.pool("pages", 2)
  sim.op("keeps", take={pool: 1})
  sim.op("starves", take={pool: 2})
  sim.op("behind", after=[sim.op("starves too", take={pool: 2})])
  with pytest.raises(OptionError, match=r"3 that never .*starves.*pages"):
    sim.run()


def test_more_given_than_taken():
  sim = Simulator()
  pool = sim.pool("p", 1)
  sim.op("gives", give={pool: 1})
  with pytest.raises(OptionError, match="2 in p"):
    sim.run()


@pytest.mark.parametrize(
  "wrong",
  [
    lambda s, d: s.op("x", d, -1.0),
    lambda s, d: s.op("x", d, math.nan),
    lambda s, d: s.op("x", d, math.inf),
    lambda s, d: s.op("x", d, 1.0, release_s=-1),
    lambda s, d: s.op("x", d, 1.0, priority=math.nan),
    lambda s, d: s.op("x", Simulator().device("d"), 1.0),
    lambda s, d: s.op("x", after=[Simulator().op("y")]),
    lambda s, d: s.op("x", take={Simulator().pool("p", 1): 1}),
    lambda s, d: s.op("x", take={s.pool("p", 1): 2}),
    lambda s, d: s.send("x", s.link("l", 1.0), -1),
    lambda s, d: s.link("l", 0.0),
    lambda s, d: s.link("l", math.nan),
    lambda s, d: s.link("l", 1.0, -1.0),
    lambda s, d: s.device("d"),
    lambda s, d: s.device(""),
    lambda s, d: s.device("e", slots=0),
    lambda s, d: s.pool("p", -1),
    lambda s, d: [s.pool("p", 1), s.pool("p", 1)],
    lambda s, d: s.at(-1.0, print),
    lambda s, d: [s.op("x", d, lambda start: -1.0), s.run()],
    lambda s, d: [s.run(), s.run()],
    lambda s, d: [s.run(), s.op("x", d, 1.0)],
    lambda s, d: [s.at(2.0, lambda: s.at(1.0, print)), s.run()],
  ],
)
def test_refusals(wrong):
  sim = Simulator()
  device = sim.device("d")
  with pytest.raises(OptionError) as caught:
    wrong(sim, device)
  assert len(str(caught.value)) < 400
