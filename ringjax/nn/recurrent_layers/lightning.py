"""Lightning attention: linear attention with a fixed decay for each head.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens; see ops/recurrent/delta.py. Between shards one state
a head is gathered, for any length.
Ref:  Qin et al. 2024, Lightning Attention-2, arXiv 2401.04658; as in MiniMax
2025, MiniMax-01, arXiv 2501.08313.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ringjax.kv.base import StateCache
from ringjax.kv.state import State, StateShape
from ringjax.nn.feedforward import ACTIVATIONS
from ringjax.nn.linear import Linear, RMSNorm
from ringjax.nn.param import param
from ringjax.nn.recurrent_layers.delta import (
  Recurrent,
  RecurrentInputs,
  carried,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.recurrent.conv import begins, tails
from ringjax.ops.recurrent.delta import delta_rule
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lightning(Recurrent):
  """Linear attention whose states decay by a constant, and a gate.

  Attributes:
    heads: Number of heads, N.
    dim: Size of a head of queries, keys and values, H.
    act: Activation of queries, keys and values.
    eps: Epsilon of the norm of the outputs of all heads together.
    layers: Number of layers of the model, on which the decays depend.
  """

  heads: int
  dim: int
  act: str
  eps: float
  layers: int

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep.

    There is no convolution: the tail is the document of the last token.
    """
    return StateShape(
      layers=layers,
      heads=self.heads,
      key=self.dim,
      value=self.dim,
      tail=1,
      convolved=(),
    )

  def rates(self, number: int) -> list[float]:
    """Logarithms of the decays of layer `number`, negated, one a head."""
    base = 2.0 ** (-8.0 / self.heads)
    share = 1 - number / (self.layers - 1 + 1e-5) + 1e-5
    return [share * base ** (head + 1) for head in range(self.heads)]

  def build(self, rngs: nnx.Rngs, embed: int) -> LightningLayer:
    return LightningLayer(rngs, self, embed)


class LightningLayer(nnx.Module):
  """The module of `Lightning`."""

  def __init__(self, rngs: nnx.Rngs, spec: Lightning, embed: int):
    self.spec = spec
    shape = (spec.heads, spec.dim)
    into = lambda: Linear(rngs, (embed,), shape, ("embed", "heads", None))
    self.q, self.k, self.v, self.z = into(), into(), into(), into()
    # Those of the model's first layer, until the stack numbers its layers.
    axes = ("heads", None, None)
    self.rate = param(rngs, (spec.heads, 1, 1), axes, wide=True)
    self.rate = self.rate.replace(_rates(spec, [0])[0])
    self.norm = RMSNorm(rngs, shape, ("heads", None), eps=spec.eps)
    self.out = Linear(rngs, shape, (embed,), ("heads", None, "embed"))

  def number_layers(self, numbers: Sequence[int]) -> None:
    """Set the decays of stacked layers by their numbers in the model."""
    self.rate = self.rate.replace(_rates(self.spec, numbers))

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the state after these tokens."""
    spec, compute_dtype = self.spec, wide_dtype(x.dtype)
    act = ACTIVATIONS[spec.act]
    inputs = RecurrentInputs(
      (act(self.q(x)), act(self.k(x)), act(self.v(x))),
      None,
      None,
      jnp.broadcast_to(tokens.seg, x.shape[:2]),
    )
    shape = spec.cache_shape(1)
    # A constant of the model, which is not trained.
    rate = lax.stop_gradient(self.rate[...].astype(compute_dtype))[:, 0, 0]
    mixed, cache = carried(_mix, rate, inputs, shape, tokens, cache, attend)
    gate = jax.nn.sigmoid(self.z(x).astype(compute_dtype))
    mixed = self.norm(mixed.astype(compute_dtype)) * gate
    return self.out(mixed.astype(x.dtype)), cache


def _rates(spec: Lightning, numbers: Sequence[int]) -> Float[Array, "L N 1 1"]:
  """Rates of some layers, float32 [L, N, 1, 1]."""
  rates = np.asarray([spec.rates(number) for number in numbers], np.float32)
  return jnp.asarray(rates[..., None, None])


def _mix(
  rate: Float[Array, " N"], x: RecurrentInputs, state: State, axis: str | None
) -> tuple[jax.Array, State]:
  """[B, T, N, H] and the state after them. Per shard, if `axis` is given."""
  tokens_before, tokens_after = tails(state.tail, (), x.seg, axis)
  is_token = (x.seg > 0)[..., None]
  decay = jnp.where(is_token, -rate[None, None], 0)
  decay = jnp.where(begins(x.seg, tokens_before)[..., None], -jnp.inf, decay)
  added = jnp.broadcast_to(is_token, decay.shape).astype(rate.dtype)
  q, k, v = x.qkv
  mixed, memory = delta_rule(
    q, k, v, decay, added, state.memory, correct=False, axis=axis
  )
  return mixed, State(memory, tokens_after)
