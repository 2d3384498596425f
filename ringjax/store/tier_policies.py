"""Admission and eviction policies of a tier of blocks.

Guarantees: a policy is called with every prompt's blocks (`request`), and with
blocks that the tier adds (`added`) and removes (`removed`); it decides whether
a block may come in (`admit`) and which are evicted (`victims`). It sees keys,
never payloads.
Cost: some dict look-ups a block; O(log n) a victim.
Memory: some hundred bytes for each block in the tier, and for up to `ghosts`
times as many absent ones: the use of a block is remembered after its eviction.

Blocks of a prompt count as used from the last to the first, so that of two
blocks that are otherwise equal the deeper one is evicted first: without its
prefix it is of no use. Time is a count of blocks used; no clock is read.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

from ringjax.checks import number, positive_int
from ringjax.errors import InputTypeError


@dataclasses.dataclass(slots=True)
class BlockUse:
  """A policy's record of a block.

  Attributes:
    last: Time at which a prompt used it last.
    count: Number of prompts that used it.
    present: Whether it is in the tier.
  """

  last: int
  count: int = 0
  present: bool = False


class TierPolicy:
  """A policy whose blocks have ranks; the lowest is evicted first.

  A subclass defines `rank`, and may define `admit`.
  """

  name: ClassVar[str] = "policy"

  def __init__(self, *, ghosts: int | float = 16):
    """Starts without blocks.

    Args:
      ghosts: Number of absent blocks that are remembered, as a multiple of the
        largest number that the tier held; 1,024 more are.
    """
    self._ghosts = number("ghosts", ghosts, least=0)
    # Absent blocks are nearly in the order of their last use.
    self._uses: collections.OrderedDict[Hashable, BlockUse] = (
      collections.OrderedDict()
    )
    self._heap: list[tuple[Any, int, Hashable]] = []
    self._now = 0
    self._present = self._largest = 0

  def rank(self, key: Hashable, use: BlockUse) -> Any:
    """Rank of a block; it changes only when the block is used."""
    del key
    return use.last

  def admit(self, key: Hashable) -> bool:
    """Whether the tier may add a block."""
    del key
    return True

  def request(self, keys: Sequence[Hashable]) -> None:
    """Records a prompt's blocks, first to last; some may be in the tier."""
    uses = self._uses
    for key in reversed(keys):
      self._now += 1
      use = uses.get(key)
      if use is None:
        uses[key] = BlockUse(self._now, 1)
        continue
      use.last = self._now
      use.count += 1
      if use.present:
        self._push(key, use)
      else:
        uses.move_to_end(key)
    self._forget()

  def added(self, key: Hashable) -> None:
    """Records that the tier has added a block."""
    use = self._uses.get(key)
    if use is None:
      self._now += 1
      use = self._uses[key] = BlockUse(self._now)
    if not use.present:
      use.present = True
      self._present += 1
      self._largest = max(self._largest, self._present)
    self._push(key, use)

  def removed(self, key: Hashable) -> None:
    """Records that a block has left the tier."""
    use = self._uses.get(key)
    if use is not None and use.present:
      use.present = False
      self._present -= 1

  def victims(self, count: int = 1) -> list[Any]:
    """Chooses up to `count` blocks to evict next.

    They stay in the policy until `removed` is called.
    """
    entries: list[tuple[Any, int, Hashable]] = []
    seen = set()
    while self._heap and len(entries) < count:
      entry = heapq.heappop(self._heap)
      _, last, key = entry
      use = self._uses.get(key)
      stale = use is None or not use.present or use.last != last
      if not stale and key not in seen:
        seen.add(key)
        entries.append(entry)
    for entry in entries:
      heapq.heappush(self._heap, entry)
    return [key for _, _, key in entries]

  def _push(self, key: Hashable, use: BlockUse) -> None:
    heapq.heappush(self._heap, (self.rank(key, use), use.last, key))
    if len(self._heap) > 4 * self._present + 1024:
      self._heap = [
        (self.rank(key, use), use.last, key)
        for key, use in self._uses.items()
        if use.present
      ]
      heapq.heapify(self._heap)

  def _forget(self) -> None:
    """Forgets absent blocks beyond the limit, those unused longest first."""
    limit = int(self._ghosts * self._largest) + 1024
    looks = 0
    while len(self._uses) - self._present > limit and looks < 4096:
      looks += 1
      key = next(iter(self._uses))
      if self._uses[key].present:
        self._uses.move_to_end(key)
      else:
        del self._uses[key]


class LRU(TierPolicy):
  """Evicts the least recently used block first."""

  name = "lru"


class LFU(TierPolicy):
  """Evicts the block that the fewest prompts used, the oldest of these."""

  name = "lfu"

  def rank(self, key: Hashable, use: BlockUse) -> tuple[int, int]:
    return use.count, use.last


class OnceUsedFirst(TierPolicy):
  """Evicts blocks of one prompt before those of several; LRU among each."""

  name = "once_used_first"

  def rank(self, key: Hashable, use: BlockUse) -> tuple[bool, int]:
    return use.count > 1, use.last


class SecondHit(TierPolicy):
  """Admits a block once several prompts have used it; LRU otherwise."""

  name = "second_hit"

  def __init__(self, uses: int = 2, *, ghosts: int | float = 16):
    """Starts without blocks.

    Args:
      uses: Number of prompts that must have used a block.
      ghosts: Number of absent blocks to remember, see `TierPolicy`.
    """
    super().__init__(ghosts=ghosts)
    self.uses = positive_int("uses", uses)

  def admit(self, key: Hashable) -> bool:
    use = self._uses.get(key)
    return use is not None and use.count >= self.uses


class Belady(TierPolicy):
  """Evicts the block whose next use is farthest: an oracle, for replays.

  Of blocks that the same prompt uses next the deepest is evicted first, as the
  others are of use without it.
  Ref: Belady 1966, IBM Systems Journal 5 (2).
  """

  name = "belady"

  def __init__(self, requests: Iterable[Sequence[Hashable]]):
    """Indexes the future uses of each block.

    Args:
      requests: Blocks of all prompts that will come, in their order.
    """
    super().__init__()
    # Of each use: number of blocks before its prompt, and depth in the prompt.
    self._future: dict[Hashable, collections.deque[tuple[int, int]]] = {}
    num_before = 0
    for keys in requests:
      for depth, key in enumerate(keys):
        uses = self._future.setdefault(key, collections.deque())
        uses.append((num_before, depth))
      num_before += len(keys)

  def rank(self, key: Hashable, use: BlockUse) -> tuple[float | int, int]:
    future = self._future.get(key, ())
    while future and future[0][0] < use.last:
      future.popleft()
    if not future:
      return -math.inf, 0
    num_before, depth = future[0]
    return -num_before, -depth


def tier_policy(value: TierPolicy | str) -> TierPolicy:
  """Create a policy by its name, or return the given policy.

  Raises:
    OptionError: If the name is unknown.
    InputTypeError: If the value is neither name nor policy.
  """
  # Imported here: that module imports this one.
  from ringjax.checks import one_of
  from ringjax.store.predicted_reuse import PredictedReuse

  if isinstance(value, TierPolicy):
    return value
  if not isinstance(value, str):
    raise InputTypeError(
      "policy",
      type(value).__name__,
      "a name or an rj.store.TierPolicy",
      "pass policy='lru'",
    )
  policies = {
    policy.name: policy
    for policy in (LRU, LFU, OnceUsedFirst, SecondHit, PredictedReuse)
  }
  return policies[one_of("policy", value, policies)]()
