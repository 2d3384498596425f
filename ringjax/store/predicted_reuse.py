"""Keep the blocks whose next use is likely and near, as learned from the past.

Guarantees: nothing is assumed of a workload; predictions come from counts that
are made while the tier runs, and that fade with time.
Cost: a few array operations a prompt; ranking the whole tier once for every
64th of it that is evicted.
Memory: 40 bytes and a dict entry for each block that is known.

Blocks are sorted into classes by features of their last use: the number of
prompts that have used the block, the time between the last two of these, the
length of the prompt, its number of new blocks, and whether the block is its
last (which is seldom reused). For each class the ages at which blocks are
reused are counted, as a hazard (Kaplan-Meier: blocks that are not reused yet
count up to their age). The value of a block is its probability of reuse within
a horizon over its expected time in the tier until then, for the best horizon:
its Gittins index, and never less than those of the blocks after it in its last
prompt. The block of least value is evicted first, and among equals the one used
first, so that the tail of a prompt goes before its head.

The estimates of classes with few blocks are shrunk to those of all classes with
the same number of prompts, and these to that of all blocks.
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
# Features of a class: number of prompts that used the block, time between the
# last two of them as a fraction of the tier's size, blocks of the prompt, and
# new blocks of it. A number belongs to the first bound above it.
_COUNTS = 4
_GAPS, _SIZES, _NEW = (1 / 64, 1 / 2, 2.0), (4, 24, 64), (3, 8, 24)
_CLASSES = _COUNTS * (len(_GAPS) + 1) * (len(_SIZES) + 1) * (len(_NEW) + 1) * 2
# Weights of the priors, in blocks: a few prompts' worth, as the blocks of a
# prompt are used together.
_PRIOR, _PRIOR_OF_COUNT = 1000.0, 50.0


class PredictedReuse(TierPolicy):
  """Evicts the block first that is least likely to be reused soon.

  Attributes:
    known: Number of blocks that are remembered.
  """

  name = "predicted_reuse"

  def __init__(self, *, ghosts: int | float = 16):
    """Starts without blocks or counts.

    Args:
      ghosts: Number of absent blocks to remember, see `TierPolicy`.
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
    num_known = next((i for i, slot in enumerate(slots) if slot < 0), n)
    block_slots = np.array(
      [
        slot if slot >= 0 else self._new(key)
        for key, slot in zip(keys, slots, strict=True)
      ]
    )
    is_known = np.array(slots) >= 0
    times = self._now + n - np.arange(n)
    self._now += n
    known_slots = block_slots[is_known]
    gap = np.zeros(n, np.int64)
    gap[is_known] = times[is_known] - self._last[known_slots]
    age = np.searchsorted(_EDGES, gap[is_known], "right") - 1
    np.add.at(self._reused, (self._of[known_slots], age), 1)
    self._count[block_slots] += 1
    self._last[block_slots] = times
    self._requests += 1
    self._request[block_slots] = self._requests
    self._of[block_slots] = self._classes(
      self._count[block_slots], gap, n, n - num_known
    )
    if self._now >= self._learn_at:
      self._learn()

  def _classes(
    self, count: np.ndarray, gap: np.ndarray, size: int, new: int
  ) -> np.ndarray:
    """Classify the blocks of a prompt, first to last."""
    classes = np.minimum(count, _COUNTS) - 1
    bounds = np.array(_GAPS) * max(1, self._largest)
    classes = classes * (len(_GAPS) + 1) + np.searchsorted(bounds, gap, "right")
    for value, bounds in ((size, _SIZES), (new, _NEW)):
      classes = classes * (len(bounds) + 1) + bisect.bisect(bounds, value)
    classes = classes * 2
    classes[-1] += 1
    return classes

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
    victims = self._queued(count)
    if len(victims) < min(count, self._present):
      self._rank(max(count, self._present // 64))
      victims = self._queued(count)
    return victims

  def _queued(self, count: int) -> list[Any]:
    """First blocks of the ranking that are present and unused since."""
    is_current = lambda entry: (
      self._in[entry[0]] and self._last[entry[0]] == entry[1]
    )
    while self._queue and not is_current(self._queue[-1]):
      self._queue.pop()
    current = [
      entry for entry in self._queue[-2 * count :] if is_current(entry)
    ]
    return [self._keys[slot] for slot, _ in current[: -count - 1 : -1]]

  def _rank(self, count: int) -> None:
    """Ranks the tier; the queue ends with the block to evict first."""
    slots = np.flatnonzero(self._in)
    last = self._last[slots]
    age = np.searchsorted(_EDGES, self._now - last, "right") - 1
    value = self._value[self._of[slots], age]
    # A block is worth at least as much as those after it in its last prompt.
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
        values = getattr(self, name)
        setattr(
          self, name, np.concatenate([values, np.zeros(grown, values.dtype)])
        )
      self._keys += [None] * grown
      self._free = list(range(size + grown - 1, size - 1, -1))
    slot = self._slots[key] = self._free.pop()
    self._keys[slot] = key
    self._count[slot] = self._of[slot] = 0
    self._in[slot] = False
    return slot

  # -------------------------------------------------------------------------
  # Learning
  # -------------------------------------------------------------------------

  def _learn(self) -> None:
    """Updates the values of classes and ages from the counts."""
    interval = int(min(0.15 * self._now + 500, 4 * self._largest + 1000))
    self._learn_at = self._now + interval
    fade = 0.5 ** (interval / (64 * self._largest + 10000))
    self._reused *= fade
    self._given_up *= fade
    slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
    slots = self._forgotten(slots)
    waiting = self._given_up.copy()
    age = np.searchsorted(_EDGES, self._now - self._last[slots], "right") - 1
    np.add.at(waiting, (self._of[slots], age), 1)
    self._value = _worth(self._reused, waiting)

  def _forgotten(self, slots: np.ndarray) -> np.ndarray:
    """Forgets absent blocks beyond the limit: returns the others' slots."""
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
  """Gittins indices, [classes, ages].

  Args:
    reused: Number of blocks of a class that were reused at an age.
    waiting: Number of blocks that have this age and were not reused yet.
  """
  ended = reused + waiting
  beyond = np.cumsum(ended[:, ::-1], 1)[:, ::-1] - ended
  risk = beyond + reused + 0.5 * waiting
  by_count = lambda x: x.reshape(_COUNTS, -1, _AGES).sum(1)
  all_hazard = (reused.sum(0) + 0.02) / (risk.sum(0) + 1)
  of_count = (by_count(reused) + _PRIOR_OF_COUNT * all_hazard) / (
    by_count(risk) + _PRIOR_OF_COUNT
  )
  # Classes without blocks get the value of their number of prompts.
  classes_per_count = _CLASSES // _COUNTS
  seen = np.flatnonzero(ended.any(1))
  hazard = (reused[seen] + _PRIOR * of_count[seen // classes_per_count]) / (
    risk[seen] + _PRIOR
  )
  value = np.repeat(_gittins(of_count), classes_per_count, 0)
  value[seen] = _gittins(hazard)
  return value


def _gittins(hazard: np.ndarray) -> np.ndarray:
  """Best ratio of hits to time in the tier, from each age on."""
  alive = np.cumprod(1 - hazard, 1)
  alive = np.concatenate([np.ones((hazard.shape[0], 1)), alive], 1)
  spent = (alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTH
  value = np.zeros_like(hazard)
  for age in range(_AGES):
    hit = alive[:, age : age + 1] - alive[:, age + 1 :]
    value[:, age] = (hit / np.cumsum(spent[:, age:], 1)).max(1)
  return value
