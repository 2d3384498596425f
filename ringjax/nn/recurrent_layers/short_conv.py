"""A short convolution between two gates: layers that see a few tokens back.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens. Between shards the tail of the convolution is sent.
Memory: for a row the last tokens that the convolution sees, no keys.
Ref:  Liquid AI 2025, LFM2, arXiv 2511.23404.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import StateCache
from ringjax.kv.state import State, StateShape
from ringjax.nn.linear import Linear
from ringjax.nn.recurrent_layers.delta import (
  Recurrent,
  RecurrentInputs,
  Taps,
  carried,
  convolved,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.recurrent.conv import tails


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConv(Recurrent):
  """out(b * conv(a * x)), where a, b and x are maps of the input.

  Attributes:
    channels: Number of channels of the convolution.
    taps: Number of tokens that it sees, including the token itself.
    bias: Whether its maps and the convolution have biases.
  """

  channels: int
  taps: int
  bias: bool = False

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return StateShape(
      layers=layers,
      heads=0,
      key=0,
      value=0,
      tail=self.taps - 1,
      convolved=((1, self.channels),),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> ShortConvLayer:
    return ShortConvLayer(rngs, self, embed)


class ShortConvLayer(nnx.Module):
  """The module of `ShortConv`."""

  def __init__(self, rngs: nnx.Rngs, spec: ShortConv, embed: int):
    self.spec = spec
    c = spec.channels
    into = lambda: Linear(
      rngs, (embed,), (c,), ("embed", "heads"), bias=spec.bias
    )
    self.before, self.behind, self.x = into(), into(), into()
    self.taps = Taps(rngs, (1, c, spec.taps), (None, "heads"), bias=spec.bias)
    self.out = Linear(rngs, (c,), (embed,), ("heads", "embed"), bias=spec.bias)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the last of these tokens."""
    gated = self.before(x) * self.x(x)
    seg = jnp.broadcast_to(tokens.seg, x.shape[:2])
    inputs = RecurrentInputs((gated[:, :, None],), None, None, seg)
    shape = self.spec.cache_shape(1)
    weights = (self.taps.arrays,)
    mixed, cache = carried(_mix, weights, inputs, shape, tokens, cache, attend)
    return self.out(self.behind(x) * mixed[:, :, 0]), cache


def _mix(
  taps: tuple, x: RecurrentInputs, state: State, axis: str | None
) -> tuple[jax.Array, State]:
  """[B, T, 1, C] and the tail after them. Per shard, if `axis` is given."""
  tokens_before, tokens_after = tails(state.tail, x.qkv, x.seg, axis)
  (mixed,) = convolved(x, taps, tokens_before)
  return mixed, State(state.memory, tokens_after)
