"""The loop: what is reported, saved, passed over and stopped."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import wait

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax as rj
from ringjax.data.batches.loader import Loader
from ringjax.data.batches.packing import Documents
from ringjax.errors import (
  CheckpointWriteError,
  NotFiniteError,
  OptionError,
  OutOfMemoryError,
  ReplayError,
)
from ringjax.models import checkpoint
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train import loop, step
from ringjax.train.checkpoints.checkpoint import Checkpoints
from tests.train.test_step import CONFIG

LENGTH, ROWS = 16, 2


def text() -> Documents:
  draw = np.random.default_rng(0)
  sizes = draw.integers(5, 40, 60)
  return Documents([draw.integers(0, 48, n) for n in sizes])


class Training:
  """A small model and its text, on as many devices as a mesh has."""

  def __init__(self, mesh=None):
    self.attend = ContextParallel(
      mesh=mesh, axis=mesh and "seq", layout=rj.Striped()
    )
    self.optimizer = optax.adamw(1e-2)
    self.step = step.make_step(self.optimizer, self.attend, step.Objective())

  def start(self) -> step.TrainState:
    model = checkpoint.create(CONFIG, seed=3, mesh=self.attend.mesh)
    return step.start(self.optimizer, model, self.attend.mesh)

  def run(self, steps: int, data=None, **more) -> loop.FitResult:
    if data is None:
      data = Loader(text(), length=LENGTH, batch=ROWS, seed=5)
    config = {"log_every": 3} | more.pop("config", {})
    state = self.start()
    if more.get("checkpoints") is not None:
      found = more["checkpoints"].restore(like=state._asdict())
      if found is not None:
        state = step.TrainState(**found[0])
        data.restore(found[1]["data"])
    return loop.fit(
      state,
      None,
      data,
      step=more.pop("step", self.step),
      place=lambda rows: batches.place(rows, self.attend),
      steps=steps,
      config=loop.LoopConfig(**config),
      **more,
    )


@pytest.fixture(scope="module")
def training() -> Training:
  return Training(rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4]))


def same(a, b) -> bool:
  a, b = (jax.tree.leaves(jax.device_get(x)) for x in (a, b))
  return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.long
def test_reports(training):
  reports = []
  ended = training.run(8, report=reports.append)
  assert [r.step for r in reports] == [3, 6, 8]
  assert ended.stopped is None and int(ended.state.step) == 8
  assert [r.first for r in reports] == [True, False, False]
  loader = Loader(text(), length=LENGTH, batch=ROWS, seed=5)
  weights = [loader.at(n).weights.sum() for n in range(8)]
  labels = [sum(weights[:3]), sum(weights[3:6]), sum(weights[6:])]
  assert [r.labels for r in reports] == pytest.approx(labels)
  assert [r.tokens for r in reports] == [n * LENGTH * ROWS for n in (3, 3, 2)]
  assert all(r.seconds > 0 and r.tokens_per_s > 0 for r in reports)
  # The mean over the steps of a report, each by its weight.
  again, figures = training.start(), []
  for n in range(3):
    again, one = training.step(
      again, None, batches.place(loader.at(n), training.attend)
    )
    figures.append((float(one.loss), float(one.weight)))
  mean = sum(a * w for a, w in figures) / sum(w for _, w in figures)
  assert reports[0].loss == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
  "parts",
  [
    (4, 10),
    pytest.param((1, 2, 10), marks=pytest.mark.slow),
    pytest.param((9, 10), marks=pytest.mark.slow),
  ],
)
def test_an_interrupted_run_ends_where_another_does(training, parts, tmp_path):
  whole = training.run(10)
  for number, steps in enumerate(parts):
    with Checkpoints(tmp_path, asynchronous=bool(number % 2)) as saved:
      last = training.run(steps, checkpoints=saved, config={"save_every": 3})
    assert int(last.state.step) == steps
  assert same(whole.state, last.state)


@pytest.mark.slow
def test_another_mesh_goes_on(training, tmp_path):
  other = Training()
  with Checkpoints(tmp_path) as saved:
    training.run(4, checkpoints=saved)
  with Checkpoints(tmp_path) as saved:
    ended = other.run(6, checkpoints=saved)
  whole = training.run(6)
  pairs = zip(
    jax.tree.leaves(jax.device_get(whole.state)),
    jax.tree.leaves(jax.device_get(ended.state)),
    strict=True,
  )
  for a, b in pairs:
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


class Poisoned:
  """Data whose weights are infinite in some steps."""

  def __init__(self, bad):
    self.inner = Loader(text(), length=LENGTH, batch=ROWS, seed=5)
    self.bad = bad
    self.state, self.restore = self.inner.state, self.inner.restore

  def __next__(self):
    number = self.inner.step
    rows = next(self.inner)
    if number in self.bad:
      rows = rows._replace(weights=np.full_like(rows.weights, np.inf))
    return rows


def test_steps_that_are_not_finite_are_passed_over(training):
  reports = []
  ended = training.run(9, Poisoned({2, 5, 6}), report=reports.append)
  assert [r.skipped for r in reports] == [1, 1, 1]
  assert all(np.isfinite(r.loss) for r in reports)
  assert int(ended.state.step) == 9


def test_too_many_of_them_end_it_before_a_save(training, tmp_path):
  bad = set(range(6, 20))
  with (
    Checkpoints(tmp_path) as saved,
    pytest.raises(NotFiniteError, match="3 steps in a row"),
  ):
    training.run(
      20,
      Poisoned(bad),
      checkpoints=saved,
      config={"save_every": 2, "most_skipped": 2},
    )
  with Checkpoints(tmp_path) as saved:
    assert saved.steps() == [2, 4, 6]
    found, _ = saved.restore(like=training.start()._asdict())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found["params"]))


@pytest.mark.parametrize(
  "number",
  [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_signals_end_it_behind_a_step(training, tmp_path, number):
  reports = []

  def report(one):
    reports.append(one.step)
    if one.step == 4:
      signal.raise_signal(number)

  before = signal.getsignal(number)
  with Checkpoints(tmp_path) as saved:
    ended = training.run(
      50, checkpoints=saved, report=report, config={"log_every": 2}
    )
    assert ended.stopped == number
    assert saved.steps() == [int(ended.state.step)] == [5]
  assert reports == [2, 4, 5]
  assert signal.getsignal(number) is before
  # And from there to the end, as if nothing had been.
  with Checkpoints(tmp_path) as saved:
    after = training.run(8, checkpoints=saved)
  assert same(after.state, training.run(8).state)


def test_in_a_thread_signals_are_left_alone(training):
  before = signal.getsignal(signal.SIGTERM)
  found = []
  thread = threading.Thread(target=lambda: found.append(training.run(1)))
  thread.start()
  thread.join()
  assert found and signal.getsignal(signal.SIGTERM) is before


def test_a_failed_save_ends_it(training, tmp_path, monkeypatch):
  class Full(Checkpoints):
    def poll(self):
      if self.polled:
        raise OSError("no space left")
      self.polled = True

    polled = False

  with Full(tmp_path) as saved, pytest.raises(OSError, match="no space"):
    training.run(9, checkpoints=saved)


@pytest.mark.parametrize("late", [False, True])
def test_memory_that_runs_out_says_what_to_change(training, monkeypatch, late):
  """In the call, or where its figures are waited for."""

  def full(*_, **__):
    raise jax.errors.JaxRuntimeError(
      "RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."
    )

  get = jax.device_get
  if late:
    of_step = lambda x: full() if isinstance(x, step.StepMetrics) else get(x)
    monkeypatch.setattr(jax, "device_get", of_step)
  else:
    monkeypatch.setattr(training, "step", full)
  with pytest.raises(OutOfMemoryError, match="remat='nothing'") as caught:
    training.run(2)
  assert caught.value.nbytes == 123456789


HANGS = """
  import time
  from ringjax.train import loop
  from ringjax.train.batch import Batch
  from ringjax.train.step import StepMetrics, TrainState
  import jax.numpy as jnp
  import numpy as np

  class Rows:
    def __next__(self): return None
    def state(self): return {}

  zero = jnp.int32(0)
  figures = StepMetrics(*(np.float32(1),) * 6)._replace(skipped=np.float32(0))

  def step(state, frozen, batch):
    taken = int(state.step)
    print("step", taken, flush=True)
    time.sleep(100000 if taken == 3 else 0.01)
    return state._replace(step=state.step + 1), figures

  loop.fit(
    TrainState(zero, {}, {}, zero), None, Rows(), step=step,
    place=lambda x: Batch(np.zeros(2), None, None),
    steps=10, config=loop.LoopConfig(timeout_s=6.0),
  )
