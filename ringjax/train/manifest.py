"""What a saved training step must be: its files, their bytes, its arrays.

Guarantees: a manifest is written whole or not at all and knows when it was
altered. What it says of a file is the file's size, CRC-32 and SHA-256, each
under the file's own path, so two files that were swapped are seen too.
Cost: writing and checking read each byte once.

A manifest is a line of JSON:

  format, version   what this is
  step              which one
  files             [[path inside of the step, bytes, CRC-32, SHA-256], ...]
  leaves            {path of a leaf: [shape, dtype]}
  extra             what the caller gave
  config            SHA-256 of the caller's config
  sha256            of all of the above
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import posixpath
import stat
import zlib
from collections.abc import Mapping
from typing import Any

from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
)

FORMAT = "ringjax training step"
VERSION = 1
_LARGEST_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
  """A file of a step.

  Attributes:
    path: inside of the step's folder, with "/".
    size: in bytes.
    crc32: of its bytes.
    sha256: of its bytes, as 64 hexadecimal digits; "" if not computed.
  """

  path: str
  size: int
  crc32: int
  sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """An array of a step.

  Attributes:
    shape: of the whole array.
    dtype: by its name, "bfloat16"; of random keys "key<threefry2x32>".
  """

  shape: tuple[int, ...]
  dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a saved step must be.

  Attributes:
    step: which one.
    files: all its files.
    leaves: its arrays by their paths in the tree.
    extra: what the caller gave, as JSON.
    config: SHA-256 of the caller's config.
  """

  step: int
  files: tuple[File, ...]
  leaves: Mapping[str, Leaf]
  extra: Mapping[str, Any]
  config: str

  def to_bytes(self) -> bytes:
    """This manifest as it lies on disk."""
    body = {
      "format": FORMAT,
      "version": VERSION,
      "step": self.step,
      "files": [[f.path, f.size, f.crc32, f.sha256] for f in self.files],
      "leaves": {k: [list(x.shape), x.dtype] for k, x in self.leaves.items()},
      "extra": dict(self.extra),
      "config": self.config,
    }
    body["sha256"] = fingerprint(body)
    return canonical(body) + b"\n"

  @classmethod
  def from_bytes(cls, data: bytes, file: str, step: int) -> Manifest:
    """What `to_bytes` wrote.

    Args:
      data: the bytes.
      file: where they are from.
      step: whose manifest it has to be.

    Raises:
      CheckpointCorruptError: it was altered, or is another step's.
      CheckpointFormatError: a newer ringjax wrote it.
    """
    try:
      body = json.loads(data)
      if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}")
      if type(body["version"]) is int and body["version"] > VERSION:
        raise CheckpointFormatError(
          file,
          f"version {body['version']}",
          f"at most {VERSION}",
          "read it with the ringjax that wrote it",
        )
      said = body.pop("sha256")
      if data != canonical({**body, "sha256": said}) + b"\n":
        raise ValueError("its JSON was written by something else")
      if said != fingerprint(body):
        raise ValueError("its bytes do not have the SHA-256 that it states")
      if body["step"] != step:
        raise ValueError(f"it is that of step {body['step']}")
      files = tuple(
        File(path=path, size=size, crc32=crc32, sha256=sha256)
        for path, size, crc32, sha256 in body["files"]
      )
      for f in files:
        # No path of a manifest leads out of its step.
        if f.path.startswith(("/", "..")) or posixpath.normpath(f.path) != (
          f.path
        ):
          raise ValueError(f"{f.path!r} is no path inside of the step")
      return cls(
        step=step,
        files=files,
        leaves={
          k: Leaf(shape=tuple(shape), dtype=dtype)
          for k, (shape, dtype) in body["leaves"].items()
        },
        extra=body["extra"],
        config=body["config"],
      )
    except CheckpointFormatError:
      raise
    except (
      ValueError,
      KeyError,
      TypeError,
      AttributeError,
      RecursionError,
    ) as error:
      why = str(error) if type(error) is ValueError else "it is no manifest"
      raise corrupt(step, file, why) from None

  @classmethod
  def read(cls, path: str, step: int) -> Manifest:
    """Reads a manifest from disk.

    Raises:
      CheckpointCorruptError: it cannot be read, or as `from_bytes`.
      CheckpointFormatError: as `from_bytes`.
    """
    try:
      with open(path, "rb") as file:
        data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
      raise corrupt(step, path, f"{error.strerror}") from None
    if len(data) > _LARGEST_BYTES:
      raise corrupt(step, path, f"it has more than {_LARGEST_BYTES} bytes")
    return cls.from_bytes(data, path, step)

  def write(self, path: str) -> None:
    """Puts this manifest in place; it and its name are on the disk then.

    Raises:
      OSError: the disk refuses.
    """
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
      file.write(self.to_bytes())
      file.flush()
      _sync(file.fileno(), temporary)
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path))

  def check_sizes(self, folder: str) -> None:
    """Looks at the files without reading them.

    Raises:
      CheckpointCorruptError: one is missing or of another size.
    """
    for file in self.files:
      self._size(folder, file)

  def check_file(self, folder: str, file: File, *, full: bool) -> None:
    """Reads a file and compares.

    Args:
      folder: of the step.
      file: one of `files`.
      full: by SHA-256 as well.

    Raises:
      CheckpointCorruptError: it is not what was written.
    """
    self._size(folder, file)
    path = os.path.join(folder, file.path)
    try:
      found = digest(folder, file.path, full=full)
    except OSError as error:
      raise corrupt(self.step, path, f"{error.strerror}") from None
    if found.size != file.size:
      raise corrupt(self.step, path, f"{found.size} of {file.size} bytes")
    if found.crc32 != file.crc32:
      raise corrupt(self.step, path, "bytes of another CRC-32")
    if full and found.sha256 != file.sha256:
      raise corrupt(self.step, path, "bytes of another SHA-256")

  def _size(self, folder: str, file: File) -> None:
    path = os.path.join(folder, file.path)
    try:
      found = os.lstat(path)
    except OSError as error:
      raise corrupt(self.step, path, f"{error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
      raise corrupt(self.step, path, "no plain file")
    if found.st_size != file.size:
      raise corrupt(self.step, path, f"{found.st_size} of {file.size} bytes")


def corrupt(step: int, file: str, got: str) -> CheckpointCorruptError:
  """What is wrong with a step, as an error to raise."""
  # The end of a long path says more than its beginning.
  shown = file if len(file) <= 120 else f"...{file[-117:]}"
  return CheckpointCorruptError(
    f"step {step}: {shown}",
    got,
    "what was written",
    "restore another step, or bring the file back",
    file=file,
    step=step,
  )


def digest(
  folder: str, path: str, *, full: bool = True, sync: bool = False
) -> File:
  """Reads a file for its sums.

  Args:
    folder: of the step.
    path: inside of it.
    full: computes SHA-256 as well.
    sync: has the file written to the disk before.

  Raises:
    OSError: it cannot be read.
  """
  crc32, size, sha256 = 0, 0, hashlib.sha256()
  piece = memoryview(bytearray(_PIECE_BYTES))
  # A link could lead out of the step.
  handle = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_NOFOLLOW)
  with open(handle, "rb", buffering=0) as file:
    if sync:
      _sync(handle, path)
    while n := file.readinto(piece):
      crc32 = zlib.crc32(piece[:n], crc32)
      size += n
      if full:
        sha256.update(piece[:n])
  return File(
    path=path,
    size=size,
    crc32=crc32,
    sha256=sha256.hexdigest() if full else "",
  )


