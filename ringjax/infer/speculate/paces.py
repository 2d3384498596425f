"""How long drafts are: by what was accepted and what rounds took.

Ref: Leviathan et al. 2023 (arXiv 2211.17192), sections 3.4 and 3.5: a draft of
n tokens of which each is accepted with probability a gives
(1 - a^(n + 1)) / (1 - a) tokens. What a round takes is measured; that of steps
without drafts while drafts pause, when the next step is on its way before the
last one's token is known.
"""

from __future__ import annotations

import collections

import numpy as np

from ringjax.infer.speculate.drafter import Drafter

# Of the last rounds, how much an older one counts.
_DECAY = 0.95
# Rounds of a width before its time counts: the first ones are compiled.
_FIRST = 2
# In place of a width: a step that had to wait for a draft, which was empty.
_EMPTY = -1
# The round from which on steps without drafts are timed, and how many.
_TIMED, _STEPS = 3, 6
# Steps without drafts until they are tried again: at first, and at most.
_PAUSE, _LONGEST = 16, 512


class Paces:
  """Chooses the length of drafts, row by row.

  Attributes:
    pause: steps without drafts that are to come before the next draft.
  """

  def __init__(self, drafter: Drafter, batch: int):
    self._adapt, self._count = drafter.adapt, drafter.nodes
    self._depth = drafter.depth
    # Lengths that are tried; a tree is whole or not there.
    self._lengths = [drafter.nodes]
    while self._lengths[-1] > 1 and not drafter.tree:
      self._lengths.append(1 << (self._lengths[-1] - 1).bit_length() - 1)
    # Accepted and looked at, of each row; a guess to begin with.
    self._right = np.full(batch, 0.7)
    self._looked = np.full(batch, 1.0)
    self._times: dict[int, collections.deque[float]] = {}
    self._rounds = collections.Counter()
    self.pause, self._next = 0, _PAUSE
    self._calls = 0

  def most(self) -> np.ndarray:
    """Tokens that are to be drafted for each row, int [B]."""
    batch = len(self._right)
    full = np.full(batch, self._count)
    if not self._adapt:
      return full
    self._calls += 1
    if self._calls == _TIMED:
      self.pause = _STEPS
    if self.pause:
      return np.zeros(batch, int)
    plain, known = self._time(0), self._time(self._count) or self._time(_EMPTY)
    if plain is None or known is None:
      return full
    best, found = 1 / plain, 0
    for length in self._lengths:
      time = self._guess(length, plain, known)
      deep = min(length, self._depth)
      each = [expected_tokens(a, deep) for a in self._right / self._looked]
      rate = float(np.mean(each)) / time
      if rate > best:
        best, found = rate, length
    if not found:
      self.pause, self._next = self._next, min(2 * self._next, _LONGEST)
      return np.zeros(batch, int)
    self._next = _PAUSE
    return np.full(batch, found)

  def add(
    self,
    most: np.ndarray,
    drafted: np.ndarray,
    came: np.ndarray,
    seconds: float,
  ) -> None:
    """Notes a round, or a step of a pause.

    Args:
      most: int [B], tokens that were to be drafted.
      drafted: int [B], tokens that were; none counts as one that was wrong.
      came: int [B], new tokens.
      seconds: that it took.
    """
    looked = (came > 0) & (most > 0)
    right = np.minimum(np.maximum(came - 1, 0), drafted)
    seen = np.where(looked, np.maximum(np.minimum(drafted, right + 1), 1), 0)
    decay = np.where(looked, _DECAY, 1.0)
    self._right = self._right * decay + np.where(looked, right, 0)
    self._looked = self._looked * decay + seen
    width = int(drafted.max(initial=0))
    if width:
      width = min(n for n in self._lengths if n >= width)
    elif most.any():
      width = _EMPTY
    elif self.pause:
      self.pause -= 1
    else:
      return
    self._rounds[width] += 1
    if self._rounds[width] > _FIRST:
      times = self._times.setdefault(width, collections.deque(maxlen=16))
      times.append(seconds)

  def _time(self, width: int) -> float | None:
    times = self._times.get(width)
    return float(np.median(times)) if times else None

  def _guess(self, length: int, plain: float, whole: float) -> float:
    """What a round takes: as measured, else between two that were."""
    known = self._time(length)
    if known is not None:
      return known
    return plain + (whole - plain) * length / self._count


def expected_tokens(acceptance: float, drafted: int) -> float:
  """New tokens of a call with a chain of `drafted` tokens, on average."""
  if acceptance >= 1:
    return drafted + 1.0
  return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
