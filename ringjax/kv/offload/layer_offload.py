"""A cache whose layers are offloaded to host memory or disk between uses.

Guarantees: a call computes the same as with a `KVCache`, bit for bit, wherever
the keys of a layer are stored. `truncate` only marks tokens as free; the next
call overwrites them.
Cost: all keys and values of a layer are copied to the devices each time that it
runs; the blocks with the call's own tokens are copied back. The next layer is
fetched while one runs; after the last layer of a loop over layers, that one is
fetched once more.
Memory: on the devices the layers placed there, and up to three more: the
running layer as stored and as read, and the one in flight.

Ring buffers of windowed layers and states of recurrent ones stay on the
devices. Keys of a layer are N blocks of P slots, in one array [n N, B, K, P, X]
for the n layers of each memory: a device cuts the memory of a host along one
axis. The last block ends with the last slot, and shares some with the one
before, where they are up to date.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import (
  DEVICE,
  DISK,
  HOST,
  IN_HOST,
  CacheSpec,
  LayerCache,
  StateCache,
)
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Allocated, PerHead
from ringjax.kv.composed.open_cache import WithOpenCache, WithOpenLayer
from ringjax.kv.kv_layer import KVLayer
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.offload.cache_files import CacheFiles, read_blocks, write_block
from ringjax.kv.offload.tiered import default_device, host_zeros
from ringjax.kv.state import StateLayer
from ringjax.kv.storage.changes import (
  InsertRows,
  KeepFirst,
  KeepTokens,
  TakeRows,
)
from ringjax.kv.storage.pages import Places
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.typing import Index

# Slots of a block: a call writes back whole blocks.
_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadLayout:
  """Storage layout of the layers of one kind.

  Attributes:
    tiers: Memory of each layer, from `kv.base.TIERS`.
    slots: Number of slots of a layer on a shard.
    blocks: Number of blocks of a layer on a shard, N.
    places: Mesh axes that shard the blocks.
  """

  tiers: tuple[str, ...]
  slots: int
  blocks: int
  places: Places

  def rank(self, index: int) -> int:
    """Index of a layer among the layers in its memory."""
    return self.tiers[:index].count(self.tiers[index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedKV:
  """Keys and values of the layers of one kind.

  Attributes:
    resident: Blocks of keys and values of layers on the devices; () if no
      layer is there.
    hosted: Blocks of layers in host memory, likewise.
    filed: For layers on disk, int32 [3]: number of blocks written so far, and
      the file numbers of keys and values; () if no layer is there.
    layout: Storage layout of the layers.
    stored: Specs of the blocks of one layer, for keys and for values.
  """

  resident: tuple[Any, ...]
  hosted: tuple[Any, ...]
  filed: PyTree
  layout: OffloadLayout
  stored: tuple[jax.ShapeDtypeStruct, ...]


tree.register(
  OffloadedKV, ("resident", "hosted", "filed"), ("layout", "stored")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedCache(WithOpenCache):
  """A `KVCache` with keys and values of each layer in the memory of its tier.

  Attributes:
    open: Slot tables, and the kinds of layers that stay on the devices.
    kind: Storage format of keys and values.
    limit: Number of tokens that fit in a row.
    layers: For each kind of layer its keys and values; None if `open` has them.
  """

  layers: tuple[OffloadedKV | None, ...]
  described: ClassVar[str] = (
    "a cache whose layers are in host memory or on disk"
  )
  refuses: ClassVar[Mapping[type, tuple[str, str]]] = {
    KeepTokens: ("keep, of drafted tokens", "leave speculate= out"),
    KeepFirst: ("keep_first, of drafted tokens", "leave speculate= out"),
    TakeRows: ("take", "leave the placement of the cache out"),
    InsertRows: ("insert", "leave the placement of the cache out"),
  }

  # -------------------------------------------------------------------------
  # Creation
  # -------------------------------------------------------------------------

  @classmethod
  def spec(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    tiers: Sequence[str],
    kind: CacheConfig,
    **where: Any,
  ) -> OffloadedCache:
    """Specs of an empty cache, as `KVCache.spec`.

    Args:
      tiers: Memory of each layer of the model, from `kv.base.TIERS`.
      kind: Storage format: without a policy, `first`, `recent`, `device` and
        codecs per head.
      **where: Other arguments of `KVCache.spec`.

    Raises:
      OptionError: If the kind is not supported, or layers are on disk on a
        mesh of several devices, or as `KVCache.spec` does.
    """
    mesh = where.get("mesh")
    if kind.evicting or kind.tier.device is not None:
      raise OptionError(
        "cache_placement",
        f"layers elsewhere, of a cache of kind {kind}",
        "a kind that keeps all tokens of a layer together",
        "leave its policy, first, recent and device out",
      )
    if isinstance(kind.codec, Allocated | PerHead):
      raise OptionError(
        "cache_placement",
        "layers elsewhere, of heads with codecs of their own",
        "one codec for all heads, or none",
        "take one codec, as cache_kind='int8'",
      )
    if mesh is not None and mesh.devices.size > 1 and DISK in tiers:
      raise OptionError(
        "cache_placement",
        f"layers on disk, on a mesh of {mesh.devices.size} devices",
        "one device, whose process reads the files",
        "place them in host memory",
      )
    full_cache = KVCache.spec(
      shapes, batch, capacity, dtype, kind=kind, **where
    )
    room = CacheSpec.of(batch, capacity, dtype, kind.codec, **where)
    layers = tuple(
      _spec_of(shape, room, tuple(tiers[n] for n in shape.which))
      if isinstance(shape, LayerCacheSpec) and full_cache._ring(number) is None
      else None
      for number, shape in enumerate(shapes)
    )
    if mesh is None:
      _check_memory(layers)
    open_cache = KVCache.spec(
      _emptied(shapes, layers), batch, capacity, dtype, kind=kind, **where
    )
    # Shapes and codec constants of all layers.
    open_cache = dataclasses.replace(
      open_cache, shapes=full_cache.shapes, constants=full_cache.constants
    )
    return cls(open=open_cache, kind=kind, limit=capacity, layers=layers)

  def allocated(self, files: CacheFiles | None = None) -> OffloadedCache:
    """Create the arrays of an empty cache from its specs.

    Args:
      files: Files of the layers on disk.

    Raises:
      OptionError: If layers are on disk without `files`.
    """
    tiers = {t for x in self.layers if x is not None for t in x.layout.tiers}
    if files is None and DISK in tiers:
      raise OptionError(
        "disk",
        "None, with layers of the cache on disk",
        "a folder for its files",
        "pass disk=DIR, or place them in host memory",
      )

    def allocate_arrays(x: OffloadedKV | None) -> OffloadedKV | None:
      if x is None:
        return None
      filed = ()
      if x.filed != ():
        assert files is not None
        count = x.layout.tiers.count(DISK) * x.layout.blocks
        numbers = [
          files.allocate((count, *s.shape[1:]), s.dtype) for s in x.stored
        ]
        filed = jnp.asarray([0, *numbers, *[0] * (2 - len(numbers))], jnp.int32)
        if self.mesh is None:
          filed = jax.device_put(filed, default_device())
      return dataclasses.replace(
        x,
        resident=jax.tree.map(host_zeros, x.resident),
        hosted=jax.tree.map(host_zeros, x.hosted),
        filed=filed,
      )

    open_cache = self.open.allocated()
    if self.mesh is None:
      open_cache = jax.device_put(open_cache, default_device())
    layers = tuple(map(allocate_arrays, self.layers))
    return dataclasses.replace(self, open=open_cache, layers=layers)

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  @property
  def slots(self) -> tuple[Any, ...]:
    pairs = zip(self.open.slots, self.layers, strict=True)
    return tuple(slots if x is None else x for slots, x in pairs)

  @property
  def offloaded(self) -> bool:
    return True

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over a full cache's tiles.

    Offloaded layers are read as layers on the devices.
    """
    return KVCache.spec(
      self.shapes,
      self.batch,
      self.capacity,
      self.dtype,
      kind=self.kind,
      mesh=self.mesh,
      axis=self.axis,
      platform=platform,
    ).tile_trips(platform)

  def bytes_by_memory(self) -> dict[str, int]:
    """Total bytes of all shards, by memory of `kv.base.TIERS`."""
    sizes = {DEVICE: sum(x.nbytes for x in jax.tree.leaves(self.open))}
    sizes |= {IN_HOST: 0, DISK: self.disk_bytes}
    for x in self.layers:
      if x is None:
        continue
      sizes[DEVICE] += sum(a.nbytes for a in x.resident)
      sizes[IN_HOST] += sum(a.nbytes for a in x.hosted)
    return sizes

  @property
  def disk_bytes(self) -> int:
    return sum(
      x.layout.tiers.count(DISK)
      * sum(s.size * s.dtype.itemsize for s in x.stored)
      for x in self.layers
      if x is not None
    )

  @property
  def passing_bytes(self) -> int:
    return 3 * max(
      (
        sum(s.size * s.dtype.itemsize for s in x.stored)
        for x in self.layers
        if x is not None and set(x.layout.tiers) != {DEVICE}
      ),
      default=0,
    )

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def fetch(
    self,
    kind: int,
    slots: PyTree,
    index: Index,
    after: Shaped[Array, " ..."],
  ) -> tuple[jax.Array, ...]:
    """Start to copy the blocks of a layer to the devices: keys and values."""
    del kind
    if not isinstance(slots, OffloadedKV):
      return ()
    return _fetched(slots, jnp.asarray(index, jnp.int32), after)

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> KVLayer | OffloadedLayer | StateLayer:
    fetched = self.fetch(kind, slots, index, jnp.zeros((1,), jnp.float32))
    return self.fetched_layer(kind, slots, index, fetched)

  def fetched_layer(
    self, kind: int, slots: PyTree, index: Index, fetched: PyTree
  ) -> KVLayer | OffloadedLayer | StateLayer:
    if not isinstance(slots, OffloadedKV):
      return self.open.layer(kind, slots, index)
    merged = LayerKV(*_merged(slots, fetched))
    cut = lambda x: lax.dynamic_index_in_dim(x, index, 0)
    constants = list(self.open.constants)
    constants[kind] = jax.tree.map(cut, constants[kind])
    open_cache = dataclasses.replace(self.open, constants=tuple(constants))
    inner = open_cache.layer(kind, merged, jnp.int32(0))
    return OffloadedLayer(self, inner, slots, jnp.asarray(index, jnp.int32))

  def behind(
    self, layer: LayerCache | StateCache, after: PyTree
  ) -> LayerCache | OffloadedLayer | StateCache:
    if not isinstance(layer, OffloadedLayer):
      return layer
    return dataclasses.replace(layer, after=after)

  def updated(self, slots: tuple[Any, ...]) -> OffloadedCache:
    open_slots = tuple(
      old if isinstance(new, OffloadedKV) else new
      for old, new in zip(self.open.slots, slots, strict=True)
    )
    layers = tuple(x if isinstance(x, OffloadedKV) else None for x in slots)
    return dataclasses.replace(
      self, open=self.open.updated(open_slots), layers=layers
    )

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  lacks: ClassVar[Mapping[str, str]] = {
    **dict.fromkeys(
      (
        "export", "load", "snapshot", "restore", "call_state", "undo_call",
        "with_states",
      ),
      "leave the placement of the cache out",
    ),
    "explain": "call bytes_by_memory()",
    "gathered": "pass keep='sharded'",
  }  # fmt: skip


