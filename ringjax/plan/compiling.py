"""The process that compiles for a TPU slice, which `ringjax.plan.aot` starts.

Guarantees: the job of a folder is answered there, in one file that is written
whole or not at all; the process then ends at once. The compiler spends most of
its time on machine code, which does not change where buffers are: a job with
`memory_only` is answered as soon as they have been placed.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import jax
from jax.experimental import topologies

from ringjax.errors import OptionError, RingjaxError
from ringjax.json_text import json_text
from ringjax.plan.aot import versions

_NEED = re.compile(
  r"\(([\d.]+)([KMGTP]?)\) exceeds available \w+ \(([\d.]+)([KMGTP]?)\)"
)
# The message about a kernel's tiles, which are not in the main memory.
_VECTOR = re.compile(
  r"memory space (?:vmem|smem).*?for %([\w.-]+).*?"
  r"size ([\d.]+\w?) and limit ([\d.]+\w?)",
  re.S,
)
# "16.00GiB( 50%);   16.00GiB;  17179869184;     3; f32[32768,4], s32[8]"
_BUFFER = re.compile(
  r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)([KMGTP]?)i?B;"
  r"\s*\d+;\s*\d+;\s*(.*)$",
  re.M,
)
# Buffers of a program that does not fit that are reported.
_LARGEST = 8
_UNITS = {"": 1, **{u: 1024 ** (i + 1) for i, u in enumerate("KMGTP")}}
_USAGE = "memory-usage-report.txt"
# Between looks whether buffers have been placed, and whether the process that
# asked still runs.
_LOOK_S = 0.1
_ALONE_S = 1.0
_TOTAL = re.compile(r"Memory Space: default[^\n]*\nTotal bytes: (\d+) ")


def child() -> None:
  """Compiles the job of a folder and leaves the answer there."""
  place = pathlib.Path(sys.argv[-1])
  job = json.loads((place / "job.json").read_text())
  alone = lambda: os.getppid() != job["caller"]
  _end_if(alone, place)
  threading.Thread(target=_watch, args=(alone, place), daemon=True).start()
  try:
    found = _compiled(job, place)
  except RingjaxError as error:
    found = {"refused": str(error)}
  except Exception as error:
    found = {"error": f"{error}", "traceback": traceback.format_exc()}
  # Whole or not at all.
  (place / "answer.part").write_text(json_text(found))
  os.replace(place / "answer.part", place / "answer.json")
  # libtpu's own threads, and one that still makes machine code, would take
  # long to end.
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(0)


def _watch(alone: Callable[[], bool], place: pathlib.Path) -> None:
  """Ends this process when the one that started it has ended, for any reason.

  A compilation takes minutes and gigabytes, and its folder would be left.
  """
  while True:
    _end_if(alone, place)
    time.sleep(_ALONE_S)


def _end_if(alone: Callable[[], bool], place: pathlib.Path) -> None:
  if alone():
    shutil.rmtree(place, ignore_errors=True)
    os._exit(1)


def _compiled(job: Mapping[str, Any], place: pathlib.Path) -> dict[str, Any]:
  try:
    found = topologies.get_topology_desc(
      job["topology"], platform="tpu", wrap=tuple(job["wraps"]), **job["config"]
    )
  except (RuntimeError, ValueError, NotImplementedError) as error:
    raise OptionError(
      "topology",
      f"{job['topology']}: {error}"[:400],
      "a slice that libtpu knows",
      "pass a slice of this libtpu, or install another version",
    ) from None
  built = _builder(job["builder"])(found.devices, **job["options"])
  start = time.monotonic()
  lowered = built.function.trace(*built.arguments).lower(
    lowering_platforms=("tpu",)
  )
  middle = time.monotonic()
  dump = place / "dump"
  dump.mkdir()
  asked = {
    **job["compiler_options"],
    "xla_dump_to": str(dump),
    "xla_dump_hlo_as_text": True,
  }
  # In a thread, which may be left alone when the answer is known.
  compiling = futures.ThreadPoolExecutor(1).submit(
    lowered.compile, compiler_options=asked
  )
  body = {
    "devices": built.mesh.devices.size,
    "coords": [list(d.coords) for d in built.mesh.devices.flat],
    "facts": dict(built.facts),
    "data_trips": built.data_trips,
    "trace_s": middle - start,
    "versions": versions(),
  }
  if job["memory_only"]:
    total = _placed(compiling, dump, job["limit_bytes"])
    if total is not None:
      seconds = time.monotonic() - middle
      return {
        **body, "fits": True, "compile_s": seconds, "needed_bytes": total
      }  # fmt: skip
  try:
    compiled = compiling.result()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    _check_tiles(str(error))
    return {
      **body,
      "fits": False,
      "compile_s": time.monotonic() - middle,
      **_excess(str(error)),
      "largest": _largest(dump),
    }
  seconds = time.monotonic() - middle
  (place / "program.hlo").write_text(compiled.as_text())
  made = compiled.memory_analysis()
  memory = {
    "arguments": made.argument_size_in_bytes,
    "outputs": made.output_size_in_bytes,
    "aliased": made.alias_size_in_bytes,
    "temporaries": made.temp_size_in_bytes,
    "code": made.generated_code_size_in_bytes,
  }
  return {**body, "fits": True, "compile_s": seconds, "memory": memory}


def _placed(
  compiling: futures.Future[Any], dump: pathlib.Path, limit_bytes: int
) -> int | None:
  """Bytes of all buffers as soon as they have been placed.

  None if the compilation ended before, or they exceed the limit: the compiler
  then says so itself.
  """
  while not compiling.done():
    totals = [
      int(total)
      for path in dump.glob(f"*{_USAGE}")
      for total in _TOTAL.findall(path.read_text(errors="replace"))
    ]
    if totals:
      return max(totals) if max(totals) <= limit_bytes else None
    time.sleep(_LOOK_S)
  return None


def _builder(name: str) -> Any:
  module, _, function = name.partition(":")
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise OptionError(
      "builder",
      f"{name!r}: {error}",
      "'module:function' that can be imported",
      "pass a function that exists, and its module",
    ) from None


def _check_tiles(text: str) -> None:
  """Refuses a kernel whose tiles do not fit the chip's vector memory.

  Fewer tokens would not change that.
  """
  found = _VECTOR.search(text)
  if found:
    raise OptionError(
      "program",
      f"{found[2]} of vector memory for {found[1]}",
      f"at most {found[3]}",
      "pass smaller tiles, q_block= and kv_block=",
    )


def _excess(text: str) -> dict[str, int]:
  """The needed and the available memory, as the compiler's error has them."""
  found = _NEED.search(text)
  if not found:
    return {"needed_bytes": 0, "limit_bytes": 0}
  size = lambda number, unit: int(float(number) * _UNITS[unit])
  return {
    "needed_bytes": size(found[1], found[2]),
    "limit_bytes": size(found[3], found[4]),
  }


