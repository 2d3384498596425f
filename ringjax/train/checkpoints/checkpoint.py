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

Orbax writes and reads the arrays, from all processes and in its own threads.
Parts that Orbax does not cover, each of which says why in its file: digests
(ringjax/train/checkpoints/manifest.py), names, lock and clean-up of steps
(checkpoint_directory.py), failures that all processes learn of
(process_group.py). This file replaces Orbax' manager: it chooses which steps
are kept, since damaged ones must not count, and its errors name one step, file
and remedy. All processes see the same root.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from ringjax.checks import integer, local_path, one_of, positive_int
from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  OptionError,
  PeerError,
  RingjaxError,
)
from ringjax.train.checkpoints import leaves as leaves_lib
from ringjax.train.checkpoints import manifest as manifests
from ringjax.train.checkpoints.checkpoint_directory import CheckpointDirectory
from ringjax.train.checkpoints.manifest import Leaf, Manifest
from ringjax.train.checkpoints.process_group import ProcessGroup

VERIFY = ("crc32", "full", "none")
TIMEOUT_S = 1200
_OPEN: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


def _is_shown(record: logging.LogRecord) -> bool:
  """False for the dozens of lines that Orbax logs at INFO in each save."""
  orbax = os.path.dirname(ocp.__file__)
  return record.levelno > logging.INFO or orbax not in record.pathname


# Orbax logs by absl's logger, which others use too.
logging.getLogger("absl").addFilter(_is_shown)


