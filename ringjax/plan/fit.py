"""Fit of cost coefficients to measured times: t = a n + b pairs + c0.

All are non-negative. Errors count relative to the time, so that short calls
have weight. Pairs are counted in both ways, `cost.KERNELS`, and the better fit
is kept: it tells whether the attention kernel skips masked tiles.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError
from ringjax.plan import cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCall:
  """A measured call: `tokens` after `before` others took `seconds`."""

  tokens: int
  before: int
  seconds: int | float

  def __post_init__(self) -> None:
    positive_int("tokens", self.tokens)
    integer("before", self.before, least=0)
    number("seconds", self.seconds, least=0)


# Name under which other packages import it.
Sample = TimedCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
  """Coefficients that fit measured calls best.

  Attributes:
    token_s: a, seconds per token.
    pair_s: b, seconds per pair.
    fixed_s: c0, seconds per call.
    kernel: Way in which pairs are counted.
    error: Largest relative error of the samples.
  """

  token_s: float
  pair_s: float
  fixed_s: float
  kernel: str
  error: float

  def seconds(self, tokens: int, before: int) -> float:
    """Predicted seconds of a call."""
    pairs = float(cost.pairs_behind(before, tokens, None, self.kernel))
    return self.token_s * tokens + self.pair_s * pairs + self.fixed_s


def fit(samples: Sequence[TimedCall]) -> Fit:
  """Fit the coefficients by least squares.

  Raises:
    OptionError: If there are too few samples, or too similar ones to tell the
      coefficients apart, or times are noise.
  """
  tokens = np.array([sample.tokens for sample in samples], np.float64)
  tokens_before = np.array([sample.before for sample in samples], np.float64)
  seconds = np.array([sample.seconds for sample in samples], np.float64)
  if len(samples) < 3 or not (seconds > 0).all():
    raise OptionError(
      "samples",
      f"{len(samples)}, least {min(seconds, default=0)} s",
      "3 or more that took time",
      "measure at least three calls of different lengths",
    )
  candidates = []
  for kernel in cost.KERNELS:
    pairs = cost.pairs_behind(tokens_before, tokens, None, kernel)
    columns = np.stack([tokens, pairs, np.ones_like(tokens)], 1)
    a, b, c = _nonnegative(columns / seconds[:, None]).tolist()
    predicted = columns @ np.array([a, b, c])
    residuals = predicted / seconds - 1
    candidate = Fit(
      token_s=a,
      pair_s=b,
      fixed_s=c,
      kernel=kernel,
      error=float(np.abs(residuals).max()),
    )
    candidates.append((float(residuals @ residuals), candidate))
  best = min(candidates, key=lambda pair: pair[0])[1]
  if best.token_s == best.pair_s == 0:
    raise OptionError(
      "samples",
      "times that do not grow with the tokens",
      "calls that differ by more than the machine's noise",
      "measure longer calls, or more rounds",
    )
  return best


def _nonnegative(rows: np.ndarray) -> np.ndarray:
  """x >= 0 that brings `rows @ x` nearest to ones; exact, by subsets."""
  scale = np.abs(rows).max(0)
  rows = rows / scale
  if np.linalg.matrix_rank(rows) < rows.shape[1]:
    raise OptionError(
      "samples",
      f"{len(rows)} that are too much alike",
      "different lengths after different prefixes",
      "measure other lengths",
    )
  best, least_error = np.zeros(rows.shape[1]), np.inf
  # Three columns have seven subsets; the optimum solves one of them.
  for size in range(1, rows.shape[1] + 1):
    for chosen in itertools.combinations(range(rows.shape[1]), size):
      coefficients, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)))
      x = np.zeros(rows.shape[1])
      x[list(chosen)] = coefficients
      residuals = rows @ x - 1
      if (coefficients >= 0).all() and float(
        residuals @ residuals
      ) < least_error:
        best, least_error = x, float(residuals @ residuals)
  return best / scale
