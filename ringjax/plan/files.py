"""Small JSON files that other processes read, or people edit.

Guarantees: a file is written whole or not at all, and checked when it is read;
a file states its format and its version.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ringjax.errors import (
  CheckpointFormatError,
  OptionError,
  RingjaxError,
  StorageError,
)
from ringjax.json_text import json_text
from ringjax.paths import as_path, open_binary, replacing

T = TypeVar("T")
_LARGEST_BYTES = 16 << 20


def write(path: str, format: str, body: dict[str, Any]) -> None:
  """Write `body`, as version 1 of `format`.

  Raises:
    OptionError: If the folder cannot be written to.
  """
  document = {"format": format, "version": 1, **body}
  write_text(path, json_text(document, indent=1) + "\n")


def write_text(path: str, text: str) -> None:
  """Write a file, whole or not at all.

  Raises:
    OptionError: If the folder cannot be written to.
    StorageError: If it is an address, and the object cannot be written.
  """
  try:
    as_path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
      file.write(text.encode())
  except StorageError:
    raise
  except OSError as error:
    raise OptionError(
      "file",
      f"{path}: {error.strerror}",
      "a path to write to",
      "pass a writable path",
    ) from None


def read(path: str, format: str) -> dict[str, Any]:
  """Read the body of a file that `write` wrote.

  Raises:
    OptionError: If there is no file that can be read.
    CheckpointFormatError: If it is not of this format.
  """
  try:
    with open_binary(path) as file:
      data = file.read(_LARGEST_BYTES + 1)
  except StorageError:
    raise
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
    # NaN and Infinity are not JSON.
    value = json.loads(data, parse_constant=_refuse)
  except (ValueError, RecursionError) as error:
    raise fault(path, f"not JSON ({error})", "a JSON object") from None
  if not isinstance(value, dict) or value.get("format") != format:
    actual_format = (
      value.get("format") if isinstance(value, dict) else type(value)
    )
    raise fault(path, f"format {actual_format!r}", f"format {format!r}")
  if value.get("version") != 1 or value["version"] is True:
    raise fault(path, f"version {value.get('version')!r}", "version 1")
  return {k: v for k, v in value.items() if k not in ("format", "version")}


def load(path: str, format: str, make: Callable[[Any], T], want: str) -> T:
  """Read a file and build an object of its body; `want` describes it.

  Raises:
    OptionError: If there is no file that can be read.
    CheckpointFormatError: If the file holds something else.
  """
  body = read(path, format)
  try:
    return make(body)
  except (RingjaxError, TypeError, KeyError, AttributeError) as error:
    raise fault(path, f"{error}", want) from None


def as_dataclass(kind: type[T], body: Mapping[str, Any]) -> T:
  """Make a dataclass of text, ints and numbers from a mapping of its fields.

  Raises:
    TypeError: If fields are missing or unknown, or of another type.
  """
  fields = {x.name: x for x in dataclasses.fields(kind)}  # type: ignore
  missing = [
    name
    for name, field in fields.items()
    if field.default is dataclasses.MISSING and name not in body
  ]
  unknown = sorted(body.keys() - fields.keys())
  if missing or unknown:
    raise TypeError(f"missing {missing}, unknown {unknown}")
  types = {"str": str, "int": int}
  for name, value in body.items():
    expected_type = types.get(f"{fields[name].type}", int | float)
    if not isinstance(value, expected_type) or isinstance(value, bool):
      raise TypeError(f"{name} {value!r}, not {fields[name].type}")
  return kind(**body)


def record(
  one: object, *properties: str, leave: Collection[str] = ()
) -> dict[str, Any]:
  """Fields of a dataclass and some of its properties, as a dict for JSON."""
  instance: Any = one
  names = [
    field.name
    for field in dataclasses.fields(instance)
    if field.name not in leave
  ]
  return {name: _plain(getattr(one, name)) for name in (*names, *properties)}


def _plain(value: Any) -> Any:
  if hasattr(value, "record"):
    return value.record()
  if dataclasses.is_dataclass(value):
    return record(value)
  if isinstance(value, Mapping):
    return dict(value)
  if isinstance(value, list | tuple):
    return [_plain(x) for x in value]
  return value


def fault(path: str, got: str, want: str) -> CheckpointFormatError:
  """Make the error that says what is wrong with a file."""
  return CheckpointFormatError(path, got, want, "write the file again")


def _refuse(name: str) -> Any:
  raise ValueError(f"{name} is not a number")
