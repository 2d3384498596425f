"""Steps in an object storage, which has neither renames nor locks.

  root/.ringjax/data/30.TOKEN/0-0   bytes of arrays: process 0, object 0
  root/.ringjax/30.json             manifest of a step, see manifest.py
  root/.ringjax/writer              lease of the process that writes

Guarantees: a step exists if and only if its manifest does, which is written
last, in one request, and deleted first. The request creates a new step only if
no process has, and replaces an old one, where the storage compares versions
(S3), only if none has replaced it; a process that has lost its lease in between
withdraws the manifest. Objects of a save have a name that no
other save has, so that a step that is saved again is the old one until its new
manifest is there. What a killed process left is ignored, and deleted by the
next process that writes. A piece is compared with its CRC-32 when it is read.
Cost: each process writes its shards, each of them once, in objects of about
`OBJECT_BYTES`, and reads the pieces that overlap its shards, of at most
`PIECE_BYTES` or a row each. A save keeps a copy of this process' shards in host
memory until they are written, a restore about `FLIGHT_BYTES`.

Orbax is not used: its formats need a file system or TensorStore's own clients,
which have other credentials and no test server.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import secrets
import zlib
from collections.abc import Iterable, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from ringjax.errors import CheckpointCorruptError, CheckpointFormatError
from ringjax.paths import ObjectFacts, ObjectPath
from ringjax.train.checkpoints import leaves as leaves_lib
from ringjax.train.checkpoints import manifest as manifests
from ringjax.train.checkpoints.manifest import File, Leaf, Manifest, Piece
from ringjax.train.checkpoints.object_lease import ObjectLease
from ringjax.train.checkpoints.process_group import ProcessGroup

OBJECT_BYTES = 64 << 20
PIECE_BYTES = 16 << 20
FLIGHT_BYTES = 256 << 20
# Requests at a time.
_THREADS = 16
_OURS = ".ringjax"
_LARGEST_BYTES = 256 << 20

# First index and end along each axis of an array.
Box = tuple[tuple[int, int], ...]
# Name of a leaf, index of the first element along each axis, values.
Part = tuple[str, tuple[int, ...], np.ndarray]
# Leaf, start, shape, offset, bytes and CRC-32 of the parts of an object.
_Places = list[tuple[str, tuple[int, ...], tuple[int, ...], int, int, int]]


class ObjectSteps:
  """The steps in a folder of objects, as one process sees and changes them.

  Attributes:
    root: Address of the folder.
  """

  def __init__(self, root: ObjectPath, group: ProcessGroup):
    self.root = root
    self._ours = root / _OURS
    self._group = group
    self._lease = ObjectLease(self._ours / "writer")

  def open(self) -> None:
    """Checks that the root can be listed."""
    self.steps()

  def acquire(self, patience_s: int | float | None = None) -> None:
    """Takes the lease of the process that writes, and cleans up."""
    if not self._lease.active:
      self._lease.acquire(patience_s)
      self.clean_up()

  def release(self) -> None:
    """Gives the lease back."""
    self._lease.release()

  # -------------------------------------------------------------------------
  # Listing
  # -------------------------------------------------------------------------

  def steps(self) -> list[int]:
    """Steps that have a manifest, whatever its content."""
    names = self._ours.store.names(str(self._ours))
    stems = (n.removesuffix(".json") for n in names if n.endswith(".json"))
    return sorted(int(n) for n in stems if n.isdecimal() and str(int(n)) == n)

  def candidates(self) -> list[int]:
    """`steps`: a step without a manifest cannot be told from remains."""
    return self.steps()

  # -------------------------------------------------------------------------
  # Changes
  # -------------------------------------------------------------------------

  def prepare(self, step: int) -> None:
    """Cleans up; names of drafts are always free."""
    del step
    self.clean_up()

  def draft(self, step: int, attempt: int) -> str:
    """Address of a folder that no save has used."""
    return str(self._data(f"{step}.{attempt}-{secrets.token_hex(6)}"))

  def save(
    self, draft: str, values: Mapping[str, Any], leaves: Mapping[str, Leaf]
  ) -> ObjectSaver:
    """Begins to write arrays, which may be donated when this returns."""
    return ObjectSaver(
      ObjectPath(draft),
      {
        name: leaves_lib.local_boxes(x, first=self._group.rank == 0)
        for name, x in values.items()
        if 0 not in leaves[name].shape
      },
      self._group,
    )

  def commit(self, draft: str, manifest: Manifest) -> None:
    """Makes a step of written objects exist; replaces an older one.

    Raises:
      OSError: If an object has another size than was written, another process
        has taken the lease, or the storage refuses.
    """
    self._check_sizes(manifest)
    place, data = self._manifest(manifest.step), manifest.to_bytes()
    for facts in (place.facts(), None):
      # The storage may have taken this process for dead. If it has not until
      # now, a manifest of other facts is that of a process that took its place
      # since.
      self._lease.check()
      if self._write_manifest(place, data, facts):
        break
    else:
      raise self._lease.refusal()
    try:
      self._lease.check()
    except BlockingIOError:
      # The next process may have removed the data, or has written the step.
      with contextlib.suppress(FileNotFoundError):
        if place.read_bytes() == data:
          place.unlink(missing_ok=True)
      raise
    self._remove_data(manifest.step, keep=ObjectPath(draft).name)

  def _write_manifest(
    self, place: ObjectPath, data: bytes, facts: ObjectFacts | None
  ) -> bool:
    """Writes a manifest; False if an older one was deleted meanwhile.

    Raises:
      BlockingIOError: If another process has written one.
    """
    try:
      place.store.write(str(place), data, new=facts is None, replaces=facts)
    except FileExistsError:
      # An attempt whose answer was lost may have written it.
      try:
        if place.read_bytes() != data:
          raise self._lease.refusal() from None
      except FileNotFoundError:
        return False
    return True

  def delete(self, step: int) -> None:
    """Deletes a step, which does not exist once its manifest is deleted.

    Raises:
      BlockingIOError: If another process has taken the lease.
    """
    self._lease.check()
    self._manifest(step).unlink(missing_ok=True)
    self._remove_data(step)

  def clean_up(self) -> None:
    """Removes objects that belong to no step.

    Raises:
      BlockingIOError: If another process has taken the lease.
    """
    folders = set(self._data().store.names(str(self._data())))
    for step in self.steps():
      try:
        folders.discard(self._folder(self.read_manifest(step)))
      except (CheckpointCorruptError, CheckpointFormatError):
        # A damaged manifest may be brought back, and needs its data.
        folders -= {name for name in folders if _step_of(name) == str(step)}
    self._remove(folders)

  def _remove_data(self, step: int, keep: str = "") -> None:
    """Removes the data of a step's number, but that in one folder."""
    names = self._data().store.names(str(self._data()))
    self._remove(x for x in names if _step_of(x) == str(step) and x != keep)

  def _remove(self, names: Iterable[str]) -> None:
    """Removes folders of data that have been listed."""
    names = list(names)
    if names:
      # After the listing: a process that takes the lease has folders of other
      # names, which must not be among these.
      self._lease.check()
    for name in names:
      folder = self._data(name)
      for address in folder.store.find(str(folder)):
        folder.store.delete(address)

  # -------------------------------------------------------------------------
  # Reading
  # -------------------------------------------------------------------------

  def read_manifest(self, step: int) -> Manifest:
    """Reads a step's manifest."""
    place = self._manifest(step)
    try:
      data = place.read_bytes()
    except FileNotFoundError as error:
      raise manifests.corrupt(step, str(place), str(error.strerror)) from None
    if len(data) > _LARGEST_BYTES:
      got = f"it has more than {_LARGEST_BYTES} bytes"
      raise manifests.corrupt(step, str(place), got)
    manifest = Manifest.from_bytes(data, str(place), step)
    if manifest.pieces is None:
      got = "a manifest of a step that Orbax wrote"
      raise manifests.corrupt(step, str(place), got)
    return manifest

  def check(self, manifest: Manifest, verify: str) -> None:
    """Compares sizes; with "full" also the SHA-256 of all objects."""
    self._check_sizes(manifest)
    if verify != "full":
      # `read` compares the CRC-32 of each piece.
      return
    for file in self._group.share(manifest.files):
      data = self._object(file).read_bytes()
      if hashlib.sha256(data).hexdigest() != file.sha256:
        place = str(self._object(file))
        got = "bytes of another SHA-256"
        raise manifests.corrupt(manifest.step, place, got)

  def read(
    self, manifest: Manifest, targets: Mapping[str, Any], verify: str
  ) -> dict[str, Any]:
    """Reads arrays as their targets say."""
    arrays: dict[str, Any] = {}
    with futures.ThreadPoolExecutor(_THREADS, "ringjax reads") as pool:
      for names in _batches(targets):
        boxes = {name: _boxes(targets[name]) for name in names}
        blocks = {
          (name, box): np.empty(_shape(box), targets[name].dtype)
          for name in names
          for box in boxes[name]
        }
        requests = [
          pool.submit(self._fill, manifest, piece, block, box, verify)
          for (name, box), block in blocks.items()
          for piece in _overlapping(manifest, name, box)
        ]
        try:
          for request in requests:
            request.result()
        finally:
          for request in requests:
            request.cancel()
        for name in names:
          own_blocks = {box: blocks[name, box] for box in boxes[name]}
          arrays[name] = _assembled(targets[name], own_blocks)
    return arrays

  def _fill(
    self,
    manifest: Manifest,
    piece: Piece,
    block: Shaped[np.ndarray, ...],
    box: Box,
    verify: str,
  ) -> None:
    """Copies the part of a piece that is in a box."""
    place = self._object(manifest.files[piece.file])
    end = piece.offset + piece.size
    try:
      data = place.store.read(str(place), piece.offset, end)
    except FileNotFoundError:
      got = "no such object"
      raise manifests.corrupt(manifest.step, str(place), got) from None
    if verify != "none" and zlib.crc32(data) != piece.crc32:
      got = f"bytes of another CRC-32 at {piece.offset:,}"
      raise manifests.corrupt(manifest.step, str(place), got)
    dtype = leaves_lib.native_dtype(block.dtype)
    values = np.frombuffer(data, dtype).reshape(piece.shape)
    source, target = [], []
    for start, size, (begin, stop) in zip(
      piece.start, piece.shape, box, strict=True
    ):
      low, high = max(start, begin), min(start + size, stop)
      source.append(slice(low - start, high - start))
      target.append(slice(low - begin, high - begin))
    block[tuple(target)] = values[tuple(source)]

  def _check_sizes(self, manifest: Manifest) -> None:
    folder = self._data(self._folder(manifest))
    sizes = {
      address: facts.size
      for address, facts in folder.store.find(str(folder)).items()
    }
    for file in manifest.files:
      place = str(self._object(file))
      if place not in sizes:
        raise manifests.corrupt(manifest.step, place, "no such object")
      if sizes[place] != file.size:
        got = f"{sizes[place]} of {file.size} bytes"
        raise manifests.corrupt(manifest.step, place, got)

  # -------------------------------------------------------------------------
  # Addresses
  # -------------------------------------------------------------------------

  def _manifest(self, step: int) -> ObjectPath:
    return self._ours / f"{step}.json"

  def _data(self, name: str = "") -> ObjectPath:
    return self._ours / "data" / name

  def _folder(self, manifest: Manifest) -> str:
    """Name of the folder of a step's data: paths of its files begin with it."""
    for file in manifest.files:
      return file.path.partition("/")[0]
    return ""

  def _object(self, file: File) -> ObjectPath:
    return self._data() / file.path


