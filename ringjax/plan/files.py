"""JSON files that another process may read, or a person may have edited.

Law: a file is written whole or not at all, and what is read is checked before
it is used; a file says its format and its version.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from typing import Any

from ringjax.errors import CheckpointFormatError, OptionError

_LARGEST_BYTES = 16 << 20


def write(path: str, format: str, body: dict[str, Any]) -> None:
  """Writes `body`, as version 1 of `format`.

  Raises:
    OptionError: the folder cannot be written to.
  """
  whole = {"format": format, "version": 1, **body}
  write_text(path, json.dumps(whole, indent=1) + "\n")


def write_text(path: str, text: str) -> None:
  """Writes a file, whole or not at all.

  Raises:
    OptionError: the folder cannot be written to.
  """
  folder = os.path.dirname(os.path.abspath(path))
  temporary = None
  try:
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError as error:
    raise OptionError(
      "file",
      f"{path}: {error.strerror}",
      "a path to write to",
      "pass a writable path",
    ) from None
  finally:
    if temporary is not None:
      with contextlib.suppress(OSError):
        os.unlink(temporary)


def read(path: str, format: str) -> dict[str, Any]:
  """The body of a file that `write` wrote.

  Raises:
    OptionError: there is none that can be read.
    CheckpointFormatError: it is something else.
  """
  try:
    with open(path, "rb") as file:
      data = file.read(_LARGEST_BYTES + 1)
  except OSError as error:
    raise OptionError(
      "file",
      f"{path}: {error.strerror}",
      "a file to read",
      "pass the path of a readable file",
    ) from None
  if len(data) > _LARGEST_BYTES:
    raise fault(path, f"more than {_LARGEST_BYTES} bytes", "a small JSON file")
  try:
    # NaN and Infinity are no JSON, and no time either.
    value = json.loads(data, parse_constant=_refuse)
  except (ValueError, RecursionError) as error:
    raise fault(path, f"no JSON ({error})", "a JSON object") from None
  if not isinstance(value, dict) or value.get("format") != format:
    have = value.get("format") if isinstance(value, dict) else type(value)
    raise fault(path, f"format {have!r}", f"format {format!r}")
  if value.get("version") != 1 or value["version"] is True:
    raise fault(path, f"version {value.get('version')!r}", "version 1")
  return {k: v for k, v in value.items() if k not in ("format", "version")}


def fault(path: str, got: str, want: str) -> CheckpointFormatError:
  """What is wrong with a file, as an error to raise."""
  return CheckpointFormatError(
    path, got, want, "write the file anew or mend it"
  )


def _refuse(name: str) -> Any:
  raise ValueError(f"{name} is not a number")
