"""A connection whose two sides tell each other that they are alive.

Guarantees: messages arrive once and in order, or the link ends; it ends once,
with a reason: a `PeerError` that names the other side and says what happened.
All that wait for a message are woken with it, and `on_end` is called with it.
A side that closes the link tells the other side why.
Cost: two threads, and a small message each way every `beat_s` seconds.
Memory: queued messages, at most `MOST_QUEUED_BYTES` and one message.

  closed   the other process ended, or its connection broke      (at once)
  silent   it sent no byte within the connection's patience
  slow     more than `MOST_QUEUED_BYTES` wait to be sent to it
  told     it has reported a failure, of itself or another process
  left     it closed the link without a failure
  broken   it sent a message that is not of the protocol
  ended    this side closed the link

A process is alive if it beats, however long it computes. If it is stuck, it
still beats: a caller that waits for an answer passes a limit (`take`), or reads
progress from the beats (`peers.py`).
"""

from __future__ import annotations

import collections
import enum
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ringjax.errors import PeerError, RingjaxError
from ringjax.parallel.links.array_messages import (
  ArrayMessage,
  message_parts,
  receive_arrays,
  send_arrays,
)
from ringjax.parallel.links.connection import Connection, HostileMessageError

Fields = Mapping[str, Any]
# Kinds of messages that links send themselves: the first one, with the sender's
# patience; heartbeats; the last one.
_LIVE, _BEAT, _BYE = "live", "beat", "bye"
# Heartbeats within the patience of the other side, at least.
_BEATS = 5
# Waits for a byte within which the other side may be silent.
_WAITS = 8
# Blamed processes in the last message of a link, if not a rank.
_SENDER, _RECEIVER = "sender", "receiver"
# Longest reason that is sent.
_MOST_WHY = 400
# Errors of a function that gets messages, because one lacks a field or has
# something else in it.
_OF_MESSAGES = (
  ArithmeticError,
  AttributeError,
  LookupError,
  TypeError,
  ValueError,
)
# Maximum bytes of queued messages: a side that receives more slowly than they
# come is given up before they fill this process's memory.
MOST_QUEUED_BYTES = 256 << 20
# Seconds for the last messages of a link that is given up.
_FLUSH_S = 1.0


class LinkEnding(enum.Enum):
  """Way in which a link has ended; see the top of the file."""

  CLOSED = "closed"
  SILENT = "silent"
  SLOW = "slow"
  TOLD = "told"
  LEFT = "left"
  BROKEN = "broken"
  ENDED = "ended"