def files_of(folder: str) -> list[str]:
  """Paths of all files in a folder and below it, sorted.

  Raises:
    OSError: a folder cannot be listed.
  """
  found = []
  for where, _, names in os.walk(folder, onerror=_raise):
    inside = os.path.relpath(where, folder)
    found += [posixpath.normpath(posixpath.join(inside, n)) for n in names]
  return sorted(found)


def sync_folders(folder: str) -> None:
  """Has the names in a folder and below it written to the disk."""
  for where, _, _ in os.walk(folder, topdown=False, onerror=_raise):
    sync_folder(where)


def sync_folder(folder: str) -> None:
  """Has the names in a folder written to the disk."""
  handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    _sync(handle, folder)
  except OSError as error:
    # Some network file systems have nothing to do here and say it so.
    if error.errno != errno.EINVAL:
      raise
  finally:
    os.close(handle)


def _sync(handle: int, path: str) -> None:
  try:
    os.fsync(handle)
  except OSError as error:
    # The system knows no name here; who reads the error wants one.
    error.filename = path
    raise


def canonical(value: Any) -> bytes:
  """JSON in the one form that has a fingerprint.

  Raises:
    ValueError: NaN and infinities are no JSON.
    TypeError: neither are objects of Python.
  """
  return json.dumps(
    value, sort_keys=True, separators=(",", ":"), allow_nan=False
  ).encode()


def fingerprint(value: Any) -> str:
  """SHA-256 of a JSON value, as 64 hexadecimal digits."""
  return hashlib.sha256(canonical(value)).hexdigest()


def _raise(error: OSError) -> None:
  raise error
