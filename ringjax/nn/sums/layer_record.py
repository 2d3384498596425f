"""Record of what one layer sums for training: its routing and its choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool

from ringjax.nn.sums.choice_sums import ChoiceRecord, ChoiceSums
from ringjax.nn.sums.router_sums import RouterRecord, RouterSums


class LayerSums(NamedTuple):
  """Sums of one layer's parts; those of several have a leading axis.

  Fields:
    router: Sums of its router, or None without one.
    choice: Sums of the keys that it chose, or None if it reads all.
  """

  router: RouterSums | None
  choice: ChoiceSums | None

  def joined(self, join_rows: Callable[[Array], Array]) -> LayerSums:
    """Sums of all rows, see `RouterSums.joined`."""
    return LayerSums(
      None if self.router is None else self.router.joined(join_rows),
      None if self.choice is None else self.choice.joined(),
    )


class LayerRecord:
  """Receives the sums of one layer while it is traced.

  Attributes:
    router: Record of its router.
    choice: Record of the keys that it chooses.
  """

  def __init__(
    self,
    real: Bool[Array, "#B T"],
    *,
    warm_up: bool = False,
    index_learns: bool = True,
  ):
    self.router = RouterRecord(real)
    self.choice = ChoiceRecord(real, warm_up=warm_up, index_learns=index_learns)

  @property
  def parts(self) -> tuple[RouterRecord, ChoiceRecord]:
    """Records of the layer's parts."""
    return self.router, self.choice

  @property
  def sums(self) -> LayerSums:
    """Sums of the layer, after it has run."""
    return LayerSums(self.router.sums, self.choice.sums)
