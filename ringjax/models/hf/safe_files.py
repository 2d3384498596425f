"""Reads the files of a model folder safely: none outside of it.

Guarantees: a name from a file is compared with the names that exist and is
never followed as a path. Files are opened for reading only, must be regular,
and are refused when they are larger than their kind can be. JSON is strict.
A folder may be one of an object storage, whose objects are no links.

`strict_json` replaces Python's `json`, which takes the last of two equal keys,
NaN, and any depth until its stack ends.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple, NoReturn

from ringjax import paths
from ringjax.errors import (
  CheckpointFormatError,
  ConfigError,
  InputTypeError,
  UnsafeFormatError,
)
from ringjax.json_text import json_text
from ringjax.paths import AnyPath, ObjectFacts, ObjectPath, ObjectReader
from ringjax.regular_files import inside, open_regular

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 10_000
# Deeper than any config, far from Python's own limit.
MAX_DEPTH = 32

# Files that are programs for Python's unpickler, completely or in part.
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")

DOWNLOAD = "download or write the file again"


class FileIdentity(NamedTuple):
  """Facts of a file's status that change when the file does."""

  device: int
  inode: int
  nbytes: int
  modified_ns: int


def file_identity(path: AnyPath) -> FileIdentity:
  """The identity of a file or an object.

  Raises:
    OSError: If it does not exist.
  """
  if isinstance(path, pathlib.Path):
    return identity(os.stat(path))
  facts = path.facts()
  if facts is None:
    raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
  return identity(facts)


def opened_identity(file: io.BufferedReader) -> FileIdentity:
  """The identity of a file that `open_inside` opened."""
  if isinstance(file.raw, ObjectReader):
    return identity(file.raw.facts)
  return identity(os.fstat(file.fileno()))


def identity(status: os.stat_result | ObjectFacts) -> FileIdentity:
  """The identity of a file, from its `os.stat` result or an object's facts."""
  if isinstance(status, ObjectFacts):
    # The version stands for the number of a file.
    digest = hashlib.sha256(status.version.encode()).digest()
    return FileIdentity(0, int.from_bytes(digest[:8], "big"), status.size, 0)
  return FileIdentity(
    status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
  )


def fault(
  argument: str, got: str, want: str, remedy: str = DOWNLOAD
) -> NoReturn:
  """Raises the error that a file of a checkpoint is refused with."""
  raise CheckpointFormatError(argument, got, want, remedy)


def shown(text: object, limit: int = 72) -> str:
  """A name that comes from a file, in printable characters and short."""
  words = str(text)
  words = words if words.isascii() and words.isprintable() else ascii(words)
  if len(words) <= limit:
    return words
  return f"{words[: limit // 2 - 2]}...{words[1 - limit // 2 :]}"


def as_path(path: str | os.PathLike[str] | None) -> AnyPath:
  """`path` as a Path or as an address, or an error that names it.

  Raises:
    InputTypeError: If it is not a path.
    OptionError: If it is an address of an unknown storage.
  """
  if not isinstance(path, str | os.PathLike):
    raise InputTypeError(
      "path", type(path).__name__, "a str or a Path", "pass a folder"
    )
  return paths.as_path(path)


# ---------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------


def strict_json(data: bytes, *, max_depth: int) -> Any:
  """Parses UTF-8 JSON as in RFC 8259: unique keys, no NaN, limited depth.

  Args:
    data: Text of the JSON.
    max_depth: Largest depth of nested objects and lists.

  Returns:
    Dicts, lists, strings, numbers, booleans and None.

  Raises:
    ValueError: If it is not such JSON, with the reason in a few words.
  """
  try:
    text = data.decode("utf-8")
    depth = 0
    # Before the parser, which is recursive.
    for bracket in _BRACKETS.sub("", _STRINGS.sub("", text)):
      depth += 1 if bracket in "[{" else -1
      if depth > max_depth:
        raise ValueError(f"brackets nested deeper than {max_depth}")
    value = json.loads(
      text,
      object_pairs_hook=_unique,
      parse_constant=_finite,
      parse_float=_finite,
    )
    if _SURROGATE.search(text):
      # Half a surrogate pair is not text: this raises.
      json_text(value, ensure_ascii=False).encode("utf-8")
  except UnicodeError:
    raise ValueError("bytes that are no UTF-8") from None
  except json.JSONDecodeError as error:
    raise ValueError(
      f"an error at character {error.pos} ({error.msg})"
    ) from None
  return value


# The last quote may be missing: otherwise a search would restart at each.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  table: dict[str, Any] = {}
  for key, value in pairs:
    if key in table:
      raise ValueError(f"the key {shown(key)} twice")
    table[key] = value
  return table


def _finite(digits: str) -> float:
  value = float(digits)
  if not math.isfinite(value):
    raise ValueError(f"the number {shown(digits)}")
  return value


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def read_config(root: AnyPath) -> dict[str, Any]:
  """Reads the config.json of a folder.

  Raises:
    ConfigError: If it is missing, too large or not a strict JSON object.
    CheckpointFormatError: If it is a link out of the folder or not a file.
  """
  if not (root / CONFIG).exists():
    raise ConfigError(
      CONFIG,
      "no such file",
      "the model's config",
      "download it into the folder of the weights",
    )
  data = _small_file(root, CONFIG, MAX_CONFIG_BYTES)
  try:
    value = strict_json(data, max_depth=MAX_DEPTH)
    if not isinstance(value, dict):
      raise ValueError(f"a {type(value).__name__} instead of an object")
  except ValueError as error:
    raise ConfigError(
      CONFIG, str(error), "a strict JSON object", DOWNLOAD
    ) from None
  return value


