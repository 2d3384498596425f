"""Protocol of pulling pages, as pure functions from state to state.

Guarantees: a publisher sends pages of exactly the generation that was asked
for; a page that is being sent is never released, whatever ends meanwhile; a
page is released once, when no open ticket and no read names it; each ticket
ends, by its readers, by its lease or by its publisher. `interleavings.py`
checks this over all interleavings. There is no clock, socket or array here.
Cost: proportional to an event's own pages; `publisher_step` also copies the
previous state, `take_event` does not.
Ref: KVDirect (arXiv 2501.14743): pull by the decode side, COMPLETE after the
reads. Generations and deferred releases are additions of this file.

  publisher                            reader
  publish -> ticket (a lease) . . . .  the ticket, by any way
                       <- ReadRequest  a run of pages with their generations
  StartRead: ReadReply, bytes ->       ... as often as there are runs
  ReadEnded                            all bytes are here
                   <- CompleteRequest  once; if it is lost, the lease ends
  CompleteReply ->

A page's *generation* is the number of the ticket that published it while it
was free; with the publisher's *incarnation* it is never used twice. A ticket
closes when all its readers have completed or aborted, when its lease expires,
or when it is withdrawn; no read begins after that. Reads in flight keep their
pages until they end: the release waits for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# A page's number and its generation.
PageKey = tuple[int, int]


# ---------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReadRequest:
  """Request of a reader for one run of pages."""

  incarnation: int
  reader: str
  number: int
  pages: tuple[PageKey, ...]


@dataclasses.dataclass(frozen=True)
class ReadReply:
  """Header of the bytes of a read: the pages as the publisher has them."""

  incarnation: int
  reader: str
  number: int
  pages: tuple[PageKey, ...]


@dataclasses.dataclass(frozen=True)
class ReadRefused:
  """Refusal of a read, with the reason `why`."""

  reader: str
  number: int
  why: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class CompleteRequest:
  """Message of a reader that has all that it wants of a ticket."""

  incarnation: int
  ticket: int
  reader: str


@dataclasses.dataclass(frozen=True)
class CompleteReply:
  """Confirmation of the publisher that the reader has completed."""

  incarnation: int
  ticket: int
  reader: str


@dataclasses.dataclass(frozen=True)
class AbortRequest:
  """Message of a reader that does not want the rest of a ticket."""

  incarnation: int
  ticket: int
  reader: str


Message = (
  ReadRequest
  | ReadReply
  | ReadRefused
  | CompleteRequest
  | CompleteReply
  | AbortRequest
)


# ---------------------------------------------------------------------------
# The publisher
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PublishPages:
  """Event: the publisher's owner offers pages to a number of readers."""

  pages: tuple[int, ...]
  readers: int = 1


@dataclasses.dataclass(frozen=True)
class WithdrawTicket:
  """Event: the publisher's owner wants the pages of a ticket back."""

  ticket: int


@dataclasses.dataclass(frozen=True)
class LeaseExpired:
  """Event: the lease of a ticket is over."""

  ticket: int


@dataclasses.dataclass(frozen=True)
class ReadEnded:
  """Event: the last byte of a read was sent, or the read was abandoned."""

  request: ReadRequest


PublisherEvent = (
  PublishPages
  | WithdrawTicket
  | LeaseExpired
  | ReadEnded
  | ReadRequest
  | CompleteRequest
  | AbortRequest
)


@dataclasses.dataclass(frozen=True)
class TicketOpened:
  """Action: a ticket was opened."""

  ticket: int
  pages: tuple[PageKey, ...]


@dataclasses.dataclass(frozen=True)
class StartRead:
  """Action: send the reply and the bytes of its pages, then `ReadEnded`."""

  request: ReadRequest
  reply: ReadReply


@dataclasses.dataclass(frozen=True)
class SendMessage:
  """Action: send a message to the other side."""

  message: Message


@dataclasses.dataclass(frozen=True)
class ReleasePages:
  """Action: these pages may be written again."""

  pages: tuple[int, ...]


PublisherAction = TicketOpened | StartRead | SendMessage | ReleasePages


@dataclasses.dataclass(frozen=True)
class OpenTicket:
  """Pages that are held for readers.

  Attributes:
    number: Number of the ticket.
    pages: Pages with their generations.
    readers: Number of readers that complete or abort before the release.
    ended: Names of the readers that have ended.
  """

  number: int
  pages: tuple[PageKey, ...]
  readers: int
  ended: frozenset[str] = frozenset()


class PageHold(NamedTuple):
  """Number of tickets and reads that hold a page.

  Fields:
    generation: Generation of its contents.
    tickets: Number of open tickets that name it.
    reads: Number of reads of it in flight.
  """

  generation: int
  tickets: int
  reads: int