def _largest(dump: pathlib.Path) -> list[dict[str, Any]]:
  """The largest buffers of a program that does not fit."""
  found: list[dict[str, Any]] = []
  for path in sorted(dump.glob(f"*{_USAGE}")):
    found += buffers(path.read_text(errors="replace"))
  found = sorted(found, key=lambda one: -one["nbytes"])[:_LARGEST]
  texts = [p.read_text(errors="replace") for p in dump.glob("*izations.txt")]
  texts.sort(key=lambda text: "is_scheduled=true" not in text)
  for one in found:
    sources = (source_of(one["shape"], text) for text in texts)
    one["source"] = next((name for name in sources if name), "")
  return found


def buffers(text: str) -> list[dict[str, Any]]:
  """The buffers of the chip's main memory that XLA's usage report lists.

  Those that share a place count once, with the shapes of them all.
  """
  main = text.partition("Memory Space: default")[2].partition("Memory Space")[0]
  found = []
  for size, unit, shapes in _BUFFER.findall(main):
    nbytes = int(float(size) * _UNITS[unit.upper()])
    found.append({"nbytes": nbytes, "shape": shapes.strip()})
  return found


def source_of(shape: str, text: str) -> str:
  """The traced operation behind the first array of `shape` in a module."""
  first = re.sub(r"^\d+\W", "", shape.split(", ")[0].strip("("))
  line = re.search(rf"= \(?{re.escape(first)}[^\n]*op_name=\"([^\"]*)\"", text)
  return line[1] if line else ""
