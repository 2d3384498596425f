"""Grouped-query attention to the blocks that an index chooses (MiniMax-M3).

Guarantees: the query heads of a kv head read the same blocks: the last ones up
to their own, and those whose best key has the best score of the index's query
for that kv head. With as many blocks as there are it is plain attention. A
cache has the index's keys beside the layer's, one head of E numbers a token,
rotated as the layer's keys are. Blocks begin at multiples of their size, in a
row of packed documents at those of the row.
Cost: K queries and one key of E numbers per token, and the products with the
chosen keys. A few queries read these alone from a cache, see `reads_fewer`;
more of them read all keys, masked.
Training: no gradient flows through a choice: an index learns from
`rj.index_loss`, by the mass of a kv head's attention on the blocks before the
local ones. Its scores, which have no scale, are divided there by sqrt(E).
Ref:  MiniMax 2026, MiniMax-M3 (MSA).
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.nn.attention_layers.attention import GroupedQuery
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  ChoosingAttention,
)
from ringjax.nn.attention_layers.choosing.indexed_attention import IndexKeys
from ringjax.nn.linear import Linear, Norm
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.index_block_reading import IndexBlockReading


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyBlockIndex:
  """An index of blocks, with a query for each kv head of its layer.

  Attributes:
    dim: Size of its queries and keys, E.
    block: Number of positions of a block.
    count: Most blocks that a query reads, the local ones among them.
    local: Number of blocks, up to the query's own, that are always read.
    norm: Norm of its queries and keys.
  """

  dim: int
  block: int
  count: int
  local: int
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int, heads: int) -> KeyBlockIndexLayer:
    """Make the module of a layer with a number of kv heads."""
    return KeyBlockIndexLayer(rngs, self, embed, heads)


class KeyBlockIndexLayer(nnx.Module):
  """The module of `KeyBlockIndex`."""

  def __init__(
    self, rngs: nnx.Rngs, spec: KeyBlockIndex, embed: int, heads: int
  ):
    self.spec = spec
    self.q = Linear(rngs, (embed,), (heads, spec.dim), ("embed", None, None))
    self.k = Linear(rngs, (embed,), (spec.dim,), ("embed", None))
    self.q_norm = spec.norm.build(rngs, spec.dim)
    self.k_norm = spec.norm.build(rngs, spec.dim)

  def __call__(
    self, x: Float[Array, "B T D"]
  ) -> tuple[Float[Array, "B T K E"], Float[Array, "B T E"]]:
    """Queries and keys before their rotation."""
    x = jax.lax.stop_gradient(x)
    return self.q_norm(self.q(x)), self.k_norm(self.k(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexBlockAttention(ChoosingAttention):
  """Attention of one layer to the blocks that an index chooses.

  Attributes:
    index: Index of the layer.
  """

  index: KeyBlockIndex

  @property
  def index_keys(self) -> IndexKeys:
    """Keys of the index, which a cache keeps beside the layer's."""
    return IndexKeys(
      heads=self.kv_heads, dim=self.index.dim, rope=self.rope, mask=self.mask
    )

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    key_limit = self.index.block * self.index.count
    reading = dataclasses.replace(shape.reading, most=key_limit)
    return dataclasses.replace(shape, reading=reading)

  def build(self, rngs: nnx.Rngs, embed: int) -> IndexBlockQuery:
    return IndexBlockQuery(rngs, self, embed)


class IndexBlockQuery(GroupedQuery):
  """The module of `IndexBlockAttention`."""

  def __init__(self, rngs: nnx.Rngs, spec: IndexBlockAttention, embed: int):
    super().__init__(rngs, spec, embed)
    self.index = spec.index.build(rngs, embed, spec.kv_heads)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, LayerCache],
    attend: Attend,
  ) -> tuple[Float[Array, "B T _"], tuple[LayerCache, LayerCache]]:
    """[B, T, D] and the layer's caches, of its keys and of the index's."""
    keys, index_keys = cache
    rope, index = self.spec.rope, self.index.spec
    (q, k, v), (index_q, new_keys) = attend.rows(
      lambda x: (self._maps(x), self.index(x)), x
    )
    row = new_keys[:, None]
    index_keys = index_keys.append(
      row, row[..., :0], tokens.at, tokens.rotation(rope)
    )
    reading = IndexBlockReading(
      q=tokens.rotate(rope, index_q),
      count=index.count,
      block=index.block,
      local=index.local,
    )
    if attend.resident:
      views = index_keys.views(apart=tokens.tree is not None)
      views = tuple(view.keys_alone() for view in views)
      reading = dataclasses.replace(reading, views=views)
    else:
      assert index_keys.fresh is not None
      fresh_keys = index_keys.fresh.k[:, 0]
      reading = dataclasses.replace(reading, keys=fresh_keys)
    out, keys = self._mixed(q, k, v, tokens, keys, attend, reading)
    return self._projected(x, out, attend), (keys, index_keys)
