"""An authenticated connection between two processes.

Guarantees: both sides prove that they have the key before anything else is
read, without sending it, within a deadline for all of it; a message has a
limited size; no wait for the next byte is longer than the connection's
patience.
Cost: two small messages on each new connection; bytes are sent from and
received into the memory where they are.

Nothing is encrypted, and data after the greeting is not signed: the key keeps
unauthenticated peers out, but not an attacker who can change packets in flight.
Use a trusted network, or a tunnel.

  greeting  server  magic, nonce
            client  nonce, HMAC-SHA256(key, "client", both nonces)
            server  HMAC-SHA256(key, "server", both nonces), or zeros
  message   4 bytes: its size, little-endian; then JSON
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringjax.errors import OptionError, PeerError
from ringjax.json_text import json_text
from ringjax.parallel.frames import (
  SIZE,
  framed,
  json_object,
  receive_view,
  send_views,
)

MAGIC = b"RJPULL\x00\x01"
_DIGEST = 32
# Seconds for a peer to show the key.
_GREETING_S = 5.0
Connected = TypeVar("Connected", bound="Connection")


class AuthenticationError(PeerError):
  """The other side does not have the same key, or is another program."""


class HostileMessageError(PeerError):
  """A message that the protocol does not allow."""


def checked_key(key: bytes) -> bytes:
  """Check that a key has at least 16 bytes.

  Raises:
    OptionError: If it is shorter, or a text.
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
  """Open a listening socket; port 0 takes a free one.

  Raises:
    OptionError: If the address is not free, or not of this machine.
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
  """Encode an object as JSON, with NumPy numbers as numbers.

  Raises:
    AttributeError, TypeError, ValueError: If it contains something else.
  """
  return json_text(fields, default=lambda x: x.item()).encode()


class Connection:
  """A connected socket: messages and bytes, with a limit on each wait."""

  def __init__(self, link: socket.socket, patience_s: int | float, name: str):
    """Wrap a connected socket; errors call the other side `name`."""
    # The other side may be gone already: the first receive will report it.
    with contextlib.suppress(OSError):
      link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self.link, self.name = link, name
    self.patience_s = patience_s

  @classmethod
  def connect(
    cls: type[Connected],
    address: tuple[str, int],
    key: bytes,
    patience_s: int | float,
    name: str,
    *,
    connect_s: int | float | None = None,
    rank: int | None = None,
  ) -> Connected:
    """Connect to a listening process that has the key.

    Args:
      address: Host and port.
      key: Secret key of both sides.
      patience_s: Seconds that the other side may be silent.
      name: Name of the other side, for errors.
      connect_s: Seconds to connect; default: the patience.
      rank: Number of the other side, for errors.

    Raises:
      AuthenticationError: If the other side has another key.
      PeerError: If nothing listens there, or it is gone.
    """
    try:
      link = socket.create_connection(
        address, patience_s if connect_s is None else connect_s
      )
    except (OSError, OverflowError) as error:
      raise PeerError(f"{name} cannot be reached: {error}", rank=rank) from None
    connection = cls(link, patience_s, name)
    try:
      connection.greet_server(key)
    except BaseException:
      connection.close()
      raise
    return connection

  @classmethod
  def admit(
    cls: type[Connected],
    link: socket.socket,
    address: tuple[Any, ...],
    key: bytes,
    patience_s: int | float,
    kind: str = "",
  ) -> Connected:
    """Greet a process that has connected to this one; for a `Door`.

    Args:
      link: Accepted socket.
      address: Host and port of the other side.
      key: Secret key of both sides.
      patience_s: Seconds that the other side may be silent, afterwards.
      kind: Name of such processes, for errors.

    Raises:
      AuthenticationError: If the other side has another key.
      PeerError: If it has not shown its key in time, or is gone.
    """
    name = f"{kind} {address[0]}:{address[1]}".strip()
    connection = cls(link, patience_s, name)
    connection.greet_client(key, min(_GREETING_S, patience_s))
    return connection

  @property
  def patience_s(self) -> int | float:
    """Seconds that the other side may be silent while bytes are due."""
    return self._patience_s

  @patience_s.setter
  def patience_s(self, seconds: int | float) -> None:
    self._patience_s = seconds
    self._restore_timeout()

  def close(self) -> None:
    """End the connection, even while a thread waits for it."""
    with contextlib.suppress(OSError):
      self.link.shutdown(socket.SHUT_RDWR)
    self.link.close()

  def fail(self, error: OSError) -> PeerError:
    """Make a `PeerError` from an error of the connection."""
    if isinstance(error, TimeoutError):
      why = f"did nothing for {self.patience_s:g} s"
    else:
      why = f"closed the connection ({error})"
    return PeerError(f"{self.name} {why}")

  # -------------------------------------------------------------------------
  # Greeting
  # -------------------------------------------------------------------------

  def greet_client(
    self, key: bytes, deadline_s: int | float | None = None
  ) -> None:
    """Run the greeting of the side that listens.

    Args:
      key: Secret key of both sides.
      deadline_s: Seconds for all of it; default: the patience.

    Raises:
      AuthenticationError: If the client has another key.
      PeerError: If it has not shown its key in time, or is gone.
    """
    until = self._within(deadline_s)
    server_nonce = secrets.token_bytes(_DIGEST)
    self.send([MAGIC + server_nonce])
    answer = bytearray(2 * _DIGEST)
    self.receive(memoryview(answer), until=until)
    client_nonce, proof = bytes(answer[:_DIGEST]), bytes(answer[_DIGEST:])
    authenticated = hmac.compare_digest(
      proof, _proof(key, b"client", server_nonce, client_nonce)
    )
    server_proof = (
      _proof(key, b"server", server_nonce, client_nonce)
      if authenticated
      else bytes(_DIGEST)
    )
    self.send([server_proof])
    if not authenticated:
      raise AuthenticationError(f"{self.name} does not have the key")

  def greet_server(self, key: bytes) -> None:
    """Run the greeting of the side that connects, within the patience.

    Raises:
      AuthenticationError: If the server has another key, or is another program.
      PeerError: If it has not answered in time, or is gone.
    """
    until = self._within(None)
    hello = bytearray(len(MAGIC) + _DIGEST)
    self.receive(memoryview(hello), until=until)
    if hello[: len(MAGIC)] != MAGIC:
      raise AuthenticationError(f"{self.name} does not speak this protocol")
    server_nonce, client_nonce = (
      bytes(hello[len(MAGIC) :]),
      secrets.token_bytes(_DIGEST),
    )
    self.send(
      [client_nonce + _proof(key, b"client", server_nonce, client_nonce)]
    )
    server_proof = bytearray(_DIGEST)
    self.receive(memoryview(server_proof), until=until)
    expected = _proof(key, b"server", server_nonce, client_nonce)
    if not hmac.compare_digest(bytes(server_proof), expected):
      raise AuthenticationError(f"{self.name} does not have the same key")

  # -------------------------------------------------------------------------
  # Messages
  # -------------------------------------------------------------------------

  def tell_object(self, fields: Mapping[str, Any]) -> None:
    """Send a JSON object."""
    self.send([framed(as_json(fields))])

  def hear_object(
    self, most: int, until: Callable[[], float] | None = None
  ) -> dict[str, Any] | None:
    """Receive the next object of `tell_object`; None if the other side left.

    Args:
      most: Maximum size in bytes.
      until: Function that returns the seconds left; default: no deadline.

    Raises:
      HostileMessageError: If it is too long, or not an object.
    """
    body = self.frame(most, until)
    if body is None:
      return None
    try:
      return json_object(body)
    except ValueError as error:
      raise self.hostile(error) from None

  def hostile(self, error: Exception) -> HostileMessageError:
    """Make a `HostileMessageError` from an error in a message."""
    why = f"{type(error).__name__}: {error}"[:200]
    return HostileMessageError(
      f"{self.name} sent a message that is not of the protocol: {why}"
    )

  def frame(
    self, most: int, until: Callable[[], float] | None = None
  ) -> bytes | None:
    """Receive the bytes of the next message, or None at the end.

    Raises:
      HostileMessageError: If it has less than 2 or more than `most` bytes.
    """
    head = bytearray(SIZE.size)
    if not self.receive(memoryview(head), may_end=True, until=until):
      return None
    (size,) = SIZE.unpack(head)
    if not 2 <= size <= most:
      raise HostileMessageError(
        f"{self.name} announced a message of {size} bytes; at most {most} are "
        "allowed"
      )
    body = bytearray(size)
    self.receive(memoryview(body), until=until)
    return bytes(body)

  def readable(self, seconds: int | float) -> bool:
    """Wait until bytes or the end arrive; whether they did in time.

    Raises:
      PeerError: If this side has closed the connection.
    """
    try:
      # Unlike epoll, poll notices that another thread closed the socket;
      # `select.select` fails for large file numbers.
      poll = select.poll()
      poll.register(self.link, select.POLLIN)
      return bool(poll.poll(math.ceil(1000 * seconds)))
    except (OSError, ValueError) as error:
      # A socket that was closed meanwhile has no file number.
      raise self.fail(OSError(str(error))) from None

  def wait(self, seconds: float) -> None:
    """Sleep, and check that the other side sends nothing meanwhile.

    Raises:
      PeerError: If it left, or sent a message.
    """
    # `poll` waits in milliseconds only: sleep, then poll.
    time.sleep(seconds)
    if not self.readable(0):
      return
    try:
      if self.link.recv(1, socket.MSG_PEEK):
        raise HostileMessageError(f"{self.name} sent a message unasked")
      raise ConnectionError("in the middle of a read")
    except OSError as error:
      raise self.fail(error) from None

  # -------------------------------------------------------------------------
  # Bytes
  # -------------------------------------------------------------------------

  def send(
    self,
    parts: Sequence[bytes | memoryview],
    until: Callable[[], float] | None = None,
  ) -> None:
    """Send contiguous bytes; `until` returns the seconds left.

    Raises:
      PeerError: If the other side takes nothing, or is gone.
    """
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    try:
      send_views(self.link, views, lambda: self._limit_timeout(until))
    except OSError as error:
      raise self.fail(error) from None
    finally:
      if until is not None:
        self._restore_timeout()

  def receive(
    self,
    view: memoryview,
    *,
    may_end: bool = False,
    until: Callable[[], float] | None = None,
  ) -> bool:
    """Fill contiguous memory; False if the other side had left before.

    Args:
      view: Memory to fill.
      may_end: Whether the other side may leave before the first byte.
      until: Function that returns the seconds left.

    Raises:
      PeerError: If the other side sends nothing, or is gone.
    """
    view = view.cast("B")
    try:
      num_received = receive_view(
        self.link, view, lambda: self._limit_timeout(until)
      )
      if num_received < len(view):
        if may_end and not num_received:
          return False
        raise ConnectionError("before the last byte")
    except OSError as error:
      raise self.fail(error) from None
    finally:
      if until is not None:
        self._restore_timeout()
    return True

  def _within(self, seconds: int | float | None) -> Callable[[], float]:
    """Make a function that returns the seconds left; default: the patience."""
    end = time.monotonic() + (self.patience_s if seconds is None else seconds)
    return lambda: end - time.monotonic()

  def _limit_timeout(self, until: Callable[[], float] | None) -> None:
    """Set the socket's timeout to the time left."""
    if until is None:
      return
    seconds_left = until()
    if seconds_left <= 0:
      raise TimeoutError("the time is over")
    self.link.settimeout(min(seconds_left, self.patience_s))

  def _restore_timeout(self) -> None:
    with contextlib.suppress(OSError):
      self.link.settimeout(self.patience_s)


def _proof(key: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
  return hmac.digest(key, MAGIC + side + server + client, "sha256")
