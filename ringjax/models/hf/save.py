"""Writes a Hugging Face model folder, all of it or nothing.

Guarantees: the folder is written beside its place and renamed into it, so that
whoever looks, also after a crash, sees the old folder or the new one, and
never a mixture. The same tensors give the same bytes.
Cost: host memory for one shard, and one copy of a tensor on its devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from ringjax.errors import (
  CheckpointFormatError,
  CheckpointWriteError,
  ConfigError,
  DtypeError,
  InputTypeError,
  OptionError,
  RingjaxError,
)
from ringjax.models.hf import header
from ringjax.models.hf.header import shown
from ringjax.models.hf.safe_files import CONFIG, INDEX, SINGLE, SUFFIX

try:
  import fcntl
except ImportError:  # Windows: what a killed process left stays.
  fcntl = None

_NAMES = {
  dtype: name for name, (_, dtype) in header.DTYPES.items() if dtype is not None
}


def write(
  path: str | os.PathLike[str],
  config: Mapping[str, Any],
  tensors: Iterable[tuple[str, np.ndarray | jax.Array]],
  *,
  max_shard_bytes: int = 5 * 10**9,
  overwrite: bool = False,
) -> None:
  """Writes config.json and the tensors, as transformers writes and reads them.

  In a run of several processes all of them make the same call, and process 0
  writes; a tensor that is spread over processes is gathered when its turn
  comes.

  Args:
    path: a folder that does not exist, or is empty.
    config: of config.json.
    tensors: names and values, in any floating, integer or boolean dtype. They
      are taken one after the other, so a generator may make each when needed.
    max_shard_bytes: a file with more than one tensor has no more bytes.
    overwrite: replaces the weights and the config of a folder that is not
      empty; its other files stay.

  Raises:
    OptionError: if `path` is taken or `max_shard_bytes` is not positive.
    ConfigError: if `config` cannot be written as JSON.
    InputTypeError: if `path` is no path or a tensor is no array.
    DtypeError: if a tensor's dtype does not exist in the format.
    CheckpointFormatError: if a name is not allowed or comes twice, or if
      process 0 could not write.
    CheckpointWriteError: if this process could not: no permission, a full disk.
  """
  if not isinstance(path, str | os.PathLike):
    raise InputTypeError(
      "path", type(path).__name__, "a str or a Path", "pass a folder"
    )
  if max_shard_bytes < 1:
    raise OptionError(
      "max_shard_bytes", max_shard_bytes, "at least 1", "raise it"
    )
  text = _json(config)
  place = pathlib.Path(path).resolve()
  with contextlib.ExitStack() as stack:
    writer = None
    with _together():
      if jax.process_index() == 0:
        with _writing(place):
          _free(place, overwrite)
          desk = stack.enter_context(_desk(place))
        writer = _Writer(desk, max_shard_bytes)
    with _together():
      _take(tensors, writer, place)
      if writer is not None:
        with _writing(place):
          writer.finish(text)
          _publish(writer.desk, place)


def _take(
  tensors: Iterable[tuple[str, np.ndarray | jax.Array]],
  writer: _Writer | None,
  place: pathlib.Path,
) -> None:
  """Hands every tensor to the writer; the other processes help to gather."""
  fault: Exception | None = None
  seen: set[str] = set()
  for name, tensor in tensors:
    _check(name, tensor, seen)
    if writer is not None and fault is None:
      try:
        with _writing(place):
          writer.room(tensor.nbytes)
      except Exception as error:
        if jax.process_count() == 1:
          raise
        # The others wait for this process where a tensor is gathered.
        fault = error
    if writer is not None and fault is None:
      writer.add(name, _host(tensor))
    elif _replicated(tensor):
      _host(tensor)
  if fault is not None:
    raise fault


class _Writer:
  """Fills files with tensors, at most `max_shard_bytes` in each."""

  def __init__(self, desk: pathlib.Path, max_shard_bytes: int):
    self.desk = desk
    self._max = max_shard_bytes
    self._held: dict[str, np.ndarray] = {}
    self._shards: list[list[str]] = []
    self._totals = {"total_parameters": 0, "total_size": 0}

  def room(self, nbytes: int) -> None:
    """Makes room for a tensor: writes what is held if it is one too many."""
    held = sum(x.nbytes for x in self._held.values())
    if self._held and held + nbytes > self._max:
      self._flush()

  def add(self, name: str, tensor: np.ndarray) -> None:
    self._held[name] = tensor
    self._totals["total_parameters"] += tensor.size
    self._totals["total_size"] += tensor.nbytes

  def finish(self, config: str) -> None:
    """Writes the rest; the parts get the names that tell their number."""
    if self._held or not self._shards:
      self._flush()
    total = len(self._shards)
    where: dict[str, str] = {}
    for i, names in enumerate(self._shards):
      stem = SINGLE.removesuffix(SUFFIX)
      file = (
        SINGLE if total == 1 else f"{stem}-{i + 1:05}-of-{total:05}{SUFFIX}"
      )
      os.rename(self.desk / f"part{i}", self.desk / file)
      where |= dict.fromkeys(names, file)
    if total > 1:
      index = {"metadata": self._totals, "weight_map": where}
      _write_text(self.desk / INDEX, _json(index))
    _write_text(self.desk / CONFIG, config)

  def _flush(self) -> None:
    file = self.desk / f"part{len(self._shards)}"
    write_file(file, self._held)
    self._shards.append(list(self._held))
    self._held = {}


def write_file(
  path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes one safetensors file, and waits until it is on the disk.

  Args:
    path: a file that does not exist.
    tensors: by their names.
  """
  # Wide ones first, so that each begins at a multiple of its item's size.
  order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
  table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name in order:
    tensor = tensors[name]
    begin, end = end, end + tensor.nbytes
    table[name] = {
      "dtype": _NAMES[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [begin, end],
    }
  text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "xb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
      flat = np.ascontiguousarray(tensors[name]).reshape(-1)
      file.write(flat.view(np.uint8).data)
    _sync(file)


# ---------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------


def _check(name: str, tensor: object, seen: set[str]) -> None:
  if wrong := header.check_name(name):
    _fault("tensors", wrong, "printable characters without '/' and '..'")
  if name in seen:
    _fault("tensors", f"{shown(name)} twice", "every name once")
  seen.add(name)
  if not isinstance(tensor, np.ndarray | jax.Array):
    kind = type(tensor).__name__
    raise InputTypeError(
      shown(name), kind, "a JAX or NumPy array", "convert it"
    )
  if tensor.dtype not in _NAMES:
    raise DtypeError(
      shown(name),
      str(tensor.dtype),
      "a float, an integer or a boolean that the format knows",
      "cast it",
    )


def _replicated(tensor: np.ndarray | jax.Array) -> bool:
  """Whether other processes hold a part of it."""
  return isinstance(tensor, jax.Array) and not (
    tensor.is_fully_addressable or tensor.is_fully_replicated
  )


def _host(tensor: np.ndarray | jax.Array) -> np.ndarray:
  if isinstance(tensor, np.ndarray):
    return tensor
  if _replicated(tensor):
    return multihost_utils.process_allgather(tensor, tiled=True)
  if not tensor.is_fully_addressable:
    tensor = tensor.addressable_data(0)
  # An array keeps what it once gave to the host: of a copy, this goes away.
  return np.asarray(tensor.copy())


# ---------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------


def _free(place: pathlib.Path, overwrite: bool) -> None:
  """Refuses a place that must not be written to."""
  if not place.exists():
    return
  if not place.is_dir():
    _taken(place, "a file", "give a folder")
  entries = list(os.scandir(place))
  if entries and not overwrite:
    _taken(place, f"a folder with {len(entries)} files", "overwrite=True")
  for entry in entries:
    if entry.is_dir(follow_symlinks=False):
      _taken(
        place, f"a folder with a folder {shown(entry.name)}", "write elsewhere"
      )


def _taken(place: pathlib.Path, got: str, remedy: str) -> NoReturn:
  raise OptionError(
    "path", f"{shown(place)}, {got}", "a new or an empty folder", remedy
  )


@contextlib.contextmanager
def _writing(place: pathlib.Path) -> Iterator[None]:
  """Has an error of the file system name the folder and what to do."""
  try:
    yield
  except OSError as error:
    if isinstance(error, RingjaxError):
      raise
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    raise CheckpointWriteError(
      "path",
      f"{shown(place, 100)}: {error.strerror or error}",
      "a folder that can be written to",
      "free space on that disk, or write to another one"
      if full
      else "check that its parent is a folder that you may write to",
      file=str(error.filename or place),
    ) from error


@contextlib.contextmanager
def _desk(place: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder beside the place, gone in the end whatever happens."""
  place.parent.mkdir(parents=True, exist_ok=True)
  stem = f".{place.name}.tmp-"
  for left in place.parent.glob(f"{stem}*"):
    if (lock := _lock(left)) is not None:
      shutil.rmtree(left, ignore_errors=True)
      os.close(lock)
  desk = place.parent / f"{stem}{secrets.token_hex(4)}"
  desk.mkdir()
  # Says to other processes, as long as this one lives: not left over.
  lock = _lock(desk)
  try:
    yield desk
  finally:
    shutil.rmtree(desk, ignore_errors=True)
    if lock is not None:
      os.close(lock)


def _lock(folder: pathlib.Path) -> int | None:
  """A descriptor that holds the folder until it is closed; None: held."""
  if fcntl is None:
    return None
  try:
    descriptor = os.open(folder, os.O_RDONLY)
  except OSError:
    return None
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    return None
  return descriptor


def _publish(desk: pathlib.Path, place: pathlib.Path) -> None:
  """Puts the finished folder into its place, in one step."""
  old = list(os.scandir(place)) if place.exists() else []
  for entry in old:
    if not _ours(entry.name):
      _carry(entry, desk)
  if place.exists():
    shutil.copymode(place, desk)
  _sync_folder(desk)
  if not old:
    os.rename(desk, place)
  elif not _exchange(desk, place):
    # In between only the name is missing; both folders are there.
    aside = place.with_name(f"{place.name}.old-{secrets.token_hex(4)}")
    os.rename(place, aside)
    os.rename(desk, place)
    shutil.rmtree(aside)
  _sync_folder(place.parent)


def _ours(name: str) -> bool:
  weights = name.startswith("model") and name.endswith(SUFFIX)
  return weights or name in (CONFIG, INDEX)


def _carry(entry: os.DirEntry[str], desk: pathlib.Path) -> None:
  if entry.is_symlink():
    os.symlink(os.readlink(entry.path), desk / entry.name)
    return
  try:
    os.link(entry.path, desk / entry.name)
  except OSError:
    shutil.copy2(entry.path, desk / entry.name)


def _exchange(a: pathlib.Path, b: pathlib.Path) -> bool:
  """Swaps two folders, if the system can do so in one step (Linux)."""
  linux = sys.platform.startswith("linux")
  libc = ctypes.CDLL(None, use_errno=True) if linux else None
  swap = getattr(libc, "renameat2", None)
  if swap is None:
    return False
  here, exchange = -100, 2
  if swap(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
    return True
  code = ctypes.get_errno()
  if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
    return False
  raise OSError(code, os.strerror(code), str(b))


def _write_text(path: pathlib.Path, text: str) -> None:
  with open(path, "x", encoding="utf-8") as file:
    file.write(text)
    _sync(file)


def _sync(file: Any) -> None:
  file.flush()
  os.fsync(file.fileno())


def _sync_folder(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _json(value: Mapping[str, Any]) -> str:
  """As transformers lays it out."""
  try:
    text = json.dumps(dict(value), indent=2, sort_keys=True, allow_nan=False)
  except (TypeError, ValueError, RecursionError) as error:
    raise ConfigError(
      "config", shown(error), "what JSON can hold", "use plain Python values"
    ) from None
  return text + "\n"


@contextlib.contextmanager
def _together() -> Iterator[None]:
  """What fails in process 0 fails in all, instead of leaving them waiting."""
  if jax.process_count() == 1:
    yield
    return
  fault: Exception | None = None
  try:
    yield
  except Exception as error:
    fault = error
  fine = multihost_utils.process_allgather(np.array(fault is None))
  if fault is not None:
    raise fault
  if not np.all(fine):
    _fault(
      "path",
      "a failure in another process",
      "that all go on together",
      "see what the other one raised",
    )


def _fault(
  argument: str, got: str, want: str, remedy: str = "rename it"
) -> NoReturn:
  raise CheckpointFormatError(argument, got, want, remedy)
