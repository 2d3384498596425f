"""Group of processes: values for all of them, and detection of failed ones.

Guarantees: when a process dies, freezes or gets stuck, every other one learns
within `timeout_s` which it was, and those that wait for it are woken with a
`PeerError`. Nothing here computes, and no wait lasts beyond a failure.
Cost: p (p - 1) / 2 quiet connections, a small message on each now and then, and
two threads for each rank on each.

Each pair of ranks has a `LiveLink` for small messages: each rank's state in its
heartbeats, values for all, reports of a failure. Arrays have separate
connections between neighbours (`link`), so that messages never queue after
them.

  dead    its connections close                              (at once)
  frozen  it sends nothing for `timeout_s`
  stuck   it works, but has made no progress for `timeout_s`

Ranks that wait for another are never taken for failed. The processes find each
other through `jax.distributed`, whose heartbeats do not serve here: they end
all processes, and do not distinguish a stuck rank from a waiting one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import distributed  # The key-value store has no public name.

from ringjax.checks import number
from ringjax.errors import PeerError
from ringjax.json_text import json_text
from ringjax.parallel import joint_outcome
from ringjax.parallel.door import Door, shut
from ringjax.parallel.links.array_messages import (
  ArrayMessage,
  receive_arrays,
  send_arrays,
)
from ringjax.parallel.links.connection import Connection
from ringjax.parallel.links.link_group import LinkGroup
from ringjax.parallel.links.live_link import LinkEnding, LiveLink

TIMEOUT_S = 10.0
_CONTROL, _ARRAYS = "control", "arrays"
# Seconds for a peer to show the group's secret and say which rank it is.
_GREETING_S = 10.0

# States of a rank. Only one that works has to make progress.
STARTING, WORKING, TOGETHER, WAITING = "starts", "works", "together", "waits"


@dataclasses.dataclass
class _RankState:
  """State of another rank, and heartbeats since its last progress."""

  doing: str = STARTING
  ticks: int = 0
  step: int = 0
  still: int = 0


class Peers:
  """The ranks of a group, from the view of one of them.

  Attributes:
    rank: Rank of this process.
    size: Number of ranks.
    timeout_s: Seconds that a rank may be silent, or work without progress.
    failure: First failure of the group, or None.
    offset_s: Difference of rank 0's `time.monotonic()` from this rank's; 0 if
      rank 0 left before it told its time.
  """

  def __init__(
    self,
    rank: int,
    size: int,
    control: dict[int, Connection],
    links: dict[int, socket.socket],
    timeout_s: int | float = TIMEOUT_S,
  ):
    """Take the connections to each rank and to neighbours; see `meet`."""
    self.rank, self.size, self.timeout_s = rank, size, timeout_s
    self.failure: PeerError | None = None
    self.offset_s = 0.0
    self._links = links
    self._states = {r: _RankState() for r in control}
    self._doing, self._ticks, self._step = STARTING, 0, 0
    self._news = threading.Condition()
    self._values: dict[tuple[int, int], Any] = {}
    self._posts: dict[int, collections.deque[str]] = {
      r: collections.deque() for r in control
    }
    self._calls = itertools.count()
    self._pongs: dict[int, float] = {}
    self._on_failure: list[Callable[[PeerError], Any]] = []
    self._on_notice: list[Callable[[int, str], Any]] = []
    self._every_s = min(1.0, timeout_s / 8)
    self._closed = False
    self._group: LinkGroup[int] = LinkGroup(self._lost, together=True)
    for r, wire in control.items():
      wire.name, wire.patience_s = f"rank {r}", timeout_s
      link = LiveLink(
        wire,
        rank=r,
        own_rank=rank,
        on_message=functools.partial(self._handle, r),
        beat=self._status,
        beat_s=self._every_s,
        closed="is gone: its connection closed",
        silent="has said nothing",
      )
      self._group.add(r, link)
    for link in list(self._group.links.values()):
      link.start()

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
      wires: dict[str, dict[int, Connection]] = {_CONTROL: {}, _ARRAYS: {}}
      try:
        # The rank of the higher number opens the connection.
        for peer_rank in range(rank):
          for kind in [_CONTROL] + [_ARRAYS] * (peer_rank == rank - 1):
            address = cards[peer_rank]["host"], cards[peer_rank]["port"]
            wire = Connection.connect(
              address, secret, patience_s, f"rank {peer_rank}", rank=peer_rank
            )
            wires[kind][peer_rank] = wire
            send_arrays(wire, kind, rank=rank)
        expected = size - 1 - rank + (rank < size - 1)
        with Door(server, greet, name="ringjax peers") as door:
          while expected:
            accepted = door.accept(patience_s)
            assert accepted is not None
            wire, peer_rank, kind = accepted
            wires[kind][peer_rank] = wire
            expected -= 1
      except (OSError, PeerError) as error:
        others = {*range(size)} - {rank, *wires[_CONTROL]}
        missing = sorted(others)
        raise PeerError(
          f"rank {rank}: no connection to rank {missing or [rank - 1]} within "
          f"{patience_s:g} s: {error}",
          rank=missing[0] if missing else None,
        ) from None
    links = {r: wire.link for r, wire in wires[_ARRAYS].items()}
    for connection in links.values():
      connection.settimeout(None)
    self = cls(rank, size, wires[_CONTROL], links, timeout_s)
    self._set_clock()
    return self

  @classmethod
  def of_processes(cls, *, timeout_s: int | float = TIMEOUT_S) -> Peers:
    """Connect the processes of `jax.distributed`; without it a group of one."""
    rank, size = jax.process_index(), jax.process_count()
    if size == 1:
      return cls(0, 1, {}, {}, timeout_s)
    exchange = functools.partial(
      joint_outcome.exchanged,
      ranks=tuple(range(size)),
      channel="peers",
      timeout_s=max(300.0, timeout_s),
    )
    host = _own_address(distributed.global_state.coordinator_address)
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

  def gather(self, value: object, *, idle: bool = True) -> list[Any]:
    """Exchange a JSON value; return those of all ranks in order.

    Args:
      value: Value of this rank.
      idle: Whether this rank waits with nothing to do, as in `receive`.

    Raises:
      PeerError: If a rank failed, or left.
    """
    call = next(self._calls)
    # As text: values that are not for JSON raise here, and may change later.
    self._group.tell_all("put", n=call, v=json_text(value))
    values = {self.rank: value}

    def complete() -> bool:
      for r in self._states:
        # Read first: a value that came before the end is there then.
        has_left = r in self._group.left
        if (call, r) in self._values:
          values[r] = self._values.pop((call, r))
        elif r not in values and has_left:
          raise PeerError(f"rank {r} has left the others", rank=r)
      return len(values) == self.size

    (self.wait if idle else self.wait_idle)(complete)
    return [values[r] for r in range(self.size)]

  def post(self, value: object, to: int | None = None) -> None:
    """Queue a JSON value for another rank, or for all others; never waits.

    Args:
      value: Value, which `receive` returns there, in the order of the posts.
      to: Rank that gets it; default: all others.
    """
    text = json_text(value)
    if to is None:
      self._group.tell_all("post", v=text)
    elif (link := self._group.links.get(to)) is not None:
      link.tell("post", v=text)

  def notify(self, rank: int, what: str) -> None:
    """Send a short text to a rank, which `on_notice` gets there; never waits.

    Notices are apart from posts: they come also where nothing is received.
    """
    if (link := self._group.links.get(rank)) is not None:
      link.tell("notice", v=what)

  def on_notice(self, call: Callable[[int, str], Any]) -> None:
    """Register a function of a rank and its text, called by another thread."""
    self._on_notice.append(call)

  def receive(self, rank: int, *, idle: bool = True) -> Any:
    """Wait for the next value that a rank posts to this one.

    Args:
      rank: Rank that posts.
      idle: Whether this rank waits with nothing to do, as in `wait`; otherwise
        its state stays, as in `wait_idle`.

    Raises:
      PeerError: If a rank failed, or this one left, before the value came.
    """
    posts = self._posts[rank]

    def posted() -> bool:
      # Read first: a value that came before the end is there then.
      has_left = rank in self._group.left
      if not posts and has_left:
        raise PeerError(f"rank {rank} has left the others", rank=rank)
      return bool(posts)

    (self.wait if idle else self.wait_idle)(posted)
    return json.loads(posts.popleft())

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
      self._closed = True
      self._group.close("it needs the others no more")
      self._shut()
      self.wake()

  # -------------------------------------------------------------------------
  # Watching
  # -------------------------------------------------------------------------

  def _status(self) -> dict[str, Any]:
    """Heartbeat: what this rank does, and its progress."""
    fields = {"doing": self._doing, "n": self._ticks, "step": self._step}
    return {"t": "am", **fields}

  def _handle(self, rank: int, message: ArrayMessage) -> None:
    kind, fields = message.kind, message.fields
    if kind == "am":
      self._check_progress(rank, fields)
    elif kind == "put":
      self._values[fields["n"], rank] = json.loads(fields["v"])
      self.wake()
    elif kind == "post":
      self._posts[rank].append(str(fields["v"]))
      self.wake()
    elif kind == "notice":
      for call in self._on_notice:
        call(rank, str(fields["v"]))
    elif kind == "ping":
      if (link := self._group.links.get(rank)) is not None:
        link.tell("pong", n=fields["n"], at=time.monotonic())
    elif kind == "pong":
      self._pongs[fields["n"]] = fields["at"]
      self.wake()

  def _check_progress(self, rank: int, fields: dict[str, Any]) -> None:
    """Note what a rank does; report it as failed if it is stuck.

    Time without progress is counted in the rank's own heartbeats, so that one
    that was suspended, as this one may have been, is not taken for stuck.
    """
    state = self._states[rank]
    if (fields["doing"], fields["n"]) != (state.doing, state.ticks):
      state.doing, state.ticks = fields["doing"], fields["n"]
      state.step, state.still = fields["step"], 0
      return
    state.still += 1
    if state.still * self._every_s > self.timeout_s and self._is_stuck(state):
      reason = f"is stuck: it has made no progress for {self.timeout_s:g} s"
      self._fail(rank, reason)

  def _is_stuck(self, state: _RankState) -> bool:
    if state.doing != TOGETHER:
      return state.doing == WORKING
    # The others wait for the ranks that have the fewest steps.
    steps = [
      peer.step
      for rank, peer in self._states.items()
      if peer.doing == TOGETHER
      and peer is not state
      and rank not in self._group.left
    ]
    if self._doing == TOGETHER:
      steps.append(self._step)
    return not steps or state.step < max(steps)

  def _lost(self, rank: int, link: LiveLink) -> None:
    """Handle the end of a link; the group has told the others."""
    assert link.error is not None
    if link.ending is LinkEnding.LEFT:
      self.wake()
    else:
      self._set_failure(link.error)

  def _fail(self, rank: int, why: str) -> None:
    """Report a failed rank to the others, unless another one has failed."""
    text = f"rank {rank} {why}"
    if self._group.fail(text, blame=rank):
      self._set_failure(PeerError(text, rank=rank))
    with self._news:
      # Another thread may still tell the others of an earlier failure.
      self._news.wait_for(lambda: self.failure is not None or self._closed)

  def _set_failure(self, failure: PeerError) -> None:
    with self._news:
      if self._closed:
        return
      self.failure = failure
    self._shut()
    self.wake()
    for call in self._on_failure:
      call(failure)

  def _shut(self) -> None:
    """Close the connections for arrays, which wakes threads blocked in one."""
    for connection in self._links.values():
      shut(connection)

  def _set_clock(self) -> None:
    """Measure `offset_s` to rank 0's clock, by its quickest answer."""
    if self.rank == 0:
      return
    best_s = math.inf
    for n in range(8):
      sent_s = time.monotonic()
      if (link := self._group.links.get(0)) is not None:
        link.tell("ping", n=n)
      self.wait(lambda n=n: n in self._pongs or 0 in self._group.left)
      if n not in self._pongs:
        return
      received_s = time.monotonic()
      if received_s - sent_s < best_s:
        best_s = received_s - sent_s
        self.offset_s = self._pongs[n] - (sent_s + received_s) / 2


def _greet(
  secret: bytes, link: socket.socket, address: tuple[Any, ...]
) -> tuple[Connection, int, str]:
  """Admit a rank that has the group's secret: (connection, rank, kind).

  Raises:
    PeerError: If the peer does not have it.
  """
  wire = Connection.admit(link, address, secret, _GREETING_S, "a peer at")
  hello = receive_arrays(wire, (_CONTROL, _ARRAYS))
  if hello is None:
    raise PeerError(f"{wire.name} left")
  return wire, hello.integer("rank", 1 << 20), hello.kind


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