@dataclasses.dataclass(eq=False)
class PublisherState:
  """State of a publisher.

  Attributes:
    incarnation: Number of this process; no other start has the same.
    next_ticket: Number of the next ticket.
    tickets: Open tickets by number.
    reads: Reads in flight.
    holds: Holds by page; follows from `tickets` and `reads`.
  """

  incarnation: int
  next_ticket: int = 0
  tickets: dict[int, OpenTicket] = dataclasses.field(default_factory=dict)
  reads: set[ReadRequest] = dataclasses.field(default_factory=set)
  holds: dict[int, PageHold] = dataclasses.field(default_factory=dict)

  def copy(self) -> PublisherState:
    """Copy that changes independently of this state."""
    return PublisherState(
      self.incarnation,
      self.next_ticket,
      dict(self.tickets),
      set(self.reads),
      dict(self.holds),
    )

  def _key(self) -> tuple[object, ...]:
    tickets = tuple(self.tickets.values())
    return self.incarnation, self.next_ticket, tickets, frozenset(self.reads)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, PublisherState) and self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())


def start_publisher(incarnation: int) -> PublisherState:
  """Make the state of a publisher without tickets."""
  return PublisherState(incarnation)


def publisher_step(
  state: PublisherState, event: PublisherEvent
) -> tuple[PublisherState, tuple[PublisherAction, ...]]:
  """State after an event, and the actions to take; `state` is not changed."""
  next_state = state.copy()
  actions = take_event(next_state, event)
  return (state if next_state == state else next_state), actions


def take_event(
  state: PublisherState, event: PublisherEvent
) -> tuple[PublisherAction, ...]:
  """Apply an event to the state of a publisher; return the actions."""
  match event:
    case PublishPages(pages, readers):
      return _publish(state, pages, readers)
    case ReadRequest():
      return _read(state, event)
    case ReadEnded(request):
      if request not in state.reads:
        return ()
      state.reads.remove(request)
      return _release(state, request.pages, reads=1)
    case CompleteRequest(incarnation, number, reader):
      actions = _end_reader(state, incarnation, number, reader)
      reply = CompleteReply(incarnation, number, reader)
      return (*actions, SendMessage(reply))
    case AbortRequest(incarnation, number, reader):
      return _end_reader(state, incarnation, number, reader)
    case WithdrawTicket(number):
      withdrawn = state.tickets.get(number)
      return () if withdrawn is None else _close(state, withdrawn)
    case LeaseExpired(number):
      expired = state.tickets.get(number)
      return () if expired is None else _close(state, expired)


def _publish(
  state: PublisherState, pages: tuple[int, ...], readers: int
) -> tuple[PublisherAction, ...]:
  """Open a ticket; pages that are held already keep their generation."""
  number = state.next_ticket
  keys = []
  for page in pages:
    hold = state.holds.get(page, PageHold(number, 0, 0))
    state.holds[page] = hold._replace(tickets=hold.tickets + 1)
    keys.append((page, hold.generation))
  state.next_ticket = number + 1
  state.tickets[number] = OpenTicket(number, tuple(keys), readers)
  return (TicketOpened(number, tuple(keys)),)


def _read(
  state: PublisherState, request: ReadRequest
) -> tuple[PublisherAction, ...]:
  """Begin a read, or refuse it; a read in flight continues."""
  if request in state.reads:
    return ()
  why, pages = "", []
  if request.incarnation != state.incarnation:
    why = "the publisher was started anew"
  for page, requested in request.pages:
    generation = _open_generation(state, page)
    if generation is None:
      why = why or f"page {page} is not published any more"
    elif generation != requested:
      why = why or f"page {page} has other contents now"
    pages.append((page, -1 if generation is None else generation))
  if why:
    refused = ReadRefused(request.reader, request.number, why)
    return (SendMessage(refused),)
  reply = ReadReply(
    state.incarnation, request.reader, request.number, tuple(pages)
  )
  state.reads.add(request)
  for page, _ in pages:
    hold = state.holds[page]
    state.holds[page] = hold._replace(reads=hold.reads + 1)
  return (StartRead(request, reply),)


def _end_reader(
  state: PublisherState, incarnation: int, number: int, reader: str
) -> tuple[PublisherAction, ...]:
  """Record that a reader of a ticket has ended; the last one closes it."""
  ticket = state.tickets.get(number)
  if ticket is None or incarnation != state.incarnation:
    return ()
  ended = ticket.ended | {reader}
  if len(ended) >= ticket.readers:
    return _close(state, ticket)
  state.tickets[number] = dataclasses.replace(ticket, ended=ended)
  return ()


def _close(
  state: PublisherState, ticket: OpenTicket
) -> tuple[PublisherAction, ...]:
  """Close a ticket: no read begins any more, pages without reads return."""
  del state.tickets[ticket.number]
  return _release(state, ticket.pages, tickets=1)


def _release(
  state: PublisherState,
  pages: Iterable[PageKey],
  *,
  tickets: int = 0,
  reads: int = 0,
) -> tuple[PublisherAction, ...]:
  """Remove holds from pages; release those without any hold."""
  free = []
  for page, generation in pages:
    hold = state.holds[page]
    remaining = PageHold(generation, hold.tickets - tickets, hold.reads - reads)
    if remaining.tickets or remaining.reads:
      state.holds[page] = remaining
    else:
      del state.holds[page]
      free.append(page)
  return (ReleasePages(tuple(free)),) if free else ()


