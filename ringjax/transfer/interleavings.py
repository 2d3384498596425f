"""Model checker of the protocol: every interleaving of a small system.

Guarantees: `explore` visits each state that a publisher and its readers can
reach: messages arrive in any order, late, twice or never; leases expire,
tickets are withdrawn and pulls cancelled at any time; the publisher crashes
at any time and starts again; released pages are overwritten at once. It
returns the shortest trace to a forbidden state, if there is one.
Cost: some tens of thousands of states, a few seconds.

The network never forgets: a message that was sent may be delivered from then
on, any number of times. A crashed reader is one to which no message is
delivered any more, so that each state includes this crash, too. Publishers
share no state, and a pull is of one publisher; the states of several
publishers are therefore all combinations of the states of each
(`explore_several` shows this on smaller systems).

Checks in each state:
  accepts  a reader accepts only bytes that the pages had at publication, from
           the first to the last byte of the read
  behind   COMPLETE is sent only after the last byte
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
  """One publisher, its first ticket and the pulls of its readers.

  Attributes:
    pages: Pages of the first ticket.
    readers: Number of readers that the ticket is for.
    pulls: Reads of each reader, each with the pages that it asks for.
    second: Pages of a ticket that may be published at any time.
    window: Maximum number of a reader's reads in flight.
  """

  pages: tuple[int, ...]
  readers: int
  pulls: tuple[tuple[tuple[int, ...], ...], ...]
  second: tuple[int, ...] = ()
  window: int = 2


@dataclasses.dataclass(frozen=True)
class ProtocolReport:
  """Result of an exploration.

  Attributes:
    states: Number of visited states.
    steps: Number of events that were tried.
    accepted: Number of states in which all readers have their pages.
    fault: Check that failed, or "".
    trace: Events that lead to the fault.
  """

  states: int
  steps: int
  accepted: int
  fault: str = ""
  trace: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _World:
  """A publisher, its readers, the network and the memory of the pages.

  `stale`: pages that were written since the first ticket; `published`: pages
  that readers may read; `sending`: reads in flight, and whether all bytes were
  right when they began; `sent`: messages, as bits; `taken_back`: whether the
  first ticket expired or was withdrawn.
  """

  publisher: Any
  pulls: tuple[Any, ...]
  sent: int
  stale: frozenset[int]
  published: frozenset[int]
  sending: frozenset[tuple[Any, Any, bool]]
  lives: int = 1
  seconds: int = 0
  taken_back: bool = False

  @functools.cached_property
  def _hash(self) -> int:
    parts = (self.publisher, self.pulls, self.sent, self.stale)
    progress = self.lives, self.seconds, self.taken_back
    return hash((parts, self.published, self.sending, progress))

  def __hash__(self) -> int:
    return self._hash


class _Fault(Exception):
  """A check failed."""


class _Explorer:
  """Transitions of one scenario, under one version of the protocol."""

  def __init__(self, scenario: PullScenario, protocol: types.ModuleType):
    self.scenario, self.p = scenario, protocol
    self.messages: list[tuple[Any, bool]] = []
    self.bits: dict[tuple[Any, bool], int] = {}
    self._publisher = functools.cache(protocol.publisher_step)
    self._pull = functools.cache(protocol.pull_step)
    self._returns = functools.cache(self._returns_at_the_end)
    self.steps = 0

  def start(self) -> _World:
    """Initial state: the first ticket is published, all pulls have begun."""
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
  # Transitions
  # -------------------------------------------------------------------------

  def moves(self, world: _World) -> Iterator[tuple[Any, _World]]:
    """Yield the events that can happen next, with their next states."""
    p = self.p
    for ticket in world.publisher.tickets:
      for event in (p.LeaseExpired(ticket), p.WithdrawTicket(ticket)):
        next_world = self._publisher_event(world, event)
        if ticket == 0:
          next_world = dataclasses.replace(next_world, taken_back=True)
        yield event, next_world
    if self.scenario.second and not world.seconds:
      event = p.PublishPages(self.scenario.second, 1)
      next_world = self._publisher_event(world, event)
      yield event, dataclasses.replace(next_world, seconds=1)
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
    unread_bits, n = world.sent, 0
    while unread_bits:
      if unread_bits & 1:
        yield self.messages[n][0], self._deliver(world, *self.messages[n])
      unread_bits, n = unread_bits >> 1, n + 1

  def _deliver(self, world: _World, message: Any, right: bool) -> _World:
    p = self.p
    to_publisher = p.ReadRequest, p.CompleteRequest, p.AbortRequest
    if isinstance(message, to_publisher):
      return self._publisher_event(world, message)
    number = int(message.reader.split()[1])
    return self._pull_event(world, number, message, right)

  def _publisher_event(self, world: _World, event: Any) -> _World:
    p = self.p
    next_state, actions = self._publisher(world.publisher, event)
    if next_state is world.publisher and not actions:
      return world
    sent, stale, published = world.sent, world.stale, world.published
    sending = world.sending
    for action in actions:
      if isinstance(action, p.SendMessage):
        sent |= self._bit(action.message, True)
      elif isinstance(action, p.TicketOpened):
        published |= {page for page, _ in action.pages}
      elif isinstance(action, p.StartRead):
        right = stale.isdisjoint(page for page, _ in action.request.pages)
        sending |= {(action.request, action.reply, right)}
      else:
        for page in action.pages:
          if page not in published:
            raise _Fault(f"once: page {page} is released twice")
          # The owner overwrites a released page at once.
          published, stale = published - {page}, stale | {page}
    return dataclasses.replace(
      world,
      publisher=next_state,
      sent=sent,
      stale=stale,
      published=published,
      sending=sending,
    )

  def _end_read(self, world: _World, sending: tuple[Any, Any, bool]) -> _World:
    """End a read: only now it is known whether all bytes were right."""
    request, reply, right = sending
    right &= world.stale.isdisjoint(page for page, _ in request.pages)
    world = dataclasses.replace(
      world,
      sent=world.sent | self._bit(reply, right),
      sending=world.sending - {sending},
    )
    return self._publisher_event(world, self.p.ReadEnded(request))

  def _restart(self, world: _World) -> _World:
    """Restart the publisher: a new process with other page contents."""
    p, scenario = self.p, self.scenario
    return self._publisher_event(
      dataclasses.replace(
        world,
        publisher=p.start_publisher(1),
        published=frozenset(),
        stale=frozenset((*scenario.pages, *scenario.second)),
        sending=frozenset(),
        lives=2,
      ),
      p.PublishPages(scenario.pages, scenario.readers),
    )

  def _pull_event(
    self, world: _World, number: int, event: Any, right: bool
  ) -> _World:
    old_pull = world.pulls[number]
    new_pull, actions = self._pull(old_pull, event)
    if new_pull is old_pull and not actions:
      return world
    if not right and new_pull.came != old_pull.came:
      raise _Fault(f"accepts: {new_pull.reader} took other bytes: {event}")
    for action in actions:
      completes = isinstance(action.message, self.p.CompleteRequest)
      if completes and len(new_pull.came) < len(new_pull.reads):
        raise _Fault(f"behind: {new_pull.reader} completes before the end")
    pulls = (*world.pulls[:number], new_pull, *world.pulls[number + 1 :])
    return self._send(dataclasses.replace(world, pulls=pulls), actions)

  # -------------------------------------------------------------------------
  # Checks of a state
  # -------------------------------------------------------------------------

  def check(self, world: _World) -> None:
    """Raise if a page would be held for ever."""
    held_for_ever = self._returns(world.publisher, world.published)
    if held_for_ever:
      raise _Fault(f"back: pages {sorted(held_for_ever)} never return")
    num_done = sum(pull.phase == "done" for pull in world.pulls)
    first_open = 0 in world.publisher.tickets
    if world.lives == 1 and num_done >= self.scenario.readers and first_open:
      raise _Fault("back: all readers have completed and the ticket is open")
    num_ended = sum(pull.phase != "reads" for pull in world.pulls)
    closed = world.lives == 1 and not first_open and not world.taken_back
    if closed and num_ended < self.scenario.readers:
      raise _Fault("early: the ticket is closed while a reader wants it")

  def _returns_at_the_end(self, publisher: Any, unreleased: Any) -> Any:
    """Pages that are still held when everything else has ended."""
    p = self.p
    events = [p.ReadEnded(request) for request in publisher.reads]
    events += [p.LeaseExpired(ticket) for ticket in publisher.tickets]
    for event in events:
      publisher, actions = self._publisher(publisher, event)
      for action in actions:
        if isinstance(action, p.ReleasePages):
          if not unreleased.issuperset(action.pages):
            raise _Fault(f"once: {action.pages} are released twice")
          unreleased = unreleased - set(action.pages)
    return unreleased


def explore(
  scenario: PullScenario,
  *,
  protocol: types.ModuleType = _protocol,
  most_states: int = 2_000_000,
) -> ProtocolReport:
  """Visit all states of one publisher with its readers.

  Args:
    scenario: Published pages and pulls.
    protocol: Module to check.
    most_states: Limit of the number of states.

  Returns:
    A report; without a fault, all states were visited.

  Raises:
    RuntimeError: If there are more states than `most_states`.
  """
  return explore_several([scenario], protocol=protocol, most_states=most_states)


def explore_several(
  scenarios: Sequence[PullScenario],
  *,
  protocol: types.ModuleType = _protocol,
  most_states: int = 2_000_000,
) -> ProtocolReport:
  """Visit all joint states of several publishers with their readers."""
  explorers = [_Explorer(scenario, protocol) for scenario in scenarios]
  initial = tuple(explorer.start() for explorer in explorers)
  predecessors: dict[Any, Any] = {initial: None}
  queue = collections.deque([initial])
  steps = accepted = 0

  def report(worlds: Any, fault: str = "") -> ProtocolReport:
    trace = []
    while fault and predecessors[worlds] is not None:
      worlds, event = predecessors[worlds]
      trace.append(str(event))
    return ProtocolReport(
      len(predecessors), steps, accepted, fault, tuple(reversed(trace))
    )

  while queue:
    worlds = queue.popleft()
    accepted += all(pull.accepted for world in worlds for pull in world.pulls)
    for n, (explorer, world) in enumerate(zip(explorers, worlds, strict=True)):
      try:
        explorer.check(world)
        for event, next_world in explorer.moves(world):
          steps += 1
          if next_world is world:
            continue
          next_worlds = (*worlds[:n], next_world, *worlds[n + 1 :])
          if next_worlds not in predecessors:
            predecessors[next_worlds] = worlds, event
            queue.append(next_worlds)
      except _Fault as fault:
        return report(worlds, str(fault))
    if len(predecessors) > most_states:
      raise RuntimeError(f"more than {most_states} states")
  return report(initial)
