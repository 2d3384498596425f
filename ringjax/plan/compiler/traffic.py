"""Bytes that a scheduled program reads from and writes to a device's memory.

Guarantees: each instruction counts its operands and results in the device's
main memory, as often as it runs. Of an array that it reads or writes in part,
only that part counts: slices, gathers, updates in place. What stays in the
chip's vector memory is free; a copy into it counts once. A kernel counts what
its author stated, or else all of its operands.

Loops and branches that depend on data run as often as the caller states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringjax.checks import number
from ringjax.plan import files
from ringjax.plan.compiler.hlo import BYTES, HloInstruction, HloProgram

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
# Instructions that move nothing, besides the ends of what others began.
_FREE = frozenset(
  {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
    "after-all", "partition-id", "replica-id", "opt-barrier", "domain",
    "get-dimension-size", "add-dependency", "async-update", "iota",
  }
)  # fmt: skip
# Views of an operand, through which its uses are followed.
_VIEWS = ("bitcast", "reshape", "opt-barrier")
# Instructions of a fusion that pass on as much as is used of them: a copy there
# is another order of the registers.
_PASSED_ON = (*_VIEWS, "copy")
# Instructions that read as much of their first operand as they return.
_PARTS = ("dynamic-slice", "slice", "gather")
# Instructions that write a part of their first operand, in place; and which
# operand holds that part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_KERNEL = 'custom_call_target="tpu_custom_call"'
# Targets of a GPU's program that read all operands: products of libraries, and
# the kernels of Pallas, which may read a part.
_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|cudnn)')
_OPAQUE = 'custom_call_target="__gpu$xla.gpu.triton"'


@dataclass(frozen=True, kw_only=True)
class MemoryTraffic:
  """Bytes of a step of one device, to and from its main memory.

  Attributes:
    read: Bytes that are read.
    written: Bytes that are written.
    largest_written: Most bytes that an instruction writes at a time.
    largest: Name of that instruction in the traced program.
  """

  read: float
  written: float
  largest_written: float
  largest: str

  @property
  def total(self) -> float:
    """Bytes that are read or written."""
    return self.read + self.written

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "total")


def traffic(program: HloProgram, *, taken: float | int = 1.0) -> MemoryTraffic:
  """Count the bytes that a program reads and writes.

  Args:
    program: Scheduled program.
    taken: Share of runs in which a conditional takes the branch that moves the
      most bytes, in [0, 1]; in the others it takes the one that moves the
      least.

  Raises:
    OptionError: If the share is not a number between 0 and 1.
  """
  share = number("taken", taken, least=0, most=1)
  return TrafficCounter(program, share).count(program.entry)


def has_opaque_kernel(program: HloProgram) -> bool:
  """Whether a kernel's text does not say which part of an array it reads."""
  return any(
    _OPAQUE in line.text
    for lines in program.computations.values()
    for line in lines
  )