def weight_files(root: AnyPath) -> tuple[list[str], dict[str, str] | None]:
  """The files to read, and the index if there is one.

  Raises:
    CheckpointFormatError: If there are no weights, a part is missing or belongs
      to another set, or the index is broken.
    UnsafeFormatError: If all weights are in files that run code.
  """
  names = sorted(entry.name for entry in root.iterdir())
  weights = [name for name in names if name.endswith(SUFFIX)]
  if not weights and INDEX not in names:
    pickles = [name for name in names if name.lower().endswith(PICKLES)]
    if pickles:
      raise UnsafeFormatError(
        "weights",
        shown(pickles[0]),
        "only safetensors: opening a pickle runs code",
        "convert it where you trust it: model.save_pretrained(folder)",
      )
    fault("weights", f"no *{SUFFIX} in the folder", "at least one file")
  if len(weights) > MAX_FILES:
    fault("weights", f"{len(weights)} files", f"at most {MAX_FILES}")
  if INDEX in names:
    weight_map = _index(root)
    files = sorted(set(weight_map.values()))
    if missing_files := [file for file in files if file not in names]:
      fault(INDEX, f"no file {shown(missing_files[0])}", "all that it lists")
  else:
    weight_map = None
    files = [SINGLE] if SINGLE in weights else weights
  # Other weights (consolidated.safetensors) are not read; a part of the set
  # that the index does not list is an error.
  unlisted = [f for f in weights if f not in files and f.startswith("model")]
  # An object storage has no rename: a model that takes the place of another
  # has new names, and the index says which count.
  if unlisted and isinstance(root, pathlib.Path):
    fault(
      shown(unlisted[0]),
      "a file beside " + (INDEX if weight_map is not None else SINGLE),
      "one set of weights",
      "remove what is left of another one",
    )
  _check_parts(files)
  return files, weight_map


def _index(root: AnyPath) -> dict[str, str]:
  """File of each tensor, from the index."""
  data = _small_file(root, INDEX, MAX_INDEX_BYTES)
  try:
    value = strict_json(data, max_depth=MAX_DEPTH)
  except ValueError as error:
    fault(INDEX, str(error), "strict JSON")
  weight_map = value.get("weight_map") if isinstance(value, dict) else None
  if not isinstance(weight_map, dict) or not weight_map:
    fault(INDEX, "no weight_map", "the file of each tensor")
  for name, file in weight_map.items():
    if not isinstance(file, str) or not file.endswith(SUFFIX):
      pickle = isinstance(file, str) and file.lower().endswith(PICKLES)
      kind = UnsafeFormatError if pickle else CheckpointFormatError
      got = f"{shown(file, 40)} for {shown(name, 60)}"
      raise kind(INDEX, got, f"a {SUFFIX} file", DOWNLOAD)
    if "/" in file or "\\" in file or not file.isprintable():
      fault(INDEX, f"the file {shown(file)}", "a file in the folder")
  return weight_map


def _check_parts(files: list[str]) -> None:
  """Checks that sets of parts numbered "00002-of-00003" are complete."""
  sets: dict[tuple[str, int], set[int]] = {}
  for file in files:
    if part := _PART.fullmatch(file):
      key = (part["stem"], int(part["of"]))
      sets.setdefault(key, set()).add(int(part["i"]))
  for (stem, total), parts in sets.items():
    if len(parts) < total or parts != set(range(1, total + 1)):
      first = next((i for i in range(1, total + 1) if i not in parts), 0)
      fault(
        "weights",
        f"{len(parts)} parts {shown(stem, 40)}*-of-{total}, without {first}",
        f"parts 1 to {total}",
        "download the rest",
      )


_PART = re.compile(r"(?P<stem>.*?)-?(?P<i>\d{1,6})-of-(?P<of>\d{1,6})\..*")


def _small_file(root: AnyPath, file: str, limit: int) -> bytes:
  with open_inside(root, file) as opened:
    data = opened.read(limit + 1)
  if len(data) > limit:
    kind = ConfigError if file == CONFIG else CheckpointFormatError
    raise kind(file, f"more than {limit} bytes", "a small file", DOWNLOAD)
  return data


def open_inside(root: AnyPath, file: str) -> io.BufferedReader:
  """Opens a regular file that is really inside of the folder, or an object.

  Raises:
    CheckpointFormatError: If it is a link out of the folder, not a regular
      file, or cannot be read.
    StorageError: If the storage of an object does not answer.
  """
  if isinstance(root, ObjectPath):
    try:
      return paths.open_binary(root / file)
    except FileNotFoundError as error:
      raise CheckpointFormatError(
        shown(file), "no such object", "a readable object", DOWNLOAD
      ) from error
  path = inside(root, file)
  if path is None:
    fault(
      shown(file),
      "a link out of the folder",
      "a file in the folder",
      "copy the file into it",
    )
  try:
    return open(open_regular(path, follow=False), "rb")
  except OSError as error:
    raise CheckpointFormatError(
      shown(file), str(error.strerror), "a readable file", DOWNLOAD
    ) from error
