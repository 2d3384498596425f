"""Reads the text of a compiled, scheduled program: what runs, and how often.

Law: an instruction's price is what the compiler wrote beside it; nothing is
priced by a rule of ours but kernels, by the cost that whoever wrote them
stated or by cycles that the caller knows. What has no price is listed.

Instructions stand in the order in which they run. A loop's trip count is not
written down for TPU: it is the constant that its condition compares with, in
the condition itself or among what goes into the loop. Where there is none the
count is data, and the caller says what to take.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel.chips import Core

_BYTES = {
  "pred": 1.0, "s4": 0.5, "u4": 0.5, "s8": 1.0, "u8": 1.0, "s16": 2.0,
  "u16": 2.0, "bf16": 2.0, "f16": 2.0, "s32": 4.0, "u32": 4.0, "f32": 4.0,
  "s64": 8.0, "u64": 8.0, "f64": 8.0, "f8e4m3fn": 1.0, "f8e5m2": 1.0,
  "f8e4m3": 1.0, "f8e4m3b11fnuz": 1.0, "f4e2m1fn": 0.5,
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-<>]+)\s+\(.*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-<>]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
  r"(?:body|condition|to_apply|calls|true_computation|false_computation)="
  r"%?([\w.\-<>]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
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
COLLECTIVES = (
  "collective-permute", "all-gather", "all-reduce", "reduce-scatter",
  "all-to-all", "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program.

  Attributes:
    name: unique in its computation.
    op: e.g. "fusion" or "collective-permute-start".
    shape: of what it gives, as text.
    operands: names of what it reads.
    text: the whole line.
    root: whether it is what its computation gives.
  """

  name: str
  op: str
  shape: str
  operands: tuple[str, ...]
  text: str
  root: bool

  @property
  def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(dtype, sizes) of each array that it gives."""
    return tuple(
      (kind, tuple(int(n) for n in sizes.split(",") if n))
      for kind, sizes in _ARRAY.findall(self.shape)
      if kind in _BYTES
    )

  @property
  def nbytes(self) -> int:
    """Bytes of the largest array that it gives."""
    return int(
      max((_BYTES[t] * math.prod(dims) for t, dims in self.arrays), default=0)
    )

  @property
  def all_bytes(self) -> int:
    """Bytes of all arrays that it gives."""
    return int(sum(_BYTES[t] * math.prod(dims) for t, dims in self.arrays))

  @property
  def op_name(self) -> str:
    """Which operation of the traced program it is from."""
    found = re.search(r'op_name="([^"]*)"', self.text)
    return found[1] if found else ""

  def called(self, which: str) -> str | None:
    """The computation that an attribute names, e.g. "body"."""
    found = re.search(rf"\b{which}=%?([\w.\-<>]+)", self.text)
    return found[1] if found else None

  @property
  def branches(self) -> tuple[str, ...]:
    """The computations of a conditional."""
    found = _BRANCHES.search(self.text)
    if found:
      return tuple(re.findall(r"[\w.\-<>]+", found[1]))
    return tuple(
      name
      for name in map(self.called, ("true_computation", "false_computation"))
      if name
    )

  @property
  def pairs(self) -> tuple[tuple[int, int], ...]:
    """(from, to) of each device that sends."""
    found = re.search(
      r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", self.text
    )
    if not found:
      return ()
    numbers = re.findall(r"\{(\d+),(\d+)\}", found[1])
    return tuple((int(a), int(b)) for a, b in numbers)


Computation = tuple[Instruction, ...]
# Pairs of a part of a loop's traced name and how often it turns.
Trips = Sequence[Sequence[Any]]


def as_trips(given: float | int | Trips) -> tuple[tuple[str, float], ...]:
  """Trip counts of loops that data counts, by parts of their names.

  Raises:
    OptionError: a number is negative or not finite.
  """
  if isinstance(given, int | float):
    pairs = (("", float(given)),)
  else:
    pairs = tuple((str(part), float(number)) for part, number in given)
  for _, number in pairs:
    if not math.isfinite(number) or number < 0:
      raise OptionError(
        "data_trips",
        number,
        "a number, 0 or more",
        "pass a finite number of at least 0",
      )
  return pairs


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """The computations of a module by name, and the name of the first to run.

  Raises:
    OptionError: no text of a scheduled module.
  """
  found: dict[str, list[Instruction]] = {}
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


def _instruction(line: str) -> Instruction | None:
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
  operands = tuple(re.findall(r"%([\w.\-<>]+)", inside))
  if op == "constant":
    operands = ()
  return Instruction(head[2], op, shape, operands, line, bool(head[1]))


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  return len(text) - 1


class Program:
  """A scheduled module and its prices, in cycles of one device."""

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
      data_trips: how often a loop turns whose trip count is data: a number, or
        pairs of a part of the loop's traced name and a number, of which the
        first that fits counts; "" fits all.

    Raises:
      OptionError: no scheduled module, or a count that is none.
    """
    pairs = as_trips(data_trips)
    self.computations, self.entry = parse(text)
    self.core = core
    self.kernels = dict(kernels or {})
    self.data_trips = pairs
    self.counted_by_data: dict[str, float] = {}
    self.unpriced_kernels: dict[str, str] = {}
    self._cycles: dict[str, float] = {}
    self._trips: dict[str, float] = {}
    self._holds: dict[str, bool] = {}
    self.times = self._times()

  # -- structure

  def callees(self, one: Instruction) -> tuple[str, ...]:
    """The computations that run where this instruction does, one by one.

    What a fusion or a reduction calls is a part of it, and not among them.
    """
    if one.op == "while":
      return tuple(n for n in (one.called("body"),) if n in self.computations)
    if one.op == "conditional":
      return tuple(n for n in one.branches if n in self.computations)
    if one.op == "call":
      return tuple(
        n for n in (one.called("to_apply"),) if n in self.computations
      )
    return ()

  def _times(self) -> dict[str, float]:
    """How often each computation runs; of branches each as if it were taken."""
    times: dict[str, float] = {}

    def count(name: str, often: float) -> None:
      times[name] = times.get(name, 0.0) + often
      for one in self.computations[name]:
        inner = often * self.trips(name, one) if one.op == "while" else often
        for callee in self.callees(one):
          count(callee, inner)

    count(self.entry, 1.0)
    return times

  def collective(self, one: Instruction) -> str | None:
    """Which of `COLLECTIVES` an instruction is or begins, or None.

    A fusion or an asynchronous call that holds one counts as it.
    """
    for kind in COLLECTIVES:
      if one.op in (kind, f"{kind}-start"):
        return kind
    if one.op in ("async-start", "fusion"):
      inner = self.inner(one)
      return None if inner is None else self.collective(inner)
    return None

  def inner(self, one: Instruction) -> Instruction | None:
    """The collective inside of a fusion or an asynchronous call."""
    for line in self.computations.get(one.called("calls") or "", ()):
      if any(line.op in (kind, f"{kind}-start") for kind in COLLECTIVES):
        return line
      if line.op in ("fusion", "async-start"):
        deeper = self.inner(line)
        if deeper is not None:
          return deeper
    return None

  def holds_collective(self, name: str) -> bool:
    """Whether anything is sent in a computation or in what it calls."""
    if name not in self._holds:
      self._holds[name] = any(
        self.collective(one) is not None
        or any(self.holds_collective(c) for c in self.callees(one))
        for one in self.computations[name]
      )
    return self._holds[name]

  # -- trip counts

  def trips(self, computation: str, loop: Instruction) -> float:
    """How often a loop turns."""
    key = f"{computation}/{loop.name}"
    if key not in self._trips:
      found = self._trip_count(computation, loop)
      if found is None:
        name = loop.op_name or loop.name
        found = next((n for part, n in self.data_trips if part in name), 1.0)
        self.counted_by_data[key] = found
      self._trips[key] = float(found)
    return self._trips[key]

  def _trip_count(self, computation: str, loop: Instruction) -> int | None:
    known = re.search(r"known_trip_count\D+(\d+)", loop.text)
    if known:
      return int(known[1])
    lines = self.computations.get(loop.called("condition") or "", ())
    by_name = {one.name: one for one in lines}
    root = next((one for one in lines if one.root), None)
    while root is not None and root.op in ("copy", "bitcast", "convert"):
      root = by_name.get(root.operands[0])
    if root is None:
      return None
    if root.op == "fusion":
      inner = self.computations.get(root.called("calls") or "", ())
      found = [_constant(one) for one in inner]
      numbers = [n for n in found if n is not None]
      if numbers:
        return numbers[0]
    if root.op != "compare" or len(root.operands) != 2:
      return None
    counter, bound = (
      self._number(computation, loop, by_name.get(name))
      for name in root.operands
    )
    if "direction=GT" in root.text:
      counter, bound = bound, counter
    # A start that is no constant is taken as 0, where loops begin.
    return None if bound is None else max(0, bound - (counter or 0))

  def _number(
    self, computation: str, loop: Instruction, one: Instruction | None
  ) -> int | None:
    """A constant of a condition, or of what goes into its loop."""
    if one is None:
      return None
    if one.op == "get-tuple-element":
      return self._carried(computation, loop, _index(one))
    return _constant(one)

  def _carried(
    self, computation: str, loop: Instruction, index: int
  ) -> int | None:
    """A constant at a place of what goes into a loop."""
    by_name = {one.name: one for one in self.computations[computation]}
    start = by_name.get(loop.operands[0])
    if start is None or start.op != "tuple" or index >= len(start.operands):
      return None
    one = by_name.get(start.operands[index])
    while one is not None and one.op in ("copy", "bitcast", "convert"):
      one = by_name.get(one.operands[0]) if one.operands else None
    return None if one is None else _constant(one)

  # -- prices

  def cycles(self, name: str) -> float:
    """Of a computation, without waiting for what is sent."""
    if name not in self._cycles:
      self._cycles[name] = sum(
        self.price(name, one) for one in self.computations[name]
      )
    return self._cycles[name]

  def price(self, computation: str, one: Instruction) -> float:
    """Cycles of an instruction: all turns of a loop, the longest branch."""
    if one.op == "while":
      body = one.called("body") or ""
      inside = self.cycles(body) if body in self.computations else 0.0
      return self.trips(computation, one) * inside
    if one.op == "conditional":
      return max((self.cycles(n) for n in self.callees(one)), default=0.0)
    if one.op == "call":
      return sum(self.cycles(n) for n in self.callees(one))
    if one.op == "custom-call":
      return self._kernel(one)
    return self.estimate(one) or 0.0

  def estimate(self, one: Instruction) -> float | None:
    """The cycles that the compiler wrote beside an instruction."""
    found = re.search(r'"estimated_cycles":"?(\d+)', one.text)
    if not found or int(found[1]) > _MOST_CYCLES:
      return None
    return float(found[1])

  def _kernel(self, one: Instruction) -> float:
    if "tpu_custom_call" not in one.text:
      return self.estimate(one) or 0.0
    for name, cycles in self.kernels.items():
      if name in one.name or name in one.op_name:
        return float(cycles)
    stated = re.search(r'"cost_estimate":\{([^}]*)\}', one.text)
    flops = stated and re.search(r'"flops":"?(\d+)', stated[1])
    if not flops or int(flops[1]) == 0:
      self.unpriced_kernels[one.name] = one.op_name or one.name
      return 0.0
    return int(flops[1]) / self.core.flops_per_cycle

  def unpriced(self) -> dict[str, int]:
    """Operations without a price, and how many lines of the text they are.

    Fusions' parts have theirs with the fusion; scalars cost nothing to speak
    of, and are not among them.
    """
    found: dict[str, int] = {}
    for name in self.times:
      for one in self.computations[name]:
        plain = one.op in _FREE or one.op.endswith(("-start", "-done"))
        own = one.op in ("while", "conditional", "call", "custom-call")
        small = one.nbytes < 1024
        if plain or own or small or self.collective(one) is not None:
          continue
        if self.estimate(one) is None:
          found[one.op] = found.get(one.op, 0) + 1
    return found


def _constant(one: Instruction) -> int | None:
  found = re.search(r"\bconstant\((-?\d+)\)", one.text)
  return int(found[1]) if one.op == "constant" and found else None


def _index(one: Instruction) -> int:
  found: Any = re.search(r"index=(\d+)", one.text)
  return int(found[1])
