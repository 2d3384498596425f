"""Attention and a state space that read the same input, and are added.

Guarantees: the results of both as they are alone; each keeps its own state of
the tokens, keys and a recurrent state, so a cache has two kinds for a layer.
Ref:  Zuo et al. 2025, Falcon-H1, arXiv 2507.22448.
"""

from __future__ import annotations

import abc
import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache, StateCache
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.recurrent_layers.mamba import Mamba2
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionAndState(abc.ABC):
  """A mixer of attention and a state space model, each with its own cache.

  Attributes:
    attention: Attention.
    state: State space model.
  """

  attention: Attention
  state: Mamba2

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Rotations that a call needs tables for."""
    return self.attention.ropes

  @property
  def heads(self) -> int:
    """Number of attention heads."""
    return self.attention.heads

  @property
  def pair_flops(self) -> int:
    """FLOPs per query and key of the attention."""
    return self.attention.pair_flops

  @property
  def reach(self) -> int | None:
    """Number of tokens it looks back: None, all by its state."""
    return None

  @abc.abstractmethod
  def build(self, rngs: nnx.Rngs, embed: int) -> nnx.Module:
    """Make the module for streams of `embed` numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside(AttentionAndState):
  """Attention in parallel with a state space model.

  Attributes:
    attention_in: Factor on the input of attention.
    attention_out: Factor on its output.
    state_in: Factor on the state space model's input.
    state_out: Factor on its output.
  """

  attention_in: float = 1.0
  attention_out: float = 1.0
  state_in: float = 1.0
  state_out: float = 1.0

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
  ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, StateCache]]:
    """[B, T, D] and the layer's caches, of attention and of the state."""
    spec, (keys, state) = self.spec, cache
    scaled = lambda y, scale: y * jnp.asarray(scale, y.dtype)
    attended, keys = self.attention(
      scaled(x, spec.attention_in), tokens, keys, attend
    )
    carried, state = self.state(scaled(x, spec.state_in), tokens, state, attend)
    y = scaled(attended, spec.attention_out) + scaled(carried, spec.state_out)
    return y, (keys, state)