"""


@pytest.mark.long
def test_a_step_that_hangs_is_given_up():
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(HANGS)],
    capture_output=True,
    text=True,
    timeout=300,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == loop.STUCK
  assert "step 3" in done.stdout and "step 4" not in done.stdout
  assert "CollectiveTimeoutError: step: got no end" in done.stderr
  assert "wanted one within 6 s" in done.stderr
  # Where it hangs.
  assert "in step" in done.stderr


@pytest.mark.long
def test_a_first_step_may_take_its_time():
  calls = []

  class Rows:
    def __next__(self):
      return None

    def state(self):
      return {}

  def slow(state, frozen, batch):
    calls.append(1)
    time.sleep(6.5 if len(calls) == 1 else 0.0)
    figures = step.StepMetrics(*(np.float32(1),) * 6)
    return state._replace(step=state.step + 1), figures._replace(
      skipped=np.float32(0)
    )

  state = step.TrainState(jnp.int32(0), {}, {}, jnp.int32(0))
  loop.fit(
    state,
    None,
    Rows(),
    step=slow,
    place=lambda rows: batches.Batch(np.zeros(2), None, None),
    steps=3,
    config=loop.LoopConfig(timeout_s=6.0),
  )
  assert len(calls) == 3


def test_steps_computed_twice_change_nothing(training):
  plain = training.run(4)
  # Shorter than the first replay takes, which compiles.
  twice = training.run(4, config={"replay_every": 2})
  assert same(plain.state, twice.state)


@pytest.mark.parametrize("at", [2, 4])
def test_a_device_that_errs_in_silence_is_found(training, tmp_path, at):
  calls = []

  def errs(state, frozen, batch):
    calls.append(1)
    after, figures = training.step(state, frozen, batch)
    # Steps 1, 2, 2 again, 3, 4, 4 again: one bit of one number.
    if len(calls) == {2: 3, 4: 5}[at]:
      flip = lambda x: x.at[(0,) * x.ndim].set(
        jnp.nextafter(x[(0,) * x.ndim], jnp.float32(9.0))
      )
      params = jax.tree.leaves(after.params)
      params[0] = flip(params[0])
      tree = jax.tree.structure(after.params)
      after = after._replace(params=jax.tree.unflatten(tree, params))
    return after, figures

  with Checkpoints(tmp_path / "saved") as saved:
    with pytest.raises(ReplayError, match=f"step {at} is computed again"):
      training.run(
        6,
        step=errs,
        checkpoints=saved,
        config={"replay_every": 2, "save_every": 1},
      )
    # Nothing of the step, nor of what came after it.
    saved.wait()
    assert max(saved.steps()) == at - 1


class FullDisk:
  """Has no room for the saves of some steps."""

  def __init__(self, monkeypatch, *steps: int):
    self._steps, self._sync = steps, os.fsync
    self._is_full = False
    monkeypatch.setattr(os, "fsync", self)

  def __call__(self, file) -> None:
    if self._is_full:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    self._sync(file)

  def before(self, taken: int, saved: Checkpoints) -> None:
    """Before each step; a save of the step before has ended."""
    if saved._pending is not None:
      wait([saved._pending])
    self._is_full = taken + 1 in self._steps


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("full", "most", "kept"),
  [
    ((2,), 1, [1, 3, 4]),
    ((1, 2), 2, [3, 4]),
    # Not in a row.
    ((1, 3), 1, [2, 4]),
  ],
)
def test_goes_on_over_a_failed_save(
  full, most, kept, training, tmp_path, monkeypatch
):
  disk = FullDisk(monkeypatch, *full)
  with Checkpoints(tmp_path / "saved") as saved:
    with pytest.warns(RuntimeWarning, match="in a row") as warned:
      ended = training.run(
        4,
        checkpoints=saved,
        on_step=lambda taken: disk.before(taken, saved),
        config={"save_every": 1, "most_unsaved": most},
      )
    assert [
      f"step {n}" in str(w.message) for n, w in zip(full, warned, strict=True)
    ]
    assert saved.steps() == kept
  assert same(ended.state, training.run(4).state)


@pytest.mark.long
@pytest.mark.parametrize(
  ("full", "most", "kept"),
  [
    ((2,), 0, [1]),
    ((2, 3), 1, [1]),
    # None comes after the last one.
    ((4,), 5, [1, 2, 3]),
  ],
)
def test_ends_at_a_failed_save(
  full, most, kept, training, tmp_path, monkeypatch
):
  disk = FullDisk(monkeypatch, *full)
  with Checkpoints(tmp_path / "saved") as saved, warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    with pytest.raises(CheckpointWriteError, match=f"step {full[-1]}"):
      training.run(
        4,
        checkpoints=saved,
        on_step=lambda taken: disk.before(taken, saved),
        config={"save_every": 1, "most_unsaved": most},
      )
    assert saved.steps() == kept


@pytest.mark.parametrize(
  "wrong",
  [
    {"log_every": 0},
    {"save_every": 0},
    {"most_skipped": 0},
    {"most_unsaved": -1},
    {"most_unsaved": True},
    {"timeout_s": 0.0},
  ],
)
def test_settings_out_of_range(wrong):
  with pytest.raises(OptionError, match=next(iter(wrong))):
    loop.LoopConfig(**wrong)


def test_no_steps(training):
  with pytest.raises(OptionError, match="steps"):
    training.run(0)
