"""Residual blocks: the order of attention, feedforward and norms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from ringjax.kv.base import LayerCache, StateCache
from ringjax.kv.encoder_states import EncoderStates
from ringjax.kv.summaries.summary_layers import SummaryLayer
from ringjax.kv.summaries.summary_spec import KeySummaries
from ringjax.nn.attention_layers.attention import Attention, GroupedQuery
from ringjax.nn.attention_layers.attention_and_state import AttentionAndState
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  SummaryAttention,
)
from ringjax.nn.attention_layers.choosing.index_block_attention import (
  IndexBlockAttention,
)
from ringjax.nn.attention_layers.choosing.indexed_attention import (
  IndexedAttention,
  IndexKeys,
)
from ringjax.nn.attention_layers.choosing.pooled_block_attention import (
  PooledBlockAttention,
)
from ringjax.nn.attention_layers.compressed import (
  CompressedAttention,
  Compression,
  NearKeys,
)
from ringjax.nn.attention_layers.cross_attention import (
  CrossAttention,
  NoCrossAttention,
)
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.attention_layers.pooled_latent import PooledLatent
from ringjax.nn.feedforward import (
  DenseAndExperts,
  Experts,
  Gated,
  NoFeedforward,
  Plain,
  ShortcutFeedforward,
)
from ringjax.nn.joint_calls import JointLayer
from ringjax.nn.layer_inputs import LayerInputs
from ringjax.nn.linear import Identity, Norm, part_dtype
from ringjax.nn.param import param
from ringjax.nn.recurrent_layers.channel_delta import ChannelDelta
from ringjax.nn.recurrent_layers.delta import Delta, Recurrent
from ringjax.nn.recurrent_layers.lightning import Lightning
from ringjax.nn.recurrent_layers.mamba import Mamba2
from ringjax.nn.recurrent_layers.mamba1 import Mamba1
from ringjax.nn.recurrent_layers.rg_lru import RgLru
from ringjax.nn.recurrent_layers.short_conv import ShortConv
from ringjax.nn.residuals import Residual, ScaledResidual
from ringjax.nn.row_tiles import by_tile
from ringjax.nn.sharding_context import Attend
from ringjax.nn.streams import LowRank, Streams
from ringjax.nn.sums.router_sums import RouterRecord
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index

# Mixers of tokens, and feedforwards that act on each token alone.
OneMixer = (
  Attention
  | ChannelDelta
  | Delta
  | Latent
  | Lightning
  | Mamba1
  | Mamba2
  | RgLru
  | ShortConv
)
Mixer = OneMixer | AttentionAndState | CompressedAttention
# Parts of mixers that keep something in a cache.
CachedMixer = (
  OneMixer | Recurrent | IndexKeys | KeySummaries | NearKeys | Compression
)
# What a mixer keeps of a call.
PartOfCache = LayerCache | StateCache | SummaryLayer | JointLayer
Feedforward = (
  Plain
  | Gated
  | Experts
  | DenseAndExperts
  | NoFeedforward
  | ShortcutFeedforward
)


@runtime_checkable
class NumberedLayer(Protocol):
  """A mixer whose parameters of a new model depend on its layer's number."""

  def number_layers(self, numbers: Sequence[int]) -> None:
    """Set the parameters of a stack of layers with these numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """One layer of a model: its parts and the places of its norms.

  Attributes:
    attention: `Attention`, or another mixer of tokens.
    feedforward: `Plain`, `Gated`, `Experts`, or both in a `DenseAndExperts`,
      which has its own norms before them; `NoFeedforward` for none.
    norm: Kind of all its norms.
    pre: Whether there are norms before attention and feedforward.
    post: Whether there are norms after them, before the residual is added.
    parallel: Whether attention and feedforward read the same input, and are
      added together; with `shared_norm` through one norm.
    shared_norm: See `parallel`.
    residuals: Sums of the stream and attention's output, and of the stream and
      the feedforward's. Parallel parts take scaled ones of the stream itself.
    cross: Attention to an encoder's states, between attention and feedforward;
      in parallel layers it reads the same input. None for none.
    inputs: Input from a token's id, added at the end; None for none.
    learned_scale: Whether the layer's output, residuals included, is multiplied
      by a learned number.
    low_rank: Low-rank residual of attention's input; the sum is divided by the
      root of 2. Not with parallel parts.
    post_norms: Kinds of the norms after attention and after the feedforward;
      None: `norm`.
    streams: Residual streams of which the layer computes one; `inputs` are
      then added to all but the first. None for one stream.
  """

  attention: Mixer
  feedforward: Feedforward
  norm: Norm
  pre: bool = True
  post: bool = False
  parallel: bool = False
  shared_norm: bool = False
  residuals: tuple[Residual, Residual] = (ScaledResidual(), ScaledResidual())
  cross: CrossAttention | None = None
  inputs: LayerInputs | None = None
  learned_scale: bool = False
  low_rank: LowRank | None = None
  post_norms: tuple[Norm, Norm] | None = None
  streams: Streams | None = None

  @property
  def output_scale(self) -> float | None:
    """Factor of both parts' outputs in plain sums; None for other residuals."""
    first, second = self.residuals
    if not isinstance(first, ScaledResidual) or first != second:
      return None
    return first.add if first.keep == 1.0 and not first.of_norm else None

  @property
  def mixers(self) -> tuple[CachedMixer, ...]:
    """Mixers of tokens, or parts of them, each with something in a cache.

    Empty for a layer that reads another layer's cache.
    """
    mixer = self.attention
    if isinstance(mixer, AttentionAndState):
      return (mixer.attention, mixer.state)
    if isinstance(mixer, CompressedAttention):
      return mixer.parts
    if isinstance(mixer, PooledBlockAttention | PooledLatent):
      return (mixer, mixer.index_keys, mixer.summaries)
    if isinstance(mixer, IndexedAttention | IndexBlockAttention):
      return (mixer, mixer.index_keys)
    if isinstance(mixer, SummaryAttention):
      return (mixer, mixer.summaries)
    return () if getattr(mixer, "reads", False) else (mixer,)

  @property
  def pair_flops(self) -> int:
    """FLOPs per query and key of all attention of the layer."""
    return self.attention.pair_flops

  def build(self, rngs: nnx.Rngs, embed: int) -> Block:
    return Block(rngs, self, embed)


