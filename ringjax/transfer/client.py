"""The reader: pulls the pages of a ticket, whole or in part.

Guarantees: what is returned are the bytes that were published, all of them,
or an error by name: `StaleTicketError` (the pages are gone),
`AuthenticationError`, or `PeerError` (the publisher is silent for `patience_s`
or has left). Arrays passed as `into` have any contents after an error.
Cost: one read for each run of pages that are neighbours on both sides (of at
most 4096 pages), `window` of them asked for at once; COMPLETE behind the last
byte. Bytes are received where they belong if the place is contiguous. Pages
that the publisher has on devices come as arrays, one read at a time, if both
sides have a `DeviceServer`, and are copied to where they belong.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.transfer import protocol
from ringjax.transfer.description import PageLeaf, Ranges, Ticket, dtype_of
from ringjax.transfer.device_pages import (
  PagePiece,
  pieces_from_json,
  put_piece,
)
from ringjax.transfer.device_server import MOST_STREAMS, DeviceServer
from ringjax.transfer.wire import (
  MOST_RUN,
  HostileMessageError,
  PullConnection,
  checked_key,
)

PATIENCE_S = 10.0
# How often arrays that come are looked at, at least and at most.
_LOOKS_S = 0.0001, 0.002
# How often at most the publisher is told that some came.
_TELLS_S = 0.01
Address = tuple[str, int]


class StaleTicketError(PeerError):
  """The pages of a ticket returned, or have other contents by now."""


class _ArraysError(PeerError):
  """JAX's transfer server says that arrays do not come."""


