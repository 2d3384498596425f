"""Checkpoints of training that survive kills, full disks and corrupt files.

Guarantees: a step exists if its folder is what its manifest says, and only
then. Both are written to the disk before the folder gets its name, in one
rename; deleting begins by taking the name away. So whenever the process dies,
every step is there whole or not at all. Nothing reaches a model whose bytes
were not compared with the manifest, unless the caller says so.
Cost: `save` holds the caller for a copy from the devices and, with several
processes, until all have called it; the rest happens in a thread, which reads
what was written once. `restore` reads a step twice, the second time from
memory if it fits.

How steps lie in the root, and who may write to it, is said in
ringjax/train/checkpoint_directory.py; all processes see the same root.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  OptionError,
  PeerError,
  RingjaxError,
)
from ringjax.train import manifest as manifests
from ringjax.train.checkpoint_directory import CheckpointDirectory
from ringjax.train.leaves import LeafToRestore, LeafToSave, named
from ringjax.train.manifest import Leaf, Manifest
from ringjax.train.process_group import ProcessGroup

VERIFY = ("crc32", "full", "none")
TIMEOUT_S = 1200
_OPEN: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


def _worth_saying(record: logging.LogRecord) -> bool:
  """False for the dozens of lines that Orbax logs at INFO in each save."""
  orbax = os.path.dirname(ocp.__file__)
  return record.levelno > logging.INFO or orbax not in record.pathname


# Orbax logs by absl's logger, which others use too.
logging.getLogger("absl").addFilter(_worth_saying)


class Checkpoints:
  """The saved steps of one training.

  Every process of `jax.distributed` makes one and calls `save`, `restore` and
  `close` at the same point; process 0 commits, sweeps and deletes. From its
  first `save` or `claim` until `close`, others on the same root can only read.

  Attributes:
    root: the folder.
    restored_step: what the last `restore` has found, or None.
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
    """Opens a folder and sweeps what a killed process left there.

    Args:
      root: a folder of a local or mounted file system; made if missing.
      keep: how many of the newest steps stay.
      every_keep: steps that this divides stay as well, for good.
      asynchronous: whether `save` returns before the step is on the disk.
      config: what must be equal for a step to be of this training, as JSON;
        steps of another config are not restored.
      timeout_s: how long processes wait for each other.

    Raises:
      OptionError: a value that cannot be.
    """
    for name, value, least in (
      ("keep", keep, 1),
      ("every_keep", 1 if every_keep is None else every_keep, 1),
      ("timeout_s", timeout_s, 1),
    ):
      if type(value) is not int or value < least:
        raise OptionError(
          name, repr(value), f"a number from {least} on", "raise it"
        )
    self.root = os.path.abspath(os.fspath(root))
    self.restored_step: int | None = None
    self._keep, self._every_keep = keep, every_keep
    self._asynchronous = asynchronous
    self._config = manifests.fingerprint(_json("config", config))
    self._together = ProcessGroup(timeout_s)
    self._shelf = CheckpointDirectory(self.root)
    self._job: _Job | None = None
    # Steps whose bytes were found to be wrong, by number.
    self._damaged: set[int] = set()
    self._together.all(
      self._shelf.open if self._together.rank == 0 else lambda: None
    )
    _OPEN.add(self)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if kind is None:
      self.close()
    else:
      # What went wrong in the block is the news.
      with contextlib.suppress(CheckpointWriteError):
        self.close()

  # -------------------------------------------------------------------------
  # Saving
  # -------------------------------------------------------------------------

  def claim(self) -> None:
    """Keeps others from writing to the root, from now on until `close`.

    A training that calls this learns at its start, and not at its first save,
    that another one is at work there.

    Raises:
      CheckpointWriteError: it is, or nothing can be written.
    """
    try:
      self._together.all(
        self._shelf.own if self._together.rank == 0 else lambda: None
      )
    except Exception as error:
      why = str(getattr(error, "strerror", None) or error)
      file = getattr(error, "filename", None)
      taken = isinstance(error, BlockingIOError | PeerError)
      raise CheckpointWriteError(
        "root",
        f"{self.root[-80:]} ({why[:100]})",
        "a folder that no other process writes to"
        if taken
        else "a folder that can be written to",
        "wait until the other process ends, or pass another root"
        if taken
        else "free space there or change its permissions, or pass another",
        file=file,
      ) from error

  def save(
    self, step: int, tree: Any, extra: Mapping[str, Any] | None = None
  ) -> None:
    """Saves a step; one of that number is replaced.

    When it returns, the arrays may be donated. A save that is under way is
    waited for first. The last one needs `wait` or `close` before the program
    ends: else it may be lost, and only a line on stderr says so.

    Args:
      step: a number from 0 on.
      tree: any pytree of JAX arrays, of any shardings; NumPy arrays and
        Python's bool, int and float, which must be equal in all processes.
      extra: JSON that belongs to the step, like the position in the data.

    Raises:
      CheckpointWriteError: this step or, if it was asynchronous, the one
        before could not be saved.
      OptionError: `step` or `extra` cannot be saved.
      InputTypeError: a leaf cannot be.
      PeerError: the processes do not save the same.
    """
    self.wait()
    if type(step) is not int or step < 0:
      raise OptionError("step", repr(step), "a number from 0 on", "count steps")
    checked = _json("extra", extra)
    leaves = {name: LeafToSave(name, x) for name, x in named(tree).items()}
    about = {name: x.leaf for name, x in leaves.items()}
    self._together.same(
      f"save of step {step}",
      [step, checked, sorted((k, x.shape, x.dtype) for k, x in about.items())],
    )
    newer = [x for x in self.steps() if x > step and x not in self._damaged]
    if newer and self._together.rank == 0:
      warnings.warn(
        f"step {step} is saved while {newer[-1]} exists, which `restore` will "
        "find first; delete what is newer to go on from here",
        RuntimeWarning,
        stacklevel=2,
      )
    job = _Job(step, about, checked)
    # Not a name that a failed save's threads may still write to.
    job.folder = self._shelf.draft(step, next(self._together.numbers))
    # All learn here whether there is a place to write to.
    self._do(job, self._prepare)
    if job.error is not None:
      raise job.error
    try:
      job.saver = self._saver()
      job.saver.save(
        job.folder,
        args=ocp.args.StandardSave(
          {name: x.copy() for name, x in leaves.items() if x.is_stored}
          # Orbax saves no empty trees.
          or {"%": np.zeros((), np.int8)}
        ),
      )
    except Exception as error:
      # The others learn of it as of any failure, in the thread.
      job.failure = error
    self._job = job
    job.thread = threading.Thread(
      target=self._finish, args=(job,), name=f"ringjax saves step {step}"
    )
    job.thread.start()
    if not self._asynchronous:
      self.wait()

  def poll(self) -> None:
    """Tells at once whether a save has failed; for every step of training.

    Raises:
      CheckpointWriteError: it has; this is said once.
    """
    job = self._job
    if job is not None and not job.is_running():
      self.wait()

  def wait(self) -> None:
    """Waits until no save is under way.

    Raises:
      CheckpointWriteError: it has failed; this is said once.
    """
    job = self._job
    if job is not None:
      job.join()
      self._job = None
      if job.error is not None:
        raise job.error

  def close(self) -> None:
    """Waits as `wait` does, and lets others write to the root.

    Raises:
      CheckpointWriteError: a save has failed.
    """
    try:
      self.wait()
    finally:
      self._shelf.disown()

  def delete(self, step: int) -> None:
    """Deletes a step.

    Raises:
      CheckpointWriteError: it cannot be, or a save has failed.
      OptionError: there is no such step.
    """
    self.wait()
    self._known(step, self._shelf.numbers())
    job = _Job(step, {}, {})
    self._do(job, self._delete)
    if job.error is not None:
      raise job.error

  def _delete(self, job: _Job) -> None:
    """Process 0: deletes a step."""
    self._shelf.own()
    self._shelf.drop(job.step)

  def _prepare(self, job: _Job) -> None:
    """Process 0: makes room for a new step."""
    self._shelf.own()
    self._shelf.make_room(job.step)

  def _saver(self) -> Any:
    """Orbax, of its own for each save: an error leaves nothing behind."""
    options = self._together.options()
    return ocp.AsyncCheckpointer(
      ocp.StandardCheckpointHandler(multiprocessing_options=options),
      async_options=ocp.options.AsyncOptions(
        timeout_secs=self._together.timeout_s
      ),
      multiprocessing_options=options,
    )

  def _finish(self, job: _Job) -> None:
    """In a thread: from the copy on the host to a step that exists."""
    self._do(job, _written, everyone=True)
    if job.error is None:
      # One lists for all: a mounted folder may look older elsewhere.
      self._do(job, lambda job: manifests.files_of(job.folder))
    if job.error is None:
      self._do(job, self._digest, everyone=True)
    if job.error is None:
      self._do(job, self._commit)
    if job.saver is not None:
      with contextlib.suppress(Exception):
        job.saver.close()
      job.saver = None
    if job.error is not None and self._together.rank == 0:
      # Orbax may still be writing on other threads; what that leaves is swept
      # before the next save.
      with contextlib.suppress(OSError):
        self._shelf.sweep()

  def _do(
    self, job: _Job, call: Callable[[_Job], Any], everyone: bool = False
  ) -> None:
    """Part of a save, after which all know whether all have done theirs."""

    def part() -> Any:
      if everyone or self._together.rank == 0:
        return call(job)

    try:
      job.said = self._together.all(part, job.step)
    except Exception as error:
      job.error = (
        error
        if isinstance(error, CheckpointWriteError)
        else _write_error(job.step, error, job.folder or self.root)
      )

  def _digest(self, job: _Job) -> list[list[Any]]:
    """Each process: brings its share of the files to the disk, and reads it."""
    mine = self._together.share(job.said[0])
    found = [manifests.digest(job.folder, path, sync=True) for path in mine]
    return [[f.path, f.size, f.crc32, f.sha256] for f in found]

  def _commit(self, job: _Job) -> None:
    """Process 0: has the step exist."""
    manifests.sync_folders(job.folder)
    files = sorted(itertools.chain.from_iterable(job.said))
    made = Manifest(
      step=job.step,
      files=tuple(
        manifests.File(path=path, size=size, crc32=crc32, sha256=sha256)
        for path, size, crc32, sha256 in files
      ),
      leaves=job.leaves,
      extra=job.extra,
      config=self._config,
    )
    self._shelf.put(job.folder, made)
    self._retire(job.step)

  def _retire(self, saved: int) -> None:
    """Deletes steps that are not to be kept."""
    self._damaged.discard(saved)
    whole = [x for x in self.steps() if x not in self._damaged]
    newest, every = whole[-self._keep :], self._every_keep
    for step in self._shelf.numbers():
      # A damaged step stays until enough others are newer.
      old = len(newest) == self._keep and step < newest[0] and step != saved
      if not old or (every is not None and step % every == 0):
        continue
      # One of a newer ringjax is not for this one to judge.
      with contextlib.suppress(CheckpointFormatError):
        with contextlib.suppress(CheckpointCorruptError):
          Manifest.read(self._shelf.path(step), step)
        self._shelf.drop(step)

  # -------------------------------------------------------------------------
  # What there is
  # -------------------------------------------------------------------------

  def _known(self, step: int, known: list[int]) -> None:
    if type(step) is not int or step not in known:
      shown = ", ".join(map(str, known[-8:])) or "none"
      raise OptionError(
        "step", repr(step), f"one of those saved: {shown}", "name one"
      )

  def steps(self) -> list[int]:
    """Steps that exist, in order; looks at sizes, not at the bytes."""
    found = []
    for step in self._shelf.numbers():
      with contextlib.suppress(CheckpointCorruptError, CheckpointFormatError):
        Manifest.read(self._shelf.path(step), step).check_sizes(
          self._shelf.folder(step)
        )
        found.append(step)
    return found

  def latest(self) -> int | None:
    """The newest of `steps`; None if there are none."""
    return max(self.steps(), default=None)

  # -------------------------------------------------------------------------
  # Restoring
  # -------------------------------------------------------------------------

  def holds(self, like: Any = None) -> bool:
    """Whether a step is saved, by what process 0 sees. Nothing is read.

    Args:
      like: as in `restore`: what the newest step must be, if its manifest can
        be read.

    Raises:
      CheckpointMismatchError, InputTypeError, PeerError: as `restore`.
    """
    numbers = self._together.all(self._shelf.claims)[0]
    if like is None:
      return bool(numbers)
    wanted = {name: LeafToRestore(name, x) for name, x in named(like).items()}
    for number in reversed(numbers):
      with contextlib.suppress(CheckpointCorruptError):
        self._compare(number, self._verified(number, "none"), wanted)
        break
    return bool(numbers)

  def restore(
    self, step: int | None = None, *, like: Any, verify: str = "crc32"
  ) -> tuple[Any, dict[str, Any]] | None:
    """Reads a step.

    Args:
      step: which one; default: the newest that is what was written. A newer
        one that is not is warned of.
      like: a tree as the one that was saved. In place of JAX arrays,
        `jax.ShapeDtypeStruct` or arrays, with the shardings that are wanted;
        without one, the array comes to the first device. NumPy arrays and
        Python's numbers stand for their kind.
      verify: how files are compared before anything is read: "crc32"; "full",
        by SHA-256 too; "none", by their sizes alone.

    Returns:
      The tree and what was `extra`; None if nothing was ever saved here.
      `restored_step` says which step it is.

    Raises:
      CheckpointCorruptError: the step named, or every step there is, is not
        what was written.
      CheckpointMismatchError: a leaf's path, shape or dtype is not that of
        `like`, or the step is of another config.
      CheckpointFormatError: a newer ringjax wrote the step.
      OptionError: there is no such step.
      InputTypeError: a leaf of `like` cannot be.
      MeshError: a sharding does not fit its array.
      PeerError: the processes do not restore the same.
    """
    if verify not in VERIFY:
      raise OptionError(
        "verify", repr(verify), f"one of {VERIFY}", "pass verify='crc32'"
      )
    if self._job is not None:
      # A save that fails is said by `poll`.
      self._job.join()
    wanted = {name: LeafToRestore(name, x) for name, x in named(like).items()}
    # What process 0 sees is what counts.
    numbers = self._together.all(self._shelf.claims)[0]
    if step is not None:
      self._known(step, numbers)
      numbers = [step]
    self._together.same("restore", [numbers, verify])
    if not numbers:
      return None
    faults: list[CheckpointCorruptError] = []
    for number in reversed(numbers):
      try:
        made = self._verified(number, verify)
        self._compare(number, made, wanted)
        arrays = self._read(number, made, wanted, verify)
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
      tree = jax.tree.unflatten(
        jax.tree.structure(like), [arrays[name] for name in wanted]
      )
      return tree, dict(made.extra)
    raise CheckpointCorruptError(
      "root",
      f"{len(faults)} step(s), all damaged; the newest: {faults[0].file}",
      "one that is what was written",
      "bring its files back, or choose an empty root to begin anew",
      file=faults[0].file,
    )

  def _verified(self, step: int, verify: str) -> Manifest:
    """A manifest whose files are what it says."""
    folder = self._shelf.folder(step)

    def check() -> Manifest:
      made = Manifest.read(self._shelf.path(step), step)
      made.check_sizes(folder)
      if verify != "none":
        for file in self._together.share(made.files):
          made.check_file(folder, file, full=verify == "full")
      return made

    made: list[Manifest] = []
    # A manifest is no JSON to be sent, so it stays here.
    self._together.all(lambda: made.append(check()), step)
    return made[0]

  def _compare(
    self, step: int, made: Manifest, wanted: Mapping[str, LeafToRestore]
  ) -> None:
    """Refuses what would be cast, cut or left out."""

    def refuse(what: str, got: str, want: str, remedy: str) -> None:
      raise CheckpointMismatchError(f"step {step}: {what}", got, want, remedy)

    if made.config != self._config:
      refuse(
        "config",
        "one that differs from that of this training",
        "the config that the step was saved with",
        "pass that config, or another root",
      )
    for names, word in (
      ([n for n in wanted if n not in made.leaves], "missing"),
      ([n for n in made.leaves if n not in wanted], "not in `like`"),
    ):
      if names:
        refuse(
          _listed(names),
          f"{len(names)} leaves that are {word}",
          "the same leaves on disk and in `like`",
          "make `like` from what was saved",
        )
    for name, x in wanted.items():
      have = made.leaves[name]
      if have.shape != x.leaf.shape:
        refuse(
          name,
          f"shape {list(have.shape)}",
          f"{list(x.leaf.shape)}, as in `like`",
          "use the config it was saved with",
        )
      if have.dtype != x.leaf.dtype:
        refuse(
          name,
          f"dtype {have.dtype}",
          f"{x.leaf.dtype}, as in `like`",
          "restore it as it is and cast it then",
        )

  def _read(
    self,
    step: int,
    made: Manifest,
    wanted: Mapping[str, LeafToRestore],
    verify: str,
  ) -> dict[str, Any]:
    targets = {
      name: x.target(made.leaves[name])
      for name, x in wanted.items()
      if 0 not in made.leaves[name].shape
    }
    if not targets:
      return {n: x.finished(None, made.leaves[n]) for n, x in wanted.items()}
    arrays: dict[str, Any] = {}

    def read() -> None:
      options = self._together.options()
      reader = ocp.Checkpointer(
        ocp.StandardCheckpointHandler(multiprocessing_options=options),
        multiprocessing_options=options,
      )
      try:
        arrays.update(
          reader.restore(
            self._shelf.folder(step), args=ocp.args.StandardRestore(targets)
          )
        )
      except (MemoryError, jax.errors.JaxRuntimeError):
        raise
      except Exception as error:
        if verify != "none":
          raise
        why = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        raise manifests.corrupt(step, self._shelf.folder(step), why) from error
      finally:
        reader.close()

    self._together.all(read, step)
    return {
      name: x.finished(arrays.get(name), made.leaves[name])
      for name, x in wanted.items()
    }


