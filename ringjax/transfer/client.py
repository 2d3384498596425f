"""Reader of published pages: pulls the pages of a ticket, all or a part.

Guarantees: the result is exactly the bytes that were published, all of them,
or a named error: `StaleTicketError` (the pages are gone),
`AuthenticationError`, or `PeerError` (the publisher is silent for `patience_s`
or has left). Arrays passed as `into` have any contents after an error.
Cost: one read for each run of pages that are consecutive on both sides (of at
most 4096 pages), `window` of them in flight; COMPLETE after the last byte.
Bytes are received in place if the target is contiguous. Pages
that the publisher has on devices come as arrays, one read at a time, if both
sides have a `DeviceServer`, and are copied to their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.parallel.links.connection import HostileMessageError, checked_key
from ringjax.transfer import protocol
from ringjax.transfer.description import PageLeaf, Ranges, Ticket, dtype_of
from ringjax.transfer.device_pages import (
  PagePiece,
  pieces_from_json,
  put_piece,
)
from ringjax.transfer.device_server import MOST_STREAMS, DeviceServer
from ringjax.transfer.wire import MOST_RUN, PullConnection

PATIENCE_S = 10.0
# Seconds between checks for arrived arrays, minimum and maximum.
_LOOKS_S = 0.0001, 0.002
# Minimum seconds between progress messages to the publisher.
_TELLS_S = 0.01
Address = tuple[str, int]


class StaleTicketError(PeerError):
  """The pages of a ticket were released, or have other contents now."""


class _ArraysError(PeerError):
  """JAX's transfer server reports that arrays do not arrive."""


@dataclasses.dataclass(frozen=True)
class PulledPages:
  """Pages that were pulled.

  Attributes:
    arrays: Arrays by leaf name, [pages, ...] of the part's shape.
    reads: Number of reads.
    nbytes: Number of bytes received.
    completed: Whether the publisher confirmed the completion; if not, the pages
      are released by the lease.
    labels: Label of the page in each row of the arrays, see
      `Publisher.publish`; "" for rows without a page.
    array_reads: Number of reads by JAX's transfer server.
  """

  arrays: dict[str, np.ndarray]
  reads: int
  nbytes: int
  completed: bool
  labels: tuple[str, ...]
  array_reads: int = 0


def pull(
  ticket: Ticket,
  address: Address,
  key: bytes,
  *,
  want: Ranges | None = None,
  pages: Sequence[int] | None = None,
  into: Mapping[str, np.ndarray] | None = None,
  places: Sequence[int] | None = None,
  reader: str | None = None,
  window: int = 2,
  patience_s: int | float = PATIENCE_S,
  devices: DeviceServer | None = None,
) -> PulledPages:
  """Pull pages of a ticket from the process that published it.

  Args:
    ticket: Ticket that `Publisher.publish` returned.
    address: Host and port of the publisher.
    key: Secret key of the publisher.
    want: Ranges of named axes, in indices of the whole array (see
      `PageLeaf.first`), within the union of the ticket's leaves; default: all.
      Leaves outside the ranges are left out.
    pages: Indices of pages within the ticket; default: all.
    into: Arrays to fill, by leaf, [any number, ...] of the part's shape;
      default: new ones with as many rows as pages.
    places: Row of the arrays for each page; default: 0, 1, 2, ...
    reader: Name of the reader, the same in a second attempt; default: random.
    window: Number of reads in flight; one with `devices`.
    patience_s: Seconds without a byte, or an array, after which the publisher
      counts as lost.
    devices: Receives pages from the publisher's devices, if it has a
      `DeviceServer`, too.

  Raises:
    StaleTicketError: If the pages are not published any more.
    AuthenticationError: If the publisher has another key.
    PeerError: If the publisher is silent, has left, or breaks the protocol.
    OptionError: If an argument does not fit the ticket.
  """
  _check_want(want or {}, [ticket])
  return _pull(
    ticket,
    address,
    key,
    want=want or {},
    pages=pages,
    into=into,
    places=places,
    reader=_reader(reader),
    window=window,
    patience_s=patience_s,
    devices=devices,
  )


