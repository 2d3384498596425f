"""Paths that users pass: of the file system, or addresses of objects.

Guarantees: a path of the file system is a `pathlib.Path` and behaves as one;
it needs neither fsspec nor a client. `replacing` and `filling` write whole or
not at all, in both.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import secrets
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from ringjax import regular_files
from ringjax.checks import is_address
from ringjax.errors import InputTypeError, StorageError
from ringjax.paths.object_path import ObjectPath

# Path of the file system, or address of an object.
AnyPath = pathlib.Path | ObjectPath


def as_path(
  path: str | os.PathLike[str] | None, argument: str = "path"
) -> AnyPath:
  """`path` as a `pathlib.Path`, or as an `ObjectPath` if it is an address.

  Args:
    path: Path of the file system, "~" for the home folder; or gs://bucket/name,
      s3://bucket/name or memory://name.
    argument: Name of the argument, for an error.

  Raises:
    InputTypeError: If it is not a path.
    OptionError: If it is an address of another scheme or without a bucket, or
      the client of its storage is not installed.
  """
  if isinstance(path, ObjectPath):
    return path
  if not isinstance(path, str | os.PathLike):
    raise InputTypeError(
      argument, type(path).__name__, "a str or a Path", "pass a path"
    )
  if is_address(path):
    return ObjectPath(os.fspath(path), argument)
  return pathlib.Path(path).expanduser()


def open_binary(path: str | os.PathLike[str]) -> io.BufferedReader:
  """Opens a file or an object for reading.

  Raises:
    OSError: If it cannot be read.
    OptionError: See `as_path`.
  """
  file = as_path(path).open("rb")
  assert isinstance(file, io.BufferedReader)
  return file


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a new file that takes the place of `path` when the block ends.

  A file whose path is an address is first written to the temporary folder of
  this machine. If the block raises, an older file stays.

  Raises:
    OSError: If it cannot be written.
    OptionError: See `as_path`.
  """
  target = as_path(path)
  if isinstance(target, pathlib.Path):
    with regular_files.replacing(target) as file:
      yield file
    return
  with tempfile.TemporaryDirectory() as folder:
    local = pathlib.Path(folder) / "object"
    with local.open("xb") as file:
      yield file
    target.store.upload(str(target), str(local))


@contextlib.contextmanager
def filling(
  folder: str | os.PathLike[str], *, last: str = ""
) -> Iterator[pathlib.Path]:
  """Yields a folder of the file system to write files into.

  That is the folder itself, which need not exist; of an address a temporary
  folder, whose files become objects when the block ends.

  Args:
    folder: Folder of the files.
    last: Name of the file that becomes an object last.

  Raises:
    OSError: If a file cannot be written.
    OptionError: See `as_path`.
  """
  place = as_path(folder)
  if isinstance(place, pathlib.Path):
    yield place
    return
  with tempfile.TemporaryDirectory() as temporary:
    local = pathlib.Path(temporary)
    yield local
    upload_folder(local, place, last=last)


def upload_folder(
  local: pathlib.Path, place: ObjectPath, *, last: str = ""
) -> None:
  """Writes the files of a local folder, and below, as objects.

  Args:
    local: Folder of the files.
    place: Address of the folder of the objects.
    last: Name of the file that becomes an object last.

  Raises:
    StorageError: If an object cannot be written.
  """
  files = sorted(p for p in local.rglob("*") if p.is_file())
  for file in sorted(files, key=lambda p: p.name == last):
    target = place / file.relative_to(local).as_posix()
    place.store.upload(str(target), str(file))


def check_writable(path: str | os.PathLike[str]) -> None:
  """Makes sure that files can be written next to `path`, by writing one.

  Folders of the file system are made.

  Raises:
    OSError: If none can be written; of an address a `StorageError`.
    OptionError: See `as_path`.
  """
  place = as_path(path)
  if isinstance(place, pathlib.Path):
    folder = place.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    # Permissions alone do not show that a disk is read-only.
    tempfile.TemporaryFile(dir=folder).close()
    return
  probe = place.with_name(f".{place.name}.{secrets.token_hex(4)}.probe")
  try:
    probe.write_bytes(b"ringjax writes here\n")
  finally:
    # A failed write leaves nothing; its error counts.
    with contextlib.suppress(StorageError):
      probe.unlink(missing_ok=True)
