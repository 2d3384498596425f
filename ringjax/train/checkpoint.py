"""Checkpoints of training that survive kills, full disks and rotten bits.

Law: a step exists if its folder is what its manifest says, and only then.
Both are written to the disk before the folder gets its name, in one rename;
deleting begins by taking the name away. So whenever the process dies, every
step is there whole or not at all. Nothing reaches a model whose bytes were not
compared with the manifest, unless the caller says so.
Cost: `save` holds the caller for a copy from the devices and, with several
processes, until all have called it; the rest happens in a thread, which reads
what was written once. `restore` reads a step twice, the second time from
memory if it fits.

  root/30/                    a step, as Orbax wrote it
  root/.ringjax/30.json       its manifest, see ringjax/train/manifest.py
  root/.ringjax/new/          what is being written
  root/.ringjax/old/          what is being deleted
  root/.ringjax/lock          held by whoever writes

Only files in .ringjax, and folders that a manifest names, are ever changed or
deleted. Steps that a killed process left in `new` and `old` are swept when the
next one begins to write. All processes see the same root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax._src import distributed  # The key-value store has no public name.
from jax.sharding import SingleDeviceSharding

from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  InputTypeError,
  MeshError,
  OptionError,
  PeerError,
  RingjaxError,
  message,
)
from ringjax.train import manifest as manifests
from ringjax.train.manifest import Leaf, Manifest

VERIFY = ("crc32", "full", "none")
TIMEOUT_S = 1200
_OURS = ".ringjax"
# Any of these in a folder with a number for a name: Orbax has written it.
_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
_GROUPS = itertools.count()

T = TypeVar("T")


class Checkpoints:
  """The saved steps of one training.

  Every process of `jax.distributed` makes one and calls `save`, `restore` and
  `close` at the same point; process 0 commits, sweeps and deletes. While one
  lives, others on the same root can only read.

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
          message(name, repr(value), f"a number from {least} on", "raise it")
        )
    self.root = os.path.abspath(os.fspath(root))
    self.restored_step: int | None = None
    self._keep, self._every_keep = keep, every_keep
    self._asynchronous = asynchronous
    self._config = manifests.fingerprint(_json("config", config))
    self._together = _Together(timeout_s)
    self._ours = os.path.join(self.root, _OURS)
    self._lock: int | None = None
    self._job: _Job | None = None
    # Steps whose bytes were found to be wrong, by number.
    self._damaged: set[int] = set()
    self._together.all(self._open)

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

  def save(
    self, step: int, tree: Any, extra: Mapping[str, Any] | None = None
  ) -> None:
    """Saves a step; one of that number is replaced.

    When it returns, the arrays may be donated. A save that is under way is
    waited for first.

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
      raise OptionError(
        message("step", repr(step), "a number from 0 on", "count steps")
      )
    checked = _json("extra", extra)
    leaves = {name: _Stored(name, x) for name, x in named(tree).items()}
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
    number = next(self._together.numbers)
    job.folder = os.path.join(self._ours, "new", f"{step}.{number}")
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
      if self._lock is not None:
        os.close(self._lock)
        self._lock = None

  def delete(self, step: int) -> None:
    """Deletes a step.

    Raises:
      CheckpointWriteError: it cannot be, or a save has failed.
      OptionError: there is no such step.
    """
    self.wait()
    self._known(step, self._numbers())
    job = _Job(step, {}, {})
    self._do(job, lambda job: self._own() or self._drop(job.step))
    if job.error is not None:
      raise job.error

  def _prepare(self, job: _Job) -> None:
    """Process 0: makes room for a new step."""
    self._own()
    final = self._folder(job.step)
    # A rename replaces an empty folder and nothing else.
    empty = os.path.isdir(final) and not os.path.islink(final)
    empty = empty and not os.listdir(final)
    known = os.path.exists(self._path(job.step))
    if os.path.lexists(final) and not known and not empty:
      raise FileExistsError(
        errno.EEXIST, "exists, and no manifest says that it is ours", final
      )
    self._sweep()

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
        self._sweep()

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
        else _write_error(job.step, error)
      )

  def _digest(self, job: _Job) -> list[list[Any]]:
    """Each process: brings its share of the files to the disk, and reads it."""
    mine = self._together.share(manifests.files_of(job.folder))
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
    if os.path.exists(self._path(job.step)):
      self._drop(job.step)
    made.write(self._path(job.step))
    os.rename(job.folder, self._folder(job.step))
    manifests.sync_folder(self.root)
    manifests.sync_folder(os.path.dirname(job.folder))
    self._retire(job.step)

  def _retire(self, saved: int) -> None:
    """Deletes steps that are not to be kept."""
    self._damaged.discard(saved)
    whole = [x for x in self.steps() if x not in self._damaged]
    newest, every = whole[-self._keep :], self._every_keep
    for step in self._numbers():
      # A damaged step stays until enough others are newer.
      old = len(newest) == self._keep and step < newest[0] and step != saved
      if not old or (every is not None and step % every == 0):
        continue
      # One of a newer ringjax is not for this one to judge.
      with contextlib.suppress(CheckpointFormatError):
        with contextlib.suppress(CheckpointCorruptError):
          Manifest.read(self._path(step), step)
        self._drop(step)

  def _drop(self, step: int) -> None:
    """Deletes a step; as soon as this begins it does not exist."""
    old = os.path.join(self._ours, "old", f"{step}.{time.time_ns()}")
    if os.path.lexists(self._folder(step)):
      os.rename(self._folder(step), old)
      manifests.sync_folder(self.root)
    os.unlink(self._path(step))
    manifests.sync_folder(self._ours)
    shutil.rmtree(old, ignore_errors=True)

  # -------------------------------------------------------------------------
  # The folder
  # -------------------------------------------------------------------------

  def _folder(self, step: int) -> str:
    return os.path.join(self.root, str(step))

  def _path(self, step: int) -> str:
    return os.path.join(self._ours, f"{step}.json")

  def _open(self) -> None:
    if self._together.rank:
      return
    if os.path.lexists(self.root) and not os.path.isdir(self.root):
      raise OptionError(
        message("root", self.root, "a folder", "choose another path")
      )
    # Who cannot write may still read; `save` says what is wrong.
    with contextlib.suppress(OSError):
      self._own()

  def _own(self) -> None:
    """Becomes the one that writes, and sweeps.

    Raises:
      OSError: another one is, or the disk refuses.
    """
    if self._lock is not None:
      return
    for folder in ("new", "old"):
      os.makedirs(os.path.join(self._ours, folder), exist_ok=True)
    path = os.path.join(self._ours, "lock")
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(lock)
      raise BlockingIOError(
        errno.EAGAIN,
        "another process or Checkpoints writes here; close it",
        path,
      ) from None
    except OSError:
      # A file system without locks.
      pass
    self._lock = lock
    self._sweep()

  def _sweep(self) -> None:
    """Takes away what was left by a process that was killed, or a failure."""
    left = {
      name.partition(".")[0]
      for folder in ("new", "old")
      for name in os.listdir(os.path.join(self._ours, folder))
    }
    lost = [
      x
      for x in self._numbers()
      if str(x) in left and not os.path.lexists(self._folder(x))
    ]
    # Stopped just before the folder got its name, or just after it lost it.
    # Where somebody else has taken the folder, the manifest stays to tell.
    for step in lost:
      os.unlink(self._path(step))
    if lost:
      manifests.sync_folder(self._ours)
    for name in os.listdir(self._ours):
      if name.endswith(".json.tmp"):
        os.unlink(os.path.join(self._ours, name))
    self._empty("new")
    self._empty("old")

  def _empty(self, folder: str) -> None:
    where = os.path.join(self._ours, folder)
    for name in os.listdir(where):
      path = os.path.join(where, name)
      if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
      else:
        os.unlink(path)

  def _numbers(self) -> list[int]:
    """Steps that have a manifest, whatever it says."""
    try:
      names = os.listdir(self._ours)
    except (FileNotFoundError, NotADirectoryError):
      return []
    return sorted(
      int(name[:-5])
      for name in names
      if name.endswith(".json") and _is_number(name[:-5])
    )

  def _claims(self) -> list[int]:
    """Steps that have a manifest, or are Orbax's and have lost it."""
    try:
      names = os.listdir(self.root)
    except (FileNotFoundError, NotADirectoryError):
      return []
    strays = {
      int(name)
      for name in names
      if _is_number(name)
      and any(os.path.isfile(os.path.join(self.root, name, x)) for x in _ORBAX)
    }
    return sorted(strays.union(self._numbers()))

  def _known(self, step: int, known: list[int]) -> None:
    if type(step) is not int or step not in known:
      shown = ", ".join(map(str, known[-8:])) or "none"
      raise OptionError(
        message("step", repr(step), f"one of those saved: {shown}", "name one")
      )

  def steps(self) -> list[int]:
    """Steps that exist, in order; looks at sizes, not at the bytes."""
    found = []
    for step in self._numbers():
      with contextlib.suppress(CheckpointCorruptError, CheckpointFormatError):
        Manifest.read(self._path(step), step).check_sizes(self._folder(step))
        found.append(step)
    return found

  def latest(self) -> int | None:
    """The newest of `steps`; None if there are none."""
    return max(self.steps(), default=None)

  # -------------------------------------------------------------------------
  # Restoring
  # -------------------------------------------------------------------------

  def restore(
    self, step: int | None = None, *, like: Any, verify: str = "crc32"
  ) -> tuple[Any, dict[str, Any]] | None:
    """Reads a step.

    Args:
      step: which one; default: the newest that is what was written. A newer
        one that is not is warned of.
      like: a tree as the one that was saved. In place of JAX arrays,
        `jax.ShapeDtypeStruct`s or arrays, with the shardings that are wanted;
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
        message("verify", repr(verify), f"one of {VERIFY}", "choose one")
      )
    if self._job is not None:
      # A save that fails is said by `poll`.
      self._job.join()
    wanted = {name: _Wanted(name, x) for name, x in named(like).items()}
    # What process 0 sees is what counts.
    numbers = self._together.all(self._claims)[0]
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
      message(
        "root",
        f"{len(faults)} step(s), all damaged; the newest: {faults[0].file}",
        "one that is what was written",
        "bring its files back, or choose an empty root to begin anew",
      ),
      faults[0].file,
    )

  def _verified(self, step: int, verify: str) -> Manifest:
    """A manifest whose files are what it says."""
    folder = self._folder(step)

    def check() -> Manifest:
      made = Manifest.read(self._path(step), step)
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
    self, step: int, made: Manifest, wanted: Mapping[str, _Wanted]
  ) -> None:
    """Refuses what would be cast, cut or left out."""

    def refuse(what: str, got: str, want: str, remedy: str) -> None:
      raise CheckpointMismatchError(
        message(f"step {step}: {what}", got, want, remedy)
      )

    if made.config != self._config:
      refuse(
        "config",
        f"that of fingerprint {made.config[:12]}",
        f"that of this training, {self._config[:12]}",
        "use the config it was trained with, or another root",
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
    wanted: Mapping[str, _Wanted],
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
            self._folder(step), args=ocp.args.StandardRestore(targets)
          )
        )
      except (MemoryError, jax.errors.JaxRuntimeError):
        raise
      except Exception as error:
        if verify != "none":
          raise
        why = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        raise manifests.corrupt(step, self._folder(step), why) from error
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


class _Together:
  """What the processes of `jax.distributed` tell each other.

  Without collectives, since these belong to training's own order.
  """

  def __init__(self, timeout_s: int):
    self.rank, self.size = jax.process_index(), jax.process_count()
    self.timeout_s = timeout_s
    self.group = next(_GROUPS)
    self.numbers = itertools.count()
    self._calls = itertools.count()
    state: Any = distributed.global_state
    self._client = state.client

  def options(self) -> Any:
    """How Orbax's parts meet."""
    return ocp.options.MultiprocessingOptions(
      primary_host=0,
      # Named, they meet in the key-value store; else in a collective, which
      # would come in between those of training.
      active_processes=set(range(self.size)),
      barrier_sync_key_prefix=f"ringjax{self.group}_{next(self.numbers)}",
    )

  def share(self, items: Any) -> list[Any]:
    """Those that are this process's to do."""
    return list(items)[self.rank :: self.size]

  def all(self, call: Callable[[], T], step: int | None = None) -> list[T]:
    """Has every process call, and returns what they gave; JSON, or one alone.

    Raises:
      Exception: what the first of them raised that failed; of its kind, if it
        is an error of ringjax.
    """
    if self.size == 1:
      return [call()]
    said: dict[str, Any] = {}
    own: Exception | None = None
    try:
      said["value"] = call()
    except Exception as error:
      own = error
      said["error"] = str(error)[:300]
      said["kind"] = type(error).__name__
      said["file"] = getattr(error, "file", None)
    found = self._gather(said)
    for rank, one in enumerate(found):
      if "error" in one:
        # All raise for the same reason, so that all go on in the same way.
        if rank == self.rank and own is not None:
          raise own
        if one["kind"] == "CheckpointCorruptError":
          raise CheckpointCorruptError(one["error"], one["file"], step)
        for kind in (CheckpointFormatError, OptionError):
          if one["kind"] == kind.__name__:
            raise kind(one["error"])
        raise PeerError(f"rank {rank}: {one['kind']}: {one['error']}", rank)
    return [one["value"] for one in found]

  def same(self, what: str, value: Any) -> None:
    """Refuses if the processes do not mean the same.

    Raises:
      PeerError: they do not.
    """
    if self.size == 1:
      return
    marks = self._gather(manifests.fingerprint(value))
    for rank, mark in enumerate(marks):
      if mark != marks[0]:
        raise PeerError(
          message(
            what,
            f"something else on rank {rank} than on rank 0",
            "the same on all",
            "give all processes the same arguments",
          ),
          rank,
        )

  def _gather(self, value: Any) -> list[Any]:
    call = next(self._calls)
    key = lambda n, r: f"ringjax/checkpoints/{self.group}/{n}/{r}"
    self._client.key_value_set(
      key(call, self.rank), manifests.canonical(value).decode()
    )
    found = []
    for rank in range(self.size):
      try:
        text = self._client.blocking_key_value_get(
          key(call, rank), 1000 * self.timeout_s
        )
      except jax.errors.JaxRuntimeError as error:
        raise PeerError(
          f"rank {rank} did not come to a checkpoint within "
          f"{self.timeout_s} s: {str(error)[:120]}",
          rank,
        ) from None
      found.append(json.loads(text))
    if call:
      # All have come to this call, so all have read the one before.
      self._client.key_value_delete(key(call - 1, self.rank))
    return found


