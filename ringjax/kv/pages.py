"""Pages: keys and values of those tokens that each KV head keeps.

Guarantees: what is stored goes into pages bit for bit, and from old pages into
new ones. On a mesh each device keeps tokens that it had.
Memory: pages of P slots, as many as the heads of all layers of a kind need
together; a head's last page is filled in part. A slot's coordinates are two
int32. Nothing is written to pages: they are made anew by `packed`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec, zeros
from ringjax.ops.attention.code_format import token_axis
from ringjax.ops.attention.paged import PagedView
from ringjax.ops.attention.views import Decoder, KVView
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.parallel.local import move
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.kv.cache import LayerCacheSpec


class Stored(NamedTuple):
  """Tokens of a kind of layers, as they are stored.

  Fields:
    k: [L, B, K, S, ...].
    v: [L, B, K, S, ...].
    at: coordinates [L, B, K, S]; segment 0 is an empty slot.
    score: float32 [L, B, K, S], what a policy has summed up so far.
  """

  k: Shaped[Array, "L B K S ..."]
  v: Shaped[Array, "L B K S ..."]
  at: Coords
  score: Float[Array, "L B K S"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
  """Over which mesh axes the dimensions of a cache are sharded.

  Attributes:
    mesh: None for one device.
    batch: axes of the batch.
    heads: axes of the KV heads.
    tokens: axes of the sequence.
  """

  mesh: Mesh | None = None
  batch: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  tokens: tuple[str, ...] = ()

  @classmethod
  def of(cls, room: CacheSpec, heads: int) -> Places:
    """Those of arrays that `room.like` makes, with so many KV heads."""

    def named(name: str) -> tuple[str, ...]:
      found = room.axes.get(name)
      return (found,) if isinstance(found, str) else tuple(found or ())

    over = named("heads")
    mesh = room.mesh
    if mesh is not None and heads % math.prod(mesh.shape[a] for a in over):
      over = ()
    return cls(
      mesh=room.mesh, batch=named("batch"), heads=over, tokens=named("tokens")
    )

  @property
  def axes(self) -> tuple[str, ...]:
    """All of them, of the largest step first."""
    return (*self.batch, *self.heads, *self.tokens)

  @property
  def shards(self) -> int:
    """Of the sequence."""
    return self.size(self.tokens) if self.tokens else 1

  @property
  def axis(self) -> str | None:
    """The one of the sequence."""
    return self.tokens[0] if self.tokens else None

  def first_head(self, heads: int) -> jax.Array:
    """The number of the first of a device's `heads`; inside of `local`."""
    if not self.heads:
      return jnp.int32(0)
    return collectives.axis_index(self.heads[0]) * heads

  def all_heads(self, x: Shaped[Array, "B K S"]) -> jax.Array:
    """Of all devices; inside of `local`."""
    return collectives.gather(x, self.heads[0], 1) if self.heads else x

  @property
  def by_head(self) -> P:
    """Of arrays [L, B, K, S, ...]."""
    return P(None, self.batch or None, self.heads or None, self.tokens or None)

  def of_slots(self, x: Shaped[ArrayLeaf, " ..."]) -> P:
    """Of keys or values of slots, [L, B, K, S, H] or codes [L, B, K, X, S]."""
    lead = (None, self.batch or None, self.heads or None)
    none = (None,) * (token_axis(x) - 3)
    return P(*lead, *none, self.tokens or None)

  @property
  def by_example(self) -> P:
    """Of arrays [B, S]."""
    return P(self.batch or None, self.tokens or None)

  @property
  def pool(self) -> P:
    """Of arrays whose first dimension is that of the pages."""
    return P(self.axes or None)

  def size(self, names: tuple[str, ...]) -> int:
    """Devices along these axes."""
    if not names:
      return 1
    assert self.mesh is not None
    return math.prod(self.mesh.shape[name] for name in names)

  def local(
    self, f: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
  ) -> Callable[..., Any]:
    """f on each device's part."""
    if self.mesh is None:
      return f
    return jax.shard_map(
      f,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
  """Pages of the layers of one kind.

  Attributes:
    k: keys [N, P, H], or their bytes uint8 [N, P, X]; N pages in all.
    v: values, the same.
    at: coordinates [N, P]; segment 0 is an empty slot.
    score: float32 [N, P], what a policy has summed up, or [N, 0].
    table: int32 [L, B, K, M], the pages of a head, -1 behind the last: numbers
      from 0 among those of the device.
    bounds: [N, 2, H], see `PagedView`, or None.
    places: where it is on a mesh.
  """

  k: Shaped[ArrayLeaf, "N P _"]
  v: Shaped[ArrayLeaf, "N P _"]
  at: Coords
  score: Float[ArrayLeaf, "N _"] | None
  table: Int[ArrayLeaf, "L B K M"]
  bounds: Float[ArrayLeaf, "N 2 H"] | None = None
  places: Places = Places()

  @classmethod
  def spec(
    cls,
    shape: LayerCacheSpec,
    room: CacheSpec,
    slots: int,
    places: Places,
  ) -> Pages:
    """A page for each device, of which none is in use: shapes and dtypes.

    Args:
      shape: a `LayerCacheSpec`.
      room: the dtype, the codec and the mesh.
      slots: of a page, P.
      places: over which axes they are sharded.
    """
    stored: Any = shape.slots(room)
    many = 1 if places.mesh is None else places.size(places.axes)

    def like(shape: tuple[int, ...], dtype: DTypeLike, spec: P) -> Any:
      if places.mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype)
      sharding = NamedSharding(places.mesh, spec)
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def pool(x: Any) -> Any:
      width = x.shape[7 - token_axis(x)]
      dtype = jnp.uint8 if x.dtype == jnp.int8 else x.dtype
      return like((many, slots, width), dtype, places.pool)

    each = like((many, slots), jnp.int32, places.pool)
    lead = (shape.layers, room.batch, shape.heads, room.shards)
    return cls(
      k=pool(stored.k),
      v=pool(stored.v),
      at=Coords(each, each),
      score=like((many, 0), jnp.float32, places.pool),
      table=like(lead, jnp.int32, places.by_head),
      places=places,
    )

  def emptied(self) -> Pages:
    """Arrays of these shapes, with no page in use."""
    made = zeros(self)
    return dataclasses.replace(made, table=made.table - 1)

  def with_table(self, table: Int[Array | np.ndarray, "L B K M"]) -> Pages:
    """With other pages for the heads."""
    return dataclasses.replace(self, table=table)

  def counts(self) -> jax.Array:
    """Tokens of each page in the table, int32 [L, B, K, M]."""

    def local(pages: Pages) -> jax.Array:
      count = jnp.sum(pages.at.seg > 0, 1, dtype=jnp.int32)
      page = jnp.maximum(pages.table, 0)
      return jnp.where(pages.table >= 0, count[page], 0)

    places = self.places
    return places.local(local, (self.specs(),), places.by_head)(self)

  def read_score(self, layer: Index) -> jax.Array:
    """Sums [B, K, s] of one layer on this device."""
    table = lax.dynamic_index_in_dim(self.table, layer, 0, keepdims=False)
    lead, page = table.shape[:2], jnp.maximum(table, 0)
    assert self.score is not None
    if not self.score.shape[1]:
      slots = table.shape[2] * self.slots
      return jnp.zeros((*lead, slots), jnp.float32)
    score = jnp.where(table[..., None] >= 0, self.score[page], 0)
    return score.reshape(*lead, -1)

  def gathered(self, device: jax.Device) -> Pages:
    """The same on one device."""
    places, table = self.places, move(self.table, device)
    if places.axes:
      each = self.k.shape[0] // places.size(places.axes)
      lead = [np.arange(1)] * 4
      sizes = (places.batch, places.heads, places.tokens)
      parts = [places.size(names) if names else 1 for names in sizes]
      for n, (count, size) in enumerate(
        zip(parts, table.shape[1:], strict=True)
      ):
        lead[n + 1] = np.arange(size) // (size // count)
      _, b, k, m = np.ix_(*lead)
      device_number = (b * parts[1] + k) * parts[2] + m
      table = jnp.where(
        table >= 0, table + jnp.asarray(device_number * each, jnp.int32), -1
      )
    along = lambda x: move(x, device)
    return Pages(
      k=along(self.k),
      v=along(self.v),
      at=Coords(*map(along, self.at)),
      score=along(self.score),
      table=table,
      bounds=None if self.bounds is None else along(self.bounds),
    )

  @property
  def slots(self) -> int:
    """Slots of a page, P."""
    return self.at.pos.shape[1]

  def view(
    self,
    layer: Index,
    constants: PyTree,
    decoders: tuple[Decoder, Decoder] | None,
    most: tuple[int, ...] = (),
  ) -> PagedView:
    """What one layer reads; `most`: of how many pages, see `PagedView`."""
    table = lax.dynamic_index_in_dim(self.table, layer, 0, keepdims=False)
    return PagedView(
      self.k,
      self.v,
      self.at,
      table,
      constants,
      decoders,
      self.places.axes,
      self.bounds if most else None,
      most,
    )

  def specs(self) -> Pages:
    """PartitionSpecs, the same tree."""
    pool: Any = self.places.pool
    return tree.with_leaves(
      self,
      k=pool,
      v=pool,
      at=Coords(pool, pool),
      score=pool,
      table=self.places.by_head,
      bounds=None if self.bounds is None else pool,
    )

  def read(self) -> Stored:
    """All tokens on this device, head by head; inside of `Places.local`."""
    page = jnp.maximum(self.table, 0)
    lead = self.table.shape[:3]
    size = self.table.shape[3] * self.slots
    one = lambda x: x[page].reshape(*lead, size, *x.shape[2:])
    seg = jnp.where(self.table[..., None] >= 0, self.at.seg[page], 0)
    return Stored(
      one(self.k),
      one(self.v),
      Coords(one(self.at.pos), seg.reshape(*lead, size)),
      None,
    )

  def read_coords(self) -> Coords:
    """Coordinates [L, B, K, S] of all tokens, head by head."""
    local = lambda pages: pages.read().at
    by_head: Any = self.places.by_head
    specs = (self.specs(),)
    return self.places.local(local, specs, Coords(by_head, by_head))(self)

  def without(self, gone: Callable[[Array], Array]) -> Pages:
    """Without tokens: `gone` says which, of positions [L, B, K, M, P]."""

    def local(pages: Pages) -> jax.Array:
      page = jnp.maximum(pages.table, 0)
      drop = gone(pages.at.pos[page]) & (pages.table >= 0)[..., None]
      count = pages.at.seg.shape[0]
      page = jnp.where(pages.table >= 0, page, count)
      # Rows may share a page: a slot is empty if it is for one of them.
      flags = jnp.zeros(pages.at.seg.shape, bool)
      flags = flags.at[page].max(drop, mode="drop")
      return jnp.where(flags, 0, pages.at.seg)

    seg = self.places.local(local, (self.specs(),), self.places.pool)(self)
    return dataclasses.replace(self, at=Coords(self.at.pos, seg))


