"""Messages of the protocol of pulls over an authenticated connection.

Guarantees: those of `parallel.links.connection`; a message is JSON of at most
1 MiB with all numbers checked. A connection for pulls has no heartbeat: its
reader waits for bytes that are due, and a publisher's leases end by a clock.
"""

from __future__ import annotations

from typing import Any

from ringjax.json_text import json_text
from ringjax.parallel.frames import framed, json_object
from ringjax.parallel.links.connection import Connection
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

MOST_MESSAGE = 1 << 20
# Maximum pages of one read, so that its message stays below the limit.
MOST_RUN = 1 << 12
_KINDS: dict[str, type] = {
  "read": ReadRequest,
  "pages": ReadReply,
  "refused": ReadRefused,
  "complete": CompleteRequest,
  "completed": CompleteReply,
  "abort": AbortRequest,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class PullConnection(Connection):
  """A connection of a reader and a publisher."""

  def tell(self, message: Message, **beside: Any) -> None:
    """Send a message, with further fields of JSON values."""
    self.send([encode(message, **beside)])

  def hear(self) -> tuple[Message, dict[str, Any]] | None:
    """Receive the next message and its further fields; None at the end.

    Raises:
      HostileMessageError: If it is too long, or not of the protocol.
    """
    body = self.frame(MOST_MESSAGE)
    if body is None:
      return None
    try:
      return decode(body)
    except (KeyError, TypeError, ValueError) as error:
      raise self.hostile(error) from None


def encode(message: Message, **beside: Any) -> bytes:
  """Encode a message as bytes, its size first."""
  fields: dict[str, Any] = dict(
    vars(message), t=_NAMES[type(message)], **beside
  )
  if "pages" in fields:
    fields["pages"] = keys_to_runs(fields["pages"])
  return framed(json_text(fields).encode())


def decode(body: bytes) -> tuple[Message, dict[str, Any]]:
  """Decode a message and its further fields.

  Raises:
    ValueError, KeyError, TypeError: If it is malformed.
  """
  fields = json_object(body)
  kind = _KINDS[fields.pop("t")]
  own_fields: dict[str, Any] = {}
  for name in kind.__dataclass_fields__:
    value = fields.pop(name)
    if name == "pages":
      value = runs_to_keys(value, MOST_RUN)
    elif name in ("reader", "why"):
      if not isinstance(value, str) or len(value) > 256:
        raise ValueError(f"{name} is no short text")
    elif type(value) is not int or not 0 <= value < 1 << 63:
      raise ValueError(f"{name} is no integer in its range")
    own_fields[name] = value
  return kind(**own_fields), fields
