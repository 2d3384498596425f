"""Keep the blocks whose next use is likely and near, as learned from the past.

Guarantees: nothing is assumed of a workload; what is predicted is counted
while the tier runs, and forgotten again.
Cost: a few array operations a prompt; ranking the whole tier once for every
64th of it that goes.
Memory: 40 bytes and a dict entry for each block that is known.

Blocks are sorted into classes by what is known when they were used last: how
many prompts had them, how long after each other the last two did, how long the
prompt is, how much of it is new, and whether the block is its last (which is
seldom found again). Of each class it is counted at which ages blocks are used
again, as a hazard (Kaplan-Meier: blocks that are not used yet count up to
their age). A block is worth its chance to be used again within a horizon for
the time that it stays until then, with the horizon that is best for it: its
Gittins index, and never less than those behind it in its last prompt. What is
worth least goes first, and among equals what was used first, so that of a
prompt the tail goes before the head.

Classes with few blocks are drawn to those of the same number of prompts, and
these to all, so that a class has to show that it is different.
Ref: Beckmann et al. 2018, LHD (NSDI): ages and classes; Gittins 1979,
JRSS B 41 (2).
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ringjax.store.tier_policies import TierPolicy

# Ages at which a bucket begins, in blocks used.
_EDGES = np.concatenate(
  [[0], np.unique((16 * 1.25 ** np.arange(72)).astype(int))]
)
_WIDTH = np.diff(np.append(_EDGES, 2 * _EDGES[-1])).astype(float)
_AGES = len(_EDGES)
# What a class is made of: prompts that had the block, the time between the
# last two of them as a part of the tier's size, blocks of the prompt, and how
# many of them are new. A number belongs to the first bound above it.
_COUNTS = 4
_GAPS, _SIZES, _NEW = (1 / 64, 1 / 2, 2.0), (4, 24, 64), (3, 8, 24)
_CLASSES = _COUNTS * (len(_GAPS) + 1) * (len(_SIZES) + 1) * (len(_NEW) + 1) * 2
# Blocks that a class has to itself before it is believed: those of a prompt
# are used together, so a few prompts' worth.
_PRIOR, _PRIOR_OF_COUNT = 1000.0, 50.0


class PredictedReuse(TierPolicy):
  """What is least likely to be used again soon goes first.

  Attributes:
    known: blocks that are remembered.
  """

  name = "predicted_reuse"

  def __init__(self, *, ghosts: int | float = 16):
    """Knows nothing yet.

    Args:
      ghosts: see `TierPolicy`.
    """
    super().__init__(ghosts=ghosts)
    self._slots: dict[Hashable, int] = {}
    self._keys: list[Hashable] = []
    self._free: list[int] = []
    self._last = np.zeros(0, np.int64)
    self._of = np.zeros(0, np.int16)
    self._count = np.zeros(0, np.int32)
    self._request = np.zeros(0, np.int64)
    self._requests = 0
    self._in = np.zeros(0, bool)
    self._reused = np.zeros((_CLASSES, _AGES))
    self._given_up = np.zeros((_CLASSES, _AGES))
    self._value = np.zeros((_CLASSES, _AGES))
    self._learn_at = 1000
    self._queue: list[tuple[int, int]] = []

  @property
  def known(self) -> int:
    return len(self._slots)

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def request(self, keys: Sequence[Hashable]) -> None:
    n = len(keys)
    if not n:
      return
    slots = [self._slots.get(key, -1) for key in keys]
    known = next((i for i, slot in enumerate(slots) if slot < 0), n)
    at = np.array(
      [s if s >= 0 else self._new(k) for k, s in zip(keys, slots, strict=True)]
    )
    old = np.array(slots) >= 0
    now = self._now + n - np.arange(n)
    self._now += n
    before = at[old]
    gap = np.zeros(n, np.int64)
    gap[old] = now[old] - self._last[before]
    age = np.searchsorted(_EDGES, gap[old], "right") - 1
    np.add.at(self._reused, (self._of[before], age), 1)
    self._count[at] += 1
    self._last[at] = now
    self._requests += 1
    self._request[at] = self._requests
    self._of[at] = self._classes(self._count[at], gap, n, n - known)
    if self._now >= self._learn_at:
      self._learn()

  def _classes(
    self, count: np.ndarray, gap: np.ndarray, size: int, new: int
  ) -> np.ndarray:
    """The class of each block of a prompt, first to last."""
    found = np.minimum(count, _COUNTS) - 1
    bounds = np.array(_GAPS) * max(1, self._largest)
    found = found * (len(_GAPS) + 1) + np.searchsorted(bounds, gap, "right")
    for value, bounds in ((size, _SIZES), (new, _NEW)):
      found = found * (len(bounds) + 1) + bisect.bisect(bounds, value)
    found = found * 2
    found[-1] += 1
    return found

  def added(self, key: Hashable) -> None:
    slot = self._slots.get(key)
    if slot is None:
      slot = self._new(key)
      self._now += 1
      self._last[slot] = self._now
    if not self._in[slot]:
      self._in[slot] = True
      self._present += 1
      self._largest = max(self._largest, self._present)

  def removed(self, key: Hashable) -> None:
    slot = self._slots.get(key)
    if slot is not None and self._in[slot]:
      self._in[slot] = False
      self._present -= 1

  def victims(self, count: int = 1) -> list[Any]:
    found = self._queued(count)
    if len(found) < min(count, self._present):
      self._rank(max(count, self._present // 64))
      found = self._queued(count)
    return found

  def _queued(self, count: int) -> list[Any]:
    """The first of the ranking that are there and were not used since."""
    fits = lambda x: self._in[x[0]] and self._last[x[0]] == x[1]
    while self._queue and not fits(self._queue[-1]):
      self._queue.pop()
    some = [x for x in self._queue[-2 * count :] if fits(x)]
    return [self._keys[slot] for slot, _ in some[: -count - 1 : -1]]

  def _rank(self, count: int) -> None:
    """Ranks the tier; the queue ends with what goes first."""
    slots = np.flatnonzero(self._in)
    last = self._last[slots]
    age = np.searchsorted(_EDGES, self._now - last, "right") - 1
    value = self._value[self._of[slots], age]
    # A block is worth what those behind it in its last prompt are, or more.
    order = np.argsort(last)
    rank = np.unique(value, return_inverse=True)[1][order]
    prompt = self._request[slots][order]
    step = np.cumsum(np.append(0, np.diff(prompt) > 0)) * (rank.size + 1)
    worth = np.empty_like(rank)
    worth[order] = np.maximum.accumulate(rank + step) - step
    first = np.lexsort((last, worth))[:count][::-1]
    self._queue = list(
      zip(slots[first].tolist(), last[first].tolist(), strict=True)
    )

  def _new(self, key: Hashable) -> int:
    if not self._free:
      size = len(self._keys)
      grown = max(1024, size)
      for name in ("_last", "_of", "_count", "_request", "_in"):
        old = getattr(self, name)
        setattr(self, name, np.concatenate([old, np.zeros(grown, old.dtype)]))
      self._keys += [None] * grown
      self._free = list(range(size + grown - 1, size - 1, -1))
    slot = self._slots[key] = self._free.pop()
    self._keys[slot] = key
    self._count[slot] = self._of[slot] = 0
    self._in[slot] = False
    return slot

  # -------------------------------------------------------------------------
  # What is learned
  # -------------------------------------------------------------------------

  def _learn(self) -> None:
    """Counts anew what blocks are worth at which age."""
    every = int(min(0.15 * self._now + 500, 4 * self._largest + 1000))
    self._learn_at = self._now + every
    fade = 0.5 ** (every / (64 * self._largest + 10000))
    self._reused *= fade
    self._given_up *= fade
    slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
    slots = self._forgotten(slots)
    waiting = self._given_up.copy()
    age = np.searchsorted(_EDGES, self._now - self._last[slots], "right") - 1
    np.add.at(waiting, (self._of[slots], age), 1)
    self._value = _worth(self._reused, waiting)

  def _forgotten(self, slots: np.ndarray) -> np.ndarray:
    """Forgets absent blocks beyond the limit; the slots of the others."""
    limit = int(self._ghosts * self._largest) + 1024
    absent = slots[~self._in[slots]]
    over = absent.size - limit
    if over <= 0:
      return slots
    gone = absent[np.argpartition(self._last[absent], over - 1)[:over]]
    age = np.searchsorted(_EDGES, self._now - self._last[gone], "right") - 1
    np.add.at(self._given_up, (self._of[gone], age), 1)
    for slot in gone.tolist():
      del self._slots[self._keys[slot]]
      self._keys[slot] = None
      self._free.append(slot)
    return np.setdiff1d(slots, gone, assume_unique=True)


def _worth(reused: np.ndarray, waiting: np.ndarray) -> np.ndarray:
  """Gittins indices [classes, ages].

  Args:
    reused: blocks of a class that were used again at an age.
    waiting: blocks that have reached that age and were not.
  """
  ended = reused + waiting
  beyond = np.cumsum(ended[:, ::-1], 1)[:, ::-1] - ended
  risk = beyond + reused + 0.5 * waiting
  by_count = lambda x: x.reshape(_COUNTS, -1, _AGES).sum(1)
  all_hazard = (reused.sum(0) + 0.02) / (risk.sum(0) + 1)
  of_count = (by_count(reused) + _PRIOR_OF_COUNT * all_hazard) / (
    by_count(risk) + _PRIOR_OF_COUNT
  )
  # Classes without a block of their own are those of their count.
  each = _CLASSES // _COUNTS
  some = np.flatnonzero(ended.any(1))
  own = (reused[some] + _PRIOR * of_count[some // each]) / (risk[some] + _PRIOR)
  value = np.repeat(_gittins(of_count), each, 0)
  value[some] = _gittins(own)
  return value


def _gittins(hazard: np.ndarray) -> np.ndarray:
  """The best rate of hits for the time spent, from each age on."""
  alive = np.cumprod(1 - hazard, 1)
  alive = np.concatenate([np.ones((hazard.shape[0], 1)), alive], 1)
  spent = (alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTH
  value = np.zeros_like(hazard)
  for age in range(_AGES):
    hit = alive[:, age : age + 1] - alive[:, age + 1 :]
    value[:, age] = (hit / np.cumsum(spent[:, age:], 1)).max(1)
  return value
