"""What layers that stream from disk cost, by the log of a run.

Guarantees: costs are medians of what was logged; the prediction is the cost
model's own form "paper", that a layer takes the larger of its computing and of
the transfer that runs beside it, with these costs in place of rates.

Of one layer after another the log has when a call asked for it and how long it
waited. Between the end of a wait and the next call lies the computing of the
layer; beside it the next one was read.
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
