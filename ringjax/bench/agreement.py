"""Whether simulators say what a live engine does: one trace, all of them.

  python -m launch.bench serve --compare=simulated --requests=200 --rate=4

Guarantees: costs are fitted to other requests than those that are compared;
these are measured by turns, while the replay has nothing to do, so that both
see the same machine, also one that others use. The trace's clock stands then.
Cost: the trace in real time, and as long again, for each round.

  live       an engine answers the trace in real time
  engine     `SimulatedEngine`: the same scheduler, steps of the fitted cost
             that vary as the measured ones
  cluster    `ClusterSimulator`, which plans services: one instance, the cost's
             mean
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

import ringjax as rj
from ringjax.checks import positive_int
from ringjax.errors import OptionError

# What `rj.serve` needs is imported when something runs: it takes a second.
if TYPE_CHECKING:
  from ringjax.serve import Engine, StepCost, TraceRequest

SIDES = ("live", "engine", "cluster")
# Requests of the trace between two measurements.
_BETWEEN = 5
# Numbers of requests and blocks, of which simulators make 32-bit tokens.
_APART = 2**24
Times = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementRound:
  """What came out of one replay.

  Attributes:
    cost: of a step, fitted to the requests beside the trace.
    steps: that it was fitted to.
    unrest: of the measured steps the median of |seconds / fitted - 1|.
    times: by side, of TTFT and TPOT in seconds p50 and p95.
  """

  cost: StepCost
  steps: int
  unrest: float
  times: dict[str, Times]

  def ratio(self, side: str, name: str, point: str) -> float:
    """Simulated by live."""
    return self.times[side][name][point] / self.times["live"][name][point]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """Several rounds, and what is in the middle of them.

  Attributes:
    rounds: in their order.
    load: processes that wanted a core before the first one and after the last
      one, on average of a minute.
    cores: of this machine.
  """

  rounds: tuple[AgreementRound, ...]
  load: tuple[float, float]
  cores: int

  def median(self, side: str, name: str, point: str) -> float:
    """Seconds, of all rounds."""
    return statistics.median(
      one.times[side][name][point] for one in self.rounds
    )

  def ratio(self, side: str, name: str, point: str) -> float:
    """The median of the rounds' ratios, simulated by live."""
    return statistics.median(
      one.ratio(side, name, point) for one in self.rounds
    )

  def worst(self, side: str) -> float:
    """The largest distance of a ratio from 1."""
    return max(
      abs(self.ratio(side, name, point) - 1)
      for name in ("ttft_s", "tpot_s")
      for point in ("p50", "p95")
    )

  def lines(self) -> list[str]:
    """For people."""
    found = [
      f"{'':12}{'':6}{'live':>10}{'engine':>10}{'ratio':>8}"
      f"{'cluster':>10}{'ratio':>8}   ratios of rounds (engine)"
    ]
    for name in ("ttft_s", "tpot_s"):
      for point in ("p50", "p95"):
        at = [1000 * self.median(side, name, point) for side in SIDES]
        each = ", ".join(
          f"{one.ratio('engine', name, point):.2f}" for one in self.rounds
        )
        found.append(
          f"{name.removesuffix('_s').upper():12}{point:6}{at[0]:7.1f} ms"
          f"{at[1]:7.1f} ms{self.ratio('engine', name, point):8.2f}"
          f"{at[2]:7.1f} ms{self.ratio('cluster', name, point):8.2f}   {each}"
        )
    found.append(
      "largest distance from live: "
      + ", ".join(f"{side} {self.worst(side):.0%}" for side in SIDES[1:])
    )
    unrest = statistics.median(one.unrest for one in self.rounds)
    found.append(
      f"steps of one kind differ by {unrest:.0%} in the median; load "
      f"{self.load[0]:.1f} before, {self.load[1]:.1f} after, {self.cores} cores"
    )
    if max(self.load) > self.cores + 0.5:
      found.append("others use this machine: run it again when they do not")
    return found


