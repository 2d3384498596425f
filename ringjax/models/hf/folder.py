"""A Hugging Face model folder: config.json and safetensors, read in streams.

Guarantees: a folder that opens is consistent to the byte (`header.py`), and
nothing in it is ever executed. A read gives each device its slice: this
process fetches the byte ranges of its devices, at most `host_bytes` (or one
tensor) of them at a time, with Orbax's reader or, of an object storage, by
`tensor_boxes.py`. It is an error if numbers are
not finite, or if a file is no longer the one that was opened.
Cost: `open` reads headers only; a read makes one pass over its bytes and one
reduction on the devices. A tensor of which each device wants a part of every
row is read by rows and resharded on the devices: one more hop of its bytes.

Tensors are not read by the safetensors package: it slices no float8, and reads
one slice at a time, while Orbax coalesces the ranges of all devices and reads
in parallel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ringjax.errors import CheckpointMismatchError, message
from ringjax.models.hf import auxiliary_files
from ringjax.models.hf.header import MAX_TENSORS, TensorInfo, read_header
from ringjax.models.hf.safe_files import (
  INDEX,
  FileIdentity,
  as_path,
  fault,
  file_identity,
  open_inside,
  read_config,
  shown,
  weight_files,
)
from ringjax.paths import AnyPath, ObjectPath

_Item = TypeVar("_Item")
_LIMIT = 390
_TOGETHER = "check that config.json and weights belong together"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
  """A model on disk or in an object storage: `Folder.open(path)`.

  Attributes:
    path: Path or address of the folder.
    config: Content of config.json.
    tensors: Every tensor by its name, in the order of files and bytes.
    files: The tensors' files, as they were when they were checked.
  """

  path: AnyPath
  config: dict[str, Any]
  tensors: dict[str, TensorInfo]
  files: dict[str, FileIdentity]

  @classmethod
  def open(cls, path: str | os.PathLike[str]) -> Folder:
    """Reads config.json and the headers of the tensors' files.

    Args:
      path: Folder, or its address. Of its files only config.json,
        *.safetensors and their index are opened.

    Returns:
      The opened folder.

    Raises:
      InputTypeError: If `path` is not a path.
      ConfigError: If config.json is missing or is not strict JSON.
      CheckpointFormatError: If there is no such folder, if there are no
        tensors, or if files and index do not add up.
      UnsafeFormatError: If all weights are in files that run code.
    """
    root = as_path(path)
    if not root.is_dir():
      fault(
        "path",
        shown(root),
        "a folder",
        "make one of the file: python -m ringjax.launch.convert --model=FILE "
        "--out=DIR"
        if root.suffix == ".gguf"
        else "download the model first: hf download NAME --local-dir FOLDER",
      )
    config = read_config(root)
    files, weight_map = weight_files(root)
    tensors: dict[str, TensorInfo] = {}
    identities: dict[str, FileIdentity] = {}
    for file in files:
      identities[file], infos = read_header(root, file)
      for name, info in infos.items():
        if name in tensors:
          both_files = f"{shown(tensors[name].file, 40)} and {shown(file, 40)}"
          fault(
            shown(name), f"it in {both_files}", "it once", "remove one file"
          )
        tensors[name] = info
      if len(tensors) > MAX_TENSORS:
        fault("tensors", str(len(tensors)), f"at most {MAX_TENSORS}")
    if weight_map is not None:
      _check_index(weight_map, tensors)
    return cls(path=root, config=config, tensors=tensors, files=identities)

  def companions(self) -> dict[str, Callable[[pathlib.Path], None]]:
    """Functions that write the files next to the weights, by file name.

    Each function takes the folder to write into.
    """
    return {
      name: functools.partial(auxiliary_files.copy_file, self.path, name)
      for name in auxiliary_files.names(self.path)
    }

  def check(
    self,
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Callable[[str], bool] = lambda name: False,
  ) -> None:
    """Compares the names and shapes of all tensors with those of a model.

    Args:
      expected: Shape of every required tensor.
      optional: Function that says whether a name that is not expected may be
        present (a buffer that is computed again).

    Raises:
      CheckpointMismatchError: If a tensor is missing, of another shape, or
        not known; it lists them, and tensors of other layers as one.
    """
    have = {name: info.shape for name, info in self.tensors.items()}
    kinds: dict[str, list[str]] = {"missing": [], "extra": [], "misshapen": []}
    for name, shape in expected.items():
      if name not in have:
        kinds["missing"].append(f"{shown(name)} {list(shape)}")
      elif have[name] != tuple(shape):
        shapes = f"{list(have[name])}, wanted {list(shape)}"
        kinds["misshapen"].append(f"{shown(name)} {shapes}")
    for name, shape in have.items():
      if name not in expected and not optional(name):
        kinds["extra"].append(f"{shown(name)} {list(shape)}")
    if any(kinds.values()):
      got = ", ".join(f"{len(x)} {kind}" for kind, x in kinds.items() if x)
      parts = ("tensors", got, "those of config.json")
      room = _LIMIT - len(message(*parts, f": {_TOGETHER}"))
      listed = _listed(kinds, room)
      raise CheckpointMismatchError(*parts, f"{listed}: {_TOGETHER}")

  def read(
    self,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    host_bytes: int = 256 << 20,
  ) -> dict[str, Shaped[Array, " ..."]]:
    """Reads tensors into the requested dtypes and shardings.

    In a run of several processes all of them make the same calls.

    Args:
      targets: Shape, dtype and, unless it is the default device, sharding
        of each requested tensor. Floats are cast; others must have the
        dtype that they have on disk.
      host_bytes: Bytes in flight in host memory at a time, including the copies
        of CPU devices; a larger tensor is read alone.

    Returns:
      The arrays, in the order of `targets`.

    Raises:
      CheckpointMismatchError: If a tensor is missing, has another shape or
        a dtype that cannot be cast, or holds a value that is not finite.
      CheckpointFormatError: If a file has changed since it was opened.
    """
    wanted = {name: self._target(name, t) for name, t in targets.items()}
    self.unchanged(wanted)
    arrays: dict[str, jax.Array] = {}
    unchecked: dict[str, jax.Array] = {}
    place = lambda name: (self.tensors[name].file, self.tensors[name].offset)
    nbytes = lambda name: self.nbytes(wanted[name], name)
    # A range of an object is a request.
    most_runs = _MAX_RUNS if isinstance(self.path, pathlib.Path) else 1
    # Two batches are in flight: one is read, one goes to the devices.
    for names in batches(
      sorted(wanted, key=place),
      host_bytes // 2,
      nbytes,
      apart=lambda name: self.tensors[name].file,
    ):
      file = self.tensors[names[0]].file
      loaded = self._load(
        file, {name: _by_rows(wanted[name], most_runs) for name in names}
      )
      self._finite(unchecked)
      for name, x in loaded.items():
        if x.sharding != wanted[name].sharding:
          x = jax.device_put(x, wanted[name].sharding)
          loaded[name] = jax.block_until_ready(x)
      unchecked = loaded
      arrays |= loaded
    self._finite(unchecked)
    self.unchanged(wanted)
    return {name: arrays[name] for name in targets}

  def read_stacked(
    self,
    names: Sequence[str],
    target: jax.ShapeDtypeStruct,
    sharding: jax.sharding.NamedSharding,
  ) -> Shaped[Array, " ..."]:
    """Reads tensors of one shape as an array [n, ...], sharded over them.

    This process reads the tensors that its devices hold, and of each its
    devices' rows. All processes make the same calls.

    Args:
      names: Names of n tensors.
      target: Shape and dtype of each of them, which floats are cast to.
      sharding: Sharding of the array.

    Returns:
      The array.

    Raises:
      CheckpointMismatchError: As `read`.
      CheckpointFormatError: If a file has changed since it was opened.
    """
    shape = (len(names), *target.shape)
    for name in names:
      self._target(name, target)
    self.unchanged(names)
    key_of = lambda place: tuple(
      s.indices(n)[:2] for s, n in zip(place, shape, strict=True)
    )
    places = sharding.addressable_devices_indices_map(shape).values()
    # Devices that hold the same part share it.
    ranges = dict.fromkeys(key_of(place) for place in places)

    def of_range(key: Any) -> np.ndarray:
      (begin, end), *rest = key
      parts = [self._range(name, rest) for name in names[begin:end]]
      # `_finite` finds a number that is too large for its new dtype.
      with np.errstate(over="ignore", invalid="ignore"):
        return np.stack([part.astype(target.dtype) for part in parts])

    with futures.ThreadPoolExecutor(_READERS) as readers:
      host_arrays = dict(
        zip(ranges, readers.map(of_range, ranges), strict=True)
      )
    array = jax.make_array_from_callback(
      shape,
      sharding,
      lambda place: host_arrays[key_of(place)],
      dtype=target.dtype,
    )
    jax.block_until_ready(array)
    self.unchanged(names)
    if jnp.issubdtype(array.dtype, jnp.floating) and not _all_finite(array):
      mesh: Any = sharding.mesh
      finite = jax.device_get(_finite_tensors(mesh, array))
      self._not_finite(names[int(np.argmin(finite))], np.dtype(target.dtype))
    return array

  def _range(self, name: str, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """A part of a tensor, as it is on disk: some rows are read, and then cut.

    Args:
      name: Name of the tensor.
      ranges: First index and end along each of its axes.
    """
    info = self.tensors[name]
    row_bytes = info.nbytes // max(1, info.shape[0])
    first, end = ranges[0]
    data = self._bytes(
      info.file, info.offset + first * row_bytes, (end - first) * row_bytes
    )
    rows = np.frombuffer(data, info.dtype).reshape(-1, *info.shape[1:])
    return rows[(slice(None), *(slice(*r) for r in ranges[1:]))]

  def _bytes(self, file: str, offset: int, nbytes: int) -> bytes:
    """Reads bytes of a file, or of an object in one request."""
    path = self.path / file
    if isinstance(path, ObjectPath):
      return path.store.read(str(path), offset, offset + nbytes)
    with open_inside(self.path, file) as opened:
      opened.seek(offset)
      return opened.read(nbytes)

  def nbytes(self, target: jax.ShapeDtypeStruct, name: str) -> int:
    """Bytes of host memory that a tensor takes while it is read.

    CPU devices share that memory, each with its own shard or copy.

    Args:
      target: Shape, dtype and sharding that it is read as.
      name: Name of the tensor.
    """
    size = self.tensors[name].nbytes
    if target.sharding is None:
      return size
    devices = target.sharding.addressable_devices
    if next(iter(devices)).platform != "cpu":
      return size
    part = math.prod(target.sharding.shard_shape(tuple(target.shape)))
    total = max(1, math.prod(target.shape))
    return max(size, size * part * len(devices) // total)

  def raw(self, name: str) -> Shaped[np.ndarray, ...]:
    """Reads a tensor into host memory, as it is on disk.

    Raises:
      CheckpointMismatchError: If NumPy lacks its dtype.
      CheckpointFormatError: If its file has changed since it was opened.
    """
    self.unchanged([name])
    info = self.tensors[name]
    if isinstance(info.dtype, str):
      _mismatch(shown(name), info.dtype, "a dtype that NumPy has")
    data = self._bytes(info.file, info.offset, info.nbytes)
    return np.frombuffer(data, info.dtype).reshape(info.shape)

  def _target(
    self, name: str, target: jax.ShapeDtypeStruct
  ) -> jax.ShapeDtypeStruct:
    """The target with a sharding; refuses what this folder cannot serve."""
    info = self.tensors.get(name)
    if info is None:
      _mismatch(shown(name), "no such tensor", list(target.shape))
    if info.shape != tuple(target.shape):
      _mismatch(shown(name), list(info.shape), list(target.shape))
    have, want = info.dtype, np.dtype(target.dtype)
    if isinstance(have, str) or (have != want and not _castable(have, want)):
      _mismatch(
        shown(name),
        str(have),
        f"{want} (only floats of at least 16 bits are cast)",
        "packed or quantised weights need their scales, and a "
        "quantization_config that says how they are packed",
      )
    if jax.dtypes.canonicalize_dtype(want) != want:
      _mismatch(
        shown(name),
        f"the target dtype {want} while 64-bit types are off",
        "a dtype of at most 32 bits",
        "ask for another, or jax.config.update('jax_enable_x64', True)",
      )
    sharding = target.sharding or _default_sharding()
    return jax.ShapeDtypeStruct(info.shape, want, sharding=sharding)

  def _load(
    self, file: str, wanted: dict[str, jax.ShapeDtypeStruct]
  ) -> dict[str, jax.Array]:
    """Calls Orbax's reader for one file, so that it reads one header."""
    if isinstance(self.path, ObjectPath):
      return self._load_objects(wanted)
    # Here, because the import takes a while and few callers read checkpoints.
    from orbax.checkpoint import v1 as ocp

    # Orbax declares no type that a flat dict fits.
    load: Any = ocp.load
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    context.safetensors_options.read_chunk_bytes = _CHUNK_BYTES
    context.memory_options.read_concurrent_bytes = _FLIGHT_BYTES
    try:
      # `_finite` finds a number that is too large for its new dtype.
      with context, np.errstate(over="ignore", invalid="ignore"):
        return load(str(self.path / file), wanted)
    except (OSError, ValueError, KeyError):
      # A file that shrinks while it is read can raise many kinds of errors.
      self.unchanged(wanted)
      raise

  def _load_objects(
    self, wanted: dict[str, jax.ShapeDtypeStruct]
  ) -> dict[str, jax.Array]:
    """Reads the parts of tensors that this process' devices want."""
    # It has a folder.
    from ringjax.models.hf.tensor_boxes import TensorBoxes

    boxes = TensorBoxes(self)

    def read(name: str, box: tuple[slice, ...]) -> np.ndarray:
      part = np.empty([s.stop - s.start for s in box], self.tensors[name].dtype)
      boxes.read(name, part, box)
      # `_finite` finds a number that is too large for its new dtype.
      with np.errstate(over="ignore", invalid="ignore"):
        return part.astype(wanted[name].dtype, copy=False)

    with futures.ThreadPoolExecutor(_READERS) as readers:
      parts = {
        (name, str(box)): readers.submit(read, name, box)
        for name, target in wanted.items()
        for box in _local_boxes(target)
      }
      return {
        name: jax.make_array_from_callback(
          target.shape,
          target.sharding,
          lambda index, name=name, shape=target.shape: parts[
            name, str(_whole_slices(index, shape))
          ].result(),
          dtype=target.dtype,
        )
        for name, target in wanted.items()
      }

  def unchanged(self, names: Iterable[str]) -> None:
    """Checks that the tensors' files are those that were opened."""
    for file in dict.fromkeys(self.tensors[name].file for name in names):
      was = self.files[file]
      try:
        current = file_identity(self.path / file)
      except OSError as error:
        current = error.strerror
      if current != was:
        fault(
          shown(file),
          f"{current.nbytes} bytes"
          if isinstance(current, FileIdentity)
          else str(current),
          f"the file of {was.nbytes} bytes that was opened; it has changed",
          "leave it alone while it is read",
        )

  def _finite(self, arrays: Mapping[str, jax.Array]) -> None:
    """Checks that every float is finite, on the devices.

    One array at a time: on CPU devices, many programs with collectives at once
    can wait for each other forever.
    """
    for name, x in arrays.items():
      if jnp.issubdtype(x.dtype, jnp.floating) and not _all_finite(x):
        self._not_finite(name, np.dtype(x.dtype))

  def _not_finite(self, name: str, dtype: np.dtype) -> NoReturn:
    """Raises with the number of non-finite values and the index of one."""
    info = self.tensors[name]
    assert isinstance(info.dtype, np.dtype)
    total, step = math.prod(info.shape), _CHUNK_BYTES // info.dtype.itemsize
    count, first = 0, -1
    with open_inside(self.path, info.file) as file:
      file.seek(info.offset)
      for start in range(0, total, step):
        data = file.read(min(step, total - start) * info.dtype.itemsize)
        values = np.frombuffer(data, info.dtype)
        with np.errstate(all="ignore"):
          not_finite = np.flatnonzero(~np.isfinite(values.astype(dtype)))
        if first < 0 and not_finite.size:
          first = start + int(not_finite[0])
        count += not_finite.size
    self.unchanged([name])
    if not count:
      _mismatch(
        shown(name),
        f"values that are not finite as {dtype} on the devices",
        "those of the file, which are",
        "read again; if it stays, test memory and devices",
      )
    index = [int(i) for i in np.unravel_index(first, info.shape)]
    _mismatch(
      shown(name),
      f"{count} of {total} values not finite as {dtype}, first at {index}",
      "finite values",
      "download the file again, or take a wider dtype",
    )


