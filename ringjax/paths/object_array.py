"""A row of numbers in an object, read in blocks when they are needed."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Shaped

from ringjax.errors import StorageError
from ringjax.paths.object_path import ObjectPath

_BLOCK_BYTES = 1 << 20
_BLOCKS = 64


class ObjectArray:
  """Numbers of an object that are sliced as an array is.

  The last blocks that were read stay in memory.

  Args:
    path: Address of the object.
    dtype: Dtype of the numbers.
    offset: Position of the first number in bytes.
    count: Number of numbers.

  Raises:
    FileNotFoundError: If there is no such object.
  """

  def __init__(
    self, path: ObjectPath, dtype: np.dtype, offset: int, count: int
  ):
    self._path, self._dtype = path, dtype
    self._offset, self._count = offset, count
    self._block_size = max(1, _BLOCK_BYTES // dtype.itemsize)
    path.stat()
    self._block = functools.lru_cache(_BLOCKS)(self._read)

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, part: slice) -> Shaped[np.ndarray, " n"]:
    """Numbers of a slice of step 1.

    Raises:
      StorageError: If the object has vanished or changed its size.
    """
    start, stop, step = part.indices(self._count)
    if step != 1:
      raise ValueError(f"got a step of {step}; wanted 1")
    first, last = start // self._block_size, -(-stop // self._block_size)
    if last - first > _BLOCKS:
      return self._numbers(start, stop)
    blocks = [self._block(number) for number in range(first, last)]
    row = np.concatenate([np.empty(0, self._dtype), *blocks])
    return row[start - first * self._block_size :][: max(0, stop - start)]

  def _read(self, number: int) -> Shaped[np.ndarray, " n"]:
    start = number * self._block_size
    return self._numbers(start, min(start + self._block_size, self._count))

  def _numbers(self, start: int, stop: int) -> Shaped[np.ndarray, " n"]:
    """Numbers `start` to `stop`, in one request."""
    size = self._dtype.itemsize
    begin, end = self._offset + start * size, self._offset + stop * size
    address = str(self._path)
    try:
      data = self._path.store.read(address, begin, end)
    except FileNotFoundError as error:
      raise StorageError(
        address[-120:],
        "no such object",
        "the object that was opened",
        "leave it alone while it is read",
        filename=address,
      ) from error
    return np.frombuffer(data, self._dtype)
