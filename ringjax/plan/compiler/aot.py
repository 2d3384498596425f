"""Compilation of programs for TPU slices and GPU hosts without the hardware.

Guarantees: memory, schedule and size are the results of the TPU's compiler
(libtpu), or of JAX's CUDA plugin, for the exact program that would run: same
builder, same mesh, same shapes, without weights and chips. The same versions
give the same results each time.

A compilation runs in a separate process: the compiler reads its flags once in a
process, takes environment variables for flags, and must not be loaded next to
a backend that computes. Builders are named by "module:function" and called
there with the devices of the topology:

  def build(devices, **options) -> Built

Both are optional (`pip install -e '.[aot]'` or '.[aot-cuda]', Linux on x86-64).
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from ringjax.checks import positive_int
from ringjax.errors import OptionError, RingjaxError
from ringjax.json_text import json_text
from ringjax.parallel import chips
from ringjax.plan import files
from ringjax.plan.compiler import kernel_grids, machine_code, overlap
from ringjax.plan.compiler.hlo import HloProgram, Trips
from ringjax.plan.compiler.target import GpuTarget, TpuTarget, target
from ringjax.plan.compiler.time_range import (
  ProgramCode,
  TimeRange,
  time_range,
)
from ringjax.plan.compiler.traffic import (
  MemoryTraffic,
  has_opaque_kernel,
  traffic,
)

# Variables of the caller's environment that a compilation sees; libtpu reads
# others as flags by parts of their names.
_KEPT = (
  "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV",
  "LD_LIBRARY_PATH", "TPU_LIBRARY_PATH", "RINGJAX_OFF",
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
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# Running compilations, of all threads.
_RUNNING: set[subprocess.Popen[str]] = set()
_CHILD = "from ringjax.plan.compiler.compiling import child; child()"
# The dump tells which buffers do not fit.
_DUMPS = frozenset(("xla_dump_to", "xla_dump_hlo_as_text"))
# Flags by which libtpu writes the machine code of each operation.
CODE_FLAGS = (
  "--xla_jf_dump_llo_text=true",
  "--xla_jf_dump_llo_pass_label_regex=final_bundles",
)
_DUMP_FLAG = "--xla_jf_dump_to="
_SIMULATE_FLAG = "--xla_jf_dump_static_llo_profile_to="


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
  """A program to compile, as a builder returns it.

  Attributes:
    function: Jitted function, which has `lower`.
    arguments: Arguments of the function: shapes with their shardings.
    mesh: Devices on which it runs; the first is number 0 of the program.
    facts: Properties that the builder reports; JSON values.
    data_trips: Trip counts of loops that depend on data, see `overlap.check`.
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
    arguments: Weights, moments, caches, tokens.
    outputs: Results.
    aliased: Part of the outputs that reuses memory of arguments.
    temporaries: Buffers that the program needs while it runs.
    code: The program itself.
    limit: Memory that the compiler lets a program fill.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  limit: int

  @property
  def total(self) -> int:
    """Sum of all parts, which is never less than the peak."""
    outputs = self.outputs - self.aliased
    return self.arguments + outputs + self.temporaries + self.code

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """A large buffer of a program: its bytes, its shapes, and its source."""

  nbytes: int
  shape: str
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The result of a compilation.

  Attributes:
    topology: Name of the slice or of the hosts.
    devices: Number of devices that the program runs on.
    fits: Whether it fits the memory of a device.
    memory: Memory per device; None if it does not fit, or with `memory_only`.
    needed_bytes: Bytes per device that the program takes, or that the compiler
      reported it would.
    limit_bytes: Bytes per device that a program may take.
    largest: Largest buffers of a program that does not fit, or as many as
      `buffers` says; those that the compiler placed at the same address are
      one.
    report: Report on the schedule; None if `memory` is, and for GPUs, whose
      compiler states no cycles.
    traffic: Bytes read and written; None if `memory` is, if they could not be
      counted, and for GPUs if a kernel reads a part that is not in the text.
      Branches of a conditional run as often as "filled_blocks" among the facts
      says.
    sent: Bytes that a device receives by each kind of collective; None if
      `memory` is.
    traffic_error: Error of counting the traffic or the time, or None.
    trace_s: Seconds of tracing and lowering.
    compile_s: Seconds of compiling.
    text_bytes: Length of the scheduled program's text.
    facts: Properties that the builder reported.
    versions: Versions of jax and of the compiler.
    text_path: Path of the saved scheduled program, or None.
    time: Least and most time of a step; None if `memory` is.
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
  traffic: MemoryTraffic | None = None
  sent: Mapping[str, float] | None = None
  time: TimeRange | None = None
  traffic_error: str | None = None

  def record(self) -> dict[str, Any]:
    """Fields as a dict for JSON, with the report as "schedule"."""
    body = files.record(self, leave=("report", "traffic", "time"))
    report, moved = self.report, self.traffic
    return {
      **body,
      "schedule": None if report is None else report.record(),
      "traffic": None if moved is None else moved.record(),
      "time": None if self.time is None else self.time.record(),
    }