class _Job:
  """A save that is under way."""

  def __init__(
    self, step: int, leaves: Mapping[str, Leaf], extra: Mapping[str, Any]
  ):
    self.step, self.leaves, self.extra = step, leaves, extra
    self.folder = ""
    self.saver: Any = None
    self.thread: threading.Thread | None = None
    self.said: list[Any] = []
    # What failed in Orbax's first half, and what is to be said of it all.
    self.failure: Exception | None = None
    self.error: CheckpointWriteError | None = None

  def is_running(self) -> bool:
    return self.thread is not None and self.thread.is_alive()

  def join(self) -> None:
    if self.thread is not None:
      self.thread.join()


def _written(job: _Job) -> None:
  """Waits for Orbax's second half."""
  if job.failure is not None:
    raise job.failure
  job.saver.wait_until_finished()


def _at_exit() -> None:
  """Says what became of a save whose program ends without `close`."""
  for one in list(_OPEN):
    try:
      one.wait()
    except CheckpointWriteError as error:
      print(f"ringjax: {error}", file=sys.stderr)


# Without a public name. Python's own `atexit` comes too late: nothing can hand
# work to other threads by then, as Orbax does. From Python 3.12 on no thread
# can begin even here, so a save that has not come far is lost; that is said.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)


def _listed(names: list[str]) -> str:
  shown = ", ".join(n if len(n) <= 60 else f"...{n[-57:]}" for n in names[:2])
  return shown + ", ..." * (len(names) > 2)


def _json(name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
  """A copy that no later change reaches."""
  try:
    copy = json.loads(manifests.canonical(dict(value or {})))
    if copy != dict(value or {}):
      raise ValueError("a tuple, or a key that is no string")
    return copy
  except (TypeError, ValueError, RecursionError) as error:
    raise OptionError(
      name, str(error), "JSON", "put arrays into the tree"
    ) from None


def _write_error(
  step: int, error: BaseException, folder: str
) -> CheckpointWriteError:
  """One error for the many that a disk can cause, in a file of `folder`."""
  file = getattr(error, "filename", None)
  if file is None and isinstance(error, OSError):
    file = folder
  why = str(error.strerror) if isinstance(error, OSError) else ""
  why = why or " ".join(str(error).split()) or "no reason"
  where = f" ({str(file)[-60:]})" if file else ""
  remedy = "make room on the disk or mend it; steps that exist are intact"
  if isinstance(error, RingjaxError):
    remedy = "look at the processes; steps that exist are intact"
  made = CheckpointWriteError(
    f"step {step}",
    f"{type(error).__name__}: {why[:100]}{where}",
    "all its files on the disk",
    remedy,
    file=file,
    step=step,
  )
  made.__cause__ = error
  return made
