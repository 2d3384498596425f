"""A sliding window of blocks of weights, which a thread reads ahead.

Guarantees: blocks come in their order, round after round; at most `window` of
them are in memory, counted from the beginning of a read to `release`, beside
those that are kept. An error of a read is raised by the `take` of its block.
Cost: a read of each block in each round, unless all fit the window: then each
is read once.

`WindowLayout` says which blocks there are and which stay;
`ringjax.plan.layer_window.simulate` is the same on simulated clocks.

Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), section 3.3.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ringjax.models.window_layout import WindowLayout


class BlockTimes:
  """Seconds by what they were spent on, and by block.

  What is counted is the first passes or later ones: programs are compiled in
  the first.

  Attributes:
    later: whether later passes are counted now.
    events: (kind, block, start, end) of each, by `time.monotonic`, if they are
      kept; else None.
  """

  KINDS = ("read", "disk", "peers", "compute")

  def __init__(self, *, events: bool = False):
    self.later = False
    self.events: list[tuple[str, int, float, float]] | None = None
    self._keeps = events
    self.restart()

  def restart(self) -> None:
    """Forgets all: the first passes are counted again."""
    self.later = False
    made: Any = lambda: {
      kind: collections.defaultdict(float) for kind in self.KINDS
    }
    self._seconds = made(), made()
    self._reads: tuple[Any, Any] = collections.Counter(), collections.Counter()
    self._passes = [0, 0]
    self.events = [] if self._keeps else None

  def begin(self, *, later: bool) -> None:
    """A pass begins, one of the first or a later one."""
    self.later = later
    self._passes[later] += 1

  @contextlib.contextmanager
  def of(self, kind: str, block: int) -> Iterator[None]:
    """Counts the seconds of what is inside."""
    start, later = time.monotonic(), self.later
    try:
      yield
    finally:
      end = time.monotonic()
      self._seconds[later][kind][block] += end - start
      if kind == "read":
        self._reads[later][block] += 1
      if self.events is not None:
        self.events.append((kind, block, start, end))

  def means(self, kind: str, blocks: int) -> tuple[float, ...]:
    """Of each block the mean seconds of a kind in a later pass, or of a read.

    If there was no later pass, in the first ones.
    """
    found = []
    for k in range(blocks):
      later = bool(self._passes[True])
      if kind == "read":
        later = bool(self._reads[True][k])
      count = self._reads[later][k] if kind == "read" else self._passes[later]
      found.append(self._seconds[later][kind][k] / max(count, 1))
    return tuple(found)


class BlockWindow:
  """Blocks in memory, and the thread that reads the next ones.

  Attributes:
    window: blocks that may be there at once; None for all.
    peak_blocks: that were there at once, kept ones among them.
    peak_bytes: their bytes.
    bytes_read: from disk.
  """

  def __init__(
    self,
    read: Callable[[int], Any],
    layout: WindowLayout,
    times: BlockTimes,
  ):
    """Begins to read.

    Args:
      read: returns a block by its number.
      layout: the blocks; those of 0 bytes are never read, nor taken.
      times: takes the seconds of reads and of waits for them.
    """
    self.window = layout.window
    self._read, self._nbytes, self._times = read, layout.nbytes, times
    self._order, self._kept = layout.order, layout.kept
    self._changed = threading.Condition()
    self._ready: dict[int, Any] = {}
    self._held: collections.Counter[int] = collections.Counter()
    self._fault: tuple[int, BaseException] | None = None
    self._closed = False
    self.peak_blocks = self.peak_bytes = self.bytes_read = 0
    self._thread = threading.Thread(
      target=self._ahead, name="ringjax block window", daemon=True
    )
    self._thread.start()

  def take(self, block: int) -> Any:
    """A block, once it is there; it stays until `release`.

    Raises:
      RingjaxError: what its read raised.
    """
    with self._times.of("disk", block), self._changed:
      while block not in self._ready:
        if self._fault is not None and self._fault[0] == block:
          raise self._fault[1]
        if self._closed:
          raise RuntimeError("the window is closed")
        self._changed.wait()
      if block in self._kept:
        return self._ready[block]
      return self._ready.pop(block)

  def release(self, block: int) -> None:
    """Lets go of a block that was taken; a kept one stays."""
    with self._changed:
      if block in self._kept:
        return
      self._held[block] -= 1
      self._changed.notify_all()

  def close(self) -> None:
    """Ends the thread and lets go of all blocks."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join()
    self._ready.clear()

  def _ahead(self) -> None:
    """The thread: reads block after block as long as there is room."""
    while self._order:
      for block in self._order:
        if not self._room(block):
          return
        if block in self._ready:
          continue
        try:
          with self._times.of("read", block):
            found = self._read(block)
        except BaseException as error:
          with self._changed:
            self._fault = block, error
            self._changed.notify_all()
          return
        with self._changed:
          self.bytes_read += self._nbytes[block]
          self._ready[block] = found
          self._changed.notify_all()
        # Else this frame has it still when the window has let go of it.
        del found
      if len(self._kept) == len(self._order):
        return

  def _room(self, block: int) -> bool:
    """Waits for room for a block and takes it; False: the window is closed."""
    with self._changed:
      if block in self._ready:
        return not self._closed
      if block not in self._kept:
        assert self.window is not None
        self._changed.wait_for(
          lambda: self._closed or self._passing() < self.window  # pyrefly: ignore
        )
      if self._closed:
        return False
      self._held[block] += 1
      self.peak_blocks = max(self.peak_blocks, self._held.total())
      self.peak_bytes = max(
        self.peak_bytes,
        sum(self._nbytes[k] * n for k, n in self._held.items()),
      )
      return True

  def _passing(self) -> int:
    return sum(n for k, n in self._held.items() if k not in self._kept)