class _Stored:
  """A leaf on its way to the disk."""

  def __init__(self, name: str, value: Any):
    self._value = value
    self._is_key = False
    if isinstance(value, jax.Array):
      self._is_key = _is_key(value.dtype)
      dtype = _key_name(value) if self._is_key else value.dtype.name
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float)):
      self._value = _array(name, value)
      dtype = self._value.dtype.name
    else:
      raise _no_leaf(name, value)
    self.leaf = Leaf(shape=tuple(self._value.shape), dtype=dtype)
    self.is_stored = 0 not in self.leaf.shape

  def copy(self) -> Any:
    """Arrays that stay what they are when the caller's are donated."""
    x = self._value
    if isinstance(x, np.ndarray):
      return x.copy()
    if self._is_key:
      return jax.random.key_data(x)
    near = x.sharding.memory_kind not in (None, "device")
    if near or any(d.platform == "cpu" for d in x.sharding.device_set):
      # Else Orbax's copy on the host would be the array itself.
      return jax.device_put(x, x.sharding, may_alias=False)
    return x


class _Wanted:
  """A leaf that is to be restored.

  Attributes:
    leaf: what it has to be.
  """

  def __init__(self, name: str, like: Any):
    self._name, self._like = name, like
    self._key: str | None = None
    if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
      dtype = like.dtype.name if not _is_key(like.dtype) else _key_name(like)
      if _is_key(like.dtype):
        self._key = dtype[4:-1]
      self.leaf = Leaf(shape=tuple(like.shape), dtype=dtype)
      self._sharding = like.sharding or SingleDeviceSharding(
        jax.local_devices()[0]
      )
      try:
        self._sharding.shard_shape(tuple(like.shape))
      except ValueError as error:
        raise MeshError(
          message(
            name,
            f"{self._sharding.spec if hasattr(self._sharding, 'spec') else ''}"
            f" for shape {list(like.shape)}",
            "a sharding that divides it",
            f"change it ({str(error)[:80]})",
          )
        ) from None
    elif isinstance(like, (np.ndarray, np.generic, bool, int, float)):
      x = _array(name, like)
      self.leaf = Leaf(shape=x.shape, dtype=x.dtype.name)
    else:
      raise _no_leaf(name, like)

  def target(self, leaf: Leaf) -> Any:
    """What Orbax is asked for."""
    if not isinstance(self._like, (jax.Array, jax.ShapeDtypeStruct)):
      return np.broadcast_to(np.zeros((), _dtype(leaf.dtype)), leaf.shape)
    if self._key is not None:
      data = jax.eval_shape(
        jax.random.key_data,
        jax.ShapeDtypeStruct(self._like.shape, self._like.dtype),
      )
      shape, dtype = data.shape, data.dtype
    else:
      shape, dtype = self._like.shape, self._like.dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

  def finished(self, x: Any, leaf: Leaf) -> Any:
    """What the caller gets; `x` is None where nothing is stored."""
    if isinstance(self._like, (jax.Array, jax.ShapeDtypeStruct)):
      if self._key is not None:
        if x is None:
          x = np.zeros((*leaf.shape, 2), np.uint32)
        return jax.random.wrap_key_data(x, impl=self._key)
      if x is None:
        x = jax.numpy.zeros(leaf.shape, leaf.dtype, device=self._sharding)
      return x
    if x is None:
      x = np.zeros(leaf.shape, _dtype(leaf.dtype))
    if isinstance(self._like, np.ndarray):
      return np.asarray(x)
    # NumPy's numbers stay NumPy's.
    if isinstance(self._like, np.generic):
      return np.asarray(x)[()]
    return type(self._like)(np.asarray(x).item())


