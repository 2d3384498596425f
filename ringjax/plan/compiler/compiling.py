"""Compilation for a slice or hosts, in a process that `rj.plan.aot` starts.

Guarantees: the job of a folder is answered there, in one file that is written
whole or not at all; the process then ends at once. The compiler spends most of
its time on machine code, which does not change where buffers are: a job with
`memory_only` is answered as soon as they have been placed.
"""

from __future__ import annotations

import dataclasses
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
from ringjax.plan.compiler.aot import versions
from ringjax.plan.compiler.kernel_grids import kernel_grids

_NEED = re.compile(
  r"\(([\d.]+)([KMGTP]?)\) exceeds available \w+ \(([\d.]+)([KMGTP]?)\)"
)
# Error about a kernel's tiles, which are in the vector memory.
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
# Maximum number of reported buffers of a program that does not fit.
_LARGEST = 8
_UNITS = {"": 1, **{u: 1024 ** (i + 1) for i, u in enumerate("KMGTP")}}
_USAGE = "memory-usage-report.txt"
# Seconds between checks whether buffers have been placed, and whether the
# calling process still runs.
_LOOK_S = 0.1
_ALONE_S = 1.0
# Tiles of products can't be tried without a GPU.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
  "tpu": {},
  "cuda": {"xla_gpu_autotune_level": 0},
}
_TOTAL = re.compile(r"Memory Space: default[^\n]*\nTotal bytes: (\d+) ")


def child() -> None:
  """Compile the job of a folder and leave the answer there."""
  folder = pathlib.Path(sys.argv[-1])
  job = json.loads((folder / "job.json").read_text())
  is_orphan = lambda: os.getppid() != job["caller"]
  _end_if(is_orphan, folder)
  threading.Thread(target=_watch, args=(is_orphan, folder), daemon=True).start()
  try:
    answer = _compile_job(job, folder)
  except RingjaxError as error:
    answer = {"refused": str(error)}
  except Exception as error:
    answer = {"error": f"{error}", "traceback": traceback.format_exc()}
  # Written whole or not at all.
  (folder / "answer.part").write_text(json_text(answer))
  os.replace(folder / "answer.part", folder / "answer.json")
  # Exit without waiting for libtpu's threads, or one that still makes machine
  # code.
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(0)


def _watch(is_orphan: Callable[[], bool], place: pathlib.Path) -> None:
  """End this process when the one that started it has ended, for any reason.

  A compilation takes minutes and gigabytes, and its folder would be left.
  """
  while True:
    _end_if(is_orphan, place)
    time.sleep(_ALONE_S)


def _end_if(is_orphan: Callable[[], bool], place: pathlib.Path) -> None:
  if is_orphan():
    shutil.rmtree(place, ignore_errors=True)
    os._exit(1)


def _compile_job(job: Mapping[str, Any], place: pathlib.Path) -> dict[str, Any]:
  topology, platform = _topology(job["target"]), job["target"]["platform"]
  built = _builder(job["builder"])(topology.devices, **job["options"])
  start = time.monotonic()
  traced = built.function.trace(*built.arguments)
  lowered = traced.lower(lowering_platforms=(platform,))
  compile_start = time.monotonic()
  dump = place / "dump"
  dump.mkdir()
  compiler_options = {
    **_OPTIONS[platform],
    **job["compiler_options"],
    "xla_dump_to": str(dump),
    "xla_dump_hlo_as_text": True,
  }
  # In a thread, which can be abandoned when the answer is known.
  compiling = futures.ThreadPoolExecutor(1).submit(
    lowered.compile, compiler_options=compiler_options
  )
  body = {
    "devices": built.mesh.devices.size,
    "coords": [
      list(getattr(device, "coords", (device.id,)))
      for device in built.mesh.devices.flat
    ],
    "facts": dict(built.facts),
    "data_trips": built.data_trips,
    "grids": [dataclasses.asdict(grid) for grid in kernel_grids(traced.jaxpr)],
    "trace_s": compile_start - start,
    "versions": versions(platform),
  }
  if job["memory_only"] and platform == "tpu":
    total = _placed_bytes(compiling, dump, job["limit_bytes"])
    if total is not None:
      seconds = time.monotonic() - compile_start
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
      "compile_s": time.monotonic() - compile_start,
      **_excess(str(error)),
      "largest": _largest(dump, job["buffers"] or _LARGEST),
    }
  seconds = time.monotonic() - compile_start
  (place / "program.hlo").write_text(compiled.as_text())
  analysis = compiled.memory_analysis()
  memory = {
    "arguments": analysis.argument_size_in_bytes,
    "outputs": analysis.output_size_in_bytes,
    "aliased": analysis.alias_size_in_bytes,
    "temporaries": analysis.temp_size_in_bytes,
    "code": analysis.generated_code_size_in_bytes,
  }
  body |= {"fits": True, "compile_s": seconds, "memory": memory}
  if job["buffers"]:
    body["largest"] = _largest(dump, job["buffers"])
  return body


