"""Draft lengths, down to none, from acceptance and measured times.

Guarantees: no round is drafted that could bring the measured cost of drafting
above `SHARE` of the time of plain decoding. The first draft is measured by
making it, once more where it was compiled; the time in which a draft model
reads the tokens of a pause is estimated until it has done so once. Rounds that
save time pay for those that do not. A draft that is not expected to save time
has a length that was timed before: it compiles nothing.
Ref: Leviathan et al. 2023 (arXiv 2211.17192), sections 3.4 and 3.5: a draft of
n tokens of which each is accepted with probability a gives
(1 - a^(n + 1)) / (1 - a) tokens. Rounds are timed where nothing was compiled;
steps without drafts while drafts pause, when the next step is in flight before
the last one's token is known. After a pause a draft model reads the tokens of
the pause, which is timed too: the longer the pause, the more a trial costs.
Times and pauses are those of steps of one size; the cost of drafting is summed
over all sizes.
"""

from __future__ import annotations

import collections
import math
import statistics
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from ringjax.infer.speculate.drafter import Drafter, TextDrafter

# Maximum cost of drafting, as a share of the time of plain decoding.
SHARE = 0.05
# Weight of a round relative to the one after it.
_DECAY = 0.95
# Width of a step that waited for a draft that was empty.
_EMPTY = -1
# Steps without drafts after the first draft, which are timed.
_STEPS = 5
# Steps without drafts until drafts are tried again: at first, and at most.
_PAUSE, _LONGEST = 16, 512
# Unread tokens from which a round's time includes a draft model's reading.
_BEHIND = 8
# Estimated time of reading a token, relative to drafting and checking it.
_READ = 1 / 8
# Weight at a trial of the acceptance before the pause.
_FADED = 0.5
# Plain steps are timed again if rounds become longer or shorter by this factor.
_DRIFT = 1.25
# Weight of the acceptance of earlier rows in that of a new row, in tokens.
_PRIOR = 1.0

# Why a step has no draft: it is timed, a draft takes longer than it saves, or
# a draft could cost more than `SHARE`. "": the step has a draft.
Reason = Literal["", "timing", "slower", "costly"]
REASONS: tuple[Reason, ...] = ("timing", "slower", "costly")


class _SizeTimes:
  """Times of steps of one size, and the pauses of drafts among them.

  Attributes:
    pause: Number of steps without drafts before the next draft.
    next: Number of steps of the next pause.
    due: Whether a pause has ended, so that a draft may be tried that need not
      pay.
    drafting_s: Seconds of rounds and empty drafts.
    stands_for: Number of steps without drafts that give the same tokens.
    all_steps: Number of steps without drafts that give the tokens of all steps.
    some: Decayed numbers of drafts that were not empty, and of all, float [2].
    why: Sentence that says why the last step had a draft, or none.
    reason: Reason in one word, one of `REASONS`, or "".
  """

  def __init__(self) -> None:
    self._times: dict[int, collections.deque[float]] = {}
    self._medians: dict[int, float] = {}
    self.pause, self.next, self.due = 0, _PAUSE, False
    self.drafting_s = self.stands_for = self.all_steps = 0.0
    self.some = np.ones(2)
    self.why = "no step was measured yet"
    self.reason: Reason = "timing"
    # Seconds of a round when plain steps were timed.
    self._then: float | None = None

  def time(self, width: int) -> float | None:
    """Seconds of a round of a width, 0 for a plain step; None if unknown."""
    return self._medians.get(width)

  def add(self, width: int, seconds: float) -> None:
    """Records the seconds of a round of a width, 0 for a plain step."""
    times = self._times.setdefault(width, collections.deque(maxlen=16))
    times.append(seconds)
    self._medians[width] = statistics.median(times)
    if not width:
      self._then = self._round()

  @property
  def widest(self) -> int:
    """Largest draft length whose time is known, or 0."""
    return max((n for n in self._times if n > 0), default=0)

  @property
  def measured(self) -> bool:
    """Whether a draft was timed, also an empty one."""
    return self.widest > 0 or _EMPTY in self._times

  @property
  def cost_s(self) -> float:
    return self.drafting_s - self.stands_for * (self.time(0) or 0.0)

  @property
  def plain_s(self) -> float:
    return self.all_steps * (self.time(0) or 0.0)

  def stale(self) -> bool:
    """Whether the time of rounds has changed since plain steps were timed.

    If so, older times of plain steps are dropped, to be measured again.
    """
    round_s = self._round()
    if self._then is None or round_s is None:
      self._then = round_s
      return False
    if round_s <= _DRIFT * self._then and self._then <= _DRIFT * round_s:
      return False
    times = self._times[0]
    while len(times) > _STEPS // 2:
      times.popleft()
    self._then = round_s
    return True

  def begin_pause(
    self, steps: int, why: str, reason: Reason, due: bool
  ) -> None:
    """Begins a pause; `due` is whether a trial follows it."""
    self.pause, self.why, self.reason = steps, why, reason
    self.due = self.due or due

  def _round(self) -> float | None:
    return self.time(self.widest) if self.widest else None


