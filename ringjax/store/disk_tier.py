"""Blocks as files of a folder that several processes may share.

Guarantees: a file gets its name once it is complete: it is written under a
temporary name, then renamed. A file damaged by a crash, a full disk or a
flipped bit is detected by its digest when it is read, removed and counted; it
is never served. No lock is held while a file is read or written, nor between
processes. Errors of the disk are counted and never raised.
Cost: a read or a write is one file; opening lists the folder once.
Memory: about 200 bytes for each file, in the index, which is rebuilt from the
folder whenever a tier is opened.

Files are not synced unless `sync` is set: after a loss of power a file may
exist without its bytes, which its digest detects. `sync=True` syncs the file
before it is renamed and its folder after, so that written blocks are durable.

Each process on a folder evicts when the files that it knows exceed the budget,
and lists the folder again after it has written a sixteenth of the budget;
together they may exceed the budget by that much each. No clock is read: files
of earlier processes count as older than all new ones, in the order of their
modification times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from ringjax.checks import integer, local_path
from ringjax.errors import InputTypeError, OptionError
from ringjax.regular_files import open_regular
from ringjax.store.block_file import HEADER_BYTES, KEY_BYTES, pack, unpack
from ringjax.store.tier_policies import TierPolicy

SUFFIX = ".kv"
_TEMPORARY = ".tmp"
# Maximum number of writes skipped after an error; it doubles with each error.
_MOST_PAUSE = 1024


class DiskTier:
  """A folder of block files that a policy keeps within a budget.

  Attributes:
    root: Folder of the files.
    budget: Maximum bytes of all files.
    nbytes: Bytes of the files that are known.
    evicted: Number of files removed to make room.
    refused: Number of blocks that were too large or not admitted.
    corrupt: Number of files whose contents did not match their digest.
    read_errors: Number of failed reads.
    write_errors: Number of failed writes.
    skipped: Number of writes skipped after an error.
    last_error: Text of the last error, or None.
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
    self.budget = integer("disk", budget, least=0)
    self.policy, self.sync = policy, sync
    self.nbytes = self.evicted = self.refused = self.corrupt = 0
    self.read_errors = self.write_errors = self.skipped = 0
    self.last_error: str | None = None
    self._sizes: dict[bytes, int] = {}
    self._lock = threading.Lock()
    self._pause = self._wait = 0
    # Bytes of files that threads are writing, which have their room already.
    self._writing = 0
    self._unlisted = 0
    self._count = 0
    self._me = f"{socket.gethostname()}-{os.getpid()}"
    self._open()

  def __len__(self) -> int:
    return len(self._sizes)

  def __contains__(self, key: bytes) -> bool:
    return key in self._sizes or self._path(key).exists()

  def request(self, keys: list[bytes]) -> None:
    """Records the blocks of a prompt."""
    with self._lock:
      self.policy.request(keys)

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

  def _list(self) -> None:
    """Rebuilds the index from the folder."""
    files = []
    for path, status in self._files(SUFFIX):
      with contextlib.suppress(ValueError):
        key = bytes.fromhex(path.name.removesuffix(SUFFIX))
        if len(key) == KEY_BYTES:
          files.append((status.st_mtime_ns, key, status.st_size))
    with self._lock:
      removed = self._sizes.keys() - {key for _, key, _ in files}
      for key in removed:
        self.policy.removed(key)
      new_files = [file for file in sorted(files) if file[1] not in self._sizes]
      self._sizes = {key: size for _, key, size in files}
      self.nbytes = sum(self._sizes.values())
      for _, key, _ in new_files:
        self.policy.added(key)
      self._unlisted = 0

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def get(self, key: bytes) -> memoryview | None:
    """Reads the payload of a block; None if it is missing or damaged."""
    path = self._path(key)
    try:
      descriptor = open_regular(path, follow=False)
      with open(descriptor, "rb", buffering=0) as file:
        data = file.readall()
      return unpack(key, data)
    except FileNotFoundError:
      self._gone(key)
    except ValueError as error:
      self.corrupt += 1
      self.last_error = f"{path.name}: {error}"
      self.remove(key)
    except OSError as error:
      if error.errno in (errno.EINVAL, errno.ELOOP):
        # A pipe, a device or a link has taken the block's name.
        self.corrupt += 1
        self.last_error = f"{path.name}: {error.strerror}"
        self.remove(key)
      else:
        self._failed(error, reading=True)
    return None

  def put(self, key: bytes, payload: bytes) -> bool:
    """Writes a block: returns whether it is on the disk afterwards."""
    size = HEADER_BYTES + len(payload)
    with self._lock:
      if key in self._sizes:
        return True
      if size > self.budget or not self.policy.admit(key):
        self.refused += 1
        return False
      if self._wait:
        self._wait -= 1
        self.skipped += 1
        return False
      self._count += 1
      number = self._count
    if self._unlisted > self.budget // 16:
      self._list()
    # Before the write: the budget holds at every moment.
    if not self._reserve(size):
      return False
    path = self._path(key)
    temporary = path.parent / f".{self._me}.{number}{_TEMPORARY}"
    try:
      self._write(path, temporary, pack(key, payload))
    except OSError as error:
      with contextlib.suppress(OSError):
        temporary.unlink()
      self._failed(error)
      return False
    finally:
      with self._lock:
        self._writing -= size
    with self._lock:
      self._pause = 0
      self._unlisted += size
      self.nbytes += size - self._sizes.get(key, 0)
      self._sizes[key] = size
      self.policy.added(key)
    return True

  def _write(
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

  def _reserve(self, size: int) -> bool:
    """Evicts blocks until a file fits, and reserves its bytes if it does."""
    while True:
      with self._lock:
        if self.nbytes + self._writing + size <= self.budget:
          self._writing += size
          return True
        victims = self.policy.victims()
        if not victims:
          self.refused += 1
          return False
      for victim in victims:
        self.evicted += 1
        self.remove(victim)

  def remove(self, key: bytes) -> None:
    """Removes a block's file, if it is there."""
    with contextlib.suppress(OSError):
      self._path(key).unlink()
    self._gone(key)

  def _gone(self, key: bytes) -> None:
    with self._lock:
      self.nbytes -= self._sizes.pop(key, 0)
      self.policy.removed(key)

  def _failed(self, error: OSError, *, reading: bool = False) -> None:
    self.last_error = str(error)
    if reading:
      self.read_errors += 1
      return
    with self._lock:
      self.write_errors += 1
      self._pause = min(_MOST_PAUSE, 2 * self._pause + 1)
      self._wait = self._pause
