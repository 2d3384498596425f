"""A star of processes: rank 0 in the middle, connected to each other rank.

Guarantees: all peers prove that they have the same key before anything else is
read; a rank that dies, freezes or never comes is named within the patience, on
every rank; a message is of the expected kind and size, or an error.
Cost: a message to each worker and one back for each sum; a heartbeat now and
then from each side while it computes or waits for its disk.

Nothing is encrypted; see `ringjax.transfer.wire` for the handshake.

  message   kind, number, size; then as many bytes: JSON, or an array
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.json_text import json_text
from ringjax.parallel.door import Door
from ringjax.parallel.frames import json_object
from ringjax.parallel.links.connection import (
  AuthenticationError,
  Connection,
  HostileMessageError,
  checked_key,
)

PATIENCE_S = 60.0
JOIN_S = 300.0
_HEAD = struct.Struct("<BIQ")
_MOST_TEXT = 1 << 26
_PAUSE_S = 0.1


class Kind(enum.IntEnum):
  """Kind of a message."""

  ALIVE = 0
  HELLO = 1
  SETUP = 2
  OPEN = 3
  PASS = 4
  ARRAY = 5
  REPORT = 6
  FAIL = 7
  END = 8


_TEXTS = (Kind.HELLO, Kind.SETUP, Kind.OPEN, Kind.PASS, Kind.REPORT, Kind.FAIL)


# Seconds in which an unauthenticated peer has to prove the key.
_GREETING_S = 5.0


class StarLink:
  """One connection of a star, with a thread that sends heartbeats.

  Attributes:
    rank: Rank of the other side.
    sent_bytes: Bytes of arrays sent so far.
  """

  def __init__(self, link: Connection, rank: int):
    self.rank, self.sent_bytes = rank, 0
    self._link = link
    self._sending = threading.Lock()
    self._over = threading.Event()
    threading.Thread(
      target=self._beat, name=f"ringjax star link to {rank}", daemon=True
    ).start()

  def tell(self, kind: Kind, number: int = 0, **body: Any) -> None:
    """Sends a message of JSON, or an empty one.

    Raises:
      PeerError: If the other side is gone, or takes nothing.
    """
    data = json_text(body).encode() if kind in _TEXTS else b""
    self._send([_HEAD.pack(kind, number, len(data)), data])

  def send(
    self, number: int, x: Shaped[np.ndarray, " ..."] | None = None
  ) -> None:
    """Sends an array, or an empty message in its place.

    Raises:
      PeerError: If the other side is gone, or takes nothing.
    """
    data = b"" if x is None else memoryview(_bytes(x))
    self.sent_bytes += len(data)
    self._send([_HEAD.pack(Kind.ARRAY, number, len(data)), data])

  def hear(self, *kinds: Kind) -> tuple[Kind, dict[str, Any]]:
    """Receives the next message of JSON.

    Raises:
      PeerError: If the other side is gone, frozen, or reports a failed rank.
      HostileMessageError: If the message is of another kind.
    """
    kind, _, size = self._head(*kinds)
    if kind not in _TEXTS:
      return kind, {}
    return kind, self._text(size)

  def receive(
    self, number: int, shape: Sequence[int], dtype: DTypeLike
  ) -> Shaped[np.ndarray, " ..."] | None:
    """Receives the next array, None where the other side sends an empty one.

    Args:
      number: Expected number of the message.
      shape: Expected shape of the array.
      dtype: Expected dtype of the array.

    Raises:
      PeerError: If the other side is gone, frozen, or reports a failed rank.
      HostileMessageError: If the message has another number or size.
    """
    _, n, size = self._head(Kind.ARRAY)
    out = np.empty(tuple(shape), dtype)
    if n != number or size not in (0, out.nbytes):
      raise HostileMessageError(
        f"rank {self.rank} sent {size} bytes for block {n}; block {number} of "
        f"{out.nbytes} bytes was expected",
        rank=self.rank,
      )
    if not size:
      return None
    self._link.receive(memoryview(_bytes(out)))
    return out

  def close(self) -> None:
    """Ends the connection."""
    self._over.set()
    self._link.close()

  def _head(self, *kinds: Kind) -> tuple[Kind, int, int]:
    """Receives the header of the next message, which must be of these kinds."""
    while True:
      head = bytearray(_HEAD.size)
      try:
        self._link.receive(memoryview(head))
      except PeerError as error:
        raise PeerError(f"{error}", rank=self.rank) from None
      kind, number, size = _HEAD.unpack(head)
      if kind == Kind.ALIVE and not size:
        continue
      is_kind = kind in Kind.__members__.values()
      if is_kind and Kind(kind) == Kind.FAIL:
        body = self._text(size)
        rank = body.get("rank")
        raise PeerError(
          str(body.get("why"))[:400],
          rank=rank if isinstance(rank, int) else self.rank,
        )
      if not is_kind or Kind(kind) not in kinds:
        raise HostileMessageError(
          f"rank {self.rank} sent a message of kind {kind}; expected "
          f"{' or '.join(expected.name for expected in kinds)}",
          rank=self.rank,
        )
      return Kind(kind), number, size

  def _text(self, size: int) -> dict[str, Any]:
    if size > _MOST_TEXT:
      raise HostileMessageError(
        f"rank {self.rank} announced a message of {size} bytes; at most "
        f"{_MOST_TEXT} are allowed",
        rank=self.rank,
      )
    data = bytearray(size)
    self._link.receive(memoryview(data))
    try:
      return json_object(data)
    except ValueError:
      raise HostileMessageError(
        f"rank {self.rank} sent what is no JSON object", rank=self.rank
      ) from None

  def _send(self, parts: Sequence[bytes | memoryview]) -> None:
    try:
      with self._sending:
        self._link.send(parts)
    except PeerError as error:
      raise PeerError(f"{error}", rank=self.rank) from None

  def _beat(self) -> None:
    while not self._over.wait(self._link.patience_s / 5):
      # The next message reports a failed connection.
      with contextlib.suppress(PeerError, OSError):
        self.tell(Kind.ALIVE)


def _bytes(x: np.ndarray) -> Any:
  """View an array as bytes; buffers don't know dtypes such as bfloat16."""
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


