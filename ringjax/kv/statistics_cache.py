"""A cache that keeps no keys but statistics of the attention to them.

Guarantees: of each layer the statistics of chosen queries of a call over all of
its keys, as the layer's own mask, positions, soft cap, slopes and sinks have
it; latent attention in the form that a cache of latents has. The call itself is
that without a cache.
Cost: beside each layer's attention that of the chosen queries, see
`rj.attention_statistics`.
Memory: two float32 numbers for each layer, head and chosen query, and what else
is asked for.

As `cache=` of a model's call with `ContextParallel`. Recurrent layers, which
attend to nothing, have none.
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
from ringjax.kv.cache import model_layers
from ringjax.kv.state import StateShape
from ringjax.ops.attention.api import attention_statistics
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.attention.views import KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import wide_dtype
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.nn.sharding_context import ContextParallel


@dataclasses.dataclass(frozen=True)
class StatisticsCache(NoCache):
  """What a call leaves of its attention.

  Attributes:
    found: for each kind of layer its statistics, [L, ...]; () for recurrent
      layers.
    rows: int32 [B, M], which of the call's tokens are the queries.
    keep: bool [B, T], tokens whose mass is found, or None.
    sinks: for each kind of layer [L, N], or None.
    attend: the `ContextParallel` of the call, with its mesh and axis.
    shapes: what each kind of layer keeps of a token.
    columns: whether the column mass is found.
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
    """For one call of `tokens` tokens, T.

    Args:
      shapes: `model.kinds`.
      dtype: of the model's keys.
      rows: the queries.
      tokens: T.
      keep: see the attributes, as the others.

    Raises:
      OptionError: layers that read only some of so many keys.
    """
    batch, many = rows.shape
    for shape in shapes:
      most = getattr(getattr(shape, "reading", None), "most", None)
      if most is not None and most < tokens:
        raise OptionError(
          "tokens",
          f"{tokens}, of which layers read the {most} that an index chooses",
          f"at most {most}, which are all read",
          "pass a shorter text: statistics are of weights of all keys",
        )
    wide = wide_dtype(dtype)

    def empty(shape: Any) -> PyTree:
      if isinstance(shape, StateShape):
        return ()
      heads = shape.heads * shape.reading.groups
      of_rows, of_keys = (
        jnp.zeros((shape.layers, batch, n, heads), wide) for n in (many, tokens)
      )
      return AttentionStatistics(
        of_rows,
        of_rows,
        None if keep is None else of_rows,
        of_keys if columns else None,
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
  def length(self) -> Any:
    return jnp.zeros(1, jnp.int32)

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    if isinstance(self.shapes[kind], StateShape):
      return FreshLayer()
    return StatisticsLayer(self, kind, slots, index)

  def updated(self, slots: tuple[Any, ...]) -> StatisticsCache:
    return dataclasses.replace(self, found=slots)

  def by_layer(self) -> tuple[AttentionStatistics | None, ...]:
    """Statistics of each layer of the model; None of recurrent ones."""
    found: dict[int, AttentionStatistics] = {}
    for shape, many in zip(self.shapes, self.found, strict=True):
      if not isinstance(shape, StateShape):
        for n, which in enumerate(shape.which):
          found[which] = jax.tree.map(lambda x, n=n: x[n], many)
    return tuple(found.get(n) for n in range(model_layers(self.shapes)))


tree.register(
  StatisticsCache,
  ("found", "rows", "keep", "sinks"),
  ("attend", "shapes", "columns"),
)


class StatisticsLayer(NamedTuple):
  """One layer's part of a `StatisticsCache` during one call.

  Fields:
    cache: during the call.
    kind: of the layer.
    slots: statistics of the layers of this kind.
    index: which layer of its kind.
    fresh: the call's keys and values.
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
    one = lambda x: lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False)
    sinks, slopes = cache.sinks[self.kind], reading.slopes
    pick = lambda x: jnp.take_along_axis(x, cache.rows, 1)
    q = jnp.take_along_axis(rotated(), cache.rows[:, :, None, None], 1)
    found = attention_statistics(
      q,
      jnp.swapaxes(self.fresh.k, 1, 2),
      keep=cache.keep,
      columns=cache.columns,
      mask=reading.mask & cache.attend.segments,
      scale=reading.scores.scale,
      logits_soft_cap=reading.scores.soft_cap,
      alibi_slopes=None if slopes is None else jnp.asarray(slopes, jnp.float32),
      sinks=None if sinks is None else one(sinks),
      q_positions=pick(at.pos),
      kv_positions=at.pos,
      q_segment_ids=pick(at.seg),
      kv_segment_ids=at.seg,
      mesh=cache.attend.mesh,
      axis=cache.attend.of_mesh,
    )
    put = lambda old, new: lax.dynamic_update_index_in_dim(
      old, new, self.index, 0
    )
    return self._replace(slots=jax.tree.map(put, self.slots, found))

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    del apart
    assert self.fresh is not None
    return (self.fresh.view(),)
