"""PyramidKV: keep fewer tokens in later layers.

Ref: Cai et al. 2024, PyramidKV, arXiv 2406.02069.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringjax.checks import integer
from ringjax.kv.policies.scores.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
  """SnapKV with budgets that decrease linearly from the first layer on.

  Their mean is the budget. If the last layer's budget would be less than the
  window, or the first layer's more than the row, all layers have the same.

  Attributes:
    beta: Ratio of the mean budget to the last layer's budget.
  """

  beta: int = 20

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("beta", self.beta, least=1)

  def counts(self, length: int, heads: Sequence[int]) -> Sequence[int]:
    layers = len(heads)
    share = isinstance(self.budget, float)
    budget = length * self.budget if share else min(self.budget, length)
    # Added and subtracted as in other implementations, for the same rounding.
    mean = (self.window + budget) - self.window
    last = mean / self.beta
    first = 2 * mean - last
    if first >= length - self.window:
      first = length - self.window
      last = 2 * mean - first
    if not length >= first >= last >= self.window:
      return [max(1, round(budget))] * layers
    step = (first - last) / (layers - 1) if layers > 1 else 0
    return [round(first - n * step) for n in range(layers)]