class Block(nnx.Module):
  """The module of `Layer`."""

  def __init__(self, rngs: nnx.Rngs, spec: Layer, embed: int):
    self.spec = spec
    norm = lambda present, kind=spec.norm: (
      kind.build(rngs, embed) if present else Identity()
    )
    after_attention, after_feedforward = spec.post_norms or (spec.norm,) * 2
    without_feedforward = isinstance(spec.feedforward, NoFeedforward)
    self.attention = spec.attention.build(rngs, embed)
    self.feedforward = spec.feedforward.build(rngs, embed)
    self.pre_attention = norm(spec.pre)
    self.post_attention = norm(spec.post, after_attention)
    has_own_norms = without_feedforward or isinstance(
      spec.feedforward, DenseAndExperts
    )
    self.pre_feedforward = norm(
      spec.pre and not spec.shared_norm and not has_own_norms
    )
    self.post_feedforward = norm(
      spec.post and not without_feedforward, after_feedforward
    )
    self.cross = (
      NoCrossAttention()
      if spec.cross is None
      else spec.cross.build(rngs, embed, spec)
    )

    layer_inputs = spec.inputs
    self.inputs = (
      None if layer_inputs is None else layer_inputs.gate(rngs, embed)
    )
    low_rank, streams = spec.low_rank, spec.streams
    self.low_rank = None if low_rank is None else low_rank.build(rngs, embed)
    self.streams = None if streams is None else streams.mixer(rngs, embed)
    assert not spec.parallel or spec.output_scale is not None
    self.attention_residual, self.feedforward_residual = (
      residual.build(rngs, embed) for residual in spec.residuals
    )
    has_scale = spec.learned_scale
    self.scale = param(rngs, (1,), (None,), value=1.0) if has_scale else None

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T *D"], Any]:
    """[B, T, D] -> [B, T, D], or [B, T, A, D] of streams; the layer's cache.

    For a layer with several mixers the cache is a tuple of theirs. `states` are
    those of an encoder, or None for no context; `number` is the layer's number
    in its model.
    """
    if self.streams is None:
      x, cache = self._parts(x, tokens, cache, attend, states)
      gate = x
    else:
      x = self.streams.predict(x)
      active = x[:, :, self.streams.spec.active]
      active, cache = self._parts(active, tokens, cache, attend, states)
      x = attend.constrain(self.streams.correct(x, active))
      gate = self.streams.active(x)
    if self.inputs is not None:
      assert tokens.inputs is not None
      layer_input = self.inputs(gate, tokens.inputs(number), attend)
      if self.streams is not None:
        padding = [(0, 0), (0, 0), (1, 0), (0, 0)]
        layer_input = jnp.broadcast_to(
          layer_input[:, :, None], (*x.shape[:2], x.shape[2] - 1, x.shape[3])
        )
        layer_input = jnp.pad(layer_input, padding)
      x = attend.constrain(x + layer_input)
    if self.scale is not None:
      scale = self.scale[...].astype(x.dtype)[None, None]
      x = by_tile(lambda x: x * scale, x)
    return x, cache

  def queries(
    self, x: Float[Array, "B T *D"], tokens: Tokens
  ) -> Float[Array, "B T N H"] | None:
    """Rotated queries of the layer if x were its input; None if it has none.

    Of the input of the layer before they are a guess, which decides what is
    copied early, and nothing else (InfiniGen, arXiv 2406.19707).
    """
    if type(self.attention) is not GroupedQuery or self.streams is not None:
      return None
    stream = x.dtype
    x, _ = self.attention_residual.begin(x)
    normed = self.pre_attention(x).astype(part_dtype(self, stream))
    return self.attention.queries(normed, tokens)

  def _parts(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None,
  ) -> tuple[jax.Array, Any]:
    """Run attention and feedforward."""
    spec = self.spec
    # Sums and norms use the stream's dtype, products the weights'.
    stream = x.dtype
    narrow = part_dtype(self, stream)
    stream_state: Any
    x, stream_state = self.attention_residual.begin(x)
    if spec.residuals[0].of_norm:
      x = stream_state = by_tile(self.pre_attention, x)
      normed = x.astype(narrow)
    else:
      normed = by_tile(lambda x: self.pre_attention(x).astype(narrow), x)
    # Each kind of mixer has its own kind of cache.
    mix: Any = self.attention
    mixed, cache = mix(normed, tokens, cache, attend)
    add_mixed = lambda x, y: self.attention_residual(
      x, self.post_attention(y.astype(stream))
    )
    if spec.parallel:
      h = normed if spec.shared_norm else by_tile(self.pre_feedforward, x)
      stream_state = self.cross(x, states, attend)
    else:
      x = by_tile(add_mixed, stream_state, mixed)
      if self.low_rank is not None:
        half = jnp.asarray(1 / math.sqrt(2), x.dtype)
        low_rank_residual = attend.rows(self.low_rank, normed).astype(stream)
        x = (x + low_rank_residual) * half
      x = self.cross(attend.constrain(x), states, attend)
      if isinstance(spec.feedforward, NoFeedforward):
        return x, cache
      h, stream_state = self.feedforward_residual.begin(x)
      h = by_tile(self.pre_feedforward, h)
      if spec.residuals[1].of_norm:
        stream_state = h
    if not isinstance(spec.feedforward, DenseAndExperts):
      # That one has its own norms before its products.
      h = h.astype(narrow)
    feedforward: Any = self.feedforward
    if isinstance(spec.feedforward, Experts | DenseAndExperts):
      by_ids = isinstance(spec.feedforward, Experts) and spec.feedforward.by_id
      ids = (tokens.ids,) if by_ids else ()
      h = feedforward(h, attend, tokens.record_of(RouterRecord), *ids)
    else:
      h = feedforward(h, attend)

    residual: Any = self.feedforward_residual

    def total(x: PyTree, mixed: jax.Array, h: jax.Array) -> jax.Array:
      if spec.parallel:
        x = add_mixed(x, mixed)
      return residual(x, self.post_feedforward(h.astype(stream)))

    return attend.constrain(by_tile(total, stream_state, mixed, h)), cache
