"""Cross-attention to the states of an encoder.

Guarantees: a state has no position and no order, so permuting the states
changes nothing; padding is not seen; a row without any state is unchanged.
Cost: 4 E K H FLOPs a state in each layer and call, for its key and value: only
the states are kept between calls.
Ref: Yen et al. 2024, arXiv 2402.16617 (CEPE).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.errors import OptionError, ShapeError
from ringjax.kv.encoder_states import EncoderStates
from ringjax.nn.attention_layers.attention import head_norm
from ringjax.nn.linear import Linear
from ringjax.nn.sharding_context import Attend, Extras

if TYPE_CHECKING:
  from ringjax.nn.block import Layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttention:
  """Attention of a layer to an encoder's states.

  It has the heads, the logits' scale and the norms of queries and keys of the
  layer's own attention, and the norm of the layer; no biases, no positions and
  no mask but that of padding.

  Attributes:
    width: Size of a state, E.
  """

  width: int

  def build(self, rngs: nnx.Rngs, embed: int, layer: Layer) -> CrossQuery:
    """Make the module, next to the other parts of a `Layer`."""
    return CrossQuery(rngs, self, embed, layer)


class CrossQuery(nnx.Module):
  """The module of `CrossAttention`."""

  def __init__(
    self, rngs: nnx.Rngs, spec: CrossAttention, embed: int, layer: Layer
  ):
    attention: Any = layer.attention
    n, k, h = attention.heads, attention.kv_heads, attention.head_dim
    assert layer.output_scale is not None
    self.width, self.output_scale = spec.width, layer.output_scale
    self.extras = Extras(
      scale=attention.logit_scale, soft_cap=attention.soft_cap
    )
    self.norm = layer.norm.build(rngs, embed)
    # No biases: those of queries and keys are about positions, and one of the
    # output would add something even without a context.
    self.q = Linear(rngs, (embed,), (n, h), ("embed", "heads", None))
    into = lambda: Linear(rngs, (spec.width,), (k, h), (None, "kv_heads", None))
    self.k, self.v = into(), into()
    self.o = Linear(rngs, (n, h), (embed,), ("heads", None, "embed"))
    self.q_norm = head_norm(rngs, attention, n)
    self.k_norm = head_norm(rngs, attention, k)

  def __call__(
    self, x: Float[Array, "B T D"], states: EncoderStates | None, attend: Attend
  ) -> Float[Array, "B T D"]:
    """x plus attention to the states; x alone without states."""
    if states is None:
      return x
    if states.phi.shape[-1] != self.width:
      raise ShapeError(
        "states",
        f"states of {states.phi.shape[-1]} numbers",
        f"{self.width}, which this model's encoder makes",
        "encode the context with the encoder of this model",
      )
    states.check(x.shape[0])
    phi = states.phi.astype(x.dtype)
    q = attend.rows(lambda x: self.q_norm(self.q(self.norm(x))), x)
    k, v = self.k_norm(self.k(phi)), self.v(phi)
    attended = attend.across(q, k, v, states.seg, self.extras)
    y = attend.rows(self.o, attended)
    if self.output_scale != 1.0:
      y = y * jnp.asarray(self.output_scale, y.dtype)
    return attend.constrain(x + y)


class NoCrossAttention(nnx.Module):
  """Replacement for cross-attention in a layer without it: the identity."""

  def __call__(
    self, x: Float[Array, "B T D"], states: EncoderStates | None, attend: Attend
  ) -> Float[Array, "B T D"]:
    del attend
    if states is not None:
      raise OptionError(
        "states",
        "a context for a layer without cross-attention",
        "a model with an encoder",
        "make one with rj.models.cepe.with_encoder(model)",
      )
    return x
