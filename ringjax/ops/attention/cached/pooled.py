"""View of a pool of pages that rows share by their page tables.

Guarantees: neither the page that holds a token nor the rows that share it
  change
a result. Tiles are folded in the order of positions whatever the other rows of
the call hold, so that a row's result is bitwise the same in any batch.
Cost: as `views`; the pages of a tile are gathered. With `SharedTiles` a tile
that several rows share is read once for all of them, and multiplied with the
queries of all rows at once.
Memory: one tile.
Ref: Kwon et al. 2023, PagedAttention, arXiv 2309.06180; Ye et al. 2024,
ChunkAttention, arXiv 2402.15220.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.ops.attention.blockwise import (
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  pad_axis,
  product,
  tile_kinds,
  tile_lists,
)
from ringjax.ops.attention.cached.code_format import as_bytes, token_axis
from ringjax.ops.attention.cached.views import (
  Aligned,
  Decoder,
  KVView,
  StoredView,
  coords_specs,
  in_basis,
)
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  Scores,
  ScoreTile,
  Terms,
)
from ringjax.ops.mask import Causal, Coords, Mask
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class PooledView(StoredView):
  """One layer's pages, in a pool that all rows share.

  Fields:
    k: Keys, [L, N, K, P, H], N pages of P slots; codes as `stored_codes` lays
      them out.
    v: Values in the same layout; the same array as `k` where values are parts
      of keys.
    at: Coordinates [B, S] of the slots in the order of `table`; segment 0 is
      an empty one.
    table: Pages of each row, int32 [B, S / P]; on a mesh indices into the
      pages of a device.
    layer: Index of the layer in the L, int32 [].
    constants: Arrays [K, n] of the layer's codecs, for keys and for values.
    decoders: Decoders of the keys and of the values, or None.
    shared: Tiles that rows share, for calls of a few tokens a row, or None.
    own_mask: Mask in place of the layer's, or None.
    own_queries: Coordinates [B, T] of queries in place of the call's, or None.
    widths: Elements of a key and of a value, where the arrays are padded with
      zeros; else None.
  """

  k: Shaped[Array, "L N K _ _"]
  v: Shaped[Array, "L N K _ _"]
  at: Coords
  table: Int[Array, "B pages"]
  layer: Index
  constants: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
  decoders: tuple[Decoder, Decoder] | None = None
  shared: SharedTiles | None = None
  own_mask: Mask | None = None
  own_queries: Coords | None = None
  widths: tuple[int, int] | None = None

  # Tiles are folded in the order of slots, all with a mask.
  in_order = True

  @property
  def mask(self) -> Mask | None:
    return self.own_mask

  @property
  def queries(self) -> Coords | None:
    return self.own_queries

  def of_tree(self, drafted: Coords, mask: Mask) -> PooledView:
    """View of a text with a tree of drafted tokens after it.

    The slots have the tree's coordinates, see `ContiguousView.of_tree`.
    """
    return dataclasses.replace(self, own_mask=mask, own_queries=drafted)

  @property
  def dims(self) -> tuple[int, int]:
    return super().dims if self.widths is None else self.widths

  def keys_alone(self) -> PooledView:
    widths = self.widths and (self.widths[0],) * 2
    return dataclasses.replace(self, v=self.k, widths=widths)

  @property
  def page(self) -> int:
    """Number of slots of a page, P."""
    return self.k.shape[token_axis(self.k)]

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, pages = self.table.shape
    return b, self.k.shape[2], pages * self.page, *self.dims

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> PooledView:
    pool = P(None, tokens, heads)
    shared, queries = self.shared, self.own_queries
    rows = self.table.shape[0]
    return tree.with_leaves(
      self,
      k=pool,
      v=pool,
      at=coords_specs(self.at, rows, batch, tokens),
      table=P(batch, tokens),
      layer=P(),
      constants=jax.tree.map(lambda _: P(heads), self.constants),
      shared=None if shared is None else shared.specs(batch, tokens),
      own_mask=jax.tree.map(lambda _: P(), self.own_mask),
      own_queries=None
      if queries is None
      else coords_specs(queries, rows, batch, None),
    )

  def of_row(self, row: Index) -> PooledView:
    """View of one row of the batch, given by its index, int32 []."""
    take_row = lambda x: lax.dynamic_slice_in_dim(x, row, 1, 0)
    return dataclasses.replace(
      self,
      at=Coords(*map(take_row, self.at)),
      table=take_row(self.table),
      shared=None,
    )

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    first = jnp.asarray(start, jnp.int32) // self.page
    page = lax.dynamic_slice_in_dim(self.table, first, size // self.page, 1)
    page = jnp.maximum(page, 0)
    b, pages = page.shape
    layer = jnp.full(page.shape, self.layer, jnp.int32)

    def decode_pages(x: jax.Array, n: int) -> jax.Array:
      data = as_bytes(x[layer, page])
      heads, slots, width = data.shape[2:]
      data = jnp.swapaxes(data, 1, 2).reshape(b, heads, pages * slots, width)
      if self.decoders is not None and width:
        data = self.decoders[n](data, self.constants[n])
      return data if self.widths is None else data[..., : self.widths[n]]

    k = decode_pages(self.k, 0)
    return k, k if self.v is self.k else decode_pages(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    if self.decoders is not None:
      return in_basis(self, q, keys)
    if self.widths is None or not keys:
      return Aligned(self, q)
    # Zeros add nothing to a product: the padded arrays are read as they are.
    value = self.dims[1]
    q = pad_axis(q, 4, self.k.shape[4])
    padded_view = dataclasses.replace(self, widths=None)
    return Aligned(padded_view, q, lambda x: x[..., :value])


tree.register(
  PooledView,
  (
    "k",
    "v",
    "at",
    "table",
    "layer",
    "constants",
    "shared",
    "own_mask",
    "own_queries",
  ),
  ("decoders", "widths"),
)


class SharedTiles(NamedTuple):
  """Tiles of slots that several rows have in common.

  A row shares a tile only if it shares all earlier ones, so that its tiles are
  folded in order: first those that it shares, then its private ones.

  Fields:
    row: One of the rows that have the tile, int32 [R, n], on each shard.
    tile: Index of the tile among that row's on the shard, int32 [R, n];
      ascending.
    cover: Rows that have the tile, bool [R, n, B].
    count: Number of the n entries in use, int32 [R].
    shared_counts: Number of a row's tiles that are shared, int32 [R, B].
  """

  row: Int[Array | np.ndarray, "R n"]
  tile: Int[Array | np.ndarray, "R n"]
  cover: Bool[Array | np.ndarray, "R n B"]
  count: Int[Array | np.ndarray, " R"]
  shared_counts: Int[Array | np.ndarray, "R B"]

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> SharedTiles:
    """Return the same tree of PartitionSpecs; devices share no tiles."""
    per_shard: Any = P(tokens)
    cover: Any = P(tokens, None, batch)
    per_row: Any = P(tokens, batch)
    return SharedTiles(per_shard, per_shard, cover, per_shard, per_row)


def pool_tile(page: int, platform: str) -> int:
  """Number of slots of a tile of pages, the same for all calls."""
  return max(page, 128 if platform == "cpu" else 512)


def decode_pool(
  q: Float[Array, "B K G T H"],
  keys: KVView,
  args: ScoreArgs,
  platform: str = "cpu",
) -> Partial:
  """Partial of a few queries per row over the keys of a view with `shared`.

  All queries of a row are after the tiles that it shares.

  The result is bitwise the same whether a tile is shared: products have at
  least two rows and their weights are transposed, which XLA's compilers sum in
  one order for any number of rows. `Engine` checks that on its device.
  """
  plan = pages_of(keys).shared
  assert plan is not None
  block = pool_tile(pages_of(keys).page, platform)
  batch, heads, groups, queries = q.shape[:4]
  row_queries = groups * queries
  context = args.context
  dtype = wide_dtype(q.dtype)
  start = Partial.empty(q.shape[:4], keys.shape[4], dtype, (q, keys))
  flat = q.reshape(batch, heads, row_queries, -1)

  # XLA's CPU compiler sums products of 16-bit numbers in an order that depends
  # on the number of rows, but not those of float32; the terms are the same, as
  # a product of two 16-bit numbers is exact in float32.
  product_dtype = dtype if platform == "cpu" else None
  flat = flat if product_dtype is None else flat.astype(product_dtype)

  def tile_of(view: Any, n: Index) -> tuple[jax.Array, jax.Array, Any]:
    k, v = view.tile(n * block, block)
    at = cut_coords(view.at, n * block, block)
    return k.astype(q.dtype).astype(flat.dtype), v, args.of_keys(at, 0)

  def fold(
    tile_args: ScoreArgs,
    s: jax.Array,
    v: jax.Array,
    carry: PyTree,
    weigh: Callable[..., Any],
    allowed: jax.Array,
  ) -> Partial:
    tile = ScoreTile(tile_args, FORWARD, 0, 0, context.q, tile_args.context.k)
    flag = finite_flag(v, s.dtype)
    flag = jnp.broadcast_to(flag, (batch, *flag.shape[1:]))
    return fold_tile(tile, s, v, flag, carry, weigh, allowed)

  def fold_shared(n: Index, carry: Partial) -> Partial:
    row, tile = plan.row[0, n], plan.tile[0, n]
    any_view: Any = keys
    k, v, tile_args = tile_of(any_view.of_row(row), tile)
    all_queries = jnp.swapaxes(flat, 0, 1).reshape(
      heads, batch * row_queries, -1
    )
    s = two_row_product("kth,knh->knt", k[0], all_queries)
    s = jnp.swapaxes(s.reshape(heads, batch, groups, queries, block), 0, 1)

    def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
      p = jnp.swapaxes(p, 0, 1).reshape(heads, batch * row_queries, block)
      acc = weighted_sum("ktn,ktj->knj", p, v[0], product_dtype)
      acc = acc.reshape(heads, batch, groups, queries, -1)
      return jnp.swapaxes(acc, 0, 1)

    cover = plan.cover[0, n][:, None, None, None, None]
    return fold(tile_args, s, v, carry, weigh, cover)

  shared_partial = loop(plan.count[0], fold_shared, start)
  kinds = tile_kinds(context.mask, context.q, context.k, queries, block)
  tile_index = jnp.arange(kinds.shape[1], dtype=jnp.int32)
  unshared = (kinds[0] > 0) & (tile_index >= jnp.min(plan.shared_counts[0]))
  lists = tile_lists(unshared[None].astype(jnp.int8), masked=True)

  def fold_unshared(n: Index, carry: Partial) -> Partial:
    tile = lists.masked[0, n]
    k, v, tile_args = tile_of(keys, tile)
    s = two_row_product("bkth,bknh->bknt", k, flat)
    s = s.reshape(batch, heads, groups, queries, block)

    def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
      p = p.reshape(batch, heads, row_queries, block)
      acc = weighted_sum("bktn,bktj->bknj", p, v, product_dtype)
      return acc.reshape(batch, heads, groups, queries, -1)

    unfinished = (tile >= plan.shared_counts[0])[:, None, None, None, None]
    return fold(tile_args, s, v, carry, weigh, unfinished)

  return loop(lists.masked_count[0], fold_unshared, shared_partial)


def pages_of(view: KVView) -> PooledView:
  """The view of pages, which another view may wrap."""
  wrapper: Any = view
  return view if isinstance(view, PooledView) else wrapper.stored


def two_row_product(
  equation: str, k: Float[Array, "*b t H"], q: Float[Array, "*b n H"]
) -> Float[Array, "*b n t"]:
  """Multiply at least two queries: a single one is summed in another order."""
  if q.shape[-2] > 1:
    return product(equation, k, q)
  return product(equation, k, jnp.concatenate([q, q], -2))[..., :1, :]


def weighted_sum(
  equation: str,
  p: Float[Array, "*b n t"],
  v: Float[Array, "*b t J"],
  form: DTypeLike | None,
) -> Float[Array, "*b n J"]:
  """Sum values by weights, transposed first; see `decode_pool`.

  `form` is the dtype in which they are multiplied, or None for theirs.
  """
  rows = p.shape[-2]
  if form is not None:
    p, v = p.astype(form), v.astype(form)
  if rows == 1:
    p = jnp.concatenate([p, p], -2)
  p = lax.optimization_barrier(jnp.swapaxes(p, -1, -2))
  return product(equation, p, v)[..., :rows, :]


def sharing_is_exact(
  shape: tuple[int, int, int, int, int],
  page: int,
  dtype: DTypeLike,
  platform: str,
  decode: Callable[..., Partial] | None = None,
  queries: int = 1,
  stored: Callable[[PooledView], PooledView] | None = None,
) -> bool:
  """Whether a view's partial is bitwise the same with and without sharing.

  Both are computed on the default device.

  Args:
    shape: Numbers of rows, KV heads and queries per head, and the dims of keys
      and values.
    page: Slots of a page.
    dtype: Dtype of queries, keys and values.
    platform: Platform of the device.
    decode: Function that reads the view, called as `decode_pool`, e.g. a
      kernel; None: `decode_pool` for the platform.
    queries: Tokens of a row in a call.
    stored: Function that encodes the pages of a view as a pool stores them;
      None: they are numbers.
  """
  if decode is None:
    decode = functools.partial(decode_pool, platform=platform)
  rows, heads, groups, dim, value = shape
  block = pool_tile(page, platform)
  tile_pages = block // page
  draw = np.random.default_rng(0).standard_normal
  random = lambda *shape: jnp.asarray(draw(shape, np.float32), dtype)
  shared_pages = np.broadcast_to(np.arange(tile_pages), (rows, tile_pages))
  private_pages = tile_pages + np.arange(rows * tile_pages).reshape(
    rows, tile_pages
  )
  table = jnp.asarray(
    np.concatenate([shared_pages, private_pages], 1), jnp.int32
  )
  pos = np.broadcast_to(np.arange(2 * block), (rows, 2 * block))
  at = Coords(*(jnp.asarray(x, jnp.int32) for x in (pos, pos * 0 + 1)))
  q_at = Coords(at.pos[:, -queries:], at.seg[:, -queries:])
  pages = (rows + 1) * tile_pages
  k = random(1, pages, heads, page, dim)
  v = random(1, pages, heads, page, value)
  q = random(rows, heads, groups, queries, dim)
  args = ScoreArgs(
    Scores(scale=dim**-0.5), Terms(), Context(q_at, at, Causal())
  )

  @jax.jit
  def run(
    q: jax.Array, k: jax.Array, v: jax.Array, shared: SharedTiles
  ) -> Partial:
    view = PooledView(k, v, at, table, jnp.int32(0), shared=shared)
    if stored is None:
      return decode(q, view, args)
    view, queries, *_ = stored(view).aligned(q)
    return decode(queries, view, args)

  def plan(count: int) -> SharedTiles:
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)
    return SharedTiles(
      ints(1, 1),
      ints(1, 1),
      jnp.ones((1, 1, rows), bool),
      ints(1) + count,
      ints(1, rows) + count,
    )

  partials = [jax.device_get(run(q, k, v, plan(n))) for n in (0, 1)]
  return all(
    np.array_equal(np.asarray(x), np.asarray(y))
    for x, y in zip(*partials, strict=True)
  )
