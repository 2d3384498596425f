"""Parses compiled HLO text: sends, their trip counts and dependencies."""

from __future__ import annotations

import collections
import re

from ringjax.plan.compiler import hlo

_SENDS = ("collective-permute", "collective-permute-start")
_CALLED = re.compile(
  r"(body|condition|to_apply|calls|true_computation|false_computation)="
  r"%?([\w.\-]+)"
)


class CompiledInstruction(hlo.HloInstruction):
  """One line of a compiled program."""

  @property
  def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(dtype, sizes) of each array of the result."""
    return self.arrays

  @property
  def bytes(self) -> int:
    """Bytes of all arrays of the result."""
    return self.all_bytes

  @property
  def line_text(self) -> str:
    """Text of the line, with its attributes."""
    return self.text


class CompiledProgram:
  """Computations of one compiled module and how often each one runs.

  Unlike `plan.compiler.hlo.HloProgram` it has no costs, and also counts
  computations that fusions and reductions call.
  """

  def __init__(self, text: str):
    parsed, self.entry = hlo.parse(text)
    self.computations = {
      name: {i.name: CompiledInstruction(**vars(i)) for i in lines}
      for name, lines in parsed.items()
    }
    self.times: dict[str, int] = collections.Counter()
    self._count(self.entry, 1)

  def _count(self, name: str, times: int) -> None:
    self.times[name] += times
    for i in self.computations[name].values():
      trips = re.search(r'known_trip_count":\{"n":"(\d+)"', i.text)
      for kind, callee in _CALLED.findall(i.text):
        n = int(trips[1]) if trips and kind == "body" else 1
        if callee in self.computations:
          self._count(callee, times * n)

  def sends(self) -> list[tuple[str, CompiledInstruction, int]]:
    """(computation, instruction, times) of each collective-permute."""
    return [
      (name, i, self.times[name])
      for name, instructions in self.computations.items()
      for i in instructions.values()
      if i.op in _SENDS
    ]

  def ops(self) -> set[str]:
    """Names of all operations."""
    return {i.op for c in self.computations.values() for i in c.values()}

  def waits_for(self, computation: str, name: str) -> set[str]:
    """Ops inside `computation` on which instruction `name` depends.

    A called computation counts with its ops.
    """
    table = self.computations[computation]
    seen: set[str] = set()
    todo = list(table[name].operands)
    while todo:
      at = todo.pop()
      if at not in seen and at in table:
        seen.add(at)
        todo += table[at].operands
    return {
      op for at in seen for op in (table[at].op, *self._inside(table[at]))
    }

  def _inside(self, instruction: CompiledInstruction) -> set[str]:
    return {
      op
      for kind, callee in _CALLED.findall(instruction.text)
      if kind in ("body", "to_apply", "calls")
      for i in self.computations.get(callee, {}).values()
      for op in (i.op, *self._inside(i))
    }

  def largest(self) -> int:
    """Bytes of the largest array of any instruction."""
    lines = (i for c in self.computations.values() for i in c.values())
    return max(i.nbytes for i in lines)


Program = CompiledProgram
