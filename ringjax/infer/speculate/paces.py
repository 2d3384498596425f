"""How long drafts are, down to none: by what was accepted and what rounds took.

Guarantees: no round is drafted that could bring what drafting has cost above
`SHARE` of what plain decoding takes, by what was measured. The first draft is
measured by making it, once more where it was compiled; what a draft model reads
behind a pause is guessed until it has done so once. Rounds that save time pay
for such that do not.
Ref: Leviathan et al. 2023 (arXiv 2211.17192), sections 3.4 and 3.5: a draft of
n tokens of which each is accepted with probability a gives
(1 - a^(n + 1)) / (1 - a) tokens. What a round takes is measured, where nothing
was compiled; that of steps without drafts while drafts pause, when the next
step is on its way before the last one's token is known. A draft model
reads behind a pause what came in it, which is measured too: the longer the
pause, the more a trial costs.
"""

from __future__ import annotations

import collections
import math

import numpy as np

from ringjax.infer.speculate.drafter import Drafter, TextDrafter

# What drafting may cost, of the time of plain decoding.
SHARE = 0.05
# Of the last rounds, how much an older one counts.
_DECAY = 0.95
# In place of a width: a step that had to wait for a draft, which was empty.
_EMPTY = -1
# Steps without drafts behind the first draft, which are timed.
_STEPS = 5
# Steps without drafts until they are tried again: at first, and at most.
_PAUSE, _LONGEST = 16, 512
# Behind a pause that long, a round's time has a draft model's reading in it.
_BEHIND = 8
# Until it is measured: what reading a token takes, of drafting and checking it.
_READ = 1 / 8
# At a trial, how much counts what was accepted before the pause.
_FADED = 0.5


