"""Recorded queries and their statistics, for eviction policies.

Guarantees: the newest queries of each row, whatever layout they came in; sums
over all queries of a row. Rows are independent. A query stays in its place as
long as it is recorded, so that a step writes the queries of its tokens alone;
`QueryWatch.order` tells the order in which they came.
Memory: L B W N H scalars for W queries; L B N H (H + 1) float32 for moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.kv.base import CacheSpec, scattered_layer
from ringjax.ops.attention.blockwise import pad_axis
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf, Index

# Moments exclude a row's first tokens, whose queries differ from the others.
_FIRST = 4


class Noted(NamedTuple):
  """Recorded queries of a kind of layers; None for what is not recorded.

  Fields:
    newest: Newest queries, rotated, [L, B, W, N, H].
    total: Sum of the queries before rotation, float32 [L, B, N, H].
    squares: Sum of their outer products, float32 [L, B, N, H, H].
    score: Sums of column masses of the open slots, float32 [L, B, K, S].
    choice: Choice of the policy that a head took at the last eviction, from 1,
      int32 [L, B, K]; 0 for none.
    paged: Sums of column masses of the slots of pages since these were made, in
      the order of a head's table; None if there are no such sums.
    fixed: Whether a head keeps its choice, bool [L, B, K], the same for all
      heads of a row.
  """

  newest: Float[ArrayLeaf, "L B W N H"] | None = None
  total: Float[ArrayLeaf, "L B N H"] | None = None
  squares: Float[ArrayLeaf, "L B N H H"] | None = None
  score: Float[ArrayLeaf, "L B K S"] | None = None
  choice: Int[ArrayLeaf, "L B K"] | None = None
  paged: Float[ArrayLeaf, "L B K _"] | None = None
  fixed: Bool[ArrayLeaf, "L B K"] | None = None

  def started(self) -> Noted:
    """Reset sums and choices at the start of a prompt."""
    zero = lambda x: None if x is None else jnp.zeros_like(x)
    return self._replace(
      score=zero(self.score),
      choice=zero(self.choice),
      paged=zero(self.paged),
      fixed=zero(self.fixed),
    )

  def without(self, rows: Bool[Array, " B"]) -> Noted:
    """Clear the records of these rows."""
    if self.newest is None:
      return self
    gone = rows[None, :, None, None, None]
    return self._replace(newest=jnp.where(gone, 0, self.newest))

  def widened(self, window: int) -> Noted:
    """Make room for `window` queries, keeping those recorded."""
    if self.newest is None:
      return self
    return self._replace(newest=pad_axis(self.newest, 2, window))

  def ordered(self, order: Int[Array, "B W"]) -> Noted:
    """Reorder the queries."""
    if self.newest is None:
      return self
    pick = order[None, :, :, None, None]
    return self._replace(newest=jnp.take_along_axis(self.newest, pick, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryWatch:
  """Coordinates and counts of the recorded queries, shared by all layers.

  Attributes:
    at: Coordinates of the newest queries, [B, W], or None.
    count: Number of queries in the sums, float32 [B], or None.
    source: Index among W old and T new queries that each place got in the last
      call, int32 [B, W]; -1 for none.
    call: During a call, coordinates of its tokens, [B, T].
    places: During a call of fewer than W tokens, place that each of its queries
      gets, int32 [B, T]; W for none.
    sharded: Whether the call's tokens are sharded over `axis`.
    mesh: Device mesh; None for one device.
    axis: Mesh axis of the sequence.
  """

  at: Coords | None = None
  count: Float[ArrayLeaf, " B"] | None = None
  source: Int[ArrayLeaf, "B W"] | None = None
  call: Coords | None = None
  places: Int[ArrayLeaf, "B T"] | None = None
  sharded: bool = False
  mesh: Mesh | None = None
  axis: str | None = None

  @classmethod
  def spec(cls, room: CacheSpec, window: int, moments: bool) -> QueryWatch:
    """Shapes and dtypes for `window` queries, and for sums if `moments`."""
    cursors = room.like((room.batch, window), jnp.int32, (None, None))
    return cls(
      at=Coords(cursors, cursors) if window else None,
      source=cursors if window else None,
      count=room.like((room.batch,), jnp.float32, (None,)) if moments else None,
      mesh=room.mesh,
      axis=room.axes.get("tokens"),
    )

  def noted_spec(
    self,
    room: CacheSpec,
    layers: int,
    heads: int,
    dim: int,
    summed: int,
    choosing: int,
  ) -> Noted:
    """Specs of the records of layers with `heads` query heads of size `dim`.

    `summed` is the number of KV heads whose column masses are summed, or 0;
    `choosing` is the number of those that take one of a policy's choices, or 0.
    """
    lead, names = (layers, room.batch), (None, "batch")

    def like(
      shape: tuple[int, ...], dtype: DTypeLike, over: tuple
    ) -> ArrayLeaf:
      return room.like((*lead, *shape), dtype, (*names, *over))

    newest = total = squares = score = choice = fixed = None
    if summed:
      score = like((summed, room.capacity), jnp.float32, ("heads", "tokens"))
    if self.at is not None:
      shape = (self.at.pos.shape[1], heads, dim)
      newest = like(shape, room.dtype, (None, "heads"))
    if self.count is not None:
      total = like((heads, dim), jnp.float32, ("heads",))
      squares = like((heads, dim, dim), jnp.float32, ("heads",))
    if choosing:
      choice = like((choosing,), jnp.int32, ("heads",))
      fixed = like((choosing,), jnp.bool_, ("heads",))
    return Noted(newest, total, squares, score, choice, fixed=fixed)

  def started(
    self, at: Coords, *, sharded: bool, from_empty: bool, notes: bool = True
  ) -> QueryWatch:
    """Prepare for a call whose tokens have these coordinates, [B, T].

    Args:
      at: Coordinates of the tokens.
      sharded: Whether the tokens are sharded.
      from_empty: Whether the call starts from empty rows.
      notes: Whether to record the queries.
    """
    if self.at is None and self.count is None:
      return self
    first = self.count if self.at is None else self.at.pos
    assert first is not None
    batch = first.shape[0]
    to_batch = lambda x: jnp.broadcast_to(x, (batch, at.pos.shape[1]))
    at = Coords(*map(to_batch, at))
    watch = dataclasses.replace(self, call=at, sharded=sharded)
    if self.count is not None:
      count = jnp.zeros_like(self.count) if from_empty else self.count
      added = jnp.sum(self._counted(at), 1, dtype=jnp.float32)
      watch = dataclasses.replace(watch, count=count + added)
    if self.at is None:
      return watch
    window = self.at.pos.shape[1]
    old = Coords(self.at.pos, self.at.seg * (0 if from_empty else 1))
    if not notes:
      return dataclasses.replace(watch, at=old)
    joined = Coords(
      *(jnp.concatenate([x, y], 1) for x, y in zip(old, at, strict=True))
    )
    index = lax.broadcasted_iota(jnp.int32, joined.pos.shape, 1)
    # Queries of the call are newer, ordered by document and position.
    new = (index >= window).astype(jnp.int32)
    real = (joined.seg > 0).astype(jnp.int32)
    order = lax.sort(
      (real, new, joined.seg, joined.pos, index), dimension=1, num_keys=5
    )[4]
    source, places = _in_free_places(order, window)
    newest = Coords(*(jnp.take_along_axis(x, source, 1) for x in joined))
    return dataclasses.replace(
      watch,
      at=newest,
      source=jnp.where(newest.seg > 0, source, -1),
      places=places if places.shape[1] < window else None,
    )

  def committed(self) -> QueryWatch:
    """Drop the state that exists only during a call."""
    return dataclasses.replace(self, call=None, places=None, sharded=False)

  def note(
    self,
    noted: Noted,
    layer: Index,
    rotated: Callable[[], Float[Array, "B T N H"]],
    plain: Callable[[], Float[Array, "B T N H"]],
    from_empty: bool,
  ) -> Noted:
    """Record the call's queries of one layer."""
    put = lambda old, new: lax.dynamic_update_index_in_dim(
      old, new.astype(old.dtype), layer, 0
    )
    take = lambda old: lax.dynamic_index_in_dim(old, layer, 0, keepdims=False)
    if noted.newest is not None and self.places is not None:
      newest = _placed(noted.newest, layer, self._all(rotated()), self.places)
      noted = noted._replace(newest=newest)
    elif noted.newest is not None:
      old, source = take(noted.newest), self.source
      assert source is not None
      window = old.shape[1]
      new = self._rows(rotated(), source - window)
      pick = jnp.clip(source, 0, window - 1)[:, :, None, None]
      old_queries = jnp.take_along_axis(old, pick, 1)
      fresh = (source >= window)[:, :, None, None]
      newest = put(
        noted.newest, jnp.where(fresh, new.astype(old.dtype), old_queries)
      )
      noted = noted._replace(newest=newest)
    if noted.total is not None:
      q = plain().astype(jnp.float32)
      assert self.call is not None
      weight = self._counted(self.call).astype(jnp.float32)
      total = jnp.einsum("bt,btnh->bnh", weight, q)
      squares = jnp.einsum("bt,btnh,btnj->bnhj", weight, q, q)
      if not from_empty:
        total = total + take(noted.total)
        squares = squares + take(noted.squares)
      noted = noted._replace(
        total=put(noted.total, total), squares=put(noted.squares, squares)
      )
    return noted

  def _counted(self, at: Coords) -> jax.Array:
    return (at.seg > 0) & (at.pos >= _FIRST)

  def _all(self, q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """The call's queries on every shard of the sequence."""
    if not self.sharded or self.axis is None:
      return q
    axis = self.axis
    return jax.shard_map(
      lambda q: collectives.gather(q, axis, 1),
      mesh=self.mesh,
      in_specs=P(None, axis),
      out_specs=P(),
      axis_names={axis},
      check_vma=False,
    )(q)

  def _rows(self, q: jax.Array, index: jax.Array) -> jax.Array:
    """Gather queries [B, W, N, H]; arbitrary where the index is negative."""
    if not self.sharded or self.axis is None:
      safe = jnp.clip(index, 0, q.shape[1] - 1)[:, :, None, None]
      return jnp.take_along_axis(q, safe, 1)

    def local(q: jax.Array, index: jax.Array) -> jax.Array:
      assert self.axis is not None
      length = q.shape[1]
      local_index = index - collectives.axis_index(self.axis) * length
      on_shard = ((local_index >= 0) & (local_index < length))[:, :, None, None]
      safe = jnp.clip(local_index, 0, length - 1)[:, :, None, None]
      queries = jnp.where(on_shard, jnp.take_along_axis(q, safe, 1), 0)
      return collectives.total(queries, self.axis)

    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P(None, self.axis), P()),
      out_specs=P(),
      axis_names={self.axis},
    )(q, index)

  def without(self, rows: Bool[Array, " B"]) -> QueryWatch:
    """Clear the records of these rows."""
    assert self.at is not None
    at = Coords(*(jnp.where(rows[:, None], 0, x) for x in self.at))
    return dataclasses.replace(self, at=at)

  def widened(self, window: int) -> QueryWatch:
    """Make room for `window` queries, keeping those recorded."""
    assert self.at is not None
    at = Coords(*(pad_axis(x, 1, window) for x in self.at))
    source = jnp.zeros_like(at.pos)
    return dataclasses.replace(self, at=at, source=source)

  def order(self, window: int) -> Int[Array, "B _"]:
    """Indices of the newest `window` queries, after empty places.

    Queries of a row came in the order of documents and positions.
    """
    assert self.at is not None
    pos, seg = jnp.asarray(self.at.pos), jnp.asarray(self.at.seg)
    index = lax.broadcasted_iota(jnp.int32, pos.shape, 1)
    pos = jnp.where(seg > 0, pos, 0)
    return lax.sort((seg, pos, index), dimension=1, num_keys=3)[2][:, -window:]

  def ordered(self, order: Int[Array, "B W"]) -> QueryWatch:
    """Reorder the places."""
    assert self.at is not None
    at = Coords(*(jnp.take_along_axis(x, order, 1) for x in self.at))
    return dataclasses.replace(self, at=at, source=jnp.zeros_like(order))

  def keep_queries(self, kept: Bool[Array | np.ndarray, "B T"]) -> QueryWatch:
    """Keep only the last call's queries in `kept`, of T tokens."""
    if self.at is None:
      return self
    assert self.source is not None
    window = self.source.shape[1]
    index = jnp.clip(self.source - window, 0, kept.shape[1] - 1)
    stays = jnp.take_along_axis(jnp.asarray(kept), index, 1)
    stays |= self.source < window
    at = Coords(self.at.pos, jnp.where(stays, self.at.seg, 0))
    return dataclasses.replace(self, at=at)

  def truncated(self, end: Int[Array, " B"]) -> QueryWatch:
    """Drop queries at positions from `end` [B] on."""
    if self.at is None:
      return self
    gone = self.at.pos >= end[:, None]
    at = Coords(self.at.pos, jnp.where(gone, 0, self.at.seg))
    return dataclasses.replace(self, at=at)