@dataclasses.dataclass(frozen=True)
class PulledPages:
  """Pages that were pulled.

  Attributes:
    arrays: by the name of a leaf, [pages, ...] of the part's shape.
    reads: how many it took.
    nbytes: that came.
    completed: whether the publisher said that it knows; if not, the pages
      return by the lease.
    labels: of the page in each row of the arrays, see `Publisher.publish`; ""
      for rows without a page.
    array_reads: of the reads, by JAX's transfer server.
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
  """Pulls pages of a ticket from the process that published it.

  Args:
    ticket: what `Publisher.publish` returned.
    address: host and port of the publisher.
    key: that of the publisher.
    want: ranges of named axes, in the numbers of the whole array (see
      `PageLeaf.first`), within what the ticket's leaves have together;
      default: all. Leaves without any of it are left out.
    pages: which of the ticket's, by their places in it; default: all.
    into: arrays to fill, by leaf, [any number, ...] of the part's shape;
      default: new ones with as many rows as pages.
    places: which row of the arrays each page gets; default: 0, 1, 2, ...
    reader: a name, the same in a second attempt; default: a random one.
    window: reads that are asked for at once; one with `devices`.
    patience_s: seconds without a byte, or an array, after which the publisher
      is given up.
    devices: gets pages from the publisher's devices, where it has one, too.

  Raises:
    StaleTicketError: the pages are not published any more.
    AuthenticationError: the publisher has another key.
    PeerError: the publisher is silent, has left, or sends what it should not.
    OptionError: an argument does not fit the ticket.
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
  """See `pull`; ranges are of the whole that other tickets have parts of."""
  key = checked_key(key)
  number("patience_s", patience_s, above=0)
  positive_int("window", window)
  which = list(range(len(ticket.pages)) if pages is None else pages)
  for n in which:
    integer("pages", n, least=0, most=len(ticket.pages) - 1)
  if not which:
    raise OptionError("pages", "none", "at least one page", "name some")
  cuts = [leaf.part(want) for leaf in ticket.layout.leaves]
  if all(cut is None for cut in cuts):
    raise OptionError(
      "want", want, "a part that the pages have", "widen the ranges"
    )
  where = list(range(len(which)) if places is None else places)
  arrays = _arrays(ticket.layout.leaves, cuts, len(which), where, into)
  keys = [ticket.pages[n] for n in which]
  runs = [
    run[n : n + MOST_RUN]
    for run in protocol.coalesce([page for page, _ in keys], where)
    for n in range(0, len(run), MOST_RUN)
  ]
  reads = [[keys[n] for n in run] for run in runs]
  while True:
    if devices is not None and not devices.reaches(ticket.incarnation):
      devices = None
    with _Connection(address, key, patience_s) as wire:
      puller = _Puller(wire, ticket, cuts, arrays, runs, where, devices)
      state, messages = protocol.start_pull(
        ticket.incarnation,
        ticket.number,
        reader,
        reads,
        # What a reader says while arrays come is not said between requests.
        window=window if devices is None else 1,
      )
      try:
        nbytes, completed = puller.run(state, messages)
        break
      except _ArraysError:
        # The publisher may be well, but not reached this way.
        continue
  labels = [""] * (max(where) + 1)
  for row, n in zip(where, which, strict=True):
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
  """Tells the publisher that a reader of a ticket does not want its pages.

  Args:
    ticket: of which this reader is one.
    address: of the publisher.
    key: that of the publisher.
    reader: its name.
    patience_s: see `pull`.

  Raises:
    AuthenticationError, PeerError: see `pull`.
  """
  name = _reader(reader)
  with _Connection(address, checked_key(key), patience_s) as wire:
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
  """Pulls one shard out of pages that lie on other shards.

  Args:
    sources: tickets of as many pages, whose leaves say by `first` which part
      of the whole array they are; together they have what is wanted, once.
    key: of all publishers.
    want: ranges of named axes of the whole array; default: all of it.
    reader: a name; each source sees it once, also one that has nothing to give.
    patience_s: see `pull`.
    devices: see `pull`.

  Returns:
    The part, with the whole extent of axes that `want` does not name.

  Raises:
    OptionError: the sources do not have all that is wanted, or have some
      twice, or have pages of different labels.
    StaleTicketError, AuthenticationError, PeerError: see `pull`.
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
  whole = _wholes(tickets, want)
  _check_cover(tickets, whole, want)
  arrays = {
    leaf: np.empty((count, *(b - a for a, b in ranges)), dtype_of(dtype))
    for leaf, (ranges, dtype) in whole.items()
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
        at = _at(leaf, cut, whole[leaf.name][0])
        into[leaf.name] = arrays[leaf.name][(slice(None), *at)]
    got = _pull(
      ticket,
      address,
      key,
      want=want,
      into=into,
      reader=name,
      patience_s=patience_s,
      devices=devices,
    )
    reads, nbytes = reads + got.reads, nbytes + got.nbytes
    array_reads += got.array_reads
    completed &= got.completed
  return PulledPages(arrays, reads, nbytes, completed, labels, array_reads)


def _reader(name: str | None) -> str:
  """The name of a reader; a random one if it has none."""
  if name is None:
    return secrets.token_hex(8)
  if not isinstance(name, str) or not 1 <= len(name) <= 256:
    raise OptionError(
      "reader", repr(name), "1 to 256 characters", "pass a short name"
    )
  return name


def _check_want(want: Ranges, tickets: Sequence[Ticket]) -> None:
  """Raises unless all axes are known, and all ranges are within them."""
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
    fits = isinstance(pair, tuple | list) and len(pair) == 2
    if not fits or not all(type(x) is int for x in pair):
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
      None if cut is None else [[c.start, c.stop] for c in cut] for cut in cuts
    ]

  def run(
    self,
    state: protocol.PullState,
    messages: tuple[protocol.SendMessage, ...],
  ) -> tuple[int, bool]:
    """Bytes that came, and whether COMPLETE was answered."""
    nbytes = 0
    try:
      self._tell(messages)
      while state.phase in ("reads", "completes"):
        heard = self.wire.hear()
        if heard is None:
          raise PeerError(f"{self.wire.name} closed the connection")
        message, beside = heard
        if isinstance(message, protocol.ReadReply):
          nbytes += self._receive(state, message, beside)
        elif not isinstance(
          message, protocol.ReadRefused | protocol.CompleteReply
        ):
          raise HostileMessageError(f"{self.wire.name} sent a request")
        state, messages = protocol.pull_step(state, message)
        self._tell(messages)
    except PeerError:
      # With all pages here only the lease is left to end the ticket.
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
      beside: dict[str, Any] = {}
      if isinstance(action.message, protocol.ReadRequest):
        beside["parts"] = self.parts
        if self.devices is not None:
          beside["devices"] = True
      self.wire.tell(action.message, **beside)

  def _receive(
    self,
    state: protocol.PullState,
    reply: protocol.ReadReply,
    beside: dict[str, Any],
  ) -> int:
    """The bytes of a read, into their rows."""
    expected = reply.number < state.asked and reply.number not in state.came
    if not expected or reply.pages != state.reads[reply.number]:
      raise HostileMessageError(f"{self.wire.name} sent pages unasked")
    run = self.runs[reply.number]
    first = self.where[run.start]
    rows = [self.arrays[x][first : first + len(run)] for x in self.names]
    wanted, size = sum(x.nbytes for x in rows), beside.get("bytes")
    if size != wanted:
      raise HostileMessageError(
        f"{self.wire.name} announced {str(size)[:40]} bytes of pages in place "
        f"of {wanted}"
      )
    if "arrays" in beside:
      self._receive_arrays(beside["arrays"], rows)
      return wanted
    for row in rows:
      direct = row if row.flags.c_contiguous else np.empty_like(row, order="C")
      self.wire.receive(direct.reshape(-1).view(np.uint8).data)
      if direct is not row:
        row[...] = direct
    return wanted

  def _receive_arrays(self, fields: Any, rows: list[np.ndarray]) -> None:
    """The pages of a read that lie on the publisher's devices.

    Args:
      fields: of the publisher, what it offers.
      rows: of each leaf of which something is wanted.
    """
    devices, wire = self.devices, self.wire
    try:
      if devices is None:
        raise ValueError("arrays that nobody asked for")
      host, ports, number = (fields[x] for x in ("host", "ports", "number"))
      told = fields["pieces"]
      if not isinstance(told, list):
        raise ValueError("no pieces")
      pieces = pieces_from_json(told, len(rows[0]), self.cuts)
      if not isinstance(host, str) or len(host) > 64:
        raise ValueError("no address")
      # Names would be asked for, for any time.
      ipaddress.ip_address(host)
      if not isinstance(ports, list) or not 2 <= len(ports) <= 1 + MOST_STREAMS:
        raise ValueError("no ports")
      for x, most in (*((x, 1 << 16) for x in ports), (number, 1 << 62)):
        if type(x) is not int or not 0 < x < most:
          raise ValueError("no offer of arrays")
      at = host, tuple(ports)
    except (KeyError, TypeError, ValueError) as error:
      raise wire.hostile(error) from None
    leaves = self.ticket.layout.leaves
    names = iter(rows)
    places = [None if cut is None else next(names) for cut in self.cuts]
    shapes = [
      jax.ShapeDtypeStruct(x.shape, dtype_of(leaves[x.leaf].dtype))
      for x in pieces
    ]
    try:
      arrays = devices.pull(
        *at, number, shapes, seconds=wire.patience_s / len(ports)
      )
      for piece, array in self._arrived(pieces, arrays):
        target, cut = places[piece.leaf], self.cuts[piece.leaf]
        assert target is not None and cut is not None
        put_piece(target, piece, cut, np.asarray(array))
    except PeerError:
      devices.avoid(self.ticket.incarnation, *at)
      raise
    except (OSError, RuntimeError) as error:
      devices.avoid(self.ticket.incarnation, *at)
      raise _ArraysError(f"{wire.name}: {str(error)[:200]}") from None
    self.array_reads += 1
    wire.tell_object({"came": len(pieces), "done": True})

  def _arrived(
    self, pieces: list[PagePiece], arrays: list[Any]
  ) -> Iterator[tuple[PagePiece, Any]]:
    """Pieces as they come; the publisher is told how many did.

    Raises:
      PeerError: none came for the patience, or the publisher is gone.
    """
    left = list(zip(pieces, arrays, strict=True))
    shortest, longest = _LOOKS_S
    pause, told, last = shortest, 0.0, time.monotonic()
    said = 0
    while True:
      ready, others = [], []
      for one in left:
        (ready if one[1].is_ready() else others).append(one)
      yield from ready
      left = others
      if not left:
        return
      now = time.monotonic()
      came = len(pieces) - len(left)
      # The publisher's patience may be another one.
      if came > said and now - told > _TELLS_S:
        self.wire.tell_object({"came": came, "done": False})
        told, said = now, came
      if ready:
        pause, last = shortest, now
      elif now - last > self.wire.patience_s:
        raise self.wire.fail(TimeoutError())
      self.wire.wait(pause)
      pause = min(2 * pause, longest)


class _Connection:
  """A greeted connection, for a `with`."""

  def __init__(self, address: Address, key: bytes, patience_s: int | float):
    fits = isinstance(address, tuple | list) and len(address) == 2
    if not fits or type(address[1]) is not int or not 0 < address[1] < 1 << 16:
      raise OptionError(
        "address", address, "a host and a port", "pass Publisher.address"
      )
    host, port = address
    self._name = f"publisher {host}:{port}"
    try:
      link = socket.create_connection((host, port), patience_s)
    except OSError as error:
      raise PeerError(f"{self._name} cannot be reached: {error}") from None
    self._wire, self._key = PullConnection(link, patience_s, self._name), key

  def __enter__(self) -> PullConnection:
    try:
      self._wire.greet_publisher(self._key)
    except BaseException:
      self._wire.close()
      raise
    return self._wire

  def __exit__(self, *_: object) -> None:
    self._wire.close()


def _arrays(
  leaves: Sequence[PageLeaf],
  cuts: list[tuple[slice, ...] | None],
  count: int,
  where: list[int],
  into: Mapping[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
  """The arrays to fill, one for each leaf of which something is wanted."""
  if len(where) != count or len(set(where)) != count or min(where) < 0:
    raise OptionError(
      "places", where, f"{count} different rows", "name a row for each page"
    )
  found = {}
  for leaf, cut in zip(leaves, cuts, strict=True):
    if cut is None:
      continue
    shape = tuple(c.stop - c.start for c in cut)
    dtype = dtype_of(leaf.dtype)
    if into is None:
      found[leaf.name] = np.empty((max(where) + 1, *shape), dtype)
      continue
    array = into.get(leaf.name)
    fits = (
      array is not None
      and array.dtype == dtype
      and array.shape[1:] == shape
      and array.shape[0] > max(where)
      and array.flags.writeable
    )
    if array is None or not fits:
      raise OptionError(
        f"into[{leaf.name!r}]",
        "nothing" if array is None else f"{array.dtype}{array.shape}",
        f"a writable {dtype} array [above {max(where)}, {shape}]",
        "leave into out, or make it so",
      )
    found[leaf.name] = array
  return found


def _wholes(
  tickets: Sequence[Ticket], want: Ranges
) -> dict[str, tuple[list[tuple[int, int]], str]]:
  """Of each leaf: the wanted range of each axis, and its dtype."""
  found: dict[str, tuple[list[tuple[int, int]], str]] = {}
  known: dict[str, PageLeaf] = {}
  for ticket in tickets:
    for leaf in ticket.layout.leaves:
      same = known.setdefault(leaf.name, leaf)
      if (same.dtype, same.axes, same.codec) != (
        leaf.dtype,
        leaf.axes,
        leaf.codec,
      ):
        raise OptionError(
          f"leaf {leaf.name}",
          f"{leaf.dtype}, {leaf.axes}, {leaf.codec!r} beside {same.dtype}, "
          f"{same.axes}, {same.codec!r}",
          "one dtype, codec and names of axes",
          "publish the shards alike",
        )
      ends = [(a, a + n) for a, n in zip(leaf.first, leaf.shape, strict=True)]
      before = found.get(leaf.name, (ends, ""))[0]
      joined = [
        (min(a, c), max(b, d))
        for (a, b), (c, d) in zip(before, ends, strict=True)
      ]
      found[leaf.name] = joined, leaf.dtype
  return {
    name: (
      [
        want.get(axis, whole)
        for axis, whole in zip(known[name].axes, ranges, strict=True)
      ],
      dtype,
    )
    for name, (ranges, dtype) in found.items()
  }


def _at(
  leaf: PageLeaf, cut: tuple[slice, ...], ranges: list[tuple[int, int]]
) -> tuple[slice, ...]:
  """Where a leaf's part lies in the wanted part of the whole."""
  return tuple(
    slice(first + c.start - a, first + c.stop - a)
    for first, c, (a, _) in zip(leaf.first, cut, ranges, strict=True)
  )


def _meet(a: tuple[slice, ...], b: tuple[slice, ...]) -> bool:
  return all(
    x.start < y.stop and y.start < x.stop for x, y in zip(a, b, strict=True)
  )


def _check_cover(
  tickets: Sequence[Ticket],
  whole: dict[str, tuple[list[tuple[int, int]], str]],
  want: Ranges,
) -> None:
  """Raises unless each wanted number comes from one source."""
  for name, (ranges, _) in whole.items():
    boxes = []
    for ticket in tickets:
      for leaf in ticket.layout.leaves:
        cut = leaf.part(want) if leaf.name == name else None
        if cut is not None:
          boxes.append(_at(leaf, cut, ranges))
    size = sum(int(np.prod([c.stop - c.start for c in b])) for b in boxes)
    twice = any(_meet(a, b) for a, b in itertools.combinations(boxes, 2))
    if twice or size != int(np.prod([b - a for a, b in ranges])):
      raise OptionError(
        f"leaf {name}",
        "parts that overlap" if twice else "parts with gaps",
        f"each number of {ranges} from one source",
        "name each shard once",
      )
