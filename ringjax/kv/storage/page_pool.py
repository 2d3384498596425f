"""A pool of pages that the rows of many calls share.

Guarantees: a token's slot follows from its position and the pages of its row's
table, so no metadata of tokens is stored; rows may share pages. A row's results
do not depend on other rows, bit for bit.
Cost: an append writes whole pages. A single token would be written fastest with
its heads adjacent but read fastest without, and a TPU's compiler would copy
the pool of all layers between the two layouts in each layer. The host assigns
pages by tables.
Memory: N pages of P slots for each group of layers, whatever rows there are.
Layers with the same window are a group, whose pages can be freed once they are
before the window. Recurrent layers have a state for each row instead.

`PagePool` has the arrays. `PooledCache` is the pool with the page tables of the
rows of one call of the model.
Ref: Kwon et al. 2023, PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec, scattered_layer, zeros
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Codec
from ringjax.kv.layer_spec import (
  LayerCacheSpec,
  LayerKV,
  constants_spec,
  filled_constants,
)
from ringjax.kv.state import State
from ringjax.kv.storage.call_tiles import CallTiles
from ringjax.kv.storage.entry_slots import row_states
from ringjax.kv.storage.layer_pages import (
  LayerPages,
  PageGroup,
  PageWrites,
  chosen_layers,
  layer_range,
  merged_arrays,
  taken_pages,
  written_pages,
)
from ringjax.kv.storage.pooled_cache import PooledCache, PooledRows
from ringjax.kv.summaries.summary_spec import SummarySlots, SummarySpec
from ringjax.ops.attention.blockwise import pad_axis
from ringjax.ops.attention.cached.code_format import row_major, token_axis
from ringjax.ops.attention.cached.pooled import SharedTiles
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf, Index

# Page number beyond all pages.
_FAR = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagePool:
  """Pages of all layers of a model.

  Attributes:
    slots: For each kind of layer its `LayerKV`, [L, N, K, P, H], or the
      `SummarySlots` of its keys, or a recurrent one's `State` with a row for
      each served row.
    constants: For each kind of layer its codec constants, [L, K, n].
    groups: Groups of layers that share page tables.
    page: Slots per page, P.
    kind: Storage format of keys and values.
    shapes: For each kind of layer, the shape of one token's cached vectors.
    dtype: Dtype of keys and values after decoding.
    mesh: Device mesh whose `axis` shards the pages; None for one device.
    axis: Mesh axis of the sequence.
    heads: Mesh axis that shards the KV heads.
  """

  slots: tuple[Any, ...]
  constants: tuple[Any, ...]
  groups: tuple[PageGroup, ...]
  page: int
  kind: CacheConfig
  shapes: tuple[Any, ...]
  dtype: DTypeLike
  mesh: Mesh | None = None
  axis: str | None = None
  heads: str | None = None

  @classmethod
  def spec(
    cls,
    shapes: tuple[Any, ...],
    *,
    rows: int,
    pages: Callable[[int | None], int],
    page: int,
    dtype: DTypeLike,
    kind: CacheConfig,
    mesh: Mesh | None = None,
    axis: str | None = None,
    head_axis: str | None = None,
    row_tokens: int | None = None,
  ) -> PagePool:
    """Specs (shapes, dtypes, shardings) of a pool; allocates nothing.

    Args:
      shapes: For each kind of layer, the shape of one token's cached vectors.
      rows: Number of rows of recurrent state.
      pages: Number of pages for a group's reach (None: all tokens), a multiple
        of the number of shards.
      page: Slots per page.
      dtype: Dtype of keys and values.
      kind: Storage format of keys and values, without a policy.
      mesh: Device mesh; None for one device.
      axis: Mesh axis that shards the pages.
      head_axis: Mesh axis that shards the KV heads if it divides them.
      row_tokens: Maximum number of tokens of a row, for compressed keys.

    Raises:
      OptionError: If the kind evicts, uses host memory, or has codecs that
        differ by head; or `row_tokens` is missing.
    """
    kind = kind.resident("a pool of pages")
    if not isinstance(kind.codec, Codec | None):
      raise OptionError(
        "cache kind",
        f"{kind}, for a pool of pages",
        "one codec for all heads",
        "pass a codec such as 'int4'",
      )
    layers = [s for s in shapes if isinstance(s, LayerCacheSpec)]
    reaches = {s.reach if kind.layout.windowed else None for s in layers}
    groups: list[PageGroup] = []
    pages_of_kind: list[Any] = [None] * len(shapes)
    size = 1 if mesh is None or head_axis is None else mesh.shape[head_axis]
    heads = None if any(s.heads % size for s in layers) else head_axis
    room = CacheSpec(
      batch=rows,
      capacity=page,
      dtype=dtype,
      mesh=mesh,
      axes=dict(batch=None, heads=heads, tokens=None),
      codec=kind.codec,
    )
    # The page axis takes the place of a contiguous cache's batch axis.
    axes = dict(batch=axis, heads=heads, tokens=None)
    reach_order = lambda reach: math.inf if reach is None else reach
    for reach in sorted(reaches, key=reach_order, reverse=True):
      num_pages = pages(reach)
      kinds = tuple(
        n
        for n, s in enumerate(shapes)
        if isinstance(s, LayerCacheSpec | SummarySpec)
        and (s.reach if kind.layout.windowed else None) == reach
      )
      total = 0
      for n in kinds:
        page_room = dataclasses.replace(room, batch=num_pages, axes=axes)
        if isinstance(shapes[n], SummarySpec):
          pages_of_kind[n] = shapes[n].page_slots(page_room)
        else:
          pages_of_kind[n] = shapes[n].filled_slots(page_room)
        total += sum(
          math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
          for x in pages_of_kind[n]
        )
      groups.append(
        PageGroup(
          reach=reach,
          kinds=kinds,
          pages=num_pages,
          token_bytes=total // (num_pages * page),
        )
      )
    slots = tuple(
      pages_or_none or row_states(s, room, row_tokens, axis)
      for s, pages_or_none in zip(shapes, pages_of_kind, strict=True)
    )
    return cls(
      slots=slots,
      constants=tuple(constants_spec(s, kind, room) for s in shapes),
      groups=tuple(groups),
      page=page,
      kind=kind,
      shapes=shapes,
      dtype=jnp.dtype(dtype),
      mesh=mesh,
      axis=axis,
      heads=heads,
    )

  @classmethod
  def create(
    cls,
    shapes: tuple[Any, ...],
    *,
    fill: Callable[[Any], Any] = zeros,
    **where: Any,
  ) -> PagePool:
    """Create empty pages; `fill` makes the arrays, other args as `spec`."""
    empty = cls.spec(shapes, **where)
    constants = filled_constants(shapes, empty.kind, empty.constants)
    return dataclasses.replace(
      empty, slots=fill(empty.slots), constants=constants
    )

  @property
  def shards(self) -> int:
    """Number of shards of the pages."""
    if self.axis is None:
      return 1
    assert self.mesh is not None
    return self.mesh.shape[self.axis]

  @property
  def recurrent(self) -> bool:
    """Whether some layers are recurrent."""
    return any(isinstance(x, State) for x in self.slots)

  def nbytes(self) -> int:
    """Total bytes on all devices."""
    return sum(x.nbytes for x in jax.tree.leaves(self.slots))

  def call(
    self,
    tables: tuple[Int[Array, "B R m"], ...],
    ends: Int[Array, " B"],
    rows: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    shared: tuple[SharedTiles, ...] | None = None,
    parents: Int[Array, "B T"] | None = None,
    tiles: tuple[CallTiles, ...] = (),
  ) -> PooledCache:
    """View of the pool for one call of the model.

    Args:
      tables: For each group the pages of the call's rows: page n of a row is
        entry n // R of shard n % R, numbered per shard; -1 marks no page.
      ends: Number of tokens of each row after this call.
      rows: Index of each row's recurrent state; states out of range are not
        written.
      fresh: Whether a row begins, with empty states.
      shared: For each group the tiles that rows share, for calls of a few
        tokens per row.
      parents: Parent of each token if they form trees, see
        `Transformer.__call__`. The tokens then take consecutive slots whatever
        their positions, see `moved`.
      tiles: Tiles of the tokens, which then pass each layer one by one; ():
        all tokens pass together.
    """
    is_state = lambda x: isinstance(x, State)

    def take_states(x: PyTree) -> PyTree:
      states = jnp.take(x, rows, 1, mode="clip")
      new = fresh.reshape(1, -1, *(1,) * (states.ndim - 2))
      return jnp.where(new, jnp.zeros_like(states), states)

    slots = tuple(
      jax.tree.map(take_states, x) if is_state(x) else x for x in self.slots
    )
    return PooledCache(
      pool=self,
      slots=slots,
      tables=tables,
      at=tuple(self._coords(table, ends) for table in tables),
      ends=ends,
      rows=rows,
      new=None,
      shared=shared,
      parents=parents,
      tiles=tiles,
    )

  def rows(
    self,
    tables: tuple[Int[ArrayLeaf, "B R m"], ...],
    ends: Int[ArrayLeaf, " B"],
  ) -> PooledRows:
    """View of some rows, for calls that append nothing.

    Args:
      tables: Page tables, see `call`.
      ends: Number of tokens of each row.
    """
    return PooledRows(pool=self, tables=tables, ends=ends)

  def _group(self, kind: int) -> int:
    """Index of the group of a kind of layer."""
    (group,) = (n for n, g in enumerate(self.groups) if kind in g.kinds)
    return group

  def read_pages(
    self,
    group: int,
    pages: Int[Array, "R k"],
    layers: tuple[int, int] | None = None,
  ) -> tuple[Any, ...]:
    """Read the stored contents of some pages.

    Args:
      group: Index of the group of layers.
      pages: k pages of each shard, numbered per shard.
      layers: First and end layer of the model to read; None for all.

    Returns:
      Pages [L, R k, ...] of each array of the group with any of these layers.
      Kinds of layers that have the same shapes are one array, in the order of
      layers, however the model groups them.
    """
    arrays = self._arrays(group)
    cuts = tuple(layer_range(x.layers, layers) for x in arrays)
    if not any(cuts):
      return ()
    taken = self._each(group, functools.partial(taken_pages, cuts), pages)
    parts = dict(
      zip((n for n, cut in enumerate(cuts) if cut), taken, strict=True)
    )
    joined = []
    for merged in merged_arrays(arrays):
      kept = [n for n in merged if n in parts]
      if not kept:
        continue
      numbers = np.concatenate(
        [np.asarray(arrays[n].layers)[list(cuts[n])] for n in kept]
      )
      order = np.argsort(numbers, kind="stable")
      x = [parts[n] for n in kept]
      x = x[0] if len(x) == 1 else jnp.concatenate(x)
      in_order = np.array_equal(order, np.arange(order.size))
      joined.append(x if in_order else jnp.take(x, order, 0))
    return tuple(joined)

  def page_layers(self, group: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Index in its kind (0: keys) and layers of each array of `read_pages`."""
    arrays = self._arrays(group)
    return tuple(
      (
        arrays[merged[0]].part,
        tuple(sorted(n for part in merged for n in arrays[part].layers)),
      )
      for merged in merged_arrays(arrays)
    )

  def layer_ranges(
    self, group: int, layers: tuple[int, int] | None = None
  ) -> tuple[range, ...]:
    """Range of layers within each array of a group, for layers of the model.

    Args:
      group: Index of the group of layers.
      layers: First and end layer of the model; None for all.

    Returns:
      A range for each array of `read_pages` of all layers.
    """
    return tuple(
      layer_range(numbers, layers) for _, numbers in self.page_layers(group)
    )

  def write_pages(
    self,
    group: int,
    pages: Int[Array, "R k"],
    held: tuple[Any, ...],
  ) -> PagePool:
    """Write back to pages what `read_pages` returned.

    Args:
      group: Index of the group of layers.
      pages: k pages of each shard; those out of range are not written.
      held: Contents of the pages, by `read_pages`.
    """
    arrays = self._arrays(group)
    parts: list[Any] = [None] * len(arrays)
    for merged, x in zip(merged_arrays(arrays), held, strict=True):
      numbers = np.concatenate([arrays[n].layers for n in merged])
      rank, first = np.argsort(np.argsort(numbers, kind="stable")), 0
      for n in merged:
        count = len(arrays[n].layers)
        whole = count == numbers.size
        parts[n] = x if whole else chosen_layers(x, rank[first : first + count])
        first += count
    written = iter(self._each(group, written_pages, pages, tuple(parts)))
    slots = list(self.slots)
    for kind in self.groups[group].kinds:
      arrays = (next(written) if x.size else x for x in slots[kind])
      slots[kind] = type(slots[kind])(*arrays)
    return dataclasses.replace(self, slots=tuple(slots))

  def read_states(self, row: Int[Array, ""]) -> tuple[Any, ...]:
    """Read a row's states of the recurrent layers."""
    take_row = lambda x: x[:, row]
    return tuple(
      jax.tree.map(take_row, x) for x in self.slots if isinstance(x, State)
    )

  def write_states(
    self, row: Int[Array, ""], held: tuple[Any, ...]
  ) -> PagePool:
    """Write back to a row the states that `read_states` returned."""
    new_states = iter(held)
    put = lambda x, new: x.at[:, row].set(new)
    return self._each_state(lambda x: jax.tree.map(put, x, next(new_states)))

  def _each_state(self, f: Callable[[State], State]) -> PagePool:
    slots = (f(x) if isinstance(x, State) else x for x in self.slots)
    return dataclasses.replace(self, slots=tuple(slots))

  def moved(
    self,
    tables: tuple[Int[Array, "B R m"], ...],
    source: Int[Array, "B n"],
    target: Int[Array, "B n"],
  ) -> PagePool:
    """Move tokens of rows to other slots, bit for bit.

    Args:
      tables: Page tables, see `call`; no other row may share the pages.
      source: Slots of the tokens within their rows; those of a row lie within
        n of one another.
      target: New slots, likewise; tokens with negative ones are not moved.
    """
    slots = list(self.slots)
    for n, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
      reads, writes = (
        self.writes(n, table, Coords(x, (x >= 0).astype(jnp.int32)))
        for x in (source, target)
      )

      def move_tokens(
        x: jax.Array, reads: PageWrites = reads, writes: PageWrites = writes
      ) -> jax.Array:
        def layer(at: jax.Array, x: jax.Array) -> jax.Array:
          new = self._tokens(x, at, reads, source)
          return self.written(x, at, new, writes)

        return lax.fori_loop(0, x.shape[0], layer, x) if x.size else x

      for kind in group.kinds:
        # Layers with summaries refuse trees, whose tokens move.
        assert not isinstance(slots[kind], SummarySlots)
        slots[kind] = LayerKV(*map(move_tokens, slots[kind]))
    return dataclasses.replace(self, slots=tuple(slots))

  def _tokens(
    self, x: jax.Array, layer: jax.Array, reads: PageWrites, source: jax.Array
  ) -> jax.Array:
    """Read tokens of one layer, in the layout that `written` takes.

    Args:
      x: Array of pages.
      layer: Index of the layer in the array.
      reads: Pages and slots of the tokens, as `writes` gives them.
      source: Slots of the tokens, [B, n].
    """
    last = token_axis(x) == 4

    def local(x: jax.Array, layer: jax.Array, reads: PageWrites) -> jax.Array:
      vectors = x.at[layer, reads.pages[0]].get(mode="clip")
      # [W P, K, X].
      vectors = jnp.transpose(vectors, (0, 3, 1, 2) if last else (0, 2, 1, 3))
      vectors = vectors.reshape(-1, *vectors.shape[2:])
      token = reads.source[0].reshape(-1)
      token = jnp.where(token < 0, source.size, token)
      place = jnp.full((source.size,), token.size, jnp.int32)
      number = jnp.arange(token.size, dtype=jnp.int32)
      place = place.at[token].set(number, mode="drop")
      vectors = vectors.at[place].get(mode="fill", fill_value=0)
      if self.axis is None:
        return vectors
      # Each token is on one shard, so the sum over its bits is exact.
      bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
      summed_bits = lax.bitcast_convert_type(vectors, bits)
      summed_bits = collectives.total(summed_bits, self.axis)
      return lax.bitcast_convert_type(summed_bits, x.dtype)

    if self.mesh is not None:
      local = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(P(None, self.axis, self.heads), P(), P(self.axis)),
        out_specs=P(None, self.heads),
        check_vma=False,
      )
    vectors = local(x, layer, reads)
    vectors = vectors.reshape(*source.shape, *vectors.shape[1:])
    return jnp.transpose(vectors, (0, 2, 3, 1) if last else (0, 2, 1, 3))

  def writes(
    self, group: int, table: Int[Array, "B R m"], new: Coords
  ) -> PageWrites:
    """Find the pages and slots to which tokens of rows are written.

    Args:
      group: Index of the group of layers.
      table: Page table, see `call`.
      new: Slots [B, T] of tokens, those of a row within T of one another, and
        segments; tokens of segment 0 are not written.
    """
    (batch, tokens), page, shards = new.pos.shape, self.page, self.shards
    local = self.groups[group].pages // shards
    pages_per_row = -(-(tokens - 1) // page) + 1
    real = new.seg > 0
    number = new.pos // page
    first = jnp.min(jnp.where(real, number, _FAR), 1, keepdims=True)
    page_offset = jnp.arange(pages_per_row, dtype=jnp.int32)[None]
    # Pages of each row from the first that it writes, shard by shard.
    touched = first + page_offset
    local_page = jnp.clip(touched // shards, 0, table.shape[2] - 1)
    page_index = jnp.take_along_axis(table, local_page[:, None], 2)
    shard = jnp.arange(shards, dtype=jnp.int32)[None, :, None]
    on_shard = (touched[:, None] % shards == shard) & (page_index >= 0)
    page_index = jnp.where(
      on_shard & (first < _FAR)[:, None], page_index, local
    )
    page_index = jnp.swapaxes(page_index, 0, 1).reshape(shards, -1)
    # One chunk of a row may end in the page in which another begins.
    same_page = page_index[:, :, None] == page_index[:, None, :]
    first_writer = jnp.argmax(same_page, 2).astype(jnp.int32)
    order = jnp.arange(batch * pages_per_row, dtype=jnp.int32)[None]
    is_first = (first_writer == order) & (page_index < local)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    place = jnp.where(
      real, row * pages_per_row + number - first, batch * pages_per_row
    )
    take = lambda x: jnp.take(x, place.reshape(-1), 1, mode="clip")
    is_written = real.reshape(1, -1) & (take(page_index) < local)
    write_index = jnp.where(
      is_written, take(first_writer), batch * pages_per_row
    )
    source = jnp.full((shards, batch * pages_per_row, page), -1, jnp.int32)
    at = jnp.broadcast_to((new.pos % page).reshape(1, -1), write_index.shape)
    shard_index = jnp.arange(shards, dtype=jnp.int32)[:, None]
    token = jnp.arange(batch * tokens, dtype=jnp.int32)[None]
    source = source.at[shard_index, write_index, at].set(token, mode="drop")
    return PageWrites(jnp.where(is_first, page_index, local + order), source)

  def written(
    self,
    old: Shaped[Array, "L N K _ _"],
    layer: Index,
    new: Shaped[Array, "B K _ _"],
    writes: PageWrites,
  ) -> Shaped[Array, "L N K _ _"]:
    """Write tokens of rows to an array of pages.

    Args:
      old: Array of pages.
      layer: Index of the layer in the array, int32 [].
      new: Tokens in the stored format.
      writes: Destination pages and slots.
    """
    last = token_axis(old) == 4
    if not last:
      new = pad_axis(new, 3, old.shape[4])
    flat = jnp.transpose(new, (0, 3, 1, 2) if last else (0, 2, 1, 3))
    # [B T, K, X].
    flat = flat.reshape(-1, *flat.shape[2:])

    def local(
      old: jax.Array, flat: jax.Array, writes: PageWrites, layer: Index
    ) -> jax.Array:
      pages, source = writes.pages[0], writes.source[0]
      new_pages = jnp.take(flat.astype(old.dtype), source, 0, mode="clip")
      # [W, P, K, X].
      new_pages = jnp.transpose(
        new_pages, (0, 2, 3, 1) if last else (0, 2, 1, 3)
      )
      keeps_old = source < 0
      keeps_old = (
        keeps_old[:, None, None] if last else keeps_old[:, None, :, None]
      )

      def put(old: jax.Array, layer: Index) -> jax.Array:
        old_pages = old.at[layer, pages].get(mode="clip")
        target = row_major(old).at[layer, pages]
        merged = jnp.where(keeps_old, old_pages, new_pages)
        return target.set(merged, mode="drop", unique_indices=True)

      return scattered_layer(old, layer, put)

    if self.mesh is None:
      return local(old, flat, writes, layer)
    pages_spec = P(None, self.axis, self.heads)
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(pages_spec, P(None, self.heads), P(self.axis), P()),
      out_specs=pages_spec,
      check_vma=False,
    )(old, flat, writes, layer)

  def copy_states(
    self, source: Int[Array, " n"], target: Int[Array, " n"]
  ) -> PagePool:
    """Copy recurrent states from rows to other rows.

    Args:
      source: Rows to copy from.
      target: Rows to copy to; those out of range are not written.
    """

    def copied(x: jax.Array) -> jax.Array:
      states = jnp.take(x, source, 1, mode="clip")
      return x.at[:, target].set(states, mode="drop")

    return self._each_state(lambda x: jax.tree.map(copied, x))

  def page_shapes(self, group: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Shape [L, ...] of one page and dtype, for each array of `read_pages`."""
    arrays = self._arrays(group)
    return tuple(
      (
        (sum(len(arrays[n].layers) for n in merged), *x.shape[2:]),
        np.dtype(x.dtype),
      )
      for merged in merged_arrays(arrays)
      for x in (arrays[merged[0]].pages,)
    )

  def page_axes(self, group: int) -> tuple[int, ...]:
    """Token axis of one page, for each array of `read_pages`."""
    arrays = self._arrays(group)
    return tuple(
      token_axis(arrays[merged[0]].pages) - 1
      for merged in merged_arrays(arrays)
    )

  def layers(self, group: int) -> tuple[int, ...]:
    """Numbers of a group's layers, in order."""
    kinds = self.groups[group].kinds
    return tuple(sorted(n for kind in kinds for n in self.shapes[kind].which))

  def _arrays(self, group: int) -> tuple[LayerPages, ...]:
    return tuple(
      LayerPages(x, part, tuple(self.shapes[kind].which))
      for kind in self.groups[group].kinds
      for part, x in enumerate(
        self.slots[kind], 2 * isinstance(self.slots[kind], SummarySlots)
      )
      if x.size
    )

  def _each(
    self, group: int, work: Callable[..., Any], pages: jax.Array, *more: Any
  ) -> tuple[Any, ...]:
    """Apply `work` to a group's arrays and pages, shard by shard."""
    arrays = tuple(x.pages for x in self._arrays(group))
    if self.mesh is None:
      return work(arrays, pages, *more)
    pages_spec = P(None, self.axis, self.heads)
    return jax.shard_map(
      work,
      mesh=self.mesh,
      in_specs=(pages_spec, P(self.axis), *(pages_spec for _ in more)),
      out_specs=pages_spec,
      check_vma=False,
    )(arrays, pages, *more)

  def _coords(self, table: jax.Array, ends: jax.Array) -> Coords:
    """Coordinates [B, S] of the slots of a table, shard by shard."""
    b, shards, pages_per_shard = table.shape
    number = jnp.arange(pages_per_shard, dtype=jnp.int32)[None] * shards
    number = number + jnp.arange(shards, dtype=jnp.int32)[:, None]
    inside = jnp.arange(self.page, dtype=jnp.int32)
    pos = number[..., None] * self.page + inside[None, None]
    pos = jnp.broadcast_to(pos[None], (b, *pos.shape))
    real = (pos < ends[:, None, None, None]) & (table >= 0)[..., None]
    flat = lambda x: x.reshape(b, -1)
    return Coords(flat(pos), flat(real).astype(jnp.int32))


tree.register(
  PagePool,
  ("slots", "constants"),
  ("groups", "page", "kind", "shapes", "dtype", "mesh", "axis", "heads"),
)
