"""Record of what one layer sums for training: routing, choice and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool

from ringjax.nn.sums.choice_sums import ChoiceRecord, ChoiceSums
from ringjax.nn.sums.router_sums import RouterRecord, RouterSums
from ringjax.nn.sums.score_sums import ScoreMaxima, ScoreRecord


class LayerSums(NamedTuple):
  """Sums of one layer's parts; those of several have a leading axis.

  Fields:
    router: Sums of its router, or None without one.
    choice: Sums of the keys that it chose, or None if it reads all.
    scores: Largest logits of its heads, or None if they are not recorded.
  """

  router: RouterSums | None
  choice: ChoiceSums | None
  scores: ScoreMaxima | None = None

  def joined(self, join_rows: Callable[[Array], Array]) -> LayerSums:
    """Sums of all rows, see `RouterSums.joined`."""
    return LayerSums(
      None if self.router is None else self.router.joined(join_rows),
      None if self.choice is None else self.choice.joined(),
      None if self.scores is None else self.scores.joined(),
    )


class LayerRecord:
  """Receives the sums of one layer while it is traced.

  Attributes:
    router: Record of its router.
    choice: Record of the keys that it chooses.
    scores: Record of its largest logits, or None if they are not recorded.
  """

  def __init__(
    self,
    real: Bool[Array, "#B T"],
    *,
    warm_up: bool = False,
    index_learns: bool = True,
    scores: bool = False,
  ):
    self.router = RouterRecord(real)
    self.choice = ChoiceRecord(real, warm_up=warm_up, index_learns=index_learns)
    self.scores = ScoreRecord(real) if scores else None

  @property
  def parts(self) -> tuple[RouterRecord, ChoiceRecord, ScoreRecord | None]:
    """Records of the layer's parts."""
    return self.router, self.choice, self.scores

  @property
  def sums(self) -> LayerSums:
    """Sums of the layer, after it has run."""
    scores = None if self.scores is None else self.scores.sums
    return LayerSums(self.router.sums, self.choice.sums, scores)