class Paces:
  """Chooses the length of drafts, row by row.

  Attributes:
    rounds: rounds with drafts.
    steps: steps without.
  """

  def __init__(
    self,
    drafter: Drafter,
    batch: int,
    *,
    whole: bool = False,
    processes: int = 1,
  ):
    """Start with no measurements.

    Args:
      drafter: The drafter.
      batch: Number of rows, B.
      whole: Whether a draft has its whole length or is left out, for calls
        that take as long for a shorter one.
      processes: Number of processes that choose lengths. Several measure other
        times, and would choose other lengths, so their drafts do not adapt.
    """
    self._adapt, self._count = drafter.adapt and processes == 1, drafter.nodes
    self._why_fixed = "adapt=False says"
    if drafter.adapt:
      self._why_fixed = f"{processes} processes measure other times"
    self._depth = drafter.depth
    # Candidate lengths; a tree is drafted whole or not at all.
    self._lengths = [drafter.nodes]
    while self._lengths[-1] > 1 and not (drafter.tree or whole):
      self._lengths.append(1 << (self._lengths[-1] - 1).bit_length() - 1)
    # A model's first draft is the shortest: it may cost several steps.
    text = isinstance(drafter, TextDrafter)
    self._first = self._lengths[0 if text else -1]
    self._read = 0.0 if text else _READ
    # Accepted and checked tokens, per row and in all, with a prior of .7.
    self._right = np.full(batch, 0.7)
    self._looked = np.full(batch, 1.0)
    self._all_right, self._all_looked = 0.7, 1.0
    # Per row, the drafts that were not empty, and all drafts.
    self._filled, self._asked = np.full(batch, 1.0), np.full(batch, 1.0)
    self._sizes: dict[int, _SizeTimes] = {0: _SizeTimes()}
    self._size = 0
    self.rounds = self.steps = 0
    # Steps since the last draft, and seconds of reading the token of one.
    self._lag = 0
    self._reading_s: float | None = None
    # Whether a first draft was let off what it had to read.
    self._excused = False

  @property
  def pause(self) -> int:
    """Steps without drafts that are to come before the next draft."""
    return self._sizes[self._size].pause

  @property
  def cost_s(self) -> float:
    """Seconds that drafting took more than plain steps for the same tokens;
    below 0 where it saved some."""
    return sum(times.cost_s for times in self._sizes.values())

  @property
  def plain_s(self) -> float:
    """Seconds that plain steps would have taken in all."""
    return sum(times.plain_s for times in self._sizes.values())

  @property
  def why(self) -> str:
    """Sentence that says why the last step had a draft, or none."""
    if not self._adapt:
      return f"always, as {self._why_fixed}"
    return self._sizes[self._size].why

  @property
  def reason(self) -> Reason:
    """Reason why the last step had no draft, one of `REASONS`; "" if it had."""
    return self._sizes[self._size].reason if self._adapt else ""

  def begin(self, row: int) -> None:
    """Starts another text in a row, with the acceptance of earlier rows."""
    self._right[row] = _PRIOR * self._all_right / self._all_looked
    self._looked[row] = _PRIOR
    self._filled[row] = self._asked[row] = 1.0

  def draft_lengths(
    self,
    size: int = 0,
    *,
    rows: Bool[np.ndarray, " B"] | None = None,
    live: int | None = None,
    behind: int | None = None,
    timed: bool = True,
  ) -> Int[np.ndarray, " B"]:
    """Number of tokens to draft for each row, int [B].

    Args:
      size: Index of a group of steps that take about as long as one another.
      rows: Rows that may have drafts, bool [B]; None for all.
      live: Number of rows of the step, those without drafts too.
      behind: Number of tokens that a draft model has to read first; None for
        the tokens of the steps since the last draft.
      timed: Whether the step can be timed, as it does nothing else.
    """
    rows = np.ones(len(self._right), bool) if rows is None else rows
    none = np.zeros(len(rows), int)
    self._size = size
    times = self._sizes.setdefault(size, _SizeTimes())
    if not self._adapt:
      return np.where(rows, self._count, none)
    if times.pause:
      return none
    plain = times.time(0)
    measured = self._measured
    if not timed and (plain is None or not measured):
      times.why, times.reason = "no step was timed yet", "timing"
      return none
    if not measured:
      times.reason = ""
      return np.where(rows, self._first, none)
    if plain is None or times.stale():
      times.begin_pause(
        _STEPS, "steps without drafts are timed", "timing", False
      )
      return none
    if times.due and self._lag >= _PAUSE:
      self._right, self._looked = self._right * _FADED, self._looked * _FADED
      self._filled, self._asked = self._filled * _FADED, self._asked * _FADED
      self._all_right *= _FADED
      self._all_looked *= _FADED
    offers = [self._offer(n, plain, rows, live) for n in self._lengths]
    speed = lambda offer: offer[1] / max(offer[2], 1e-12)
    length, tokens, time = max(offers, key=speed)
    pays = tokens * plain >= time
    timed_offers = [x for x in offers if times.time(x[0]) is not None]
    if times.due and not pays and timed_offers:
      # Another length may need programs that are not compiled yet.
      length, tokens, time = max(timed_offers, key=speed)
    why = (
      f"a draft of {length} takes {_ratio(time, plain):.2f} steps and gives "
      f"{tokens:.2f} tokens"
    )
    if not (pays or times.due):
      times.begin_pause(times.next, why, "slower", True)
      times.next = min(2 * times.next, _LONGEST)
      return none
    lag = self._lag if behind is None else behind
    wait = self._wait(self._guess(length, plain), plain, lag)
    if wait:
      why += f"; it could cost more than {SHARE:.0%}"
      times.begin_pause(min(wait, _LONGEST), why, "costly", True)
      return none
    times.due, times.why, times.reason = False, why, ""
    if pays:
      times.next = _PAUSE
    return np.where(rows, length, none)

  def add(
    self,
    most: np.ndarray,
    drafted: np.ndarray,
    came: np.ndarray,
    seconds: float | None,
    size: int = 0,
    *,
    behind: int | None = None,
    timed: bool = True,
  ) -> None:
    """Records a round, or a step of a pause.

    Args:
      most: Number of tokens that should be drafted, int [B].
      drafted: Number of drafted tokens, int [B].
      came: Number of new tokens, int [B].
      seconds: Duration; None if something was compiled meanwhile, so that the
        time predicts nothing.
      size: Index of the group of steps, see `draft_lengths`.
      behind: Number of tokens that a draft model had to read first; None for
        the tokens of the steps since the last draft.
      timed: Whether the seconds were measured; otherwise they are an estimate
        that counts as cost and predicts nothing.
    """
    offered = (came > 0) & (most > 0)
    looked = offered & (drafted > 0)
    right = np.minimum(np.maximum(came - 1, 0), drafted)
    seen = np.where(looked, np.minimum(drafted, right + 1), 0)
    decay = np.where(looked, _DECAY, 1.0)
    self._right = self._right * decay + np.where(looked, right, 0)
    self._looked = self._looked * decay + seen
    if looked.any():
      self._all_right = self._all_right * _DECAY + right[looked].sum()
      self._all_looked = self._all_looked * _DECAY + seen.sum()
    decay = np.where(offered, _DECAY, 1.0)
    self._filled = self._filled * decay + looked
    self._asked = self._asked * decay + offered
    times = self._sizes.setdefault(size, _SizeTimes())
    live = came[came > 0]
    stands_for = float(live.mean()) if live.size else 1.0
    times.all_steps += stands_for
    width = int(drafted.max(initial=0))
    if width:
      width = min(n for n in self._lengths if n >= width)
      self.rounds += 1
    else:
      self.steps += 1
      width = _EMPTY if most.any() else 0
    if width:
      times.some = times.some * _DECAY + [width > 0, 1]
      lag, self._lag = self._lag, 0
      lag = lag if behind is None else behind
      if seconds is None:
        return
      usual = times.time(width)
      reads = lag >= _BEHIND
      if reads and timed and not self._excused and not self._measured:
        self._excused = True
        return
      times.drafting_s += seconds
      times.stands_for += stands_for
      if reads and usual is not None:
        if timed:
          self._reading_s = max(0.0, seconds - usual) / lag
        return
    else:
      self._lag += 1
      if not times.pause:
        return
      times.pause -= 1
    if seconds is not None and timed:
      times.add(width, seconds)

  def usual(self, size: int, *, empty: bool = False) -> float | None:
    """Seconds of a round, or of an empty draft; None if unknown.

    Args:
      size: Index of the group of steps, see `draft_lengths`.
      empty: Whether to return the time of an empty draft.
    """
    times = self._sizes.get(size)
    if times is None:
      return None
    return times.time(_EMPTY if empty else self._lengths[0])

  @property
  def _measured(self) -> bool:
    return any(times.measured for times in self._sizes.values())

  def _wait(self, time: float, plain: float, lag: int) -> int:
    """Steps until a round that gives one token costs no more than `SHARE`."""
    reading = self._reading_s
    if reading is None:
      full_s = self._guess(self._count, plain)
      reading = self._read * max(0.0, full_s - plain) / self._count
    over = self.cost_s + time - plain + reading * lag
    over -= SHARE * self.plain_s
    if over <= 0:
      return 0
    saved_s = SHARE * plain - reading
    return math.ceil(over / saved_s) if saved_s > 0 else _LONGEST

  def _offer(
    self,
    length: int,
    plain: float,
    rows: Bool[np.ndarray, " B"],
    live: int | None,
  ) -> tuple[int, float, float]:
    """Return a draft length, its expected tokens, and its seconds."""
    deep, times = min(length, self._depth), self._sizes[self._size]
    gains = [
      filled * (expected_tokens(right, deep) - 1)
      for right, filled in zip(
        (self._right / self._looked)[rows],
        (self._filled / self._asked)[rows],
        strict=True,
      )
    ]
    tokens = 1 + sum(gains) / max(1, len(gains) if live is None else live)
    empty = times.time(_EMPTY)
    time = self._guess(length, plain)
    if empty is not None:
      share = float(times.some[0] / times.some[1])
      time = share * time + (1 - share) * empty
    return length, float(tokens), time

  def _guess(self, length: int, plain: float) -> float:
    """Seconds of a round: measured, or scaled from the largest measured one."""
    times = self._sizes[self._size]
    measured_s = times.time(length)
    if measured_s is not None:
      return measured_s
    if not times.measured:
      # The ratio to a plain step is that of the nearest size.
      nearest = min(
        (n for n, size_times in self._sizes.items() if size_times.measured),
        key=lambda n: abs(n - self._size),
      )
      times = self._sizes[nearest]
    widest = times.widest
    widest_s = times.time(widest or _EMPTY)
    assert widest_s is not None
    base = times.time(0)
    if base:
      widest_s *= plain / base
    return plain + (widest_s - plain) * length / (widest or self._count)


def _ratio(time: float, plain: float) -> float:
  return time / plain if plain else 1.0


def expected_tokens(acceptance: float, drafted: int) -> float:
  """New tokens of a call with a chain of `drafted` tokens, on average."""
  if acceptance >= 1:
    return drafted + 1.0
  return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
