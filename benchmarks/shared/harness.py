"""The harness of all benchmarks: settings, checks, timing, record, tables.

A benchmark is a `Benchmark`: it defines cases, builds a case's contestants,
checks their results, and defines the contents of a row. The harness does the
rest.

Guarantees: all contestants of a case get the same inputs, in place before the
clock starts, and run in turn (see `timing`). A contestant whose result is off
(WRONG), or that raises, is not timed and gets a reason in place of a number;
none is left out. The file of a record is complete after every row, so that a
run that is killed keeps its rows, and `append` adds to them.
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
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import jax
import numpy as np
from jaxtyping import PyTree, Shaped

from ringjax import checks
from ringjax.bench import one_device, timing
from ringjax.bench.one_device import OneDeviceProcess, Trial
from ringjax.bench.timing import Timing
from ringjax.errors import OptionError
from ringjax.plan import draw as pictures

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
# Function of the fraction of a row that is done and a label of the current run.
Report = Callable[[float | int, str], None]

PASSES = ("fwd", "fwdbwd")
# Values of columns with names, in the order of the tables.
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
    default: Default value; None for an optional field.
    choices: Allowed names; () for any text, None for positive ints.
    flag: Name of the flag; "" for the field's name, None for no flag.
    several: Whether it takes several values, as every tuple does.
  """
  is_list = several or isinstance(default, tuple)
  facts = {"choices": choices, "flag": flag, "several": is_list}
  return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
  """Settings of a benchmark; their options are checked on creation.

  Raises:
    OptionError: If an option has no value or a wrong one.
  """

  def __post_init__(self) -> None:
    for flag, field in self.options().items():
      setting, choices = getattr(self, field.name), field.metadata["choices"]
      if setting is None and field.default is None:
        continue
      values = setting if isinstance(setting, tuple) else (setting,)
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
    """Fields that are options, by their flags, or names without a flag."""
    return {
      field.metadata["flag"] or field.name: field
      for field in dataclasses.fields(cls)
      if field.metadata
    }

  @classmethod
  def flags(cls) -> tuple[str, ...]:
    """The flags that set an option."""
    options = cls.options().items()
    return tuple(f for f, x in options if x.metadata["flag"] is not None)

  def with_flags(self, given: Mapping[str, Any]) -> BenchmarkSettings:
    """Copies the settings with the values of flags.

    Args:
      given: Value of each flag by its name; several values as a list of texts,
        None if the flag was not passed.

    Raises:
      OptionError: If a value does not have the type of its option.
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
  """Creates a case for each combination of the values of some settings.

  Args:
    case: Class of the cases; its other fields are named as settings.
    settings: Settings of the benchmark.
    several: Name of the setting that holds the values of each field; the last
      one varies fastest.
  """
  names = [field.name for field in dataclasses.fields(case)]
  fixed = {n: getattr(settings, n) for n in names if n not in several}
  values = [getattr(settings, name) for name in several.values()]
  return [
    case(**fixed, **dict(zip(several, combination, strict=True)))
    for combination in itertools.product(*values)
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
    run: Function that does the work of the case once.
    check: Function that returns the result to compare with the reference, and
      warms up.
  """

  run: Callable[[], Any]
  check: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Contestant:
  """An implementation that takes part in a benchmark.

  Attributes:
    build: Function that places inputs of a case: (case, inputs) -> Runnable.
    ours: Whether it is this package.
    sharded: Whether it runs on all devices, or on one.
    one_device: Whether it runs in a process that has one device.
    parts: Parts of the benchmark in which it takes part; None for all.
    load: Function that imports its dependencies.
  """

  build: Callable[[Any, Any], Runnable]
  ours: bool = False
  sharded: bool = False
  one_device: bool = False
  parts: tuple[str, ...] | None = None
  load: Callable[[], Any] = lambda: None

  def trial(self, case: Any, inputs: PyTree) -> Trial:
    """Builds the contestant and runs it once."""
    self.load()
    built = self.build(case, inputs)
    return built.run, built.check()


def host_arrays(outputs: PyTree) -> tuple[Shaped[np.ndarray, " ..."], ...]:
  """The arrays of a result as NumPy arrays."""
  return tuple(np.asarray(x) for x in jax.tree.leaves(outputs))


