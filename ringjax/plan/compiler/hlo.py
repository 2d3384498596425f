"""Parser of a compiled, scheduled program: instructions, costs and trip counts.

Guarantees: the cost of an instruction is the compiler's own estimate, from the
instruction's line. Only kernels have other costs: the FLOPs that their author
stated, or cycles that the caller knows. Instructions without a cost are listed.

Instructions are in the order in which they run. A loop's trip count is not
written down for TPU: it is the constant that its condition compares with, in
the condition itself or among the inputs of the loop. Without one the count
depends on data: the loop's scope "expected_trips_N" states the count to assume,
else the caller does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.parallel.chips import Core

BYTES = {
  "pred": 1.0, "s4": 0.5, "u4": 0.5, "s8": 1.0, "u8": 1.0, "s16": 2.0,
  "u16": 2.0, "bf16": 2.0, "f16": 2.0, "s32": 4.0, "u32": 4.0, "f32": 4.0,
  "s64": 8.0, "u64": 8.0, "f64": 8.0, "f8e4m3fn": 1.0, "f8e5m2": 1.0,
  "f8e4m3": 1.0, "f8e4m3b11fnuz": 1.0, "f4e2m1fn": 0.5,
}  # fmt: skip
_WORD = r"[\w.\-<>]+"
_COMPUTATION = re.compile(rf"^(ENTRY\s+)?%?({_WORD})\s+\(.*\{{\s*$")
_NAME = re.compile(rf"^\s+(ROOT\s+)?%?({_WORD}) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# A loop whose trip count depends on data, traced in a scope that states one.
_EXPECTED_TRIPS = re.compile(r"expected_trips_(\d+)/while$")
# Larger numbers mean "unknown".
_MOST_CYCLES = 1 << 60
# Operations that take no time, or run in parallel to others: copies between the
# memories of a chip are done by DMA engines.
_FREE = frozenset(
  {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
    "after-all", "partition-id", "replica-id", "opt-barrier", "domain",
    "copy-start", "copy-done", "slice-start", "slice-done", "async-update",
    "get-dimension-size", "add-dependency",
  }
)  # fmt: skip
# Operations whose result is their operand's value.
_SAME = ("copy", "bitcast", "convert")
# Operations that may hold a collective in a computation that they call.
_HOLDERS = ("fusion", "async-start")
# Attribute that names the computation which runs in an instruction's place.
_RUNS = {"while": "body", "call": "to_apply"}
COLLECTIVES = (
  "collective-permute", "all-gather", "all-reduce", "reduce-scatter",
  "all-to-all", "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip


@dataclass(frozen=True)
class HloInstruction:
  """One line of a program.

  Attributes:
    name: Name, unique in its computation.
    op: Operation, e.g. "fusion" or "collective-permute-start".
    shape: Shape of its result, as text.
    operands: Names of its operands.
    text: The whole line.
    root: Whether its result is that of its computation.
  """

  name: str
  op: str
  shape: str
  operands: tuple[str, ...]
  text: str
  root: bool

  @property
  def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(dtype, sizes) of each array of its result."""
    return tuple(
      (kind, tuple(int(n) for n in sizes.split(",") if n))
      for kind, sizes in _ARRAY.findall(self.shape)
      if kind in BYTES
    )

  @property
  def nbytes(self) -> int:
    """Bytes of the largest array of its result."""
    return int(max((self._bytes(*array) for array in self.arrays), default=0))

  @property
  def all_bytes(self) -> int:
    """Bytes of all arrays of its result."""
    return int(sum(self._bytes(*array) for array in self.arrays))

  @staticmethod
  def _bytes(kind: str, sizes: tuple[int, ...]) -> float:
    return BYTES[kind] * math.prod(sizes)

  @property
  def op_name(self) -> str:
    """Name of its operation in the traced program."""
    match = re.search(r'op_name="([^"]*)"', self.text)
    return match[1] if match else ""

  @property
  def kind(self) -> str | None:
    """Kind of collective that it is or begins, or None."""
    kind = self.op.removesuffix("-start")
    return kind if kind in COLLECTIVES else None

  def called(self, which: str) -> str:
    """Name of the computation in an attribute, e.g. "body"; "" if none."""
    match = re.search(rf"\b{which}=%?({_WORD})", self.text)
    return match[1] if match else ""

  @property
  def branches(self) -> tuple[str, ...]:
    """Computations of a conditional."""
    match = re.search(r"branch_computations=\{([^}]*)\}", self.text)
    if match:
      return tuple(re.findall(_WORD, match[1]))
    return tuple(map(self.called, ("true_computation", "false_computation")))

  @property
  def pairs(self) -> tuple[tuple[int, int], ...]:
    """(from, to) of each device that sends."""
    match = re.search(
      r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", self.text
    )
    numbers = re.findall(r"\{(\d+),(\d+)\}", match[1]) if match else ()
    return tuple((int(a), int(b)) for a, b in numbers)

  @property
  def constant(self) -> int | None:
    """Value of an integer constant, or None."""
    match = re.search(r"\bconstant\((-?\d+)\)", self.text)
    return int(match[1]) if self.op == "constant" and match else None

  @property
  def estimate(self) -> float | None:
    """Estimated cycles that the compiler wrote into its line, or None."""
    match = re.search(r'"estimated_cycles":"?(\d+)', self.text)
    if not match or int(match[1]) > _MOST_CYCLES:
      return None
    return float(match[1])


