"""Control messages between the router and the instances of a cluster.

Guarantees: both sides have proved that they have the key (see
`parallel/links/connection.py`); messages are JSON objects, which arrive once
and in order, or the link ends.
A side that is silent for too long, or that sends a malformed message, is
disconnected: `on_end` is called once, with the reason. `tell` never blocks.
Cost: two threads a link, and a heartbeat every `beat_s` seconds each way.

As for pulls, nothing is encrypted: use a network that you trust, or a tunnel.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ringjax.checks import number
from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.parallel.links.connection import Connection, checked_key
from ringjax.transfer.client import Address

# Maximum bytes of a message: prompts of many millions of tokens.
_MOST_BYTES = 1 << 27
Fields = Mapping[str, Any]


def checked_beat(
  silence_s: int | float, beat_s: int | float
) -> tuple[float, float]:
  """Check the silence limit and the heartbeat interval of a link.

  Raises:
    OptionError: If a link would be given up between two heartbeats.
  """
  silence_s = number("silence_s", silence_s, above=0)
  beat_s = number("beat_s", beat_s, above=0)
  if beat_s * 2 > silence_s:
    raise OptionError(
      "beat_s",
      f"{beat_s:g}",
      f"at most half of silence_s={silence_s:g}",
      "lower it, or raise silence_s",
    )
  return silence_s, beat_s


def dial(
  address: Address, key: bytes, silence_s: int | float, name: str = "router"
) -> Connection:
  """Connect to a router and authenticate.

  Args:
    address: Host and port where instances join.
    key: Secret key of the cluster.
    silence_s: Seconds without a byte after which the router counts as lost.
    name: Name in errors, followed by the address.

  Raises:
    PeerError: If nothing answers there.
    AuthenticationError: If the peer has another key.
  """
  key, name = checked_key(key), f"{name} {address[0]}:{address[1]}"
  return Connection.connect(address, key, silence_s, name)


def ask_router(
  address: Address, key: bytes, *, silence_s: int | float = 10.0, **fields: Any
) -> dict[str, Any]:
  """Send a command to a router and return its reply.

  Args:
    address: Host and port where instances join.
    key: Secret key of the cluster.
    silence_s: Seconds to wait for the router.
    **fields: `what`, "instances" or "set_role", and its arguments: set_role
      has `name` and `role`.

  Raises:
    PeerError: If the router cannot be reached, or has another key.
    OptionError: If the router refuses.
  """
  wire = dial(address, key, silence_s)
  try:
    wire.tell_object({"t": "command", **fields})
    reply = wire.hear_object(_MOST_BYTES)
  finally:
    wire.close()
  if reply is None:
    raise PeerError(f"{wire.name} closed the connection")
  if "error" in reply:
    raise OptionError(str(reply["error"])[:400])
  return reply


class ControlLink:
  """An authenticated connection for control messages.

  Attributes:
    name: Name of the other side.
    ended: Whether the link has ended.
  """

  def __init__(
    self,
    wire: Connection,
    *,
    on_message: Callable[[dict[str, Any]], object],
    on_end: Callable[[str], object],
    beat: Callable[[], Fields],
    beat_s: int | float,
  ):
    """Prepare the link; `start` begins to send and receive.

    Args:
      wire: Authenticated connection.
      on_message: Function called with each message, by one thread.
      on_end: Function called by that thread with the reason of the end.
      beat: Function that returns the heartbeat message.
      beat_s: Seconds between heartbeats; see `checked_beat`.
    """
    self.name, self.ended = wire.name, False
    self._wire, self._on_message, self._on_end = wire, on_message, on_end
    self._beat, self._beat_s = beat, beat_s
    self._outbox: queue.Queue[Fields | None] = queue.Queue()
    self._why = ""

  def start(self) -> ControlLink:
    """Start the threads that send and receive."""
    for work in (self._send, self._hear):
      threading.Thread(
        target=work, name=f"ringjax link {self.name}", daemon=True
      ).start()
    return self

  def tell(self, **fields: Any) -> None:
    """Queue a message to be sent after those before it."""
    self._outbox.put(fields)

  def close(self, why: str = "it was closed") -> None:
    """End the link after the queued messages; `on_end` gets the reason."""
    self._why = self._why or why
    self._outbox.put(None)

  def _send(self) -> None:
    due = time.monotonic()
    try:
      while True:
        try:
          timeout_s = due - time.monotonic()
          fields = self._outbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
          fields, due = self._beat(), time.monotonic() + self._beat_s
        if fields is None:
          break
        self._wire.tell_object(fields)
        if time.monotonic() > due:
          self._wire.tell_object(self._beat())
          due = time.monotonic() + self._beat_s
    except Exception as error:
      # On any error: a link that can't send must not look alive.
      self._why = self._why or str(error) or type(error).__name__
    self._wire.close()

  def _hear(self) -> None:
    why = f"{self.name} closed the connection"
    try:
      while (fields := self._wire.hear_object(_MOST_BYTES)) is not None:
        try:
          self._on_message(fields)
        except RingjaxError:
          raise
        except Exception as error:
          raise self._wire.hostile(error) from None
    except RingjaxError as error:
      why = str(error)
    self.ended = True
    self.close(why)
    self._wire.close()
    self._on_end(self._why)
