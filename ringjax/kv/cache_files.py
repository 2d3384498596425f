"""Keys and values of layers in files: blocks that are read and written again.

Guarantees: a block that was written is read as it was; one that was not is
zeros. Files have no names, so that none is left when the process ends, however
it ends. Room on the disk is taken when an array is made: a disk that is full is
an error then, and not in the middle of a text.
Cost: a read of one layer's blocks is one call of the system; the system reads
the next layer ahead while this one is in use, and writes behind.
Memory: the arrays that a program asks for; what the system keeps of files is
memory that it gives up when it is needed.
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

# Events that are kept: of a few thousand steps.
EVENTS = 1 << 16


class TransferEvent(NamedTuple):
  """A transfer between tiers, or a wait for one.

  Fields:
    what: "read" or "write" of a file; "wait" of a call for a layer's read.
    part: "weights" or "cache".
    layer: of the model; of the cache the number among those on disk.
    nbytes: that were moved.
    start: seconds on `time.monotonic`'s clock.
    seconds: that it took.
  """

  what: str
  part: str
  layer: int
  nbytes: int
  start: float
  seconds: float


class _File:
  """One array in a file without a name."""

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
    found = np.empty((count, *self.shape[1:]), self.dtype)
    left, offset = _bytes_of(found), first * self.each
    while left:
      got = os.preadv(self.descriptor, [left[: 1 << 30]], offset)
      if not got:
        raise OSError(f"an end at byte {offset:,}")
      left, offset = left[got:], offset + got
    return found

  def ahead(self, first: int, count: int) -> None:
    """Has the system read blocks while something else goes on."""
    os.posix_fadvise(
      self.descriptor,
      first % self.shape[0] * self.each,
      count * self.each,
      os.POSIX_FADV_WILLNEED,
    )

  def write(self, first: int, x: np.ndarray) -> None:
    left = _bytes_of(np.ascontiguousarray(x))
    offset = first * self.each
    while left:
      got = os.pwritev(self.descriptor, [left[: 1 << 30]], offset)
      left, offset = left[got:], offset + got


def _bytes_of(x: np.ndarray) -> memoryview:
  flat: Any = x.reshape(-1).view(np.uint8)
  return memoryview(flat)


def _nameless(folder: str) -> int:
  """A file of a folder that nothing can open again."""
  try:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
  except (AttributeError, OSError):
    # Not all file systems have these.
    found, path = tempfile.mkstemp(prefix="ringjax-cache-", dir=folder)
    os.unlink(path)
    return found


class CacheFiles:
  """Files of a folder for the layers of caches that are on disk.

  It must live as long as the caches that it was passed for.

  Attributes:
    folder: where they are.
    events: what was read and written, the newest; see `TransferEvent`.
    nbytes: of all arrays.
    bytes_read: from the files so far, and `bytes_written` to them.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Prepares; nothing is made yet.

    Raises:
      OptionError: no such folder.
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
    """The number of a new array of blocks [n, ...], all zeros.

    Raises:
      OptionError: the disk has no room for it.
    """
    made = _File(self.folder, tuple(shape), np.dtype(dtype))
    number = next(_NUMBERS)
    self._files[number] = made
    self.nbytes += made.each * made.shape[0]
    _OWNERS[number] = self
    return number

  def clear(self) -> None:
    """Lets go of all arrays."""
    for number in self._files:
      _OWNERS.pop(number, None)
    self._files.clear()
    self.nbytes = 0

  def raise_fault(self) -> None:
    """Raises the error of a read or write that a program ended with.

    Raises:
      OptionError: a file that could not be read or written.
    """
    if self.error is not None:
      error, self.error = self.error, None
      raise error

  def _timed(
    self, what: str, layer: int, nbytes: int, do: Callable[[], Any]
  ) -> Any:
    start = time.monotonic()
    try:
      found = do()
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
    return found


def read_blocks(number: int, first: int, count: int) -> np.ndarray:
  """Blocks of an array, by its number; the next ones are read ahead.

  Args:
    number: of the array, of whatever `CacheFiles`.
    first: the first block.
    count: how many; those of a layer.

  Raises:
    OptionError: an array whose files are gone, or an I/O error.
  """
  files = _owner(number)
  file = files._files[number]
  nbytes = count * file.each

  def read() -> np.ndarray:
    found = file.read(first, count)
    file.ahead(first + count, count)
    return found

  files.bytes_read += nbytes
  return files._timed("read", first // count, nbytes, read)


def write_block(
  number: int, first: int, x: Shaped[np.ndarray, "B K _ _"], count: int
) -> None:
  """Writes a block; `count` of them are of a layer. See `read_blocks`."""
  files = _owner(number)
  file = files._files[number]
  files.bytes_written += x.nbytes
  files._timed("write", first // count, x.nbytes, lambda: file.write(first, x))


def _owner(number: int) -> CacheFiles:
  found = _OWNERS.get(number)
  if found is None or number not in found._files:
    raise OptionError(
      "cache",
      "one on disk whose CacheFiles are gone",
      "files that live as long as the cache",
      "keep the rj.kv.CacheFiles that it was made with",
    )
  return found


_NUMBERS = itertools.count(1)
_OWNERS: weakref.WeakValueDictionary[int, CacheFiles] = (
  weakref.WeakValueDictionary()
)