def compare(
  outputs: Sequence[np.ndarray],
  reference: Sequence[np.ndarray],
  tolerance: float,
) -> tuple[float, bool]:
  """Computes (largest absolute difference, whether any output is off).

  Args:
    outputs: Outputs of a contestant.
    reference: Expected outputs.
    tolerance: Allowed difference as a fraction of the reference's largest
      absolute number, or of 1 if that is larger.
  """
  worst, wrong = 0.0, len(outputs) != len(reference)
  for a, b in zip(outputs, reference, strict=False):
    if a.shape != b.shape:
      return float("nan"), True
    difference = float(np.max(np.abs(a.astype(b.dtype) - b)))
    scale = max(1.0, float(np.max(np.abs(b))))
    # `not <=` in place of `>`: NaN counts as wrong.
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
  done_weight: float,
  weight: float,
  part: float | int,
  label: str,
) -> None:
  progress.at(done_weight + weight * part, f"{case}: {label}")


class Benchmark:
  """Base class of benchmarks, which runs, records and prints them.

  A subclass lists `cases`, creates the `row` of one, mostly by `measure`, and
  formats rows.

  Attributes:
    name: Name of the benchmark.
    options: Class of its settings.
    quick: Settings of a short run, or None.
    contestants: Contestants by name.
    columns: Columns of a row that make its key, see `order`.
    parts: Names of a column "part" or "kind", in their order.
    files: Flags that are arguments of `run`.
    summary_name: Key of the summary in the record.
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
    # Resources that are open during a run.
    self.stack = contextlib.ExitStack()
    self.stack.callback(self.process.close)

  @property
  def cases(self) -> Sequence[Any]:
    """Cases of the benchmark, each of which becomes a row."""
    raise NotImplementedError

  def weight(self, case: Any) -> float:
    """Cost of a case in any unit, for the display of progress."""
    del case
    return 1.0

  def facts(self) -> Row:
    """Further entries of the record, in addition to settings and rows."""
    return {}

  def row(self, case: Any, report: Report) -> Row:
    """Measures a case."""
    raise NotImplementedError

  def table(self, case: Any, row: Row) -> str:
    """The text of a case's row."""
    del case, row
    return ""

  def summary(self, rows: Sequence[Row]) -> Row:
    """Computes ratios and other figures from all rows."""
    raise NotImplementedError

  def closing(self, result: Row) -> str:
    """The text of a result, which follows the texts of its rows."""
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
    """Number of devices that a contestant runs on."""
    contestant = self.contestants.get(name)
    return (
      self.settings.devices
      if contestant is not None and contestant.sharded
      else 1
    )

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
    """Checks all contestants, then times those that are right, in turn.

    Args:
      names: Names of the contestants.
      build: Function that builds the contestant of a name.
      compare: Function of a first result that returns (largest difference,
        whether it is wrong).
      report: Function that is called before each run.
      machine: Further functions to time, without a check.
      warmup: Rounds before, whose times are dropped. The first run after the
        checks of others is slower, which matters for short runs.
      steps: Steps of a run; times are reported per step.

    Returns:
      Entry of each contestant in a row, and the timings of `machine`.
    """
    runs, rounds = dict(machine or {}), self.settings.rounds
    total = 1 + len(names) + (warmup + rounds) * (len(names) + len(runs))
    results: dict[str, Row] = {}
    for i, name in enumerate(names):
      results[name] = result_row(Timing(), None, self.devices(name))
      report((1 + i) / total, f"{name}, check")
      try:
        work, output = build(name)
        difference, wrong = compare(output)
        results[name]["max_abs_difference"] = difference
        if wrong:
          results[name]["reason"] = f"WRONG: off by {difference:.1e}"
        else:
          runs[name] = work
        del work, output
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
        run_timing = timings.pop(name)
        run_timing = Timing(
          tuple(x / steps for x in run_timing.seconds), run_timing.reason
        )
        difference = results[name]["max_abs_difference"]
        results[name] = result_row(run_timing, difference, self.devices(name))
    return results, timings

  def placed(
    self, one_device_wanted: bool, build: Callable[..., Trial], *args: Any
  ) -> Trial:
    """Calls `build(*args)`, in a process with one device if wanted."""
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
      settings: Settings of the run.
      command: Command line, for the record.
      json: File for the result; rewritten after every row.
      plot: File for a picture of all rows; needs matplotlib.
      append: Whether to keep the rows in `json`, except those that run again.
      stream: Stream for progress; default stderr.
      say: Function that prints a text.

    Raises:
      OptionError: If there are too few devices, matplotlib is missing, or the
        rows to append to are of another machine.
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
      # Fail at once without matplotlib, not after hours of work.
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
      previous = timing.read_json(json)
      timing.check_same_machine(json, previous["machine"], result["machine"])
      last = {
        k: previous[k] for k in ("command", "date", "versions", "machine")
      }
      result["earlier"] = [*previous.get("earlier", []), last]
      rows = previous["rows"]
    with self.stack:
      self.load()
      result |= self.facts()
      cases, done_weight = self.cases, 0.0
      weights = [self.weight(case) for case in cases]
      progress = timing.Progress(sum(weights), stream)
      for case, weight in zip(cases, weights, strict=True):
        report = functools.partial(_report, progress, case, done_weight, weight)
        report(0, "reference")
        row = self.row(case, report)
        self.process.clear()
        done_weight += weight
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
    """Imports the contestants' dependencies, before anything is compiled.

    Importing flax later would make JAX compile its programs again. A contestant
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
  """Times of a function that is no contestant, as JSON."""
  assert one.median_s is not None, one.reason
  return {
    "median_s": one.median_s,
    "min_s": one.min_s,
    "seconds": list(one.seconds),
  }


def product_row(one: Timing, size: int) -> Row:
  """Time and rate of the matrix product of `timing.gemm`."""
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
  """Rate of a contestant in percent of the matrix product's rate."""
  median, rate = one["median_s"], product["flops_per_s"]
  return None if median is None else 100 * flops / median / rate


