"""The cache of a model: keys of its layers, and states of recurrent ones.

Guarantees: rows are independent; appending tokens, removing some of them and
appending others is the same as never having appended the removed ones; exported
tokens are loaded bit for bit.
Memory: L B S K (H + J) numbers, where S is the capacity; for windowed layers
of kind "windowed" S is their window and a slack, see `window`.

`ContiguousSlots` and `WindowSlots` are tables of the token in each slot; each
kind of layer of the model has one array of keys and one of values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from ringjax import tree
from ringjax.errors import OptionError, ShapeError
from ringjax.kv.base import CacheSpec, zeros
from ringjax.kv.cache_kind import DENSE, CacheConfig
from ringjax.kv.cache_rows import placed_as, row_indices
from ringjax.kv.encoder_states import EncoderStates, inserted
from ringjax.kv.kv_layer import KVLayer
from ringjax.kv.layer_spec import (
  LayerCacheSpec,
  LayerKV,
  constants_spec,
  filled_constants,
)
from ringjax.kv.model_cache import ModelCache
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.state import State, StateShape
from ringjax.kv.storage import changes
from ringjax.kv.storage.exported_blocks import (
  Blocks,
  appended_blocks,
  check_blocks,
  located_slots,
)
from ringjax.kv.storage.growth import Growth, widened_slots
from ringjax.kv.storage.refusals import refuse_beyond_slack, refuse_holes
from ringjax.kv.storage.slots import FILL, REPLICATED, SHARDED, ContiguousSlots
from ringjax.kv.storage.window import WindowSlots, ring_size
from ringjax.kv.summaries.summary_layers import RowSummaryLayer
from ringjax.kv.summaries.summary_spec import SummarySlots, SummarySpec
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.views import ContiguousView, tile_slots
from ringjax.ops.mask import Coords
from ringjax.parallel.local_arrays import move
from ringjax.parallel.programs import bounded
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class KVCache(ModelCache):
  """A cache of fixed capacity.

  Attributes:
    slots: For each kind of layer its `LayerKV`, `State` if recurrent,
      `SummarySlots` for those of its keys, or `DistantSlots` if a call fetches
      its layers.
    held: Slot table (token of each slot) of the layers that keep all tokens.
    rings: Slot tables of the ring buffers, one for each size.
    ring_of: For each kind of layer the index of its ring in `rings`, or None.
    kind: Storage format of keys and values.
    mesh: Device mesh whose `axis` shards S; None for one device.
    axis: Mesh axis of the sequence.
    shapes: For each kind of layer, the shape of one token's cached vectors.
    dtype: Dtype of keys and values after decoding.
    constants: For each kind of layer the constants of its key and value codecs,
      [L, K, n] each; with a codec per head, constants for each codec.
    states: Encoder states that cross-attention reads, per row, or None.
    growth: Growth step and limit; None if the capacity is fixed.
  """

  slots: tuple[Any, ...]
  held: ContiguousSlots
  rings: tuple[WindowSlots, ...] = ()
  ring_of: tuple[int | None, ...] = ()
  kind: CacheConfig = DENSE
  mesh: Mesh | None = None
  axis: str | None = None
  shapes: tuple[LayerCacheSpec | StateShape | SummarySpec, ...] = ()
  dtype: DTypeLike | None = None
  constants: tuple[Any, ...] = ()
  states: EncoderStates | None = None
  growth: Growth | None = None
  row_axes: ClassVar[Mapping[str, int]] = {
    "slots": 1,
    "held": 0,
    "rings": 0,
    "states": 0,
  }
  tables: ClassVar[tuple[str, ...]] = ("held", "rings")
  changing: ClassVar[tuple[str, ...]] = ("held", "rings", "slots")
  call_fields: ClassVar[tuple[str, ...]] = ("slots",)

  @classmethod
  def spec(
    cls,
    shapes: tuple[LayerCacheSpec | StateShape | SummarySpec, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheConfig = DENSE,
    mesh: Mesh | None = None,
    axis: str | None = None,
    head_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
    platform: str | None = None,
    filled: bool = False,
  ) -> KVCache:
    """Specs (shapes, dtypes, shardings) of an empty cache; allocates nothing.

    Args:
      shapes: For each kind of layer, the shape of one token's cached vectors.
      batch: Number of rows, B.
      capacity: Tokens per row, a multiple of the number of shards.
      dtype: Dtype of keys and values.
      kind: Storage format of keys and values.
      mesh: Device mesh; None for one device.
      axis: Mesh axis that shards the slots.
      head_axis: Mesh axis that shards the KV heads if it divides them.
      batch_axes: Mesh axes that shard the batch.
      platform: Target platform; default: the mesh's, or else JAX's default.
      filled: Whether to pad head dims on a TPU with zeros, so that programs
        need not copy the slots in and out: see `filled_up`.

    Raises:
      OptionError: If `capacity` is not a multiple of the number of shards.
    """
    size = 1 if axis is None or mesh is None else mesh.shape[axis]
    if capacity < 1 or capacity % size:
      raise OptionError(
        "capacity",
        capacity,
        f"a positive multiple of the {size} shards",
        f"round it up to {max(1, math.ceil(capacity / size)) * size}",
      )
    room = CacheSpec.of(
      batch,
      capacity,
      dtype,
      kind.codec,
      mesh=mesh,
      axis=axis,
      head_axis=head_axis,
      batch_axes=batch_axes,
      platform=platform,
    )
    sizes = [ring_size(getattr(s, "reach", None), kind, room) for s in shapes]
    rings = sorted({x for x in sizes if x is not None})
    rooms = [dataclasses.replace(room, capacity=n) for n, _ in rings]
    ring_of = tuple(None if x is None else rings.index(x) for x in sizes)

    def slots(
      shape: LayerCacheSpec | StateShape | SummarySpec, room: CacheSpec
    ) -> LayerKV | State | SummarySlots:
      if filled and isinstance(shape, LayerCacheSpec):
        return shape.filled_slots(room)
      return shape.slots(room)

    return cls(
      tuple(
        slots(s, room if n is None else rooms[n])
        for s, n in zip(shapes, ring_of, strict=True)
      ),
      ContiguousSlots.spec(room),
      tuple(
        WindowSlots.spec(room, reach, kind.layout.slack)
        for room, (_, reach) in zip(rooms, rings, strict=True)
      ),
      ring_of,
      kind,
      mesh,
      axis,
      shapes,
      jnp.dtype(dtype),
      tuple(constants_spec(s, kind, room) for s in shapes),
    )

  def allocated(self, files: CacheFiles | None = None) -> KVCache:
    del files
    constants = filled_constants(self.shapes, self.kind, self.constants)
    return dataclasses.replace(zeros(self), constants=constants)

  @property
  def at(self) -> Coords:
    """Coordinates of all slots, [B, S]."""
    return self.held.at

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over a full cache's tiles.

    Args:
      platform: Platform whose tiles are counted, as JAX names it.
    """
    max_tiles = 0
    for slots, layer_spec in zip(self.slots, self.shapes, strict=True):
      if isinstance(slots, LayerKV):
        assert isinstance(layer_spec, LayerCacheSpec)
        length = slots.k.shape[token_axis(slots.k)] // self.shards
        shape = (*slots.k.shape[:3], length, layer_spec.key)
        # Tiles of decoded keys, in the cache's dtype.
        tile: Any = jax.ShapeDtypeStruct(shape, self.dtype)
        stored = ContiguousView(tile, tile, self.at, jnp.int32(0))
        max_tiles = max(max_tiles, -(-length // tile_slots(stored, platform)))
    return max_tiles / 2

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of free slots, int [B, R]; None under a trace.

    Slots that the cache can still grow by are included, see `growing`.
    """
    free = self.held.free()
    if free is None or self.growth is None:
      return free
    return free + self.growth.limit - self.capacity

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self,
    at: Coords,
    *,
    replicated: bool,
    sees: bool,
    tokens: Int[Array, "B T"] | None = None,
  ) -> KVCache:
    del tokens
    mode = REPLICATED if replicated else SHARDED if sees else FILL
    return self.each_table(lambda table: table.allocate(at, mode))

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    if isinstance(slots, State):
      return slots.layer(self, index)
    if isinstance(slots, SummarySlots):
      return RowSummaryLayer(
        cache=self,
        slots=slots,
        index=index,
        spec=self._summary_spec(kind),
        unrotated=self.kind.layout.unrotated,
      )
    return KVLayer(self, self.table(kind), slots, index, kind)

  def _summary_spec(self, kind: int) -> SummarySpec:
    shape = self.shapes[kind]
    assert isinstance(shape, SummarySpec)
    return shape

  def table(self, kind: int) -> ContiguousSlots | WindowSlots:
    """Slot table of a kind of layer: the token in each slot."""
    number = self._ring(kind)
    return self.held if number is None else self.rings[number]

  def _permuted(self, f: Callable[..., tuple[Any, Any]]) -> KVCache:
    """Replace each slot table, and the order of its layers' tokens.

    Args:
      f: Function of a table that returns the new one, and a function that
        permutes the arrays of a layer.
    """
    slot_table, permute = f(self.held)
    rings = [f(ring) for ring in self.rings]

    def permuted(kind: int, slots: PyTree) -> PyTree:
      if isinstance(slots, State | SummarySlots):
        # Summaries are of positions.
        return slots
      number = self._ring(kind)
      move_tokens = permute if number is None else rings[number][1]
      return jax.tree.map(move_tokens, slots)

    return dataclasses.replace(
      self,
      slots=tuple(permuted(kind, x) for kind, x in enumerate(self.slots)),
      held=slot_table,
      rings=tuple(ring for ring, _ in rings),
    )

  def _ring(self, kind: int) -> int | None:
    """Index of a layer kind's ring; None if it keeps all tokens."""
    return self.ring_of[kind] if self.ring_of else None

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def growing(self, step: int, limit: int) -> KVCache:
    """Return the cache with memory that grows as tokens are appended.

    Args:
      step: Minimum number of slots to add; longer caches grow by more.
      limit: Maximum number of tokens in a row.

    Raises:
      OptionError: If the slots are sharded, or layers have ring buffers or
        compressed keys.
    """
    compressed = any(isinstance(x, StateShape) and x.grows for x in self.shapes)
    if self.shards > 1 or self.rings or compressed:
      also = ", and compressed keys" if compressed else ""
      raise OptionError(
        "grow",
        f"{step}, of slots over {self.shards} shard(s) with {len(self.rings)} "
        f"sizes of ring buffers{also}",
        "one shard of the sequence, and layers that keep all tokens as keys",
        "leave it out, or pass cache_kind='dense' and no sequence axis",
      )
    return dataclasses.replace(self, growth=Growth(step, limit))

  def _grown(self, taken: Int[np.ndarray, "B R"] | int) -> KVCache:
    """Grow the cache to fit a call's tokens, if it grows; see `growing`.

    Each array is copied into a larger one and deleted, one after another.

    Args:
      taken: Number of slots that the call takes.
    """
    if self.growth is None:
      return self
    # Free slots after the last token of the longest row.
    spare = int(np.asarray(self.held.free()).min())
    need = self.capacity - spare + int(np.max(taken))
    if need <= self.capacity or self.capacity >= self.growth.limit:
      return self
    added_slots = self.growth.size(need) - self.capacity
    widened = lambda x, axis: widened_slots(x, axis, added_slots)
    slots = []
    for kind, s in enumerate(self.slots):
      if isinstance(s, SummarySlots):
        shape = self._summary_spec(kind)
        windows = shape.windows(self.capacity + added_slots, 1)
        added_windows = windows - shape.windows(self.capacity, 1)
        s = jax.tree.map(lambda x, n=added_windows: widened_slots(x, 3, n), s)
      elif not isinstance(s, State):
        s = jax.tree.map(lambda x: widened(x, token_axis(x)), s)
      slots.append(s)
    at = Coords(*(widened(x, 1) for x in self.held.at))
    slot_table = dataclasses.replace(self.held, at=at)
    return dataclasses.replace(self, slots=tuple(slots), held=slot_table)

  def changed(self, change: changes.CacheChange) -> KVCache:
    slack = self.kind.layout.slack
    match change:
      case changes.Truncate(end, most):
        self._refuse_states("truncate")
        if self.rings and (most is None or most > slack):
          self._refuse_far(end)
        return self.each_table(lambda table: table.truncate(end))
      case changes.KeepTokens(kept):
        self._refuse_states("keep")
        refuse_beyond_slack(self, "kept", kept.shape[1])
        refuse_holes(self, kept)
        return _keep(self, kept)
      case changes.KeepFirst(count, tokens):
        self._refuse_states("keep_first")
        refuse_beyond_slack(self, "tokens", tokens)
        return _keep_first(self, count)
      case changes.ResetRows(rows):
        return self._emptied(rows)
      case changes.InsertRows(rows, KVCache() as other):
        return self._inserted(rows, other)
      case changes.LoadBlocks(row, blocks, at):
        return self._loaded(row, blocks, at)
      case changes.MakeRoom(taken):
        return self._grown(taken)
      case changes.Flush():
        return self._grown(1)
      case changes.Evict() | changes.RecordMore():
        # It drops no tokens, and records no queries.
        return self
    return super().changed(change)

  def _refuse_far(self, end: jax.Array) -> None:
    """Check that ring buffers can be truncated as far as `end`."""
    slack = self.kind.layout.slack
    if isinstance(end, jax.core.Tracer) or isinstance(
      self.held.used, jax.core.Tracer
    ):
      raise OptionError(
        "length",
        "a traced value, with windowed layers",
        "one that is known, so that it can be checked",
        "truncate outside of jit, or make the cache with kind='dense'",
      )
    new = np.asarray(end)
    removed_tokens = np.where(new > 0, np.asarray(self.length) - new, 0)
    furthest = int(removed_tokens.max(initial=0))
    if furthest > slack:
      raise OptionError(
        "length",
        f"{furthest} tokens less than a row has, with windowed layers",
        f"at most the last {slack}, or all of a row",
        "make the cache with kind='dense', or with a larger slack",
      )

  def _emptied(self, rows: Int[np.ndarray, " n"]) -> KVCache:
    emptied = lambda table: placed_as(table.emptied(rows), table)
    cache = self.each_table(emptied)
    clear = lambda x: x.at[:, rows].set(0)
    slots = tuple(
      jax.tree.map(clear, s) if isinstance(s, State) else s for s in self.slots
    )
    return dataclasses.replace(
      cache,
      slots=placed_as(slots, self.slots),
      states=self.states and self.states.reset(rows),
    )

  def _inserted(self, rows: Int[np.ndarray, " n"], other: KVCache) -> KVCache:
    shape = lambda c: (
      [(x.shape[0], *x.shape[2:]) for x in jax.tree.leaves(c.slots)]
      + [c.capacity, c.kind, c.shards]
    )
    if shape(other) != shape(self):
      raise OptionError(
        "other",
        f"a cache of {other.capacity} tokens, kind {other.kind}, over "
        f"{other.shards} shard(s)",
        f"one of the same model, capacity {self.capacity}, kind {self.kind} "
        f"and {self.shards} shard(s)",
        "make both with model.init_cache and the same arguments but batch",
      )
    if rows.size != other.batch:
      raise ShapeError(
        "rows",
        f"{rows.size} for a cache of {other.batch}",
        f"{other.batch}, one for each row of the other cache",
        "take the rows to insert: other.take(examples)",
      )
    states = inserted(self.states, rows, other.states, self.batch)
    slot_table = dataclasses.replace(other.held, mode=self.held.mode)
    other = dataclasses.replace(other, held=slot_table, states=None)
    stateless = dataclasses.replace(self, states=None)
    fields = stateless.rows_replaced(rows, other) | {"states": states}
    return dataclasses.replace(self, **fields)

  def export(self, row: int, start: int, stop: int) -> Blocks:
    row = int(row_indices([row], self.batch)[0])
    token_slots, rings = self.located(self.at, row, start, stop)

    def part(kind: int, slots: PyTree) -> PyTree:
      if isinstance(slots, SummarySlots):
        # Those of the windows that end with exported tokens.
        stride = self._summary_spec(kind).sizes.stride
        windows = slice(start // stride, stop // stride)
        return jax.tree.map(lambda x: x[:, row, :, windows], slots)
      number = self._ring(kind)
      index = jnp.asarray(
        token_slots if number is None else rings[number], jnp.int32
      )
      take = lambda x: jnp.take(x[:, row], index, axis=token_axis(x) - 1)
      return self.unfilled(kind, jax.tree.map(take, slots))

    parts = tuple(part(kind, x) for kind, x in enumerate(self.slots))
    at = Coords(*(x[row][jnp.asarray(token_slots, jnp.int32)] for x in self.at))
    return Blocks(at, parts, self.kind)

  def unfilled(self, kind: int, part: PyTree) -> PyTree:
    """Strip the padding of head dims from slots or tokens of a kind of layer.

    Args:
      kind: Index of the kind of layer.
      part: Arrays [..., >=H] and [..., >=J]; codes are returned unchanged.
    """
    shape = self.shapes[kind]
    if self.kind.codec is not None or not isinstance(shape, LayerCacheSpec):
      return part
    return LayerKV(part.k[..., : shape.key], part.v[..., : shape.value])

  def located(
    self, at: Coords, row: int, start: int, stop: int
  ) -> tuple[Int[np.ndarray, " _"], list[Int[np.ndarray, " _"]]]:
    """Find the slots of a row's positions, by position; see `export`.

    Args:
      at: Coordinates of the slots of layers that keep all tokens.
      row: Index of the row in the cache.
      start: First position.
      stop: Position after the last.

    Returns:
      Slots of the layers that keep all tokens, and slots of each ring buffer.
    """
    self._refuse_states("export")
    return located_slots(at, self.rings, row, start, stop)

  def _loaded(self, row: int, blocks: Blocks, at: Coords) -> KVCache:
    self._refuse_states("load")
    row = int(row_indices([row], self.batch)[0])
    check_blocks(self, blocks, at)
    count = at.pos.shape[0]
    grown = self.with_room(count)
    row_cache = grown.take(np.array([row]))
    row_cache.check(1, count, replicated=True, sees=True)
    at = Coords(*(jnp.asarray(x, jnp.int32)[None] for x in at))
    filled: Any = appended_blocks(row_cache, blocks.parts, at)
    return grown.insert(np.array([row]), filled)

  def gathered(self, device: jax.Device) -> KVCache:
    """Copy the cache to one device."""
    to_device = lambda x: jax.tree.map(lambda y: move(y, device), x)
    cache = self._permuted(lambda table: table.gathered(device))
    return dataclasses.replace(
      cache,
      slots=tuple(
        to_device(x) if isinstance(x, State | SummarySlots) else x
        for x in cache.slots
      ),
      constants=to_device(self.constants),
      states=to_device(self.states),
      mesh=None,
      axis=None,
    )

  def _refuse_states(self, what: str) -> None:
    if self.recurrent:
      raise OptionError(
        "cache",
        f"{what} of recurrent layers, whose state does not go back",
        "keys and values in every layer",
        "use snapshot and restore, or read the text into a new cache",
      )


tree.register(
  KVCache,
  ("slots", "held", "rings", "constants", "states"),
  ("ring_of", "kind", "mesh", "axis", "shapes", "dtype", "growth"),
)


@bounded
@jax.jit
def _keep(cache: KVCache, kept: jax.Array) -> KVCache:
  return cache._permuted(lambda table: table.keep_tokens(kept))


@bounded
@jax.jit
def _keep_first(cache: KVCache, count: jax.Array) -> KVCache:
  count = jnp.maximum(count, 0).astype(jnp.int32)
  return cache.each_table(lambda table: table.kept_first(count))
