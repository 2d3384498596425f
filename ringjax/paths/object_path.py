"""Addresses of objects, with the methods of `pathlib.Path`.

A folder is the common beginning of addresses: it exists while an object is in
it, and is never made.
"""

from __future__ import annotations

import fnmatch
import functools
import io
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringjax.errors import OptionError
from ringjax.paths.object_store import (
  ObjectFacts,
  ObjectStore,
  check_scheme,
  store_of,
)

# Bytes that a file which is read in order requests at a time.
READ_BYTES = 4 << 20


class ObjectStatus(NamedTuple):
  """The part of `os.stat_result` that an object has.

  Fields:
    st_size: Size in bytes.
  """

  st_size: int


@functools.total_ordering
class ObjectPath(os.PathLike[str]):
  """Address of an object or of a folder of objects: gs://bucket/folder/name.

  Args:
    address: Address; "." and ".." are not resolved, as names may contain them.
    argument: Name of the argument, for an error.

  Raises:
    OptionError: If the scheme is unknown or not installed, or no bucket is
      named.
  """

  def __init__(self, address: str, argument: str = "path"):
    check_scheme(argument, address)
    scheme, _, key = address.partition(":")
    names = [name for name in key.split("/") if name]
    if not names:
      raise OptionError(
        argument, address, f"{scheme}://BUCKET/NAME", "add the bucket"
      )
    self._scheme = scheme.lower()
    self._names = tuple(names)

  @property
  def store(self) -> ObjectStore:
    """The storage that has the object."""
    return store_of(self._scheme)

  @property
  def name(self) -> str:
    """Name after the last "/"."""
    return self._names[-1]

  @property
  def suffix(self) -> str:
    """End of the name from its last dot on, or ""."""
    return posixpath.splitext(self.name)[1]

  @property
  def stem(self) -> str:
    """Name without its suffix."""
    return posixpath.splitext(self.name)[0]

  @property
  def parent(self) -> ObjectPath:
    """Folder of the object; a bucket is in itself."""
    return self if len(self._names) == 1 else self._with(self._names[:-1])

  def __str__(self) -> str:
    return f"{self._scheme}://{'/'.join(self._names)}"

  def __repr__(self) -> str:
    return f"ObjectPath({str(self)!r})"

  def __fspath__(self) -> str:
    return str(self)

  def __truediv__(self, name: str | os.PathLike[str]) -> ObjectPath:
    names = [x for x in os.fspath(name).split("/") if x]
    return self._with((*self._names, *names))

  def __eq__(self, other: object) -> bool:
    return isinstance(other, ObjectPath) and str(self) == str(other)

  def __lt__(self, other: ObjectPath) -> bool:
    return str(self) < str(other)

  def __hash__(self) -> int:
    return hash(str(self))

  def with_name(self, name: str) -> ObjectPath:
    """Address of another object of the same folder."""
    return self._with((*self._names[:-1], name))

  def expanduser(self) -> ObjectPath:
    """The address itself, which has no "~"."""
    return self

  def absolute(self) -> ObjectPath:
    """The address itself."""
    return self

  def resolve(self) -> ObjectPath:
    """The address itself: objects have no links."""
    return self

  def facts(self) -> ObjectFacts | None:
    """Size and version of the object, or None if there is no such object."""
    return self.store.facts(str(self))

  def is_file(self) -> bool:
    """Whether there is an object of this address."""
    return self.facts() is not None

  def is_dir(self) -> bool:
    """Whether an object is in the folder."""
    return bool(self.store.names(str(self)))

  def exists(self) -> bool:
    """Whether there is such an object or folder."""
    return self.is_file() or self.is_dir()

  def stat(self) -> ObjectStatus:
    """Size of the object.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    facts = self.facts()
    if facts is None:
      raise FileNotFoundError(2, "no such object", str(self))
    return ObjectStatus(facts.size)

  def mkdir(
    self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
  ) -> None:
    """Does nothing: a folder exists while an object is in it."""

  def iterdir(self) -> Iterator[ObjectPath]:
    """Addresses just below the folder, sorted."""
    for name in self.store.names(str(self)):
      yield self / name

  def glob(self, pattern: str) -> Iterator[ObjectPath]:
    """Objects below the folder that match a pattern, sorted.

    Args:
      pattern: Pattern as of `pathlib.Path.glob`; "**" stands for any folders.
    """
    matcher = re.compile(_regular_expression(pattern))
    start = len(str(self)) + 1
    for address in self.store.find(str(self)):
      if matcher.fullmatch(address[start:]):
        yield ObjectPath(address)

  def rglob(self, pattern: str) -> Iterator[ObjectPath]:
    """Objects in the folder and below that match a pattern, sorted."""
    return self.glob(f"**/{pattern}")

  def open(
    self, mode: str = "r", *, encoding: str | None = None
  ) -> io.BufferedReader | io.TextIOWrapper:
    """Opens the object for reading, in ranges of `READ_BYTES`.

    Args:
      mode: "r" or "rb".
      encoding: Encoding of a text.

    Raises:
      FileNotFoundError: If there is no such object.
      ValueError: If the mode is one for writing; see `paths.replacing`.
    """
    if mode not in ("r", "rb"):
      raise ValueError(f"mode {mode!r}: objects are written by paths.replacing")
    reader: Any = ObjectReader(self)
    file = io.BufferedReader(reader, READ_BYTES)
    return file if mode == "rb" else io.TextIOWrapper(file, encoding)

  def read_bytes(self) -> bytes:
    """All bytes of the object.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    return self.store.read(str(self))

  def read_text(self, encoding: str = "utf-8") -> str:
    """The text of the object.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    return self.read_bytes().decode(encoding)

  def write_bytes(self, data: bytes) -> int:
    """Writes the object, whole or not at all; returns its size in bytes."""
    self.store.write(str(self), data)
    return len(data)

  def write_text(self, data: str, encoding: str = "utf-8") -> int:
    """Writes the object, whole or not at all; returns its characters."""
    self.write_bytes(data.encode(encoding))
    return len(data)

  def unlink(self, missing_ok: bool = False) -> None:
    """Deletes the object.

    Raises:
      FileNotFoundError: If there is no such object and it may not be missing.
    """
    if not missing_ok:
      self.stat()
    self.store.delete(str(self))

  def _with(self, names: tuple[str, ...]) -> ObjectPath:
    return ObjectPath(f"{self._scheme}://{'/'.join(names)}")


class ObjectReader(io.RawIOBase):
  """An object as a file that is read in ranges.

  Attributes:
    facts: Size and version of the object when it was opened.

  Raises:
    FileNotFoundError: If there is no such object.
  """

  def __init__(self, path: ObjectPath):
    super().__init__()
    facts = path.facts()
    if facts is None:
      raise FileNotFoundError(2, "no such object", str(path))
    self.facts = facts
    self._path, self._position = path, 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._position

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    base = (0, self._position, self.facts.size)[whence]
    self._position = max(0, base + offset)
    return self._position

  def readinto(self, buffer: memoryview | bytearray) -> int:  # pyrefly: ignore
    view = memoryview(buffer).cast("B")
    end = min(self._position + len(view), self.facts.size)
    count = max(0, end - self._position)
    if count:
      data = self._path.store.read(str(self._path), self._position, end)
      view[:count] = data
      self._position += count
    return count


def _regular_expression(pattern: str) -> str:
  """A regular expression of a pattern whose "*" does not match "/"."""
  parts = []
  for part in pattern.split("/"):
    if part == "**":
      parts.append("(?:[^/]+/)*")
    else:
      text = fnmatch.translate(part).removesuffix("\\Z").removesuffix("\\z")
      parts.append(text.replace(".*", "[^/]*") + "/")
  return "".join(parts).removesuffix("/")
