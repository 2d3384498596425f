"""Mamba: a small state for each channel, with dynamics chosen by the token.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens. Between shards the tail of a convolution and two
states are gathered, for any length.
Ref:  Gu and Dao 2023, arXiv 2312.00752; the norms as in Lieber et al. 2024,
Jamba, arXiv 2403.19887.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import StateCache
from ringjax.kv.state import State, StateShape
from ringjax.nn.linear import Linear, RMSNorm, linear_product
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
from ringjax.ops.recurrent.selective import selective_scan
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba1(Recurrent):
  """A selective state space model after a short convolution, and a gate.

  Attributes:
    channels: Number of channels, C.
    state: Size of a channel's state, H.
    rank: Size of the vector from which time steps are computed.
    taps: Number of tokens that the convolution sees, including the token
      itself.
    eps: Epsilon of the norms of time steps, B and C; None: no norms.
    norm_weights: Whether these norms have weights.
    bias: Whether the maps into and out of it have biases.
    conv_bias: Whether the convolution has a bias.
  """

  channels: int
  state: int
  rank: int
  taps: int
  eps: float | None
  norm_weights: bool = True
  bias: bool = False
  conv_bias: bool = True

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return StateShape(
      layers=layers,
      heads=self.channels,
      key=1,
      value=self.state,
      tail=self.taps - 1,
      convolved=((1, self.channels),),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> Mamba1Layer:
    return Mamba1Layer(rngs, self, embed)


def _norm(rngs: nnx.Rngs, spec: Mamba1, size: int) -> RMSNorm | None:
  """The norm of time steps, B or C, if the model has one."""
  if spec.eps is None:
    return None
  shape = (size,) if spec.norm_weights else None
  return RMSNorm(rngs, shape, (None,), eps=spec.eps)


class Mamba1Layer(nnx.Module):
  """The module of `Mamba1`."""

  # Maps whose arrays it uses, in addition to or instead of calling them.
  ARRAYS = ("low", "into", "out_of", "step")

  def __init__(self, rngs: nnx.Rngs, spec: Mamba1, embed: int):
    self.spec = spec
    c, h, rank = spec.channels, spec.state, spec.rank
    into = lambda: Linear(
      rngs, (embed,), (c,), ("embed", "heads"), bias=spec.bias
    )
    of_x = lambda size: Linear(rngs, (c,), (size,), ("heads", None))
    self.x, self.z = into(), into()
    self.taps = Taps(
      rngs, (1, c, spec.taps), (None, "heads"), bias=spec.conv_bias
    )
    # Input of the time steps; then B and C of the paper.
    self.low, self.into, self.out_of = of_x(rank), of_x(h), of_x(h)
    self.low_norm = _norm(rngs, spec, rank)
    self.into_norm = _norm(rngs, spec, h)
    self.out_of_norm = _norm(rngs, spec, h)
    self.step = Linear(rngs, (rank,), (c,), (None, "heads"), bias=True)
    self.log_rate = param(rngs, (c, h), ("heads", None), fan_in=1)
    self.skip = param(rngs, (c,), ("heads",), value=1.0)
    self.out = Linear(rngs, (c,), (embed,), ("heads", "embed"), bias=spec.bias)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the state after these tokens."""
    compute_dtype = wide_dtype(x.dtype)
    seg = jnp.broadcast_to(tokens.seg, x.shape[:2])
    inputs = RecurrentInputs((self.x(x)[:, :, None],), None, None, seg)
    shape = self.spec.cache_shape(1)
    maps = (self.low, self.into, self.out_of)
    norms = (self.low_norm, self.into_norm, self.out_of_norm)
    assert self.step.bias is not None
    weights = (
      (self.taps.arrays,),
      tuple(map_.weight[...] for map_ in maps),
      tuple(
        None if n is None or n.weight is None else n.weight[...] for n in norms
      ),
      self.step.weight[...],
      self.step.bias[...],
      self.log_rate[...],
      self.skip[...],
    )
    mixed, cache = carried(
      self._mix, weights, inputs, shape, tokens, cache, attend
    )
    mixed = mixed[:, :, 0].astype(compute_dtype) * jax.nn.silu(
      self.z(x).astype(compute_dtype)
    )
    return self.out(mixed.astype(x.dtype)), cache

  def _mix(
    self, weights: tuple, x: RecurrentInputs, state: State, axis: str | None
  ) -> tuple[jax.Array, State]:
    """[B, T, 1, C] and the state after them. Per shard, if `axis` is given."""
    taps, maps, norms, step_map, step_bias, log_rate, skip = weights
    tokens_before, tokens_after = tails(state.tail, x.qkv, x.seg, axis)
    (u,) = convolved(x, taps, tokens_before)
    u = jax.nn.silu(u[:, :, 0])
    low, b, c = (linear_product(u, map_, 1) for map_ in maps)
    eps = self.spec.eps
    if eps is not None:
      low, b, c = (
        rms_norm(y, weight, eps)
        for y, weight in zip((low, b, c), norms, strict=True)
      )
    state_dtype = state.memory.dtype
    step = linear_product(low, step_map, 1).astype(state_dtype)
    step = jax.nn.softplus(step + step_bias.astype(state_dtype)[None, None])
    mixed, memory = selective_scan(
      u,
      jnp.where((x.seg > 0)[..., None], step, 0),
      -jnp.exp(log_rate.astype(state_dtype)),
      b,
      c,
      state.memory[:, :, 0],
      begins(x.seg, tokens_before),
      axis=axis,
    )
    # A token's direct contribution to its own output (D of the paper).
    skipped = u.astype(state_dtype) * skip.astype(state_dtype)[None, None]
    mixed = (mixed.astype(state_dtype) + skipped).astype(u.dtype)
    return mixed[:, :, None], State(memory[:, :, None], tokens_after)
