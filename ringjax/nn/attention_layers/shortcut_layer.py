"""Layers of two attentions whose experts are a shortcut past the second one.

Guarantees: with norms n and p, attentions A and dense feedforwards F a layer is

  y = x + A0(n0(x));  h = p0(y);  z = y + F0(h)
  u = z + A1(n1(z));  x' = u + F1(p1(u)) + E(h)

so the mixture of experts E reads what the first feedforward reads, and its
output is added at the end of the layer.
Cost: that of two layers with dense feedforwards, and of one mixture; rows may
travel to their experts while the second attention runs.
Ref:  Meituan LongCat Team 2025, LongCat-Flash, arXiv 2509.01322.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.encoder_states import EncoderStates
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.block import Block, Layer, PartOfCache
from ringjax.nn.feedforward import ShortcutFeedforward, ShortcutFeedforwards
from ringjax.nn.linear import part_dtype
from ringjax.nn.sharding_context import Attend
from ringjax.nn.sums.router_sums import RouterRecord
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortcutLayer(Layer):
  """A layer of two attentions with a shortcut of experts.

  Attributes:
    attention: Both attentions, each with its own weights and cache.
    feedforward: Feedforwards of the layer.
  """

  attention: Latent
  feedforward: ShortcutFeedforward

  @property
  def mixers(self) -> tuple[Latent, Latent]:
    """Both attentions, each of which keeps keys in a cache."""
    return self.attention, self.attention

  @property
  def pair_flops(self) -> int:
    """FLOPs per query and key of both attentions."""
    return 2 * self.attention.pair_flops

  def build(self, rngs: nnx.Rngs, embed: int) -> ShortcutBlock:
    return ShortcutBlock(rngs, self, embed)


class ShortcutBlock(Block):
  """The module of `ShortcutLayer`: of each part but the experts it has two."""

  def __init__(self, rngs: nnx.Rngs, spec: ShortcutLayer, embed: int):
    twice = lambda part: nnx.List([part.build(rngs, embed) for _ in range(2)])
    parts: Any = self
    parts.spec = spec
    parts.attention = twice(spec.attention)
    parts.feedforward = spec.feedforward.build(rngs, embed)
    parts.pre_attention = twice(spec.norm)
    parts.pre_feedforward = twice(spec.norm)

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T *D"], Any]:
    """[B, T, D] -> [B, T, D], and the caches of both attentions."""
    assert states is None
    assert isinstance(cache, tuple)
    del number
    stream, feed = x.dtype, cast(ShortcutFeedforwards, self.feedforward)
    first, second = cache
    x, h, first = self._attended(0, x, tokens, first, attend)
    shortcut = feed.sparse(h, attend, tokens.record_of(RouterRecord))
    x = attend.constrain(x + feed.dense[0](h, attend).astype(stream))
    x, h, second = self._attended(1, x, tokens, second, attend)
    x = x + feed.dense[1](h, attend).astype(stream)
    return attend.constrain(x + shortcut.astype(stream)), (first, second)

  def _attended(
    self,
    number: int,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: Any,
    attend: Attend,
  ) -> tuple[jax.Array, jax.Array, Any]:
    """Run one attention.

    Returns:
      The stream, the input of the feedforward, and the attention's cache.
    """
    # Sums and norms use the stream's dtype, products the weights'.
    parts: Any = self
    narrow = part_dtype(self, x.dtype)
    normed = parts.pre_attention[number](x).astype(narrow)
    mixed, cache = parts.attention[number](normed, tokens, cache, attend)
    x = attend.constrain(x + mixed.astype(x.dtype))
    return x, parts.pre_feedforward[number](x).astype(narrow), cache
