"""Pallas TPU kernel for the queries of prompts over pages of a pool.

Guarantees: equals `views.decode_attention` wherever it serves (`decline` says
where it does not), up to rounding; forward only. A query's sums are folded in
the order of slots, tile by tile, by instructions that do not depend on the
other queries and rows of the call.
Cost: each tile of queries reads the pages that one of its queries sees, in
place by their numbers; pages that none of them sees are not read. Tiles of a
plan (`pooled.SharedTiles`) are read once for the queries of all rows, where a
row has no more than a tile of them.
Memory: VMEM only: two tiles of pages, and the sums of a tile of queries.
Ref: Kwon et al. 2023, PagedAttention, arXiv 2309.06180; Dao et al. 2022,
FlashAttention, arXiv 2205.14135.

  grid [K / heads, (tile of a row's queries, tile of its pages)s]
  scores [slots, queries]    acc [heads, J, queries], m, l [heads, 1, queries]

A tile of queries has those of a group's heads, one head after another, in the
lanes: the largest score and the sums of a query run over whole registers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, PyTree

from ringjax.ops.attention.blockwise import pad_axis, tile_kinds
from ringjax.ops.attention.cached.code_format import CodeFormat
from ringjax.ops.attention.cached.pooled import PooledView, SharedTiles
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.kernels import (
  code_tiles,
  decoder_tpu,
  tile_ops,
)
from ringjax.ops.attention.kernels.code_tiles import CodeTile
from ringjax.ops.attention.kernels.decoder_tpu import PoolDecoderTPU
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import ScoreArgs, Scores
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Coords, visible
from ringjax.ops.softmax import Partial, finite_max
from ringjax.parallel import collectives
from ringjax.typing import Index

# Most queries of a tile, those of all heads of a group together.
_QUERIES = 512
# [s, a] [s, b] -> [a, b]
_TN = (((0,), (0,)), ((), ()))


class PrefillPoolTPU(PoolDecoderTPU):
  """A Pallas kernel for TPU for many queries of each row over pages."""

  def tile(
    self, q: Float[Array, "B K G T H"], keys: PooledView
  ) -> tuple[int, int, int]:
    """Choose (heads, slots, queries of a head) of a tile."""
    block = self.slots(keys)
    groups, tokens = q.shape[2:4]
    queries = min(tokens, max(1, _QUERIES // groups))
    vmem_bytes = tile_ops.core(self.chip).vmem_bytes
    heads = self.most_heads(
      q.shape[1],
      lambda n: _vmem(q, keys, n, block, queries) <= vmem_bytes // 2,
    )
    return heads, block, queries

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    reason = self.unserved_pages(keys, args)
    if reason is not None:
      return reason
    assert isinstance(keys, PooledView)
    if keys.decoders is not None:
      reason = code_tiles.undecoded(keys)
      if reason is not None:
        return reason
    heads, block, queries = self.tile(q, keys)
    rows = q.shape[0] * -(-q.shape[3] // queries)
    columns = -(-keys.shape[2] // block)
    steps = max(rows * columns, keys.table.size)
    if steps > tile_ops.MOST_STEPS or rows >= 1 << tile_ops.ROW_BITS:
      return f"{rows} x {columns} tiles: more than its list holds"
    return self.unserved(
      q,
      keys,
      args,
      length=keys.shape[2],
      block=block,
      need=_vmem(q, keys, heads, block, queries),
      numbers=(keys.k, keys.v) if keys.decoders is None else (),
    )

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Attention partial of q [B, K, G, T, H] over the keys of a view."""
    check_serves(self, q, keys, args)
    assert isinstance(keys, PooledView)
    carry, first = None, None
    if self._shares(q, keys):
      carry, first = self._shared_sums(q, keys, args), keys.shared
    call = _PromptCall.of(self, q, keys, args, after=first)
    acc, m, total = call.by_head(q, call.sums(q, carry))
    return Partial(acc, m * (1 / tile_ops.LOG2_E), total)

  def _shares(self, q: Float[Array, "B K G T H"], keys: PooledView) -> bool:
    """Whether tiles that rows share are read once for all of them."""
    if keys.shared is None or self.tile(q, keys)[2] < q.shape[3]:
      return False
    b, _, g, t, _ = q.shape
    tiles = -(-b * t // max(1, _QUERIES // g)) * keys.shared.row.shape[1]
    return tiles <= tile_ops.MOST_STEPS

  def _shared_sums(
    self, q: Float[Array, "B K G T H"], keys: PooledView, args: ScoreArgs
  ) -> tuple[jax.Array, ...]:
    """Sums of the shared tiles, as `_PromptCall.by_head` orders them.

    The queries of all rows are those of one row, whose tiles are the shared
    ones.
    """
    plan, (b, kv, g, t, h) = keys.shared, q.shape
    assert plan is not None
    flat_at = lambda x: jnp.broadcast_to(x, (b, t)).reshape(1, b * t)
    all_rows = args._replace(
      context=args.context._replace(q=Coords(*map(flat_at, args.context.q)))
    )
    queries = jnp.moveaxis(q, 0, 2).reshape(1, kv, g, b * t, h)
    call = _PromptCall.of(self, queries, keys, all_rows, of_plan=plan)
    sums = call.by_head(queries, call.sums(queries))

    def by_row(x: jax.Array) -> jax.Array:
      x = x[0].reshape(kv, g, b, t, *x.shape[4:])
      return jnp.moveaxis(x, 2, 0)

    return tuple(map(by_row, sums))


@dataclasses.dataclass(frozen=True)
class _PromptCall:
  """Operands of a call.

  Attributes:
    kernel: The kernel's options.
    keys: View of the pages.
    args: Score function and its arrays.
    heads: Heads of a tile.
    block: Slots of a tile.
    queries: Queries of a head in a tile.
    count: Tiles of queries of a row, n.
    at_q: Coordinates of the queries, int32 [B * n, 2, lanes].
    at_k: Coordinates of the slots, int32 [B, tiles, 2, block].
    steps: Tiles of queries and of slots that count.
    cover: Queries that each tile of slots is for, int32 [rows, n, 1, lanes],
      or None for all.
    places: Row and column of each tile of a plan, int32 [n] each, or None.
  """

  kernel: PrefillPoolTPU
  keys: PooledView
  args: ScoreArgs
  heads: int
  block: int
  queries: int
  count: int
  at_q: Int[Array, "rows 2 lanes"]
  at_k: Int[Array, "B tiles 2 block"]
  steps: tile_ops.TileSteps
  cover: Int[Array, "rows n 1 lanes"] | None = None
  places: tuple[Int[Array, " n"], Int[Array, " n"]] | None = None

  @classmethod
  def of(
    cls,
    kernel: PrefillPoolTPU,
    q: Float[Array, "B K G T H"],
    keys: PooledView,
    args: ScoreArgs,
    *,
    of_plan: SharedTiles | None = None,
    after: SharedTiles | None = None,
  ) -> _PromptCall:
    """Make the operands of a call.

    Args:
      kernel: The kernel's options.
      q: Queries.
      keys: View of the pages.
      args: Score function and its arrays.
      of_plan: Tiles of which the call reads each once, for the queries of all
        rows one after another; None: each row reads its own.
      after: Tiles that are left out, as their sums are carried in, or None.
    """
    heads, block, queries = kernel.tile(q, keys)
    (b, _, g, t, _), (rows_of_keys, _, slots, *_) = q.shape, keys.shape
    count, columns = -(-t // queries), -(-slots // block)
    # Coordinates that are added have segment 0, which sees and is seen by none.
    padded = lambda at, b, n: Coords(
      *(pad_axis(jnp.broadcast_to(x, (b, x.shape[1])), 1, n) for x in at)
    )
    at_q = padded(args.context.q, b, count * queries)
    at_k = padded(args.context.k, rows_of_keys, columns * block)
    lanes = tile_ops.lanes(g * queries)
    cover = None
    if of_plan is None:
      by_example = lambda x: jax.tree.map(lambda a: a[:, None], x)
      kinds = jax.vmap(
        lambda q, k: tile_kinds(args.context.mask, q, k, queries, block)
      )(by_example(at_q), by_example(at_k))
      kinds = kinds.reshape(b * count, columns)
    else:
      covered = jnp.repeat(of_plan.cover[0], t // rows_of_keys, 1)
      in_use = jnp.arange(covered.shape[0], dtype=jnp.int32)
      covered = covered & (in_use < of_plan.count[0])[:, None]
      covered = pad_axis(covered, 1, count * queries)
      covered = covered.reshape(-1, count, queries)
      covered = jnp.swapaxes(covered, 0, 1).astype(jnp.int32)
      kinds = jnp.max(covered, 2)
      cover = pad_axis(jnp.tile(covered, (1, 1, g)), 2, lanes)[:, :, None]
    if after is not None:
      index = jnp.arange(columns, dtype=jnp.int32)[None]
      unshared = index >= jnp.repeat(after.shared_counts[0], count)[:, None]
      kinds = jnp.where(unshared, kinds, 0)
    # A tile whose queries see nothing has a step that computes nothing, and
    # writes the sums that it began with.
    nothing = ~jnp.any(kinds != 0, 1)
    kinds = kinds.at[:, 0].set(jnp.where(nothing, 3, kinds[:, 0]))
    kinds = kinds.astype(jnp.int8)
    rows = jnp.stack([x.reshape(b * count, queries) for x in at_q], 1)
    rows = pad_axis(jnp.tile(rows, (1, 1, g)), 2, lanes)
    return cls(
      kernel,
      keys,
      args,
      heads,
      block,
      queries,
      count,
      rows,
      jnp.stack([x.reshape(-1, columns, block) for x in at_k], 2),
      tile_ops.TileSteps.of(kinds),
      cover,
      None if of_plan is None else (of_plan.row[0], of_plan.tile[0]),
    )

  def by_head(
    self, q: Float[Array, "B K G T H"], sums: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    """Sums [B, K, G, T, ...] of those of tiles of queries, see `sums`."""
    b, kv, g, t, _ = q.shape

    def ordered(x: jax.Array, *last: int) -> jax.Array:
      """[B * n, K, G * queries, ...] -> [B, K, G, T, ...]."""
      x = x[:, :, : g * self.queries]
      x = x.reshape(b, self.count, kv, g, self.queries, *last)
      x = jnp.moveaxis(x, 1, 3).reshape(b, kv, g, -1, *last)
      return x[:, :, :, :t]

    acc, m, total = sums
    return (
      ordered(acc, acc.shape[-1]),
      ordered(m[:, :, 0]),
      ordered(total[:, :, 0]),
    )

  def _carried(
    self, q: Float[Array, "B K G T H"], carry: tuple[jax.Array, ...]
  ) -> list[jax.Array]:
    """Sums as `by_head` orders them, of rows of one tile, as operands."""
    (b, kv, g, t, _), lanes = q.shape, self.at_q.shape[2]
    acc, m, total = (x.reshape(b, kv, g * t, *x.shape[4:]) for x in carry)
    flat = (pad_axis(x, 2, lanes)[:, :, None] for x in (m, total))
    return [pad_axis(acc, 2, lanes), *flat]

  @property
  def pages_per_tile(self) -> int:
    """Number of pages of a tile."""
    return self.block // self.keys.page

  def sums(
    self,
    q: Float[Array, "B K G T H"],
    carry: tuple[jax.Array, ...] | None = None,
  ) -> tuple[jax.Array, ...]:
    """Sums of the tiles of queries.

    Args:
      q: Queries.
      carry: Sums of earlier tiles, as `by_head` orders them, or None.

    Returns:
      Weighted values [B * n, K, lanes, J], the largest scores to base 2 and the
      sums of weights [B * n, K, 1, lanes].
    """
    keys, context = self.keys, self.args.context
    coded = keys.decoders is not None
    carried = [] if carry is None else self._carried(q, carry)
    if not coded:
      q = pad_axis(q, 4, keys.k.shape[4])
    b, kv, g, _, h = q.shape
    j, lanes = _widths(keys)[1], self.at_q.shape[2]
    tile_pages, count = self.pages_per_tile, self.count
    tiles = pad_axis(q, 3, count * self.queries)
    tiles = tiles.reshape(b, kv, g, count, self.queries, h)
    tiles = jnp.moveaxis(tiles, 3, 1).reshape(b * count, kv, -1, h)
    tiles = pad_axis(tiles, 2, lanes)
    if coded:
      # Decoded keys have slots in the lanes: both sides are turned around.
      tiles = jnp.swapaxes(tiles, 2, 3)
    tables = code_tiles.level_tables(keys)
    table_operands = [x for x in tables if x is not None]
    columns = self.at_k.shape[1]
    # Missing pages all become page 0.
    table = pad_axis(
      jnp.maximum(keys.table, 0), 1, columns * tile_pages
    ).reshape(-1)
    leaves, structure = jax.tree.flatten(context.mask)
    scalars = (
      jnp.asarray(keys.layer, jnp.int32).reshape(1),
      table,
      self.steps.words,
      *(jnp.asarray(x, jnp.int32).reshape(1) for x in leaves),
      *(self.places or ()),
    )
    of_plan = self.places is not None
    row = lambda i, words: tile_ops.row_of(words[i])
    column = lambda i, words: tile_ops.column_of(words[i])

    def slots_at(
      i: Index, words: Ref, rest: tuple[Ref, ...]
    ) -> tuple[Any, Any]:
      """(row, column) of a step's tile of slots."""
      if not of_plan:
        return row(i, words) // count, column(i, words)
      plan_rows, plan_columns = rest[len(leaves) : len(leaves) + 2]
      return plan_rows[column(i, words)], plan_columns[column(i, words)]

    def page_at(
      n: int,
      ki: Index,
      i: Index,
      layer: Ref,
      table: Ref,
      words: Ref,
      *rest: Ref,
    ) -> tuple[Any, ...]:
      example, tile = slots_at(i, words, rest)
      return layer[0], table[(example * columns + tile) * tile_pages + n], ki

    of_queries = lambda ki, i, layer, table, words, *_: (
      row(i, words),
      ki,
      0,
      0,
    )

    specs, pages = decoder_tpu.page_operands(
      keys,
      self.heads,
      self.block,
      page_at,
    )
    out_type = lambda *shape: collectives.out_type(
      (b * count, kv, *shape), jnp.float32, q, keys, self.args.terms, context
    )
    need = _vmem(q, keys, self.heads, self.block, self.queries)
    sums_specs = [
      pl.BlockSpec((1, self.heads, lanes, j), of_queries),
      *[pl.BlockSpec((1, self.heads, 1, lanes), of_queries)] * 2,
    ]
    return tuple(
      pl.pallas_call(
        functools.partial(
          _kernel,
          self.args.scores,
          structure,
          tile_pages,
          code_tiles.formats(keys),
          tuple(x is not None for x in tables),
          self.cover is not None,
          bool(carried),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars),
          grid=(kv // self.heads, self.steps.count),
          in_specs=[
            pl.BlockSpec((1, self.heads, *tiles.shape[2:]), of_queries),
            pl.BlockSpec(
              (1, 2, lanes),
              lambda ki, i, layer, table, words, *_: (row(i, words), 0, 0),
            ),
            pl.BlockSpec(
              (1, 1, 2, self.block),
              lambda ki, i, layer, table, words, *rest: (
                *slots_at(i, words, rest),
                0,
                0,
              ),
            ),
            *[
              pl.BlockSpec(
                (1, 1, 1, lanes),
                lambda ki, i, layer, table, words, *_: (
                  row(i, words),
                  column(i, words),
                  0,
                  0,
                ),
              )
            ]
            * (self.cover is not None),
            *(sums_specs if carried else ()),
            *specs,
            *(self._table_spec(x) for x in table_operands),
          ],
          out_specs=sums_specs,
          scratch_shapes=[
            pltpu.VMEM((self.heads, j, lanes), jnp.float32),
            pltpu.VMEM((self.heads, 1, lanes), jnp.float32),
            pltpu.VMEM((self.heads, 1, lanes), jnp.float32),
          ],
        ),
        out_shape=[out_type(lanes, j), out_type(1, lanes), out_type(1, lanes)],
        compiler_params=self.kernel.params(need, "parallel", "arbitrary"),
        cost_estimate=self._cost(q),
        interpret=self.kernel.interpret,
        name="ringjax_prefill_pool",
      )(
        *scalars,
        tiles,
        self.at_q,
        self.at_k,
        *(() if self.cover is None else (self.cover,)),
        *carried,
        *pages,
        *table_operands,
      )
    )

  def _table_spec(self, table: Float[Array, "_ M 128"]) -> pl.BlockSpec:
    """Block spec of levels, which are per head or common to all heads."""
    per_head = table.shape[0] > 1
    return pl.BlockSpec(
      (self.heads if per_head else 1, *table.shape[1:]),
      lambda ki, *_: (ki if per_head else 0, 0, 0),
    )

  def _cost(self, q: jax.Array) -> pl.CostEstimate:
    """Cost of half of all tiles, as of prompts that are read from the start."""
    b, kv, g, t, _ = q.shape
    slots = self.keys.shape[2]
    pairs = b * kv * g * t * slots // 2
    reads = b * self.count * kv * slots // 2
    flops = 2 * pairs * sum(_widths(self.keys))
    return pl.CostEstimate(
      flops=flops,
      transcendentals=pairs,
      bytes_accessed=reads * decoder_tpu.slot_bytes(self.keys),
    )


def _widths(keys: PooledView) -> tuple[int, int]:
  """Elements of a key and of a value in a product."""
  if keys.decoders is not None:
    return keys.dims
  return keys.k.shape[4], keys.v.shape[4]


def _vmem(
  q: jax.Array, keys: PooledView, heads: int, block: int, queries: int
) -> int:
  """Approximate bytes of vector memory that a step takes."""
  lanes = tile_ops.lanes(q.shape[2] * queries)
  h, j = map(tile_ops.lanes, _widths(keys))
  slot = decoder_tpu.slot_bytes(keys)
  # Inputs and outputs are double-buffered for the next step.
  in_flight = heads * (block * slot + lanes * (h * q.dtype.itemsize + 4 * j))
  if keys.shared is not None:
    # Sums of shared tiles.
    in_flight += 4 * heads * lanes * (j + 2 * 8)
  scratch = 4 * heads * lanes * (j + 2 * 8)
  if keys.decoders is not None:
    # A head's codes and numbers, 4 bytes each.
    scratch += 2 * 4 * block * (h + j)
  return 2 * in_flight + scratch + 2 * block * slot + 4 * 4 * lanes * block


def _kernel(
  scores: Scores,
  structure: PyTree,
  pages_per_tile: int,
  formats: tuple[CodeFormat, ...],
  looked_up: tuple[bool, ...],
  covers: bool,
  carries: bool,
  *refs: Any,
) -> None:
  first = 3 + structure.num_leaves + 2 * covers
  words, leaves = refs[2], refs[3 : 3 + structure.num_leaves]
  q_ref, q_at, k_at, *pages = refs[first:-6]
  cover = pages.pop(0) if covers else None
  carry, pages = pages[: 3 * carries], pages[3 * carries :]
  table_refs = [pages.pop() for present in looked_up if present][::-1]
  tables = [table_refs.pop(0) if present else None for present in looked_up]
  acc_out, m_out, l_out, acc, m_ref, l_ref = refs[-6:]
  word = words[pl.program_id(1)]

  @pl.when(word & tile_ops.FIRST != 0)
  def _() -> None:
    if carries:
      acc_in, m_in, l_in = carry
      for head in range(acc.shape[0]):
        acc[head] = acc_in[0, head].T
      m_ref[...], l_ref[...] = m_in[0], l_in[0]
      return
    acc[...] = jnp.zeros_like(acc)
    m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
    l_ref[...] = jnp.zeros_like(l_ref)

  def fold_tile(masked: bool) -> None:
    allowed: Any = None
    if masked:
      mask = jax.tree.unflatten(structure, [ref[0] for ref in leaves])
      queries = Coords(q_at[0, 0:1, :], q_at[0, 1:2, :])
      slots = Coords(
        *(tile_ops.column(k_at[0, 0, n : n + 1, :]) for n in (0, 1))
      )
      allowed = visible(mask, queries, slots)
      if cover is not None:
        allowed = allowed & (cover[0, 0] > 0)
    decoded_tiles = [
      CodeTile.of(
        pages[n * pages_per_tile : (n + 1) * pages_per_tile],
        tables[n],
        form,
        # A non-finite scale of keys alone reaches the scores by itself.
        clean=masked and n == len(formats) - 1,
      )
      for n, form in enumerate(formats)
    ]
    for head in range(acc.shape[0]):
      q = q_ref[0, head]
      flags: Any = None
      if decoded_tiles:
        k = decoded_tiles[0].numbers(head, q.dtype)
        v = k if len(formats) == 1 else decoded_tiles[1].numbers(head, q.dtype)
        if masked:
          flags = decoded_tiles[-1].flag(head)
        dot = tile_ops.dot(k, q, _TN)
      else:
        k, v = decoder_tpu.join_pages(pages, pages_per_tile, head, q.dtype)
        if masked:
          v, flags = tile_ops.cleaned(v)
        dot = tile_ops.dot(k, q, tile_ops.NT)
      s, c = tile_ops.power(scores, dot, None, decoder_tpu.no_distances)
      if masked:
        s = jnp.where(allowed, s + tile_ops.column(flags), -jnp.inf)
      old_m = m_ref[head]
      m = jnp.maximum(old_m, jnp.max(s, axis=0, keepdims=True) * c)
      safe = finite_max(m)
      p = jnp.exp2(s * c - safe)
      weight = jnp.exp2(old_m - safe)
      l_ref[head] = l_ref[head] * weight + jnp.sum(p, axis=0, keepdims=True)
      m_ref[head] = m
      product = tile_ops.dot(
        v, p.astype(v.dtype), tile_ops.NN if decoded_tiles else _TN
      )
      acc[head] = acc[head] * weight + product

  pl.when(word & tile_ops.MASKED != 0)(lambda: fold_tile(True))
  pl.when(word & tile_ops.FULL != 0)(lambda: fold_tile(False))

  @pl.when(word & tile_ops.LAST != 0)
  def _() -> None:
    for head in range(acc.shape[0]):
      acc_out[0, head] = acc[head].T
    m_out[0] = m_ref[...]
    l_out[0] = l_ref[...]