def _pull(
  ticket: Ticket,
  address: Address,
  key: bytes,
  *,
  want: Ranges,
  pages: Sequence[int] | None = None,
  into: Mapping[str, np.ndarray] | None = None,
  places: Sequence[int] | None = None,
  reader: str,
  window: int = 2,
  patience_s: int | float,
  devices: DeviceServer | None = None,
) -> PulledPages:
  """Pull as `pull` does; ranges may go beyond the ticket's own leaves."""
  key = checked_key(key)
  number("patience_s", patience_s, above=0)
  positive_int("window", window)
  page_indices = list(range(len(ticket.pages)) if pages is None else pages)
  for n in page_indices:
    integer("pages", n, least=0, most=len(ticket.pages) - 1)
  if not page_indices:
    raise OptionError("pages", "none", "at least one page", "name some")
  cuts = [leaf.part(want) for leaf in ticket.layout.leaves]
  if all(cut is None for cut in cuts):
    raise OptionError(
      "want", want, "a part that the pages have", "widen the ranges"
    )
  target_rows = list(range(len(page_indices)) if places is None else places)
  arrays = _arrays(
    ticket.layout.leaves, cuts, len(page_indices), target_rows, into
  )
  keys = [ticket.pages[n] for n in page_indices]
  runs = [
    run[n : n + MOST_RUN]
    for run in protocol.coalesce([page for page, _ in keys], target_rows)
    for n in range(0, len(run), MOST_RUN)
  ]
  reads = [[keys[n] for n in run] for run in runs]
  while True:
    if devices is not None and not devices.reaches(ticket.incarnation):
      devices = None
    with _connected(address, key, patience_s) as wire:
      puller = _Puller(wire, ticket, cuts, arrays, runs, target_rows, devices)
      state, messages = protocol.start_pull(
        ticket.incarnation,
        ticket.number,
        reader,
        reads,
        # Progress messages for arrays must not come between read requests.
        window=window if devices is None else 1,
      )
      try:
        nbytes, completed = puller.run(state, messages)
        break
      except _ArraysError:
        # The publisher may be well, but unreachable for arrays: use bytes.
        continue
  labels = [""] * (max(target_rows) + 1)
  for row, n in zip(target_rows, page_indices, strict=True):
    labels[row] = ticket.labels[n]
  return PulledPages(
    arrays, len(runs), nbytes, completed, tuple(labels), puller.array_reads
  )


def decline(
  ticket: Ticket,
  address: Address,
  key: bytes,
  *,
  reader: str | None = None,
  patience_s: int | float = PATIENCE_S,
) -> None:
  """Tell the publisher that a reader of a ticket does not want its pages.

  Args:
    ticket: Ticket for which this reader was counted.
    address: Host and port of the publisher.
    key: Secret key of the publisher.
    reader: Name of the reader.
    patience_s: See `pull`.

  Raises:
    AuthenticationError, PeerError: As in `pull`.
  """
  name = _reader(reader)
  with _connected(address, checked_key(key), patience_s) as wire:
    abort = protocol.AbortRequest(ticket.incarnation, ticket.number, name)
    wire.tell(abort)


