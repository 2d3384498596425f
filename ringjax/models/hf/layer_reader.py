"""Reads the weights of layers from a folder, repeatedly, one layer ahead.

Guarantees: bytes of a file that has changed since the folder was opened are
never returned. The first time that a layer is read, its numbers are checked to
be finite (of packed weights the scales, not their products with codes).
Arrays that were returned are not written again.
Cost: each request reads the layer's bytes, while the layer before is in use:
while layer n is in use, n + 1 is read, and after the last layer the first.
Memory: twice the bytes of the largest layer, however many calls ask at a time,
as long as each releases a layer before it asks for the next; nothing some time
after the last request.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from ringjax.errors import CheckpointMismatchError
from ringjax.kv.offload.cache_files import EVENTS, TransferEvent
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.safe_files import DOWNLOAD
from ringjax.models.hf.tensor_boxes import TensorBoxes

# A thread without requests for this long ends, and releases its arrays.
_IDLE_S = 10.0
# Longest time that a call waits for others to release their layers.
_ROOM_S = 5.0
# Name of the thread that reads ahead.
READ_AHEAD = "ringjax-read-ahead"

# Alignment of arrays in bytes.
_ALIGN = 64
# Numbers that are checked at a time.
_CHECKED = 1 << 20

# (mask, masked bits of a value that is not finite), by dtype.
_NOT_FINITE = {
  np.dtype(np.uint8): (0xFF, 0xFF),
  np.dtype(jnp.float8_e4m3fn): (0x7F, 0x7F),
  np.dtype(jnp.float8_e5m2): (0x7C, 0x7C),
  np.dtype(np.float16): (0x7C00, 0x7C00),
  np.dtype(jnp.bfloat16): (0x7F80, 0x7F80),
  np.dtype(np.float32): (0x7F800000, 0x7F800000),
  np.dtype(np.float64): (0x7FF << 52, 0x7FF << 52),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPart:
  """Tensors of a folder that are read as one array.

  Attributes:
    names: Names of the tensors, in the order of the first axis if `stacked`;
      otherwise one.
    stacked: Whether the array has an axis for them.
    shape: Shape of each tensor.
    dtype: Dtype of the tensors on disk.
    cuts: Mesh axis that shards each axis of the array, or None.
    codes: Whether all bit patterns are valid, so that no check is needed.
    wanted: Dtype that floats are converted to.
  """

  names: tuple[str, ...]
  stacked: bool
  shape: tuple[int, ...]
  dtype: np.dtype
  cuts: tuple[str | None, ...] = ()
  codes: bool = False
  wanted: DTypeLike | None = None

  @property
  def full_shape(self) -> tuple[int, ...]:
    """Shape of the unsharded array."""
    return (len(self.names), *self.shape) if self.stacked else self.shape

  def local(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a shard, by the sizes of the mesh's axes."""
    cuts = self.cuts or (None,) * len(self.full_shape)
    return tuple(
      n if cut is None else n // sizes[cut]
      for n, cut in zip(self.full_shape, cuts, strict=True)
    )

  @property
  def result_dtype(self) -> np.dtype:
    """Dtype of the array: float64 becomes float32, which JAX has."""
    return np.dtype(np.float32) if self.dtype == np.float64 else self.dtype


@dataclasses.dataclass
class _Entry:
  """A shard of a layer: in flight, read, or failed with an error."""

  nbytes: int
  arrays: tuple[np.ndarray, ...] | None = None
  error: Exception | None = None
  finished: bool = False
  dropped: bool = False
  used: int = 0


