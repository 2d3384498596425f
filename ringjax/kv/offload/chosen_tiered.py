"""A cache with a part in host memory of which only chosen pages are copied.

Guarantees: all tokens are kept, bit for bit. A token of an answer reads the
pages of the older part that its queries choose: by bounds of their keys
(Quest), the same pages as `Select` reads on the devices; or all those with keys
that the index of its layer chooses, and so the same keys as without host
memory. A choice does not depend on drafts, other tokens of a call, other rows,
or what was hot before. The tokens of a prompt read all pages.
Cost: of each call, a product of its queries with the landmarks, and a copy of
each chosen page that is not hot, see `fetch_chosen`; `fetches` counts them.
Memory: on the devices as `TieredCache`, `hot` tokens of each KV head, and the
landmarks: of bounds, two vectors for each page of a KV head; of an index, its
key of each token. On the hosts as `TieredCache`.

Ref: Tang et al. 2024, Quest, arXiv 2406.10774; DeepSeek-AI 2025,
DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import HOST, CacheSpec, zeros
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_rows import placed_as
from ringjax.kv.eviction.evictable_layers import check_layers
from ringjax.kv.kv_layer import KVLayer
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.offload.host_memory import default_device
from ringjax.kv.offload.hot_pages import (
  ChosenPages,
  HotPages,
  fetch_chosen,
  is_wider,
)
from ringjax.kv.offload.moved_blocks import with_heads
from ringjax.kv.offload.tiered import TieredCache, TieredLayer
from ringjax.kv.storage import changes
from ringjax.kv.storage.pages import Places, host
from ringjax.kv.storage.slots import REPLICATED
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.paged import PagedView, ranked_pages
from ringjax.ops.attention.cached.views import KVView, UnrotatedView
from ringjax.ops.attention.sparse.top_tokens import ranked
from ringjax.ops.mask import Coords, SameSegment, visible
from ringjax.parallel.local_arrays import move
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.kv.model_cache import ModelCache
  from ringjax.ops.attention.cached.selection import KeySelection


class PageFetches(NamedTuple):
  """Pages that calls have chosen, of all rows, layers, KV heads and shards.

  Fields:
    hits: Pages that were on the devices.
    misses: Pages that were copied from host memory.
    bytes: Bytes of the pages that were copied.
  """

  hits: int
  misses: int
  bytes: int

  def since(self, earlier: PageFetches) -> PageFetches:
    """Pages that calls have chosen after those that `earlier` counts."""
    pairs = zip(self, earlier, strict=True)
    return PageFetches(*(new - old for new, old in pairs))

  def record(self) -> dict[str, int | float]:
    """Fields and the share of hits as JSON."""
    share = self.hits / max(1, self.hits + self.misses)
    return {**self._asdict(), "hit_share": share}


def page_fetches(cache: ModelCache) -> PageFetches | None:
  """Chosen pages of a cache and its parts; None without a choice."""
  if isinstance(cache, ChosenTieredCache):
    return cache.fetches()
  parts = [x for x in map(page_fetches, cache.parts) if x is not None]
  if not parts:
    return None
  hits, misses, num_bytes = (sum(x) for x in zip(*parts, strict=True))
  return PageFetches(int(hits), int(misses), int(num_bytes))


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
    landmarks: For each kind of layer, what queries choose the pages by: least
      and largest elements of the keys, [L, B, K, R M, 2, H], or the keys of
      the layer's index, [L, B, 1, R M, P, E].
    hot: For each kind of layer its hot pages; () if all stays on the devices.
  """

  landmarks: tuple[Any, ...]
  hot: tuple[Any, ...]
  layer_fields: ClassVar[tuple[str, ...]] = ("hot",)
  row_axes: ClassVar[Mapping[str, int]] = {
    **TieredCache.row_axes,
    "landmarks": 1,
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
    _check_layers(shapes, kind, room, resident)
    fields = {x.name: getattr(base, x.name) for x in dataclasses.fields(base)}
    return cls(
      **fields,
      landmarks=tuple(
        None if blocks is None else _landmarks_spec(shape, room, kind)
        for shape, blocks in zip(shapes, base.blocks, strict=True)
      ),
      hot=_hot_spec(shapes, base.blocks, room, kind),
    )

  def allocated(self, files: CacheFiles | None = None) -> ChosenTieredCache:
    cache: Any = super().allocated(files)
    landmarks, hot = zeros(self.landmarks), _emptied(self.hot)
    if self.mesh is None:
      # As `TieredCache` does, so that jit does not compile twice.
      landmarks, hot = jax.device_put((landmarks, hot), default_device())
    return dataclasses.replace(cache, landmarks=landmarks, hot=hot)

  def _hot_for(self, batch: int) -> tuple[Any, ...]:
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
    return _emptied(_hot_spec(self.shapes, self.blocks, room, self.kind))

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  def fetches(self) -> PageFetches:
    """Count the pages that the calls of this cache have chosen."""
    hits = misses = num_bytes = 0
    for hot in self.hot:
      if not hot:
        continue
      counts = host(hot.counts).reshape(-1, 2).astype(np.int64).sum(0)
      page_bytes = sum(x.nbytes // x.shape[0] for x in (hot.k, hot.v))
      hits += int(counts[0])
      misses += int(counts[1])
      num_bytes += int(counts[1]) * page_bytes
    return PageFetches(hits, misses, num_bytes)

  def tokens_read(self, kind: int, tokens: int) -> int:
    """Older tokens that a query reads at most of `tokens`, on one shard.

    Args:
      kind: Index of the kind of layer.
      tokens: Number of older tokens.
    """
    page, policy = self.kind.tier.block, self.kind.policy
    pages = -(-tokens // page)
    if policy is not None:
      return min(tokens, policy.pages(pages, page) * page) if pages else 0
    return min(tokens, self.shapes[kind].reading.most * page)

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over a full cache's pages."""
    return (
      super().tile_trips(platform) + 1 / 3
    ) / self.kind.tier.tile_blocks - 1 / 3

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def layer(self, kind: int, slots: PyTree, index: Index) -> ChosenTieredLayer:
    inner, hot = slots
    inner = self.open.layer(kind, inner, index)
    return ChosenTieredLayer(self, inner, index, kind, hot)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def _with_blocks(
    self, slots: tuple[Any, ...], count: Int[Array, "B R"]
  ) -> ChosenTieredCache:
    older, page = self.held.used, self.kind.tier.block
    landmarks = tuple(
      None
      if x is None
      else _with_landmarks(
        x,
        self.open,
        older,
        count,
        n,
        self.kind,
        self.limit,
        with_heads(self.places, self.shapes[n].heads),
      )
      for n, x in enumerate(self.landmarks)
    )
    # Before the blocks are written: tokens that were dropped may be hot.
    hot = _without_pages_from(self.hot, older // page, self.places)
    cache: Any = super()._with_blocks(slots, count)
    return dataclasses.replace(cache, landmarks=landmarks, hot=hot)

  def changed(self, change: changes.CacheChange) -> ChosenTieredCache:
    """Return the cache after a change between calls; see `ModelCache.changed`.

    Hot pages of rows that are taken or inserted are copied again. Bounds of a
    page that `truncate` leaves partly empty include the keys that it had.
    """
    cache: Any = super().changed(change)
    match change:
      case changes.TakeRows(rows):
        return dataclasses.replace(cache, hot=self._hot_for(len(rows)))
      case changes.InsertRows(rows, _):
        empty = lambda x: placed_as(x.at[:, rows].set(-1), x)
        hot = tuple(
          x and dataclasses.replace(x, page=empty(x.page)) for x in cache.hot
        )
        return dataclasses.replace(cache, hot=hot)
    return cache

  def gathered(self, device: jax.Device) -> ChosenTieredCache:
    """Copy the cache to one device and its host."""
    order = self._gathered_order()
    cache: Any = super().gathered(device)

    def gather_pages(x: jax.Array) -> jax.Array:
      index = order[None, :, None, :, None, None]
      return move(jnp.asarray(np.take_along_axis(host(x), index, 3)), device)

    landmarks = jax.tree.map(gather_pages, self.landmarks)
    cache = dataclasses.replace(cache, landmarks=landmarks)
    to_device = lambda x: jax.device_put(x, device)
    hot = jax.tree.map(to_device, cache._hot_for(self.batch))
    counted = []
    for new, old in zip(hot, self.hot, strict=True):
      if new:
        by_shard = host(old.counts).reshape(*new.counts.shape[:3], -1, 2)
        counts = move(jnp.asarray(by_shard.sum(3)), device)
        new = dataclasses.replace(new, counts=counts)
      counted.append(new)
    return dataclasses.replace(cache, hot=tuple(counted))


tree.register(
  ChosenTieredCache,
  ("open", "held", "blocks", "landmarks", "hot"),
  ("kind", "limit", "memory", "places"),
)


@dataclasses.dataclass(frozen=True)
class ChosenTieredLayer(TieredLayer):
  """One layer's part of a `ChosenTieredCache` during one call.

  Attributes:
    hot: Hot pages of the kind of layer.
    chosen: Pages that the call's queries read; None: they read all.
  """

  hot: Any
  chosen: ChosenPages | None = None

  @property
  def slots(self) -> tuple[Any, Any]:
    return self.inner.slots, self.hot

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> ChosenTieredLayer:
    del plain
    cache: Any = self.cache
    policy = cache.kind.policy
    if policy is None or not self._chooses:
      # An index chooses by `chosen_by`.
      return self
    bounds, heads = cache.landmarks[self.kind], self._places
    count = bounds.shape[3] // cache.shards
    pages_read = tuple(
      policy.pages(n, cache.kind.tier.block) for n in range(count + 1)
    )

    def choose(
      q: jax.Array, bounds: jax.Array, at: Coords
    ) -> tuple[jax.Array, jax.Array]:
      b, t, n, h = q.shape
      num_heads, num_pages = bounds.shape[1:3]
      q = q.reshape(b, t, num_heads, n // num_heads, h)
      q = jnp.transpose(q, (0, 2, 3, 1, 4))
      is_slot = (at.seg > 0).reshape(at.seg.shape[0], 1, num_pages, -1)
      has_page = jnp.broadcast_to(jnp.any(is_slot, 3), bounds.shape[:3])
      pages, reads = ranked_pages(q, bounds, has_page, pages_read)
      # Of an empty row a query would read a page, too.
      return pages, reads & jnp.take_along_axis(has_page[:, :, None], pages, 3)

    q = rotated()
    spec = P(heads.batch or None, None, heads.heads or None)
    return self._fetched(choose, q, spec, q.shape[1], max(pages_read))

  def chosen_by(self, selection: KeySelection) -> ChosenTieredLayer:
    """Copy the pages with keys that the layer's index may choose.

    Each shard copies those of its best keys of the older part: the keys that
    queries read are among them and those of the open cache.
    """
    if not self._chooses:
      return self
    cache: Any = self.cache
    assert self.fresh is not None
    mask = cache.shapes[self.kind].reading.mask & SameSegment()
    batch = self._places.batch or None

    def choose(
      queries: PyTree, index_keys: jax.Array, at: Coords
    ) -> tuple[jax.Array, jax.Array]:
      selection, q_at = queries
      keys = index_keys[:, 0].reshape(
        index_keys.shape[0], -1, index_keys.shape[-1]
      )
      expand = lambda at, axis: Coords(*(jnp.expand_dims(x, axis) for x in at))
      allowed = visible(mask, expand(q_at, 2), expand(at, 1))
      scores = ranked(selection.scores(keys), allowed)
      count = min(selection.count, scores.shape[2])
      score, slot = lax.top_k(scores, count)
      pages = slot.astype(jnp.int32) // cache.kind.tier.block
      return pages[:, None], (score > -jnp.inf)[:, None]

    selection = selection.without_keys()
    tokens, most = selection.q.shape[1], selection.count
    coords = self.fresh.at
    row: Any = lambda x: P(batch if x.shape[0] > 1 else None)
    specs = selection.specs(batch, None), Coords(*map(row, coords))
    fetched = self._fetched(choose, (selection, coords), specs, tokens, most)
    # The index chooses among the keys of all hot pages.
    chosen = fetched.chosen
    assert chosen is not None
    return dataclasses.replace(fetched, chosen=chosen._replace(places=None))

  @property
  def _places(self) -> Places:
    shape = self.cache.shapes[self.kind]
    return with_heads(self.cache.places, shape.heads)

  @property
  def _chooses(self) -> bool:
    """Whether the call's tokens choose pages: not those of a prompt."""
    cache: Any = self.cache
    hosted = cache.blocks[self.kind] is not None
    return hosted and cache.open.held.mode == REPLICATED

  def _fetched(
    self,
    choose: Callable[..., tuple[jax.Array, jax.Array]],
    queries: PyTree,
    specs: PyTree,
    tokens: int,
    most: int,
  ) -> ChosenTieredLayer:
    """Copy the pages that the queries choose.

    Args:
      choose: Function of a device's queries, the landmarks of the layer and
        the coordinates of the older slots, to the pages that each query
        chooses, int32 [B, K, T, n], and whether it reads them.
      queries: Arrays that it gets.
      specs: PartitionSpecs of the queries.
      tokens: Number of tokens of the call, T.
      most: Pages that a query reads, n.
    """
    cache: Any = self.cache
    places = self._places
    blocks, landmarks = cache.blocks[self.kind], cache.landmarks[self.kind]
    batch, heads, axis = (x or None for x in _axes(places))

    def local(
      queries: PyTree,
      blocks: LayerKV,
      hot: HotPages,
      landmarks: jax.Array,
      at: Coords,
      layer: jax.Array,
    ) -> tuple[HotPages, ChosenPages]:
      of_layer = lax.dynamic_index_in_dim(landmarks, layer, 0, keepdims=False)
      at = Coords(*at)
      pages, reads = choose(queries, of_layer, at)
      return fetch_chosen(LayerKV(*blocks), hot, at, layer, pages, reads)

    block_spec: Any = P(axis, batch, heads)
    value_spec: Any = block_spec if blocks.v.size else P()
    by_head: Any = P(batch, heads, axis)
    by_query: Any = P(batch, heads, None, axis)
    wider = is_wider(self.hot, cache.shards, tokens * most, landmarks.shape[3])
    pool: Any = places.pool if wider else None
    value_pool: Any = pool if self.hot.v.size or pool is None else P()
    hot_specs = self.hot.specs(places)
    hot, chosen = places.local(
      local,
      (
        specs,
        LayerKV(block_spec, value_spec),
        hot_specs,
        places.by_head,
        places.by_example,
        P(),
      ),
      (
        hot_specs,
        ChosenPages(
          pool,
          value_pool,
          by_head,
          by_query,
          Coords(by_head, by_head),
        ),
      ),
    )(
      queries,
      blocks,
      self.hot,
      landmarks,
      cache.held.at,
      jnp.asarray(self.index, jnp.int32),
    )
    return dataclasses.replace(self, hot=hot, chosen=chosen)

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    cache: Any = self.cache
    if cache.blocks[self.kind] is None:
      return self.inner.views(apart=apart)
    if self.chosen is None:
      return super().views(apart=apart)
    codec, chosen = cache.kind.codec, self.chosen
    constants, decoders = ((), ()), None
    if codec is not None:
      constants = self.inner._constants()
      decoders = cache.shapes[self.kind].decoders(codec, cache.dtype)
    k = self.hot.k if chosen.k is None else chosen.k
    v = self.hot.v if chosen.v is None else chosen.v
    view: Any = PagedView(
      k,
      v if v.size else k[..., :0],
      chosen.at.pos,
      chosen.at.seg,
      chosen.table,
      constants,
      decoders,
      self._places.axes,
      places=chosen.places,
    )
    rotation = self.inner.rotation
    if cache.kind.layout.unrotated and not rotation.trivial:
      view = UnrotatedView(view, rotation)
    return (view, *self.inner.views(apart=apart))

  def recall(self, empty: PyTree) -> PyTree:
    return self.inner.recall(empty)

  def keep(self, state: PyTree) -> ChosenTieredLayer:
    return dataclasses.replace(self, inner=self.inner.keep(state))


# ---------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------


def _axes(places: Places) -> tuple[tuple[str, ...], ...]:
  return places.batch, places.heads, places.tokens


def _check_layers(
  shapes: tuple[Any, ...],
  kind: CacheConfig,
  room: CacheSpec,
  resident: tuple[bool, ...],
) -> None:
  """Refuse layers that can't choose pages of host memory."""
  check_layers(shapes, kind, room)
  for shape, stays in zip(shapes, resident, strict=True):
    if stays:
      continue
    reading: Any = shape.reading
    indexed = reading is not None and reading.most is not None
    if indexed == (kind.policy is None):
      by_index = reading is not None and kind.layout.unrotated
      by_index = by_index and indexed and reading.rope is not None
      if by_index and reading.rope.scaling.by_length:
        raise OptionError(
          "unrotated",
          "True, with hot, for an index whose rotation depends on the length",
          "keys that are stored rotated",
          "leave unrotated out",
        )
      continue
    got, remedy = "", "leave hot out"
    if indexed:
      got, remedy = (
        "and a policy, for a layer whose index chooses",
        (
          f"leave the policy out, as dense:device={kind.tier.device},"
          f"hot={kind.tier.hot}"
        ),
      )
    else:
      got, remedy = (
        "without a policy, for a layer without an index",
        (f"write select:device={kind.tier.device},hot={kind.tier.hot}"),
      )
    raise OptionError(
      "hot",
      f"{kind.tier.hot}, {got}",
      "one that chooses: a policy, or the index of each layer",
      remedy,
    )


def _landmarks_spec(
  shape: LayerCacheSpec, room: CacheSpec, kind: CacheConfig
) -> ArrayLeaf:
  """Shape, dtype and sharding of the landmarks of a kind of layer."""
  pages = room.capacity // kind.tier.block
  lead = (shape.layers, room.batch, shape.heads, pages)
  names = (None, "batch", "heads", "tokens", None, None)
  each = 2, shape.key
  if kind.policy is None:
    each = kind.tier.block, shape.key - _index_of(shape)
  return room.like((*lead, *each), room.dtype, names)


def _index_of(shape: LayerCacheSpec) -> int:
  """First dim of a key that belongs to the key of the layer's index."""
  assert shape.reading is not None and shape.reading.index is not None
  return shape.reading.index


def _hot_spec(
  shapes: tuple[Any, ...],
  blocks: tuple[Any, ...],
  room: CacheSpec,
  kind: CacheConfig,
) -> tuple[Any, ...]:
  page = kind.tier.block
  count = -(-(kind.tier.hot or 0) // page)
  # No more than a row has.
  count = min(count, room.capacity // room.shards // page)
  return tuple(
    () if x is None else HotPages.spec(shape, room, page, count)
    for shape, x in zip(shapes, blocks, strict=True)
  )


def _emptied(hot: tuple[Any, ...]) -> tuple[Any, ...]:
  return tuple(x and x.allocated() for x in hot)


# ---------------------------------------------------------------------------
# Moving tokens to the host
# ---------------------------------------------------------------------------


@bounded
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), donate_argnums=0)
def _with_landmarks(
  landmarks: Float[Array, "L B K M n H"],
  open_cache: KVCache,
  older: Int[Array, "B R"],
  count: Int[Array, "B R"],
  kind: int,
  config: CacheConfig,
  limit: int,
  places: Places,
) -> Float[Array, "L B K M n H"]:
  """Landmarks with those of the first `count` pages of the open tokens.

  Args:
    landmarks: Landmarks of a kind of layer.
    open_cache: Open cache.
    older: Slots of the older part in use, int32 [B, R].
    count: Number of pages, int32 [B, R].
    kind: Index of the kind of layer.
    config: Cache kind.
    limit: Maximum number of tokens of a row, for rotations that depend on it.
    places: Mesh axes that shard the landmarks.
  """
  shape: Any = open_cache.shapes[kind]
  rotation = shape.reading.rotation(limit)
  page = config.tier.block
  k, v = open_cache.slots[kind]

  def local(
    landmarks: jax.Array,
    k: jax.Array,
    v: jax.Array,
    constants: PyTree,
    at: Coords,
    older: jax.Array,
    count: jax.Array,
  ) -> jax.Array:
    inside = dataclasses.replace(
      open_cache,
      constants=tuple(
        constants if n == kind else ((), ())
        for n, _ in enumerate(open_cache.constants)
      ),
    )
    table = dataclasses.replace(open_cache.held, at=Coords(*at))
    slots = k.shape[3 if k.dtype != jnp.int8 else 4]
    num_pages = slots // page
    real = at.seg[:, : num_pages * page] > 0
    real = real.reshape(real.shape[0], 1, num_pages, page, 1)
    nth = jnp.arange(num_pages, dtype=jnp.int32)[None]
    target = jnp.where(nth < count, older // page + nth, landmarks.shape[3])
    rows, heads = landmarks.shape[1:3]
    row = jnp.arange(rows)[:, None, None]
    head = jnp.arange(heads)[None, :, None]

    def step(layer: Index, out: jax.Array) -> jax.Array:
      stored = LayerKV(k, v)
      view = KVLayer(inside, table, stored, layer, kind).view(rotation)
      if not shape.value:
        view = view.keys_alone()
      keys, _ = view.tile(jnp.int32(0), view.shape[2])
      keys = keys[:, :, : num_pages * page]
      keys = keys.reshape(rows, heads, num_pages, page, -1).astype(out.dtype)
      if config.policy is None:
        new = keys[..., _index_of(shape) :]
      else:
        low = jnp.min(jnp.where(real, keys, jnp.inf), 3)
        high = jnp.max(jnp.where(real, keys, -jnp.inf), 3)
        new = jnp.stack([low, high], 3)
      return out.at[layer, row, head, target[:, None]].set(new, mode="drop")

    if not num_pages:
      return landmarks
    return loop(shape.layers, step, landmarks)

  by_row = places.by_example
  heads = places.heads or None
  constants = open_cache.constants[kind]
  return places.local(
    local,
    (
      places.by_head,
      places.of_slots(k),
      places.of_slots(v) if v.size else P(),
      jax.tree.map(lambda _: P(None, heads), constants),
      by_row,
      by_row,
      by_row,
    ),
    places.by_head,
  )(landmarks, k, v, constants, open_cache.held.at, older, count)


def _without_pages_from(
  hot: tuple[Any, ...], first: Int[Array, "B R"], places: Places
) -> tuple[Any, ...]:
  """Hot pages without those from page `first` of each row and shard on."""

  def forget(x: HotPages) -> HotPages:
    at_places = with_heads(places, x.page.shape[2])
    drop = lambda page, first: jnp.where(page < first[None, :, None], page, -1)
    local = at_places.local(
      drop, (at_places.by_head, at_places.by_example), at_places.by_head
    )
    return dataclasses.replace(x, page=placed_as(local(x.page, first), x.page))

  return tuple(x and forget(x) for x in hot)
