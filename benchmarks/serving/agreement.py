"""Agreement of simulators with a live engine, on one trace.

  python -m launch.bench serve --compare=simulated --requests=200 --rate=4

Guarantees: costs are fitted to other requests than those that are compared;
they are measured in turns with the replay, whenever it is idle, so that both
see the same machine, even if others use it. The trace's clock stops meanwhile.
Cost: the trace in real time, and as long again, for each round.

  live       an engine answers the trace in real time
  engine     `SimulatedEngine`: the same scheduler, steps of the fitted cost
             that vary as the measured ones
  cluster    `ClusterSimulator`, which plans services: one instance, the mean
             cost
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

# `rj.serve` is imported in a run: the import takes a second.
if TYPE_CHECKING:
  from ringjax.serve import Engine, StepCost, TraceRequest

SIDES = ("live", "engine", "cluster")
# Requests of the trace between two measurements.
_BETWEEN = 5
# Offset of request and block numbers between two editions of a trace;
# simulators derive 32-bit tokens from the numbers.
_EDITION_STRIDE = 2**24
Times = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementRound:
  """Result of one replay.

  Attributes:
    cost: Cost of a step, fitted to the calibration requests.
    steps: Number of steps that it was fitted to.
    unrest: Median of |seconds / fitted - 1| over the measured steps.
    times: TTFT and TPOT in seconds, p50 and p95, by side.
  """

  cost: StepCost
  steps: int
  unrest: float
  times: dict[str, Times]

  def ratio(self, side: str, name: str, point: str) -> float:
    """Ratio of a simulated time to the live one."""
    return self.times[side][name][point] / self.times["live"][name][point]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """Results of several rounds, and their medians.

  Attributes:
    rounds: Results of the rounds, in order.
    load: Load average of a minute before the first and after the last round.
    cores: Number of cores of this machine.
  """

  rounds: tuple[AgreementRound, ...]
  load: tuple[float, float]
  cores: int

  def median(self, side: str, name: str, point: str) -> float:
    """Median of a time over all rounds, in seconds."""
    return statistics.median(
      result.times[side][name][point] for result in self.rounds
    )

  def ratio(self, side: str, name: str, point: str) -> float:
    """Median over the rounds of the ratio of simulated to live."""
    return statistics.median(
      result.ratio(side, name, point) for result in self.rounds
    )

  def worst(self, side: str) -> float:
    """The largest distance of a ratio from 1."""
    return max(
      abs(self.ratio(side, name, point) - 1)
      for name in ("ttft_s", "tpot_s")
      for point in ("p50", "p95")
    )

  def lines(self) -> list[str]:
    """Lines of a table of all times and ratios."""
    table_lines = [
      f"{'':12}{'':6}{'live':>10}{'engine':>10}{'ratio':>8}"
      f"{'cluster':>10}{'ratio':>8}   ratios of rounds (engine)"
    ]
    for name in ("ttft_s", "tpot_s"):
      for point in ("p50", "p95"):
        at = [1000 * self.median(side, name, point) for side in SIDES]
        round_ratios = ", ".join(
          f"{result.ratio('engine', name, point):.2f}" for result in self.rounds
        )
        table_lines.append(
          f"{name.removesuffix('_s').upper():12}{point:6}{at[0]:7.1f} "
          f"ms{at[1]:7.1f} "
          f"ms{self.ratio('engine', name, point):8.2f}{at[2]:7.1f} "
          f"ms{self.ratio('cluster', name, point):8.2f}   {round_ratios}"
        )
    table_lines.append(
      "largest distance from live: "
      + ", ".join(f"{side} {self.worst(side):.0%}" for side in SIDES[1:])
    )
    unrest = statistics.median(result.unrest for result in self.rounds)
    table_lines.append(
      f"steps of one kind differ by {unrest:.0%} in the median; load "
      f"{self.load[0]:.1f} before, {self.load[1]:.1f} after, {self.cores} cores"
    )
    if max(self.load) > self.cores + 0.5:
      table_lines.append(
        "others use this machine: run it again when they do not"
      )
    return table_lines


def compare_simulators(
  engine: Engine,
  trace: Sequence[TraceRequest],
  calibration: Sequence[TraceRequest],
  *,
  rounds: int = 3,
  clock: Callable[[], float] = time.monotonic,
  progress: Callable[[int, int], None] = lambda round, done: None,
) -> Agreement:
  """Replays a trace live and in simulators that are calibrated in turns.

  Args:
    engine: Idle engine without a thread; later rounds find no prefixes of
      earlier ones.
    trace: Requests in the order of arrivals.
    calibration: Other requests of the same kind, in the order of arrivals, to
      measure the cost of steps.
    rounds: Number of repetitions.
    clock: Function that returns seconds, see `rj.serve.replay_live`.
    progress: Function of the round and its number of requests that have
      arrived.

  Raises:
    OptionError: If the engine is busy, no answer of the trace has a second
      token, or the engine refuses a request.
  """
  positive_int("rounds", rounds)
  if engine.busy:
    raise OptionError(
      "engine", "one that is busy", "one with nothing to do", "run it first"
    )
  if all(request.new_tokens < 2 for request in trace):
    raise OptionError(
      "trace",
      "answers of one token",
      "some of two or more: the time of a further one is compared",
      "ask for longer answers",
    )
  # Warm up: compile, and fill the system's caches.
  first = _edition(calibration[: 2 * engine.rows], 2 * rounds + 1)
  rj.serve.replay_live(engine, _rebased(first))
  load, results = os.getloadavg()[0], []
  for n in range(rounds):
    on_request = functools.partial(progress, n)
    others = _edition(calibration, 2 * n + 1)
    results.append(
      _round(engine, _edition(trace, 2 * n), others, clock, on_request)
    )
  return Agreement(
    rounds=tuple(results),
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
  pending = [
    calibration[i : i + size] for i in range(0, len(calibration), size)
  ]

  def measure() -> None:
    with rj.serve.record_steps(engine, record, clock=clock):
      rj.serve.replay_live(engine, _rebased(pending.pop(0)), clock=clock)

  def idle(done: int) -> None:
    if len(pending) > 1 and parts - len(pending) <= done / _BETWEEN:
      measure()

  measure()
  live = rj.serve.replay_live(
    engine, trace, progress=progress, idle=idle, clock=clock
  )
  while pending:
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
  simulated = rj.serve.replay_simulated(
    rj.serve.SimulatedEngine.like(engine, varying), trace
  )
  times = {
    side: {
      name: _points(getattr(result, field))
      for name, field in (("ttft_s", "first_s"), ("tpot_s", "token_s"))
    }
    for side, result in (("live", live), ("engine", simulated))
  }
  times["cluster"] = _cluster(engine, cost, trace)
  deviations = [
    abs(seconds / cost.of(step) - 1)
    for step, seconds in zip(record.steps, record.seconds, strict=True)
  ]
  return AgreementRound(
    cost=cost,
    steps=len(record.steps),
    unrest=statistics.median(deviations),
    times=times,
  )


def _rebased(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
  """Shifts arrivals so that the first request arrives at 0."""
  start = trace[0].arrival
  return [
    dataclasses.replace(request, arrival=request.arrival - start)
    for request in trace
  ]


def _edition(trace: Sequence[TraceRequest], n: int) -> list[TraceRequest]:
  """The n-th edition of a trace, which shares no prefix with others."""
  return [
    dataclasses.replace(
      request,
      number=request.number + n * _EDITION_STRIDE,
      blocks=tuple(block + n * _EDITION_STRIDE for block in request.blocks),
    )
    for request in trace
  ]


def _points(values: Sequence[float]) -> dict[str, float]:
  p50, p95 = np.percentile(np.asarray(values), (50, 95))
  return {"p50": float(p50), "p95": float(p95)}


def _cluster(
  engine: Engine, cost: StepCost, trace: Sequence[TraceRequest]
) -> Times:
  """Times of an instance like the engine, by the simulator of clusters."""
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
  result = cluster.ClusterSimulator(
    instances=[instance], policy=cluster.ShortestQueue()
  ).run(trace)
  return {
    "ttft_s": _points([request.ttft_s for request in result.served]),
    "tpot_s": _points(
      [request.tpot_s for request in result.served if request.new_tokens > 1]
    ),
  }
