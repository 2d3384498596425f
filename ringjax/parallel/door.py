"""Admission of peers to a listening socket that unknown peers cannot block.

Guarantees: each connection is greeted in a separate thread, so that a silent
one delays no other; at most `waiting` connections are greeted at a time, and
when one more comes, the one that has waited longest is closed. A peer that
greets at once is admitted, however many silent connections there are.
Cost: a thread for each connection until it is admitted or closed.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ringjax.errors import PeerError

Peer = TypeVar("Peer")
# Most connections that have not been admitted yet.
MOST_WAITING = 64


class Door(Generic[Peer]):
  """Greets the connections of a listening socket, several at once."""

  def __init__(
    self,
    server: socket.socket,
    greet: Callable[[socket.socket, Any], Peer],
    enter: Callable[[Peer], object] | None = None,
    *,
    name: str,
    waiting: int = MOST_WAITING,
    dropped: Callable[[], object] | None = None,
  ):
    """Accept connections from now on, in background threads.

    Args:
      server: Listening socket; it stays the caller's, who closes it.
      greet: Function of a connection and its address that returns the admitted
        peer, or raises PeerError or OSError for any other, whose connection
        is then closed.
      enter: Function of an admitted peer, called in the thread that greeted
        it; default: peers wait for `accept`.
      name: Prefix of the threads' names.
      waiting: Largest number of connections that are greeted at a time.
      dropped: Function called when a waiting connection is closed for a
        newer one.
    """
    self._server, self._greet_peer = server, greet
    self._admitted: queue.SimpleQueue[Peer | None] = queue.SimpleQueue()
    self._enter = self._admitted.put if enter is None else enter
    self._name, self._most, self._dropped = name, waiting, dropped
    self._lock = threading.Lock()
    self._waiting: dict[int, socket.socket] = {}
    self._closed = False
    self._wake, self._woken = socket.socketpair()
    server.setblocking(False)
    self._thread = threading.Thread(
      target=self._accept, name=f"{name} accept", daemon=True
    )
    self._thread.start()

  def __enter__(self) -> Door[Peer]:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def accept(self, timeout_s: int | float | None = None) -> Peer | None:
    """Return the next admitted peer, or None once the door is closed.

    Raises:
      TimeoutError: If no peer was admitted within `timeout_s` seconds.
    """
    try:
      return self._admitted.get(timeout=timeout_s)
    except queue.Empty:
      raise TimeoutError(f"no peer within {timeout_s:g} s") from None

  def close(self) -> None:
    """Stop accepting, and close the connections that still wait."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      waiting = list(self._waiting.values())
    for link in waiting:
      shut(link)
    with contextlib.suppress(OSError):
      self._wake.send(b"\0")
    self._thread.join()
    self._admitted.put(None)

  def _accept(self) -> None:
    with selectors.DefaultSelector() as ready, self._wake, self._woken:
      ready.register(self._woken, selectors.EVENT_READ)
      try:
        ready.register(self._server, selectors.EVENT_READ)
      except (ValueError, OSError):
        return  # The server was closed before the first connection.
      while True:
        ready.select()
        if self._closed:
          return
        try:
          link, address = self._server.accept()
        except BlockingIOError:
          continue  # The peer left again.
        except OSError:
          if self._server.fileno() < 0:
            return
          time.sleep(0.05)  # Out of file descriptors, for example.
          continue
        self._admit(link, address)

  def _admit(self, link: socket.socket, address: tuple[str, int]) -> None:
    oldest = None
    with self._lock:
      if self._closed:
        link.close()
        return
      if len(self._waiting) >= self._most:
        oldest = self._waiting.pop(next(iter(self._waiting)))
      self._waiting[id(link)] = link
    if oldest is not None:
      shut(oldest)
      if self._dropped is not None:
        self._dropped()
    threading.Thread(
      target=self._greet,
      args=(link, address),
      name=f"{self._name} greet {address}",
      daemon=True,
    ).start()

  def _greet(self, link: socket.socket, address: tuple[str, int]) -> None:
    peer = None
    # Errors mean an unauthenticated peer, or one that left.
    with contextlib.suppress(PeerError, OSError):
      peer = self._greet_peer(link, address)
    with self._lock:
      admitted = self._waiting.pop(id(link), None) is not None
    if peer is None or not admitted:
      shut(link)
    else:
      self._enter(peer)


def shut(link: socket.socket) -> None:
  """Close a socket, and wake the thread that waits for it."""
  with contextlib.suppress(OSError):
    link.shutdown(socket.SHUT_RDWR)
  link.close()
