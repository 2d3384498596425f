"""The manifest of a saved training step: its files, their digests, its arrays.

Guarantees: a manifest is written completely or not at all, and an altered one
is detected. A file is identified by its path, size, CRC-32 and SHA-256, so that
two files that were swapped are detected, too.
Cost: writing and verifying read each byte once.

This is not from Orbax, which keeps no digests of its files. Of 78 single bits
that were flipped in a step (Orbax 0.12.8), 5 came back as wrong values without
an error.

A manifest is a line of JSON:

  format, version   the constants below
  step              the number of the step
  files             [[path inside of the step, bytes, CRC-32, SHA-256], ...]
  leaves            {path of a leaf: [shape, dtype]}
  extra             the caller's JSON
  config            SHA-256 of the caller's config
  pieces            {path of a leaf: [[start, shape, file, offset, bytes,
                    CRC-32], ...]} of steps in an object storage, else missing
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
from typing import Any, NamedTuple

from ringjax.errors import CheckpointCorruptError, CheckpointFormatError
from ringjax.regular_files import open_regular

FORMAT = "ringjax training step"
VERSION = 1
_LARGEST_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20


class File(NamedTuple):
  """A file of a step.

  Fields:
    path: Path inside of the step's folder, with "/".
    size: Size in bytes.
    crc32: CRC-32 of its bytes.
    sha256: SHA-256 of its bytes, 64 hexadecimal digits; "" if not computed.
  """

  path: str
  size: int
  crc32: int
  sha256: str


class Leaf(NamedTuple):
  """Shape and dtype of an array of a step.

  Fields:
    shape: Shape of the whole array.
    dtype: Name of the dtype, "bfloat16"; of random keys "key<threefry2x32>".
  """

  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f"{self.dtype} {list(self.shape)}"


class Piece(NamedTuple):
  """A box of an array of a step, whose bytes are contiguous in a file.

  Fields:
    start: Index of its first element along each axis of the array.
    shape: Shape of the box.
    file: Number of its file in `Manifest.files`.
    offset: Position of its first byte in the file.
    size: Size in bytes.
    crc32: CRC-32 of its bytes.
  """

  start: tuple[int, ...]
  shape: tuple[int, ...]
  file: int
  offset: int
  size: int
  crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The content of a saved step.

  Attributes:
    step: Number of the step.
    files: All files of the step.
    leaves: Shapes and dtypes of its arrays by their paths in the tree.
    extra: JSON of the caller.
    config: SHA-256 of the caller's config.
    pieces: Pieces of each array by its path in the tree, of a step in an
      object storage; None of one that Orbax wrote.
  """

  step: int
  files: tuple[File, ...]
  leaves: Mapping[str, Leaf]
  extra: Mapping[str, Any]
  config: str
  pieces: Mapping[str, tuple[Piece, ...]] | None = None

  def to_bytes(self) -> bytes:
    """The manifest in the form that is written to the disk."""
    body: dict[str, Any] = {
      "format": FORMAT,
      "version": VERSION,
      "step": self.step,
      "files": self.files,
      "leaves": dict(self.leaves),
      "extra": dict(self.extra),
      "config": self.config,
    }
    if self.pieces is not None:
      body["pieces"] = dict(self.pieces)
    return canonical(body | {"sha256": fingerprint(body)}) + b"\n"

  @classmethod
  def from_bytes(cls, data: bytes, file: str, step: int) -> Manifest:
    """Parses the result of `to_bytes`.

    Args:
      data: Bytes of the manifest.
      file: Path of its file, for errors.
      step: Expected number of the step.

    Raises:
      CheckpointCorruptError: If it was altered, or is another step's.
      CheckpointFormatError: If a newer ringjax wrote it.
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
      sha256 = body.pop("sha256")
      if data != canonical({**body, "sha256": sha256}) + b"\n":
        raise ValueError("its JSON was written by something else")
      if sha256 != fingerprint(body):
        raise ValueError("its bytes do not have the SHA-256 that it states")
      if body["step"] != step:
        raise ValueError(f"it is that of step {body['step']}")
      files = tuple(File(*x) for x in body["files"])
      for path, *_ in files:
        if path.startswith(("/", "..")) or posixpath.normpath(path) != path:
          raise ValueError(f"{path!r} is no path inside of the step")
      return cls(
        step=step,
        files=files,
        leaves={k: Leaf(tuple(s), d) for k, (s, d) in body["leaves"].items()},
        extra=body["extra"],
        config=body["config"],
        pieces=_pieces(body.get("pieces"), files, step),
      )
    except CheckpointFormatError:
      raise
    except (
      ValueError,
      KeyError,
      IndexError,
      TypeError,
      AttributeError,
      RecursionError,
    ) as error:
      reason = str(error) if type(error) is ValueError else "it is no manifest"
      raise corrupt(step, file, reason) from None

  @classmethod
  def read(cls, path: str, step: int) -> Manifest:
    """Reads a manifest from the disk.

    Raises:
      CheckpointCorruptError: If it cannot be read, was altered, or is another
        step's.
      CheckpointFormatError: If a newer ringjax wrote it.
    """
    try:
      with open(open_regular(path), "rb") as file:
        data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
      raise corrupt(step, path, f"{error.strerror}") from None
    if len(data) > _LARGEST_BYTES:
      raise corrupt(step, path, f"it has more than {_LARGEST_BYTES} bytes")
    return cls.from_bytes(data, path, step)

  def write(self, path: str) -> None:
    """Writes the manifest in one rename and syncs it and its name.

    Raises:
      OSError: If it cannot be written.
    """
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
      file.write(self.to_bytes())
      file.flush()
      _sync(file.fileno(), temporary)
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path))

  def check_sizes(self, folder: str) -> None:
    """Compares the sizes of all files without reading them.

    Raises:
      CheckpointCorruptError: If a file is missing or of another size.
    """
    for file in self.files:
      self.check_file(folder, file, verify="none")

  def check_file(self, folder: str, file: File, *, verify: str) -> None:
    """Compares a file with its entry in the manifest.

    Args:
      folder: Folder of the step.
      file: One of `files`.
      verify: "none" compares its size, "crc32" its CRC-32, too, "full" all.

    Raises:
      CheckpointCorruptError: If it differs.
    """
    path = os.path.join(folder, file.path)
    try:
      status = os.lstat(path)
      if not stat.S_ISREG(status.st_mode):
        raise corrupt(self.step, path, "no regular file")
      actual = file._replace(size=status.st_size)
      if verify != "none" and actual == file:
        actual = digest(folder, file.path, full=verify == "full")
    except OSError as error:
      raise corrupt(self.step, path, f"{error.strerror}") from None
    if actual.size != file.size:
      raise corrupt(self.step, path, f"{actual.size} of {file.size} bytes")
    if actual.crc32 != file.crc32:
      raise corrupt(self.step, path, "bytes of another CRC-32")
    if verify == "full" and actual.sha256 != file.sha256:
      raise corrupt(self.step, path, "bytes of another SHA-256")


def _pieces(
  table: Mapping[str, Any] | None, files: tuple[File, ...], step: int
) -> dict[str, tuple[Piece, ...]] | None:
  """The pieces in a manifest's JSON.

  Raises:
    ValueError: If a piece is not in its file.
  """
  if table is None:
    return None
  pieces = {
    name: tuple(
      Piece(tuple(start), tuple(shape), *place)
      for start, shape, *place in entries
    )
    for name, entries in table.items()
  }
  for piece in (piece for row in pieces.values() for piece in row):
    end = piece.offset + piece.size
    if min(piece.file, piece.offset) < 0 or end > files[piece.file].size:
      raise ValueError(f"a piece of step {step} ends after its file")
  return pieces


def corrupt(step: int, file: str, got: str) -> CheckpointCorruptError:
  """The error that names a step's corrupt file, to be raised."""
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
  """Reads a file and computes its digests.

  Args:
    folder: Folder of the step.
    path: Path inside of the folder.
    full: Whether to compute SHA-256 as well.
    sync: Whether to sync the file to the disk first.

  Raises:
    OSError: If it cannot be read.
  """
  crc32, size, sha256 = 0, 0, hashlib.sha256()
  chunk = memoryview(bytearray(_PIECE_BYTES))
  # A link could lead out of the step.
  handle = open_regular(os.path.join(folder, path), follow=False)
  with open(handle, "rb", buffering=0) as file:
    if sync:
      _sync(handle, path)
    while n := file.readinto(chunk):
      crc32 = zlib.crc32(chunk[:n], crc32)
      size += n
      if full:
        sha256.update(chunk[:n])
  return File(path, size, crc32, sha256.hexdigest() if full else "")


