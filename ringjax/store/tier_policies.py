"""Which blocks a tier takes in, and which one goes first.

Guarantees: a policy is told of every prompt's blocks (`request`), of blocks
that the tier takes (`added`) and lets go (`removed`); it says whether a block
may come in (`admit`) and which go (`victims`). It knows keys, never payloads.
Cost: some dict look-ups a block; O(log n) a victim.
Memory: some hundred bytes for each block in the tier, and for as many absent
ones as `ghosts` times those: what a policy has learned of a block outlives it.

Blocks of a prompt count as used from the last to the first, so that of two
blocks that are otherwise equal the deeper one goes first: without its prefix
it is of no use. Time is a count of blocks used; no clock is asked.
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
  """What a policy remembers of a block.

  Attributes:
    last: when a prompt had it last.
    count: prompts that had it.
    present: whether it is in the tier.
  """

  last: int
  count: int = 0
  present: bool = False


class TierPolicy:
  """A policy whose blocks have ranks; the lowest goes first.

  A subclass says `rank`, and may say `admit`.
  """

  name: ClassVar[str] = "policy"

  def __init__(self, *, ghosts: int | float = 16):
    """Without blocks.

    Args:
      ghosts: absent blocks that are remembered, as a multiple of the largest
        number that the tier held, and 1,024.
    """
    self._ghosts = number("ghosts", ghosts, least=0)
    # The absent ones among them in the order of their last use, or nearly.
    self._uses: collections.OrderedDict[Hashable, BlockUse] = (
      collections.OrderedDict()
    )
    self._heap: list[tuple[Any, int, Hashable]] = []
    self._now = 0
    self._present = self._largest = 0

  def rank(self, key: Hashable, use: BlockUse) -> Any:
    """What is compared; it changes only when the block is used."""
    del key
    return use.last

  def admit(self, key: Hashable) -> bool:
    """Whether the tier takes a block in."""
    del key
    return True

  def request(self, keys: Sequence[Hashable]) -> None:
    """A prompt has these blocks, first to last; some may be in the tier."""
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
    """The tier has taken a block in."""
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
    """A block has left the tier."""
    use = self._uses.get(key)
    if use is not None and use.present:
      use.present = False
      self._present -= 1

  def victims(self, count: int = 1) -> list[Any]:
    """Up to `count` blocks of the tier that go first; they stay until
    `removed` is called."""
    found: list[tuple[Any, int, Hashable]] = []
    seen = set()
    while self._heap and len(found) < count:
      entry = heapq.heappop(self._heap)
      _, last, key = entry
      use = self._uses.get(key)
      stale = use is None or not use.present or use.last != last
      if not stale and key not in seen:
        seen.add(key)
        found.append(entry)
    for entry in found:
      heapq.heappush(self._heap, entry)
    return [key for _, _, key in found]

  def _push(self, key: Hashable, use: BlockUse) -> None:
    heapq.heappush(self._heap, (self.rank(key, use), use.last, key))
    if len(self._heap) > 4 * self._present + 1024:
      self._heap = [
        (self.rank(k, u), u.last, k) for k, u in self._uses.items() if u.present
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
  """The least recently used goes first."""

  name = "lru"


class LFU(TierPolicy):
  """What the fewest prompts had goes first, the least recent of these."""

  name = "lfu"

  def rank(self, key: Hashable, use: BlockUse) -> Any:
    return use.count, use.last


class OnceUsedFirst(TierPolicy):
  """What one prompt had goes before what several had; LRU among these."""

  name = "once_used_first"

  def rank(self, key: Hashable, use: BlockUse) -> Any:
    return use.count > 1, use.last


class SecondHit(TierPolicy):
  """A block reaches the tier once several prompts had it; LRU otherwise."""

  name = "second_hit"

  def __init__(self, uses: int = 2, *, ghosts: int | float = 16):
    """Without blocks.

    Args:
      uses: prompts that must have had a block.
      ghosts: see `TierPolicy`.
    """
    super().__init__(ghosts=ghosts)
    self.uses = positive_int("uses", uses)

  def admit(self, key: Hashable) -> bool:
    use = self._uses.get(key)
    return use is not None and use.count >= self.uses


class Belady(TierPolicy):
  """What is used again last goes first: an oracle, for replays.

  Of blocks that the same prompt uses next the deepest goes first, as the
  others are of use without it.
  Ref: Belady 1966, IBM Systems Journal 5 (2).
  """

  name = "belady"

  def __init__(self, requests: Iterable[Sequence[Hashable]]):
    """Knows the future.

    Args:
      requests: all prompts that will come, in their order.
    """
    super().__init__()
    # Of each use the blocks that came before its prompt, and its depth there.
    self._future: dict[Hashable, collections.deque[tuple[int, int]]] = {}
    before = 0
    for keys in requests:
      for depth, key in enumerate(keys):
        uses = self._future.setdefault(key, collections.deque())
        uses.append((before, depth))
      before += len(keys)

  def rank(self, key: Hashable, use: BlockUse) -> Any:
    ahead = self._future.get(key, ())
    while ahead and ahead[0][0] < use.last:
      ahead.popleft()
    if not ahead:
      return -math.inf, 0
    before, depth = ahead[0]
    return -before, -depth


def tier_policy(value: TierPolicy | str) -> TierPolicy:
  """A policy by its name, or the policy itself.

  Raises:
    OptionError: there is none of this name.
    InputTypeError: it is no policy.
  """
  # A lower file would have to know a higher one.
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
  known = {
    one.name: one
    for one in (LRU, LFU, OnceUsedFirst, SecondHit, PredictedReuse)
  }
  return known[one_of("policy", value, known)]()
