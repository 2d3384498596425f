"""What each layer reads of a token's id beside the residual stream.

Guarantees: a layer's input is its own part of a second embedding and of a map
of the first one, mixed; tokens are alone in it, so it is the same however they
are sharded.
Cost: it is computed where a layer runs, [B, T, P] at a time, and never for all
layers at once.
"""

from __future__ import annotations

import dataclasses
import math

import jax
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
    vocab: ids that it has; others count as 0.
    layers: L.
    width: P, of a layer's part.
    act: of the gate by which a layer reads it.
    norm: of the map of the first embedding, and behind what a layer reads.
  """

  vocab: int
  layers: int
  width: int
  act: str
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int) -> LayerInputTable:
    return LayerInputTable(rngs, self, embed)

  def gate(self, rngs: nnx.Rngs, embed: int) -> LayerInputGate:
    """How one layer reads its part."""
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
      tokens: ids.
      x: what the first layer reads.
      number: of the layer.
    """
    spec = self.spec
    number = jnp.asarray(number, jnp.int32)
    wide = lambda s: jnp.asarray(s, x.dtype)
    known = jnp.where(tokens < spec.vocab, tokens, 0)
    own = self.table[...][known, number].astype(x.dtype)
    own = own * wide(math.sqrt(spec.width))
    weight = lax.dynamic_index_in_dim(
      self.projection[...], number, 1, keepdims=False
    )
    mapped = jnp.einsum(
      "btd,dp->btp",
      x,
      weight.astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    mapped = self.norm(mapped * wide(1 / math.sqrt(x.shape[-1])))
    return (mapped + own) * wide(1 / math.sqrt(2))


class LayerInputGate(nnx.Module):
  """What a layer makes of its input, beside the residual stream."""

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
  ) -> jax.Array:
    """What is added to x."""
    gated = ACTIVATIONS[self.act](attend.rows(self.gate, x)) * given
    return self.norm(attend.rows(self.projection, gated))
