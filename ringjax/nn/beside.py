"""Attention and a state space that read the same input, and are added.

Guarantees: what the two give by themselves; each keeps what it keeps of
tokens, keys and a state, so that a cache has two kinds for such layers.
Ref:  Zuo et al. 2025, Falcon-H1, arXiv 2507.22448.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache, StateCache
from ringjax.nn.attention import Attention
from ringjax.nn.mamba import Mamba2
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
  """Attention beside a state space.

  Attributes:
    attention: the one.
    state: the other.
    attention_in: what the input of attention is multiplied by.
    attention_out: the same of its output.
    state_in: the same of the state space's input.
    state_out: the same of its output.
  """

  attention: Attention
  state: Mamba2
  attention_in: float = 1.0
  attention_out: float = 1.0
  state_in: float = 1.0
  state_out: float = 1.0

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """What the tables of a call have to be made for."""
    return self.attention.ropes

  @property
  def heads(self) -> int:
    """Of the attention: whose scores there are."""
    return self.attention.heads

  @property
  def pair_flops(self) -> int:
    """Of a query and a key of the attention."""
    return self.attention.pair_flops

  @property
  def reach(self) -> int | None:
    """How many tokens it looks back: all, by its state."""
    return None

  def build(self, rngs: nnx.Rngs, embed: int) -> BesideLayer:
    return BesideLayer(rngs, self, embed)


class BesideLayer(nnx.Module):
  """The module of `Beside`."""

  def __init__(self, rngs: nnx.Rngs, spec: Beside, embed: int):
    self.spec = spec
    self.attention = spec.attention.build(rngs, embed)
    self.state = spec.state.build(rngs, embed)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, StateCache],
    attend: Attend,
  ) -> tuple[jax.Array, tuple[LayerCache, StateCache]]:
    """[B, T, D] and the layer's caches, of attention and of the state."""
    spec, (keys, state) = self.spec, cache
    scaled = lambda y, scale: y * jnp.asarray(scale, y.dtype)
    seen, keys = self.attention(
      scaled(x, spec.attention_in), tokens, keys, attend
    )
    carried, state = self.state(scaled(x, spec.state_in), tokens, state, attend)
    y = scaled(seen, spec.attention_out) + scaled(carried, spec.state_out)
    return y, (keys, state)