class ObjectSaver:
  """Save of one step: its objects are written in threads.

  Args:
    draft: Address of the folder of the objects.
    boxes: Parts of each array that this process writes: (index of the first
      element along each axis, values).
    group: Processes of the training.
  """

  def __init__(
    self,
    draft: ObjectPath,
    boxes: Mapping[str, list[tuple[tuple[int, ...], np.ndarray]]],
    group: ProcessGroup,
  ):
    self._draft, self._group = draft, group
    self._pool = futures.ThreadPoolExecutor(_THREADS // 2, "ringjax writes")
    self._objects = [
      self._pool.submit(self._write, number, parts)
      for number, parts in enumerate(_objects(boxes))
    ]

  def _write(self, number: int, parts: list[Part]) -> tuple[File, _Places]:
    """Writes an object; returns its facts and the places of its parts."""
    name = f"{self._group.rank}-{number}"
    places: _Places = []
    data = bytearray()
    for leaf, start, values in parts:
      part = values.tobytes()
      crc32 = zlib.crc32(part)
      places.append((leaf, start, values.shape, len(data), len(part), crc32))
      data += part
    content = bytes(data)
    (self._draft / name).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    path = f"{self._draft.name}/{name}"
    return File(path, len(content), zlib.crc32(content), sha256), places

  def wait(self) -> None:
    """Waits until this process has written its objects."""
    for written in self._objects:
      written.result()

  def contents(
    self,
  ) -> tuple[tuple[File, ...], dict[str, tuple[Piece, ...]]]:
    """Objects and pieces of all processes."""
    answers = self._group.all(lambda: [x.result() for x in self._objects])
    files: list[File] = []
    pieces: dict[str, list[Piece]] = {}
    for file, places in itertools.chain(*answers):
      for leaf, start, shape, *place in places:
        piece = Piece(tuple(start), tuple(shape), len(files), *place)
        pieces.setdefault(leaf, []).append(piece)
      files.append(File(*file))
    return tuple(files), {name: tuple(x) for name, x in pieces.items()}

  def close(self) -> None:
    """Ends the threads; what is not written yet is not."""
    # A thread that still writes would leave an object after the clean-up.
    self._pool.shutdown(wait=True, cancel_futures=True)
    self._objects = []


def _step_of(name: str) -> str:
  """Number of the step in the name of a folder of data."""
  return name.partition(".")[0]


def _objects(boxes: Mapping[str, list[Any]]) -> Iterable[list[Part]]:
  """Parts of arrays, in lists of about `OBJECT_BYTES`."""
  parts: list[Part] = []
  size = 0
  for name, starts in boxes.items():
    for start, values in starts:
      for part in _cut(name, start, values):
        if parts and size + part[2].nbytes > OBJECT_BYTES:
          yield parts
          parts, size = [], 0
        parts.append(part)
        size += part[2].nbytes
  if parts:
    yield parts


def _cut(
  name: str, start: tuple[int, ...], values: Shaped[np.ndarray, ...]
) -> Iterable[Part]:
  """Cuts a box into parts of at most `PIECE_BYTES`, or of a row."""
  if not values.ndim:
    yield name, start, values
    return
  rows = max(1, PIECE_BYTES // max(1, values.nbytes // len(values)))
  for first in range(0, len(values), rows):
    begin = (start[0] + first, *start[1:])
    yield name, begin, values[first : first + rows]


def _batches(targets: Mapping[str, Any]) -> Iterable[list[str]]:
  """Names of arrays, in lists of about `FLIGHT_BYTES` of this process."""
  names: list[str] = []
  size = 0
  for name, target in targets.items():
    item = np.dtype(target.dtype).itemsize
    nbytes = item * sum(math.prod(_shape(box)) for box in _boxes(target))
    if names and size + nbytes > FLIGHT_BYTES:
      yield names
      names, size = [], 0
    names.append(name)
    size += nbytes
  if names:
    yield names


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
  index = (slice(None),) * len(shape) if index is None else index
  return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _boxes(target: Any) -> list[Box]:
  """Different parts of an array that this process' devices want."""
  shape = tuple(target.shape)
  if not isinstance(target, jax.ShapeDtypeStruct):
    return [tuple((0, n) for n in shape)]
  assert target.sharding is not None
  indices = target.sharding.addressable_devices_indices_map(shape).values()
  return list(dict.fromkeys(_box(index, shape) for index in indices))


def _shape(box: Box) -> tuple[int, ...]:
  return tuple(stop - start for start, stop in box)


def _overlapping(manifest: Manifest, name: str, box: Box) -> list[Piece]:
  """Pieces of an array that have elements of a box.

  Raises:
    CheckpointCorruptError: If they do not cover the box.
  """
  assert manifest.pieces is not None
  pieces, covered = [], 0
  for piece in manifest.pieces.get(name, ()):
    spans = [
      min(start + size, stop) - max(start, begin)
      for start, size, (begin, stop) in zip(
        piece.start, piece.shape, box, strict=True
      )
    ]
    if all(span > 0 for span in spans):
      pieces.append(piece)
      covered += math.prod(spans)
  if covered != math.prod(_shape(box)):
    raise manifests.corrupt(manifest.step, name, "pieces that do not cover it")
  return pieces


def _assembled(target: Any, blocks: Mapping[Box, np.ndarray]) -> Any:
  """The array of a target, of the parts that this process has."""
  if not isinstance(target, jax.ShapeDtypeStruct):
    return next(iter(blocks.values()))
  shape = tuple(target.shape)
  return jax.make_array_from_callback(
    shape,
    target.sharding,
    lambda index: blocks[_box(index, shape)],
    dtype=target.dtype,
  )
