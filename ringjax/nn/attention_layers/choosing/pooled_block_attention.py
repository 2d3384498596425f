"""Grouped-query attention to the blocks whose mean index key is best (Qwen4).

Guarantees: all heads read the same tokens: those of the blocks whose mean key
of the index, normed and rotated by the position of the block's first token, has
the best score; and those of a query's own block up to itself, if it has not
ended. With as many blocks as there are it is plain attention. A cache has the
index's keys beside the layer's, one head of E numbers a token, before norm and
rotation. Blocks begin at multiples of their size, in a row of packed documents
at those of the row.
Cost: I queries and one key of E numbers per token, one mean per block, which a
cache keeps once the block has ended, and the products with the chosen keys. A
few queries read these alone from a cache, see `reads_fewer`.
Training: no gradient flows through a choice: an index learns from
`rj.index_loss`, by attention's mass on the blocks that have ended. Its scores,
which have no scale, are divided there by the root of their I E products.
Ref:  Qwen Team 2026, Qwen4-Exp.
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
from ringjax.nn.attention_layers.attention import GroupedQuery
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  ChoosingAttention,
  appended_summaries,
  index_summaries,
  refuse_tree,
)
from ringjax.nn.attention_layers.choosing.indexed_attention import IndexKeys
from ringjax.nn.linear import Linear, Norm
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.index_block_reading import PooledBlockReading


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanBlockIndex:
  """An index of blocks by the means of their keys.

  Attributes:
    heads: Number of its query heads, I; they share the keys.
    dim: Size of its queries and keys, E.
    block: Number of positions of a block.
    count: Most blocks that a query reads, besides its own that has not ended.
    norm: Norm of its queries and of mean keys, an RMSNorm with a weight.
  """

  heads: int
  dim: int
  block: int
  count: int
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int) -> MeanBlockIndexLayer:
    return MeanBlockIndexLayer(rngs, self, embed)


class MeanBlockIndexLayer(nnx.Module):
  """The module of `MeanBlockIndex`."""

  def __init__(self, rngs: nnx.Rngs, spec: MeanBlockIndex, embed: int):
    self.spec = spec
    into = lambda shape, *axes: Linear(rngs, (embed,), shape, ("embed", *axes))
    self.q = into((spec.heads, spec.dim), None, None)
    self.k = into((spec.dim,), None)
    self.q_norm = spec.norm.build(rngs, spec.dim)
    self.k_norm = spec.norm.build(rngs, spec.dim)

  def __call__(
    self, x: Float[Array, "B T D"]
  ) -> tuple[Float[Array, "B T I E"], Float[Array, "B T E"]]:
    """Queries before their rotation, and keys before their norm."""
    x = jax.lax.stop_gradient(x)
    return self.q_norm(self.q(x)), self.k(x)

  @property
  def norm_weight(self) -> Float[Array, " E"]:
    """Factor of each dim of a normed mean key."""
    norm: Any = self.k_norm
    weight = norm.weight[...]
    return weight.astype(jnp.float32) + jnp.float32(norm.offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledBlockAttention(ChoosingAttention):
  """Attention of one layer to the blocks with the best mean index keys.

  Attributes:
    index: Index of the layer.
  """

  index: MeanBlockIndex

  @property
  def index_keys(self) -> IndexKeys:
    """Keys of the index, which a cache keeps beside the layer's."""
    return IndexKeys(
      heads=self.index.heads, dim=self.index.dim, rope=None, mask=self.mask
    )

  @property
  def summaries(self) -> KeySummaries:
    """Mean keys, which a cache keeps once their block has ended."""
    return index_summaries(self.index.dim, self.index.block)

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    key_limit = self.index.block * (self.index.count + 1)
    reading = dataclasses.replace(shape.reading, most=key_limit)
    return dataclasses.replace(shape, reading=reading)

  def build(self, rngs: nnx.Rngs, embed: int) -> PooledBlockQuery:
    return PooledBlockQuery(rngs, self, embed)


class PooledBlockQuery(GroupedQuery):
  """The module of `PooledBlockAttention`."""

  def __init__(self, rngs: nnx.Rngs, spec: PooledBlockAttention, embed: int):
    super().__init__(rngs, spec, embed)
    self.index = spec.index.build(rngs, embed)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, LayerCache, Any],
    attend: Attend,
  ) -> tuple[Float[Array, "B T _"], tuple[LayerCache, LayerCache, Any]]:
    """[B, T, D] and the layer's caches: keys, index keys and their means."""
    refuse_tree(tokens)
    keys, index_keys, summaries = cache
    rope, index = self.spec.rope, self.index.spec
    (q, k, v), (index_q, new_keys) = attend.rows(
      lambda x: (self._maps(x), self.index(x)), x
    )
    row = new_keys[:, None]
    index_keys = index_keys.append(
      row, row[..., :0], tokens.at, tokens.rotation(None)
    )
    summaries, means = appended_summaries(summaries, index_keys, tokens, attend)
    reading = PooledBlockReading(
      q=tokens.rotate(rope, index_q),
      weights=jnp.ones(index_q.shape[:3], jnp.float32),
      bias=jnp.zeros((index.block, index.dim), jnp.float32),
      count=index.count,
      block=index.block,
      norm=self.index.norm_weight,
      eps=index.norm.eps,
      rope=rope,
      scale=(index.heads * index.dim) ** -0.5,
    )
    if not attend.resident:
      assert index_keys.fresh is not None
      fresh_keys = index_keys.fresh.k[:, 0]
      # Packed documents have positions of their own.
      reading = dataclasses.replace(
        reading,
        keys=fresh_keys,
        positions=None if rope is None else tokens.pos,
      )
    else:
      if means is None:
        views = tuple(view.keys_alone() for view in index_keys.views())
        reading = dataclasses.replace(reading, views=views)
      else:
        reading = dataclasses.replace(reading, summaries=means)
      reading = jax.lax.stop_gradient(reading)
    out, keys = self._mixed(q, k, v, tokens, keys, attend, reading)
    return self._projected(x, out, attend), (keys, index_keys, summaries)
