"""What is said when memory runs out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ringjax.errors import OutOfMemoryError, RingjaxError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# "allocating 123456789 bytes", "Used 17.50G of 16.00G hbm", "1.5GiB"
_PLAIN = re.compile(r"(\d{4,}) ?bytes")
_SHORT = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])i?B?\b", re.I)


def ran_out(error: BaseException) -> bool:
  """Whether an error says that memory ran out."""
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in f"{error}"


def asked(error: BaseException) -> int | None:
  """Bytes that an error says were asked for, or None."""
  if isinstance(error, OutOfMemoryError):
    return error.nbytes
  text = f"{error}"
  if found := _PLAIN.search(text):
    return int(found[1])
  if found := _SHORT.search(text):
    return int(float(found[1]) * 1024 ** _UNITS[found[2].lower()])
  return None


def told(error: BaseException, doing: str, knobs: str) -> str:
  """A line that says what asked for how much, and what to change."""
  nbytes = asked(error)
  much = "more" if nbytes is None else f"{nbytes:,} bytes"
  return f"out of memory while {doing}, which asked for {much}: {knobs}"


@contextlib.contextmanager
def watched(doing: str, knobs: str) -> Iterator[None]:
  """Says what ran out of memory inside of the block.

  Args:
    doing: what the block does, "reading the prompt".
    knobs: what to change, two ways at least.

  Raises:
    OutOfMemoryError: memory ran out.
  """
  try:
    yield
  except RingjaxError:
    # Ours say more, an estimate made beforehand too.
    raise
  except Exception as error:
    if not ran_out(error):
      raise
    raise OutOfMemoryError(told(error, doing, knobs), asked(error)) from error
