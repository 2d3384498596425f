"""One layer's summaries during a call, in rows of slots or in pages of a pool.

Guarantees: a call writes the summaries of the windows that end with its tokens,
on the shard that has their place; nothing else is read or written.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax.kv.base import CallLayer
from ringjax.kv.storage.call_tiles import CacheTile
from ringjax.kv.storage.slots import written_rows
from ringjax.kv.summaries.summary_spec import SummarySlots, SummarySpec
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.chosen_slots import gathers
from ringjax.ops.attention.cached.code_format import row_major
from ringjax.ops.attention.cached.summaries.summary_view import (
  SummaryView,
  page_entry,
)
from ringjax.ops.attention.cached.summaries.window_sums import (
  EndingWindows,
  PoolingGates,
  WindowSizes,
  WindowWeights,
  window_sums,
)
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.cache import KVCache
  from ringjax.kv.storage.pooled_cache import PooledCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryLayer(CallLayer):
  """Base class of one layer's summaries during a call.

  Attributes:
    slots: Summaries of all layers of its kind.
    index: Index of the layer among them.
    spec: Shape of the summaries.
    unrotated: Whether keys are stored before their rotation.
  """

  slots: SummarySlots
  index: Index
  spec: SummarySpec
  unrotated: bool

  def appended(
    self,
    views: tuple[KVView, ...],
    at: Coords,
    weights: WindowWeights | PoolingGates | None,
  ) -> SummaryLayer:
    """Write the summaries of the windows that end in a call.

    Args:
      views: Views of the layer's keys, with those of the call.
      at: Coordinates of the call's tokens, [B, T].
      weights: Weights of keys and values in a window, or biases of the gates
        that keys have; None for means of keys.
    """
    if not self._kept(views):
      return self
    (view,) = views
    shape = view.shape[0], at.pos.shape[1]
    at = Coords(*(jnp.broadcast_to(x, shape) for x in at))
    windows = EndingWindows.of(at, self.spec.sizes)
    mesh, axis, batch, heads = self._axes(view)

    def local(
      view: KVView,
      windows: EndingWindows,
      weights: WindowWeights | PoolingGates | None,
      slots: SummarySlots,
      place: Any,
    ) -> SummarySlots:
      windows = EndingWindows(*windows)
      names = frozenset((*collectives.names(axis), *batch, *heads))
      windows, weights, place = collectives.vary(
        (windows, weights, place), names
      )
      sums = window_sums(
        view, windows, self.spec.sizes, weights, slots.k.dtype, axis
      )
      put = lambda old, new: (
        old
        if new is None or not old.size
        else self._written(old, new, windows, place, axis)
      )
      return SummarySlots(*map(put, slots, sums))

    slots, place = self.slots, self._place()
    if mesh is None:
      written = local(view, windows, weights, slots, place)
    else:
      specs: Any = view
      by_array: Any = [self._spec(x, batch, heads) for x in slots]
      slot_specs = SummarySlots(*by_array)
      by_row: Any = P(batch or None)
      by_head: Any = P(None, heads or None)
      weight_specs: Any = None
      if isinstance(weights, WindowWeights):
        weight_specs = WindowWeights(by_head, by_head)
      elif weights is not None:
        replicated: Any = P()
        weight_specs = PoolingGates(replicated)
      written = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
          specs.specs(batch or None, heads or None, axis),
          EndingWindows(by_row, by_row),
          weight_specs,
          slot_specs,
          self._place_spec(axis),
        ),
        out_specs=slot_specs,
      )(view, windows, weights, slots, place)
    return dataclasses.replace(self, slots=written)

  def view(self, views: tuple[KVView, ...]) -> SummaryView | None:
    """View of the summaries; None where the keys of these views have none."""
    return self._view() if self._kept(views) else None

  def _kept(self, views: tuple[KVView, ...]) -> bool:
    """Whether keys can be read one by one as all later calls read them."""
    rotation_changes = self.unrotated and not self.spec.fixed
    return len(views) == 1 and gathers(views[0]) and not rotation_changes

  def _view(self) -> SummaryView:
    raise NotImplementedError

  def _axes(
    self, view: KVView
  ) -> tuple[Mesh | None, str | None, tuple[str, ...], tuple[str, ...]]:
    """Mesh, and axes of the sequence, of the rows and of the heads."""
    raise NotImplementedError

  def _spec(
    self, x: Array, batch: tuple[str, ...], heads: tuple[str, ...]
  ) -> P:
    """PartitionSpec of an array of summaries."""
    raise NotImplementedError

  def _place(self) -> Any:
    """Arrays that say where a row's summaries are."""
    return ()

  def _place_spec(self, axis: str | None) -> Any:
    """PartitionSpecs of `_place`."""
    del axis
    return ()

  def _written(
    self,
    old: Float[Array, "L _ K _ X"],
    new: Float[Array, "B n K X"],
    windows: EndingWindows,
    place: Any,
    axis: str | None,
  ) -> Float[Array, "L _ K _ X"]:
    """Write the summaries of windows that end, on this shard."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSummaryLayer(SummaryLayer):
  """One layer's summaries in rows of slots.

  Attributes:
    cache: Cache of the call.
  """

  cache: KVCache

  def _view(self) -> SummaryView:
    return SummaryView(
      k=self.slots.k,
      v=self.slots.v,
      layer=self.index,
      heads=self.spec.heads,
      sizes=self.spec.sizes,
      of_kv_heads=not self.spec.of_index,
    )

  def _axes(
    self, view: KVView
  ) -> tuple[Mesh | None, str | None, tuple[str, ...], tuple[str, ...]]:
    table = self.cache.held
    if table.mesh is None:
      return None, None, (), ()
    rows, kv_heads = view.shape[:2]
    sizes: Any = table.mesh.shape
    divides = rows % math.prod(sizes[a] for a in table.batch_axes) == 0
    batch = table.batch_axes if divides else ()
    heads = collectives.names(table.head_axis)
    if self.spec.of_index or any(kv_heads % sizes[a] for a in heads):
      heads = ()
    return table.mesh, table.axis, batch, heads

  def _spec(
    self, x: Array, batch: tuple[str, ...], heads: tuple[str, ...]
  ) -> P:
    if not x.size:
      return P()
    return P(None, batch or None, heads or None, self.cache.held.axis)

  def _written(
    self,
    old: Float[Array, "L B K C X"],
    new: Float[Array, "B n K X"],
    windows: EndingWindows,
    place: Any,
    axis: str | None,
  ) -> Float[Array, "L B K C X"]:
    del place
    size = old.shape[3]
    shard = jnp.int32(0) if axis is None else collectives.axis_index(axis)
    first = windows.number[:, 0] - shard * size
    # Windows of a row are consecutive; a shard has a range of them.
    start = jnp.clip(first, 0, size)
    stop = first + jnp.sum(windows.ends, 1, dtype=jnp.int32)
    count = jnp.clip(stop, 0, size) - start
    n = windows.number.shape[1]
    step = jnp.arange(min(n, size), dtype=jnp.int32)[None]
    index = jnp.clip(start - first, 0, n - 1)[:, None] + step
    index = jnp.minimum(index, n - 1)[:, :, None, None]
    tokens = jnp.take_along_axis(new.astype(old.dtype), index, 1)
    layer = jnp.asarray(self.index, jnp.int32)
    return written_rows(
      old, jnp.swapaxes(tokens, 1, 2), layer, start, jnp.maximum(count, 0)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledSummaryLayer(SummaryLayer):
  """One layer's summaries in the pages of a pool.

  Attributes:
    cache: Cache of the call.
    group: Index of the group of layers, whose pages it shares.
  """

  cache: PooledCache
  group: int

  def of_tile(self, tile: CacheTile) -> PooledSummaryLayer:
    """Part of the layer for the tokens of a tile."""
    cache: Any = tile.cache
    return dataclasses.replace(self, cache=cache)

  def with_tile(
    self, tile: CacheTile, new: PooledSummaryLayer
  ) -> PooledSummaryLayer:
    """Part of the layer with the summaries that a tile has written."""
    del tile
    return dataclasses.replace(self, slots=new.slots)

  def _view(self) -> SummaryView:
    table = self.cache.tables[self.group]
    return SummaryView(
      k=self.slots.k,
      v=self.slots.v,
      layer=self.index,
      table=table.reshape(table.shape[0], -1),
      page=self.cache.pool.page,
      heads=self.spec.heads,
      sizes=self.spec.sizes,
      of_kv_heads=not self.spec.of_index,
    )

  def _axes(
    self, view: KVView
  ) -> tuple[Mesh | None, str | None, tuple[str, ...], tuple[str, ...]]:
    del view
    pool = self.cache.pool
    heads = () if self.spec.of_index else collectives.names(pool.heads)
    return pool.mesh, pool.axis, (), heads

  def _spec(
    self, x: Array, batch: tuple[str, ...], heads: tuple[str, ...]
  ) -> P:
    del batch
    return P(None, self.cache.pool.axis, heads or None) if x.size else P()

  def _place(self) -> Any:
    table = self.cache.tables[self.group]
    return table.reshape(table.shape[0], -1)

  def _place_spec(self, axis: str | None) -> Any:
    return P(None, axis)

  def _written(
    self,
    old: Float[Array, "L N K E X"],
    new: Float[Array, "B n K X"],
    windows: EndingWindows,
    place: Any,
    axis: str | None,
  ) -> Float[Array, "L N K E X"]:
    sizes: WindowSizes = self.spec.sizes
    page, entry = page_entry(windows.number, self.cache.pool.page, sizes)
    shard, shards = jnp.int32(0), 1
    if axis is not None:
      shard = collectives.axis_index(axis)
      shards = collectives.axis_size(axis)
    local = jnp.clip(page // shards, 0, place.shape[1] - 1)
    target = jnp.take_along_axis(place, local, 1)
    real = windows.ends & (page % shards == shard) & (target >= 0)
    order = jnp.argsort(~real.reshape(-1), stable=True).astype(jnp.int32)
    layer = jnp.asarray(self.index, jnp.int32)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    new, target, entry = (flat(x) for x in (new, target, entry))

    def put(step: Index, old: Array) -> Array:
      n = order[step]
      corner = (layer, target[n], jnp.int32(0), entry[n], jnp.int32(0))
      vector = lax.dynamic_index_in_dim(new, n, 0, keepdims=False)
      vector = vector[None, None, :, None].astype(old.dtype)
      return lax.dynamic_update_slice(row_major(old), vector, corner)

    # A loop writes in place whatever the layout of the array is on a device.
    return loop(jnp.sum(real, dtype=jnp.int32), put, old)
