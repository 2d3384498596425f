"""Blocks as files of a folder that several processes may share.

Guarantees: those of an `IndexedTier`. A file gets its name once it is complete:
it is written under a temporary name, then renamed. A file damaged by a crash, a
full disk or a flipped bit is detected by its digest when it is read. No lock is
held between processes.
Cost: a read or a write is one file; opening lists the folder once.

Files are not synced unless `sync` is set: after a loss of power a file may
exist without its bytes, which its digest detects. `sync=True` syncs the file
before it is renamed and its folder after, so that written blocks are durable.

No clock is read: files of earlier processes count as older than all new ones,
in the order of their modification times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import stat
from collections.abc import Iterator
from typing import Any, NoReturn

from ringjax.checks import local_path
from ringjax.errors import InputTypeError, OptionError
from ringjax.regular_files import open_regular
from ringjax.store.block_file import KEY_BYTES
from ringjax.store.indexed_tier import IndexedTier
from ringjax.store.tier_policies import TierPolicy

SUFFIX = ".kv"
_TEMPORARY = ".tmp"


class DiskTier(IndexedTier):
  """A folder of block files that a policy keeps within a budget.

  Attributes:
    root: Folder of the files.
  """

  def __init__(
    self,
    root: str | os.PathLike[str],
    budget: int,
    policy: TierPolicy,
    *,
    sync: bool = False,
  ):
    """Opens a folder, and creates it if it is missing.

    Args:
      root: Folder of the files.
      budget: Maximum bytes of all files.
      policy: Policy that chooses the files to keep.
      sync: Whether files are synced to the disk.

    Raises:
      InputTypeError: If `root` is no path.
      OptionError: If `root` is no folder, or other users can write to it.
    """
    if not isinstance(root, str | os.PathLike):
      raise InputTypeError(
        "disk", type(root).__name__, "a folder", "pass disk=(folder, bytes)"
      )
    self.root = pathlib.Path(local_path("root", root))
    super().__init__("disk", str(self.root), budget, policy)
    self.sync = sync
    self._me = f"{socket.gethostname()}-{os.getpid()}"
    self._open()

  def __contains__(self, key: bytes) -> bool:
    return key in self._sizes or self._path(key).exists()

  def _path(self, key: bytes) -> pathlib.Path:
    name = key.hex()
    return self.root / name[:2] / (name + SUFFIX)

  # -------------------------------------------------------------------------
  # The folder
  # -------------------------------------------------------------------------

  def _open(self) -> None:
    """Checks the folder, removes files of dead writers, lists the rest."""
    try:
      self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
      status = self.root.stat()
    except FileExistsError:
      self._refuse("a file", "a folder, or a path where one can be made")
    except OSError as error:
      # E.g. a read-only disk: the store works without it.
      self._failed(error)
      return
    is_trusted = not hasattr(os, "geteuid") or status.st_uid in (
      0,
      os.geteuid(),
    )
    if not is_trusted or status.st_mode & stat.S_IWOTH:
      # A digest is no defence against users who can write a matching one.
      self._refuse(
        "a folder that other users can write to", "a folder of one's own"
      )
    for path, _ in self._files(_TEMPORARY):
      if self._abandoned(path.name):
        with contextlib.suppress(OSError):
          path.unlink()
    self._list()

  def _refuse(self, got: str, want: str) -> NoReturn:
    raise OptionError(
      "disk", f"{self.root}, {got}", want, "pass another folder"
    ) from None

  def _abandoned(self, name: str) -> bool:
    """Whether the writer of a temporary file is gone."""
    # .HOST-PID.NUMBER and the suffix; names of hosts may have dots.
    writer, _, _ = name[1:].removesuffix(_TEMPORARY).rpartition(".")
    host, _, pid = writer.rpartition("-")
    if host != socket.gethostname() or not pid.isdigit():
      return False
    try:
      os.kill(int(pid), 0)
    except ProcessLookupError:
      return True
    except OSError:
      return False
    return False

  def _files(self, suffix: str) -> Iterator[tuple[pathlib.Path, Any]]:
    """Yields files of a suffix with their `stat`; skips removed ones."""
    try:
      folders = [
        entry.path for entry in os.scandir(self.root) if len(entry.name) == 2
      ]
    except OSError as error:
      self._failed(error, reading=True)
      return
    for folder in folders:
      with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
          if entry.name.endswith(suffix):
            with contextlib.suppress(OSError):
              yield pathlib.Path(entry.path), entry.stat(follow_symlinks=False)

  def _blocks(self) -> Iterator[tuple[int, bytes, int]]:
    for path, status in self._files(SUFFIX):
      with contextlib.suppress(ValueError):
        key = bytes.fromhex(path.name.removesuffix(SUFFIX))
        if len(key) == KEY_BYTES:
          yield status.st_mtime_ns, key, status.st_size

  def _read(self, key: bytes) -> bytes:
    path = self._path(key)
    try:
      descriptor = open_regular(path, follow=False)
    except OSError as error:
      if error.errno in (errno.EINVAL, errno.ELOOP):
        # A pipe, a device or a link has taken the block's name.
        raise ValueError(error.strerror) from None
      raise
    with open(descriptor, "rb", buffering=0) as file:
      return file.readall()

  def _write(self, key: bytes, number: int, parts: tuple[bytes, bytes]) -> None:
    path = self._path(key)
    temporary = path.parent / f".{self._me}.{number}{_TEMPORARY}"
    try:
      self._write_file(path, temporary, parts)
    except OSError:
      with contextlib.suppress(OSError):
        temporary.unlink()
      raise

  def _write_file(
    self, path: pathlib.Path, temporary: pathlib.Path, parts: tuple[bytes, ...]
  ) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    handle = os.open(temporary, flags, 0o600)
    with open(handle, "wb", buffering=0) as file:
      for part in parts:
        view = memoryview(part)
        while view:
          # A write may be partial, e.g. on a disk that is nearly full.
          view = view[file.write(view) :]
      if self.sync:
        os.fsync(handle)
    os.replace(temporary, path)
    if self.sync:
      folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
      try:
        os.fsync(folder)
      finally:
        os.close(folder)

  def _delete(self, key: bytes) -> None:
    self._path(key).unlink()
