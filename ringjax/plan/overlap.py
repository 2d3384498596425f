"""Reads off a compiled schedule whether computation hides what is sent.

Guarantees: nothing is measured. The schedule is walked as a device runs it: one
instruction after the other, each as long as the compiler's own estimate; a
send begins at its `-start` and the device waits at its `-done` until the last
byte has arrived. Sends of one direction share a link and follow each other; a
send over h hops occupies it h times as long. A loop is walked three times and
then continued.

Faults that `check` finds: a send that the compiler made synchronous, more than
`LIMIT` of the step spent waiting for sends, and kernels without a cost, for the
compiler places a send by what it assumes about the work beside it.

Not modelled: contention of several rings on one link, the time to the first
byte, waiting for memory beyond what estimates have of it, other devices that
are late.
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
from ringjax.plan.hlo import HloInstruction, HloProgram, Trips

# Part of a step that may be spent waiting for the ring.
LIMIT = 0.02
# Turns of a loop that are walked.
_TURNS = 3
# Spans of the picture that are kept.
_SPANS = 20_000
_PERMUTE = "collective-permute"
# Links between the farthest of the pairs that send; None without coordinates.
Measure = Callable[[Sequence[tuple[int, int]]], int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivePermute:
  """A send of the program's text: one instruction, which may run often.

  Attributes:
    name: of the instruction.
    computation: in which it stands.
    times: how often it runs.
    nbytes: of each.
    hops: links between the farthest pair; None without coordinates.
    synchronous: whether the device does nothing else meanwhile.
    between_cycles: of work between its start and its done.
    link_cycles: until it has arrived, with what its links carry before it.
    source: the operation of the traced program.
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
    """Whether the work beside it takes as long as it is on its way."""
    return not self.synchronous and self.between_cycles >= self.link_cycles

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return files.record(self, "hidden")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """Sums over all collectives of a kind.

  Attributes:
    kind: e.g. "all-gather".
    count: how many run.
    nbytes: that a device receives in them.
    link_s: seconds that links are busy, one after the other.
    waited_s: of them, that nothing else runs meanwhile.
  """

  kind: str
  count: float
  nbytes: float
  link_s: float
  waited_s: float


