"""Reads the text of a compiled, scheduled program: what runs, and how often.

Guarantees: the cost of an instruction is the one that the compiler wrote
beside it. Only a kernel has another: the FLOPs that its author stated, or
cycles that the caller knows. Instructions without a cost are listed.

Instructions stand in the order in which they run. A loop's trip count is not
written down for TPU: it is the constant that its condition compares with, in
the condition itself or among what goes into the loop. Where there is none the
count depends on data, and the caller says what to take.
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

_BYTES = {
  "pred": 1.0, "s4": 0.5, "u4": 0.5, "s8": 1.0, "u8": 1.0, "s16": 2.0,
  "u16": 2.0, "bf16": 2.0, "f16": 2.0, "s32": 4.0, "u32": 4.0, "f32": 4.0,
  "s64": 8.0, "u64": 8.0, "f64": 8.0, "f8e4m3fn": 1.0, "f8e5m2": 1.0,
  "f8e4m3": 1.0, "f8e4m3b11fnuz": 1.0, "f4e2m1fn": 0.5,
}  # fmt: skip
_WORD = r"[\w.\-<>]+"
_COMPUTATION = re.compile(rf"^(ENTRY\s+)?%?({_WORD})\s+\(.*\{{\s*$")
_NAME = re.compile(rf"^\s+(ROOT\s+)?%?({_WORD}) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# Larger numbers stand for "unknown".
_MOST_CYCLES = 1 << 60
# What takes no time of its own, or runs beside the rest: a copy between the
# memories of a chip is moved by DMA engines.
_FREE = frozenset(
  {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
    "after-all", "partition-id", "replica-id", "opt-barrier", "domain",
    "copy-start", "copy-done", "slice-start", "slice-done", "async-update",
    "get-dimension-size", "add-dependency",
  }
)  # fmt: skip
# What gives the value that it is given.
_SAME = ("copy", "bitcast", "convert")
# What may hold a collective in a computation that it calls.
_HOLDERS = ("fusion", "async-start")
# The attribute that names the computation which runs in an instruction's place.
_RUNS = {"while": "body", "call": "to_apply"}
COLLECTIVES = (
  "collective-permute", "all-gather", "all-reduce", "reduce-scatter",
  "all-to-all", "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip


@dataclass(frozen=True)
class HloInstruction:
  """One line of a program.

  Attributes:
    name: unique in its computation.
    op: e.g. "fusion" or "collective-permute-start".
    shape: of its result, as text.
    operands: names of what it reads.
    text: the whole line.
    root: whether its result is that of its computation.
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
      if kind in _BYTES
    )

  @property
  def nbytes(self) -> int:
    """Bytes of the largest array of its result."""
    return int(max((self._bytes(*x) for x in self.arrays), default=0))

  @property
  def all_bytes(self) -> int:
    """Bytes of all arrays of its result."""
    return int(sum(self._bytes(*x) for x in self.arrays))

  @staticmethod
  def _bytes(kind: str, sizes: tuple[int, ...]) -> float:
    return _BYTES[kind] * math.prod(sizes)

  @property
  def op_name(self) -> str:
    """Which operation of the traced program it is from."""
    found = re.search(r'op_name="([^"]*)"', self.text)
    return found[1] if found else ""

  @property
  def kind(self) -> str | None:
    """Which of `COLLECTIVES` it is or begins, or None."""
    kind = self.op.removesuffix("-start")
    return kind if kind in COLLECTIVES else None

  def called(self, which: str) -> str:
    """The computation that an attribute names, e.g. "body"; "" if none."""
    found = re.search(rf"\b{which}=%?({_WORD})", self.text)
    return found[1] if found else ""

  @property
  def branches(self) -> tuple[str, ...]:
    """The computations of a conditional."""
    found = re.search(r"branch_computations=\{([^}]*)\}", self.text)
    if found:
      return tuple(re.findall(_WORD, found[1]))
    return tuple(map(self.called, ("true_computation", "false_computation")))

  @property
  def pairs(self) -> tuple[tuple[int, int], ...]:
    """(from, to) of each device that sends."""
    found = re.search(
      r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", self.text
    )
    numbers = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else ()
    return tuple((int(a), int(b)) for a, b in numbers)

  @property
  def constant(self) -> int | None:
    """The value of a constant that is an integer."""
    found = re.search(r"\bconstant\((-?\d+)\)", self.text)
    return int(found[1]) if self.op == "constant" and found else None

  @property
  def estimate(self) -> float | None:
    """The cycles that the compiler wrote beside it."""
    found = re.search(r'"estimated_cycles":"?(\d+)', self.text)
    if not found or int(found[1]) > _MOST_CYCLES:
      return None
    return float(found[1])


Computation = tuple[HloInstruction, ...]
# Pairs of a part of a loop's traced name and its trip count.
Trips = Sequence[Sequence[Any]]


