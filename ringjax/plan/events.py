"""A discrete-event simulator of operations on devices and links.

Guarantees: the same operations give the same timeline, on every machine and
in every process; nothing is random and no clock is read. All operations that
end at one instant are handled before any starts there, so that a free slot
goes to the waiting operation of the highest priority, whichever ended first.
A running operation is not interrupted.

  device   runs `slots` operations at once, the others wait
  link     carries one message at a time: `nbytes / bandwidth` seconds, and
           the message has arrived `latency_s` later
  pool     a count of interchangeable items (buffers, credits, pages) that an
           operation takes when it starts and another gives back when it ends

Of the operations that wait for a device or link the one of the highest
priority starts first, then the one that was described first; an operation that
waits for a pool lets others pass.

Cost: O(log n) an operation and dependency.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link

# A number of seconds, bytes or slots: callers may write 1 or 1.0.
Number = int | float


@dataclasses.dataclass(frozen=True)
class Device:
  """A device that runs operations.

  Attributes:
    name: Name, unique in its simulator.
    slots: Number of operations that run at once.
  """

  name: str
  slots: Number = 1


@dataclasses.dataclass(frozen=True)
class Channel:
  """One direction of a link, which carries one message at a time.

  Attributes:
    name: Name, unique in its simulator.
    link: Bandwidth, and latency from the last byte's departure to its arrival.
  """

  name: str
  link: Link


@dataclasses.dataclass(frozen=True)
class Pool:
  """A count of interchangeable items.

  Attributes:
    name: Name, unique in its simulator.
    size: Number of items.
  """

  name: str
  size: Number


@dataclasses.dataclass(frozen=True)
class Span:
  """Execution record of one operation; times in seconds from the start.

  Attributes:
    name: Name of the operation.
    kind: Group of the operation, for pictures and sums.
    resource: Name of the device or link; "" for neither.
    ready_s: Time when its dependencies and its release time were met.
    start_s: Start time.
    end_s: Time when its slot was free again.
    done_s: Time when operations that depend on it may begin; after `end_s` by
      the latency of a link.
    nbytes: Number of bytes that it sent.
  """

  name: str
  kind: str
  resource: str
  ready_s: Number
  start_s: Number
  end_s: Number
  done_s: Number
  nbytes: Number = 0.0


@dataclasses.dataclass(frozen=True)
class Op:
  """Handle of an operation, for `after` and to find its span."""

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
    """Time when all operations are done; 0 if there were none."""
    return max((span.done_s for span in self.spans), default=0.0)

  def of(self, where: str) -> tuple[Span, ...]:
    """Spans of a device or link, in the order of their start."""
    spans = (span for span in self.spans if span.resource == where)
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))

  def busy_s(self, where: str) -> float:
    """Seconds of work on a device or link, summed over slots."""
    return math.fsum(span.end_s - span.start_s for span in self.of(where))

  def idle(self, where: str) -> float:
    """Fraction of the time in which a device with one slot is idle."""
    if not self.finish_s:
      return 1.0
    return 1 - self.busy_s(where) / float(self.finish_s)

  def sent_bytes(self) -> dict[str, Number]:
    """Total bytes sent, by link."""
    bytes_by_link: dict[str, Number] = {}
    for span in self.spans:
      if span.nbytes:
        bytes_by_link[span.resource] = (
          bytes_by_link.get(span.resource, 0.0) + span.nbytes
        )
    return bytes_by_link


_Place = TypeVar("_Place", Device, Channel)


@dataclasses.dataclass(eq=False, slots=True)
class _Queue:
  """State of a device or link: free slots and waiting operations."""

  place: Channel | Device
  index: int
  free: Number
  # A heap of (-priority, index, operation).
  ready: list[tuple[Number, int, _State]] = dataclasses.field(
    default_factory=list
  )


@dataclasses.dataclass(eq=False, slots=True)
class _Stock:
  """State of a pool.

  `short` has the indices of the queues in which an operation waits for it.
  """

  pool: Pool
  free: Number
  short: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False, slots=True)
class _State:
  """State of an operation."""

  index: int
  name: str
  kind: str
  queue: _Queue
  seconds: Number | Callable[[float], Number]
  priority: Number
  release_s: Number
  take: list[tuple[_Stock, Number]]
  give: list[tuple[_Stock, Number]]
  on_end: Callable[[Span], None] | None
  latency_s: Number = 0.0
  nbytes: Number = 0.0
  missing: int = 0
  waiting: list[_State] = dataclasses.field(default_factory=list)
  ready_s: float = math.nan
  # Its start and end times.
  ran: tuple[float, float] = (math.nan, math.nan)
  span: Span | None = None


class Simulator:
  """Runs a description of devices, links and operations, once.

  A scheduler that decides while time passes adds operations from `then` or
  `at`, which are called inside `run`.
  """

  def __init__(self) -> None:
    # Queue 0 is for operations without a device: delays and joins.
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
    """Current time, inside a call of `then` or `at`."""
    return self._now

  def device(self, name: str, slots: Number = 1) -> Device:
    """Add a device.

    Raises:
      OptionError: If the name is taken or there are no slots.
    """
    if not slots >= 1:
      raise OptionError("slots", slots, "1 or more", "pass slots=1")
    return self._add(Device(name, slots), slots)

  def link(
    self, name: str, bandwidth: Number, latency_s: Number = 0.0
  ) -> Channel:
    """Add a one-way link of `bandwidth` bytes per second.

    Raises:
      OptionError: If the name is taken, or the bandwidth is not above 0.
    """
    link = Link(bandwidth=bandwidth, latency_s=latency_s)
    return self._add(Channel(name, link), 1)

  def pool(self, name: str, size: Number) -> Pool:
    """Add a pool that is full.

    Raises:
      OptionError: If the name is taken or the size is negative.
    """
    number("size", size, least=0)
    if name in self._stocks:
      raise _name_taken("pool", name)
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
    """Add an operation.

    Args:
      name: Name for reports; need not be unique.
      where: Device or link; None is a delay that needs neither.
      seconds: Duration, or a function of the start time.
      after: Operations that have to be done before.
      kind: Group, for pictures and sums.
      priority: Priority among waiting operations; the highest starts first.
      release_s: Earliest start.
      take: Amounts that it takes from pools when it starts.
      give: Amounts that it puts into pools when it is done.
      then: Function called with its span when it is done; may add operations.

    Returns:
      Handle of the operation.

    Raises:
      OptionError: If a number is out of range, or a device, pool or operation
        belongs to another simulator.
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
    dependencies = set(after)
    for dependency in dependencies:
      if not (
        dependency.index < index
        and self._ops[dependency.index].name == dependency.name
      ):
        raise _foreign("after", dependency.name, "operation")
    for dependency in dependencies:
      if self._ops[dependency.index].span is None:
        self._ops[dependency.index].waiting.append(state)
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
    """Add a message of `nbytes`; it is done when it has arrived.

    Args:
      name: Name for reports; need not be unique.
      channel: Link that carries it.
      nbytes: Size in bytes.
      slowdown: Factor on this message's transfer time.
      kind: Group, for pictures and sums.
      **options: Other options of `op`.

    Raises:
      OptionError: As in `op`.
    """
    number("nbytes", nbytes, least=0)
    number("slowdown", slowdown, least=0)
    seconds = nbytes / channel.link.bandwidth * slowdown
    op = self.op(name, channel, seconds, kind=kind, **options)
    state = self._ops[op.index]
    state.nbytes, state.latency_s = nbytes, channel.link.latency_s
    return op

  def at(self, time_s: Number, call: Callable[[], None]) -> None:
    """Call `call` at a time; it may add operations.

    Raises:
      OptionError: If the time has passed.
    """
    number("time_s", time_s, least=self._now)
    self._post(time_s, call)

  def run(self) -> Timeline:
    """Run all operations that were described.

    Raises:
      OptionError: If some operations can never start, or it ran before.
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
    self._refuse_stuck()
    return Timeline(
      tuple(state.span for state in self._ops if state.span is not None)
    )

  # Description.

  def _add(self, place: _Place, slots: Number) -> _Place:
    if place.name in self._by_name or not place.name:
      raise _name_taken("name", place.name)
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
    self, name: str, amounts_by_pool: Mapping[Pool, Number] | None
  ) -> list[tuple[_Stock, Number]]:
    amounts = []
    for pool, amount in (amounts_by_pool or {}).items():
      stock = self._stocks.get(pool.name)
      if stock is None or stock.pool is not pool:
        raise _foreign(name, pool.name, "pool")
      remedy = f"pass less, or make the pool {pool.name} larger"
      number(name, amount, least=0, most=pool.size, remedy=remedy)
      amounts.append((stock, amount))
    return amounts

  # Execution.

  def _post(self, time_s: Number, call: Callable[[], None]) -> None:
    heapq.heappush(self._events, (time_s, next(self._numbers), call))

  def _release(self, state: _State) -> None:
    """Queue an operation whose dependencies are done, at its release time."""
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
      stock.free += amount
      if stock.free > stock.pool.size:
        raise OptionError(
          "give",
          f"{stock.free} in {stock.pool.name}",
          f"{stock.pool.size} at most",
          "give back only what was taken",
        )
      self._changed |= stock.short
      stock.short.clear()
    place_name, times = state.queue.place.name, (state.ready_s, *state.ran)
    state.span = Span(
      state.name, state.kind, place_name, *times, self._now, state.nbytes
    )
    for dependent in state.waiting:
      dependent.missing -= 1
      if not dependent.missing:
        self._release(dependent)
    if state.on_end is not None:
      state.on_end(state.span)

  def _start_all(self) -> None:
    while self._changed:
      # Pools are shared between queues: the earliest described goes first.
      for index in sorted(self._changed):
        self._changed.discard(index)
        self._start(self._queues[index])

  def _start(self, queue: _Queue) -> None:
    skipped = []
    while queue.ready and queue.free >= 1:
      entry = heapq.heappop(queue.ready)
      state = entry[2]
      lacking = [stock for stock, amount in state.take if stock.free < amount]
      if lacking:
        for stock in lacking:
          stock.short.add(queue.index)
        skipped.append(entry)
        continue
      for stock, amount in state.take:
        stock.free -= amount
      self._begin(state)
    for entry in skipped:
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
    finish = functools.partial(self._finish, state)
    self._post(end_s + state.latency_s, finish)

  def _refuse_stuck(self) -> None:
    """Raise if operations never started, because they wait for a pool."""
    stuck = [state for state in self._ops if state.span is None]
    if not stuck:
      return
    # The others wait for these.
    unblocked = [state for state in stuck if not state.missing]
    names = ", ".join(state.name for state in unblocked[:3])
    pools = sorted(
      {stock.pool.name for state in unblocked for stock, _ in state.take}
    )
    raise OptionError(
      "operations",
      f"{len(stuck)} that never start, first {names}",
      f"all to end; no operation gives back to {', '.join(pools)}",
      "make the pools larger or add give=",
    )


def _foreign(argument: str, name: str, kind: str) -> OptionError:
  return OptionError(
    argument, name, f"a {kind} of this simulator", "add it to this one"
  )


def _name_taken(argument: str, name: str) -> OptionError:
  return OptionError(
    argument, repr(name), "a name that is not taken", "pass another name"
  )
