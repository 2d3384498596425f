"""Kinds of caches as text: "name" or "name:key=value,key=value", for flags."""

from __future__ import annotations

from typing import Any

from ringjax import option_text
from ringjax.errors import OptionError
from ringjax.kv.cache_kind import FROM_FILES, KINDS, CacheKind, cache_kind


def parse(text: str, name: str = "cache kind") -> CacheKind:
  """The kind of cache that a text names, with its options.

  Args:
    text: a name of `KINDS`, or a codec's and a policy's with a plus between;
      behind a colon values of options of that kind, such
      as "int4:group=32,keys.bits=8", where "group" is that of the keys and of
      the values: literals of Python, in any case of letters; several values
      in parentheses, "fastgen:punctuation=(33,46)".
    name: of the flag or argument, for errors.

  Raises:
    OptionError: an unknown name or option, or a value of another type.
  """
  kind_name, colon, rest = text.partition(":")
  known_names = KINDS | FROM_FILES
  if any(part not in known_names for part in kind_name.split("+")):
    raise OptionError(
      name,
      repr(text),
      f"one of {', '.join(KINDS)}, or a codec + a policy of these",
      f"pass {name}=dense, or {name}=allocated:table=DIR",
    )
  kind = cache_kind(kind_name)
  known = kind.options()
  options: dict[str, Any] = {}
  for part in option_text.split(rest) if colon else ():
    key, equals, value = part.partition("=")
    names = [n for n in known if key in (n, n.partition(".")[2])]
    if not names or key in options or not equals:
      shown = ", ".join(f"{k}={v}" for k, v in known.items())
      raise OptionError(
        name,
        f"{part!r} in {text!r}",
        f"options of {kind_name!r}, each once: {shown or 'there are none'}",
        f"write {name}={kind_name}:key=value,key=value",
      )
    for n in names:
      options[n] = _value(name, part, value, known[n])
  return kind.with_options(options)


def _value(name: str, part: str, text: str, like: Any) -> Any:
  """What a text says, of the type of `like` or None; any where that is None."""
  value = option_text.value(text)
  if isinstance(like, float) and type(value) is int:
    # A share; from 2 on a number of tokens.
    return value if value > 1 else float(value)
  if isinstance(like, tuple) and type(value) is int:
    return (value,)
  if None not in (like, value) and type(value) is not type(like):
    raise OptionError(
      name,
      repr(part),
      f"a value of type {type(like).__name__}",
      f"write it as {part.partition('=')[0]}={like}",
    )
  return value
