"""Coefficients from measured times: t = a n + b pairs + c0, none negative.

Errors count relative to the time, so that short calls have a say. Pairs are
counted in both ways, `cost.KERNELS`, and the one that fits better is kept: it
tells whether the attention kernel leaves out what the mask forbids.
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
  """A measured call: `tokens` behind `before` others took `seconds`."""

  tokens: int
  before: int
  seconds: int | float

  def __post_init__(self) -> None:
    positive_int("tokens", self.tokens)
    integer("before", self.before, least=0)
    number("seconds", self.seconds, least=0)


# As other packages import it.
Sample = TimedCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
  """The coefficients that fit measured calls best.

  Attributes:
    token_s: a.
    pair_s: b.
    fixed_s: c0.
    kernel: how pairs are counted.
    error: of the samples, the largest relative one.
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
  """Fits the coefficients by least squares.

  Raises:
    OptionError: samples too few or too alike to tell the coefficients apart,
      or times that are noise.
  """
  tokens = np.array([s.tokens for s in samples], np.float64)
  before = np.array([s.before for s in samples], np.float64)
  seconds = np.array([s.seconds for s in samples], np.float64)
  if len(samples) < 3 or not (seconds > 0).all():
    raise OptionError(
      "samples",
      f"{len(samples)}, least {min(seconds, default=0)} s",
      "3 or more that took time",
      "measure at least three calls of different lengths",
    )
  fits = []
  for kernel in cost.KERNELS:
    pairs = cost.pairs_behind(before, tokens, None, kernel)
    columns = np.stack([tokens, pairs, np.ones_like(tokens)], 1)
    a, b, c = _nonnegative(columns / seconds[:, None]).tolist()
    predicted = columns @ np.array([a, b, c])
    miss = predicted / seconds - 1
    found = Fit(
      token_s=a,
      pair_s=b,
      fixed_s=c,
      kernel=kernel,
      error=float(np.abs(miss).max()),
    )
    fits.append((float(miss @ miss), found))
  best = min(fits, key=lambda pair: pair[0])[1]
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
      "different lengths behind different prefixes",
      "measure other lengths",
    )
  best, least = np.zeros(rows.shape[1]), np.inf
  # Three columns have seven subsets; the optimum solves one of them.
  for size in range(1, rows.shape[1] + 1):
    for chosen in itertools.combinations(range(rows.shape[1]), size):
      part, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)))
      x = np.zeros(rows.shape[1])
      x[list(chosen)] = part
      miss = rows @ x - 1
      if (part >= 0).all() and float(miss @ miss) < least:
        best, least = x, float(miss @ miss)
  return best / scale
