"""The checkpoint directory of one training: names, lock and clean-up.

  root/30/                    a step, as Orbax wrote it
  root/.ringjax/30.json       its manifest, see ringjax/train/manifest.py
  root/.ringjax/new/          what is being written
  root/.ringjax/old/          what is being deleted
  root/.ringjax/lock          held by whoever writes

Guarantees: only files in .ringjax, and folders that a manifest names, are ever
changed or deleted. A step gets its name in one rename and loses it in one, so
that a process that dies leaves it whole or not at all; what it left in `new`
and `old` is swept when the next one begins to write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time

from ringjax.errors import OptionError
from ringjax.train import manifest as manifests

# How long one that writes waits for one that only sweeps.
PATIENCE_S = 5.0
_OURS = ".ringjax"
# Any of these in a folder with a number for a name: Orbax has written it.
_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


class CheckpointDirectory:
  """Steps in a folder, as one process sees and changes them.

  Attributes:
    root: the folder.
  """

  def __init__(self, root: str):
    """Touches nothing yet.

    Args:
      root: an absolute path.
    """
    self.root = root
    self._ours = os.path.join(root, _OURS)
    self._lock: int | None = None

  def folder(self, step: int) -> str:
    """Where a step lies."""
    return os.path.join(self.root, str(step))

  def path(self, step: int) -> str:
    """Where its manifest lies."""
    return os.path.join(self._ours, f"{step}.json")

  def draft(self, step: int, number: int) -> str:
    """Where a step is written before it exists; `number` tells attempts."""
    return os.path.join(self._ours, "new", f"{step}.{number}")

  # -------------------------------------------------------------------------
  # Who writes
  # -------------------------------------------------------------------------

  def open(self) -> None:
    """Sweeps, if nobody writes here and this process may.

    Raises:
      OptionError: the root is no folder.
    """
    if os.path.lexists(self.root) and not os.path.isdir(self.root):
      raise OptionError("root", self.root, "a folder", "choose another path")
    # Who cannot write may still read; `own` says what is wrong. And who reads
    # for long, as an evaluation does, must not keep training from writing.
    with contextlib.suppress(OSError):
      self.own(patience_s=0)
    self.disown()

  def own(self, patience_s: int | float | None = None) -> None:
    """Becomes the one that writes, and sweeps.

    Args:
      patience_s: how long it waits for another; default: `PATIENCE_S`.

    Raises:
      OSError: another one is, or the disk refuses.
    """
    if self._lock is not None:
      return
    for folder in ("new", "old"):
      os.makedirs(os.path.join(self._ours, folder), exist_ok=True)
    path = os.path.join(self._ours, "lock")
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    patience_s = PATIENCE_S if patience_s is None else patience_s
    end = time.monotonic() + patience_s
    while True:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        # It may be one that only sweeps.
        if time.monotonic() < end:
          time.sleep(0.01)
          continue
        os.close(lock)
        raise BlockingIOError(
          errno.EAGAIN, "another process writes here until it closes", path
        ) from None
      except OSError:
        # A file system without locks.
        break
    self._lock = lock
    self.sweep()

  def disown(self) -> None:
    """Lets others write."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  # -------------------------------------------------------------------------
  # What there is
  # -------------------------------------------------------------------------

  def numbers(self) -> list[int]:
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

  def claims(self) -> list[int]:
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
    return sorted(strays.union(self.numbers()))

  # -------------------------------------------------------------------------
  # What its owner does
  # -------------------------------------------------------------------------

  def make_room(self, step: int) -> None:
    """Sweeps, for a step that will get its name.

    Raises:
      OSError: its folder is there and is not ours, or the disk refuses.
    """
    final = self.folder(step)
    # A rename replaces an empty folder and nothing else.
    empty = os.path.isdir(final) and not os.path.islink(final)
    empty = empty and not os.listdir(final)
    known = os.path.exists(self.path(step))
    if os.path.lexists(final) and not known and not empty:
      raise FileExistsError(
        errno.EEXIST, "exists, and no manifest says that it is ours", final
      )
    self.sweep()

  def put(self, draft: str, made: manifests.Manifest) -> None:
    """Has a step exist whose files are on the disk; replaces an older one."""
    path = self.path(made.step)
    if os.path.exists(path):
      self.drop(made.step)
    made.write(path)
    os.rename(draft, self.folder(made.step))
    manifests.sync_folder(self.root)
    manifests.sync_folder(os.path.dirname(draft))

  def drop(self, step: int) -> None:
    """Deletes a step; as soon as this begins it does not exist."""
    old = os.path.join(self._ours, "old", f"{step}.{time.time_ns()}")
    if os.path.lexists(self.folder(step)):
      os.rename(self.folder(step), old)
      manifests.sync_folder(self.root)
    os.unlink(self.path(step))
    manifests.sync_folder(self._ours)
    shutil.rmtree(old, ignore_errors=True)

  def sweep(self) -> None:
    """Takes away what was left by a process that was killed, or a failure."""
    left = {
      name.partition(".")[0]
      for folder in ("new", "old")
      for name in os.listdir(os.path.join(self._ours, folder))
    }
    lost = [
      x
      for x in self.numbers()
      if str(x) in left and not os.path.lexists(self.folder(x))
    ]
    # Stopped just before the folder got its name, or just after it lost it.
    # Where somebody else has taken the folder, the manifest stays to tell.
    for step in lost:
      os.unlink(self.path(step))
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


def _is_number(name: str) -> bool:
  return name.isascii() and name.isdigit() and str(int(name)) == name
