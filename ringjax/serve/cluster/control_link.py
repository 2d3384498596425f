"""Connections between the router of a cluster and its instances or clients.

An instance stays connected by a `LiveLink`; a client sends a command and gets
a reply. As for pulls, nothing is encrypted: use a network that you trust, or a
tunnel.
"""

from __future__ import annotations

from typing import Any

from ringjax.checks import number
from ringjax.errors import OptionError, PeerError
from ringjax.parallel.links.connection import Connection, checked_key
from ringjax.transfer.client import Address

# Maximum bytes of a reply.
_MOST_BYTES = 1 << 27


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