def compare_simulators(
  engine: Engine,
  trace: Sequence[TraceRequest],
  calibration: Sequence[TraceRequest],
  *,
  rounds: int = 3,
  clock: Callable[[], float] = time.monotonic,
  progress: Callable[[int, int], None] = lambda round, done: None,
) -> Agreement:
  """Replays a trace live and in simulators that were calibrated beside it.

  Args:
    engine: one without a thread, with nothing to do; later rounds find no
      prefixes of earlier ones.
    trace: in the order of arrivals.
    calibration: other requests of the same kind, in the order of arrivals,
      which are measured.
    rounds: how often all of it is done.
    clock: seconds, see `rj.serve.replay_live`.
    progress: called with the round and how many requests of it have come.

  Raises:
    OptionError: the engine is busy, no answer of the trace has a second token,
      or the engine has refused a request of it.
  """
  positive_int("rounds", rounds)
  if engine.busy:
    raise OptionError(
      "engine", "one that is busy", "one with nothing to do", "run it first"
    )
  if all(one.new_tokens < 2 for one in trace):
    raise OptionError(
      "trace",
      "answers of one token",
      "some of two or more: the time of a further one is compared",
      "ask for longer answers",
    )
  # Compiles, and lets the system's caches fill.
  first = _apart(calibration[: 2 * engine.rows], 2 * rounds + 1)
  rj.serve.replay_live(engine, _now(first))
  load, found = os.getloadavg()[0], []
  for n in range(rounds):
    at = functools.partial(progress, n)
    others = _apart(calibration, 2 * n + 1)
    found.append(_round(engine, _apart(trace, 2 * n), others, clock, at))
  return Agreement(
    rounds=tuple(found),
    load=(load, os.getloadavg()[0]),
    cores=os.cpu_count() or 1,
  )


def _round(
  engine: Engine,
  trace: Sequence[TraceRequest],
  calibration: Sequence[TraceRequest],
  clock: Callable[[], float],
  progress: Callable[[int], None],
) -> AgreementRound:
  record = rj.serve.StepRecord()
  parts = max(1, math.ceil(len(trace) / _BETWEEN))
  size = math.ceil(len(calibration) / parts)
  left = [calibration[i : i + size] for i in range(0, len(calibration), size)]

  def measure() -> None:
    with rj.serve.record_steps(engine, record, clock=clock):
      rj.serve.replay_live(engine, _now(left.pop(0)), clock=clock)

  def idle(done: int) -> None:
    if len(left) > 1 and parts - len(left) <= done / _BETWEEN:
      measure()

  measure()
  live = rj.serve.replay_live(
    engine, trace, progress=progress, idle=idle, clock=clock
  )
  while left:
    measure()
  if live.refused:
    raise OptionError(
      "trace",
      f"{live.refused} requests that are too long",
      f"{engine.longest:,} tokens of a prompt and its answer at most",
      "make the engine with a larger longest=",
    )
  cost = record.fit()
  varying = rj.serve.VaryingCost(cost, record)
  same = rj.serve.replay_simulated(
    rj.serve.SimulatedEngine.like(engine, varying), trace
  )
  times = {
    side: {
      name: _points(getattr(result, field))
      for name, field in (("ttft_s", "first_s"), ("tpot_s", "token_s"))
    }
    for side, result in (("live", live), ("engine", same))
  }
  times["cluster"] = _cluster(engine, cost, trace)
  away = [
    abs(seconds / cost.of(step) - 1)
    for step, seconds in zip(record.steps, record.seconds, strict=True)
  ]
  return AgreementRound(
    cost=cost,
    steps=len(record.steps),
    unrest=statistics.median(away),
    times=times,
  )


def _now(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
  """Requests of which the first one comes at once."""
  start = trace[0].arrival
  return [
    dataclasses.replace(one, arrival=one.arrival - start) for one in trace
  ]


def _apart(trace: Sequence[TraceRequest], n: int) -> list[TraceRequest]:
  """The n-th edition, of which no other one has a prefix."""
  return [
    dataclasses.replace(
      one,
      number=one.number + n * _APART,
      blocks=tuple(block + n * _APART for block in one.blocks),
    )
    for one in trace
  ]


def _points(values: Sequence[float]) -> dict[str, float]:
  p50, p95 = np.percentile(np.asarray(values), (50, 95))
  return {"p50": float(p50), "p95": float(p95)}


def _cluster(
  engine: Engine, cost: StepCost, trace: Sequence[TraceRequest]
) -> Times:
  """What the simulator of clusters says of an instance like the engine."""
  from ringjax.serve import cluster

  limits, tree = engine.scheduler.limits, engine.scheduler.tree
  capacity = tree.groups[0].pages * tree.shards * tree.page
  instance = cluster.SimulatedInstance(
    name="one",
    times=cluster.engine_times(cost),
    capacity_tokens=capacity,
    max_rows=limits.rows,
    max_prefill_tokens=min(
      limits.budget, limits.rows + limits.pieces * limits.piece
    ),
    max_prefill_rows=limits.pieces,
    share="ahead",
    prefix_cache_tokens=capacity if engine.scheduler.reuse else 0,
  )
  found = cluster.ClusterSimulator(
    instances=[instance], policy=cluster.ShortestQueue()
  ).run(trace)
  return {
    "ttft_s": _points([one.ttft_s for one in found.served]),
    "tpot_s": _points(
      [one.tpot_s for one in found.served if one.new_tokens > 1]
    ),
  }
