"""Free memory of the host, and errors of programs that run out of memory."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator

from ringjax.errors import OutOfMemoryError, RingjaxError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# "allocating 123456789 bytes", "Used 17.50G of 16.00G hbm", "1.5GiB"
_PLAIN = re.compile(r"(\d{4,}) ?bytes")
_SHORT = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])i?B?\b", re.I)


# Files of a control group: its limit, its usage, and the field with cached
# files in that, which can be evicted. For version 2 of the interface, then
# version 1.
_GROUP = ("memory.max", "memory.current", "inactive_file")
_GROUP_1 = (
  "memory.limit_in_bytes",
  "memory.usage_in_bytes",
  "total_inactive_file",
)


def host_free_bytes(root: str = "/") -> int | None:
  """Bytes that this process may still allocate; None if that is unknown.

  The minimum of the machine's free memory and what the limits of the process'
  control groups leave: in a container the machine may have much more, and a
  process that takes it is killed.

  Args:
    root: Folder of the system's files, proc and sys.
  """
  lines = _read(pathlib.Path(root, "proc/meminfo")).splitlines()
  free_bytes = [
    int(line.split()[1]) * 1024
    for line in lines
    if line.startswith("MemAvailable:")
  ]
  for folder, names in _groups(root):
    limit, used = (_read(folder / name).strip() for name in names[:2])
    if limit.isdecimal() and used.isdecimal():
      pattern = rf"^{names[2]} (\d+)$"
      cached = re.search(pattern, _read(folder / "memory.stat"), re.M)
      free_bytes.append(
        int(limit) - int(used) + (int(cached[1]) if cached else 0)
      )
  return max(0, min(free_bytes)) if free_bytes else None


def _groups(root: str) -> Iterator[tuple[pathlib.Path, tuple[str, ...]]]:
  """Folders of this process's control groups, and names of their files."""
  top = pathlib.Path(root, "sys/fs/cgroup")
  for line in _read(pathlib.Path(root, "proc/self/cgroup")).splitlines():
    _, _, controllers_and_path = line.partition(":")
    kinds, _, path = controllers_and_path.partition(":")
    if kinds and "memory" not in kinds.split(","):
      continue
    group_root, names = (top / "memory", _GROUP_1) if kinds else (top, _GROUP)
    group_path = pathlib.PurePosixPath(path.strip("/"))
    # Enclosing groups have limits too; in a container its own group is the top.
    for part in (group_path, *group_path.parents):
      yield group_root / part, names


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except OSError:
    return ""


def ran_out(error: BaseException) -> bool:
  """Whether an error reports that memory ran out."""
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in f"{error}"


def requested_bytes(error: BaseException) -> int | None:
  """Parse the bytes of the allocation that failed from an error, or None."""
  if isinstance(error, OutOfMemoryError):
    return error.nbytes
  text = f"{error}"
  if match := _PLAIN.search(text):
    return int(match[1])
  if match := _SHORT.search(text):
    return int(float(match[1]) * 1024 ** _UNITS[match[2].lower()])
  return None


def told(error: BaseException, doing: str, knobs: str) -> str:
  """Compose a line: what ran out of memory, its bytes, what to change."""
  nbytes = requested_bytes(error)
  amount = "more" if nbytes is None else f"{nbytes:,} bytes"
  return f"out of memory while {doing}, which asked for {amount}: {knobs}"


@contextlib.contextmanager
def watched(doing: str, knobs: str) -> Iterator[None]:
  """Convert the block's errors about memory into `OutOfMemoryError`.

  Args:
    doing: Description of the block's work, e.g. "reading the prompt".
    knobs: Options that the caller can change, at least two.

  Raises:
    OutOfMemoryError: If memory ran out.
  """
  try:
    yield
  except RingjaxError:
    # These already name the argument, as does an estimate beforehand.
    raise
  except Exception as error:
    if not ran_out(error):
      raise
    raise OutOfMemoryError(
      told(error, doing, knobs), nbytes=requested_bytes(error)
    ) from error
