"""How the queries of a kind of layer read its keys."""

from __future__ import annotations

import dataclasses

from ringjax.ops.attention.scores import Scores
from ringjax.ops.mask import Causal, Mask
from ringjax.ops.rope import Rope, Rotation
from ringjax.typing import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyReading:
  """What an eviction knows of a kind of layer, after the call.

  Attributes:
    groups: query heads of a KV head, G.
    scores: scale and soft cap.
    mask: who sees whom.
    slopes: ALiBi, of all query heads, or None.
    rope: the rotation of keys and queries, or None.
    first: the first dim of a head that it rotates.
    late: whether a norm with weights comes behind the rotation.
    most: how many keys a query reads, of those that it sees, which an index
      chooses; None: all.
  """

  groups: int
  scores: Scores
  mask: Mask = Causal()
  slopes: tuple[float, ...] | None = None
  rope: Rope | None = None
  first: int = 0
  late: bool = False
  most: int | None = None

  def rotation(self, length: Lengths) -> Rotation:
    """Of keys that are stored before it, for a context of `length` tokens."""
    return Rotation(rope=self.rope, first=self.first, length=length)
