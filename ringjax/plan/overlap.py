"""Does computation hide what travels? Read off a compiled schedule.

Law: nothing is measured. The schedule is walked as a device runs it: one
instruction after the other, each as long as the compiler's own estimate; a
send begins at its `-start` and the device waits at its `-done` until the last
byte is there. Sends of one direction share a link and follow each other; a
send over h hops occupies it h times as long. A loop is walked three times and
then continued.

What `check` finds fault with: a send that the compiler made synchronous, more
than `LIMIT` of the step spent waiting for sends, and kernels without a cost,
for the compiler places a send by what it believes about the work beside it.

Not modelled: contention of several rings on one link, the time to the first
byte, waiting for memory beyond what estimates have of it, other devices that
are late.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.parallel.chips import Core
from ringjax.plan.hlo import Instruction, Program, Trips

# Part of a step that may be spent waiting for the ring.
LIMIT = 0.02
# Turns of a loop that are walked.
_TURNS = 3
# Spans of the picture that are kept.
_SPANS = 20_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send:
  """One permute of the program's text.

  Attributes:
    name: of the instruction.
    computation: in which it stands.
    times: how often it runs.
    nbytes: of each.
    hops: links between the farthest pair; None without coordinates.
    synchronous: whether the device does nothing else meanwhile.
    between_cycles: of work between its start and its done.
    link_cycles: until it is there, with what its links still carry before it.
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
    """Whether the work beside it takes as long as its way."""
    return not self.synchronous and self.between_cycles >= self.link_cycles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """All collectives of a kind.

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
class Span:
  """A stretch of the timeline: what a lane did, in cycles."""

  lane: str
  kind: str
  start: float
  end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What a schedule does with its links.

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
    counted_by_data: loops whose trip count is data, and how often each is
      taken to turn.
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
  sends: tuple[Send, ...]
  collectives: tuple[Collective, ...]
  link_cycles: float
  counted_by_data: Mapping[str, float]
  unpriced: Mapping[str, int]
  unpriced_kernels: tuple[str, ...]
  spans: tuple[Span, ...] = ()

  @property
  def seconds(self) -> float:
    """Of the step."""
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
    body = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ("core", "spans", "sends", "collectives")
    }
    return {
      "chip": self.core.name,
      **body,
      "seconds": self.seconds,
      "stalled": self.stalled,
      "can_hide": self.can_hide,
      "faults": list(self.faults()),
      "unpriced_kernels": list(self.unpriced_kernels),
      "collectives": [dataclasses.asdict(one) for one in self.collectives],
      "sends": [
        {**dataclasses.asdict(one), "hidden": one.hidden} for one in self.sends
      ],
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
) -> Report:
  """Walks a schedule and says what of its sends is hidden.

  Args:
    text: a scheduled HLO module, `compiled.as_text()`.
    chip: the device, by a name that `chips.core` knows.
    coords: of each device of the mesh, in its order, to count hops; without
      them each send is one hop.
    wraps: which dimensions of the slice close to a ring.
    kernels: cycles of a Pallas kernel's call by a part of its name; default:
      what its cost estimate takes at the peak.
    data_trips: how often a loop turns whose trip count is data, e.g. how many
      tiles of a row a mask leaves; a number, or as in `hlo.Program`.

  Raises:
    OptionError: no scheduled module, an unknown chip, or coordinates that are
      fewer than the devices.
  """
  core = chips.core(chip) if isinstance(chip, str) else chip
  program = Program(text, core, kernels=kernels, data_trips=data_trips)
  most = max(
    (max(pair) for one in _permutes(program) for pair in one.pairs), default=-1
  )
  if coords is not None and most >= len(coords):
    raise OptionError(
      "coords",
      f"{len(coords)} of them",
      f"those of {most + 1} devices or more",
      "pass the coordinates of mesh.devices.flat",
    )
  measure: Callable[..., int | None] = lambda pairs: (
    None if coords is None else hops(pairs, coords, wraps)
  )
  sends = _sends(program, measure)
  walk = _Walk(program, measure)
  walk.run(program.entry)
  return Report(
    core=core,
    total_cycles=walk.now,
    compute_cycles=walk.busy,
    stalled_cycles=walk.stalled + walk.synchronous,
    synchronous_cycles=walk.synchronous,
    other_cycles=walk.other,
    sends=tuple(sends),
    collectives=_collectives(program, walk),
    link_cycles=max(walk.carried.values(), default=0.0),
    counted_by_data=dict(sorted(program.counted_by_data.items())),
    unpriced=program.unpriced(),
    unpriced_kernels=tuple(program.unpriced_kernels),
    spans=tuple(walk.spans),
  )


def _permutes(program: Program) -> list[Instruction]:
  return [
    one
    for name in program.times
    for one in program.computations[name]
    if one.op in ("collective-permute", "collective-permute-start")
  ]


def _sends(program: Program, measure: Callable[..., int | None]) -> list[Send]:
  """Each permute: what lies between its start and its done."""
  found: list[Send] = []
  for name, times in program.times.items():
    lines = program.computations[name]
    ends = {
      one.operands[0]: n
      for n, one in enumerate(lines)
      if one.op == "collective-permute-done"
    }
    open_ = {
      one.name: (n, ends.get(one.name, n))
      for n, one in enumerate(lines)
      if one.op == "collective-permute-start"
    }
    alone = {
      one.name: link_cycles(program, one, measure(one.pairs)) for one in lines
      if one.op in ("collective-permute", "collective-permute-start")
    }  # fmt: skip
    by_name = {one.name: one for one in lines}
    for n, one in enumerate(lines):
      if one.name not in alone:
        continue
      apart = one.op == "collective-permute-start"
      first, last = open_.get(one.name, (n, n))
      between = [program.price(name, x) for x in lines[first + 1 : last]]
      # Those before it that still are on their way, over the same links.
      shared = [
        other
        for other, (a, b) in open_.items()
        if a <= first < b and by_name[other].pairs == one.pairs
      ]
      found.append(
        Send(
          name=one.name,
          computation=name,
          times=times,
          nbytes=one.nbytes,
          hops=measure(one.pairs),
          synchronous=not apart,
          between_cycles=math.fsum(between) if apart else 0.0,
          link_cycles=math.fsum(alone[x] for x in shared)
          if apart
          else alone[one.name],
          source=one.op_name,
        )
      )
  return found


def link_cycles(program: Program, one: Instruction, far: int | None) -> float:
  """Cycles that a permute keeps its links busy."""
  return one.nbytes / program.core.link_bytes_per_cycle * (far or 1)


class _Walk:
  """Runs a schedule: a device, a link for each direction, and a clock."""

  def __init__(self, program: Program, measure: Callable[..., int | None]):
    self._program, self._measure = program, measure
    self.now = self.busy = 0.0
    self.stalled = self.synchronous = self.other = 0.0
    self.spans: list[Span] = []
    # By the pairs that send: until when the link is busy, and how long it was.
    self._until: dict[Any, float] = {}
    self.carried: dict[Any, float] = {}
    self._arrives: dict[tuple[str, str], tuple[float, bool]] = {}
    # Of collectives that are no permutes: (count, bytes, link, waited).
    self.rest: dict[str, list[float]] = collections.defaultdict(
      lambda: [0.0] * 4
    )

  def run(self, name: str) -> None:
    for one in self._program.computations[name]:
      self._step(name, one)

  def _step(self, name: str, one: Instruction) -> None:
    program = self._program
    kind = program.collective(one)
    inside = program.callees(one)
    if kind == "collective-permute":
      self._permute(name, one)
    elif one.op.endswith("-done") and self._waits(name, one):
      pass
    elif kind is not None:
      self._gather(name, one, kind)
    elif one.op == "while" and any(map(program.holds_collective, inside)):
      self._loop(program.trips(name, one), inside[0])
    elif one.op == "conditional" and any(map(program.holds_collective, inside)):
      self.run(max(inside, key=program.cycles))
    elif one.op == "call":
      for callee in inside:
        self.run(callee)
    else:
      self._work(program.price(name, one))

  def _work(self, cycles: float) -> None:
    if cycles:
      self._note("device", "work", self.now, self.now + cycles)
      self.now += cycles
      self.busy += cycles

  def _permute(self, name: str, one: Instruction) -> None:
    inner = self._program.inner(one)
    pairs = (inner or one).pairs
    cycles = link_cycles(self._program, one, self._measure(pairs))
    begin = max(self.now, self._until.get(pairs, 0.0))
    end = begin + cycles
    self._until[pairs] = end
    self.carried[pairs] = self.carried.get(pairs, 0.0) + cycles
    lane = f"link {1 + list(self._until).index(pairs)}"
    self._note(lane, "send", begin, end)
    if one.op == "collective-permute":
      self._note("device", "wait", self.now, end)
      self.synchronous += end - self.now
      self.now = end
    else:
      self._arrives[name, one.name] = (end, True)

  def _gather(self, name: str, one: Instruction, kind: str) -> None:
    """A collective that is no permute; they follow each other."""
    received, cycles = received_bytes(self._program, one, kind)
    apart = one.op.endswith("-start")
    begin = max(self.now, self._until.get("others", 0.0)) if apart else self.now
    work = self._program.estimate(one) or 0.0 if one.op == "fusion" else 0.0
    end = begin + max(cycles, work)
    self._until["others"] = end
    sums = self.rest[kind]
    sums[0] += 1
    sums[1] += received
    sums[2] += cycles
    self._note("others", "send", begin, end)
    if apart:
      self._arrives[name, one.name] = (end, False)
      return
    self.busy += work
    wait = end - self.now - work
    self.other += wait
    sums[3] += wait
    self._note("device", "wait", self.now + work, end)
    self.now = end

  def _waits(self, name: str, one: Instruction) -> bool:
    """Waits for a start of this computation; whether there was one."""
    start = next((x for x in one.operands if (name, x) in self._arrives), None)
    if start is None:
      return False
    arrives, permute = self._arrives.pop((name, start))
    wait = max(0.0, arrives - self.now)
    if permute:
      self.stalled += wait
    else:
      self.other += wait
      begun = self._named(name, start)
      kind = self._program.collective(begun)
      if kind is not None:
        self.rest[kind][3] += wait
    self._note("device", "wait", self.now, self.now + wait)
    self.now += wait
    return True

  def _named(self, computation: str, name: str) -> Instruction:
    lines = self._program.computations[computation]
    return next(one for one in lines if one.name == name)

  def _loop(self, trips: float, body: str) -> None:
    """A few turns, then as many more like the last one."""
    turns = min(int(trips), _TURNS)
    before = self._sums()
    for _ in range(turns):
      before = self._sums()
      self.run(body)
    more = trips - turns
    if not turns or more <= 0:
      return
    after = self._sums()
    gone = more * (after[0] - before[0])
    self._continue(before, after, more)
    # What is on its way stays as far ahead of the clock as it was.
    self._until = {k: t + gone for k, t in self._until.items()}
    self._arrives = {k: (t + gone, p) for k, (t, p) in self._arrives.items()}

  def _sums(self) -> list[Any]:
    return [
      self.now, self.busy, self.stalled, self.synchronous, self.other,
      dict(self.carried), {k: list(v) for k, v in self.rest.items()},
    ]  # fmt: skip

  def _continue(self, before: list, after: list, more: float) -> None:
    on = lambda i: after[i] + more * (after[i] - before[i])
    self.now, self.busy, self.stalled, self.synchronous, self.other = map(
      on, range(5)
    )
    for key, value in after[5].items():
      self.carried[key] = value + more * (value - before[5].get(key, 0.0))
    for key, values in after[6].items():
      old = before[6].get(key, [0.0] * 4)
      self.rest[key] = [
        value + more * (value - o) for value, o in zip(values, old, strict=True)
      ]

  def _note(self, lane: str, kind: str, start: float, end: float) -> None:
    if end > start and len(self.spans) < _SPANS:
      self.spans.append(Span(lane, kind, start, end))


def received_bytes(
  program: Program, one: Instruction, kind: str
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


def _collectives(program: Program, walk: _Walk) -> tuple[Collective, ...]:
  clock = program.core.clock_hz
  found = [
    Collective(
      kind=kind,
      count=sums[0],
      nbytes=sums[1],
      link_s=sums[2] / clock,
      waited_s=sums[3] / clock,
    )
    for kind, sums in sorted(walk.rest.items())
  ]
  permutes = _permutes(program)
  if permutes:
    count = nbytes = 0.0
    for name, times in program.times.items():
      for one in program.computations[name]:
        if one.op in ("collective-permute", "collective-permute-start"):
          count += times
          nbytes += times * one.nbytes
    found.insert(
      0,
      Collective(
        kind="collective-permute",
        count=count,
        nbytes=nbytes,
        link_s=sum(walk.carried.values()) / clock,
        waited_s=(walk.stalled + walk.synchronous) / clock,
      ),
    )
  return tuple(found)
