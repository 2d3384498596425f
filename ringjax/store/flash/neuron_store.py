"""The neurons of a model's layers: on disk, with a window of each in memory.

Guarantees: `fetch` returns the window with the neurons that `prepare` was
called with, or reads these again if another call has moved the window in
between: results are right for any order of calls, from any threads.
Memory: a buffer for each layer, allocated at once; and one block at a time of a
layer that is read whole: `nbytes`.
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

from ringjax.store.flash.neuron_file import NeuronFile, layer_bytes
from ringjax.store.flash.neuron_window import NeuronWindow

# A program gets one of these fractions of a window's rows: 1/4, 1/2 or all.
_PARTS = (4, 2, 1)
_MULTIPLE = 8
# Number of neurons of a block, for a layer that is read whole.
BLOCK = 512


class Prepared(NamedTuple):
  """Index of the size that a program fetches, or their number; and a ticket.

  If the branch is the number of sizes, the program reads the whole layer.
  """

  branch: int
  ticket: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuronReport:
  """Counters of a model's neurons on disk so far.

  Bytes and reads are those of windows; the `whole_` counters are of layers that
  were read whole, for prompts and for calls that needed more than a window
  holds.

  Attributes:
    layers: Number of layers with their neurons on disk.
    neurons: Number of neurons of all these layers.
    window: Number of calls that a neuron stays.
    max_rows: Number of rows of each layer's window.
    buffer_bytes: Bytes of all windows and of one block, at most.
    disk_bytes: Bytes of the neurons on disk.
    calls: Number of calls of a layer through its window.
    needed: Number of neurons that these calls needed.
    fresh: Number of these that had to be read.
    used: Number of used rows of the windows, summed over these calls.
    forgotten: Number of sets of neurons dropped early, for lack of rows.
    bytes_read: Bytes read from disk into windows.
    reads: Number of reads from disk into windows.
    whole_calls: Number of times that a layer was read whole.
    whole_bytes: Bytes read for these.
    waited_s: Seconds that calls waited for the disk.
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
    """Fraction of the needed neurons that was in memory."""
    return 1 - self.fresh / max(self.needed, 1)

  @property
  def active_share(self) -> float:
    """Mean fraction of a layer's neurons that a call needs."""
    return self.needed / max(self.calls * self.neurons / self.layers, 1)

  @property
  def resident_share(self) -> float:
    """Mean fraction of a layer's neurons that is in memory."""
    return self.used / max(self.calls * self.neurons / self.layers, 1)


class NeuronStore:
  """Windows of the layers of a file.

  Attributes:
    file: File with the neurons.
    first: Index of the first part of a neuron that is read; those before are
      resident.
    window: Number of calls that a neuron stays.
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
      file: File with the neurons.
      max_rows: Number of rows of each layer's window, by the layer's number.
      window: Number of calls that a neuron stays.
      first: Index of the first part of a neuron that is read.
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
    """Resets the counters to zero; the windows stay as they are."""
    self._calls = self._needed = self._fresh = self._used = self._forgotten = 0
    self._whole_calls = self._whole_bytes = self._whole_reads = 0
    self._waited_s = 0.0
    self._reads, self._bytes = self.file.reads, self.file.bytes_read

  def sizes(self, number: int) -> tuple[int, ...]:
    """Numbers of rows of a layer's window that a program may fetch."""
    rows = self._windows[number].max_rows
    sizes = {-(-rows // (part * _MULTIPLE)) * _MULTIPLE for part in _PARTS}
    return tuple(sorted({min(size, rows) for size in sizes}))

  def prepare(self, number: int, needed: Bool[np.ndarray, " F"]) -> Prepared:
    """Brings the needed neurons of a layer into its window.

    Args:
      number: Number of the layer.
      needed: Mask of the needed neurons, bool [F].

    Raises:
      CheckpointFormatError: If the file has changed, or cannot be read.
    """
    window = self._windows[number]
    ids = np.flatnonzero(needed).astype(np.int32)
    sizes = self.sizes(number)
    if not window.fits(ids):
      return Prepared(len(sizes), -1)
    with self._locks[number]:
      start_s = time.monotonic()
      step = window.step(ids, self._reading(number))
      self._tickets[number] += 1
      ticket, used = self._tickets[number], window.num_used
    with self._counting:
      self._calls += 1
      self._needed += step.needed
      self._fresh += step.fresh
      self._forgotten += step.forgotten
      self._used += used
      self._waited_s += time.monotonic() - start_s
    return Prepared(
      next(n for n, size in enumerate(sizes) if used <= size), ticket
    )

  def fetch(
    self,
    number: int,
    size: int,
    ticket: int,
    needed: Bool[np.ndarray, " F"],
  ) -> tuple[Shaped[np.ndarray, "R P D"], Int[np.ndarray, " R"]]:
    """Fetches rows of a layer's window, and their neurons; F for empty rows.

    Args:
      number: Number of the layer.
      size: Number of rows R, one of `sizes`.
      ticket: Ticket that `prepare` returned.
      needed: Mask that `prepare` was called with.

    Raises:
      CheckpointFormatError: If the file has changed, or cannot be read.
    """
    window = self._windows[number]
    with self._locks[number]:
      if self._tickets[number] == ticket:
        return window.rows[:size].copy(), window.pointer[:size].copy()
    # Another call has moved the window: it may lack the needed neurons.
    ids = np.flatnonzero(needed).astype(np.int32)
    rows = np.zeros((size, *window.rows.shape[1:]), window.rows.dtype)
    pointer = np.full(size, window.neurons, np.int32)
    self._reading(number)(ids, rows[: len(ids)])
    pointer[: len(ids)] = ids
    return rows, pointer

  def block(self, number: int, index: int) -> Shaped[np.ndarray, "R P D"]:
    """Reads a block of a whole layer, with zeros after its last neuron.

    Args:
      number: Number of the layer.
      index: Index of the block.

    Raises:
      CheckpointFormatError: If the file has changed, or cannot be read.
    """
    layer, first = self.file.layers[number], self.first
    rows = min(BLOCK, layer.neurons)
    neurons = np.zeros((rows, len(layer.parts), layer.embed), self.file.dtype)
    start = index * rows
    count = min(rows, layer.neurons - start)
    with self._counting:
      start_s, reads = time.monotonic(), self.file.reads
      bytes_before = self.file.bytes_read
      self.file.block(number, start, neurons[:count])
      self._whole_calls += index == 0
      self._whole_bytes += self.file.bytes_read - bytes_before
      self._whole_reads += self.file.reads - reads
      self._waited_s += time.monotonic() - start_s
    return np.ascontiguousarray(neurons[:, first:])

  @property
  def nbytes(self) -> int:
    """Peak bytes: all windows, and a call's copy of one or of a block."""
    windows = self._windows.values()
    blocks = [
      layer_bytes(layer, self.file.dtype)
      // layer.neurons
      * min(BLOCK, layer.neurons)
      for layer in self.file.layers.values()
    ]
    passing = max(
      max(window.rows.nbytes for window in windows), 2 * max(blocks)
    )
    return sum(window.nbytes for window in windows) + passing

  def report(self) -> NeuronReport:
    """Report the counters so far."""
    layers = self.file.layers.values()
    return NeuronReport(
      layers=len(layers),
      neurons=sum(layer.neurons for layer in layers),
      window=self.window,
      max_rows={n: window.max_rows for n, window in self._windows.items()},
      buffer_bytes=self.nbytes,
      disk_bytes=sum(layer_bytes(layer, self.file.dtype) for layer in layers),
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
