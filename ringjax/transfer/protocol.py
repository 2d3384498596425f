"""The protocol of pulling pages, as pure functions from state to state.

Guarantees: a publisher sends pages of exactly the generation that was asked
for; a page that is being sent is never released, whatever ends meanwhile; a
page is released once, when no open ticket and no read names it; each ticket
ends, by its readers, by its lease or by its publisher. `interleavings.py`
checks this over all interleavings. There is no clock, socket or array here.
Cost: of an event, its own pages; `publisher_step` copies the state before,
which `take_event` does not.
Ref: KVDirect (arXiv 2501.14743): pull by the decoding side, COMPLETE behind
the reads. Generations and releases that wait are this file's.

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
or when it is withdrawn; no read begins after that. Reads that are under way
keep their pages until they end: the release waits for them.
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
  """A reader asks for pages; one read is one run of them."""

  incarnation: int
  reader: str
  number: int
  pages: tuple[PageKey, ...]


@dataclasses.dataclass(frozen=True)
class ReadReply:
  """What goes before the bytes: the pages as the publisher has them."""

  incarnation: int
  reader: str
  number: int
  pages: tuple[PageKey, ...]


@dataclasses.dataclass(frozen=True)
class ReadRefused:
  """No bytes come, because of `why`."""

  reader: str
  number: int
  why: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class CompleteRequest:
  """A reader has all that it wants of a ticket."""

  incarnation: int
  ticket: int
  reader: str


@dataclasses.dataclass(frozen=True)
class CompleteReply:
  """The publisher knows that the reader has completed."""

  incarnation: int
  ticket: int
  reader: str


@dataclasses.dataclass(frozen=True)
class AbortRequest:
  """A reader does not want the rest of a ticket."""

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
  """The publisher's owner offers pages to a number of readers."""

  pages: tuple[int, ...]
  readers: int = 1


@dataclasses.dataclass(frozen=True)
class WithdrawTicket:
  """The publisher's owner wants the pages of a ticket back."""

  ticket: int


@dataclasses.dataclass(frozen=True)
class LeaseExpired:
  """The time of a ticket is over."""

  ticket: int


@dataclasses.dataclass(frozen=True)
class ReadEnded:
  """The last byte of a read was sent, or none of it is sent any more."""

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
  """A ticket exists from now on."""

  ticket: int
  pages: tuple[PageKey, ...]


@dataclasses.dataclass(frozen=True)
class StartRead:
  """Send the reply and the bytes of its pages, then say `ReadEnded`."""

  request: ReadRequest
  reply: ReadReply


@dataclasses.dataclass(frozen=True)
class SendMessage:
  """Send a message to the other side."""

  message: Message


@dataclasses.dataclass(frozen=True)
class ReleasePages:
  """These pages may be written again."""

  pages: tuple[int, ...]


PublisherAction = TicketOpened | StartRead | SendMessage | ReleasePages


@dataclasses.dataclass(frozen=True)
class OpenTicket:
  """Pages that are held for readers.

  Attributes:
    number: of the ticket.
    pages: with their generations.
    readers: how many complete or abort before the pages return.
    ended: the names of those that have.
  """

  number: int
  pages: tuple[PageKey, ...]
  readers: int
  ended: frozenset[str] = frozenset()


class PageHold(NamedTuple):
  """Why a page is held.

  Fields:
    generation: of its contents.
    tickets: open ones that name it.
    reads: of it that are under way.
  """

  generation: int
  tickets: int
  reads: int


@dataclasses.dataclass(eq=False)
class PublisherState:
  """What a publisher knows.

  Attributes:
    incarnation: of this process; no other start has the same.
    next_ticket: the number of the next ticket.
    tickets: those that are open, by number.
    reads: those that are under way.
    holds: by page why it is held; follows from `tickets` and `reads`.
  """

  incarnation: int
  next_ticket: int = 0
  tickets: dict[int, OpenTicket] = dataclasses.field(default_factory=dict)
  reads: set[ReadRequest] = dataclasses.field(default_factory=set)
  holds: dict[int, PageHold] = dataclasses.field(default_factory=dict)

  def copy(self) -> PublisherState:
    """A state that changes apart from this one."""
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
  """A publisher without tickets."""
  return PublisherState(incarnation)


def publisher_step(
  state: PublisherState, event: PublisherEvent
) -> tuple[PublisherState, tuple[PublisherAction, ...]]:
  """The state behind an event, and what is to be done; `state` stays."""
  after = state.copy()
  actions = take_event(after, event)
  return (state if after == state else after), actions


def take_event(
  state: PublisherState, event: PublisherEvent
) -> tuple[PublisherAction, ...]:
  """Changes the state of a publisher by an event; what is to be done."""
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
      done = _end_reader(state, incarnation, number, reader)
      reply = CompleteReply(incarnation, number, reader)
      return (*done, SendMessage(reply))
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
  """Opens a ticket; pages that are held already keep their generation."""
  number = state.next_ticket
  keys = []
  for page in pages:
    held = state.holds.get(page, PageHold(number, 0, 0))
    state.holds[page] = held._replace(tickets=held.tickets + 1)
    keys.append((page, held.generation))
  state.next_ticket = number + 1
  state.tickets[number] = OpenTicket(number, tuple(keys), readers)
  return (TicketOpened(number, tuple(keys)),)


