"""Description of how the queries of a kind of layer read its keys."""

from __future__ import annotations

import dataclasses

from ringjax.ops.attention.scores import Scores
from ringjax.ops.mask import Causal, Mask
from ringjax.ops.rope import Rope, Rotation
from ringjax.typing import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyReading:
  """Attention parameters of a kind of layer, for evictions after a call.

  Attributes:
    groups: Number of query heads per KV head, G.
    scores: Scale and soft cap of the attention scores.
    mask: Attention mask.
    slopes: ALiBi slopes of all query heads, or None.
    rope: Rotation of keys and queries, or None.
    first: First dim of a head that is rotated.
    late: Whether a norm with weights follows the rotation.
    most: Number of visible keys that a query reads, which it chooses; None for
      all.
    chooser: Name of what chooses them, for errors.
    plain: Whether the layer is plain attention where a query reads all keys.
    index: First dim of a stored key that belongs to the index's key, which is
      its last part; None without an index.
  """

  groups: int
  scores: Scores
  mask: Mask = Causal()
  slopes: tuple[float, ...] | None = None
  rope: Rope | None = None
  first: int = 0
  late: bool = False
  most: int | None = None
  chooser: str = "an index"
  plain: bool = True
  index: int | None = None

  def rotation(self, length: Lengths) -> Rotation:
    """Rotation of keys stored unrotated, for a context of `length` tokens."""
    return Rotation(rope=self.rope, first=self.first, length=length)
