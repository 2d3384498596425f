"""Compressed keys of a layer, one for each window of m tokens.

Guarantees: entries are stored in the order in which their windows end, after
those of earlier calls, each with the coordinates of the token that ends its
window; the tokens of a window that has not ended are in the tail. Rows are
independent.
Cost: a call's new entries are gathered on all shards, 1 / m of its tokens, and
each shard writes those that it stores.
Memory: S / m entries of a row over all shards, for a capacity of S tokens, and
a window of projections on each shard.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec, CallCache
from ringjax.kv.state import State, StateLayer, StateShape
from ringjax.kv.storage.call_tiles import CacheTile
from ringjax.ops.attention.cached.views import ContiguousView
from ringjax.ops.attention.sparse.compressed_keys import (
  Projections,
  window_size,
)
from ringjax.ops.mask import Coords
from ringjax.ops.recurrent.conv import Tail
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf, Index


class EntrySlots(NamedTuple):
  """Entries of a kind of layer, or of one without the axis L.

  Fields:
    keys: Rows of all compressors, one after another, [L, B, 1, M, X].
    pos: Positions of the tokens that end the windows, int32 [L, B, M].
    seg: Documents, int32 [L, B, M]; 0 in empty slots.
  """

  keys: Shaped[ArrayLeaf, "L B 1 M X"]
  pos: Shaped[ArrayLeaf, "L B M"]
  seg: Shaped[ArrayLeaf, "L B M"]


class CompressedState(State):
  """Entries and the tail of a kind of layer: `State` with `EntrySlots`."""

  def layer(self, cache: CallCache, index: Index) -> CompressedLayer:
    """Part of layer `index` for a call, with these states as its slots."""
    slot_table = getattr(cache, "held", None)
    batch_axes = getattr(slot_table, "batch_axes", ())
    return CompressedLayer(self, index, cache.mesh, cache.axis, batch_axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedShape(StateShape):
  """Shape of the entries and the tail of a kind of layer.

  Attributes:
    rate: Number of tokens of a window without overlap, m.
    overlap: Whether an entry has the tokens of the window before, too.
    dims: Sizes of the entries of each compressor.
  """

  grows: ClassVar[bool] = True

  rate: int
  overlap: bool
  dims: tuple[int, ...]

  @classmethod
  def of(
    cls, layers: int, rate: int, overlap: bool, dims: tuple[int, ...]
  ) -> CompressedShape:
    """Shape for `layers` layers."""
    return cls(
      layers=layers,
      heads=0,
      key=0,
      value=0,
      tail=window_size(rate, overlap) - 1,
      convolved=tuple((1, (1 + overlap) * dim) for dim in dims for _ in "vg"),
      rate=rate,
      overlap=overlap,
      dims=dims,
    )

  def slots(self, room: CacheSpec) -> CompressedState:
    """Specs (shapes, dtypes, shardings) of entries and tails.

    No codec applies.
    """
    lead, n = (self.layers, room.batch), self.tail
    entries = -(-room.capacity // self.rate)
    entries = -(-entries // room.shards) * room.shards
    coords = lambda: room.like(
      (*lead, entries), jnp.int32, (None, "batch", "tokens")
    )
    of_token = lambda dim: room.like(
      (*lead, n, (1 + self.overlap) * dim), room.dtype, (None, "batch")
    )
    number = lambda: room.like((*lead, n), jnp.int32, (None, "batch"))
    projections = tuple(
      Projections(of_token(dim), of_token(dim)) for dim in self.dims
    )
    return CompressedState(
      EntrySlots(
        room.like(
          (*lead, 1, entries, sum(self.dims)),
          room.dtype,
          (None, "batch", None, "tokens"),
        ),
        coords(),
        coords(),
      ),
      Tail((projections, number()), number()),
    )


@dataclasses.dataclass(frozen=True)
class CompressedLayer(StateLayer):
  """One layer's entries and tail during one call.

  Attributes:
    slots: Slots of all layers of its kind.
    index: Index of the layer among them.
    mesh: Mesh whose `axis` shards the entries; None for one device.
    axis: Mesh axis of the sequence.
    batch_axes: Mesh axes that shard the rows if they divide them.
  """

  slots: CompressedState
  mesh: Mesh | None = None
  axis: str | None = None
  batch_axes: tuple[str, ...] = ()

  def recall_tail(self, empty: Tail) -> Tail:
    """Read the tail that earlier calls left, with the dtypes of `empty`."""
    take = lambda x, like: lax.dynamic_index_in_dim(
      x, self.index, 0, keepdims=False
    ).astype(like.dtype)
    return jax.tree.map(take, self.slots.tail, empty)

  def appended(
    self,
    keys: Float[Array, "B n X"],
    at: Coords,
    tail: Tail,
    *,
    sees: bool,
  ) -> CompressedLayer:
    """Store a call's entries and the tail after its tokens.

    Args:
      keys: Entries, rotated.
      at: Coordinates of the entries, [B, n]; segment 0 for none.
      tail: Tail after the call's tokens.
      sees: Whether they follow the stored entries; else they replace them.
    """
    old = self.slots.memory
    seg = lax.dynamic_index_in_dim(old.seg, self.index, 0, keepdims=False)
    if not sees:
      seg = jnp.zeros_like(seg)
    stored_count = jnp.sum(seg > 0, 1, dtype=jnp.int32)
    real = at.seg > 0
    slot = stored_count[:, None] + jnp.cumsum(real, 1, dtype=jnp.int32) - 1
    slot = jnp.where(real, slot, old.seg.shape[2])
    new = EntrySlots(keys[None, :, None], at.pos[None], at.seg[None])
    layer_index = jnp.asarray(self.index, jnp.int32)

    def write(
      old: EntrySlots, new: EntrySlots, slot: jax.Array, first: Index
    ) -> EntrySlots:
      size = old.seg.shape[2]
      slot = slot - first
      # Slots of other shards are out of range.
      slot = jnp.where((slot >= 0) & (slot < size), slot, size)
      row = jnp.arange(slot.shape[0], dtype=jnp.int32)[:, None]
      put = lambda x, value: x.at[layer_index, row, slot].set(
        value.astype(x.dtype), mode="drop"
      )
      kept_seg = old.seg
      if not sees:
        kept_seg = lax.dynamic_update_index_in_dim(
          old.seg, jnp.zeros(old.seg.shape[1:], jnp.int32), layer_index, 0
        )
      stored_keys = old.keys.at[layer_index, row, 0, slot].set(
        new.keys[0, :, 0].astype(old.keys.dtype), mode="drop"
      )
      return EntrySlots(
        stored_keys, put(old.pos, new.pos[0]), put(kept_seg, new.seg[0])
      )

    if self.mesh is None or self.axis is None:
      memory = write(old, new, slot, jnp.int32(0))
    else:
      memory = self._on_shards(write, old, new, slot)
    return self._with(memory, tail)

  def _on_shards(
    self, write: Any, old: EntrySlots, new: EntrySlots, slot: Int[Array, "B n"]
  ) -> EntrySlots:
    """Write on each shard the entries that it stores."""
    axis = self.axis
    assert axis is not None

    def local(old: EntrySlots, new: EntrySlots, slot: jax.Array) -> EntrySlots:
      new, slot = collectives.vary((new, slot), frozenset({axis}))
      first = collectives.axis_index(axis) * old.seg.shape[2]
      return write(old, new, slot, first)

    assert self.mesh is not None
    sizes = (self.mesh.shape[name] for name in self.batch_axes)
    divides = slot.shape[0] % math.prod(sizes) == 0
    batch = self.batch_axes if self.batch_axes and divides else None
    # Entries are the last axis but one of keys, the last of coordinates.
    specs = jax.tree.map(
      lambda x: P(None, batch, *(None,) * (x.ndim == 5), axis), old
    )
    # Over all axes: XLA cannot partition a scatter over some.
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(specs, P(None, batch), P(batch)),
      out_specs=specs,
    )(old, new, slot)

  def _with(self, memory: EntrySlots, tail: Tail) -> CompressedLayer:
    put = lambda x, new: lax.dynamic_update_index_in_dim(
      x, new.astype(x.dtype), self.index, 0
    )
    tail = jax.tree.map(put, self.slots.tail, tail)
    return dataclasses.replace(self, slots=CompressedState(memory, tail))

  def view(self) -> ContiguousView:
    """View of the stored entries; a value is its key."""
    memory = self.slots.memory
    take = lambda x: lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False)
    at = Coords(take(memory.pos), take(memory.seg))
    return ContiguousView(memory.keys, memory.keys, at, self.index).keys_alone()

  def of_tile(self, tile: CacheTile) -> CompressedLayer:
    """Part of the layer for the row of a tile."""
    slots: Any = super().of_tile(tile).slots
    return dataclasses.replace(self, slots=slots, index=jnp.int32(0))


def row_states(
  shape: StateShape,
  room: CacheSpec,
  row_tokens: int | None,
  axis: str | None,
) -> State:
  """Specs of the states of the rows of a pool of pages.

  Args:
    shape: Shape of the states.
    room: Room of a page.
    row_tokens: Maximum number of tokens of a row, or None.
    axis: Mesh axis that shards the pages, and states that grow.

  Raises:
    OptionError: If the states grow, and `row_tokens` is None.
  """
  if not shape.grows:
    return shape.slots(room)
  if row_tokens is None:
    raise OptionError(
      "row_tokens",
      "None for layers with compressed keys",
      "the largest number of tokens of a row",
      "pass row_tokens=",
    )
  axes = {**room.axes, "tokens": axis}
  return shape.slots(dataclasses.replace(room, capacity=row_tokens, axes=axes))
