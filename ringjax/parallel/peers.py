"""Group of processes: values for all of them, and detection of failed ones.

Guarantees: when a process dies, freezes or gets stuck, every other one learns
within `timeout_s` which it was, and those that wait for it are woken with a
`PeerError`. Nothing here computes, and no wait lasts beyond a failure.
Cost: p (p - 1) / 2 quiet TCP connections, a small message on each now and then.

Each pair of ranks has a control connection for small JSON messages: each
rank's state, values for all, reports of a failure. Arrays have separate
connections between neighbours (`link`), so that messages never queue after
them.

  dead    its connections close                              (at once)
  frozen  it sends no message for `timeout_s`
  stuck   it works, but has made no progress for `timeout_s`

Ranks that wait for another are never taken for failed. The processes find each
other through `jax.distributed`, whose heartbeats do not serve here: they end
all processes, and do not distinguish a stuck rank from a waiting one.
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
from jax._src import distributed  # The key-value store has no public name.

from ringjax.checks import number
from ringjax.errors import PeerError
from ringjax.json_text import json_text
from ringjax.parallel import frames
from ringjax.parallel.door import Door

TIMEOUT_S = 10.0
_MAGIC = b"ringjax1"
_HELLO = struct.Struct("<8s32sIB")
_CONTROL, _ARRAYS = 0, 1
_LARGEST_BYTES = 1 << 26
_MEETINGS = itertools.count()

# States of a rank. Only one that works has to make progress.
STARTING, WORKING, TOGETHER, WAITING = "starts", "works", "together", "waits"


@dataclasses.dataclass
class _Peer:
  """State of another rank as last reported; times by this rank's clock."""

  control: socket.socket
  heard_s: float
  moved_s: float
  doing: str = STARTING
  ticks: int = 0
  step: int = 0
  has_left: bool = False
  buffer: bytearray = dataclasses.field(default_factory=bytearray)
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Peers:
  """The ranks of a group, from the view of one of them.

  Attributes:
    rank: Rank of this process.
    size: Number of ranks.
    timeout_s: Seconds that a rank may be silent, or work without progress.
    failure: First failure of the group, or None.
    offset_s: Difference of rank 0's `time.monotonic()` from this rank's.
  """

  def __init__(
    self,
    rank: int,
    size: int,
    control: dict[int, socket.socket],
    links: dict[int, socket.socket],
    timeout_s: int | float = TIMEOUT_S,
  ):
    """Take the connections to each rank and to neighbours; see `meet`."""
    start_s = time.monotonic()
    self.rank, self.size, self.timeout_s = rank, size, timeout_s
    self.failure: PeerError | None = None
    self.offset_s = 0.0
    self._links = links
    self._peers = {
      r: _Peer(s, heard_s=start_s, moved_s=start_s) for r, s in control.items()
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
    """Connect this process to the others of its group.

    Args:
      rank: Rank of this process.
      size: Number of ranks of the group.
      exchange: Function that sends its argument to all ranks and returns
        theirs.
      host: Address under which the others reach this process.
      timeout_s: Timeout as in `Peers`.

    Raises:
      PeerError: If a rank did not connect in time.
      OptionError: If the timeout is not above 0.
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
        # The rank of the higher number opens the connection.
        for peer_rank in range(rank):
          for kind in [_CONTROL] + [_ARRAYS] * (peer_rank == rank - 1):
            address = cards[peer_rank]["host"], cards[peer_rank]["port"]
            connection = socket.create_connection(address, patience_s)
            connection.sendall(_HELLO.pack(_MAGIC, secret, rank, kind))
            by_kind[kind][peer_rank] = connection
        expected = size - 1 - rank + (rank < size - 1)
        with Door(server, greet, name="ringjax peers") as door:
          while expected:
            accepted = door.accept(patience_s)
            assert accepted is not None
            connection, peer_rank, kind = accepted
            by_kind[kind][peer_rank] = connection
            expected -= 1
      except OSError as error:
        missing = [r for r in range(size) if r != rank and r not in control]
        raise PeerError(
          f"rank {rank}: no connection to rank {missing or [rank - 1]} within "
          f"{patience_s:g} s: {error}",
          missing[0] if missing else None,
        ) from None
    for connection in (*control.values(), *links.values()):
      connection.settimeout(None)
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self = cls(rank, size, control, links, timeout_s)
    self._set_clock()
    return self

  @classmethod
  def of_processes(cls, *, timeout_s: int | float = TIMEOUT_S) -> Peers:
    """Connect the processes of `jax.distributed`; without it a group of one."""
    rank, size = jax.process_index(), jax.process_count()
    if size == 1:
      return cls(0, 1, {}, {}, timeout_s)
    state: Any = distributed.global_state
    number = next(_MEETINGS)
    key = lambda r: f"ringjax/peers/{number}/{r}"
    patience_ms = int(1000 * max(300.0, timeout_s))

    def exchange(card: str) -> list[str]:
      state.client.key_value_set(key(rank), card)
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
    """Make a group inside this process, one rank for each thread."""
    cards = [""] * size
    all_here = threading.Barrier(size)
    groups: list[Any] = [None] * size

    def join(rank: int) -> None:
      def exchange(card: str) -> list[str]:
        cards[rank] = card
        all_here.wait()
        return cards

      groups[rank] = cls.meet(rank, size, exchange, timeout_s=timeout_s)

    threads = [threading.Thread(target=join, args=(r,)) for r in range(size)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return groups

  # -------------------------------------------------------------------------
  # Messages to the others
  # -------------------------------------------------------------------------

  def tick(self, step: int = 0) -> None:
    """Count progress of this rank; in a common operation, to this step."""
    self._ticks += 1
    self._step = step

  @contextlib.contextmanager
  def doing(self, what: str) -> Iterator[None]:
    """Report to the others what this rank does inside the block."""
    previous, self._doing = self._doing, what
    try:
      yield
    finally:
      self._doing = previous
      # After a wait the time without progress counts from 0.
      self._ticks += 1

  def gather(self, value: object) -> list[Any]:
    """Exchange a JSON value; return those of all ranks in order.

    Raises:
      PeerError: If a rank failed, or left.
    """
    call = next(self._calls)
    self._tell_all({"t": "put", "n": call, "v": value})
    values = {self.rank: value}

    def complete() -> bool:
      for r, peer in self._peers.items():
        if (call, r) in self._values:
          values[r] = self._values.pop((call, r))
        elif r not in values and peer.has_left:
          raise PeerError(f"rank {r} has left the others", rank=r)
      return len(values) == self.size

    self.wait(complete)
    return [values[r] for r in range(self.size)]

  def wait(self, until: Callable[[], bool]) -> None:
    """Wait until a condition holds; `wake` has it evaluated again.

    Raises:
      PeerError: If a rank failed meanwhile.
    """
    with self.doing(WAITING):
      self.wait_idle(until)

  def wait_idle(self, until: Callable[[], bool]) -> None:
    """Wait in a thread other than the working one: the rank's state stays."""
    with self._news:
      while not until():
        if self.failure is not None:
          raise self.failure
        self._news.wait(0.5)

  def wake(self) -> None:
    """Let the waiting threads evaluate their conditions again."""
    with self._news:
      self._news.notify_all()

  def link(self, rank: int) -> socket.socket:
    """Return the connection for arrays to a neighbour."""
    return self._links[rank]

  def check(self) -> None:
    """Raise PeerError if a rank failed."""
    if self.failure is not None:
      raise self.failure

  def on_failure(self, call: Callable[[PeerError], Any]) -> None:
    """Register `call`, which another thread calls as soon as a rank fails."""
    self._on_failure.append(call)

  def abandon(self, error: BaseException) -> None:
    """Report to the others that this rank cannot continue."""
    if self.failure is None:
      # This rank's own callbacks are for failures of others.
      self._on_failure = []
      reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
      self._fail(self.rank, f"failed: {reason}")

  @contextlib.contextmanager
  def abandoning(self) -> Iterator[None]:
    """Report an error in the body to the others, and raise its cause.

    A socket that closed because another rank failed is that rank's failure.
    """
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
    """Report that `rank` failed, unless a failure becomes known meanwhile.

    Args:
      rank: Rank that failed.
      why: Description of the failure.
      grace_s: Seconds to wait for another rank's report.

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
    """Leave the group; the others may continue."""
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
    last_s = next_s = time.monotonic()
    while not self._closed and self.failure is None:
      now_s = time.monotonic()
      if now_s - last_s > max(3 * self._every_s, self.timeout_s / 2):
        # This process itself was suspended: its clocks of the others restart.
        for peer in self._peers.values():
          peer.heard_s = peer.moved_s = now_s
      last_s = now_s
      if now_s >= next_s:
        status = {"doing": self._doing, "n": self._ticks, "step": self._step}
        self._tell_all({"t": "am", **status})
        next_s = now_s + self._every_s
      for key, _ in selector.select(min(0.1, max(0.0, next_s - now_s))):
        if not self._receive(key.data):
          selector.unregister(key.fileobj)
      self._check_peers(time.monotonic())
    selector.close()

  def _receive(self, rank: int) -> bool:
    """Read the messages of a rank; False after the last one."""
    peer = self._peers[rank]
    try:
      data = peer.control.recv(1 << 16)
    except OSError:
      data = b""
    if not data:
      if not peer.has_left:
        self._fail(rank, "is gone: its connection closed")
      return False
    peer.heard_s = time.monotonic()
    peer.buffer += data
    while len(peer.buffer) >= frames.SIZE.size:
      (size,) = frames.SIZE.unpack_from(peer.buffer)
      if size > _LARGEST_BYTES:
        self._fail(rank, f"sent a message of {size} bytes")
        return False
      if len(peer.buffer) < frames.SIZE.size + size:
        break
      text = peer.buffer[frames.SIZE.size : frames.SIZE.size + size]
      try:
        message = frames.json_object(text)
      except ValueError as error:
        self._fail(rank, f"sent a message that is no JSON object: {error}")
        return False
      del peer.buffer[: frames.SIZE.size + size]
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
      peer.has_left = True
      self.wake()
    elif kind == "fail":
      reason = message["why"]
      if message["rank"] == self.rank:
        reason = f"was given up by rank {rank}: {reason}"
      self._fail(message["rank"], reason)

  def _check_peers(self, now_s: float) -> None:
    """Report ranks that are silent or stuck as failed."""
    for rank, peer in self._peers.items():
      if peer.has_left or self.failure is not None:
        continue
      if now_s - peer.heard_s > self.timeout_s:
        self._fail(rank, f"has said nothing for {self.timeout_s:g} s")
      elif now_s - peer.moved_s > self.timeout_s and self._is_stuck(peer):
        reason = f"is stuck: it has made no progress for {self.timeout_s:g} s"
        self._fail(rank, reason)

  def _is_stuck(self, peer: _Peer) -> bool:
    if peer.doing != TOGETHER:
      return peer.doing == WORKING
    # The others wait for the ranks that have the fewest steps.
    steps = [
      p.step
      for p in self._peers.values()
      if p.doing == TOGETHER and p is not peer
    ]
    if self._doing == TOGETHER:
      steps.append(self._step)
    return not steps or peer.step < max(steps)

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
    """Close all connections, which wakes threads that are blocked in one."""
    control = [peer.control for peer in self._peers.values()]
    for connection in (*self._links.values(), *control):
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      connection.close()

  def _tell_all(self, message: dict[str, Any]) -> None:
    for rank, peer in self._peers.items():
      if not peer.has_left:
        self._tell(rank, message)

  def _tell(self, rank: int, message: dict[str, Any]) -> None:
    data = json_text(message).encode()
    peer = self._peers[rank]
    # `_watch` notices a closed connection.
    with contextlib.suppress(OSError), peer.lock:
      peer.control.sendall(frames.framed(data))

  def _set_clock(self) -> None:
    """Measure `offset_s` to rank 0's clock, by its quickest answer."""
    if self.rank == 0:
      return
    best_s = math.inf
    for n in range(8):
      sent_s = time.monotonic()
      self._tell(0, {"t": "ping", "n": n})
      self.wait(lambda n=n: n in self._pongs)
      received_s = time.monotonic()
      if received_s - sent_s < best_s:
        best_s = received_s - sent_s
        self.offset_s = self._pongs[n] - (sent_s + received_s) / 2


def _greet(
  secret: bytes, link: socket.socket, address: object
) -> tuple[socket.socket, int, int]:
  """Read (connection, rank, kind) of a rank that has the group's secret.

  Raises:
    PeerError: If the peer does not have it.
  """
  link.settimeout(10.0)
  magic, token, rank, kind = frames.receive_header(link, _HELLO)
  if magic != _MAGIC or not hmac.compare_digest(token, secret):
    raise PeerError(f"{address} does not have the group's secret")
  return link, rank, kind


def _own_address(coordinator: str | None) -> str:
  """Address of this machine in the coordinator's network."""
  host, _, port = (coordinator or "localhost:1").rpartition(":")
  host = host.strip("[]")
  try:
    candidates = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, address = candidates[0]
    with socket.socket(family, kind) as probe:
      # Nothing is sent: this only picks a route.
      probe.connect(address)
      address_here = probe.getsockname()[0]
  except OSError:
    return "127.0.0.1"
  return "127.0.0.1" if address_here == "::1" else address_here
