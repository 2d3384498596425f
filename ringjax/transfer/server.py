"""Publisher of pages: a process that offers pages of its memory to readers.

Guarantees: those of `protocol.py`, for the memory of a process: pages go to
readers that have the key, with the contents that they had at publication; the
callbacks of a page are called once, when no reader can get it any more, at the
latest a lease and a patience after publication. Readers may come and go at any
time; a reader's errors end only its own connection. A connection that does not
show the key within five seconds is closed, or earlier for a newer one when many
wait: silent connections keep no reader out.
Cost: a thread for each connection and one for the leases. Whole pages are sent
from where they are; a part of a page that is not contiguous is copied first.
Pages on devices are sent from there to readers with a `DeviceServer`, and are
copied to the host for others.
Memory: the copied parts of one read on each connection.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.errors import InputTypeError, OptionError, PeerError
from ringjax.parallel.door import Door
from ringjax.parallel.links.connection import (
  AuthenticationError,
  HostileMessageError,
  checked_key,
  listening,
)
from ringjax.transfer import protocol
from ringjax.transfer.description import (
  MOST_PAGES,
  PageLayout,
  PageLeaf,
  Ticket,
  checked_labels,
)
from ringjax.transfer.device_pages import (
  DevicePage,
  cut_pages,
  pieces_to_json,
)
from ringjax.transfer.device_server import ArrayOffer, DeviceServer
from ringjax.transfer.wire import PullConnection

Buffer = bytes | bytearray | memoryview | np.ndarray
Released = Callable[[tuple[int, ...]], object]
LEASE_S, PATIENCE_S = 30.0, 10.0
# Maximum seconds between checks of leases.
_LOOK_S = 0.25


@dataclasses.dataclass
class PublisherCounters:
  """Counters of a publisher's work.

  Attributes:
    tickets: Tickets that were published.
    reads: Reads that were sent completely.
    array_reads: Reads of these that used JAX's transfer server.
    read_bytes: Bytes of pages that were sent.
    copied_bytes: Bytes of these that were copied first, not being contiguous.
    refused: Reads of pages that are not offered any more.
    broken: Reads that were not sent completely.
    expired: Tickets whose lease ended.
    released: Pages that were released.
    strangers: Connections without the key, or with malformed messages.
    turned_away: Readers beyond the limit, and connections without a key that
      were closed for newer ones.
  """

  tickets: int = 0
  reads: int = 0
  array_reads: int = 0
  read_bytes: int = 0
  copied_bytes: int = 0
  refused: int = 0
  broken: int = 0
  expired: int = 0
  released: int = 0
  strangers: int = 0
  turned_away: int = 0


@dataclasses.dataclass
class _HeldPage:
  """The bytes of a page, leaf by leaf, and the callbacks of its release.

  `owners`: callback of each ticket that names the page, by ticket number.
  """

  data: tuple[memoryview, ...] | DevicePage
  layout: PageLayout
  label: str
  owners: dict[int, Released | None] = dataclasses.field(default_factory=dict)

  @property
  def leaves(self) -> tuple[memoryview, ...]:
    """Bytes of each leaf, in the memory of the host."""
    if isinstance(self.data, DevicePage):
      batch, row = self.data
      return tuple(_view(row, array[row]) for array in batch.on_host)
    return self.data

  @property
  def places(self) -> list[tuple[int, int]]:
    """Address and size of each leaf."""
    if isinstance(self.data, DevicePage):
      return [(id(self.data.batch), self.data.row)]
    arrays = [np.frombuffer(view, np.uint8) for view in self.leaves]
    return [(x.ctypes.data, x.size) for x in arrays]


class Publisher:
  """Offers pages to readers that pull them.

  Attributes:
    address: Host and port under which readers reach it.
    counters: Counters of its work.
  """

  def __init__(
    self,
    key: bytes,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    lease_s: int | float = LEASE_S,
    patience_s: int | float = PATIENCE_S,
    connections: int = 64,
    devices: DeviceServer | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Open the port and begin to accept readers.

    Args:
      key: Secret key that readers need, too, at least 16 bytes.
      host: Interface to listen on; by default only this machine's own.
      port: Port number; 0 takes a free one.
      lease_s: Seconds from publication after which no read begins.
      patience_s: Seconds without a byte after which a reader counts as lost,
        and after a lease's end until reads are cut off.
      connections: Maximum number of readers at once; connections that have not
        shown the key yet are not counted, and give way to newer ones.
      devices: Sends pages from devices to readers that have a server, too.
      clock: Returns monotonic seconds.

    Raises:
      OptionError: If the key is too short, a number is out of range, or the
        address is not free on this machine.
    """
    self._key = checked_key(key)
    self._lease_s = number("lease_s", lease_s, above=0)
    self._patience_s = number("patience_s", patience_s, above=0)
    self._most = positive_int("connections", connections)
    self._devices = devices
    integer("port", port, least=0, most=65535)
    self.counters = PublisherCounters()
    self._clock = clock
    self._state = protocol.start_publisher(secrets.randbits(62))
    self._lock = threading.Condition()
    self._pages: dict[int, _HeldPage] = {}
    self._deadlines: dict[int, float] = {}
    self._wires: dict[int, PullConnection] = {}
    self._connections = itertools.count()
    self._next_number = 0
    self._closed = False
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    self._door = Door(
      self._server,
      self._greet,
      self._serve,
      name="ringjax publisher",
      dropped=self._drop_waiting,
    )
    threading.Thread(
      target=self._watch, name="ringjax publisher leases", daemon=True
    ).start()

  def __enter__(self) -> Publisher:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # -------------------------------------------------------------------------
  # The owner's side
  # -------------------------------------------------------------------------

  def publish(
    self,
    pages: Mapping[int, Buffer | Sequence[Buffer] | DevicePage],
    layout: PageLayout,
    *,
    labels: Sequence[str] = (),
    readers: int = 1,
    lease_s: int | float | None = None,
    released: Released | None = None,
  ) -> Ticket:
    """Offer pages; their bytes must not change until they are released.

    Args:
      pages: Pages by number, in the order of the sequence: the bytes of a page,
        or of each of its leaves, or a page of a `PageBatch`. A page may be in
        several tickets, with the same memory; it is released when all of them
        have ended.
      layout: Meaning of the bytes.
      labels: Text for each page that readers get with it, such as a hash of
        its tokens; default: empty texts.
      readers: Number of readers, each under its own name, that complete or
        abort before the pages are released.
      lease_s: Lease of this ticket in seconds; default: the publisher's.
      released: Called with the released pages, once for each page, from another
        thread; a page in several tickets calls the callbacks of all of them.

    Returns:
      The ticket that readers need, to be sent to them in any way.

    Raises:
      OptionError: If a page has another size, or is offered already with other
        memory, layout or label.
      PeerError: If the publisher is closed.
    """
    positive_int("readers", readers)
    lease = self._lease_s if lease_s is None else lease_s
    lease = number("lease_s", lease, above=0)
    if not 1 <= len(pages) <= MOST_PAGES:
      raise OptionError(
        "pages", len(pages), f"1 to {MOST_PAGES} pages", "publish some"
      )
    for page in pages:
      integer("page", page, least=0, most=(1 << 48) - 1)
    names = checked_labels(labels or [""] * len(pages), len(pages))
    new_pages = {
      page: _HeldPage(_page_data(page, data, layout), layout, label)
      for (page, data), label in zip(pages.items(), names, strict=True)
    }
    with self._lock:
      if self._closed:
        raise PeerError("the publisher is closed")
      for page, held_page in new_pages.items():
        offered = self._pages.get(page, held_page)
        same_metadata = (
          offered.layout == layout and offered.label == held_page.label
        )
        if not same_metadata or offered.places != held_page.places:
          # Readers of the new ticket would get the contents offered already.
          raise OptionError(
            f"page {page}",
            "other memory, or another layout or label, than it is offered with "
            "already",
            "a number whose page has returned, or the same memory",
            "take numbers from new_numbers",
          )
      self._next_number = max(self._next_number, 1 + max(new_pages))
      (opened,) = protocol.take_event(
        self._state, protocol.PublishPages(tuple(new_pages), readers)
      )
      assert isinstance(opened, protocol.TicketOpened)
      for page, held_page in new_pages.items():
        owners = self._pages.setdefault(page, held_page).owners
        owners[opened.ticket] = released
      self._deadlines[opened.ticket] = self._clock() + lease
      self.counters.tickets += 1
      self._lock.notify_all()
    return Ticket(
      incarnation=self._state.incarnation,
      number=opened.ticket,
      readers=readers,
      lease_s=lease,
      pages=opened.pages,
      layout=layout,
      labels=names,
    )

  def new_numbers(self, count: int) -> range:
    """Consecutive numbers that no page has had yet."""
    positive_int("count", count)
    with self._lock:
      first = self._next_number
      self._next_number += count
    return range(first, first + count)

  def renew(self, ticket: Ticket, lease_s: int | float | None = None) -> bool:
    """Restart a lease; False for an ended or another publisher's ticket."""
    lease = self._lease_s if lease_s is None else lease_s
    lease = number("lease_s", lease, above=0)
    with self._lock:
      from_this = ticket.incarnation == self._state.incarnation
      if not from_this or ticket.number not in self._deadlines:
        return False
      self._deadlines[ticket.number] = self._clock() + lease
      return True

  def withdraw(self, ticket: Ticket) -> None:
    """End a ticket; its pages are released once they are not being read."""
    if ticket.incarnation == self._state.incarnation:
      self._step(protocol.WithdrawTicket(ticket.number))

  def expire(self) -> None:
    """End tickets whose lease is over; a thread calls this, too."""
    with self._lock:
      now_s = self._clock()
      expired = [
        ticket for ticket, end in self._deadlines.items() if end <= now_s
      ]
      self.counters.expired += len(expired)
      for ticket in expired:
        del self._deadlines[ticket]
    for ticket in expired:
      self._step(protocol.LeaseExpired(ticket))

  @property
  def offered(self) -> int:
    """Number of pages that are not yet released."""
    with self._lock:
      return len(self._pages)

  @property
  def device_bytes(self) -> int:
    """Bytes on devices of batches with pages that are not yet released."""
    with self._lock:
      page_data = [x.data for x in self._pages.values()]
    batches = {data.batch for data in page_data if isinstance(data, DevicePage)}
    return sum(batch.nbytes for batch in batches)

  def close(self) -> None:
    """Withdraw all tickets and end all connections; all pages are released."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      self._lock.notify_all()
    self._door.close()
    self._server.close()
    for ticket in list(self._state.tickets):
      self._step(protocol.WithdrawTicket(ticket))
    self._wait(lambda: not self._state.reads)
    with self._lock:
      wires = list(self._wires.values())
    for wire in wires:
      wire.close()
    self._wait(lambda: not self._state.reads and not self._wires)

  def _wait(self, until: Callable[[], bool]) -> None:
    with self._lock:
      self._lock.wait_for(until, self._patience_s)

  # -------------------------------------------------------------------------
  # Steps of the protocol
  # -------------------------------------------------------------------------

  def _step(
    self, event: protocol.PublisherEvent
  ) -> tuple[protocol.PublisherAction, ...]:
    """Take a protocol step; release pages, and return the actions."""
    callbacks: list[tuple[Released, list[int]]] = []
    with self._lock:
      actions = protocol.take_event(self._state, event)
      ticket = getattr(event, "ticket", -1)
      if ticket not in self._state.tickets:
        self._deadlines.pop(ticket, None)
      for action in actions:
        if isinstance(action, protocol.ReleasePages):
          self.counters.released += len(action.pages)
          for page in action.pages:
            for call in self._pages.pop(page).owners.values():
              # Compare by equality, as each access to `x.method` makes a new
              # object.
              callback_pages = next(
                (m for c, m in callbacks if c == call), None
              )
              if callback_pages is None and call is not None:
                callbacks.append((call, callback_pages := []))
              if callback_pages is not None and callback_pages[-1:] != [page]:
                callback_pages.append(page)
      self._lock.notify_all()
    for call, pages in callbacks:
      try:
        call(tuple(pages))
      except Exception as error:
        # An error in an owner's callback must not stop other readers.
        warnings.warn(
          f"released{tuple(pages)} raised {error!r}",
          RuntimeWarning,
          stacklevel=2,
        )
    return actions

  def _watch(self) -> None:
    """End leases in time."""
    while True:
      with self._lock:
        ends = list(self._deadlines.values())
        wait_s = min(ends, default=self._clock() + _LOOK_S) - self._clock()
        self._lock.wait(min(max(wait_s, 0.001), _LOOK_S))
        if self._closed:
          return
      self.expire()

  # -------------------------------------------------------------------------
  # Connections
  # -------------------------------------------------------------------------

  def _greet(
    self, link: socket.socket, address: tuple[Any, ...]
  ) -> PullConnection:
    """Authenticate a reader; unauthenticated peers get little time."""
    try:
      return PullConnection.admit(
        link, address, self._key, self._patience_s, "reader"
      )
    except AuthenticationError:
      with self._lock:
        self.counters.strangers += 1
      raise

  def _drop_waiting(self) -> None:
    with self._lock:
      self.counters.turned_away += 1

  def _serve(self, wire: PullConnection) -> None:
    """Answer one reader until it leaves."""
    with self._lock:
      full = self._closed or len(self._wires) >= self._most
      connection = next(self._connections)
      if full:
        self.counters.turned_away += 1
      else:
        self._wires[connection] = wire
    if full:
      wire.close()
      return
    try:
      while (heard := wire.hear()) is not None:
        self._answer(connection, wire, *heard)
    except (AuthenticationError, HostileMessageError):
      with self._lock:
        self.counters.strangers += 1
    except PeerError:
      pass  # Its tickets end by their leases.
    finally:
      wire.close()
      with self._lock:
        del self._wires[connection]
        self._lock.notify_all()

  def _answer(
    self,
    connection: int,
    wire: PullConnection,
    message: protocol.Message,
    beside: dict[str, Any],
  ) -> None:
    if isinstance(message, protocol.ReadRequest):
      self._read(connection, wire, message, beside)
    elif isinstance(message, protocol.CompleteRequest | protocol.AbortRequest):
      for action in self._step(message):
        if isinstance(action, protocol.SendMessage):
          wire.tell(action.message)
    else:
      raise HostileMessageError(f"{wire.name} sent what publishers send")

  def _read(
    self,
    connection: int,
    wire: PullConnection,
    message: protocol.ReadRequest,
    beside: dict[str, Any],
  ) -> None:
    """Send the pages of a read, or the reason of a refusal."""
    # Readers of the same name on two connections count as two.
    request = dataclasses.replace(
      message, reader=f"{connection}:{message.reader}"
    )
    for action in self._step(request):
      if isinstance(action, protocol.StartRead):
        sent = False
        try:
          self._send_pages(wire, message, beside)
          sent = True
        finally:
          with self._lock:
            self.counters.reads += sent
            self.counters.broken += not sent
          self._step(protocol.ReadEnded(request))
      elif isinstance(action, protocol.SendMessage):
        with self._lock:
          self.counters.refused += 1
        assert isinstance(action.message, protocol.ReadRefused)
        wire.tell(dataclasses.replace(action.message, reader=message.reader))

  def _send_pages(
    self,
    wire: PullConnection,
    message: protocol.ReadRequest,
    beside: dict[str, Any],
  ) -> None:
    numbers = [page for page, _ in message.pages]
    with self._lock:
      pages = [self._pages[page] for page in numbers]
      deadline = self._deadline(numbers)
    if any(
      isinstance(page.data, DevicePage) and page.data.gone for page in pages
    ):
      why = "its arrays were deleted or donated"
      wire.tell(protocol.ReadRefused(message.reader, message.number, why))
      raise PeerError(f"a page's {why[4:]}")
    layout = pages[0].layout
    if any(page.layout != layout for page in pages):
      raise HostileMessageError(f"{wire.name} reads two layouts at once")
    slices = _slices(wire.name, layout, beside.get("parts"))
    wanted_leaves = [
      (leaf, n, cut)
      for n, (leaf, cut) in enumerate(zip(layout.leaves, slices, strict=True))
      if cut is not None
    ]
    size = len(pages) * sum(
      _part_bytes(leaf, cut) for leaf, _, cut in wanted_leaves
    )
    reply = protocol.ReadReply(
      message.incarnation, message.reader, message.number, message.pages
    )
    until = lambda: (
      max(deadline, self._deadline(numbers))
      + (self._patience_s - self._clock())
    )
    if beside.get("devices") is True:
      array_offer = self._offered_arrays(pages, slices, size, until())
      if array_offer is not None:
        offer, fields = array_offer
        wire.tell(reply, bytes=size, arrays=fields)
        self._wait_taken(wire, offer, until)
        with self._lock:
          self.counters.array_reads += 1
          self.counters.read_bytes += size
        return
    wire.tell(reply, bytes=size)
    page_leaves = [page.leaves for page in pages]
    for leaf, n, cut in wanted_leaves:
      views, copied = _cut_part(
        [leaves[n] for leaves in page_leaves], leaf, cut
      )
      wire.send(views, until)
      nbytes = sum(map(len, views))
      with self._lock:
        self.counters.read_bytes += nbytes
        self.counters.copied_bytes += nbytes * copied

  def _offered_arrays(
    self,
    pages: list[_HeldPage],
    slices: list[tuple[slice, ...] | None],
    nbytes: int,
    seconds: float,
  ) -> tuple[ArrayOffer, dict[str, Any]] | None:
    """Offer pages as arrays on devices; None if that is not possible.

    Then some are not on devices, they are too many, or there is no room.
    """
    device_pages = [
      page.data for page in pages if isinstance(page.data, DevicePage)
    ]
    if self._devices is None or len(device_pages) < len(pages) or seconds <= 0:
      return None
    if nbytes > self._devices.most - self._devices.held:
      return None
    try:
      pieces, cuts = cut_pages(device_pages, slices)
      texts = pieces_to_json(pieces)
      arrays = [cut() for cut in cuts]
      # Pulls that have begun by then continue.
      offer = self._devices.offer(arrays, min(seconds, self._patience_s))
    except (OSError, RuntimeError):
      # There are too many pieces, or no memory for the parts, or no port for
      # the server.
      return None
    if offer is None:
      return None
    return offer, {
      "host": self._devices.host,
      "ports": offer.ports,
      "number": offer.number,
      "pieces": texts,
    }

  def _wait_taken(
    self,
    wire: PullConnection,
    offer: ArrayOffer,
    until: Callable[[], float],
  ) -> None:
    """Wait until a reader has all of an offer; it reports its progress.

    Raises:
      PeerError: If it is gone, or silent for the patience.
    """
    assert self._devices is not None
    num_received = -1
    while True:
      fields = wire.hear_object(256, until)
      if fields is None:
        raise PeerError(f"{wire.name} left before it had all arrays")
      received_now, is_last = fields.get("came"), fields.get("done")
      if (
        type(received_now) is not int
        or received_now <= num_received
        or type(is_last) is not bool
      ):
        raise HostileMessageError(f"{wire.name} does not say what came")
      num_received = received_now
      if is_last:
        self._devices.taken(offer)
        return

  def _deadline(self, pages: list[int]) -> float:
    """Latest lease end of a read's pages; -inf if no lease is left."""
    with self._lock:
      tickets = self._pages[pages[0]].owners
      ends = [
        self._deadlines[ticket]
        for ticket in tickets
        if ticket in self._deadlines
      ]
    return max(ends, default=-float("inf"))