def as_trips(given: float | int | Trips) -> tuple[tuple[str, float], ...]:
  """Trip counts of loops that depend on data, by parts of their names.

  Raises:
    OptionError: a number is negative or not finite.
  """
  pairs = (("", given),) if isinstance(given, int | float) else given
  return tuple(
    (str(part), number("data_trips", count, least=0)) for part, count in pairs
  )


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """The computations of a module by name, and the name of the first to run.

  Raises:
    OptionError: not the text of a scheduled module.
  """
  found: dict[str, list[HloInstruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    if current is None:
      head = _COMPUTATION.match(line)
      if head and "->" in line:
        current = found.setdefault(head[2], [])
        entry = head[2] if head[1] else entry
    elif line.startswith("}"):
      current = None
    else:
      one = _instruction(line)
      if one is not None:
        current.append(one)
  if not entry or "is_scheduled=true" not in text.partition("\n")[0]:
    raise OptionError(
      "text",
      text[:60],
      "a scheduled HLO module with an entry",
      "pass compiled.as_text(), not lowered.as_text()",
    )
  return {name: tuple(lines) for name, lines in found.items()}, entry


def _instruction(line: str) -> HloInstruction | None:
  head = _NAME.match(line)
  if head is None:
    return None
  rest = line[head.end() :]
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
  shape, rest = rest[:end], rest[end:].lstrip()
  op, paren, _ = rest.partition("(")
  if not paren:
    return None
  inside = rest[len(op) : _closing(rest, len(op)) + 1]
  operands = () if op == "constant" else re.findall(rf"%({_WORD})", inside)
  return HloInstruction(
    head[2], op, shape, tuple(operands), line, bool(head[1])
  )


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  return len(text) - 1


class HloProgram:
  """A scheduled module and the cost of its parts, in cycles of one device.

  Attributes:
    computations: instructions, by the computation's name.
    entry: the computation that runs first.
    times: how often each runs; of branches each as if it were taken.
    counted_by_data: loops whose trip count depends on data, and what it was
      taken for.
    unpriced_kernels: kernels without a known cost: traced names, by name.
  """

  def __init__(
    self,
    text: str,
    core: Core,
    *,
    kernels: Mapping[str, float | int] | None = None,
    data_trips: float | int | Trips = 1.0,
  ):
    """Reads the text.

    Args:
      text: of a scheduled module.
      core: the device.
      kernels: cycles of a call, by a part of the kernel's name; they go before
        the cost that the kernel states.
      data_trips: trip counts of loops that depend on data: a number, or pairs
        of a part of the loop's traced name and a number, of which the first
        that fits counts; "" fits all.

    Raises:
      OptionError: not a scheduled module, or a negative count.
    """
    self._data_trips = as_trips(data_trips)
    self.computations, self.entry = parse(text)
    self.core = core
    self._kernels = dict(kernels or {})
    self.counted_by_data: dict[str, float] = {}
    self.unpriced_kernels: dict[str, str] = {}
    self._cycles: dict[str, float] = {}
    self._trips: dict[str, float] = {}
    self._sends: dict[str, bool] = {}
    self.times: dict[str, float] = {}
    self._count(self.entry, 1.0)

  # -- structure

  def callees(self, one: HloInstruction) -> tuple[str, ...]:
    """The computations that run where this instruction does, one by one.

    What a fusion or a reduction calls is a part of it, and not among them.
    """
    names: tuple[str, ...] = ()
    if one.op == "conditional":
      names = one.branches
    elif one.op in _RUNS:
      names = (one.called(_RUNS[one.op]),)
    return tuple(name for name in names if name in self.computations)

  def _count(self, name: str, often: float) -> None:
    self.times[name] = self.times.get(name, 0.0) + often
    for one in self.computations[name]:
      inner = often * self.trips(name, one) if one.op == "while" else often
      for callee in self.callees(one):
        self._count(callee, inner)

  def inner(self, one: HloInstruction) -> HloInstruction | None:
    """The collective inside of a fusion or an asynchronous call."""
    for line in self.computations.get(one.called("calls"), ()):
      if line.kind is not None:
        return line
      if line.op in _HOLDERS and (deeper := self.inner(line)) is not None:
        return deeper
    return None

  def collective(self, one: HloInstruction) -> str | None:
    """Which of `COLLECTIVES` an instruction is or begins, or None.

    A fusion or an asynchronous call that holds one counts as it.
    """
    if one.op in _HOLDERS:
      inner = self.inner(one)
      return None if inner is None else inner.kind
    return one.kind

  def holds_collective(self, name: str) -> bool:
    """Whether anything is sent in a computation or in what it calls."""
    if name not in self._sends:
      self._sends[name] = any(
        self.collective(one) is not None
        or any(map(self.holds_collective, self.callees(one)))
        for one in self.computations[name]
      )
    return self._sends[name]

  def sent_bytes(self) -> dict[str, float]:
    """Bytes of the results of each kind of collective, over all loops.

    Of one device. Of a branch as if it were taken; of a permute it is what
    comes in.
    """
    found: dict[str, float] = {}
    for name, often in self.times.items():
      for one in self.computations[name]:
        kind = self.collective(one)
        if kind is None:
          continue
        inner = self.inner(one) if one.op in _HOLDERS else one
        assert inner is not None
        # What starts one holds its operand too.
        many = 2 if inner.op.endswith("-start") else 1
        found[kind] = found.get(kind, 0.0) + often * inner.all_bytes / many
    return found

  # -- trip counts

  def trips(self, computation: str, loop: HloInstruction) -> float:
    """How often the body of a loop runs."""
    key = f"{computation}/{loop.name}"
    if key not in self._trips:
      found = self._trip_count(computation, loop)
      if found is None:
        name = loop.op_name or loop.name
        found = next((n for part, n in self._data_trips if part in name), 1.0)
        self.counted_by_data[key] = found
      self._trips[key] = float(found)
    return self._trips[key]

  def _trip_count(self, computation: str, loop: HloInstruction) -> int | None:
    known = re.search(r"known_trip_count\D+(\d+)", loop.text)
    if known:
      return int(known[1])
    condition = self.computations.get(loop.called("condition"), ())
    lines = {one.name: one for one in condition}
    root = _origin(next((x for x in condition if x.root), None), lines)
    if root is None:
      return None
    if root.op == "fusion":
      inner = self.computations.get(root.called("calls"), ())
      numbers = [x.constant for x in inner if x.constant is not None]
      if numbers:
        return numbers[0]
    if root.op != "compare" or len(root.operands) != 2:
      return None
    counter, bound = (
      self._value(computation, loop, lines.get(name)) for name in root.operands
    )
    if "direction=GT" in root.text:
      counter, bound = bound, counter
    # A start that is no constant is taken as 0, where loops begin.
    return None if bound is None else max(0, bound - (counter or 0))

  def _value(
    self, computation: str, loop: HloInstruction, one: HloInstruction | None
  ) -> int | None:
    """A constant of a condition, or of what goes into its loop."""
    if one is None or one.op != "get-tuple-element":
      return None if one is None else one.constant
    lines = {x.name: x for x in self.computations[computation]}
    start = lines.get(loop.operands[0])
    found = re.search(r"index=(\d+)", one.text)
    index = int(found[1]) if found else 0
    if start is None or start.op != "tuple" or index >= len(start.operands):
      return None
    origin = _origin(lines.get(start.operands[index]), lines)
    return None if origin is None else origin.constant

  # -- costs

  def cycles(self, name: str) -> float:
    """Cycles of a computation, without waiting for what is sent."""
    if name not in self._cycles:
      prices = (self.price(name, one) for one in self.computations[name])
      self._cycles[name] = sum(prices, 0.0)
    return self._cycles[name]

  def price(self, computation: str, one: HloInstruction) -> float:
    """Cycles of an instruction: all turns of a loop, the longest branch."""
    if one.op == "custom-call" and "tpu_custom_call" in one.text:
      return self._kernel(one)
    if one.op not in (*_RUNS, "conditional"):
      return one.estimate or 0.0
    inside = [self.cycles(name) for name in self.callees(one)]
    if one.op == "while":
      return self.trips(computation, one) * sum(inside, 0.0)
    return max(inside, default=0.0)

  def _kernel(self, one: HloInstruction) -> float:
    for name, cycles in self._kernels.items():
      if name in one.name or name in one.op_name:
        return float(cycles)
    stated = re.search(r'"cost_estimate":\{([^}]*)\}', one.text)
    flops = stated and re.search(r'"flops":"?(\d+)', stated[1])
    if not flops or int(flops[1]) == 0:
      self.unpriced_kernels[one.name] = one.op_name or one.name
      return 0.0
    return int(flops[1]) / self.core.flops_per_cycle

  def unpriced(self) -> dict[str, int]:
    """Operations without a cost, and how many lines of the text they are.

    The parts of a fusion have theirs with the fusion; scalars cost next to
    nothing, and are not among them.
    """
    found: dict[str, int] = {}
    for name in self.times:
      for one in self.computations[name]:
        plain = one.op in _FREE or one.op.endswith(("-start", "-done"))
        own = one.op in (*_RUNS, "conditional", "custom-call")
        small = one.nbytes < 1024
        if plain or own or small or self.collective(one) is not None:
          continue
        if one.estimate is None:
          found[one.op] = found.get(one.op, 0) + 1
    return found


def _origin(
  one: HloInstruction | None, lines: Mapping[str, HloInstruction]
) -> HloInstruction | None:
  """Where a value is from, before copies and conversions of it."""
  while one is not None and one.op in _SAME:
    one = lines.get(one.operands[0]) if one.operands else None
  return one
