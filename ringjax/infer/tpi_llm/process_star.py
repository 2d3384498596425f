"""A star of processes: rank 0 in the middle, connected to each other rank.

Guarantees: all peers prove that they have the same key before anything else is
read; a rank that dies, freezes or never comes is named within the patience, on
every rank; a message is of the expected kind and size, or an error.
Cost: a message to each worker and one back for each sum; the heartbeats of a
`LiveLink` to each.

Nothing is encrypted; see `parallel.links.connection` for the handshake.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.parallel.door import Door
from ringjax.parallel.links.array_messages import receive_arrays, send_arrays
from ringjax.parallel.links.connection import (
  AuthenticationError,
  Connection,
  HostileMessageError,
  checked_key,
)
from ringjax.parallel.links.link_group import LinkGroup
from ringjax.parallel.links.live_link import LiveLink

PATIENCE_S = 60.0
JOIN_S = 300.0
# Kinds of messages of rank 0; ranks answer arrays and reports.
_KINDS = ("setup", "open", "pass", "array", "report", "end")
_PAUSE_S = 0.1


class StarLink(LiveLink):
  """A connection of a star.

  Attributes:
    sent_bytes: Bytes of arrays sent so far.
  """

  def __init__(
    self, wire: Connection, rank: int | None, own_rank: int | None = None
  ):
    """Prepare the link to a rank, from this process of rank `own_rank`."""
    super().__init__(wire, rank=rank, own_rank=own_rank, kinds=_KINDS)
    self.sent_bytes = 0

  def send_array(
    self, number: int, x: Shaped[np.ndarray, " ..."] | None = None
  ) -> None:
    """Sends an array, or an empty message in its place.

    Raises:
      PeerError: If the other side is gone, or takes nothing.
    """
    arrays = [] if x is None else [x]
    self.sent_bytes += sum(array.nbytes for array in arrays)
    self.send("array", arrays, number=number)

  def take_array(
    self, number: int, shape: Sequence[int], dtype: DTypeLike
  ) -> Shaped[np.ndarray, " ..."] | None:
    """Waits for the next array, None where the other side sends an empty one.

    Args:
      number: Expected number of the message.
      shape: Expected shape of the array.
      dtype: Expected dtype of the array.

    Raises:
      PeerError: If the other side is gone, frozen, or reports a failed rank.
      HostileMessageError: If the message has another number or array.
    """
    message = self.take("array")
    arrays, n = message.arrays, message.fields.get("number")
    expected = (tuple(shape), np.dtype(dtype))
    if n != number or any((x.shape, x.dtype) != expected for x in arrays[:2]):
      raise HostileMessageError(
        f"rank {self.rank} sent {[x.shape for x in arrays[:2]]} for block {n}; "
        f"block {number} of {expected[0]} was expected",
        rank=self.rank,
      )
    return arrays[0] if arrays else None


class Star:
  """The middle of a star: rank 0, with a link to each other rank.

  The first rank that is lost ends the star, and all others learn which it was.

  Attributes:
    links: Connections by rank, from 1, those that have ended included.
  """

  def __init__(self) -> None:
    """Make a star of this rank alone."""
    self.links: dict[int, StarLink] = {}
    self._group: LinkGroup[int] = LinkGroup(together=True)

  def __iter__(self) -> Iterator[StarLink]:
    """Iterates over the links in the order of ranks."""
    return iter([self.links[rank] for rank in sorted(self.links)])

  @classmethod
  def gather(
    cls,
    server: socket.socket,
    size: int,
    key: bytes,
    *,
    digest: str = "",
    patience_s: int | float = PATIENCE_S,
    join_s: int | float = JOIN_S,
    check: Callable[[], Any] | None = None,
  ) -> Star:
    """Waits until all other ranks have connected.

    Args:
      server: Listening socket.
      size: Number of ranks, this one included.
      key: Key that all ranks have, at least 16 bytes.
      digest: Digest of the model, which must be the same on every rank.
      patience_s: Seconds that a rank may be silent afterwards.
      join_s: Seconds to wait for all ranks.
      check: Called now and then meanwhile; may raise if a rank can't come.

    Raises:
      PeerError: If a rank did not come in time.
      OptionError: If a rank has another model, or came twice.
    """
    positive_int("size", size)
    number("patience_s", patience_s, above=0)
    key, deadline = checked_key(key), time.monotonic() + join_s
    self = cls()

    def greet(
      link: socket.socket, address: tuple[Any, ...]
    ) -> tuple[Connection, dict[str, Any]]:
      wire = Connection.admit(link, address, key, patience_s)
      hello = receive_arrays(wire, ("hello",))
      if hello is None:
        raise PeerError(f"{wire.name} left")
      return wire, hello.fields

    try:
      with Door(server, greet, name="ringjax ranks") as door:
        while len(self.links) < size - 1:
          if check is not None:
            check()
          for error in list(self._group.lost.values()):
            raise error
          left_s = deadline - time.monotonic()
          if left_s <= 0:
            missing = [r for r in range(1, size) if r not in self.links]
            raise PeerError(
              f"rank {', '.join(map(str, missing))} of {size} did not join "
              f"within {join_s:g} s",
              rank=missing[0],
            )
          try:
            greeted = door.accept(min(left_s, 0.5))
          except TimeoutError:
            continue
          if greeted is not None:
            self._admit(*greeted, size, digest)
    except Exception as error:
      self.fail(error)
      raise
    return self

  def _admit(
    self, wire: Connection, hello: dict[str, Any], size: int, digest: str
  ) -> None:
    """Checks a rank's hello and adds its connection to the links.

    Raises:
      OptionError: If its model, size or rank is not the expected one.
    """
    rank, count = hello.get("rank"), hello.get("size")
    fault = None
    if type(rank) is not int or not 0 < rank < size or count != size:
      fault = f"rank {rank} of {count}", f"ranks 1 to {size - 1} of {size}"
    elif rank in self.links:
      fault = f"two processes of rank {rank}", "each rank once"
    elif hello.get("digest") != digest:
      fault = f"another model folder on rank {rank}", "the same on all ranks"
    if fault is not None:
      error = OptionError("rank", *fault, "start the ranks with the same flags")
      refused = StarLink(wire, None, 0)
      refused.start()
      refused.fail(f"{error}", blame=0)
      refused.join(1.0)
      raise error
    assert isinstance(rank, int)
    wire.name = f"rank {rank}"
    link = self.links[rank] = StarLink(wire, rank, 0)
    self._group.add(rank, link)
    link.start()

  def fail(self, error: BaseException) -> None:
    """Reports an error to all ranks and ends the connections."""
    rank = error.rank if isinstance(error, PeerError) else None
    reason = f"{error}" if rank else f"rank 0 failed: {error}"
    self._group.fail(reason, blame=rank or 0)

  def close(self) -> None:
    """Ends the connections."""
    self._group.close("rank 0 has ended the group")


def join(
  address: tuple[str, int],
  rank: int,
  size: int,
  key: bytes,
  *,
  digest: str = "",
  patience_s: int | float = PATIENCE_S,
  join_s: int | float = JOIN_S,
) -> StarLink:
  """Connects a rank to the middle of its star.

  Args:
    address: Host and port of rank 0.
    rank: Rank of this process, from 1.
    size: Number of ranks, rank 0 included.
    key: Key that all ranks have, at least 16 bytes.
    digest: Digest of the model.
    patience_s: Seconds that rank 0 may be silent.
    join_s: Seconds to try to reach it.

  Raises:
    PeerError: If rank 0 was not reached.
    AuthenticationError: If rank 0 has another key.
  """
  number("patience_s", patience_s, above=0)
  key, deadline = checked_key(key), time.monotonic() + join_s
  while True:
    left_s = deadline - time.monotonic()
    try:
      if left_s <= 0:
        raise TimeoutError
      wire = Connection.connect(
        address, key, patience_s, "rank 0", connect_s=left_s
      )
      break
    except AuthenticationError:
      raise
    except (OSError, PeerError) as error:
      if time.monotonic() + _PAUSE_S >= deadline:
        raise PeerError(
          f"rank 0 was not reached at {address[0]}:{address[1]} within "
          f"{join_s:g} s: {error}",
          rank=0,
        ) from None
      time.sleep(_PAUSE_S)
  try:
    send_arrays(wire, "hello", rank=rank, size=size, digest=digest)
  except BaseException:
    wire.close()
    raise
  link = StarLink(wire, 0, rank)
  link.start()
  return link
