"""Rows that take turns are DistServe's decode loop, request for request."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools

import pytest

from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster import (
  ClusterSimulator,
  DistServeModel,
  QuadraticTimes,
  ShortestQueue,
  SimulatedInstance,
  as_distserve_counts,
  percentiles,
)
from ringjax.serve.cluster.times.distserve_times import stated
from ringjax.serve.traces import TraceRequest, poisson_trace
from tests.helpers import refused

pytestmark = pytest.mark.usefixtures("unchecked")
OPT = stated()["opt-13b"][1]


def published(rows, times, stages, limit=50_000):
  """When answers end, by the published loop, one step of a stage at a time.

  Args:
    rows: (seconds when its prompt was read, prompt, answer's tokens) of each.

  Returns:
    The seconds, and how many steps left a row behind.
  """
  waiting = [collections.deque() for _ in range(stages)]
  busy = dict.fromkeys(range(-1, stages), False)
  made, ends, behind = [0] * len(rows), [0.0] * len(rows), 0
  number = itertools.count()
  events = [(at, next(number), -1, [n]) for n, (at, _, _) in enumerate(rows)]
  heapq.heapify(events)
  while events:
    now = events[0][0]
    # Prompts that were read in one call come at once.
    while events and events[0][0] == now:
      _, _, stage, batch = heapq.heappop(events)
      busy[stage] = False
      if stage == stages - 1:
        for n in batch:
          made[n] += 1
          ends[n] = now
        batch = [n for n in batch if made[n] < rows[n][2]]
      waiting[(stage + 1) % stages].extend(batch)
    for k, queue in enumerate(waiting):
      if busy[k] or not queue:
        continue
      left, turn = limit, []
      while queue and left >= rows[queue[0]][1] + made[queue[0]] + 1:
        left -= rows[queue[0]][1] + made[queue[0]] + 1
        turn.append(queue.popleft())
      behind += bool(queue)
      a, b, c = times.small if len(turn) < times.split else times.large
      tokens = limit - left
      ms = (a + b * tokens + c * len(turn)) / stages
      # A prompt and the tokens that were made enter; the next one does not.
      ms += 2 + 1e-4 * (tokens - len(turn)) if k == 0 else 0.0
      busy[k] = True
      heapq.heappush(events, (now + ms / 1e3, next(number), k, turn))
  return ends, behind


def model(**options):
  return DistServeModel(
    name="opt-13b",
    times=stated()["opt-13b"],
    capacity_tokens={(1, 1): 66_144, (1, 2): 190_000, (1, 4): 400_000},
    kv_token_bytes=819_200,
    **options,
  )


READER = SimulatedInstance(
  name="reader",
  role="prefill",
  times=QuadraticTimes(),
  capacity_tokens=2**40,
  max_prefill_tokens=2**40,
)


def run(trace, *instances):
  cluster = ClusterSimulator(instances=instances, policy=ShortestQueue())
  return cluster.run(as_distserve_counts(trace))


def trace_of(rate, seed=0):
  return poisson_trace(
    rate=rate, requests=70, prompt_tokens=2500, new_tokens=40, spread=0.8,
    seed=seed,
  )  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("stages", "rate"), [(1, 1.0), (1, 40.0), (2, 60.0), (4, 90.0)]
)
def test_times_are_those_of_the_published_loop(stages, rate):
  trace = trace_of(rate, seed=stages)
  decode = model().instance("decode", "decode", 1, stages)
  found = run(trace, READER, decode).served
  rows = [(x.arrival, x.prompt_tokens, x.new_tokens) for x in trace]
  want, behind = published(rows, OPT, stages)
  for one, end in zip(found, want, strict=True):
    assert one.last_token_s == pytest.approx(end, rel=1e-9), one.number
  assert (behind > 0) == (rate > 1)


def test_stages_add_to_prefill_alone():
  # (18.1 + 10.19 + 0.0712) / 2 + 2 ms a stage and 2.01 ms; 4 steps of decode
  # whose two stages take half each, and 2 ms and 0.01 behind 100 tokens.
  made = model()
  (one,) = run(
    [TraceRequest(arrival=0.0, prompt_tokens=100, new_tokens=4)],
    made.instance("prefill", "prefill", 1, 2),
    made.instance("decode", "decode", 1, 2),
  ).served
  read = 18.10 + 0.1019 * 100 + 7.12e-6 * 100**2
  assert one.ttft_s == pytest.approx((read + 4 + 2.01) / 1e3)
  step = 19.93 + 6.27e-4 * 102.5 + 0.0385
  assert one.tpot_s == pytest.approx((step + 2 + 1e-4 * 101.5) / 1e3)


def test_rows_that_are_kept_wait_before_they_join_instead():
  trace, turns = trace_of(40.0), model().instance("decode", "decode", 1, 1)
  turning, kept = (
    run(trace, READER, decode)
    for decode in (turns, dataclasses.replace(turns, decode="kept"))
  )
  made = [x.counters["decode"].decode_tokens for x in (turning, kept)]
  assert made == [sum(x.new_tokens for x in trace)] * 2
  turning, kept = (percentiles(x.served)["tpot_s"] for x in (turning, kept))
  assert turning["p50"] > 1.2 * kept["p50"]
  assert turning["p99"] < 0.9 * kept["p99"]


def test_an_instance_that_does_both_reads_before_the_rows_turn():
  times = QuadraticTimes(
    prefill_fixed_s=1.0, decode_fixed_s=0.1, decode_row_s=0.0
  )
  one = SimulatedInstance(
    name="one", times=times, decode="turns", max_decode_tokens=12,
    max_prefill_tokens=1,
  )  # fmt: skip
  cluster = ClusterSimulator(instances=[one], policy=ShortestQueue())
  trace = [
    TraceRequest(arrival=0.0, prompt_tokens=5, new_tokens=3, number=0),
    TraceRequest(arrival=0.1, prompt_tokens=5, new_tokens=3, number=1),
    TraceRequest(arrival=0.2, prompt_tokens=11, new_tokens=3, number=2),
  ]
  first, second, long = cluster.run(trace).served
  assert [x.first_token_s for x in (first, second)] == [1.0, 2.0]
  # Both rows in a step of 6 + 6 tokens; of 7 + 7 the first is alone.
  assert first.last_token_s == pytest.approx(2.2)
  assert second.last_token_s == pytest.approx(2.3)
  # 11 and 2 more are never in a step.
  assert "13" in long.rejected or "14" in long.rejected


def test_what_rows_that_take_turns_refuse():
  make = lambda **options: SimulatedInstance(
    name="one", times=QuadraticTimes(), decode="turns", **options
  )
  refused(OptionError, lambda: make(share="mixed"), "decode='kept'")
  refused(
    OptionError,
    lambda: ClusterSimulator(
      instances=[make()], policy=ShortestQueue(), transfer="push", stream=2,
      links=Link(bandwidth=1.0), kv_token_bytes=1,
    ),
    "decode='turns'",
  )  # fmt: skip
  refused(
    OptionError,
    lambda: SimulatedInstance(
      name="one", times=QuadraticTimes(), decode="turned"
    ),
    "turns",
  )
