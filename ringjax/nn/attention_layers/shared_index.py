"""Layers that read the keys that the index of an earlier layer chose.

Guarantees: a layer without an index chooses as the last layer before it that
has one, on all layouts, shards and caches: an index's queries, weights and keys
go from layer to layer next to the residual stream, as further numbers of each
token. They are rounded to the stream's dtype for both layers.
Cost: no maps and no weights of an index in such a layer. It keeps a copy of the
index's keys in its cache, and scores them again.
Memory: I (E + 1) + E further numbers per token between layers, of I heads of E
numbers.
Ref:  IndexCache 2026, arXiv 2603.12201.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.encoder_states import EncoderStates
from ringjax.nn.attention_layers.key_index import KeyIndex
from ringjax.nn.block import Block, Layer, PartOfCache
from ringjax.nn.sharding_context import Attend
from ringjax.nn.streams import HyperStreams
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexStream:
  """Residual stream with room for what layers hand on of an index.

  Attributes:
    index: Index of the layers that have one.
    streams: Hyper-connected residual streams, or None for one stream.
  """

  index: KeyIndex
  streams: HyperStreams | None = None

  def build(self, rngs: nnx.Rngs, embed: int) -> IndexStreamEnds:
    """Make the module of the stream's ends."""
    return IndexStreamEnds(rngs, self, embed)

  def numbers(self, embed: int) -> int:
    """Numbers of a token between layers."""
    streams = self.streams
    width = embed if streams is None else streams.numbers(embed)
    return width + self.index.handed


class IndexStreamEnds(nnx.Module):
  """The module of `IndexStream`: the start and the end of the stream."""

  def __init__(self, rngs: nnx.Rngs, spec: IndexStream, embed: int):
    self.spec, self.embed = spec, embed
    streams = spec.streams
    self.streams = None if streams is None else streams.build(rngs, embed)

  def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
    """Widen embeddings, or their streams, by zeros, which no layer reads."""
    if self.streams is not None:
      x = self.streams.spread(x).reshape(*x.shape[:2], -1)
    return jnp.pad(x, [(0, 0), (0, 0), (0, self.spec.index.handed)])

  def merged(self, x: Float[Array, "*b W"]) -> Float[Array, "*b D"]:
    """Residual stream alone, or the weighted sum of the streams."""
    x = x[..., : x.shape[-1] - self.spec.index.handed]
    if self.streams is None:
      return x
    return self.streams.merged(x.reshape(*x.shape[:-1], -1, self.embed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexSharingLayer(Layer):
  """A layer that hands on what its index, or that of an earlier one, has.

  Attributes:
    count: Number of hyper-connected streams, which its residuals read; 0 for
      one stream.
  """

  count: int = 0

  def build(self, rngs: nnx.Rngs, embed: int) -> IndexSharingBlock:
    return IndexSharingBlock(rngs, self, embed)


class IndexSharingBlock(Block):
  """The module of `IndexSharingLayer`."""

  def __init__(self, rngs: nnx.Rngs, spec: IndexSharingLayer, embed: int):
    super().__init__(rngs, spec, embed)
    self.embed, self.count = embed, spec.count

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T *D"], Any]:
    """[B, T, D + n] -> the same of the next layer, and the layer's cache."""
    width = self.embed * max(1, self.count)
    tokens = tokens.handing(x[..., width:])
    x = x[..., :width]
    if self.count:
      x = x.reshape(*x.shape[:2], self.count, self.embed)
    x, cache = super().__call__(x, tokens, cache, attend, states, number)
    assert tokens.handed is not None
    x = x.reshape(*x.shape[:2], width)
    x = jnp.concatenate([x, tokens.handed.astype(x.dtype)], -1)
    return attend.constrain(x), cache
