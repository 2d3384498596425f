"""Every interleaving of the protocol on a small system, checked.

Guarantees: `explore` visits each state that a publisher and its readers can
reach: messages arrive in any order, late, twice or never; leases expire,
tickets are withdrawn and pulls cancelled at any time; the publisher crashes
at any time and starts again; pages that return are written at once. It
returns the shortest way to a state that must not be, if there is one.
Cost: some tens of thousands of states, a few seconds.

The network never forgets: a message that was sent may be delivered from then
on, any number of times. A reader that crashed is one to which no message is
delivered any more, so each state stands for a crash in it too. Publishers
share no state, and a pull is of one publisher; the states of several
publishers are therefore all combinations of the states of each
(`explore_several` shows this on smaller systems).

What is checked in each state:
  accepts  a reader accepts only bytes that the pages had at publication, from
           the first to the last byte of the read
  behind   COMPLETE is sent only behind the last byte
  once     a page is released only while it is held
  early    a ticket stays open until all its readers have ended, unless it
           expires or is withdrawn
  back     if nothing arrives any more, reads end and leases expire, every
           page returns
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from ringjax.transfer import protocol as _protocol


@dataclasses.dataclass(frozen=True)
class PullScenario:
  """One publisher, its first ticket and who pulls what of it.

  Attributes:
    pages: of the first ticket.
    readers: that the ticket is for.
    pulls: of each reader, its reads, each the pages that it asks for.
    second: pages of a ticket that may be published at any time.
    window: reads that a reader asks for at once.
  """

  pages: tuple[int, ...]
  readers: int
  pulls: tuple[tuple[tuple[int, ...], ...], ...]
  second: tuple[int, ...] = ()
  window: int = 2


@dataclasses.dataclass(frozen=True)
class ProtocolReport:
  """What an exploration found.

  Attributes:
    states: how many were visited.
    steps: how many events were tried.
    accepted: states in which all readers have their pages.
    fault: which check failed, or "".
    trace: the events that lead there.
  """

  states: int
  steps: int
  accepted: int
  fault: str = ""
  trace: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _World:
  """A publisher, its readers, the network and the memory of the pages.

  `stale`: pages that were written since the first ticket; `held`: pages that
  are published; `sending`: reads under way, and whether all bytes were right
  when they began; `sent`: messages, as bits; `taken_back`: the first ticket
  expired or was withdrawn.
  """

  publisher: Any
  pulls: tuple[Any, ...]
  sent: int
  stale: frozenset[int]
  held: frozenset[int]
  sending: frozenset[tuple[Any, Any, bool]]
  lives: int = 1
  seconds: int = 0
  taken_back: bool = False

  @functools.cached_property
  def _hash(self) -> int:
    parts = (self.publisher, self.pulls, self.sent, self.stale)
    more = self.lives, self.seconds, self.taken_back
    return hash((parts, self.held, self.sending, more))

  def __hash__(self) -> int:
    return self._hash


class _Fault(Exception):
  """A check failed."""


class _Explorer:
  """The moves of one scenario, under one version of the protocol."""

  def __init__(self, scenario: PullScenario, protocol: types.ModuleType):
    self.scenario, self.p = scenario, protocol
    self.messages: list[tuple[Any, bool]] = []
    self.bits: dict[tuple[Any, bool], int] = {}
    self._publisher = functools.cache(protocol.publisher_step)
    self._pull = functools.cache(protocol.pull_step)
    self._returns = functools.cache(self._returns_at_the_end)
    self.steps = 0

  def start(self) -> _World:
    """The first ticket is published and all pulls have begun."""
    p, scenario = self.p, self.scenario
    publisher, _ = p.publisher_step(
      p.start_publisher(0), p.PublishPages(scenario.pages, scenario.readers)
    )
    keys = dict(publisher.tickets[0].pages)
    world = _World(
      publisher,
      (),
      0,
      frozenset(),
      frozenset(scenario.pages),
      frozenset(),
    )
    for n, reads in enumerate(scenario.pulls):
      runs = [[(page, keys[page]) for page in run] for run in reads]
      pull, actions = p.start_pull(
        0, 0, f"reader {n}", runs, window=scenario.window
      )
      world = dataclasses.replace(world, pulls=(*world.pulls, pull))
      world = self._send(world, actions)
    return world

  def _send(self, world: _World, actions: Sequence[Any]) -> _World:
    sent = world.sent
    for action in actions:
      sent |= self._bit(action.message, True)
    return dataclasses.replace(world, sent=sent)

  def _bit(self, message: Any, right: bool) -> int:
    key = (message, right)
    if key not in self.bits:
      self.bits[key] = 1 << len(self.messages)
      self.messages.append(key)
    return self.bits[key]

  # -------------------------------------------------------------------------
  # Moves
  # -------------------------------------------------------------------------

  def moves(self, world: _World) -> Iterator[tuple[Any, _World]]:
    """What can happen next; each with the state that it leads to."""
    p = self.p
    for ticket in world.publisher.tickets:
      for event in (p.LeaseExpired(ticket), p.WithdrawTicket(ticket)):
        after = self._publisher_event(world, event)
        if ticket == 0:
          after = dataclasses.replace(after, taken_back=True)
        yield event, after
    if self.scenario.second and not world.seconds:
      event = p.PublishPages(self.scenario.second, 1)
      after = self._publisher_event(world, event)
      yield event, dataclasses.replace(after, seconds=1)
    if world.lives == 1:
      yield "the publisher starts anew", self._restart(world)
    for number, pull in enumerate(world.pulls):
      if pull.phase == "reads":
        yield (
          f"cancel {pull.reader}",
          self._pull_event(world, number, p.CancelPull(), True),
        )
    for sending in world.sending:
      yield f"ends {sending[0]}", self._end_read(world, sending)
    left, n = world.sent, 0
    while left:
      if left & 1:
        yield self.messages[n][0], self._deliver(world, *self.messages[n])
      left, n = left >> 1, n + 1

  def _deliver(self, world: _World, message: Any, right: bool) -> _World:
    p = self.p
    to_publisher = p.ReadRequest, p.CompleteRequest, p.AbortRequest
    if isinstance(message, to_publisher):
      return self._publisher_event(world, message)
    number = int(message.reader.split()[1])
    return self._pull_event(world, number, message, right)

  def _publisher_event(self, world: _World, event: Any) -> _World:
    p = self.p
    after, actions = self._publisher(world.publisher, event)
    if after is world.publisher and not actions:
      return world
    sent, stale, held = world.sent, world.stale, world.held
    sending = world.sending
    for action in actions:
      if isinstance(action, p.SendMessage):
        sent |= self._bit(action.message, True)
      elif isinstance(action, p.TicketOpened):
        held |= {page for page, _ in action.pages}
      elif isinstance(action, p.StartRead):
        right = stale.isdisjoint(page for page, _ in action.request.pages)
        sending |= {(action.request, action.reply, right)}
      else:
        for page in action.pages:
          if page not in held:
            raise _Fault(f"once: page {page} is released twice")
          # Whoever gets a page back writes into it at once.
          held, stale = held - {page}, stale | {page}
    return dataclasses.replace(
      world,
      publisher=after,
      sent=sent,
      stale=stale,
      held=held,
      sending=sending,
    )

  def _end_read(self, world: _World, sending: tuple[Any, Any, bool]) -> _World:
    """The last byte leaves: now it is known whether all were right."""
    request, reply, right = sending
    right &= world.stale.isdisjoint(page for page, _ in request.pages)
    world = dataclasses.replace(
      world,
      sent=world.sent | self._bit(reply, right),
      sending=world.sending - {sending},
    )
    return self._publisher_event(world, self.p.ReadEnded(request))

  def _restart(self, world: _World) -> _World:
    """A new process has the same pages with other contents."""
    p, scenario = self.p, self.scenario
    return self._publisher_event(
      dataclasses.replace(
        world,
        publisher=p.start_publisher(1),
        held=frozenset(),
        stale=frozenset((*scenario.pages, *scenario.second)),
        sending=frozenset(),
        lives=2,
      ),
      p.PublishPages(scenario.pages, scenario.readers),
    )

  def _pull_event(
    self, world: _World, number: int, event: Any, right: bool
  ) -> _World:
    before = world.pulls[number]
    after, actions = self._pull(before, event)
    if after is before and not actions:
      return world
    if not right and after.came != before.came:
      raise _Fault(f"accepts: {after.reader} took other bytes: {event}")
    for action in actions:
      completes = isinstance(action.message, self.p.CompleteRequest)
      if completes and len(after.came) < len(after.reads):
        raise _Fault(f"behind: {after.reader} completes before the end")
    pulls = (*world.pulls[:number], after, *world.pulls[number + 1 :])
    return self._send(dataclasses.replace(world, pulls=pulls), actions)

  # -------------------------------------------------------------------------
  # Checks of a state
  # -------------------------------------------------------------------------

  def check(self, world: _World) -> None:
    """Raises if a page would stay for ever."""
    held = self._returns(world.publisher, world.held)
    if held:
      raise _Fault(f"back: pages {sorted(held)} never return")
    done = sum(pull.phase == "done" for pull in world.pulls)
    first = 0 in world.publisher.tickets
    if world.lives == 1 and done >= self.scenario.readers and first:
      raise _Fault("back: all readers have completed and the ticket is open")
    over = sum(pull.phase != "reads" for pull in world.pulls)
    closed = world.lives == 1 and not first and not world.taken_back
    if closed and over < self.scenario.readers:
      raise _Fault("early: the ticket is closed while a reader wants it")

  def _returns_at_the_end(self, publisher: Any, held: Any) -> Any:
    """The pages that are still held when all else has ended."""
    p = self.p
    events = [p.ReadEnded(request) for request in publisher.reads]
    events += [p.LeaseExpired(t) for t in publisher.tickets]
    for event in events:
      publisher, actions = self._publisher(publisher, event)
      for action in actions:
        if isinstance(action, p.ReleasePages):
          if not held.issuperset(action.pages):
            raise _Fault(f"once: {action.pages} are released twice")
          held = held - set(action.pages)
    return held


def explore(
  scenario: PullScenario,
  *,
  protocol: types.ModuleType = _protocol,
  most_states: int = 2_000_000,
) -> ProtocolReport:
  """Visits all states of one publisher with its readers.

  Args:
    scenario: what is published and pulled.
    protocol: the module to check.
    most_states: where to give up.

  Returns:
    What was found; without a fault, all states were visited.

  Raises:
    RuntimeError: there are more states than `most_states`.
  """
  return explore_several([scenario], protocol=protocol, most_states=most_states)


def explore_several(
  scenarios: Sequence[PullScenario],
  *,
  protocol: types.ModuleType = _protocol,
  most_states: int = 2_000_000,
) -> ProtocolReport:
  """As `explore`, of several publishers at once, state by state."""
  explorers = [_Explorer(s, protocol) for s in scenarios]
  begin = tuple(e.start() for e in explorers)
  came: dict[Any, Any] = {begin: None}
  queue = collections.deque([begin])
  steps = accepted = 0

  def report(worlds: Any, fault: str = "") -> ProtocolReport:
    trace = []
    while fault and came[worlds] is not None:
      worlds, event = came[worlds]
      trace.append(str(event))
    return ProtocolReport(
      len(came), steps, accepted, fault, tuple(reversed(trace))
    )

  while queue:
    worlds = queue.popleft()
    accepted += all(p.accepted for w in worlds for p in w.pulls)
    for n, (explorer, world) in enumerate(zip(explorers, worlds, strict=True)):
      try:
        explorer.check(world)
        for event, after in explorer.moves(world):
          steps += 1
          if after is world:
            continue
          new = (*worlds[:n], after, *worlds[n + 1 :])
          if new not in came:
            came[new] = worlds, event
            queue.append(new)
      except _Fault as fault:
        return report(worlds, str(fault))
    if len(came) > most_states:
      raise RuntimeError(f"more than {most_states} states")
  return report(begin)
