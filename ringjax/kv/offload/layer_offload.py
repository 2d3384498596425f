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
from jaxtyping import PyTree

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import DEVICE, DISK, HOST, IN_HOST, CacheSpec
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Allocated, PerHead
from ringjax.kv.composed.open_cache import WithOpenCache, WithOpenLayer
from ringjax.kv.kv_layer import KVLayer
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.offload.host_memory import check_host_memory, default_device
from ringjax.kv.offload.layer_blocks import (
  MOST_SLOTS,
  OffloadedKV,
  OffloadLayout,
  merged_blocks,
  put_blocks,
)
from ringjax.kv.state import StateLayer
from ringjax.kv.storage import changes
from ringjax.kv.storage.pages import Places
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedCache(WithOpenCache):
  """A `KVCache` with keys and values of each layer in the memory of its tier.

  Attributes:
    open: Slot tables and keys, of which some kinds of layers have
      `OffloadedKV`.
    kind: Storage format of keys and values.
    limit: Number of tokens that fit in a row.
  """

  described: ClassVar[str] = (
    "a cache whose layers are in host memory or on disk"
  )
  refuses: ClassVar[Mapping[type, tuple[str, str]]] = {
    changes.KeepTokens: ("keep, of drafted tokens", "leave speculate= out"),
    changes.KeepFirst: (
      "keep_first, of drafted tokens",
      "leave speculate= out",
    ),
    changes.TakeRows: ("take", "leave the placement of the cache out"),
    changes.InsertRows: ("insert", "leave the placement of the cache out"),
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
    slots = tuple(
      _spec_of(shape, room, tuple(tiers[n] for n in shape.which))
      if isinstance(shape, LayerCacheSpec) and full_cache._ring(number) is None
      else on_device
      for number, (shape, on_device) in enumerate(
        zip(shapes, full_cache.slots, strict=True)
      )
    )
    hosted = any(isinstance(x, OffloadedKV) and x.hosted for x in slots)
    if mesh is None and hosted:
      check_host_memory(
        default_device(), "cache_placement", "host memory",
        "place these layers on disk",
      )  # fmt: skip
    open_cache = dataclasses.replace(full_cache, slots=slots)
    return cls(open=open_cache, kind=kind, limit=capacity)

  def allocated(self, files: CacheFiles | None = None) -> OffloadedCache:
    """Create the arrays of an empty cache from its specs.

    Args:
      files: Files of the layers on disk.

    Raises:
      OptionError: If layers are on disk without `files`.
    """
    if files is None and any(
      x and x.filed != () for x in self.offloaded_layers
    ):
      raise OptionError(
        "disk",
        "None, with layers of the cache on disk",
        "a folder for its files",
        "pass disk=DIR, or place them in host memory",
      )
    pairs = zip(self.offloaded_layers, self.slots, strict=True)
    slots = tuple(slots if x is None else () for x, slots in pairs)
    open_cache = dataclasses.replace(self.open, slots=slots).allocated()
    if self.mesh is None:
      open_cache = jax.device_put(open_cache, default_device())
    slots = tuple(
      on_device if x is None else x.allocated(files, self.mesh)
      for x, on_device in zip(
        self.offloaded_layers, open_cache.slots, strict=True
      )
    )
    open_cache = dataclasses.replace(open_cache, slots=slots)
    return dataclasses.replace(self, open=open_cache)

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  @property
  def offloaded_layers(self) -> tuple[OffloadedKV | None, ...]:
    """For each kind of layer its keys and values; None if on the devices."""
    return tuple(x if isinstance(x, OffloadedKV) else None for x in self.slots)

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
    sizes = {DEVICE: self.nbytes(), IN_HOST: 0, DISK: self.disk_bytes}
    for x in self.offloaded_layers:
      if x is not None:
        hosted = sum(array.nbytes for array in x.hosted)
        filed = sum(array.nbytes for array in jax.tree.leaves(x.filed))
        sizes[IN_HOST] += hosted
        sizes[DEVICE] -= hosted + filed
    return sizes

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> KVLayer | OffloadedLayer | StateLayer:
    if not isinstance(slots, OffloadedKV):
      return self.open.layer(kind, slots, index)
    fetched = slots.fetched
    if fetched == ():
      fetched = slots.fetch(index, jnp.zeros((1,), jnp.float32))
    merged = LayerKV(*merged_blocks(slots, fetched))
    cut = lambda x: lax.dynamic_index_in_dim(x, index, 0)
    constants = list(self.open.constants)
    constants[kind] = jax.tree.map(cut, constants[kind])
    open_cache = dataclasses.replace(self.open, constants=tuple(constants))
    inner = open_cache.layer(kind, merged, jnp.int32(0))
    stored = dataclasses.replace(slots, fetched=())
    return OffloadedLayer(self, inner, stored, jnp.asarray(index, jnp.int32))

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


tree.register(OffloadedCache, ("open",), ("kind", "limit"))


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

  def written_after(self, fetched: PyTree) -> OffloadedLayer:
    return dataclasses.replace(self, after=fetched)

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
