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
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

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
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.offload.host_memory import (
  check_host_memory,
  default_device,
  host_zeros,
)
from ringjax.kv.offload.layer_blocks import (
  MOST_SLOTS,
  OffloadedKV,
  OffloadLayout,
  fetched_blocks,
  merged_blocks,
  put_blocks,
)
from ringjax.kv.state import StateLayer
from ringjax.kv.storage.changes import (
  InsertRows,
  KeepFirst,
  KeepTokens,
  TakeRows,
)
from ringjax.kv.storage.pages import Places
from ringjax.typing import Index


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
    if mesh is None and any(x is not None and x.hosted for x in layers):
      check_host_memory(
        default_device(), "cache_placement", "host memory",
        "place these layers on disk",
      )  # fmt: skip
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
    return fetched_blocks(slots, jnp.asarray(index, jnp.int32), after)

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
    merged = LayerKV(*merged_blocks(slots, fetched))
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
    return put_blocks(
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
  block = min(MOST_SLOTS, local)
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
