"""A cache with a part in host memory of which only chosen pages are copied.

Guarantees: all tokens are kept, bit for bit. A token of an answer reads the
pages of the older part that its queries choose: by bounds of their keys
(Quest), the same pages as `Select` reads on the devices, or by another choice,
of pages or of single tokens, see `page_choice`; or all those with keys that the
index of its layer chooses, and so the same keys as without host memory. With
`rank` the keys of chosen pages are rebuilt, see `low_rank_keys`; tokens that
`hashed_keys` samples are weighed; `clustered_keys` are read by their clusters,
which queries of prompts shape. A choice does not depend on drafts,
other tokens of a call, other rows, or what was hot before. The tokens of a
prompt read all pages.
Cost: of each call, a product of its queries with the landmarks, and a copy of
each chosen page that is not hot, see `fetch_chosen`; `fetches` counts them.
Memory: on the devices as `TieredCache`, `hot` tokens of each KV head, and the
landmarks: of bounds, two vectors for each page of a KV head; of an index, its
key of each token; of hashes, their bits; of clusters, their centres. On the
hosts as `TieredCache`.

Ref: Tang et al. 2024, Quest, arXiv 2406.10774; DeepSeek-AI 2025,
DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.kv.base import HOST, CacheSpec, zeros
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_rows import placed_as
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.offload.choices import unit_of, units_read
from ringjax.kv.offload.chosen_layer import ChosenTieredLayer
from ringjax.kv.offload.host_memory import default_device
from ringjax.kv.offload.hot_pages import (
  COUNTS,
  HotPages,
  PageFetches,
  emptied,
  hot_specs,
  slots_copied,
  without_pages_from,
)
from ringjax.kv.offload.landmarks import (
  PageKeys,
  centres_spec,
  check_choosing_layers,
  landmarks_spec,
  moments_spec,
  with_landmarks,
)
from ringjax.kv.offload.low_rank_keys import LowRankKeys
from ringjax.kv.offload.moved_blocks import with_heads
from ringjax.kv.offload.tiered import TieredCache
from ringjax.kv.storage import changes
from ringjax.kv.storage.pages import host
from ringjax.ops.mask import Coords
from ringjax.parallel.local_arrays import move
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.kv.model_cache import ModelCache


def page_fetches(cache: ModelCache) -> PageFetches | None:
  """Chosen pages of a cache and its parts; None without a choice."""
  if isinstance(cache, ChosenTieredCache):
    return cache.fetches()
  parts = [x for x in map(page_fetches, cache.parts) if x is not None]
  if not parts:
    return None
  return PageFetches(*(int(sum(x)) for x in zip(*parts, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenTieredCache(TieredCache):
  """Pages of older tokens in host memory, hot ones of them on the devices.

  Attributes:
    open: Open cache of the newest tokens.
    held: Slot table (token of each slot) of the pages, on the devices.
    blocks: For each kind of layer its pages in host memory, see `TieredCache`.
    kind: Cache kind, with `device` and `hot` set.
    limit: Maximum number of tokens in a row.
    memory: Memory kind of the pages, one of `MEMORIES`.
    places: Mesh axes that shard the pages.
    landmarks: For each kind of layer, what queries choose the pages by: two
      vectors of a page, [L, B, K, R M, 2, H], hashes, [L, B, K, R M, P, n],
      `ClusterLandmarks`, or keys of the layer's index, [L, B, 1, R M, P, E].
    centres: For each kind of layer the choice's vectors of its heads; None
      without them.
    low_rank: For each kind of layer the coefficients of its keys; None where
      keys are copied.
    hot: For each kind of layer its hot pages; None if all stays on the devices.
    moments: For each kind of layer the sums of outer products of the queries of
      each KV head's group, those of prompts, float32; None: none are recorded.
  """

  landmarks: tuple[PyTree[Shaped[ArrayLeaf, "_ B _ _ ..."]] | None, ...]
  centres: tuple[Float[ArrayLeaf, "_ B _ _ _"] | None, ...]
  low_rank: tuple[LowRankKeys | None, ...]
  hot: tuple[HotPages | None, ...]
  moments: tuple[Float[ArrayLeaf, "_ B _ _ _"] | None, ...]
  layer_fields: ClassVar[tuple[str, ...]] = ("hot", "moments")
  begins_early: ClassVar[bool] = True
  changing: ClassVar[tuple[str, ...]] = (*TieredCache.changing, "moments")
  row_axes: ClassVar[Mapping[str, int]] = {
    **TieredCache.row_axes,
    "landmarks": 1,
    "centres": 1,
    "low_rank": 1,
    "moments": 1,
  }

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
  ) -> ChosenTieredCache:
    """Specs of an empty cache, as `TieredCache.spec`.

    Raises:
      OptionError: If a layer can't choose, or as `TieredCache.spec` does.
    """
    base = TieredCache.spec(
      shapes, batch, capacity, dtype, kind=kind, memory=memory, **where
    )
    room = CacheSpec.of(batch, base.held.capacity, dtype, kind.codec, **where)
    resident = tuple(blocks is None for blocks in base.blocks)
    check_choosing_layers(shapes, kind, room, resident)
    fields = {x.name: getattr(base, x.name) for x in dataclasses.fields(base)}
    return cls(
      **fields,
      landmarks=tuple(
        None if blocks is None else landmarks_spec(shape, room, kind)
        for shape, blocks in zip(shapes, base.blocks, strict=True)
      ),
      centres=tuple(
        None if blocks is None else centres_spec(shape, room, kind)
        for shape, blocks in zip(shapes, base.blocks, strict=True)
      ),
      low_rank=tuple(
        None
        if blocks is None or kind.tier.rank is None
        else LowRankKeys.spec(shape, room, kind)
        for shape, blocks in zip(shapes, base.blocks, strict=True)
      ),
      hot=hot_specs(shapes, base.blocks, room, kind),
      moments=tuple(
        None if blocks is None else moments_spec(shape, room, kind)
        for shape, blocks in zip(shapes, base.blocks, strict=True)
      ),
    )

  def allocated(self, files: CacheFiles | None = None) -> ChosenTieredCache:
    cache: Any = super().allocated(files)
    arrays = (
      zeros(self.landmarks),
      zeros(self.centres),
      zeros(self.low_rank),
      emptied(self.hot),
      zeros(self.moments),
    )
    if self.mesh is None:
      # As `TieredCache` does, so that jit does not compile twice.
      arrays = jax.device_put(arrays, default_device())
    landmarks, centres, low_rank, hot, moments = arrays
    return dataclasses.replace(
      cache,
      landmarks=landmarks,
      centres=centres,
      low_rank=low_rank,
      hot=hot,
      moments=moments,
    )

  def _hot_for(self, batch: int) -> tuple[HotPages | None, ...]:
    """Empty hot pages for a number of rows."""
    places = self.places
    room = CacheSpec(
      batch=batch,
      capacity=self.held.capacity,
      dtype=self.dtype,
      mesh=places.mesh,
      axes=dict(
        batch=places.batch or None,
        heads=places.heads[0] if places.heads else None,
        tokens=places.axis,
      ),
      codec=self.kind.codec,
    )
    return emptied(hot_specs(self.shapes, self.blocks, room, self.kind))

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  def fetches(self) -> PageFetches:
    """Count the pages that the calls of this cache have chosen."""
    total = PageFetches(0, 0, 0)
    for hot, low_rank, blocks in zip(
      self.hot, self.low_rank, self.blocks, strict=True
    ):
      if not hot or blocks is None:
        continue
      counts = host(hot.counts).reshape(-1, COUNTS).astype(np.int64).sum(0)
      hits, misses, early, ahead = counts.tolist()
      copied = (hot.k, hot.v) if low_rank is None else (hot.v,)
      page_bytes = sum(x.nbytes // x.shape[0] for x in copied)
      platform = next(iter(hot.counts.devices())).platform
      page = hot.k.shape[1]
      page_bytes *= slots_copied(blocks.k, page, platform) // page
      num_bytes = (misses - early + ahead) * page_bytes
      of_kind = PageFetches(hits, misses, num_bytes, early, ahead)
      total = PageFetches(*map(sum, zip(total, of_kind, strict=True)))
    return total

  def tokens_read(self, kind: int, tokens: int) -> int:
    """Older tokens that a query reads at most of `tokens`, on one shard.

    Args:
      kind: Index of the kind of layer.
      tokens: Number of older tokens.
    """
    page = self.kind.tier.block
    pages = -(-tokens // page)
    if self.kind.policy is not None:
      read = units_read(self.kind, pages) * unit_of(self.kind)
      return min(tokens, read) if pages else 0
    return min(tokens, self.shapes[kind].reading.most * page)

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over a full cache's pages."""
    return (
      super().tile_trips(platform) + 1 / 3
    ) / self.kind.tier.tile_blocks - 1 / 3

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self, at: Coords, *, sees: bool, **call: Any
  ) -> ChosenTieredCache:
    cache: Any = super().allocate(at, sees=sees, **call)
    return cache if sees else cache._without_queries(jnp.zeros_like)

  def layer(self, kind: int, slots: PyTree, index: Index) -> ChosenTieredLayer:
    inner, hot, moments = slots
    inner = self.open.layer(kind, inner, index)
    return ChosenTieredLayer(self, inner, index, kind, hot, moments)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def _with_blocks(
    self, slots: tuple[Any, ...], count: Int[Array, "B R"]
  ) -> ChosenTieredCache:
    older = self.held.used
    page_keys = tuple(
      None
      if x is None
      else with_landmarks(
        PageKeys(x, self.centres[n], self.low_rank[n]),
        self.open,
        older,
        count,
        self.moments[n],
        n,
        self.kind,
        self.limit,
        with_heads(self.places, self.shapes[n].heads),
      )
      for n, x in enumerate(self.landmarks)
    )
    # Before the blocks are written: tokens that were dropped may be hot.
    first = older // unit_of(self.kind)
    hot = without_pages_from(self.hot, first, self.places)
    cache: Any = super()._with_blocks(slots, count)
    return dataclasses.replace(
      cache,
      landmarks=tuple(x and x.landmarks for x in page_keys),
      centres=tuple(x and x.centres for x in page_keys),
      low_rank=tuple(x and x.low_rank for x in page_keys),
      hot=hot,
    )

  def changed(self, change: changes.CacheChange) -> ChosenTieredCache:
    """Return the cache after a change between calls; see `ModelCache.changed`.

    Hot pages of rows that are taken or inserted are copied again. Bounds of a
    page that `truncate` leaves partly empty include the keys that it had, and
    moments the queries of dropped tokens, unless a row becomes empty.
    """
    cache: Any = super().changed(change)
    match change:
      case changes.ResetRows(rows):
        return cache._without_queries(lambda x: x.at[:, rows].set(0))
      case changes.Truncate(end, _):
        is_empty = end[None, :, None, None, None] == 0
        return cache._without_queries(lambda x: jnp.where(is_empty, 0, x))
      case changes.TakeRows(rows):
        return dataclasses.replace(cache, hot=self._hot_for(len(rows)))
      case changes.InsertRows(rows, _):
        empty = lambda x: placed_as(x.at[:, rows].set(-1), x)
        hot = tuple(
          x and dataclasses.replace(x, page=empty(x.page)) for x in cache.hot
        )
        return dataclasses.replace(cache, hot=hot)
    return cache

  def _without_queries(
    self, change: Callable[[jax.Array], jax.Array]
  ) -> ChosenTieredCache:
    """Return the cache with changed moments of queries."""
    reset = lambda x: placed_as(change(x), x)
    return dataclasses.replace(self, moments=jax.tree.map(reset, self.moments))

  def gathered(self, device: jax.Device) -> ChosenTieredCache:
    """Copy the cache to one device and its host."""
    order = self._gathered_order()
    cache: Any = super().gathered(device)

    def gather_pages(x: jax.Array) -> jax.Array:
      index = order[None, :, None, :].reshape(
        1, len(order), 1, -1, *(1,) * (x.ndim - 4)
      )
      return move(jnp.asarray(np.take_along_axis(host(x), index, 3)), device)

    landmarks = jax.tree.map(gather_pages, self.landmarks)
    to_device = lambda x: jax.device_put(x, device)
    cache = dataclasses.replace(
      cache,
      landmarks=landmarks,
      centres=jax.tree.map(to_device, self.centres),
      low_rank=jax.tree.map(to_device, self.low_rank),
      moments=jax.tree.map(to_device, self.moments),
    )
    hot = jax.tree.map(to_device, cache._hot_for(self.batch))
    counted = []
    for new, old in zip(hot, self.hot, strict=True):
      if new is not None and old is not None:
        by_shard = host(old.counts).reshape(*new.counts.shape[:3], -1, COUNTS)
        counts = move(jnp.asarray(by_shard.sum(3)), device)
        new = dataclasses.replace(new, counts=counts)
      counted.append(new)
    return dataclasses.replace(cache, hot=tuple(counted))


tree.register(
  ChosenTieredCache,
  (
    "open",
    "held",
    "blocks",
    "landmarks",
    "centres",
    "low_rank",
    "hot",
    "moments",
  ),
  ("kind", "limit", "memory", "places"),
)
