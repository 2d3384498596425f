"""The common part of records: one layer's sums, added up while it is traced."""

from __future__ import annotations

from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Sums = TypeVar("Sums")


class SumRecord(Generic[Sums]):
  """Receives the sums of one layer while it is traced.

  Attributes:
    real: Whether each token is no padding, [B or 1, T].
    sums: Sums of the layer; None until a part of it has added some.
  """

  def __init__(self, real: Bool[Array, "#B T"]):
    self.real = real
    self.sums: Sums | None = None

  def _add(self, sums: Sums) -> None:
    """Add the sums of one part; a layer may have two attentions."""
    earlier = self.sums
    if earlier is not None:
      sums = jax.tree.map(jnp.add, earlier, sums)
    self.sums = sums