class LiveLink:
  """An authenticated connection with heartbeats.

  Attributes:
    wire: The connection.
    name: Name of the other side.
    rank: Rank of the other side, for errors, or None.
    error: Reason of the end, with the rank at fault, None if it is unknown;
      None while the link lives.
    ending: Way in which it has ended; None while the link lives.
    on_end: Function called once with the reason of the end, or None.
  """

  def __init__(
    self,
    wire: Connection,
    *,
    rank: int | None = None,
    own_rank: int | None = None,
    kinds: Collection[str] | None = None,
    on_message: Callable[[ArrayMessage], object] | None = None,
    on_end: Callable[[PeerError], object] | None = None,
    beat: Callable[[], Fields] = lambda: {"t": _BEAT},
    beat_s: int | float | None = None,
    closed: str = "closed the connection",
    silent: str = "did nothing",
  ):
    """Prepare the link; `start` begins to send and receive.

    Args:
      wire: Authenticated connection, whose patience is the limit of silence.
      rank: Rank of the other side, for errors.
      own_rank: Rank of this process, for the error when it has failed or was
        given up.
      kinds: Kinds of messages that the other side may send; default: any.
      on_message: Function called with each message, by one thread; default:
        messages wait for `take`. Errors of the package, of types and of values
        are blamed on the message, others on this process; both end the link.
      on_end: Function called once by that thread, with the reason of the end.
      beat: Function that returns the fields of a heartbeat. They are those of a
        message, "t" its kind.
      beat_s: Seconds between heartbeats, at most a fifth of the other side's
        patience, which is the default.
      closed: Text of an error after the name: the connection has closed.
      silent: Text of an error between the name and the seconds of silence.
    """
    self.wire, self.rank, self._own_rank = wire, rank, own_rank
    self._closed, self._silent = closed, silent
    self.error: PeerError | None = None
    self.ending: LinkEnding | None = None
    self._kinds = None if kinds is None else {*kinds, _LIVE, _BEAT, _BYE}
    self._on_message = self._keep if on_message is None else on_message
    self.on_end = on_end
    self._beat = beat
    self._beat_s = wire.patience_s / _BEATS if beat_s is None else beat_s
    self._news = threading.Condition()
    self._came: collections.deque[ArrayMessage] = collections.deque()
    self._sending, self._starting = threading.Lock(), threading.Lock()
    self._counting, self._queued_bytes = threading.Lock(), 0
    self._outbox: queue.SimpleQueue[list[bytes | memoryview] | None] = (
      queue.SimpleQueue()
    )
    self._sender, self._receiver = (
      threading.Thread(
        target=work, name=f"ringjax link {wire.name}", daemon=True
      )
      for work in (self._send_queued, self._receive)
    )

  @property
  def name(self) -> str:
    """Name of the other side, for errors."""
    return self.wire.name

  def start(self) -> LiveLink:
    """Start the threads that send and receive, unless they were started."""
    with self._starting:
      if self._sender.ident is None:
        self.tell(_LIVE, patience_s=self.wire.patience_s)
        # Nothing is sent before the receiver runs: if the other side has left
        # already, sending fails, and only the receiver gets the reason.
        with self._sending:
          self._sender.start()
          self._receiver.start()
    return self

  # -------------------------------------------------------------------------
  # Messages
  # -------------------------------------------------------------------------

  def tell(
    self, kind: str, arrays: Sequence[np.ndarray] = (), /, **fields: Any
  ) -> None:
    """Queue a message to be sent after those before it; never waits.

    Fields may change afterwards, arrays must not. Fields that are not for JSON
    end the link, as a failure of this process. So does a message while more
    than `MOST_QUEUED_BYTES` wait, as a failure of the other side. A link that
    has ended drops the message.
    """
    if self.error is not None:
      return
    try:
      parts = message_parts(kind, arrays, **fields)
    except (AttributeError, TypeError, ValueError) as error:
      self._fail_here(f"a message to {self.name}: {error}")
      return
    num_bytes = sum(map(len, parts))
    with self._counting:
      waiting = self._queued_bytes
      is_slow = waiting > MOST_QUEUED_BYTES
      if not is_slow:
        self._queued_bytes += num_bytes
        self._outbox.put(parts)
    if is_slow:
      why = (
        f"{self.name} receives too slowly: {waiting:,} bytes wait to be sent, "
        f"of at most {MOST_QUEUED_BYTES:,}"
      )
      self._end(LinkEnding.SLOW, why, self.rank)

  def send(
    self, kind: str, arrays: Sequence[np.ndarray] = (), /, **fields: Any
  ) -> int:
    """Send a message at once, before queued ones; return its size in bytes.

    Raises:
      PeerError: If the link has ended, or the other side takes nothing.
    """
    if self.error is not None:
      raise self.error
    try:
      with self._sending:
        return send_arrays(self.wire, kind, arrays, **fields)
    except PeerError as error:
      raise self._unsent(error) from None

  def take(
    self, *kinds: str, within_s: int | float | None = None
  ) -> ArrayMessage:
    """Wait for the next message, which must be of one of these kinds.

    Args:
      *kinds: Kinds of messages; none allow all kinds.
      within_s: Maximum seconds to wait; default: as long as the link lives.

    Raises:
      PeerError: If the link has ended and all its messages are taken, or
        nothing came in time.
      HostileMessageError: If the message is of another kind.
    """
    with self._news:
      if not self._news.wait_for(
        lambda: self._came or self.error is not None, within_s
      ):
        raise PeerError(
          f"{self.name} has answered nothing for {within_s:g} s",
          rank=self.rank,
        )
      if not self._came:
        assert self.error is not None
        raise self.error
      message = self._came.popleft()
    if kinds and message.kind not in kinds:
      raise HostileMessageError(
        f"{self.name} sent {message.kind[:40]}; expected {' or '.join(kinds)}",
        rank=self.rank,
      )
    return message

  # -------------------------------------------------------------------------
  # End
  # -------------------------------------------------------------------------

  def close(self, why: str = "it was closed") -> None:
    """End the link after the queued messages, without a failure.

    Args:
      why: Reason, which `on_end` gets, and the other side.
    """
    self._say_bye(why, self.rank)

  def fail(self, why: str, *, blame: int | None = None) -> None:
    """End the link after the queued messages, and report a failure.

    Args:
      why: Description of the failure, which the other side gets.
      blame: Rank of the process that failed; default: this process.
    """
    if blame is None:
      self._say_bye(why, self._own_rank, blame=_SENDER)
    elif blame == self.rank:
      self._say_bye(why, blame, blame=_RECEIVER)
    else:
      self._say_bye(why, blame, blame=blame)

  def join(self, seconds: int | float) -> None:
    """Wait until the last message is sent; then end the connection anyway."""
    if self.error is not None:
      # One that ended before its start has not told the other side why.
      self.start()
    self._await(self._sender, seconds)
    self.wire.close()

  @staticmethod
  def _await(thread: threading.Thread, seconds: int | float) -> None:
    """Wait for the end of a thread of this link, unless it is the caller."""
    if thread.is_alive() and thread is not threading.current_thread():
      thread.join(max(0.0, seconds))

  def _say_bye(
    self,
    why: str,
    rank: int | None,
    *,
    ending: LinkEnding = LinkEnding.ENDED,
    error: str = "",
    **fields: Any,
  ) -> None:
    """End the link after the queued messages and a last one, which says why.

    Args:
      why: Reason for the other side.
      rank: Rank at fault, for the error of this side.
      ending: Way in which the link ends.
      error: Reason for this side; default: `why`.
      **fields: Further fields of the last message.
    """
    if self._end(ending, error or why, rank, shut=False):
      self._outbox.put(message_parts(_BYE, why=why[:_MOST_WHY], **fields))
    self._outbox.put(None)

  def _fail_here(self, error: Exception | str) -> None:
    """End the link by an error of this process."""
    why = (
      error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    )
    self._say_bye(
      why,
      self._own_rank,
      ending=LinkEnding.BROKEN,
      error=f"{self._own_name} failed: {why}",
      blame=_SENDER,
    )

  @property
  def _own_name(self) -> str:
    rank = self._own_rank
    return "this process" if rank is None else f"rank {rank}"

  def _end(
    self,
    ending: LinkEnding,
    why: str,
    rank: int | None,
    *,
    shut: bool = True,
  ) -> bool:
    """Set the reason, wake all that wait; whether the link lived until now."""
    with self._news:
      first = self.error is None
      if first:
        self.ending = ending
        self.error = PeerError(why, rank=rank)
      self._news.notify_all()
    if shut:
      self._outbox.put(None)
      self.wire.close()
    return first

  def _unsent(self, error: PeerError) -> PeerError:
    """End a link that can't send; the reason of the end."""
    # The other side's reason may have arrived, and takes precedence.
    self._await(self._receiver, _FLUSH_S)
    self._end(*self._reason_of(error))
    assert self.error is not None
    return self.error

  # -------------------------------------------------------------------------
  # Threads
  # -------------------------------------------------------------------------

  def _send_queued(self) -> None:
    """Send queued messages and heartbeats until the link ends."""
    due = time.monotonic()
    try:
      while True:
        try:
          queued = self._outbox.get(timeout=max(0.0, due - time.monotonic()))
          if queued is None:
            break
          if queued:
            with self._sending:
              self.wire.send(queued)
            with self._counting:
              self._queued_bytes -= sum(map(len, queued))
          else:
            # The interval has changed.
            due = min(due, time.monotonic() + self._beat_s)
        except queue.Empty:
          pass
        if time.monotonic() >= due and self.error is None:
          try:
            fields = dict(self._beat())
            parts = message_parts(fields.pop("t"), **fields)
          except Exception as error:
            # A link that can't beat must not look alive.
            self._fail_here(error)
            continue
          with self._sending:
            self.wire.send(parts)
          due = time.monotonic() + self._beat_s
    except PeerError as error:
      self._unsent(error)
    except Exception as error:
      # Nor may one that can't send: there is no memory, for instance.
      self._fail_here(error)
    self.wire.close()

  def _receive(self) -> None:
    """Receive messages until the link ends."""
    ending, why = LinkEnding.CLOSED, f"{self.name} {self._closed}"
    rank = self.rank
    try:
      while self._wait_for_byte():
        message = receive_arrays(self.wire, self._kinds)
        if message is None:
          break
        if message.kind == _BYE:
          ending, why, rank = self._reason_told(message.fields)
          break
        if message.kind == _LIVE:
          self._adapt(message.fields)
        elif message.kind != _BEAT:
          self._handle(message)
      else:
        raise self.wire.fail(TimeoutError()) from TimeoutError()
    except PeerError as error:
      ending, why, rank = self._reason_of(error)
      if ending is not LinkEnding.CLOSED:
        self._say_bye(why, rank, ending=ending, blame=_RECEIVER)
    except Exception as error:
      # There is no memory for a message, for instance: all that wait are woken.
      ending = LinkEnding.BROKEN
      self._fail_here(error)
    if ending in (LinkEnding.SILENT, LinkEnding.BROKEN):
      # The other side may still hear why.
      self._await(self._sender, _FLUSH_S)
    self._end(ending, why, rank)
    if self.on_end is not None:
      assert self.error is not None
      self.on_end(self.error)

  def _wait_for_byte(self) -> bool:
    """Wait for the next message; False after too long a silence.

    Silence is counted in waits of this process: one that was suspended itself
    does not give up the others.
    """
    wait_s = self.wire.patience_s / _WAITS
    return any(self.wire.readable(wait_s) for _ in range(_WAITS))

  def _adapt(self, fields: Fields) -> None:
    """Beat often enough for the other side."""
    patience_s = fields.get("patience_s")
    if not isinstance(patience_s, int | float) or not patience_s > 0:
      raise self.wire.hostile(ValueError(f"a patience of {patience_s!r:.40}"))
    if patience_s / _BEATS < self._beat_s:
      self._beat_s = patience_s / _BEATS
      self._outbox.put([])

  def _handle(self, message: ArrayMessage) -> None:
    try:
      self._on_message(message)
    except RingjaxError as error:
      raise HostileMessageError(str(error)) from None
    except _OF_MESSAGES as error:
      raise self.wire.hostile(error) from None

  def _keep(self, message: ArrayMessage) -> None:
    with self._news:
      self._came.append(message)
      self._news.notify_all()

  def _reason_told(self, fields: Fields) -> tuple[LinkEnding, str, int | None]:
    """Way, reason and blamed rank of the other side's last message."""
    why, blame = str(fields.get("why"))[:_MOST_WHY], fields.get("blame")
    if blame == _SENDER:
      return LinkEnding.TOLD, f"{self.name} failed: {why}", self.rank
    if blame == _RECEIVER:
      text = f"{self._own_name} was given up by {self.name}: {why}"
      return LinkEnding.TOLD, text, self._own_rank
    if type(blame) is int:
      return LinkEnding.TOLD, why, blame
    return LinkEnding.LEFT, f"{self.name} left: {why}", self.rank

  def _reason_of(self, error: PeerError) -> tuple[LinkEnding, str, int | None]:
    """Way, reason and rank of an end by a connection's or message's error."""
    if isinstance(error, HostileMessageError):
      return LinkEnding.BROKEN, str(error), self.rank
    # `Connection.fail` is raised while an error of the system is handled.
    if isinstance(error.__cause__ or error.__context__, TimeoutError):
      patience = f"{self.wire.patience_s:g} s"
      text = f"{self.name} {self._silent} for {patience}"
      return LinkEnding.SILENT, text, self.rank
    return LinkEnding.CLOSED, f"{self.name} {self._closed}", self.rank
