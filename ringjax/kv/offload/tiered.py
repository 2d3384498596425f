"""A cache with a part in host memory: the newest tokens stay on the devices.

Guarantees: all tokens are kept, bit for bit, whatever codec stores them. What
a call reads does not depend on which memory the older part is in. Rows are
independent; each device moves tokens that it had.
Cost: of each call, one copy of the older part to the devices, see `HostView`;
of each move, one copy of what moves.
Memory: on the devices `device` tokens of a row and two blocks of `block`
tokens on each shard, whatever its length; a call that brings more tokens makes
the open cache larger until the next `evict`. On the hosts, blocks for a whole
row.

The newest tokens are in an ordinary cache, the open one, to which calls append.
`evict` is called between calls of the model, outside of jit, and moves the
oldest; `generate` does so by itself. Ring buffers of windowed layers and states
of recurrent ones stay on the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from ringjax import tree
from ringjax.checks import one_of
from ringjax.errors import OptionError, PromptError
from ringjax.kv.base import HOST, CacheSpec, zeros
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_rows import on_host, placed_as, row_indices
from ringjax.kv.composed.open_cache import ResizableCache, WithOpenLayer
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.offload.host_memory import (
  check_host_memory,
  default_device,
  host_zeros,
)
from ringjax.kv.offload.moved_blocks import moved_blocks, noted_blocks, shifted
from ringjax.kv.storage import changes
from ringjax.kv.storage.exported_blocks import Blocks
from ringjax.kv.storage.pages import Places, host
from ringjax.kv.storage.slots import ContiguousSlots
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.streamed import HostView
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.parallel.local_arrays import move
from ringjax.typing import ArrayLeaf, Index, leaf

# Memories of the older part; "device" is for comparisons.
MEMORIES = (HOST, "device")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TieredCache(ResizableCache):
  """Blocks of older tokens in host memory, and an open cache of the newest.

  Attributes:
    open: Open cache of the newest tokens.
    held: Slot table (token of each slot) of the blocks, on the devices.
    blocks: For each kind of layer its blocks, [L N, B, K, P, X] for keys and
      for values, see `HostView`; None if all stays on the devices.
    kind: Cache kind, with `device` set.
    limit: Maximum number of tokens in a row.
    memory: Memory kind of the blocks, one of `MEMORIES`.
    places: Mesh axes that shard the blocks.
  """

  held: ContiguousSlots
  blocks: tuple[LayerKV | None, ...]
  memory: str
  places: Places
  older: ClassVar[str] = "held"
  row_axes: ClassVar[Mapping[str, int]] = {"held": 0, "blocks": 1}
  # Blocks only grow, so that their table says what they held.
  changing: ClassVar[tuple[str, ...]] = ("open", "held")

  # -------------------------------------------------------------------------
  # Making one
  # -------------------------------------------------------------------------

  @classmethod
  def spec(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheConfig,
    memory: str = HOST,
    **where: Any,
  ) -> TieredCache:
    """Specs of an empty cache, as `KVCache.spec`.

    Args:
      kind: Cache kind, with `device` set.
      memory: Memory kind of the blocks: "pinned_host", or "device" as baseline.
      **where: Other arguments of `KVCache.spec`.

    Raises:
      OptionError: If `memory` is another one, or as `KVCache.spec` does.
    """
    one_of("memory", memory, MEMORIES, remedy="leave it out")
    mesh: Any = where.get("mesh")
    axis = where.get("axis")
    size = mesh.shape[axis] if axis is not None else 1
    local = min(_open_slots(kind, size) * size, capacity)
    open_cache = KVCache.spec(
      shapes, batch, local, dtype, kind=kind.opened(), **where
    )
    # Only for its check that the shards divide the whole capacity.
    KVCache.spec((), batch, capacity, dtype, kind=kind.opened(), **where)
    count = -(-capacity // size // kind.tier.block)
    count += -count % kind.tier.tile_blocks
    room = CacheSpec.of(
      batch, size * count * kind.tier.block, dtype, kind.codec, **where
    )
    return cls(
      open=open_cache,
      held=ContiguousSlots.spec(room),
      blocks=tuple(
        _blocks_spec(shape, room, kind.tier.block, size * count, memory)
        if isinstance(shape, LayerCacheSpec) and open_cache._ring(n) is None
        else None
        for n, shape in enumerate(shapes)
      ),
      kind=kind,
      limit=capacity,
      memory=memory,
      # `with_heads` drops the head axis for arrays whose heads do not divide.
      places=Places.of(room, 0),
    )

  def allocated(self, files: CacheFiles | None = None) -> TieredCache:
    """Create the arrays of an empty cache from its specs.

    Raises:
      OptionError: If the devices lack the memory of the blocks.
    """
    if self.memory == HOST:
      mesh = self.mesh
      device = default_device() if mesh is None else mesh.local_devices[0]
      check_host_memory(
        device,
        "device",
        f"{self.kind.tier.device}",
        "leave device out: all tokens then stay on the devices",
      )
    open_cache, slot_table = self.open.allocated(files), zeros(self.held)
    if self.mesh is None:
      # Blocks are committed to a device, and so is all that a call returns:
      # an uncommitted cache at the start would make jit compile twice.
      open_cache, slot_table = jax.device_put(
        (open_cache, slot_table), default_device()
      )
    blocks = jax.tree.map(host_zeros, self.blocks)
    return dataclasses.replace(
      self, open=open_cache, held=slot_table, blocks=blocks
    )

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  def bytes_by_memory(self) -> dict[str, int]:
    """Total bytes of all shards, by memory kind."""
    sizes = {"device": 0, self.memory: 0}
    for x in jax.tree.leaves(self):
      memory = HOST if x.sharding.memory_kind == HOST else "device"
      sizes[memory] += x.nbytes
    return sizes

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over a full cache's blocks.

    The loops of `fold_tiles` read two blocks and one block of host memory a
    turn; a kernel reads the part on the device.
    """
    del platform
    return (self.held.capacity / self.kind.tier.block / self.shards - 1) / 3

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of tokens that still fit, int [B, R]; None under a trace.

    Slots that `truncate` left empty in a block are not free.
    """
    if isinstance(self.open.held.used, jax.core.Tracer):
      return None
    used_slots = host(self.open.held.used) + host(self.held.used)
    return self.limit // self.shards - used_slots

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(self, at: Coords, *, sees: bool, **call: Any) -> TieredCache:
    cache = super().allocate(at, sees=sees, **call)
    if sees:
      return cache
    return dataclasses.replace(cache, held=self.held.emptied(slice(None)))

  def layer(self, kind: int, slots: PyTree, index: Index) -> TieredLayer:
    inner = self.open.layer(kind, slots, index)
    if self.blocks[kind] is None:
      return inner
    return TieredLayer(self, inner, index, kind)

  # -------------------------------------------------------------------------
  # Moving tokens to the host
  # -------------------------------------------------------------------------

  def _evicted(self) -> TieredCache:
    """Move older tokens to the blocks and shrink the open cache."""
    self._refuse_trace("evict")
    size, block = self.shards, self.kind.tier.block
    min_slots = min(_open_slots(self.kind, size), self.limit // size)
    used, older = host(self.open.held.used), host(self.held.used)
    # Shards that have fewer tokens of a row keep fewer: they get the next.
    total = used + older
    num_staying = -(-(self.kind.tier.device or 0) // size)
    num_staying = np.maximum(
      num_staying - (total.max(1, keepdims=True) - total), 0
    )
    num_blocks = np.maximum(used - num_staying, 0) // block
    num_blocks = np.minimum(num_blocks, (self.held.local - older) // block)
    if min_slots == self.limit // size:
      # All tokens fit on the devices.
      num_blocks = np.zeros_like(num_blocks)
    count = jnp.asarray(num_blocks, jnp.int32)
    cache = self
    if num_blocks.any():
      slots = tuple(
        None if blocks is None else x
        for blocks, x in zip(self.blocks, self.open.slots, strict=True)
      )
      cache = self._with_blocks(slots, count)
    local = max(min_slots, int((used - block * num_blocks).max(initial=0)))
    if num_blocks.any() or local != self.open.held.local:
      shift = jnp.asarray(block * num_blocks, jnp.int32)
      cache = cache._with_open(shift, local)
    return cache

  def _with_blocks(
    self, slots: tuple[Any, ...], count: Int[Array, "B R"]
  ) -> TieredCache:
    """Append the first `count` blocks of open tokens to the older ones.

    Args:
      slots: Open slots of each kind of layer with blocks, None of others.
      count: Number of blocks to move, int32 [B, R].
    """
    block = self.kind.tier.block
    return dataclasses.replace(
      self,
      held=noted_blocks(self.held, self.open.held, count, block, self.places),
      blocks=moved_blocks(
        self.blocks, slots, self.held.used, count, self.memory, self.places
      ),
    )

  def _sized(self, local: int) -> TieredCache:
    """Resize the open cache to `local` slots per shard; nothing moves."""
    if local == self.open.held.local:
      return self
    return self._with_open(
      jnp.zeros((self.batch, self.shards), jnp.int32), local
    )

  def _with_open(self, shift: jax.Array, local: int) -> TieredCache:
    """Drop `shift` tokens of the open cache and resize it, by `shifted`."""
    keeps_all = tuple(x is not None for x in self.blocks)
    open_cache = shifted(self.open, shift, local, keeps_all, self.places)
    return dataclasses.replace(self, open=open_cache)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def changed(self, change: changes.CacheChange) -> TieredCache:
    """Return the cache after a change between calls; see `ModelCache.changed`.

    A block that becomes partly empty is not refilled.
    Cost: to take or insert rows, a copy of blocks in the hosts' memory.

    Raises:
      OptionError: If `evict` has moved tokens of the last call that would be
        dropped; if rows are taken or inserted under a trace, or if their blocks
        are on other hosts.
    """
    match change:
      case changes.Truncate(end, _):
        cache = super().changed(change)
        return dataclasses.replace(cache, held=self._truncated_table(end))
      case changes.KeepTokens() | changes.KeepFirst():
        self._refuse_moved()
      case changes.ResetRows(rows):
        block_table = placed_as(self.held.emptied(rows), self.held)
        return dataclasses.replace(super().changed(change), held=block_table)
      case changes.TakeRows(rows):
        self._refuse_trace("take", rows)
      case changes.InsertRows(rows, other):
        self._refuse_trace("insert")
        this, that = self._same_size(other)
        return super(TieredCache, this).changed(changes.InsertRows(rows, that))
      case changes.LoadBlocks(row, blocks, at):
        return self._loaded(row, blocks, at)
      case changes.Evict() | changes.Flush():
        # Of all rows: moving tokens does not change them.
        return self._evicted()
    return super().changed(change)

  def _truncated_table(self, end: Int[Array, " B"]) -> ContiguousSlots:
    """Slot table of the blocks without positions from `end` on."""
    block_table = self.held.truncate(end)
    block = self.kind.tier.block
    used = block_table._everywhere(-(-block_table.used // block) * block)
    return dataclasses.replace(block_table, used=used, before=used + 0)

  def _refuse_moved(self) -> None:
    """Refuse to take back tokens that `evict` has moved to the blocks."""
    last_call = self.open.held.before
    if not isinstance(last_call, jax.core.Tracer) and host(last_call).min() < 0:
      raise OptionError(
        "cache",
        "keep, where tokens of the last call have moved to the blocks",
        "the cache that the call returned",
        "call keep first, and evict after it",
      )

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """Copy a row's tokens to host arrays; see `ModelCache.export`.

    A cache without host memory can load them, too.
    """
    self._refuse_trace("export")
    row = int(row_indices([row], self.batch)[0])
    located_slots, rings = self.open.located(self.at, row, start, stop)
    older = self.held.capacity
    in_blocks = located_slots < older

    def join_tokens(x: jax.Array, blocks: jax.Array) -> np.ndarray:
      axis = token_axis(x) - 1
      newer = on_host(x[:, row], "export")
      newer = np.take(newer, located_slots[~in_blocks] - older, axis)
      # [L, N, K, P, X]
      part = self._by_layer(on_host(blocks, "export")[:, row], len(x))
      number, slot = np.divmod(located_slots[in_blocks], self.kind.tier.block)
      part = np.moveaxis(part, axis + 1, 2)[:, number, slot]
      part = np.moveaxis(part, 1, axis)
      order = np.argsort(np.argsort(~in_blocks, kind="stable"))
      return np.take(np.concatenate([part, newer], axis), order, axis)

    def export_layer(kind: int, slots: PyTree) -> PyTree:
      blocks, number = self.blocks[kind], self.open._ring(kind)
      if blocks is not None:
        return jax.tree.map(join_tokens, slots, blocks)
      assert number is not None
      take = lambda x: np.take(
        on_host(x[:, row], "export"), rings[number], token_axis(x) - 1
      )
      return jax.tree.map(take, slots)

    parts = tuple(export_layer(n, x) for n, x in enumerate(self.open.slots))
    at = Coords(*(jnp.asarray(host(x)[row][located_slots]) for x in self.at))
    return Blocks(at, parts, self.open.kind)

  def _loaded(self, row: int, blocks: Blocks, at: Coords) -> TieredCache:
    """Append exported tokens to a row; see `ModelCache.load`.

    They pass through the open cache in steps of a block, or all at once if
    layers have ring buffers. As after `evict`, do not use this cache again.
    """
    self._refuse_trace("load")
    row = int(row_indices([row], self.batch)[0])
    count = at.pos.shape[0]
    free = self.free()
    assert free is not None
    free_slots = int(free.sum(1)[row])
    if count > free_slots:
      raise PromptError(
        "blocks",
        f"{count} tokens for a row with {free_slots} free slots",
        f"at most {free_slots}",
        "make a larger cache, with model.init_cache(batch, capacity)",
      )
    step = count if self.open.rings else self.kind.tier.block
    cut = lambda x, first, axis: x[
      (slice(None),) * axis + (slice(first, first + step),)
    ]
    cache = self
    for first in range(0, count, step):
      cut_slots = lambda x, first=first: cut(x, first, token_axis(x))
      cut_coords = lambda x, first=first: Coords(*(cut(y, first, 0) for y in x))
      part = blocks._replace(
        at=cut_coords(blocks.at), parts=jax.tree.map(cut_slots, blocks.parts)
      )
      cache = cache.evict().with_room(min(step, count - first))
      loaded = cache.open.load(row, part, cut_coords(at))
      cache = dataclasses.replace(cache, open=loaded)
    return cache.evict()

  def gathered(self, device: jax.Device) -> TieredCache:
    """Copy the cache to one device and its host."""
    self._refuse_trace("gathered")
    block, order = self.kind.tier.block, self._gathered_order()
    count = order.shape[1]

    def gather_blocks(x: jax.Array) -> jax.Array:
      index = order.T[None].reshape(1, count, -1, *(1,) * (x.ndim - 2))
      by_layer = self._by_layer(on_host(x, "gathered"), x.shape[0] // count)
      ordered = np.take_along_axis(by_layer, index, 1).reshape(x.shape)
      memory = x.sharding.memory_kind
      sharding = SingleDeviceSharding(device, memory_kind=memory)
      return jax.device_put(ordered, sharding)

    def coords(x: jax.Array) -> jax.Array:
      by_block = host(x).reshape(self.batch, count, block)
      ordered = np.take_along_axis(by_block, order[..., None], 1)
      return move(jnp.asarray(ordered.reshape(self.batch, -1)), device)

    used = jnp.asarray(host(self.held.used).sum(1, keepdims=True))
    used = move(used, device)
    return dataclasses.replace(
      self,
      open=self.open.gathered(device),
      held=ContiguousSlots(
        at=Coords(*map(coords, self.held.at)), used=used, before=used + 0
      ),
      blocks=jax.tree.map(gather_blocks, self.blocks),
      places=Places(),
    )

  def _gathered_order(self) -> Int[np.ndarray, "B N"]:
    """Blocks of each row on one device: the used ones first, by shard."""
    block, size = self.kind.tier.block, self.shards
    count = self.held.capacity // block
    slot = np.arange(count) % (count // size) * block
    shard = np.arange(count) // (count // size)
    empty = slot[None] >= host(self.held.used)[:, shard]
    return np.argsort(empty, axis=1, kind="stable")

  def _by_layer(self, x: np.ndarray, layers: int) -> np.ndarray:
    """Reshape blocks [L N, ...], stored shard by shard, to [L, N, ...]."""
    # No -1 in the reshape: values that are part of the keys have size 0.
    blocks = x.shape[0] // layers
    by_shard = x.reshape(
      self.shards, layers, blocks // self.shards, *x.shape[1:]
    )
    return np.moveaxis(by_shard, 0, 1).reshape(layers, blocks, *x.shape[1:])

  def _refuse_trace(self, what: str, *more: Any) -> None:
    if any(
      isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((self, more))
    ):
      raise OptionError(
        "cache",
        f"{what} inside of jit",
        "a call between calls of the model, for it writes the hosts' memory",
        f"call {what} outside of jit; rj.infer.generate does what it needs",
      )


tree.register(
  TieredCache,
  ("open", "held", "blocks"),
  ("kind", "limit", "memory", "places"),
)


@dataclasses.dataclass(frozen=True)
class TieredLayer(WithOpenLayer):
  """One layer's part of a `TieredCache` during one call."""

  cache: TieredCache
  index: Index
  kind: int

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    cache, blocks = self.cache, self.cache.blocks[self.kind]
    assert blocks is not None
    codec, rotation = cache.kind.codec, self.inner.rotation
    view = HostView(
      *blocks,
      cache.held.at,
      self.index,
      layers=cache.shapes[self.kind].layers,
      tile_blocks=cache.kind.tier.tile_blocks,
    )
    if codec is not None:
      shape = cache.shapes[self.kind]
      view = dataclasses.replace(
        view,
        constants=self.inner._constants(),
        decoders=shape.decoders(codec, cache.dtype),
      )
    if cache.kind.layout.unrotated and not rotation.trivial:
      view = dataclasses.replace(view, rotation=rotation)
    return (view, *self.inner.views(apart=apart))


# ---------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------


def _open_slots(kind: CacheConfig, shards: int) -> int:
  """Slots of the open cache on each shard.

  Two more blocks than what stays: a block's tokens fit between two moves.
  """
  return -(-(kind.tier.device or 0) // shards) + 2 * kind.tier.block


def _blocks_spec(
  shape: LayerCacheSpec, room: CacheSpec, block: int, count: int, memory: str
) -> LayerKV:
  """Shapes, dtypes and shardings of the blocks of a kind of layer."""
  block_spec = dataclasses.replace(
    room, capacity=block, mesh=None, axes={}, target=room.platform
  )

  def blocks(x: ArrayLeaf) -> ArrayLeaf:
    layers, *dims = x.shape
    names = ("tokens", "batch", "heads") if 0 not in dims else ()
    spec = room.like((layers * count, *dims), x.dtype, names)
    if 0 in dims:
      return spec
    sharding = spec.sharding
    if sharding is None:
      sharding = SingleDeviceSharding(default_device(), memory_kind=memory)
    else:
      sharding = sharding.with_memory_kind(memory)
    return leaf(jax.ShapeDtypeStruct(spec.shape, x.dtype, sharding=sharding))

  return LayerKV(*map(blocks, shape.slots(block_spec)))
