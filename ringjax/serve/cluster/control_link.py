"""What routers and instances of a cluster tell each other.

Guarantees: both sides have shown that they have the key (`transfer/wire.py`);
messages are objects of JSON, which arrive once and in order, or the link ends.
A side that is silent for too long, or that sends what is no message, is
given up: `on_end` is called once, with the reason. `tell` never waits.
Cost: two threads a link, and a beat every `beat_s` seconds each way.

As of pulls nothing is encrypted: use a network that you trust, or a tunnel.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ringjax.checks import number
from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.transfer.client import Address
from ringjax.transfer.wire import PullConnection, checked_key

# Bytes of a message: prompts of many millions of tokens.
_MOST_BYTES = 1 << 27
Fields = Mapping[str, Any]


def checked_beat(
  silence_s: int | float, beat_s: int | float
) -> tuple[float, float]:
  """When another side is given up, and how often it hears of this one.

  Raises:
    OptionError: it would be given up between two beats.
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
) -> PullConnection:
  """A greeted connection to a router.

  Args:
    address: host and port where instances join.
    key: that of the cluster.
    silence_s: seconds without a byte after which it is given up.
    name: what errors call it, behind which the address stands.

  Raises:
    PeerError: nothing answers there.
    AuthenticationError: what answers has another key.
  """
  key, name = checked_key(key), f"{name} {address[0]}:{address[1]}"
  try:
    link = socket.create_connection(address, silence_s)
  except (OSError, OverflowError) as error:
    raise PeerError(f"{name} cannot be reached: {error}") from None
  wire = PullConnection(link, silence_s, name)
  try:
    wire.greet_publisher(key)
  except BaseException:
    wire.close()
    raise
  return wire


def ask_router(
  address: Address, key: bytes, *, silence_s: int | float = 10.0, **fields: Any
) -> dict[str, Any]:
  """What a router answers to a command: "instances", or "set_role".

  Args:
    address: where instances join it.
    key: that of the cluster.
    silence_s: seconds to wait for it.
    **fields: `what`, and its arguments: set_role has `name` and `role`.

  Raises:
    PeerError: it cannot be reached, or has another key.
    OptionError: it refuses.
  """
  wire = dial(address, key, silence_s)
  try:
    wire.tell_object({"t": "command", **fields})
    found = wire.hear_object(_MOST_BYTES)
  finally:
    wire.close()
  if found is None:
    raise PeerError(f"{wire.name} closed the connection")
  if "error" in found:
    raise OptionError(str(found["error"])[:400])
  return found


class ControlLink:
  """One link, once it is greeted.

  Attributes:
    name: of the other side.
    ended: whether it is over.
  """

  def __init__(
    self,
    wire: PullConnection,
    *,
    on_message: Callable[[dict[str, Any]], object],
    on_end: Callable[[str], object],
    beat: Callable[[], Fields],
    beat_s: int | float,
  ):
    """Begins with `start`.

    Args:
      wire: the connection, greeted.
      on_message: called with each message, by one thread.
      on_end: called by that thread with why there are no more.
      beat: the message that is sent every so often.
      beat_s: how often, in seconds; see `checked_beat`.
    """
    self.name, self.ended = wire.name, False
    self._wire, self._on_message, self._on_end = wire, on_message, on_end
    self._beat, self._beat_s = beat, beat_s
    self._outbox: queue.Queue[Fields | None] = queue.Queue()
    self._why = ""

  def start(self) -> ControlLink:
    """Lets its threads work."""
    for work in (self._send, self._hear):
      threading.Thread(
        target=work, name=f"ringjax link {self.name}", daemon=True
      ).start()
    return self

  def tell(self, **fields: Any) -> None:
    """Sends a message, behind those before it."""
    self._outbox.put(fields)

  def close(self, why: str = "it was closed") -> None:
    """Ends it behind the messages that wait; `on_end` is told why."""
    self._why = self._why or why
    self._outbox.put(None)

  def _send(self) -> None:
    due = time.monotonic()
    try:
      while True:
        try:
          left = due - time.monotonic()
          fields = self._outbox.get(timeout=max(0.0, left))
        except queue.Empty:
          fields, due = self._beat(), time.monotonic() + self._beat_s
        if fields is None:
          break
        self._wire.tell_object(fields)
        if time.monotonic() > due:
          self._wire.tell_object(self._beat())
          due = time.monotonic() + self._beat_s
    except Exception as error:
      # Whatever it is: a link that sends no more must not look alive.
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
