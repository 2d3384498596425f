"""Residual blocks: in which order attention, feedforward and norms come."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache, StateCache
from ringjax.kv.encoder_states import EncoderStates
from ringjax.nn.attention import Attention
from ringjax.nn.beside import Beside
from ringjax.nn.channel_delta import ChannelDelta
from ringjax.nn.cross_attention import CrossAttention, NoCrossAttention
from ringjax.nn.delta import Delta
from ringjax.nn.feedforward import Experts, Gated, NoFeedforward, Plain
from ringjax.nn.latent import Latent
from ringjax.nn.linear import Identity, Norm
from ringjax.nn.mamba import Mamba2
from ringjax.nn.mamba1 import Mamba1
from ringjax.nn.sharding_context import Attend
from ringjax.nn.short_conv import ShortConv
from ringjax.nn.tokens import Tokens

# What mixes tokens, and what each token goes through alone.
OneMixer = (
  Attention | ChannelDelta | Delta | Latent | Mamba1 | Mamba2 | ShortConv
)
Mixer = OneMixer | Beside
Feedforward = Plain | Gated | Experts | NoFeedforward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """One layer of a model: its parts and where the norms stand.

  Attributes:
    attention: an `Attention`, or what else mixes tokens.
    feedforward: `Plain`, `Gated` or `Experts`; `NoFeedforward` for none.
    norm: the kind of all its norms.
    pre: norms before attention and feedforward.
    post: norms behind them, before the residual is added.
    parallel: attention and feedforward read the same input, and are added
      together; with `shared_norm` through one norm.
    shared_norm: see `parallel`.
    residual_scale: what a part's output is multiplied by before it is added.
    cross: attention to an encoder's states, between attention and feedforward;
      of parallel ones it reads the same input. None for none.
  """

  attention: Mixer
  feedforward: Feedforward
  norm: Norm
  pre: bool = True
  post: bool = False
  parallel: bool = False
  shared_norm: bool = False
  residual_scale: float = 1.0
  cross: CrossAttention | None = None

  @property
  def mixers(self) -> tuple[OneMixer, ...]:
    """What mixes tokens, of which each keeps something in a cache."""
    mixer = self.attention
    if isinstance(mixer, Beside):
      return (mixer.attention, mixer.state)
    return (mixer,)

  def build(self, rngs: nnx.Rngs, embed: int) -> Block:
    return Block(rngs, self, embed)


class Block(nnx.Module):
  """The module of `Layer`."""

  def __init__(self, rngs: nnx.Rngs, spec: Layer, embed: int):
    self.spec = spec
    norm = lambda here: spec.norm.build(rngs, embed) if here else Identity()
    alone = isinstance(spec.feedforward, NoFeedforward)
    self.attention = spec.attention.build(rngs, embed)
    self.feedforward = spec.feedforward.build(rngs, embed)
    self.pre_attention = norm(spec.pre)
    self.post_attention = norm(spec.post)
    self.pre_feedforward = norm(spec.pre and not spec.shared_norm and not alone)
    self.post_feedforward = norm(spec.post and not alone)
    self.cross = (
      NoCrossAttention()
      if spec.cross is None
      else spec.cross.build(rngs, embed, spec)
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache | StateCache | tuple[LayerCache | StateCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
  ) -> tuple[jax.Array, Any]:
    """[B, T, D] -> [B, T, D], and the layer's cache.

    Of a layer with several mixers it is one for each. `states` are those of an
    encoder, or None for no context.
    """
    spec = self.spec
    scaled = lambda y: (
      y
      if spec.residual_scale == 1.0
      else y * jnp.asarray(spec.residual_scale, y.dtype)
    )
    normed = self.pre_attention(x)
    # Each kind of mixer has its own kind of cache.
    mix: Any = self.attention
    mixed, cache = mix(normed, tokens, cache, attend)
    mixed = scaled(self.post_attention(mixed))
    if spec.parallel:
      h = normed if spec.shared_norm else self.pre_feedforward(x)
      x = self.cross(x, states, attend)
    else:
      x = self.cross(attend.constrain(x + mixed), states, attend)
      if isinstance(spec.feedforward, NoFeedforward):
        return x, cache
      h = self.pre_feedforward(x)
    h = scaled(self.post_feedforward(self.feedforward(h, attend)))
    return attend.constrain(x + mixed + h if spec.parallel else x + h), cache
