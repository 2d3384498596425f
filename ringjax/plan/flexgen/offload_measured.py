"""Costs of layers that stream from disk, measured from the log of a run.

Guarantees: costs are medians of logged times; the prediction is the cost
model's form "paper", in which a layer takes the larger of its compute and of
the transfer that overlaps it, with these costs instead of rates.

For each layer the log has the time at which a call asked for it and how long it
waited. Between the end of a wait and the next call the layer was computed;
meanwhile the next layer was read.

`forecast` predicts other batches and lengths: the compute time of a layer is a
piecewise linear function of the tokens of a pass, through the measured ones.
Attention is included as far as it grows with tokens alone, so lengths at which
it takes more than the products need their own measurement.
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
  """Costs of a pass over the layers on disk.

  Attributes:
    layers: Number of layers on disk.
    passes: Number of complete passes in the log.
    read_s: Seconds of reading a layer, by its number.
    compute_s: Seconds from a layer's wait to the next call, by its number.
    wait_s: Median seconds that calls waited in a pass.
    pass_s: Median measured seconds of a pass.
    predicted_s: Seconds of a pass, predicted from the costs.
    read_bytes_s: Bandwidth of all reads in bytes per second.
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
    """Relative error of the prediction."""
    return self.predicted_s / self.pass_s - 1

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedRun:
  """A call of `generate` whose layers were read from disk.

  Attributes:
    rows: Number of rows of the batch.
    prompt: Tokens of a row in the one prefill pass, including padding.
    new: Tokens of each answer; each after the first is a pass.
    start: Start of the call, on the clock of the events.
    end: End of the call.
    events: Events of the call, see `ringjax.models.Transformer.transfers`.
  """

  rows: int
  prompt: int
  new: int
  start: float
  end: float
  events: Sequence[Any]

  def passes(self) -> list[list[tuple[int, float, float]]]:
    """(layer, seconds of its wait, seconds of its compute) of each pass.

    Raises:
      OptionError: If the log has another number of passes, or no layer on disk.
    """
    waits = [
      event
      for event in self.events
      if event.what == "wait" and event.part == "weights"
    ]
    if not waits:
      raise OptionError(
        "events",
        "no waits for layers",
        "those of a model with layers on disk",
        'load it with placement="disk", or a fraction on disk',
      )
    stops = [*(event.start for event in waits[1:]), self.end]
    passes: list[list[tuple[int, float, float]]] = []
    for wait, stop in zip(waits, stops, strict=True):
      if wait.layer == waits[0].layer:
        passes.append([])
      spent = stop - wait.start - wait.seconds
      passes[-1].append((wait.layer, wait.seconds, spent))
    if len(passes) != self.new:
      raise OptionError(
        "events",
        f"{len(passes)} passes for {self.new} new tokens",
        "one for the prompts, and one for each token after the first",
        "log a whole call that reads its prompt at once, and no row of which "
        "ends early",
      )
    return passes


def forecast(
  runs: Sequence[StreamedRun], *, rows: int, prompt: int, new: int
) -> float:
  """Predict the seconds of a call of another size from the logs of some calls.

  Args:
    runs: Calls of the same model on the same machine, without compilation.
    rows: Number of rows of the batch.
    prompt: Tokens of a row, including padding.
    new: Tokens of each answer.

  Raises:
    OptionError: If there are no runs, or logs are incomplete.
  """
  if not runs:
    raise OptionError("runs", "none", "one or more", "log a call first")
  computing: dict[int, dict[int, list[float]]] = {}
  reading: dict[int, list[float]] = {}
  begins = []
  for run in runs:
    passes = run.passes()
    first_wait = next(event for event in run.events if event.what == "wait")
    begins.append(first_wait.start - run.start + first_wait.seconds)
    for n, timed_layers in enumerate(passes):
      tokens = run.rows * (run.prompt if n == 0 else 1)
      for layer, _, seconds in timed_layers:
        computing.setdefault(layer, {}).setdefault(tokens, []).append(seconds)
    for event in run.events:
      if event.what == "read" and event.part == "weights":
        reading.setdefault(event.layer, []).append(event.seconds)
  read = {n: statistics.median(samples) for n, samples in reading.items()}
  order = [*computing]

  def pass_seconds(tokens: int, *, last: bool = False) -> float:
    total = 0.0
    for i, layer in enumerate(order):
      read_after = read.get(order[(i + 1) % len(order)], 0.0)
      if last and i == len(order) - 1:
        # No layer of the call waits for the read after the last one.
        read_after = 0.0
      total += max(_interpolated(computing[layer], tokens), read_after)
    return total

  begin, prompts = statistics.median(begins), rows * prompt
  if new == 1:
    return begin + pass_seconds(prompts, last=True)
  steps = (new - 2) * pass_seconds(rows) + pass_seconds(rows, last=True)
  return begin + pass_seconds(prompts) + steps


