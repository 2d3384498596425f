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
from ringjax.nn.weights.placed_layers import raise_fault
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.parallel import memory
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.choice_training import ChoiceStatistics
from ringjax.train.expert_balance import RouterStatistics
from ringjax.train.optimizers.qk_clip import ScoreStatistics
from ringjax.train.step import StepMetrics, TrainState

# The exit status of a process whose step took too long.
STUCK = 4


@runtime_checkable
class RowSource(Protocol):
  """Rows whose position can be saved, as `ringjax.data.Loader`."""

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
    log_every: Steps between two reports.
    save_every: Steps between two saves; None saves at the end only.
    most_skipped: Largest number of steps in a row that may be not finite.
    most_unsaved: Largest number of saves in a row that may fail, with a warning
      each; the one at the end may not, since none comes after it.
    timeout_s: Seconds after which a step counts as hung and the process ends;
      None waits.
    evaluate_every: Steps between two held-out losses; None computes none. The
      last step has one, too.
    replay_every: Steps between two that are computed twice, to detect devices
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
    step: Steps taken in all.
    loss: Mean negative log-likelihood of their labels, or mean of
      `Objective.posttraining`.
    objective: Minimised quantity, of the last step.
    gradient_norm: Global norm of the last step's gradients.
    tokens: Tokens read, including padding and tokens without a label.
    labels: Sum of the labels' weights, or number of pairs of answers.
    skipped: Number of steps that were not finite.
    seconds: Seconds that the steps took, without saves.
    first: Whether the time of compiling is included.
    held_out: Loss of held-out data after the last of the steps, nats a token;
      None if it was not computed.
    experts: Statistics of the last step's routing; None without experts.
    choice: Statistics of the keys that layers chose in the last step; None if
      all read all.
    policy: Statistics of the last step's policy, see `rj.rl`; None of other
      losses.
    means: Means of a loss after pre-training over all the steps, by their
      names; None without one.
    predicted: Negative log-likelihood of the last step's labels by the layer
      that predicts one token further; None if it is not trained.
    scores: Largest attention logit of the steps, and the heads that they
      clipped; None without `Optimizer.qk_clip`.
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
  experts: RouterStatistics | None = None
  choice: ChoiceStatistics | None = None
  policy: PyTree = None
  means: dict[str, float] | None = None
  predicted: float | None = None
  scores: ScoreStatistics | None = None

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
    state: Initial state; it is donated.
    frozen: Model that adapters are added to, or None.
    data: Rows, at the position of the state.
    steps: Number of the last step.
    step: Compiled step by `make_step`.
    place: Function that moves rows to the devices, as
      `ringjax.train.batch.place`.
    config: Logging, saving and failure-tolerance settings.
    checkpoints: A `Checkpoints`, or None to save nothing.
    report: Function that is called with the metrics of the steps, in all
      processes.
    on_step: Function that is called before each step with the steps taken.
    evaluate: Held-out loss of a state, which it must not change; called every
      `config.evaluate_every` steps and after the last one.

  Raises:
    OptionError: If `steps` is not positive, or only one of `evaluate` and
      `config.evaluate_every` is given.
    CheckpointFormatError: If a layer of `frozen` could not be read from disk.
    DataError: If labels are outside of the vocabulary.
    NotFiniteError: If too many steps in a row were not finite; the last step
      saved is from before them.
    ReplayError: If a step that was computed twice gave two results; it is not
      saved.
    CheckpointWriteError: If more saves in a row failed than `config` allows,
      or the last one did.
    OutOfMemoryError: If a step did not fit the memory.
  """
  positive_int("steps", steps)
  if (config.evaluate_every is None) != (evaluate is None):
    raise OptionError(
      "evaluate",
      f"{evaluate} with evaluate_every={config.evaluate_every}",
      "a function and its steps, or neither",
      "pass both, or leave both out",
    )
  steps_taken = int(jax.device_get(state.step))
  metrics = _Metrics(config, frozen)
  saves = _Saves(checkpoints, config)
  with _Signals() as signals, _Watchdog(config.timeout_s) as watchdog:
    waiting: StepMetrics | None = None
    # The first replay compiles the copy and the comparison.
    untimed: Callable[[], Any] = watchdog.pause
    while steps_taken < steps:
      on_step(steps_taken)
      batch = place(next(data))
      replay = config.replay_every is not None and not (
        (steps_taken + 1) % config.replay_every
      )
      copy = None
      if replay:
        with untimed():
          copy = _copied(state)
      with memory.watched(f"taking step {steps_taken + 1}", _MEMORY):
        state, step_metrics = step(state, frozen, batch)
      metrics.tokens += batch.tokens.size
      steps_taken += 1
      if copy is not None:
        with untimed():
          _check_replay(
            steps_taken, (state, step_metrics), step(copy, frozen, batch)
          )
        untimed = contextlib.nullcontext
      if waiting is not None:
        metrics.add(waiting)
      waiting = step_metrics
      last = steps_taken == steps
      stop = signals.stop(steps_taken)
      save = (
        config.save_every is not None and not steps_taken % config.save_every
      )
      saves.poll()
      every = config.evaluate_every
      evaluates = every is not None and (last or not steps_taken % every)
      if (
        last or stop or save or evaluates or steps_taken % config.log_every == 0
      ):
        # Read now and not one step late: only finite states are saved.
        metrics.add(waiting)
        waiting = None
        latest = metrics.take(steps_taken)
        if evaluates and evaluate is not None:
          with watchdog.pause():
            latest = dataclasses.replace(latest, held_out=evaluate(state))
          metrics.start = time.monotonic()
        report(latest)
      watchdog.tick()
      if checkpoints is not None and (last or stop or save):
        with watchdog.pause():
          if not int(state.skipped):
            extra = {"data": data.state()}
            saves.save(steps_taken, state._asdict(), extra, last=last or stop)
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
def _differing(a: PyTree, b: PyTree) -> jax.Array:
  """Number of numbers that differ in two trees; NaN equals NaN."""
  differ = lambda x, y: jnp.sum(
    (x != y) & ~((x != x) & (y != y)), dtype=jnp.int32
  )
  return jax.tree.reduce(jnp.add, jax.tree.map(differ, a, b), jnp.int32(0))


def _check_replay(step: int, first: PyTree, second: PyTree) -> None:
  count = int(jax.device_get(_differing(first, second)))
  if count:
    raise ReplayError(
      "step",
      f"{count} numbers that differ when step {step} is computed again",
      "the same bits",
      "test the devices; the saved steps are from before it",
    )


class _Saves:
  """Saves of steps, of which `most_unsaved` in a row may fail."""

  def __init__(self, checkpoints: Any, config: LoopConfig):
    self._checkpoints, self._most = checkpoints, config.most_unsaved
    self._failed, self._is_open = 0, False

  def poll(self) -> None:
    """Counts the last save as failed if it has failed."""
    if self._checkpoints is not None:
      self._tolerate(self._checkpoints.poll)

  def save(self, step: int, tree: PyTree, extra: PyTree, *, last: bool) -> None:
    # Processes see a failure one step apart: after this wait all have seen it,
    # and no process saves before another knows.
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
    tokens: Tokens read since then.
    start: Time at which the clock of these steps began.
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
      values = jax.tree.map(float, jax.device_get(metrics))
    self._steps.append(values)
    if not values.finite:
      # On a mesh, a layer that could not be read is filled with NaN.
      raise_fault(self._faults)
    if values.wrong:
      raise DataError(
        "labels",
        f"{int(values.wrong)} outside of the vocabulary in one step",
        f"ids of the model, or {IGNORE_INDEX} for no label",
        "pass vocab= to ringjax.train.batch.place, which says where they are",
      )
    if not values.finite and values.skipped > self._most_skipped:
      raise NotFiniteError(
        "loss",
        f"{int(values.skipped)} steps in a row with loss {values.loss:g} and "
        f"gradient norm {values.gradient_norm:g}",
        "finite ones",
        "lower the learning rate, or look at the data; the saved steps are "
        "from before these",
      )

  def take(self, step: int) -> TrainingReport:
    """Makes the report after a step, and resets the metrics."""
    end = time.monotonic()
    finite: list[Any] = [x for x in self._steps if x.finite]
    labels = sum(x.weight for x in finite)
    last: Any = self._steps[-1]
    means = None
    if last.means is not None:
      sums = lambda name, field: sum(
        getattr(x.means[name], field) for x in finite
      )
      means = {
        name: sums(name, "total") / (sums(name, "count") or math.nan)
        for name in last.means
      }
    scores = None
    if last.scores is not None:
      steps_scores = [x.scores for x in finite]
      scores = ScoreStatistics(
        max((x.largest for x in steps_scores), default=math.nan),
        sum(x.clipped for x in steps_scores),
      )
    report = TrainingReport(
      step=step,
      loss=sum(x.loss * x.weight for x in finite) / (labels or math.nan),
      objective=last.objective,
      gradient_norm=last.gradient_norm,
      tokens=self.tokens,
      labels=float(labels),
      skipped=len(self._steps) - len(finite),
      seconds=end - self.start,
      first=self._first,
      experts=last.experts,
      choice=last.choice,
      policy=last.policy,
      means=means,
      predicted=last.predicted,
      scores=scores,
    )
    self.start, self._first = end, False
    self._steps, self.tokens = [], 0
    return report


class _Signals:
  """Records SIGTERM and SIGINT, which end the run; a second one kills it."""

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
    for signum, handler in self._before.items():
      signal.signal(signum, handler)

  def _record(self, signum: int, _: object) -> None:
    if self.received is not None:
      # The second signal ends the process at once.
      signal.signal(signum, signal.SIG_DFL)
      signal.raise_signal(signum)
    self.received = signum

  def _pass_on(self, signum: int, _: object) -> None:
    # With several processes JAX records SIGTERM, and agrees on a last step.
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
  """Ends a process whose step takes longer than a timeout."""

  def __init__(self, timeout_s: float | None):
    self._timeout_s = timeout_s
    # None until the first step has ended: compiling is not timed.
    self._timer: threading.Timer | None = None

  def __enter__(self) -> _Watchdog:
    return self

  def __exit__(self, *_: object) -> None:
    self._cancel()

  def tick(self) -> None:
    """Restarts the clock, at the end of a step."""
    self._cancel()
    if self._timeout_s is not None:
      self._timer = threading.Timer(self._timeout_s, self._give_up)
      self._timer.daemon = True
      self._timer.start()

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Stops the clock within the block."""
    was_running = self._timer is not None
    self._cancel()
    try:
      yield
    finally:
      if was_running:
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
