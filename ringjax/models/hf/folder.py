"""A Hugging Face model folder: config.json and safetensors files, by stream.

Guarantees: a folder that opens is consistent to the byte (`header.py`), and
nothing in it is ever executed. A read gives each device its own slice: this
process fetches the byte ranges of its own devices, at most `host_bytes` (or one
tensor) of them at a time, with Orbax's reader; the numbers are finite and the
files are still those that were opened, or it is an error.
Cost: `open` reads headers only; a read makes one pass over its bytes and one
reduction on the devices. A tensor of which each device wants a piece of every
row is read by rows and turned on the devices: one more hop of its bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  InputTypeError,
  message,
)
from ringjax.models.hf import header
from ringjax.models.hf.header import AGAIN, shown
from ringjax.models.hf.safe_files import (
  INDEX,
  FileIdentity,
  identity,
  open_inside,
  pread,
  read_config,
  weight_files,
)

_LIMIT = 390


class TensorInfo(NamedTuple):
  """Where one tensor lies, and what it is.

  Attributes:
    file: the name of its file in the folder.
    dtype: as NumPy has it, or its name in the format where NumPy has none.
    shape: as on disk.
    nbytes: as on disk.
    offset: of its first byte in the file.
  """

  file: str
  dtype: np.dtype | str
  shape: tuple[int, ...]
  nbytes: int
  offset: int


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
    if not isinstance(path, str | os.PathLike):
      raise InputTypeError(
        "path", type(path).__name__, "a str or a Path", "pass a folder"
      )
    root = pathlib.Path(path)
    if not root.is_dir():
      _fault(
        "path",
        shown(root),
        "a folder",
        "download the model first: hf download NAME --local-dir FOLDER",
      )
    config = read_config(root)
    files, weight_map = weight_files(root)
    tensors: dict[str, TensorInfo] = {}
    identities: dict[str, FileIdentity] = {}
    for file in files:
      identities[file], found = _header(root, file)
      for name, info in found.items():
        if name in tensors:
          where = f"{shown(tensors[name].file, 40)} and {shown(file, 40)}"
          _fault(shown(name), f"it in {where}", "it once", "remove one file")
        tensors[name] = info
      if len(tensors) > header.MAX_TENSORS:
        _fault("tensors", str(len(tensors)), f"at most {header.MAX_TENSORS}")
    if weight_map is not None:
      _check_index(weight_map, tensors)
    return cls(path=root, config=config, tensors=tensors, files=identities)

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
    missing = [
      f"{shown(name)} {_shape(shape)}"
      for name, shape in expected.items()
      if name not in have
    ]
    extra = [
      f"{shown(name)} {_shape(shape)}"
      for name, shape in have.items()
      if name not in expected and not optional(name)
    ]
    misshapen = [
      f"{shown(name)} {_shape(have[name])}, wanted {_shape(shape)}"
      for name, shape in expected.items()
      if name in have and tuple(shape) != have[name]
    ]
    kinds = {"missing": missing, "extra": extra, "misshapen": misshapen}
    if any(kinds.values()):
      got = ", ".join(f"{len(x)} {kind}" for kind, x in kinds.items() if x)
      parts = ("tensors", got, "those of config.json")
      remedy = "check that config.json and weights belong together"
      room = _LIMIT - len(message(*parts, f": {remedy}"))
      listed = _listed(kinds, room)
      raise CheckpointMismatchError(message(*parts, f"{listed}: {remedy}"))

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
        devices; a tensor that has more is read alone.

    Returns:
      The arrays, in the order of `targets`.

    Raises:
      CheckpointMismatchError: if a tensor is not there, has another shape or
        a dtype that cannot be had, or holds a value that is not finite.
      CheckpointFormatError: if a file has changed since it was opened.
    """
    wanted = {name: self._target(name, t) for name, t in targets.items()}
    self._unchanged(wanted)
    arrays: dict[str, jax.Array] = {}
    before: dict[str, jax.Array] = {}
    # Two batches are on their way: one is read, one goes to the devices.
    for file, names in self._batches(wanted, host_bytes // 2):
      got = self._load(file, {name: _by_rows(wanted[name]) for name in names})
      self._finite(before)
      for name, x in got.items():
        if x.sharding != wanted[name].sharding:
          x = jax.device_put(x, wanted[name].sharding)
          got[name] = jax.block_until_ready(x)
      before = got
      arrays |= got
    self._finite(before)
    self._unchanged(wanted)
    return {name: arrays[name] for name in targets}

  def _target(
    self, name: str, target: jax.ShapeDtypeStruct
  ) -> jax.ShapeDtypeStruct:
    """The target with a sharding, if this folder can serve it."""
    info = self.tensors.get(name)
    if info is None:
      _mismatch(shown(name), "no such tensor", _shape(target.shape))
    if info.shape != tuple(target.shape):
      _mismatch(shown(name), _shape(info.shape), _shape(target.shape))
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

  def _batches(
    self, wanted: Mapping[str, jax.ShapeDtypeStruct], host_bytes: int
  ) -> Iterator[tuple[str, list[str]]]:
    """Names of one file each, neighbours on disk, of `host_bytes` or one."""
    place = lambda name: (self.tensors[name].file, self.tensors[name].offset)
    file, names, nbytes = "", [], 0
    for name in sorted(wanted, key=place):
      info = self.tensors[name]
      if names and (file != info.file or nbytes + info.nbytes > host_bytes):
        yield file, names
        names, nbytes = [], 0
      file, nbytes = info.file, nbytes + info.nbytes
      names.append(name)
    if names:
      yield file, names

  def _load(
    self, file: str, wanted: dict[str, jax.ShapeDtypeStruct]
  ) -> dict[str, jax.Array]:
    """One call of Orbax's reader: one file, so that it reads one header."""
    # Here, because it takes a while and not everybody reads checkpoints.
    from orbax.checkpoint import v1 as ocp

    # Orbax names no type that a flat dict fits.
    load: Any = ocp.load
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    context.safetensors_options.read_chunk_bytes = _CHUNK_BYTES
    context.memory_options.read_concurrent_bytes = _FLIGHT_BYTES
    try:
      # A number too large for its new dtype is found by who looks for those
      # that are not finite.
      with context, np.errstate(over="ignore", invalid="ignore"):
        return load(str(self.path / file), wanted)
    except (OSError, ValueError, KeyError):
      # A file that shrinks while it is read ends in one of many errors.
      self._unchanged(wanted)
      raise

  def _unchanged(self, names: Iterable[str]) -> None:
    """The files of these tensors are those that were opened."""
    for file in dict.fromkeys(self.tensors[name].file for name in names):
      was = self.files[file]
      try:
        now = identity(os.stat(self.path / file))
      except OSError as error:
        now = error.strerror
      if now != was:
        _fault(
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
    width, total = info.dtype.itemsize, math.prod(info.shape)
    step = max(_CHUNK_BYTES // width, 1)
    count, first = 0, -1
    descriptor = open_inside(self.path, info.file)
    try:
      for start in range(0, total, step):
        nbytes = min(step, total - start) * width
        data = pread(descriptor, nbytes, info.offset + start * width)
        if len(data) < nbytes:
          break
        with np.errstate(all="ignore"):
          values = np.frombuffer(data, info.dtype).astype(dtype)
        bad = np.flatnonzero(~np.isfinite(values))
        if first < 0 and bad.size:
          first = start + int(bad[0])
        count += bad.size
    finally:
      os.close(descriptor)
    self._unchanged([name])
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


# ---------------------------------------------------------------------------
# Headers and index
# ---------------------------------------------------------------------------


def _header(
  root: pathlib.Path, file: str
) -> tuple[FileIdentity, dict[str, TensorInfo]]:
  descriptor = open_inside(root, file)
  try:
    was = identity(os.fstat(descriptor))
    first8 = pread(descriptor, 8, 0)
    length = header.header_bytes(file, first8, was.nbytes)
    data = pread(descriptor, length, 8)
  finally:
    os.close(descriptor)
  if len(data) != length:
    _fault(shown(file), "a file that shrinks", "a file at rest")
  start = 8 + length
  entries = header.parse_header(file, data, was.nbytes - start)
  return was, {
    name: TensorInfo(
      file,
      # A dtype without NumPy's equivalent keeps its name.
      header.DTYPES[entry.dtype][1] or entry.dtype,
      entry.shape,
      entry.nbytes,
      start + entry.begin,
    )
    for name, entry in entries.items()
  }


def _check_index(
  weight_map: dict[str, str], tensors: dict[str, TensorInfo]
) -> None:
  for name, file in weight_map.items():
    if name not in tensors or tensors[name].file != file:
      where = tensors[name].file if name in tensors else "no file"
      got = f"{shown(name, 60)} in {shown(where, 40)}"
      _fault(INDEX, got, f"it in {shown(file)}")
  for name, info in tensors.items():
    if name not in weight_map:
      got = f"nothing on {shown(name, 60)} in {shown(info.file, 40)}"
      _fault(INDEX, got, "an entry for every tensor")


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def _shape(shape: tuple[int, ...]) -> str:
  return json.dumps(list(shape))


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


def _fault(argument: str, got: str, want: str, remedy: str = AGAIN) -> NoReturn:
  raise CheckpointFormatError(argument, got, want, remedy)


def _mismatch(
  argument: str,
  got: str,
  want: str,
  remedy: str = "check that config.json and weights belong together",
) -> NoReturn:
  raise CheckpointMismatchError(argument, got, want, remedy)
