"""A pool of pages that the rows of many calls share.

Guarantees: a token is at the slot of its position in the pages of its row's
table, so nothing about tokens is stored beside them; rows may share pages. What
a row reads does not depend on the others, bit for bit.
Cost: an append writes the pages of what is appended, whole: a token alone would
be written fastest with its heads next to one another, and read fastest without,
and a TPU's compiler would copy the pool of all layers in each layer between the
two. The host says where, by tables.
Memory: N pages of P slots for each group of layers, whatever rows there are:
layers that look back equally far are a group, whose pages can be freed once
they are out of sight. Recurrent layers have a state for each row instead.

`PagePool` has the arrays. `PooledCache` is what a call of the model sees of
it: the pool with the tables of the call's rows.
Ref: Kwon et al. 2023, PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
from ringjax.kv.base import KV, CacheSpec, scattered_layer, zeros
from ringjax.kv.cache import (
  LayerCacheSpec,
  LayerKV,
  constants_spec,
  filled_constants,
)
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.codecs import Codec
from ringjax.kv.state import State
from ringjax.ops.ancestors import MOST_DRAFTED, tree_coords
from ringjax.ops.attention.blockwise import pad_axis
from ringjax.ops.attention.code_format import (
  as_stored,
  row_major,
  token_axis,
)
from ringjax.ops.attention.pooled import PooledView, SharedTiles
from ringjax.ops.attention.views import KVView, UnrotatedView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf, Index


class PageWrites(NamedTuple):
  """Where the tokens of a call go, in the pages of a group of layers.

  Fields:
    pages: int32 [R, W], pages of each shard that are written, each once; those
      out of range are not.
    source: int32 [R, W, P], which token of the call each slot gets; -1: it
      stays.
  """

  pages: Int[ArrayLeaf, "R W"]
  source: Int[ArrayLeaf, "R W P"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageGroup:
  """Layers whose tokens are in the same pages.

  Attributes:
    reach: tokens before its own that a query looks back, None for all.
    kinds: which kinds of layers of the model.
    pages: N, over all devices.
    token_bytes: of one token, all layers of the group.
  """

  reach: int | None
  kinds: tuple[int, ...]
  pages: int
  token_bytes: int


# Behind all pages.
_FAR = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagePool:
  """Pages of all layers of a model.

  Attributes:
    slots: for each kind of layer its `LayerKV`, [L, N, K, P, H], or a recurrent
      one's `State` with a row for each that is served.
    constants: for each kind of layer the numbers of its codecs, [L, K, n].
    groups: which layers share tables.
    page: P.
    kind: how keys and values are stored.
    shapes: what each kind of layer keeps of a token.
    dtype: of keys and values, once decoded.
    mesh: whose `axis` shards the pages; None is one device.
    axis: the sequence's axis.
    heads: the axis that shards the KV heads.
  """

  slots: tuple[Any, ...]
  constants: tuple[Any, ...]
  groups: tuple[PageGroup, ...]
  page: int
  kind: CacheKind
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
    kind: CacheKind,
    mesh: Mesh | None = None,
    axis: str | None = None,
    head_axis: str | None = None,
  ) -> PagePool:
    """Shapes, dtypes and shardings; nothing is allocated.

    Args:
      shapes: what each kind of layer keeps.
      rows: states of recurrent layers.
      pages: of a group that looks back so far (None: all), a multiple of the
        shards.
      page: slots of a page.
      dtype: of keys and values.
      kind: how they are stored, without a policy.
      mesh: None for one device.
      axis: the mesh axis that shards the pages.
      head_axis: the mesh axis that shards the KV heads where they divide.

    Raises:
      OptionError: a kind that evicts, has a part in host memory, or codecs
        that differ from head to head.
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
    reaches = {s.reach if kind.windowed else None for s in layers}
    groups: list[PageGroup] = []
    made: list[Any] = [None] * len(shapes)
    heads = head_axis
    if mesh is not None and head_axis is not None:
      size = mesh.shape[head_axis]
      if any(s.heads % size for s in layers):
        heads = None
    room = CacheSpec(
      batch=rows,
      capacity=page,
      dtype=dtype,
      mesh=mesh,
      axes=dict(batch=None, heads=heads, tokens=None),
      codec=kind.codec,
    )
    # A page stands where a row of an ordinary cache would.
    axes = dict(batch=axis, heads=heads, tokens=None)
    far = lambda reach: math.inf if reach is None else reach
    for reach in sorted(reaches, key=far, reverse=True):
      many = pages(reach)
      mine = tuple(
        n
        for n, s in enumerate(shapes)
        if isinstance(s, LayerCacheSpec)
        and (s.reach if kind.windowed else None) == reach
      )
      total = 0
      for n in mine:
        made[n] = shapes[n].filled_slots(
          dataclasses.replace(room, batch=many, axes=axes)
        )
        total += sum(
          math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in made[n]
        )
      groups.append(
        PageGroup(
          reach=reach,
          kinds=mine,
          pages=many,
          token_bytes=total // (many * page),
        )
      )
    slots = tuple(
      s.slots(room) if one is None else one
      for s, one in zip(shapes, made, strict=True)
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
    """Empty pages; `fill` makes the arrays, the rest is as for `spec`."""
    empty = cls.spec(shapes, **where)
    constants = filled_constants(shapes, empty.kind, empty.constants)
    return dataclasses.replace(
      empty, slots=fill(empty.slots), constants=constants
    )

  @property
  def shards(self) -> int:
    """Shards of the pages."""
    if self.axis is None:
      return 1
    assert self.mesh is not None
    return self.mesh.shape[self.axis]

  @property
  def recurrent(self) -> bool:
    """Whether some layers keep a state."""
    return any(isinstance(x, State) for x in self.slots)

  def nbytes(self) -> int:
    """Bytes of all devices together."""
    return sum(x.nbytes for x in jax.tree.leaves(self.slots))

  def call(
    self,
    tables: tuple[Int[Array, "B R m"], ...],
    ends: Int[Array, " B"],
    rows: Int[Array, " B"],
    fresh: Bool[Array, " B"],
    shared: tuple[SharedTiles, ...] | None = None,
    parents: Int[Array, "B T"] | None = None,
  ) -> PooledCache:
    """What a call of the model sees.

    Args:
      tables: for each group the pages of the call's rows: page n of a row is
        number n // R on shard n % R, there counted from 0; -1 is none.
      ends: tokens of each row behind this call.
      rows: which state of recurrent layers each row has; those out of range
        are not written.
      fresh: rows that begin.
      shared: for each group the tiles that rows share, for calls of a few
        tokens a row.
      parents: of a call whose tokens form trees, see `Transformer.__call__`.
        They are then in consecutive slots whatever their positions, see
        `moved`.
    """
    of_state = lambda x: isinstance(x, State)

    def taken(x: PyTree) -> PyTree:
      found = jnp.take(x, rows, 1, mode="clip")
      new = fresh.reshape(1, -1, *(1,) * (found.ndim - 2))
      return jnp.where(new, jnp.zeros_like(found), found)

    slots = tuple(
      jax.tree.map(taken, x) if of_state(x) else x for x in self.slots
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
    )

  def rows(
    self,
    tables: tuple[Int[ArrayLeaf, "B R m"], ...],
    ends: Int[ArrayLeaf, " B"],
  ) -> PooledRows:
    """What some rows hold, for calls that append nothing.

    Args:
      tables: see `call`.
      ends: tokens of each row.
    """
    return PooledRows(pool=self, tables=tables, ends=ends)

  def _group(self, kind: int) -> int:
    """Which group a kind of layer is in."""
    (found,) = (n for n, g in enumerate(self.groups) if kind in g.kinds)
    return found

  def read_pages(
    self,
    group: int,
    pages: Int[Array, "R k"],
    layers: tuple[int, int] | None = None,
  ) -> tuple[Any, ...]:
    """What some pages hold, as it is stored.

    Args:
      group: of layers.
      pages: k pages of each shard, counted there from 0.
      layers: of the model, first and end, that are read; None for all.

    Returns:
      For each array of the group's layers that holds anything of these:
      [L, R k, ...].
    """
    cuts = self.layer_ranges(group, layers)
    if not any(cuts):
      return ()
    return self._each(group, functools.partial(_take_pages, cuts), pages)

  def layer_ranges(
    self, group: int, layers: tuple[int, int] | None = None
  ) -> tuple[range, ...]:
    """Which of its layers each array of a group has, of some of the model.

    Args:
      group: of layers.
      layers: of the model, first and end; None for all.
    """
    found: list[range] = []
    for kind in self.groups[group].kinds:
      for x in self.slots[kind]:
        if not x.size:
          continue
        if layers is None:
          found.append(range(x.shape[0]))
          continue
        which = self.shapes[kind].which
        found.append(range(*(bisect.bisect_left(which, n) for n in layers)))
    return tuple(found)

  def write_pages(
    self,
    group: int,
    pages: Int[Array, "R k"],
    held: tuple[Any, ...],
  ) -> PagePool:
    """The pool whose pages hold what `read_pages` returned.

    Args:
      group: of layers.
      pages: k pages of each shard; those out of range are not written.
      held: see `read_pages`.
    """
    written = iter(self._each(group, _put_pages, pages, held))
    slots = list(self.slots)
    for kind in self.groups[group].kinds:
      arrays = (next(written) if x.size else x for x in slots[kind])
      slots[kind] = LayerKV(*arrays)
    return dataclasses.replace(self, slots=tuple(slots))

  def read_states(self, row: Int[Array, ""]) -> tuple[Any, ...]:
    """The states that a row has of recurrent layers."""
    one = lambda x: x[:, row]
    return tuple(
      jax.tree.map(one, x) for x in self.slots if isinstance(x, State)
    )

  def write_states(
    self, row: Int[Array, ""], held: tuple[Any, ...]
  ) -> PagePool:
    """The pool whose row has the states that `read_states` returned."""
    rest = iter(held)
    put = lambda x, new: x.at[:, row].set(new)
    slots = tuple(
      jax.tree.map(put, x, next(rest)) if isinstance(x, State) else x
      for x in self.slots
    )
    return dataclasses.replace(self, slots=slots)

  def moved(
    self,
    tables: tuple[Int[Array, "B R m"], ...],
    source: Int[Array, "B n"],
    target: Int[Array, "B n"],
  ) -> PagePool:
    """The pool where tokens of rows are in other slots, bit for bit.

    Args:
      tables: see `call`; of pages that are a row's own.
      source: slots of the tokens, counted in their rows, those of a row within
        n of one another.
      target: where they go, likewise; below 0 they stay.
    """
    slots = list(self.slots)
    for n, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
      reads, writes = (
        self.writes(n, table, Coords(x, (x >= 0).astype(jnp.int32)))
        for x in (source, target)
      )

      def one(
        x: jax.Array, reads: PageWrites = reads, writes: PageWrites = writes
      ) -> jax.Array:
        def layer(at: jax.Array, x: jax.Array) -> jax.Array:
          new = self._tokens(x, at, reads, source)
          return self.written(x, at, new, writes)

        return lax.fori_loop(0, x.shape[0], layer, x) if x.size else x

      for kind in group.kinds:
        slots[kind] = LayerKV(*map(one, slots[kind]))
    return dataclasses.replace(self, slots=tuple(slots))

  def _tokens(
    self, x: jax.Array, layer: jax.Array, reads: PageWrites, source: jax.Array
  ) -> jax.Array:
    """What one layer has of tokens, as `written` takes it.

    Args:
      x: an array of pages.
      layer: which of them.
      reads: as if they were written there.
      source: slots of the tokens, [B, n].
    """
    last = token_axis(x) == 4

    def local(x: jax.Array, layer: jax.Array, reads: PageWrites) -> jax.Array:
      held = x.at[layer, reads.pages[0]].get(mode="clip")
      # [W P, K, X].
      held = jnp.transpose(held, (0, 3, 1, 2) if last else (0, 2, 1, 3))
      held = held.reshape(-1, *held.shape[2:])
      token = reads.source[0].reshape(-1)
      token = jnp.where(token < 0, source.size, token)
      place = jnp.full((source.size,), token.size, jnp.int32)
      number = jnp.arange(token.size, dtype=jnp.int32)
      place = place.at[token].set(number, mode="drop")
      held = held.at[place].get(mode="fill", fill_value=0)
      if self.axis is None:
        return held
      # Each token is on one shard; of its bits the sum is exact.
      bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
      whole = lax.bitcast_convert_type(held, bits)
      whole = collectives.total(whole, self.axis)
      return lax.bitcast_convert_type(whole, x.dtype)

    if self.mesh is not None:
      local = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(P(None, self.axis, self.heads), P(), P(self.axis)),
        out_specs=P(None, self.heads),
        check_vma=False,
      )
    held = local(x, layer, reads)
    held = held.reshape(*source.shape, *held.shape[1:])
    return jnp.transpose(held, (0, 2, 3, 1) if last else (0, 2, 1, 3))

  def writes(
    self, group: int, table: Int[Array, "B R m"], new: Coords
  ) -> PageWrites:
    """Where tokens of rows go.

    Args:
      group: of layers.
      table: see `call`.
      new: slots [B, T] of tokens, those of a row within T of one another, and
        segments; of segment 0 they go nowhere.
    """
    (batch, tokens), page, shards = new.pos.shape, self.page, self.shards
    local = self.groups[group].pages // shards
    many = -(-(tokens - 1) // page) + 1
    real = new.seg > 0
    number = new.pos // page
    first = jnp.min(jnp.where(real, number, _FAR), 1, keepdims=True)
    which = jnp.arange(many, dtype=jnp.int32)[None]
    # Of each row the pages from its first one on, shard by shard.
    touched = first + which
    own = jnp.clip(touched // shards, 0, table.shape[2] - 1)
    found = jnp.take_along_axis(table, own[:, None], 2)
    shard = jnp.arange(shards, dtype=jnp.int32)[None, :, None]
    here = (touched[:, None] % shards == shard) & (found >= 0)
    found = jnp.where(here & (first < _FAR)[:, None], found, local)
    found = jnp.swapaxes(found, 0, 1).reshape(shards, -1)
    # Two pieces of a row may end and begin in one page.
    same = found[:, :, None] == found[:, None, :]
    whose = jnp.argmax(same, 2).astype(jnp.int32)
    order = jnp.arange(batch * many, dtype=jnp.int32)[None]
    alone = (whose == order) & (found < local)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    place = jnp.where(real, row * many + number - first, batch * many)
    take = lambda x: jnp.take(x, place.reshape(-1), 1, mode="clip")
    goes = real.reshape(1, -1) & (take(found) < local)
    into = jnp.where(goes, take(whose), batch * many)
    source = jnp.full((shards, batch * many, page), -1, jnp.int32)
    at = jnp.broadcast_to((new.pos % page).reshape(1, -1), into.shape)
    each = jnp.arange(shards, dtype=jnp.int32)[:, None]
    token = jnp.arange(batch * tokens, dtype=jnp.int32)[None]
    source = source.at[each, into, at].set(token, mode="drop")
    return PageWrites(jnp.where(alone, found, local + order), source)

  def written(
    self,
    old: Shaped[Array, "L N K _ _"],
    layer: Index,
    new: Shaped[Array, "B K _ _"],
    writes: PageWrites,
  ) -> jax.Array:
    """An array of pages with tokens of rows.

    Args:
      old: the array.
      layer: int32 [], which of the L.
      new: the tokens, as they are stored.
      writes: where they go.
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
      made = jnp.take(flat.astype(old.dtype), source, 0, mode="clip")
      # [W, P, K, X].
      made = jnp.transpose(made, (0, 2, 3, 1) if last else (0, 2, 1, 3))
      keeps = source < 0
      keeps = keeps[:, None, None] if last else keeps[:, None, :, None]

      def put(old: jax.Array, layer: Index) -> jax.Array:
        there = old.at[layer, pages].get(mode="clip")
        spot = row_major(old).at[layer, pages]
        whole = jnp.where(keeps, there, made)
        return spot.set(whole, mode="drop", unique_indices=True)

      return scattered_layer(old, layer, put)

    if self.mesh is None:
      return local(old, flat, writes, layer)
    held = P(None, self.axis, self.heads)
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(held, P(None, self.heads), P(self.axis), P()),
      out_specs=held,
      check_vma=False,
    )(old, flat, writes, layer)

  def copy_states(
    self, source: Int[Array, " n"], target: Int[Array, " n"]
  ) -> PagePool:
    """The pool where rows have the states of others.

    Args:
      source: rows.
      target: which get theirs; those out of range are not written.
    """

    def copied(x: jax.Array) -> jax.Array:
      held = jnp.take(x, source, 1, mode="clip")
      return x.at[:, target].set(held, mode="drop")

    slots = tuple(
      jax.tree.map(copied, x) if isinstance(x, State) else x for x in self.slots
    )
    return dataclasses.replace(self, slots=slots)

  def page_shapes(self, group: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Of each array of `read_pages` the shape of one page [L, ...] and its
    dtype."""
    return tuple(
      ((x.shape[0], *x.shape[2:]), np.dtype(x.dtype))
      for x in self._arrays(group)
    )

  def page_axes(self, group: int) -> tuple[int, ...]:
    """Of each array of `read_pages` the axis of tokens in one page."""
    return tuple(token_axis(x) - 1 for x in self._arrays(group))

  def _arrays(self, group: int) -> tuple[Any, ...]:
    kinds = self.groups[group].kinds
    return tuple(x for kind in kinds for x in self.slots[kind] if x.size)

  def _each(
    self, group: int, work: Callable[..., Any], pages: jax.Array, *more: Any
  ) -> tuple[Any, ...]:
    """A function of a group's arrays and of pages, shard by shard."""
    arrays = self._arrays(group)
    if self.mesh is None:
      return work(arrays, pages, *more)
    held = P(None, self.axis, self.heads)
    return jax.shard_map(
      work,
      mesh=self.mesh,
      in_specs=(held, P(self.axis), *(held for _ in more)),
      out_specs=held,
      check_vma=False,
    )(arrays, pages, *more)

  def _coords(self, table: jax.Array, ends: jax.Array) -> Coords:
    """Coordinates [B, S] of the slots that a table names, shard by shard."""
    b, shards, many = table.shape
    number = jnp.arange(many, dtype=jnp.int32)[None] * shards
    number = number + jnp.arange(shards, dtype=jnp.int32)[:, None]
    inside = jnp.arange(self.page, dtype=jnp.int32)
    pos = number[..., None] * self.page + inside[None, None]
    pos = jnp.broadcast_to(pos[None], (b, *pos.shape))
    real = (pos < ends[:, None, None, None]) & (table >= 0)[..., None]
    flat = lambda x: x.reshape(b, -1)
    return Coords(flat(pos), flat(real).astype(jnp.int32))


def _take_pages(
  cuts: tuple[range, ...], arrays: tuple[Any, ...], pages: jax.Array
) -> tuple[Any, ...]:
  def one(x: jax.Array, cut: range) -> jax.Array:
    if len(cut) == x.shape[0]:
      return jnp.take(x, pages[0], 1, mode="clip")
    # One gather: a part of the pool would be a copy.
    layer = np.arange(cut.start, cut.stop, dtype=np.int32)[:, None]
    return x.at[layer, pages[0][None]].get(mode="clip")

  return tuple(one(x, cut) for x, cut in zip(arrays, cuts, strict=True) if cut)


def _put_pages(
  arrays: tuple[Any, ...], pages: jax.Array, held: tuple[Any, ...]
) -> tuple[Any, ...]:
  return tuple(
    x.at[:, pages[0]].set(new, mode="drop")
    for x, new in zip(arrays, held, strict=True)
  )


tree.register(
  PagePool,
  ("slots", "constants"),
  ("groups", "page", "kind", "shapes", "dtype", "mesh", "axis", "heads"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledRows:
  """Rows of a pool, which a call reads; an argument of jit.

  Attributes:
    pool: the pool.
    tables: see `PagePool.call`.
    ends: int32 [B], tokens of each row.
  """

  pool: PagePool
  tables: tuple[Int[ArrayLeaf, "B R m"], ...]
  ends: Int[ArrayLeaf, " B"]

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.pool.slots

  @property
  def mesh(self) -> Mesh | None:
    return self.pool.mesh

  @property
  def axis(self) -> str | None:
    return self.pool.axis

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    ends = jnp.asarray(self.ends)
    rows = jnp.arange(ends.shape[0], dtype=jnp.int32)
    tables = tuple(map(jnp.asarray, self.tables))
    held = self.pool.call(tables, ends, rows, rows < 0)
    return held.layer(kind, slots, index)


tree.register(PooledRows, ("pool", "tables", "ends"), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledCache:
  """A pool with the tables of some rows, for one call of a model.

  Attributes:
    pool: the pool; its arrays may be those before the call.
    slots: the arrays, and the states of the call's rows.
    tables: see `PagePool.call`.
    at: coordinates of the slots of each group, [B, S]; of a tree and the text
      before it those of `ops.ancestors`.
    ends: int32 [B].
    rows: int32 [B].
    new: slots and segments of the call's tokens, [B, T].
    shared: see `PagePool.call`.
    parents: see `PagePool.call`.
    writes: for each group where the call's tokens go.
  """

  pool: PagePool
  slots: tuple[Any, ...]
  tables: tuple[Any, ...]
  at: tuple[Coords, ...]
  ends: Int[Array, " B"]
  rows: Int[Array, " B"]
  new: Coords | None
  shared: tuple[SharedTiles, ...] | None = None
  parents: Int[Array, "B T"] | None = None
  writes: tuple[PageWrites, ...] = ()
  # Rows of a pool have no contexts of cross-attention.
  states = None

  @property
  def mesh(self) -> Mesh | None:
    return self.pool.mesh

  @property
  def axis(self) -> str | None:
    return self.pool.axis

  @property
  def shards(self) -> int:
    return self.pool.shards

  @property
  def length(self) -> jax.Array:
    """int32 [B], tokens of each row."""
    return self.ends

  def allocate(
    self, at: Coords, *, replicated: bool, sees: bool
  ) -> PooledCache:
    """With the coordinates [B, T] of the call's tokens.

    Raises:
      OptionError: tokens that are sharded: all devices need them.
    """
    if not replicated or not sees:
      raise OptionError(
        "attend",
        "a call whose tokens are sharded, over a pool of pages",
        "CachedAttention() of replicated tokens",
        "leave attend out",
      )
    if self.parents is None:
      return self._with_new(at)
    # The text before the tree is of the ancestors of all of its tokens.
    drafted = tree_coords(self.parents, at)
    start = self.ends - jnp.sum(at.seg > 0, 1, dtype=jnp.int32)

    def with_tree(held: Coords) -> Coords:
      number = held.pos - start[:, None]
      inside = (number >= 0) & (held.seg > 0)
      number = jnp.clip(number, 0, at.pos.shape[1] - 1)
      own = [jnp.take_along_axis(x, number, 1) for x in drafted]
      seg = jnp.where(held.seg > 0, MOST_DRAFTED, 0)
      return Coords(
        jnp.where(inside, own[0], held.pos), jnp.where(inside, own[1], seg)
      )

    slots = start[:, None] + jnp.arange(at.pos.shape[1], dtype=jnp.int32)[None]
    made = self._with_new(Coords(slots, at.seg))
    return dataclasses.replace(made, at=tuple(map(with_tree, self.at)))

  def _with_new(self, new: Coords) -> PooledCache:
    """With what a call appends: slots and segments."""
    shape = (self.ends.shape[0], new.pos.shape[1])
    new = Coords(*(jnp.broadcast_to(x, shape) for x in new))
    writes = tuple(
      self.pool.writes(group, table, new)
      for group, table in enumerate(self.tables)
    )
    return dataclasses.replace(self, new=new, writes=writes)

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> PooledCache:
    """Itself: it keeps all tokens, whatever their ids are."""
    del tokens, at
    return self

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    if isinstance(slots, State):
      return slots.layer(self, index)
    return PooledLayer(self, slots, index, kind, self.pool._group(kind))

  def updated(self, slots: tuple[Any, ...]) -> PagePool:
    """The pool after the layers."""

    def put(old: PyTree, new: PyTree) -> PyTree:
      return old.at[:, self.rows].set(new.astype(old.dtype), mode="drop")

    made = tuple(
      jax.tree.map(put, old, new) if isinstance(new, State) else new
      for old, new in zip(self.pool.slots, slots, strict=True)
    )
    return dataclasses.replace(self.pool, slots=made)


@dataclasses.dataclass(frozen=True)
class PooledLayer:
  """One layer's part of a `PooledCache` during one call."""

  cache: PooledCache
  slots: LayerKV
  index: Index
  kind: int
  group: int
  fresh: KV | Coords | None = None
  rotation: Rotation = Rotation()

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> PooledLayer:
    pool = self.cache.pool
    stored = LayerKV(k if pool.kind.unrotated else rotation.own(k), v)
    codec = pool.kind.codec
    if isinstance(codec, Codec):
      of_k, of_v = self._constants()
      k_codes = codec.keys.encode(stored.k.astype(pool.dtype), of_k)
      stored = LayerKV(as_stored(k_codes, self.slots.k), v)
      if v.shape[-1]:
        v_codes = codec.values.encode(v.astype(pool.dtype), of_v)
        stored = stored._replace(v=as_stored(v_codes, self.slots.v))
    assert self.cache.new is not None
    slots = LayerKV(*map(self._written, self.slots, stored))
    return dataclasses.replace(
      self, slots=slots, rotation=rotation.general(), fresh=at
    )

  def for_reading(self, rotation: Rotation) -> PooledLayer:
    """For a call that appends nothing; see `KVLayer.for_reading`."""
    return dataclasses.replace(self, rotation=rotation.general())

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> PooledLayer:
    del rotated, plain
    return self

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    if apart and self.cache.parents is None:
      raise OptionError(
        "parents",
        "a tree of drafted tokens, over a pool of pages",
        "a call of the pool that knows it",
        "pass parents= to PagePool.call too",
      )
    pool, codec = self.cache.pool, self.cache.pool.kind.codec
    shape, decoders, widths = pool.shapes[self.kind], None, None
    if codec is None:
      widths = shape.widths(self.slots)
    else:
      decoders = shape.decoders(codec, pool.dtype)
    table, shared = self.cache.tables[self.group], self.cache.shared
    view: Any = PooledView(
      *self.slots,
      self.cache.at[self.group],
      table.reshape(table.shape[0], -1),
      self.index,
      self._constants(),
      decoders,
      shared[self.group] if shared else None,
      widths=widths,
    )
    if pool.kind.unrotated and not self.rotation.trivial:
      view = UnrotatedView(view, self.rotation)
    return (view,)

  def _constants(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Those of this layer: [K, n] each."""
    one = lambda x: lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False)
    return jax.tree.map(one, self.cache.pool.constants[self.kind])

  def _written(self, old: jax.Array, new: jax.Array) -> jax.Array:
    """An array of pages with the call's tokens, [B, K, T, X] or as stored."""
    if not old.size:
      return old
    writes = self.cache.writes[self.group]
    return self.cache.pool.written(old, self.index, new, writes)
