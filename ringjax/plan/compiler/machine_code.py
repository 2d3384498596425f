"""Cycles of an operation of a compiled program, from its machine code.

A bundle holds the instructions that a TensorCore issues in one cycle. libtpu
writes the bundles of each operation, one that XLA made or a Pallas kernel, with
its loops and branches. An operation takes at least as many cycles as it runs
bundles, and as its rows need to pass the matrix units.

Guarantees: nothing here is what an author or XLA's cost model states. Waiting
for memory is not included: bytes over the bandwidth are counted apart.

Assumptions, by which one count is a lower and one an upper bound:
  least: A branch skips its region, unless the region multiplies or belongs to
    the loop's pipeline; of regions that multiply equally much (a tile with a
    mask and one without) the one with the fewest cycles runs.
  most: Every region runs, of those that multiply equally much one.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

from ringjax.parallel import chips

# Rows of one instruction: 8 sublanes of 32 bits.
_SUBLANES, _WORD = 8, 32

#   0x2f LB: > > { %p144 = scmp.eq.s32 ..  ;;  %516 = sbr.rel (%p36) .. }
BUNDLE = re.compile(
  r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<mark>[A-Z]{2})?\s*:\s*(?P<loops>[>\s]*)\{"
)
BRANCH = re.compile(r"\bsbr\.rel\b")
# %9 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v8
_MULTIPLY = re.compile(r"\bvmatmul\.(?P<rest>[\w.\[\]]+)")
_UNIT = re.compile(r"mxu(\d+)")
_TYPE = re.compile(r"\b(?:bf|f|s|u)(\d+)")
# Ending of the files with the bundles of an operation.
ENDING = "-final_bundles.txt"
# Bytes of a granule, the unit of copies between memories.
_GRANULE = 32
_FILE = re.compile(rf"\d+-(.+)-\d+{re.escape(ENDING)}")
_LABEL = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_TARGET = re.compile(r"\bsbr\.rel (?:\(!?(%p\w+)\) )?target = \$region(\d+)")
_COMPARE = re.compile(
  r"(%p\w+) = scmp\.\w+\.[su]32(?:\.totalorder)? (%\w+), (-?\d+|%\w+)"
)
_COMBINE = re.compile(r"(%p\w+) = p(?:n?and|n?or) (%p\w+), (%p\w+)")
_COUNTER = re.compile(r"(%s\w+) = sphi [^;]*?iteration index, stage = ")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_COPIED = re.compile(r"\bdma\.\w+[^;]*?/\*size_in_granules=\*/(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationCode:
  """Cycles of one run of an operation on a device.

  Attributes:
    least_cycles: Lower bound of the cycles, without waiting for memory.
    most_cycles: Cycles if every region runs.
    copied: Most bytes that its own copies move.
    matrix: Least cycles in which the busiest matrix unit takes rows.
    open: Whether a loop's length is unknown: the loop counts once.
  """

  least_cycles: float
  most_cycles: float
  copied: float
  matrix: float
  open: bool


@dataclasses.dataclass
class _Loop:
  """Loop of the code: its first bundle, and its trip count if it is stated."""

  start: int
  parent: int | None
  trips: float | None = None
  stages: int = 0


@dataclasses.dataclass
class _Block:
  """Consecutive bundles without a branch between them."""

  start: int
  loop: int | None
  bundles: int = 0
  copied: float = 0.0
  rows: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )


class _Code:
  """Blocks, loops and guarded regions of an operation's bundles."""

  def __init__(self, text: str, chip: str):
    self.rows_per_cycle = chips.core(chip).rows_per_cycle
    self.blocks: list[_Block] = []
    self.loops: list[_Loop] = []
    self.labels: dict[str, int] = {}
    # (bundle, predicate, region) of each branch.
    self.branches: list[tuple[int, str, str]] = []
    self._compared: dict[str, tuple[str, str]] = {}
    self._combined: list[tuple[str, str, str]] = []
    self._counters: set[str] = set()
    self._parse(text)
    self._count_trips()

  def _parse(self, text: str) -> None:
    number, stack, block = -1, [], None
    for line in text.splitlines():
      bundle = BUNDLE.match(line)
      if bundle:
        number += 1
        # Bundles that wait for a branch are empty, and are written without
        # their loop.
        empty = line.startswith("{}", bundle.end() - 1)
        depth = len(stack) if empty else bundle["loops"].count(">")
        begins = bundle["mark"] == "LB"
        if begins or depth != len(stack):
          del stack[depth - begins :]
          block = None
        while len(stack) < depth:
          stack.append(len(self.loops))
          parent = stack[-2] if len(stack) > 1 else None
          self.loops.append(_Loop(number, parent))
        if bundle["mark"]:
          block = None
        for region in _LABEL.findall(line):
          self.labels.setdefault(region, number)
          block = None
      if number < 0:
        continue
      if block is None:
        block = _Block(number, stack[-1] if stack else None)
        self.blocks.append(block)
      block.bundles += bundle is not None
      self._read(line, number, block, stack)
      if BRANCH.search(line):
        block = None

  def _read(
    self, line: str, number: int, block: _Block, stack: list[int]
  ) -> None:
    """Read a line's products, copies, comparisons and branches."""
    for unit, rows in products(line):
      block.rows[unit] += rows
    block.copied += _GRANULE * sum(map(int, _COPIED.findall(line)))
    if "scmp" in line:
      for name, register, bound in _COMPARE.findall(line):
        self._compared[name] = (register, bound)
    if " = p" in line:
      self._combined += _COMBINE.findall(line)
    if "iteration index" in line and stack:
      self._counters.update(_COUNTER.findall(line))
      loop = self.loops[stack[0]]
      stages = map(int, _STAGE.findall(line))
      loop.stages = max(loop.stages, *stages, 0)
    for predicate, region in _TARGET.findall(line):
      self.branches.append((number, predicate, region))

  def _count_trips(self) -> None:
    """Take loops' trip counts from the comparisons of their last branches."""
    starts = {loop.start: loop for loop in self.loops}
    for number, predicate, region in self.branches:
      start = self.labels.get(region, number + 1)
      loop = starts.get(start)
      bound = self._compared.get(predicate, ("", ""))[1]
      if loop is not None and start <= number and bound.isdecimal():
        # A pipelined loop turns once more for each stage after the first.
        loop.trips = max(0.0, float(int(bound) - loop.stages))

  def cycles(self, block: _Block) -> int:
    busiest = max(block.rows.values(), default=0)
    return max(block.bundles, busiest // self.rows_per_cycle)

  def matrix(self, block: _Block) -> int:
    return max(block.rows.values(), default=0) // self.rows_per_cycle

  def regions(self) -> list[tuple[int, int, bool]]:
    """(first, end, whether it is a pipeline's stage) of guarded regions."""
    stages = {
      name
      for name, (register, _) in self._compared.items()
      if register in self._counters
    }
    for name, *operands in self._combined:
      if stages.issuperset(operands):
        stages.add(name)
    return [
      (number + 1, end, predicate in stages)
      for number, predicate, region in self.branches
      if predicate and (end := self.labels.get(region, -1)) > number + 1
    ]


def products(line: str) -> Iterator[tuple[str, int]]:
  """Yield the matrix unit and the rows of each product of a bundle."""
  if "vmatmul" in line:
    for product in _MULTIPLY.finditer(line):
      unit = _UNIT.search(product["rest"])
      yield unit[1] if unit else "0", _rows_of(product["rest"])


def _rows_of(instruction: str) -> int:
  kind = _TYPE.search(instruction)
  # Without a type the operands are bfloat16.
  bits = int(kind[1]) if kind else 16
  return _SUBLANES * _WORD // bits


def operation_code(
  text: str, chip: str, steps: tuple[float | int, float | int] | None = None
) -> OperationCode:
  """Count the cycles of an operation's final bundles, as libtpu dumps them.

  Args:
    text: Text of the file.
    chip: Name that `chips.core` knows.
    steps: Least and most steps of the outermost loop, if the code does not
      state them; None if they are unknown.
  """
  code = _Code(text, chip)
  regions = code.regions()
  around = {
    id(block): [r for r in regions if r[0] <= block.start < r[1]]
    for block in code.blocks
  }
  multiplies = {
    region: any(
      code.matrix(block)
      for block in code.blocks
      if region[0] <= block.start < region[1]
    )
    for region in regions
  }
  runs = lambda block: all(
    region[2] or multiplies[region] for region in around[id(block)]
  )
  tiles = _tiles(code, around)
  unknown: list[bool] = []

  def times(block: _Block) -> tuple[float, float]:
    least_runs = most_runs = 1.0
    index = block.loop
    while index is not None:
      loop = code.loops[index]
      if loop.trips is not None:
        least_runs, most_runs = least_runs * loop.trips, most_runs * loop.trips
      elif loop.parent is None and steps is not None:
        least_runs, most_runs = least_runs * steps[0], most_runs * steps[1]
      else:
        unknown.append(True)
      index = loop.parent
    return least_runs, most_runs

  least_cycles = most_cycles = copied = matrix = 0.0
  for block in code.blocks:
    low, high = times(block)
    group = tiles.get(id(block), [block])
    cycles = list(map(code.cycles, group))
    if runs(block):
      least_cycles += low * min(cycles) / len(group)
      matrix += low * min(map(code.matrix, group)) / len(group)
    most_cycles += high * max(cycles) / len(group)
    copied += high * block.copied
  cores = chips.core(chip).cores
  return OperationCode(
    least_cycles=least_cycles / cores,
    most_cycles=most_cycles,
    copied=copied,
    matrix=matrix / cores,
    open=bool(unknown),
  )


def _tiles(
  code: _Code, around: Mapping[int, list[tuple[int, int, bool]]]
) -> dict[int, list[_Block]]:
  """Blocks of a loop that stand for each other, by the identity of each.

  Guarded blocks that multiply nearly as much as the one that multiplies most.
  """
  groups: dict[int, list[_Block]] = {}
  for loop in {block.loop for block in code.blocks}:
    guarded = [
      block
      for block in code.blocks
      if block.loop == loop
      and any(not region[2] for region in around[id(block)])
    ]
    top = max(map(code.matrix, guarded), default=0)
    alike = [block for block in guarded if code.matrix(block) > 0.9 * top > 0]
    groups |= {id(block): alike for block in alike}
  return groups


def read_folder(folder: pathlib.Path) -> dict[str, str]:
  """Texts of the final bundles in a folder, by the operation's name."""
  texts = {}
  for path in sorted(folder.glob(f"*{ENDING}")):
    match = _FILE.fullmatch(path.name)
    if match and not match[1].startswith("<"):
      texts[match[1]] = path.read_text(errors="replace")
  return texts


def read_simulated(folder: pathlib.Path) -> dict[str, float]:
  """Cycles of the compiler's simulator in a folder, by the operation's name.

  Operations that it could not follow have none, and are left out.
  """
  cycles = {}
  for path in sorted(folder.glob("*_static_llo_profile.textproto")):
    text = path.read_text(errors="replace")
    name = re.search(r'hlo_op_name: "([^"]*)"', text)
    number = re.search(r"estimated_cycles: (\d+)", text)
    if name and number and int(number[1]):
      cycles[name[1]] = float(number[1])
  return cycles
