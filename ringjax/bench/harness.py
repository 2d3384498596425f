"""The harness of all benchmarks: settings, checks, timing, record, tables.

A benchmark is a `Benchmark`: its cases, the contestants of a case, how one is
built, what a right result is, and what a row holds. The harness does the rest.

Guarantees: all contestants of a case get the same inputs, in place before the
clock starts, and run in turn (see `timing`). A contestant whose result is off
(WRONG), or that raises, is not timed and gets a reason in place of a number;
none is left out. The file of a record is whole after every row, so that a run
that is killed keeps the rows that it had, and `append` adds to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TextIO

import jax
import numpy as np
from jaxtyping import PyTree

from ringjax import checks
from ringjax.bench import one_device, timing
from ringjax.bench.one_device import OneDeviceProcess, Trial
from ringjax.bench.timing import Timing
from ringjax.errors import OptionError
from ringjax.plan import draw as pictures

Row = dict[str, Any]
# Called with the fraction of a row that is done and a label of what runs now.
Report = Callable[[float | int, str], None]

PASSES = ("fwd", "fwdbwd")
# Columns of names, in the order of the tables.
_NAMES = {"dtype": ("", "float32", "bfloat16", "float16"), "pass": PASSES}


# ---------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------


def option(
  default: object,
  choices: Collection[str] | None = None,
  *,
  flag: str | None = "",
  several: bool = False,
) -> Any:
  """A field of settings, which a flag sets and which is checked.

  Args:
    default: its value; None in a field that may be left out.
    choices: the names that it may have; () is any text, None positive ints.
    flag: its flag; "" is the field's own name, None is none.
    several: whether it takes several values, as every tuple does.
  """
  several = several or isinstance(default, tuple)
  facts = {"choices": choices, "flag": flag, "several": several}
  return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
  """The settings of a benchmark, whose options are checked when it is made.

  Raises:
    OptionError: an option has no value, or one that it may not have.
  """

  def __post_init__(self) -> None:
    for flag, field in self.options().items():
      given, choices = getattr(self, field.name), field.metadata["choices"]
      if given is None and field.default is None:
        continue
      values = given if isinstance(given, tuple) else (given,)
      if not values:
        raise OptionError(
          field.name, "nothing", "one value or more", f"pass --{flag}=VALUE"
        )
      for value in values:
        if choices is None:
          checks.positive_int(field.name, value)
        elif choices:
          checks.one_of(field.name, value, choices)

  @classmethod
  def options(cls) -> dict[str, dataclasses.Field[Any]]:
    """The fields that are options, by their flags, or names without one."""
    return {
      field.metadata["flag"] or field.name: field
      for field in dataclasses.fields(cls)
      if field.metadata
    }

  @classmethod
  def flags(cls) -> tuple[str, ...]:
    """The flags that set an option."""
    found = cls.options().items()
    return tuple(f for f, x in found if x.metadata["flag"] is not None)

  def with_flags(self, given: Mapping[str, Any]) -> BenchmarkSettings:
    """A copy whose options have the values of flags.

    Args:
      given: by the flag's name its value, several of them as a list of texts;
        None where the flag was not passed.

    Raises:
      OptionError: a value is not of its option's kind.
    """
    chosen: dict[str, Any] = {}
    for flag in self.flags():
      field, value = self.options()[flag], given.get(flag)
      if value is None:
        continue
      if isinstance(value, list):
        numbers = field.metadata["choices"] is None
        value = tuple(_integer(flag, x) if numbers else x for x in value)
        if not field.metadata["several"]:
          if len(value) != 1:
            raise OptionError(
              flag, f"{len(value)} values", "one value", f"pass one --{flag}"
            )
          (value,) = value
      chosen[field.name] = value
    if "heads" in chosen and "kv_heads" in self.options():
      chosen.setdefault("kv_heads", chosen["heads"])
    return dataclasses.replace(self, **chosen)


def combinations(case: type, settings: Any, **several: str) -> list[Any]:
  """A case of each combination of the values of some settings.

  Args:
    case: the class of the cases, whose other fields are settings themselves.
    settings: of the benchmark.
    several: by field the setting that holds its values; the last one changes
      first.
  """
  names = [field.name for field in dataclasses.fields(case)]
  one = {n: getattr(settings, n) for n in names if n not in several}
  values = [getattr(settings, name) for name in several.values()]
  return [
    case(**one, **dict(zip(several, found, strict=True)))
    for found in itertools.product(*values)
  ]


def _integer(flag: str, text: str) -> int:
  try:
    return int(text)
  except ValueError:
    raise OptionError(
      flag, repr(text), "an integer", f"pass one, e.g. --{flag}=64"
    ) from None


# ---------------------------------------------------------------------------
# Contestants
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Runnable:
  """A contestant with its inputs in place.

  Attributes:
    run: does the work of the case once.
    check: the result that is compared with the reference; warms up as well.
  """

  run: Callable[[], Any]
  check: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Contestant:
  """An implementation that takes part in a benchmark.

  Attributes:
    build: puts inputs of a case in place: (case, inputs) -> Runnable.
    ours: whether it is this package.
    sharded: whether it runs on all devices, or on one.
    one_device: whether it runs in a process that has one device.
    parts: of the benchmark, in which it takes part; None is all.
    load: imports what it needs.
  """

  build: Callable[[Any, Any], Runnable]
  ours: bool = False
  sharded: bool = False
  one_device: bool = False
  parts: tuple[str, ...] | None = None
  load: Callable[[], Any] = lambda: None

  def trial(self, case: Any, inputs: PyTree) -> Trial:
    """Builds it and runs it once."""
    self.load()
    built = self.build(case, inputs)
    return built.run, built.check()


def host_arrays(outputs: PyTree) -> tuple[np.ndarray, ...]:
  """The arrays of a result as NumPy arrays."""
  return tuple(np.asarray(x) for x in jax.tree.leaves(outputs))


def compare(
  outputs: Sequence[np.ndarray],
  reference: Sequence[np.ndarray],
  tolerance: float,
) -> tuple[float, bool]:
  """(largest absolute difference, whether any output is off).

  Args:
    outputs: of a contestant.
    reference: what they should be.
    tolerance: of the largest number of the reference, or of 1 where that is
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