def best(
  row: Row, names: Sequence[str], key: str = "median_s"
) -> tuple[str, float] | None:
  """Finds (name, time) of the fastest of `names` that has a time."""
  times = [
    (name, row["results"][name][key])
    for name in names
    if row["results"].get(name, {}).get(key)
  ]
  return min(times, key=lambda x: x[1], default=None)


def ratio(
  row: Row, a: Sequence[str], b: Sequence[str], key: str = "median_s"
) -> float | None:
  """The best time of contestants `a` over that of `b`; None without both."""
  best_a, best_b = best(row, a, key), best(row, b, key)
  return best_a[1] / best_b[1] if best_a and best_b else None


def ratios(
  rows: Sequence[Row], a: Sequence[str], b: Sequence[str]
) -> dict[str, Any] | None:
  """The `ratio` of each row and their median; None if no row has one."""
  row_ratios = [ratio(row, a, b) for row in rows]
  known_ratios = [x for x in row_ratios if x is not None]
  return (
    {"ratios": row_ratios, "median": statistics.median(known_ratios)}
    if known_ratios
    else None
  )


# ---------------------------------------------------------------------------
# Tables and pictures
# ---------------------------------------------------------------------------


def lines(
  row: Row, more: Callable[[Any], str], *, digits: int = 1
) -> list[str]:
  """Formats a line of each contestant: its time and `more`, or a reason.

  Times, in milliseconds with `digits` digits, begin in column 28.
  """
  table_lines = []
  for name, result in row["results"].items():
    devices = result["devices"]
    line = f"  {name:15} {devices:2} device{'s' if devices > 1 else ' '}"
    if result["median_s"] is None:
      line += f"           - {result['reason']}"
    else:
      line += f"{result['median_s'] * 1e3:11.{digits}f} ms {more(result)}"
    table_lines.append(line)
  return table_lines


def import_torch(threads: int | None = None) -> types.ModuleType:
  """Imports PyTorch with `threads` threads; None for one for each core."""
  torch = importlib.import_module("torch")
  torch.set_num_threads(threads or os.cpu_count() or 1)
  return torch


def figure(width: float | int, height: float | int) -> Any:
  """Creates a matplotlib figure of a size in inches, without a display."""
  return pictures.figures().Figure(
    figsize=(width, height), layout="constrained", facecolor="white"
  )


def tidy(ax: Axes, title: str = "") -> None:
  """Styles axes as in all pictures of benchmarks."""
  ax.set_title(title, loc="left", fontsize=10)
  ax.spines[["top", "right"]].set_visible(False)
  ax.grid(axis="y", color="0.9")
  ax.set_axisbelow(True)
  ax.tick_params(labelsize=8)


def bars(
  ax: Axes,
  rows: Sequence[Row],
  colors: Mapping[str, str],
  height: Callable[[Row, str], float],
  tick: Callable[[Row], str],
) -> None:
  """Draws grouped bars: a group for each row, a bar for each contestant.

  Args:
    ax: Matplotlib axes.
    rows: Rows of the groups.
    colors: Color of each contestant.
    height: Function of a row and a contestant that returns the bar's height.
    tick: Function that returns the text below a row's group.
  """
  width = 0.85 / max(len(colors), 1)
  for i, (name, color) in enumerate(colors.items()):
    x = np.arange(len(rows)) + (i - (len(colors) - 1) / 2) * width
    heights = [height(row, name) for row in rows]
    ax.bar(x, heights, width * 0.92, color=color, label=name)
  ax.set_xticks(range(len(rows)), [tick(row) for row in rows])


def save(drawn: Figure, path: str, *, dpi: int = 150) -> None:
  """Writes a figure into a PNG."""
  drawn.savefig(path, dpi=dpi)
  print(f"wrote {path}", file=sys.stderr)