tree.register(OffloadedCache, ("open", "layers"), ("kind", "limit"))


@dataclasses.dataclass(frozen=True)
class OffloadedLayer(WithOpenLayer):
  """One layer's part of an `OffloadedCache` during one call.

  Attributes:
    cache: Cache of the call.
    inner: Copy of the layer on the devices, a stack of one layer.
    stored: Keys and values of all layers of the kind, to write back to.
    index: Index of the layer within the kind.
    after: Fetched arrays to wait for before writing back: it happens in place,
      so all reads must come first.
  """

  stored: OffloadedKV
  index: Index
  after: PyTree = ()

  @property
  def slots(self) -> OffloadedKV:
    """All layers of the kind, after writing back this one."""
    index, _ = lax.optimization_barrier((self.index, self.after))
    return _put(
      self.stored,
      index,
      self.inner.slots,
      self.inner.held.before,
      self.inner.held.used,
    )


# ---------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------


def _spec_of(
  shape: LayerCacheSpec, room: CacheSpec, tiers: tuple[str, ...]
) -> OffloadedKV:
  """Specs of the keys and values of a kind of layer."""
  local = room.capacity // room.shards
  block = min(_BLOCK, local)
  count = -(-local // block)
  block_spec = dataclasses.replace(
    room, capacity=block, mesh=None, axes={}, target=room.platform
  )
  stored = tuple(
    jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)
    for x in dataclasses.replace(shape, layers=1).slots(block_spec)
    if 0 not in x.shape
  )
  layout = OffloadLayout(
    tiers=tiers,
    slots=local,
    blocks=count,
    places=Places.of(room, shape.heads),
  )

  def tier_specs(tier: str, memory: str | None) -> tuple[Any, ...]:
    layers = tiers.count(tier)
    if not layers:
      return ()
    specs = []
    for x in stored:
      like = room.like(
        (layers * count * room.shards, *x.shape[1:]),
        x.dtype,
        ("tokens", "batch", "heads"),
      )
      sharding = like.sharding
      if memory is not None and sharding is None:
        sharding = SingleDeviceSharding(default_device(), memory_kind=memory)
      elif memory is not None:
        sharding = sharding.with_memory_kind(memory)
      specs.append(jax.ShapeDtypeStruct(like.shape, x.dtype, sharding=sharding))
    return tuple(specs)

  filed = ()
  if DISK in tiers:
    filed = jax.ShapeDtypeStruct((3,), jnp.int32)
  return OffloadedKV(
    resident=tier_specs(DEVICE, None),
    hosted=tier_specs(IN_HOST, HOST),
    filed=filed,
    layout=layout,
    stored=stored,
  )


