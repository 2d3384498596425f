"""RG-LRU: a linear recurrence of each channel, whose gates the token sets.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens, log2 of a shard's tokens deep. Between shards the
tail of a convolution and two numbers a channel are gathered, for any length.
Ref:  De et al. 2024, Griffin, arXiv 2402.19427.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import StateCache
from ringjax.kv.state import State, StateShape
from ringjax.nn.feedforward import ACTIVATIONS
from ringjax.nn.linear import Linear, linear_product
from ringjax.nn.param import param
from ringjax.nn.recurrent_layers.delta import (
  Recurrent,
  RecurrentInputs,
  Taps,
  carried,
  convolved,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.recurrent.conv import begins, tails
from ringjax.ops.recurrent.scan import recurrence_of_shard
from ringjax.ops.recurrent.sequence import beside
from ringjax.ops.softmax import wide_dtype

# Decay of a channel, to the power of its gate: exp(-_POWER softplus(rate)).
_POWER = 8.0
# Largest derivative of the root of what a decay leaves.
_STEEPEST = 1000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RgLru(Recurrent):
  """A gated linear recurrence after a short convolution, and a gate.

  Attributes:
    heads: Number of blocks of channels, N, within which the gates mix them.
    dim: Number of channels of a block, H.
    taps: Number of tokens that the convolution sees, including the token
      itself.
    act: Activation of the gate of the outputs.
  """

  heads: int
  dim: int
  taps: int
  act: str

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return StateShape(
      layers=layers,
      heads=self.heads,
      key=1,
      value=self.dim,
      tail=self.taps - 1,
      convolved=((self.heads, self.dim),),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> RgLruLayer:
    return RgLruLayer(rngs, self, embed)


class RgLruLayer(nnx.Module):
  """The module of `RgLru`."""

  def __init__(self, rngs: nnx.Rngs, spec: RgLru, embed: int):
    self.spec = spec
    n, h = shape = (spec.heads, spec.dim)
    into = lambda: Linear(
      rngs, (embed,), shape, ("embed", "heads", None), bias=True
    )
    gate = lambda: param(rngs, (n, h, h), ("heads", None, None), fan_in=h)
    bias = lambda: param(rngs, shape, ("heads", None))
    self.x, self.z = into(), into()
    self.taps = Taps(rngs, (n, h, spec.taps), ("heads", None), bias=True)
    # Gates of the inputs and of the decays.
    self.input_gate, self.input_bias = gate(), bias()
    self.decay_gate, self.decay_bias = gate(), bias()
    # A decay of about 0.96 where the gate is open.
    self.rate = param(rngs, (n * h,), ("heads",), value=-5.3)
    self.out = Linear(
      rngs, shape, (embed,), ("heads", None, "embed"), bias=True
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the state after these tokens."""
    spec = self.spec
    seg = jnp.broadcast_to(tokens.seg, x.shape[:2])
    inputs = RecurrentInputs((self.x(x),), None, None, seg)
    weights = (
      (self.taps.arrays,),
      (self.input_gate[...], self.input_bias[...]),
      (self.decay_gate[...], self.decay_bias[...]),
      self.rate[...].reshape(spec.heads, spec.dim),
    )
    shape = spec.cache_shape(1)
    mixed, cache = carried(_mix, weights, inputs, shape, tokens, cache, attend)
    return self.out(mixed * ACTIVATIONS[spec.act](self.z(x))), cache


def _mix(
  weights: tuple, x: RecurrentInputs, state: State, axis: str | None
) -> tuple[jax.Array, State]:
  """[B, T, N, H] and the state after them. Per shard, if `axis` is given."""
  taps, input_gate, decay_gate, rate = weights
  tokens_before, tokens_after = tails(state.tail, x.qkv, x.seg, axis)
  (u,) = convolved(x, taps, tokens_before)
  dtype = wide_dtype(u.dtype)

  def gated(gate: tuple[jax.Array, jax.Array]) -> jax.Array:
    of_head = lambda u, weight, bias: linear_product(u, weight, 1, bias)
    y = jax.vmap(of_head, in_axes=(2, 0, 0), out_axes=2)(u, *gate)
    return jax.nn.sigmoid(y.astype(dtype))

  softplus = jax.nn.softplus(rate.astype(dtype))[None, None]
  log_decay = -_POWER * gated(decay_gate) * softplus
  is_first = beside(begins(x.seg, tokens_before), u)
  is_token = beside(x.seg > 0, u)
  # What a decay leaves for the input; a document's first token has all.
  share = jnp.where(is_first, 1, _root(-jnp.expm1(2 * log_decay)))
  added = u.astype(dtype) * gated(input_gate) * share
  # Padding leaves a state as it is.
  decay = jnp.where(is_token, jnp.exp(log_decay), 1)
  h, memory = recurrence_of_shard(
    jnp.where(is_first, 0, decay),
    jnp.where(is_token, added, 0),
    state.memory[:, :, 0],
    axis=axis,
  )
  return h.astype(u.dtype), State(memory[:, :, None], tokens_after)


@jax.custom_jvp
def _root(x: Float[Array, " ..."]) -> Float[Array, " ..."]:
  """Square root with a derivative of at most `_STEEPEST`."""
  return jnp.sqrt(x)


@_root.defjvp
def _root_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (x,), (dx,) = primals, tangents
  return jnp.sqrt(x), dx / jnp.sqrt(jnp.maximum(4 * x, _STEEPEST**-2))