def _open_generation(state: PublisherState, page: int) -> int | None:
  """Generation of a page if it may be read, else None."""
  hold = state.holds.get(page)
  return hold.generation if hold is not None and hold.tickets else None


# ---------------------------------------------------------------------------
# The reader
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CancelPull:
  """Event: the reader's owner does not want the pages any more."""


PullEvent = ReadReply | ReadRefused | CompleteReply | CancelPull


@dataclasses.dataclass(frozen=True)
class PullState:
  """State of one pull on the reader's side.

  Attributes:
    incarnation: Incarnation of the publisher that made the ticket.
    ticket: Number of the ticket.
    reader: Name of this reader.
    reads: Runs of pages, each page with its generation.
    window: Maximum number of reads in flight.
    requested: Number of reads that were requested.
    came: Numbers of the reads whose bytes have arrived.
    phase: "reads", "completes", "done" or "failed".
    why: Reason of a failure.
  """

  incarnation: int
  ticket: int
  reader: str
  reads: tuple[tuple[PageKey, ...], ...]
  window: int
  requested: int = 0
  came: frozenset[int] = frozenset()
  phase: str = "reads"
  why: str = dataclasses.field(default="", compare=False)

  @property
  def accepted(self) -> bool:
    """Whether the reader has all pages and may use them."""
    return self.phase in ("completes", "done")


def start_pull(
  incarnation: int,
  ticket: int,
  reader: str,
  reads: Sequence[Sequence[PageKey]],
  *,
  window: int = 2,
) -> tuple[PullState, tuple[SendMessage, ...]]:
  """Begin a pull; its state and first messages.

  Args:
    incarnation: Incarnation in the ticket.
    ticket: Number of the ticket.
    reader: Name of the reader, the same in a second attempt.
    reads: Pages of each read, at least one read.
    window: Maximum number of reads in flight.
  """
  runs = tuple(tuple(run) for run in reads)
  return _ask(PullState(incarnation, ticket, reader, runs, window))


def pull_step(
  state: PullState, event: PullEvent
) -> tuple[PullState, tuple[SendMessage, ...]]:
  """Apply an event to a pull; its new state, and the messages to send.

  A `ReadReply` is an event once all its bytes have arrived.
  """
  match event:
    case ReadReply():
      return _reply(state, event)
    case ReadRefused():
      if state.phase == "reads" and event.number not in state.came:
        state = dataclasses.replace(state, phase="failed", why=event.why)
    case CompleteReply():
      if state.phase == "completes":
        state = dataclasses.replace(state, phase="done")
    case CancelPull():
      if state.phase == "reads":
        state = dataclasses.replace(state, phase="failed", why="cancelled")
        abort = AbortRequest(state.incarnation, state.ticket, state.reader)
        return state, (SendMessage(abort),)
  return state, ()


def _reply(
  state: PullState, reply: ReadReply
) -> tuple[PullState, tuple[SendMessage, ...]]:
  """Accept the bytes of a read if they are what was asked for."""
  if state.phase != "reads" or reply.number in state.came:
    return state, ()
  if (reply.incarnation, reply.pages) != (
    state.incarnation,
    state.reads[reply.number],
  ):
    why = f"the pages of read {reply.number} are not those asked for"
    return dataclasses.replace(state, phase="failed", why=why), ()
  state = dataclasses.replace(state, came=state.came | {reply.number})
  if len(state.came) < len(state.reads):
    return _ask(state)
  state = dataclasses.replace(state, phase="completes")
  return state, (_complete(state),)


def _ask(state: PullState) -> tuple[PullState, tuple[SendMessage, ...]]:
  """Request further reads, up to the window."""
  end = min(len(state.reads), len(state.came) + state.window)
  new = tuple(
    SendMessage(_request(state, n)) for n in range(state.requested, end)
  )
  return dataclasses.replace(state, requested=max(end, state.requested)), new


def _request(state: PullState, number: int) -> ReadRequest:
  pages = state.reads[number]
  return ReadRequest(state.incarnation, state.reader, number, pages)


def _complete(state: PullState) -> SendMessage:
  request = CompleteRequest(state.incarnation, state.ticket, state.reader)
  return SendMessage(request)


def coalesce(
  pages: Sequence[int], places: Sequence[int] | None = None
) -> list[range]:
  """Split a list of pages into the fewest runs that one read can fetch.

  Args:
    pages: Page numbers at the publisher, in the wanted order.
    places: Row of each page at the reader; default: consecutive rows.

  Returns:
    Ranges of positions in `pages`: within one, both numbers rise by 1.
  """
  targets = range(len(pages)) if places is None else places
  runs: list[range] = []
  for n in range(len(pages)):
    follows = (
      n > 0
      and pages[n] == pages[n - 1] + 1
      and targets[n] == targets[n - 1] + 1
    )
    first = runs.pop().start if follows else n
    runs.append(range(first, n + 1))
  return runs
