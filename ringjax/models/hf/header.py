"""The header of a safetensors file: read by safetensors, then checked further.

Guarantees: a header that passes describes every byte of the file once. It is
checked before a tensor is allocated, and costs a few times its length.
The library finds wrong JSON, types, dtypes, sizes, holes and overlaps. Checked
here is what it accepts: a name that comes twice (readers may take either),
names that could be paths or are not printable, unknown fields, absurd sizes and
ranks, and git-lfs pointers. It gives no offsets: those are from the JSON.
Ref: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from ringjax.models.hf.safe_files import (
  FileIdentity,
  fault,
  file_identity,
  open_inside,
  opened_identity,
  shown,
  strict_json,
)
from ringjax.paths import AnyPath

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 200_000
MAX_RANK = 8
MAX_NAME = 512
# Largest number of elements of a tensor, with sizes of 0 counted as 1.
MAX_ELEMENTS = 1 << 48

# Dtypes of the format that NumPy has; the others keep their name.
DTYPES: dict[str, np.dtype] = {
  name: np.dtype(dtype)
  for name, dtype in {
    "BOOL": np.bool_,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
  }.items()
}
# Dtypes as which tensors are read: powers of two as their exponents.
READ_DTYPES: dict[str, np.dtype] = {**DTYPES, "F8_E8M0": np.dtype(np.uint8)}


class TensorInfo(NamedTuple):
  """Place of a stored tensor, with its dtype and shape.

  Attributes:
    file: Name of its file in the folder.
    dtype: NumPy's dtype, or its name in the format where it is not read.
    shape: Shape on disk.
    nbytes: Bytes on disk.
    offset: Offset of its first byte in the file.
  """

  file: str
  dtype: np.dtype | str
  shape: tuple[int, ...]
  nbytes: int
  offset: int


def check_name(name: str) -> str | None:
  """Describes the fault of a tensor's name, or returns None."""
  if not name:
    return "an empty tensor name"
  if len(name) > MAX_NAME:
    return f"a tensor name of {len(name)} characters"
  if "/" in name or "\\" in name or ".." in name or not name.isprintable():
    return f"the tensor name {shown(name)}"
  return None


def read_header(
  root: AnyPath, file: str
) -> tuple[FileIdentity, dict[str, TensorInfo]]:
  """Reads the tensors of a file, in the order of their bytes.

  Args:
    root: Path or address of the folder.
    file: Name of the file in it.

  Returns:
    (identity of the file when it was read, its tensors by their names).

  Raises:
    CheckpointFormatError: If the header violates the format, or does not
      describe exactly the bytes of the file.
  """
  label = shown(file)
  with open_inside(root, file) as opened:
    old = opened_identity(opened)
    first8 = opened.read(8)
    start = 8 + _header_bytes(label, first8, old.nbytes)
    text = opened.read(start - 8)
  if not text.startswith(b"{"):
    fault(label, f"a header that starts with {text[:1]!r}", "a '{'")
  try:
    table = strict_json(text, max_depth=3)
  except ValueError as error:
    fault(label, f"a header with {error}", "strict JSON")
  try:
    with (
      _local_file(root / file, first8 + text, old.nbytes) as path,
      safetensors.safe_open(
        path, framework="numpy", backend="pread"
      ) as library,
    ):
      names = library.offset_keys()
    new = file_identity(root / file)
  except safetensors.SafetensorError as error:
    why = str(error).rpartition("header: ")[2]
    fault(
      label,
      f"a header that safetensors refuses: {shown(why, 82)}",
      f"one that describes each of the {old.nbytes - start} bytes of data once",
    )
  except OSError:
    new, names = None, []
  if new != old:
    fault(label, "a file that changes", "a file at rest", "wait for its writer")
  if len(names) > MAX_TENSORS:
    fault(label, f"{len(names)} tensors", f"at most {MAX_TENSORS}")
  return old, {
    name: _tensor(label, file, name, table[name], start) for name in names
  }


@contextlib.contextmanager
def _local_file(
  path: AnyPath, header: bytes, nbytes: int
) -> Iterator[pathlib.Path]:
  """Yields a file for the library, which reads no other.

  That of an object has its header and its size; the rest takes no space.
  """
  if isinstance(path, pathlib.Path):
    yield path
    return
  with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
    file.write(header)
    file.flush()
    os.truncate(file.name, nbytes)
    yield pathlib.Path(file.name)


def _header_bytes(label: str, first8: bytes, file_bytes: int) -> int:
  """The length of the header, from the first 8 bytes of a file."""
  if len(first8) < 8:
    fault(label, f"{file_bytes} bytes", "at least 8")
  if first8 == b"version ":
    fault(
      label,
      "a git-lfs pointer, the text that stands for a file",
      "a safetensors file",
      "run `git lfs pull` in its folder",
    )
  length = int.from_bytes(first8, "little")
  if length > MAX_HEADER_BYTES:
    fault(
      label,
      f"a header of {length} bytes",
      f"at most {MAX_HEADER_BYTES}",
      "check that this is a safetensors file",
    )
  if length < 2 or 8 + length > file_bytes:
    fault(
      label,
      f"a header of {length} bytes in a file of {file_bytes}",
      "a header inside of the file",
    )
  return length


def _tensor(
  label: str, file: str, name: str, info: dict, start: int
) -> TensorInfo:
  """Parses an entry of a header that the library has accepted."""
  if wrong := check_name(name):
    fault(label, wrong, "printable characters without '/' and '..'")
  keys = {"dtype", "shape", "data_offsets"}
  if info.keys() != keys:
    fault(label, f"{shown(name)} with other fields", ", ".join(sorted(keys)))
  shape, (begin, end) = info["shape"], info["data_offsets"]
  few_axes = len(shape) <= MAX_RANK
  if not few_axes or math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
    fault(
      label,
      f"{shown(name)} with shape {shown(shape, 32)}",
      f"at most {MAX_RANK} sizes and "
      f"2^{MAX_ELEMENTS.bit_length() - 1} elements",
    )
  # A dtype without NumPy's equivalent keeps its name.
  dtype = READ_DTYPES.get(info["dtype"], info["dtype"])
  return TensorInfo(file, dtype, tuple(shape), end - begin, start + begin)