Computation = tuple[HloInstruction, ...]
# Pairs of a part of a loop's traced name and its trip count.
Trips = Sequence[Sequence[Any]]


def as_trips(given: float | int | Trips) -> tuple[tuple[str, float], ...]:
  """Trip counts of loops that depend on data, by parts of their names.

  Raises:
    OptionError: If a number is negative or not finite.
  """
  pairs = (("", given),) if isinstance(given, int | float) else given
  return tuple(
    (str(part), number("data_trips", count, least=0)) for part, count in pairs
  )


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """Parse a module into its computations by name, and the name of the entry.

  Raises:
    OptionError: If it is not the text of a scheduled module.
  """
  computations: dict[str, list[HloInstruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    if current is None:
      head = _COMPUTATION.match(line)
      if head and "->" in line:
        current = computations.setdefault(head[2], [])
        entry = head[2] if head[1] else entry
    elif line.startswith("}"):
      current = None
    else:
      instruction = _instruction(line)
      if instruction is not None:
        current.append(instruction)
  if not entry or "is_scheduled=true" not in text.partition("\n")[0]:
    raise OptionError(
      "text",
      text[:60],
      "a scheduled HLO module with an entry",
      "pass compiled.as_text(), not lowered.as_text()",
    )
  return {name: tuple(lines) for name, lines in computations.items()}, entry


def _instruction(line: str) -> HloInstruction | None:
  head = _NAME.match(line)
  if head is None:
    return None
  remainder = line[head.end() :]
  end = (
    _closing_index(remainder, 0) + 1
    if remainder.startswith("(")
    else remainder.index(" ")
  )
  shape, remainder = remainder[:end], remainder[end:].lstrip()
  op, paren, _ = remainder.partition("(")
  if not paren:
    return None
  arguments = remainder[len(op) : _closing_index(remainder, len(op)) + 1]
  operands = () if op == "constant" else re.findall(rf"%({_WORD})", arguments)
  return HloInstruction(
    head[2], op, shape, tuple(operands), line, bool(head[1])
  )


def _closing_index(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  return len(text) - 1


class HloProgram:
  """A scheduled module and the cost of its parts, in cycles of one device.

  Attributes:
    text: Text of the module.
    computations: Instructions by the computation's name.
    entry: Name of the computation that runs first.
    times: Number of runs of each computation; all branches count as taken.
    counted_by_data: Loops whose trip count depends on data, and the assumed
      count.
    unpriced_kernels: Traced names of kernels without a known cost, by name.
  """

  def __init__(
    self,
    text: str,
    core: Core | None = None,
    *,
    kernels: Mapping[str, float | int] | None = None,
    data_trips: float | int | Trips = 1.0,
  ):
    """Parse the text and count how often each computation runs.

    Args:
      text: Text of a scheduled module.
      core: Device model, by which kernels have a price; None where
        cycles are not needed.
      kernels: Cycles of a call, by a part of the kernel's name; they take
        precedence over the cost that the kernel states.
      data_trips: Trip counts of loops that depend on data and whose scope
        states none: a number, or pairs of a part of the loop's traced name and
        a number, of which the first that fits counts; "" fits all.

    Raises:
      OptionError: If it is not a scheduled module, or a count is negative.
    """
    self._data_trips = as_trips(data_trips)
    self.text = text
    self.computations, self.entry = parse(text)
    self._core = core
    self._kernels = dict(kernels or {})
    self.counted_by_data: dict[str, float] = {}
    self.unpriced_kernels: dict[str, str] = {}
    self._cycles: dict[str, float] = {}
    self._trips: dict[str, float] = {}
    self._sends: dict[str, bool] = {}
    self.times: dict[str, float] = {}
    self._count_runs(self.entry, 1.0)

  @property
  def core(self) -> Core:
    """Device model.

    Raises:
      OptionError: If the program was parsed without one.
    """
    if self._core is None:
      raise OptionError(
        "core",
        "None",
        "the device whose cycles are asked for",
        "pass core=chips.core(name)",
      )
    return self._core

  # -- structure

  def callees(self, one: HloInstruction) -> tuple[str, ...]:
    """Names of the computations that run where this instruction does.

    Computations of a fusion or a reduction are part of it, and not included.
    """
    names: tuple[str, ...] = ()
    if one.op == "conditional":
      names = one.branches
    elif one.op in _RUNS:
      names = (one.called(_RUNS[one.op]),)
    return tuple(name for name in names if name in self.computations)

  def _count_runs(self, name: str, often: float) -> None:
    self.times[name] = self.times.get(name, 0.0) + often
    for instruction in self.computations[name]:
      inner = (
        often * self.trips(name, instruction)
        if instruction.op == "while"
        else often
      )
      for callee in self.callees(instruction):
        self._count_runs(callee, inner)

  def signature(self, one: HloInstruction) -> str:
    """Text of what an instruction computes, equal for equal instructions.

    Names and annotations are not part of it. An instruction without a
    computation has its own, as its operands' shapes are in other lines.
    """
    name = one.called("calls")
    if name not in self.computations:
      return one.name
    parts = [_unnamed(one.text)]
    for line in self.computations[name]:
      parts.append(_unnamed(line.text))
      if line.called("calls") in self.computations:
        parts.append(self.signature(line))
    return "\n".join(parts)

  def inner(self, one: HloInstruction) -> HloInstruction | None:
    """The collective inside of a fusion or an asynchronous call, or None."""
    for line in self.computations.get(one.called("calls"), ()):
      if line.kind is not None:
        return line
      if line.op in _HOLDERS and (deeper := self.inner(line)) is not None:
        return deeper
    return None

  def collective(self, one: HloInstruction) -> str | None:
    """Kind of collective that an instruction is or begins, or None.

    A fusion or an asynchronous call counts as the collective that it holds.
    """
    if one.op in _HOLDERS:
      inner = self.inner(one)
      return None if inner is None else inner.kind
    return one.kind

  def holds_collective(self, name: str) -> bool:
    """Whether a computation or one that it calls has a collective."""
    if name not in self._sends:
      self._sends[name] = any(
        self.collective(instruction) is not None
        or any(map(self.holds_collective, self.callees(instruction)))
        for instruction in self.computations[name]
      )
    return self._sends[name]

  def sent_bytes(self) -> dict[str, float]:
    """Bytes of the results of each kind of collective, over all loops.

    For one device; all branches count as taken; for a permute these are the
    received bytes.
    """
    bytes_by_kind: dict[str, float] = {}
    for name, runs in self.times.items():
      for instruction in self.computations[name]:
        kind = self.collective(instruction)
        if kind is None:
          continue
        inner = (
          self.inner(instruction) if instruction.op in _HOLDERS else instruction
        )
        assert inner is not None
        # The result of a start includes its operand.
        num_arrays = 2 if inner.op.endswith("-start") else 1
        bytes_by_kind[kind] = (
          bytes_by_kind.get(kind, 0.0) + runs * inner.all_bytes / num_arrays
        )
    return bytes_by_kind

  # -- trip counts

  def trips(self, computation: str, loop: HloInstruction) -> float:
    """Number of iterations of a loop."""
    key = f"{computation}/{loop.name}"
    if key not in self._trips:
      count = self._trip_count(computation, loop)
      if count is None:
        count = self._assumed_trips(loop)
        self.counted_by_data[key] = count
      self._trips[key] = float(count)
    return self._trips[key]

  def _assumed_trips(self, loop: HloInstruction) -> float:
    """Trip count to assume of a loop whose count depends on data."""
    name = loop.op_name or loop.name
    stated = _EXPECTED_TRIPS.search(name)
    if stated:
      return float(stated[1])
    return next(
      (assumed for part, assumed in self._data_trips if part in name), 1.0
    )

  def _trip_count(self, computation: str, loop: HloInstruction) -> int | None:
    stated = re.search(r"known_trip_count\D+(\d+)", loop.text)
    if stated:
      return int(stated[1])
    condition = self.computations.get(loop.called("condition"), ())
    lines = {instruction.name: instruction for instruction in condition}
    root = _source_value(
      next(
        (instruction for instruction in condition if instruction.root), None
      ),
      lines,
    )
    if root is None:
      return None
    if root.op == "fusion":
      inner = self.computations.get(root.called("calls"), ())
      numbers = [
        instruction.constant
        for instruction in inner
        if instruction.constant is not None
      ]
      if numbers:
        return numbers[0]
    if root.op != "compare" or len(root.operands) != 2:
      return None
    counter, bound = (
      self._value(computation, loop, lines.get(name)) for name in root.operands
    )
    if "direction=GT" in root.text:
      counter, bound = bound, counter
    # A start that is not constant is taken as 0, where loops begin.
    return None if bound is None else max(0, bound - (counter or 0))

  def _value(
    self, computation: str, loop: HloInstruction, one: HloInstruction | None
  ) -> int | None:
    """Constant of a condition, or of an input of its loop."""
    if one is None or one.op != "get-tuple-element":
      return None if one is None else one.constant
    lines = {
      instruction.name: instruction
      for instruction in self.computations[computation]
    }
    start = lines.get(loop.operands[0])
    match = re.search(r"index=(\d+)", one.text)
    index = int(match[1]) if match else 0
    if start is None or start.op != "tuple" or index >= len(start.operands):
      return None
    origin = _source_value(lines.get(start.operands[index]), lines)
    return None if origin is None else origin.constant

  # -- costs

  def cycles(self, name: str) -> float:
    """Cycles of a computation, without waiting for communication."""
    if name not in self._cycles:
      prices = (
        self.price(name, instruction) for instruction in self.computations[name]
      )
      self._cycles[name] = sum(prices, 0.0)
    return self._cycles[name]

  def price(self, computation: str, one: HloInstruction) -> float:
    """Cycles of an instruction: a whole loop, or the longest branch."""
    if one.op == "custom-call" and "tpu_custom_call" in one.text:
      return self._kernel_cycles(one)
    if one.op not in (*_RUNS, "conditional"):
      return one.estimate or 0.0
    callee_cycles = [self.cycles(name) for name in self.callees(one)]
    if one.op == "while":
      return self.trips(computation, one) * sum(callee_cycles, 0.0)
    return max(callee_cycles, default=0.0)

  def _kernel_cycles(self, kernel: HloInstruction) -> float:
    for name, cycles in self._kernels.items():
      if name in kernel.name or name in kernel.op_name:
        return float(cycles)
    stated = re.search(r'"cost_estimate":\{([^}]*)\}', kernel.text)
    flops = stated and re.search(r'"flops":"?(\d+)', stated[1])
    if not flops or int(flops[1]) == 0:
      self.unpriced_kernels[kernel.name] = kernel.op_name or kernel.name
      return 0.0
    return int(flops[1]) / self.core.flops_per_cycle

  def unpriced(self) -> dict[str, int]:
    """Number of lines without a cost, by operation.

    The parts of a fusion are priced with the fusion; scalars cost next to
    nothing. Neither is included.
    """
    counts: dict[str, int] = {}
    for name in self.times:
      for instruction in self.computations[name]:
        free = instruction.op in _FREE or instruction.op.endswith(
          ("-start", "-done")
        )
        priced_elsewhere = instruction.op in (
          *_RUNS,
          "conditional",
          "custom-call",
        )
        small = instruction.nbytes < 1024
        if (
          free
          or priced_elsewhere
          or small
          or self.collective(instruction) is not None
        ):
          continue
        if instruction.estimate is None:
          counts[instruction.op] = counts.get(instruction.op, 0) + 1
    return counts


def _unnamed(text: str) -> str:
  """A line of a program without names and annotations."""
  text = re.split(r", (?:metadata|backend_config|sharding)=", text)[0]
  return re.sub(rf"%{_WORD}", "%", text).strip().removeprefix("ROOT ")


def _source_value(
  source: HloInstruction | None, lines: Mapping[str, HloInstruction]
) -> HloInstruction | None:
  """Instruction that computed a value, before copies and conversions."""
  while source is not None and source.op in _SAME:
    source = lines.get(source.operands[0]) if source.operands else None
  return source
