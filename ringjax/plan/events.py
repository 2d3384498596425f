"""A discrete-event simulator: operations on devices and links.

Law: the same operations give the same timeline, on every machine and in every
process; nothing is random and no clock is read. At one instant all that ends
is handled before anything starts, so that the most urgent operation gets the
place, whoever ended first. Nothing that runs is interrupted.

  device   runs `slots` operations at once, the others wait
  link     carries one message at a time: `nbytes / bandwidth` seconds, and
           the message is there `latency_s` later
  pool     a count of equal things (buffers, credits, pages) that an operation
           takes when it starts and another gives back when it ends

Of those that wait for a place, the one with the highest priority goes first,
then the one that was described first; one that lacks something of a pool lets
others pass. Cost: O(log n) an operation and dependency.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel.chips import Link

# A number of seconds, bytes, slots: what a caller may write as 1 or as 1.0.
Number = int | float

_DONE, _FREE, _READY, _CALL = range(4)


@dataclasses.dataclass(frozen=True)
class Device:
  """A place that computes.

  Attributes:
    name: unique in its simulator.
    slots: operations that run at once.
  """

  name: str
  slots: Number = 1


@dataclasses.dataclass(frozen=True)
class Channel:
  """One way of a link, which carries one message at a time.

  Attributes:
    name: unique in its simulator.
    link: how fast; its latency is from the last byte's leaving to its arrival.
  """

  name: str
  link: Link


@dataclasses.dataclass(frozen=True)
class Pool:
  """A count of equal things.

  Attributes:
    name: unique in its simulator.
    size: how many there are.
  """

  name: str
  size: Number


@dataclasses.dataclass(frozen=True)
class Span:
  """What became of one operation; times in seconds from the start.

  Attributes:
    name: of the operation.
    kind: its group, for pictures and sums.
    where: name of the device or link; "" is nowhere.
    ready_s: when its dependencies and its release time were met.
    start_s: when it began.
    end_s: when its place was free again.
    done_s: when those that depend on it may begin; behind `end_s` by the
      latency of a link.
    nbytes: what it sent.
  """

  name: str
  kind: str
  where: str
  ready_s: Number
  start_s: Number
  end_s: Number
  done_s: Number
  nbytes: Number = 0.0


@dataclasses.dataclass(frozen=True)
class Op:
  """A handle of an operation, for `after` and to find its span."""

  index: int
  name: str


@dataclasses.dataclass(frozen=True)
class Timeline:
  """The result: one span for each operation, in the order of description."""

  spans: tuple[Span, ...]

  def __getitem__(self, op: Op) -> Span:
    return self.spans[op.index]

  @property
  def finish_s(self) -> Number:
    """When all is done; 0 if there was nothing."""
    return max((s.done_s for s in self.spans), default=0.0)

  def of(self, where: str) -> tuple[Span, ...]:
    """The spans of a device or link, in order of their start."""
    found = (s for s in self.spans if s.where == where)
    return tuple(sorted(found, key=lambda s: (s.start_s, s.end_s)))

  def busy_s(self, where: str) -> float:
    """Seconds of work on a device or link; slots add up."""
    return math.fsum(s.end_s - s.start_s for s in self.of(where))

  def sent_bytes(self) -> dict[str, Number]:
    """Bytes by link."""
    found: dict[str, Number] = {}
    for s in self.spans:
      if s.nbytes:
        found[s.where] = found.get(s.where, 0.0) + s.nbytes
    return found


@dataclasses.dataclass(slots=True)
class _State:
  """An operation while it is simulated."""

  name: str
  kind: str
  where: int
  seconds: Number | Callable[[float], Number]
  latency_s: Number
  nbytes: Number
  priority: Number
  release_s: Number
  take: tuple[tuple[int, Number], ...]
  give: tuple[tuple[int, Number], ...]
  then: Callable[[Span], None] | None
  missing: int = 0
  waiting: list[int] = dataclasses.field(default_factory=list)
  ready_s: float = math.nan
  start_s: float = math.nan
  end_s: float = math.nan
  done_s: float = math.nan
  span: Span | None = None


class Simulator:
  """Takes a description of places and operations, and runs it once.

  A scheduler that decides while time passes adds operations from `then` or
  `at`, which are called inside `run`.
  """

  def __init__(self) -> None:
    self._names: dict[str, int] = {}
    # Place 0 is nowhere: delays and joins, any number at once.
    self._places: list[Any] = [Device("", math.inf)]
    self._free: list[float] = [math.inf]
    self._ready: list[list[tuple[float, int]]] = [[]]
    self._pools: list[Pool] = []
    self._left: list[float] = []
    self._pool_names: dict[str, int] = {}
    # Places where something waits for a pool.
    self._short: list[set[int]] = []
    self._ops: list[_State] = []
    self._events: list[tuple[float, int, int, Any]] = []
    self._count = 0
    self._changed: set[int] = set()
    self._now = 0.0
    self._running = False
    self._over = False

  @property
  def now_s(self) -> Number:
    """The time at which `then` or `at` is called."""
    return self._now

  def device(self, name: str, slots: Number = 1) -> Device:
    """Adds a device.

    Raises:
      OptionError: the name is taken or there are no slots.
    """
    if not slots >= 1:
      raise OptionError("slots", slots, "1 or more", "pass slots=1")
    return self._add(Device(name, slots), slots)

  def link(
    self, name: str, bandwidth: Number, latency_s: Number = 0.0
  ) -> Channel:
    """Adds a one-way link of `bandwidth` bytes per second.

    Raises:
      OptionError: the name is taken, or nothing can pass.
    """
    link = Link(bandwidth=bandwidth, latency_s=latency_s)
    return self._add(Channel(name, link), 1)

  def pool(self, name: str, size: Number) -> Pool:
    """Adds a pool that is full.

    Raises:
      OptionError: the name is taken or the size is none.
    """
    _check("size", size)
    if name in self._pool_names:
      raise _taken("pool", name)
    self._pool_names[name] = len(self._pools)
    self._pools.append(Pool(name, size))
    self._left.append(size)
    self._short.append(set())
    return self._pools[-1]

  def op(
    self,
    name: str,
    where: Device | None = None,
    seconds: Number | Callable[[float], Number] = 0.0,
    *,
    after: Iterable[Op] = (),
    kind: str = "",
    priority: Number = 0.0,
    release_s: Number = 0.0,
    take: Mapping[Pool, Number] | None = None,
    give: Mapping[Pool, Number] | None = None,
    then: Callable[[Span], None] | None = None,
  ) -> Op:
    """Adds work.

    Args:
      name: for people; need not be unique.
      where: the device; None is a delay that needs none.
      seconds: how long it takes, or a function of when it starts.
      after: what has to be done before.
      kind: its group, for pictures and sums.
      priority: higher goes first where several wait.
      release_s: not before this time.
      take: what it takes from pools when it starts.
      give: what it puts into pools when it is done.
      then: called with its span when it is done; may add operations.

    Returns:
      A handle.

    Raises:
      OptionError: a number that is none, or a place that is not this
        simulator's.
    """
    place = 0 if where is None else self._place(where)
    if not callable(seconds):
      _check("seconds", seconds)
    return self._describe(
      name, place, seconds, 0.0, 0.0, after, kind, priority, release_s,
      take, give, then,
    )  # fmt: skip

  def send(
    self,
    name: str,
    channel: Channel,
    nbytes: Number,
    *,
    slowdown: Number = 1.0,
    after: Iterable[Op] = (),
    kind: str = "send",
    priority: Number = 0.0,
    release_s: Number = 0.0,
    take: Mapping[Pool, Number] | None = None,
    give: Mapping[Pool, Number] | None = None,
    then: Callable[[Span], None] | None = None,
  ) -> Op:
    """Adds a message of `nbytes`; it is done when it has arrived.

    `slowdown` divides the bandwidth for this message alone; the other
    arguments are those of `op`.

    Raises:
      OptionError: as `op`.
    """
    _check("nbytes", nbytes)
    _check("slowdown", slowdown)
    place, link = self._place(channel), channel.link
    seconds = nbytes / link.bandwidth * slowdown
    return self._describe(
      name, place, seconds, link.latency_s, nbytes, after, kind, priority,
      release_s, take, give, then,
    )  # fmt: skip

  def at(self, time_s: Number, call: Callable[[], None]) -> None:
    """Calls `call` at a time; there it may add operations.

    Raises:
      OptionError: the time has passed.
    """
    _check("time_s", time_s)
    if time_s < self._now:
      raise OptionError("time_s", time_s, f"{self._now} or later", "raise it")
    self._post(time_s, _CALL, call)

  def run(self) -> Timeline:
    """Runs all that was described.

    Raises:
      OptionError: some operations can never start, or it ran before.
    """
    if self._over or self._running:
      raise OptionError(
        "run", "a second call", "one", "describe a new Simulator"
      )
    self._running = True
    for index, state in enumerate(self._ops):
      if not state.missing:
        self._release(index)
    while True:
      self._start_all()
      if not self._events:
        break
      self._now = self._events[0][0]
      while self._events and self._events[0][0] == self._now:
        _, _, what, subject = heapq.heappop(self._events)
        self._handle(what, subject)
    self._over = True
    self._refuse_rest()
    return Timeline(tuple(s.span for s in self._ops if s.span is not None))

  # Describing.

  def _add(self, place: Any, slots: Number) -> Any:
    if place.name in self._names or not place.name:
      raise _taken("name", place.name)
    self._names[place.name] = len(self._places)
    self._places.append(place)
    self._free.append(slots)
    self._ready.append([])
    return place

  def _place(self, place: Device | Channel) -> int:
    index = self._names.get(place.name, 0)
    if not index or self._places[index] is not place:
      raise OptionError(
        "where",
        place.name,
        "a device or link of this simulator",
        "make it with its device() or link()",
      )
    return index

  def _amounts(
    self, name: str, given: Mapping[Pool, Number] | None
  ) -> tuple[tuple[int, Number], ...]:
    found = []
    for pool, amount in (given or {}).items():
      index = self._pool_names.get(pool.name, -1)
      if index < 0 or self._pools[index] is not pool:
        raise OptionError(
          name, pool.name, "a pool of this simulator", "make it with pool()"
        )
      _check(name, amount)
      if amount > pool.size:
        raise OptionError(
          name,
          f"{amount} of {pool.name}",
          f"{pool.size} at most",
          "make the pool larger",
        )
      found.append((index, amount))
    return tuple(found)

  def _describe(
    self,
    name: str,
    place: int,
    seconds: Any,
    latency_s: Number,
    nbytes: Number,
    after: Iterable[Op],
    kind: str,
    priority: Number,
    release_s: Number,
    take: Mapping[Pool, Number] | None,
    give: Mapping[Pool, Number] | None,
    then: Callable[[Span], None] | None,
  ) -> Op:
    _check("release_s", release_s)
    if math.isnan(priority):
      raise OptionError("priority", priority, "a number", "pass 0")
    if self._over:
      raise OptionError(
        "op", name, "it before the end of run()", "add it earlier"
      )
    index = len(self._ops)
    state = _State(
      name,
      kind,
      place,
      seconds,
      latency_s,
      nbytes,
      priority,
      release_s,
      self._amounts("take", take),
      self._amounts("give", give),
      then,
    )
    before = {}
    for op in after:
      known = op.index < index and self._ops[op.index].name == op.name
      if not known:
        raise OptionError(
          "after", op, "operations of this simulator", "describe them first"
        )
      if self._ops[op.index].span is None:
        before[op.index] = None
    for earlier in before:
      self._ops[earlier].waiting.append(index)
    state.missing = len(before)
    self._ops.append(state)
    if self._running and not state.missing:
      self._release(index)
    return Op(index, name)

  # Running.

  def _post(self, time_s: Number, what: int, subject: Any) -> None:
    heapq.heappush(self._events, (time_s, self._count, what, subject))
    self._count += 1

  def _release(self, index: int) -> None:
    state = self._ops[index]
    if state.release_s > self._now:
      self._post(state.release_s, _READY, index)
    else:
      self._enqueue(index)

  def _enqueue(self, index: int) -> None:
    state = self._ops[index]
    state.ready_s = self._now
    heapq.heappush(self._ready[state.where], (-state.priority, index))
    self._changed.add(state.where)

  def _handle(self, what: int, subject: Any) -> None:
    if what == _CALL:
      subject()
      return
    if what == _READY:
      self._enqueue(subject)
      return
    state = self._ops[subject]
    if what == _FREE:
      self._free[state.where] += 1
      self._changed.add(state.where)
      return
    for pool, amount in state.give:
      self._left[pool] += amount
      if self._left[pool] > self._pools[pool].size:
        raise OptionError(
          "give",
          f"{self._left[pool]} in {self._pools[pool].name}",
          f"{self._pools[pool].size} at most",
          "give back only what was taken",
        )
      self._changed |= self._short[pool]
      self._short[pool].clear()
    state.span = Span(
      state.name,
      state.kind,
      self._places[state.where].name,
      state.ready_s,
      state.start_s,
      state.end_s,
      state.done_s,
      state.nbytes,
    )
    for index in state.waiting:
      later = self._ops[index]
      later.missing -= 1
      if not later.missing:
        self._release(index)
    if state.then is not None:
      state.then(state.span)

  def _start_all(self) -> None:
    while self._changed:
      # Pools are shared between places: the earliest described goes first.
      for place in sorted(self._changed):
        self._changed.discard(place)
        self._start(place)

  def _start(self, place: int) -> None:
    ready, passed = self._ready[place], []
    while ready and self._free[place] >= 1:
      entry = heapq.heappop(ready)
      state = self._ops[entry[1]]
      lacking = [p for p, n in state.take if self._left[p] < n]
      if lacking:
        for pool in lacking:
          self._short[pool].add(place)
        passed.append(entry)
        continue
      for pool, amount in state.take:
        self._left[pool] -= amount
      self._begin(entry[1], state)
    for entry in passed:
      heapq.heappush(ready, entry)

  def _begin(self, index: int, state: _State) -> None:
    seconds = state.seconds
    if callable(seconds):
      seconds = seconds(self._now)
      _check("seconds", seconds)
    state.start_s = self._now
    state.end_s = self._now + seconds
    state.done_s = state.end_s + state.latency_s
    if state.where:
      self._free[state.where] -= 1
      self._post(state.end_s, _FREE, index)
    self._post(state.done_s, _DONE, index)

  def _refuse_rest(self) -> None:
    stuck = [s for s in self._ops if s.span is None]
    if not stuck:
      return
    # Those behind others are stuck because of them.
    first = [s for s in stuck if not s.missing]
    names = ", ".join(s.name for s in first[:3])
    pools = sorted({self._pools[p].name for s in first for p, _ in s.take})
    raise OptionError(
      "operations",
      f"{len(stuck)} that never start, first {names}",
      f"all to end; nobody gives back to {', '.join(pools)}",
      "make the pools larger or add give=",
    )


def _check(name: str, value: Number) -> None:
  if not 0 <= value < math.inf:
    raise OptionError(name, value, "a finite number, 0 or more", "correct it")


def _taken(what: str, name: str) -> OptionError:
  return OptionError(
    what, repr(name), "a name that is not taken", "choose another"
  )
