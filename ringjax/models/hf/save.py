"""Writes a Hugging Face model folder, all of it or nothing.

Guarantees: the folder is written next to its final path and renamed, so that
a reader, also after a crash, sees the old folder or the new one and never a
mixture; at an address, `object_folder.py` does. The same tensors give the same
bytes.
Memory: one shard on the host, and one copy of a tensor on its devices.

`write_file` replaces the safetensors writer, which hides the number of a system
error (a full disk has its own remedy), makes files that others may not read,
and does not wait for the disk. The swap of two folders is here since Python has
none.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import json
import os
import pathlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Shaped

from ringjax.checks import positive_int
from ringjax.errors import (
  CheckpointWriteError,
  ConfigError,
  DtypeError,
  InputTypeError,
  OptionError,
  RingjaxError,
)
from ringjax.json_text import json_text
from ringjax.models.hf.header import DTYPES, check_name
from ringjax.models.hf.object_folder import ObjectFolder
from ringjax.models.hf.safe_files import (
  CONFIG,
  INDEX,
  SINGLE,
  SUFFIX,
  as_path,
  fault,
  shown,
)
from ringjax.paths import AnyPath, ObjectPath

try:
  import fcntl
except ImportError:  # Windows: what a killed process left stays.
  fcntl = None

AnyArray = Shaped[np.ndarray | Array, "..."]
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(
  path: str | os.PathLike[str],
  config: Mapping[str, Any],
  tensors: Iterable[tuple[str, AnyArray]],
  *,
  max_shard_bytes: int = 5 * 10**9,
  overwrite: bool = False,
  beside: Callable[[pathlib.Path], None] = lambda folder: None,
) -> None:
  """Writes config.json and the tensors, as transformers writes and reads them.

  In a run of several processes all of them make the same call, and process 0
  writes; a tensor that is sharded over processes is gathered just before it is
  written.

  Args:
    path: A folder that does not exist, or is empty; also as an address.
    config: Content of config.json.
    tensors: Names and values, in any floating, integer or boolean dtype. They
      are taken one after the other, so a generator may make each when needed.
    max_shard_bytes: Largest size of a file with more than one tensor.
    overwrite: Whether to replace the weights and the config of a folder that is
      not empty; its other files stay.
    beside: Function that writes further files into the folder before it
      appears.

  Raises:
    OptionError: If `path` is taken or `max_shard_bytes` is not positive.
    ConfigError: If `config` cannot be written as JSON.
    InputTypeError: If `path` is not a path or a tensor is not an array.
    DtypeError: If a tensor's dtype does not exist in the format.
    CheckpointFormatError: If a name is not allowed or comes twice, or if
      process 0 could not write.
    CheckpointWriteError: If this process could not: no permission, a full disk.
    StorageError: If this process could not write the objects of an address.
  """
  place = as_path(path).resolve()
  positive_int("max_shard_bytes", max_shard_bytes)
  text = _json(config)
  with contextlib.ExitStack() as stack:
    writer = None
    with _same_outcome():
      if jax.process_index() == 0:
        with _writing(place):
          writer = stack.enter_context(
            _opened(place, text, max_shard_bytes, overwrite)
          )
    with _same_outcome():
      _collect(tensors, writer, place)
      if writer is not None:
        with _writing(place):
          writer.finish(beside)


@contextlib.contextmanager
def _opened(
  place: AnyPath, config: str, max_shard_bytes: int, overwrite: bool
) -> Iterator[_Writer]:
  """Yields a writer of a new folder that has its name when it is finished."""
  if isinstance(place, ObjectPath):
    target = ObjectFolder(place, config, overwrite)
    with tempfile.TemporaryDirectory() as temporary:
      yield _ObjectWriter(pathlib.Path(temporary), max_shard_bytes, target)
    return
  _check_free(place, overwrite)
  with _staging(place) as staging:
    yield _LocalWriter(staging, max_shard_bytes, place, config)


def _collect(
  tensors: Iterable[tuple[str, AnyArray]],
  writer: _Writer | None,
  place: AnyPath,
) -> None:
  """Passes every tensor to the writer; other processes help to gather."""
  failure: Exception | None = None
  seen: set[str] = set()
  for name, tensor in tensors:
    _check(name, tensor, seen)
    if writer is not None and failure is None:
      try:
        with _writing(place):
          writer.flush_before(tensor.nbytes)
      except Exception as error:
        if jax.process_count() == 1:
          raise
        # The other processes wait for this one when a tensor is gathered.
        failure = error
    if writer is not None and failure is None:
      writer.add(name, host_copy(tensor))
    elif _over_processes(tensor):
      host_copy(tensor)
  if failure is not None:
    raise failure


class _Writer(abc.ABC):
  """Fills files with tensors, at most `max_shard_bytes` in each."""

  def __init__(self, folder: pathlib.Path, max_shard_bytes: int):
    self.folder = folder
    self._max = max_shard_bytes
    self._held: dict[str, np.ndarray] = {}
    self._shards: list[list[str]] = []
    self._totals = {"total_parameters": 0, "total_size": 0}

  @abc.abstractmethod
  def finish(self, beside: Callable[[pathlib.Path], None]) -> None:
    """Writes the remaining tensors and other files; the folder appears."""

  def flush_before(self, nbytes: int) -> None:
    """Writes the held tensors if `nbytes` more do not fit into the file."""
    nbytes_held = sum(x.nbytes for x in self._held.values())
    if self._held and nbytes_held + nbytes > self._max:
      self._flush()

  def add(self, name: str, tensor: np.ndarray) -> None:
    self._held[name] = tensor
    self._totals["total_parameters"] += tensor.size
    self._totals["total_size"] += tensor.nbytes

  def _flush(self) -> None:
    file = self.folder / f"part{len(self._shards)}"
    write_file(file, self._held)
    self._shards.append(list(self._held))
    self._held = {}


class _LocalWriter(_Writer):
  """Writer of a folder of the file system, which is renamed in the end."""

  def __init__(
    self,
    folder: pathlib.Path,
    max_shard_bytes: int,
    place: pathlib.Path,
    config: str,
  ):
    super().__init__(folder, max_shard_bytes)
    self._place, self._config = place, config

  def finish(self, beside: Callable[[pathlib.Path], None]) -> None:
    """Writes the remaining tensors, numbers the files, renames the folder."""
    if self._held or not self._shards:
      self._flush()
    total = len(self._shards)
    file_of: dict[str, str] = {}
    for i, names in enumerate(self._shards):
      part = "" if total == 1 else f"-{i + 1:05}-of-{total:05}"
      file = SINGLE.removesuffix(SUFFIX) + part + SUFFIX
      os.rename(self.folder / f"part{i}", self.folder / file)
      file_of |= dict.fromkeys(names, file)
    if total > 1:
      index = {"metadata": self._totals, "weight_map": file_of}
      _write_text(self.folder / INDEX, _json(index))
    _write_text(self.folder / CONFIG, self._config)
    beside(self.folder)
    _publish(self.folder, self._place)


class _ObjectWriter(_Writer):
  """Writer of a folder of objects: one file at a time is on the disk."""

  def __init__(
    self, folder: pathlib.Path, max_shard_bytes: int, target: ObjectFolder
  ):
    super().__init__(folder, max_shard_bytes)
    self._target = target
    self._file_of: dict[str, str] = {}

  def finish(self, beside: Callable[[pathlib.Path], None]) -> None:
    """Writes the remaining tensors and files; the last object counts."""
    if not self._shards and not self._target.replaces:
      # As transformers writes a model of one file: without an index.
      file = self.folder / SINGLE
      write_file(file, self._held)
      self._target.upload(file, SINGLE)
    elif self._held or not self._shards:
      self._flush()
    beside(self.folder)
    index = {"metadata": self._totals, "weight_map": self._file_of}
    self._target.finish(self.folder, _json(index) if self._file_of else None)

  def _flush(self) -> None:
    names = list(self._held)
    super()._flush()
    number = len(self._shards)
    file = self._target.upload(self.folder / f"part{number - 1}", number)
    self._file_of |= dict.fromkeys(names, file)


def write_file(
  path: str | os.PathLike[str],
  tensors: Mapping[str, Shaped[np.ndarray, " ..."]],
) -> None:
  """Writes one safetensors file, and waits until it is on the disk.

  Args:
    path: A file that does not exist.
    tensors: Tensors by their names.
  """
  # Wide dtypes first, so that each begins at a multiple of its item's size.
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
  text = json_text(table, separators=(",", ":"), ensure_ascii=False).encode()
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
  if wrong := check_name(name):
    allowed = "printable characters without '/' and '..'"
    fault("tensors", wrong, allowed, "rename the tensor")
  if name in seen:
    fault("tensors", f"{shown(name)} twice", "every name once", "rename one")
  seen.add(name)
  if not isinstance(tensor, np.ndarray | jax.Array):
    raise InputTypeError(
      shown(name),
      type(tensor).__name__,
      "a JAX or NumPy array",
      "convert it with np.asarray",
    )
  if tensor.dtype not in _NAMES:
    raise DtypeError(
      shown(name),
      str(tensor.dtype),
      "a float, an integer or a boolean that the format knows",
      "cast it, e.g. to float32",
    )


def _over_processes(tensor: np.ndarray | jax.Array) -> bool:
  """Whether some of its values are only on other processes."""
  return isinstance(tensor, jax.Array) and not (
    tensor.is_fully_addressable or tensor.is_fully_replicated
  )


def host_copy(tensor: AnyArray) -> Shaped[np.ndarray, ...]:
  """Copies all of a tensor to host memory."""
  if isinstance(tensor, np.ndarray):
    return tensor
  if _over_processes(tensor):
    return multihost_utils.process_allgather(tensor, tiled=True)
  if not tensor.is_fully_addressable:
    tensor = tensor.addressable_data(0)
  # An array caches its host copy: a temporary array frees it.
  return np.asarray(tensor.copy())


# ---------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------


def _check_free(place: pathlib.Path, overwrite: bool) -> None:
  """Refuses a file, a folder with folders, or without `overwrite` any files."""
  if not place.exists():
    return
  entries = list(os.scandir(place)) if place.is_dir() else []
  folders = [x.name for x in entries if x.is_dir(follow_symlinks=False)]
  if not place.is_dir():
    got, remedy = "a file", "give a folder"
  elif entries and not overwrite:
    got, remedy = f"a folder with {len(entries)} files", "pass overwrite=True"
  elif folders:
    got, remedy = f"a folder with a folder {shown(folders[0])}", "pass another"
  else:
    return
  raise OptionError(
    "path", f"{shown(place)}, {got}", "a new or an empty folder", remedy
  )


@contextlib.contextmanager
def _writing(place: AnyPath) -> Iterator[None]:
  """Converts a file system error into one with a remedy."""
  try:
    yield
  except OSError as error:
    if isinstance(error, RingjaxError):
      raise
    disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    raise CheckpointWriteError(
      "path",
      f"{shown(place, 100)}: {error.strerror or error}",
      "a folder that can be written to",
      "free space on that disk, or write to another one"
      if disk_full
      else "check that its parent is a folder that you may write to",
      file=str(error.filename or place),
    ) from error


@contextlib.contextmanager
def _staging(place: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder next to the final path, removed in the end in any case."""
  place.parent.mkdir(parents=True, exist_ok=True)
  stem = f".{place.name}.tmp-"
  for leftover in place.parent.glob(f"{stem}*"):
    if (lock := _lock(leftover)) is not None:
      shutil.rmtree(leftover, ignore_errors=True)
      os.close(lock)
  staging = place.parent / f"{stem}{secrets.token_hex(4)}"
  staging.mkdir()
  # While this process lives, no other one takes the folder for a leftover.
  lock = _lock(staging)
  try:
    yield staging
  finally:
    shutil.rmtree(staging, ignore_errors=True)
    if lock is not None:
      os.close(lock)


