"""Predicts from a compiled schedule whether computation hides communication.

Guarantees: nothing is measured. The schedule is walked as a device runs it: one
instruction after the other, each as long as the compiler's own estimate; a
send begins at its `-start` and the device waits at its `-done` until the last
byte has arrived. Sends of one direction share a link and follow each other; a
send over h hops occupies it h times as long. A loop is walked three times and
then extrapolated.

Faults that `check` finds: a send that the compiler made synchronous, more than
`LIMIT` of the step spent waiting for sends, and kernels without a cost, as the
compiler schedules a send by its estimates of the work that overlaps it.

Not modelled: contention of several rings on one link, the latency of a message,
waiting for memory beyond the estimates' share of it, other devices that are
late.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.parallel.chips import Core
from ringjax.plan import files
from ringjax.plan.compiler.hlo import HloInstruction, HloProgram, Trips

# Maximum fraction of a step that may be spent waiting for the ring.
LIMIT = 0.02
# Iterations of a loop that are walked.
_TURNS = 3
# Maximum number of spans that are kept for a picture.
_SPANS = 20_000
_PERMUTE = "collective-permute"
# Links between the farthest pair of sender and receiver; None if unknown.
Measure = Callable[[Sequence[tuple[int, int]]], int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivePermute:
  """A permute instruction of the program's text, which may run often.

  Attributes:
    name: Name of the instruction.
    computation: Name of the computation that contains it.
    times: Number of times that it runs.
    nbytes: Bytes of each send.
    hops: Links between the farthest pair; None without coordinates.
    synchronous: Whether the device does nothing else meanwhile.
    between_cycles: Cycles of work between its start and its done.
    link_cycles: Cycles until it has arrived, after earlier sends on its links.
    source: Operation of the traced program.
  """

  name: str
  computation: str
  times: float
  nbytes: int
  hops: int | None
  synchronous: bool
  between_cycles: float
  link_cycles: float
  source: str

  @property
  def hidden(self) -> bool:
    """Whether the overlapping work takes as long as the send."""
    return not self.synchronous and self.between_cycles >= self.link_cycles

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "hidden")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """Totals of all collectives of a kind.

  Attributes:
    kind: Kind, e.g. "all-gather".
    count: Number of times that they run.
    nbytes: Bytes that a device receives.
    link_s: Seconds that links are busy, one after the other.
    waited_s: Seconds of these in which nothing else runs.
  """

  kind: str
  count: float
  nbytes: float
  link_s: float
  waited_s: float


@dataclasses.dataclass(frozen=True)
class ScheduleSpan:
  """Activity of the device or a link in a part of the schedule, in cycles."""

  lane: str
  kind: str
  start: float
  end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapReport:
  """Cycles of a schedule: work, waiting for links, and each send.

  Attributes:
    core: Device model.
    total_cycles: Cycles of the step.
    compute_cycles: Cycles of its work.
    stalled_cycles: Cycles of waiting for sends, including synchronous ones.
    synchronous_cycles: Cycles of synchronous sends alone.
    other_cycles: Cycles of waiting for other collectives.
    sends: Permutes of the program's text.
    collectives: Totals of all communication, by kind.
    link_cycles: Cycles that the busiest direction of the ring is in use.
    counted_by_data: Loops whose trip count depends on data, and the assumed
      count.
    unpriced: Operations without an estimate: number of lines by kind.
    unpriced_kernels: Kernels without cycles and without a stated cost.
    spans: Spans of the first iterations, for a picture.
  """

  core: Core
  total_cycles: float
  compute_cycles: float
  stalled_cycles: float
  synchronous_cycles: float
  other_cycles: float
  sends: tuple[CollectivePermute, ...]
  collectives: tuple[Collective, ...]
  link_cycles: float
  counted_by_data: Mapping[str, float]
  unpriced: Mapping[str, int]
  unpriced_kernels: tuple[str, ...]
  spans: tuple[ScheduleSpan, ...] = ()

  @property
  def seconds(self) -> float:
    """Duration of the step in seconds."""
    return self.total_cycles / self.core.clock_hz

  @property
  def stalled(self) -> float:
    """Fraction of the step that is spent waiting for sends."""
    return self.stalled_cycles / self.total_cycles if self.total_cycles else 0.0

  @property
  def can_hide(self) -> bool:
    """Whether there is as much work as the busiest link needs time."""
    return self.compute_cycles >= self.link_cycles

  def faults(self, limit: float = LIMIT) -> tuple[str, ...]:
    """Reasons why communication does not overlap with work; empty if none.

    Args:
      limit: Maximum fraction of the step that may be spent waiting for sends.
    """
    fault_texts = []
    synchronous = [send for send in self.sends if send.synchronous]
    if synchronous:
      most_hops = max((send.hops or 0) for send in synchronous)
      fault_texts.append(
        f"{len(synchronous)} of {len(self.sends)} sends are synchronous"
        + (f", over up to {most_hops} hops" if most_hops > 1 else "")
        + ": order the devices with rj.make_mesh"
      )
    if self.stalled > limit:
      why = "" if self.can_hide else " (there is too little work to hide it)"
      exposed = [send.name for send in self.sends if not send.hidden]
      fault_texts.append(
        f"{100 * self.stalled:.1f} % of the step waits for sends{why}, at most "
        f"{100 * limit:g} % may: {', '.join(exposed[:4]) or 'in a queue'}"
      )
    if self.unpriced_kernels:
      fault_texts.append(
        f"{len(self.unpriced_kernels)} kernels state no cost, which the "
        "compiler's schedule and this report are made by: pass cost_estimate= "
        f"to pallas_call ({', '.join(self.unpriced_kernels[:4])})"
      )
    return tuple(fault_texts)

  def record(self) -> dict[str, Any]:
    """Fields as a dict for JSON, without the spans."""
    return {
      "chip": self.core.name,
      **files.record(
        self, "seconds", "stalled", "can_hide", leave=("core", "spans")
      ),
      "faults": list(self.faults()),
    }


def hops(
  pairs: Sequence[tuple[int, int]],
  coords: Sequence[Sequence[int]],
  wraps: Sequence[bool] | None = None,
) -> int:
  """Number of links between the farthest two devices of a pair.

  Args:
    pairs: (from, to), numbers of devices.
    coords: Chip coordinates of each device.
    wraps: Whether each dimension closes to a ring; default: none does.
  """
  sides = [max(c[i] for c in coords) + 1 for i in range(len(coords[0]))]
  closed = wraps or (False,) * len(sides)

  def distance(a: Sequence[int], b: Sequence[int]) -> int:
    steps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return sum(
      min(n, side - n) if ring else n
      for n, side, ring in zip(steps, sides, closed, strict=True)
    )

  # Two devices of one chip have no link between them: counted as one.
  return max(
    (max(1, distance(coords[a], coords[b])) for a, b in pairs), default=1
  )


def check(
  text: str | HloProgram,
  chip: str | Core,
  *,
  coords: Sequence[Sequence[int]] | None = None,
  wraps: Sequence[bool] | None = None,
  kernels: Mapping[str, float | int] | None = None,
  data_trips: float | int | Trips = 1.0,
) -> OverlapReport:
  """Walk a schedule and report which of its sends are hidden.

  Args:
    text: A scheduled HLO module, `compiled.as_text()`, or the program that
      was read from it for this device.
    chip: Device, by a name that `chips.core` knows.
    coords: Coordinates of the mesh's devices, in its order, to count hops;
      without them each send is one hop.
    wraps: Whether each dimension of the slice closes to a ring.
    kernels: Cycles of a Pallas kernel's call by a part of its name; default:
      the FLOPs of its cost estimate at the peak rate.
    data_trips: Trip counts of loops that depend on data, e.g. the number of
      tiles of a row that a mask leaves; a number, or as in `HloProgram`.

  Raises:
    OptionError: If it is not a scheduled module, the chip is unknown, or there
      are fewer coordinates than devices.
  """
  core = chips.core(chip) if isinstance(chip, str) else chip
  program = text
  if isinstance(program, str):
    program = HloProgram(program, core, kernels=kernels, data_trips=data_trips)
  largest_number = max(
    (max(pair) for _, permute in _permutes(program) for pair in permute.pairs),
    default=-1,
  )
  if coords is not None and largest_number >= len(coords):
    raise OptionError(
      "coords",
      f"{len(coords)} of them",
      f"those of {largest_number + 1} devices or more",
      "pass the coordinates of mesh.devices.flat",
    )
  measure: Measure = lambda pairs: (
    None if coords is None else hops(pairs, coords, wraps)
  )
  sends = _sends(program, measure)
  walk = _Walk(program, measure)
  walk.run(program.entry)
  sums = walk.sums
  return OverlapReport(
    core=core,
    total_cycles=sums["now"],
    compute_cycles=sums["busy"],
    stalled_cycles=sums["stalled"] + sums["synchronous"],
    synchronous_cycles=sums["synchronous"],
    other_cycles=sums["other"],
    sends=tuple(sends),
    collectives=_collectives(program, walk),
    link_cycles=max(walk.carried(), default=0.0),
    counted_by_data=dict(sorted(program.counted_by_data.items())),
    unpriced=program.unpriced(),
    unpriced_kernels=tuple(program.unpriced_kernels),
    spans=tuple(walk.spans),
  )


def _permutes(program: HloProgram) -> Iterator[tuple[str, HloInstruction]]:
  """Yield each permute of the text with the name of its computation."""
  for name in program.times:
    for instruction in program.computations[name]:
      if instruction.kind == _PERMUTE:
        yield name, instruction


def _sends(program: HloProgram, measure: Measure) -> list[CollectivePermute]:
  """All permutes, with the work between their start and their done."""
  sends: list[CollectivePermute] = []
  for name, times in program.times.items():
    lines = program.computations[name]
    permutes = {
      n: instruction
      for n, instruction in enumerate(lines)
      if instruction.kind == _PERMUTE
    }
    done_index = {
      instruction.operands[0]: n
      for n, instruction in enumerate(lines)
      if instruction.op == f"{_PERMUTE}-done"
    }
    # A synchronous permute ends where it begins.
    ends = {n: done_index.get(x.name, n) for n, x in permutes.items()}
    cycles_alone = {
      n: link_cycles(program, permute, measure(permute.pairs))
      for n, permute in permutes.items()
    }
    for n, permute in permutes.items():
      asynchronous = permute.op != _PERMUTE
      between = [
        program.price(name, instruction)
        for instruction in lines[n + 1 : ends[n]]
      ]
      # This permute, and earlier ones still in flight on the same links.
      shared = [
        cycles_alone[m]
        for m, earlier in permutes.items()
        if m <= n < ends[m] and earlier.pairs == permute.pairs
      ]
      sends.append(
        CollectivePermute(
          name=permute.name,
          computation=name,
          times=times,
          nbytes=permute.nbytes,
          hops=measure(permute.pairs),
          synchronous=not asynchronous,
          between_cycles=math.fsum(between),
          link_cycles=math.fsum(shared) if asynchronous else cycles_alone[n],
          source=permute.op_name,
        )
      )
  return sends


def link_cycles(
  program: HloProgram, one: HloInstruction, far: int | None
) -> float:
  """Cycles that a permute keeps its links busy."""
  return one.nbytes / program.core.link_bytes_per_cycle * (far or 1)


class _Walk:
  """Walks a schedule with a device, a link for each direction, and a clock.

  Attributes:
    sums: Cycles "now", "busy", "stalled" (for permutes), "synchronous" (in
      them) and waited for "other" collectives; for links ("carried", pairs);
      and for a kind of other collectives (kind, "count"), (kind, "nbytes"),
      (kind, "link"), (kind, "waited").
    spans: Spans of the picture.
  """

  def __init__(self, program: HloProgram, measure: Measure):
    self._program, self._measure = program, measure
    self.sums: collections.defaultdict[Any, float]
    self.sums = collections.defaultdict(float)
    self.spans: list[ScheduleSpan] = []
    # Time until which a link is busy, by the pairs that send, or "others".
    self._busy_until: dict[Any, float] = {}
    # (arrival time, kind) of sends in flight, by computation and start.
    self._arrives: dict[tuple[str, str], tuple[float, str]] = {}

  def carried(self) -> list[float]:
    """Cycles that the link of each direction was in use."""
    return [cycles for key, cycles in self.sums.items() if key[0] == "carried"]

  def run(self, name: str) -> None:
    for instruction in self._program.computations[name]:
      self._step(name, instruction)

  def _step(self, name: str, instruction: HloInstruction) -> None:
    program = self._program
    kind = program.collective(instruction)
    inside = program.callees(instruction)
    sends = any(map(program.holds_collective, inside))
    operand = next(
      (
        operand_name
        for operand_name in instruction.operands
        if (name, operand_name) in self._arrives
      ),
      None,
    )
    if kind == _PERMUTE:
      self._send(name, instruction)
    elif instruction.op.endswith("-done") and operand is not None:
      self._wait_until(*self._arrives.pop((name, operand)))
    elif kind is not None:
      self._run_collective(name, instruction, kind)
    elif instruction.op == "while" and sends:
      self._loop(program.trips(name, instruction), inside[0])
    elif instruction.op == "conditional" and sends:
      self.run(max(inside, key=program.cycles))
    elif instruction.op == "call":
      for callee in inside:
        self.run(callee)
    else:
      self._advance("work", program.price(name, instruction), "busy")

  def _advance(self, kind: str, cycles: float, *sums: Any) -> None:
    """Advance the clock by cycles of work or waiting."""
    now_cycles = self.sums["now"]
    self._record_span("device", kind, now_cycles, now_cycles + cycles)
    for name in ("now", *sums):
      self.sums[name] += cycles

  def _send(self, name: str, permute: HloInstruction) -> None:
    pairs = (self._program.inner(permute) or permute).pairs
    cycles = link_cycles(self._program, permute, self._measure(pairs))
    begin = max(self.sums["now"], self._busy_until.get(pairs, 0.0))
    end = self._busy_until[pairs] = begin + cycles
    self.sums["carried", pairs] += cycles
    self._record_span(
      f"link {1 + list(self._busy_until).index(pairs)}", "send", begin, end
    )
    if permute.op == _PERMUTE:
      self._advance("wait", end - self.sums["now"], "synchronous")
    else:
      self._arrives[name, permute.name] = (end, _PERMUTE)

  def _run_collective(
    self, name: str, instruction: HloInstruction, kind: str
  ) -> None:
    """Run a collective that is not a permute; these follow each other."""
    received, cycles = received_bytes(self._program, instruction, kind)
    now_cycles = self.sums["now"]
    asynchronous = instruction.op.endswith("-start")
    begin = (
      max(now_cycles, self._busy_until.get("others", 0.0))
      if asynchronous
      else now_cycles
    )
    work = instruction.estimate or 0.0 if instruction.op == "fusion" else 0.0
    end = self._busy_until["others"] = begin + max(cycles, work)
    self.sums[kind, "count"] += 1
    self.sums[kind, "nbytes"] += received
    self.sums[kind, "link"] += cycles
    self._record_span("others", "send", begin, end)
    if asynchronous:
      self._arrives[name, instruction.name] = (end, kind)
      return
    self.sums["now"] += work
    self.sums["busy"] += work
    self._wait_until(end, kind)

  def _wait_until(self, end: float, kind: str) -> None:
    """Let the device wait until `end`."""
    wait = max(0.0, end - self.sums["now"])
    if kind == _PERMUTE:
      self._advance("wait", wait, "stalled")
    else:
      self._advance("wait", wait, "other", (kind, "waited"))

  def _loop(self, trips: float, body: str) -> None:
    """Walk a few iterations, then count the others like the last one."""
    num_walked = min(int(trips), _TURNS)
    sums_before: dict[Any, float] = {}
    for _ in range(num_walked):
      sums_before = dict(self.sums)
      self.run(body)
    remaining = trips - num_walked
    if not num_walked or remaining <= 0:
      return
    gained = {k: n - sums_before.get(k, 0.0) for k, n in self.sums.items()}
    for key, n in gained.items():
      self.sums[key] += remaining * n
    # Sends in flight keep their distance to the clock.
    skipped = remaining * gained.get("now", 0.0)
    self._busy_until = {
      k: time + skipped for k, time in self._busy_until.items()
    }
    self._arrives = {
      k: (time + skipped, x) for k, (time, x) in self._arrives.items()
    }

  def _record_span(
    self, lane: str, kind: str, start: float, end: float
  ) -> None:
    if end > start and len(self.spans) < _SPANS:
      self.spans.append(ScheduleSpan(lane, kind, start, end))


def received_bytes(
  program: HloProgram, one: HloInstruction, kind: str
) -> tuple[float, float]:
  """(bytes that a device receives, cycles of its links) of a collective.

  By `chips.Link`: gathers use all links of a device at once.
  """
  inner = program.inner(one) or one
  size = group_size(inner.text)
  # The result of a start includes its operands: for a gather the output is the
  # largest array. In an all-reduce of several arrays all count.
  asynchronous = inner.op.endswith("-start") and kind != "all-reduce"
  nbytes = float(inner.nbytes if asynchronous else inner.all_bytes)
  if kind == "reduce-scatter" and "-start" not in inner.op:
    nbytes *= size
  share = nbytes * (size - 1) / max(1, size)
  link = chips.MACHINES[program.core.name].links
  assert isinstance(link, chips.Link)
  link = dataclasses.replace(link, bandwidth=program.core.link_bytes_s)
  if kind == "all-reduce":
    seconds, received = 2 * link.gather_s(share, size), 2 * share
  elif kind.endswith("all-to-all"):
    seconds, received = link.exchange_s(share, size), share
  else:
    seconds, received = link.gather_s(share, size), share
  return received, seconds * program.core.clock_hz


def group_size(text: str) -> int:
  """Group size of a collective from its line; 1 if it states none.

  Formats: {{0,1},{2,3}}, [groups,size]<=[...] or mesh['a'=2,'b'=4] {'b'}.
  """
  listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
  if listed:
    return max(1, len(listed[1].split(",")))
  iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", text)
  if iota:
    return int(iota[2])
  named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text)
  if not named:
    return 1
  sizes = dict(re.findall(r"'([^']*)'=(\d+)", named[1]))
  axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])
  return math.prod(int(part or sizes.get(axis, 1)) for axis, part in axes)


def _collectives(program: HloProgram, walk: _Walk) -> tuple[Collective, ...]:
  """Totals by kind, permutes first."""
  clock, sums = program.core.clock_hz, walk.sums
  kinds = sorted({k[0] for k in sums if isinstance(k, tuple)} - {"carried"})
  collectives = [
    Collective(
      kind=kind,
      count=sums[kind, "count"],
      nbytes=sums[kind, "nbytes"],
      link_s=sums[kind, "link"] / clock,
      waited_s=sums[kind, "waited"] / clock,
    )
    for kind in kinds
  ]
  permutes = [
    (program.times[name], permute) for name, permute in _permutes(program)
  ]
  if permutes:
    collectives.insert(
      0,
      Collective(
        kind=_PERMUTE,
        count=sum(times for times, _ in permutes),
        nbytes=sum(times * permute.nbytes for times, permute in permutes),
        link_s=sum(walk.carried()) / clock,
        waited_s=(sums["stalled"] + sums["synchronous"]) / clock,
      ),
    )
  return tuple(collectives)
