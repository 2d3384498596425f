"""The patterns by name, and their text: `xattention,threshold=.9`."""

from __future__ import annotations

from ringjax import option_text
from ringjax.ops.attention.tiles.flexprefill import FlexPrefill
from ringjax.ops.attention.tiles.minference import MInference
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.ops.attention.tiles.xattention import XAttention

PATTERNS: dict[str, type[TilePattern]] = {
  "xattention": XAttention,
  "flexprefill": FlexPrefill,
  "minference": MInference,
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
  return option_text.named(
    text, TilePattern, PATTERNS, name, separator=",", before=before
  )
