"""Items that a thread makes before they are asked for.

Guarantees: items come in order, each once. What making one raises is raised
where it would have been taken, and the thread is then done. `close` ends the
thread, which at that moment may still finish one item; so does dropping the
object.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any


class _Shared:
  """What the thread and its consumer both hold."""

  def __init__(self) -> None:
    self.changed = threading.Condition()
    self.items: collections.deque[tuple[Any, BaseException | None]] = (
      collections.deque()
    )
    self.closed = False


class Prefetcher:
  """`make(start)`, `make(start + 1)`, ... as they are taken.

  Args:
    make: makes an item; it is called in another thread, once at a time.
    start: the first.
    depth: how many wait at most.
  """

  def __init__(self, make: Callable[[int], Any], start: int, depth: int):
    self._shared = _Shared()
    # The thread holds what is shared, not this object: it can be dropped.
    thread = threading.Thread(
      target=_work,
      args=(self._shared, make, start, depth),
      name="ringjax-data",
      daemon=True,
    )
    self.close = weakref.finalize(self, _close, self._shared, thread)
    thread.start()

  def take(self) -> Any:
    """The next item, when it is there; or raises what making it raised."""
    shared = self._shared
    with shared.changed:
      shared.changed.wait_for(lambda: shared.items)
      item, error = shared.items[0]
      if error is not None:
        raise error
      shared.items.popleft()
      shared.changed.notify_all()
      return item


def _work(
  shared: _Shared, make: Callable[[int], Any], at: int, depth: int
) -> None:
  error = None
  while error is None:
    with shared.changed:
      shared.changed.wait_for(
        lambda: shared.closed or len(shared.items) < depth
      )
      if shared.closed:
        return
    item = None
    try:
      item = make(at)
    except BaseException as raised:
      error = raised
    with shared.changed:
      shared.items.append((item, error))
      shared.changed.notify_all()
    at += 1


def _close(shared: _Shared, thread: threading.Thread) -> None:
  with shared.changed:
    shared.closed = True
    shared.changed.notify_all()
  # Garbage may be collected in the thread itself.
  if thread is not threading.current_thread():
    thread.join()
