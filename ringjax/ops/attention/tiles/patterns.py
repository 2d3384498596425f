"""The patterns by name, and their text: `xattention,threshold=.9`."""

from __future__ import annotations

from ringjax import option_text
from ringjax.errors import OptionError
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.ops.attention.tiles.xattention import XAttention

PATTERNS: dict[str, type[TilePattern]] = {"xattention": XAttention}


def pattern_of(text: TilePattern | str, name: str = "pattern") -> TilePattern:
  """Make the pattern that a text describes; return a pattern as it is.

  Args:
    text: Name and options, "xattention,threshold=0.9,stride=16", or a pattern.
    name: Name of the argument or flag, for errors.

  Raises:
    OptionError: If there is no such pattern or option, or a value is out of
      range.
  """
  if isinstance(text, TilePattern):
    return text
  if not isinstance(text, str) or not text:
    raise OptionError(
      name,
      repr(text),
      f"one of {', '.join(PATTERNS)}, with options",
      f"pass {name}='xattention,threshold=0.9'",
    )
  kind, comma, options = text.partition(",")
  joined = f"{kind}:{options}" if comma else kind
  return option_text.named(joined, TilePattern, PATTERNS, name)
