"""Sums of what one layer of attention records of the tiles that it computes.

The part of the attention that is left out is measured at sampled queries: with
the log-sum-exp over the chosen tiles and over all keys it is
1 - exp(chosen - all).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TileSums(NamedTuple):
  """Sums over the tokens of a call in one layer, float32.

  With a leading axis they are those of several layers.

  Fields:
    chosen: Tiles that are computed, summed over queries and heads.
    visible: Tiles that dense attention computes, likewise; 0 where tiles are
      not counted.
    left_out: Part of the attention that is left out, summed over the sampled
      queries of each head, [N].
    samples: Number of sampled queries.
  """

  chosen: Float[Array, "*L"]
  visible: Float[Array, "*L"]
  left_out: Float[Array, "*L N"]
  samples: Float[Array, "*L"]


class TileRecord:
  """Receives the tiles of one layer while it is traced.

  Attributes:
    real: Whether each token is no padding, [B or 1, T].
    sums: Sums of the layer; None until its attention has run.
  """

  def __init__(self, real: Bool[Array, "#B T"]):
    self.real = real
    self.sums: TileSums | None = None

  def add(
    self,
    chosen_lse: Float[Array, "B M N"],
    all_lse: Float[Array, "B M N"],
    sampled: Bool[Array, "B M"],
    tiles: tuple[Int[Array, "B T N"], Int[Array, "B T N"]] | None = None,
  ) -> None:
    """Sum a layer's sampled queries, and the tiles of all its queries.

    Args:
      chosen_lse: Log-sum-exp of the sampled queries over the chosen tiles.
      all_lse: Log-sum-exp of the same queries over all keys.
      sampled: Whether each sampled query is no padding.
      tiles: Numbers of tiles that are computed, and that dense attention
        computes, of the block of each query; None if they are not counted.
    """
    real = sampled[..., None] & (all_lse > -jnp.inf)
    left_out = -jnp.expm1(jnp.where(real, chosen_lse - all_lse, 0))
    # Both sums round: a part below 0 is none.
    left_out = jnp.sum(jnp.maximum(left_out, 0), (0, 1))
    zero = jnp.zeros((), jnp.float32)
    chosen = visible = zero
    if tiles is not None:
      count = lambda x: jnp.sum(
        jnp.where(self.real[..., None], x, 0).astype(jnp.float32)
      )
      chosen, visible = map(count, tiles)
    self.sums = TileSums(
      chosen,
      visible,
      left_out.astype(jnp.float32),
      jnp.sum(real[..., 0], dtype=jnp.float32),
    )
