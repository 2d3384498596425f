"""Which files of a folder are read, and how: none outside of it, no links out.

Guarantees: a name from a file is compared with the names that are there and
never followed as a path. Files are opened for reading only, must be regular,
and are refused when they are larger than their kind can be.
"""

from __future__ import annotations

import os
import pathlib
import re
import stat
from typing import Any, NamedTuple, NoReturn

from ringjax.errors import (
  CheckpointFormatError,
  ConfigError,
  UnsafeFormatError,
  message,
)
from ringjax.models.hf import header
from ringjax.models.hf.header import AGAIN, shown

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 10_000
# Deeper than any config, far from Python's own limit.
MAX_DEPTH = 32

# Files that are programs for Python's unpickler, whole or in part.
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")


class FileIdentity(NamedTuple):
  """What changes when a file does."""

  device: int
  inode: int
  nbytes: int
  modified_ns: int


def read_config(root: pathlib.Path) -> dict[str, Any]:
  if not (root / CONFIG).exists():
    raise ConfigError(CONFIG, "no such file", "the model's config", "add it")
  data = _small_file(root, CONFIG, MAX_CONFIG_BYTES)
  try:
    value = header.strict_json(data, max_depth=MAX_DEPTH)
    if not isinstance(value, dict):
      raise ValueError(f"a {type(value).__name__} instead of an object")
  except ValueError as error:
    raise ConfigError(
      CONFIG, header.reason(error), "a strict JSON object", AGAIN
    ) from None
  return value


def weight_files(root: pathlib.Path) -> tuple[list[str], dict[str, str] | None]:
  """The files to read, and the index if there is one."""
  names = sorted(entry.name for entry in os.scandir(root))
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
    _fault("weights", f"no *{SUFFIX} in the folder", "at least one file")
  if len(weights) > MAX_FILES:
    _fault("weights", f"{len(weights)} files", f"at most {MAX_FILES}")
  if INDEX in names:
    weight_map = _index(root)
    files = sorted(set(weight_map.values()))
    if absent := [file for file in files if file not in names]:
      _fault(INDEX, f"no file {shown(absent[0])}", "all that it lists")
  else:
    weight_map = None
    files = [SINGLE] if SINGLE in weights else weights
  # Another set of weights (consolidated.safetensors) is none of our business;
  # parts of this one that nobody lists are.
  stray = [f for f in weights if f not in files and f.startswith("model")]
  if stray:
    _fault(
      shown(stray[0]),
      "a file beside " + (INDEX if weight_map is not None else SINGLE),
      "one set of weights",
      "remove what is left of another one",
    )
  _check_parts(files)
  return files, weight_map


def _index(root: pathlib.Path) -> dict[str, str]:
  data = _small_file(root, INDEX, MAX_INDEX_BYTES)
  try:
    value = header.strict_json(data, max_depth=MAX_DEPTH)
  except ValueError as error:
    _fault(INDEX, header.reason(error), "strict JSON")
  weight_map = value.get("weight_map") if isinstance(value, dict) else None
  if not isinstance(weight_map, dict) or not weight_map:
    _fault(INDEX, "no weight_map", "the file of each tensor")
  for name, file in weight_map.items():
    if not isinstance(file, str) or not file.endswith(SUFFIX):
      pickle = isinstance(file, str) and file.lower().endswith(PICKLES)
      kind = UnsafeFormatError if pickle else CheckpointFormatError
      got = f"{shown(file, 40)} for {shown(name, 60)}"
      raise kind(message(INDEX, got, f"a {SUFFIX} file", AGAIN))
    if "/" in file or "\\" in file or not file.isprintable():
      _fault(INDEX, f"the file {shown(file)}", "a file in the folder")
  return weight_map


def _check_parts(files: list[str]) -> None:
  """Of parts that are numbered "00002-of-00003", all are there."""
  sets: dict[tuple[str, int], set[int]] = {}
  for file in files:
    if part := _PART.fullmatch(file):
      key = (part["stem"], int(part["of"]))
      sets.setdefault(key, set()).add(int(part["i"]))
  for (stem, total), parts in sets.items():
    if len(parts) < total or parts != set(range(1, total + 1)):
      first = next((i for i in range(1, total + 1) if i not in parts), 0)
      _fault(
        "weights",
        f"{len(parts)} parts {shown(stem, 40)}*-of-{total}, without {first}",
        f"parts 1 to {total}",
        "download the rest",
      )


_PART = re.compile(r"(?P<stem>.*?)-?(?P<i>\d{1,6})-of-(?P<of>\d{1,6})\..*")


def _small_file(root: pathlib.Path, file: str, limit: int) -> bytes:
  descriptor = open_inside(root, file)
  try:
    data = pread(descriptor, limit + 1, 0)
  finally:
    os.close(descriptor)
  if len(data) > limit:
    kind = ConfigError if file == CONFIG else CheckpointFormatError
    raise kind(message(file, f"more than {limit} bytes", "a small file", AGAIN))
  return data


def open_inside(root: pathlib.Path, file: str) -> int:
  """A descriptor of a regular file that truly lies in the folder.

  The cache of the Hugging Face hub keeps a folder of links, snapshots/<hash>,
  to files in blobs/ beside snapshots/: those count as inside.
  """
  home, path = root.resolve(), (root / file).resolve()
  inside = path.parent == home
  if home.parent.name == "snapshots":
    inside = inside or path.parent == home.parent.parent / "blobs"
  if not inside:
    _fault(
      shown(file),
      "a link out of the folder",
      "a file in the folder",
      "copy the file into it",
    )
  flags = os.O_RDONLY
  # A pipe must not make the opening wait.
  for flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
    flags |= getattr(os, flag, 0)
  try:
    descriptor = os.open(path, flags)
  except OSError as error:
    raise CheckpointFormatError(
      shown(file), str(error.strerror), "a readable file", AGAIN
    ) from error
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    _fault(shown(file), "something that is no file", "a regular file")
  return descriptor


def pread(descriptor: int, length: int, offset: int) -> bytes:
  """`length` bytes, or fewer where the file ends."""
  parts = []
  while length > 0 and (part := os.pread(descriptor, length, offset)):
    parts.append(part)
    length -= len(part)
    offset += len(part)
  return b"".join(parts)


def identity(status: os.stat_result) -> FileIdentity:
  return FileIdentity(
    status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
  )


def _fault(argument: str, got: str, want: str, remedy: str = AGAIN) -> NoReturn:
  raise CheckpointFormatError(argument, got, want, remedy)
