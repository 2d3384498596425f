"""The partition with which all ranks compute equally long, in whole tiles.

With t = a c + b pairs(P, c) for c tokens behind P, all ranks take the same
time K if each c in turn solves a quadratic; K is bisected until the c add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.plan import cost
from ringjax.plan.cost import Profile, Prompt

# ---------------------------------------------------------------------------
# Closed form
# ---------------------------------------------------------------------------


def balanced(
  profile: Profile, prompt: Prompt, ranks: int
) -> Float[np.ndarray, " ranks"]:
  """Lengths with which all ranks compute equally long.

  They add up to the prompt's tokens and are not rounded; see `round_to_tiles`.
  """
  positive_int("ranks", ranks)

  def lengths(seconds: float) -> np.ndarray:
    """The most tokens each rank reads in `seconds`, one after another."""
    found = np.zeros(ranks)
    before = float(prompt.prefix)
    for i in range(ranks):
      found[i] = _length_for(profile, prompt, before, seconds)
      before += found[i]
    return found

  one = _seconds_behind(profile, prompt, prompt.prefix, prompt.tokens)
  found = lengths(_bisect(lambda s: lengths(s).sum() >= prompt.tokens, one))
  return found * (prompt.tokens / found.sum())


def _seconds_behind(
  profile: Profile, prompt: Prompt, before: int | float, c: int | float
) -> float:
  """Seconds of `c` tokens behind `before`, without what a call costs."""
  pairs = cost.pairs_behind(before, c, prompt.window, profile.kernel)
  return float(profile.work_s(c, pairs))


def _length_for(
  profile: Profile, prompt: Prompt, before: float, seconds: float
) -> float:
  a, b = profile.token_s, profile.pair_s
  if prompt.window is None or not b:
    # b' c^2 + (a + b P) c = K, in the form that does not cancel.
    square = b if profile.kernel == "dense" else b / 2
    slope = a + b * before
    if not slope:
      return math.sqrt(seconds / square)
    root = math.sqrt(slope * slope + 4 * square * seconds)
    return 2 * seconds / (slope + root)
  takes = lambda c: _seconds_behind(profile, prompt, before, c)
  high = float(prompt.tokens)
  if takes(high) <= seconds:
    return high
  return _bisect(lambda c: takes(c) >= seconds, high)


def _bisect(reached: Callable[[float], bool], high: float) -> float:
  """The least x up to `high` for which `reached` holds, to double precision."""
  low = 0.0
  while low < (middle := (low + high) / 2) < high:
    if reached(middle):
      high = middle
    else:
      low = middle
  return high


# ---------------------------------------------------------------------------
# Rounding
# ---------------------------------------------------------------------------


def most_ranks(tokens: int, ranks: int, tile: int = 1) -> int:
  """Ranks that get two tiles each, at most `ranks`, at least one.

  With tiles of one token, ranks that get one.
  """
  positive_int("tokens", tokens)
  positive_int("ranks", ranks)
  least = 2 * tile if positive_int("tile", tile) > 1 else 1
  return max(1, min(ranks, tokens // least))


def round_to_tiles(
  shares: Sequence[int | float] | Float[np.ndarray, " ..."],
  tokens: int,
  tile: int = 1,
) -> tuple[int, ...]:
  """Lengths in whole tiles, nearest to `shares`; by largest remainder.

  Args:
    shares: of each rank, in any unit.
    tokens: what the lengths add up to. The last tile may be short, and then
      it is the last rank's.
    tile: tokens of a tile.

  Returns:
    Lengths, each of one tile or more.

  Raises:
    OptionError: fewer tiles than ranks, or shares that are negative, not
      finite or all 0.
  """
  given = np.asarray(shares, np.float64)
  right = given.ndim == 1 and given.size and np.isfinite(given).all()
  if not right or (given < 0).any() or not given.sum() > 0:
    raise OptionError(
      "shares",
      shares,
      "numbers >= 0, one for each rank, not all 0",
      "pass e.g. [1.0] * ranks",
    )
  positive_int("tile", tile)
  tiles = -(-positive_int("tokens", tokens) // tile)
  if tiles < given.size:
    raise OptionError(
      "ranks",
      f"{given.size} for {tiles} tiles of {tile} tokens",
      "a tile each",
      f"use {tiles} ranks or smaller tiles",
    )
  exact = given / given.sum() * tiles
  counts = np.maximum(np.floor(exact).astype(np.int64), 1)
  # Ties go to earlier ranks, so that the result does not depend on sorting.
  while counts.sum() < tiles:
    counts[np.argmax(np.round(exact - counts, 9))] += 1
  while counts.sum() > tiles:
    over = np.where(counts > 1, np.round(counts - exact, 9), -np.inf)
    counts[np.argmax(over)] -= 1
  lengths = counts * tile
  lengths[-1] -= tiles * tile - tokens
  return tuple(int(n) for n in lengths)