# ---------------------------------------------------------------------------
# Benchmarks
# ---------------------------------------------------------------------------


_print = functools.partial(print, flush=True)


def _report(
  progress: timing.Progress,
  case: Any,
  done: float,
  weight: float,
  part: float | int,
  label: str,
) -> None:
  progress.at(done + weight * part, f"{case}: {label}")


class Benchmark:
  """A benchmark: what is measured, and how a run of it goes.

  A subclass lists `cases`, makes the `row` of one, mostly by `measure`, and
  says how rows are shown.

  Attributes:
    name: of the benchmark.
    options: the class of its settings.
    quick: settings of a short run, or None.
    contestants: by name.
    columns: of a row, that make its key, see `order`.
    parts: names of a column "part" or "kind", in their order.
    files: the flags that are arguments of `run`.
    summary_name: the key of the summary in the record.
  """

  name: ClassVar[str]
  options: ClassVar[type[BenchmarkSettings]]
  quick: ClassVar[BenchmarkSettings | None] = None
  contestants: ClassVar[Mapping[str, Contestant]] = {}
  columns: ClassVar[tuple[str, ...]] = ()
  parts: ClassVar[tuple[str, ...]] = ()
  files: ClassVar[tuple[str, ...]] = ("json", "plot", "append")
  summary_name: ClassVar[str] = "summary"

  def __init__(self, settings: Any):
    self.settings = settings
    self.process = OneDeviceProcess()
    # What is open during a run.
    self.stack = contextlib.ExitStack()
    self.stack.callback(self.process.close)

  @property
  def cases(self) -> Sequence[Any]:
    """The cases, each of which becomes a row."""
    raise NotImplementedError

  def weight(self, case: Any) -> float:
    """The cost of a case in any unit, by which progress is shown."""
    del case
    return 1.0

  def facts(self) -> Row:
    """Entries of the record beside its settings and rows."""
    return {}

  def row(self, case: Any, report: Report) -> Row:
    """Measures a case."""
    raise NotImplementedError

  def table(self, case: Any, row: Row) -> str:
    """The text of a case's row."""
    del case, row
    return ""

  def summary(self, rows: Sequence[Row]) -> Row:
    """Ratios and other figures that are computed from all rows."""
    raise NotImplementedError

  def closing(self, result: Row) -> str:
    """The text of a whole result, which follows those of its rows."""
    del result
    return ""

  def draw(self, result: Row, path: str) -> None:
    """Draws a result into a PNG."""
    raise NotImplementedError

  def order(self, row: Row) -> tuple[Any, ...]:
    """The key of a row, by which rows are sorted and replaced."""
    names = {"part": self.parts, "kind": self.parts, **_NAMES}
    place = lambda name, x: names[name].index(x) if name in names else x or 0
    return tuple(place(name, row[name]) for name in self.columns)

  def devices(self, name: str) -> int:
    """The devices that a contestant runs on."""
    one = self.contestants.get(name)
    return self.settings.devices if one is not None and one.sharded else 1

  def measure(
    self,
    names: Sequence[str],
    build: Callable[[str], Trial],
    compare: Callable[[Any], tuple[float | None, bool]],
    report: Report,
    *,
    machine: Mapping[str, Callable[[], Any]] | None = None,
    warmup: int = 0,
    steps: int = 1,
  ) -> tuple[dict[str, Row], dict[str, Timing]]:
    """Checks all contestants, then times in turn those that are right.

    Args:
      names: of the contestants.
      build: builds one.
      compare: (largest difference, whether it is wrong) of a first result.
      report: called before each run.
      machine: what is timed beside them, without a check.
      warmup: rounds before, whose times are thrown away. The first run behind
        the others' checks finds its memory gone; of short runs that is a good
        part.
      steps: of a run, whose time is reported of one.

    Returns:
      What a row holds of each contestant, and the timings of `machine`.
    """
    runs, rounds = dict(machine or {}), self.settings.rounds
    total = 1 + len(names) + (warmup + rounds) * (len(names) + len(runs))
    results: dict[str, Row] = {}
    for i, name in enumerate(names):
      results[name] = result_row(Timing(), None, self.devices(name))
      report((1 + i) / total, f"{name}, check")
      try:
        work, found = build(name)
        difference, wrong = compare(found)
        results[name]["max_abs_difference"] = difference
        if wrong:
          results[name]["reason"] = f"WRONG: off by {difference:.1e}"
        else:
          runs[name] = work
        del work, found
      except Exception as error:
        results[name]["reason"] = timing.reason(error)
    timings = timing.interleave(
      runs,
      rounds,
      warmup=warmup,
      on_run=lambda n, name: report((1 + len(names) + n) / total, name),
    )
    for name in results:
      if name in runs:
        one = timings.pop(name)
        one = Timing(tuple(x / steps for x in one.seconds), one.reason)
        difference = results[name]["max_abs_difference"]
        results[name] = result_row(one, difference, self.devices(name))
    return results, timings

  def placed(
    self, one_device_wanted: bool, build: Callable[..., Trial], *args: Any
  ) -> Trial:
    """`build(*args)`, in a process with one device where that is wanted."""
    if one_device_wanted and one_device.useful():
      return self.process.build(build, *args)
    return build(*args)

  @classmethod
  def run(
    cls,
    settings: BenchmarkSettings,
    *,
    command: str = "",
    json: str | None = None,
    plot: str | None = None,
    append: bool = False,
    stream: TextIO | io.TextIOBase | None = None,
    say: Callable[[str], Any] = _print,
  ) -> Row:
    """Runs the benchmark; prints, writes and returns the result.

    Args:
      settings: what to run.
      command: the command line, for the record.
      json: file for the result; rewritten after every row.
      plot: file for a picture of all rows; needs matplotlib.
      append: keeps the rows that `json` holds already, but for those that run
        anew.
      stream: where progress is shown; default stderr.
      say: prints a text.

    Raises:
      OptionError: there are fewer devices than are asked for, no matplotlib,
        or no rows of this machine to append to.
    """
    if append and json is None:
      raise OptionError(
        "append", "no --json", "a file with rows to keep", "pass --json=FILE"
      )
    devices = getattr(settings, "devices", 1)
    if devices > len(jax.devices()):
      raise OptionError(
        "devices",
        devices,
        f"at most the {len(jax.devices())} devices there are",
        f"pass --devices={len(jax.devices())}",
      )
    if plot is not None:
      # Without matplotlib it fails now, not after hours of work.
      pictures.figures()
    self = cls(settings)
    rows: list[Row] = []
    result: Row = {
      "benchmark": self.name,
      **timing.environment(command),
      "settings": dataclasses.asdict(settings),
      "complete": False,
      "rows": rows,
    }
    if append and json is not None and os.path.exists(json):
      before = timing.read_json(json)
      timing.check_same_machine(json, before["machine"], result["machine"])
      last = {k: before[k] for k in ("command", "date", "versions", "machine")}
      result["earlier"] = [*before.get("earlier", []), last]
      rows = before["rows"]
    with self.stack:
      self.load()
      result |= self.facts()
      cases, done = self.cases, 0.0
      weights = [self.weight(case) for case in cases]
      progress = timing.Progress(sum(weights), stream)
      for case, weight in zip(cases, weights, strict=True):
        report = functools.partial(_report, progress, case, done, weight)
        report(0, "reference")
        row = self.row(case, report)
        self.process.clear()
        done += weight
        rows = [r for r in rows if self.order(r) != self.order(row)] + [row]
        rows.sort(key=self.order)
        result |= {
          "rows": rows,
          self.summary_name: self.summary(rows),
          "complete": case is cases[-1],
        }
        if json is not None:
          timing.write_json(json, result)
        gc.collect()
        progress.clear()
        if text := self.table(case, row):
          say(text)
    if text := self.closing(result):
      say(text)
    if plot is not None:
      self.draw(result, plot)
    return result

  def load(self) -> None:
    """Imports what contestants need, before anything is compiled.

    Importing flax makes JAX compile anew what is compiled already. A contestant
    that fails here fails again in each row, with a reason.
    """
    for name in getattr(self.settings, "contestants", ()):
      if name in self.contestants:
        with contextlib.suppress(Exception):
          self.contestants[name].load()


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