def pull_shards(
  sources: Sequence[tuple[Ticket, Address]],
  key: bytes,
  *,
  want: Ranges | None = None,
  reader: str | None = None,
  patience_s: int | float = PATIENCE_S,
  devices: DeviceServer | None = None,
) -> PulledPages:
  """Pull one shard out of pages that are stored on other shards.

  Args:
    sources: Tickets of as many pages, whose leaves state by `first` which part
      of the whole array they are; together they have the wanted part, once.
    key: Secret key of all publishers.
    want: Ranges of named axes of the whole array; default: all of it.
    reader: Name of the reader; each source sees it once, even a source without
      wanted data.
    patience_s: See `pull`.
    devices: See `pull`.

  Returns:
    The part, with the whole extent of axes that `want` does not name.

  Raises:
    OptionError: If the sources miss a part of what is wanted, have some of it
      twice, or have pages of different labels.
    StaleTicketError, AuthenticationError, PeerError: As in `pull`.
  """
  if not sources:
    raise OptionError("sources", "none", "at least one", "name the shards")
  name = _reader(reader)
  count, labels = len(sources[0][0].pages), sources[0][0].labels
  if any(len(ticket.pages) != count for ticket, _ in sources):
    raise OptionError(
      "sources",
      [len(ticket.pages) for ticket, _ in sources],
      "as many pages in each ticket",
      "publish the same tokens on each shard",
    )
  if any(ticket.labels != labels for ticket, _ in sources):
    raise OptionError(
      "sources",
      "pages of different labels",
      "the same labels in each ticket",
      "publish the same tokens on each shard, in one order",
    )
  want = want or {}
  tickets = [ticket for ticket, _ in sources]
  _check_want(want, tickets)
  whole_ranges = _wanted_ranges(tickets, want)
  _check_cover(tickets, whole_ranges, want)
  arrays = {
    leaf: np.empty((count, *(b - a for a, b in ranges)), dtype_of(dtype))
    for leaf, (ranges, dtype) in whole_ranges.items()
  }
  reads = nbytes = array_reads = 0
  completed = True
  for ticket, address in sources:
    leaves = ticket.layout.leaves
    if all(leaf.part(want) is None for leaf in leaves):
      decline(ticket, address, key, reader=name, patience_s=patience_s)
      continue
    into = {}
    for leaf in leaves:
      cut = leaf.part(want)
      if cut is not None:
        target_slices = _slices_in_whole(leaf, cut, whole_ranges[leaf.name][0])
        into[leaf.name] = arrays[leaf.name][(slice(None), *target_slices)]
    pulled = _pull(
      ticket,
      address,
      key,
      want=want,
      into=into,
      reader=name,
      patience_s=patience_s,
      devices=devices,
    )
    reads, nbytes = reads + pulled.reads, nbytes + pulled.nbytes
    array_reads += pulled.array_reads
    completed &= pulled.completed
  return PulledPages(arrays, reads, nbytes, completed, labels, array_reads)


def _reader(name: str | None) -> str:
  """Check a reader's name; None draws a random one."""
  if name is None:
    return secrets.token_hex(8)
  if not isinstance(name, str) or not 1 <= len(name) <= 256:
    raise OptionError(
      "reader", repr(name), "1 to 256 characters", "pass a short name"
    )
  return name


def _check_want(want: Ranges, tickets: Sequence[Ticket]) -> None:
  """Raise unless all axes are base, and all ranges are within them."""
  ends: dict[str, tuple[int, int]] = {}
  for ticket in tickets:
    for leaf in ticket.layout.leaves:
      for axis, size, first in zip(
        leaf.axes, leaf.shape, leaf.first, strict=True
      ):
        low, high = ends.get(axis, (first, first + size))
        ends[axis] = min(low, first), max(high, first + size)
  for axis, pair in want.items():
    if axis not in ends:
      raise OptionError(
        "want", f"the axis {axis!r}", f"some of {sorted(ends)}", "rename it"
      )
    low, high = ends[axis]
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or not all(type(bound) is int for bound in pair):
      raise OptionError(
        f"want[{axis!r}]", pair, "two integers", "pass (first, end)"
      )
    if not low <= pair[0] < pair[1] <= high:
      raise OptionError(
        f"want[{axis!r}]",
        f"{pair[0]} to {pair[1]}",
        f"a range within {low} to {high}",
        "narrow it to what was published",
      )


