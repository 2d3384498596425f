"""The host's free memory, and errors of programs that run out of memory."""

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


# Of a control group: its limit, what it uses, and what of that is cached files,
# which make room. By version 2 of the interface and by version 1.
_GROUP = ("memory.max", "memory.current", "inactive_file")
_GROUP_1 = (
  "memory.limit_in_bytes",
  "memory.usage_in_bytes",
  "total_inactive_file",
)


def host_free_bytes(root: str = "/") -> int | None:
  """Bytes that this process may still allocate; None if that is unknown.

  The least of the machine's free memory and what the limits of the process'
  control groups leave: in a container the machine may have much more, and a
  process that takes it is killed.

  Args:
    root: the folder of the system's files, proc and sys.
  """
  lines = _read(pathlib.Path(root, "proc/meminfo")).splitlines()
  found = [
    int(line.split()[1]) * 1024
    for line in lines
    if line.startswith("MemAvailable:")
  ]
  for folder, names in _groups(root):
    limit, used = (_read(folder / name).strip() for name in names[:2])
    if limit.isdecimal() and used.isdecimal():
      pattern = rf"^{names[2]} (\d+)$"
      cached = re.search(pattern, _read(folder / "memory.stat"), re.M)
      found.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
  return max(0, min(found)) if found else None


def _groups(root: str) -> Iterator[tuple[pathlib.Path, tuple[str, ...]]]:
  """Folders of the control groups of this process, and names of their files."""
  top = pathlib.Path(root, "sys/fs/cgroup")
  for line in _read(pathlib.Path(root, "proc/self/cgroup")).splitlines():
    _, _, rest = line.partition(":")
    kinds, _, path = rest.partition(":")
    if kinds and "memory" not in kinds.split(","):
      continue
    home, names = (top / "memory", _GROUP_1) if kinds else (top, _GROUP)
    place = pathlib.PurePosixPath(path.strip("/"))
    # All groups around it have limits too; in a container its own is the top.
    for part in (place, *place.parents):
      yield home / part, names


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except OSError:
    return ""


def ran_out(error: BaseException) -> bool:
  """Whether an error is about memory that ran out."""
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in f"{error}"


def asked(error: BaseException) -> int | None:
  """Bytes of the allocation that failed, read from the error, or None."""
  if isinstance(error, OutOfMemoryError):
    return error.nbytes
  text = f"{error}"
  if found := _PLAIN.search(text):
    return int(found[1])
  if found := _SHORT.search(text):
    return int(float(found[1]) * 1024 ** _UNITS[found[2].lower()])
  return None


def told(error: BaseException, doing: str, knobs: str) -> str:
  """One line: what ran out of memory, the bytes it needed, what to change."""
  nbytes = asked(error)
  much = "more" if nbytes is None else f"{nbytes:,} bytes"
  return f"out of memory while {doing}, which asked for {much}: {knobs}"


@contextlib.contextmanager
def watched(doing: str, knobs: str) -> Iterator[None]:
  """Turns the block's errors about memory into `OutOfMemoryError`.

  Args:
    doing: what the block does, e.g. "reading the prompt".
    knobs: what the caller can change, two options at least.

  Raises:
    OutOfMemoryError: memory ran out.
  """
  try:
    yield
  except RingjaxError:
    # These name the argument already, an estimate beforehand too.
    raise
  except Exception as error:
    if not ran_out(error):
      raise
    raise OutOfMemoryError(
      told(error, doing, knobs), nbytes=asked(error)
    ) from error
