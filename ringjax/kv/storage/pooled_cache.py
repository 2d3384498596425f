"""The rows of a call whose keys are in the pages of a pool."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import KV, CallCache, CallLayer
from ringjax.kv.codecs import Codec
from ringjax.kv.layer_spec import (
  LayerCacheSpec,
  LayerKV,
  encoded,
  of_layer,
  rotated_view,
)
from ringjax.kv.state import State, StateLayer
from ringjax.kv.storage.call_tiles import CacheTile, CallTiles
from ringjax.kv.summaries.summary_layers import PooledSummaryLayer
from ringjax.kv.summaries.summary_spec import SummarySlots

if TYPE_CHECKING:
  from ringjax.kv.storage.layer_pages import PageWrites
  from ringjax.kv.storage.page_pool import PagePool
from ringjax.ops.ancestors import MOST_DRAFTED, tree_coords
from ringjax.ops.attention.cached.pooled import PooledView, SharedTiles
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledRows:
  """Read-only view of rows of a pool; an argument of jit.

  Attributes:
    pool: Pool of pages.
    tables: Page tables, see `PagePool.call`.
    ends: Number of tokens of each row, int32 [B].
  """

  pool: PagePool
  tables: tuple[Int[ArrayLeaf, "B R m"], ...]
  ends: Int[ArrayLeaf, " B"]

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.pool.slots

  @property
  def mesh(self) -> Mesh | None:
    return self.pool.mesh

  @property
  def axis(self) -> str | None:
    return self.pool.axis

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    ends = jnp.asarray(self.ends)
    rows = jnp.arange(ends.shape[0], dtype=jnp.int32)
    tables = tuple(map(jnp.asarray, self.tables))
    cache = self.pool.call(tables, ends, rows, rows < 0)
    return cache.layer(kind, slots, index)


tree.register(PooledRows, ("pool", "tables", "ends"), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledCache(CallCache):
  """A pool with the tables of some rows, for one call of a model.

  Attributes:
    pool: Pool of pages; its arrays may be those before the call.
    slots: Arrays of the pool, and states of the call's rows.
    tables: Page tables, see `PagePool.call`.
    at: Coordinates of the slots of each group, [B, S]; for a tree and the text
      before it those of `ops.ancestors`.
    ends: Number of tokens of each row after the call, int32 [B].
    rows: Index of each row's recurrent state, int32 [B].
    new: Slots and segments of the call's tokens, [B, T].
    shared: Tiles that rows share, see `PagePool.call`.
    parents: Parent of each token in a tree, see `PagePool.call`.
    writes: For each group, the destination of the call's tokens; in tiles
      those of all tiles of a size, for each size.
    tiles: Tiles of the call's tokens.
    present: 1, or 0 for a call that computes nothing; None: it always computes.
    borrows: Whether `slots` has None in place of the pool's arrays, which are
      those of the call before it in the same program.
  """

  pool: PagePool
  slots: tuple[Any, ...]
  tables: tuple[Any, ...]
  at: tuple[Coords, ...]
  ends: Int[Array, " B"]
  rows: Int[Array, " B"]
  new: Coords | None
  shared: tuple[SharedTiles, ...] | None = None
  parents: Int[Array, "B T"] | None = None
  writes: tuple[Any, ...] = ()
  tiles: tuple[CallTiles, ...] = ()
  present: Int[Array, ""] | None = None
  borrows: bool = False
  lender: ClassVar[str] = "pool"
  # A pool has no encoder states for cross-attention.
  states = None

  @property
  def mesh(self) -> Mesh | None:
    return self.pool.mesh

  @property
  def axis(self) -> str | None:
    return self.pool.axis

  @property
  def shards(self) -> int:
    return self.pool.shards

  @property
  def length(self) -> Int[Array, " B"]:
    """Number of tokens of each row, int32 [B]."""
    return self.ends

  def allocate(
    self,
    at: Coords,
    *,
    replicated: bool,
    sees: bool,
    tokens: Int[Array, "B T"] | None = None,
  ) -> PooledCache:
    """Assign slots to the call's tokens with coordinates [B, T].

    Raises:
      OptionError: If the tokens are sharded: all devices need all of them.
    """
    del tokens
    if not replicated or not sees:
      raise OptionError(
        "attend",
        "a call whose tokens are sharded, over a pool of pages",
        "CachedAttention() of replicated tokens",
        "leave attend out",
      )
    if self.parents is None:
      return self._with_new(at)
    # The text before the tree counts as ancestor of all its tokens.
    drafted = tree_coords(self.parents, at)
    start = self.ends - jnp.sum(at.seg > 0, 1, dtype=jnp.int32)

    def insert_tree(held: Coords) -> Coords:
      number = held.pos - start[:, None]
      inside = (number >= 0) & (held.seg > 0)
      last = at.pos.shape[1] - 1
      # A gather would write an index for each slot of the cache.
      nodes = jnp.arange(last + 1)[None, None]
      is_node = jnp.minimum(number, last)[..., None] == nodes
      tree_coord = [
        jnp.sum(jnp.where(is_node, x[:, None], 0), -1, dtype=x.dtype)
        for x in drafted
      ]
      seg = jnp.where(held.seg > 0, MOST_DRAFTED, 0)
      return Coords(
        jnp.where(inside, tree_coord[0], held.pos),
        jnp.where(inside, tree_coord[1], seg),
      )

    slots = start[:, None] + jnp.arange(at.pos.shape[1], dtype=jnp.int32)[None]
    cache = self._with_new(Coords(slots, at.seg))
    return dataclasses.replace(cache, at=tuple(map(insert_tree, self.at)))

  def _with_new(self, new: Coords) -> PooledCache:
    """Set the slots and segments of the appended tokens."""
    shape = (self.ends.shape[0], new.pos.shape[1])
    new = Coords(*(jnp.broadcast_to(x, shape) for x in new))
    if self.tiles:
      cache = dataclasses.replace(self, new=new)
      writes = tuple(
        jax.vmap(functools.partial(cache._tile_writes, level))(
          jnp.arange(tiles.row.shape[0], dtype=jnp.int32)
        )
        for level, tiles in enumerate(self.tiles)
      )
      return dataclasses.replace(cache, writes=writes)
    writes = tuple(
      self.pool.writes(group, table, new)
      for group, table in enumerate(self.tables)
    )
    return dataclasses.replace(self, new=new, writes=writes)

  def tile(self, level: int, n: Index) -> CacheTile:
    tile, new = self._tile(level, n)
    assert self.new is not None
    first_slot = self.ends - jnp.sum(self.new.seg > 0, 1, dtype=jnp.int32)
    # Slots after the tile's tokens may hold what no earlier call has written.
    end = tile.take_row(first_slot) + tile.start
    end = end + jnp.sum(new.seg > 0, 1, dtype=jnp.int32)
    tables = tuple(map(tile.take_row, self.tables))
    cache = dataclasses.replace(
      self,
      tables=tables,
      at=tuple(self.pool._coords(table, end) for table in tables),
      ends=end,
      rows=tile.take_row(self.rows),
      new=new,
      writes=jax.tree.map(lambda x: x[n], self.writes[level]),
      tiles=(),
    )
    return tile._replace(cache=cache)

  def _tile(self, level: int, n: Index) -> tuple[CacheTile, Coords]:
    """A tile without its cache, and the slots and segments of its tokens."""
    tiles, new = self.tiles[level], self.new
    assert new is not None
    row, start, filled = (
      jnp.asarray(x)[n] for x in (tiles.row, tiles.start, tiles.filled)
    )
    is_filled = jnp.arange(tiles.size, dtype=jnp.int32)[None] < filled
    tile = CacheTile(row, start, is_filled, None)
    pos, seg = map(tile.take, new)
    return tile, Coords(pos, jnp.where(is_filled, seg, 0))

  def _tile_writes(self, level: int, n: Index) -> tuple[PageWrites, ...]:
    """For each group, the destination of the tokens of a tile."""
    tile, new = self._tile(level, n)
    return tuple(
      self.pool.writes(group, tile.take_row(table), new)
      for group, table in enumerate(self.tables)
    )

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> PooledLayer | PooledSummaryLayer | StateLayer:
    if isinstance(slots, State):
      return slots.layer(self, index)
    if isinstance(slots, SummarySlots):
      return PooledSummaryLayer(
        cache=self,
        slots=slots,
        index=index,
        spec=self.pool.shapes[kind],
        unrotated=self.pool.kind.layout.unrotated,
        group=self.pool._group(kind),
      )
    return PooledLayer(self, slots, index, kind, self.pool._group(kind))

  def borrowing(self) -> PooledCache:
    """Cache for the second call of a program, see `borrows`."""
    slots = tuple(x if isinstance(x, State) else None for x in self.slots)
    return dataclasses.replace(self, slots=slots, borrows=True)

  def updated(self, slots: tuple[Any, ...]) -> PagePool:
    """Return the pool with the arrays after the layers."""
    if self.borrows:
      slots = tuple(
        old if new is None else new
        for old, new in zip(self.pool.slots, slots, strict=True)
      )

    def put(old: PyTree, new: PyTree) -> PyTree:
      return old.at[:, self.rows].set(new.astype(old.dtype), mode="drop")

    new_slots = tuple(
      jax.tree.map(put, old, new) if isinstance(new, State) else new
      for old, new in zip(self.pool.slots, slots, strict=True)
    )
    return dataclasses.replace(self.pool, slots=new_slots)


@dataclasses.dataclass(frozen=True)
class PooledLayer(CallLayer):
  """One layer's part of a `PooledCache` during one call."""

  cache: PooledCache
  slots: LayerKV
  index: Index
  kind: int
  group: int
  fresh: KV | Coords | None = None
  rotation: Rotation = Rotation()

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> PooledLayer:
    pool = self.cache.pool
    stored = LayerKV(k if pool.kind.layout.unrotated else rotation.own(k), v)
    codec = pool.kind.codec
    if isinstance(codec, Codec):
      constants, dtype = self._constants(), pool.dtype
      stored = encoded(codec, stored, constants, self.slots, dtype)
    assert self.cache.new is not None
    slots = LayerKV(*map(self._written, self.slots, stored))
    return dataclasses.replace(
      self, slots=slots, rotation=rotation.general(), fresh=at
    )

  def of_tile(self, tile: CacheTile) -> PooledLayer:
    """Part of the layer for the tokens of a tile."""
    cache: Any = tile.cache
    return dataclasses.replace(self, cache=cache)

  def with_tile(self, tile: CacheTile, new: PooledLayer) -> PooledLayer:
    """Part of the layer with the keys that a tile has appended."""
    del tile
    return dataclasses.replace(self, slots=new.slots)

  def for_reading(self, rotation: Rotation) -> PooledLayer:
    """Prepare for a call that appends nothing, as `KVLayer.for_reading`."""
    return dataclasses.replace(self, rotation=rotation.general())

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    if apart and self.cache.parents is None:
      raise OptionError(
        "parents",
        "a tree of drafted tokens, over a pool of pages",
        "a call of the pool that knows it",
        "pass parents= to PagePool.call too",
      )
    pool, codec = self.cache.pool, self.cache.pool.kind.codec
    shape, decoders, widths = pool.shapes[self.kind], None, None
    if codec is None:
      widths = shape.widths(self.slots)
    else:
      decoders = shape.decoders(codec, pool.dtype)
    table, shared = self.cache.tables[self.group], self.cache.shared
    view = PooledView(
      *self.slots,
      self.cache.at[self.group],
      table.reshape(table.shape[0], -1),
      self.index,
      self._constants(),
      decoders,
      shared[self.group] if shared else None,
      widths=widths,
    )
    return (rotated_view(view, pool.kind, self.rotation),)

  def _constants(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Codec constants of this layer, [K, n] each."""
    return of_layer(self.cache.pool.constants[self.kind], self.index)

  def _written(self, old: jax.Array, new: jax.Array) -> jax.Array:
    """Write the call's tokens, [B, K, T, X] or stored codes, to the pages."""
    if not old.size:
      return old
    writes = self.cache.writes[self.group]
    return self.cache.pool.written(old, self.index, new, writes)


def encoded_view(pool: PagePool, kind: int, view: PooledView) -> PooledView:
  """View of one layer's pages of numbers, encoded as a kind's are stored.

  Pages of numbers stay as they are, and of codecs that differ by layer or
  have constants on a mesh: for a view on one device.
  """
  codec, shape = pool.kind.codec, pool.shapes[kind]
  if not isinstance(codec, Codec) or not isinstance(shape, LayerCacheSpec):
    return view
  constants = of_layer(pool.constants[kind], 0)
  if pool.mesh is not None and jax.tree.leaves(constants):
    return view
  tokens, slots = LayerKV(view.k[0], view.v[0]), pool.slots[kind]
  codes = encoded(codec, tokens, constants, slots, pool.dtype)
  return dataclasses.replace(
    view,
    k=codes.k[None],
    v=codes.v[None],
    constants=constants,
    decoders=shape.decoders(codec, pool.dtype),
  )
