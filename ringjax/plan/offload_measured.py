"""What layers that stream from disk cost, by the log of a run.

Guarantees: costs are medians of what was logged; the prediction is the cost
model's own form "paper", that a layer takes the larger of its computing and of
the transfer that runs beside it, with these costs in place of rates.

Of one layer after another the log has when a call asked for it and how long it
waited. Between the end of a wait and the next call lies the computing of the
layer; beside it the next one was read.

`forecast` reckons with another batch and other lengths: computing of a layer is
a function of the tokens of a pass, straight between those that were measured.
Attention is in it as far as it grows with tokens alone, so lengths at which it
takes more than the products want a measurement of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.plan import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredOffload:
  """Costs of a pass over the layers that are on disk.

  Attributes:
    layers: that are on disk.
    passes: whole ones in the log.
    read_s: seconds of reading a layer, by its number.
    compute_s: seconds from its wait to the next call, by its number.
    wait_s: seconds that calls waited in a pass, the median.
    pass_s: seconds of a pass, the median of what was measured.
    predicted_s: of a pass by the costs.
    read_bytes_s: bytes a second of all reads.
  """

  layers: int
  passes: int
  read_s: dict[int, float]
  compute_s: dict[int, float]
  wait_s: float
  pass_s: float
  predicted_s: float
  read_bytes_s: float

  @property
  def error(self) -> float:
    """Of the prediction, a part of what was measured."""
    return self.predicted_s / self.pass_s - 1

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return files.record(self, "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedRun:
  """A call of `generate` whose layers were read from disk.

  Attributes:
    rows: of the batch.
    prompt: tokens of a row that were read in one pass, padding included.
    new: tokens of each answer; each after the first is a pass.
    start: of the call, on the clock of the events.
    end: of the call.
    events: of the call, see `ringjax.models.Transformer.transfers`.
  """

  rows: int
  prompt: int
  new: int
  start: float
  end: float
  events: Sequence[Any]

  def passes(self) -> list[list[tuple[int, float, float]]]:
    """Of each pass (layer, seconds of its wait, and of its computing).

    Raises:
      OptionError: the log has another number of passes, or no layer on disk.
    """
    waits = [e for e in self.events if e.what == "wait" and e.part == "weights"]
    if not waits:
      raise OptionError(
        "events",
        "no waits for layers",
        "those of a model with layers on disk",
        'load it with placement="disk", or a fraction on disk',
      )
    stops = [*(e.start for e in waits[1:]), self.end]
    found: list[list[tuple[int, float, float]]] = []
    for e, stop in zip(waits, stops, strict=True):
      if e.layer == waits[0].layer:
        found.append([])
      spent = stop - e.start - e.seconds
      found[-1].append((e.layer, e.seconds, spent))
    if len(found) != self.new:
      raise OptionError(
        "events",
        f"{len(found)} passes for {self.new} new tokens",
        "one for the prompts, and one for each token after the first",
        "log a whole call that reads its prompt at once, and no row of which "
        "ends early",
      )
    return found


def forecast(
  runs: Sequence[StreamedRun], *, rows: int, prompt: int, new: int
) -> float:
  """Seconds of a call of another size, by the logs of some.

  Args:
    runs: calls of the same model on the same machine, without their compiling.
    rows: of the batch.
    prompt: tokens of a row, padding included.
    new: tokens of each answer.

  Raises:
    OptionError: no runs, or logs that are not whole.
  """
  if not runs:
    raise OptionError("runs", "none", "one or more", "log a call first")
  computing: dict[int, dict[int, list[float]]] = {}
  reading: dict[int, list[float]] = {}
  begins = []
  for run in runs:
    passes = run.passes()
    first = next(e for e in run.events if e.what == "wait")
    begins.append(first.start - run.start + first.seconds)
    for n, one in enumerate(passes):
      tokens = run.rows * (run.prompt if n == 0 else 1)
      for layer, _, seconds in one:
        computing.setdefault(layer, {}).setdefault(tokens, []).append(seconds)
    for e in run.events:
      if e.what == "read" and e.part == "weights":
        reading.setdefault(e.layer, []).append(e.seconds)
  read = {n: statistics.median(x) for n, x in reading.items()}
  order = [*computing]

  def of_pass(tokens: int, *, last: bool = False) -> float:
    total = 0.0
    for i, layer in enumerate(order):
      after = read.get(order[(i + 1) % len(order)], 0.0)
      if last and i == len(order) - 1:
        # Nothing of the call waits for what is read behind it.
        after = 0.0
      total += max(_between(computing[layer], tokens), after)
    return total

  begin, prompts = statistics.median(begins), rows * prompt
  if new == 1:
    return begin + of_pass(prompts, last=True)
  steps = (new - 2) * of_pass(rows) + of_pass(rows, last=True)
  return begin + of_pass(prompts) + steps


def _between(measured: dict[int, list[float]], tokens: int) -> float:
  """Seconds for a number of tokens, on the line between its neighbours."""
  known = sorted((n, statistics.median(x)) for n, x in measured.items())
  if len(known) == 1:
    return known[0][1]
  at = sum(n <= tokens for n, _ in known)
  (a, low), (b, high) = known[max(0, min(at, len(known) - 1) - 1) :][:2]
  slope = max(0.0, (high - low) / (b - a))
  return max(0.0, low + slope * (tokens - a))


def streamed_costs(events: Sequence[Any], *, skip: int = 1) -> MeasuredOffload:
  """The costs of a log, of calls that came one right behind the other.

  Args:
    events: see `ringjax.models.Transformer.transfers`.
    skip: passes at the beginning to leave out, of which the first reads what
      no layer before it could hide.

  Raises:
    OptionError: fewer than two whole passes behind these.
  """
  waits = [e for e in events if e.what == "wait" and e.part == "weights"]
  reads = [e for e in events if e.what == "read" and e.part == "weights"]
  first = min((e.layer for e in waits), default=0)
  starts = [n for n, e in enumerate(waits) if e.layer == first][skip:]
  if len(starts) < 3:
    raise OptionError(
      "events",
      f"{max(0, len(starts) - 1)} whole passes over the layers on disk",
      "two or more",
      "run a model with layers on disk for more tokens",
    )
  computing: dict[int, list[float]] = {}
  waited, took = [], []
  for begin, end in itertools.pairwise(starts):
    run = waits[begin : end + 1]
    took.append(run[-1].start - run[0].start)
    waited.append(sum(e.seconds for e in run[:-1]))
    for now, then in itertools.pairwise(run):
      spent = then.start - now.start - now.seconds
      computing.setdefault(now.layer, []).append(spent)
  since = waits[starts[0]].start
  reading: dict[int, list[float]] = {}
  late = [e for e in reads if e.start >= since] or reads
  for e in late:
    reading.setdefault(e.layer, []).append(e.seconds)
  read = {n: statistics.median(x) for n, x in sorted(reading.items())}
  compute = {n: statistics.median(x) for n, x in sorted(computing.items())}
  order = list(compute)
  after = {n: order[(i + 1) % len(order)] for i, n in enumerate(order)}
  # While a layer computes, the next one is read.
  predicted = sum(max(s, read.get(after[n], 0.0)) for n, s in compute.items())
  return MeasuredOffload(
    layers=len(compute),
    passes=len(took),
    read_s=read,
    compute_s=compute,
    wait_s=statistics.median(waited),
    pass_s=statistics.median(took),
    predicted_s=predicted,
    read_bytes_s=sum(e.nbytes for e in late)
    / max(1e-9, sum(e.seconds for e in late)),
  )
