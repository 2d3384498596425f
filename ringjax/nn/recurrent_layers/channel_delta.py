"""Kimi's delta attention: the delta rule with a decay for each key channel.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens; see ops/recurrent/delta.py. Between shards the
tail of a convolution and one affine map a head are gathered, for any length.
Ref:  Kimi Team 2025, Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import StateCache
from ringjax.kv.state import StateShape
from ringjax.nn.linear import Identity, Linear, RMSNorm
from ringjax.nn.param import param
from ringjax.nn.recurrent_layers.delta import (
  Recurrent,
  RecurrentInputs,
  Taps,
  carried,
  mix_delta,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelDelta(Recurrent):
  """The delta rule with a decay for each channel, after convolutions.

  Attributes:
    heads: Number of heads, N.
    dim: Size of a head of queries, keys and values, H.
    rank: Size of the vectors from which decays and gates are computed; None:
      they are computed from the layer's input.
    taps: Number of tokens that the convolutions see, including the token
      itself.
    eps: Epsilon of the norm of the outputs.
    flat_rates: Whether files have the rates of the heads in one axis.
    lower_limit: Limit of the logarithms of decays, below 0, to which a sigmoid
      leads; None: a softplus, without a limit.
  """

  heads: int
  dim: int
  rank: int | None
  taps: int
  eps: float
  lower_limit: float | None = None
  flat_rates: bool = False

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return StateShape(
      layers=layers,
      heads=self.heads,
      key=self.dim,
      value=self.dim,
      tail=self.taps - 1,
      convolved=((self.heads, self.dim),) * 3,
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> ChannelDeltaLayer:
    return ChannelDeltaLayer(rngs, self, embed)


class ChannelDeltaLayer(nnx.Module):
  """The module of `ChannelDelta`."""

  def __init__(self, rngs: nnx.Rngs, spec: ChannelDelta, embed: int):
    self.spec = spec
    n, h = spec.heads, spec.dim
    into = lambda size, name: Linear(
      rngs, (size,), (n, h), (name, "heads", None)
    )
    taps = lambda: Taps(rngs, (n, h, spec.taps), ("heads", None))
    rank = spec.rank
    down = lambda: (
      Identity()
      if rank is None
      else Linear(rngs, (embed,), (rank,), ("embed", None))
    )
    out_of = lambda: into(embed, "embed") if rank is None else into(rank, None)
    self.q, self.k, self.v = (into(embed, "embed") for _ in range(3))
    self.q_taps, self.k_taps, self.v_taps = taps(), taps(), taps()
    self.beta = Linear(rngs, (embed,), (n,), ("embed", "heads"))
    self.step_down, self.step = down(), out_of()
    self.z_down, self.z = down(), out_of()
    # In Kimi's files shaped to broadcast with [B, T, N, H].
    shape, axes = (1, 1, n, 1), (None, None, "heads", None)
    if rank is None or spec.flat_rates:
      shape, axes = (n,), ("heads",)
    self.log_rate = param(rngs, shape, axes, fan_in=1)
    self.offset = param(rngs, (n * h,), ("heads",), value=1.0)
    self.norm = RMSNorm(rngs, (h,), (None,), eps=spec.eps)
    self.out = Linear(rngs, (n, h), (embed,), ("heads", None, "embed"))

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the state after these tokens."""
    spec, compute_dtype = self.spec, wide_dtype(x.dtype)
    offset = (
      self.offset[...].astype(compute_dtype).reshape(1, 1, spec.heads, spec.dim)
    )
    step = self.step(self.step_down(x)).astype(compute_dtype) + offset
    rate = jnp.exp(self.log_rate[...].astype(compute_dtype))
    rate = rate.reshape(1, 1, spec.heads, 1)
    if spec.lower_limit is None:
      log_decay = -rate * jax.nn.softplus(step)
    else:
      limit = jnp.asarray(spec.lower_limit, compute_dtype)
      log_decay = limit * jax.nn.sigmoid(rate * step)
    inputs = RecurrentInputs(
      (self.q(x), self.k(x), self.v(x)),
      log_decay,
      jax.nn.sigmoid(self.beta(x).astype(compute_dtype)),
      jnp.broadcast_to(tokens.seg, x.shape[:2]),
    )
    taps = tuple(
      conv.weight[...] for conv in (self.q_taps, self.k_taps, self.v_taps)
    )
    shape = spec.cache_shape(1)
    mixed, cache = carried(
      mix_delta, taps, inputs, shape, tokens, cache, attend
    )
    gate = jax.nn.sigmoid(self.z(self.z_down(x)).astype(compute_dtype))
    mixed = self.norm(mixed.astype(compute_dtype)) * gate
    return self.out(mixed.astype(x.dtype)), cache
