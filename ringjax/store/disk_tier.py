"""Blocks as files of a folder that several processes may share.

Guarantees: a file has its name once it is whole: it is written beside, then
renamed. What a crash, a full disk or a flipped bit leaves is detected by its
digest when it is read, removed and counted; it is never served. No lock is
held while a file is read or written, nor between processes. Errors of the disk
are counted and never raised.
Cost: a read or a write is one file; opening lists the folder once.
Memory: about 200 bytes for each file, in the index, which is rebuilt from the
folder whenever a tier is opened.

Files are not synced unless `sync` is set: after a loss of power a file may be
there without its bytes, which its digest tells. `sync=True` syncs the file
before it is renamed and its folder after, so that what was written stays.

Processes on one folder each evict when what they know exceeds the budget, and
list the folder anew after having written a sixteenth of it; they may exceed
the budget together by that much each. The clock is not asked: files that an
earlier process left count as older than all that is written, in the order of
their times, whatever these are.
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

from ringjax.checks import integer
from ringjax.errors import InputTypeError, OptionError
from ringjax.regular_files import open_regular
from ringjax.store.block_file import HEADER_BYTES, KEY_BYTES, pack, unpack
from ringjax.store.tier_policies import TierPolicy

SUFFIX = ".kv"
_TEMPORARY = ".tmp"
# Writes that are left out after an error, doubled each time.
_MOST_PAUSE = 1024


class DiskTier:
  """A folder of block files that a policy keeps within a budget.

  Attributes:
    root: the folder.
    budget: bytes of all files.
    nbytes: bytes of the files that are known.
    evicted: files that were removed to make room.
    refused: blocks that did not come in.
    corrupt: files that were not what was written.
    read_errors: reads that the disk refused.
    write_errors: writes that the disk refused.
    skipped: writes that were left out after an error.
    last_error: what the disk said last, or None.
  """

  def __init__(
    self,
    root: str | os.PathLike[str],
    budget: int,
    policy: TierPolicy,
    *,
    sync: bool = False,
  ):
    """Opens a folder, and makes it if it is not there.

    Args:
      root: the folder.
      budget: bytes.
      policy: which files stay.
      sync: whether files are synced to the disk.

    Raises:
      InputTypeError: `root` is no path.
      OptionError: no folder, or one that other users can write to.
    """
    if not isinstance(root, str | os.PathLike):
      raise InputTypeError(
        "disk", type(root).__name__, "a folder", "pass disk=(folder, bytes)"
      )
    self.root = pathlib.Path(root)
    self.budget = integer("disk", budget, least=0)
    self.policy, self.sync = policy, sync
    self.nbytes = self.evicted = self.refused = self.corrupt = 0
    self.read_errors = self.write_errors = self.skipped = 0
    self.last_error: str | None = None
    self._sizes: dict[bytes, int] = {}
    self._lock = threading.Lock()
    self._pause = self._wait = 0
    self._unlisted = 0
    self._count = 0
    self._me = f"{socket.gethostname()}-{os.getpid()}"
    self._open()

  def __len__(self) -> int:
    return len(self._sizes)

  def __contains__(self, key: bytes) -> bool:
    return key in self._sizes or self._path(key).exists()

  def request(self, keys: list[bytes]) -> None:
    """A prompt has these blocks."""
    with self._lock:
      self.policy.request(keys)

  def _path(self, key: bytes) -> pathlib.Path:
    name = key.hex()
    return self.root / name[:2] / (name + SUFFIX)

  # -------------------------------------------------------------------------
  # The folder
  # -------------------------------------------------------------------------

  def _open(self) -> None:
    """Checks the folder, removes what dead writers left, lists the rest."""
    try:
      self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
      status = self.root.stat()
    except FileExistsError:
      self._refuse("a file", "a folder, or a path where one can be made")
    except OSError as error:
      # E.g. a read-only disk: the store goes on without it.
      self._failed(error)
      return
    mine = not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())
    if not mine or status.st_mode & stat.S_IWOTH:
      # A digest is no defence against who can write one.
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
    host, _, pid = name.split(".")[1].rpartition("-")
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
    """Files of that suffix with what `stat` says; none that has gone."""
    try:
      folders = [e.path for e in os.scandir(self.root) if len(e.name) == 2]
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
    """Makes the index that of the folder."""
    found = []
    for path, status in self._files(SUFFIX):
      with contextlib.suppress(ValueError):
        key = bytes.fromhex(path.name.removesuffix(SUFFIX))
        if len(key) == KEY_BYTES:
          found.append((status.st_mtime_ns, key, status.st_size))
    with self._lock:
      gone = self._sizes.keys() - {key for _, key, _ in found}
      for key in gone:
        self.policy.removed(key)
      new = [x for x in sorted(found) if x[1] not in self._sizes]
      self._sizes = {key: size for _, key, size in found}
      self.nbytes = sum(self._sizes.values())
      for _, key, _ in new:
        self.policy.added(key)
      self._unlisted = 0

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def get(self, key: bytes) -> memoryview | None:
    """The payload of a block, or None where there is no whole one."""
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
    """Writes a block; whether it is on the disk afterwards."""
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
    self._make_room(size)
    path = self._path(key)
    temporary = path.parent / f".{self._me}.{number}{_TEMPORARY}"
    try:
      self._write(path, temporary, pack(key, payload))
    except OSError as error:
      with contextlib.suppress(OSError):
        temporary.unlink()
      self._failed(error)
      return False
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
          # A full disk may take a part.
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

  def _make_room(self, size: int) -> None:
    while True:
      with self._lock:
        if self.nbytes + size <= self.budget:
          return
        victims = self.policy.victims()
      if not victims:
        return
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
