"""Times several callables against each other on a machine that others use.

Guarantees: contestants run once each in turn, round after round, so that a
slow minute of the machine falls on all of them; medians, and ratios of
medians, are reported. The order changes from round to round: one contestant
may leave gigabytes behind, which the machine clears away in the next one's
time. A contestant that raises gets a reason in place of a number; it is never
left out.
The machine's own matrix product takes part as one more contestant: a
percentage of its rate means the same on every machine.
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

from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.parallel import chips, processor

GEMM_SIZE = 2048
# One product is so short that a busy machine makes its time a lottery.
_PRODUCTS = 4
# Rows of a matrix by whose product an accelerator is measured.
_LARGE = 8192
# Their versions are part of a record.
_PACKAGES = (
  "jax", "jaxlib", "numpy", "torch", "transformers", "safetensors",
  "ringattention", "ringjax",
)  # fmt: skip
# The widest vector instructions of a processor, widest first.
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
    seconds: of each round, in order; empty where there is a reason.
    reason: why there is no number, or None.
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
    runs: for each contestant a call that does the work; what it returns is
      waited for.
    rounds: timed rounds.
    warmup: rounds before them whose times are thrown away.
    on_run: called before each run with (runs so far, contestant).
  """
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  reasons: dict[str, str] = {}
  done = 0
  for n in range(-warmup, rounds):
    for name in _order(list(runs), n):
      if name in reasons:
        continue
      on_run(done, name)
      done += 1
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
    runs: as in `interleave`.
    rounds: timed rounds.
    stream: where progress is shown; default stderr.

  Raises:
    OptionError: a run fails.
  """
  progress = Progress(len(runs) * (rounds + 1), stream)
  found = interleave(runs, rounds, on_run=progress.at)
  progress.clear()
  for label, one in found.items():
    if one.reason is not None:
      raise OptionError(
        "fit",
        f"{label}: {one.reason}",
        "calls that run",
        "pass smaller sizes or a smaller preset",
      )
  return found


def _order(names: Sequence[str], n: int) -> list[str]:
  """The order of round `n`: of an even number of names each comes behind every
  other once in as many rounds (Williams 1949, designs for residual effects)."""
  count = len(names)
  # 0, 1, -1, 2, -2, ...: no two neighbours have the same distance.
  zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
  return [names[(i + n) % count] for i in zigzag]


def reason(error: Exception) -> str:
  """One line that says why a contestant has no number."""
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
  """Products of two square matrices, `gemm_flops` of work, ready to run.

  Args:
    dtype: of the matrices.
    size: rows of a matrix; default `GEMM_SIZE`.
  """
  size = GEMM_SIZE if size is None else size
  device = jax.devices()[0]
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
  """FLOP/s of a device: its data sheet's, else a measured matrix product's.

  A CPU's is the rate of all its cores, which its devices share.
  """
  name = chips.known(device.device_kind)
  if device.platform != "cpu" and name is not None:
    return chips.CHIPS[name].rate(dtype)
  # A small product is over before an accelerator is asked for the next one.
  size = GEMM_SIZE if device.platform == "cpu" else _LARGE
  runs = {"product": gemm(dtype, size)}
  return gemm_flops(size) / (interleave(runs, 5)["product"].median_s or 1.0)


class Progress:
  """Progress on stderr: what runs now and how long the rest may take.

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
    now = time.monotonic()
    terminal = self._stream.isatty()
    if now - self._last < (0.1 if terminal else self._every_s):
      return
    self._last = now
    elapsed = now - self._start
    part = done / self._total
    left = f", {_clock(elapsed * (1 / part - 1))} left" if part > 0 else ""
    text = f"[{100 * part:3.0f} % after {_clock(elapsed)}{left}] {label}"
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
  """What a result depends on besides the code: versions, machine, date."""
  versions = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = "not installed"
  now = datetime.datetime.now(datetime.UTC)
  return {
    "command": command,
    "date": now.isoformat(timespec="seconds"),
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
  """Refuses to add rows to a file whose rows are another machine's.

  Args:
    path: of the file.
    before: `machine` of the file's `environment`; what an older version did
      not record is taken as equal.
    now: this machine's.

  Raises:
    OptionError: the machines differ.
  """
  names = ("cpu", "vectors", "cores", "device")
  other = [name for name in names if before.get(name, now[name]) != now[name]]
  if not other:
    return
  of = lambda x: ", ".join(f"{name} {x[name]}" for name in other)
  raise OptionError(
    "append",
    f"rows of another machine ({of(before)}) in {path}",
    f"rows of this one ({of(now)})",
    "pass another file to --json: such rows do not compare",
  )


def _cpu_model() -> str:
  named = processor.told("model name") or platform.processor()
  return named or platform.machine()


def _vectors() -> str:
  """The widest vector instructions, which a model's name may not tell."""
  has = processor.instructions()
  return next((_VECTORS[name] for name in _VECTORS if name in has), "unknown")


def read_json(path: str) -> Any:
  with open(path) as file:
    return json.load(file)


def write_json(path: str, value: object) -> None:
  """Writes all of `value` or nothing: a reader never sees half a file."""
  temporary = f"{path}.tmp"
  with open(temporary, "w") as file:
    file.write(json_text(value, indent=1) + "\n")
  os.replace(temporary, path)
