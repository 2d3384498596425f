"""Parsing of objects from a name and options, `NAME:key=value,key=value`."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ringjax.errors import OptionError

T = TypeVar("T")

# Types of dataclass fields that can be written as text, including None for an
# option that is left out.
_WRITTEN = re.compile(
  r"((int|float|str|bool|None|tuple\[(int|float|str), \.\.\.\])( \| |$))+"
)


def split(options: str) -> list[str]:
  """Split "a=1,b=(2,3)" at its commas, except those in parentheses."""
  return re.split(r",(?![^()]*\))", options)


def pairs(
  options: str | None,
  known: Collection[str],
  name: str,
  of: str,
  separator: str = ":",
) -> dict[str, str]:
  """Parse options into texts by name.

  Args:
    options: Options such as "a=1,b=2"; None if there is no separator.
    known: Names of all options.
    name: Name of the argument or flag, for errors.
    of: Name of the object, the text before the separator.
    separator: Text between the name and its options.

  Raises:
    OptionError: If a name is unknown, occurs twice, or has no value.
  """
  texts: dict[str, str] = {}
  for part in () if options is None else split(options):
    key, equals, option_text = part.partition("=")
    if key not in known or not equals or key in texts:
      raise OptionError(
        name,
        f"{part!r} in {f'{of}{separator}{options}'!r}",
        f"options of {of!r}, each once: {', '.join(known) or 'it has none'}",
        f"write {name}={of}{separator}key=value,key=value",
      )
    texts[key] = option_text
  return texts


def value(text: str) -> Any:
  """Parse a text as a Python literal, in any case; else return the text."""
  is_constant = text.lower() in ("true", "false", "none")
  try:
    return ast.literal_eval(text.capitalize() if is_constant else text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text


def named(
  text: object,
  base: type[T],
  known: Mapping[str, type[T]],
  name: str,
  *,
  separator: str = ":",
  before: str = "",
) -> T:
  """Make the object that a text describes; return an object as it is.

  Args:
    text: Name, and options after the separator; or a `base`.
    base: Common base class of the objects.
    known: Dataclasses by their names. Fields of numbers, words, bools and
      tuples of them are options; several values are in parentheses,
      "early:widths=(2,4)".
    name: Name of the argument or flag, for errors.
    separator: Text between the name and its options.
    before: Text in front of this one in the argument, for errors.

  Raises:
    OptionError: If there is no such name, or it has no such option.
  """
  if isinstance(text, base):
    return text
  type_name, has_options, options_text = str(text).partition(separator)
  if type_name not in known:
    raise OptionError(
      name,
      repr(f"{before}{text}" if before else text),
      f"one of {', '.join(known)}, or a {base.__name__}",
      f"pass {name}={before}{next(iter(known))}, for instance",
    )
  option_class: Any = known[type_name]
  types = {
    f.name: str(f.type)
    for f in dataclasses.fields(option_class)
    if isinstance(f.default, int | float | str)
    or (f.default is None and _WRITTEN.fullmatch(str(f.type)))
  }
  options: dict[str, Any] = {}
  for key, option_text in pairs(
    options_text if has_options else None,
    types,
    name,
    f"{before}{type_name}",
    separator,
  ).items():
    options[key] = parsed = value(option_text)
    words = re.findall(r"\w+", types[key])
    if "tuple" in words and isinstance(parsed, int):
      options[key] = (parsed,)
    elif (
      "str" in words
      and ("None" if parsed is None else type(parsed).__name__) not in words
    ):
      # A folder's name may be 7, or none.
      options[key] = option_text
  return option_class(**options)
