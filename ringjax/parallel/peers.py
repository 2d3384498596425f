"""A group of processes: values for all of them, and which one has failed.

Guarantees: when a process dies, freezes or gets stuck, every other one learns
within `timeout_s` which it was, and those that wait for it are woken with a
`PeerError`. Nothing here computes, and no wait lasts beyond a failure.
Cost: p (p - 1) / 2 quiet TCP connections, a small message on each now and then.

Each pair of ranks has a control connection for small JSON messages: what each
is doing, values for all, the news of a failure. Arrays go through connections
of their own between neighbours (`link`), so that messages never queue behind
them.

  dead    its connections close                              (at once)
  frozen  it sends no message for `timeout_s`
  stuck   it works, but has made no progress for `timeout_s`

A rank that waits for another is never taken for a failed one. The processes
find each other through `jax.distributed`, whose own heartbeats do not serve
here: they end all processes, and do not tell a stuck rank from a waiting one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import itertools
import json
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # The key-value store has no public name.

from ringjax.checks import number
from ringjax.errors import PeerError
from ringjax.json_text import json_text
from ringjax.parallel.door import Door

TIMEOUT_S = 10.0
_MAGIC = b"ringjax1"
_HELLO = struct.Struct("<8s32sIB")
_SIZE = struct.Struct("<I")
_CONTROL, _ARRAYS = 0, 1
_LARGEST_BYTES = 1 << 26
_MEETINGS = itertools.count()

# What a rank may be doing. Only one that works has to make progress.
STARTING, WORKING, TOGETHER, WAITING = "starts", "works", "together", "waits"


@dataclasses.dataclass
class _Peer:
  """What is known of another rank; times by this rank's clock."""

  control: socket.socket
  heard_s: float
  moved_s: float
  doing: str = STARTING
  ticks: int = 0
  step: int = 0
  left: bool = False
  buffer: bytearray = dataclasses.field(default_factory=bytearray)
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Peers:
  """The ranks of a group, as one of them sees the others.

  Attributes:
    rank: of this process.
    size: how many there are.
    timeout_s: how long another may be silent, or work without progress.
    failure: the first failure of the group, or None.
    offset_s: what to add to this rank's `time.monotonic()` for rank 0's.
  """

  def __init__(
    self,
    rank: int,
    size: int,
    control: dict[int, socket.socket],
    links: dict[int, socket.socket],
    timeout_s: int | float = TIMEOUT_S,
  ):
    """Takes the connections to each rank and to neighbours; see `meet`."""
    now = time.monotonic()
    self.rank, self.size, self.timeout_s = rank, size, timeout_s
    self.failure: PeerError | None = None
    self.offset_s = 0.0
    self._links = links
    self._peers = {
      r: _Peer(s, heard_s=now, moved_s=now) for r, s in control.items()
    }
    self._doing, self._ticks, self._step = STARTING, 0, 0
    self._news = threading.Condition()
    self._values: dict[tuple[int, int], Any] = {}
    self._calls = itertools.count()
    self._pongs: dict[int, float] = {}
    self._on_failure: list[Callable[[PeerError], Any]] = []
    self._every_s = min(1.0, timeout_s / 8)
    self._closed = False
    self._thread = threading.Thread(
      target=self._watch, name=f"ringjax peers of rank {rank}", daemon=True
    )
    self._thread.start()

  # -------------------------------------------------------------------------
  # Meeting
  # -------------------------------------------------------------------------

  @classmethod
  def meet(
    cls,
    rank: int,
    size: int,
    exchange: Callable[[str], Sequence[str]],
    *,
    host: str = "127.0.0.1",
    timeout_s: int | float = TIMEOUT_S,
  ) -> Peers:
    """Connects this process to the others of its group.

    Args:
      rank: of this process.
      size: ranks of the group.
      exchange: gives its argument to all ranks and returns what they gave.
      host: under which the others reach this one.
      timeout_s: see `Peers`.

    Raises:
      PeerError: a rank did not connect in time.
      OptionError: the timeout is not above 0.
    """
    number("timeout_s", timeout_s, above=0)
    patience_s = max(30.0, timeout_s)
    local = host in ("127.0.0.1", "localhost")
    with socket.create_server(
      ("127.0.0.1" if local else "", 0), backlog=2 * size
    ) as server:
      card = {
        "host": host,
        "port": server.getsockname()[1],
        "secret": secrets.token_hex(32) if rank == 0 else "",
      }
      cards = [json.loads(c) for c in exchange(json_text(card))]
      secret = bytes.fromhex(cards[0]["secret"])
      greet = functools.partial(_greet, secret)
      control: dict[int, socket.socket] = {}
      links: dict[int, socket.socket] = {}
      by_kind = {_CONTROL: control, _ARRAYS: links}
      try:
        # The rank of the higher number connects.
        for other in range(rank):
          for kind in [_CONTROL] + [_ARRAYS] * (other == rank - 1):
            address = cards[other]["host"], cards[other]["port"]
            made = socket.create_connection(address, patience_s)
            made.sendall(_HELLO.pack(_MAGIC, secret, rank, kind))
            by_kind[kind][other] = made
        expected = size - 1 - rank + (rank < size - 1)
        with Door(server, greet, name="ringjax peers") as door:
          while expected:
            accepted = door.accept(patience_s)
            assert accepted is not None
            made, other, kind = accepted
            by_kind[kind][other] = made
            expected -= 1
      except OSError as error:
        missing = [r for r in range(size) if r != rank and r not in control]
        raise PeerError(
          f"rank {rank}: no connection to rank {missing or [rank - 1]} within "
          f"{patience_s:g} s: {error}",
          missing[0] if missing else None,
        ) from None
    for made in (*control.values(), *links.values()):
      made.settimeout(None)
      made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self = cls(rank, size, control, links, timeout_s)
    self._set_clock()
    return self

  @classmethod
  def of_processes(cls, *, timeout_s: int | float = TIMEOUT_S) -> Peers:
    """The processes of `jax.distributed`; a group of one without others."""
    rank, size = jax.process_index(), jax.process_count()
    if size == 1:
      return cls(0, 1, {}, {}, timeout_s)
    state: Any = distributed.global_state
    number = next(_MEETINGS)
    key = lambda r: f"ringjax/peers/{number}/{r}"
    patience_ms = int(1000 * max(300.0, timeout_s))

    def exchange(mine: str) -> list[str]:
      state.client.key_value_set(key(rank), mine)
      return [
        state.client.blocking_key_value_get(key(r), patience_ms)
        for r in range(size)
      ]

    host = _own_address(state.coordinator_address)
    return cls.meet(rank, size, exchange, host=host, timeout_s=timeout_s)

  @classmethod
  def in_threads(
    cls, size: int, *, timeout_s: int | float = TIMEOUT_S
  ) -> list[Peers]:
    """A group inside of this process, one rank for each thread."""
    cards = [""] * size
    all_here = threading.Barrier(size)
    made: list[Any] = [None] * size

    def join(rank: int) -> None:
      def exchange(mine: str) -> list[str]:
        cards[rank] = mine
        all_here.wait()
        return cards

      made[rank] = cls.meet(rank, size, exchange, timeout_s=timeout_s)

    threads = [threading.Thread(target=join, args=(r,)) for r in range(size)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return made

  # -------------------------------------------------------------------------
  # Telling the others
  # -------------------------------------------------------------------------

  def tick(self, step: int = 0) -> None:
    """Counts progress of this rank; of a common operation, to this step."""
    self._ticks += 1
    self._step = step

  @contextlib.contextmanager
  def doing(self, what: str) -> Iterator[None]:
    """Tells the others what this rank does inside of the block."""
    before, self._doing = self._doing, what
    try:
      yield
    finally:
      self._doing = before
      # After a wait the time without progress counts from 0.
      self._ticks += 1

  def gather(self, value: object) -> list[Any]:
    """The value of each rank, in their order; JSON values.

    Raises:
      PeerError: a rank failed, or left.
    """
    call = next(self._calls)
    self._tell_all({"t": "put", "n": call, "v": value})
    found = {self.rank: value}

    def complete() -> bool:
      for r, peer in self._peers.items():
        if (call, r) in self._values:
          found[r] = self._values.pop((call, r))
        elif r not in found and peer.left:
          raise PeerError(f"rank {r} has left the others", rank=r)
      return len(found) == self.size

    self.wait(complete)
    return [found[r] for r in range(self.size)]

  def wait(self, until: Callable[[], bool]) -> None:
    """Waits until a condition holds; `wake` has it evaluated again.

    Raises:
      PeerError: a rank failed meanwhile.
    """
    with self.doing(WAITING):
      self.rest(until)

  def rest(self, until: Callable[[], bool]) -> None:
    """As `wait`, for a thread beside the one that works."""
    with self._news:
      while not until():
        if self.failure is not None:
          raise self.failure
        self._news.wait(0.5)

  def wake(self) -> None:
    """Has the threads that wait evaluate their conditions again."""
    with self._news:
      self._news.notify_all()

  def link(self, rank: int) -> socket.socket:
    """The connection for arrays, to a neighbour."""
    return self._links[rank]

  def check(self) -> None:
    """Raises PeerError if a rank failed."""
    if self.failure is not None:
      raise self.failure

  def on_failure(self, call: Callable[[PeerError], Any]) -> None:
    """Has `call` called, from another thread, as soon as a rank fails."""
    self._on_failure.append(call)

  def abandon(self, error: BaseException) -> None:
    """Tells the others that this rank cannot go on."""
    if self.failure is None:
      # This rank's own callbacks are for failures of others.
      self._on_failure = []
      why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
      self._fail(self.rank, f"failed: {why}")

  @contextlib.contextmanager
  def abandoning(self) -> Iterator[None]:
    """Tells the others of an error in its body, and raises what is the cause:
    a socket that closed because another rank failed is that rank's failure."""
    try:
      yield
    except PeerError:
      raise
    except BaseException as error:
      self.abandon(error)
      if self.failure is not None and isinstance(error, OSError):
        raise self.failure from None
      raise

  def report_failure(
    self, rank: int, why: str, grace_s: int | float = 1.0
  ) -> PeerError:
    """Reports that `rank` failed, unless a failure becomes known meanwhile.

    Args:
      rank: which one.
      why: what it did.
      grace_s: how long to wait for another rank's report.

    Returns:
      The failure of the group.
    """
    end = time.monotonic() + grace_s
    with self._news:
      while self.failure is None and time.monotonic() < end:
        self._news.wait(0.05)
    self._fail(rank, why)
    assert self.failure is not None
    return self.failure

  def close(self) -> None:
    """Leaves the group; the others may go on."""
    if not self._closed:
      self._tell_all({"t": "bye"})
      self._closed = True
      self._thread.join(2 * self._every_s)
      self._shut()

  # -------------------------------------------------------------------------
  # Watching
  # -------------------------------------------------------------------------

  def _watch(self) -> None:
    selector = selectors.DefaultSelector()
    for r, peer in self._peers.items():
      selector.register(peer.control, selectors.EVENT_READ, r)
    last = next_s = time.monotonic()
    while not self._closed and self.failure is None:
      now = time.monotonic()
      if now - last > max(3 * self._every_s, self.timeout_s / 2):
        # This process itself did not run: its clocks of the others restart.
        for peer in self._peers.values():
          peer.heard_s = peer.moved_s = now
      last = now
      if now >= next_s:
        am = {"doing": self._doing, "n": self._ticks, "step": self._step}
        self._tell_all({"t": "am", **am})
        next_s = now + self._every_s
      for key, _ in selector.select(min(0.1, max(0.0, next_s - now))):
        if not self._receive(key.data):
          selector.unregister(key.fileobj)
      self._check_peers(time.monotonic())
    selector.close()

  def _receive(self, rank: int) -> bool:
    """Reads the messages of a rank; False where no more can come."""
    peer = self._peers[rank]
    try:
      data = peer.control.recv(1 << 16)
    except OSError:
      data = b""
    if not data:
      if not peer.left:
        self._fail(rank, "is gone: its connection closed")
      return False
    peer.heard_s = time.monotonic()
    peer.buffer += data
    while len(peer.buffer) >= _SIZE.size:
      (size,) = _SIZE.unpack_from(peer.buffer)
      if size > _LARGEST_BYTES:
        self._fail(rank, f"sent a message of {size} bytes")
        return False
      if len(peer.buffer) < _SIZE.size + size:
        break
      message = json.loads(peer.buffer[_SIZE.size : _SIZE.size + size])
      del peer.buffer[: _SIZE.size + size]
      self._handle(rank, peer, message)
    return True

  def _handle(self, rank: int, peer: _Peer, message: dict[str, Any]) -> None:
    kind = message["t"]
    if kind == "am":
      if (message["doing"], message["n"]) != (peer.doing, peer.ticks):
        peer.doing, peer.ticks = message["doing"], message["n"]
        peer.step = message["step"]
        peer.moved_s = peer.heard_s
    elif kind == "put":
      self._values[message["n"], rank] = message["v"]
      self.wake()
    elif kind == "ping":
      answer = {"t": "pong", "n": message["n"], "at": time.monotonic()}
      self._tell(rank, answer)
    elif kind == "pong":
      self._pongs[message["n"]] = message["at"]
      self.wake()
    elif kind == "bye":
      peer.left = True
      self.wake()
    elif kind == "fail":
      why = message["why"]
      if message["rank"] == self.rank:
        why = f"was given up by rank {rank}: {why}"
      self._fail(message["rank"], why)

  def _check_peers(self, now: float) -> None:
    """Fails ranks that are silent or stuck."""
    for rank, peer in self._peers.items():
      if peer.left or self.failure is not None:
        continue
      if now - peer.heard_s > self.timeout_s:
        self._fail(rank, f"has said nothing for {self.timeout_s:g} s")
      elif now - peer.moved_s > self.timeout_s and self._is_stuck(peer):
        why = f"is stuck: it has made no progress for {self.timeout_s:g} s"
        self._fail(rank, why)

  def _is_stuck(self, peer: _Peer) -> bool:
    if peer.doing != TOGETHER:
      return peer.doing == WORKING
    # The others wait for the rank that has done least.
    done = [
      p.step
      for p in self._peers.values()
      if p.doing == TOGETHER and p is not peer
    ]
    if self._doing == TOGETHER:
      done.append(self._step)
    return not done or peer.step < max(done)

  def _fail(self, rank: int, why: str) -> None:
    with self._news:
      if self.failure is not None or self._closed:
        return
      self.failure = PeerError(f"rank {rank} {why}", rank=rank)
    self._tell_all({"t": "fail", "rank": rank, "why": why})
    self._shut()
    self.wake()
    for call in self._on_failure:
      call(self.failure)

  def _shut(self) -> None:
    """Ends all connections, which wakes threads that are blocked in one."""
    control = [peer.control for peer in self._peers.values()]
    for one in (*self._links.values(), *control):
      with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
      one.close()

  def _tell_all(self, message: dict[str, Any]) -> None:
    for rank, peer in self._peers.items():
      if not peer.left:
        self._tell(rank, message)

  def _tell(self, rank: int, message: dict[str, Any]) -> None:
    data = json_text(message).encode()
    peer = self._peers[rank]
    # A connection that is closed is noticed by `_watch`.
    with contextlib.suppress(OSError), peer.lock:
      peer.control.sendall(_SIZE.pack(len(data)) + data)

  def _set_clock(self) -> None:
    """Measures `offset_s` from rank 0's clock, by its quickest answer."""
    if self.rank == 0:
      return
    best_s = math.inf
    for n in range(8):
      before = time.monotonic()
      self._tell(0, {"t": "ping", "n": n})
      self.wait(lambda n=n: n in self._pongs)
      after = time.monotonic()
      if after - before < best_s:
        best_s = after - before
        self.offset_s = self._pongs[n] - (before + after) / 2


def send(link: socket.socket, parts: Sequence[np.ndarray]) -> None:
  """Sends contiguous arrays as bytes."""
  views = [p.reshape(-1).view(np.uint8).data for p in parts]
  while views:
    # The system takes a limited number of pieces at once.
    done = link.sendmsg(views[:64])
    while views and done >= len(views[0]):
      done -= len(views.pop(0))
    if done:
      views[0] = views[0][done:]


def receive(link: socket.socket, parts: Sequence[np.ndarray]) -> None:
  """Fills contiguous arrays with the bytes that arrive.

  Raises:
    ConnectionError: the other end is closed.
  """
  for part in parts:
    view = part.reshape(-1).view(np.uint8).data
    while len(view):
      done = link.recv_into(view)
      if not done:
        raise ConnectionError("closed by the other end")
      view = view[done:]


def _greet(
  secret: bytes, link: socket.socket, address: object
) -> tuple[socket.socket, int, int]:
  """(connection, rank, kind) of a rank that has the group's secret.

  Raises:
    PeerError: it is a stranger.
  """
  link.settimeout(10.0)
  hello = np.zeros(_HELLO.size, np.uint8)
  receive(link, [hello])
  magic, token, rank, kind = _HELLO.unpack(hello.tobytes())
  if magic != _MAGIC or not hmac.compare_digest(token, secret):
    raise PeerError(f"{address} does not have the group's secret")
  return link, rank, kind


def _own_address(coordinator: str | None) -> str:
  """The address of this machine, as the coordinator's network has it."""
  host, _, port = (coordinator or "localhost:1").rpartition(":")
  host = host.strip("[]")
  try:
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
      # Nothing is sent: this only picks a route.
      probe.connect(address)
      mine = probe.getsockname()[0]
  except OSError:
    return "127.0.0.1"
  return "127.0.0.1" if mine == "::1" else mine