class Star:
  """The middle of a star: rank 0, with a link to each other rank.

  Attributes:
    links: Connections by rank, from 1.
  """

  def __init__(self, links: dict[int, StarLink]):
    self.links = links

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
    links: dict[int, StarLink] = {}
    fault: Exception | None = None

    def greet(
      link: socket.socket, address: tuple[str, int]
    ) -> tuple[StarLink, dict[str, Any]]:
      wire = Connection(link, patience_s, f"{address[0]}:{address[1]}")
      wire.greet_client(key, min(_GREETING_S, patience_s))
      star = StarLink(wire, -1)
      try:
        return star, star.hear(Kind.HELLO)[1]
      except PeerError:
        star.close()
        raise

    door = Door(server, greet, name="ringjax ranks")
    try:
      while len(links) < size - 1:
        if check is not None:
          check()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
          missing = [rank for rank in range(1, size) if rank not in links]
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
          cls._join(*greeted, links, size, digest)
    except Exception as error:
      fault = error
      raise
    finally:
      door.close()
      if fault is not None:
        cls(links).fail(fault)
    return cls(links)

  @classmethod
  def _join(
    cls,
    star: StarLink,
    hello: dict[str, Any],
    links: dict[int, StarLink],
    size: int,
    digest: str,
  ) -> None:
    """Checks a rank's hello and adds its connection to the links.

    Raises:
      OptionError: If its model, size or rank is not the expected one.
    """
    rank, count = hello.get("rank"), hello.get("size")
    is_int = isinstance(rank, int) and not isinstance(rank, bool)
    fault = None
    if not is_int or not 0 < rank < size or count != size:  # pyrefly: ignore
      fault = f"rank {rank} of {count}", f"ranks 1 to {size - 1} of {size}"
    elif rank in links:
      fault = f"two processes of rank {rank}", "each rank once"
    elif hello.get("digest") != digest:
      fault = f"another model folder on rank {rank}", "the same on all ranks"
    if fault is not None:
      error = OptionError("rank", *fault, "start the ranks with the same flags")
      with contextlib.suppress(PeerError):
        star.tell(Kind.FAIL, why=f"{error}", rank=0)
      star.close()
      raise error
    assert isinstance(rank, int)
    star.rank, star._link.name = rank, f"rank {rank}"
    links[rank] = star

  def fail(self, error: BaseException) -> None:
    """Reports an error to all ranks and ends the connections."""
    rank = error.rank if isinstance(error, PeerError) else None
    reason = f"{error}" if rank else f"rank 0 failed: {error}"
    for link in self:
      if link.rank != rank:
        with contextlib.suppress(PeerError):
          link.tell(Kind.FAIL, why=reason, rank=rank or 0)
    self.close()

  def close(self) -> None:
    """Ends the connections."""
    for link in self:
      link.close()


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
      link = Connection.connect(
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
  star = StarLink(link, 0)
  star.tell(Kind.HELLO, rank=rank, size=size, digest=digest)
  return star