def timing_row(one: Timing) -> Row:
  """The times of what is timed beside contestants."""
  assert one.median_s is not None, one.reason
  return {
    "median_s": one.median_s,
    "min_s": one.min_s,
    "seconds": list(one.seconds),
  }


def product_row(one: Timing, size: int) -> Row:
  """The machine's matrix product of `timing.gemm` and its rate."""
  row, flops = timing_row(one), timing.gemm_flops(size)
  rate = flops / row["median_s"]
  return {"size": size, "flops": flops, "flops_per_s": rate, **row}


def result_row(one: Timing, difference: float | None, devices: int = 1) -> Row:
  """The entry of a contestant in a row."""
  return {
    "devices": devices,
    "median_s": one.median_s,
    "min_s": one.min_s,
    "max_abs_difference": difference,
    "seconds": list(one.seconds),
    "reason": one.reason,
  }


def percent(flops: float | int, one: Row, product: Row) -> float | None:
  """The rate of a contestant in percent of the matrix product's."""
  median, rate = one["median_s"], product["flops_per_s"]
  return None if median is None else 100 * flops / median / rate


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


def ratio(
  row: Row, a: Sequence[str], b: Sequence[str], key: str = "median_s"
) -> float | None:
  """The best time of contestants `a` over that of `b`; None without both."""
  mine, theirs = best(row, a, key), best(row, b, key)
  return mine[1] / theirs[1] if mine and theirs else None


