"""Expected Attention: keep the tokens that later queries should attend to.

Ref: Devoto et al. 2025, Expected Attention, arXiv 2510.00636.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import integer
from ringjax.kv.policies.policy import Look, Policy
from ringjax.ops.attention.blockwise import loop
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
  """Keeps tokens with the largest expected mass of normally drawn queries.

  The distribution has the mean and covariance of all queries of the row,
  rotated to the positions that follow. The first four tokens stay.

  Attributes:
    positions: Number of following positions to average the rotation over.
    covariance: Whether to use the covariance, and not only the mean.
    by_value: Whether to multiply the mass by the norm of the value.
    least: Number added to the mass before it is multiplied.
  """

  positions: int = 512
  covariance: bool = True
  by_value: bool = True
  least: int | float = 0.0

  moments: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("positions", self.positions, least=1)

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    mean, covariance = self._rotated(look)
    scale = look.reading.scores.scale

    def logits(k: jax.Array, v: jax.Array) -> jax.Array:
      del v
      s = scale * jnp.einsum("bksh,bkgh->bksg", k, mean)
      if self.covariance:
        variance = jnp.einsum("bksh,bkghj,bksj->bksg", k, covariance, k)
        s = s + scale**2 / 2 * variance
      return s

    first = look.pos < 4
    assert mean is not None
    groups = mean.shape[2]
    total = 0.0
    for g in range(groups):
      s = look.by_token(lambda k, v, g=g: logits(k, v)[..., g])
      s = jnp.where(look.real & ~first, s, -jnp.inf)
      top = jnp.max(s, -1, keepdims=True)
      weight = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top))
      total = total + weight / jnp.maximum(
        jnp.sum(weight, -1, keepdims=True), 1e-30
      )
    mass = total / groups
    if self.by_value:
      norm = look.by_token(lambda k, v: jnp.sqrt(jnp.sum(jnp.square(v), -1)))
      mass = (mass + self.least) * norm
    return jnp.where(first, jnp.inf, mass)

  def _rotated(self, look: Look):
    """Mean and covariance by the mean rotation of the following positions."""
    mean, covariance = look.mean, look.covariance
    if look.reading.rope is None:
      return mean, covariance
    assert mean is not None
    size = mean.shape[-1]
    units = jnp.eye(size, dtype=jnp.float32)[None, :, None]

    def mean_rotation(start: jax.Array) -> jax.Array:
      rotation = look.reading.rotation(start)

      def add_rotation(n: Index, total: jax.Array) -> jax.Array:
        return (
          total + rotation.anywhere(units, (start + n)[None, None])[0, :, 0]
        )

      zero = jnp.zeros((size, size), jnp.float32)
      # Row i is the image of unit vector i under the mean rotation.
      return loop(self.positions, add_rotation, zero) / self.positions

    rotations = jax.vmap(mean_rotation)(look.length)
    mean = jnp.einsum("bkgi,bih->bkgh", mean, rotations)
    covariance = jnp.einsum(
      "bkgij,bih,bjl->bkghl", covariance, rotations, rotations
    )
    return mean, covariance
