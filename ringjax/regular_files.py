"""Files by untrusted names, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
  """Open a regular file for reading, and nothing else.

  Opening a pipe would wait for its other end; this does not.

  Args:
    path: Path of the file.
    follow: Whether the last part of the path may be a symbolic link.

  Returns:
    The file descriptor.

  Raises:
      OSError: If it cannot be opened, or is a pipe, a device or a folder.
  """
  flags = os.O_RDONLY
  for flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"):
    flags |= getattr(os, flag, 0)
  if not follow:
    flags |= getattr(os, "O_NOFOLLOW", 0)
  descriptor = os.open(path, flags)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
  return descriptor


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Open a new file that takes the place of `path` when the block ends.

  If the block raises, the new file is removed, and an older one stays.
  """
  target = pathlib.Path(path)
  new = target.parent / f".{target.name}.{secrets.token_hex(4)}.new"
  try:
    with open(new, "xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(new, target)
  finally:
    new.unlink(missing_ok=True)


def inside(folder: pathlib.Path, name: str) -> pathlib.Path | None:
  """Resolve a file of a model's folder, or return None if it is elsewhere.

  The cache of the Hugging Face hub keeps folders of links in snapshots/<hash>
  to files in blobs/ next to snapshots/: those count as inside.
  """
  root, path = folder.resolve(), (folder / name).resolve()
  roots = {root}
  for parent in root.parents:
    if parent.name == "snapshots":
      roots.add(parent.parent / "blobs")
      break
  return path if path.parent in roots else None
