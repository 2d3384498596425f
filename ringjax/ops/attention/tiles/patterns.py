"""The patterns by name, and their text: `xattention,threshold=.9`."""

from __future__ import annotations

import dataclasses

from ringjax import option_text
from ringjax.errors import OptionError
from ringjax.ops.attention.tiles.flexprefill import FlexPrefill
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.ops.attention.tiles.xattention import XAttention

PATTERNS: dict[str, type[TilePattern]] = {
  "xattention": XAttention,
  "flexprefill": FlexPrefill,
}


def pattern_of(
  text: TilePattern | str, name: str = "pattern", before: str = ""
) -> TilePattern:
  """Make the pattern that a text describes; return a pattern as it is.

  Args:
    text: Name and options, "xattention,threshold=0.9,stride=16", or a pattern.
    name: Name of the argument or flag, for errors.
    before: Text in front of the pattern's in that argument, for errors.

  Raises:
    OptionError: If there is no such pattern or option, or a value is out of
      range.
  """
  if isinstance(text, TilePattern):
    return text
  kind, comma, options = str(text).partition(",")
  if kind not in PATTERNS:
    raise OptionError(
      name,
      repr(f"{before}{text}"),
      f"one of the patterns {', '.join(PATTERNS)}, with options",
      f"pass {name}='{before}xattention,threshold=0.9'",
    )
  option_names = [field.name for field in dataclasses.fields(PATTERNS[kind])]
  keys: set[str] = set()
  for option in option_text.split(options) if comma else ():
    key, equals, _ = option.partition("=")
    if key in keys:
      raise OptionError(
        name,
        f"{key} twice in {f'{before}{text}'!r}",
        "each option once",
        "leave one of them out",
      )
    keys.add(key)
    if key not in option_names or not equals:
      raise OptionError(
        name,
        f"{option!r} in {f'{before}{text}'!r}",
        f"options of {kind}: {', '.join(option_names)}",
        f"write {name}='{before}{kind},{option_names[0]}=128', for instance",
      )
  joined = f"{kind}:{options}" if comma else kind
  return option_text.named(joined, TilePattern, PATTERNS, name)
