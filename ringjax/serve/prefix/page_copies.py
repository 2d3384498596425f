"""Copies of pages between a pool and bytes of a store.

Guarantees: a page that is written has the bits that were read.
Cost: pages are copied in batches of one shape, by compiled programs: one for
each group of layers and direction. Of a pool that is spread over processes each
process reads its own shards, by a program for each device that has other pages
or heads; these programs wait for no other process.
Memory: a batch on the device, and one on the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from ringjax.kv.storage.page_pool import PagePool
from ringjax.parallel.programs import bounded

# Pages of each shard in one copy.
BATCH = 16


@bounded
@functools.partial(jax.jit, static_argnums=(1, 3))
def read_pages(
  pool: PagePool,
  group: int,
  pages: Int[Array, "R k"],
  layers: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
  """Compiled `PagePool.read_pages`: arrays of a group's pages."""
  return pool.read_pages(group, pages, layers)


@bounded
@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def write_pages(
  pool: PagePool,
  group: int,
  pages: Int[Array, "R k"],
  held: tuple[Shaped[Array, ...], ...],
) -> PagePool:
  """Compiled `PagePool.write_pages`; the pool's arrays are donated."""
  return pool.write_pages(group, pages, held)


@dataclasses.dataclass(frozen=True)
class PagePart:
  """Part of the pages of a batch: some of a device, or all.

  Attributes:
    shard: Number of the pages' shard.
    heads: Number of the shard of KV heads.
  """

  shard: int
  heads: int


# A batch by its parts, with an array of pages for each array of the group.
DeviceBatch = Mapping[PagePart, Sequence[Shaped[Array, "..."]]]
HostBatch = Mapping[PagePart, Sequence[Shaped[np.ndarray, "..."]]]
Payload = bytes | memoryview
_WHOLE = PagePart(0, 0)


@runtime_checkable
class PageCopies(Protocol):
  """Copies of pages between a pool and bytes.

  Attributes:
    facts: Text of the part of each page that this process has.
  """

  facts: str

  def nbytes(self, group: int, shard: int) -> int:
    """Bytes that this process has of a page; 0 if it has no part of it.

    Args:
      group: Number of the group of layers.
      shard: Number of the page's shard.
    """
    ...

  def read(
    self, pool: PagePool, group: int, pages: Int[np.ndarray, "R k"]
  ) -> DeviceBatch:
    """Arrays of a batch of pages, whose copies to the host have begun.

    Args:
      pool: Pool to read.
      group: Number of the group of layers.
      pages: `BATCH` pages of each shard.
    """
    ...

  def on_host(self, batch: DeviceBatch) -> HostBatch:
    """Waits for the arrays of `read`; returns them as NumPy arrays."""
    ...

  def payload(self, batch: HostBatch, shard: int, n: int) -> bytes:
    """Bytes of page n of a shard, in a batch on the host."""
    ...

  def blank(self, group: int) -> HostBatch:
    """A batch of zeros on the host, to fill with payloads."""
    ...

  def fill(
    self, batch: HostBatch, shard: int, n: int, payload: Payload
  ) -> None:
    """Writes a payload to page n of a shard, in a batch on the host."""
    ...

  def write(
    self,
    pool: PagePool,
    group: int,
    pages: Int[np.ndarray, "R k"],
    batch: HostBatch,
  ) -> PagePool:
    """Writes a batch to pages; those out of range are not written."""
    ...


def page_copies(pool: PagePool) -> PageCopies:
  """The copies of a pool, of one process or of several."""
  arrays = jax.tree.leaves(pool.slots)
  local = all(x.is_fully_addressable for x in arrays)
  return WholePages(pool) if local else SpreadPages(pool)


class WholePages:
  """Pages whose arrays are all on devices of this process."""

  def __init__(self, pool: PagePool):
    self.facts, self._shards = "", pool.shards
    self._shapes = [pool.page_shapes(g) for g in range(len(pool.groups))]

  def nbytes(self, group: int, shard: int) -> int:
    """Bytes of a page."""
    return _nbytes(self._shapes[group])

  def read(
    self, pool: PagePool, group: int, pages: Int[np.ndarray, "R k"]
  ) -> DeviceBatch:
    """Arrays [L, R * k, ...] of a batch of pages."""
    return {_WHOLE: _sent(read_pages(pool, group, pages))}

  def on_host(self, batch: DeviceBatch) -> HostBatch:
    """NumPy arrays of a batch."""
    return _on_host(batch)

  def payload(self, batch: HostBatch, shard: int, n: int) -> bytes:
    """Bytes of page n of a shard."""
    return _payload(batch[_WHOLE], shard * BATCH + n)

  def blank(self, group: int) -> HostBatch:
    """Zeros [L, R * k, ...]."""
    return {_WHOLE: _blank(self._shapes[group], self._shards * BATCH)}

  def fill(
    self, batch: HostBatch, shard: int, n: int, payload: Payload
  ) -> None:
    """Writes a payload to page n of a shard."""
    _unpack(payload, batch[_WHOLE], shard * BATCH + n)

  def write(
    self,
    pool: PagePool,
    group: int,
    pages: Int[np.ndarray, "R k"],
    batch: HostBatch,
  ) -> PagePool:
    """Writes a batch to pages."""
    return write_pages(pool, group, pages, tuple(batch[_WHOLE]))


