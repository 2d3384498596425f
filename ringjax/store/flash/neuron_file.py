"""A file of the neurons of feedforward layers, with reads of single neurons.

A neuron of a gated feedforward is a column of the gate, a column of the
up-projection and a row of the down-projection. *Bundled* these follow one
another, so that one read gets all of them (Alizadeh et al. 2023, LLM in a
Flash, arXiv 2312.11514).

Guarantees: a file is complete or missing; checksums of the returned neurons are
compared when a neuron is first read. A file that was cut, altered or replaced
raises a `CheckpointFormatError`.
Cost: a read for each run of neighbouring neurons; unbundled, for each part of
it. Several threads read runs.
Memory: for writing, one layer and its copy; for reading, the caller's arrays.

  offset  bytes
  0       8      "RJNEUR", a zero, the version
  8       4      bytes of the JSON text, little-endian
  12      4      CRC-32 of the JSON text and of the checksums
  16             the JSON text: model, dtype, layers, their offsets
                 checksums: for each layer uint32 [parts, neurons]
                 zeros up to a multiple of 4,096
                 layer by layer [neurons, parts, embed], or unbundled
                 [parts, neurons, embed]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from ringjax.checks import local_path, positive_int
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
)
from ringjax.json_text import json_text
from ringjax.regular_files import open_regular, replacing

MAGIC = b"RJNEUR\x00\x01"
_HEAD, _ALIGN = 16, 4096
# Buffers per read; the system's limit (IOV_MAX) is 1,024.
_PIECES = 512
_CHUNK = 1024
_REMEDY = "write it again with rj.models.write_neurons"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuronLayer:
  """The neurons of one layer in a file.

  Attributes:
    number: Number of the layer in the model.
    neurons: Number of neurons, F.
    embed: Number of elements of a part, D.
    parts: Names of a neuron's parts in order: "gate" if gated, "up", "down".
    offset: Offset of the layer's first byte in the file.
  """

  number: int
  neurons: int
  embed: int
  parts: tuple[str, ...]
  offset: int = 0


def write_neuron_file(
  path: str | os.PathLike[str],
  layers: Sequence[NeuronLayer],
  arrays: Callable[[int], Sequence[Shaped[np.ndarray, "F D"]]],
  *,
  dtype: np.dtype,
  model: str = "",
  bundled: bool = True,
) -> pathlib.Path:
  """Writes the neurons of layers to a file, and replaces it atomically.

  Args:
    path: Path of the file.
    layers: Description of each layer; their offsets are chosen here.
    arrays: Returns the parts [F, D] of the layer with a number.
    dtype: Dtype of all weights.
    model: Digest of the model, which a reader may compare.
    bundled: Whether a neuron's parts follow one another.

  Raises:
    CheckpointMismatchError: If a weight is not finite.
    CheckpointWriteError: If the disk refuses the file; an older one is intact.
  """
  place = pathlib.Path(local_path("path", path))
  sizes = [
    len(layer.parts) * layer.neurons * layer.embed * dtype.itemsize
    for layer in layers
  ]
  tables = sum(4 * len(layer.parts) * layer.neurons for layer in layers)

  def text(start: int) -> bytes:
    offsets = [start + sum(sizes[:n]) for n in range(len(sizes))]
    header = {
      "model": model,
      "dtype": dtype.name,
      "bundled": bundled,
      "size": start + sum(sizes),
      "layers": [
        dataclasses.asdict(dataclasses.replace(layer, offset=offset))
        for layer, offset in zip(layers, offsets, strict=True)
      ],
    }
    return json_text(header).encode()

  # The header's length depends on the digits of the offsets that are in it:
  # repeat until the start of the layers is stable.
  start = 0
  while start != (next_start := _aligned(_HEAD + len(text(start)) + tables)):
    start = next_start
  header = text(start)
  try:
    with replacing(place) as file:
      file.seek(start)
      sums = b"".join(
        _write_layer(file.write, layer, arrays(layer.number), dtype, bundled)
        for layer in layers
      )
      file.seek(0)
      check = zlib.crc32(sums, zlib.crc32(header))
      file.write(MAGIC + len(header).to_bytes(4, "little"))
      file.write(check.to_bytes(4, "little") + header + sums)
  except OSError as error:
    raise CheckpointWriteError(
      f"{place}",
      f"{error.strerror}",
      f"room for {start + sum(sizes):,} bytes in a folder that can be written",
      "free space, or choose another folder",
      file=f"{place}",
    ) from error
  return place


def _aligned(n: int) -> int:
  return -(-n // _ALIGN) * _ALIGN


def _write_layer(
  write: Callable[[bytes], int],
  layer: NeuronLayer,
  parts: Sequence[np.ndarray],
  dtype: np.dtype,
  bundled: bool,
) -> bytes:
  """Writes a layer and returns its checksums, uint32 [parts, neurons]."""
  sums = np.zeros((len(parts), layer.neurons), np.uint32)
  for p, part in enumerate(parts):
    assert part.shape == (layer.neurons, layer.embed), (layer, part.shape)
    if not np.isfinite(part.astype(np.float32)).all():
      raise CheckpointMismatchError(
        f"layer {layer.number}",
        f"numbers in its {layer.parts[p]} that are not finite",
        "finite weights",
        "look at the model's weights",
      )
    for start in range(0, layer.neurons, _CHUNK):
      rows = np.ascontiguousarray(part[start : start + _CHUNK], dtype)
      for n, row in enumerate(rows):
        sums[p, start + n] = zlib.crc32(row.view(np.uint8))
      if not bundled:
        write(rows.tobytes())
  for start in range(0, layer.neurons if bundled else 0, _CHUNK):
    rows = [part[start : start + _CHUNK].astype(dtype) for part in parts]
    write(np.stack(rows, 1).tobytes())
  return sums.tobytes()


class NeuronFile:
  """Reads neurons of layers by their numbers.

  Attributes:
    path: Path of the file.
    layers: Descriptions of the layers, by number.
    dtype: Dtype of the weights.
    model: Digest of the model that it was written with.
    bundled: Whether a neuron's parts follow one another.
    reads: Number of system calls to read so far; `bytes_read` is their bytes.
  """

  def __init__(self, path: str | os.PathLike[str], *, threads: int = 8):
    """Opens a file.

    Args:
      path: Path of the file.
      threads: Number of concurrent reads.

    Raises:
      CheckpointFormatError: If the file is missing or incomplete.
    """
    self.path = pathlib.Path(local_path("path", path))
    self._threads = positive_int("threads", threads)
    self.reads = self.bytes_read = 0
    try:
      self._file = open_regular(self.path)
    except OSError as error:
      self._fault(f"{error.strerror}", "a readable file")
    self._closing = weakref.finalize(self, os.close, self._file)
    self._identity = self._state()
    try:
      self._sums = self._parse()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
      self._fault(f"a header that is none ({error})", "a whole file of neurons")
    if self._identity[0] != self.size:
      self._fault(f"{self._identity[0]:,} bytes", f"{self.size:,} bytes")
    self._checked = {
      n: np.zeros(sums.shape, bool) for n, sums in self._sums.items()
    }
    self._lock = threading.Lock()
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None

  def _parse(self) -> dict[int, np.ndarray]:
    """Parses the header and returns the checksums of each layer."""
    head = os.pread(self._file, _HEAD, 0)
    if len(head) < _HEAD or head[:8] != MAGIC:
      raise ValueError("it begins otherwise")
    length = int.from_bytes(head[8:12], "little")
    text = os.pread(self._file, length, _HEAD)
    header = json.loads(text.decode())
    records: list[dict[str, Any]] = [
      {**record, "parts": tuple(record["parts"])} for record in header["layers"]
    ]
    layers = [NeuronLayer(**record) for record in records]
    nbytes = sum(4 * len(layer.parts) * layer.neurons for layer in layers)
    sums = os.pread(self._file, nbytes, _HEAD + length)
    if zlib.crc32(sums, zlib.crc32(text)) != int.from_bytes(
      head[12:16], "little"
    ):
      raise ValueError("another checksum than it states")
    self.layers: Mapping[int, NeuronLayer] = {
      layer.number: layer for layer in layers
    }
    self.dtype = np.dtype(jnp.dtype(header["dtype"]))
    self.model, self.size = str(header["model"]), int(header["size"])
    self.bundled = bool(header["bundled"])
    tables: dict[int, np.ndarray] = {}
    offset = 0
    for layer in layers:
      count = len(layer.parts) * layer.neurons
      table = np.frombuffer(sums, np.uint32, count, offset)
      tables[layer.number] = table.reshape(len(layer.parts), layer.neurons)
      offset += 4 * count
    return tables

  def read(
    self,
    number: int,
    ids: Int[np.ndarray, " n"],
    out: Shaped[np.ndarray, "n P D"],
    *,
    first: int = 0,
  ) -> None:
    """Reads neurons of a layer.

    Args:
      number: Number of the layer.
      ids: Neurons to read, in increasing order.
      out: Buffer for them; C-contiguous, of the file's dtype.
      first: Index of the first of their parts to read.

    Raises:
      CheckpointFormatError: If the file has changed, or cannot be read.
    """
    layer = self.layers[number]
    parts = len(layer.parts)
    assert out.shape == (len(ids), parts - first, layer.embed), out.shape
    assert out.flags.c_contiguous and out.dtype == self.dtype
    if self._state() != self._identity:
      self._fault("a file that has changed", "the file that was opened")
    runs = self._runs(layer, ids, out, first)
    if len(runs) > 1 and self._threads > 1:
      list(self._workers().map(self._run, runs))
    else:
      for run in runs:
        self._run(run)
    self._check(layer, ids, out, first)

  def block(
    self, number: int, start: int, out: Shaped[np.ndarray, "n P D"]
  ) -> None:
    """Reads consecutive neurons of a layer, with all parts.

    Args:
      number: Number of the layer.
      start: First neuron.
      out: Buffer for them; C-contiguous, of the file's dtype.

    Raises:
      CheckpointFormatError: If the file has changed, or cannot be read.
    """
    self.read(number, np.arange(start, start + len(out)), out)

  def close(self) -> None:
    """Closes the file; it can't be read any more."""
    if self._pool is not None:
      self._pool.shutdown()
    self._closing()

  def __deepcopy__(self, memo: dict[int, object]) -> NeuronFile:
    return self

  def _runs(
    self, layer: NeuronLayer, ids: np.ndarray, out: np.ndarray, first: int
  ) -> list[tuple[int, list[memoryview]]]:
    """Merge neighbouring neurons to single reads: (offset, buffers)."""
    row = layer.embed * self.dtype.itemsize
    parts = len(layer.parts)
    flat: Any = out.reshape(-1).view(np.uint8)
    raw = memoryview(flat)
    pieces: list[tuple[int, memoryview]] = []
    if self.bundled:
      size = (parts - first) * row
      for n, i in enumerate(ids.tolist()):
        offset = (i * parts + first) * row
        pieces.append((offset, raw[n * size : (n + 1) * size]))
    else:
      stride = (parts - first) * row
      for p in range(first, parts):
        for n, i in enumerate(ids.tolist()):
          begin = n * stride + (p - first) * row
          pieces.append(
            ((p * layer.neurons + i) * row, raw[begin : begin + row])
          )
    runs: list[tuple[int, list[memoryview]]] = []
    end = -1
    for offset, piece in pieces:
      if offset != end or len(runs[-1][1]) == _PIECES:
        runs.append((layer.offset + offset, []))
      runs[-1][1].append(piece)
      end = offset + len(piece)
    return runs

  def _run(self, run: tuple[int, list[memoryview]]) -> None:
    offset, buffers = run
    reads = total = 0
    while buffers:
      try:
        nread = os.preadv(self._file, buffers, offset)
      except OSError as error:
        self._fault(f"{error.strerror} at byte {offset:,}", "a readable file")
      if not nread:
        self._fault(f"an end at byte {offset:,}", f"{self.size:,} bytes")
      reads, total, offset = reads + 1, total + nread, offset + nread
      while buffers and nread >= len(buffers[0]):
        nread -= len(buffers[0])
        buffers = buffers[1:]
      if nread:
        buffers = [buffers[0][nread:], *buffers[1:]]
    with self._lock:
      self.reads += reads
      self.bytes_read += total

  def _check(
    self, layer: NeuronLayer, ids: np.ndarray, out: np.ndarray, first: int
  ) -> None:
    """Compares the checksums of parts that were not read before."""
    checked, sums = self._checked[layer.number], self._sums[layer.number]
    bits = out.view(np.uint8)
    for p in range(first, len(layer.parts)):
      for n in np.flatnonzero(~checked[p, ids]):
        if zlib.crc32(bits[n, p - first]) != sums[p, ids[n]]:
          self._fault(
            f"another {layer.parts[p]} of neuron {ids[n]} in layer "
            f"{layer.number} than was written",
            "its checksum",
          )
        checked[p, ids[n]] = True

  def _workers(self) -> concurrent.futures.ThreadPoolExecutor:
    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(
        self._threads, thread_name_prefix="neurons"
      )
    return self._pool

  def _state(self) -> tuple[int, int]:
    status = os.fstat(self._file)
    return status.st_size, status.st_mtime_ns

  def _fault(self, got: str, wanted: str) -> NoReturn:
    raise CheckpointFormatError(f"{self.path}", got, wanted, _REMEDY)


def layer_bytes(layer: NeuronLayer, dtype: np.dtype) -> int:
  """Bytes of all neurons of a layer."""
  shape = (len(layer.parts), layer.neurons, layer.embed)
  return math.prod(shape) * dtype.itemsize
