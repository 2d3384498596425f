"""Objects by a name and options, as `NAME:key=value,key=value`."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ringjax.errors import OptionError

T = TypeVar("T")

# Types that can be written in a text, as a dataclass has them, with None for
# what an option is if it is left out.
_WRITTEN = re.compile(
  r"((int|float|str|bool|None|tuple\[(int|float|str), \.\.\.\])( \| |$))+"
)


def split(options: str) -> list[str]:
  """Cuts "a=1,b=(2,3)" at its commas, but for those in parentheses."""
  return re.split(r",(?![^()]*\))", options)


def pairs(
  options: str | None, known: Collection[str], name: str, of: str
) -> dict[str, str]:
  """Options by their names, as texts.

  Args:
    options: "a=1,b=2"; None where there is no colon.
    known: the names that there are.
    name: of the argument or flag, for errors.
    of: what the options are of, in front of the colon.

  Raises:
    OptionError: an unknown name, one twice, or one without a value.
  """
  found: dict[str, str] = {}
  for part in () if options is None else split(options):
    key, equals, said = part.partition("=")
    if key not in known or not equals or key in found:
      raise OptionError(
        name,
        f"{part!r} in {f'{of}:{options}'!r}",
        f"options of {of!r}, each once: {', '.join(known) or 'it has none'}",
        f"write {name}={of}:key=value,key=value",
      )
    found[key] = said
  return found


def value(text: str) -> Any:
  """What a text says as a literal of Python, in any case; else the text."""
  named = text.lower() in ("true", "false", "none")
  try:
    return ast.literal_eval(text.capitalize() if named else text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text


def named(
  text: object, base: type[T], known: Mapping[str, type[T]], name: str
) -> T:
  """The object that a text stands for; an object is returned as it is.

  Args:
    text: a name, and options behind a colon; or a `base`.
    base: the class of all that is known.
    known: dataclasses by their names. Fields of numbers, words, bools and
      tuples of them are options; several values are in parentheses,
      "early:widths=(2,4)".
    name: of the argument or flag, for errors.

  Raises:
    OptionError: no such name, or other options than it has.
  """
  if isinstance(text, base):
    return text
  way, colon, rest = str(text).partition(":")
  if way not in known:
    raise OptionError(
      name,
      repr(text),
      f"one of {', '.join(known)}, or a {base.__name__}",
      f"pass {name}={next(iter(known))}, for instance",
    )
  made: Any = known[way]
  types = {
    f.name: str(f.type)
    for f in dataclasses.fields(made)
    if isinstance(f.default, int | float | str)
    or (f.default is None and _WRITTEN.fullmatch(str(f.type)))
  }
  options: dict[str, Any] = {}
  for key, said in pairs(rest if colon else None, types, name, way).items():
    options[key] = found = value(said)
    words = re.findall(r"\w+", types[key])
    if "tuple" in words and isinstance(found, int):
      options[key] = (found,)
    elif (
      "str" in words
      and ("None" if found is None else type(found).__name__) not in words
    ):
      # A folder may be called 7, or none.
      options[key] = said
  return made(**options)
