"""The training loop: steps until all are taken or a signal stops it.

Guarantees: the result of a run depends on its settings, its data and its first
state, and not on how often it was interrupted: all that a step depends on is
saved, and a run that was stopped resumes bit for bit. No state is saved after a
step that was not finite.
Cost: the host reads a step's metrics while the next one runs.

On SIGTERM and SIGINT the run ends after the current step: all processes take
the same last step, save it once, and `fit` returns the signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
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
from jaxtyping import PyTree

from ringjax.checks import integer, number, positive_int
from ringjax.errors import (
  CheckpointWriteError,
  CollectiveTimeoutError,
  DataError,
  NotFiniteError,
  OptionError,
  ReplayError,
)
from ringjax.nn.placed import raise_fault
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.parallel import memory
from ringjax.train.checkpoint import Checkpoints
from ringjax.train.step import StepMetrics, TrainState

# The exit status of a process whose step took too long.
STUCK = 4


@runtime_checkable
class RowSource(Protocol):
  """Rows whose position can be saved, as `ringjax.data.loader.Loader`."""

  def __next__(self) -> Any:
    """The next rows."""
    ...

  def state(self) -> dict[str, Any]:
    """Its position, as JSON."""
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
    timeout_s: seconds after which a step counts as hung and the process ends;
      None waits.
    evaluate_every: steps between two held-out losses; None computes none. The
      last step has one too.
    replay_every: steps between two that are computed twice, to detect devices
      that compute wrong results; None for none. Such a step takes twice the
      time and the state's memory.
  """

  log_every: int = 10
  save_every: int | None = None
  most_skipped: int = 3
  most_unsaved: int = 0
  timeout_s: float | None = None
  evaluate_every: int | None = None
  replay_every: int | None = None

  def __post_init__(self) -> None:
    for name in ("log_every", "most_skipped"):
      positive_int(name, getattr(self, name))
    for name in ("save_every", "evaluate_every", "replay_every"):
      if getattr(self, name) is not None:
        positive_int(name, getattr(self, name))
    integer("most_unsaved", self.most_unsaved, least=0)
    if self.timeout_s is not None:
      number("timeout_s", self.timeout_s, above=0)