def batches(
  items: Iterable[_Item],
  most: int,
  nbytes: Callable[[_Item], int],
  apart: Callable[[_Item], object] = lambda item: None,
) -> Iterator[list[_Item]]:
  """Items in their order, in lists of at most `most` bytes or of one item.

  Args:
    items: Items to group.
    most: Largest size of a list in bytes.
    nbytes: Function from an item to its bytes.
    apart: Key of an item; items with different keys are in different lists.
  """
  batch: list[_Item] = []
  size = 0
  for item in items:
    n = nbytes(item)
    if batch and (size + n > most or apart(item) != apart(batch[-1])):
      yield batch
      batch, size = [], 0
    batch.append(item)
    size += n
  if batch:
    yield batch


# Several threads read ranges, in chunks of this size.
_CHUNK_BYTES = 8 << 20
_FLIGHT_BYTES = 64 << 20
# More ranges than this in one tensor cost more than a hop between devices.
_MAX_RUNS = 256

_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())
# Threads that read tensors of `read_stacked`.
_READERS = 8


@functools.partial(jax.jit, static_argnums=0)
def _finite_tensors(
  mesh: jax.sharding.Mesh, x: Shaped[Array, "n ..."]
) -> Shaped[Array, " n"]:
  """Whether each tensor of a stack is finite, known to every process."""
  finite = jnp.isfinite(x).all(tuple(range(1, x.ndim)))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.lax.with_sharding_constraint(finite, everywhere)


