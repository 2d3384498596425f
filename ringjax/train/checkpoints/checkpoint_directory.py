"""The checkpoint directory of one training: names, lock and clean-up.

  root/30/                    a step, as Orbax wrote it
  root/.ringjax/30.json       its manifest, see manifest.py
  root/.ringjax/new/          steps that are being written
  root/.ringjax/old/          steps that are being deleted
  root/.ringjax/lock          held by the process that writes

Guarantees: only files in .ringjax, and folders that a manifest names, are ever
changed or deleted; a step's folder that has lost its manifest is renamed
(30.without-manifest-0) when that step is saved again. A step gets its name in
one rename and loses it in one, so that a process that dies leaves it complete
or not at all; its remains in `new` and `old` are removed when the next process
begins to write.

`orbax.checkpoint.CheckpointManager` is not used: it takes every folder whose
name is a number for a step, even an empty one, and deletes a saved step to
keep it; it syncs nothing, so that a name may outlive a power failure and the
bytes not; and two managers may write to one folder (Orbax 0.12.8).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import time

from ringjax.errors import OptionError
from ringjax.train.checkpoints import manifest as manifests

# Seconds that a process that writes waits for one that only cleans up.
PATIENCE_S = 5.0
_OURS = ".ringjax"
# Files that show that Orbax has written a folder whose name is a number.
_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


class CheckpointDirectory:
  """The steps in a folder, as one process sees and changes them.

  Attributes:
    root: Absolute path of the folder.
  """

  def __init__(self, root: str):
    """Makes the object; changes nothing yet.

    Args:
      root: Absolute path of the folder.
    """
    self.root = root
    self._ours = os.path.join(root, _OURS)
    self._lock: int | None = None

  def folder(self, step: int) -> str:
    """The folder of a step."""
    return os.path.join(self.root, str(step))

  def manifest(self, step: int) -> str:
    """The path of a step's manifest."""
    return os.path.join(self._ours, f"{step}.json")

  def draft(self, step: int, attempt: int) -> str:
    """The folder in which a step is written before it exists."""
    return os.path.join(self._ours, "new", f"{step}.{attempt}")

  # -------------------------------------------------------------------------
  # The lock
  # -------------------------------------------------------------------------

  def open(self) -> None:
    """Cleans up, if no other process writes here and this one may.

    Raises:
      OptionError: If the root is not a folder.
    """
    if os.path.lexists(self.root) and not os.path.isdir(self.root):
      raise OptionError(
        "root", self.root, "a folder", "pass the path of a folder or a new path"
      )
    # A process without the right to write may read; and one that reads for a
    # long time, as an evaluation does, must not keep training from writing.
    with contextlib.suppress(OSError):
      self.acquire(patience_s=0)
    self.release()

  def acquire(self, patience_s: int | float | None = None) -> None:
    """Takes the lock of the process that writes, and cleans up.

    Args:
      patience_s: Seconds that it waits for another process; default:
        `PATIENCE_S`.

    Raises:
      OSError: If another process has the lock, or the disk refuses.
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
        if time.monotonic() >= end:
          os.close(lock)
          raise BlockingIOError(
            errno.EAGAIN, "another process writes here until it closes", path
          ) from None
        time.sleep(0.01)
      except OSError:
        # The file system has no locks.
        break
    self._lock = lock
    self.clean_up()

  def release(self) -> None:
    """Releases the lock."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  # -------------------------------------------------------------------------
  # Listing
  # -------------------------------------------------------------------------

  def steps(self) -> list[int]:
    """Steps that have a manifest, whatever its content."""
    return sorted(
      int(name.removesuffix(".json"))
      for name in _names(self._ours)
      if name.endswith(".json") and _is_number(name.removesuffix(".json"))
    )

  def candidates(self) -> list[int]:
    """Steps with a manifest, and folders of Orbax that have lost theirs."""
    without = {
      int(name)
      for name in _names(self.root)
      if _is_number(name) and self._is_orbax(name)
    }
    return sorted(without.union(self.steps()))

  def _is_orbax(self, name: str) -> bool:
    """Whether Orbax has written a folder of the root."""
    folder = os.path.join(self.root, name)
    return any(os.path.isfile(os.path.join(folder, x)) for x in _ORBAX)

  # -------------------------------------------------------------------------
  # Changes, for which the lock is held
  # -------------------------------------------------------------------------

  def prepare(self, step: int) -> str | None:
    """Makes a step's name free, and cleans up.

    Returns:
      New path of a folder of that name that was in the way and has lost its
      manifest; None if there was no such folder.

    Raises:
      OSError: If something that Orbax has not written has the name, or the disk
        refuses.
    """
    moved_to = None
    final = self.folder(step)
    # A rename replaces an empty folder and nothing else.
    empty = os.path.isdir(final) and not os.path.islink(final)
    empty = empty and not os.listdir(final)
    has_manifest = os.path.exists(self.manifest(step))
    if os.path.lexists(final) and not has_manifest and not empty:
      if os.path.islink(final) or not self._is_orbax(str(step)):
        raise FileExistsError(
          errno.EEXIST, "exists, and no manifest says that it is ours", final
        )
      names = (f"{final}.without-manifest-{n}" for n in itertools.count())
      moved_to = next(name for name in names if not os.path.lexists(name))
      os.rename(final, moved_to)
      manifests.sync_folder(self.root)
    self.clean_up()
    return moved_to

  def commit(self, draft: str, manifest: manifests.Manifest) -> None:
    """Makes a step of synced files exist; replaces an older one."""
    path = self.manifest(manifest.step)
    if os.path.exists(path):
      self.delete(manifest.step)
    manifest.write(path)
    os.rename(draft, self.folder(manifest.step))
    manifests.sync_folder(self.root)
    manifests.sync_folder(os.path.dirname(draft))

  def delete(self, step: int) -> None:
    """Deletes a step, which does not exist from the first rename on."""
    old = os.path.join(self._ours, "old", f"{step}.{time.time_ns()}")
    if os.path.lexists(self.folder(step)):
      os.rename(self.folder(step), old)
      manifests.sync_folder(self.root)
    os.unlink(self.manifest(step))
    manifests.sync_folder(self._ours)
    shutil.rmtree(old, ignore_errors=True)

  def clean_up(self) -> None:
    """Removes the remains of a killed process or a failed save."""
    leftovers = [
      os.path.join(self._ours, folder, name)
      for folder in ("new", "old")
      for name in os.listdir(os.path.join(self._ours, folder))
    ]
    steps = {os.path.basename(path).partition(".")[0] for path in leftovers}
    # The process stopped just before the folder got its name, or just after it
    # lost it. If something else has taken the folder, the manifest stays.
    for step in self.steps():
      if str(step) in steps and not os.path.lexists(self.folder(step)):
        os.unlink(self.manifest(step))
        manifests.sync_folder(self._ours)
    leftovers += [
      os.path.join(self._ours, name)
      for name in os.listdir(self._ours)
      if name.endswith(".json.tmp")
    ]
    for path in leftovers:
      if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
      else:
        os.unlink(path)


def _names(folder: str) -> list[str]:
  """The names in a folder; empty if there is no folder."""
  try:
    return os.listdir(folder)
  except (FileNotFoundError, NotADirectoryError):
    return []


def _is_number(name: str) -> bool:
  return name.isascii() and name.isdigit() and str(int(name)) == name