_CONFIG = LoopConfig()
_MEMORY = (
  "shard the sequence over more devices, keep less of a layer "
  "(remat='nothing'), or accumulate over more micro-batches"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingReport:
  """Metrics of the steps since the last report.

  Attributes:
    step: steps taken in all.
    loss: mean negative log-likelihood of their labels.
    objective: the minimised quantity, of the last step.
    gradient_norm: of the last step.
    tokens: read, padding and tokens without a label included.
    labels: sum of the labels' weights.
    skipped: how many steps were not finite.
    seconds: that they took, saves not counted.
    first: whether the time of compiling is included.
    held_out: loss of held-out data after the last of the steps, nats a token;
      None where it was not computed.
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
  held_out: float | None = None

  @property
  def tokens_per_s(self) -> float:
    return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
  """The state at the end of a run, and the signal that stopped it, or None."""

  state: TrainState
  stopped: int | None


def fit(
  state: TrainState,
  frozen: PyTree,
  data: RowSource,
  *,
  steps: int,
  step: Callable[[TrainState, Any, Any], tuple[TrainState, StepMetrics]],
  place: Callable[[Any], Any],
  config: LoopConfig = _CONFIG,
  checkpoints: Checkpoints | None = None,
  report: Callable[[TrainingReport], Any] = lambda report: None,
  on_step: Callable[[int], Any] = lambda step: None,
  evaluate: Callable[[TrainState], float] | None = None,
) -> FitResult:
  """Trains up to a number of steps.

  Args:
    state: to begin with; it is donated.
    frozen: the model that adapters are added to, or None.
    data: the rows, at the position of the state.
    steps: the last step's number.
    step: by `make_step`.
    place: moves rows to the devices, by `ringjax.train.batch.place`.
    config: when to log and save, and which failures to tolerate.
    checkpoints: a `Checkpoints`, or None to save nothing.
    report: called with the metrics of the steps, in all processes.
    on_step: called before each step with how many are taken.
    evaluate: Held-out loss of a state, which it leaves as it is; called every
      `config.evaluate_every` steps and after the last one.

  Raises:
    OptionError: `steps` is not positive, or only one of `evaluate` and
      `config.evaluate_every` is given.
    CheckpointFormatError: a layer of `frozen` could not be read from disk.
    DataError: labels outside of the vocabulary.
    NotFiniteError: too many steps in a row were not finite; the last step
      saved is from before them.
    ReplayError: a step that was computed twice gave two results; it is not
      saved.
    CheckpointWriteError: more saves in a row failed than `config` allows, or
      the last one did.
    OutOfMemoryError: a step did not fit the memory.
  """
  positive_int("steps", steps)
  if (config.evaluate_every is None) != (evaluate is None):
    raise OptionError(
      "evaluate",
      f"{evaluate} with evaluate_every={config.evaluate_every}",
      "a function and its steps, or neither",
      "pass both, or leave both out",
    )
  taken = int(jax.device_get(state.step))
  metrics = _Metrics(config, frozen)
  saves = _Saves(checkpoints, config)
  with _Signals() as signals, _Watchdog(config.timeout_s) as watchdog:
    waiting: StepMetrics | None = None
    # The first replay compiles what copies and compares.
    untimed: Callable[[], Any] = watchdog.pause
    while taken < steps:
      on_step(taken)
      batch = place(next(data))
      replay = config.replay_every is not None and not (
        (taken + 1) % config.replay_every
      )
      copy = None
      if replay:
        with untimed():
          copy = _copied(state)
      with memory.watched(f"taking step {taken + 1}", _MEMORY):
        state, found = step(state, frozen, batch)
      metrics.tokens += batch.tokens.size
      taken += 1
      if copy is not None:
        with untimed():
          _check_replay(taken, (state, found), step(copy, frozen, batch))
        untimed = contextlib.nullcontext
      if waiting is not None:
        metrics.add(waiting)
      waiting = found
      last = taken == steps
      stop = signals.stop(taken)
      save = config.save_every is not None and not taken % config.save_every
      saves.poll()
      every = config.evaluate_every
      asked = every is not None and (last or not taken % every)
      if last or stop or save or asked or taken % config.log_every == 0:
        # Not one step late: only finite states are saved.
        metrics.add(waiting)
        waiting = None
        latest = metrics.take(taken)
        if asked and evaluate is not None:
          with watchdog.pause():
            latest = dataclasses.replace(latest, held_out=evaluate(state))
          metrics.start = time.monotonic()
        report(latest)
      watchdog.tick()
      if checkpoints is not None and (last or stop or save):
        with watchdog.pause():
          if not int(state.skipped):
            extra = {"data": data.state()}
            saves.save(taken, state._asdict(), extra, last=last or stop)
        metrics.start = time.monotonic()
      if stop:
        break
    if checkpoints is not None:
      with watchdog.pause():
        checkpoints.wait()
  return FitResult(state=state, stopped=signals.received)


@jax.jit
def _copied(state: TrainState) -> TrainState:
  return jax.tree.map(jnp.copy, state)


@jax.jit
def _differing(a: Any, b: Any) -> jax.Array:
  """How many numbers differ between two trees; NaN is equal to NaN."""
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
      "test the devices; the saved steps are from before it",
    )


class _Saves:
  """Saves, of which `most_unsaved` in a row may fail."""

  def __init__(self, checkpoints: Any, config: LoopConfig):
    self._checkpoints, self._most = checkpoints, config.most_unsaved
    self._failed, self._is_open = 0, False

  def poll(self) -> None:
    """Counts the last save if it has failed."""
    if self._checkpoints is not None:
      self._tolerate(self._checkpoints.poll)

  def save(self, step: int, tree: Any, extra: Any, *, last: bool) -> None:
    # Processes see a failure one step apart: after this wait all have seen it,
    # and none saves before another knows.
    self._tolerate(self._checkpoints.wait)
    if self._is_open:
      self._failed = 0
    self._is_open = True
    save = lambda: self._checkpoints.save(step, tree, extra)
    if last:
      save()
    else:
      self._tolerate(save)

  def _tolerate(self, call: Callable[[], Any]) -> None:
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


class _Metrics:
  """Metrics of the steps since the last report.

  Attributes:
    tokens: read since then.
    start: when the clock of these steps began.
  """

  def __init__(self, config: LoopConfig, frozen: PyTree) -> None:
    self._most_skipped = config.most_skipped
    self._faults = getattr(getattr(frozen, "stack", None), "faults", ())
    self._first = True
    self._steps: list[StepMetrics] = []
    self.tokens = 0
    self.start = time.monotonic()

  def add(self, metrics: StepMetrics) -> None:
    """Reads a step's metrics; raises if too many steps were not finite."""
    # Programs run after their calls return, and fail then.
    with memory.watched("taking a step", _MEMORY):
      found: Any = jax.tree.map(float, jax.device_get(metrics))
    self._steps.append(found)
    if not found.finite:
      # A layer that could not be read on a mesh has no numbers.
      raise_fault(self._faults)
    if found.wrong:
      raise DataError(
        "labels",
        f"{int(found.wrong)} outside of the vocabulary in one step",
        f"ids of the model, or {IGNORE_INDEX} for no label",
        "pass vocab= to ringjax.train.batch.place, which says where they are",
      )
    if not found.finite and found.skipped > self._most_skipped:
      raise NotFiniteError(
        "loss",
        f"{int(found.skipped)} steps in a row with loss {found.loss:g} and "
        f"gradient norm {found.gradient_norm:g}",
        "finite ones",
        "lower the learning rate, or look at the data; the saved steps are "
        "from before these",
      )

  def take(self, step: int) -> TrainingReport:
    """The report after a step; resets the metrics."""
    now = time.monotonic()
    finite: list[Any] = [x for x in self._steps if x.finite]
    labels = sum(x.weight for x in finite)
    last: Any = self._steps[-1]
    made = TrainingReport(
      step=step,
      loss=sum(x.loss * x.weight for x in finite) / (labels or math.nan),
      objective=last.objective,
      gradient_norm=last.gradient_norm,
      tokens=self.tokens,
      labels=float(labels),
      skipped=len(self._steps) - len(finite),
      seconds=now - self.start,
      first=self._first,
    )
    self.start, self._first = now, False
    self._steps, self.tokens = [], 0
    return made


class _Signals:
  """Records SIGTERM and SIGINT in place of dying; a second one kills."""

  _NAMES = (signal.SIGTERM, signal.SIGINT)

  def __init__(self) -> None:
    self.received: int | None = None
    self._own: int = signal.SIGTERM
    self._before: dict[int, Any] = {}

  def __enter__(self) -> _Signals:
    if threading.current_thread() is threading.main_thread():
      for signum in self._NAMES:
        if jax.process_count() == 1:
          self._before[signum] = signal.signal(signum, self._record)
        elif signum != signal.SIGTERM:
          self._before[signum] = signal.signal(signum, self._pass_on)
    return self

  def __exit__(self, *_: object) -> None:
    for signum, before in self._before.items():
      signal.signal(signum, before)

  def _record(self, signum: int, _: Any) -> None:
    if self.received is not None:
      # The second one: it ends the process at once.
      signal.signal(signum, signal.SIG_DFL)
      signal.raise_signal(signum)
    self.received = signum

  def _pass_on(self, signum: int, _: Any) -> None:
    # With several processes JAX records SIGTERM, and agrees on a step.
    self._own = signum
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)

  def stop(self, step: int) -> bool:
    """Whether all processes end after this step."""
    if (
      jax.process_count() > 1
      and multihost_utils.reached_preemption_sync_point(step)
    ):
      self.received = self._own
    return self.received is not None


class _Watchdog:
  """Ends a process whose step does not end within a time."""

  def __init__(self, timeout_s: float | None):
    self._timeout_s = timeout_s
    # None until the first step has ended: compiling is not timed.
    self._timer: threading.Timer | None = None

  def __enter__(self) -> _Watchdog:
    return self

  def __exit__(self, *_: object) -> None:
    self._cancel()

  def tick(self) -> None:
    """A step has ended, and the time of the next one begins."""
    self._cancel()
    if self._timeout_s is not None:
      self._timer = threading.Timer(self._timeout_s, self._give_up)
      self._timer.daemon = True
      self._timer.start()

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Does not count what is done inside of the block."""
    runs = self._timer is not None
    self._cancel()
    try:
      yield
    finally:
      if runs:
        self.tick()

  def _cancel(self) -> None:
    if self._timer is not None:
      self._timer.cancel()

  def _give_up(self) -> None:
    error = CollectiveTimeoutError(
      "step",
      f"no end of one in {self._timeout_s:g} s",
      f"one within {self._timeout_s:g} s",
      "another process or device hangs: see all threads below",
    )
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    # The main thread is in a collective, which no exception reaches.
    os._exit(STUCK)
