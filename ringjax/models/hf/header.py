"""What a safetensors file says about itself, believed only when it adds up.

Guarantees: a header that passes names every byte of the file once: no hole, no
overlap, no name twice, no size that the dtype and the shape do not give. It
is checked before a tensor is allocated, and costs a few times its own length.
Ref: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from ringjax.errors import CheckpointFormatError

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 200_000
MAX_RANK = 8
MAX_NAME = 512
# Elements of one tensor, zeros of its shape counted as ones.
MAX_ELEMENTS = 1 << 48

AGAIN = "download or write the file again"

# Bits of an element, and its dtype in NumPy where there is one.
DTYPES: dict[str, tuple[int, np.dtype | None]] = {
  "BOOL": (8, np.dtype(np.bool_)),
  "I8": (8, np.dtype(np.int8)),
  "I16": (16, np.dtype(np.int16)),
  "I32": (32, np.dtype(np.int32)),
  "I64": (64, np.dtype(np.int64)),
  "U8": (8, np.dtype(np.uint8)),
  "U16": (16, np.dtype(np.uint16)),
  "U32": (32, np.dtype(np.uint32)),
  "U64": (64, np.dtype(np.uint64)),
  "BF16": (16, np.dtype(jnp.bfloat16)),
  "F16": (16, np.dtype(np.float16)),
  "F32": (32, np.dtype(np.float32)),
  "F64": (64, np.dtype(np.float64)),
  "F8_E4M3": (8, np.dtype(jnp.float8_e4m3fn)),
  "F8_E5M2": (8, np.dtype(jnp.float8_e5m2)),
  "F8_E8M0": (8, None),
  "F8_E4M3FNUZ": (8, None),
  "F8_E5M2FNUZ": (8, None),
  "F6_E2M3": (6, None),
  "F6_E3M2": (6, None),
  "F4": (4, None),
  "C64": (64, None),
}


class Entry(NamedTuple):
  """One tensor of a file; `begin` counts from the end of the header."""

  dtype: str
  shape: tuple[int, ...]
  begin: int
  nbytes: int


def shown(text: object, limit: int = 72) -> str:
  """A name that somebody else chose, in printable characters and short."""
  words = str(text)
  words = words if words.isascii() and words.isprintable() else ascii(words)
  if len(words) <= limit:
    return words
  return f"{words[: limit // 2 - 2]}...{words[1 - limit // 2 :]}"


def strict_json(data: bytes, *, max_depth: int) -> Any:
  """JSON in UTF-8 as RFC 8259 has it, every key once, no NaN, not too deep.

  Args:
    data: the text.
    max_depth: how far objects and lists may be nested.

  Returns:
    Dicts, lists, strings, numbers, booleans and None.

  Raises:
    ValueError: what is wrong with it, in a few words.
  """
  text = data.decode("utf-8")
  depth = 0
  # Before the parser, which recurses.
  for bracket in _BRACKETS.sub("", _STRINGS.sub("", text)):
    depth += 1 if bracket in "[{" else -1
    if depth > max_depth:
      raise ValueError(f"brackets nested deeper than {max_depth}")
  value = json.loads(
    text,
    object_pairs_hook=_unique,
    parse_constant=_no_constant,
    parse_float=_finite,
  )
  if _SURROGATE.search(text):
    # Half a surrogate pair is no text: this raises.
    json.dumps(value, ensure_ascii=False).encode("utf-8")
  return value


# The last quote may be missing, or else a search would begin anew at each.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    seen = set()
    for key, _ in pairs:
      if key in seen:
        raise ValueError(f"the key {shown(key)} twice")
      seen.add(key)
  return found


def _no_constant(word: str) -> NoReturn:
  raise ValueError(f"the number {word}")


def _finite(digits: str) -> float:
  value = float(digits)
  if not math.isfinite(value):
    raise ValueError(f"the number {shown(digits)}")
  return value


def check_name(name: str) -> str | None:
  """What is wrong with a tensor's name, or None."""
  if not name:
    return "an empty tensor name"
  if len(name) > MAX_NAME:
    return f"a tensor name of {len(name)} characters"
  if "/" in name or "\\" in name or ".." in name or not name.isprintable():
    return f"the tensor name {shown(name)}"
  return None


