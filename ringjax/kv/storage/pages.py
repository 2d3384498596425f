"""Pages: keys and values of the tokens that each KV head keeps.

Guarantees: tokens are copied into pages, and from old pages to new ones, bit
for bit. On a mesh no token moves to another device.
Memory: pages of P slots, as many as the heads of all layers of a kind need
together; a head's last page may be partly empty. A slot's position is an int32,
stored per head if heads keep different tokens, else once for all heads of a
layer or of all layers; likewise its segment if rows have several documents.
Pages are never written in place: `packed` makes new ones.
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
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.paged import PagedView
from ringjax.ops.attention.cached.views import Decoder, KVView
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.parallel.local_arrays import move
from ringjax.typing import ArrayLeaf, Index, leaf

if TYPE_CHECKING:
  from ringjax.kv.layer_spec import LayerCacheSpec


class Stored(NamedTuple):
  """Stored tokens of a kind of layers.

  Fields:
    k: Keys or their codes, [L, B, K, S, ...].
    v: Values or their codes, [L, B, K, S, ...].
    at: Coordinates [L, B, K, S]; segment 0 is an empty slot.
    score: Scores that a policy has summed up so far, float32 [L, B, K, S].
  """

  k: Shaped[Array, "L B K S ..."]
  v: Shaped[Array, "L B K S ..."]
  at: Coords
  score: Float[Array, "L B K S"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
  """Mesh axes that shard the dimensions of a cache.

  Attributes:
    mesh: Device mesh; None for one device.
    batch: Axes that shard the batch.
    heads: Axes that shard the KV heads.
    tokens: Axes that shard the sequence.
  """

  mesh: Mesh | None = None
  batch: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  tokens: tuple[str, ...] = ()

  @classmethod
  def of(cls, room: CacheSpec, heads: int) -> Places:
    """Places of arrays by `room.like` with `heads` KV heads."""

    def named(name: str) -> tuple[str, ...]:
      axes = room.axes.get(name)
      return (axes,) if isinstance(axes, str) else tuple(axes or ())

    head_axes = named("heads")
    mesh = room.mesh
    if mesh is not None and heads % math.prod(mesh.shape[a] for a in head_axes):
      head_axes = ()
    return cls(
      mesh=room.mesh,
      batch=named("batch"),
      heads=head_axes,
      tokens=named("tokens"),
    )

  @property
  def axes(self) -> tuple[str, ...]:
    """All axes, from the outermost."""
    return (*self.batch, *self.heads, *self.tokens)

  @property
  def shards(self) -> int:
    """Number of shards of the sequence."""
    return self.size(self.tokens) if self.tokens else 1

  @property
  def axis(self) -> str | None:
    """Mesh axis of the sequence, or None."""
    return self.tokens[0] if self.tokens else None

  def first_head(self, heads: int) -> Int[Array, ""]:
    """Index of the first of a device's `heads`; inside of `local`."""
    if not self.heads:
      return jnp.int32(0)
    return collectives.axis_index(self.heads[0]) * heads

  def all_heads(self, x: Shaped[Array, "B K S"]) -> Shaped[Array, "B _ S"]:
    """Gather the heads of all devices; inside of `local`."""
    return collectives.gather(x, self.heads[0], 1) if self.heads else x

  @property
  def by_head(self) -> P:
    """Spec of arrays [L, B, K, S, ...]."""
    return P(None, self.batch or None, self.heads or None, self.tokens or None)

  def of_slots(self, x: Shaped[ArrayLeaf, " ..."]) -> P:
    """Spec of slots [L, B, K, S, H], or of codes [L, B, K, X, S]."""
    lead = (None, self.batch or None, self.heads or None)
    none = (None,) * (token_axis(x) - 3)
    return P(*lead, *none, self.tokens or None)

  @property
  def by_row(self) -> P:
    """Spec of arrays [L, B, S]."""
    return P(None, self.batch or None, self.tokens or None)

  @property
  def by_example(self) -> P:
    """Spec of arrays [B, S]."""
    return P(self.batch or None, self.tokens or None)

  @property
  def pool(self) -> P:
    """Spec of arrays with pages as their first dimension."""
    return P(self.axes or None)

  def size(self, names: tuple[str, ...]) -> int:
    """Number of devices along these axes."""
    if not names:
      return 1
    assert self.mesh is not None
    return math.prod(self.mesh.shape[name] for name in names)

  def local(
    self, f: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
  ) -> Callable[..., Any]:
    """Apply `f` to each device's part, by `shard_map`."""
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
    k: Keys [N, P, H], or their bytes uint8 [N, P, X]; N pages in all.
    v: Values [N, P, J], or their bytes.
    pos: Positions of the tokens, -1 for an empty slot: int32 [N, P]; if the
      heads of a layer keep the same tokens [L, B, S], in the order of a head's
      table; if all layers do [1, B, S].
    seg: Segments of the tokens, of the same shape; None if all are 1.
    score: Scores that a policy has summed up, float32 [N, P], or [N, 0].
    table: Pages of each head, int32 [L, B, K, M], -1 after the last; numbered
      per device.
    bounds: Bounds of the keys, [N, 2, H], see `PagedView`, or None.
    places: Mesh axes that shard the pages.
  """

  k: Shaped[ArrayLeaf, "N P _"]
  v: Shaped[ArrayLeaf, "N P _"]
  pos: Int[ArrayLeaf, "*slots"]
  seg: Int[ArrayLeaf, "*slots"] | None
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
    alike: str | None = None,
  ) -> Pages:
    """Specs of one unused page for each device.

    Args:
      shape: Layers that get the pages.
      room: Dtype, codec and mesh of the cache.
      slots: Slots of a page, P.
      places: Mesh axes that shard the pages.
      alike: Heads that keep the same tokens, see `CacheConfig.alike`.
    """
    stored = shape.slots(room)
    num_devices = 1 if places.mesh is None else places.size(places.axes)

    def like(shape: tuple[int, ...], dtype: DTypeLike, spec: P) -> ArrayLeaf:
      if places.mesh is None:
        return leaf(jax.ShapeDtypeStruct(shape, dtype))
      sharding = NamedSharding(places.mesh, spec)
      return leaf(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))

    def pool(x: ArrayLeaf) -> ArrayLeaf:
      width = x.shape[7 - token_axis(x)]
      dtype = jnp.uint8 if x.dtype == jnp.int8 else x.dtype
      return like((num_devices, slots, width), dtype, places.pool)

    pos = like((num_devices, slots), jnp.int32, places.pool)
    if alike is not None:
      layers = 1 if alike == "layers" else shape.layers
      by_row = (layers, room.batch, room.shards * slots)
      pos = like(by_row, jnp.int32, places.by_row)
    lead = (shape.layers, room.batch, shape.heads, room.shards)
    return cls(
      k=pool(stored.k),
      v=pool(stored.v),
      pos=pos,
      seg=None,
      score=like((num_devices, 0), jnp.float32, places.pool),
      table=like(lead, jnp.int32, places.by_head),
      places=places,
    )

  def emptied(self) -> Pages:
    """Create arrays from these specs, with no page in use."""
    empty = zeros(self)
    return dataclasses.replace(empty, pos=empty.pos - 1, table=empty.table - 1)

  @property
  def alike(self) -> int:
    """Number of layers with separate positions that their heads share.

    0 if positions are stored per head.
    """
    return self.pos.shape[0] if self.pos.ndim == 3 else 0

  def with_table(self, table: Int[Array | np.ndarray, "L B K M"]) -> Pages:
    """Replace the page table of the heads."""
    return dataclasses.replace(self, table=table)

  def take(self, rows: Int[Array, " n"]) -> Pages:
    """Gather these rows, with repetition; copies share pages."""
    pick = lambda x: jnp.take(x, rows, 1, mode="clip")
    pages = self.with_table(pick(self.table))
    if not self.alike:
      return pages
    seg = None if self.seg is None else pick(self.seg)
    return dataclasses.replace(pages, pos=pick(self.pos), seg=seg)

  def in_table(self, x: Int[Array, "*slots"]) -> Int[Array, "L B K M P"]:
    """Look up positions or segments by the table; inside of `Places.local`."""
    if not self.alike:
      return x[jnp.maximum(self.table, 0)]
    by_page = x.reshape(*x.shape[:2], 1, -1, self.slots)
    return jnp.broadcast_to(by_page, (*self.table.shape, self.slots))

  def counts(self) -> Int[Array, "L B K M"]:
    """Number of tokens of each page in the table, int32 [L, B, K, M]."""

    def local(pages: Pages) -> jax.Array:
      real = (pages.pos >= 0).astype(jnp.int32)
      if pages.alike:
        count = jnp.sum(pages.in_table(real), -1, dtype=jnp.int32)
      else:
        count = jnp.sum(real, 1, dtype=jnp.int32)
        count = count[jnp.maximum(pages.table, 0)]
      return jnp.where(pages.table >= 0, count, 0)

    places = self.places
    return places.local(local, (self.specs(),), places.by_head)(self)

  def read_score(self, layer: Index) -> Float[Array, "B K _"]:
    """Policy scores [B, K, s] of one layer on this device."""
    table = lax.dynamic_index_in_dim(self.table, layer, 0, keepdims=False)
    lead, page = table.shape[:2], jnp.maximum(table, 0)
    assert self.score is not None
    if not self.score.shape[1]:
      slots = table.shape[2] * self.slots
      return jnp.zeros((*lead, slots), jnp.float32)
    score = jnp.where(table[..., None] >= 0, self.score[page], 0)
    return score.reshape(*lead, -1)

  def gathered(self, device: jax.Device) -> Pages:
    """Copy the pages to one device."""
    places, table = self.places, move(self.table, device)
    if places.axes:
      pages_per_device = self.k.shape[0] // places.size(places.axes)
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
        table >= 0,
        table + jnp.asarray(device_number * pages_per_device, jnp.int32),
        -1,
      )
    to_device = lambda x: move(x, device)
    return Pages(
      k=to_device(self.k),
      v=to_device(self.v),
      pos=to_device(self.pos),
      seg=None if self.seg is None else to_device(self.seg),
      score=to_device(self.score),
      table=table,
      bounds=None if self.bounds is None else to_device(self.bounds),
    )

  @property
  def slots(self) -> int:
    """Slots of a page, P."""
    return self.k.shape[1]

  def view(
    self,
    layer: Index,
    constants: PyTree,
    decoders: tuple[Decoder, Decoder] | None,
    most: tuple[int, ...] = (),
  ) -> PagedView:
    """View of one layer; `most` limits the pages read, see `PagedView`."""
    take = lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)

    def positions(x: jax.Array | None) -> Any:
      if x is None or not self.alike:
        return x
      # If all layers share positions, there is only one entry.
      return (take(x) if self.alike > 1 else x[0])[:, None]

    return PagedView(
      self.k,
      self.v,
      positions(self.pos),
      positions(self.seg),
      take(self.table),
      constants,
      decoders,
      self.places.axes,
      self.bounds if most else None,
      most,
    )

  def specs(self) -> Pages:
    """PartitionSpecs of the pages, as the same tree."""
    pool = self.places.pool
    slots = self.places.by_row if self.alike else pool
    return tree.with_leaves(
      self,
      k=pool,
      v=pool,
      pos=slots,
      seg=None if self.seg is None else slots,
      score=pool,
      table=self.places.by_head,
      bounds=None if self.bounds is None else pool,
    )

  def read(self) -> Stored:
    """All tokens on this device, head by head; inside of `Places.local`."""
    page = jnp.maximum(self.table, 0)
    lead = self.table.shape[:3]
    size = self.table.shape[3] * self.slots
    gather_pages = lambda x: x[page].reshape(*lead, size, *x.shape[2:])
    return Stored(
      gather_pages(self.k), gather_pages(self.v), self._coords(), None
    )

  def _coords(self) -> Coords:
    """Coordinates [L, B, K, S] of `read`."""
    pos = self.in_table(self.pos)
    real = (self.table >= 0)[..., None] & (pos >= 0)
    seg = jnp.int32(1) if self.seg is None else self.in_table(self.seg)
    flat = lambda x: x.reshape(*x.shape[:3], -1)
    return Coords(flat(jnp.maximum(pos, 0)), flat(jnp.where(real, seg, 0)))

  def read_coords(self) -> Coords:
    """Coordinates [L, B, K, S] of all tokens, head by head."""
    local = lambda pages: pages._coords()
    by_head: Any = self.places.by_head
    specs = (self.specs(),)
    return self.places.local(local, specs, Coords(by_head, by_head))(self)

  def without(self, gone: Callable[[Array], Array]) -> Pages:
    """Drop tokens for which `gone` is true, of positions [L, B, K, M, P]."""

    def local(pages: Pages) -> jax.Array:
      pos = pages.pos
      if pages.alike:
        by_page = pos.reshape(*pos.shape[:2], 1, -1, pages.slots)
        return jnp.where(gone(by_page).reshape(pos.shape), -1, pos)
      page = jnp.maximum(pages.table, 0)
      drop = gone(pos[page]) & (pages.table >= 0)[..., None]
      page = jnp.where(pages.table >= 0, page, pos.shape[0])
      # Rows may share a page: a slot dropped for one is dropped for all.
      flags = jnp.zeros(pos.shape, bool)
      flags = flags.at[page].max(drop, mode="drop")
      return jnp.where(flags, -1, pos)

    specs = self.specs()
    pos = self.places.local(local, (specs,), specs.pos)(self)
    return dataclasses.replace(self, pos=pos)


tree.register(
  Pages,
  ("k", "v", "pos", "seg", "score", "table", "bounds"),
  ("places",),
)


def page_bounds(
  view: KVView, pages: Pages, layer: Index, bounds: Float[Array, "N 2 H"]
) -> Float[Array, "N 2 H"]:
  """Set the key bounds of a layer's pages; inside of `Places.local`."""
  table = lax.dynamic_index_in_dim(pages.table, layer, 0, keepdims=False)
  real = (view.at.seg > 0).reshape(*table.shape, pages.slots)[..., None]
  k, _ = view.tile(jnp.int32(0), view.shape[2])
  k = k.reshape(*table.shape, pages.slots, k.shape[-1]).astype(bounds.dtype)
  low = jnp.min(jnp.where(real, k, jnp.inf), 3)
  high = jnp.max(jnp.where(real, k, -jnp.inf), 3)
  page = jnp.where(table >= 0, table, bounds.shape[0])
  return bounds.at[page].set(jnp.stack([low, high], 3), mode="drop")


