"""Choice of steps with drafts, by acceptance and measured step times.

Guarantees: by the rule of `Paces`, drafts cost at most `paces.SHARE` of the
measured time of steps without drafts; the first draft, compilation, and tokens
that a draft model reads before it are not included. Times and pauses are those
of steps of one size: 1, 2, up to 4, 8, 16, ... rows. A step takes from when the
tokens of the one before were known until its own are, so that steps without
drafts, which the host plans while the device computes, are timed as such. Steps
that also compute prompts or move pages are not timed; their drafts count with
the times of other steps.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ringjax.infer.speculate.drafter import Drafter
from ringjax.infer.speculate.paces import Paces, Reason
from ringjax.parallel.compile_times import Compiling
from ringjax.serve.scheduler import ServedRow, StepPlan


class StepTiming(NamedTuple):
  """Facts about a step in flight, from which its time follows.

  Fields:
    size: Number of its kind, by its rows.
    began_s: Time at which the host could plan it.
    draft_s: Seconds that a draft model took.
    unread: Tokens that the draft model had to read first.
    lengths: Tokens that were to be drafted, by slot, int [R].
    timed: Whether the step computes answers alone.
    compiled: Whether something was compiled meanwhile.
  """

  size: int
  began_s: float
  draft_s: float
  unread: int
  lengths: np.ndarray
  timed: bool
  compiled: bool


class StepPaces:
  """Chooses which steps of an engine have drafts."""

  def __init__(
    self,
    drafter: Drafter,
    rows: int,
    clock: Callable[[], float],
    choose: Callable[[list[int]], list[int]] = lambda lengths: lengths,
  ):
    """Start without rows.

    Args:
      drafter: The drafter.
      rows: Number of slots.
      clock: Seconds.
      choose: Function of a choice by measured times, which returns the choice
        of all processes.
    """
    self._choose = choose
    self._paces = Paces(drafter, rows, whole=True)
    self._rows, self._clock = rows, clock
    self._compiling = Compiling()
    self._size, self._count = 0, drafter.nodes
    # Numbers of tokens of each slot that may be and that will be drafted.
    self._most, self._lengths = np.zeros(rows, int), np.zeros(rows, int)
    # Start of the step, and the last time when a step's tokens were known.
    self._began = self._known = -np.inf
    # Whether the last step did other work than answers.
    self._beside = False
    # Draft seconds and unread tokens of the planned step.
    self._draft_s, self._unread = 0.0, 0
    # Seconds of a draft model that had no texts to read, by sizes.
    self._drafts: dict[int, collections.deque[float]] = {}

  @property
  def why(self) -> str:
    """The reason for which the last step had drafts, or none."""
    return self._paces.why

  @property
  def reason(self) -> Reason:
    """The reason for which the last step paused, one of `paces.REASONS`; ""
    where it had drafts, or no row that they are for."""
    return self._paces.reason if self._most.any() else ""

  @contextlib.contextmanager
  def step(self) -> Iterator[None]:
    """Context of a step that records its start and its compilations."""
    self._began = self._clock()
    with Compiling() as self._compiling:
      yield

  def begin(self, row: ServedRow) -> None:
    """Resets the acceptance of a slot when a row begins in it."""
    assert row.slot is not None
    self._paces.begin(row.slot)

  def drafts(
    self,
    running: Iterable[ServedRow],
    drafted: Callable[[ServedRow], bool],
    unread: Callable[[], int],
  ) -> bool:
    """Whether the step that is about to be planned has drafts.

    Args:
      running: Rows that have slots.
      drafted: Whether a row may have a draft.
      unread: Returns how many tokens a draft model has to read first.
    """
    rows, live, beside = np.zeros(self._rows, bool), 0, self._beside
    self._most, self._lengths = self._count * rows, self._count * rows
    for row in running:
      if row.reading or not row.chosen:
        beside = True
        continue
      live += 1
      if row.slot is not None and row.most > row.chosen + 1 and drafted(row):
        rows[row.slot] = True
    self._draft_s, self._unread = 0.0, 0
    self._size = max(0, live - 1).bit_length()
    if not rows.any():
      return False
    self._unread, self._most = unread(), self._count * rows
    lengths = self._paces.draft_lengths(
      self._size, rows=rows, live=live, behind=self._unread, timed=not beside
    )
    self._lengths = np.asarray(self._choose(lengths.tolist()), int)
    return bool(self._lengths.any())

  @contextlib.contextmanager
  def drafting(self) -> Iterator[None]:
    """Context that times the work of a draft model."""
    began_s = self._clock()
    yield
    self._draft_s = self._clock() - began_s

  def planned(self, plan: StepPlan) -> StepTiming:
    """Records a step whose calls are in flight."""
    lengths = np.zeros(self._rows, int)
    for turn in plan.turns:
      # A row's last token has no successor to draft.
      if turn.chooses and turn.row.most > turn.row.chosen:
        lengths[turn.slot] = self._lengths[turn.slot]
    self._beside = bool(
      plan.pieces or plan.preempted or plan.restored or plan.forks
    )
    return StepTiming(
      self._size,
      self._began,
      self._draft_s,
      self._unread,
      lengths,
      not self._beside,
      self._compiling.seconds() > 0,
    )

  def add(
    self, timing: StepTiming, plan: StepPlan, count: np.ndarray | None
  ) -> None:
    """Records the results of a step when its tokens are known.

    Args:
      timing: The result of `planned`.
      plan: The plan of the step.
      count: Number of new tokens of each slot, int [R]; None: one of each.
    """
    known_s = self._clock()
    began_s, self._known = max(timing.began_s, self._known), known_s
    if not plan.turns:
      return
    came, drafted = np.zeros(self._rows, int), np.zeros(self._rows, int)
    for turn in plan.turns:
      if turn.chooses and not turn.row.ended:
        came[turn.slot] = 1 if count is None else int(count[turn.slot])
        drafted[turn.slot] = len(turn.draft.tokens)
    drafting = timing.lengths.any()
    seconds: float | None = known_s - began_s
    if timing.compiled or self._compiling.seconds() > 0:
      seconds = None
    elif not timing.timed:
      seconds = self._guess(timing, bool(drafted.any())) if drafting else None
    elif drafting and not timing.unread:
      times = self._drafts.setdefault(timing.size, collections.deque(maxlen=16))
      times.append(timing.draft_s)
    self._paces.add(
      timing.lengths,
      drafted,
      came,
      seconds,
      timing.size,
      behind=timing.unread,
      timed=timing.timed,
    )

  def _guess(self, timing: StepTiming, drafted: bool) -> float | None:
    """Estimated seconds of a step with other work, from drafting times."""
    usual = self._paces.usual(timing.size, empty=not drafted)
    draft_times = self._drafts.get(timing.size)
    if usual is None or not draft_times:
      return None
    return usual + max(0.0, timing.draft_s - statistics.median(draft_times))