def _interpolated(measured: dict[int, list[float]], tokens: int) -> float:
  """Seconds for a number of tokens, interpolated between its neighbours."""
  points = sorted(
    (n, statistics.median(samples)) for n, samples in measured.items()
  )
  if len(points) == 1:
    return points[0][1]
  index = sum(n <= tokens for n, _ in points)
  (a, low), (b, high) = points[max(0, min(index, len(points) - 1) - 1) :][:2]
  slope = max(0.0, (high - low) / (b - a))
  return max(0.0, low + slope * (tokens - a))


def streamed_costs(events: Sequence[Any], *, skip: int = 1) -> MeasuredOffload:
  """Measure costs from a log of calls that directly followed each other.

  Args:
    events: Events, see `ringjax.models.Transformer.transfers`.
    skip: Number of passes at the beginning to leave out; the first one reads
      layers that no earlier layer could hide.

  Raises:
    OptionError: If fewer than two complete passes remain.
  """
  waits = [
    event
    for event in events
    if event.what == "wait" and event.part == "weights"
  ]
  reads = [
    event
    for event in events
    if event.what == "read" and event.part == "weights"
  ]
  first = min((event.layer for event in waits), default=0)
  starts = [n for n, event in enumerate(waits) if event.layer == first][skip:]
  if len(starts) < 3:
    raise OptionError(
      "events",
      f"{max(0, len(starts) - 1)} whole passes over the layers on disk",
      "two or more",
      "run a model with layers on disk for more tokens",
    )
  computing: dict[int, list[float]] = {}
  waited, pass_times = [], []
  for begin, end in itertools.pairwise(starts):
    run = waits[begin : end + 1]
    pass_times.append(run[-1].start - run[0].start)
    waited.append(sum(wait.seconds for wait in run[:-1]))
    for wait, next_wait in itertools.pairwise(run):
      spent = next_wait.start - wait.start - wait.seconds
      computing.setdefault(wait.layer, []).append(spent)
  since = waits[starts[0]].start
  reading: dict[int, list[float]] = {}
  later_reads = [event for event in reads if event.start >= since] or reads
  for event in later_reads:
    reading.setdefault(event.layer, []).append(event.seconds)
  read = {
    n: statistics.median(samples) for n, samples in sorted(reading.items())
  }
  compute = {
    n: statistics.median(samples) for n, samples in sorted(computing.items())
  }
  order = list(compute)
  next_layer = {n: order[(i + 1) % len(order)] for i, n in enumerate(order)}
  # While a layer computes, the next one is read.
  predicted = sum(
    max(s, read.get(next_layer[n], 0.0)) for n, s in compute.items()
  )
  return MeasuredOffload(
    layers=len(compute),
    passes=len(pass_times),
    read_s=read,
    compute_s=compute,
    wait_s=statistics.median(waited),
    pass_s=statistics.median(pass_times),
    predicted_s=predicted,
    read_bytes_s=sum(event.nbytes for event in later_reads)
    / max(1e-9, sum(e.seconds for e in later_reads)),
  )
