"""Items that a thread makes before they are asked for.

Guarantees: items come in order, each once. What making one raises is raised
where it would have been taken. `close` ends the thread, which at that moment
may still finish one item; so does dropping the object.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Prefetcher:
  """`make(start)`, `make(start + 1)`, ... as they are taken.

  Args:
    make: makes an item; it is called in another thread, one call at a time.
    start: the first.
    depth: how many are ready at most.
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
    """Waits for the next item; raises what making it raised."""
    item = self._items[0].result()
    self._items.popleft()
    self._items.append(self._pool.submit(self._make, self._next))
    self._next += 1
    return item


def _close(pool: ThreadPoolExecutor, thread: threading.Thread) -> None:
  # Garbage may be collected in the thread itself, which cannot wait for itself.
  wait = thread is not threading.current_thread()
  pool.shutdown(wait=wait, cancel_futures=True)
