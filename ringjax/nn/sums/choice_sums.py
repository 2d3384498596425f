"""Sums over a layer's tokens of how well its choice of keys serves it.

Guarantees: sums are over tokens that are no padding, and the same on every
mesh. Recall is the part of the attention over all visible keys that falls on
the chosen ones, exp(lse of the chosen keys - lse of all), at sampled queries.
Cost: sums; the log-sum-exps are computed by the layer's attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ringjax.nn.sums.sum_record import SumRecord


class ChoiceSums(NamedTuple):
  """Sums over the tokens of a call in one layer, float32.

  With a leading axis they are those of several layers.

  Fields:
    loss: Loss of the index, summed over the tokens; 0 without an index.
    recall: Recall, its mean over the heads, summed over the sampled queries.
    samples: Number of sampled queries.
    tokens: Number of tokens that are no padding.
  """

  loss: Float[Array, "*L"]
  recall: Float[Array, "*L"]
  samples: Float[Array, "*L"]
  tokens: Float[Array, "*L"]

  def joined(self) -> ChoiceSums:
    """Sums of all rows, from those of groups of rows, [L, M] each."""
    return ChoiceSums(*(jnp.sum(x, 1) for x in self))


class ChoiceRecord(SumRecord[ChoiceSums]):
  """Receives the choice of keys of one layer while it is traced.

  Attributes:
    warm_up: Whether queries read all keys while the index learns.
    index_learns: Whether the loss of an index is computed.
  """

  def __init__(
    self, real: Bool[Array, "#B T"], *, warm_up: bool, index_learns: bool
  ):
    super().__init__(real)
    self.warm_up = warm_up
    self.index_learns = index_learns

  def add(
    self,
    loss: Float[Array, "B T"] | None,
    chosen_lse: Float[Array, "B M N"],
    all_lse: Float[Array, "B M N"],
    sampled: Bool[Array, "B M"],
  ) -> None:
    """Sum a layer's tokens.

    Args:
      loss: Loss of the index for each query, or None without one.
      chosen_lse: Log-sum-exp of the sampled queries over the chosen keys.
      all_lse: Log-sum-exp of the same queries over all visible keys.
      sampled: Whether each sampled query is no padding.
    """
    real = sampled[..., None] & (all_lse > -jnp.inf)
    share = jnp.exp(jnp.where(real, chosen_lse - all_lse, 0))
    # Both sums round: a part above 1 is all.
    share = jnp.where(real, jnp.minimum(share, 1), 0)
    # A row of coordinates may be that of all rows.
    shape = sampled.shape[0], self.real.shape[1]
    count = jnp.sum(jnp.broadcast_to(self.real, shape), dtype=jnp.float32)
    total = jnp.zeros((), jnp.float32)
    if loss is not None:
      total = jnp.sum(jnp.where(self.real, loss, 0)).astype(jnp.float32)
    self._add(
      ChoiceSums(
        total,
        jnp.sum(jnp.mean(share, -1)).astype(jnp.float32),
        jnp.sum(real[..., 0], dtype=jnp.float32),
        count,
      )
    )
