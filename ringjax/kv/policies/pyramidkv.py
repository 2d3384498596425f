"""Fewer tokens in later layers.

Ref: Cai et al. 2024, PyramidKV, arXiv 2406.02069.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringjax.checks import integer
from ringjax.kv.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
  """As `SnapKV`, with budgets that fall from the first layer to the last.

  Their mean is the budget. If the last layer's would be less than the window,
  or the first layer's more than the row, all layers have the same.

  Attributes:
    beta: the last layer's budget is 1 / beta of the mean.
  """

  beta: int = 20

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("beta", self.beta, least=1)

  def counts(self, length: int, heads: Sequence[int]) -> Sequence[int]:
    layers = len(heads)
    share = isinstance(self.budget, float)
    whole = length * self.budget if share else min(self.budget, length)
    # As it is computed elsewhere, to the last digit.
    mean = (self.window + whole) - self.window
    low = mean / self.beta
    high = 2 * mean - low
    if high >= length - self.window:
      high = length - self.window
      low = 2 * mean - high
    if not length >= high >= low >= self.window:
      return [max(1, round(whole))] * layers
    step = (high - low) / (layers - 1) if layers > 1 else 0
    return [round(high - n * step) for n in range(layers)]
