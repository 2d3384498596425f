"""Search for the largest context that fits, with few compilations.

Guarantees: the tokens that fit were tried and fit; the tokens that are too many
were tried and do not fit.

The bytes that a program lacks say how far off it is: memory is nearly linear in
the tokens, so two failures determine a line. A failure takes the compiler
seconds and a fit minutes, so the search comes from above and aims to fit once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ringjax.errors import OptionError

_DIGITS = 5
# Function from tokens to (whether they fit, bytes needed, bytes available).
Compile = Callable[[int], tuple[bool, int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestContext:
  """The bounds of the largest context.

  Attributes:
    tokens: Number of tokens that fits; 0 if not even the least does.
    needed_bytes: Bytes needed per device for these; for the least if none fits.
    too_many: Number of tokens that does not fit; None if the most fit.
    tried: Number of programs that were compiled.
  """

  tokens: int
  needed_bytes: int
  too_many: int | None
  tried: int


def largest(
  fits: Compile, *, unit: int, least: int, most: int, part: float = 0.125
) -> LargestContext:
  """Search the largest number of tokens that fit, from above.

  Args:
    fits: Compiles a program for a number of tokens.
    unit: Tokens are multiples of it, by numbers of few binary digits.
    least: Minimum tokens to try.
    most: Maximum tokens to try.
    part: The search ends when the tokens that do not fit exceed those that do
      by at most this fraction.

  Raises:
    OptionError: If there is no multiple of the unit between the bounds.
  """

  def round_down(tokens: float | int) -> int:
    """Round down to a number of units with few digits in base 2.

    Other numbers pad blocks, and memory is not linear in the tokens.
    """
    num_units = max(1, int(tokens) // max(1, unit))
    dropped_bits = max(0, num_units.bit_length() - _DIGITS)
    return (num_units >> dropped_bits << dropped_bits) * unit

  low, high = round_down(least), round_down(most)
  if unit < 1 or low > high or not part > 0:
    raise OptionError(
      "tokens",
      f"from {least} to {most} in steps of {unit}",
      "bounds with a multiple of the step between",
      "pass a smaller least or a larger most",
    )
  failures: list[tuple[int, int]] = []
  best_fit = 0, 0
  num_tokens, tried, limit = high, 0, 0
  while True:
    does_fit, need, limit = fits(num_tokens)
    tried += 1
    if does_fit:
      best_fit = num_tokens, need
    else:
      failures.append((num_tokens, need))
    if not best_fit[0]:
      if num_tokens <= low:
        return LargestContext(
          tokens=0, needed_bytes=need, too_many=num_tokens, tried=tried
        )
      # Low enough for a fit, but so that the next try, a step above, fails.
      guess = _estimated_limit(failures, limit) / math.sqrt(1 + part)
      num_tokens = max(
        low, min(round_down(min(guess, 0.95 * num_tokens)), num_tokens - unit)
      )
      continue
    min_tokens = best_fit[0] + unit
    if not failures or failures[-1][0] <= max(
      best_fit[0] * (1 + part), min_tokens
    ):
      break
    # Between the fit and the failure, by the line through both.
    bound, need_bound = failures[-1]
    num_tokens = max(round_down(best_fit[0] * (1 + part)), min_tokens)
    if need_bound > best_fit[1]:
      room = (limit - best_fit[1]) / (need_bound - best_fit[1])
      line = best_fit[0] + room * (bound - best_fit[0])
      num_tokens = max(num_tokens, round_down(line / math.sqrt(1 + part)))
    if num_tokens >= bound:
      num_tokens = max(round_down(math.sqrt(best_fit[0] * bound)), min_tokens)
  return LargestContext(
    tokens=best_fit[0],
    needed_bytes=best_fit[1],
    too_many=failures[-1][0] if failures else None,
    tried=tried,
  )


def _estimated_limit(over: list[tuple[int, int]], limit: int) -> float:
  """Estimate where memory meets the limit, from the last failures; rather high.

  By a line through the last two: faster growth is above the line. By one
  alone, as if memory grew quadratically.
  """
  b, need_b = over[-1]
  if len(over) == 1:
    # The need is 0 if the compiler does not report it.
    return b * math.sqrt(limit / need_b) if need_b > limit else b / 2
  a, need_a = over[-2]
  if need_b >= need_a:
    return b / 2
  slope = (need_a - need_b) / (a - b)
  # Not far below at once: a failure costs little.
  return max(b / 4, b - (need_b - limit) / slope)
