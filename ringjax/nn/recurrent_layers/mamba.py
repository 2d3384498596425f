"""Mamba 2: a state of each head that decays, and to which tokens add.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens. Between shards the tail of a convolution, one state
and one number a head are gathered, for any length.
Ref:  Dao and Gu 2024, Transformers are SSMs, arXiv 2405.21060.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import StateCache
from ringjax.kv.state import State, StateShape
from ringjax.nn.linear import Linear, RMSNorm
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
from ringjax.ops.norm import rms_norm
from ringjax.ops.recurrent.conv import begins, tails
from ringjax.ops.recurrent.delta import delta_rule
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrent):
  """A state space model after a short convolution, and a gate.

  Attributes:
    groups: Number of groups of heads that share B and C, K.
    heads: Number of heads, N, a multiple of K.
    state: Size of a channel's state, H.
    channels: Number of channels of a head, J.
    taps: Number of tokens that the convolution sees, including the token
      itself.
    eps: Epsilon of the norm of the gated outputs.
    norm_groups: Number of parts of the outputs that are normalised separately;
      0: no norm.
    bias: Whether the maps into and out of it have biases.
    conv_bias: Whether the convolution has a bias.
    step_limit: Minimum and maximum of the time step.
    gate_last: Whether the gate comes after the norm, not before it.
    scales: Factors on the gate, V, K, Q and time steps before anything else, in
      this order.
  """

  groups: int
  heads: int
  state: int
  channels: int
  taps: int
  eps: float
  norm_groups: int = 1
  bias: bool = False
  conv_bias: bool = True
  step_limit: tuple[float, float] = (0.0, math.inf)
  gate_last: bool = False
  scales: tuple[float, float, float, float, float] | None = None

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return StateShape(
      layers=layers,
      heads=self.heads,
      key=self.state,
      value=self.channels,
      tail=self.taps - 1,
      convolved=(
        *((self.groups, self.state),) * 2,
        (self.heads, self.channels),
      ),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> Mamba2Layer:
    return Mamba2Layer(rngs, self, embed)


class GroupedNorm(RMSNorm):
  """An RMSNorm of [..., N, J] over equal groups of the N J numbers."""

  def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], spec: Mamba2):
    super().__init__(rngs, shape, ("heads", None), eps=spec.eps)
    self.groups = spec.norm_groups

  def __call__(self, x: Float[Array, "*B N J"]) -> Float[Array, "*B N J"]:
    assert self.weight is not None
    parts = x.reshape(*x.shape[:-2], self.groups, -1)
    normed = rms_norm(parts, None, self.eps).reshape(x.shape)
    weight = self.weight[...].astype(x.dtype)
    return normed * weight[(None,) * (x.ndim - 2)]


class Mamba2Layer(nnx.Module):
  """The module of `Mamba2`."""

  def __init__(self, rngs: nnx.Rngs, spec: Mamba2, embed: int):
    self.spec = spec
    keys, values = (spec.groups, spec.state), (spec.heads, spec.channels)
    into = lambda shape, *axes: Linear(
      rngs, (embed,), shape, ("embed", *axes), bias=spec.bias
    )
    taps = lambda shape, axis: Taps(
      rngs, (*shape, spec.taps), (axis, None), bias=spec.conv_bias
    )
    self.z = into(values, "heads", None)
    self.v = into(values, "heads", None)
    # B and C of the paper.
    self.k = into(keys, "kv_heads", None)
    self.q = into(keys, "kv_heads", None)
    self.step = into((spec.heads,), "heads")
    self.q_taps, self.k_taps = taps(keys, "kv_heads"), taps(keys, "kv_heads")
    self.v_taps = taps(values, "heads")
    self.log_rate = param(rngs, (spec.heads,), ("heads",), fan_in=1)
    self.offset = param(rngs, (spec.heads,), ("heads",), value=1.0)
    self.skip = param(rngs, (spec.heads,), ("heads",), value=1.0)
    self.norm = GroupedNorm(rngs, values, spec) if spec.norm_groups else None
    self.out = Linear(
      rngs, values, (embed,), ("heads", None, "embed"), bias=spec.bias
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the state after these tokens."""
    spec, compute_dtype = self.spec, wide_dtype(x.dtype)
    head = lambda p: p[...].astype(compute_dtype)[None, None]
    z, v, k, q, step = (
      map_(x) for map_ in (self.z, self.v, self.k, self.q, self.step)
    )
    if spec.scales is not None:
      scaled = zip((z, v, k, q, step), spec.scales, strict=True)
      z, v, k, q, step = (y * jnp.asarray(s, y.dtype) for y, s in scaled)
    step = jax.nn.softplus(step.astype(compute_dtype) + head(self.offset))
    step = jnp.clip(
      step, *(jnp.asarray(s, compute_dtype) for s in spec.step_limit)
    )
    inputs = RecurrentInputs(
      (q, k, v),
      -jnp.exp(head(self.log_rate)) * step,
      step,
      jnp.broadcast_to(tokens.seg, x.shape[:2]),
    )
    taps = tuple(
      conv.arrays for conv in (self.q_taps, self.k_taps, self.v_taps)
    )
    shape = spec.cache_shape(1)
    weights = (taps, self.skip[...])
    mixed, cache = carried(_mix, weights, inputs, shape, tokens, cache, attend)
    mixed, gate = (
      mixed.astype(compute_dtype),
      jax.nn.silu(z.astype(compute_dtype)),
    )
    mixed = mixed if spec.gate_last else mixed * gate
    mixed = mixed if self.norm is None else self.norm(mixed)
    mixed = mixed * gate if spec.gate_last else mixed
    return self.out(mixed.astype(x.dtype)), cache


def _mix(
  weights: tuple, x: RecurrentInputs, state: State, axis: str | None
) -> tuple[jax.Array, State]:
  """[B, T, N, J] and the state after them. Per shard, if `axis` is given."""
  taps, skip = weights
  tokens_before, tokens_after = tails(state.tail, x.qkv, x.seg, axis)

  assert x.decay is not None and x.beta is not None
  q, k, v = map(jax.nn.silu, convolved(x, taps, tokens_before))
  real = (x.seg > 0)[..., None]
  decay = jnp.where(real, x.decay, 0)
  decay = jnp.where(begins(x.seg, tokens_before)[..., None], -jnp.inf, decay)
  mixed, memory = delta_rule(
    q,
    k,
    v,
    decay,
    jnp.where(real, x.beta, 0),
    state.memory,
    correct=False,
    axis=axis,
  )
  # A token's direct contribution to its own output (D of the paper).
  state_dtype = memory.dtype
  skipped = (
    v.astype(state_dtype) * skip.astype(state_dtype)[None, None, :, None]
  )
  return (mixed.astype(state_dtype) + skipped).astype(v.dtype), State(
    memory, tokens_after
  )
