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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import (
  DEVICE,
  DISK,
  HOST,
  IN_HOST,
  KV,
  CacheSpec,
  Ends,
  LayerCache,
  RowIndices,
  StateCache,
  donated,
)
from ringjax.kv.cache import (
  KVCache,
  KVLayer,
  LayerCacheSpec,
  LayerKV,
  filled_constants,
)
from ringjax.kv.cache_files import CacheFiles, read_blocks, write_block
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Allocated, PerHead
from ringjax.kv.pages import Places
from ringjax.kv.tiered import default_device, host_zeros
from ringjax.ops.attention.code_format import token_axis
from ringjax.ops.attention.views import KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
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
class OffloadedCache:
  """A `KVCache` with keys and values of each layer in the memory of its tier.

  Attributes:
    base: Slot tables, and the kinds of layers that stay on the devices.
    layers: For each kind of layer its keys and values; None if `base` has them.
  """

  base: KVCache
  layers: tuple[OffloadedKV | None, ...]

  # -------------------------------------------------------------------------
  # Creation
  # -------------------------------------------------------------------------

  @classmethod
  def create(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    tiers: Sequence[str],
    files: CacheFiles | None = None,
    **where: Any,
  ) -> OffloadedCache:
    """Create an empty cache; takes the arguments of `spec`.

    Args:
      shapes: For each kind of layer, the shape of one token's cached vectors.
      batch: Number of rows, B.
      capacity: Tokens per row.
      dtype: Dtype of keys and values.
      tiers: Memory of each layer of the model, from `kv.base.TIERS`.
      files: Files of the layers on disk.
      **where: Kind, mesh and sharding arguments of `spec`.

    Raises:
      OptionError: If layers are on disk without `files`, or as `spec` does.
    """
    empty = cls.spec(shapes, batch, capacity, dtype, tiers=tiers, **where)
    if files is None and DISK in {
      tier for x in empty.layers if x is not None for tier in x.layout.tiers
    }:
      raise OptionError(
        "disk",
        "None, with layers of the cache on disk",
        "a folder for its files",
        "pass disk=DIR, or place them in host memory",
      )
    device = where.get("mesh") is None

    def allocate_arrays(x: OffloadedKV | None) -> OffloadedKV | None:
      if x is None:
        return None
      filed: Any = ()
      if x.filed != ():
        assert files is not None
        count = x.layout.tiers.count(DISK) * x.layout.blocks
        numbers = [
          files.allocate((count, *s.shape[1:]), s.dtype) for s in x.stored
        ]
        filed = jnp.asarray([0, *numbers, *[0] * (2 - len(numbers))], jnp.int32)
        if device:
          filed = jax.device_put(filed, default_device())
      return dataclasses.replace(
        x,
        resident=jax.tree.map(host_zeros, x.resident),
        hosted=jax.tree.map(host_zeros, x.hosted),
        filed=filed,
      )

    base = KVCache.create(
      _emptied(shapes, empty.layers), batch, capacity, dtype, **where
    )
    full_cache = KVCache.spec(shapes, batch, capacity, dtype, **where)
    base = _with_shapes(base, full_cache, filled=True)
    if device:
      base = jax.device_put(base, default_device())
    return cls(base=base, layers=tuple(map(allocate_arrays, empty.layers)))

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
    """Specs (shapes, dtypes, shardings) of an empty cache, as `KVCache.spec`.

    Args:
      shapes: For each kind of layer, the shape of one token's cached vectors.
      batch: Number of rows, B.
      capacity: Tokens per row.
      dtype: Dtype of keys and values.
      tiers: Memory of each layer of the model, from `kv.base.TIERS`.
      kind: Storage format: without a policy, `first`, `recent`, `device` and
        codecs per head.
      **where: Mesh and sharding arguments of `KVCache.spec`.

    Raises:
      OptionError: If the kind is not supported, or layers are on disk on a
        mesh of several devices, or as `KVCache.spec` does.
    """
    mesh: Any = where.get("mesh")
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
    room = CacheSpec(
      batch=batch,
      capacity=capacity,
      dtype=jnp.dtype(dtype),
      mesh=mesh,
      axes=dict(
        batch=where.get("batch_axes") or None,
        heads=where.get("head_axis"),
        tokens=where.get("axis"),
      ),
      codec=kind.codec,
      target=where.get("platform"),
    )
    layers = tuple(
      _spec_of(shape, room, tuple(tiers[n] for n in shape.which))
      if isinstance(shape, LayerCacheSpec) and full_cache._ring(number) is None
      else None
      for number, shape in enumerate(shapes)
    )
    if mesh is None:
      _check_memory(layers)
    base = KVCache.spec(
      _emptied(shapes, layers), batch, capacity, dtype, kind=kind, **where
    )
    return cls(base=_with_shapes(base, full_cache), layers=layers)

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  @property
  def slots(self) -> tuple[Any, ...]:
    pairs = zip(self.base.slots, self.layers, strict=True)
    return tuple(base_slots if x is None else x for base_slots, x in pairs)

  @property
  def mesh(self) -> Any:
    return self.base.mesh

  @property
  def axis(self) -> str | None:
    return self.base.axis

  @property
  def shards(self) -> int:
    return self.base.shards

  @property
  def batch(self) -> int:
    """Number of rows, B."""
    return self.base.batch

  @property
  def capacity(self) -> int:
    return self.base.capacity

  @property
  def kind(self) -> CacheConfig:
    return self.base.kind

  @property
  def dtype(self) -> Any:
    return self.base.dtype

  @property
  def shapes(self) -> tuple[Any, ...]:
    return self.base.shapes

  @property
  def states(self) -> Any:
    return self.base.states

  @property
  def recurrent(self) -> bool:
    return self.base.recurrent

  @property
  def irreversible(self) -> bool:
    return self.base.irreversible

  @property
  def length(self) -> jax.Array:
    """int32 [B], the position after each row's last token; 0 if empty."""
    return self.base.length

  @property
  def lost(self) -> bool:
    """Whether some of the arrays were donated to a program."""
    return donated(self)

  def bytes_by_memory(self) -> dict[str, int]:
    """Total bytes of all shards, by memory of `kv.base.TIERS`."""
    sizes = {DEVICE: sum(x.nbytes for x in jax.tree.leaves(self.base))}
    sizes |= {IN_HOST: 0, DISK: self.disk_bytes}
    for x in self.layers:
      if x is None:
        continue
      sizes[DEVICE] += sum(a.nbytes for a in x.resident)
      sizes[IN_HOST] += sum(a.nbytes for a in x.hosted)
    return sizes

  @property
  def disk_bytes(self) -> int:
    """Total bytes of the files of layers on disk."""
    return sum(
      x.layout.tiers.count(DISK)
      * sum(s.size * s.dtype.itemsize for s in x.stored)
      for x in self.layers
      if x is not None
    )

  def free(self) -> np.ndarray | None:
    """Number of free slots, int [B, R]; None under a trace."""
    return self.base.free()

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Check that tokens fit; see `KVCache.check`."""
    self.base.check(batch, tokens, replicated=replicated, sees=sees)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self, at: Coords, *, replicated: bool, sees: bool
  ) -> OffloadedCache:
    base = self.base.allocate(at, replicated=replicated, sees=sees)
    return dataclasses.replace(self, base=base)

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> OffloadedCache:
    """Return itself: this cache keeps all tokens, whatever their ids."""
    del tokens, at
    return self

  def fetch(
    self,
    kind: int,
    slots: PyTree,
    index: Index,
    after: Shaped[Array, " ..."],
  ) -> Any:
    """Start to copy the blocks of a layer to the devices, for `layer`.

    Args:
      kind: Index of the kind of layer.
      slots: Keys and values of the kind's layers.
      index: Index of the layer within the kind; one beyond the last gives
        blocks that nothing reads.
      after: Array that must be computed before the copy, so that no layer
        takes device memory too early.

    Returns:
      Blocks of keys and of values; () for a kind that stays on the devices.
    """
    del kind
    if not isinstance(slots, OffloadedKV):
      return ()
    return _fetched(slots, jnp.asarray(index, jnp.int32), after)

  def layer(
    self, kind: int, slots: PyTree, index: Index, fetched: PyTree | None = None
  ) -> Any:
    """One layer's part for a call, from the blocks that `fetch` returned."""
    if not isinstance(slots, OffloadedKV):
      return self.base.layer(kind, slots, index)
    if fetched is None:
      fetched = self.fetch(kind, slots, index, jnp.zeros((1,), jnp.float32))
    merged = LayerKV(*_merged(slots, fetched))
    cut = lambda x: lax.dynamic_index_in_dim(x, index, 0)
    constants = list(self.base.constants)
    constants[kind] = jax.tree.map(cut, constants[kind])
    base = dataclasses.replace(self.base, constants=tuple(constants))
    inner = base.layer(kind, merged, jnp.int32(0))
    return OffloadedLayer(inner, slots, jnp.asarray(index, jnp.int32))

  def behind(self, layer: LayerCache | StateCache, after: PyTree) -> Any:
    """Let a layer be written back only after `after` has been fetched."""
    if not isinstance(layer, OffloadedLayer):
      return layer
    return dataclasses.replace(layer, after=after)

  def updated(self, slots: tuple[Any, ...]) -> OffloadedCache:
    base_slots = tuple(
      old if isinstance(new, OffloadedKV) else new
      for old, new in zip(self.base.slots, slots, strict=True)
    )
    layers = tuple(x if isinstance(x, OffloadedKV) else None for x in slots)
    return OffloadedCache(base=self.base.updated(base_slots), layers=layers)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def evict(self) -> OffloadedCache:
    """Return itself: this cache never evicts; see `EvictingCache.evict`."""
    return self

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> OffloadedCache:
    """Return itself; see `EvictingCache.flush`."""
    del rows
    return self

  def with_room(self, taken: Int[np.ndarray, "B R"] | int) -> OffloadedCache:
    """Return itself: the size is fixed; see `EvictingCache.with_room`."""
    del taken
    return self

  def steps(self) -> int:
    """Number of tokens that can be appended before `flush` is due."""
    return self.base.steps()

  def truncate(self, length: Ends, most: int | None = None) -> OffloadedCache:
    """Drop the tokens at positions from `length` on; see `KVCache`."""
    base = self.base.truncate(length, most)
    return dataclasses.replace(self, base=base)

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> OffloadedCache:
    return self._refused("keep, of drafted tokens", "leave speculate= out")

  def take(self, examples: RowIndices) -> OffloadedCache:
    return self._refused("take", "leave the placement of the cache out")

  def gathered(self, device: jax.Device) -> OffloadedCache:
    return self._refused("gathered", "pass keep='sharded'")

  def _refused(self, name: str, remedy: str) -> Any:
    raise OptionError(
      "cache",
      f"{name} of a cache whose layers are in host memory or on disk",
      "a cache on the devices",
      remedy,
    )


