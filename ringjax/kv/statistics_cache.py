"""A cache that stores no keys, but statistics of the attention to them.

Guarantees: for each layer, statistics of chosen queries of a call over all of
its keys, with the layer's own mask, positions, soft cap, slopes and sinks;
latent attention in the form that a cache of latents has. The call's outputs are
those without a cache.
Cost: in each layer, attention of the chosen queries once more, see
`rj.attention_statistics`.
Memory: two float32 numbers for each layer, head and chosen query, and the
optional statistics.

Pass it as `cache=` to a model's call with `ContextParallel`. Recurrent layers
have no statistics, for they have no attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import KV, FreshLayer, NoCache
from ringjax.kv.layer_spec import LayerCacheSpec, by_model_layer, unstacked
from ringjax.kv.state import StateShape
from ringjax.ops.attention.api import attention_statistics
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import wide_dtype
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.nn.sharding_context import ContextParallel


@dataclasses.dataclass(frozen=True)
class StatisticsCache(NoCache):
  """Attention statistics of one call, for `cache=` of the model.

  Attributes:
    found: Statistics of each kind of layer, [L, ...]; () for recurrent layers.
    rows: Indices of the call's tokens that are the queries, int32 [B, M].
    keep: Tokens whose mass is measured, bool [B, T], or None.
    sinks: Attention sinks of each kind of layer, [L, N], or None.
    attend: The `ContextParallel` of the call, with its mesh and axis.
    shapes: `LayerCacheSpec` or `StateShape` of each kind of layer.
    columns: Whether the column mass is measured.
  """

  found: tuple[Any, ...]
  rows: Int[Array, "B M"]
  keep: Bool[Array, "B T"] | None
  sinks: tuple[Any, ...]
  attend: ContextParallel
  shapes: tuple[Any, ...]
  columns: bool

  @classmethod
  def create(
    cls,
    shapes: Sequence[Any],
    dtype: DTypeLike,
    rows: Int[Array, "B M"],
    tokens: int,
    *,
    keep: Bool[Array, "B T"] | None,
    columns: bool,
    sinks: Sequence[Any],
    attend: ContextParallel,
  ) -> StatisticsCache:
    """Allocate statistics for one call; other arguments as the attributes.

    Args:
      shapes: `model.kinds`.
      dtype: Dtype of the model's keys.
      rows: Indices of the queries among the tokens.
      tokens: Number of tokens of the call, T.

    Raises:
      OptionError: If layers read only some of so many keys.
    """
    batch, num_queries = rows.shape
    for shape in shapes:
      if isinstance(shape, StateShape) and shape.grows:
        raise OptionError(
          "model",
          "layers with compressed keys, which take part in the weights",
          "layers whose keys are single tokens",
          "use another model",
        )
      reading = getattr(shape, "reading", None)
      if reading is not None and not reading.plain:
        raise OptionError(
          "model",
          f"layers that add up several attentions ({reading.chooser} chooses "
          "their keys)",
          "layers with one attention",
          "use another model",
        )
      limit = None if reading is None else reading.most
      if reading is not None and limit is not None and limit < tokens:
        raise OptionError(
          "tokens",
          f"{tokens}, of which layers read the {limit} that "
          f"{reading.chooser} chooses",
          f"at most {limit}, which are all read",
          "pass a shorter text: statistics are of weights of all keys",
        )
    statistics_dtype = wide_dtype(dtype)

    def empty(shape: Any) -> PyTree:
      if not isinstance(shape, LayerCacheSpec):
        return ()
      assert shape.reading is not None
      heads = shape.heads * shape.reading.groups
      query_zeros, key_zeros = (
        jnp.zeros((shape.layers, batch, n, heads), statistics_dtype)
        for n in (num_queries, tokens)
      )
      return AttentionStatistics(
        query_zeros,
        query_zeros,
        None if keep is None else query_zeros,
        key_zeros if columns else None,
      )

    return cls(
      found=tuple(map(empty, shapes)),
      rows=rows,
      keep=keep,
      sinks=tuple(sinks),
      attend=attend,
      shapes=tuple(shapes),
      columns=columns,
    )

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.found

  @property
  def length(self) -> Int[Array, " B"]:
    return jnp.zeros(1, jnp.int32)

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> FreshLayer | StatisticsLayer:
    if not isinstance(self.shapes[kind], LayerCacheSpec):
      return FreshLayer()
    return StatisticsLayer(self, kind, slots, index)

  def updated(self, slots: tuple[Any, ...]) -> StatisticsCache:
    return dataclasses.replace(self, found=slots)

  def by_layer(self) -> tuple[AttentionStatistics | None, ...]:
    """Statistics of each layer of the model; None for recurrent layers."""
    by_kind = [
      unstacked(stacked, shape.layers)
      if isinstance(shape, LayerCacheSpec)
      else None
      for shape, stacked in zip(self.shapes, self.found, strict=True)
    ]
    return tuple(by_model_layer(self.shapes, by_kind))


tree.register(
  StatisticsCache,
  ("found", "rows", "keep", "sinks"),
  ("attend", "shapes", "columns"),
)


class StatisticsLayer(NamedTuple):
  """One layer's part of a `StatisticsCache` during one call.

  Fields:
    cache: Cache of the call.
    kind: Index of the layer's kind.
    slots: Statistics of all layers of this kind.
    index: Index of the layer within its kind.
    fresh: Keys and values of the call.
  """

  cache: StatisticsCache
  kind: int
  slots: PyTree
  index: Index
  fresh: KV | None = None

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> StatisticsLayer:
    return self._replace(fresh=KV(rotation.own(k), v, at))

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> StatisticsLayer:
    del plain
    assert self.fresh is not None
    cache, at = self.cache, self.fresh.at
    reading = cache.shapes[self.kind].reading
    select_layer = lambda x: lax.dynamic_index_in_dim(
      x, self.index, 0, keepdims=False
    )
    sinks, slopes = cache.sinks[self.kind], reading.slopes
    select_queries = lambda x: jnp.take_along_axis(x, cache.rows, 1)
    q = jnp.take_along_axis(rotated(), cache.rows[:, :, None, None], 1)
    statistics = attention_statistics(
      q,
      jnp.swapaxes(self.fresh.k, 1, 2),
      keep=cache.keep,
      columns=cache.columns,
      mask=reading.mask & cache.attend.segments,
      scale=reading.scores.scale,
      logits_soft_cap=reading.scores.soft_cap,
      alibi_slopes=None if slopes is None else jnp.asarray(slopes, jnp.float32),
      sinks=None if sinks is None else select_layer(sinks),
      q_positions=select_queries(at.pos),
      kv_positions=at.pos,
      q_segment_ids=select_queries(at.seg),
      kv_segment_ids=at.seg,
      mesh=cache.attend.mesh,
      axis=cache.attend.of_mesh,
    )
    put = lambda old, new: lax.dynamic_update_index_in_dim(
      old, new, self.index, 0
    )
    return self._replace(slots=jax.tree.map(put, self.slots, statistics))

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    del apart
    assert self.fresh is not None
    return (self.fresh.view(),)
