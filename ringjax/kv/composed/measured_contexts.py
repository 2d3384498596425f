"""A cache after contexts that records statistics of the attention to them.

Guarantees: for each layer, statistics of a call's queries over contexts, prefix
and question, weighed and selected as in the call itself. The call's outputs are
those with a `ContextCache`.
Cost: the attention of the call once more, see `view_statistics`.
Memory: three float32 numbers for each layer, head and query.

On one device, of models without recurrent layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from ringjax import tree
from ringjax.kv.composed.context_cache import ContextCache, ContextLayer
from ringjax.kv.layer_spec import LayerCacheSpec, by_model_layer, unstacked
from ringjax.ops.attention.cached.cached_attention import CacheVisit
from ringjax.ops.attention.cached.view_statistics import view_statistics
from ringjax.ops.attention.scores import Terms
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.softmax import wide_dtype
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredContexts(ContextCache):
  """A `ContextCache` for one call, with its attention statistics.

  Attributes:
    found: Statistics of each kind of layer, [L, B, T, N].
    sinks: Attention sinks of each kind of layer, [L, N], or None.
    before: Position; the kept mass is that of the keys before it.
  """

  found: tuple[Any, ...]
  sinks: tuple[Any, ...]
  before: int
  layer_fields: ClassVar[tuple[str, ...]] = ("found",)

  @classmethod
  def of(
    cls, cache: ContextCache, tokens: int, sinks: Sequence[Any], before: int
  ) -> MeasuredContexts:
    """Copy a cache and allocate statistics for one call.

    Args:
      cache: Cache on one device, without recurrent layers.
      tokens: Number of tokens of the call, T.
      sinks: Attention sinks of each kind of layer, [L, N], or None.
      before: Position before which keys count for the kept mass.
    """

    def empty(shape: Any) -> AttentionStatistics:
      assert isinstance(shape, LayerCacheSpec)
      assert shape.reading is not None
      heads = shape.heads * shape.reading.groups
      zeros = jnp.zeros(
        (shape.layers, cache.batch, tokens, heads), wide_dtype(cache.dtype)
      )
      return AttentionStatistics(zeros, zeros, zeros)

    copied = jax.tree.map(jnp.copy, cache)
    return cls(
      open=copied.open,
      kind=cache.kind,
      limit=cache.limit,
      contexts=copied.contexts,
      weigh=copied.weigh,
      found=tuple(map(empty, cache.shapes)),
      sinks=tuple(sinks),
      before=before,
    )

  def layer(self, kind: int, slots: PyTree, index: Index) -> MeasuredLayer:
    stored, statistics = slots
    inner = self.open.layer(kind, stored, index)
    return MeasuredLayer(self, inner, kind, index, statistics)

  def by_layer(self) -> tuple[AttentionStatistics | None, ...]:
    """Statistics of each layer of the model; None for layers without keys."""
    by_kind = [
      unstacked(stacked, shape.layers)
      for shape, stacked in zip(self.shapes, self.found, strict=True)
    ]
    return tuple(by_model_layer(self.shapes, by_kind))


tree.register(
  MeasuredContexts,
  ("open", "contexts", "weigh", "found", "sinks"),
  ("kind", "limit", "before"),
)


@dataclasses.dataclass(frozen=True)
class MeasuredLayer(ContextLayer):
  """One layer's part of a `MeasuredContexts` during one call.

  Attributes:
    found: Statistics of all layers of this kind.
  """

  found: AttentionStatistics

  @property
  def slots(self) -> Any:
    return self.inner.slots, self.found

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> MeasuredLayer:
    del plain
    cache: Any = self.cache
    views, at = self.views(), self.inner.fresh.at
    reading, sinks = cache.shapes[self.kind].reading, cache.sinks[self.kind]
    q = rotated()
    b, t, n, h = q.shape
    heads = views[0].shape[1]
    by_kv_head = lambda x: jnp.asarray(x, jnp.float32).reshape(heads, -1)
    visit = CacheVisit(
      q=jnp.transpose(q.reshape(b, t, heads, n // heads, h), (0, 2, 3, 1, 4)),
      at=at,
      terms=Terms(
        slopes=None if reading.slopes is None else by_kv_head(reading.slopes)
      ),
      mask=reading.mask,
      scores=reading.scores,
      local=None,
      decoder=None,
      few=0,
    )
    if sinks is not None:
      sinks = by_kv_head(lax.dynamic_index_in_dim(sinks, self.index, 0, False))
    statistics = view_statistics(visit, views, sinks, cache.before)
    put = lambda old, new: lax.dynamic_update_index_in_dim(
      old, new.astype(old.dtype), self.index, 0
    )
    return dataclasses.replace(
      self, found=jax.tree.map(put, self.found, statistics)
    )
