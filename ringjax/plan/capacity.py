"""The largest context that fits, found with few compilations.

Guarantees: the tokens that fit were tried and fit; the tokens that are too many
were tried and do not fit.

What a program lacks says how far off it is: memory is close to a line in the
tokens, and two failures draw it. A failure takes the compiler seconds and a fit
minutes, so that the search comes from above and aims to fit once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ringjax.errors import OptionError

_DIGITS = 5
# Of tokens: whether they fit, bytes they need, bytes there are.
Compile = Callable[[int], tuple[bool, int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestContext:
  """The bounds of the largest context.

  Attributes:
    tokens: a number that fits; 0 where not even the least does.
    needed_bytes: of a device, for these; for the least where nothing fits.
    too_many: tokens that do not fit; None where the most fit.
    tried: how many programs were compiled.
  """

  tokens: int
  needed_bytes: int
  too_many: int | None
  tried: int


def largest(
  fits: Compile, *, unit: int, least: int, most: int, part: float = 0.125
) -> LargestContext:
  """Searches the largest number of tokens that fit, from above.

  Args:
    fits: compiles a program of so many tokens.
    unit: tokens are multiples of it, by numbers of few binary digits.
    least: the fewest tokens to try.
    most: the most tokens to try.
    part: the search ends when the tokens that do not fit are more than those
      that do by at most this part.

  Raises:
    OptionError: bounds without a multiple of the unit between.
  """

  def down(tokens: float | int) -> int:
    """The next number of units below that has few digits, in base 2.

    With others blocks are padded, and memory is not a line in the tokens.
    """
    many = max(1, int(tokens) // max(1, unit))
    rest = max(0, many.bit_length() - _DIGITS)
    return (many >> rest << rest) * unit

  low, high = down(least), down(most)
  if unit < 1 or low > high or not part > 0:
    raise OptionError(
      "tokens",
      f"from {least} to {most} in steps of {unit}",
      "bounds with a multiple of the step between",
      "pass a smaller least or a larger most",
    )
  over: list[tuple[int, int]] = []
  known = 0, 0
  at, tried, limit = high, 0, 0
  while True:
    good, need, limit = fits(at)
    tried += 1
    if good:
      known = at, need
    else:
      over.append((at, need))
    if not known[0]:
      if at <= low:
        return LargestContext(
          tokens=0, needed_bytes=need, too_many=at, tried=tried
        )
      # As far below the guess as lets the next try, a step above, fail.
      guess = _guess(over, limit) / math.sqrt(1 + part)
      at = max(low, min(down(min(guess, 0.95 * at)), at - unit))
      continue
    least = known[0] + unit
    if not over or over[-1][0] <= max(known[0] * (1 + part), least):
      break
    # Between what fits and what does not, by the line through both.
    bound, need_bound = over[-1]
    at = max(down(known[0] * (1 + part)), least)
    if need_bound > known[1]:
      room = (limit - known[1]) / (need_bound - known[1])
      line = known[0] + room * (bound - known[0])
      at = max(at, down(line / math.sqrt(1 + part)))
    if at >= bound:
      at = max(down(math.sqrt(known[0] * bound)), least)
  return LargestContext(
    tokens=known[0],
    needed_bytes=known[1],
    too_many=over[-1][0] if over else None,
    tried=tried,
  )


def _guess(over: list[tuple[int, int]], limit: int) -> float:
  """Where memory meets the limit, by the last failures; rather too high.

  A line through two of them: what grows faster than a line lies above it. By
  one alone, as if memory grew with the square.
  """
  b, need_b = over[-1]
  if len(over) == 1:
    # The need is 0 where the compiler does not say it.
    return b * math.sqrt(limit / need_b) if need_b > limit else b / 2
  a, need_a = over[-2]
  if need_b >= need_a:
    return b / 2
  slope = (need_a - need_b) / (a - b)
  # Not far below at once: a failure costs little.
  return max(b / 4, b - (need_b - limit) / slope)
