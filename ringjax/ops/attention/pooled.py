"""A view of a pool of pages that rows share by their tables.

Guarantees: which page holds a token changes nothing, nor which rows share it.
Tiles are folded in the order of positions whatever the other rows of the call
hold, so that a row's result is the same, bit for bit, in any company.
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
from ringjax.ops.attention.code_format import as_bytes, token_axis
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  Scores,
  ScoreTile,
  Terms,
)
from ringjax.ops.attention.views import (
  Aligned,
  Decoder,
  KVView,
  StoredView,
  coords_specs,
  in_basis,
)
from ringjax.ops.mask import Causal, Coords, Mask
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.parallel.place import MeshAxes
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class PooledView(StoredView):
  """One layer's pages, out of a pool that all rows share.

  Fields:
    k: [L, N, K, P, H], N pages of P slots; codes as `stored_codes` says.
    v: the same of values; the same array as `k` where values are parts of
      keys.
    at: coordinates [B, S] of the slots in the order of `table`; segment 0 is
      an empty one.
    table: int32 [B, S / P], the pages of each row; on a mesh they are counted
      on each device among those that it has.
    layer: int32 [], which of the L.
    constants: of the layer's codecs, arrays [K, n] for keys and for values.
    decoders: what makes numbers of the bytes of keys and of values, or None.
    shared: tiles that rows share, for calls of a few tokens a row, or None.
    own_mask: a mask in place of the layer's, or None.
    own_queries: coordinates [B, T] of the queries in place of the call's, or
      None.
    widths: numbers of a key and of a value, where the arrays have zeros behind
      them; else None.
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
    """Of text and a tree of drafted tokens behind it, by whose coordinates the
    slots have theirs; see `ContiguousView.of_tree`."""
    return dataclasses.replace(self, own_mask=mask, own_queries=drafted)

  @property
  def dims(self) -> tuple[int, int]:
    return super().dims if self.widths is None else self.widths

  def keys_alone(self) -> PooledView:
    widths = self.widths and (self.widths[0],) * 2
    return dataclasses.replace(self, v=self.k, widths=widths)

  @property
  def page(self) -> int:
    """Slots of a page, P."""
    return self.k.shape[token_axis(self.k)]

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, many = self.table.shape
    return b, self.k.shape[2], many * self.page, *self.dims

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
    """The same for one row of the batch, int32 []."""
    one = lambda x: lax.dynamic_slice_in_dim(x, row, 1, 0)
    return dataclasses.replace(
      self, at=Coords(*map(one, self.at)), table=one(self.table), shared=None
    )

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
    first = jnp.asarray(start, jnp.int32) // self.page
    page = lax.dynamic_slice_in_dim(self.table, first, size // self.page, 1)
    page = jnp.maximum(page, 0)
    b, many = page.shape
    layer = jnp.full(page.shape, self.layer, jnp.int32)

    def one(x: jax.Array, n: int) -> jax.Array:
      data = as_bytes(x[layer, page])
      heads, slots, width = data.shape[2:]
      data = jnp.swapaxes(data, 1, 2).reshape(b, heads, many * slots, width)
      if self.decoders is not None and width:
        data = self.decoders[n](data, self.constants[n])
      return data if self.widths is None else data[..., : self.widths[n]]

    k = one(self.k, 0)
    return k, k if self.v is self.k else one(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    if self.decoders is not None:
      return in_basis(self, q, keys)
    if self.widths is None or not keys:
      return Aligned(self, q)
    # Zeros add nothing to a product: the arrays are read as they are.
    value = self.dims[1]
    q = pad_axis(q, 4, self.k.shape[4])
    made = dataclasses.replace(self, widths=None)
    return Aligned(made, q, lambda x: x[..., :value])


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

  A row shares a tile only if it shares all before it, so that its tiles are
  folded in order: first those that it shares, then its own.

  Fields:
    row: int32 [R, n], on each shard, one of the rows that have the tile.
    tile: int32 [R, n], which of the row's tiles on that shard; ascending.
    cover: bool [R, n, B], the rows that have it.
    count: int32 [R], how many of the n are there.
    done: int32 [R, B], how many of a row's tiles are shared.
  """

  row: Int[Array | np.ndarray, "R n"]
  tile: Int[Array | np.ndarray, "R n"]
  cover: Bool[Array | np.ndarray, "R n B"]
  count: Int[Array | np.ndarray, " R"]
  done: Int[Array | np.ndarray, "R B"]

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> SharedTiles:
    """PartitionSpecs, the same tree; nothing is shared between devices."""
    own: Any = P(tokens)
    cover: Any = P(tokens, None, batch)
    done: Any = P(tokens, batch)
    return SharedTiles(own, own, cover, own, done)


def pool_tile(page: int, platform: str) -> int:
  """Slots of a tile of pages, the same for all calls."""
  return max(page, 128 if platform == "cpu" else 512)


def decode_pool(
  q: Float[Array, "B K G T H"],
  keys: KVView,
  args: ScoreArgs,
  platform: str = "cpu",
) -> Partial:
  """The partial of a few queries a row over the keys of a view with `shared`.

  All queries of a row are behind the tiles that it shares.

  It is the same, bit for bit, whether a tile is shared: products have two rows
  at least and their weights transposed, which XLA's compilers sum in one order
  whatever the number of rows. `Engine` checks that on its device.
  """
  plan = pages_of(keys).shared
  assert plan is not None
  block = pool_tile(pages_of(keys).page, platform)
  batch, heads, groups, queries = q.shape[:4]
  each = groups * queries
  context = args.context
  wide = wide_dtype(q.dtype)
  start = Partial.empty(q.shape[:4], keys.shape[4], wide, (q, keys))
  flat = q.reshape(batch, heads, each, -1)

  # XLA's CPU compiler sums products of 16-bit numbers in another order for
  # other numbers of rows, and those of float32 in one; what is added is the
  # same, a product of two 16-bit numbers being exact in float32.
  form = wide if platform == "cpu" else None
  flat = flat if form is None else flat.astype(form)

  def tile_of(view: Any, n: Index) -> tuple[jax.Array, jax.Array, Any]:
    k, v = view.tile(n * block, block)
    at = cut_coords(view.at, n * block, block)
    return k.astype(q.dtype).astype(flat.dtype), v, args.of_keys(at, 0)

  def fold(
    here: ScoreArgs,
    s: jax.Array,
    v: jax.Array,
    carry: PyTree,
    weigh: Callable[..., Any],
    allowed: jax.Array,
  ) -> Partial:
    tile = ScoreTile(here, FORWARD, 0, 0, context.q, here.context.k)
    flag = finite_flag(v, s.dtype)
    flag = jnp.broadcast_to(flag, (batch, *flag.shape[1:]))
    return fold_tile(tile, s, v, flag, carry, weigh, allowed)

  def common(n: Index, carry: Partial) -> Partial:
    row, which = plan.row[0, n], plan.tile[0, n]
    whole: Any = keys
    k, v, here = tile_of(whole.of_row(row), which)
    many = jnp.swapaxes(flat, 0, 1).reshape(heads, batch * each, -1)
    s = _rows_of_two("kth,knh->knt", k[0], many)
    s = jnp.swapaxes(s.reshape(heads, batch, groups, queries, block), 0, 1)

    def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
      p = jnp.swapaxes(p, 0, 1).reshape(heads, batch * each, block)
      acc = _weighted("ktn,ktj->knj", p, v[0], form)
      acc = acc.reshape(heads, batch, groups, queries, -1)
      return jnp.swapaxes(acc, 0, 1)

    cover = plan.cover[0, n][:, None, None, None, None]
    return fold(here, s, v, carry, weigh, cover)

  some = loop(plan.count[0], common, start)
  kinds = tile_kinds(context.mask, context.q, context.k, queries, block)
  number = jnp.arange(kinds.shape[1], dtype=jnp.int32)
  rest = (kinds[0] > 0) & (number >= jnp.min(plan.done[0]))
  lists = tile_lists(rest[None].astype(jnp.int8), masked=True)

  def own(n: Index, carry: Partial) -> Partial:
    which = lists.masked[0, n]
    k, v, here = tile_of(keys, which)
    s = _rows_of_two("bkth,bknh->bknt", k, flat)
    s = s.reshape(batch, heads, groups, queries, block)

    def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
      p = p.reshape(batch, heads, each, block)
      acc = _weighted("bktn,bktj->bknj", p, v, form)
      return acc.reshape(batch, heads, groups, queries, -1)

    mine = (which >= plan.done[0])[:, None, None, None, None]
    return fold(here, s, v, carry, weigh, mine)

  return loop(lists.masked_count[0], own, some)


def pages_of(view: KVView) -> PooledView:
  """The view of pages, if it is inside of another."""
  around: Any = view
  return view if isinstance(view, PooledView) else around.stored


def _rows_of_two(
  equation: str, k: Float[Array, "*b t H"], q: Float[Array, "*b n H"]
) -> Float[Array, "*b n t"]:
  """A product with two queries at least: one alone is summed otherwise."""
  if q.shape[-2] > 1:
    return product(equation, k, q)
  return product(equation, k, jnp.concatenate([q, q], -2))[..., :1, :]


def _weighted(
  equation: str,
  p: Float[Array, "*b n t"],
  v: Float[Array, "*b t J"],
  form: DTypeLike | None,
) -> Float[Array, "*b n J"]:
  """Sums of values by weights, transposed first; see `decode_pool`.

  `form` is the dtype in which they are multiplied, or None for their own.
  """
  many = p.shape[-2]
  if form is not None:
    p, v = p.astype(form), v.astype(form)
  if many == 1:
    p = jnp.concatenate([p, p], -2)
  p = lax.optimization_barrier(jnp.swapaxes(p, -1, -2))
  return product(equation, p, v)[..., :many, :]


def sharing_is_exact(
  shape: tuple[int, int, int, int, int],
  page: int,
  dtype: DTypeLike,
  platform: str,
  decode: Callable[..., Partial] | None = None,
  queries: int = 1,
) -> bool:
  """Whether a view's partial has the same bits with shared tiles and without.

  It tries both on the default device.

  Args:
    shape: rows, KV heads, queries of each, and the dims of keys and values.
    page: slots of a page.
    dtype: of queries, keys and values.
    platform: of the device.
    decode: what reads the view, called as `decode_pool`, e.g. a kernel; None:
      `decode_pool` for the platform.
    queries: tokens of a row in a call.
  """
  if decode is None:
    decode = functools.partial(decode_pool, platform=platform)
  rows, heads, groups, dim, value = shape
  block = pool_tile(page, platform)
  each = block // page
  draw = np.random.default_rng(0).standard_normal
  make = lambda *shape: jnp.asarray(draw(shape, np.float32), dtype)
  common = np.broadcast_to(np.arange(each), (rows, each))
  own = each + np.arange(rows * each).reshape(rows, each)
  table = jnp.asarray(np.concatenate([common, own], 1), jnp.int32)
  pos = np.broadcast_to(np.arange(2 * block), (rows, 2 * block))
  at = Coords(*(jnp.asarray(x, jnp.int32) for x in (pos, pos * 0 + 1)))
  q_at = Coords(at.pos[:, -queries:], at.seg[:, -queries:])
  pages = (rows + 1) * each
  k = make(1, pages, heads, page, dim)
  v = make(1, pages, heads, page, value)
  q = make(rows, heads, groups, queries, dim)
  args = ScoreArgs(
    Scores(scale=dim**-0.5), Terms(), Context(q_at, at, Causal())
  )

  @jax.jit
  def run(
    q: jax.Array, k: jax.Array, v: jax.Array, shared: SharedTiles
  ) -> Partial:
    view = PooledView(k, v, at, table, jnp.int32(0), shared=shared)
    return decode(q, view, args)

  def plan(count: int) -> SharedTiles:
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)
    return SharedTiles(
      ints(1, 1),
      ints(1, 1),
      jnp.ones((1, 1, rows), bool),
      ints(1) + count,
      ints(1, rows) + count,
    )

  both = [jax.device_get(run(q, k, v, plan(n))) for n in (0, 1)]
  return all(
    np.array_equal(np.asarray(x), np.asarray(y))
    for x, y in zip(*both, strict=True)
  )
