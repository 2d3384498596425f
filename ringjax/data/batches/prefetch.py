"""Prefetcher: a thread that makes items before they are taken.

Guarantees: items come in order, each once. An error in making an item is raised
where the item would have been taken. `close` ends the thread, which at that
moment may still finish one item; so does dropping the object.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Prefetcher:
  """Makes `make(start)`, `make(start + 1)`, ... in advance, in a thread.

  Args:
    make: Function that makes an item; called one at a time, in another thread.
    start: Number of the first item.
    depth: Largest number of items that are ready.
  """

  def __init__(self, make: Callable[[int], Any], start: int, depth: int):
    self._make, self._next = make, start + depth
    self._pool = ThreadPoolExecutor(1, thread_name_prefix="ringjax-data")
    thread = self._pool.submit(threading.current_thread).result()
    self._items = collections.deque(
      self._pool.submit(make, start + i) for i in range(depth)
    )
    self.close = weakref.finalize(self, _close, self._pool, thread)

  def take(self) -> Any:
    """Waits for the next item; raises the error of making it, if any."""
    item = self._items[0].result()
    self._items.popleft()
    self._items.append(self._pool.submit(self._make, self._next))
    self._next += 1
    return item


def _close(pool: ThreadPoolExecutor, thread: threading.Thread) -> None:
  # Garbage may be collected in the thread itself, which cannot wait for itself.
  wait = thread is not threading.current_thread()
  pool.shutdown(wait=wait, cancel_futures=True)
