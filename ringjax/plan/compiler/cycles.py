"""Cycles of a Pallas kernel's tile, as libtpu scheduled its instructions.

A bundle holds the instructions that a TensorCore issues in one cycle. A tile
takes at least as many cycles as it has bundles, and at least the cycles in
which its rows pass the matrix units; waits for memory are not included.

Guarantees: the figures are counted in the machine code that would run, for
full tiles, in which no pair is masked.

  cycles.count("ringjax.bench.tiles:ours", "v6e:1x1", {"what": "forward"})
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.compiler import aot
from ringjax.plan.compiler.machine_code import (
  BRANCH,
  BUNDLE,
  ENDING,
  products,
)

_SPILL = re.compile(r"_spill\]")
_PROGRAM = "program.hlo"
_CALL = re.compile(
  r"^\s*(?:ROOT )?%?([\w.\-]+) = .* custom-call\(.*"
  r'custom_call_target="tpu_custom_call"',
  re.M,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BasicBlock:
  """Consecutive instructions without a branch between them.

  Attributes:
    bundles: Number of bundles.
    matrix_cycles: Cycles in which the busiest matrix unit takes rows.
    spills: Moves of values between registers and memory for lack of registers.
  """

  bundles: int
  matrix_cycles: int
  spills: int

  @property
  def cycles(self) -> int:
    """Lower bound of the cycles of the block."""
    return max(self.bundles, self.matrix_cycles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTile:
  """Cycles of a full tile of a kernel.

  Attributes:
    kernel: Name of the kernel in the program.
    work: Block that multiplies; of several equally large ones that with the
      fewest cycles, which does not mask.
    blocks: All blocks of the kernel.
  """

  kernel: str
  work: BasicBlock
  blocks: tuple[BasicBlock, ...]

  @property
  def step_cycles(self) -> tuple[int, int]:
    """Cycles of a step that runs one of two branches: the fewest, the most.

    Each branch is a block that multiplies, such as for a full tile and for a
    tile with a mask; all other blocks belong to both.
    """
    branches = [block.cycles for block in self.blocks if block.matrix_cycles]
    common = sum(b.cycles for b in self.blocks if not b.matrix_cycles)
    return common + min(branches), common + max(branches)

  def record(self) -> dict[str, Any]:
    """Fields of the tile as a dict for JSON."""
    return {
      "program": self.kernel,
      "cycles": self.work.cycles,
      **dataclasses.asdict(self.work),
    }


def basic_blocks(text: str, chip: str) -> tuple[BasicBlock, ...]:
  """Split a kernel's final bundles, as libtpu dumps them, into basic blocks.

  Args:
    text: Text of the file.
    chip: Name that `chips.core` knows.
  """
  rows = chips.core(chip).rows_per_cycle
  blocks: list[BasicBlock] = []
  bundles = spills = 0
  units: collections.Counter[str] = collections.Counter()
  depth = None

  def end_block() -> None:
    nonlocal bundles, spills
    if bundles:
      busiest = max(units.values(), default=0)
      blocks.append(
        BasicBlock(
          bundles=bundles, matrix_cycles=busiest // rows, spills=spills
        )
      )
    bundles = spills = 0
    units.clear()

  for line in text.splitlines():
    bundle = BUNDLE.match(line)
    if bundle:
      loop_depth = bundle["loops"].count(">")
      if bundle["mark"] or loop_depth != depth:
        end_block()
      depth = loop_depth
      bundles += 1
    for unit, product_rows in products(line):
      units[unit] += product_rows
    spills += len(_SPILL.findall(line))
    if BRANCH.search(line):
      end_block()
  end_block()
  return tuple(blocks)


def tile_of(kernel: str, found: tuple[BasicBlock, ...]) -> KernelTile | None:
  """Find the tile among a kernel's blocks; None if nothing is multiplied."""
  most_cycles = max((block.matrix_cycles for block in found), default=0)
  if not most_cycles:
    return None
  # Masked tiles multiply as much.
  full_tiles = [
    block for block in found if block.matrix_cycles > 0.9 * most_cycles
  ]
  work = min(full_tiles, key=lambda block: (block.cycles, block.bundles))
  return KernelTile(kernel=kernel, work=work, blocks=found)


def count(
  builder: str,
  topology: str,
  options: Mapping[str, Any] | None = None,
  *,
  timeout_s: float | int = 3600.0,
) -> tuple[KernelTile, ...]:
  """Compile a program and count the cycles of its Pallas kernels' tiles.

  Args:
    builder: Builder of a program with kernels, see `aot.compile`.
    topology: Slice; the smallest one suffices, e.g. "v5e:1x1".
    options: Options of the builder.
    timeout_s: Seconds after which the compilation is ended.

  Returns:
    The tiles of the kernels that multiply, sorted by name.

  Raises:
    OptionError: If libtpu is missing, the slice is unknown, or the program has
      no such kernels.
    CompileError: If the compiler refuses the program.
  """
  with tempfile.TemporaryDirectory(prefix="ringjax-cycles-") as folder:
    folder_path = pathlib.Path(folder)
    aot.compile(
      builder,
      topology,
      options,
      flags=(f"--xla_jf_dump_to={folder}", *aot.CODE_FLAGS),
      timeout_s=timeout_s,
      text_path=str(folder_path / _PROGRAM),
    )
    program = folder_path / _PROGRAM
    kernel_names = set(
      _CALL.findall(program.read_text() if program.exists() else "")
    )
    tiles = []
    for path in sorted(folder_path.glob(f"*{ENDING}")):
      name = _kernel(path.name)
      if name in kernel_names:
        text = path.read_text(errors="replace")
        tiles.append(tile_of(name, basic_blocks(text, topology)))
  tiles = [tile for tile in tiles if tile is not None]
  if not tiles:
    raise OptionError(
      "builder",
      f"{builder}, whose program has no kernel that multiplies",
      "a program with Pallas kernels",
      "pass sizes and a dtype that the kernel takes",
    )
  return tuple(sorted(tiles, key=lambda tile: tile.kernel))


def _kernel(file: str) -> str:
  """Kernel's name in "1795-NAME-01-final_bundles.txt", or ""."""
  match = re.fullmatch(rf"\d+-(.+)-\d+{ENDING}", file)
  return match[1] if match else ""
