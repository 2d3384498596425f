"""Residuals: sums of a layer's stream and a part's output.

Guarantees: each acts on each token alone, so it is the same however tokens are
sharded.

A residual is a frozen dataclass with `of_norm`, whether the stream that it adds
to is the normed input of the part, and `build(rngs, embed)`, which returns a
function of the stream and the output.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.nn.param import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledResidual:
  """keep x + add y, of a stream x and a part's output y.

  Attributes:
    keep: Factor of the stream.
    add: Factor of the output.
    of_norm: Whether the stream is the normed input of the part, as in
      MiniMax-01.
  """

  keep: float = 1.0
  add: float = 1.0
  of_norm: bool = False

  def build(self, rngs: nnx.Rngs, embed: int) -> ScaledResidual:
    """Return itself, as it has no parameters."""
    del rngs, embed
    return self

  def __call__(
    self, x: Float[Array, "B T D"], y: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Add a part's output y to the stream x."""
    return _times(x, self.keep) + _times(y, self.add)


def _times(x: Float[Array, "B T D"], factor: float) -> Float[Array, "B T D"]:
  """x times a factor, in x's dtype."""
  return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedResidual:
  """A learned sum of a part's input and output: alpha x + beta y, elementwise.

  beta = sigmoid(gate / temperature), and alpha^2 = 1 - beta^2, or `floor` if
  that is larger.

  Attributes:
    temperature: Divisor of the gate.
    floor: Smallest square of alpha.
  """

  temperature: float
  floor: float = 1e-3
  of_norm: ClassVar[bool] = False

  def build(self, rngs: nnx.Rngs, embed: int) -> GatedResidualLayer:
    return GatedResidualLayer(rngs, self, embed)


class GatedResidualLayer(nnx.Module):
  """The module of `GatedResidual`."""

  def __init__(self, rngs: nnx.Rngs, spec: GatedResidual, embed: int):
    self.spec = spec
    self.gate = param(rngs, (embed,), (None,), value=0.0, wide=True)

  def __call__(
    self, x: Float[Array, "B T D"], y: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Add a part's output y to its input x."""
    gate = self.gate[...].astype(jnp.float32) / self.spec.temperature
    beta = jax.nn.sigmoid(gate)
    square = jax.nn.sigmoid(-gate) * (1 + beta)
    alpha = jnp.sqrt(jnp.maximum(square, jnp.float32(self.spec.floor)))
    alpha, beta = alpha[None, None], beta[None, None]
    total = alpha * x.astype(jnp.float32) + beta * y.astype(jnp.float32)
    return total.astype(x.dtype)


Residual = ScaledResidual | GatedResidual
