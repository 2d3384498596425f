"""Times several callables against each other on a machine that others use.

Guarantees: contestants run once each in turn, round after round, so that a
slow minute of the machine falls on all of them; medians, and ratios of
medians, are reported. The order changes from round to round: one contestant
may leave gigabytes to free, which the machine does in the next one's time. A
contestant that raises gets a reason in place of a number; it is never left out.
A matrix product takes part as one more contestant: a percentage of its rate is
comparable between machines.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp

from ringjax.checks import is_address
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.parallel import chips, processor
from ringjax.paths import open_binary, replacing

GEMM_SIZE = 2048
# Products of a run: the time of one is too short to be stable on a busy
# machine.
_PRODUCTS = 4
# Number of rows of the matrices by which an accelerator is measured.
_LARGE = 8192
# Packages whose versions are part of a record.
_PACKAGES = (
  "jax", "jaxlib", "numpy", "torch", "transformers", "safetensors",
  "ringattention", "ringjax",
)  # fmt: skip
# Vector instructions of processors, widest first.
_VECTORS = {
  "amx_tile": "AMX",
  "avx512f": "AVX-512",
  "avx2": "AVX2",
  "avx": "AVX",
  "sve2": "SVE2",
  "sve": "SVE",
  "asimd": "NEON",
}


class Skipped(Exception):
  """A contestant declines a case; the text is its reason."""


@dataclasses.dataclass(frozen=True)
class Timing:
  """The runs of one contestant.

  Attributes:
    seconds: Seconds of each round, in order; empty if there is a reason.
    reason: Reason of a failure, or None.
  """

  seconds: tuple[float, ...] = ()
  reason: str | None = None

  @property
  def median_s(self) -> float | None:
    return statistics.median(self.seconds) if self.seconds else None

  @property
  def min_s(self) -> float | None:
    return min(self.seconds, default=None)


def interleave(
  runs: Mapping[str, Callable[[], Any]],
  rounds: int,
  *,
  warmup: int = 1,
  on_run: Callable[[int, str], None] = lambda n, name: None,
) -> dict[str, Timing]:
  """Times `runs` in turn, `rounds` times after `warmup` rounds.

  Args:
    runs: Function of each contestant that does the work; the arrays that it
      returns are waited for.
    rounds: Number of timed rounds.
    warmup: Number of earlier rounds, whose times are dropped.
    on_run: Function that is called before each run with (runs so far,
      contestant).
  """
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  reasons: dict[str, str] = {}
  num_runs = 0
  for n in range(-warmup, rounds):
    for name in _order(list(runs), n):
      if name in reasons:
        continue
      on_run(num_runs, name)
      num_runs += 1
      try:
        start = time.perf_counter()
        jax.block_until_ready(runs[name]())
        elapsed = time.perf_counter() - start
      except Exception as error:
        reasons[name] = reason(error)
        continue
      if n >= 0:
        seconds[name].append(elapsed)
  return {
    name: Timing(reason=reasons[name])
    if name in reasons
    else Timing(tuple(seconds[name]))
    for name in runs
  }


def timed(
  runs: Mapping[str, Callable[[], Any]],
  rounds: int,
  stream: TextIO | io.TextIOBase | None = None,
) -> dict[str, Timing]:
  """Times `runs` in turn, with a line of progress.

  Args:
    runs: Function of each contestant, see `interleave`.
    rounds: Number of timed rounds.
    stream: Stream for progress; default stderr.

  Raises:
    OptionError: If a run fails.
  """
  progress = Progress(len(runs) * (rounds + 1), stream)
  timings = interleave(runs, rounds, on_run=progress.at)
  progress.clear()
  for label, timing in timings.items():
    if timing.reason is not None:
      raise OptionError(
        "fit",
        f"{label}: {timing.reason}",
        "calls that run",
        "pass smaller sizes or a smaller preset",
      )
  return timings


def _order(names: Sequence[str], n: int) -> list[str]:
  """Order of the names in round `n`.

  For an even number of names, each follows every other once in as many rounds
  (Williams 1949, designs for residual effects).
  """
  count = len(names)
  # 0, 1, -1, 2, -2, ...: no two neighbours have the same distance.
  zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
  return [names[(i + n) % count] for i in zigzag]


def reason(error: Exception) -> str:
  """One line with the reason that a contestant has no number."""
  if isinstance(error, ModuleNotFoundError) and error.name:
    return f"{error.name} is not installed"
  if isinstance(error, Skipped):
    return str(error)
  text = str(error).strip().split("\n")[0]
  if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
    text = f"out of memory: {text}"
  text = f"{type(error).__name__}: {text}"
  return text if len(text) <= 200 else text[:197] + "..."


def gemm_flops(size: int) -> float:
  """FLOPs of one run of `gemm`."""
  return float(_PRODUCTS * 2 * size**3)


def gemm(dtype: str, size: int | None = None) -> Callable[[], Any]:
  """Returns a function that multiplies square matrices, `gemm_flops` of work.

  Args:
    dtype: Dtype of the matrices.
    size: Number of rows of a matrix; default `GEMM_SIZE`.
  """
  size = GEMM_SIZE if size is None else size
  device = jax.local_devices()[0]
  exact = jax.lax.Precision.HIGHEST if dtype == "float32" else None
  f = jax.jit(lambda a, b: jnp.matmul(a, b, precision=exact))
  keys = jax.random.split(jax.random.key(0))
  shape = (size, size)
  a, b = (
    jax.device_put(jax.random.normal(k, shape).astype(dtype), device)
    for k in keys
  )
  jax.block_until_ready(f(a, b))

  def run() -> None:
    for _ in range(_PRODUCTS):
      jax.block_until_ready(f(a, b))

  return run


def peak(dtype: str, device: jax.Device) -> float:
  """Peak FLOP/s of a device by its data sheet, else by a matrix product.

  For a CPU it is the rate of all cores, which its devices share.
  """
  name = chips.machine_name(device.device_kind)
  if device.platform != "cpu" and name is not None:
    return chips.CHIPS[name].rate(dtype)
  # An accelerator ends a small product before the host launches the next.
  size = GEMM_SIZE if device.platform == "cpu" else _LARGE
  runs = {"product": gemm(dtype, size)}
  return gemm_flops(size) / (interleave(runs, 5)["product"].median_s or 1.0)


class Progress:
  """Progress on stderr: current run and estimate of the remaining time.

  On a terminal one line is rewritten; elsewhere a line is added every few
  seconds.
  """

  def __init__(
    self,
    total: int | float,
    stream: TextIO | io.TextIOBase | None = None,
    every_s: float = 5.0,
  ) -> None:
    self._total = total
    self._stream = stream or sys.stderr
    self._every_s = every_s
    self._start = time.monotonic()
    self._last = -float("inf")
    self._width = 0

  def at(self, done: int | float, label: str) -> None:
    """Shows that `done` of the total is done and that `label` runs now."""
    now_s = time.monotonic()
    terminal = self._stream.isatty()
    if now_s - self._last < (0.1 if terminal else self._every_s):
      return
    self._last = now_s
    elapsed = now_s - self._start
    part = done / self._total
    remaining = f", {_clock(elapsed * (1 / part - 1))} left" if part > 0 else ""
    text = f"[{100 * part:3.0f} % after {_clock(elapsed)}{remaining}] {label}"
    if terminal:
      text = text[:79]
      self._stream.write("\r" + text.ljust(self._width))
      self._width = len(text)
    else:
      self._stream.write(text + "\n")
    self._stream.flush()

  def clear(self) -> None:
    """Makes room for other output on the same terminal."""
    if self._width:
      self._stream.write("\r" + " " * self._width + "\r")
      self._stream.flush()
      self._width = 0


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"


def environment(command: str) -> dict[str, Any]:
  """Environment of a result: command, date, versions and machine."""
  versions = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = "not installed"
  date = datetime.datetime.now(datetime.UTC)
  return {
    "command": command,
    "date": date.isoformat(timespec="seconds"),
    "versions": versions,
    "machine": {
      "cpu": _cpu_model(),
      "vectors": _vectors(),
      "cores": os.cpu_count(),
      "load_before": os.getloadavg()[0],
      "platform": platform.platform(),
      "backend": jax.default_backend(),
      "device": jax.devices()[0].device_kind,
    },
  }


def check_same_machine(
  path: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
  """Refuses to add rows to a file with rows of another machine.

  Args:
    path: Path of the file.
    before: `machine` of the file's `environment`; entries that an older version
      did not record are taken as equal.
    now: `machine` of this `environment`.

  Raises:
    OptionError: If the machines differ.
  """
  names = ("cpu", "vectors", "cores", "device")
  differing = [
    name for name in names if before.get(name, now[name]) != now[name]
  ]
  if not differing:
    return
  text_of = lambda x: ", ".join(f"{name} {x[name]}" for name in differing)
  raise OptionError(
    "append",
    f"rows of another machine ({text_of(before)}) in {path}",
    f"rows of this one ({text_of(now)})",
    "pass another file to --json: such rows do not compare",
  )


def _cpu_model() -> str:
  named = processor.told("model name") or platform.processor()
  return named or platform.machine()


def _vectors() -> str:
  """Widest vector instructions of the processor."""
  supported = processor.instructions()
  return next(
    (_VECTORS[name] for name in _VECTORS if name in supported), "unknown"
  )


def read_json(path: str) -> Any:
  with open_binary(path) as file:
    return json.load(file)


def write_json(path: str, value: object) -> None:
  """Writes `value` atomically: a reader never sees half a file.

  A device or a pipe is written to, not replaced.
  """
  text = json_text(value, indent=1) + "\n"
  is_device = not is_address(path) and os.path.exists(path)
  if is_device and not os.path.isfile(path):
    with open(path, "w") as file:
      file.write(text)
    return
  with replacing(path) as file:
    file.write(text.encode())
