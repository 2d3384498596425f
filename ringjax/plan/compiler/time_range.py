"""Least and most time of a step of a compiled program.

Guarantees: nothing is measured, and nothing is what a kernel's author or XLA's
cost model states where the machine code says it.

  floor   the largest of: the model's FLOPs at the peak; the bytes that a step
          must read or write once, at the memory's bandwidth; the bytes of the
          busiest direction of the links, at theirs.
  least   the largest of: the floor; the bytes that XLA's operations touch; the
          cycles of all operations, which follow each other on a core: those of
          the machine code, or the simulator's where they are more.
  most    the sum over all operations of their cycles, the bytes that they move
          and the bytes that they send, as if nothing overlapped. Each counts
          once; an operation that the simulator covers takes at least as long
          as it says.

Left out: contention of links and memory, stragglers, the host and its memory.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan import files
from ringjax.plan.compiler import overlap
from ringjax.plan.compiler.hlo import HloInstruction, HloProgram, Trips
from ringjax.plan.compiler.kernel_grids import KernelGrid
from ringjax.plan.compiler.machine_code import OperationCode, operation_code
from ringjax.plan.compiler.source_lines import SourceLines
from ringjax.plan.compiler.traffic import TrafficCounter

NOTE = (
  "static, not measured: contention of links and memory, stragglers, the host "
  "and its memory are left out"
)
# Operations that a report names.
TOP = 5
# Cycles that XLA adds to its estimate of any operation, also of an empty one:
# the time to start it, and for its copies to begin and to end.
_START_CYCLES = 1_800
_KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationTime:
  """Time of one operation of a program.

  Attributes:
    name: Name of the instruction.
    source: File and line that made it, or its name in the traced program.
    times: Number of runs in a step.
    floor_s: Time of one run that its products, bytes and links take alone.
    least_s: Least time of one run on the core.
    most_s: Most time of one run.
    open: Whether the length of one of its loops is unknown: it counts once.
  """

  name: str
  source: str
  times: float
  floor_s: float
  least_s: float
  most_s: float
  open: bool

  @property
  def above_s(self) -> float:
    """Most time of all runs above their floor."""
    return self.times * max(0.0, self.most_s - self.floor_s)

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "above_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeRange:
  """Least and most time of a step on one device, in seconds.

  Attributes:
    product_s: The model's FLOPs at the data sheet's peak.
    memory_s: Bytes that a step must read or write, at the memory's bandwidth.
    link_s: Bytes of the busiest direction of the links.
    touched_s: Bytes that XLA's operations read and write, at the bandwidth.
    core_s: Cycles of the operations on a core.
    most_s: Sum over all operations without any overlap.
    least_bytes: Bytes that a step must read or write.
    touched_bytes: Bytes that the program reads and writes.
    covered: Share of `most_s` in operations whose machine code was counted.
    operations: Operations that cost most above their floor, at most `TOP`.
    open: Names of operations with a loop of unknown length, of which the most
      time is that of one turn.
    assumptions: Assumptions of each of these, as texts.
  """

  product_s: float
  memory_s: float
  link_s: float
  touched_s: float
  core_s: float
  most_s: float
  least_bytes: float
  touched_bytes: float
  covered: float
  operations: tuple[OperationTime, ...]
  open: tuple[str, ...]
  assumptions: tuple[str, ...]

  @property
  def floor_s(self) -> float:
    """Time that no program of this step on these devices can be below."""
    return max(self.product_s, self.memory_s, self.link_s)

  @property
  def least_s(self) -> float:
    """Lower bound of the time of this program."""
    return max(self.floor_s, self.touched_s, self.core_s)

  @property
  def bound(self) -> str:
    """Name of the floor's largest part: "products", "memory" or "links"."""
    floors = {
      "products": self.product_s,
      "memory": self.memory_s,
      "links": self.link_s,
    }
    return max(floors, key=lambda name: floors[name])

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    body = files.record(self, "floor_s", "least_s", "bound")
    return {**body, "note": NOTE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCode:
  """Machine code of a program's operations.

  Attributes:
    bundles: Text of the bundles by the operation's name.
    simulated: Cycles of the compiler's simulator by the operation's name.
    grids: Grids of the program's kernels.
    tile_share: Share of the steps of a kernel's list that run; None if the
      data decides.
  """

  # Megabytes, which no message should show.
  bundles: Mapping[str, str] = dataclasses.field(
    default_factory=dict, repr=False
  )
  simulated: Mapping[str, float] = dataclasses.field(default_factory=dict)
  grids: tuple[KernelGrid, ...] = ()
  tile_share: float | None = None

  def steps(self, line: HloInstruction) -> tuple[float, float] | None:
    """Least and most steps of a call of a kernel; None if unknown."""
    stem = _stem(line.name)
    # In a gradient a kernel's name is within "transpose_jvp_NAME__".
    alike = [grid for grid in self.grids if _stem(grid.name) == stem] or [
      grid for grid in self.grids if grid.name and grid.name in stem
    ]
    sizes = sorted(sizes for _, sizes in line.arrays)
    exact = [grid for grid in alike if sorted(grid.outputs) == sizes]
    alike = exact or alike
    if not alike or any(grid.open for grid in alike):
      return None
    bounds = [self._bounds(grid) for grid in alike]
    return min(low for low, _ in bounds), max(high for _, high in bounds)

  def _bounds(self, grid: KernelGrid) -> tuple[float, float]:
    if grid.listed is None:
      return float(grid.steps), float(grid.steps)
    if self.tile_share is None:
      # A call has at least one step.
      return float(grid.steps), float(grid.most_steps)
    steps = grid.steps * max(1.0, self.tile_share * grid.listed)
    return steps, steps


def time_range(
  program: HloProgram | str,
  topology: str,
  report: overlap.OverlapReport,
  *,
  code: ProgramCode | None = None,
  facts: Mapping[str, Any] | None = None,
  argument_bytes: float | int = 0.0,
  data_trips: float | int | Trips = 1.0,
) -> TimeRange:
  """Bound the time of a step of a compiled program.

  Args:
    program: The scheduled program, or its text.
    topology: Slice, e.g. "v5p:4x4x8".
    report: Report on its schedule, for the bytes on its links.
    code: Machine code of its operations; without it the operations count by
      their bytes and XLA's estimates.
    facts: Facts of the builder: "model_flops" and "least_bytes" of each device,
      "dtype" of the products, "filled_blocks" as of `traffic`.
    argument_bytes: Bytes of arguments, and of outputs elsewhere, which count
      where no fact says how many a step needs.
    data_trips: Trip counts of loops that depend on data, as of `HloProgram`,
      if the program is a text.

  Raises:
    OptionError: If it is not a scheduled module, or the slice is unknown.
  """
  facts = dict(facts or {})
  core = chips.core(topology)
  chip = chips.CHIPS[core.name]
  if isinstance(program, str):
    program = HloProgram(program, core, data_trips=data_trips)
  heavy_share = float(facts.get("filled_blocks", 1.0))
  counted = _Times(program, code or ProgramCode(), topology, heavy_share)
  operations = [
    time
    for time in counted.operations(program.entry, 1.0)
    if time.most_s or time.least_s
  ]
  total = lambda name: math.fsum(x.times * getattr(x, name) for x in operations)
  most_s = total("most_s")
  touched = TrafficCounter(program, heavy_share).count(program.entry).total
  # Branches whose share is unknown count as the lightest, and kernels, whose
  # bytes their authors state, not at all.
  surely = TrafficCounter(program, counted.surely, kernels=False)
  least_bytes = float(facts.get("least_bytes") or argument_bytes)
  flops = float(facts.get("model_flops", 0.0))
  dtype = str(facts.get("dtype", "bfloat16"))
  link_s = max(
    report.link_cycles / core.clock_hz,
    math.fsum(
      collective.nbytes / (_ports(core) * core.link_bytes_s)
      for collective in report.collectives
      if collective.kind != "collective-permute"
    ),
  )
  top = sorted(operations, key=lambda time: -time.above_s)
  covered_s = math.fsum(
    time.times * time.most_s
    for time in operations
    if time.name in counted.covered
  )
  product_s = flops / chip.rate(dtype)
  memory_s = least_bytes / chip.hbm_bandwidth
  touched_s = surely.count(program.entry).total / chip.hbm_bandwidth
  core_s = counted.least_s(program.entry)
  return TimeRange(
    product_s=product_s,
    memory_s=memory_s,
    link_s=link_s,
    touched_s=touched_s,
    core_s=core_s,
    # The model may need more than the sum counts, e.g. of a kernel without
    # machine code.
    most_s=max(most_s, product_s, memory_s, link_s, touched_s, core_s),
    least_bytes=least_bytes,
    touched_bytes=touched,
    covered=covered_s / most_s if most_s else 0.0,
    operations=tuple(time for time in top[:TOP] if time.above_s > 0),
    open=tuple(sorted({time.name for time in operations if time.open})),
    assumptions=(
      f"products: {flops:.4g} FLOPs of the model on each device, nothing "
      f"computed twice, at {chip.rate(dtype) / 1e12:,.0f} TFLOP/s of {dtype} "
      f"({chip.source})",
      f"memory: {least_bytes / 1e9:,.3f} GB that a step must read or write "
      f"once, at {chip.hbm_bandwidth / 1e9:,.0f} GB/s ({chip.source})",
      f"links: {core.link_bytes_s / 1e9:g} GB/s one way, times the hops of a "
      f"permute; other collectives over all links at once ({core.source})",
      f"cycles at {core.clock_hz / 1e6:,.0f} MHz ({core.source}); loops that "
      f"data counts: {_loops(program) or 'none'}",
    ),
  )


class _Times:
  """Times of the operations of a program.

  Attributes:
    surely: Share of runs in which a conditional is known to take its heaviest
      branch.
    covered: Names of operations whose machine code was counted.
  """

  def __init__(
    self, program: HloProgram, code: ProgramCode, topology: str, taken: float
  ):
    self._program, self._code, self._topology = program, code, topology
    self._chip = chips.CHIPS[program.core.name]
    self._taken = taken
    self.surely = taken if taken < 1 else 0.0
    self.covered: set[str] = set()
    self._traffic = TrafficCounter(program, taken)
    self._sources = SourceLines.of(program.text)
    self._memo: dict[tuple[str, str], OperationTime] = {}
    self._least: dict[str, float] = {}
    self._names = self._codes_by_signature()

  def _codes_by_signature(self) -> dict[str, str]:
    """Name of an operation with machine code, by what it computes.

    The compiler makes the code of equal operations once.
    """
    code_names = {*self._code.bundles, *self._code.simulated}
    return {
      self._signature(line): line.name
      for computation in self._program.times
      for line in self._program.computations[computation]
      if line.name in code_names
    }

  def _signature(self, line: HloInstruction) -> str:
    if _is_kernel(line):
      return f"{_stem(line.name)} {line.arrays}"
    return self._program.signature(line)

  def operations(self, name: str, times: float) -> Iterator[OperationTime]:
    """Yield the operations of a computation, with their number of runs."""
    for line in self._program.computations[name]:
      callees = self._program.callees(line)
      if line.op == "conditional":
        heavy = max(callees, key=self._most_s, default=None)
        light = min(callees, key=self._most_s, default=None)
        if heavy is not None and light is not None:
          yield from self.operations(heavy, times * self._taken)
          if self._taken < 1:
            yield from self.operations(light, times * (1 - self._taken))
      elif callees:
        trips = self._program.trips(name, line) if line.op == "while" else 1.0
        for callee in callees:
          yield from self.operations(callee, times * trips)
      else:
        yield dataclasses.replace(self._time(name, line), times=times)

  def _most_s(self, name: str) -> float:
    return math.fsum(x.times * x.most_s for x in self.operations(name, 1.0))

  def least_s(self, name: str) -> float:
    """Least time of a computation's operations, one after another."""
    if name in self._least:
      return self._least[name]
    seconds = 0.0
    for line in self._program.computations[name]:
      callees = list(map(self.least_s, self._program.callees(line)))
      if line.op == "conditional" and callees:
        seconds += self.surely * max(callees) + (1 - self.surely) * min(callees)
      elif callees:
        trips = self._program.trips(name, line) if line.op == "while" else 1.0
        seconds += trips * sum(callees)
      else:
        seconds += self._time(name, line).least_s
    self._least[name] = seconds
    return seconds

  def _time(self, name: str, line: HloInstruction) -> OperationTime:
    if (name, line.name) not in self._memo:
      self._memo[name, line.name] = self._counted(name, line)
    return self._memo[name, line.name]

  def _counted(self, name: str, line: HloInstruction) -> OperationTime:
    clock = self._program.core.clock_hz
    moved = self._traffic.of(name, line).total
    link_s = self._link_s(line)
    is_kernel = _is_kernel(line)
    own_code, simulated = self._machine_code(line, is_kernel)
    matrix_cycles = least_cycles = most_cycles = 0.0
    if own_code is not None:
      self.covered.add(line.name)
      matrix_cycles = own_code.matrix
      least_cycles, most_cycles = own_code.least_cycles, own_code.most_cycles
      if is_kernel:
        # What its code copies, not what its author states.
        moved = own_code.copied
      most_cycles += _START_CYCLES
    elif line.estimate is not None or is_kernel:
      most_cycles = self._program.price(name, line)
    memory_s = moved / self._chip.hbm_bandwidth
    floor_s = max(matrix_cycles / clock, link_s, memory_s)
    estimated = own_code is None and line.estimate is not None
    # XLA's estimate and the simulator's include the waiting for memory.
    most_s = (
      max(most_cycles / clock, memory_s)
      if estimated
      else most_cycles / clock + memory_s
    )
    return OperationTime(
      name=line.name,
      source=self._sources.source(line) or line.op_name or line.op,
      times=1.0,
      floor_s=floor_s,
      least_s=max(least_cycles, simulated) / clock,
      most_s=max(most_s, simulated / clock) + link_s,
      # The loops of a collective wait for links, which count by their bytes.
      open=own_code is not None and own_code.open and not link_s,
    )

  def _machine_code(
    self, line: HloInstruction, is_kernel: bool
  ) -> tuple[OperationCode | None, float]:
    """Cycles of an operation's code, and of the simulator, if there are any."""
    name = line.name
    if name not in self._code.bundles and name not in self._code.simulated:
      name = self._names.get(self._signature(line), "")
    if not name:
      return None, 0.0
    text = self._code.bundles.get(name)
    steps = self._code.steps(line) if is_kernel else _iterations(line)
    own_code = (
      None if text is None else operation_code(text, self._topology, steps)
    )
    return own_code, float(self._code.simulated.get(name, 0.0))

  def _link_s(self, line: HloInstruction) -> float:
    program, clock = self._program, self._program.core.clock_hz
    kind = program.collective(line)
    if kind is None or line.op.endswith("-done"):
      return 0.0
    if kind == "collective-permute":
      return overlap.link_cycles(program, line, None) / clock
    return overlap.received_bytes(program, line, kind)[1] / clock


def _is_kernel(line: HloInstruction) -> bool:
  return line.op == "custom-call" and _KERNEL in line.text


def _iterations(line: HloInstruction) -> tuple[float, float] | None:
  """Turns of an operation's loop, as XLA annotates them."""
  match = re.search(r'"iteration_bounds":\[([^\]]*)\]', line.text)
  numbers = re.findall(r"\d+", match[1]) if match else ()
  trip_count = float(math.prod(map(int, numbers)))
  return (trip_count, trip_count) if numbers else None


def _stem(name: str) -> str:
  """Name of a kernel without the number that XLA appends."""
  return re.sub(r"(\.(\d+|clone|remat\d*))+$", "", name)


def _ports(core: chips.Core) -> int:
  link = chips.MACHINES[core.name].links
  if not isinstance(link, chips.Link):
    raise OptionError(
      "topology", core.name, "a slice with one kind of link", "pass another"
    )
  return link.ports


def _loops(program: HloProgram) -> str:
  """Text of the assumed trip counts of loops that depend on data, or ""."""
  counts = sorted(set(program.counted_by_data.values()))
  if not counts:
    return ""
  loops = len(program.counted_by_data)
  return (
    f"{loops} are taken to turn {', '.join(f'{n:g}' for n in counts)} times"
  )
