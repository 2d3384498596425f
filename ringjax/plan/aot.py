"""Compiles programs for TPU slices without TPU hardware.

Guarantees: memory, schedule and size are what the TPU compiler (libtpu) made of
the exact program that would run: same builder, same mesh, same shapes, without
weights and chips. The same versions give the same answer each time.

A compilation is a process of its own: the compiler reads its flags once in a
process, takes environment variables for flags, and must not be loaded beside
a backend that computes. Builders are named by "module:function" and called
there with the devices of the topology:

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
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from jax.sharding import Mesh

from ringjax.errors import OptionError, RingjaxError
from ringjax.json_text import json_text
from ringjax.parallel import chips
from ringjax.plan import files, overlap
from ringjax.plan.hlo import Trips

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
# What is dumped says which buffers do not fit.
_DUMPS = frozenset(("xla_dump_to", "xla_dump_hlo_as_text"))
# v4 has two cores that XLA uses as one device.
_CONFIGS = {"tpu-v4": {"chip_config_name": "megacore"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
  """A program to compile, as a builder returns it.

  Attributes:
    function: a jitted function, which has `lower`.
    arguments: of the function: shapes with their shardings.
    mesh: the devices on which it runs; the first is number 0 of the program.
    facts: properties that the builder reports; JSON.
    data_trips: see `overlap.check`.
  """

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  mesh: Mesh
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  data_trips: Trips | float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Memory of a program on each device, in bytes.

  Attributes:
    arguments: weights, moments, caches, tokens.
    outputs: results.
    aliased: the part of the outputs that takes the place of arguments.
    temporaries: what the program needs while it runs.
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

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return files.record(self, "total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """A large buffer of a program that does not fit: its shape and its source."""

  nbytes: int
  shape: str
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The result of a compilation.

  Attributes:
    topology: the slice.
    devices: how many the program runs on.
    fits: whether it fits the memory of a device.
    memory: None where it does not fit, or with `memory_only`.
    needed_bytes: of a device: what the program takes, or what the compiler
      said that it would.
    limit_bytes: of a device.
    largest: the largest buffers of a program that does not fit.
    report: of the schedule; None where `memory` is.
    trace_s: seconds of tracing and lowering.
    compile_s: of compiling.
    text_bytes: length of the scheduled program's text.
    facts: what the builder reported.
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
  report: overlap.OverlapReport | None
  trace_s: float
  compile_s: float
  text_bytes: int
  facts: Mapping[str, Any]
  versions: Mapping[str, str]
  text_path: str | None = None

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    body = files.record(self, leave=("report",))
    report = self.report
    return {**body, "schedule": None if report is None else report.record()}


class CompileError(RingjaxError, RuntimeError):
  """The TPU compiler refuses a program, or its builder fails."""


def missing() -> str | None:
  """Why nothing can be compiled for TPU here; None if it can."""
  if os.environ.get("TPU_LIBRARY_PATH"):
    return None
  if importlib.util.find_spec("libtpu") is None:
    return "libtpu is not installed: pip install -e '.[aot]'"
  return None


def require() -> None:
  """Raises where nothing can be compiled for TPU.

  Raises:
    OptionError: it says what to install.
  """
  why = missing()
  if why is not None:
    raise OptionError(
      "libtpu", "none", "the TPU compiler", f"{why}, on Linux x86-64"
    )


def environment(flags: Sequence[str] = ()) -> dict[str, str]:
  """The environment variables with which libtpu compiles.

  It then logs little, and several processes may compile at a time.

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
      returns a `Built`.
    topology: e.g. "v5e:16x16" or "v5p:4x4x8".
    options: of the builder; JSON.
    compiler_options: of XLA, e.g. {"xla_tpu_...": True}.
    kernels: cycles of Pallas kernels by name, see `overlap.check`.
    flags: of libtpu, "--xla_...=...".
    timeout_s: seconds after which the compilation is ended.
    text_path: file for the scheduled program's text.
    memory_only: ends when all buffers have been placed in the chip's memory,
      in a tenth of the time: no machine code is made, hence neither `memory`
      nor `report`. What a kernel needs of the vector memory is then unchecked.

  Returns:
    The result, also where the program does not fit.

  Raises:
    OptionError: no libtpu, no such slice, options that are not JSON, or
      an error of this library in the builder.
    CompileError: the compiler refuses the program, or takes too long.
  """
  core, sides = chips.core(topology), chips.sides(topology)
  taken = _DUMPS.intersection(compiler_options or ())
  if taken:
    raise OptionError(
      "compiler_options",
      ", ".join(sorted(taken)),
      "none of these, which say where buffers are reported",
      "pass text_path= to keep the program",
    )
  require()
  job = {
    "builder": builder,
    "caller": os.getpid(),
    "topology": topology,
    "wraps": core.wraps(sides),
    "config": {**_CONFIGS.get(core.name, {}), **_host(sides)},
    "options": dict(options or {}),
    "compiler_options": dict(compiler_options or {}),
    "memory_only": memory_only,
    "limit_bytes": core.hbm_bytes,
  }
  try:
    text = json_text(job)
  except (TypeError, ValueError) as error:
    raise OptionError(
      "options", f"{error}", "values that JSON has", "pass plain values"
    ) from None
  found, program = _run(text, flags, timeout_s)
  if text_path is not None and program:
    pathlib.Path(text_path).write_text(program)
  memory = report = None
  needed = found.get("needed_bytes") or 0
  if "memory" in found:
    memory = Memory(limit=core.hbm_bytes, **found["memory"])
    # The compiler counts buffers that never live together once.
    needed = memory.total
    report = overlap.check(
      program,
      core,
      coords=found["coords"],
      wraps=core.wraps(sides),
      kernels=kernels,
      data_trips=found["data_trips"],
    )
  return Compiled(
    topology=topology,
    devices=found["devices"],
    fits=bool(found["fits"]),
    memory=memory,
    needed_bytes=needed,
    limit_bytes=found.get("limit_bytes") or core.hbm_bytes,
    largest=tuple(Buffer(**one) for one in found.get("largest", ())),
    report=report,
    trace_s=found["trace_s"],
    compile_s=found["compile_s"],
    text_bytes=len(program),
    facts=found["facts"],
    versions=found["versions"],
    text_path=text_path if program else None,
  )


def _run(
  job: str, flags: Sequence[str], timeout_s: float | int
) -> tuple[dict[str, Any], str]:
  """The answer of the process that compiles, and the program's text."""
  environ = environment(flags)
  # The process must find the modules that this one finds.
  paths = [p or os.getcwd() for p in sys.path]
  environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
  with tempfile.TemporaryDirectory(prefix="ringjax-aot-") as name:
    folder = pathlib.Path(name)
    (folder / "job.json").write_text(job)
    with subprocess.Popen(
      [sys.executable, "-c", _CHILD, name],
      env=environ,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
    ) as process:
      _RUNNING.add(process)
      try:
        _, said = process.communicate(timeout=timeout_s)
      except subprocess.TimeoutExpired:
        raise CompileError(
          "compile",
          f"no program after {timeout_s:g} s",
          "one within that time",
          "pass a larger timeout_s",
        ) from None
      finally:
        process.kill()
        _RUNNING.discard(process)
    answer = folder / "answer.json"
    if not answer.exists():
      raise CompileError(
        "compile",
        f"a process that ended with status {process.returncode}",
        "an answer",
        f"see its last lines: {_fatal(said)}",
      )
    found = json.loads(answer.read_text())
    text = folder / "program.hlo"
    program = text.read_text() if text.exists() else ""
  if "refused" in found:
    raise OptionError(found["refused"])
  if "error" in found:
    raise CompileError(
      "program",
      found["error"][:1500],
      "one that compiles for TPU",
      "see the traceback" + ":\n" + found["traceback"][-3000:],
    )
  return found, program


def _host(sides: Sequence[int]) -> dict[str, Any]:
  """The chips of a host, of a slice that is narrower than a host.

  A host has 2 x 2 chips unless it is said, which older compilers insist on.
  """
  if min(sides[:2]) > 1:
    return {}
  bounds = [min(n, 2) for n in sides[:2]]
  return {"chips_per_host_bounds": [*bounds, 1]}


def _fatal(said: str) -> str:
  """The compiler's fatal error, without the addresses behind it."""
  lines = said.strip().splitlines()
  fatal = [line for line in lines if _FATAL.match(line)]
  return "\n".join(fatal or lines)[-1500:]


def stop() -> None:
  """Ends the compilations of all threads; their calls raise CompileError."""
  for process in tuple(_RUNNING):
    process.kill()


def versions() -> dict[str, str]:
  """The installed versions of jax and libtpu."""
  found = {}
  for name in ("jax", "libtpu"):
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      found[name] = "unknown"
  return found
