"""A sliding window of weight blocks that a thread prefetches.

Guarantees: blocks come in their order, round after round; in addition to the
kept blocks at most `window` of them are in memory, counted from the beginning
of a read to `release`. An error of a read is raised by the `take` of its block.
Cost: a read of each block in each round, unless all fit the window: then each
is read once.

`WindowLayout` lists the blocks and those that are kept;
`ringjax.plan.systems.layer_window.simulate` simulates the same window.

Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), section 3.3.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ringjax.models.partition.window_layout import WindowLayout


class BlockTimes:
  """Seconds spent, by kind of work and by block.

  First and later passes are counted separately: the first ones include the
  compilation of programs.

  Attributes:
    later: Whether the current pass is a later one.
    events: Recorded events (kind, block, start, end) by `time.monotonic`, or
      None if they are not recorded.
  """

  KINDS = ("read", "disk", "peers", "compute")

  def __init__(self, *, events: bool = False):
    self.later = False
    self.events: list[tuple[str, int, float, float]] | None = None
    self._keeps = events
    self._last_read: dict[int, float] = {}
    self.restart()

  def restart(self) -> None:
    """Resets counts but a block's last read; the next passes are first ones."""
    self.later = False
    empty_counts = lambda: {
      kind: collections.defaultdict(float) for kind in self.KINDS
    }
    self._seconds = empty_counts(), empty_counts()
    self._reads: tuple[Any, Any] = collections.Counter(), collections.Counter()
    self._passes = [0, 0]
    self.events = [] if self._keeps else None

  def begin(self, *, later: bool) -> None:
    """Begins a pass, a first or a later one."""
    self.later = later
    self._passes[later] += 1

  @contextlib.contextmanager
  def of(self, kind: str, block: int) -> Iterator[None]:
    """Counts the seconds of the code in a `with` statement."""
    start, in_later_pass = time.monotonic(), self.later
    try:
      yield
    finally:
      end = time.monotonic()
      self._seconds[in_later_pass][kind][block] += end - start
      if kind == "read":
        self._reads[in_later_pass][block] += 1
        self._last_read[block] = end - start
      if self.events is not None:
        self.events.append((kind, block, start, end))

  def means(self, kind: str, blocks: int) -> tuple[float, ...]:
    """Mean seconds of a kind by block: per read for "read", else per pass.

    Later passes are used, or the first ones if there was no later pass. A block
    that stays in memory has the seconds of its last read, before the restart.
    """
    means = []
    for k in range(blocks):
      use_later = bool(self._passes[True])
      if kind == "read":
        use_later = bool(self._reads[True][k])
      count = (
        self._reads[use_later][k] if kind == "read" else self._passes[use_later]
      )
      if kind == "read" and not count:
        means.append(self._last_read.get(k, 0.0))
      else:
        means.append(self._seconds[use_later][kind][k] / max(count, 1))
    return tuple(means)


class BlockWindow:
  """Blocks in memory, and the thread that reads the next ones.

  Attributes:
    window: Maximum number of blocks in memory at once; None for all.
    peak_blocks: Peak number of blocks in memory, with the kept ones.
    peak_bytes: Peak bytes of blocks in memory.
    bytes_read: Bytes read from disk.
  """

  def __init__(
    self,
    read: Callable[[int], Any],
    layout: WindowLayout,
    times: BlockTimes,
  ):
    """Starts the reading thread.

    Args:
      read: Function that returns a block by its number.
      layout: Layout of the blocks; those of 0 bytes are never read or taken.
      times: Counts the seconds of reads and of waits for them.
    """
    self.window = layout.window
    self._read, self._nbytes, self._times = read, layout.nbytes, times
    self._order, self._kept = layout.order, layout.kept_blocks
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
    """Waits for a block and returns it; it stays in memory until `release`.

    Raises:
      RingjaxError: If the read of the block raised it.
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
    """Frees a block that was taken, unless it is a kept one."""
    with self._changed:
      if block in self._kept:
        return
      self._held[block] -= 1
      self._changed.notify_all()

  def close(self) -> None:
    """Ends the thread and frees all blocks."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join()
    self._ready.clear()

  def _ahead(self) -> None:
    """Reads block after block as long as there is room; the thread's target."""
    while self._order:
      for block in self._order:
        if not self._room(block):
          return
        if block in self._ready:
          continue
        try:
          with self._times.of("read", block):
            weights = self._read(block)
        except BaseException as error:
          with self._changed:
            self._fault = block, error
            self._changed.notify_all()
          return
        with self._changed:
          self.bytes_read += self._nbytes[block]
          self._ready[block] = weights
          self._changed.notify_all()
        # Else this frame would keep the block alive after its release.
        del weights
      if len(self._kept) == len(self._order):
        return

  def _room(self, block: int) -> bool:
    """Waits for room for a block and reserves it; False if closed."""
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
