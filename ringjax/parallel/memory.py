"""Memory of devices and of the host, and errors of running out of it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class ReportsMemory(Protocol):
  """Device that may report its memory, such as a `jax.Device`.

  Attributes:
    platform: JAX's name of the platform.
  """

  platform: str

  def memory_stats(self) -> Any:
    """Return figures by name; None or an error if there are no figures."""
    ...


class DeviceMemory(NamedTuple):
  """Memory of a device, in bytes; None for what its platform does not report.

  Fields:
    total: Memory that programs may fill.
    used: Allocated memory.
    peak: Largest allocated memory so far.
  """

  total: int | None
  used: int | None
  peak: int | None


def device_memory(device: ReportsMemory, sharing: int = 1) -> DeviceMemory:
  """Memory of a device as its platform reports it.

  CPU devices share the host's memory.

  Args:
    device: Device of this process.
    sharing: Number of devices that share the host's memory, on CPUs.
  """
  stats: Mapping[str, int]
  try:
    stats = device.memory_stats() or {}
  except (NotImplementedError, RuntimeError):
    stats = {}
  total = stats.get("bytes_limit")
  if total is None and device.platform == "cpu":
    host = host_total_bytes()
    total = None if host is None else host // sharing
  # A platform that reports its limit alone has allocated nothing yet.
  used = stats.get("bytes_in_use", 0 if "bytes_limit" in stats else None)
  return DeviceMemory(total, used, stats.get("peak_bytes_in_use"))


def device_free_bytes(device: ReportsMemory, sharing: int) -> int | None:
  """Bytes that may still be allocated on a device; None if unknown.

  CPU devices share the host's memory: each of `sharing` gets its part.
  """
  total, used, _ = device_memory(device, sharing)
  if total is not None and used is not None:
    return total - used
  if device.platform != "cpu":
    return None
  free = host_free_bytes()
  return None if free is None else free // sharing


def host_total_bytes(root: str = "/") -> int | None:
  """Memory that processes may fill; None if that is unknown.

  The minimum of the machine's memory and the limits of the process' control
  groups.

  Args:
    root: Folder of the system's files, proc and sys.
  """
  total_bytes = _meminfo(root, "MemTotal:") or _pages(root)
  for folder, names in _groups(root):
    limit = _read(folder / names[0]).strip()
    if limit.isdecimal():
      total_bytes.append(int(limit))
  return min(total_bytes, default=None)


def host_free_bytes(root: str = "/") -> int | None:
  """Bytes that this process may still allocate; None if that is unknown.

  The minimum of the machine's free memory and what the limits of the process'
  control groups leave: in a container the machine may have much more, and a
  process that takes it is killed.

  Args:
    root: Folder of the system's files, proc and sys.
  """
  free_bytes = _meminfo(root, "MemAvailable:")
  for folder, names in _groups(root):
    limit, used = (_read(folder / name).strip() for name in names[:2])
    if limit.isdecimal() and used.isdecimal():
      pattern = rf"^{names[2]} (\d+)$"
      cached = re.search(pattern, _read(folder / "memory.stat"), re.M)
      free_bytes.append(
        int(limit) - int(used) + (int(cached[1]) if cached else 0)
      )
  return max(0, min(free_bytes)) if free_bytes else None


def _meminfo(root: str, field: str) -> list[int]:
  """Bytes of a field of the system's table of memory, none if it has none."""
  lines = _read(pathlib.Path(root, "proc/meminfo")).splitlines()
  return [
    int(line.split()[1]) * 1024 for line in lines if line.startswith(field)
  ]


def _pages(root: str) -> list[int]:
  """Bytes of this machine's pages, where the system has no table of memory."""
  if root != "/":
    return []
  try:
    return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
  except (AttributeError, OSError, ValueError):
    return []


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
