"""Largest attention logits of one layer's heads, for training.

Guarantees: maxima are over the tokens that are no padding, and the same on
every mesh.
Cost: a maximum over an array [B, T, N], which the layer's attention computes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.nn.sums.sum_record import SumRecord


class ScoreMaxima(NamedTuple):
  """Maxima over the tokens of a call in one layer, float32.

  With a leading axis they are those of several layers.

  Fields:
    heads: Largest logit of each query head, [N]; -inf where no query sees a
      key.
  """

  heads: Float[Array, "*L N"]

  def joined(self) -> ScoreMaxima:
    """Maxima of all rows, from those of groups of rows, [L, M, N]."""
    return ScoreMaxima(jnp.max(self.heads, 1))


class ScoreRecord(SumRecord[ScoreMaxima]):
  """Receives the largest logits of one layer while it is traced."""

  def add(self, maxima: Float[Array, "B T N"]) -> None:
    """Record a layer's attention, the only one that it has.

    Args:
      maxima: Largest logit of each query and head.
    """
    assert self.sums is None
    real = self.real[..., None]
    heads = jnp.max(jnp.where(real, maxima, -jnp.inf), (0, 1))
    self.sums = ScoreMaxima(heads.astype(jnp.float32))