class _Puller:
  """One pull over one connection."""

  def __init__(
    self,
    wire: PullConnection,
    ticket: Ticket,
    cuts: list[tuple[slice, ...] | None],
    arrays: dict[str, np.ndarray],
    runs: list[range],
    where: list[int],
    devices: DeviceServer | None,
  ):
    self.wire, self.arrays, self.runs, self.where = wire, arrays, runs, where
    self.ticket, self.cuts, self.devices = ticket, cuts, devices
    self.array_reads = 0
    self.names = [
      leaf.name
      for leaf, cut in zip(ticket.layout.leaves, cuts, strict=True)
      if cut is not None
    ]
    self.parts = [
      None
      if cut is None
      else [[axis_slice.start, axis_slice.stop] for axis_slice in cut]
      for cut in cuts
    ]

  def run(
    self,
    state: protocol.PullState,
    messages: tuple[protocol.SendMessage, ...],
  ) -> tuple[int, bool]:
    """Run the protocol; (bytes received, whether COMPLETE was answered)."""
    nbytes = 0
    try:
      self._tell(messages)
      while state.phase in ("reads", "completes"):
        heard = self.wire.hear()
        if heard is None:
          raise PeerError(f"{self.wire.name} closed the connection")
        message, extra_fields = heard
        if isinstance(message, protocol.ReadReply):
          nbytes += self._receive(state, message, extra_fields)
        elif not isinstance(
          message, protocol.ReadRefused | protocol.CompleteReply
        ):
          raise HostileMessageError(f"{self.wire.name} sent a request")
        state, messages = protocol.pull_step(state, message)
        self._tell(messages)
    except PeerError:
      # All pages are here: the ticket then ends by its lease.
      if not state.accepted:
        raise
    if state.phase == "failed":
      raise StaleTicketError(
        f"{self.wire.name}: {state.why}; the ticket has ended, ask for a new "
        "one"
      )
    return nbytes, state.phase == "done"

  def _tell(self, messages: tuple[protocol.SendMessage, ...]) -> None:
    for action in messages:
      extra_fields: dict[str, Any] = {}
      if isinstance(action.message, protocol.ReadRequest):
        extra_fields["parts"] = self.parts
        if self.devices is not None:
          extra_fields["devices"] = True
      self.wire.tell(action.message, **extra_fields)

  def _receive(
    self,
    state: protocol.PullState,
    reply: protocol.ReadReply,
    beside: dict[str, Any],
  ) -> int:
    """Receive the bytes of a read into their rows; return their number."""
    expected = reply.number < state.requested and reply.number not in state.came
    if not expected or reply.pages != state.reads[reply.number]:
      raise HostileMessageError(f"{self.wire.name} sent pages unasked")
    run = self.runs[reply.number]
    first = self.where[run.start]
    rows = [
      self.arrays[leaf_name][first : first + len(run)]
      for leaf_name in self.names
    ]
    expected_bytes, size = (
      sum(rows_of_leaf.nbytes for rows_of_leaf in rows),
      beside.get("bytes"),
    )
    if size != expected_bytes:
      raise HostileMessageError(
        f"{self.wire.name} announced {str(size)[:40]} bytes of pages in place "
        f"of {expected_bytes}"
      )
    if "arrays" in beside:
      self._receive_arrays(beside["arrays"], rows)
      return expected_bytes
    for row in rows:
      direct = row if row.flags.c_contiguous else np.empty_like(row, order="C")
      self.wire.receive(direct.reshape(-1).view(np.uint8).data)
      if direct is not row:
        row[...] = direct
    return expected_bytes

  def _receive_arrays(self, fields: Any, rows: list[np.ndarray]) -> None:
    """Pull the pages of a read that are stored on the publisher's devices.

    Args:
      fields: The publisher's offer.
      rows: Target rows of each wanted leaf.
    """
    devices, wire = self.devices, self.wire
    try:
      if devices is None:
        raise ValueError("arrays that nobody asked for")
      host, ports, number = (fields[x] for x in ("host", "ports", "number"))
      pieces_json = fields["pieces"]
      if not isinstance(pieces_json, list):
        raise ValueError("no pieces")
      pieces = pieces_from_json(pieces_json, len(rows[0]), self.cuts)
      if not isinstance(host, str) or len(host) > 64:
        raise ValueError("no address")
      # An address only: host names would be looked up, for any time.
      ipaddress.ip_address(host)
      if not isinstance(ports, list) or not 2 <= len(ports) <= 1 + MOST_STREAMS:
        raise ValueError("no ports")
      for x, limit in (*((x, 1 << 16) for x in ports), (number, 1 << 62)):
        if type(x) is not int or not 0 < x < limit:
          raise ValueError("no offer of arrays")
      endpoint = host, tuple(ports)
    except (KeyError, TypeError, ValueError) as error:
      raise wire.hostile(error) from None
    leaves = self.ticket.layout.leaves
    names = iter(rows)
    places = [None if cut is None else next(names) for cut in self.cuts]
    shapes = [
      jax.ShapeDtypeStruct(piece.shape, dtype_of(leaves[piece.leaf].dtype))
      for piece in pieces
    ]
    try:
      arrays = devices.pull(
        *endpoint, number, shapes, seconds=wire.patience_s / len(ports)
      )
      for piece, array in self._arriving(pieces, arrays):
        target, cut = places[piece.leaf], self.cuts[piece.leaf]
        assert target is not None and cut is not None
        put_piece(target, piece, cut, np.asarray(array))
    except PeerError:
      devices.avoid(self.ticket.incarnation, *endpoint)
      raise
    except (OSError, RuntimeError) as error:
      devices.avoid(self.ticket.incarnation, *endpoint)
      raise _ArraysError(f"{wire.name}: {str(error)[:200]}") from None
    self.array_reads += 1
    wire.tell_object({"came": len(pieces), "done": True})

  def _arriving(
    self, pieces: list[PagePiece], arrays: list[Any]
  ) -> Iterator[tuple[PagePiece, Any]]:
    """Yield pieces as they arrive, and tell the publisher their number.

    Raises:
      PeerError: If none arrives within the patience, or the publisher is gone.
    """
    pending = list(zip(pieces, arrays, strict=True))
    shortest, longest = _LOOKS_S
    pause, told_s, last_arrival_s = shortest, 0.0, time.monotonic()
    num_told = 0
    while True:
      ready, not_ready = [], []
      for pending_piece in pending:
        (ready if pending_piece[1].is_ready() else not_ready).append(
          pending_piece
        )
      yield from ready
      pending = not_ready
      if not pending:
        return
      now_s = time.monotonic()
      num_arrived = len(pieces) - len(pending)
      # The publisher has its own patience, so it is told regularly.
      if num_arrived > num_told and now_s - told_s > _TELLS_S:
        self.wire.tell_object({"came": num_arrived, "done": False})
        told_s, num_told = now_s, num_arrived
      if ready:
        pause, last_arrival_s = shortest, now_s
      elif now_s - last_arrival_s > self.wire.patience_s:
        raise self.wire.fail(TimeoutError())
      self.wire.wait(pause)
      pause = min(2 * pause, longest)


