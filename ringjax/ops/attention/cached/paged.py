"""View of pages in which each KV head of each example has different tokens.

Guarantees: the page that holds a token does not change a result. Heads of one
layer may have different tokens, and numbers of tokens. Where queries read some
pages, each reads those that it chooses, whatever other queries and rows do.
Cost: as `views`; the pages of a tile are gathered.
Memory: one tile.

The heads are examples to the reader of the view: an array [B, K, ...] is read
as [B K, 1, ...], since coordinates differ from head to head.
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
from ringjax.ops.attention.cached.views import (
  Aligned,
  Decoder,
  KVView,
  StoredView,
  UnrotatedView,
  in_basis,
)
from ringjax.ops.attention.scores import Context, Terms
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class PagedView(StoredView):
  """One layer's pages, out of a pool of N pages of P slots.

  Fields:
    k: Keys, [N, P, H], or uint8 [N, P, X] where a codec stores keys.
    v: Values in the same layout; the same array as `k` where values are parts
      of keys.
    pos: Positions of the slots, int32 [N, P], -1 for an empty one; where heads
      have the same tokens [B, 1, S], or [B, K, S], in the order of the table.
    seg: Segments of the slots, of the same shape; None: all have segment 1.
    table: Pages of each head, int32 [B, K, M], -1 after the last. On a mesh
      each device counts its own pages from 0.
    constants: Arrays [K, n] of the layer's codecs, for keys and for values.
    decoders: Decoders of the keys and of the values, or None.
    axes: Mesh axes that shard the pool: those of the batch, heads and tokens.
    bounds: Least and largest element of a page's keys in each dim, [N, 2, H];
      or None.
    pages_read: Number of pages that a query reads of a head with 0, 1, ... M
      pages on a device, if there are bounds. It reads those whose bounds allow
      the largest products with the queries of its group. Empty: all pages.
    places: Places in the table that each query reads, int32 [B, K, T, n], -1
      for none, if the queries chose their pages before; or None.
    bias: Bias of the scores of a query and the slots of each of these pages,
      float32 [B, K, G, T, n], such as the negative logarithm of the probability
      that a sampled key had; -inf for a page that only other queries of the
      group read. None: 0.
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
  pages_read: tuple[int, ...] = ()
  places: Int[Array, "B K T n"] | None = None
  bias: Float[Array, "B K G T n"] | None = None

  @property
  def at(self) -> Coords:
    """Coordinates [B K, S]."""
    pos = self._in_table(self.pos)
    real = (self.table >= 0)[..., None] & (pos >= 0)
    seg = jnp.int32(1) if self.seg is None else self._in_table(self.seg)
    b, heads, _ = self.table.shape
    flatten = lambda x: x.reshape(b * heads, -1)
    return Coords(
      flatten(jnp.maximum(pos, 0)), flatten(jnp.where(real, seg, 0))
    )

  def _in_table(self, x: Int[Array, "*slots"]) -> Int[Array, "B K M P"]:
    """Arrange positions or segments in the order of the table, per head."""
    if x.ndim == 2:
      return x[jnp.maximum(self.table, 0)]
    by_page = x.reshape(*x.shape[:2], -1, self.k.shape[1])
    return jnp.broadcast_to(by_page, (*self.table.shape, self.k.shape[1]))

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, heads, pages = self.table.shape
    return b * heads, 1, pages * self.k.shape[1], *self.dims

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> PagedView:
    pool = P(self.axes or None)
    by_head = heads if self.pos.shape[1] > 1 else None
    slots = pool if self.pos.ndim == 2 else P(batch, by_head, tokens)
    return tree.with_leaves(
      self,
      k=pool,
      v=pool,
      pos=slots,
      seg=None if self.seg is None else slots,
      table=P(batch, heads, tokens),
      constants=jax.tree.map(lambda _: P(heads), self.constants),
      bounds=None if self.bounds is None else pool,
      places=None if self.places is None else P(batch, heads, None, tokens),
      bias=None if self.bias is None else P(batch, heads, None, None, tokens),
    )

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    slots = self.k.shape[1]
    first = jnp.asarray(start, jnp.int32) // slots
    page = lax.dynamic_slice_in_dim(self.table, first, size // slots, 2)
    page = jnp.maximum(page, 0)
    b, heads, _ = page.shape

    def decode_pages(x: jax.Array, n: int) -> jax.Array:
      data = x[page].reshape(b, heads, size, x.shape[-1])
      if self.decoders is not None and x.shape[-1]:
        data = self.decoders[n](data, self.constants[n])
      return data.reshape(b * heads, 1, size, data.shape[-1])

    k = decode_pages(self.k, 0)
    return k, k if self.v is self.k else decode_pages(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    aligned = Aligned(self, q)
    if self.decoders is not None:
      aligned = in_basis(self, q, keys)
    return aligned._replace(by_head=True)

  @property
  def selects(self) -> bool:
    """Whether a query reads some pages and not all."""
    by_bounds = bool(self.pages_read) and self.bounds is not None
    return by_bounds or self.places is not None

  def _ranked(
    self, q: Float[Array, "B K G T H"]
  ) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
    """Places in the table that a query may read, and whether it reads them."""
    if self.places is not None:
      return jnp.maximum(self.places, 0), self.places >= 0
    assert self.bounds is not None
    bounds = self.bounds[jnp.maximum(self.table, 0)]
    return ranked_pages(q, bounds, self.table >= 0, self.pages_read)

  def chosen(self, q: Float[Array, "B K G T H"]) -> Bool[Array, "B K T S"]:
    """Mark the slots that each query reads."""
    places, reads = self._ranked(q)
    is_page = jax.nn.one_hot(places, self.table.shape[2], dtype=bool)
    pages = jnp.any(is_page & reads[..., None], 3)
    return jnp.repeat(pages, self.k.shape[1], 3)

  def by_query(self, q: Float[Array, "B K G T H"]) -> PagedView:
    """View of the pages that each query reads, as pages of K T heads."""
    places, reads = self._ranked(q)
    b, heads, count, n = places.shape
    table = jnp.take_along_axis(self.table[:, :, None], places, 3)
    table = jnp.where(reads, table, -1).reshape(b, heads * count, n)
    repeat = lambda x: jnp.repeat(x, count, 0)

    def of_slots(x: jax.Array | None) -> jax.Array | None:
      if x is None or x.ndim == 2:
        return x
      by_page = jnp.repeat(self._in_table(x), count, 1)
      index = places.reshape(b, heads * count, n, 1)
      return jnp.take_along_axis(by_page, index, 2).reshape(
        b, heads * count, -1
      )

    return dataclasses.replace(
      self,
      pos=of_slots(self.pos),
      seg=of_slots(self.seg),
      table=table,
      constants=jax.tree.map(repeat, self.constants),
      bounds=None,
      pages_read=(),
      places=None,
      bias=None,
    )

  def bias_by_query(self) -> Float[Array, "_ 1 G 1 S"] | None:
    """Bias of the scores of `by_query`'s slots, whose heads are examples."""
    if self.bias is None:
      return None
    groups, _, n = self.bias.shape[2:]
    by_head = jnp.swapaxes(self.bias, 2, 3).reshape(-1, 1, groups, 1, n)
    return jnp.repeat(by_head, self.k.shape[1], 4)


tree.register(
  PagedView,
  ("k", "v", "pos", "seg", "table", "constants", "bounds", "places", "bias"),
  ("decoders", "axes", "pages_read"),
)


def ranked_pages(
  q: Float[Array, "B K G T H"],
  bounds: Float[Array, "B K M 2 H"],
  has_page: Bool[Array, "B K M"],
  pages_read: tuple[int, ...],
) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
  """Rank pages by upper bounds of the products of queries with their keys.

  Args:
    q: Queries, of whose groups each chooses together.
    bounds: Least and largest element of a page's keys in each dim.
    has_page: Whether there is a page at a place.
    pages_read: Number of pages that a query reads of a head with 0, 1, ... M.

  Returns:
    The best places, best first, and whether the query reads them.
  """
  # One product, of the parts of a query that go with the least and the largest
  # elements: slices of the bounds would be copied.
  parts = jnp.concatenate([jnp.minimum(q, 0), jnp.maximum(q, 0)], -1)
  bounds = bounds.astype(q.dtype).reshape(*bounds.shape[:3], -1)
  upper_bounds = product("bkgth,bkmh->bkgtm", parts, bounds)
  best = jnp.max(upper_bounds, 2)
  best = jnp.where(has_page[:, :, None], best, -jnp.inf)
  places = lax.top_k(best, max(pages_read))[1]
  # The number of pages of a head depends on its row alone, not on the width
  # of the table.
  num_read = jnp.asarray(pages_read, jnp.int32)[jnp.sum(has_page, 2)]
  rank = lax.broadcasted_iota(jnp.int32, places.shape, 3)
  return places, rank < num_read[:, :, None, None]


def selecting(view: KVView) -> PagedView | None:
  """Pages of a view from which each query reads some, or None."""
  pages = view.stored if isinstance(view, UnrotatedView) else view
  return pages if isinstance(pages, PagedView) and pages.selects else None


def with_places(
  view: KVView,
  places: Int[Array, "B K T n"] | None,
  bias: Float[Array, "B K G T n"] | None,
) -> KVView:
  """View that is `selecting`, with other `PagedView.places` and `bias`."""
  if isinstance(view, UnrotatedView):
    return view._replace(stored=with_places(view.stored, places, bias))
  assert isinstance(view, PagedView)
  return dataclasses.replace(view, places=places, bias=bias)


def read_by_query(
  view: KVView,
  q: Float[Array, "B K G T H"],
  at: Coords,
  terms: Terms,
  read: Callable[..., Partial],
) -> Partial:
  """Partial of queries that each read different pages.

  Args:
    view: View that is `selecting`.
    q: Queries.
    at: Coordinates of the queries, [B or 1, T].
    terms: Arrays of the score function.
    read: Function that gives the partial for a view, queries and terms with
      K T heads, and coordinates [B K, T].
  """
  pages = selecting(view)
  assert pages is not None
  b, heads, groups, count, dim = q.shape
  page_view = pages.by_query(q)
  if isinstance(view, UnrotatedView):
    page_view = view._replace(stored=page_view)
  split_q = jnp.swapaxes(q, 2, 3).reshape(b, heads * count, groups, 1, dim)
  per_head = lambda x: jnp.broadcast_to(x[:, None], (b, heads, count))
  split_at = Coords(*(per_head(x).reshape(-1, 1) for x in at))
  slopes = terms.slopes
  if slopes is not None:
    slopes = jnp.repeat(slopes, count, 0)
  terms = terms._replace(slopes=slopes, bias=pages.bias_by_query())
  partial = read(page_view, split_q, terms, split_at)

  def unsplit(x: Float[Array, "B KT G 1 *J"]) -> jax.Array:
    x = x.reshape(b, heads, count, groups, *x.shape[4:])
    return jnp.swapaxes(x, 2, 3)

  return jax.tree.map(unsplit, partial)


def heads_as_examples(
  q: Float[Array, "B K G T H"], context: Context, terms: Terms
) -> tuple[Float[Array, "B*K 1 G T H"], Context, Terms]:
  """Reshape queries to [B K, 1, G, T, H], and their context and terms."""
  b, heads = q.shape[:2]
  # Arrays that all examples share are not repeated.
  repeat_heads = lambda x: (
    jnp.repeat(x, heads, 0) if jnp.ndim(x) and x.shape[0] == b > 1 else x
  )
  slopes = terms.slopes
  if slopes is not None:
    slopes = jnp.tile(slopes[:, None], (b, 1, 1))
  context = context._replace(
    q=Coords(*map(repeat_heads, context.q)),
    mask=jax.tree.map(repeat_heads, context.mask),
  )
  q = q.reshape(b * heads, 1, *q.shape[2:])
  return q, context, terms._replace(slopes=slopes)