def page_counts(keep: Bool[Array, "L B K S"], slots: int) -> Int[Array, "1 2"]:
  """Pages of all heads together and of the largest, int32 [1, 2]."""
  pages_per_row = -(-jnp.sum(keep, -1, dtype=jnp.int32) // slots)
  return jnp.stack([jnp.sum(pages_per_row), jnp.max(pages_per_row)])[None]


def few_sizes(count: int, octave: int = 16) -> int:
  """Round `count` up to one of `octave` sizes per octave: few compilations."""
  step = 1 << max(0, count.bit_length() - octave.bit_length())
  return max(1, -(-int(count) // step) * step)


def packed(
  tokens: Stored,
  keep: Bool[Array, "L B K S"],
  old: Pages,
  pages: int,
  most: int,
  segments: bool,
) -> Pages:
  """Pack the kept tokens into new pages; inside of `Places.local`.

  Args:
    tokens: Tokens of this device.
    keep: Whether a token stays, bool [L, B, K, S].
    old: Pages before, with the same layout.
    pages: Number of new pages, N; must suffice for all heads.
    most: Width of the page table, M; must suffice for each head.
    segments: Whether tokens may have other segments than 1.
  """
  slots = old.slots
  lead, size = keep.shape[:3], keep.shape[3]
  rows = math.prod(lead)
  keep = keep.reshape(rows, size)
  order = jnp.argsort(1 - keep.astype(jnp.int32), axis=1, stable=True)
  count = jnp.sum(keep, 1, dtype=jnp.int32)
  pages_per_row = -(-count // slots)
  ends = jnp.cumsum(pages_per_row, dtype=jnp.int32)
  first = ends - pages_per_row
  page = jnp.arange(pages, dtype=jnp.int32)
  row = jnp.searchsorted(ends, page, side="right").astype(jnp.int32)
  row = jnp.minimum(row, rows - 1)
  nth = (page - first[row])[:, None] * slots
  nth = nth + jnp.arange(slots, dtype=jnp.int32)[None]
  real = (nth < count[row][:, None]) & (page < ends[-1])[:, None]
  slot = order[row[:, None], jnp.clip(nth, 0, size - 1)]

  def gather_slots(x: jax.Array) -> jax.Array:
    return x.reshape(rows, *x.shape[3:])[row[:, None], slot]

  def of_slots(x: jax.Array, empty: int) -> jax.Array:
    """Positions or segments in the layout of the pages before."""
    if not old.alike:
      return jnp.where(real, gather_slots(x), empty)
    # All heads keep the same tokens: use those of the first.
    table_slots = jnp.arange(most * slots, dtype=jnp.int32)
    index = order.reshape(*lead, size)[: old.alike, :, 0]
    index = index[..., jnp.minimum(table_slots, size - 1)]
    in_use = (
      table_slots[None, None] < count.reshape(lead)[: old.alike, :, 0, None]
    )
    x = jnp.take_along_axis(x[: old.alike, :, 0], index, 2)
    return jnp.where(in_use, x, empty)

  number = jnp.arange(most, dtype=jnp.int32)[None]
  table = jnp.where(
    number < pages_per_row[:, None], first[:, None] + number, jnp.int32(-1)
  )
  score = jnp.zeros((pages, 0), jnp.float32)
  if tokens.score is not None:
    score = jnp.where(real, gather_slots(tokens.score), 0)
  return Pages(
    k=gather_slots(tokens.k),
    v=gather_slots(tokens.v),
    # A kept group may include slots of dropped tokens: these stay empty.
    pos=of_slots(jnp.where(tokens.at.seg > 0, tokens.at.pos, -1), -1),
    seg=of_slots(tokens.at.seg, 0) if segments else None,
    score=score,
    table=table.reshape(*lead, most),
    places=old.places,
  )


def host(x: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
  """Copy a small array to the host."""
  return np.asarray(jax.device_get(x))


def joined(old: Pages, new: Pages, rows: np.ndarray) -> Pages:
  """Replace `rows`, int [n], of `old` by the rows of `new`."""
  places = old.places
  if places.batch:
    raise OptionError(
      "cache",
      "insert of rows that are sharded over the mesh",
      "a mesh that shards the sequence alone",
      "make both caches with a batch that does not divide over the data axis",
    )

  if old.seg is not None or new.seg is not None:
    old, new = (
      dataclasses.replace(x, seg=(x.pos >= 0).astype(jnp.int32))
      if x.seg is None
      else x
      for x in (old, new)
    )
  index = jnp.asarray(rows)

  def local(old: Pages, new: Pages) -> Pages:
    concat = lambda x, y: jnp.concatenate([x, y], 0)
    table_width = max(old.table.shape[3], new.table.shape[3])

    def padded(x: jax.Array, size: int, fill: int = -1) -> jax.Array:
      pad = ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),)
      return jnp.pad(x, pad, constant_values=fill)

    def of_slots(x: Any, y: Any, empty: int) -> Any:
      if x is None:
        return None
      if not old.alike:
        return concat(x, y)
      x, y = (padded(z, table_width * old.slots, empty) for z in (x, y))
      return x.at[:, index].set(y)

    new_table = padded(new.table, table_width)
    new_table = jnp.where(new_table >= 0, new_table + old.k.shape[0], -1)
    return Pages(
      k=concat(old.k, new.k),
      v=concat(old.v, new.v),
      pos=of_slots(old.pos, new.pos, -1),
      seg=of_slots(old.seg, new.seg, 0),
      score=concat(old.score, new.score),
      table=padded(old.table, table_width).at[:, index].set(new_table),
      bounds=None if old.bounds is None else concat(old.bounds, new.bounds),
      places=places,
    )

  specs = (old.specs(), new.specs())
  return places.local(local, specs, old.specs())(old, new)