def ratios(
  rows: Sequence[Row], a: Sequence[str], b: Sequence[str]
) -> dict[str, Any] | None:
  """`ratio` of each row and their median, or None where no row has one."""
  found = [ratio(row, a, b) for row in rows]
  known = [x for x in found if x is not None]
  return (
    {"ratios": found, "median": statistics.median(known)} if known else None
  )


# ---------------------------------------------------------------------------
# Tables and pictures
# ---------------------------------------------------------------------------


def lines(
  row: Row, more: Callable[[Any], str], *, digits: int = 1
) -> list[str]:
  """A line of each contestant: its time and `more` of its result, or a reason.

  Times, in milliseconds with so many digits, begin in column 28.
  """
  found = []
  for name, one in row["results"].items():
    devices = one["devices"]
    line = f"  {name:15} {devices:2} device{'s' if devices > 1 else ' '}"
    if one["median_s"] is None:
      line += f"           - {one['reason']}"
    else:
      line += f"{one['median_s'] * 1e3:11.{digits}f} ms {more(one)}"
    found.append(line)
  return found


def import_torch(threads: int | None = None) -> Any:
  """PyTorch, which then uses so many threads; None is one for each core."""
  torch = importlib.import_module("torch")
  torch.set_num_threads(threads or os.cpu_count() or 1)
  return torch


def figure(width: float | int, height: float | int) -> Any:
  """A matplotlib figure of so many inches, without a display."""
  return pictures.figures().Figure(
    figsize=(width, height), layout="constrained", facecolor="white"
  )


def tidy(ax: Any, title: str = "") -> None:
  """Axes as the pictures of benchmarks have them."""
  ax.set_title(title, loc="left", fontsize=10)
  ax.spines[["top", "right"]].set_visible(False)
  ax.grid(axis="y", color="0.9")
  ax.set_axisbelow(True)
  ax.tick_params(labelsize=8)


def bars(
  ax: Any,
  rows: Sequence[Row],
  colors: Mapping[str, str],
  height: Callable[[Row, str], float],
  tick: Callable[[Row], str],
) -> None:
  """Grouped bars: a group of each row, in it a bar of each contestant.

  Args:
    ax: matplotlib axes.
    rows: of the groups.
    colors: by contestant.
    height: of a row and a contestant.
    tick: the text below a row's group.
  """
  width = 0.85 / max(len(colors), 1)
  for i, (name, color) in enumerate(colors.items()):
    x = np.arange(len(rows)) + (i - (len(colors) - 1) / 2) * width
    heights = [height(row, name) for row in rows]
    ax.bar(x, heights, width * 0.92, color=color, label=name)
  ax.set_xticks(range(len(rows)), [tick(row) for row in rows])


def save(drawn: Any, path: str, *, dpi: int = 150) -> None:
  """Writes a figure into a PNG."""
  drawn.savefig(path, dpi=dpi)
  print(f"wrote {path}", file=sys.stderr)
