"""A discrete-event simulator: operations on devices and links.

Guarantees: the same operations give the same timeline, on every machine and
in every process; nothing is random and no clock is read. All operations that
end at one instant are handled before any starts there, so that a free slot
goes to the waiting operation of the highest priority, whichever ended first.
A running operation is not interrupted.

  device   runs `slots` operations at once, the others wait
  link     carries one message at a time: `nbytes / bandwidth` seconds, and
           the message has arrived `latency_s` later
  pool     a count of equal things (buffers, credits, pages) that an operation
           takes when it starts and another gives back when it ends

Of the operations that wait for a device or link the one of the highest
priority starts first, then the one that was described first; one that lacks
something of a pool lets others pass.

Cost: O(log n) an operation and dependency.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link

# A number of seconds, bytes, slots: what a caller may write as 1 or as 1.0.
Number = int | float


@dataclasses.dataclass(frozen=True)
class Device:
  """A device that runs operations.

  Attributes:
    name: unique in its simulator.
    slots: operations that run at once.
  """

  name: str
  slots: Number = 1


@dataclasses.dataclass(frozen=True)
class Channel:
  """One direction of a link, which carries one message at a time.

  Attributes:
    name: unique in its simulator.
    link: bandwidth, and latency from the last byte's leaving to its arrival.
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
  """Execution record of one operation; times in seconds from the start.

  Attributes:
    name: of the operation.
    kind: its group, for pictures and sums.
    where: name of the device or link; "" is neither.
    ready_s: when its dependencies and its release time were met.
    start_s: when it began.
    end_s: when its slot was free again.
    done_s: when operations that depend on it may begin; behind `end_s` by the
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
    """When all operations are done; 0 if there were none."""
    return max((s.done_s for s in self.spans), default=0.0)

  def of(self, where: str) -> tuple[Span, ...]:
    """The spans of a device or link, in order of their start."""
    found = (s for s in self.spans if s.where == where)
    return tuple(sorted(found, key=lambda s: (s.start_s, s.end_s)))

  def busy_s(self, where: str) -> float:
    """Seconds of work on a device or link; slots add up."""
    return math.fsum(s.end_s - s.start_s for s in self.of(where))

  def idle(self, where: str) -> float:
    """Part of the time in which a device of one slot does nothing."""
    return 1 - self.busy_s(where) / float(self.finish_s)

  def sent_bytes(self) -> dict[str, Number]:
    """Bytes by link."""
    found: dict[str, Number] = {}
    for s in self.spans:
      if s.nbytes:
        found[s.where] = found.get(s.where, 0.0) + s.nbytes
    return found


@dataclasses.dataclass(eq=False, slots=True)
class _Queue:
  """A device or link while it is simulated: free slots, waiting operations."""

  place: Channel | Device
  index: int
  free: Number
  # A heap of (-priority, index, operation).
  ready: list[tuple[Number, int, _State]] = dataclasses.field(
    default_factory=list
  )


@dataclasses.dataclass(eq=False, slots=True)
class _Stock:
  """A pool while it is simulated.

  `short` has the indices of the queues in which an operation waits for it.
  """

  pool: Pool
  left: Number
  short: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False, slots=True)
class _State:
  """An operation while it is simulated."""

  index: int
  name: str
  kind: str
  queue: _Queue
  seconds: Number | Callable[[float], Number]
  priority: Number
  release_s: Number
  take: list[tuple[_Stock, Number]]
  give: list[tuple[_Stock, Number]]
  then: Callable[[Span], None] | None
  latency_s: Number = 0.0
  nbytes: Number = 0.0
  missing: int = 0
  waiting: list[_State] = dataclasses.field(default_factory=list)
  ready_s: float = math.nan
  # Its start and its end.
  ran: tuple[float, float] = (math.nan, math.nan)
  span: Span | None = None


class Simulator:
  """Takes a description of devices, links and operations, and runs it once.

  A scheduler that decides while time passes adds operations from `then` or
  `at`, which are called inside `run`.
  """

  def __init__(self) -> None:
    # Queue 0 is of operations on no device: delays and joins.
    self._queues = [_Queue(Device("", math.inf), 0, math.inf)]
    self._by_name: dict[str, _Queue] = {}
    self._stocks: dict[str, _Stock] = {}
    self._ops: list[_State] = []
    # A heap of (time, number, call).
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._numbers = itertools.count()
    # Indices of the queues in which an operation may start now.
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
      OptionError: the name is taken, or the bandwidth is not above 0.
    """
    link = Link(bandwidth=bandwidth, latency_s=latency_s)
    return self._add(Channel(name, link), 1)

  def pool(self, name: str, size: Number) -> Pool:
    """Adds a pool that is full.

    Raises:
      OptionError: the name is taken or the size is negative.
    """
    number("size", size, least=0)
    if name in self._stocks:
      raise _taken("pool", name)
    self._stocks[name] = _Stock(Pool(name, size), size)
    return self._stocks[name].pool

  def op(
    self,
    name: str,
    where: Device | Channel | None = None,
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
    """Adds an operation.

    Args:
      name: for people; need not be unique.
      where: the device; None is a delay that needs none.
      seconds: how long it takes, or a function of when it starts.
      after: operations that have to be done before.
      kind: its group, for pictures and sums.
      priority: of several that wait, the highest starts first.
      release_s: the earliest start.
      take: what it takes from pools when it starts.
      give: what it puts into pools when it is done.
      then: called with its span when it is done; may add operations.

    Returns:
      A handle.

    Raises:
      OptionError: a number out of its range, or a device, pool or operation of
        another simulator.
    """
    queue = self._queues[0] if where is None else self._queue(where)
    if not callable(seconds):
      number("seconds", seconds, least=0)
    number("release_s", release_s, least=0)
    if math.isnan(priority):
      raise OptionError("priority", priority, "a number", "pass 0")
    if self._over:
      raise OptionError(
        "op", name, "an operation before the end of run()", "add it earlier"
      )
    index = len(self._ops)
    state = _State(
      index,
      name,
      kind,
      queue,
      seconds,
      priority,
      release_s,
      self._amounts("take", take),
      self._amounts("give", give),
      then,
    )
    before = set(after)
    for one in before:
      if not (one.index < index and self._ops[one.index].name == one.name):
        raise _foreign("after", one.name, "operation")
    for one in before:
      if self._ops[one.index].span is None:
        self._ops[one.index].waiting.append(state)
        state.missing += 1
    self._ops.append(state)
    if self._running and not state.missing:
      self._release(state)
    return Op(index, name)

  def send(
    self,
    name: str,
    channel: Channel,
    nbytes: Number,
    *,
    slowdown: Number = 1.0,
    kind: str = "send",
    **options: Any,
  ) -> Op:
    """Adds a message of `nbytes`; it is done when it has arrived.

    Args:
      name: for people; need not be unique.
      channel: the link.
      nbytes: of the message.
      slowdown: divides the bandwidth for this message alone.
      kind: its group, for pictures and sums.
      **options: the others of `op`.

    Raises:
      OptionError: as `op`.
    """
    number("nbytes", nbytes, least=0)
    number("slowdown", slowdown, least=0)
    seconds = nbytes / channel.link.bandwidth * slowdown
    made = self.op(name, channel, seconds, kind=kind, **options)
    state = self._ops[made.index]
    state.nbytes, state.latency_s = nbytes, channel.link.latency_s
    return made

  def at(self, time_s: Number, call: Callable[[], None]) -> None:
    """Calls `call` at a time; there it may add operations.

    Raises:
      OptionError: the time has passed.
    """
    number("time_s", time_s, least=self._now)
    self._post(time_s, call)

  def run(self) -> Timeline:
    """Runs all operations that were described.

    Raises:
      OptionError: some operations can never start, or it ran before.
    """
    if self._over or self._running:
      raise OptionError(
        "run", "a second call", "one", "describe a new Simulator"
      )
    self._running = True
    for state in tuple(self._ops):
      if not state.missing:
        self._release(state)
    while True:
      self._start_all()
      if not self._events:
        break
      self._now = self._events[0][0]
      while self._events and self._events[0][0] == self._now:
        heapq.heappop(self._events)[2]()
    self._over = True
    self._refuse_rest()
    return Timeline(tuple(s.span for s in self._ops if s.span is not None))

  # Describing.

  def _add(self, place: Channel | Device, slots: Number) -> Any:
    if place.name in self._by_name or not place.name:
      raise _taken("name", place.name)
    queue = _Queue(place, len(self._queues), slots)
    self._queues.append(queue)
    self._by_name[place.name] = queue
    return place

  def _queue(self, place: Device | Channel) -> _Queue:
    queue = self._by_name.get(place.name)
    if queue is None or queue.place is not place:
      raise _foreign("where", place.name, "device or link")
    return queue

  def _amounts(
    self, name: str, given: Mapping[Pool, Number] | None
  ) -> list[tuple[_Stock, Number]]:
    found = []
    for pool, amount in (given or {}).items():
      stock = self._stocks.get(pool.name)
      if stock is None or stock.pool is not pool:
        raise _foreign(name, pool.name, "pool")
      remedy = f"pass less, or make the pool {pool.name} larger"
      number(name, amount, least=0, most=pool.size, remedy=remedy)
      found.append((stock, amount))
    return found

  # Running.

  def _post(self, time_s: Number, call: Callable[[], None]) -> None:
    heapq.heappush(self._events, (time_s, next(self._numbers), call))

  def _release(self, state: _State) -> None:
    """Queues an operation whose dependencies are done, at its release."""
    if state.release_s > self._now:
      self._post(state.release_s, functools.partial(self._release, state))
      return
    state.ready_s = self._now
    heapq.heappush(state.queue.ready, (-state.priority, state.index, state))
    self._changed.add(state.queue.index)

  def _free(self, queue: _Queue) -> None:
    queue.free += 1
    self._changed.add(queue.index)

  def _finish(self, state: _State) -> None:
    for stock, amount in state.give:
      stock.left += amount
      if stock.left > stock.pool.size:
        raise OptionError(
          "give",
          f"{stock.left} in {stock.pool.name}",
          f"{stock.pool.size} at most",
          "give back only what was taken",
        )
      self._changed |= stock.short
      stock.short.clear()
    where, times = state.queue.place.name, (state.ready_s, *state.ran)
    state.span = Span(
      state.name, state.kind, where, *times, self._now, state.nbytes
    )
    for later in state.waiting:
      later.missing -= 1
      if not later.missing:
        self._release(later)
    if state.then is not None:
      state.then(state.span)

  def _start_all(self) -> None:
    while self._changed:
      # Pools are shared between queues: the earliest described goes first.
      for index in sorted(self._changed):
        self._changed.discard(index)
        self._start(self._queues[index])

  def _start(self, queue: _Queue) -> None:
    passed = []
    while queue.ready and queue.free >= 1:
      entry = heapq.heappop(queue.ready)
      state = entry[2]
      lacking = [stock for stock, amount in state.take if stock.left < amount]
      if lacking:
        for stock in lacking:
          stock.short.add(queue.index)
        passed.append(entry)
        continue
      for stock, amount in state.take:
        stock.left -= amount
      self._begin(state)
    for entry in passed:
      heapq.heappush(queue.ready, entry)

  def _begin(self, state: _State) -> None:
    seconds = state.seconds
    if callable(seconds):
      seconds = seconds(self._now)
      number("seconds", seconds, least=0)
    end_s = self._now + seconds
    state.ran = self._now, end_s
    if state.queue.index:
      state.queue.free -= 1
      self._post(end_s, functools.partial(self._free, state.queue))
    done = functools.partial(self._finish, state)
    self._post(end_s + state.latency_s, done)

  def _refuse_rest(self) -> None:
    """Refuses operations that never started, which wait for a pool."""
    stuck = [s for s in self._ops if s.span is None]
    if not stuck:
      return
    # The others wait for these.
    first = [s for s in stuck if not s.missing]
    names = ", ".join(s.name for s in first[:3])
    pools = sorted({stock.pool.name for s in first for stock, _ in s.take})
    raise OptionError(
      "operations",
      f"{len(stuck)} that never start, first {names}",
      f"all to end; no operation gives back to {', '.join(pools)}",
      "make the pools larger or add give=",
    )


def _foreign(argument: str, name: str, thing: str) -> OptionError:
  return OptionError(
    argument, name, f"a {thing} of this simulator", "add it to this one"
  )


def _taken(what: str, name: str) -> OptionError:
  return OptionError(
    what, repr(name), "a name that is not taken", "pass another name"
  )
