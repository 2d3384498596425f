"""The largest context that fits, by asking a compiler as seldom as possible.

Law: what is given as fitting was tried and fits; what is given as too much was
tried and does not. What a program lacks tells how far it is off: memory is
close to a line in the tokens, and two failures draw it. A failure takes a whole
compilation seconds and a fit minutes, so that the search comes from above and
means to fit once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ringjax.errors import OptionError

_DIGITS = 5
# A try answers with (whether it fits, bytes it needs, bytes there are).
Try = Callable[[int], tuple[bool, int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
  """Between what the largest context lies.

  Attributes:
    tokens: that fit; 0 where not even the least does.
    needed_bytes: of a device, of those; of the least where nothing fits.
    too_many: tokens that do not fit; None where the most fits.
    tried: how many programs were compiled.
  """

  tokens: int
  needed_bytes: int
  too_many: int | None
  tried: int

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return dataclasses.asdict(self)


def largest(
  fits: Try, *, unit: int, least: int, most: int, part: float = 0.125
) -> Largest:
  """Searches the largest number of tokens that fit, from above.

  Args:
    fits: compiles a program of so many tokens.
    unit: tokens are multiples of it, by numbers of few binary digits.
    least: tokens below which nobody cares.
    most: tokens above which nobody cares.
    part: ends when what does not fit is so much more than what does.

  Raises:
    OptionError: bounds that leave nothing to search.
  """

  def down(tokens: float | int) -> int:
    """The next number of units below that has few digits, in base 2.

    Others leave blocks that are filled up, and no line can be drawn.
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
      "widen them",
    )
  over: list[tuple[int, int]] = []
  tried = 0
  at = high
  while True:
    good, need, limit = fits(at)
    tried += 1
    if good:
      break
    over.append((at, need))
    if at <= low:
      return Largest(tokens=0, needed_bytes=need, too_many=at, tried=tried)
    # As far below the guess as lets the next try, a step above, fail.
    guess = _guess(over, limit) / math.sqrt(1 + part)
    at = max(low, min(down(min(guess, 0.95 * at)), at - unit))
  known = (at, need)
  # Between what fits and what does not, by the line through both.
  while over:
    bound, need_bound = over[-1]
    least = known[0] + unit
    if bound <= max(known[0] * (1 + part), least):
      break
    at = max(down(known[0] * (1 + part)), least)
    if need_bound > known[1]:
      room = (limit - known[1]) / (need_bound - known[1])
      line = known[0] + room * (bound - known[0])
      at = max(at, down(line / math.sqrt(1 + part)))
    if at >= bound:
      at = max(down(math.sqrt(known[0] * bound)), least)
    good, need, limit = fits(at)
    tried += 1
    if good:
      known = (at, need)
    else:
      over.append((at, need))
  return Largest(
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
    # What is said is nothing where the compiler does not know how much.
    return b * math.sqrt(limit / need_b) if need_b > limit else b / 2
  a, need_a = over[-2]
  if need_b >= need_a:
    return b / 2
  slope = (need_a - need_b) / (a - b)
  # Not far below by one look: what does not fit is told soon.
  return max(b / 4, b - (need_b - limit) / slope)