def _emptied(
  shapes: tuple[Any, ...], layers: tuple[OffloadedKV | None, ...]
) -> tuple[Any, ...]:
  """Shapes with zero layers for the kinds that are stored in `layers`."""
  return tuple(
    shape if x is None else dataclasses.replace(shape, layers=0)
    for shape, x in zip(shapes, layers, strict=True)
  )


def _check_memory(layers: tuple[OffloadedKV | None, ...]) -> None:
  """Check that the device can read the memory of the layers."""
  if not any(x is not None and x.hosted for x in layers):
    return
  device = default_device()
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise OptionError(
      "cache_placement",
      f"host memory, on a {device.platform} with the memories {kinds}",
      f"devices that read {HOST} memory",
      "place these layers on disk",
    )


# ---------------------------------------------------------------------------
# To the devices and back
# ---------------------------------------------------------------------------


def _places(layout: OffloadLayout) -> tuple[jax.Array, jax.Array, list[str]]:
  """Branch and rank of each layer, and the memories in use by branch."""
  used = [t for t in (DEVICE, IN_HOST, DISK) if t in layout.tiers]
  branches = jnp.asarray([used.index(t) for t in layout.tiers], jnp.int32)
  ranks = [layout.rank(n) for n in range(len(layout.tiers))]
  return branches, jnp.asarray(ranks, jnp.int32), used