def files_of(folder: str) -> list[str]:
  """Paths of all files in a folder and below it, sorted.

  Raises:
    OSError: If a folder cannot be listed.
  """
  paths = []
  for root, _, names in os.walk(folder, onerror=_raise):
    inside = os.path.relpath(root, folder)
    paths += [posixpath.normpath(posixpath.join(inside, n)) for n in names]
  return sorted(paths)


def sync_folders(folder: str) -> None:
  """Syncs the names in a folder and below it to the disk."""
  for root, _, _ in os.walk(folder, topdown=False, onerror=_raise):
    sync_folder(root)


def sync_folder(folder: str) -> None:
  """Syncs the names in a folder to the disk."""
  handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    _sync(handle, folder)
  except OSError as error:
    # Network file systems without anything to sync return this.
    if error.errno != errno.EINVAL:
      raise
  finally:
    os.close(handle)


def _sync(handle: int, path: str) -> None:
  try:
    os.fsync(handle)
  except OSError as error:
    # The system's error has no file name.
    error.filename = path
    raise


def canonical(value: object) -> bytes:
  """Canonical JSON, of which fingerprints are computed.

  Raises:
    ValueError: If a number is NaN or infinite, which JSON does not have.
    TypeError: If it contains other Python objects.
  """
  return json.dumps(
    value, sort_keys=True, separators=(",", ":"), allow_nan=False
  ).encode()


def fingerprint(value: object) -> str:
  """SHA-256 of a JSON value, as 64 hexadecimal digits."""
  return hashlib.sha256(canonical(value)).hexdigest()


def _raise(error: OSError) -> None:
  raise error
