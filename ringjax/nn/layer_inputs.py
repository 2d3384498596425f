"""Inputs of each layer from a token's id, in addition to the residual stream.

Guarantees: a layer's input mixes its part of a second embedding with a map
of the first one; it depends on each token alone, so it is the same however
tokens are sharded.
Cost: it is computed where a layer runs, [B, T, P] at a time, and never for all
layers at once.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax.nn.feedforward import ACTIVATIONS
from ringjax.nn.linear import Linear, Norm
from ringjax.nn.param import param
from ringjax.nn.sharding_context import Attend
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
  """A second embedding, of which each layer has a part.

  Attributes:
    vocab: Number of ids that it has; others count as 0.
    layers: Number of layers, L.
    width: Size of a layer's part, P.
    act: Activation of the gate by which a layer reads it.
    norm: Norm of the map of the first embedding, and of a layer's addition.
  """

  vocab: int
  layers: int
  width: int
  act: str
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int) -> LayerInputTable:
    return LayerInputTable(rngs, self, embed)

  def gate(self, rngs: nnx.Rngs, embed: int) -> LayerInputGate:
    """Make the gate by which one layer reads its part."""
    return LayerInputGate(rngs, self, embed)


class LayerInputTable(nnx.Module):
  """The module of `LayerInputs`."""

  def __init__(self, rngs: nnx.Rngs, spec: LayerInputs, embed: int):
    self.spec = spec
    shape = (spec.vocab, spec.layers, spec.width)
    self.table = param(rngs, shape, ("vocab", None, None), fan_in=spec.width)
    shape = (embed, spec.layers, spec.width)
    self.projection = param(rngs, shape, ("embed", None, None), fan_in=embed)
    self.norm = spec.norm.build(rngs, spec.width)

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T D"],
    number: Index,
  ) -> Float[Array, "B T P"]:
    """The input of layer `number`.

    Args:
      tokens: Token ids, int32 [B, T].
      x: Input of the first layer.
      number: Number of the layer.
    """
    spec = self.spec
    number = jnp.asarray(number, jnp.int32)
    as_dtype = lambda s: jnp.asarray(s, x.dtype)
    ids = jnp.where(tokens < spec.vocab, tokens, 0)
    own_part = self.table[...][ids, number].astype(x.dtype)
    own_part = own_part * as_dtype(math.sqrt(spec.width))
    weight = lax.dynamic_index_in_dim(
      self.projection[...], number, 1, keepdims=False
    )
    mapped = jnp.einsum(
      "btd,dp->btp",
      x,
      weight.astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    mapped = self.norm(mapped * as_dtype(1 / math.sqrt(x.shape[-1])))
    return (mapped + own_part) * as_dtype(1 / math.sqrt(2))


class LayerInputGate(nnx.Module):
  """Adds a layer's gated input to the residual stream."""

  def __init__(self, rngs: nnx.Rngs, spec: LayerInputs, embed: int):
    self.act = spec.act
    p = spec.width
    self.gate = Linear(rngs, (embed,), (p,), ("embed", None))
    self.projection = Linear(rngs, (p,), (embed,), (None, "embed"))
    self.norm = spec.norm.build(rngs, embed)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    given: Float[Array, "B T P"],
    attend: Attend,
  ) -> Float[Array, "B T D"]:
    """Value that is added to x."""
    gated = ACTIVATIONS[self.act](attend.rows(self.gate, x)) * given
    return self.norm(attend.rows(self.projection, gated))
