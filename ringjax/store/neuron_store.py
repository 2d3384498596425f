"""The neurons of a model's layers: on disk, with a window of each in memory.

Guarantees: `fetch` returns the neurons that `prepare` was asked for, and those
beside them in the window, or reads what it was asked for when another call has
moved the window in between: what is computed of them is right for any order of
calls, from any threads.
Memory: a buffer for each layer, allocated at once; and of a layer that is read
whole one block at a time: `nbytes`.
Ref: Alizadeh et al. 2023, LLM in a Flash, arXiv 2312.11514.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from ringjax.store.neuron_file import NeuronFile, layer_bytes
from ringjax.store.neuron_window import NeuronWindow

# Sizes of what a program gets of a window, as parts of its rows.
_PARTS = (4, 2, 1)
_MULTIPLE = 8
# Neurons of a block of a layer that is read whole.
BLOCK = 512


class Prepared(NamedTuple):
  """What a program does next: which of the sizes, or `whole`; and a ticket."""

  branch: int
  ticket: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuronReport:
  """What a model's neurons on disk came to so far.

  Bytes and reads are those of windows; `whole_` ones are of layers that were
  read whole, for prompts and for calls that needed more than a window holds.

  Attributes:
    layers: how many have their neurons on disk.
    neurons: of all of them.
    window: calls that a neuron stays for.
    max_rows: that the window of each layer has.
    buffer_bytes: of all windows and of one block, what there is at most.
    disk_bytes: of the neurons on disk.
    calls: of a layer, by its window.
    needed: neurons that these asked for.
    fresh: of these, that had to be read.
    used: rows of windows behind these, all added.
    forgotten: sets of neurons that went early, for lack of rows.
    bytes_read: from disk, into windows.
    reads: of the disk, into windows.
    whole_calls: times that a layer was read whole.
    whole_bytes: bytes that were read for these.
    waited_s: seconds that calls waited for the disk.
  """

  layers: int
  neurons: int
  window: int
  max_rows: Mapping[int, int]
  buffer_bytes: int
  disk_bytes: int
  calls: int
  needed: int
  fresh: int
  used: int
  forgotten: int
  bytes_read: int
  reads: int
  whole_calls: int
  whole_bytes: int
  waited_s: int | float

  @property
  def hit_share(self) -> float:
    """Of the neurons that calls needed, the part that was in memory."""
    return 1 - self.fresh / max(self.needed, 1)

  @property
  def active_share(self) -> float:
    """Of all neurons of a layer, the part that a call needs."""
    return self.needed / max(self.calls * self.neurons / self.layers, 1)

  @property
  def resident_share(self) -> float:
    """Of all neurons of a layer, the part that is in memory."""
    return self.used / max(self.calls * self.neurons / self.layers, 1)


class NeuronStore:
  """Windows of the layers of a file.

  Attributes:
    file: has the neurons.
    first: the first part of a neuron that is read; those before are resident.
    window: calls that a neuron stays for.
  """

  def __init__(
    self,
    file: NeuronFile,
    max_rows: Mapping[int, int],
    *,
    window: int,
    first: int = 0,
  ):
    """Allocates all windows.

    Args:
      file: has the neurons.
      max_rows: of each layer's window, by its number.
      window: calls that a neuron stays for.
      first: the first part of a neuron that is read.
    """
    self.file, self.first, self.window = file, first, window
    self._windows = {
      n: NeuronWindow(
        layer.neurons,
        max_rows[n],
        (len(layer.parts) - first, layer.embed),
        file.dtype,
        window=window,
      )
      for n, layer in file.layers.items()
    }
    self._tickets = dict.fromkeys(file.layers, 0)
    self._locks = {n: threading.Lock() for n in file.layers}
    self._counting = threading.Lock()
    self.reset()

  def __deepcopy__(self, memo: dict[int, object]) -> NeuronStore:
    return self

  def reset(self) -> None:
    """Counts from zero again; the windows stay as they are."""
    self._calls = self._needed = self._fresh = self._used = self._forgotten = 0
    self._whole_calls = self._whole_bytes = self._whole_reads = 0
    self._waited_s = 0.0
    self._reads, self._bytes = self.file.reads, self.file.bytes_read

  def sizes(self, number: int) -> tuple[int, ...]:
    """Rows that a program may be given of a layer's window."""
    rows = self._windows[number].max_rows
    each = {-(-rows // (part * _MULTIPLE)) * _MULTIPLE for part in _PARTS}
    return tuple(sorted({min(n, rows) for n in each}))

  def prepare(self, number: int, needed: Bool[np.ndarray, " F"]) -> Prepared:
    """Has the needed neurons of a layer in its window.

    Args:
      number: of the layer.
      needed: which of them.

    Raises:
      CheckpointFormatError: the file has changed, or cannot be read.
    """
    window = self._windows[number]
    ids = np.flatnonzero(needed).astype(np.int32)
    sizes = self.sizes(number)
    if not window.fits(ids):
      return Prepared(len(sizes), -1)
    with self._locks[number]:
      start = time.monotonic()
      done = window.step(ids, self._reading(number))
      self._tickets[number] += 1
      ticket, used = self._tickets[number], window.num_used
    with self._counting:
      self._calls += 1
      self._needed += done.needed
      self._fresh += done.fresh
      self._forgotten += done.forgotten
      self._used += used
      self._waited_s += time.monotonic() - start
    return Prepared(next(n for n, x in enumerate(sizes) if used <= x), ticket)

  def fetch(
    self,
    number: int,
    size: int,
    ticket: int,
    needed: Bool[np.ndarray, " F"],
  ) -> tuple[Shaped[np.ndarray, "R P D"], Int[np.ndarray, " R"]]:
    """Neurons of a layer, and which these are; F for rows without one.

    Args:
      number: of the layer.
      size: R, one of `sizes`.
      ticket: that `prepare` returned.
      needed: what it was called with.

    Raises:
      CheckpointFormatError: the file has changed, or cannot be read.
    """
    window = self._windows[number]
    with self._locks[number]:
      if self._tickets[number] == ticket:
        return window.rows[:size].copy(), window.pointer[:size].copy()
    # Another call was here: the window may not have them any more.
    ids = np.flatnonzero(needed).astype(np.int32)
    rows = np.zeros((size, *window.rows.shape[1:]), window.rows.dtype)
    pointer = np.full(size, window.neurons, np.int32)
    self._reading(number)(ids, rows[: len(ids)])
    pointer[: len(ids)] = ids
    return rows, pointer

  def block(self, number: int, index: int) -> Shaped[np.ndarray, "R P D"]:
    """A block of a layer that is read whole, zeros behind its last neuron.

    Args:
      number: of the layer.
      index: which block.

    Raises:
      CheckpointFormatError: the file has changed, or cannot be read.
    """
    layer, first = self.file.layers[number], self.first
    rows = min(BLOCK, layer.neurons)
    found = np.zeros((rows, len(layer.parts), layer.embed), self.file.dtype)
    start = index * rows
    count = min(rows, layer.neurons - start)
    with self._counting:
      began, reads = time.monotonic(), self.file.reads
      before = self.file.bytes_read
      self.file.block(number, start, found[:count])
      self._whole_calls += index == 0
      self._whole_bytes += self.file.bytes_read - before
      self._whole_reads += self.file.reads - reads
      self._waited_s += time.monotonic() - began
    return np.ascontiguousarray(found[:, first:])

  @property
  def nbytes(self) -> int:
    """Bytes of all windows, of what a call copies of one, and of a block."""
    windows = self._windows.values()
    blocks = [
      layer_bytes(x, self.file.dtype) // x.neurons * min(BLOCK, x.neurons)
      for x in self.file.layers.values()
    ]
    passing = max(max(w.rows.nbytes for w in windows), 2 * max(blocks))
    return sum(w.nbytes for w in windows) + passing

  def report(self) -> NeuronReport:
    """What it came to so far."""
    layers = self.file.layers.values()
    return NeuronReport(
      layers=len(layers),
      neurons=sum(x.neurons for x in layers),
      window=self.window,
      max_rows={n: w.max_rows for n, w in self._windows.items()},
      buffer_bytes=self.nbytes,
      disk_bytes=sum(layer_bytes(x, self.file.dtype) for x in layers),
      calls=self._calls,
      needed=self._needed,
      fresh=self._fresh,
      used=self._used,
      forgotten=self._forgotten,
      bytes_read=self.file.bytes_read - self._bytes - self._whole_bytes,
      reads=self.file.reads - self._reads - self._whole_reads,
      whole_calls=self._whole_calls,
      whole_bytes=self._whole_bytes,
      waited_s=self._waited_s,
    )

  def _reading(self, number: int) -> Callable[[np.ndarray, np.ndarray], None]:
    return lambda ids, out: self.file.read(number, ids, out, first=self.first)
