"""Reads the weights of layers from a folder, again and again, a layer ahead.

Guarantees: bytes of a file that has changed since the folder was opened are
never returned; the first time that a layer is read, its numbers are finite, or
it is an error (of packed weights the scales; not their products with codes).
Arrays that were returned are not written again.
Cost: a read of a layer's bytes each time that it is asked for, beside the use
of the layer before: while layer n is in use, n + 1 is read, and behind the last
layer the first.
Memory: twice the bytes of the largest layer, however many calls ask at a time,
as long as each lets go of a layer before it asks for the next; nothing a while
after the last one.
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
from ringjax.kv.cache_files import EVENTS, TransferEvent
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.safe_files import DOWNLOAD
from ringjax.models.hf.tensor_boxes import TensorBoxes

# A thread that nobody asks ends, and lets go of what it has read.
_IDLE_S = 10.0
# A call waits no longer than this for others to let go of their layers.
_ROOM_S = 5.0

# Where arrays begin.
_ALIGN = 64
# Numbers that are looked at together.
_CHECKED = 1 << 20

# Of packed weights: bytes that stand for no number.
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
    names: of the tensors, in the order of the first axis where they are
      `stacked`; otherwise one.
    stacked: whether the array has an axis for them.
    shape: of each tensor.
    dtype: of the tensors on disk.
    cuts: the mesh axis that shards each axis of the array, or None.
    codes: whether every byte stands for a number: no check.
    wanted: what floats become.
  """

  names: tuple[str, ...]
  stacked: bool
  shape: tuple[int, ...]
  dtype: np.dtype
  cuts: tuple[str | None, ...] = ()
  codes: bool = False
  wanted: DTypeLike | None = None

  @property
  def whole(self) -> tuple[int, ...]:
    """The shape of the array."""
    return (len(self.names), *self.shape) if self.stacked else self.shape

  def local(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a shard, by the sizes of the mesh's axes."""
    cuts = self.cuts or (None,) * len(self.whole)
    return tuple(
      n if cut is None else n // sizes[cut]
      for n, cut in zip(self.whole, cuts, strict=True)
    )

  @property
  def result_dtype(self) -> np.dtype:
    """Of the array: float64 becomes float32, which JAX has."""
    return np.dtype(np.float32) if self.dtype == np.float64 else self.dtype


@dataclasses.dataclass
class _Entry:
  """A shard of a layer: on its way, there, or lost by an error."""

  nbytes: int
  arrays: tuple[np.ndarray, ...] | None = None
  error: Exception | None = None
  done: bool = False
  dropped: bool = False
  used: int = 0


class LayerReader:
  """Layers of a folder for programs that ask for them in turns.

  Attributes:
    stored_bytes: of all layers on disk.
    reads: how often each layer was read; on a mesh each of its shards.
    bytes_read: bytes of all reads.
    held_bytes: bytes in host memory now, and `peak_bytes` at most so far.
    limit_bytes: bytes that it may have.
    waited_s: seconds that calls have waited for a read.
    events: reads and waits of calls for them, the newest; a call waits for 0
      s, too.
    waiting: called with a text when a call waits for long; or None.
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
    """Prepares; nothing is read yet.

    Args:
      folder: where the tensors are.
      layers: by the number of each layer, what it is made of.
      sizes: of the mesh's axes that shard some part.
      shards: different shards of a layer in this process.
      users: devices of this process that read the same shard.
    """
    self.folder = folder
    self.layers = {n: tuple(parts) for n, parts in layers.items()}
    self.sizes = dict(sizes or {})
    self.shards, self.users = shards, users
    self._order = sorted(self.layers)
    each = {n: self._nbytes(n) for n in self._order}
    self.stored_bytes = sum(
      folder.tensors[name].nbytes
      for parts in self.layers.values()
      for part in parts
      for name in part.names
    )
    self.limit_bytes = 2 * shards * max(each.values(), default=0)
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
    # Arrays may be let go by any thread, in the middle of anything.
    self._changed = threading.Condition(threading.RLock())
    self._thread: threading.Thread | None = None

  def __deepcopy__(self, memo: dict[int, object]) -> LayerReader:
    return self

  def _nbytes(self, number: int) -> int:
    """Bytes of a shard of a layer, as they are held."""
    return sum(
      math.prod(part.local(self.sizes)) * part.result_dtype.itemsize
      for part in self.layers[number]
    )

  def get(self, number: int, at: tuple[int, ...] = ()) -> Any:
    """The arrays of a layer's parts.

    Args:
      number: of the layer.
      at: which shard along each axis of `sizes`.

    Raises:
      CheckpointFormatError: a file that has changed, or an I/O error.
      CheckpointMismatchError: numbers that are not finite.
    """
    key, start = (number, at), time.monotonic()
    while True:
      with self._changed:
        entry = self._entries.get(key)
        mine = entry is None
        if entry is None:
          entry = self._entries[key] = _Entry(self._nbytes(number))
      if mine:
        self._fill(key, entry, demanded=True)
      with self._changed:
        while not entry.done:
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
    """Has the layer behind this one read."""
    place = self._order.index(number)
    after = self._order[(place + 1) % len(self._order)], at
    self._asked_at = time.monotonic()
    if self._thread is None:
      self._thread = threading.Thread(
        target=_ahead, args=(weakref.ref(self),), daemon=True
      )
      self._thread.start()
    if after not in self._entries and after not in self._wanted:
      self._wanted.append(after)
      self._changed.notify_all()

  def release(self) -> None:
    """Lets go of what was read and nobody has asked for yet."""
    with self._changed:
      self._wanted.clear()
      for key, entry in list(self._entries.items()):
        if entry.done:
          del self._entries[key]

  def _ahead(self) -> bool:
    """Reads one layer that is wanted next; whether to go on."""
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
      entry.done = True
      self._changed.notify_all()

  def _room(self, key: Any, entry: _Entry, *, demanded: bool) -> bool:
    """Reserves an entry's bytes; without a demand only if some get free."""
    start = time.monotonic()
    with self._changed:
      while self.held_bytes + entry.nbytes > self.limit_bytes:
        done = [k for k, x in self._entries.items() if x.done]
        spent = [k for k in done if self._entries[k].used >= self.users]
        out = next(iter(spent + (done if demanded else [])), None)
        if out is not None:
          del self._entries[out]
          continue
        waiting = time.monotonic() - start < _ROOM_S
        if not demanded and (done or not waiting):
          # What others have read ahead stays until it is used.
          del self._entries[key]
          entry.done = entry.dropped = True
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
    made = []
    shapes = [part.local(self.sizes) for part in parts]
    spaces = _spaces(shapes, [part.dtype for part in parts])
    for part, x in zip(parts, spaces, strict=True):
      self._part(part, x, at)
      made.append(x.astype(part.result_dtype, copy=False))
    self.folder.unchanged(names)
    if (number, at) not in self._checked:
      for part, x in zip(parts, made, strict=True):
        check_finite(part, x)
      self._checked.add((number, at))
    self.reads[number] += 1
    for x in made:
      self.bytes_read += x.nbytes
      # What was reserved for the whole is free when all arrays are.
      freed: Any = weakref.finalize(x, self._count, -x.nbytes)
      freed.atexit = False
    return tuple(made)

  def _part(
    self, part: StoredPart, out: np.ndarray, at: tuple[int, ...]
  ) -> None:
    """Reads a shard of a part."""
    place = dict(zip(self.sizes, at, strict=True))
    cuts = part.cuts or (None,) * len(part.whole)
    box = [
      slice(0, n)
      if cut is None
      else slice(place[cut] * m, (place[cut] + 1) * m)
      for n, m, cut in zip(part.whole, out.shape, cuts, strict=True)
    ]
    if not part.stacked:
      self._boxes.read(part.names[0], out, box)
      return
    # Indices, as of a vector of scalars the rows are no arrays.
    for row, name in enumerate(part.names[box[0]]):
      self._boxes.read(name, out[row, ...], box[1:])


def _ahead(reader: weakref.ref[LayerReader]) -> None:
  """The thread that reads ahead, as long as its reader is there."""
  while (found := reader()) is not None and found._ahead():
    del found


def _spaces(
  shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]
) -> list[np.ndarray]:
  """Arrays in pages of their own, which the system has back at once.

  What is freed to the allocator stays with the process where smaller things
  came between.

  Args:
    shapes: of the arrays.
    dtypes: of these.
  """
  sizes = [
    math.prod(shape) * dtype.itemsize
    for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  # As JAX wants arrays that it reads in place.
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
    CheckpointMismatchError: some are not.
  """
  if part.codes:
    return
  wanted = x.dtype if part.wanted is None else np.dtype(part.wanted)
  mask, bad = _NOT_FINITE[wanted]
  count, flat = 0, x.reshape(-1)
  for start in range(0, flat.size, _CHECKED):
    some = flat[start : start + _CHECKED]
    with np.errstate(over="ignore", invalid="ignore"):
      some = some.astype(wanted, copy=False)
    bits = some.view(np.dtype(f"u{wanted.itemsize}"))
    count += int(((bits & bits.dtype.type(mask)) == bad).sum())
  if count:
    raise CheckpointMismatchError(
      part.names[0],
      f"{count} of {x.size} values that are not finite",
      "finite values",
      DOWNLOAD,
    )
