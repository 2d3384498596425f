"""The training loop: steps until all are taken or a signal stops it.

Guarantees: what a run leaves depends on its settings, its data and its first
state, and not on how often it was interrupted: what is saved is all that a step
depends on, and a run that was stopped goes on bit for bit as if it had not
been. A state is never saved behind a step that was not finite.
Cost: the host reads a step's figures while the next one runs.

On SIGTERM and SIGINT the run ends behind the step at hand: all processes take
the same last step, save it once, and `fit` says which signal it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from ringjax.checks import positive_int
from ringjax.errors import (
  CheckpointWriteError,
  CollectiveTimeoutError,
  NotFiniteError,
  OptionError,
  ReplayError,
)
from ringjax.parallel import memory
from ringjax.train.step import StepMetrics, TrainState

# The exit status of a process whose step took too long.
STUCK = 4


@runtime_checkable
class Data(Protocol):
  """Where rows come from; a `ringjax.data.loader.Loader` is one."""

  def __next__(self) -> Any:
    """The next rows."""
    ...

  def state(self) -> dict[str, Any]:
    """Where it is, as JSON."""
    ...

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on from there."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
  """Logging, checkpoint and failure-tolerance settings.

  Attributes:
    log_every: steps between two reports.
    save_every: steps between two saves; None saves at the end only.
    most_skipped: steps in a row that may be not finite.
    most_unsaved: saves in a row that may fail, with a warning each; the one at
      the end may not, since none comes after it.
    timeout_s: seconds after which a step is given up; None waits.
    replay_every: steps between two that are computed twice, to find devices
      that err in silence; None for none. Such a step takes twice the time and
      the state's memory.
  """

  log_every: int = 10
  save_every: int | None = None
  most_skipped: int = 3
  most_unsaved: int = 0
  timeout_s: float | None = None
  replay_every: int | None = None

  def __post_init__(self) -> None:
    for name in ("log_every", "most_skipped"):
      positive_int(name, getattr(self, name))
    for name in ("save_every", "replay_every"):
      if getattr(self, name) is not None:
        positive_int(name, getattr(self, name))
    if type(self.most_unsaved) is not int or self.most_unsaved < 0:
      raise OptionError(
        "most_unsaved",
        repr(self.most_unsaved),
        "a number from 0 on",
        "0 ends the run when a save fails",
      )
    if self.timeout_s is not None and not self.timeout_s > 0:
      raise OptionError(
        "timeout_s", self.timeout_s, "seconds above 0", "raise it"
      )


_PACE = LoopConfig()
_KNOBS = (
  "shard the sequence over more devices, keep less of a layer "
  "(remat='nothing'), or accumulate over more micro-batches"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingReport:
  """The steps since the last report.

  Attributes:
    step: steps taken in all.
    loss: mean negative log-likelihood of their labels.
    objective: what was minimised, of the last one.
    gradient_norm: of the last one.
    tokens: that were read, those without a label and padding too.
    labels: that counted, by weight.
    skipped: how many were not finite.
    seconds: that they took, saves not counted.
    first: whether the time of compiling is among them.
  """

  step: int
  loss: float
  objective: float
  gradient_norm: float
  tokens: int
  labels: float
  skipped: int
  seconds: float
  first: bool

  @property
  def tokens_per_s(self) -> float:
    return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
  """How a run ended: its state, and the signal that stopped it, if one did."""

  state: TrainState
  stopped: int | None


def fit(
  state: TrainState,
  frozen: Any,
  data: Data,
  *,
  steps: int,
  step: Callable[[TrainState, Any, Any], tuple[TrainState, StepMetrics]],
  place: Callable[[Any], Any],
  pace: LoopConfig = _PACE,
  checkpoints: Any = None,
  resume: bool = True,
  report: Callable[[TrainingReport], Any] = lambda report: None,
  on_step: Callable[[int], Any] = lambda step: None,
) -> FitResult:
  """Trains until so many steps are taken.

  Args:
    state: to begin with; where `checkpoints` holds a step, that is restored
      over it. It is donated.
    frozen: what the step needs beside it.
    data: the rows; it is brought to where the state is.
    steps: the last step's number.
    step: by `make_step`.
    place: brings rows to the devices, by `ringjax.train.batch.place`.
    pace: how often what is done.
    checkpoints: a `Checkpoints`, or None to save nothing.
    resume: whether to look there for a step to go on from.
    report: called with what the steps gave, in all processes.
    on_step: called before each step with how many are taken.

  Raises:
    OptionError: no steps.
    NotFiniteError: too many steps in a row were not finite; the last step
      saved is from before them.
    ReplayError: a step that was computed twice gave two results; nothing is
      saved of it.
    CheckpointWriteError: more saves in a row failed than the pace bears, or
      the last one did.
    OutOfMemoryError: a step had no room.
  """
  positive_int("steps", steps)
  state, taken = _resumed(state, data, checkpoints if resume else None)
  sums = _Sums()
  saves = _Saves(checkpoints, pace)
  with _Signals() as signals, _Watch(pace.timeout_s) as watch:
    waiting: StepMetrics | None = None
    # The first replay compiles what copies and compares.
    calm: Callable[[], Any] = watch.pause
    while taken < steps:
      on_step(taken)
      batch = place(next(data))
      again = None
      if pace.replay_every is not None and not (taken + 1) % pace.replay_every:
        with calm():
          again = _copied(state)
      with memory.watched(f"taking step {taken + 1}", _KNOBS):
        state, figures = step(state, frozen, batch)
      sums.read(batch.tokens.size)
      taken += 1
      if again is not None:
        with calm():
          _check_replay(taken, (state, figures), step(again, frozen, batch))
        calm = contextlib.nullcontext
      if waiting is not None:
        sums.add(waiting, pace)
      waiting = figures
      last = taken == steps
      stop = signals.stop(taken)
      save = pace.save_every is not None and not (taken % pace.save_every)
      saves.poll()
      if last or stop or save or taken % pace.log_every == 0:
        # Not one step late: what is saved has to be fine.
        sums.add(waiting, pace)
        waiting = None
        report(sums.take(taken))
      watch.tick()
      if checkpoints is not None and (last or stop or save):
        with watch.pause():
          skipped = int(state.skipped)
          if not skipped:
            extra = {"data": data.state()}
            saves.save(taken, state._asdict(), extra, last=last or bool(stop))
        sums.restart()
      if stop:
        break
    if checkpoints is not None:
      with watch.pause():
        checkpoints.wait()
  return FitResult(state=state, stopped=signals.received)


def _resumed(
  state: TrainState, data: Data, checkpoints: Any
) -> tuple[TrainState, int]:
  """The newest saved state, or the given one, and its step."""
  found = None
  if checkpoints is not None:
    found = checkpoints.restore(like=state._asdict())
  if found is not None:
    saved, extra = found
    data.restore(extra["data"])
    state = TrainState(**saved)
  return state, int(jax.device_get(state.step))


@jax.jit
def _copied(state: TrainState) -> TrainState:
  return jax.tree.map(jnp.copy, state)


@jax.jit
def _differing(a: Any, b: Any) -> jax.Array:
  """Numbers that are not the same, in two trees."""
  differ = lambda x, y: jnp.sum(
    (x != y) & ~((x != x) & (y != y)), dtype=jnp.int32
  )
  return jax.tree.reduce(jnp.add, jax.tree.map(differ, a, b), jnp.int32(0))


def _check_replay(taken: int, first: Any, second: Any) -> None:
  count = int(jax.device_get(_differing(first, second)))
  if count:
    raise ReplayError(
      "step",
      f"{count} numbers that differ when step {taken} is computed again",
      "the same bits",
      "test the devices; what is saved is from before this step",
    )


class _Saves:
  """Saves, of which some may fail."""

  def __init__(self, checkpoints: Any, pace: LoopConfig):
    self._checkpoints, self._most = checkpoints, pace.most_unsaved
    self._failed, self._is_open = 0, False

  def poll(self) -> None:
    """Tells when the last save has failed."""
    if self._checkpoints is not None:
      self._bear(self._checkpoints.poll)

  def save(self, step: int, tree: Any, extra: Any, *, last: bool) -> None:
    # Processes see a failure one step apart: here all have seen it, and none
    # saves while another is still told of it.
    self._bear(self._checkpoints.wait)
    if self._is_open:
      self._failed = 0
    self._is_open = True
    save = lambda: self._checkpoints.save(step, tree, extra)
    if last:
      save()
    else:
      self._bear(save)

  def _bear(self, call: Callable[[], Any]) -> None:
    try:
      call()
    except CheckpointWriteError as error:
      self._is_open = False
      self._failed += 1
      if self._failed > self._most:
        raise
      if not jax.process_index():
        warnings.warn(
          f"{error}; going on without it, failed save {self._failed} in a row "
          f"of {self._most} that may",
          RuntimeWarning,
          stacklevel=3,
        )


class _Sums:
  """The figures of the steps since the last report."""

  def __init__(self) -> None:
    self._first = True
    self._start = time.monotonic()
    self._clear()

  def _clear(self) -> None:
    self._nll = self._weight = 0.0
    self._tokens = 0
    self._objective = self._norm = float("nan")
    self._skipped = 0

  def restart(self) -> None:
    """Does not count the time since the last report."""
    self._start = time.monotonic()

  def read(self, tokens: int) -> None:
    """A step has so many."""
    self._tokens += tokens

  def add(self, figures: StepMetrics, pace: LoopConfig) -> None:
    # Programs run behind the calls, and so do their failures.
    with memory.watched("taking a step", _KNOBS):
      found: Any = jax.tree.map(float, jax.device_get(figures))
    self._objective, self._norm = found.objective, found.gradient_norm
    if found.finite:
      self._nll += found.loss * found.weight
      self._weight += found.weight
      return
    self._skipped += 1
    if found.skipped > pace.most_skipped:
      raise NotFiniteError(
        "loss",
        f"{int(found.skipped)} steps in a row with loss {found.loss:g} and "
        f"gradient norm {found.gradient_norm:g}",
        "finite ones",
        "lower the learning rate, or look at the data; what is saved is from "
        "before these steps",
      )

  def take(self, step: int) -> TrainingReport:
    now = time.monotonic()
    made = TrainingReport(
      step=step,
      loss=self._nll / self._weight if self._weight else float("nan"),
      objective=float(self._objective),
      gradient_norm=float(self._norm),
      tokens=self._tokens,
      labels=self._weight,
      skipped=self._skipped,
      seconds=now - self._start,
      first=self._first,
    )
    self._start, self._first = now, False
    self._clear()
    return made


class _Signals:
  """Notes SIGTERM and SIGINT instead of dying of them; a second one kills."""

  _NAMES = (signal.SIGTERM, signal.SIGINT)

  def __init__(self) -> None:
    self.received: int | None = None
    self._own: int = signal.SIGTERM
    self._before: dict[int, Any] = {}

  def __enter__(self) -> _Signals:
    if threading.current_thread() is threading.main_thread():
      for number in self._NAMES:
        if jax.process_count() == 1:
          self._before[number] = signal.signal(number, self._note)
        elif number != signal.SIGTERM:
          self._before[number] = signal.signal(number, self._pass_on)
    return self

  def __exit__(self, *_: object) -> None:
    for number, before in self._before.items():
      signal.signal(number, before)

  def _note(self, number: int, _: Any) -> None:
    if self.received is not None:
      # Somebody is impatient.
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self.received = number

  def _pass_on(self, number: int, _: Any) -> None:
    # Of several processes JAX notes SIGTERM, and agrees on a step.
    self._own = number
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)

  def stop(self, step: int) -> bool:
    """Whether all processes end behind this step."""
    if (
      jax.process_count() > 1
      and multihost_utils.reached_preemption_sync_point(step)
    ):
      self.received = self._own
    return self.received is not None


class _Watch:
  """Ends a process whose step does not come to its end."""

  def __init__(self, timeout_s: float | None):
    self._timeout_s = timeout_s
    self._last = time.monotonic()
    self._paused = False
    self._over = threading.Event()
    self._thread: threading.Thread | None = None
    # Compiling takes as long as it takes.
    self._begun = False

  def __enter__(self) -> _Watch:
    if self._timeout_s is not None:
      self._thread = threading.Thread(target=self._look, daemon=True)
      self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._over.set()
    if self._thread is not None:
      self._thread.join()

  def tick(self) -> None:
    """A step has ended."""
    self._last, self._begun = time.monotonic(), True

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Does not count what is done inside of the block."""
    self._paused = True
    try:
      yield
    finally:
      self._last, self._paused = time.monotonic(), False

  def _look(self) -> None:
    assert self._timeout_s is not None
    while not self._over.wait(min(1.0, self._timeout_s / 4)):
      spent = time.monotonic() - self._last
      if self._begun and not self._paused and spent > self._timeout_s:
        error = CollectiveTimeoutError(
          "step",
          f"no end of one in {spent:.0f} s",
          f"one within {self._timeout_s:g} s",
          "another process or device hangs: see all threads below",
        )
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        # What hangs is in a collective, which no exception reaches.
        os._exit(STUCK)
