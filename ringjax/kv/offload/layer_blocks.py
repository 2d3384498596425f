"""Blocks of layers in three memories: copied to the devices and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax import tree
from ringjax.kv.base import DEVICE, DISK, IN_HOST, DistantSlots
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.offload.cache_files import (
  CacheFiles,
  read_blocks,
  write_block,
)
from ringjax.kv.offload.host_memory import default_device, host_zeros
from ringjax.kv.storage.pages import Places
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.typing import Index

# Slots of a block: a call writes back whole blocks.
MOST_SLOTS = 256


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
class OffloadedKV(DistantSlots):
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

  @property
  def _stored_bytes(self) -> int:
    """Bytes of one layer."""
    return sum(x.size * x.dtype.itemsize for x in self.stored)

  @property
  def disk_bytes(self) -> int:
    """Bytes of the layers on disk."""
    return self.layout.tiers.count(DISK) * self._stored_bytes

  @property
  def layer_bytes(self) -> int:
    """Bytes of a layer that is copied to the devices; 0 if all are there."""
    return 0 if set(self.layout.tiers) == {DEVICE} else self._stored_bytes

  def fetch(
    self, index: Index, after: Shaped[Array, " ..."]
  ) -> tuple[Shaped[Array, "N B K *P"], ...]:
    return fetched_blocks(self, jnp.asarray(index, jnp.int32), after)

  def allocated(self, files: CacheFiles | None, mesh: Mesh | None) -> Any:
    """Allocate the arrays of these specs, on a mesh or on one device."""
    filed = ()
    if self.filed != ():
      assert files is not None
      count = self.layout.tiers.count(DISK) * self.layout.blocks
      numbers = [
        files.allocate((count, *x.shape[1:]), x.dtype) for x in self.stored
      ]
      filed = jnp.asarray([0, *numbers, *[0] * (2 - len(numbers))], jnp.int32)
      if mesh is None:
        filed = jax.device_put(filed, default_device())
    return dataclasses.replace(
      self,
      resident=jax.tree.map(host_zeros, self.resident),
      hosted=jax.tree.map(host_zeros, self.hosted),
      filed=filed,
    )


tree.register(
  OffloadedKV, ("resident", "hosted", "filed", "fetched"), ("layout", "stored")
)


def _places(layout: OffloadLayout) -> tuple[jax.Array, jax.Array, list[str]]:
  """Branch and rank of each layer, and the memories in use by branch."""
  used = [t for t in (DEVICE, IN_HOST, DISK) if t in layout.tiers]
  branches = jnp.asarray([used.index(t) for t in layout.tiers], jnp.int32)
  ranks = [layout.rank(n) for n in range(len(layout.tiers))]
  return branches, jnp.asarray(ranks, jnp.int32), used


def fetched_blocks(
  slots: OffloadedKV, index: Int[Array, ""], after: Shaped[Array, " ..."]
) -> tuple[Shaped[Array, "N B K *P"], ...]:
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


def merged_blocks(
  slots: OffloadedKV, blocks: tuple[Shaped[Array, "N B K *P"], ...]
) -> tuple[Shaped[Array, "1 B K *S"], ...]:
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


def put_blocks(
  slots: OffloadedKV,
  index: Int[Array, ""],
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
  block = min(MOST_SLOTS, layout.slots)

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