tree.register(Pages, ("k", "v", "at", "score", "table", "bounds"), ("places",))


def page_bounds(
  view: KVView, pages: Pages, layer: Index, bounds: Float[Array, "N 2 H"]
) -> jax.Array:
  """With the bounds of the pages of a layer; inside of `Places.local`."""
  table = lax.dynamic_index_in_dim(pages.table, layer, 0, keepdims=False)
  real = (view.at.seg > 0).reshape(*table.shape, pages.slots)[..., None]
  k, _ = view.tile(jnp.int32(0), view.shape[2])
  k = k.reshape(*table.shape, pages.slots, k.shape[-1]).astype(bounds.dtype)
  low = jnp.min(jnp.where(real, k, jnp.inf), 3)
  high = jnp.max(jnp.where(real, k, -jnp.inf), 3)
  page = jnp.where(table >= 0, table, bounds.shape[0])
  return bounds.at[page].set(jnp.stack([low, high], 3), mode="drop")


def page_counts(keep: Bool[Array, "L B K S"], slots: int) -> jax.Array:
  """Pages of all heads together and of the largest: int32 [1, 2]."""
  each = -(-jnp.sum(keep, -1, dtype=jnp.int32) // slots)
  return jnp.stack([jnp.sum(each), jnp.max(each)])[None]


def few_sizes(count: int, octave: int = 16) -> int:
  """At least `count`, of `octave` sizes an octave, so that few are compiled."""
  step = 1 << max(0, count.bit_length() - octave.bit_length())
  return max(1, -(-int(count) // step) * step)


def packed(
  found: Stored, keep: Bool[Array, "L B K S"], slots: int, pages: int, most: int
) -> tuple[Any, ...]:
  """The kept tokens in pages; inside of `Places.local`.

  Args:
    found: of this device.
    keep: which stay.
    slots: of a page.
    pages: N, at least as many as are needed.
    most: M, at least as many as a head needs.

  Returns:
    (k, v, at, score, table) of `Pages`.
  """
  lead, size = keep.shape[:3], keep.shape[3]
  rows = math.prod(lead)
  keep = keep.reshape(rows, size)
  order = jnp.argsort(1 - keep.astype(jnp.int32), axis=1, stable=True)
  count = jnp.sum(keep, 1, dtype=jnp.int32)
  each = -(-count // slots)
  ends = jnp.cumsum(each, dtype=jnp.int32)
  first = ends - each
  page = jnp.arange(pages, dtype=jnp.int32)
  row = jnp.searchsorted(ends, page, side="right").astype(jnp.int32)
  row = jnp.minimum(row, rows - 1)
  nth = (page - first[row])[:, None] * slots
  nth = nth + jnp.arange(slots, dtype=jnp.int32)[None]
  real = (nth < count[row][:, None]) & (page < ends[-1])[:, None]
  slot = order[row[:, None], jnp.clip(nth, 0, size - 1)]

  def one(x: jax.Array) -> jax.Array:
    return x.reshape(rows, *x.shape[3:])[row[:, None], slot]

  number = jnp.arange(most, dtype=jnp.int32)[None]
  table = jnp.where(
    number < each[:, None], first[:, None] + number, jnp.int32(-1)
  )
  score = None if found.score is None else jnp.where(real, one(found.score), 0)
  if score is None:
    score = jnp.zeros((pages, 0), jnp.float32)
  return (
    one(found.k),
    one(found.v),
    Coords(one(found.at.pos), jnp.where(real, one(found.at.seg), 0)),
    score,
    table.reshape(*lead, most),
  )


def host(x: Shaped[Array, " ..."]) -> np.ndarray:
  """A small array on the host."""
  return np.asarray(jax.device_get(x))


def joined(old: Pages, new: Pages, rows: np.ndarray) -> Pages:
  """With the rows of `new` in place of `rows` of `old`, int [n]."""
  places = old.places
  if places.batch:
    raise OptionError(
      "cache",
      "insert of rows that are sharded over the mesh",
      "a mesh that shards the sequence alone",
      "make both caches with a batch that does not divide over the data axis",
    )

  def local(old: Pages, new: Pages) -> Pages:
    both = lambda x, y: jnp.concatenate([x, y], 0)
    most = max(old.table.shape[3], new.table.shape[3])
    wide = lambda x: jnp.pad(
      x,
      ((0, 0),) * 3 + ((0, most - x.shape[3]),),
      constant_values=-1,
    )
    more = wide(new.table)
    more = jnp.where(more >= 0, more + old.k.shape[0], -1)
    return Pages(
      k=both(old.k, new.k),
      v=both(old.v, new.v),
      at=Coords(both(old.at.pos, new.at.pos), both(old.at.seg, new.at.seg)),
      score=both(old.score, new.score),
      table=wide(old.table).at[:, jnp.asarray(rows)].set(more),
      bounds=None if old.bounds is None else both(old.bounds, new.bounds),
      places=places,
    )

  specs = (old.specs(), new.specs())
  return places.local(local, specs, old.specs())(old, new)
