"""Grouped-query attention whose queries read the keys that an index chooses.

Guarantees: all heads of a layer read the same keys, those with the best scores
of its index; with as many keys as there are it is plain attention. A cache has
the index's keys beside the layer's, one head of E numbers a token, rotated as
the layer's keys are.
Cost: `KeyIndex`, and the products with the chosen keys. A few queries read
these alone from a cache, see `reads_fewer`; more of them read all keys, masked.
Ref:  DeepSeek-AI 2025, DeepSeek-V3.2-Exp, whose attention has latents.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.query_reading import KeyReading
from ringjax.nn.attention_layers.attention import GroupedQuery
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  ChoosingAttention,
)
from ringjax.nn.attention_layers.key_index import KeyIndex
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.selection import KeySelection
from ringjax.ops.attention.scores import Scores
from ringjax.ops.mask import Causal, Mask
from ringjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexKeys:
  """Keys of an index, as a mixer that a cache keeps.

  Attributes:
    heads: Number of the index's query heads, I.
    dim: Size of a key, E.
    rope: Rotation of the keys, or None.
    mask: Mask between queries and keys.
  """

  heads: int
  dim: int
  rope: Rope | None
  mask: Mask = Causal()
  kv_heads = 1

  @property
  def reach(self) -> int | None:
    """Number of tokens that a query looks back; None: all."""
    return self.mask.reach[0]

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    """Shape of what `layers` of this kind keep for a token."""
    return LayerCacheSpec(
      layers,
      1,
      self.dim,
      0,
      reading=KeyReading(
        groups=self.heads,
        scores=Scores(scale=self.dim**-0.5),
        mask=self.mask,
        rope=self.rope,
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedAttention(ChoosingAttention):
  """Attention of one layer to the keys that an index chooses.

  Attributes:
    index: Index of the layer.
  """

  index: KeyIndex

  @classmethod
  def of(
    cls, attention: object, *, heads: int, dim: int, count: int
  ) -> IndexedAttention:
    """Add an index to a layer.

    Args:
      attention: `Attention` whose queries see all keys before them.
      heads: Number of the index's query heads.
      dim: Size of the index's keys; the layer's rotation must fit into it.
      count: Most keys that a query reads.

    Raises:
      OptionError: If the layer cannot choose its keys, or the index is
        narrower than its rotation.
    """
    fields = cls.fields_of(attention)
    rope = fields["rope"]
    if rope is not None and dim < rope.dims:
      raise OptionError(
        "sparse_attention.dim",
        f"{dim} for layers that rotate {rope.dims} dims",
        f"at least {rope.dims}, to which the index's keys are rotated, too",
        f"pass dim={rope.dims}",
      )
    index = KeyIndex(
      heads=heads,
      dim=dim,
      count=count,
      interleaved=rope is not None and rope.interleaved,
    )
    return cls(**fields, index=index)

  @property
  def index_keys(self) -> IndexKeys:
    """Keys of the index, which a cache keeps beside the layer's."""
    return IndexKeys(
      heads=self.index.heads,
      dim=self.index.dim,
      rope=self.rope,
      mask=self.mask,
    )

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    reading = dataclasses.replace(shape.reading, most=self.index.count)
    return dataclasses.replace(shape, reading=reading)

  def build(self, rngs: nnx.Rngs, embed: int) -> IndexedQuery:
    return IndexedQuery(rngs, self, embed)


class IndexedQuery(GroupedQuery):
  """The module of `IndexedAttention`."""

  def __init__(self, rngs: nnx.Rngs, spec: IndexedAttention, embed: int):
    super().__init__(rngs, spec, embed)
    self.index = spec.index.build(rngs, embed, embed, spec.rope)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, LayerCache],
    attend: Attend,
  ) -> tuple[Float[Array, "B T _"], tuple[LayerCache, LayerCache]]:
    """[B, T, D] and the layer's caches, of its keys and of the index's."""
    keys, index_keys = cache
    rope = self.spec.rope
    (q, k, v), index_q, weights, new_keys = attend.rows(self._indexed_maps, x)
    row = new_keys[:, None]
    index_keys = index_keys.append(
      row, row[..., :0], tokens.at, tokens.rotation(rope)
    )
    selection = KeySelection(
      q=tokens.rotate(rope, index_q),
      weights=weights,
      count=self.index.spec.count,
      first=0,
    )
    if attend.resident:
      views = index_keys.views(apart=tokens.tree is not None)
      selection = dataclasses.replace(
        selection, views=tuple(view.keys_alone() for view in views)
      )
    else:
      assert index_keys.fresh is not None
      fresh_keys = index_keys.fresh.k[:, 0]
      selection = dataclasses.replace(selection, keys=fresh_keys)
    out, keys = self._mixed(q, k, v, tokens, keys, attend, selection)
    return self._projected(x, out, attend), (keys, index_keys)

  def _indexed_maps(self, x: Float[Array, "B T D"]) -> tuple[Any, ...]:
    """Project to queries, keys and values, and to those of the index."""
    index = self.index
    return self._maps(x), *index.queries(x, x), index.keys(x)