def _page_data(
  page: int,
  data: Buffer | Sequence[Buffer] | DevicePage,
  layout: PageLayout,
) -> tuple[memoryview, ...] | DevicePage:
  """Views of the bytes of each leaf of a page, without copies."""
  if isinstance(data, DevicePage):
    data.batch.check(page, data.row, layout)
    return data
  in_one_piece = isinstance(data, bytes | bytearray | memoryview | np.ndarray)
  parts: list[Any] = [data] if in_one_piece else list(data)
  views = [_view(page, part) for part in parts]
  sizes = [leaf.nbytes for leaf in layout.leaves]
  if in_one_piece and len(views[0]) == sum(sizes):
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(views[0][a:b] for a, b in itertools.pairwise(ends))
  if [len(view) for view in views] != sizes:
    raise OptionError(
      f"page {page}",
      f"{[len(view) for view in views]} bytes",
      f"{sizes} bytes, or {sum(sizes)} in one piece",
      "pass the leaves of the layout, in its order",
    )
  return tuple(views)


def _view(page: int, data: Any) -> memoryview:
  if isinstance(data, np.ndarray):
    if not data.flags.c_contiguous:
      raise OptionError(
        f"page {page}",
        "an array whose elements are apart",
        "contiguous bytes",
        "pass np.ascontiguousarray(page)",
      )
    # Dtypes of ml_dtypes do not support the buffer protocol.
    data = data.reshape(-1).view(np.uint8)
  try:
    view = memoryview(data)
  except TypeError:
    raise InputTypeError(
      f"page {page}",
      type(data).__name__,
      "bytes, or an array of NumPy",
      "pass np.asarray(page)",
    ) from None
  if not view.c_contiguous:
    raise OptionError(
      f"page {page}",
      "memory with gaps",
      "contiguous bytes",
      "pass a copy",
    )
  return view.cast("B")


