"""Partition with which all ranks compute equally long, in whole tiles.

With t = a c + b pairs(P, c) for c tokens after P, all ranks take the same
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
    """Maximum tokens that each rank prefills in `seconds`, in order."""
    rank_lengths = np.zeros(ranks)
    tokens_before = float(prompt.prefix)
    for i in range(ranks):
      rank_lengths[i] = _length_for(profile, prompt, tokens_before, seconds)
      tokens_before += rank_lengths[i]
    return rank_lengths

  total_s = _seconds_after(profile, prompt, prompt.prefix, prompt.tokens)
  rank_lengths = lengths(
    _bisect(lambda s: lengths(s).sum() >= prompt.tokens, total_s)
  )
  return rank_lengths * (prompt.tokens / rank_lengths.sum())


def _seconds_after(
  profile: Profile, prompt: Prompt, before: int | float, c: int | float
) -> float:
  """Seconds of `c` tokens after `before`, without a call's fixed time."""
  pairs = cost.pairs_behind(before, c, prompt.window, profile.kernel)
  return float(profile.work_s(c, pairs))


def _length_for(
  profile: Profile, prompt: Prompt, before: float, seconds: float
) -> float:
  a, b = profile.token_s, profile.pair_s
  if prompt.window is None or not b:
    # b' c^2 + (a + b P) c = K, in the form without cancellation.
    square = b if profile.kernel == "dense" else b / 2
    slope = a + b * before
    if not slope:
      return math.sqrt(seconds / square)
    root = math.sqrt(slope * slope + 4 * square * seconds)
    return 2 * seconds / (slope + root)
  duration = lambda c: _seconds_after(profile, prompt, before, c)
  high = float(prompt.tokens)
  if duration(high) <= seconds:
    return high
  return _bisect(lambda c: duration(c) >= seconds, high)


def _bisect(reached: Callable[[float], bool], high: float) -> float:
  """Least x up to `high` for which `reached` holds, to double precision."""
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
  """Number of ranks that get two tiles each, at most `ranks`, at least one.

  With tiles of one token, the number of ranks that get one.
  """
  positive_int("tokens", tokens)
  positive_int("ranks", ranks)
  min_tokens = 2 * tile if positive_int("tile", tile) > 1 else 1
  return max(1, min(ranks, tokens // min_tokens))


def round_to_tiles(
  shares: Sequence[int | float] | Float[np.ndarray, " ..."],
  tokens: int,
  tile: int = 1,
) -> tuple[int, ...]:
  """Lengths in whole tiles, nearest to `shares`; by largest remainder.

  Args:
    shares: Share of each rank, in any unit.
    tokens: Sum of the lengths. The last tile may be short, and then it belongs
      to the last rank.
    tile: Tile size in tokens.

  Returns:
    Lengths, each of one tile or more.

  Raises:
    OptionError: If there are fewer tiles than ranks, or shares are negative,
      not finite or all 0.
  """
  weights = np.asarray(shares, np.float64)
  valid = weights.ndim == 1 and weights.size and np.isfinite(weights).all()
  if not valid or (weights < 0).any() or not weights.sum() > 0:
    raise OptionError(
      "shares",
      shares,
      "numbers >= 0, one for each rank, not all 0",
      "pass e.g. [1.0] * ranks",
    )
  positive_int("tile", tile)
  tiles = -(-positive_int("tokens", tokens) // tile)
  if tiles < weights.size:
    raise OptionError(
      "ranks",
      f"{weights.size} for {tiles} tiles of {tile} tokens",
      "a tile each",
      f"use {tiles} ranks or smaller tiles",
    )
  exact = weights / weights.sum() * tiles
  counts = np.maximum(np.floor(exact).astype(np.int64), 1)
  # Ties go to earlier ranks, so that the result does not depend on sorting.
  while counts.sum() < tiles:
    counts[np.argmax(np.round(exact - counts, 9))] += 1
  while counts.sum() > tiles:
    excess = np.where(counts > 1, np.round(counts - exact, 9), -np.inf)
    counts[np.argmax(excess)] -= 1
  lengths = counts * tile
  lengths[-1] -= tiles * tile - tokens
  return tuple(int(n) for n in lengths)