def _topology(aim: Mapping[str, Any]) -> topologies.TopologyDescription:
  """The devices that a target's compiler knows."""
  # Sequences come as lists from JSON.
  options = {
    key: tuple(value) if isinstance(value, list) and key == "wrap" else value
    for key, value in aim["options"].items()
  }
  try:
    return topologies.get_topology_desc(
      aim["name"], platform=aim["platform"], **options
    )
  except (RuntimeError, ValueError, NotImplementedError) as error:
    raise OptionError(
      "topology",
      f"{aim['name'] or options['topology']}: {error}"[:400],
      "one that the installed compiler knows",
      "pass another one, or install another version of libtpu or of JAX's "
      "CUDA plugin, which must be JAX's own",
    ) from None


def _placed_bytes(
  compiling: futures.Future[Any], dump: pathlib.Path, limit_bytes: int
) -> int | None:
  """Total bytes of all buffers as soon as they have been placed.

  None if the compilation ended before, or they exceed the limit: the compiler
  then reports that itself.
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
  """Raise if a kernel's tiles do not fit the chip's vector memory.

  Fewer tokens would not change that.
  """
  match = _VECTOR.search(text)
  if match:
    raise OptionError(
      "program",
      f"{match[2]} of vector memory for {match[1]}",
      f"at most {match[3]}",
      "pass smaller tiles, q_block= and kv_block=",
    )


def _excess(text: str) -> dict[str, int]:
  """Needed and available memory, from the compiler's error."""
  match = _NEED.search(text)
  if not match:
    return {"needed_bytes": 0, "limit_bytes": 0}
  size = lambda number, unit: int(float(number) * _UNITS[unit])
  return {
    "needed_bytes": size(match[1], match[2]),
    "limit_bytes": size(match[3], match[4]),
  }


def _largest(dump: pathlib.Path, count: int) -> list[dict[str, Any]]:
  """Largest buffers of a program, as the compiler reports them."""
  largest: list[dict[str, Any]] = []
  for path in sorted(dump.glob(f"*{_USAGE}")):
    largest += buffers(path.read_text(errors="replace"))
  largest = sorted(largest, key=lambda buffer: -buffer["nbytes"])[:count]
  texts = [
    path.read_text(errors="replace") for path in dump.glob("*izations.txt")
  ]
  texts.sort(key=lambda text: "is_scheduled=true" not in text)
  for buffer in largest:
    sources = (source_of(buffer["shape"], text) for text in texts)
    buffer["source"] = next((name for name in sources if name), "")
  return largest


def buffers(text: str) -> list[dict[str, Any]]:
  """Buffers of the chip's main memory that XLA's usage report lists.

  Buffers that share memory count once, with the shapes of all.
  """
  main = text.partition("Memory Space: default")[2].partition("Memory Space")[0]
  buffer_list = []
  for size, unit, shapes in _BUFFER.findall(main):
    nbytes = int(float(size) * _UNITS[unit.upper()])
    buffer_list.append({"nbytes": nbytes, "shape": shapes.strip()})
  return buffer_list


def source_of(shape: str, text: str) -> str:
  """Traced operation of the first array of `shape` in a module, or ""."""
  first_array = re.sub(r"^\d+\W", "", shape.split(", ")[0].strip("("))
  line = re.search(
    rf"= \(?{re.escape(first_array)}[^\n]*op_name=\"([^\"]*)\"", text
  )
  return line[1] if line else ""
