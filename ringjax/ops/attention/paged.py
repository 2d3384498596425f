"""A view of pages: each KV head of each example has tokens of its own.

Guarantees: which page holds a token changes nothing. Heads of one layer may
have different tokens, and numbers of tokens. Where queries read some pages,
each reads those that it chooses itself, whatever other queries and rows do.
Cost: as `views`; the pages of a tile are gathered.
Memory: one tile.

The heads are examples to what reads the view: an array [B, K, ...] is taken
for [B K, 1, ...], since coordinates differ from head to head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax import tree
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.scores import Context, Terms
from ringjax.ops.attention.views import (
  Aligned,
  Decoder,
  KVView,
  StoredView,
  UnrotatedView,
  in_basis,
)
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial
from ringjax.parallel.place import MeshAxes
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class PagedView(StoredView):
  """One layer's pages, out of a pool of N pages of P slots.

  Fields:
    k: [N, P, H], or uint8 [N, P, X] where a codec stores keys.
    v: the same of values; the same array as `k` where values are parts of
      keys.
    pos: positions of the slots, -1 of an empty one: int32 [N, P]; where heads
      have the same tokens [B, 1, S], or [B, K, S], in the order of the table.
    seg: segments of the slots, of the same shape; None: all have segment 1.
    table: int32 [B, K, M], the pages of each head, -1 behind the last. On a
      mesh they are counted on each device from 0, among those that it has.
    constants: of the layer's codecs, arrays [K, n] for keys and for values.
    decoders: what makes numbers of the bytes of keys and of values, or None.
    axes: mesh axes that shard the pool: those of the batch, heads and tokens.
    bounds: [N, 2, H], the least and the largest number of the keys of a page,
      in each dim; or None.
    most: with bounds, how many pages a query reads of a head that has 0, 1, ...
      M of them on a device: those whose bounds allow the largest products with
      the queries of its group. Empty: all of them.
  """

  k: Shaped[Array, "N P _"]
  v: Shaped[Array, "N P _"]
  pos: Int[Array, "*slots"]
  seg: Int[Array, "*slots"] | None
  table: Int[Array, "B K M"]
  constants: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
  decoders: tuple[Decoder, Decoder] | None = None
  axes: tuple[str, ...] = ()
  bounds: Float[Array, "N 2 H"] | None = None
  most: tuple[int, ...] = ()

  @property
  def at(self) -> Coords:
    """Coordinates [B K, S]."""
    pos = self._in_table(self.pos)
    real = (self.table >= 0)[..., None] & (pos >= 0)
    seg = jnp.int32(1) if self.seg is None else self._in_table(self.seg)
    b, heads, _ = self.table.shape
    flat = lambda x: x.reshape(b * heads, -1)
    return Coords(flat(jnp.maximum(pos, 0)), flat(jnp.where(real, seg, 0)))

  def _in_table(self, x: Int[Array, "*slots"]) -> Int[Array, "B K M P"]:
    """Positions or segments, head by head."""
    if x.ndim == 2:
      return x[jnp.maximum(self.table, 0)]
    by_page = x.reshape(*x.shape[:2], -1, self.k.shape[1])
    return jnp.broadcast_to(by_page, (*self.table.shape, self.k.shape[1]))

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, heads, many = self.table.shape
    return b * heads, 1, many * self.k.shape[1], *self.dims

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> PagedView:
    pool: Any = P(self.axes or None)
    slots: Any = pool if self.pos.ndim == 2 else P(batch, None, tokens)
    return tree.with_leaves(
      self,
      k=pool,
      v=pool,
      pos=slots,
      seg=None if self.seg is None else slots,
      table=P(batch, heads, tokens),
      constants=jax.tree.map(lambda _: P(heads), self.constants),
      bounds=None if self.bounds is None else pool,
    )

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
    slots = self.k.shape[1]
    first = jnp.asarray(start, jnp.int32) // slots
    page = lax.dynamic_slice_in_dim(self.table, first, size // slots, 2)
    page = jnp.maximum(page, 0)
    b, heads, _ = page.shape

    def one(x: jax.Array, n: int) -> jax.Array:
      data = x[page].reshape(b, heads, size, x.shape[-1])
      if self.decoders is not None and x.shape[-1]:
        data = self.decoders[n](data, self.constants[n])
      return data.reshape(b * heads, 1, size, data.shape[-1])

    k = one(self.k, 0)
    return k, k if self.v is self.k else one(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    found = Aligned(self, q)
    if self.decoders is not None:
      found = in_basis(self, q, keys)
    return found._replace(by_head=True)

  @property
  def selects(self) -> bool:
    """Whether a query reads some pages and not all."""
    return bool(self.most) and self.bounds is not None

  def _ranked(
    self, q: Float[Array, "B K G T H"]
  ) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
    """Places in the table that a query may read, and which of them it does."""
    assert self.bounds is not None
    page = jnp.maximum(self.table, 0)
    bounds = self.bounds[page].astype(q.dtype)
    low, high = bounds[..., 0, :], bounds[..., 1, :]
    most = product("bkgth,bkmh->bkgtm", jnp.maximum(q, 0), high)
    most = most + product("bkgth,bkmh->bkgtm", jnp.minimum(q, 0), low)
    best, here = jnp.max(most, 2), self.table >= 0
    best = jnp.where(here[:, :, None], best, -jnp.inf)
    which = lax.top_k(best, max(self.most))[1]
    # A head's number is that of its row alone, however wide the table is.
    number = jnp.asarray(self.most, jnp.int32)[jnp.sum(here, 2)]
    rank = lax.broadcasted_iota(jnp.int32, which.shape, 3)
    return which, rank < number[:, :, None, None]

  def chosen(self, q: Float[Array, "B K G T H"]) -> Bool[Array, "B K T S"]:
    """Which slots each query reads."""
    which, reads = self._ranked(q)
    each = jax.nn.one_hot(which, self.table.shape[2], dtype=bool)
    pages = jnp.any(each & reads[..., None], 3)
    return jnp.repeat(pages, self.k.shape[1], 3)

  def by_query(self, q: Float[Array, "B K G T H"]) -> PagedView:
    """The pages that each query reads, as those of K T heads."""
    which, reads = self._ranked(q)
    b, heads, count, n = which.shape
    table = jnp.take_along_axis(self.table[:, :, None], which, 3)
    table = jnp.where(reads, table, -1).reshape(b, heads * count, n)
    each = lambda x: jnp.repeat(x, count, 0)

    def of_slots(x: jax.Array | None) -> Any:
      if x is None or x.ndim == 2:
        return x
      by_page = jnp.repeat(self._in_table(x), count, 1)
      index = which.reshape(b, heads * count, n, 1)
      return jnp.take_along_axis(by_page, index, 2).reshape(
        b, heads * count, -1
      )

    return dataclasses.replace(
      self,
      pos=of_slots(self.pos),
      seg=of_slots(self.seg),
      table=table,
      constants=jax.tree.map(each, self.constants),
      bounds=None,
      most=(),
    )


tree.register(
  PagedView,
  ("k", "v", "pos", "seg", "table", "constants", "bounds"),
  ("decoders", "axes", "most"),
)


def selecting(view: KVView) -> PagedView | None:
  """The pages of a view of which each query reads some, if it is such a one."""
  pages = view.stored if isinstance(view, UnrotatedView) else view
  return pages if isinstance(pages, PagedView) and pages.selects else None


def read_by_query(
  view: KVView,
  q: Float[Array, "B K G T H"],
  at: Coords,
  terms: Terms,
  read: Callable[..., Partial],
) -> Partial:
  """The partial of queries that each read pages of their own.

  Args:
    view: one that is `selecting`.
    q: the queries.
    at: their coordinates, [B or 1, T].
    terms: of the scores.
    read: the same of a view, queries and terms whose heads these are, and of
      coordinates [B K, T].
  """
  pages = selecting(view)
  assert pages is not None
  b, heads, groups, count, dim = q.shape
  made: Any = pages.by_query(q)
  if isinstance(view, UnrotatedView):
    made = view._replace(stored=made)
  apart = jnp.swapaxes(q, 2, 3).reshape(b, heads * count, groups, 1, dim)
  wide = lambda x: jnp.broadcast_to(x[:, None], (b, heads, count))
  own = Coords(*(wide(x).reshape(-1, 1) for x in at))
  slopes = terms.slopes
  if slopes is not None:
    slopes = jnp.repeat(slopes, count, 0)
  partial = read(made, apart, terms._replace(slopes=slopes), own)

  def back(x: Float[Array, "B KT G 1 *J"]) -> jax.Array:
    x = x.reshape(b, heads, count, groups, *x.shape[4:])
    return jnp.swapaxes(x, 2, 3)

  return jax.tree.map(back, partial)


def heads_as_examples(
  q: Float[Array, "B K G T H"], context: Context, terms: Terms
) -> tuple[jax.Array, Context, Terms]:
  """Queries [B K, 1, G, T, H] and what goes with them."""
  b, heads = q.shape[:2]
  # What is the same for all examples stays so.
  each = lambda x: (
    jnp.repeat(x, heads, 0) if jnp.ndim(x) and x.shape[0] == b > 1 else x
  )
  slopes = terms.slopes
  if slopes is not None:
    slopes = jnp.tile(slopes[:, None], (b, 1, 1))
  context = context._replace(
    q=Coords(*map(each, context.q)), mask=jax.tree.map(each, context.mask)
  )
  q = q.reshape(b * heads, 1, *q.shape[2:])
  return q, context, terms._replace(slopes=slopes)