def _lock(folder: pathlib.Path) -> int | None:
  """A descriptor that locks a folder until it is closed; None: not locked."""
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


def _publish(staging: pathlib.Path, place: pathlib.Path) -> None:
  """Moves the finished folder to its final path, in one step."""
  old = list(os.scandir(place)) if place.exists() else []
  for entry in old:
    if not _ours(entry.name) and not (staging / entry.name).exists():
      _carry_over(entry, staging)
  if place.exists():
    shutil.copymode(place, staging)
  _sync_folder(staging)
  if not old:
    os.rename(staging, place)
  elif not _exchange(staging, place):
    # In between only the name is missing; both folders exist.
    old_place = place.with_name(f"{place.name}.old-{secrets.token_hex(4)}")
    os.rename(place, old_place)
    os.rename(staging, place)
    shutil.rmtree(old_place)
  _sync_folder(place.parent)


def _ours(name: str) -> bool:
  weights = name.startswith("model") and name.endswith(SUFFIX)
  return weights or name in (CONFIG, INDEX)


def _carry_over(entry: os.DirEntry[str], staging: pathlib.Path) -> None:
  """Links a file that stays into the new folder, or copies it."""
  to = staging / entry.name
  try:
    os.link(entry.path, to, follow_symlinks=False)
  except (OSError, NotImplementedError):
    shutil.copy2(entry.path, to, follow_symlinks=False)


def _exchange(a: pathlib.Path, b: pathlib.Path) -> bool:
  """Swaps two folders, if the system can do so in one step (Linux)."""
  linux = sys.platform.startswith("linux")
  libc = ctypes.CDLL(None, use_errno=True) if linux else None
  swap = getattr(libc, "renameat2", None)
  if swap is None:
    return False
  at_cwd, exchange = -100, 2
  if swap(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
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
  """JSON in the layout of transformers."""
  try:
    text = json.dumps(dict(value), indent=2, sort_keys=True, allow_nan=False)
  except (TypeError, ValueError, RecursionError) as error:
    raise ConfigError(
      "config", shown(error), "what JSON can hold", "use plain Python values"
    ) from None
  return text + "\n"


@contextlib.contextmanager
def _same_outcome() -> Iterator[None]:
  """Fails in all processes if it fails in one, so that none waits forever."""
  if jax.process_count() == 1:
    yield
    return
  failure: Exception | None = None
  try:
    yield
  except Exception as error:
    failure = error
  succeeded = multihost_utils.process_allgather(np.array(failure is None))
  if failure is not None:
    raise failure
  if not np.all(succeeded):
    fault(
      "path",
      "a failure in another process",
      "success in all of them",
      "see what the other process raised",
    )