class SpreadPages:
  """Pages whose arrays are on devices of several processes.

  A payload has the heads of a page that this process has, in their order; it is
  empty where other processes have the page.
  """

  def __init__(self, pool: PagePool):
    assert pool.mesh is not None
    heads = 1 if pool.heads is None else pool.mesh.shape[pool.heads]
    self._shards, self._heads = pool.shards, heads
    self._sharding = NamedSharding(pool.mesh, P(None, pool.axis, pool.heads))
    self._shapes = [
      [
        ((shape[0], shape[1] // heads, *shape[2:]), dtype)
        for shape, dtype in pool.page_shapes(g)
      ]
      for g in range(len(pool.groups))
    ]
    size = self._shards, heads
    places = self._sharding.addressable_devices_indices_map((1, *size))
    self._parts = {
      device: PagePart(index[1].start or 0, index[2].start or 0)
      for device, index in places.items()
      if index is not None
    }
    # One device for each part: others have copies of it.
    self._sources = {
      part: device for device, part in reversed(self._parts.items())
    }
    local_heads: dict[int, list[int]] = {}
    for part in sorted(self._sources, key=lambda x: (x.shard, x.heads)):
      local_heads.setdefault(part.shard, []).append(part.heads)
    self._local_heads = local_heads
    self.facts = repr((size, sorted(local_heads.items())))

  def nbytes(self, group: int, shard: int) -> int:
    """Bytes of this process's heads of a page."""
    count = len(self._local_heads.get(shard, ()))
    return count * _nbytes(self._shapes[group])

  def read(
    self, pool: PagePool, group: int, pages: Int[np.ndarray, "R k"]
  ) -> DeviceBatch:
    """Arrays [L, k, ...] of a batch of pages, by part."""
    return {
      part: _sent(
        read_pages(
          _on_device(pool, device), group, pages[part.shard : part.shard + 1]
        )
      )
      for part, device in self._sources.items()
    }

  def on_host(self, batch: DeviceBatch) -> HostBatch:
    """NumPy arrays of a batch, by part."""
    return _on_host(batch)

  def payload(self, batch: HostBatch, shard: int, n: int) -> bytes:
    """Bytes of this process's heads of page n of a shard."""
    return b"".join(
      _payload(batch[PagePart(shard, heads)], n)
      for heads in self._local_heads.get(shard, ())
    )

  def blank(self, group: int) -> HostBatch:
    """Zeros [L, k, ...], by part."""
    return {part: _blank(self._shapes[group], BATCH) for part in self._sources}

  def fill(
    self, batch: HostBatch, shard: int, n: int, payload: Payload
  ) -> None:
    """Writes a payload to this process's heads of page n of a shard."""
    heads = self._local_heads.get(shard, ())
    size = len(payload) // max(1, len(heads))
    for number, head in enumerate(heads):
      part = memoryview(payload)[number * size : (number + 1) * size]
      _unpack(part, batch[PagePart(shard, head)], n)

  def write(
    self,
    pool: PagePool,
    group: int,
    pages: Int[np.ndarray, "R k"],
    batch: HostBatch,
  ) -> PagePool:
    """Writes a batch to pages; all processes make the same call."""
    arrays = []
    for n, (shape, _) in enumerate(self._shapes[group]):
      layers, heads = shape[:2]
      sizes = layers, self._shards * BATCH, heads * self._heads
      global_shape = (*sizes, *shape[2:])
      arrays.append(
        jax.make_array_from_single_device_arrays(
          global_shape,
          self._sharding,
          [
            jax.device_put(batch[part][n], device)
            for device, part in self._parts.items()
          ],
        )
      )
    return write_pages(pool, group, pages, tuple(arrays))


def _on_device(pool: PagePool, device: jax.Device) -> PagePool:
  """The part of a pool that one device has, as a pool of this device alone."""

  def shard(x: jax.Array) -> jax.Array:
    return next(s.data for s in x.addressable_shards if s.device == device)

  slots, constants = jax.tree.map(shard, (pool.slots, pool.constants))
  return dataclasses.replace(
    pool, slots=slots, constants=constants, mesh=None, axis=None, heads=None
  )


def _on_host(batch: DeviceBatch) -> HostBatch:
  return {
    part: [np.asarray(x) for x in arrays] for part, arrays in batch.items()
  }


def _sent(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
  """Arrays whose copies to the host have begun."""
  for x in arrays:
    x.copy_to_host_async()
  return arrays


def _nbytes(shapes: Sequence[tuple[tuple[int, ...], Any]]) -> int:
  return sum(int(np.prod(s)) * d.itemsize for s, d in shapes)


def _blank(
  shapes: Sequence[tuple[tuple[int, ...], Any]], pages: int
) -> list[np.ndarray]:
  return [
    np.zeros((shape[0], pages, *shape[1:]), dtype) for shape, dtype in shapes
  ]


def _payload(arrays: Sequence[np.ndarray], n: int) -> bytes:
  return b"".join(x[:, n].tobytes() for x in arrays)


def _unpack(payload: Payload, arrays: Sequence[np.ndarray], n: int) -> None:
  """Writes a payload to index n of the arrays."""
  at = 0
  for x in arrays:
    shape = (x.shape[0], *x.shape[2:])
    size = int(np.prod(shape))
    values = np.frombuffer(payload, x.dtype, size, at)
    x[:, n] = values.reshape(shape)
    at += values.nbytes