def _connected(
  address: Address, key: bytes, patience_s: int | float
) -> contextlib.closing[PullConnection]:
  """Context manager of an authenticated connection to a publisher."""
  is_pair = isinstance(address, tuple | list) and len(address) == 2
  if not is_pair or type(address[1]) is not int or not 0 < address[1] < 1 << 16:
    raise OptionError(
      "address", address, "a host and a port", "pass Publisher.address"
    )
  name = f"publisher {address[0]}:{address[1]}"
  return contextlib.closing(
    PullConnection.connect((address[0], address[1]), key, patience_s, name)
  )


def _arrays(
  leaves: Sequence[PageLeaf],
  cuts: list[tuple[slice, ...] | None],
  count: int,
  where: list[int],
  into: Mapping[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
  """Arrays to fill, one for each wanted leaf."""
  if len(where) != count or len(set(where)) != count or min(where) < 0:
    raise OptionError(
      "places", where, f"{count} different rows", "name a row for each page"
    )
  arrays = {}
  for leaf, cut in zip(leaves, cuts, strict=True):
    if cut is None:
      continue
    shape = tuple(axis_slice.stop - axis_slice.start for axis_slice in cut)
    dtype = dtype_of(leaf.dtype)
    if into is None:
      arrays[leaf.name] = np.empty((max(where) + 1, *shape), dtype)
      continue
    array = into.get(leaf.name)
    usable = (
      array is not None
      and array.dtype == dtype
      and array.shape[1:] == shape
      and array.shape[0] > max(where)
      and array.flags.writeable
    )
    if array is None or not usable:
      raise OptionError(
        f"into[{leaf.name!r}]",
        "nothing" if array is None else f"{array.dtype}{array.shape}",
        f"a writable {dtype} array [above {max(where)}, {shape}]",
        "leave into out, or make it so",
      )
    arrays[leaf.name] = array
  return arrays


def _wanted_ranges(
  tickets: Sequence[Ticket], want: Ranges
) -> dict[str, tuple[list[tuple[int, int]], str]]:
  """(wanted range of each axis, dtype) by leaf, over all tickets."""
  ranges_by_leaf: dict[str, tuple[list[tuple[int, int]], str]] = {}
  first_leaf: dict[str, PageLeaf] = {}
  for ticket in tickets:
    for leaf in ticket.layout.leaves:
      base = first_leaf.setdefault(leaf.name, leaf)
      if (base.dtype, base.axes, base.codec) != (
        leaf.dtype,
        leaf.axes,
        leaf.codec,
      ):
        raise OptionError(
          f"leaf {leaf.name}",
          f"{leaf.dtype}, {leaf.axes}, {leaf.codec!r} beside {base.dtype}, "
          f"{base.axes}, {base.codec!r}",
          "one dtype, codec and names of axes",
          "publish the shards alike",
        )
      ends = [(a, a + n) for a, n in zip(leaf.first, leaf.shape, strict=True)]
      previous = ranges_by_leaf.get(leaf.name, (ends, ""))[0]
      joined = [
        (min(a, c), max(b, d))
        for (a, b), (c, d) in zip(previous, ends, strict=True)
      ]
      ranges_by_leaf[leaf.name] = joined, leaf.dtype
  return {
    name: (
      [
        want.get(axis, full_range)
        for axis, full_range in zip(first_leaf[name].axes, ranges, strict=True)
      ],
      dtype,
    )
    for name, (ranges, dtype) in ranges_by_leaf.items()
  }


def _slices_in_whole(
  leaf: PageLeaf, cut: tuple[slice, ...], ranges: list[tuple[int, int]]
) -> tuple[slice, ...]:
  """Slices of a leaf's part within the wanted part of the whole."""
  return tuple(
    slice(first + axis_slice.start - a, first + axis_slice.stop - a)
    for first, axis_slice, (a, _) in zip(leaf.first, cut, ranges, strict=True)
  )


def _overlap(a: tuple[slice, ...], b: tuple[slice, ...]) -> bool:
  return all(
    x.start < y.stop and y.start < x.stop for x, y in zip(a, b, strict=True)
  )


def _check_cover(
  tickets: Sequence[Ticket],
  ranges_by_leaf: dict[str, tuple[list[tuple[int, int]], str]],
  want: Ranges,
) -> None:
  """Raise unless each wanted number comes from exactly one source."""
  for name, (ranges, _) in ranges_by_leaf.items():
    boxes = []
    for ticket in tickets:
      for leaf in ticket.layout.leaves:
        cut = leaf.part(want) if leaf.name == name else None
        if cut is not None:
          boxes.append(_slices_in_whole(leaf, cut, ranges))
    size = sum(
      int(np.prod([axis_slice.stop - axis_slice.start for axis_slice in b]))
      for b in boxes
    )
    overlaps = any(_overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    if overlaps or size != int(np.prod([b - a for a, b in ranges])):
      raise OptionError(
        f"leaf {name}",
        "parts that overlap" if overlaps else "parts with gaps",
        f"each number of {ranges} from one source",
        "name each shard once",
      )
