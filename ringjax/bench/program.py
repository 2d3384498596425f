"""Reads compiled HLO text: what is sent, how often, and what it waits for."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass
class Instruction:
  name: str
  op: str
  shapes: list[tuple[str, tuple[int, ...]]]
  operands: list[str]
  rest: str

  @property
  def bytes(self) -> int:
    return sum(_BYTES[t] * math.prod(dims) for t, dims in self.shapes)


class Program:
  """Computations of one compiled module and how often each one runs."""

  def __init__(self, text: str):
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.entry = ""
    current = None
    for line in text.splitlines():
      head = _HEADER.match(line)
      if head:
        current = self.computations.setdefault(head[1], {})
        if line.startswith("ENTRY"):
          self.entry = head[1]
        continue
      found = _LINE.match(line)
      if found and current is not None:
        name, kind, op, rest = found.groups()
        shapes = [
          (t, tuple(int(d) for d in dims.split(",") if d))
          for t, dims in _SHAPE.findall(kind)
          if t in _BYTES
        ]
        args = rest.split("), ")[0]
        operands = re.findall(r"%([\w.\-]+)", args)
        current[name] = Instruction(name, op, shapes, operands, rest)
    self.times: dict[str, int] = collections.Counter()
    self._count(self.entry, 1)

  def _count(self, name: str, times: int) -> None:
    self.times[name] += times
    for i in self.computations[name].values():
      trips = re.search(r'known_trip_count":\{"n":"(\d+)"', i.rest)
      for kind, callee in re.findall(
        r"(body|condition|to_apply|calls|true_computation|"
        r"false_computation)=%?([\w.\-]+)",
        i.rest,
      ):
        n = int(trips[1]) if trips and kind == "body" else 1
        if callee in self.computations:
          self._count(callee, times * n)

  def sends(self) -> list[tuple[str, Instruction, int]]:
    """(computation, instruction, times) of each collective-permute."""
    return [
      (name, i, self.times[name])
      for name, instructions in self.computations.items()
      for i in instructions.values()
      if i.op in ("collective-permute", "collective-permute-start")
    ]

  def ops(self) -> set[str]:
    return {i.op for c in self.computations.values() for i in c.values()}

  def waits_for(self, computation: str, name: str) -> set[str]:
    """Ops inside `computation` on which instruction `name` depends.

    A called computation counts with the ops that it holds.
    """
    table = self.computations[computation]
    seen: set[str] = set()
    todo = list(table[name].operands)
    while todo:
      at = todo.pop()
      if at in seen or at not in table:
        continue
      seen.add(at)
      todo += table[at].operands
    ops: set[str] = set()
    for at in seen:
      ops.add(table[at].op)
      ops |= self._inside(table[at])
    return ops

  def _inside(self, instruction: Instruction) -> set[str]:
    ops: set[str] = set()
    for callee in re.findall(
      r"(?:body|to_apply|calls)=%?([\w.\-]+)", instruction.rest
    ):
      for i in self.computations.get(callee, {}).values():
        ops |= {i.op} | self._inside(i)
    return ops

  def largest(self) -> int:
    """Bytes of the largest single array anywhere."""
    return max(
      _BYTES[t] * math.prod(dims)
      for c in self.computations.values()
      for i in c.values()
      for t, dims in i.shapes
    )