class Paces:
  """Chooses the length of drafts, row by row.

  Attributes:
    pause: steps without drafts that are to come before the next draft.
    rounds: rounds with drafts.
    steps: steps without.
    cost_s: seconds that drafting took more than plain steps for the same
      tokens; below 0 where it saved some.
    plain_s: seconds that plain steps would have taken in all.
  """

  def __init__(self, drafter: Drafter, batch: int):
    self._adapt, self._count = drafter.adapt, drafter.nodes
    self._depth = drafter.depth
    # Lengths that are tried; a tree is whole or not there.
    self._lengths = [drafter.nodes]
    while self._lengths[-1] > 1 and not drafter.tree:
      self._lengths.append(1 << (self._lengths[-1] - 1).bit_length() - 1)
    # A model's first draft is the shortest: it may cost several steps.
    text = isinstance(drafter, TextDrafter)
    self._first = self._lengths[0 if text else -1]
    # Accepted and looked at, of each row; a guess to begin with.
    self._right = np.full(batch, 0.7)
    self._looked = np.full(batch, 1.0)
    self._times: dict[int, collections.deque[float]] = {}
    self.pause, self._next = 0, _PAUSE
    self.rounds = self.steps = 0
    # Of rounds and empty drafts: seconds, and steps that they stand for.
    self._drafting_s = self._stands_for = 0.0
    self._all_steps = 0.0
    # Steps since the last draft, and what a draft reads of each, in seconds.
    self._lag = 0
    self._reading_s: float | None = None
    # Whether a pause has ended, and a draft that need not pay may be tried.
    self._due = False
    self._why = "no step was measured yet"

  @property
  def cost_s(self) -> float:
    return self._drafting_s - self._stands_for * (self._time(0) or 0.0)

  @property
  def plain_s(self) -> float:
    return self._all_steps * (self._time(0) or 0.0)

  @property
  def why(self) -> str:
    """Why the last step had a draft, or none."""
    return self._why if self._adapt else "always, as adapt=False says"

  def most(self) -> np.ndarray:
    """Tokens that are to be drafted for each row, int [B]."""
    batch = len(self._right)
    full, none = np.full(batch, self._count), np.zeros(batch, int)
    if not self._adapt:
      return full
    if self.pause:
      return none
    plain = self._time(0)
    if not (self._measured or _EMPTY in self._times):
      return np.full(batch, self._first)
    if plain is None:
      self.pause, self._why = _STEPS, "steps without drafts are timed"
      return none
    if self._due and self._lag >= _PAUSE:
      self._right, self._looked = self._right * _FADED, self._looked * _FADED
    length, tokens, time = max(
      (self._offer(n, plain) for n in self._lengths),
      key=lambda offer: offer[1] / offer[2],
    )
    pays = tokens / time > 1 / plain
    self._why = (
      f"a draft of {length} takes {time / plain:.2f} steps and gives "
      f"{tokens:.2f} tokens"
    )
    if not (pays or self._due):
      self._rest(self._next)
      self._next = min(2 * self._next, _LONGEST)
      return none
    wait = self._wait(time, plain)
    if wait:
      self._why += f"; it could cost more than {SHARE:.0%}"
      self._rest(min(wait, _LONGEST))
      return none
    self._due = False
    if pays:
      self._next = _PAUSE
    return np.full(batch, length)

  def add(
    self,
    most: np.ndarray,
    drafted: np.ndarray,
    came: np.ndarray,
    seconds: float | None,
  ) -> None:
    """Notes a round, or a step of a pause.

    Args:
      most: int [B], tokens that were to be drafted.
      drafted: int [B], tokens that were; none counts as one that was wrong.
      came: int [B], new tokens.
      seconds: that it took; None: something was compiled in it, which says
        nothing about the next one.
    """
    looked = (came > 0) & (most > 0)
    right = np.minimum(np.maximum(came - 1, 0), drafted)
    seen = np.where(looked, np.maximum(np.minimum(drafted, right + 1), 1), 0)
    decay = np.where(looked, _DECAY, 1.0)
    self._right = self._right * decay + np.where(looked, right, 0)
    self._looked = self._looked * decay + seen
    live = came[came > 0]
    stands_for = float(live.mean()) if live.size else 1.0
    self._all_steps += stands_for
    width = int(drafted.max(initial=0))
    if width:
      width = min(n for n in self._lengths if n >= width)
      self.rounds += 1
    else:
      self.steps += 1
      width = _EMPTY if most.any() else 0
    if width:
      lag, self._lag = self._lag, 0
      if seconds is None:
        return
      self._drafting_s += seconds
      self._stands_for += stands_for
      usual = self._time(width)
      if lag >= _BEHIND and usual is not None:
        self._reading_s = max(0.0, seconds - usual) / lag
        return
    else:
      self._lag += 1
      if not self.pause:
        return
      self.pause -= 1
    if seconds is None:
      return
    times = self._times.setdefault(width, collections.deque(maxlen=16))
    times.append(seconds)

  def _rest(self, steps: int) -> None:
    self.pause, self._due = steps, True

  def _wait(self, time: float, plain: float) -> int:
    """Steps until a round that gives one token costs no more than `SHARE`."""
    reading = self._reading_s
    if reading is None:
      whole = self._guess(self._count, plain)
      reading = _READ * max(0.0, whole - plain) / self._count
    over = self.cost_s + time - plain + reading * self._lag
    over -= SHARE * self.plain_s
    if over <= 0:
      return 0
    each = SHARE * plain - reading
    return math.ceil(over / each) if each > 0 else _LONGEST

  def _offer(self, length: int, plain: float) -> tuple[int, float, float]:
    """A length, the tokens that it is expected to give, and its seconds."""
    deep = min(length, self._depth)
    each = [expected_tokens(a, deep) for a in self._right / self._looked]
    return length, float(np.mean(each)), self._guess(length, plain)

  def _time(self, width: int) -> float | None:
    times = self._times.get(width)
    return float(np.median(times)) if times else None

  @property
  def _measured(self) -> int:
    """The largest length whose time is known, or 0."""
    return max((n for n in self._lengths if n in self._times), default=0)

  def _guess(self, length: int, plain: float) -> float:
    """What a round takes: as measured, else by the largest that was."""
    known = self._time(length)
    if known is not None:
      return known
    widest = self._measured
    whole = self._time(widest) if widest else self._time(_EMPTY)
    assert whole is not None
    return plain + (whole - plain) * length / (widest or self._count)


def expected_tokens(acceptance: float, drafted: int) -> float:
  """New tokens of a call with a chain of `drafted` tokens, on average."""
  if acceptance >= 1:
    return drafted + 1.0
  return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