def _read(
  state: PublisherState, request: ReadRequest
) -> tuple[PublisherAction, ...]:
  """Begins a read, or refuses it; one that is under way goes on."""
  if request in state.reads:
    return ()
  why, pages = "", []
  if request.incarnation != state.incarnation:
    why = "the publisher was started anew"
  for page, wanted in request.pages:
    found = _open_generation(state, page)
    if found is None:
      why = why or f"page {page} is not published any more"
    elif found != wanted:
      why = why or f"page {page} has other contents now"
    pages.append((page, -1 if found is None else found))
  if why:
    refused = ReadRefused(request.reader, request.number, why)
    return (SendMessage(refused),)
  reply = ReadReply(
    state.incarnation, request.reader, request.number, tuple(pages)
  )
  state.reads.add(request)
  for page, _ in pages:
    held = state.holds[page]
    state.holds[page] = held._replace(reads=held.reads + 1)
  return (StartRead(request, reply),)


def _end_reader(
  state: PublisherState, incarnation: int, number: int, reader: str
) -> tuple[PublisherAction, ...]:
  """A reader of a ticket has ended; the last one closes it."""
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
  """No read of the ticket begins any more; pages return if none is read."""
  del state.tickets[ticket.number]
  return _release(state, ticket.pages, tickets=1)


def _release(
  state: PublisherState,
  pages: Iterable[PageKey],
  *,
  tickets: int = 0,
  reads: int = 0,
) -> tuple[PublisherAction, ...]:
  """Takes holds from pages; those that nothing holds any more return."""
  free = []
  for page, generation in pages:
    held = state.holds[page]
    left = PageHold(generation, held.tickets - tickets, held.reads - reads)
    if left.tickets or left.reads:
      state.holds[page] = left
    else:
      del state.holds[page]
      free.append(page)
  return (ReleasePages(tuple(free)),) if free else ()


def _open_generation(state: PublisherState, page: int) -> int | None:
  """The generation of a page that may be read."""
  held = state.holds.get(page)
  return held.generation if held is not None and held.tickets else None


# ---------------------------------------------------------------------------
# The reader
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CancelPull:
  """The reader's owner does not want the pages any more."""


PullEvent = ReadReply | ReadRefused | CompleteReply | CancelPull


@dataclasses.dataclass(frozen=True)
class PullState:
  """What a reader knows of one pull.

  Attributes:
    incarnation: of the publisher that made the ticket.
    ticket: its number.
    reader: this reader's name.
    reads: the runs of pages, each with its generation.
    window: how many reads are asked for at once.
    asked: how many were.
    came: the numbers of the reads whose bytes are here.
    phase: "reads", "completes", "done" or "failed".
    why: it failed.
  """

  incarnation: int
  ticket: int
  reader: str
  reads: tuple[tuple[PageKey, ...], ...]
  window: int
  asked: int = 0
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
  """A pull, and its first messages.

  Args:
    incarnation: of the ticket.
    ticket: its number.
    reader: a name; the same one in a second attempt.
    reads: the pages of each read, at least one read.
    window: reads that are asked for at once.
  """
  runs = tuple(tuple(run) for run in reads)
  return _ask(PullState(incarnation, ticket, reader, runs, window))


def pull_step(
  state: PullState, event: PullEvent
) -> tuple[PullState, tuple[SendMessage, ...]]:
  """What an event does to a pull, and which messages are to be sent.

  A `ReadReply` is an event once all its bytes are here.
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
  """Takes the bytes of a read if they are what was asked for."""
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
  """Asks for further reads, up to the window."""
  end = min(len(state.reads), len(state.came) + state.window)
  new = tuple(SendMessage(_request(state, n)) for n in range(state.asked, end))
  return dataclasses.replace(state, asked=max(end, state.asked)), new


def _request(state: PullState, number: int) -> ReadRequest:
  pages = state.reads[number]
  return ReadRequest(state.incarnation, state.reader, number, pages)


def _complete(state: PullState) -> SendMessage:
  made = CompleteRequest(state.incarnation, state.ticket, state.reader)
  return SendMessage(made)


def coalesce(
  pages: Sequence[int], places: Sequence[int] | None = None
) -> list[range]:
  """Splits a list of pages into the fewest runs that one read can fetch.

  Args:
    pages: numbers at the publisher, in the order in which they are wanted.
    places: where each goes at the reader; default: one behind the other.

  Returns:
    Ranges of positions in `pages`: within one, both numbers rise by 1.
  """
  where = range(len(pages)) if places is None else places
  runs: list[range] = []
  for n in range(len(pages)):
    follows = (
      n > 0 and pages[n] == pages[n - 1] + 1 and where[n] == where[n - 1] + 1
    )
    first = runs.pop().start if follows else n
    runs.append(range(first, n + 1))
  return runs
