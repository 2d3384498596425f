"""Latent attention to the blocks of tokens that an index chooses (GLM-5.3).

Guarantees: all heads read the same tokens: those of the blocks whose pooled key
has the best score of the index, and those of a query's own block up to itself.
With as many blocks as there are it is plain latent attention. A cache has the
index's keys and gates beside the latents. Blocks begin at multiples of their
size, in a row of packed documents at those of the row.
Cost: a map of the queries' latent to I heads of E numbers, and two maps to E
numbers per token. A cache keeps the pooled key of each block that has ended, so
that a call reads the keys and gates of the blocks that it ends, and the pooled
keys; a few queries then read the latents of their blocks alone, see
`reads_fewer`.
Training: no gradient flows through a choice: an index learns from
`rj.index_loss`, by attention's mass on the blocks that have ended.
Ref:  Zhipu AI 2026, GLM-5.3-Flash.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.summaries.summary_spec import KeySummaries
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  appended_summaries,
  index_summaries,
  refuse_tree,
)
from ringjax.nn.attention_layers.choosing.indexed_attention import IndexKeys
from ringjax.nn.attention_layers.key_index import KeyIndex, KeyIndexLayer
from ringjax.nn.attention_layers.latent import Latent, LatentLayer
from ringjax.nn.param import param
from ringjax.nn.row_tiles import by_tile
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.index_block_reading import PooledBlockReading
from ringjax.ops.attention.cached.summaries.window_sums import PoolingGates
from ringjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledIndex(KeyIndex):
  """An index of blocks of tokens; `count` tokens are those of whole blocks.

  Attributes:
    block: Number of tokens of a block, a divisor of `count`.
  """

  block: int

  def build(
    self, rngs: nnx.Rngs, embed: int, query: int, rope: Rope | None
  ) -> PooledIndexLayer:
    return PooledIndexLayer(rngs, self, embed, query, rope)


class PooledIndexLayer(KeyIndexLayer):
  """The module of `PooledIndex`."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    spec: PooledIndex,
    embed: int,
    query: int,
    rope: Rope | None,
  ):
    super().__init__(rngs, spec, embed, query, rope)
    self.gate = param(rngs, (spec.dim, embed), (None, "embed"), fan_in=embed)
    self.bias = param(rngs, (spec.block, spec.dim), (None, None), value=0.0)

  def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T X"]:
    """Keys and, after them, their gates, [B, T, 2 E]."""
    x = jax.lax.stop_gradient(x)
    gates = jnp.einsum(
      "btd,ed->bte",
      x,
      self.gate[...].astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    return jnp.concatenate([super().keys(x), gates], -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledLatent(Latent):
  """Latent attention of one layer to the blocks that an index chooses.

  Attributes:
    pooled: Index of the layer, without a rotation.
  """

  pooled: PooledIndex

  @property
  def index_keys(self) -> IndexKeys:
    """Keys and gates of the index, which a cache keeps beside the latents."""
    index = self.pooled
    return IndexKeys(
      heads=index.heads, dim=2 * index.dim, rope=None, mask=self.mask
    )

  @property
  def summaries(self) -> KeySummaries:
    """Pooled keys, which a cache keeps once their block has ended."""
    return index_summaries(self.pooled.dim, self.pooled.block)

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    key_limit = self.pooled.count + self.pooled.block
    reading = dataclasses.replace(shape.reading, most=key_limit)
    return dataclasses.replace(shape, reading=reading)

  def build(self, rngs: nnx.Rngs, embed: int) -> PooledLatentLayer:
    return PooledLatentLayer(rngs, self, embed)


class PooledLatentLayer(LatentLayer):
  """The module of `PooledLatent`."""

  def _index(self, rngs: nnx.Rngs, embed: int, query: int) -> PooledIndexLayer:
    spec: Any = self.spec
    return spec.pooled.build(rngs, embed, query, None)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, LayerCache, Any],
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, LayerCache, Any]]:
    """[B, T, D] and the layer's caches: latents, index keys and pooled keys."""
    refuse_tree(tokens)
    latents, index_keys, summaries = cache
    q, row, (index_q, weights, new_keys) = attend.rows(self._all_maps, x)
    packed = new_keys[:, None]
    index_keys = index_keys.append(
      packed, packed[..., :0], tokens.at, tokens.rotation(None)
    )
    index: Any = self.index
    summaries, pooled = appended_summaries(
      summaries, index_keys, tokens, attend, PoolingGates(index.bias[...])
    )
    choice = PooledBlockReading(
      q=index_q,
      weights=weights,
      bias=index.bias[...],
      count=index.spec.count // index.spec.block,
      block=index.spec.block,
    )
    if not attend.resident:
      assert index_keys.fresh is not None
      fresh_keys = index_keys.fresh.k[:, 0]
      choice = dataclasses.replace(choice, keys=fresh_keys)
    else:
      if pooled is None:
        views = tuple(view.keys_alone() for view in index_keys.views())
        choice = dataclasses.replace(choice, views=views)
      else:
        choice = dataclasses.replace(choice, summaries=pooled)
      choice = jax.lax.stop_gradient(choice)
    out, latents = self._mixed(q, row, (), tokens, latents, attend, choice)
    return attend.rows(self.o, out), (latents, index_keys, summaries)

  def _all_maps(self, x: Float[Array, "B T D"]) -> tuple[Any, ...]:
    """Queries, latents, and the index's queries, weights, and keys."""
    latent = by_tile(self.q_norm, self.q_down(x))
    index: Any = self.index
    index_parts = *index.queries(x, latent), index.keys(x)
    return self.q(latent), self.kv_down(x), index_parts