def _fetched(
  slots: OffloadedKV, index: jax.Array, after: Shaped[Array, " ..."]
) -> tuple[jax.Array, ...]:
  """Copy a layer's blocks to the devices, [N, B, K, P, X] per shard."""
  layout = slots.layout
  branches, ranks, used = _places(layout)
  index, after = lax.optimization_barrier((index, after))
  last = len(layout.tiers) - 1
  pick = lambda x: lax.dynamic_index_in_dim(
    x, jnp.minimum(index, last), 0, keepdims=False
  )
  rank = pick(ranks)
  count = layout.blocks

  def read_memory(
    arrays: tuple[Any, ...],
  ) -> Callable[[], tuple[jax.Array, ...]]:
    def local(rank: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
      return tuple(
        jax.device_put(
          lax.dynamic_slice_in_dim(x, rank * count, count, 0),
          jax.memory.Space.Device,
        )
        for x in arrays
      )

    spec = _spec(layout)
    specs = (spec,) * len(arrays)
    run = layout.places.local(local, (P(), *specs), specs)
    return lambda: tuple(run(rank, *arrays))

  def read_disk() -> tuple[jax.Array, ...]:
    def call(
      filed: Array | np.ndarray,
      first: Array | np.ndarray,
      real: Array | np.ndarray,
      _: Any,
    ) -> tuple[np.ndarray, ...]:
      if not real:
        return tuple(np.zeros(x.shape, x.dtype) for x in slots.stored)
      numbers = np.asarray(filed)[1:]
      return tuple(
        read_blocks(int(numbers[n]), int(first), count)
        for n in range(len(slots.stored))
      )

    return tuple(
      jax.pure_callback(
        call,
        slots.stored,
        slots.filed,
        rank * count,
        index <= last,
        after.reshape(-1)[0],
        vmap_method="sequential",
      )
    )

  reader_of_tier = {
    DEVICE: read_memory(slots.resident),
    IN_HOST: read_memory(slots.hosted),
    DISK: read_disk,
  }
  readers = [reader_of_tier[tier] for tier in used]
  blocks = (
    readers[0]() if len(readers) == 1 else lax.switch(pick(branches), readers)
  )
  # Stops fusion with the copy: results must not depend on the memory.
  return lax.optimization_barrier(blocks)


def _spec(layout: OffloadLayout) -> P:
  places = layout.places
  return P(places.tokens or None, places.batch or None, places.heads or None)


def _merged(
  slots: OffloadedKV, blocks: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Join blocks into keys and values, a stack of one layer."""
  layout = slots.layout

  def merge_blocks(x: jax.Array) -> jax.Array:
    axis = token_axis(x)
    count, block = x.shape[0], x.shape[axis]
    overlap = count * block - layout.slots
    last, full_blocks = x[-1], x[: count - 1] if overlap else x
    merged = jnp.moveaxis(full_blocks, 0, axis - 1)
    lead, dims = merged.shape[: axis - 1], merged.shape[axis + 1 :]
    merged = merged.reshape(*lead, full_blocks.shape[0] * block, *dims)
    if overlap:
      tail = lax.slice_in_dim(last, overlap, block, axis=axis - 1)
      merged = jnp.concatenate([merged, tail], axis - 1)
    return merged[None]

  merged_parts = []
  for x in blocks:
    spec = layout.places.of_slots(x)
    merged_parts.append(
      layout.places.local(merge_blocks, (_spec(layout),), spec)(x)
    )
  if len(merged_parts) == 1:
    # Values are part of the keys.
    merged_parts.append(merged_parts[0][..., :0])
  return tuple(merged_parts)


def _put(
  slots: OffloadedKV,
  index: jax.Array,
  layer: LayerKV,
  before: Int[Array, "B R"],
  used: Int[Array, "B R"],
) -> OffloadedKV:
  """Write back the blocks of a layer that hold slots `before` to `used`.

  Args:
    slots: Keys and values of the kind's layers, to write to.
    index: Index of the layer within the kind.
    layer: Keys and values of the layer, a stack of one.
    before: Cursors before the call, int32 [B, R].
    used: Cursors after the call, int32 [B, R].
  """
  layout = slots.layout
  branches, ranks, memories = _places(layout)
  pick = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
  rank, branch = pick(ranks), pick(branches)
  parts = tuple(x for x in layer if x.size)
  count, places = layout.blocks, layout.places
  block = min(_BLOCK, layout.slots)

  def span(before: jax.Array, used: jax.Array) -> tuple[Any, Any]:
    """First block with a token of the call, and the end of the range."""
    has_new = used > before
    first = jnp.where(has_new, before, layout.slots)
    end = jnp.max(jnp.where(has_new, used, 0), initial=0)
    return jnp.min(first, initial=layout.slots) // block, -(-end // block)

  def cut(x: jax.Array, n: Index) -> jax.Array:
    """Block n of a stack of one layer; the last one ends with the last slot."""
    block_slots = lax.dynamic_slice_in_dim(x, n * block, block, token_axis(x))
    return block_slots

  def write_tier(
    arrays: tuple[Any, ...], tier: str, space: Any
  ) -> tuple[Any, ...]:
    if not arrays:
      return ()
    in_tier = (branch == memories.index(tier)).astype(jnp.int32)

    def local(
      writes: jax.Array,
      rank: jax.Array,
      before: jax.Array,
      used: jax.Array,
      *old_and_new: jax.Array,
    ) -> tuple[jax.Array, ...]:
      olds, news = old_and_new[: len(parts)], old_and_new[len(parts) :]
      first, end = span(before, used)

      def step(n: Index, olds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
          lax.dynamic_update_slice_in_dim(
            old, jax.device_put(cut(new, n), space), rank * count + n, 0
          )
          for old, new in zip(olds, news, strict=True)
        )

      end = jnp.where(writes > 0, end, first)
      return lax.fori_loop(first, end, step, tuple(olds))

    specs = (_spec(layout),) * len(arrays)
    rows = places.by_example
    run = places.local(
      local,
      (P(), P(), rows, rows, *specs, *map(places.of_slots, parts)),
      specs,
    )
    return tuple(run(in_tier, rank, before, used, *arrays, *parts))

  filed = slots.filed
  if DISK in memories:
    filed = _filed(slots, rank, branch == memories.index(DISK), parts, cut,
                   *span(before, used))  # fmt: skip
  return dataclasses.replace(
    slots,
    resident=write_tier(slots.resident, DEVICE, jax.memory.Space.Device),
    hosted=write_tier(slots.hosted, IN_HOST, jax.memory.Space.Host),
    filed=filed,
  )


def _filed(
  slots: OffloadedKV,
  rank: jax.Array,
  on_disk: jax.Array,
  parts: tuple[jax.Array, ...],
  cut: Callable[[jax.Array, Index], jax.Array],
  first: jax.Array,
  end: jax.Array,
) -> jax.Array:
  """Write blocks of a layer to files if it is `on_disk`.

  Returns `filed` with its counter increased: reads that use it come later.
  """
  count = slots.layout.blocks

  def call(
    filed: Array | np.ndarray,
    block: Array | np.ndarray,
    *blocks: Array | np.ndarray,
  ) -> np.ndarray:
    filed = np.array(filed)
    for number, x in zip(filed[1:], blocks, strict=False):
      write_block(int(number), int(block), np.asarray(x)[0], count)
    filed[0] += 1
    return filed

  def step(n: Index, filed: jax.Array) -> jax.Array:
    return jax.pure_callback(
      call,
      jax.ShapeDtypeStruct((3,), jnp.int32),
      filed,
      rank * count + n,
      *(cut(x, n) for x in parts),
      vmap_method="sequential",
    )

  return lax.fori_loop(first, jnp.where(on_disk, end, first), step, slots.filed)