class Checkpoints:
  """The saved steps of one training.

  Every process of `jax.distributed` makes one and calls `save`, `restore` and
  `close` at the same point; process 0 commits, cleans up and deletes. From its
  first `save` or `claim` until `close`, others on the same root can only read.

  Attributes:
    root: Absolute path of the folder.
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
      root: Folder of a local or mounted file system; made if missing.
      keep: Number of newest steps that are kept.
      every_keep: Steps that this divides are also kept, and never deleted.
      asynchronous: Whether `save` returns before the step is on the disk.
      config: JSON that identifies the training; steps of another config are not
        restored.
      timeout_s: Seconds that processes wait for each other.

    Raises:
      OptionError: If a value is out of range, or the root is an address such
        as gs://bucket.
    """
    self._keep = positive_int("keep", keep)
    if every_keep is not None:
      positive_int("every_keep", every_keep)
    self._every_keep = every_keep
    self.root = os.path.abspath(local_path("root", root))
    self.restored_step: int | None = None
    self._asynchronous = asynchronous
    self._config = manifests.fingerprint(_json("config", config))
    self._group = ProcessGroup(positive_int("timeout_s", timeout_s))
    self._directory = CheckpointDirectory(self.root)
    # The save in flight, or one that has ended and was not waited for.
    self._pending: concurrent.futures.Future[None] | None = None
    # Numbers of steps whose bytes do not match their manifest.
    self._damaged: set[int] = set()
    self._group.first(self._directory.open)
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
      self._group.first(self._directory.acquire)
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
    folder = self._directory.draft(step, attempt)
    with _write_errors(step, folder):
      # All processes learn here whether the folder can be written.
      self._group.first(lambda: self._prepare(step), step)
    saver, failure = None, None
    try:
      saver = self._saver()
      saver.save(
        folder,
        args=ocp.args.StandardSave(
          {
            name: leaves_lib.copied(x)
            for name, x in values.items()
            if 0 not in leaves[name].shape
          }
          # Orbax cannot save empty trees.
          or {"%": np.zeros((), np.int8)}
        ),
      )
    except Exception as error:
      # The thread reports it to the other processes, as any failure.
      failure = error
    pool = concurrent.futures.ThreadPoolExecutor(1, f"ringjax saves {step}")
    self._pending = pool.submit(
      self._finish, step, folder, saver, failure, leaves, extra
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
      self._directory.release()

  def delete(self, step: int) -> None:
    """Deletes a step.

    Raises:
      CheckpointWriteError: If it cannot be deleted, or a save has failed.
      OptionError: If there is no such step.
    """
    self.wait()
    _check_known(step, self._directory.steps())

    def delete() -> None:
      self._directory.acquire()
      self._directory.delete(step)

    with _write_errors(step, self.root):
      self._group.first(delete, step)

  def _prepare(self, step: int) -> None:
    """Makes room for a new step; process 0 only."""
    self._directory.acquire()
    moved_to = self._directory.prepare(step)
    if moved_to is not None:
      warnings.warn(
        f"a folder of step {step} without a manifest was in the way; it is "
        f"kept as {moved_to}: delete it, or look at what removed its manifest",
        RuntimeWarning,
        stacklevel=2,
      )

  def _saver(
    self,
  ) -> Any:
    """A new Orbax saver for each save: an error leaves no state in it."""
    options = self._group.options()
    return ocp.AsyncCheckpointer(
      ocp.StandardCheckpointHandler(multiprocessing_options=options),
      async_options=ocp.options.AsyncOptions(
        timeout_secs=self._group.timeout_s
      ),
      multiprocessing_options=options,
    )

  def _finish(
    self,
    step: int,
    folder: str,
    saver: Any,
    failure: Exception | None,
    leaves: Mapping[str, Leaf],
    extra: dict[str, Any],
  ) -> None:
    """Completes a save in a thread: from the host copy to a committed step."""

    def written() -> None:
      """Waits for Orbax' second half; on each process."""
      if failure is not None:
        raise failure
      saver.wait_until_finished()

    def digest() -> list[manifests.File]:
      """Syncs and reads this process' share of the files."""
      own_files = self._group.share(files)
      return [manifests.digest(folder, path, sync=True) for path in own_files]

    def commit() -> None:
      """Commits the step; process 0 only."""
      manifests.sync_folders(folder)
      file_records = sorted(itertools.chain(*digests))
      manifest = Manifest(
        step=step,
        files=tuple(manifests.File(*x) for x in file_records),
        leaves=leaves,
        extra=extra,
        config=self._config,
      )
      self._directory.commit(folder, manifest)
      self._retire(step)

    try:
      with _write_errors(step, folder), _closed(saver):
        self._group.all(written, step)
        # One list for all: a mounted folder may look older on other processes.
        files = self._group.first(lambda: manifests.files_of(folder), step)
        digests = self._group.all(digest, step)
        self._group.first(commit, step)
    except CheckpointWriteError:
      if self._group.rank == 0:
        # Orbax may still be writing on other threads; its remains are removed
        # before the next save.
        with contextlib.suppress(OSError):
          self._directory.clean_up()
      raise

  def _retire(self, saved: int) -> None:
    """Deletes steps that should not be kept."""
    self._damaged.discard(saved)
    intact = [x for x in self.steps() if x not in self._damaged]
    newest, every = intact[-self._keep :], self._every_keep
    for step in self._directory.steps():
      # A damaged step stays until enough others are newer.
      outdated = (
        len(newest) == self._keep and step < newest[0] and step != saved
      )
      if not outdated or (every is not None and step % every == 0):
        continue
      # A step of a newer ringjax is never deleted by this one.
      with contextlib.suppress(CheckpointFormatError):
        with contextlib.suppress(CheckpointCorruptError):
          Manifest.read(self._directory.manifest(step), step)
        self._directory.delete(step)

  # -------------------------------------------------------------------------
  # Listing
  # -------------------------------------------------------------------------

  def steps(self) -> list[int]:
    """Steps that exist, in order; compares sizes, not bytes."""
    steps = []
    for step in self._directory.steps():
      with contextlib.suppress(CheckpointCorruptError, CheckpointFormatError):
        manifest = Manifest.read(self._directory.manifest(step), step)
        manifest.check_sizes(self._directory.folder(step))
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
    numbers = self._group.first(self._directory.candidates)
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
    numbers = self._group.first(self._directory.candidates)
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
    folder = self._directory.folder(step)
    manifests_read: list[Manifest] = []

    def check() -> None:
      manifests_read.append(Manifest.read(self._directory.manifest(step), step))
      manifests_read[0].check_sizes(folder)
      if verify != "none":
        for file in self._group.share(manifests_read[0].files):
          manifests_read[0].check_file(folder, file, verify=verify)

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
      )

  def _read(
    self, manifest: Manifest, targets: Mapping[str, Any], verify: str
  ) -> dict[str, Any]:
    """Reads the arrays of a step that have elements."""
    wanted = {
      k: x for k, x in targets.items() if 0 not in manifest.leaves[k].shape
    }
    folder, arrays = self._directory.folder(manifest.step), {}

    def read() -> None:
      options = self._group.options()
      reader = ocp.Checkpointer(
        ocp.StandardCheckpointHandler(multiprocessing_options=options),
        multiprocessing_options=options,
      )
      try:
        args = ocp.args.StandardRestore(wanted)
        arrays.update(reader.restore(folder, args=args))
      except (MemoryError, jax.errors.JaxRuntimeError):
        raise
      except Exception as error:
        if verify != "none":
          raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        raise manifests.corrupt(manifest.step, folder, reason) from error
      finally:
        reader.close()

    if wanted:
      self._group.all(read, manifest.step)
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
  saver: Any,
) -> Iterator[None]:
  """Closes Orbax' saver after the block, whatever that raises."""
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
      file, reason = file or folder, str(error.strerror)
    reason = reason or " ".join(str(error).split()) or "no reason"
    file_text = f" ({str(file)[-60:]})" if file else ""
    remedy = "make room on the disk or repair it; steps that exist are intact"
    if isinstance(error, RingjaxError):
      remedy = "look at the processes; steps that exist are intact"
    raise CheckpointWriteError(
      f"step {step}",
      f"{type(error).__name__}: {reason[:100]}{file_text}",
      "all its files on the disk",
      remedy,
      file=file,
      step=step,
    ) from error
