"""Two exclusive tiers of chunks, kept by frequency times importance.

Guarantees: a chunk is in one of the two tiers at most; each tier's size is
never exceeded. All chunks are on the disk as well, so that evicting one writes
nothing.
Cost: O(log n) an access, with one heap for each tier.

The score of a chunk is its number of uses times the mean fraction of its tokens
that were important (a moving average). A chunk that is used in the slow tier
moves to the fast one if its score beats the smallest there, whose chunk takes
its place; one that is read from the disk enters the fast tier, or else the slow
one, if it beats the smallest there.
Ref: Chen et al. 2025, IMPRESS (FAST).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable

from ringjax.checks import number, positive_int


class ScoredTiers:
  """Assignment of chunks to a fast and a slow tier of memory.

  Attributes:
    sizes: Number of chunks of the fast and of the slow tier.
    moving: Weight of the newest importance in the mean.
  """

  def __init__(self, fast: int, slow: int, *, moving: int | float = 0.2):
    """Creates two empty tiers.

    Args:
      fast: Number of chunks of the fast tier.
      slow: Number of chunks of the slow tier.
      moving: Weight of the newest importance in the mean.
    """
    self.sizes = positive_int("fast", fast), positive_int("slow", slow)
    self.moving = number("moving", moving, above=0, most=1)
    self._used: dict[Hashable, int] = {}
    self._part: dict[Hashable, float] = {}
    self._tier: dict[Hashable, int] = {}
    self._heaps: tuple[list[tuple[float, int, Hashable]], ...] = ([], [])
    self._count = [0, 0]
    self._order = 0

  def score(self, key: Hashable) -> float:
    """Number of uses times the mean fraction of important tokens."""
    return self._used.get(key, 0) * self._part.get(key, 0.0)

  def where(self, key: Hashable) -> str:
    """Name of a chunk's tier: "fast", "slow" or "disk"."""
    return ("fast", "slow", "disk")[self._tier.get(key, 2)]

  def access(self, key: Hashable, important: int | float) -> str:
    """Records a use of a chunk, and returns the tier in which it was.

    Args:
      key: Key of the chunk.
      important: Fraction of its tokens that were important, 0 to 1.
    """
    tier = self.where(key)
    part = number("important", important, least=0, most=1)
    mean = self._part.get(key, part)
    self._part[key] = mean + self.moving * (part - mean)
    self._used[key] = self._used.get(key, 0) + 1
    if tier == "fast":
      self._push(0, key)
      return tier
    if tier == "slow":
      self._take(key)
    self._enter(0, key)
    return tier

  def _enter(self, tier: int, key: Hashable) -> None:
    """Puts a chunk into a tier, or else into the one below, if it fits."""
    while tier < 2:
      if self._count[tier] < self.sizes[tier]:
        self._place(tier, key)
        return
      smallest = self._smallest(tier)
      if self.score(key) > self.score(smallest):
        self._take(smallest)
        self._place(tier, key)
        key = smallest
      tier += 1

  def _place(self, tier: int, key: Hashable) -> None:
    self._tier[key] = tier
    self._count[tier] += 1
    self._push(tier, key)

  def _take(self, key: Hashable) -> None:
    self._count[self._tier.pop(key)] -= 1

  def _push(self, tier: int, key: Hashable) -> None:
    self._order += 1
    heap = self._heaps[tier]
    heapq.heappush(heap, (self.score(key), self._order, key))
    # Entries of earlier scores stay until they are the least: hits alone would
    # add one after the other.
    if len(heap) > 4 * self._count[tier] + 64:
      current: dict[Hashable, tuple[float, int, Hashable]] = {}
      for entry in heap:
        score, _, tier_key = entry
        if self._tier.get(tier_key) == tier and self.score(tier_key) == score:
          current[tier_key] = min(entry, current.get(tier_key, entry))
      heap[:] = current.values()
      heapq.heapify(heap)

  def _smallest(self, tier: int) -> Hashable:
    heap = self._heaps[tier]
    while True:
      score, _, key = heap[0]
      if self._tier.get(key) == tier and self.score(key) == score:
        return key
      heapq.heappop(heap)