@dataclasses.dataclass(frozen=True)
class ScheduleSpan:
  """What the device or a link did in a stretch of the schedule, in cycles."""

  lane: str
  kind: str
  start: float
  end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapReport:
  """How much of a schedule waits for its links.

  Attributes:
    core: the device.
    total_cycles: of the step.
    compute_cycles: of its work.
    stalled_cycles: that it waits for sends, synchronous ones included.
    synchronous_cycles: of synchronous sends alone.
    other_cycles: that it waits for other collectives.
    sends: each permute of the text.
    collectives: all that is sent, by kind.
    link_cycles: that the busiest direction of the ring is in use.
    counted_by_data: loops whose trip count depends on data, and what it is
      taken for.
    unpriced: operations without an estimate, by kind, in lines of text.
    unpriced_kernels: kernels without cycles and without a stated cost.
    spans: of the first turns, for a picture.
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
    """Seconds of the step."""
    return self.total_cycles / self.core.clock_hz

  @property
  def stalled(self) -> float:
    """The part of the step that it waits for sends."""
    return self.stalled_cycles / self.total_cycles if self.total_cycles else 0.0

  @property
  def can_hide(self) -> bool:
    """Whether there is as much work as the busiest link has to carry."""
    return self.compute_cycles >= self.link_cycles

  def faults(self, limit: float = LIMIT) -> tuple[str, ...]:
    """What keeps links and work from running side by side; empty if nothing.

    Args:
      limit: part of the step that may be spent waiting for sends.
    """
    found = []
    late = [one for one in self.sends if one.synchronous]
    if late:
      far = max((one.hops or 0) for one in late)
      found.append(
        f"{len(late)} of {len(self.sends)} sends are synchronous"
        + (f", over up to {far} hops" if far > 1 else "")
        + ": order the devices with rj.make_mesh"
      )
    if self.stalled > limit:
      why = "" if self.can_hide else " (there is too little work to hide it)"
      exposed = [one.name for one in self.sends if not one.hidden]
      found.append(
        f"{100 * self.stalled:.1f} % of the step waits for sends{why}, at most "
        f"{100 * limit:g} % may: {', '.join(exposed[:4]) or 'in a queue'}"
      )
    if self.unpriced_kernels:
      found.append(
        f"{len(self.unpriced_kernels)} kernels state no cost, which the "
        "compiler's schedule and this report are made by: pass cost_estimate= "
        f"to pallas_call ({', '.join(self.unpriced_kernels[:4])})"
      )
    return tuple(found)

  def record(self) -> dict[str, Any]:
    """As JSON has it, without the spans."""
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
  """Links between the two devices of a pair that are farthest apart.

  Args:
    pairs: (from, to), numbers of devices.
    coords: of each device's chip.
    wraps: which dimensions close to a ring; default: none.
  """
  sides = [max(c[i] for c in coords) + 1 for i in range(len(coords[0]))]
  closed = wraps or (False,) * len(sides)

  def far(a: Sequence[int], b: Sequence[int]) -> int:
    steps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return sum(
      min(n, side - n) if ring else n
      for n, side, ring in zip(steps, sides, closed, strict=True)
    )

  # Two devices of one chip have no link between them to speak of.
  return max((max(1, far(coords[a], coords[b])) for a, b in pairs), default=1)


def check(
  text: str,
  chip: str | Core,
  *,
  coords: Sequence[Sequence[int]] | None = None,
  wraps: Sequence[bool] | None = None,
  kernels: Mapping[str, float | int] | None = None,
  data_trips: float | int | Trips = 1.0,
) -> OverlapReport:
  """Walks a schedule and reports which of its sends are hidden.

  Args:
    text: a scheduled HLO module, `compiled.as_text()`.
    chip: the device, by a name that `chips.core` knows.
    coords: of each device of the mesh, in its order, to count hops; without
      them each send is one hop.
    wraps: which dimensions of the slice close to a ring.
    kernels: cycles of a Pallas kernel's call by a part of its name; default:
      what its cost estimate takes at the peak.
    data_trips: trip counts of loops that depend on data, e.g. how many tiles
      of a row a mask leaves; a number, or as in `HloProgram`.

  Raises:
    OptionError: not a scheduled module, an unknown chip, or fewer coordinates
      than devices.
  """
  core = chips.core(chip) if isinstance(chip, str) else chip
  program = HloProgram(text, core, kernels=kernels, data_trips=data_trips)
  most = max(
    (max(pair) for _, one in _permutes(program) for pair in one.pairs),
    default=-1,
  )
  if coords is not None and most >= len(coords):
    raise OptionError(
      "coords",
      f"{len(coords)} of them",
      f"those of {most + 1} devices or more",
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
  """Each permute of the text, with the computation in which it stands."""
  for name in program.times:
    for one in program.computations[name]:
      if one.kind == _PERMUTE:
        yield name, one


def _sends(program: HloProgram, measure: Measure) -> list[CollectivePermute]:
  """Each permute, with the work between its start and its done."""
  found: list[CollectivePermute] = []
  for name, times in program.times.items():
    lines = program.computations[name]
    permutes = {n: x for n, x in enumerate(lines) if x.kind == _PERMUTE}
    done = {
      x.operands[0]: n
      for n, x in enumerate(lines)
      if x.op == f"{_PERMUTE}-done"
    }
    # A synchronous one ends where it begins.
    ends = {n: done.get(x.name, n) for n, x in permutes.items()}
    alone = {
      n: link_cycles(program, x, measure(x.pairs)) for n, x in permutes.items()
    }
    for n, one in permutes.items():
      apart = one.op != _PERMUTE
      between = [program.price(name, x) for x in lines[n + 1 : ends[n]]]
      # It, and those before it that are still under way over its links.
      shared = [
        alone[m]
        for m, other in permutes.items()
        if m <= n < ends[m] and other.pairs == one.pairs
      ]
      found.append(
        CollectivePermute(
          name=one.name,
          computation=name,
          times=times,
          nbytes=one.nbytes,
          hops=measure(one.pairs),
          synchronous=not apart,
          between_cycles=math.fsum(between),
          link_cycles=math.fsum(shared) if apart else alone[n],
          source=one.op_name,
        )
      )
  return found


def link_cycles(
  program: HloProgram, one: HloInstruction, far: int | None
) -> float:
  """Cycles that a permute keeps its links busy."""
  return one.nbytes / program.core.link_bytes_per_cycle * (far or 1)


class _Walk:
  """Runs a schedule: a device, a link for each direction, and a clock.

  Attributes:
    sums: cycles "now", "busy", "stalled" (for permutes), "synchronous" (in
      them) and waited for "other" collectives; of the links ("carried", pairs);
      and of a kind of other collectives (kind, "count"), (kind, "nbytes"),
      (kind, "link"), (kind, "waited").
    spans: of the picture.
  """

  def __init__(self, program: HloProgram, measure: Measure):
    self._program, self._measure = program, measure
    self.sums: collections.defaultdict[Any, float]
    self.sums = collections.defaultdict(float)
    self.spans: list[ScheduleSpan] = []
    # By the pairs that send, or "others": until when the link is busy.
    self._until: dict[Any, float] = {}
    # By computation and start: when it has arrived, and its kind.
    self._arrives: dict[tuple[str, str], tuple[float, str]] = {}

  def carried(self) -> list[float]:
    """Cycles that the link of each direction was in use."""
    return [n for key, n in self.sums.items() if key[0] == "carried"]

  def run(self, name: str) -> None:
    for one in self._program.computations[name]:
      self._step(name, one)

  def _step(self, name: str, one: HloInstruction) -> None:
    program = self._program
    kind = program.collective(one)
    inside = program.callees(one)
    sends = any(map(program.holds_collective, inside))
    start = next((x for x in one.operands if (name, x) in self._arrives), None)
    if kind == _PERMUTE:
      self._permute(name, one)
    elif one.op.endswith("-done") and start is not None:
      self._arrive(*self._arrives.pop((name, start)))
    elif kind is not None:
      self._gather(name, one, kind)
    elif one.op == "while" and sends:
      self._loop(program.trips(name, one), inside[0])
    elif one.op == "conditional" and sends:
      self.run(max(inside, key=program.cycles))
    elif one.op == "call":
      for callee in inside:
        self.run(callee)
    else:
      self._pass("work", program.price(name, one), "busy")

  def _pass(self, kind: str, cycles: float, *sums: Any) -> None:
    """The device works or waits for so many cycles."""
    now = self.sums["now"]
    self._note("device", kind, now, now + cycles)
    for name in ("now", *sums):
      self.sums[name] += cycles

  def _permute(self, name: str, one: HloInstruction) -> None:
    pairs = (self._program.inner(one) or one).pairs
    cycles = link_cycles(self._program, one, self._measure(pairs))
    begin = max(self.sums["now"], self._until.get(pairs, 0.0))
    end = self._until[pairs] = begin + cycles
    self.sums["carried", pairs] += cycles
    self._note(f"link {1 + list(self._until).index(pairs)}", "send", begin, end)
    if one.op == _PERMUTE:
      self._pass("wait", end - self.sums["now"], "synchronous")
    else:
      self._arrives[name, one.name] = (end, _PERMUTE)

  def _gather(self, name: str, one: HloInstruction, kind: str) -> None:
    """A collective that is not a permute; they follow each other."""
    received, cycles = received_bytes(self._program, one, kind)
    now = self.sums["now"]
    apart = one.op.endswith("-start")
    begin = max(now, self._until.get("others", 0.0)) if apart else now
    work = one.estimate or 0.0 if one.op == "fusion" else 0.0
    end = self._until["others"] = begin + max(cycles, work)
    self.sums[kind, "count"] += 1
    self.sums[kind, "nbytes"] += received
    self.sums[kind, "link"] += cycles
    self._note("others", "send", begin, end)
    if apart:
      self._arrives[name, one.name] = (end, kind)
      return
    self.sums["now"] += work
    self.sums["busy"] += work
    self._arrive(end, kind)

  def _arrive(self, end: float, kind: str) -> None:
    """The device waits for what has arrived at `end`."""
    wait = max(0.0, end - self.sums["now"])
    if kind == _PERMUTE:
      self._pass("wait", wait, "stalled")
    else:
      self._pass("wait", wait, "other", (kind, "waited"))

  def _loop(self, trips: float, body: str) -> None:
    """Walks a few turns, then counts the others like the last one."""
    turns = min(int(trips), _TURNS)
    before: dict[Any, float] = {}
    for _ in range(turns):
      before = dict(self.sums)
      self.run(body)
    more = trips - turns
    if not turns or more <= 0:
      return
    gained = {k: n - before.get(k, 0.0) for k, n in self.sums.items()}
    for key, n in gained.items():
      self.sums[key] += more * n
    # What is on its way stays as far ahead of the clock as it was.
    gone = more * gained.get("now", 0.0)
    self._until = {k: t + gone for k, t in self._until.items()}
    self._arrives = {k: (t + gone, x) for k, (t, x) in self._arrives.items()}

  def _note(self, lane: str, kind: str, start: float, end: float) -> None:
    if end > start and len(self.spans) < _SPANS:
      self.spans.append(ScheduleSpan(lane, kind, start, end))


def received_bytes(
  program: HloProgram, one: HloInstruction, kind: str
) -> tuple[float, float]:
  """(bytes that a device receives, cycles of its links) of a collective.

  By `chips.Link`: gathers go over all links of a device at once.
  """
  inner = program.inner(one) or one
  size = group_size(inner.text)
  # What a start gives holds what goes in, too: of a gather what comes out is
  # the largest. Several arrays that are summed at once all count.
  apart = inner.op.endswith("-start") and kind != "all-reduce"
  nbytes = float(inner.nbytes if apart else inner.all_bytes)
  if kind == "reduce-scatter" and "-start" not in inner.op:
    nbytes *= size
  share = nbytes * (size - 1) / max(1, size)
  made = chips.MACHINES[program.core.name].links
  assert isinstance(made, chips.Link)
  made = dataclasses.replace(made, bandwidth=program.core.link_bytes_s)
  if kind == "all-reduce":
    seconds, received = 2 * made.gather_s(share, size), 2 * share
  elif kind.endswith("all-to-all"):
    seconds, received = made.exchange_s(share, size), share
  else:
    seconds, received = made.gather_s(share, size), share
  return received, seconds * program.core.clock_hz


def group_size(text: str) -> int:
  """Devices of a group of a collective, by its line; 1 where it says nothing.

  Written {{0,1},{2,3}}, [groups,size]<=[...] or mesh['a'=2,'b'=4] {'b'}.
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
  over = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])
  return math.prod(int(part or sizes.get(axis, 1)) for axis, part in over)


def _collectives(program: HloProgram, walk: _Walk) -> tuple[Collective, ...]:
  """Sums by kind, the permutes first."""
  clock, sums = program.core.clock_hz, walk.sums
  kinds = sorted({k[0] for k in sums if isinstance(k, tuple)} - {"carried"})
  found = [
    Collective(
      kind=kind,
      count=sums[kind, "count"],
      nbytes=sums[kind, "nbytes"],
      link_s=sums[kind, "link"] / clock,
      waited_s=sums[kind, "waited"] / clock,
    )
    for kind in kinds
  ]
  permutes = [(program.times[name], one) for name, one in _permutes(program)]
  if permutes:
    found.insert(
      0,
      Collective(
        kind=_PERMUTE,
        count=sum(times for times, _ in permutes),
        nbytes=sum(times * one.nbytes for times, one in permutes),
        link_s=sum(walk.carried()) / clock,
        waited_s=(sums["stalled"] + sums["synchronous"]) / clock,
      ),
    )
  return tuple(found)