def named(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their paths, "opt/0/mu/w", in the tree's order.

  Raises:
    OptionError: two have the same, or a dict's keys have no order.
  """
  found: dict[str, Any] = {}
  try:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
  except ValueError as error:
    raise OptionError(
      message("tree", str(error), "keys of one type in a dict", "rename some")
    ) from None
  for path, leaf in leaves:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # "%" stands for nothing, which would be no part of a path.
    name = "/".join(urllib.parse.quote(p, safe="") or "%" for p in parts) or "%"
    if name in found:
      raise OptionError(
        message("tree", f"two leaves {name}", "one of each path", "rename one")
      )
    found[name] = leaf
  return found


def _array(name: str, value: Any) -> np.ndarray:
  x = np.asarray(value)
  if x.dtype.hasobject or x.dtype.kind in "USMm":
    raise _no_leaf(name, value)
  return x


def _dtype(name: str) -> np.dtype:
  return np.dtype(jax.numpy.dtype(name))


def _is_key(dtype: Any) -> bool:
  return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _key_name(x: Any) -> str:
  """The dtype of random keys, with the name by which they are made again."""
  said: list[str] = []

  def look(keys: Any) -> None:
    said.append(f"key<{jax.random.key_impl(keys)}>")

  jax.eval_shape(look, jax.ShapeDtypeStruct(x.shape, x.dtype))
  return said[0]


def _no_leaf(name: str, value: Any) -> InputTypeError:
  return InputTypeError(
    message(
      f"leaf {name}",
      type(value).__name__,
      "an array or a number",
      "put what is no array into `extra`",
    )
  )


def _listed(names: list[str]) -> str:
  shown = ", ".join(n if len(n) <= 60 else f"...{n[-57:]}" for n in names[:2])
  return shown + ", ..." * (len(names) > 2)


def _is_number(name: str) -> bool:
  return name.isascii() and name.isdigit() and str(int(name)) == name


def _json(name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
  """A copy that no later change reaches."""
  try:
    copy = json.loads(manifests.canonical(dict(value or {})))
    if copy != dict(value or {}):
      raise ValueError("a tuple, or a key that is no string")
    return copy
  except (TypeError, ValueError, RecursionError) as error:
    raise OptionError(
      message(name, str(error), "JSON", "put arrays into the tree")
    ) from None


def _write_error(step: int, error: BaseException) -> CheckpointWriteError:
  """One error for the many that a disk can cause."""
  file = getattr(error, "filename", None)
  why = str(error.strerror) if isinstance(error, OSError) else ""
  why = why or " ".join(str(error).split()) or "no reason"
  where = f" ({str(file)[-60:]})" if file else ""
  remedy = "make room on the disk or mend it; steps that exist are intact"
  if isinstance(error, RingjaxError):
    remedy = "look at the processes; steps that exist are intact"
  made = CheckpointWriteError(
    message(
      f"step {step}",
      f"{type(error).__name__}: {why[:100]}{where}",
      "all its files on the disk",
      remedy,
    ),
    file,
    step,
  )
  made.__cause__ = error
  return made