class LayerReader:
  """Layers of a folder for programs that ask for them in turn.

  Attributes:
    stored_bytes: Bytes of all layers on disk.
    reads: Number of reads of each layer; on a mesh each of its shards counts.
    bytes_read: Bytes of all reads.
    held_bytes: Bytes in host memory now; `peak_bytes` is the maximum so far.
    limit_bytes: Bytes that it may hold.
    waited_s: Seconds that calls have waited for a read.
    events: The newest reads, and waits of calls for them, including waits of
      0 s.
    waiting: Function that is called with a text when a call waits for long; or
      None.
  """

  def __init__(
    self,
    folder: Folder,
    layers: Mapping[int, Sequence[StoredPart]],
    *,
    sizes: Mapping[str, int] | None = None,
    shards: int = 1,
    users: int = 1,
  ):
    """Prepares the reader; nothing is read yet.

    Args:
      folder: Folder of the tensors.
      layers: Stored parts of each layer, by its number.
      sizes: Sizes of the mesh's axes that shard some part.
      shards: Number of different shards of a layer in this process.
      users: Number of devices of this process that read the same shard.
    """
    self.folder = folder
    self.layers = {n: tuple(parts) for n, parts in layers.items()}
    self.sizes = dict(sizes or {})
    self.shards, self.users = shards, users
    self._order = sorted(self.layers)
    layer_bytes = {n: self._nbytes(n) for n in self._order}
    self.stored_bytes = sum(
      folder.tensors[name].nbytes
      for parts in self.layers.values()
      for part in parts
      for name in part.names
    )
    self.limit_bytes = 2 * shards * max(layer_bytes.values(), default=0)
    self.reads: collections.Counter[int] = collections.Counter()
    self.bytes_read = self.held_bytes = self.peak_bytes = 0
    self.waited_s = 0.0
    self.events: collections.deque[TransferEvent] = collections.deque(
      maxlen=EVENTS
    )
    self.waiting: Callable[[str], Any] | None = None
    self._asked_at = time.monotonic()
    self._checked: set[Any] = set()
    self._entries: dict[Any, _Entry] = {}
    self._wanted: collections.deque[Any] = collections.deque()
    self._boxes = TensorBoxes(folder)
    # Arrays may be freed by any thread, at any point: the lock must be
    # reentrant.
    self._changed = threading.Condition(threading.RLock())
    self._thread: threading.Thread | None = None

  def __deepcopy__(self, memo: dict[int, object]) -> LayerReader:
    return self

  def _nbytes(self, number: int) -> int:
    """Bytes in memory of a shard of a layer."""
    return sum(
      math.prod(part.local(self.sizes)) * part.result_dtype.itemsize
      for part in self.layers[number]
    )

  def get(
    self, number: int, at: tuple[int, ...] = ()
  ) -> tuple[np.ndarray, ...] | None:
    """Returns the arrays of a layer's parts, and has the next layer read.

    Args:
      number: Number of the layer.
      at: Index of the shard along each axis of `sizes`.

    Raises:
      CheckpointFormatError: If a file has changed or cannot be read.
      CheckpointMismatchError: If numbers are not finite.
    """
    key, start = (number, at), time.monotonic()
    while True:
      with self._changed:
        entry = self._entries.get(key)
        is_new = entry is None
        if entry is None:
          entry = self._entries[key] = _Entry(self._nbytes(number))
      if is_new:
        self._fill(key, entry, demanded=True)
      with self._changed:
        while not entry.finished:
          if not self._changed.wait(1.0) and self.waiting is not None:
            waited = time.monotonic() - start
            self.waiting(f"layer {number} from disk for {waited:.0f} s so far")
        if entry.dropped:
          continue
        waited = time.monotonic() - start
        self.waited_s += waited
        self.events.append(
          TransferEvent("wait", "weights", number, entry.nbytes, start, waited)
        )
        if entry.error is not None:
          if self._entries.get(key) is entry:
            del self._entries[key]
          raise entry.error
        entry.used += 1
        self._want(number, at)
        return entry.arrays

  def _want(self, number: int, at: tuple[int, ...]) -> None:
    """Requests the layer after this one from the thread."""
    position = self._order.index(number)
    next_layer = self._order[(position + 1) % len(self._order)], at
    self._asked_at = time.monotonic()
    if self._thread is None:
      self._thread = threading.Thread(
        name=READ_AHEAD,
        target=_ahead,
        args=(weakref.ref(self),),
        daemon=True,
      )
      self._thread.start()
    if next_layer not in self._entries and next_layer not in self._wanted:
      self._wanted.append(next_layer)
      self._changed.notify_all()

  def release(self) -> None:
    """Releases arrays that were read ahead and not requested yet."""
    with self._changed:
      self._wanted.clear()
      for key, entry in list(self._entries.items()):
        if entry.finished:
          del self._entries[key]

  def _ahead(self) -> bool:
    """Reads one requested layer; returns whether to continue."""
    with self._changed:
      if not self._wanted:
        self._changed.wait(_IDLE_S)
      if not self._wanted:
        if time.monotonic() - self._asked_at < _IDLE_S:
          return True
        self.release()
        self._thread = None
        return False
      key = self._wanted.popleft()
      if key in self._entries:
        return True
      entry = self._entries[key] = _Entry(self._nbytes(key[0]))
    self._fill(key, entry, demanded=False)
    return True

  def _fill(self, key: Any, entry: _Entry, *, demanded: bool) -> None:
    """Reads a shard of a layer, once there is room for it."""
    if not self._room(key, entry, demanded=demanded):
      return
    start = time.monotonic()
    try:
      entry.arrays = self._read(*key)
      seconds = time.monotonic() - start
      self.events.append(
        TransferEvent("read", "weights", key[0], entry.nbytes, start, seconds)
      )
    except Exception as error:
      entry.error = error
      self._count(-entry.nbytes)
    with self._changed:
      if entry.error is not None and not demanded:
        # A failure between two calls is of neither: whoever needs the layer
        # reads it again and raises what that read meets.
        self._entries.pop(key, None)
        entry.dropped = True
      entry.finished = True
      self._changed.notify_all()

  def _room(self, key: Any, entry: _Entry, *, demanded: bool) -> bool:
    """Reserves an entry's bytes; unless demanded, only if some get free."""
    start = time.monotonic()
    with self._changed:
      while self.held_bytes + entry.nbytes > self.limit_bytes:
        ready = [k for k, x in self._entries.items() if x.finished]
        used_up = [k for k in ready if self._entries[k].used >= self.users]
        dropped = next(iter(used_up + (ready if demanded else [])), None)
        if dropped is not None:
          del self._entries[dropped]
          continue
        waiting = time.monotonic() - start < _ROOM_S
        if not demanded and (ready or not waiting):
          # Layers that others have read ahead stay until they are used.
          del self._entries[key]
          entry.finished = entry.dropped = True
          self._changed.notify_all()
          return False
        if not waiting:
          break
        self._changed.wait(0.05)
      self._count(entry.nbytes)
    return True

  def _count(self, nbytes: int) -> None:
    with self._changed:
      self.held_bytes += nbytes
      self.peak_bytes = max(self.peak_bytes, self.held_bytes)
      self._changed.notify_all()

  def _read(self, number: int, at: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    parts = self.layers[number]
    names = [name for part in parts for name in part.names]
    self.folder.unchanged(names)
    arrays = []
    shapes = [part.local(self.sizes) for part in parts]
    spaces = _spaces(shapes, [part.dtype for part in parts])
    for part, x in zip(parts, spaces, strict=True):
      self._part(part, x, at)
      arrays.append(x.astype(part.result_dtype, copy=False))
    self.folder.unchanged(names)
    if (number, at) not in self._checked:
      for part, x in zip(parts, arrays, strict=True):
        check_finite(part, x)
      self._checked.add((number, at))
    self.reads[number] += 1
    for x in arrays:
      self.bytes_read += x.nbytes
      # The bytes reserved for the layer are free when all its arrays are.
      freed = weakref.finalize(x, self._count, -x.nbytes)
      freed.atexit = False
    return tuple(arrays)

  def _part(
    self, part: StoredPart, out: np.ndarray, at: tuple[int, ...]
  ) -> None:
    """Reads a shard of a part."""
    place = dict(zip(self.sizes, at, strict=True))
    cuts = part.cuts or (None,) * len(part.full_shape)
    box = [
      slice(0, n)
      if cut is None
      else slice(place[cut] * m, (place[cut] + 1) * m)
      for n, m, cut in zip(part.full_shape, out.shape, cuts, strict=True)
    ]
    if not part.stacked:
      self._boxes.read(part.names[0], out, box)
      return
    # `out[row, ...]` is an array even for scalars, unlike `out[row]`.
    for row, name in enumerate(part.names[box[0]]):
      self._boxes.read(name, out[row, ...], box[1:])


def _ahead(reader: weakref.ref[LayerReader]) -> None:
  """Reads ahead in a thread, as long as its reader is alive."""
  while (strong := reader()) is not None and strong._ahead():
    del strong


def _spaces(
  shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]
) -> list[np.ndarray]:
  """Allocates arrays in separate pages, which are given back when freed.

  Memory that the allocator frees stays with the process if smaller blocks lie
  in between.

  Args:
    shapes: Shapes of the arrays.
    dtypes: Dtypes of the arrays.
  """
  sizes = [
    math.prod(shape) * dtype.itemsize
    for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  # Aligned, so that JAX reads the arrays in place.
  starts = [0, *itertools.accumulate(-(-n // _ALIGN) * _ALIGN for n in sizes)]
  kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  pages = mmap.mmap(-1, max(starts[-1], 1), flags=kind)
  return [
    np.ndarray(shape, dtype, pages, start)
    for start, shape, dtype in zip(starts, shapes, dtypes, strict=False)
  ]


def check_finite(part: StoredPart, x: Shaped[np.ndarray, " ..."]) -> None:
  """Refuses numbers that are not finite, by the bits of their exponents.

  Raises:
    CheckpointMismatchError: If some are not finite.
  """
  if part.codes:
    return
  wanted = x.dtype if part.wanted is None else np.dtype(part.wanted)
  mask, not_finite = _NOT_FINITE[wanted]
  count, flat = 0, x.reshape(-1)
  for start in range(0, flat.size, _CHECKED):
    chunk = flat[start : start + _CHECKED]
    with np.errstate(over="ignore", invalid="ignore"):
      chunk = chunk.astype(wanted, copy=False)
    bits = chunk.view(np.dtype(f"u{wanted.itemsize}"))
    count += int(((bits & bits.dtype.type(mask)) == not_finite).sum())
  if count:
    raise CheckpointMismatchError(
      part.names[0],
      f"{count} of {x.size} values that are not finite",
      "finite values",
      DOWNLOAD,
    )
