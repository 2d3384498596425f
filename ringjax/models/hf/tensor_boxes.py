"""Reads boxes of tensors from a folder's files: some rows, some columns.

Guarantees: bytes of a file that has changed since the folder was opened are
never returned; of an object, a reader that ends checks it once more
(`Folder.unchanged`).
Cost: one read per contiguous run of bytes; short runs are cut out of whole
rows, about a mebibyte of them at a time.

Files are read, not mapped: a mapped file that shrinks ends the process, and its
pages would count as memory of this process.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import threading
import weakref
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Shaped

from ringjax.models.hf.folder import Folder
from ringjax.models.hf.safe_files import (
  fault,
  file_identity,
  open_inside,
  opened_identity,
  shown,
)
from ringjax.paths import ObjectPath

# Shorter runs of bytes are cut out of whole rows; those of an object, each of
# which is a request, are longer.
_RUN_BYTES = 512
_OBJECT_RUN_BYTES = 64 << 10
# Bytes of such rows in memory at a time, unless one row has more.
_ROWS_BYTES = 1 << 20
_OBJECT_ROWS_BYTES = 16 << 20
# Bytes of a request for an object, and requests at a time.
_REQUEST_BYTES = 16 << 20
_REQUESTS = 8


class TensorBoxes:
  """The files of a folder, open for reads of parts of tensors."""

  def __init__(self, folder: Folder):
    self.folder = folder
    self._files: dict[str, int] = {}
    self._objects: dict[str, ObjectPath] = {}
    self._lock = threading.Lock()
    local = isinstance(folder.path, pathlib.Path)
    self._run_bytes = _RUN_BYTES if local else _OBJECT_RUN_BYTES
    self._rows_bytes = _ROWS_BYTES if local else _OBJECT_ROWS_BYTES
    weakref.finalize(self, _close, self._files)

  def read(
    self, name: str, out: Shaped[np.ndarray, " ..."], box: Sequence[slice]
  ) -> None:
    """Reads a box of a tensor.

    Args:
      name: Name of the tensor.
      out: Contiguous array of the box's shape and the tensor's dtype.
      box: Range of each axis of the tensor.

    Raises:
      CheckpointFormatError: If a file has changed or cannot be read.
    """
    info = self.folder.tensors[name]
    size, shape = out.dtype.itemsize, info.shape
    # Axes after `split` are whole: their bytes are contiguous.
    split = len(shape)
    while split and box[split - 1] == slice(0, shape[split - 1]):
      split -= 1
    split = max(split - 1, 0)
    inner = math.prod(shape[split + 1 :])
    first = box[split].start * inner if shape else 0
    run = (out.shape[split] if shape else 1) * inner
    if split and run * size < self._run_bytes:
      self._rows(name, out, box)
      return
    strides = [math.prod(shape[i + 1 :]) for i in range(split)]
    flat = out.reshape(-1, run)
    corners = itertools.product(*(range(b.start, b.stop) for b in box[:split]))
    for row, corner in zip(flat, corners, strict=True):
      start = sum(i * n for i, n in zip(corner, strides, strict=True)) + first
      self._bytes(name, row, info.offset + start * size)

  def _rows(self, name: str, out: np.ndarray, box: Sequence[slice]) -> None:
    """Cuts a box out of whole rows of the first axis."""
    info = self.folder.tensors[name]
    row_size = math.prod(info.shape[1:])
    size = out.dtype.itemsize
    rows_at_once = max(1, self._rows_bytes // (row_size * size))
    for start in range(box[0].start, box[0].stop, rows_at_once):
      stop = min(start + rows_at_once, box[0].stop)
      rows = np.empty((stop - start, *info.shape[1:]), out.dtype)
      self._bytes(name, rows, info.offset + start * row_size * size)
      at = slice(start - box[0].start, stop - box[0].start)
      out[at] = rows[(slice(None), *box[1:])]

  def _bytes(self, name: str, out: np.ndarray, offset: int) -> None:
    """Reads the bytes of an array from a tensor's file."""
    file = self.folder.tensors[name].file
    flat: Any = out.reshape(-1).view(np.uint8)
    unread = memoryview(flat)
    if isinstance(self.folder.path, ObjectPath):
      self._object_bytes(file, unread, offset)
      return
    while unread:
      try:
        count = os.preadv(self._open(file), [unread[: 1 << 30]], offset)
      except OSError as error:
        fault(
          shown(file),
          f"{error.strerror} at byte {offset:,}",
          "a readable file",
          "look at the disk, or download the file again",
        )
      if not count:
        fault(
          shown(file),
          f"an end at byte {offset:,}",
          "the file that was opened; it has changed",
          "leave it alone while it is read",
        )
      unread, offset = unread[count:], offset + count

  def _object_bytes(self, file: str, out: memoryview, offset: int) -> None:
    """Reads bytes of an object, in several requests at a time."""
    place = self._object(file)

    def read(start: int) -> None:
      end = min(start + _REQUEST_BYTES, len(out))
      data = place.store.read(str(place), offset + start, offset + end)
      out[start:end] = data

    starts = range(0, len(out), _REQUEST_BYTES)
    try:
      if len(starts) < 2:
        for start in starts:
          read(start)
        return
      with futures.ThreadPoolExecutor(_REQUESTS) as readers:
        list(readers.map(read, starts))
    except FileNotFoundError:
      self._changed(file, "no such object")

  def _object(self, file: str) -> ObjectPath:
    with self._lock:
      if file not in self._objects:
        path = self.folder.path / file
        assert isinstance(path, ObjectPath)
        try:
          unchanged = file_identity(path) == self.folder.files[file]
        except FileNotFoundError:
          unchanged = False
        if not unchanged:
          self._changed(file, "another object")
        self._objects[file] = path
      return self._objects[file]

  def _open(self, file: str) -> int:
    with self._lock:
      if file not in self._files:
        with open_inside(self.folder.path, file) as opened:
          if opened_identity(opened) != self.folder.files[file]:
            self._changed(file, "another file")
          self._files[file] = os.dup(opened.fileno())
      return self._files[file]

  def _changed(self, file: str, got: str) -> NoReturn:
    fault(
      shown(file),
      got,
      "the file that was opened; it has changed",
      "load the model again",
    )


def _close(files: dict[str, int]) -> None:
  for descriptor in files.values():
    os.close(descriptor)
