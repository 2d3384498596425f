"""Attention in the order in which an engine's answers read their pages.

Guarantees: keys are folded in the order, tiles and products of `decode_pool`
for a row with the same keys in its pages, whatever the number of queries of the
call: a training's forward pass, a chunk of a prompt and an answer's next token
are the same numbers, where the compiler sums a product of at most 32 queries in
one order. The gradient is that of `Blockwise`.
Cost: as `Blockwise`, with tiles of 128 keys on a CPU, all of them with a mask.
Memory: one tile of scores for a block of queries.

Tiles of keys begin at multiples of their size and are folded in ascending
order; a tile that a query does not see leaves its partial as it is. So the
first token of a document has to be the first one of its row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import (
  Blockwise,
  Local,
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  pad_axis,
  pad_coords,
  pad_operands,
  tile_kinds,
  tile_lists,
)
from ringjax.ops.attention.cached.pooled import (
  decode_pool,
  pages_of,
  pool_tile,
  two_row_product,
  weighted_sum,
)
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.scores import FORWARD, ScoreArgs, ScoreTile
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.typing import Index

# Most queries of a product: XLA's CPU compiler sums those of more in another
# order.
_QUERIES = 32
# Slots of the smallest page, of which a tile has a whole number.
_PAGE = 16


@dataclasses.dataclass(frozen=True)
class PoolOrder(Blockwise):
  """Local algorithm that folds keys as `decode_pool` does.

  Attributes:
    platform: Platform whose tile sizes are used.
  """

  platform: str = "cpu"

  def on_device(
    self, platform: str, kind: str, alone: bool = True
  ) -> PoolOrder:
    """Specialize to a device, as `Blockwise.on_device` does."""
    blockwise = super().on_device(platform, kind, alone)
    return dataclasses.replace(self, wide=blockwise.wide, platform=platform)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these keys into `carry`, see `Blockwise.forward`."""
    block, length = pool_tile(_PAGE, self.platform), x.q.shape[3]
    width = _width(x.q)
    x, args = pad_operands(x, args, width, block)
    carry = Partial(*(pad_axis(c, 3, x.q.shape[3]) for c in carry))
    batch = x.q.shape[0]

    def row(n: Index, carry: Partial) -> Partial:
      of_row = lambda a: (
        lax.dynamic_slice_in_dim(a, n, 1, 0)
        if jnp.ndim(a) and a.shape[0] == batch
        else a
      )
      row_x, context = Local(*map(of_row, x)), args.context
      row_args = args._replace(
        context=context._replace(
          q=Coords(*map(of_row, context.q)),
          k=Coords(*map(of_row, context.k)),
          mask=jax.tree.map(of_row, context.mask),
        )
      )

      def tile(start: Index) -> tuple[jax.Array, jax.Array]:
        cut = lambda a: lax.dynamic_slice_in_dim(a, start, block, 2)
        return cut(row_x.k), cut(row_x.v)

      row_carry = Partial(*map(of_row, carry))
      new = self._fold(row_x.q, tile, row_args, row_carry, width, block)
      return Partial(
        *(
          lax.dynamic_update_slice_in_dim(c, part, n, 0)
          for c, part in zip(carry, new, strict=True)
        )
      )

    # One row at a time: the compiler sums and rounds large arrays otherwise.
    terms = args.terms
    plain = terms.bias is None and terms.slopes is None
    if args.context.allow is not None or args.context.seed is not None:
      plain = False
    if not plain:
      # Terms of pairs are not cut by row.
      partial = super().forward(x, args, carry)
      return Partial(*(c[:, :, :, :length] for c in partial))
    partial = loop(batch, row, carry)
    return Partial(*(c[:, :, :, :length] for c in partial))

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Partial of queries over the pages of their rows."""
    if getattr(keys, "shared", None) is not None:
      return decode_pool(q, keys, args, self.platform)
    block, length = pool_tile(pages_of(keys).page, self.platform), q.shape[3]
    width = _width(q)
    padded = -(-length // width) * width
    context = args.context
    at = pad_coords(context.q, padded)
    args = args._replace(context=context._replace(q=at))
    q = pad_axis(q, 3, padded)
    dtype = wide_dtype(q.dtype)
    start = Partial.empty(q.shape[:4], keys.shape[4], dtype, (q, keys))
    tile = lambda first: keys.tile(first, block)
    partial = self._fold(q, tile, args, start, width, block)
    return Partial(*(c[:, :, :, :length] for c in partial))

  def _fold(
    self,
    q: Float[Array, "B K G T H"],
    tile: Any,
    args: ScoreArgs,
    carry: Partial,
    width: int,
    block: int,
  ) -> Partial:
    """Fold all tiles of keys, `width` queries of each row at a time.

    Args:
      q: Queries, a multiple of `width`.
      tile: Function from a first slot to `block` keys and values.
      args: Score function, whose keys are a multiple of `block`.
      carry: Partial of the queries over other keys.
      width: Number of queries that are folded together.
      block: Number of keys of a tile.
    """
    context = args.context
    batch, heads, groups = q.shape[:3]
    rows = groups * width
    kinds = tile_kinds(context.mask, context.q, context.k, width, block)
    lists = tile_lists(kinds, masked=True)
    # As in `decode_pool`.
    product_dtype = wide_dtype(q.dtype) if self.platform == "cpu" else None
    cast = lambda a: a if product_dtype is None else a.astype(product_dtype)

    def block_of_queries(i: Index, carry: Partial) -> Partial:
      cut = lambda a: lax.dynamic_slice_in_dim(a, i * width, width, 3)
      flat = cast(cut(q).reshape(batch, heads, rows, -1))
      q_at = cut_coords(context.q, i * width, width)

      def step(n: Index, partial: Partial) -> Partial:
        first = lists.masked[i, n] * block
        k, v = tile(first)
        s = two_row_product("bkth,bknh->bknt", cast(k.astype(q.dtype)), flat)
        s = s.reshape(batch, heads, groups, width, block)

        def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
          p = p.reshape(batch, heads, rows, block)
          acc = weighted_sum("bktn,bktj->bknj", p, v, product_dtype)
          return acc.reshape(batch, heads, groups, width, -1)

        k_at = cut_coords(context.k, first, block)
        score_tile = ScoreTile(args, FORWARD, i * width, first, q_at, k_at)
        flag = finite_flag(v, s.dtype)
        return fold_tile(score_tile, s, v, flag, partial, weigh)

      partial = Partial(*map(cut, carry))
      partial = loop(lists.masked_count[i], step, partial)
      return Partial(
        *(
          lax.dynamic_update_slice_in_dim(c, new, i * width, 3)
          for c, new in zip(carry, partial, strict=True)
        )
      )

    blocks = q.shape[3] // width
    if blocks == 1:
      return block_of_queries(jnp.int32(0), carry)
    return loop(blocks, block_of_queries, carry)


def _width(q: Float[Array, "B K G T H"]) -> int:
  """Number of queries of a row that are folded together."""
  return min(max(1, _QUERIES // q.shape[2]), q.shape[3])
