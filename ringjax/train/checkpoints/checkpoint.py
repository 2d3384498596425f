"""Checkpoints of training that survive kills, full disks and corrupt files.

Guarantees: a step exists if and only if its folder matches its manifest. Both
are synced to the disk before the folder gets its name, in one rename; deleting
begins by removing the name. So whenever the process dies, every step is there
completely or not at all. No bytes reach a model before they were compared with
the manifest, unless the caller turns that off.
Cost: `save` blocks the caller for a copy from the devices and, with several
processes, until all have called it; the rest happens in a thread, which reads
the written files once. `restore` reads a step twice, the second time from
memory if it fits.

Steps are in a folder, whose arrays Orbax writes and reads (`local_steps.py`),
or in an object storage, which has neither renames nor locks
(`object_steps.py`): there the objects come first and the manifest, in one
request, last. Parts that Orbax does not cover, each of which says why in its
file: digests (ringjax/train/checkpoints/manifest.py), names, lock and clean-up
of steps (checkpoint_directory.py), failures that all processes learn of
(process_group.py). This file replaces Orbax' manager: it chooses which steps
are kept, since damaged ones must not count, and its errors name one step, file
and remedy. All processes see the same root.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import os
import pathlib
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ringjax.checks import integer, one_of, positive_int
from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  OptionError,
  PeerError,
  RingjaxError,
  StorageError,
)
from ringjax.paths import as_path
from ringjax.train.checkpoints import leaves as leaves_lib
from ringjax.train.checkpoints import manifest as manifests
from ringjax.train.checkpoints.local_steps import LocalSteps
from ringjax.train.checkpoints.manifest import Leaf, Manifest
from ringjax.train.checkpoints.object_steps import ObjectSteps
from ringjax.train.checkpoints.process_group import ProcessGroup
from ringjax.train.checkpoints.step_storage import StepSaver, StepStorage

VERIFY = ("crc32", "full", "none")
TIMEOUT_S = 1200
_OPEN: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


class Checkpoints:
  """The saved steps of one training.

  Every process of `jax.distributed` makes one and calls `save`, `restore` and
  `close` at the same point; process 0 commits, cleans up and deletes. From its
  first `save` or `claim` until `close`, others on the same root can only read.

  Attributes:
    root: Absolute path of the folder, or its address.
    restored_step: Step that the last `restore` read, or None.
  """

  def __init__(
    self,
    root: str | os.PathLike[str],
    *,
    keep: int = 3,
    every_keep: int | None = None,
    asynchronous: bool = True,
    config: Mapping[str, Any] | None = None,
    timeout_s: int = TIMEOUT_S,
  ):
    """Opens a folder and removes what a killed process left there.

    Args:
      root: Folder of a local or mounted file system, made if missing; or an
        address, gs://bucket/folder or s3://bucket/folder.
      keep: Number of newest steps that are kept.
      every_keep: Steps that this divides are also kept, and never deleted.
      asynchronous: Whether `save` returns before the step is on the disk.
      config: JSON that identifies the training; steps of another config are not
        restored.
      timeout_s: Seconds that processes wait for each other.

    Raises:
      OptionError: If a value is out of range, or the root is an address that
        `ringjax.paths.as_path` refuses.
      StorageError: If the root is an address that cannot be reached.
    """
    self._keep = positive_int("keep", keep)
    if every_keep is not None:
      positive_int("every_keep", every_keep)
    self._every_keep = every_keep
    place = as_path(root, "root").absolute()
    self.root = (
      os.path.normpath(place) if isinstance(place, pathlib.Path) else str(place)
    )
    self.restored_step: int | None = None
    self._asynchronous = asynchronous
    self._config = manifests.fingerprint(_json("config", config))
    self._group = ProcessGroup(positive_int("timeout_s", timeout_s))
    self._steps: StepStorage = (
      LocalSteps(self.root, self._group)
      if isinstance(place, pathlib.Path)
      else ObjectSteps(place, self._group)
    )
    # The save in flight, or one that has ended and was not waited for.
    self._pending: concurrent.futures.Future[None] | None = None
    # Numbers of steps whose bytes do not match their manifest.
    self._damaged: set[int] = set()
    self._group.first(self._steps.open)
    _OPEN.add(self)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: types.TracebackType | None,
  ) -> None:
    # An error of the block comes before one of a save.
    hidden = () if kind is None else (CheckpointWriteError,)
    with contextlib.suppress(*hidden):
      self.close()

  # -------------------------------------------------------------------------
  # Saving
  # -------------------------------------------------------------------------

  def claim(self) -> None:
    """Keeps others from writing to the root, from now on until `close`.

    A training that calls this fails at its start, and not at its first save, if
    another one writes there.

    Raises:
      CheckpointWriteError: If another process writes there, or the folder
        cannot be written.
    """
    try:
      self._group.first(self._steps.acquire)
    except Exception as error:
      reason = str(getattr(error, "strerror", None) or error)
      in_use = isinstance(error, BlockingIOError | PeerError)
      raise CheckpointWriteError(
        "root",
        f"{self.root[-80:]} ({reason[:100]})",
        "a folder that no other process writes to"
        if in_use
        else "a folder that can be written to",
        "wait until the other process ends, or pass another root"
        if in_use
        else "free space there or change its permissions, or pass another",
        file=getattr(error, "filename", None),
      ) from error

  def save(
    self, step: int, tree: PyTree, extra: Mapping[str, Any] | None = None
  ) -> None:
    """Saves a step; one of that number is replaced.

    When it returns, the arrays may be donated. A save in flight is waited for
    first. The last one needs `wait` or `close` before the program ends:
    otherwise it may be lost, and only a line on stderr reports it.

    Args:
      step: Number of the step, from 0 on.
      tree: Any pytree of JAX arrays, of any shardings; NumPy arrays and
        Python's bool, int and float, which must be equal in all processes.
      extra: JSON that belongs to the step, like the position in the data.

    Raises:
      CheckpointWriteError: If this step or, if it was asynchronous, the one
        before could not be saved.
      OptionError: If `step` or `extra` cannot be saved.
      InputTypeError: If a leaf cannot be saved.
      PeerError: If the processes do not save the same.
    """
    self.wait()
    step = integer("step", step, least=0)
    extra = _json("extra", extra)
    values = leaves_lib.named(tree)
    leaves = _leaves(values)
    for name, x in values.items():
      leaves_lib.check_alive(name, x)
    self._group.check_equal(f"save of step {step}", [step, extra, leaves])
    newer = [x for x in self.steps() if x > step and x not in self._damaged]
    if newer and self._group.rank == 0:
      warnings.warn(
        f"step {step} is saved while {newer[-1]} exists, which `restore` will "
        "find first; delete the newer steps to continue from here",
        RuntimeWarning,
        stacklevel=2,
      )
    # A new name: a failed save's threads may still write to its folder.
    attempt = next(self._group.numbers)
    with _write_errors(step, self.root):
      # All processes learn here whether the folder can be written.
      draft = self._group.first(lambda: self._prepare(step, attempt), step)
    saver, failure = None, None
    try:
      saver = self._steps.save(draft, values, leaves)
    except Exception as error:
      # The thread reports it to the other processes, as any failure.
      failure = error
    pool = concurrent.futures.ThreadPoolExecutor(1, f"ringjax saves {step}")
    self._pending = pool.submit(
      self._finish, step, draft, saver, failure, leaves, extra
    )
    pool.shutdown(wait=False)
    if not self._asynchronous:
      self.wait()

  def poll(self) -> None:
    """Raises at once if a save has failed; called before every training step.

    Raises:
      CheckpointWriteError: If a save has failed; this is raised once.
    """
    if self._pending is not None and self._pending.done():
      self.wait()

  def wait(self) -> None:
    """Waits until no save is in flight.

    Raises:
      CheckpointWriteError: If a save has failed; this is raised once.
    """
    if self._pending is not None:
      concurrent.futures.wait([self._pending])
      save, self._pending = self._pending, None
      save.result()

  def close(self) -> None:
    """Waits as `wait` does, and lets others write to the root.

    Raises:
      CheckpointWriteError: If a save has failed.
    """
    try:
      self.wait()
    finally:
      self._steps.release()

  def delete(self, step: int) -> None:
    """Deletes a step.

    Raises:
      CheckpointWriteError: If it cannot be deleted, or a save has failed.
      OptionError: If there is no such step.
    """
    self.wait()
    _check_known(step, self._steps.steps())

    def delete() -> None:
      self._steps.acquire()
      self._steps.delete(step)

    with _write_errors(step, self.root):
      self._group.first(delete, step)

  def _prepare(self, step: int, attempt: int) -> str:
    """Makes room for a step; returns where it is written. Process 0 only."""
    self._steps.acquire()
    moved_to = self._steps.prepare(step)
    if moved_to is not None:
      warnings.warn(
        f"a folder of step {step} without a manifest was in the way; it is "
        f"kept as {moved_to}: delete it, or look at what removed its manifest",
        RuntimeWarning,
        stacklevel=2,
      )
    return self._steps.draft(step, attempt)

  def _finish(
    self,
    step: int,
    draft: str,
    saver: StepSaver | None,
    failure: Exception | None,
    leaves: Mapping[str, Leaf],
    extra: dict[str, Any],
  ) -> None:
    """Completes a save in a thread: from the host copy to a committed step."""

    def written() -> None:
      """Waits until this process has written its part; on each process."""
      if saver is None:
        assert failure is not None
        raise failure
      saver.wait()

    def commit() -> None:
      """Commits the step; process 0 only."""
      manifest = Manifest(
        step=step,
        files=files,
        leaves=leaves,
        extra=extra,
        config=self._config,
        pieces=pieces,
      )
      self._steps.commit(draft, manifest)
      self._retire(step)

    try:
      with _write_errors(step, draft), _closed(saver):
        self._group.all(written, step)
        assert saver is not None
        files, pieces = saver.contents()
        self._group.first(commit, step)
    except CheckpointWriteError:
      if self._group.rank == 0:
        # Threads may still be writing; their remains are removed before the
        # next save.
        with contextlib.suppress(OSError):
          self._steps.clean_up()
      raise

  def _retire(self, saved: int) -> None:
    """Deletes steps that should not be kept."""
    self._damaged.discard(saved)
    intact = [x for x in self.steps() if x not in self._damaged]
    newest, every = intact[-self._keep :], self._every_keep
    for step in self._steps.steps():
      # A damaged step stays until enough others are newer.
      outdated = (
        len(newest) == self._keep and step < newest[0] and step != saved
      )
      if not outdated or (every is not None and step % every == 0):
        continue
      # A step of a newer ringjax is never deleted by this one.
      with contextlib.suppress(CheckpointFormatError):
        with contextlib.suppress(CheckpointCorruptError):
          self._steps.read_manifest(step)
        self._steps.delete(step)

  # -------------------------------------------------------------------------
  # Listing
  # -------------------------------------------------------------------------

  def steps(self) -> list[int]:
    """Steps that exist, in order; compares sizes, not bytes."""
    steps = []
    for step in self._steps.steps():
      with contextlib.suppress(CheckpointCorruptError, CheckpointFormatError):
        self._steps.check(self._steps.read_manifest(step), "none")
        steps.append(step)
    return steps

  def latest(self) -> int | None:
    """The newest of `steps`, or None."""
    return max(self.steps(), default=None)

  # -------------------------------------------------------------------------
  # Restoring
  # -------------------------------------------------------------------------

  def holds(self, like: PyTree = None) -> bool:
    """Whether a step is saved, as process 0 sees it. Reads no array.

    Args:
      like: Expected tree of the newest step with a readable manifest, as in
        `restore`.

    Raises:
      CheckpointMismatchError, InputTypeError, PeerError: See `restore`.
    """
    numbers = self._group.first(self._steps.candidates)
    if like is not None:
      wanted = _leaves(leaves_lib.named(like))
      for number in reversed(numbers):
        with contextlib.suppress(CheckpointCorruptError):
          self._compare(self._verified(number, "none"), wanted)
          break
    return bool(numbers)

  def restore(
    self, step: int | None = None, *, like: PyTree, verify: str = "crc32"
  ) -> tuple[Any, dict[str, Any]] | None:
    """Reads a step.

    Args:
      step: Number of the step; default: the newest that is intact. A warning
        names newer ones that are damaged.
      like: Tree like the one that was saved. In place of JAX arrays,
        `jax.ShapeDtypeStruct` or arrays, with the wanted shardings; without a
        sharding, the array goes to the first device. NumPy arrays and Python's
        numbers stand for their kind.
      verify: Comparison of files before anything is read: "crc32"; "full", by
        SHA-256, too; "none", by their sizes alone.

    Returns:
      (tree, `extra` of the save); None if nothing was ever saved here.
      `restored_step` is the number of the step.

    Raises:
      CheckpointCorruptError: If the given step, or every step there is, is
        damaged.
      CheckpointMismatchError: If a leaf's path, shape or dtype is not that of
        `like`, or the step is of another config.
      CheckpointFormatError: If a newer ringjax wrote the step.
      OptionError: If there is no such step.
      InputTypeError: If a leaf of `like` is not an array, shape or number.
      MeshError: If a sharding does not fit its array.
      PeerError: If the processes do not restore the same.
    """
    one_of("verify", verify, VERIFY)
    if self._pending is not None:
      # `poll` raises the errors of that save.
      concurrent.futures.wait([self._pending])
    likes = leaves_lib.named(like)
    wanted = _leaves(likes)
    targets = {name: leaves_lib.target(name, x) for name, x in likes.items()}
    # The steps that process 0 sees count.
    numbers = self._group.first(self._steps.candidates)
    if step is not None:
      _check_known(step, numbers)
      numbers = [step]
    self._group.check_equal("restore", [numbers, verify])
    if not numbers:
      return None
    faults: list[CheckpointCorruptError] = []
    for number in reversed(numbers):
      try:
        manifest = self._verified(number, verify)
        self._compare(manifest, wanted)
        arrays = self._read(manifest, targets, verify)
      except CheckpointCorruptError as fault:
        if step is not None:
          raise
        faults.append(fault)
        self._damaged.add(number)
        continue
      for fault in faults:
        warnings.warn(
          f"passed over, going back to step {number}: {fault}",
          RuntimeWarning,
          stacklevel=2,
        )
      self.restored_step = number
      leaves = [
        leaves_lib.finished(x, targets[name], arrays.get(name))
        for name, x in likes.items()
      ]
      return jax.tree.unflatten(jax.tree.structure(like), leaves), dict(
        manifest.extra
      )
    raise CheckpointCorruptError(
      "root",
      f"{len(faults)} step(s), all damaged; the newest: {faults[0].file}",
      "one that is what was written",
      "bring its files back, or pass an empty root to start again",
      file=faults[0].file,
    )

  def _verified(self, step: int, verify: str) -> Manifest:
    """The manifest of a step, once its files match it."""
    manifests_read: list[Manifest] = []

    def check() -> None:
      manifests_read.append(self._steps.read_manifest(step))
      self._steps.check(manifests_read[0], verify)

    self._group.all(check, step)
    return manifests_read[0]

  def _compare(self, manifest: Manifest, wanted: Mapping[str, Leaf]) -> None:
    """Refuses a tree whose leaves would be cast, cut or left out."""
    label = f"step {manifest.step}"
    if manifest.config != self._config:
      raise CheckpointMismatchError(
        f"{label}: config",
        "one that differs from that of this training",
        "the config that the step was saved with",
        "pass that config, or another root",
      )
    names = dict.fromkeys((*wanted, *manifest.leaves))
    differ = [x for x in names if manifest.leaves.get(x) != wanted.get(x)]
    if differ:
      have, want = manifest.leaves.get(differ[0]), wanted.get(differ[0])
      raise CheckpointMismatchError(
        f"{label}: {_listed(differ)}",
        f"{have or 'a leaf that is missing on disk'}, of {len(differ)} that "
        "differ",
        f"{want or 'none, since it is not in `like`'}",
        "make `like` from what was saved, and cast it then",
        leaves=differ,
      )

  def _read(
    self, manifest: Manifest, targets: Mapping[str, Any], verify: str
  ) -> dict[str, Any]:
    """Reads the arrays of a step that have elements."""
    wanted = {
      k: x for k, x in targets.items() if 0 not in manifest.leaves[k].shape
    }
    arrays: dict[str, Any] = {}
    if wanted:
      self._group.all(
        lambda: arrays.update(self._steps.read(manifest, wanted, verify)),
        manifest.step,
      )
    return arrays


def _at_exit() -> None:
  """Prints the failure of a save whose program ends without `close`."""
  for checkpoints in list(_OPEN):
    try:
      checkpoints.wait()
    except CheckpointWriteError as error:
      print(f"ringjax: {error}", file=sys.stderr)


# `_register_atexit` has no public name. Python's own `atexit` is too late:
# nothing can hand work to other threads by then, as Orbax does. From Python
# 3.12 on no thread can begin even here, so a save that is not far is lost and
# printed.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)


def _check_known(step: int, known: list[int]) -> None:
  if type(step) is not int or step not in known:
    shown = ", ".join(map(str, known[-8:])) or "none"
    raise OptionError(
      "step", repr(step), f"one of those saved: {shown}", "pass one of them"
    )


def _leaves(values: Mapping[str, Any]) -> dict[str, Leaf]:
  return {name: leaves_lib.leaf_of(name, x) for name, x in values.items()}


def _listed(names: list[str]) -> str:
  shown = ", ".join(n if len(n) <= 60 else f"...{n[-57:]}" for n in names[:2])
  return shown + ", ..." * (len(names) > 2)


def _json(name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
  """A deep copy of a JSON value, which later changes don't reach."""
  try:
    copy = json.loads(manifests.canonical(dict(value or {})))
    if copy != dict(value or {}):
      raise ValueError("a tuple, or a key that is no string")
    return copy
  except (TypeError, ValueError, RecursionError) as error:
    raise OptionError(
      name, str(error), "JSON", "put arrays into the tree"
    ) from None


@contextlib.contextmanager
def _closed(
  saver: StepSaver | None,
) -> Iterator[None]:
  """Closes a saver after the block, whatever that raises."""
  try:
    yield
  finally:
    if saver is not None:
      with contextlib.suppress(Exception):
        saver.close()


@contextlib.contextmanager
def _write_errors(step: int, folder: str) -> Iterator[None]:
  """Converts the many errors that a disk can cause into one."""
  try:
    yield
  except CheckpointWriteError:
    raise
  except Exception as error:
    file, reason = getattr(error, "filename", None), ""
    if isinstance(error, OSError):
      file, reason = file or folder, str(error.strerror or error)
    reason = reason or " ".join(str(error).split()) or "no reason"
    file_text = f" ({str(file)[-60:]})" if file else ""
    remedy = "make room on the disk or repair it; steps that exist are intact"
    if isinstance(error, StorageError):
      remedy = "see that error; steps that exist are intact"
    elif isinstance(error, RingjaxError):
      remedy = "look at the processes; steps that exist are intact"
    raise CheckpointWriteError(
      f"step {step}",
      f"{type(error).__name__}: {reason[:100]}{file_text}",
      "all its files on the disk",
      remedy,
      file=file,
      step=step,
    ) from error