def header_bytes(file: str, first8: bytes, file_bytes: int) -> int:
  """The length of the header, from the first 8 bytes of a file.

  Args:
    file: its name, for the error.
    first8: its first bytes.
    file_bytes: its size.

  Returns:
    How many bytes of JSON follow.

  Raises:
    CheckpointFormatError: if there cannot be so many.
  """
  if len(first8) < 8:
    _fault(file, f"{file_bytes} bytes", "at least 8")
  if first8 == b"version ":
    _fault(
      file,
      "a git-lfs pointer, the text that stands for a file",
      "a safetensors file",
      "run `git lfs pull` in its folder",
    )
  length = int.from_bytes(first8, "little")
  if length > MAX_HEADER_BYTES:
    _fault(
      file,
      f"a header of {length} bytes",
      f"at most {MAX_HEADER_BYTES}",
      "check that this is a safetensors file",
    )
  if length < 2 or 8 + length > file_bytes:
    _fault(
      file,
      f"a header of {length} bytes in a file of {file_bytes}",
      "a header inside of the file",
    )
  return length


def parse_header(file: str, header: bytes, data_bytes: int) -> dict[str, Entry]:
  """The tensors of a file, in the order of their bytes.

  Args:
    file: its name, for errors.
    header: the JSON, without the 8 bytes before it.
    data_bytes: how many bytes of the file follow the header.

  Returns:
    An entry for every tensor, by its name.

  Raises:
    CheckpointFormatError: if the header is not as the format demands or does
      not describe exactly the bytes of the file.
  """
  if not header.startswith(b"{"):
    _fault(file, f"a header that starts with {header[:1]!r}", "a '{'")
  if header.count(b'"data_offsets"') > MAX_TENSORS:
    _fault(file, "too many tensors", f"at most {MAX_TENSORS}")
  try:
    table = strict_json(header, max_depth=3)
  except ValueError as error:
    _fault(file, f"a header with {reason(error)}", "strict JSON")
  _metadata(file, table.pop("__metadata__", None))
  if len(table) > MAX_TENSORS:
    _fault(file, f"{len(table)} tensors", f"at most {MAX_TENSORS}")
  found = {name: _entry(file, name, info) for name, info in table.items()}
  found = dict(sorted(found.items(), key=lambda item: item[1][2:]))
  end = 0
  for name, entry in found.items():
    if entry.begin != end:
      _fault(
        file,
        f"{shown(name)} from byte {entry.begin} of the data",
        f"from byte {end}, without holes and overlaps",
      )
    end += entry.nbytes
  if end != data_bytes:
    _fault(file, f"{data_bytes} bytes of data", f"{end} as the header says")
  return found


def _metadata(file: str, value: object) -> None:
  # Absent is as good as empty.
  if value is None:
    return
  plain = isinstance(value, dict) and all(
    isinstance(x, str) for x in value.values()
  )
  if not plain:
    _fault(file, "__metadata__ that is no table of strings", "strings")


def _entry(file: str, name: str, info: object) -> Entry:
  if wrong := check_name(name):
    _fault(file, wrong, "printable characters without '/' and '..'")
  keys = {"dtype", "shape", "data_offsets"}
  if not isinstance(info, dict) or info.keys() != keys:
    _fault(file, f"{shown(name)} with other fields", ", ".join(sorted(keys)))
  dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
  if not isinstance(dtype, str) or dtype not in DTYPES:
    _fault(
      file,
      f"{shown(name)} with dtype {shown(dtype, 24)}",
      "a dtype of the format",
    )
  if not _counts(shape) or len(shape) > MAX_RANK:
    _fault(
      file,
      f"{shown(name)} with shape {shown(shape, 32)}",
      f"at most {MAX_RANK} sizes",
    )
  if not _counts(offsets) or len(offsets) != 2:
    _fault(
      file, f"{shown(name)} with offsets {shown(offsets, 32)}", "two of them"
    )
  # One after the other: a product of huge integers is slow.
  elements = 1
  for size in shape:
    elements *= max(size, 1)
    if elements > MAX_ELEMENTS:
      _fault(
        file,
        f"{shown(name)} with shape {shown(shape, 32)}",
        f"at most 2^{MAX_ELEMENTS.bit_length() - 1} elements",
      )
  elements = 0 if 0 in shape else elements
  nbytes, odd = divmod(elements * DTYPES[dtype][0], 8)
  begin, end = offsets
  if odd or end - begin != nbytes:
    _fault(
      file,
      f"{shown(name)} with {shown(end - begin, 24)} bytes",
      f"{nbytes} for {dtype} {list(shape)}",
    )
  return Entry(dtype, tuple(shape), begin, nbytes)


def _counts(value: object) -> bool:
  """A list of integers of at least 0; True is no integer here."""
  return isinstance(value, list) and all(
    type(x) is int and x >= 0 for x in value
  )


def reason(error: ValueError) -> str:
  if isinstance(error, UnicodeError):
    return "bytes that are no UTF-8"
  if isinstance(error, json.JSONDecodeError):
    return f"an error at character {error.pos} ({error.msg})"
  return str(error)


def _fault(file: str, got: str, want: str, remedy: str = AGAIN) -> NoReturn:
  raise CheckpointFormatError(shown(file), got, want, remedy)