class CompileError(RingjaxError, RuntimeError):
  """The compiler refuses a program, or its builder fails."""


def missing(topology: str = "v5e:2x2") -> str | None:
  """Reason why nothing can be compiled for `topology` here; None if it can."""
  return target(topology).missing()


def require(topology: str = "v5e:2x2") -> None:
  """Raise if nothing can be compiled for `topology`.

  Raises:
    OptionError: If its compiler is missing; it says what to install.
  """
  why = missing(topology)
  if why is None:
    return
  name = "libtpu"
  if isinstance(target(topology), GpuTarget):
    name = "CUDA plugin"
  raise OptionError(
    name, "none", f"the compiler for {topology}", f"{why}, on Linux x86-64"
  )


def environment(flags: Sequence[str] = ()) -> dict[str, str]:
  """Environment variables for a process that compiles with libtpu.

  libtpu then logs little, and several processes may compile at a time.

  Args:
    flags: Flags for LIBTPU_INIT_ARGS, which a process reads once.
  """
  variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
  variables |= _SET
  if flags:
    variables["LIBTPU_INIT_ARGS"] = " ".join(flags)
  return variables


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
  code: bool = False,
  simulate: bool = False,
  buffers: int | None = None,
) -> Compiled:
  """Compile a program for a TPU slice or GPU hosts, in a separate process.

  Args:
    builder: "module:function", called with the slice's devices and `options`;
      returns a `Built`.
    topology: Slice, e.g. "v5e:16x16" or "v5p:4x4x8"; or GPUs of a host,
      "h100:8", and of several, "h100:2x8".
    options: Options of the builder; JSON values.
    compiler_options: Options of XLA, e.g. {"xla_tpu_...": True}.
    kernels: Cycles of Pallas kernels by name, see `overlap.check`; not for
      GPUs.
    flags: Flags of libtpu, "--xla_...=...".
    timeout_s: Seconds after which the compilation is ended.
    text_path: File for the scheduled program's text.
    memory_only: End when all buffers have been placed in the chip's memory,
      in a tenth of the time: no machine code is made, hence neither `memory`
      nor `report`. The kernels' use of vector memory is then unchecked. A
      program for GPUs, which is compiled in seconds, is compiled whole.
    code: Count the cycles of the operations in their machine code, for `time`;
      the compiler writes it to temporary files, up to hundreds of MB.
    simulate: Compile a second time and run the compiler's simulator, which
      covers operations until the first that it does not know.
    buffers: Number of the largest buffers that the result lists; None: 8 of a
      program that does not fit, and none of others.

  Returns:
    The result, also if the program does not fit.

  Raises:
    OptionError: If the compiler is missing, the topology is unknown, options
      are not JSON or not for GPUs, or the builder raises an error of this
      library.
    CompileError: If the compiler refuses the program, or takes too long.
  """
  aim = target(topology)
  reserved = _DUMPS.intersection(compiler_options or ())
  if reserved:
    raise OptionError(
      "compiler_options",
      ", ".join(sorted(reserved)),
      "none of these, which say where buffers are reported",
      "pass text_path= to keep the program",
    )
  if buffers is not None:
    positive_int("buffers", buffers)
  if memory_only and buffers is not None:
    raise OptionError(
      "memory_only",
      f"True with buffers={buffers}",
      "one of them: it ends before the compiler has reported its buffers",
      "leave out memory_only=, or buffers=",
    )
  if memory_only and (code or simulate):
    raise OptionError(
      "memory_only",
      "True with code or simulate",
      "one of them: without machine code there are no cycles",
      "leave out memory_only=, or code= and simulate=",
    )
  dumps = [flag for flag in flags if flag.startswith(_DUMP_FLAG)]
  if code and dumps:
    raise OptionError(
      "flags",
      ", ".join(dumps),
      "none of these with code=True, which writes there",
      "leave out the flag, or code=",
    )
  if isinstance(aim, GpuTarget):
    _refuse_for_gpus(kernels=kernels, flags=flags, code=code, simulate=simulate)
  require(topology)
  job = {
    "builder": builder,
    "caller": os.getpid(),
    "target": aim.job(),
    "options": dict(options or {}),
    "compiler_options": dict(compiler_options or {}),
    "memory_only": memory_only,
    "buffers": buffers,
    "limit_bytes": aim.hbm_bytes,
  }
  try:
    text = json_text(job)
  except (TypeError, ValueError) as error:
    raise OptionError(
      "options", f"{error}", "values that JSON has", "pass plain values"
    ) from None
  with tempfile.TemporaryDirectory(prefix="ringjax-code-") as folder:
    written = (f"{_DUMP_FLAG}{folder}", *CODE_FLAGS) if code else ()
    answer, program = _run(text, topology, (*flags, *written), timeout_s)
    bundles = machine_code.read_folder(pathlib.Path(folder))
  simulated = {}
  if simulate and program:
    simulated = _simulated(text, topology, flags, timeout_s)
  if text_path is not None and program:
    pathlib.Path(text_path).write_text(program)
  memory = report = moved = sent = seconds = traffic_error = None
  needed = answer.get("needed_bytes") or 0
  fits = bool(answer["fits"])
  if "memory" in answer:
    memory = Memory(limit=aim.hbm_bytes, **answer["memory"])
    # The compiler counts buffers whose lifetimes don't overlap once.
    needed = memory.total
    if isinstance(aim, GpuTarget) and needed > aim.hbm_bytes:
      # The plugin warns of it in a log, and goes on.
      fits, memory = False, None
  if memory is not None:
    core = aim.core if isinstance(aim, TpuTarget) else None
    parsed = HloProgram(
      program, core, kernels=kernels, data_trips=answer["data_trips"]
    )
    if core is not None:
      report = overlap.check(
        parsed,
        core,
        coords=answer["coords"],
        wraps=core.wraps(chips.sides(topology)),
      )
    sent = parsed.sent_bytes()
    try:
      if report is not None or not has_opaque_kernel(parsed):
        moved = traffic(parsed, taken=answer["facts"].get("filled_blocks", 1.0))
      if report is not None:
        seconds = time_range(
          parsed,
          topology,
          report,
          code=ProgramCode(
            bundles=bundles,
            simulated=simulated,
            grids=kernel_grids.from_records(answer["grids"]),
            tile_share=answer["facts"].get("tile_share"),
          ),
          facts=answer["facts"],
          argument_bytes=memory.arguments + memory.outputs - memory.aliased,
        )
    except Exception as error:
      # Compiling took minutes: its result counts without the traffic.
      traffic_error = f"{type(error).__name__}: {error}"
  return Compiled(
    topology=topology,
    devices=answer["devices"],
    fits=fits,
    memory=memory,
    needed_bytes=needed,
    limit_bytes=answer.get("limit_bytes") or aim.hbm_bytes,
    largest=tuple(Buffer(**buffer) for buffer in answer.get("largest", ())),
    report=report,
    trace_s=answer["trace_s"],
    compile_s=answer["compile_s"],
    text_bytes=len(program),
    facts=answer["facts"],
    versions=answer["versions"],
    text_path=text_path if program else None,
    traffic=moved,
    sent=sent,
    time=seconds,
    traffic_error=traffic_error,
  )