def _local_boxes(target: jax.ShapeDtypeStruct) -> list[tuple[slice, ...]]:
  """Different parts of an array that this process' devices want."""
  assert target.sharding is not None
  indices = target.sharding.addressable_devices_indices_map(target.shape)
  boxes = [_whole_slices(index, target.shape) for index in indices.values()]
  return list({str(box): box for box in boxes}.values())


def _whole_slices(
  index: tuple[slice, ...] | None, shape: tuple[int, ...]
) -> tuple[slice, ...]:
  """An index with its first element and end along each axis."""
  index = (slice(None),) * len(shape) if index is None else index
  return tuple(
    slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)
  )


def _castable(have: np.dtype, want: np.dtype) -> bool:
  if (have, want) == (np.dtype(np.int64), np.dtype(np.int32)):
    # Small whole numbers, see `names.WholeNumbers`.
    return True
  return all(
    jnp.issubdtype(x, jnp.floating) and x.itemsize >= 2 for x in (have, want)
  )


def _by_rows(
  target: jax.ShapeDtypeStruct, most_runs: int = _MAX_RUNS
) -> jax.ShapeDtypeStruct:
  """The target sharded by rows, if it has more than `most_runs` ranges."""
  sharding, shape = target.sharding, target.shape
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return target
  # The mesh axes that cut each dimension, up to the last one that is cut.
  cuts = [
    (cut,) if isinstance(cut, str) else tuple(cut or ())
    for cut in sharding.spec
  ]
  while cuts and not cuts[-1]:
    cuts.pop()
  num_shards = lambda *axes: math.prod(
    sharding.mesh.shape[axis] for axis in axes
  )
  axes = tuple(axis for cut in cuts for axis in cut)
  if len(cuts) < 2 or shape[0] % num_shards(*axes):
    return target
  if math.prod(shape[: len(cuts) - 1]) * num_shards(*cuts[-1]) <= most_runs:
    return target
  rows = jax.sharding.PartitionSpec(axes)
  return jax.ShapeDtypeStruct(
    shape,
    target.dtype,
    sharding=jax.sharding.NamedSharding(
      sharding.mesh, rows, memory_kind=sharding.memory_kind
    ),
  )


