"""Headers of GGUF files: metadata, and the place of each tensor's bytes.

Guarantees: every count and length is compared with the bytes that are left
before memory of its size is allocated; each tensor is inside of the file, and
no two overlap. Tensors are read through a memory map, and not copied before; of
a file in an object storage by ranges, the header in blocks of 1 MiB and the
bytes of a tensor in one request.
Ref: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import pathlib
import re
import struct
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float, UInt8

from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.paths import (
  AnyPath,
  ObjectArray,
  ObjectFacts,
  ObjectPath,
  as_path,
)
from ringjax.regular_files import inside, open_regular

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_KEY_BYTES = 65_535
_MAX_NAME = 512
_MAX_TENSORS = 200_000
_MAX_ELEMENTS = 1 << 48
_SPLIT = re.compile(
  r"(?P<stem>.*)-(?P<i>\d{5})-of-(?P<of>\d{5})(?P<suffix>\.gguf)", re.I
)
_MAX_SPLITS = 10_000
_DTYPES = {
  0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1",
  10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6


def fault(
  argument: str, got: str, want: str, remedy: str = "download the file again"
) -> NoReturn:
  """Raises the error that a file is refused with."""
  raise CheckpointFormatError(argument, got, want, remedy)


def shown(text: object, limit: int = 72) -> str:
  """A text that comes from a file, printable and short."""
  words = ascii(str(text))[1:-1]
  return words if len(words) <= limit else f"{words[: limit - 3]}..."


def open_inside(root: pathlib.Path, file: str) -> int:
  """A descriptor of a regular file that is really inside of the folder."""
  path = inside(root, file)
  if path is None:
    fault(shown(file), "a link out of the folder", "a file in it", "copy it")
  try:
    return open_regular(path, follow=False)
  except OSError as error:
    fault(shown(file), str(error.strerror), "a readable file")


def package() -> Any:
  """The gguf package, of the extra `gguf`."""
  try:
    import gguf
  except ImportError as error:
    raise OptionError(
      "gguf", "no such package", "the package gguf, to read GGUF files",
      "pip install 'ringjax[gguf]'",
    ) from error  # fmt: skip
  return gguf


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
  """One tensor of a GGUF file.

  Attributes:
    file: Name of its file.
    type: Number of its ggml type.
    shape: Shape as an array, the axis of blocks last.
    offset: Offset of its first byte in the file.
    nbytes: Bytes on disk.
  """

  file: str
  type: int
  shape: tuple[int, ...]
  offset: int
  nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFiles:
  """A GGUF file, or all parts of a split one.

  Attributes:
    path: Folder of the files, or its address.
    name: Name of the file, or of the first part.
    metadata: Metadata of the first part.
    tensors: Tensors by their names in the file.
    status: Status of each file, or facts of the object, when it was checked.
  """

  path: AnyPath
  name: str
  metadata: dict[str, Any]
  tensors: dict[str, GgufTensor]
  status: dict[str, os.stat_result | ObjectFacts]

  def floats(
    self, name: str, index: int | None = None
  ) -> Float[np.ndarray, ...]:
    """Dequantises a tensor, or one index of its first axis, to float32."""
    gguf, t = package(), self.tensors[name]
    kind = gguf.GGMLQuantizationType(t.type)
    if isinstance(self.path, ObjectPath):
      return _dequantised(_object_rows(self.path, t, index), kind)
    with open(open_inside(self.path, t.file), "rb") as file:
      data = np.memmap(file, np.uint8, "r", t.offset, (t.nbytes,))
      rows = data.reshape(*t.shape[:-1], -1)
      return _dequantised(rows if index is None else rows[index], kind)


def _dequantised(
  rows: UInt8[np.ndarray, ...], kind: Any
) -> Float[np.ndarray, ...]:
  # Blocks of bad scales become NaN, which the caller refuses by name.
  with np.errstate(all="ignore"):
    return np.asarray(package().dequantize(rows, kind), np.float32)


def _object_rows(
  folder: ObjectPath, t: GgufTensor, index: int | None
) -> UInt8[np.ndarray, ...]:
  """Bytes of a tensor in an object, or of one index of its first axis."""
  address, start, nbytes, shape = folder / t.file, t.offset, t.nbytes, t.shape
  if index is not None:
    nbytes //= shape[0]
    start, shape = start + index * nbytes, shape[1:]
  data = address.store.read(str(address), start, start + nbytes)
  return np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)


def is_gguf(path: str | os.PathLike[str]) -> bool:
  """Whether a path is a GGUF file, or a folder with one.

  A file counts by its suffix or its first bytes; a folder with a config.json
  and safetensors does not.
  """
  place = as_path(path)
  if place.is_dir():
    names = [entry.name for entry in place.iterdir()]
    if "config.json" in names and any(".safetensors" in x for x in names):
      return False
    return any(map(_has_suffix, names))
  if _has_suffix(place.name):
    return True
  if isinstance(place, ObjectPath):
    return False
  try:
    with open(open_regular(place), "rb") as file:
      return file.read(len(_MAGIC)) == _MAGIC
  except OSError:
    return False


def _has_suffix(name: str) -> bool:
  return name.lower().endswith(SUFFIX)


def open_gguf(path: str | os.PathLike[str]) -> GgufFiles:
  """Reads and checks the headers of a model.

  Args:
    path: A GGUF file, a part of a split one, or a folder with one of these; or
      the address of one.

  Raises:
    CheckpointFormatError: If a file is missing, cut off or contradictory.
    OptionError: If the package gguf, or the client of an address, is not
      installed.
    StorageError: If an object can't be read.
  """
  place = as_path(path).expanduser()
  root, names = place.parent, [place.name]
  if place.is_dir():
    root = place
    names = sorted(x.name for x in root.iterdir() if _has_suffix(x.name))
    stems = {m["stem"] if (m := _SPLIT.fullmatch(n)) else n for n in names}
    if len(stems) != 1:
      fault("folder", f"{len(stems)} GGUF models", "one", "pass its file")
  elif not place.exists():
    fault(shown(place), "no such file", "a GGUF file", "pass another path")
  elif (
    isinstance(place, pathlib.Path) and inside(place.parent, place.name) is None
  ):
    # A link that the caller names may point anywhere; parts are beside its
    # target.
    target = place.resolve()
    root, names = target.parent, [target.name]
  files = _parts(names[0])
  missing = [name for name in files if not (root / name).is_file()]
  if missing:
    want = f"a file of this name, as the model has {len(files)} parts"
    remedy = "put all parts into one folder"
    fault(shown(missing[0]), "no such file", want, remedy)
  metadata: dict[str, Any] = {}
  tensors: dict[str, GgufTensor] = {}
  status: dict[str, os.stat_result | ObjectFacts] = {}
  for number, file in enumerate(files):
    status[file], count, of_file = _read(root, file)
    _check_split(file, count, number, len(files))
    metadata = metadata or count
    for key in ("general.architecture", "split.tensors.count"):
      if key in count and count[key] != metadata.get(key):
        got = f"{key} {shown(count[key])}"
        want = f"{shown(metadata.get(key))}, as in the first part"
        fault(shown(file), got, want, "put parts of one model into a folder")
    for name, tensor in of_file.items():
      if name in tensors:
        fault(shown(file), f"tensor {shown(name)} once more", "it once")
      tensors[name] = tensor
  count = metadata.get("split.tensors.count", len(tensors))
  if count != len(tensors):
    fault(shown(files[0]), f"{len(tensors)} tensors in all", f"{count}")
  return GgufFiles(
    path=root, name=files[0], metadata=metadata, tensors=tensors,
    status=status,
  )  # fmt: skip


def _parts(file: str) -> list[str]:
  """Names of all parts of the model that a file is a part of."""
  part = _SPLIT.fullmatch(file)
  if part is None:
    return [file]
  count, number = int(part["of"]), int(part["i"])
  if not 1 <= number <= count <= _MAX_SPLITS:
    fault(shown(file), f"part {number} of {count}", "a part that there is")
  return [f"{part['stem']}-{i:05}-of-{count:05}{part['suffix']}"
          for i in range(1, count + 1)]  # fmt: skip


def _check_split(
  file: str, metadata: dict[str, Any], number: int, of: int
) -> None:
  count, at = metadata.get("split.count", 0) or 1, metadata.get("split.no", 0)
  if (count, at) != (of, number):
    fault(
      shown(file),
      f"a header of part {at} of {count}, counted from 0",
      f"part {number} of {of}, as its name says",
      "put all parts into one folder, with the names that they came with",
    )


class _Cursor:
  """Cursor in a header, which never reads beyond the end of its file."""

  def __init__(self, label: str, data: mmap.mmap | bytes | ObjectArray):
    self.label, self.data, self.at = label, data, 0

  def take(self, count: int, what: str) -> bytes:
    bytes_left = len(self.data) - self.at
    if count > bytes_left:
      fault(
        self.label,
        f"{what} of {count} bytes, {bytes_left} left",
        "a whole file",
      )
    self.at += count
    # Of a map a copy, as of an object's numbers.
    return bytes(self.data[self.at - count : self.at])

  def number(self, form: str, what: str) -> int:
    return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

  def count(self, each: int, what: str) -> int:
    """Reads a number of items of at least `each` bytes, all in the file."""
    count, bytes_left = self.number("<Q", what), len(self.data) - self.at
    if count * each > bytes_left:
      fault(self.label, f"{count} {what} in {bytes_left} bytes", "a whole file")
    return count

  def text(self, most: int, what: str) -> str:
    data = self.take(self.count(1, f"bytes of {what}"), what)
    if len(data) > most:
      fault(self.label, f"{what} of {len(data)} bytes", f"at most {most}")
    try:
      return data.decode()
    except UnicodeDecodeError:
      fault(self.label, f"{what} that is no UTF-8", "UTF-8")

  def value(self, kind: int, key: str) -> Any:
    label = f"value of {shown(key, 40)}"
    if kind == _STRING:
      return self.text(len(self.data), label)
    if kind == _ARRAY:
      kind = self.number("<I", label)
      if kind == _STRING:
        return [self.text(len(self.data), label)
                for _ in range(self.count(8, f"strings, {label}"))]  # fmt: skip
      dtype = self.dtype(kind, label)
      data = self.take(
        dtype.itemsize * self.count(dtype.itemsize, f"numbers, {label}"), label
      )
      values = np.frombuffer(data, dtype)
      return (values.astype(bool) if kind == _BOOL else values).tolist()
    dtype = self.dtype(kind, label)
    x = np.frombuffer(self.take(dtype.itemsize, label), dtype)[0].item()
    if kind == _FLOAT32 and math.isfinite(x):
      # The decimal that was meant, 1e-5, not its float32 value.
      x = float(str(np.float32(x)))
    return bool(x) if kind == _BOOL else x

  def dtype(self, kind: int, what: str) -> np.dtype:
    if kind not in _DTYPES:
      fault(self.label, f"type {kind}, {what}", "a type of GGUF 3, not nested")
    return np.dtype(_DTYPES[kind])


def _read(
  root: AnyPath, file: str
) -> tuple[os.stat_result | ObjectFacts, dict[str, Any], dict[str, GgufTensor]]:
  if isinstance(root, ObjectPath):
    facts = (root / file).facts()
    if facts is None or facts.size < 24:
      size = "no such object" if facts is None else f"{facts.size} bytes"
      fault(shown(file), size, "at least 24 bytes")
    data = ObjectArray(root / file, np.dtype(np.uint8), 0, facts.size)
    return facts, *_header(file, data)
  with open(open_inside(root, file), "rb") as opened:
    status = os.fstat(opened.fileno())
    if status.st_size < 24:
      fault(shown(file), f"{status.st_size} bytes", "at least 24")
    with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
      return status, *_header(file, data)


def _header(
  file: str, data: mmap.mmap | bytes | ObjectArray
) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
  label = shown(file)
  c = _Cursor(label, data)
  magic = c.take(4, "magic")
  if magic != _MAGIC:
    fault(label, f"a file that begins with {magic!r}", f"{_MAGIC!r}")
  version = c.number("<I", "version")
  if version not in (2, 3):
    big_endian = version in (2 << 24, 3 << 24)
    got = "a big-endian file" if big_endian else f"version {version}"
    fault(label, got, "version 2 or 3, little-endian", "convert it anew")
  tensor_count = c.count(24, "tensors")
  if tensor_count > _MAX_TENSORS:
    fault(label, f"{tensor_count} tensors", f"at most {_MAX_TENSORS}")
  metadata: dict[str, Any] = {}
  for _ in range(c.count(13, "keys")):
    key = c.text(_KEY_BYTES, "a key")
    if key in metadata:
      fault(label, f"the key {shown(key)} twice", "it once")
    metadata[key] = c.value(c.number("<I", "a type"), key)
  infos = [_info(c) for _ in range(tensor_count)]
  align = metadata.get("general.alignment", 32)
  if type(align) is not int or not 0 < align <= 1 << 20 or align % 8:
    fault(label, f"general.alignment {shown(align)}", "a multiple of 8")
  start = -(-c.at // align) * align
  tensors: dict[str, GgufTensor] = {}
  for name, shape, kind, offset in infos:
    if name in tensors:
      fault(label, f"tensor {shown(name)} twice", "it once")
    nbytes = _nbytes(label, name, shape, kind)
    if offset % align or start + offset + nbytes > len(data):
      placement = f"{shown(name)} of {nbytes} bytes at {offset}"
      fault(
        label, placement, f"it aligned to {align}, in a file of {len(data)}"
      )
    tensors[name] = GgufTensor(
      file=file, type=kind, shape=shape, offset=start + offset, nbytes=nbytes
    )
  end, previous = start, ""
  for name, t in sorted(tensors.items(), key=lambda x: x[1].offset):
    if t.offset < end:
      fault(label, f"{shown(name)} over {shown(previous)}", "bytes of one each")
    end, previous = t.offset + t.nbytes, name
  return metadata, tensors


def _info(c: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
  name = c.text(_MAX_NAME, "a tensor's name")
  rank = c.number("<I", "a rank")
  if not 1 <= rank <= 4:
    fault(c.label, f"{shown(name)} with {rank} axes", "1 to 4")
  sizes = [c.number("<Q", "a size") for _ in range(rank)]
  if not all(sizes) or math.prod(sizes) > _MAX_ELEMENTS:
    fault(c.label, f"{shown(name)} of {sizes}", "a size that can be")
  kind, offset = c.number("<I", "a type"), c.number("<Q", "an offset")
  return name, tuple(reversed(sizes)), kind, offset


def _nbytes(label: str, name: str, shape: tuple[int, ...], kind: int) -> int:
  """Bytes of a tensor, of a type that can be dequantised."""
  gguf = package()
  label_of_type = f"type {kind}"
  try:
    ggml_type = gguf.GGMLQuantizationType(kind)
    label_of_type += f", {ggml_type.name}"
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    gguf.dequantize(np.zeros((1, size), np.uint8), ggml_type)
  except (ValueError, KeyError, NotImplementedError):
    fault(
      label, f"{shown(name)} of {label_of_type}",
      "a type that the package gguf dequantises", "convert it to Q8_0 or BF16",
    )  # fmt: skip
  if shape[-1] % block:
    fault(
      label, f"{shown(name)} with rows of {shape[-1]}", f"blocks of {block}"
    )
  return math.prod(shape) // block * size
