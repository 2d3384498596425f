"""Grouped-query attention to the blocks with the best mean keys (MoBA).

Guarantees: each query head reads its own block and the earlier blocks whose
mean keys score best; there are no further weights. With as many blocks as there
are it is plain attention. Blocks begin at multiples of their size, in a row of
packed documents at those of the row.
Ref:  Lu et al. 2025, MoBA, arXiv 2502.13189.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  SummaryAttention,
  SummaryQuery,
  refuse_tree,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.block_reading import BlockReading
from ringjax.ops.attention.cached.summaries.window_sums import WindowSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockAttention(SummaryAttention):
  """Attention of one layer to blocks of keys that each query head chooses.

  Attributes:
    block: Number of positions of a block.
    count: Most blocks that a query reads, its own among them.
  """

  block: int
  count: int

  @classmethod
  def of(cls, attention: object, *, block: int, count: int) -> BlockAttention:
    """Let a layer choose blocks.

    Args:
      attention: `Attention` whose queries see all keys before them.
      block: Number of positions of a block.
      count: Most blocks that a query reads, its own among them.

    Raises:
      OptionError: If the layer cannot choose its keys.
    """
    return cls(**cls.fields_of(attention), block=block, count=count)

  @property
  def windows(self) -> WindowSizes:
    return WindowSizes(self.block, self.block)

  @property
  def summarizes_values(self) -> bool:
    return False

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    key_limit = self.block * self.count
    reading = dataclasses.replace(
      shape.reading, most=key_limit, chooser="each head, by blocks' mean keys,"
    )
    return dataclasses.replace(shape, reading=reading)

  def build(self, rngs: nnx.Rngs, embed: int) -> BlockQuery:
    return BlockQuery(rngs, self, embed)


class BlockQuery(SummaryQuery):
  """The module of `BlockAttention`."""

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, Any],
    attend: Attend,
  ) -> tuple[Float[Array, "B T _"], tuple[LayerCache, Any]]:
    """[B, T, D] and the layer's caches: of its keys and of their means."""
    spec: Any = self.spec
    refuse_tree(tokens)
    q, k, v = attend.rows(self._maps, x)
    q, cache, means = self._appended_with_summaries(
      q, k, v, tokens, cache, attend
    )
    reading = BlockReading(count=spec.count, block=spec.block, summaries=means)
    out = self._seen(q, tokens, cache[0], attend, reading)
    return self._projected(x, out, attend), cache