def _default_sharding() -> jax.sharding.Sharding:
  config: Any = jax.config
  device = config.jax_default_device
  if isinstance(device, str):
    device = jax.local_devices(backend=device)[0]
  return jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])


def _check_index(
  weight_map: dict[str, str], tensors: dict[str, TensorInfo]
) -> None:
  """Compares the index with the headers of its files."""
  for name in weight_map | tensors:
    listed = weight_map.get(name, "no file")
    stored_in = tensors[name].file if name in tensors else "no file"
    if listed != stored_in:
      got = f"{shown(name, 60)} in {shown(stored_in, 40)}"
      fault(INDEX, got, f"it in {shown(listed)}, as the index says")


def _listed(kinds: Mapping[str, list[str]], room: int) -> str:
  """Lists up to ten tensors; those that differ in numbers only count as one."""
  lines: list[str] = []
  for kind, tensors in kinds.items():
    alike: dict[str, list[str]] = {}
    for text in tensors:
      alike.setdefault(_NUMBER.sub(".*.", text), []).append(text)
    for group in alike.values():
      alike_text = f" and {len(group) - 1} alike" if len(group) > 1 else ""
      lines.append(f"{kind} {group[0]}{alike_text}")
  text = ""
  for line in lines[:10]:
    longer = f"{text}; {line}" if text else line
    if len(longer) > room and text:
      return text
    text = longer
  return text


_NUMBER = re.compile(r"\.\d+\.")


def _mismatch(
  argument: str, got: object, want: object, remedy: str = _TOGETHER
) -> NoReturn:
  raise CheckpointMismatchError(argument, got, want, remedy)