def _simulated(
  job: str, topology: str, flags: Sequence[str], timeout_s: float | int
) -> dict[str, float]:
  """Cycles of the compiler's simulator, by the operation's name.

  The simulator ends the process at the first operation that it does not know;
  the cycles of those before it are kept. It does not run loops whose length is
  computed while the program runs: operations of 0 cycles are left out.
  """
  with tempfile.TemporaryDirectory(prefix="ringjax-simulated-") as folder:
    with contextlib.suppress(CompileError):
      _run(job, topology, (*flags, f"{_SIMULATE_FLAG}{folder}"), timeout_s)
    return machine_code.read_simulated(pathlib.Path(folder))


def _refuse_for_gpus(**options: Any) -> None:
  """Raise if an option is given that is about libtpu alone."""
  for name, value in options.items():
    if value:
      raise OptionError(
        name, repr(value), "nothing for GPUs", f"leave {name} out"
      )


def _run(
  job: str, topology: str, flags: Sequence[str], timeout_s: float | int
) -> tuple[dict[str, Any], str]:
  """Run the process that compiles; its answer, and the program's text."""
  environ = environment(flags)
  # The process must find the modules that this one finds.
  paths = [path or os.getcwd() for path in sys.path]
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
        _, stderr = process.communicate(timeout=timeout_s)
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
    answer_path = folder / "answer.json"
    if not answer_path.exists():
      raise CompileError(
        "compile",
        f"a process that ended with status {process.returncode}",
        "an answer",
        f"see its last lines: {_fatal(stderr)}",
      )
    answer = json.loads(answer_path.read_text())
    program_path = folder / "program.hlo"
    program = program_path.read_text() if program_path.exists() else ""
  if "refused" in answer:
    raise OptionError(answer["refused"])
  if "error" in answer:
    raise CompileError(
      "program",
      answer["error"][:1500],
      f"one that compiles for {topology}",
      "see the traceback" + ":\n" + answer["traceback"][-3000:],
    )
  return answer, program


def _fatal(stderr: str) -> str:
  """The compiler's fatal error, without the stack addresses after it."""
  lines = stderr.strip().splitlines()
  fatal = [line for line in lines if _FATAL.match(line)]
  return "\n".join(fatal or lines)[-1500:]


def stop() -> None:
  """End the compilations of all threads; their calls raise CompileError."""
  for process in tuple(_RUNNING):
    process.kill()


def versions(platform: str = "tpu") -> dict[str, str]:
  """Installed versions of jax, and of the compiler for a platform.

  Args:
    platform: "tpu", or "cuda" for GPUs.
  """
  names = ["jax", "libtpu"] if platform == "tpu" else ["jax", *_PLUGINS]
  installed = {}
  for name in names:
    try:
      installed[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      if platform == "tpu":
        installed[name] = "unknown"
  return installed