tree.register(
  QueryWatch,
  ("at", "count", "source", "call", "places"),
  ("sharded", "mesh", "axis"),
)


def _in_free_places(
  order: Int[Array, "B _"], window: int
) -> tuple[Int[Array, "B W"], Int[Array, "B T"]]:
  """Leave old queries in their places, and put new ones in the other places.

  Args:
    order: Indices of W old and T new queries, [B, W + T]; the last W of them
      are recorded. Empty places count as old queries.
    window: Number of places, W.

  Returns:
    The index of each place's query, and the place of each new one; W for none.
  """
  tokens = order.shape[1] - window
  # Sorting again inverts an order; a scatter would be sent between devices.
  rank = lax.broadcasted_iota(jnp.int32, order.shape, 1)
  rank = lax.sort((order, rank), dimension=1, num_keys=1)[1]
  recorded = rank >= tokens
  is_free, is_new = ~recorded[:, :window], recorded[:, window:]
  place = lax.broadcasted_iota(jnp.int32, is_free.shape, 1)
  # The n-th new query that is recorded gets the n-th free place.
  free_places = jnp.argsort(~is_free, axis=1, stable=True).astype(jnp.int32)
  new_queries = jnp.argsort(~is_new, axis=1, stable=True).astype(jnp.int32)
  nth = lambda mask: jnp.cumsum(mask, 1, dtype=jnp.int32) - 1
  clipped = lambda n, most: jnp.clip(n, 0, most - 1)
  query = jnp.take_along_axis(new_queries, clipped(nth(is_free), tokens), 1)
  source = jnp.where(is_free, window + query, place)
  at = jnp.take_along_axis(free_places, clipped(nth(is_new), window), 1)
  return source, jnp.where(is_new, at, window)


