"""Files for the keys and values of layers on disk, read and written by blocks.

Guarantees: a written block reads back bit for bit; others read as zeros. Files
are unlinked, so that none remains when the process ends, however it ends. Disk
space is allocated with an array: a full disk is an error then, and not in the
middle of a text.
Cost: a read of one layer's blocks is one system call; the kernel reads the next
layer ahead while this one is in use, and writes back asynchronously.
Memory: the arrays that a program asks for; the kernel's page cache is released
under memory pressure.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from ringjax.errors import OptionError, RingjaxError

# Number of events to keep: a few thousand steps.
EVENTS = 1 << 16


class TransferEvent(NamedTuple):
  """A transfer between tiers, or a wait for one.

  Fields:
    what: "read" or "write" of a file, or "wait" of a call for a layer's read.
    part: Source of the bytes, "weights" or "cache".
    layer: Index in the model; for the cache, index among the layers on disk.
    nbytes: Number of bytes moved.
    start: Start time on `time.monotonic`'s clock, in seconds.
    seconds: Duration in seconds.
  """

  what: str
  part: str
  layer: int
  nbytes: int
  start: float
  seconds: float


class _File:
  """One array in an unlinked file."""

  def __init__(self, folder: str, shape: tuple[int, ...], dtype: np.dtype):
    self.shape, self.dtype = shape, dtype
    self.each = math.prod(shape[1:]) * dtype.itemsize
    try:
      self.descriptor = _nameless(folder)
      weakref.finalize(self, os.close, self.descriptor)
      os.posix_fallocate(self.descriptor, 0, max(1, shape[0] * self.each))
    except OSError as error:
      raise OptionError(
        "disk",
        f"{error.strerror} for {shape[0] * self.each:,} bytes in {folder!r}",
        "a folder that can be written to, with room for the cache",
        "name another folder, or place less of the cache on disk",
      ) from error

  def read(self, first: int, count: int) -> np.ndarray:
    blocks = np.empty((count, *self.shape[1:]), self.dtype)
    remaining, offset = _bytes_of(blocks), first * self.each
    while remaining:
      num_read = os.preadv(self.descriptor, [remaining[: 1 << 30]], offset)
      if not num_read:
        raise OSError(f"an end at byte {offset:,}")
      remaining, offset = remaining[num_read:], offset + num_read
    return blocks

  def prefetch(self, first: int, count: int) -> None:
    """Ask the kernel to read blocks in the background."""
    os.posix_fadvise(
      self.descriptor,
      first % self.shape[0] * self.each,
      count * self.each,
      os.POSIX_FADV_WILLNEED,
    )

  def write(self, first: int, x: np.ndarray) -> None:
    remaining = _bytes_of(np.ascontiguousarray(x))
    offset = first * self.each
    while remaining:
      num_written = os.pwritev(self.descriptor, [remaining[: 1 << 30]], offset)
      remaining, offset = remaining[num_written:], offset + num_written


def _bytes_of(x: np.ndarray) -> memoryview:
  flat: Any = x.reshape(-1).view(np.uint8)
  return memoryview(flat)


def _nameless(folder: str) -> int:
  """Open an unlinked file in a folder; return its descriptor."""
  try:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
  except (AttributeError, OSError):
    # Not all file systems support O_TMPFILE.
    descriptor, path = tempfile.mkstemp(prefix="ringjax-cache-", dir=folder)
    os.unlink(path)
    return descriptor


class CacheFiles:
  """Files in a folder for the layers of caches on disk.

  Must live as long as the caches that use it.

  Attributes:
    folder: Folder of the files.
    events: Newest reads and writes, see `TransferEvent`.
    nbytes: Total bytes of the arrays.
    bytes_read: Bytes read so far; `bytes_written` likewise.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Check the folder; files are created by `allocate`.

    Raises:
      OptionError: If the folder does not exist.
    """
    self.folder = os.fspath(folder)
    if not os.path.isdir(self.folder):
      raise OptionError(
        "disk", repr(self.folder), "a folder that exists", "make it first"
      )
    self.events: collections.deque[TransferEvent] = collections.deque(
      maxlen=EVENTS
    )
    self.nbytes = self.bytes_read = self.bytes_written = 0
    self.error: RingjaxError | None = None
    self._files: dict[int, _File] = {}

  def allocate(self, shape: Sequence[int], dtype: DTypeLike) -> int:
    """Create an array of blocks [n, ...], all zeros; return its number.

    Raises:
      OptionError: If the disk is full.
    """
    file = _File(self.folder, tuple(shape), np.dtype(dtype))
    number = next(_NUMBERS)
    self._files[number] = file
    self.nbytes += file.each * file.shape[0]
    _OWNERS[number] = self
    return number

  def clear(self) -> None:
    """Release all arrays."""
    for number in self._files:
      _OWNERS.pop(number, None)
    self._files.clear()
    self.nbytes = 0

  def raise_fault(self) -> None:
    """Raise the error of a failed read or write inside of a program.

    Raises:
      OptionError: If a file could not be read or written.
    """
    if self.error is not None:
      error, self.error = self.error, None
      raise error

  def _timed(
    self, what: str, layer: int, nbytes: int, do: Callable[[], Any]
  ) -> Any:
    start = time.monotonic()
    try:
      result = do()
    except OSError as error:
      self.error = OptionError(
        "disk",
        f"{error} while {what} of the cache in {self.folder!r}",
        "a disk that works",
        "look at the disk, and restart the session",
      )
      raise self.error from error
    seconds = time.monotonic() - start
    self.events.append(
      TransferEvent(what, "cache", layer, nbytes, start, seconds)
    )
    return result


def read_blocks(
  number: int, first: int, count: int
) -> Shaped[np.ndarray, "_ ..."]:
  """Read blocks of an array; the next ones are read ahead.

  Args:
    number: Number of the array, of any `CacheFiles`.
    first: First block.
    count: Number of blocks of a layer.

  Raises:
    OptionError: If the `CacheFiles` are gone, or on an I/O error.
  """
  files = _owner(number)
  file = files._files[number]
  nbytes = count * file.each

  def read() -> np.ndarray:
    blocks = file.read(first, count)
    file.prefetch(first + count, count)
    return blocks

  files.bytes_read += nbytes
  return files._timed("read", first // count, nbytes, read)


def write_block(
  number: int, first: int, x: Shaped[np.ndarray, "B K _ _"], count: int
) -> None:
  """Write a block of a layer that has `count` blocks."""
  files = _owner(number)
  file = files._files[number]
  files.bytes_written += x.nbytes
  files._timed("write", first // count, x.nbytes, lambda: file.write(first, x))


def _owner(number: int) -> CacheFiles:
  files = _OWNERS.get(number)
  if files is None or number not in files._files:
    raise OptionError(
      "cache",
      "one on disk whose CacheFiles are gone",
      "files that live as long as the cache",
      "keep the rj.kv.CacheFiles that it was made with",
    )
  return files


_NUMBERS = itertools.count(1)
_OWNERS: weakref.WeakValueDictionary[int, CacheFiles] = (
  weakref.WeakValueDictionary()
)
