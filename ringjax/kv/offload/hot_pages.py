"""Pages of host memory that are kept on the devices while queries choose them.

A page here is a unit of the choice: a block of host memory, or a single token
of one, see `PageChoice.unit`.

Guarantees: after `fetch_chosen` the pages that the call's queries chose are on
the device, bit for bit; only those that were not there are copied. Rows, heads
and shards are independent.
Cost: a copy of each missing page of keys and of values, one after another, on a
TPU of at least eight tokens; an order of a head's hot pages by their last use.
With pages that `begin_pages` copies ahead, those of them that are missing are
not copied again; its number of copies does not depend on data, so a compiler
can begin them while another layer runs.
Memory: `hot` tokens of each KV head; during a call that chooses more pages,
those, for one layer at a time.

The least recently used pages are replaced (LRU), never one that the call
chose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.kv.base import CacheSpec, zeros
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_rows import placed_as
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.offload.choices import unit_of
from ringjax.kv.offload.low_rank_keys import LowRankKeys
from ringjax.kv.offload.moved_blocks import with_heads
from ringjax.kv.state import StateShape
from ringjax.kv.storage.pages import Places
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.code_format import as_bytes, token_axis
from ringjax.ops.mask import Coords
from ringjax.typing import ArrayLeaf, Index, leaf

_LAST = jnp.iinfo(jnp.int32).max
# Tokens of a tile of a TPU's memory, the least that is copied.
_TPU_ROWS = 8
# Numbers that are counted on each shard, see `HotPages.counts`.
COUNTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class HotPages:
  """Hot pages of the layers of one kind: C of each KV head, on each shard.

  Attributes:
    k: Keys [N, P, H], or their bytes uint8 [N, P, X]; on each device the pages
      of its layers, rows and heads, one after another.
    v: Values in the same layout; of size 0 where they are part of the keys.
    page: Page of the older part that each has, int32 [L, B, K, R C]; -1 for
      none. Each shard counts its own pages from 0.
    used: Number of calls, of the layer, until the last that chose the page,
      int32 [L, B, K, R C].
    counts: Pages that calls chose and that were there (hits), that were not
      (misses), those of the misses that had been copied ahead, and copies
      ahead, all of a device at its first row and head, int32 [L, B, K, R 4].
  """

  k: Shaped[ArrayLeaf, "N P _"]
  v: Shaped[ArrayLeaf, "N P _"]
  page: Int[ArrayLeaf, "L B K _"]
  used: Int[ArrayLeaf, "L B K _"]
  counts: Int[ArrayLeaf, "L B K _"]

  @classmethod
  def spec(
    cls, shape: LayerCacheSpec, room: CacheSpec, slots: int, hot: int
  ) -> HotPages:
    """Specs of hot pages.

    Args:
      shape: Layers that have them.
      room: Batch, dtype, codec and mesh of the cache.
      slots: Slots of a page, P.
      hot: Hot pages of a KV head on a shard, C.
    """
    places = Places.of(room, shape.heads)
    stored = shape.slots(dataclasses.replace(room, mesh=None, axes={}))

    def like(shape: tuple[int, ...], dtype: DTypeLike, spec: P) -> ArrayLeaf:
      if places.mesh is None:
        return leaf(jax.ShapeDtypeStruct(shape, dtype))
      sharding = NamedSharding(places.mesh, spec)
      return leaf(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))

    lead = (shape.layers, room.batch, shape.heads)
    count = math.prod(lead) * room.shards * hot

    def pool(x: ArrayLeaf) -> ArrayLeaf:
      width = x.shape[7 - token_axis(x)]
      dtype = jnp.uint8 if x.dtype == jnp.int8 else x.dtype
      # Compiled programs return arrays of size 0 replicated.
      spec = places.pool if width else P()
      return like((count, slots, width), dtype, spec)

    by_slot = like((*lead, room.shards * hot), jnp.int32, places.by_head)
    return cls(
      k=pool(stored.k),
      v=pool(stored.v),
      page=by_slot,
      used=by_slot,
      counts=like((*lead, room.shards * COUNTS), jnp.int32, places.by_head),
    )

  def allocated(self) -> HotPages:
    """Create the arrays from these specs, with no page in use."""
    empty = zeros(self)
    return dataclasses.replace(empty, page=empty.page - 1)

  def specs(self, places: Places) -> HotPages:
    """PartitionSpecs of the arrays, as the same tree."""
    return tree.with_leaves(
      self,
      k=places.pool,
      v=places.pool if self.v.size else P(),
      page=places.by_head,
      used=places.by_head,
      counts=places.by_head,
    )


tree.register(HotPages, ("k", "v", "page", "used", "counts"), ())


class PageFetches(NamedTuple):
  """Pages that calls have chosen, of all rows, layers, KV heads and shards.

  Fields:
    hits: Pages that were on the devices.
    misses: Pages that were not.
    bytes: Bytes of the pages that were copied from host memory.
    early: Misses that had been copied ahead of their layer, with `ahead`.
    copied_ahead: Copies ahead of a layer, with those that were of no use.
  """

  hits: int
  misses: int
  bytes: int
  early: int = 0
  copied_ahead: int = 0

  def since(self, earlier: PageFetches) -> PageFetches:
    """Pages that calls have chosen after those that `earlier` counts."""
    pairs = zip(self, earlier, strict=True)
    return PageFetches(*(new - old for new, old in pairs))

  def record(self) -> dict[str, int | float]:
    """Fields and the share of hits as JSON."""
    share = self.hits / max(1, self.hits + self.misses)
    return {**self._asdict(), "hit_share": share}


class EarlyPages(NamedTuple):
  """Pages that were copied ahead of the layer that may choose them.

  Fields:
    k: Keys of pages [F, P, X]; of size 0 where they are rebuilt.
    v: Values in the same layout, or of size 0 where they are part of the keys.
    page: Number of each page among those of all rows and heads of the device,
      int32 [F]; -1 for none.
  """

  k: Shaped[Array, "F P _"]
  v: Shaped[Array, "F P _"]
  page: Int[Array, " F"]

  @classmethod
  def specs(cls, hot: HotPages, places: Places, *, keys: bool) -> EarlyPages:
    """PartitionSpecs of the arrays, with keys or without."""
    pool: PyTree = places.pool
    none: PyTree = P()
    return cls(pool if keys else none, pool if hot.v.size else none, pool)


class ChosenPages(NamedTuple):
  """Pages that the queries of a call read, in device memory.

  Fields:
    k: Keys of pages [N, P, X]; None: those of the hot pages.
    v: Values of pages, or None.
    table: Index of each page of a head in the arrays, int32 [B, K, W], -1 for
      none.
    places: Places in the table that each query reads, int32 [B, K, T, n], -1
      for none; None: it reads all pages of the table.
    at: Coordinates of the slots of the table's pages, [B, K, W P]; positions
      are -1 for an empty slot.
    bias: Bias of the scores of each query and page, float32 [B, K, G, T, n];
      None: 0.
  """

  k: Shaped[Array, "N P _"] | None
  v: Shaped[Array, "N P _"] | None
  table: Int[Array, "B K W"]
  places: Int[Array, "B K T n"] | None
  at: Coords
  bias: Float[Array, "B K G T n"] | None = None


def is_wider(hot: HotPages, shards: int, wanted: int, pages: int) -> bool:
  """Whether a call may choose more pages of a head than are hot.

  Args:
    hot: Hot pages of the layers.
    shards: Shards of the sequence.
    wanted: Pages that all queries of the call read.
    pages: Pages of a row in host memory, on all shards.
  """
  return min(wanted, pages // shards) > hot.page.shape[3] // shards


def fetch_chosen(
  blocks: LayerKV,
  hot: HotPages,
  at: Coords,
  layer: Index,
  pages: Int[Array, "B K T n"],
  reads: Bool[Array, "B K T n"],
  low_rank: LowRankKeys | None = None,
  early_pages: EarlyPages | None = None,
) -> tuple[HotPages, ChosenPages]:
  """Copy the chosen pages that are not hot, on one device.

  Args:
    blocks: Blocks of the older part in host memory, [L N, B, K, S, X], of S
      tokens, or M pages of a row for each layer.
    hot: Hot pages of the layers.
    at: Coordinates of the older part, [B, N S].
    layer: Index of the layer in the L, int32 [].
    pages: Pages from which the queries choose, 0 to M - 1; those of a query
      are distinct.
    reads: Whether the query reads the page.
    low_rank: Coefficients from which keys are rebuilt; None: they are copied.
    early_pages: Pages of the layer that were copied ahead; None: none were.

  Returns:
    The hot pages after the call, and those that the queries read.
  """
  _, b, heads, size = hot.page.shape
  host_pages = _HostPages.of(blocks, hot, layer)
  total = host_pages.total
  wanted = min(pages.shape[2] * pages.shape[3], total)
  extra = max(0, wanted - size)
  take_layer = lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
  page_of, used = take_layer(hot.page), take_layer(hot.used)
  widen = lambda x, value: jnp.pad(
    x, ((0, 0), (0, 0), (0, extra)), constant_values=value
  )
  page_of, used = widen(page_of, -1), widen(used, -1)
  width = size + extra
  flat = pages.reshape(b, heads, -1)
  read = reads.reshape(b, heads, -1)
  slot_of = _slots_of(page_of, total)
  is_hit = read & (jnp.take_along_axis(slot_of, flat, 2) >= 0)
  is_miss = read & ~is_hit & _is_first(flat, read, total)
  chosen = _scattered(
    flat, read, jnp.bool_(True), jnp.zeros_like(slot_of, bool)
  )
  stays = (page_of >= 0) & jnp.take_along_axis(
    chosen, jnp.maximum(page_of, 0), 2
  )
  # Room that only this call has is taken last, pages of this call never.
  rank = jnp.where(stays, _LAST, used)
  slots = jnp.arange(width, dtype=jnp.int32)[None, None]
  rank = jnp.where(slots < size, rank, jnp.maximum(rank, _LAST - 1))
  order = jnp.argsort(rank, 2).astype(jnp.int32)
  nth = jnp.cumsum(is_miss, 2, dtype=jnp.int32) - 1
  victim = jnp.take_along_axis(order, jnp.clip(nth, 0, width - 1), 2)
  page_of = _scattered(victim, is_miss, flat, page_of)
  slot_of = _slots_of(page_of, total)
  slot = jnp.take_along_axis(slot_of, flat, 2)
  clock = 1 + jnp.max(used, 2, keepdims=True)
  chosen = (page_of >= 0) & jnp.take_along_axis(
    chosen, jnp.maximum(page_of, 0), 2
  )
  used = jnp.where(chosen, clock, used)

  # In place in the arrays of all layers, if the call needs no more room.
  first = jnp.asarray(layer, jnp.int32) * (b * heads * size)
  arrays: tuple[jax.Array, ...] = (hot.k, hot.v)
  if extra:
    arrays = tuple(_wider(x, first, b * heads, size, extra) for x in arrays)
  base = jnp.int32(0) if extra else first
  head = jnp.arange(b * heads, dtype=jnp.int32).reshape(b, heads, 1)
  first_slot = base + head * width
  arrays, is_early = _fetched(
    host_pages,
    arrays,
    flat,
    first_slot + victim,
    is_miss,
    low_rank,
    early_pages,
  )
  table = first_slot + slots
  table = jnp.where(page_of >= 0, table, -1)
  back = lambda old, new: lax.dynamic_update_slice_in_dim(
    old, new[None], layer, 0
  )
  distinct_hits = _is_first(flat, read, total) & is_hit
  num_copies = 0 if early_pages is None else early_pages.page.size
  copies = jnp.zeros_like(is_miss[..., :1], jnp.int32).at[0, 0].set(num_copies)
  counts = jnp.stack(
    [jnp.sum(x, 2) for x in (distinct_hits, is_miss, is_early, copies)], 2
  )
  pools = arrays
  if extra:
    pools = tuple(
      _narrow(old, new, first, b * heads, size)
      for old, new in zip((hot.k, hot.v), arrays, strict=True)
    )
  new_hot = HotPages(
    k=pools[0],
    v=pools[1],
    page=back(hot.page, page_of[..., :size]),
    used=back(hot.used, used[..., :size]),
    counts=hot.counts.at[layer].add(counts.astype(jnp.int32)),
  )

  def of_pages(x: Int[Array, "B S"], empty: int) -> Int[Array, "B K _"]:
    by_page = x.reshape(x.shape[0], total, -1)
    by_page = jnp.broadcast_to(by_page, (b, *by_page.shape[1:]))
    row = jnp.arange(b)[:, None, None]
    picked = by_page[row, jnp.maximum(page_of, 0)]
    picked = jnp.where((page_of >= 0)[..., None], picked, empty)
    return picked.reshape(b, heads, -1)

  seg = of_pages(at.seg, 0)
  pos = jnp.where(seg > 0, of_pages(at.pos, -1), -1)
  places = jnp.where(reads, slot.reshape(pages.shape), -1)
  k, v = arrays if extra else (None, None)
  return new_hot, ChosenPages(k, v, table, places, Coords(pos, seg))


def _scattered(
  index: Int[Array, "B K n"],
  counts: Bool[Array, "B K n"],
  value: Shaped[Array, "*n"],
  into: Shaped[Array, "B K m"],
) -> Shaped[Array, "B K m"]:
  """Set elements of each head at the indices that count."""
  b, heads, size = into.shape
  row = jnp.arange(b)[:, None, None]
  head = jnp.arange(heads)[None, :, None]
  at = jnp.where(counts, index, size)
  return into.at[row, head, at].set(value, mode="drop")


def _slots_of(page_of: Int[Array, "B K C"], total: int) -> Int[Array, "B K M"]:
  """Slot that has each page, -1 for none."""
  slots = jnp.broadcast_to(
    jnp.arange(page_of.shape[2], dtype=jnp.int32), page_of.shape
  )
  empty = jnp.full((*page_of.shape[:2], total), -1, jnp.int32)
  return _scattered(page_of, page_of >= 0, slots, empty)


def _is_first(
  pages: Int[Array, "B K n"], reads: Bool[Array, "B K n"], total: int
) -> Bool[Array, "B K n"]:
  """Mark one of the entries with the same page, among those that are read."""
  n = pages.shape[2]
  index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), pages.shape)
  empty = jnp.full((*pages.shape[:2], total), -1, jnp.int32)
  # Any of several writes may win.
  owner = _scattered(pages, reads, index, empty)
  return reads & (jnp.take_along_axis(owner, pages, 2) == index)


def _wider(
  pool: Shaped[Array, "N P _"], first: Index, heads: int, size: int, extra: int
) -> Shaped[Array, "_ P _"]:
  """Copy one layer's pages, with room for more of each head."""
  if not pool.size:
    return pool
  layer = lax.dynamic_slice_in_dim(pool, first, heads * size, 0)
  by_head = layer.reshape(heads, size, *pool.shape[1:])
  wider = jnp.pad(by_head, ((0, 0), (0, extra), (0, 0), (0, 0)))
  return wider.reshape(-1, *pool.shape[1:])