def _placed(
  old: Float[Array, "L B W N H"],
  layer: Index,
  new: Float[Array, "B T N H"],
  places: Int[Array, "B T"],
) -> Float[Array, "L B W N H"]:
  """Write queries to their places of a layer; those of place W to none."""
  new = new.astype(old.dtype)
  scattering = lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
  )

  def put(old: jax.Array, layer: Index) -> jax.Array:
    layers = jnp.full_like(places, layer)
    return lax.scatter(
      old,
      jnp.stack([layers, places], -1),
      new,
      scattering,
      mode=lax.GatherScatterMode.FILL_OR_DROP,
    )

  return scattered_layer(old, layer, put)


def moments_of(
  noted: Noted, count: Float[Array, " B"], groups: int
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K G H H"]]:
  """Mean [B, K, G, H] and covariance [B, K, G, H, H] of one layer's queries."""
  assert noted.total is not None and noted.squares is not None
  b, n, h = noted.total.shape
  safe_count = jnp.maximum(count, 1)
  mean = noted.total / safe_count[:, None, None]
  covariance = noted.squares / safe_count[:, None, None, None]
  covariance = covariance - mean[..., :, None] * mean[..., None, :]
  return (
    mean.reshape(b, n // groups, groups, h),
    covariance.reshape(b, n // groups, groups, h, h),
  )