tree.register(OffloadedCache, ("base", "layers"), ())


@dataclasses.dataclass(frozen=True)
class OffloadedLayer:
  """One layer's part of an `OffloadedCache` during one call.

  Fields:
    inner: Copy of the layer on the devices, a stack of one layer.
    stored: Keys and values of all layers of the kind, to write back to.
    index: Index of the layer within the kind.
    after: Fetched arrays to wait for before writing back: it happens in place,
      so all reads must come first.
  """

  inner: KVLayer
  stored: OffloadedKV
  index: Index
  after: PyTree = ()

  @property
  def cache(self) -> KVCache:
    return self.inner.cache

  @property
  def fresh(self) -> KV | None:
    return self.inner.fresh

  @property
  def slots(self) -> OffloadedKV:
    """All layers of the kind, after writing back this one."""
    index, _ = lax.optimization_barrier((self.index, self.after))
    return _put(
      self.stored,
      index,
      self.inner.slots,
      self.inner.held.before,
      self.inner.held.used,  # pyrefly: ignore
    )

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> OffloadedLayer:
    inner = self.inner.append(k, v, at, rotation)
    return dataclasses.replace(self, inner=inner)

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> OffloadedLayer:
    del rotated, plain
    return self

  def for_reading(self, rotation: Rotation) -> OffloadedLayer:
    """Prepare for a call that appends nothing, as `KVLayer.for_reading`."""
    return dataclasses.replace(self, inner=self.inner.for_reading(rotation))

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    return self.inner.views(apart=apart)


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

  filed: Any = ()
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


def _with_shapes(
  base: KVCache, full_cache: KVCache, *, filled: bool = False
) -> KVCache:
  """Set the shapes and codec constants of all layers."""
  constants = full_cache.constants
  if filled:
    constants = filled_constants(full_cache.shapes, full_cache.kind, constants)
  return dataclasses.replace(
    base, shapes=full_cache.shapes, constants=constants
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
    def call(filed: Any, first: Any, real: Any, _: Any) -> Any:
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

  def call(filed: Any, block: Any, *blocks: Any) -> np.ndarray:
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
