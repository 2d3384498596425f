"""Compiles programs for TPU slices that are not there.

Law: what is reported of memory, of the schedule and of its size is what the
TPU compiler (libtpu) made of the very program that would run: same builder,
same mesh, same shapes, no weights and no chip. The same versions give the
same answer each time.

A compilation is a process of its own: the compiler reads its flags once in a
process, takes environment variables for flags, and must not be loaded beside
what really computes. Builders are named by "module:function" and called there
with the devices of the topology:

  def build(devices, **options) -> Built

libtpu is optional (`pip install -e '.[aot]'`, Linux on x86-64).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from ringjax.errors import OptionError, RingjaxError, message
from ringjax.parallel import chips
from ringjax.plan import overlap

# Of the caller's environment a compilation sees these; libtpu reads others as
# flags by parts of their names.
_KEPT = (
  "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV",
  "LD_LIBRARY_PATH", "TPU_LIBRARY_PATH",
)  # fmt: skip
_SET = {
  "JAX_PLATFORMS": "cpu",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_LOG_DIR": "disabled",
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "PYTHONDONTWRITEBYTECODE": "1",
}
# "F1122 21:26:03.123456   123 shape.cc:99] Check failed: size >= 0"
_FATAL = re.compile(r"F\d{4} ")
# Compilations under way, of all threads.
_RUNNING: set[subprocess.Popen[str]] = set()
_CHILD = "from ringjax.plan.compiling import child; child()"
# By what is dumped it is known what fits.
_DUMPS = frozenset(("xla_dump_to", "xla_dump_hlo_as_text"))
# v4 has two cores that XLA uses as one device.
_CONFIGS = {"tpu-v4": {"chip_config_name": "megacore"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
  """What a builder hands over.

  Attributes:
    function: a jitted function, which has `lower`.
    arguments: of it: shapes with their shardings.
    mesh: whose devices it runs on; its first is number 0 of the program.
    facts: what the builder knows of it, to be reported; JSON.
    data_trips: see `overlap.check`.
  """

  function: Any
  arguments: tuple[Any, ...]
  mesh: Any
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  data_trips: Any = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Bytes of each device.

  Attributes:
    arguments: what the program is given: weights, moments, caches, tokens.
    outputs: what it gives.
    aliased: of the outputs, what lies where arguments lay.
    temporaries: what it needs meanwhile.
    code: the program itself.
    limit: what the compiler lets a program fill.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  limit: int

  @property
  def total(self) -> int:
    """All of it at once, which is never less than the peak."""
    outputs = self.outputs - self.aliased
    return self.arguments + outputs + self.temporaries + self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """A large buffer of a program that does not fit: its shape and its source."""

  nbytes: int
  shape: str
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """What came of a compilation.

  Attributes:
    topology: for which.
    devices: how many the program runs on.
    fits: whether it fits the memory of a device.
    memory: None where it does not fit, or nothing else was asked for.
    needed_bytes: of a device: what it takes, or what the compiler said it
      would.
    limit_bytes: of a device.
    largest: the largest buffers where it does not fit.
    report: of the schedule; None where `memory` is.
    trace_s: seconds of tracing and lowering.
    compile_s: of compiling.
    text_bytes: length of the scheduled program's text.
    facts: what the builder said.
    versions: of jax and libtpu.
    text_path: where the scheduled program was saved, or None.
  """

  topology: str
  devices: int
  fits: bool
  memory: Memory | None
  needed_bytes: int
  limit_bytes: int
  largest: tuple[Buffer, ...]
  report: overlap.Report | None
  trace_s: float
  compile_s: float
  text_bytes: int
  facts: Mapping[str, Any]
  versions: Mapping[str, str]
  text_path: str | None = None

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    body = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ("memory", "largest", "report", "facts", "versions")
    }
    memory = self.memory
    return {
      **body,
      "memory": None
      if memory is None
      else {**dataclasses.asdict(memory), "total": memory.total},
      "largest": [dataclasses.asdict(one) for one in self.largest],
      "schedule": None if self.report is None else self.report.record(),
      "facts": dict(self.facts),
      "versions": dict(self.versions),
    }


class CompileError(RingjaxError, RuntimeError):
  """A program that the TPU compiler, or the builder, refuses."""


def missing() -> str | None:
  """Why nothing can be compiled for TPU here; None if it can."""
  if os.environ.get("TPU_LIBRARY_PATH"):
    return None
  if importlib.util.find_spec("libtpu") is None:
    return "libtpu is not installed: pip install -e '.[aot]'"
  return None


def require() -> None:
  """Refuses to go on where nothing can be compiled for TPU.

  Raises:
    OptionError: with what to install.
  """
  why = missing()
  if why is not None:
    raise OptionError(
      "libtpu", "none", "the TPU compiler", f"{why}, on Linux x86-64"
    )


def environment(flags: Sequence[str] = ()) -> dict[str, str]:
  """The environment in which libtpu compiles, quietly and beside others.

  Args:
    flags: for LIBTPU_INIT_ARGS, which a process reads once.
  """
  made = {name: os.environ[name] for name in _KEPT if name in os.environ}
  made |= _SET
  if flags:
    made["LIBTPU_INIT_ARGS"] = " ".join(flags)
  return made


def compile(
  builder: str,
  topology: str,
  options: Mapping[str, Any] | None = None,
  *,
  compiler_options: Mapping[str, Any] | None = None,
  kernels: Mapping[str, float | int] | None = None,
  flags: Sequence[str] = (),
  timeout_s: float | int = 3600.0,
  text_path: str | None = None,
  memory_only: bool = False,
) -> Compiled:
  """Compiles a program for a TPU slice, in a process of its own.

  Args:
    builder: "module:function", called with the slice's devices and `options`;
      gives a `Built`.
    topology: e.g. "v5e:16x16" or "v5p:4x4x8".
    options: of the builder; JSON.
    compiler_options: of XLA, e.g. {"xla_tpu_...": True}.
    kernels: cycles of Pallas kernels by name, see `overlap.check`.
    flags: of libtpu, "--xla_...=...".
    timeout_s: seconds until it is given up.
    text_path: where to keep the scheduled program's text.
    memory_only: ends where all buffers have their places in the chip's memory,
      in a tenth of the time: no machine code is made, and with it neither
      `memory` nor `report`. What a kernel needs of the fast memory beside the
      matrix unit is then unchecked.

  Returns:
    What came of it, also where it does not fit.

  Raises:
    OptionError: no libtpu, no such slice, options that are no JSON, or what
      the builder refuses.
    CompileError: the compiler refuses the program, or takes too long.
  """
  core, sides = chips.core(topology), chips.sides(topology)
  taken = _DUMPS.intersection(compiler_options or ())
  if taken:
    raise OptionError(
      "compiler_options",
      ", ".join(sorted(taken)),
      "options that are not set here, to read what fits",
      "pass text_path= for the program",
    )
  require()
  try:
    job = json.dumps(
      {
        "builder": builder,
        "caller": os.getpid(),
        "topology": topology,
        "wraps": core.wraps(sides),
        "config": _CONFIGS.get(core.name, {}),
        "options": dict(options or {}),
        "compiler_options": dict(compiler_options or {}),
        "memory_only": memory_only,
        "limit_bytes": core.hbm_bytes,
      }
    )
  except (TypeError, ValueError) as error:
    raise OptionError(
      "options", f"{error}", "what JSON has", "pass plain values"
    ) from None
  with tempfile.TemporaryDirectory(prefix="ringjax-aot-") as folder:
    found, text = _run(job, folder, flags, timeout_s)
    if text_path is not None and text:
      pathlib.Path(text_path).write_text(text)
    return _read(found, text, core, topology, sides, kernels, text_path)


def _run(
  job: str, folder: str, flags: Sequence[str], timeout_s: float | int
) -> tuple[dict[str, Any], str]:
  """What the process found, and the program's text."""
  place = pathlib.Path(folder)
  (place / "job.json").write_text(job)
  command = [sys.executable, "-c", _CHILD, folder]
  here = environment(flags)
  # The process must find the modules that this one finds.
  paths = [p or os.getcwd() for p in sys.path]
  here["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
  process = subprocess.Popen(
    command,
    env=here,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    errors="replace",
  )
  _RUNNING.add(process)
  try:
    _, said = process.communicate(timeout=timeout_s)
  except subprocess.TimeoutExpired:
    raise CompileError(
      message(
        "compile",
        f"nothing after {timeout_s:g} s",
        "a program within that time",
        "raise timeout_s",
      )
    ) from None
  finally:
    _end(process)
  answer = place / "answer.json"
  if not answer.exists():
    raise CompileError(
      message(
        "compile",
        f"a process that ended with status {process.returncode}",
        "an answer",
        f"see what it said: {_fatal(said)}",
      )
    )
  found = json.loads(answer.read_text())
  if "refused" in found:
    raise OptionError(found["refused"])
  if "error" in found:
    raise CompileError(
      message(
        "program",
        found["error"][:1500],
        "one that compiles for TPU",
        "see the traceback" + ":\n" + found["traceback"][-3000:],
      )
    )
  text = place / "program.hlo"
  return found, text.read_text() if text.exists() else ""


def _fatal(said: str) -> str:
  """The compiler's last words, without the addresses behind them."""
  lines = said.strip().splitlines()
  fatal = [line for line in lines if _FATAL.match(line)]
  return "\n".join(fatal or lines)[-1500:]


def _end(process: subprocess.Popen[str]) -> None:
  """Ends a compilation, if it has not ended."""
  process.kill()
  process.wait()
  _RUNNING.discard(process)


def stop() -> None:
  """Ends the compilations of all threads; their calls raise CompileError."""
  for process in tuple(_RUNNING):
    process.kill()


def _read(
  found: Mapping[str, Any],
  text: str,
  core: chips.Core,
  topology: str,
  sides: tuple[int, ...],
  kernels: Mapping[str, float | int] | None,
  text_path: str | None,
) -> Compiled:
  fits = bool(found["fits"])
  memory = report = None
  limit = found.get("limit_bytes") or core.hbm_bytes
  needed = found.get("needed_bytes") or 0
  if "memory" in found:
    memory = Memory(limit=core.hbm_bytes, **found["memory"])
    needed = memory.total
    # The compiler counts buffers that never live together once.
    report = overlap.check(
      text,
      core,
      coords=found["coords"],
      wraps=core.wraps(sides),
      kernels=kernels,
      data_trips=found["data_trips"],
    )
  return Compiled(
    topology=topology,
    devices=found["devices"],
    fits=fits,
    memory=memory,
    needed_bytes=needed,
    limit_bytes=limit,
    largest=tuple(Buffer(**one) for one in found.get("largest", ())),
    report=report,
    trace_s=found["trace_s"],
    compile_s=found["compile_s"],
    text_bytes=len(text),
    facts=found["facts"],
    versions=found["versions"],
    text_path=text_path if text else None,
  )


def versions() -> dict[str, str]:
  """Of jax and libtpu, as they are installed."""
  found = {}
  for name in ("jax", "libtpu"):
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      found[name] = "unknown"
  return found