class TrafficCounter:
  """Counts the traffic of computations and instructions, each once."""

  def __init__(
    self, program: HloProgram, taken: float, *, kernels: bool = True
  ):
    """Create a counter.

    Args:
      program: Scheduled program.
      taken: Share of runs in which a conditional takes its heaviest branch.
      kernels: Whether kernels count, by what their authors state.
    """
    self._program, self._taken, self._kernels = program, taken, kernels
    self._counted: dict[str, MemoryTraffic] = {}
    self._lines: dict[str, dict[str, HloInstruction]] = {}

  def count(self, name: str) -> MemoryTraffic:
    """Traffic of one run of a computation."""
    if name not in self._counted:
      self._counted[name] = _sum(
        self.of(name, line) for line in self._program.computations[name]
      )
    return self._counted[name]

  def of(self, name: str, line: HloInstruction) -> MemoryTraffic:
    """Traffic of one run of an instruction of a computation."""
    if name not in self._lines:
      self._lines[name] = {
        other.name: other for other in self._program.computations[name]
      }
    lines = self._lines[name]
    callees = [self.count(callee) for callee in self._program.callees(line)]
    if line.op == "conditional":
      callees.sort(key=lambda moved: moved.total)
      light, heavy = callees[0], callees[-1]
      return _sum(
        (_times(heavy, self._taken), _times(light, 1.0 - self._taken))
      )
    if callees:
      trips = self._program.trips(name, line) if line.op == "while" else 1.0
      return _times(_sum(callees), trips)
    if line.op in _FREE or line.op.endswith("-done"):
      return _moved(line, 0.0, 0.0)
    stored = [_stored(lines[x].shape) for x in line.operands if x in lines]
    if line.op == "custom-call":
      return self._custom_call(line, stored)
    if line.kind is not None and line.op.endswith("-start"):
      # The results are those of the collective; of most kinds the operands come
      # before them, and flags after.
      result = _stored(line.shape) - (
        0.0 if line.kind == "all-reduce" else math.fsum(stored)
      )
      return _moved(line, math.fsum(stored), max(result, 0.0))
    if line.op.endswith("-start"):
      # The results are the source, the destination and a flag; of copies the
      # destination is first.
      called = self._program.computations.get(line.called("calls"))
      if called is None:
        source, destination = _arrays(line.shape)[:2]
        if line.op == "copy-start":
          source, destination = destination, source
        part = min(source[0], destination[0])
        return _moved(line, part * source[1], part * destination[1])
    inner = self._inner(line)
    if inner is None:
      return self._plain(line, stored, lines)
    read = math.fsum(
      self._read(inner, operand) if nbytes else 0.0
      for operand, nbytes in enumerate(stored)
    )
    return _moved(line, read, self._written(inner, line.shape))

  def _inner(self, line: HloInstruction) -> str | None:
    """Computation of a fusion, or of an asynchronous call."""
    called = line.called("calls") or line.called("called_computations")
    return called if called in self._program.computations else None

  def _plain(
    self,
    line: HloInstruction,
    stored: list[float],
    lines: Mapping[str, HloInstruction],
  ) -> MemoryTraffic:
    result = _stored(line.shape)
    if line.op in _PARTS and stored:
      part = math.fsum(size for size, _ in _arrays(line.shape))
      return _moved(line, min(part, stored[0]) + math.fsum(stored[1:]), result)
    if line.op in _UPDATES and stored:
      part = line.operands[_UPDATES[line.op]]
      written = min(_size(lines[part].shape), result)
      return _moved(line, _stored(lines[part].shape), written)
    return _moved(line, math.fsum(stored), result)

  def _custom_call(
    self, line: HloInstruction, stored: list[float]
  ) -> MemoryTraffic:
    is_kernel = _KERNEL in line.text
    if is_kernel and not self._kernels:
      return _moved(line, 0.0, 0.0)
    if not is_kernel and not _PRODUCT.search(line.text):
      return _moved(line, 0.0, 0.0)
    result = _stored(line.shape)
    stated = re.search(r'"bytes_accessed":"?(\d+)', line.text)
    read = float(stated[1]) - result if stated else math.fsum(stored)
    return _moved(line, max(read, 0.0), result)

  def _read(self, computation: str, operand: int) -> float:
    """Bytes of an operand that a fusion reads."""
    lines = self._program.computations[computation]
    parameter = next(
      line
      for line in lines
      if line.op == "parameter" and f"parameter({operand})" in line.text
    )
    size = _size(parameter.shape)
    return min(size, self._uses(computation, parameter.name, size))

  def _uses(self, computation: str, name: str, size: float) -> float:
    lines = self._program.computations[computation]
    total = 0.0
    for line in lines:
      if name not in line.operands:
        continue
      first = line.operands[0] == name
      # A copy that is returned is written, and read whole.
      kinds = _VIEWS if line.root else _PASSED_ON
      if line.op in kinds or self._is_view(line, kinds):
        total += self._uses(computation, line.name, size)
      elif line.op in _PARTS and first:
        total += _size(line.shape)
      elif line.op in _UPDATES and first:
        continue
      elif (inner := self._inner(line)) is not None:
        total += self._read(inner, line.operands.index(name))
      elif line.op == "tuple":
        continue
      else:
        return size
    return total

  def _is_view(self, line: HloInstruction, kinds: tuple[str, ...]) -> bool:
    """Whether a fusion returns a view of its operand, by these operations."""
    inner = self._inner(line)
    return inner is not None and all(
      part.op in ("parameter", *kinds)
      for part in self._program.computations[inner]
    )

  def _written(self, computation: str, shape: str) -> float:
    """Bytes of a fusion's results that it writes."""
    lines = {
      line.name: line for line in self._program.computations[computation]
    }
    root = next(line for line in lines.values() if line.root)
    roots = [lines[x] for x in root.operands] if root.op == "tuple" else [root]
    arrays = _arrays(shape)
    if len(roots) != len(arrays):
      return _stored(shape)
    return math.fsum(
      self._root_bytes(computation, lines, line, size) * in_memory
      for line, (size, in_memory) in zip(roots, arrays, strict=True)
    )

  def _root_bytes(
    self,
    computation: str,
    lines: Mapping[str, HloInstruction],
    root: HloInstruction,
    size: float,
  ) -> float:
    while root.op in _VIEWS:
      root = lines[root.operands[0]]
    if root.op == "parameter":
      # Passed through.
      return 0.0
    if root.op in _UPDATES:
      return min(size, _size(lines[root.operands[_UPDATES[root.op]]].shape))
    inner = self._inner(root)
    if inner is not None and len(_arrays(root.shape)) == 1:
      return min(size, self._written(inner, re.sub(r"\{.*", "", root.shape)))
    return size


def _arrays(shape: str) -> list[tuple[float, bool]]:
  """(bytes, whether it is in the main memory) of each array of a shape."""
  return [
    (
      BYTES[kind] * math.prod(int(n) for n in sizes.split(",") if n),
      (_SPACE.search(layout) or ["", "0"])[1] == "0",
    )
    for kind, sizes, layout in _ARRAY.findall(shape)
    if kind in BYTES
  ]


def _size(shape: str) -> float:
  return math.fsum(size for size, _ in _arrays(shape))


def _stored(shape: str) -> float:
  """Bytes of a shape's arrays that are in the main memory."""
  return math.fsum(size * in_memory for size, in_memory in _arrays(shape))


def _moved(line: HloInstruction, read: float, written: float) -> MemoryTraffic:
  return MemoryTraffic(
    read=read,
    written=written,
    largest_written=written,
    largest=line.op_name or line.name,
  )


def _times(moved: MemoryTraffic, count: float) -> MemoryTraffic:
  return MemoryTraffic(
    read=moved.read * count,
    written=moved.written * count,
    largest_written=moved.largest_written if count else 0.0,
    largest=moved.largest,
  )


def _sum(parts: Iterator[MemoryTraffic] | Any) -> MemoryTraffic:
  read = written = largest_written = 0.0
  largest = ""
  for part in parts:
    read, written = read + part.read, written + part.written
    if part.largest_written > largest_written:
      largest_written, largest = part.largest_written, part.largest
  return MemoryTraffic(
    read=read, written=written, largest_written=largest_written, largest=largest
  )
