"""What benchmarks of contestants share: the record, and the check before.

Law: a contestant whose result is off, or that raises, is not timed and gets a
reason in place of a number; nobody is left out. A record is whole after every
row: a run that is killed keeps the rows that it had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.bench import timing
from ringjax.bench.timing import Timing
from ringjax.errors import OptionError

Row = dict[str, Any]
# What a contestant runs, and what came out the first time.
Made = tuple[Callable[[], Any], Any]


def check(
  settings: Any,
  *,
  choices: Mapping[str, Sequence[str]],
  counts: Sequence[str],
) -> None:
  """Whether settings are such as can be run; each a value or a tuple of them.

  Args:
    settings: a dataclass.
    choices: what the values of some of its attributes are of.
    counts: attributes that are positive ints.

  Raises:
    OptionError: nothing given, or a value that cannot be.
  """
  for name in (*choices, *counts):
    given = getattr(settings, name)
    values = given if isinstance(given, tuple) else (given,)
    if name in choices:
      wrong = [x for x in values if x not in choices[name]]
      want, remedy = (
        f"some of {', '.join(choices[name])}",
        "remove or replace these names",
      )
    else:
      wrong = [x for x in values if x < 1]
      want, remedy = "positive ints", "count from 1"
    if wrong or not values:
      came = ", ".join(map(repr, wrong)) or "nothing"
      raise OptionError(name, came, want, remedy)


def numpy(outputs: Any) -> tuple[np.ndarray, ...]:
  """The arrays of a result, on the host."""
  return tuple(np.asarray(x) for x in jax.tree.leaves(outputs))


class Record:
  """The result of a run, written after every row.

  Attributes:
    result: what the file holds.
  """

  def __init__(
    self,
    name: str,
    settings: Any,
    *,
    order: Callable[[Row], Any],
    summary: Callable[[Sequence[Row]], Any],
    command: str = "",
    json: str | None = None,
    plot: str | None = None,
    append: bool = False,
    **facts: Any,
  ):
    """Checks what can be known beforehand, and begins.

    Args:
      name: of the benchmark.
      settings: a dataclass with `devices`.
      order: what tells rows apart, in the order of the tables.
      summary: of all rows.
      command: the command line, for the record.
      json: file for the result.
      plot: file for a picture, for which matplotlib has to be there.
      append: keeps what `json` holds already, but for rows that run anew.
      facts: more that a result depends on.

    Raises:
      OptionError: no file to append to, or one with rows of another machine;
        too few devices; no matplotlib.
    """
    if append and json is None:
      raise OptionError(
        "append", "no file", "--json", "name the file to append to"
      )
    if settings.devices > len(jax.devices()):
      raise OptionError(
        "devices",
        settings.devices,
        f"at most the {len(jax.devices())} devices there are",
        "make it smaller",
      )
    timing.check_plot(plot)
    self._order, self._summary, self._json = order, summary, json
    self.result: dict[str, Any] = {
      "benchmark": name,
      **timing.environment(command),
      **facts,
      "settings": dataclasses.asdict(settings),
      "complete": False,
      "rows": [],
    }
    self._rows: list[Row] = []
    if append and json is not None and os.path.exists(json):
      before = timing.read_json(json)
      timing.check_same_machine(json, before["machine"], self.result["machine"])
      last = {k: before[k] for k in ("command", "date", "versions", "machine")}
      self.result["earlier"] = [*before.get("earlier", []), last]
      self._rows = before["rows"]

  def add(self, row: Row, *, last: bool) -> None:
    """One more row; `last` of the run."""
    mine = self._order(row)
    self._rows = [r for r in self._rows if self._order(r) != mine] + [row]
    rows = sorted(self._rows, key=self._order)
    self.result |= {
      "rows": rows,
      "summary": self._summary(rows),
      "complete": last,
    }
    if self._json is not None:
      timing.write_json(self._json, self.result)
    gc.collect()


def load(contestants: Iterable[Any]) -> None:
  """Imports what they need, before anything is compiled.

  Importing flax makes JAX compile anew what is compiled already. Who fails
  here fails again in each row, with a reason.
  """
  for one in contestants:
    with contextlib.suppress(Exception):
      one.load()


def run(
  names: Sequence[str],
  make: Callable[[str], Made],
  compare: Callable[[Any], tuple[float, bool]],
  rounds: int,
  report: Callable[[int, str], None],
  machine: Mapping[str, Callable[[], Any]],
  *,
  warmup: int = 0,
) -> tuple[dict[str, Timing], dict[str, float]]:
  """Checks all contestants, then times in turn those that are right.

  Args:
    names: of the contestants.
    make: gets one ready.
    compare: (largest difference, whether it is wrong) of what came out.
    rounds: timed rounds.
    report: called before each of `steps(names, warmup + rounds)` steps.
    machine: what is timed beside them, without a check.
    warmup: rounds before, whose times are thrown away. The first run behind the
      others' checks finds its memory gone; of short runs that is a good part.

  Returns:
    The timings, and the differences of those that had a result.
  """
  runs = dict(machine)
  reasons: dict[str, str] = {}
  differences: dict[str, float] = {}
  for i, name in enumerate(names):
    report(1 + i, f"{name}, check")
    try:
      work, found = make(name)
      differences[name], wrong = compare(found)
      if wrong:
        reasons[name] = f"WRONG: off by {differences[name]:.1e}"
      else:
        runs[name] = work
      del work, found
    except Exception as error:
      reasons[name] = timing.reason(error)
  timings = timing.interleave(
    runs,
    rounds,
    warmup=warmup,
    on_run=lambda n, name: report(1 + len(names) + n, name),
  )
  timings |= {name: Timing(reason=text) for name, text in reasons.items()}
  return timings, differences


def steps(names: Sequence[str], rounds: int) -> int:
  """Steps of `run`, the reference before it included."""
  return 1 + len(names) + rounds * (len(names) + 1)


def compare(
  outputs: Sequence[np.ndarray],
  reference: Sequence[np.ndarray],
  tolerance: float,
) -> tuple[float, bool]:
  """(largest absolute difference, whether any output is off).

  `tolerance` is of the largest number of the reference, or of 1 where that is
  smaller.
  """
  worst, wrong = 0.0, len(outputs) != len(reference)
  for a, b in zip(outputs, reference, strict=False):
    if a.shape != b.shape:
      return float("nan"), True
    difference = float(np.max(np.abs(a.astype(b.dtype) - b)))
    scale = max(1.0, float(np.max(np.abs(b))))
    # Not `>`: NaN is wrong.
    wrong = wrong or not difference <= tolerance * scale
    worst = max(worst, difference) if difference == difference else difference
  return worst, wrong


def lines(row: Row, more: Callable[[Any], str]) -> list[str]:
  """A line of each contestant: its time and `more` of its result, or why none.

  Times begin in column 28.
  """
  found = []
  for name, one in row["results"].items():
    devices = one["devices"]
    line = f"  {name:15} {devices:2} device{'s' if devices > 1 else ' '}"
    if one["median_s"] is None:
      line += f"           - {one['reason']}"
    else:
      line += f"{one['median_s'] * 1e3:11.1f} ms {more(one)}"
    found.append(line)
  return found


def best(
  row: Row, names: Sequence[str], key: str = "median_s"
) -> tuple[str, float] | None:
  """(name, time) of the fastest of `names` that has a number."""
  found = [
    (name, row["results"][name][key])
    for name in names
    if row["results"].get(name, {}).get(key)
  ]
  return min(found, key=lambda x: x[1], default=None)