def _narrow(
  pool: Shaped[Array, "N P _"],
  pages: Shaped[Array, "_ P _"],
  first: Index,
  heads: int,
  size: int,
) -> Shaped[Array, "N P _"]:
  """Put a layer's pages back, without the additional room."""
  if not pool.size:
    return pool
  by_head = pages.reshape(heads, -1, *pool.shape[1:])[:, :size]
  layer = by_head.reshape(-1, *pool.shape[1:])
  return lax.dynamic_update_slice_in_dim(pool, layer, first, 0)


class _HostPages(NamedTuple):
  """Pages of a layer in host memory, of all rows and heads of a device.

  Fields:
    blocks: Blocks of all layers.
    layer: Index of the layer, int32 [].
    total: Number of pages of a head, M.
    heads: Number of heads of all rows.
    page: Tokens of a page.
  """

  blocks: LayerKV
  layer: Index
  total: int
  heads: int
  page: int

  @classmethod
  def of(cls, blocks: LayerKV, hot: HotPages, layer: Index) -> _HostPages:
    """Pages of a layer, of the size that hot ones have."""
    num_layers, b, heads, _ = hot.page.shape
    slots, page = blocks.k.shape[token_axis(blocks.k)], hot.k.shape[1]
    total = blocks.k.shape[0] // num_layers * (slots // page)
    return cls(blocks, layer, total, b * heads, page)

  def numbers(self, pages: Int[Array, "B K n"]) -> Int[Array, "B K n"]:
    """Number of each page among those of all rows and heads."""
    head = jnp.arange(self.heads, dtype=jnp.int32)
    return head.reshape(*pages.shape[:2], 1) * self.total + pages

  def copied(
    self, stack: Shaped[Array, "_ B K _ _"], number: Index
  ) -> Shaped[Array, "1 P _"]:
    """Copy a page of `blocks.k` or `blocks.v` to the device."""
    head, page = number // self.total, number % self.total
    parts = stack.shape[token_axis(stack)] // self.page
    first = jnp.asarray(self.layer, jnp.int32) * (self.total // parts)
    source = (first + page // parts) * self.heads + head
    return _copied_page(stack, self.page, source, page % parts)


def _filled(
  arrays: tuple[jax.Array, ...],
  wanted: Bool[Array, "B K n"],
  targets: Int[Array, "B K n"],
  pages_of: Callable[[Index], tuple[jax.Array | None, ...]],
) -> tuple[jax.Array, ...]:
  """Put the wanted pages into their slots, one after another.

  Args:
    arrays: Arrays of keys and values, [N, P, X].
    wanted: Whether to put each page.
    targets: Slot of each page in the arrays.
    pages_of: Function of the index of a page in `wanted` that returns its keys
      and values, [1, P, X]; None leaves an array as it is.
  """
  flat = wanted.reshape(-1)
  (order,) = jnp.nonzero(flat, size=flat.size, fill_value=0)
  order = order.astype(jnp.int32)

  def step(i: Index, arrays: PyTree) -> PyTree:
    entry = order[i]
    slot = targets.reshape(-1)[entry]
    return tuple(
      into
      if page is None
      else lax.dynamic_update_slice_in_dim(into, page, slot, 0)
      for into, page in zip(arrays, pages_of(entry), strict=True)
    )

  return loop(jnp.sum(flat, dtype=jnp.int32), step, arrays)


def _fetched(
  host_pages: _HostPages,
  arrays: tuple[jax.Array, ...],
  pages: Int[Array, "B K n"],
  targets: Int[Array, "B K n"],
  is_miss: Bool[Array, "B K n"],
  low_rank: LowRankKeys | None,
  early_pages: EarlyPages | None,
) -> tuple[tuple[jax.Array, ...], Bool[Array, "B K n"]]:
  """Put missing pages into their slots: early ones, and those of host memory.

  With `low_rank` their keys are rebuilt on the device.

  Returns:
    The arrays, and which of the pages were early.
  """
  numbers = host_pages.numbers(pages)

  def pages_from(
    source: LayerKV | EarlyPages, copy: Callable[[jax.Array, Index], jax.Array]
  ) -> Callable[[Index], tuple[jax.Array | None, ...]]:
    def pages_of(entry: Index) -> tuple[jax.Array | None, ...]:
      number = numbers.reshape(-1)[entry]
      if low_rank is None:
        k = copy(source.k, entry)
      else:
        head, page = number // host_pages.total, number % host_pages.total
        k = low_rank.of_unit(host_pages.layer, head, page, host_pages.page)
        k = k.astype(arrays[0].dtype)
      return k, copy(source.v, entry) if arrays[1].size else None

    return pages_of

  is_early = jnp.zeros_like(is_miss)
  if early_pages is not None:
    is_same = numbers[..., None] == early_pages.page[None, None, None]
    is_early = is_miss & jnp.any(is_same, 3)
    place = jnp.argmax(is_same, 3).reshape(-1)
    take = lambda stack, entry: lax.dynamic_slice_in_dim(
      stack, place[entry].astype(jnp.int32), 1, 0
    )
    arrays = _filled(arrays, is_early, targets, pages_from(early_pages, take))
  copy = lambda stack, entry: host_pages.copied(
    stack, numbers.reshape(-1)[entry]
  )
  pages_of = pages_from(host_pages.blocks, copy)
  return _filled(arrays, is_miss & ~is_early, targets, pages_of), is_early


def begin_pages(
  blocks: LayerKV,
  hot: HotPages,
  layer: Index,
  pages: Int[Array, "B K T n"],
  reads: Bool[Array, "B K T n"],
  count: int,
  *,
  keys: bool,
) -> EarlyPages:
  """Copy pages that a layer will probably choose and that are not hot.

  Args:
    blocks: Blocks of the older part in host memory.
    hot: Hot pages of the layers.
    layer: Index of the layer, int32 [].
    pages: Pages that queries will probably choose, the likeliest first.
    reads: Whether the query will probably read the page.
    count: Number of copies, F, whatever is missing.
    keys: Whether keys are copied, too.
  """
  host_pages = _HostPages.of(blocks, hot, layer)
  total = host_pages.total
  page_of = lax.dynamic_index_in_dim(hot.page, layer, 0, keepdims=False)
  flat, read = (x.reshape(*x.shape[:2], -1) for x in (pages, reads))
  hot_slot = jnp.take_along_axis(_slots_of(page_of, total), flat, 2)
  is_missing = read & (hot_slot < 0) & _is_first(flat, read, total)
  # The likeliest pages of all heads, then their next ones.
  by_rank = lambda x: jnp.transpose(x.reshape(pages.shape), (3, 2, 0, 1))
  missing = by_rank(is_missing).reshape(-1)
  (first,) = jnp.nonzero(missing, size=count, fill_value=missing.size)
  numbers = by_rank(host_pages.numbers(flat)).reshape(-1)
  number = jnp.where(
    first < missing.size, numbers[jnp.minimum(first, missing.size - 1)], -1
  )

  def copied(stack: jax.Array) -> jax.Array:
    return jnp.concatenate(
      [
        host_pages.copied(stack, jnp.maximum(number[i], 0))
        for i in range(count)
      ]
    )

  nothing = lambda x: jnp.zeros((0, *x.shape[1:]), x.dtype)
  return EarlyPages(
    copied(blocks.k) if keys else nothing(hot.k),
    copied(blocks.v) if hot.v.size else nothing(hot.v),
    number.astype(jnp.int32),
  )


def slots_copied(
  blocks: Shaped[ArrayLeaf, "_ B K _ _"], page: int, platform: str
) -> int:
  """Number of tokens that are copied from host memory for a page.

  Args:
    blocks: Blocks in host memory.
    page: Tokens of a page.
    platform: Platform of the devices.
  """
  axis = token_axis(blocks)
  if axis == blocks.ndim - 1:
    return blocks.shape[axis]
  return max(page, _TPU_ROWS) if platform == "tpu" else page


def _copied_page(
  blocks: Shaped[Array, "_ B K _ _"], page: int, source: Index, part: Index
) -> Shaped[Array, "1 P _"]:
  """Copy a page from host memory to the device.

  Args:
    blocks: Blocks in host memory.
    page: Tokens of a page.
    source: Index of the block of a head among those of all heads.
    part: Index of the page in the block.
  """

  def copied(
    size: int, blocks: jax.Array, source: Index, part: Index
  ) -> jax.Array:
    slots = blocks.shape[token_axis(blocks)]
    dims = blocks.shape[3:] if size == slots else (size, blocks.shape[4])
    # On a TPU a copy is one slice, along one axis, of the hosts' memory.
    stack = blocks.reshape(-1, *dims)
    row = source * (slots // size) + part * page // size
    host_slots = lax.dynamic_slice_in_dim(stack, row, 1, 0)
    stored = as_bytes(jax.device_put(host_slots, jax.memory.Space.Device))
    if size == page:
      return stored
    return lax.dynamic_slice_in_dim(stored, part * page % size, page, 1)

  sizes = [slots_copied(blocks, page, x) for x in ("tpu", "cpu")]
  on_tpu, elsewhere = (functools.partial(copied, size) for size in sizes)
  if sizes[0] == sizes[1]:
    return elsewhere(blocks, source, part)
  return lax.platform_dependent(
    blocks, source, part, tpu=on_tpu, default=elsewhere
  )


def hot_specs(
  shapes: Sequence[LayerCacheSpec | StateShape],
  blocks: Sequence[LayerKV | None],
  room: CacheSpec,
  kind: CacheConfig,
) -> tuple[HotPages | None, ...]:
  """Specs of the hot pages of each kind of layer; None for those without."""
  page = unit_of(kind)
  count = -(-(kind.tier.hot or 0) // page)
  # No more than a row has.
  count = min(count, room.capacity // room.shards // page)
  return tuple(
    None
    if x is None or not isinstance(shape, LayerCacheSpec)
    else HotPages.spec(shape, room, page, count)
    for shape, x in zip(shapes, blocks, strict=True)
  )


def emptied(hot: tuple[HotPages | None, ...]) -> tuple[HotPages | None, ...]:
  """Create hot pages from their specs, with no page in use."""
  return tuple(x and x.allocated() for x in hot)


def without_pages_from(
  hot: tuple[HotPages | None, ...], first: Int[Array, "B R"], places: Places
) -> tuple[HotPages | None, ...]:
  """Hot pages without those from page `first` of each row and shard on."""

  def forget(x: HotPages) -> HotPages:
    at_places = with_heads(places, x.page.shape[2])
    drop = lambda page, first: jnp.where(page < first[None, :, None], page, -1)
    local = at_places.local(
      drop, (at_places.by_head, at_places.by_example), at_places.by_head
    )
    return dataclasses.replace(x, page=placed_as(local(x.page, first), x.page))

  return tuple(x and forget(x) for x in hot)