def _slices(
  name: str, layout: PageLayout, parts: Any
) -> list[tuple[slice, ...] | None]:
  """Part of each leaf that a reader asks for; None for no part of it."""
  if parts is None:
    return [tuple(slice(0, n) for n in leaf.shape) for leaf in layout.leaves]
  if not isinstance(parts, list) or len(parts) != len(layout.leaves):
    raise HostileMessageError(f"{name} wants parts of other leaves")
  slices: list[tuple[slice, ...] | None] = []
  for leaf, part in zip(layout.leaves, parts, strict=True):
    if part is None:
      slices.append(None)
      continue
    if not isinstance(part, list) or len(part) != len(leaf.shape):
      raise HostileMessageError(f"{name} wants a part with other axes")
    cut = []
    for size, pair in zip(leaf.shape, part, strict=True):
      is_range = isinstance(pair, list) and len(pair) == 2
      is_range = is_range and all(type(bound) is int for bound in pair)
      if not is_range or not 0 <= pair[0] < pair[1] <= size:
        raise HostileMessageError(f"{name} wants a part that is not there")
      cut.append(slice(*pair))
    slices.append(tuple(cut))
  if all(cut is None for cut in slices):
    raise HostileMessageError(f"{name} wants nothing of its pages")
  return slices


def _part_bytes(leaf: PageLeaf, cut: tuple[slice, ...]) -> int:
  count = functools.reduce(
    lambda n, axis_slice: n * (axis_slice.stop - axis_slice.start), cut, 1
  )
  return count * (leaf.nbytes // int(np.prod(leaf.shape, dtype=np.int64)))


def _cut_part(
  pages: list[memoryview], leaf: PageLeaf, cut: tuple[slice, ...]
) -> tuple[list[memoryview], bool]:
  """Bytes of a part of each page, and whether they were copied."""
  if _part_bytes(leaf, cut) == leaf.nbytes:
    return pages, False
  item = _part_bytes(leaf, tuple(slice(0, 1) for _ in cut))
  parts, copied = collections.deque[memoryview](), False
  for page in pages:
    array = np.frombuffer(page, np.dtype((np.void, item)))
    part = array.reshape(leaf.shape)[cut]
    copied |= not part.flags.c_contiguous
    flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    parts.append(flat.data)
  return list(parts), copied
