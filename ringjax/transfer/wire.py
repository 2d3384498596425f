"""Messages of the protocol over a TCP connection, and who may open one.

Guarantees: both sides show that they have the key before anything else is
read, without sending it, within a deadline for all of it; a message is JSON of
at most 1 MiB with all numbers checked; no wait for the next byte is longer than
the connection's patience.
Cost: two small messages on each new connection; bytes of pages are sent from
and received into the memory where they are.

Nothing is encrypted, and what follows the greeting is not signed: the key
keeps strangers out, not someone who can change packets on their way. Use a
network that is trusted, or a tunnel.

  greeting  server  magic, nonce
            client  nonce, HMAC-SHA256(key, "client", both nonces)
            server  HMAC-SHA256(key, "server", both nonces), or zeros
  message   4 bytes: its size, little-endian; then JSON
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.errors import OptionError, PeerError
from ringjax.json_text import json_text
from ringjax.transfer.description import keys_to_runs, runs_to_keys
from ringjax.transfer.protocol import (
  AbortRequest,
  CompleteReply,
  CompleteRequest,
  Message,
  ReadRefused,
  ReadReply,
  ReadRequest,
)

MAGIC = b"RJPULL\x00\x01"
MOST_MESSAGE = 1 << 20
# Pages of one read; its message stays below the limit.
MOST_RUN = 1 << 12
_DIGEST = 32
_SIZE = struct.Struct("<I")
_KINDS: dict[str, type] = {
  "read": ReadRequest,
  "pages": ReadReply,
  "refused": ReadRefused,
  "complete": CompleteRequest,
  "completed": CompleteReply,
  "abort": AbortRequest,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class AuthenticationError(PeerError):
  """The other side does not have the same key, or is something else."""


class HostileMessageError(PeerError):
  """A message is not what the protocol allows."""


def checked_key(key: bytes) -> bytes:
  """A key of at least 16 bytes.

  Raises:
    OptionError: it is shorter, or a text.
  """
  if not isinstance(key, bytes | bytearray) or len(key) < 16:
    raise OptionError(
      "key",
      # The key is not shown.
      f"{type(key).__name__} of {len(key)}",
      "at least 16 bytes",
      "make one with secrets.token_bytes(32)",
    )
  return bytes(key)


def listening(host: str, port: int) -> socket.socket:
  """A socket that others connect to; port 0 takes a free one.

  Raises:
    OptionError: the address is not free, or not of this machine.
  """
  try:
    return socket.create_server((host, port), backlog=128)
  except OSError as error:
    raise OptionError(
      "host, port",
      f"{host}:{port}: {error.strerror}",
      "a free address of this machine",
      "pass another port, or port=0 for any",
    ) from None


def as_json(fields: Mapping[str, Any]) -> bytes:
  """An object as JSON; numbers of NumPy are numbers.

  Raises:
    AttributeError, TypeError, ValueError: something else is in it.
  """
  return json_text(fields, default=lambda x: x.item()).encode()


class PullConnection:
  """One connection: messages and bytes, with a limit on each wait."""

  def __init__(self, link: socket.socket, patience_s: int | float, name: str):
    """Takes a connected socket; `name` is what errors call the other side."""
    # The other side may be gone by now: the first receive says so.
    with contextlib.suppress(OSError):
      link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.settimeout(patience_s)
    self.link, self.patience_s, self.name = link, patience_s, name

  def close(self) -> None:
    """Ends the connection, also under a thread that waits for it."""
    with contextlib.suppress(OSError):
      self.link.shutdown(socket.SHUT_RDWR)
    self.link.close()

  def fail(self, error: OSError) -> PeerError:
    """What an error of the connection means."""
    if isinstance(error, TimeoutError):
      why = f"did nothing for {self.patience_s:g} s"
    else:
      why = f"closed the connection ({error})"
    return PeerError(f"{self.name} {why}")

  # -------------------------------------------------------------------------
  # Greeting
  # -------------------------------------------------------------------------

  def greet_reader(
    self, key: bytes, deadline_s: int | float | None = None
  ) -> None:
    """The publisher's side of the greeting.

    Args:
      key: that readers have.
      deadline_s: seconds for all of it; default: the patience.

    Raises:
      AuthenticationError: the reader has another key.
      PeerError: it has not shown its key in time, or is gone.
    """
    until = self._within(deadline_s)
    mine = secrets.token_bytes(_DIGEST)
    self.send([MAGIC + mine])
    answer = bytearray(2 * _DIGEST)
    self.receive(memoryview(answer), until=until)
    theirs, proof = bytes(answer[:_DIGEST]), bytes(answer[_DIGEST:])
    right = hmac.compare_digest(proof, _proof(key, b"client", mine, theirs))
    shown = _proof(key, b"server", mine, theirs) if right else bytes(_DIGEST)
    self.send([shown])
    if not right:
      raise AuthenticationError(f"{self.name} does not have the key")

  def greet_publisher(self, key: bytes) -> None:
    """The reader's side of the greeting, within the patience.

    Raises:
      AuthenticationError: the publisher has another key, or is none.
      PeerError: it has not answered in time, or is gone.
    """
    until = self._within(None)
    hello = bytearray(len(MAGIC) + _DIGEST)
    self.receive(memoryview(hello), until=until)
    if hello[: len(MAGIC)] != MAGIC:
      raise AuthenticationError(f"{self.name} does not speak this protocol")
    theirs, mine = bytes(hello[len(MAGIC) :]), secrets.token_bytes(_DIGEST)
    self.send([mine + _proof(key, b"client", theirs, mine)])
    shown = bytearray(_DIGEST)
    self.receive(memoryview(shown), until=until)
    wanted = _proof(key, b"server", theirs, mine)
    if not hmac.compare_digest(bytes(shown), wanted):
      raise AuthenticationError(f"{self.name} does not have the same key")

  # -------------------------------------------------------------------------
  # Messages
  # -------------------------------------------------------------------------

  def tell(self, message: Message, **beside: Any) -> None:
    """Sends a message, with further fields that are JSON."""
    self.send([encode(message, **beside)])

  def hear(self) -> tuple[Message, dict[str, Any]] | None:
    """The next message and its further fields; None if the other side left.

    Raises:
      HostileMessageError: it is too long, or not of the protocol.
    """
    body = self._frame(MOST_MESSAGE)
    if body is None:
      return None
    try:
      return decode(body)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
      raise self.hostile(error) from None

  def tell_object(self, fields: Mapping[str, Any]) -> None:
    """Sends an object of JSON that is no message of this protocol."""
    body = as_json(fields)
    self.send([_SIZE.pack(len(body)), body])

  def hear_object(
    self, most: int, until: Callable[[], float] | None = None
  ) -> dict[str, Any] | None:
    """The next object of `tell_object`, of `most` bytes at most; None if the
    other side left. `until` gives the seconds that are left.

    Raises:
      HostileMessageError: it is too long, or none.
    """
    body = self._frame(most, until)
    if body is None:
      return None
    try:
      fields = json.loads(body)
      if not isinstance(fields, dict):
        raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
      raise self.hostile(error) from None
    return fields

  def hostile(self, error: Exception) -> HostileMessageError:
    """What an error in a message of the other side means."""
    why = f"{type(error).__name__}: {error}"[:200]
    return HostileMessageError(
      f"{self.name} sent a message that is not of the protocol: {why}"
    )

  def _frame(
    self, most: int, until: Callable[[], float] | None = None
  ) -> bytes | None:
    """The bytes of the next message."""
    head = bytearray(_SIZE.size)
    if not self.receive(memoryview(head), may_end=True, until=until):
      return None
    (size,) = _SIZE.unpack(head)
    if not 2 <= size <= most:
      raise HostileMessageError(
        f"{self.name} announced a message of {size} bytes; at most {most} are "
        "allowed"
      )
    body = bytearray(size)
    self.receive(memoryview(body), until=until)
    return bytes(body)

  def wait(self, seconds: float) -> None:
    """Waits while the other side has nothing to say.

    Raises:
      PeerError: it left, or said something.
    """
    try:
      # `select.select` takes no sockets of large numbers, and `poll` waits for
      # milliseconds.
      time.sleep(seconds)
      poll = select.poll()
      poll.register(self.link, select.POLLIN)
      if not poll.poll(0):
        return
      if self.link.recv(1, socket.MSG_PEEK):
        raise HostileMessageError(f"{self.name} sent a message unasked")
      raise ConnectionError("in the middle of a read")
    except (OSError, ValueError) as error:
      # A socket that was closed meanwhile has no number.
      found = error if isinstance(error, OSError) else OSError(str(error))
      raise self.fail(found) from None

  # -------------------------------------------------------------------------
  # Bytes
  # -------------------------------------------------------------------------

  def send(
    self,
    parts: Sequence[bytes | memoryview],
    until: Callable[[], float] | None = None,
  ) -> None:
    """Sends contiguous bytes; `until` gives the seconds that are left.

    Raises:
      PeerError: the other side takes nothing, or is gone.
    """
    views = [memoryview(p).cast("B") for p in parts if len(p)]
    try:
      while views:
        self._limit(until)
        # The system takes a limited number of pieces at once.
        done = self.link.sendmsg(views[:64])
        while views and done >= len(views[0]):
          done -= len(views.pop(0))
        if done:
          views[0] = views[0][done:]
    except OSError as error:
      raise self.fail(error) from None
    finally:
      if until is not None:
        self._rest()

  def receive(
    self,
    view: memoryview,
    *,
    may_end: bool = False,
    until: Callable[[], float] | None = None,
  ) -> bool:
    """Fills contiguous memory; False if the other side had left before.

    Args:
      view: to fill.
      may_end: whether it may leave before the first byte.
      until: gives the seconds that are left.

    Raises:
      PeerError: the other side sends nothing, or is gone.
    """
    view = view.cast("B")
    size = len(view)
    try:
      while len(view):
        self._limit(until)
        done = self.link.recv_into(view)
        if not done:
          if may_end and len(view) == size:
            return False
          raise ConnectionError("before the last byte")
        view = view[done:]
    except OSError as error:
      raise self.fail(error) from None
    finally:
      if until is not None:
        self._rest()
    return True

  def _within(self, seconds: int | float | None) -> Callable[[], float]:
    """The seconds that are left of so many, or of the patience."""
    end = time.monotonic() + (self.patience_s if seconds is None else seconds)
    return lambda: end - time.monotonic()

  def _limit(self, until: Callable[[], float] | None) -> None:
    """Waits no longer than there is time left."""
    if until is None:
      return
    left = until()
    if left <= 0:
      raise TimeoutError("the time is over")
    self.link.settimeout(min(left, self.patience_s))

  def _rest(self) -> None:
    with contextlib.suppress(OSError):
      self.link.settimeout(self.patience_s)


def _proof(key: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
  return hmac.digest(key, MAGIC + side + server + client, "sha256")


def encode(message: Message, **beside: Any) -> bytes:
  """A message as bytes, its size first."""
  fields: dict[str, Any] = dict(
    vars(message), t=_NAMES[type(message)], **beside
  )
  if "pages" in fields:
    fields["pages"] = keys_to_runs(fields["pages"])
  body = json_text(fields).encode()
  return _SIZE.pack(len(body)) + body


def decode(body: bytes) -> tuple[Message, dict[str, Any]]:
  """A message and its further fields.

  Raises:
    ValueError, KeyError, TypeError: it is none.
  """
  fields = json.loads(body)
  if not isinstance(fields, dict):
    raise ValueError("not an object")
  kind = _KINDS[fields.pop("t")]
  own: dict[str, Any] = {}
  for name in kind.__dataclass_fields__:
    value = fields.pop(name)
    if name == "pages":
      value = runs_to_keys(value, MOST_RUN)
    elif name in ("reader", "why"):
      if not isinstance(value, str) or len(value) > 256:
        raise ValueError(f"{name} is no short text")
    elif type(value) is not int or not 0 <= value < 1 << 63:
      raise ValueError(f"{name} is no integer in its range")
    own[name] = value
  return kind(**own), fields
