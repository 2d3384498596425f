"""A Hugging Face model folder: config.json and safetensors files, by stream.

Guarantees: a folder that opens is consistent to the byte (`header.py`), and
nothing in it is ever executed. A read gives each device its own slice: this
process fetches the byte ranges of its own devices, at most `host_bytes` (or one
tensor) of them at a time, with Orbax's reader; the numbers are finite and the
files are still those that were opened, or it is an error.
Cost: `open` reads headers only; a read makes one pass over its bytes and one
reduction on the devices. A tensor of which each device wants a piece of every
row is read by rows and resharded on the devices: one more hop of its bytes.

Tensors are not read by safetensors: it slices no float8, and reads one slice at
a time where Orbax coalesces the ranges of all devices and reads in parallel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from ringjax.errors import CheckpointMismatchError, message
from ringjax.models.hf import auxiliary_files
from ringjax.models.hf.header import MAX_TENSORS, TensorInfo, read_header
from ringjax.models.hf.safe_files import (
  INDEX,
  FileIdentity,
  as_path,
  fault,
  identity,
  open_inside,
  read_config,
  shown,
  weight_files,
)

_Item = TypeVar("_Item")
_LIMIT = 390
_TOGETHER = "check that config.json and weights belong together"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
  """A model on disk: `Folder.open(path)`.

  Attributes:
    path: the folder.
    config: config.json.
    tensors: every tensor by its name, in the order of files and bytes.
    files: the files that hold them, as they were when they were checked.
  """

  path: pathlib.Path
  config: dict[str, Any]
  tensors: dict[str, TensorInfo]
  files: dict[str, FileIdentity]

  @classmethod
  def open(cls, path: str | os.PathLike[str]) -> Folder:
    """Reads config.json and the headers of the tensors' files.

    Args:
      path: a folder. Of its files only config.json, *.safetensors and their
        index are opened.

    Returns:
      What is in it.

    Raises:
      InputTypeError: if `path` is no path.
      ConfigError: if config.json is missing or is not strict JSON.
      CheckpointFormatError: if there is no such folder, if there are no
        tensors, or if files and index do not add up.
      UnsafeFormatError: if there are weights only in files that run code.
    """
    root = as_path(path)
    if not root.is_dir():
      fault(
        "path",
        shown(root),
        "a folder",
        "make one of the file: python -m launch.convert --model=FILE --out=DIR"
        if root.suffix == ".gguf"
        else "download the model first: hf download NAME --local-dir FOLDER",
      )
    config = read_config(root)
    files, weight_map = weight_files(root)
    tensors: dict[str, TensorInfo] = {}
    identities: dict[str, FileIdentity] = {}
    for file in files:
      identities[file], found = read_header(root, file)
      for name, info in found.items():
        if name in tensors:
          where = f"{shown(tensors[name].file, 40)} and {shown(file, 40)}"
          fault(shown(name), f"it in {where}", "it once", "remove one file")
        tensors[name] = info
      if len(tensors) > MAX_TENSORS:
        fault("tensors", str(len(tensors)), f"at most {MAX_TENSORS}")
    if weight_map is not None:
      _check_index(weight_map, tensors)
    return cls(path=root, config=config, tensors=tensors, files=identities)

  def companions(self) -> dict[str, Callable[[pathlib.Path], None]]:
    """Files that go with the weights: by their names, what writes each.

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
      expected: the shape of every tensor that must be there.
      optional: says of a name that is not expected whether it may be there
        (a buffer that is computed again).

    Raises:
      CheckpointMismatchError: if a tensor is missing, of another shape, or
        not known; it lists them, alike ones (other layers) as one.
    """
    have = {name: info.shape for name, info in self.tensors.items()}
    kinds: dict[str, list[str]] = {"missing": [], "extra": [], "misshapen": []}
    for name, shape in expected.items():
      if name not in have:
        kinds["missing"].append(f"{shown(name)} {list(shape)}")
      elif have[name] != tuple(shape):
        both = f"{list(have[name])}, wanted {list(shape)}"
        kinds["misshapen"].append(f"{shown(name)} {both}")
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
  ) -> dict[str, jax.Array]:
    """Reads tensors into the dtypes and shardings that are asked for.

    In a run of several processes all of them make the same calls.

    Args:
      targets: shape, dtype and, where it is not the default device, sharding
        of each tensor that is wanted. Floats are cast; all else must have the
        dtype that it has on disk.
      host_bytes: bytes to have in host memory at a time on their way to the
        devices, the copies of CPU devices counted; a tensor that has more is
        read alone.

    Returns:
      The arrays, in the order of `targets`.

    Raises:
      CheckpointMismatchError: if a tensor is not there, has another shape or
        a dtype that cannot be had, or holds a value that is not finite.
      CheckpointFormatError: if a file has changed since it was opened.
    """
    wanted = {name: self._target(name, t) for name, t in targets.items()}
    self.unchanged(wanted)
    arrays: dict[str, jax.Array] = {}
    before: dict[str, jax.Array] = {}
    place = lambda name: (self.tensors[name].file, self.tensors[name].offset)
    nbytes = lambda name: self.nbytes(wanted[name], name)
    # Two batches are on their way: one is read, one goes to the devices.
    for names in batches(
      sorted(wanted, key=place),
      host_bytes // 2,
      nbytes,
      apart=lambda name: self.tensors[name].file,
    ):
      file = self.tensors[names[0]].file
      got = self._load(file, {name: _by_rows(wanted[name]) for name in names})
      self._finite(before)
      for name, x in got.items():
        if x.sharding != wanted[name].sharding:
          x = jax.device_put(x, wanted[name].sharding)
          got[name] = jax.block_until_ready(x)
      before = got
      arrays |= got
    self._finite(before)
    self.unchanged(wanted)
    return {name: arrays[name] for name in targets}

  def nbytes(self, target: jax.ShapeDtypeStruct, name: str) -> int:
    """Bytes of the host's memory that a tensor takes on its way.

    CPU devices are in that memory, each with its own part or copy.

    Args:
      target: as what it is read.
      name: the tensor's.
    """
    size = self.tensors[name].nbytes
    if target.sharding is None:
      return size
    devices = target.sharding.addressable_devices
    if next(iter(devices)).platform != "cpu":
      return size
    part = math.prod(target.sharding.shard_shape(tuple(target.shape)))
    whole = max(1, math.prod(target.shape))
    return max(size, size * part * len(devices) // whole)

  def raw(self, name: str) -> Shaped[np.ndarray, ...]:
    """A tensor as it is on disk, in the memory of the host.

    Raises:
      CheckpointMismatchError: NumPy lacks its dtype.
      CheckpointFormatError: its file has changed since it was opened.
    """
    self.unchanged([name])
    info = self.tensors[name]
    if isinstance(info.dtype, str):
      _mismatch(shown(name), info.dtype, "a dtype that NumPy has")
    with open(open_inside(self.path, info.file), "rb") as file:
      file.seek(info.offset)
      data = file.read(info.nbytes)
    return np.frombuffer(data, info.dtype).reshape(info.shape)

  def _target(
    self, name: str, target: jax.ShapeDtypeStruct
  ) -> jax.ShapeDtypeStruct:
    """The target with a sharding, if this folder can serve it."""
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
    """One call of Orbax's reader: one file, so that it reads one header."""
    # Here, because the import takes a while and few callers read checkpoints.
    from orbax.checkpoint import v1 as ocp

    # Orbax names no type that a flat dict fits.
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
      # A file that shrinks while it is read ends in one of many errors.
      self.unchanged(wanted)
      raise

  def unchanged(self, names: Iterable[str]) -> None:
    """The files of these tensors are those that were opened."""
    for file in dict.fromkeys(self.tensors[name].file for name in names):
      was = self.files[file]
      try:
        now = identity(os.stat(self.path / file))
      except OSError as error:
        now = error.strerror
      if now != was:
        fault(
          shown(file),
          f"{now.nbytes} bytes" if isinstance(now, FileIdentity) else str(now),
          f"the file of {was.nbytes} bytes that was opened; it has changed",
          "leave it alone while it is read",
        )

  def _finite(self, arrays: Mapping[str, jax.Array]) -> None:
    """Every float is finite, on the devices.

    One array at a time: on CPU devices, programs that wait for other devices
    wait for ever when there are many of them.
    """
    for name, x in arrays.items():
      if jnp.issubdtype(x.dtype, jnp.floating) and not _all_finite(x):
        self._not_finite(name, np.dtype(x.dtype))

  def _not_finite(self, name: str, dtype: np.dtype) -> NoReturn:
    """Says how many values are not finite, and where the first one is."""
    info = self.tensors[name]
    assert isinstance(info.dtype, np.dtype)
    total, step = math.prod(info.shape), _CHUNK_BYTES // info.dtype.itemsize
    count, first = 0, -1
    with open(open_inside(self.path, info.file), "rb") as file:
      file.seek(info.offset)
      for start in range(0, total, step):
        values = np.fromfile(file, info.dtype, min(step, total - start))
        with np.errstate(all="ignore"):
          bad = np.flatnonzero(~np.isfinite(values.astype(dtype)))
        if first < 0 and bad.size:
          first = start + int(bad[0])
        count += bad.size
    self.unchanged([name])
    if not count:
      _mismatch(
        shown(name),
        f"values that are not finite as {dtype} on the devices",
        "those of the file, which are",
        "read again; if it stays, test memory and devices",
      )
    where = [int(i) for i in np.unravel_index(first, info.shape)]
    _mismatch(
      shown(name),
      f"{count} of {total} values not finite as {dtype}, first at {where}",
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
    items: what is grouped.
    most: bytes of a list.
    nbytes: bytes of an item.
    apart: items for which this differs are not in one list.
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


# Ranges are read by several threads, in pieces of this size.
_CHUNK_BYTES = 8 << 20
_FLIGHT_BYTES = 64 << 20
# More ranges than this of one tensor cost more than a hop between devices.
_MAX_RUNS = 256

_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def _castable(have: np.dtype, want: np.dtype) -> bool:
  return all(
    jnp.issubdtype(x, jnp.floating) and x.itemsize >= 2 for x in (have, want)
  )


def _by_rows(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """The target cut along rows, where its own cut shatters into ranges."""
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
  ways = lambda *axes: math.prod(sharding.mesh.shape[axis] for axis in axes)
  axes = tuple(axis for cut in cuts for axis in cut)
  if len(cuts) < 2 or shape[0] % ways(*axes):
    return target
  if math.prod(shape[: len(cuts) - 1]) * ways(*cuts[-1]) <= _MAX_RUNS:
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
    found = tensors[name].file if name in tensors else "no file"
    if listed != found:
      got = f"{shown(name, 60)} in {shown(found, 40)}"
      fault(INDEX, got, f"it in {shown(listed)}, as the index says")


def _listed(kinds: Mapping[str, list[str]], room: int) -> str:
  """Up to ten of the tensors, one of those that differ in numbers only."""
  lines: list[str] = []
  for kind, tensors in kinds.items():
    alike: dict[str, list[str]] = {}
    for text in tensors:
      alike.setdefault(_NUMBER.sub(".*.", text), []).append(text)
    for group in alike.values():
      more = f" and {len(group) - 1} alike" if len(group) > 1 else ""
      lines.append(f"{kind} {group[0]}{more}")
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
