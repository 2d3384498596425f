"""Pallas TPU kernel for decode attention over pages that rows share.

Guarantees: equals `pooled.decode_pool` wherever it serves (`decline` says
where it does not), up to rounding; forward only. A tile is folded by the same
instructions whether it is shared or not, in the order of slots.
Cost: a shared tile is read once, and multiplied with the queries of all rows
as one matrix; each row reads its other tiles by itself. Pages are read in
place by their indices, and only those that a row has.
Memory: VMEM only: two tiles of pages, and the sums of all rows.
Ref: Ye et al. 2024, ChunkAttention, arXiv 2402.15220; Kwon et al. 2023,
PagedAttention, arXiv 2309.06180.

  shared tiles  grid [K / heads, tiles]         acc [heads, B G T, J], m, l
  row's tiles   grid [K / heads, (row, tile)s]  acc [heads, G T, J], m, l

The second kernel continues with the sums of the first. Each page of a tile is
a separate operand, so that the pipeline loads all of them at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.ops.attention.blockwise import pad_axis
from ringjax.ops.attention.cached.pooled import PooledView
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.kernels import decoder_tpu, tile_ops
from ringjax.ops.attention.kernels.decoder_tpu import PoolDecoderTPU
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import ScoreArgs, Scores
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import Partial, finite_max
from ringjax.parallel import collectives

# Most bytes of a tile's keys and values, see `decode_tpu`.
_TILE_BYTES = 2 << 20
# Most queries of a row, those of a group's heads together, if there are several
# of each head.
_MOST_QUERIES = 128
# Rows of a register of float32, and of one of bfloat16.
_ROWS, _SUBLANES = 8, 16


class DecodePoolTPU(PoolDecoderTPU):
  """A Pallas kernel for TPU for decode attention over shared pages.

  Its tiles are those of the view's plan, of `pool_tile` slots unless
  `kv_block` says otherwise.
  """

  def tile(
    self, q: Float[Array, "B K G T H"], keys: PooledView
  ) -> tuple[int, int]:
    """Choose (heads, slots) of a tile for queries [B, K, G, T, H]."""
    block = self.slots(keys)
    row, vmem_bytes = (
      block * decoder_tpu.slot_bytes(keys),
      tile_ops.core(self.chip).vmem_bytes,
    )
    heads = self.most_heads(
      q.shape[1],
      lambda n: (
        n * row <= _TILE_BYTES and _vmem(q, keys, n, block) <= vmem_bytes // 2
      ),
    )
    return heads, block

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    reason = self.unserved_pages(keys, args)
    if reason is not None:
      return reason
    assert isinstance(keys, PooledView)
    if keys.decoders is not None:
      return "pages of codes: it reads numbers"
    if keys.shared is None:
      return "a view without a plan of shared tiles"
    if q.shape[3] > 1 and q.shape[2] * q.shape[3] > _MOST_QUERIES:
      return (
        f"{q.shape[2]} x {q.shape[3]} queries of a row: at most {_MOST_QUERIES}"
      )
    heads, block = self.tile(q, keys)
    if keys.table.size * keys.page // block > tile_ops.MOST_STEPS:
      return f"{keys.table.size} pages of all rows: more than its list holds"
    return self.unserved(
      q,
      keys,
      args,
      length=keys.shape[2],
      block=block,
      need=_vmem(q, keys, heads, block),
      numbers=(keys.k, keys.v),
    )

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Attention partial of q [B, K, G, T, H]; see `pooled.decode_pool`."""
    check_serves(self, q, keys, args)
    assert isinstance(keys, PooledView)
    call = _PoolCall.of(self, q, keys, args)
    carry = call.fold_shared_tiles(q) if shares(keys) else call.empty_sums(q)
    acc, m, total = call.fold_row_tiles(q, carry)
    b, kv, g, t, _ = q.shape
    unflatten = lambda x: x[:, :, : g * t].reshape(b, kv, g, t, *x.shape[3:])
    m = m[..., 0] * (1 / tile_ops.LOG2_E)
    return Partial(unflatten(acc), unflatten(m), unflatten(total[..., 0]))


@dataclasses.dataclass(frozen=True)
class _PoolCall:
  """Operands that both kernels of a call have in common.

  Attributes:
    kernel: The kernel's options.
    keys: View of the pages.
    args: Score function and its arrays.
    heads: Heads of a tile.
    block: Slots of a tile.
    leaves: Arrays of the mask, int32 [1] each.
    table: Page indices, int32 [B, tiles * pages of a tile], none below 0.
    at: Coordinates of the slots, int32 [B, tiles, 2, block].
  """

  kernel: DecodePoolTPU
  keys: PooledView
  args: ScoreArgs
  heads: int
  block: int
  leaves: tuple[Any, ...]
  table: Int[Array, "B _"]
  at: Int[Array, "B tiles 2 block"]

  @classmethod
  def of(
    cls,
    kernel: DecodePoolTPU,
    q: Float[Array, "B K G T H"],
    keys: PooledView,
    args: ScoreArgs,
  ) -> _PoolCall:
    heads, block = kernel.tile(q, keys)
    b, slots = q.shape[0], keys.shape[2]
    columns = -(-slots // block)
    broadcast = [jnp.broadcast_to(x, (b, slots)) for x in args.context.k]
    at = [
      pad_axis(x, 1, columns * block).reshape(b, columns, block)
      for x in broadcast
    ]
    # Missing pages all become page 0, which is then not read again at each
    # step.
    table = jnp.maximum(keys.table, 0)
    return cls(
      kernel,
      keys,
      args,
      heads,
      block,
      tuple(
        jnp.asarray(x, jnp.int32).reshape(1)
        for x in jax.tree.leaves(args.context.mask)
      ),
      pad_axis(table, 1, columns * (block // keys.page)),
      jnp.stack(at, 2),
    )

  @property
  def pages_per_tile(self) -> int:
    """Number of pages of a tile."""
    return self.block // self.keys.page

  def pages(
    self,
  ) -> tuple[list[pl.BlockSpec], list[Shaped[Array, "L N K P _"]]]:
    """Return (BlockSpecs, arrays) of a tile's pages, indexed by scalars."""
    size = self.pages_per_tile
    return decoder_tpu.page_operands(
      self.keys,
      self.heads,
      self.block,
      lambda n, ki, i, layer, pages, *_: (layer[0], pages[i * size + n], ki),
    )

  def out_type(self, *shape: int) -> jax.ShapeDtypeStruct:
    return collectives.out_type(
      shape,
      jnp.float32,
      self.keys.k,
      self.keys.v,
      self.table,
      self.args.context,
    )

  def params(self, q: jax.Array) -> Any:
    need = _vmem(q, self.keys, self.heads, self.block)
    return self.kernel.params(need, "parallel", "arbitrary")

  def cost(self, q: jax.Array, tiles: int) -> pl.CostEstimate:
    nbytes = tiles * self.block * q.shape[1] * decoder_tpu.slot_bytes(self.keys)
    return self.kernel.cost(nbytes, q.size // q.shape[4] * tiles * self.block)

  @property
  def static(self) -> tuple[Any, ...]:
    structure = jax.tree.structure(self.args.context.mask)
    return self.args.scores, structure, self.pages_per_tile

  def empty_sums(self, q: Float[Array, "B K G T H"]) -> tuple[Any, ...]:
    """Sums of no tile, [B, K, G * T up to 8, ...]."""
    b, kv, g, t, _ = q.shape
    rows = _round_up(g * t, _ROWS)
    sizes = (self.keys.shape[4], tile_ops.LANES, tile_ops.LANES)
    sums = zip(sizes, (0.0, -jnp.inf, 0.0), strict=True)
    return tuple(
      collectives.full((b, kv, rows, size), value, jnp.float32, (q, self.keys))
      for size, value in sums
    )

  def fold_shared_tiles(self, q: Float[Array, "B K G T H"]) -> tuple[Any, ...]:
    """Sums of the shared tiles, [B, K, G * T up to 8, ...]."""
    plan, (b, kv, g, t, h) = self.keys.shared, q.shape
    assert plan is not None
    j = self.keys.shape[4]
    row_queries = g * t
    rows = _round_up(b * row_queries, _SUBLANES)
    flat = jnp.swapaxes(q.reshape(b, kv, row_queries, h), 0, 1)
    flat = pad_axis(flat.reshape(kv, b * row_queries, h), 1, rows)
    by_query = lambda x: jnp.repeat(x, row_queries, 0)
    at_queries = tile_ops.by_row(self.args.context.q, q.shape)
    q_at = jnp.stack([x.reshape(-1) for x in at_queries], 1)
    row, tile, count = plan.row[0], plan.tile[0], plan.count[0]
    n = row.shape[0]
    offsets = jnp.arange(self.pages_per_tile, dtype=jnp.int32)[None]
    numbers = tile[:, None] * self.pages_per_tile + offsets
    pages = self.table[row[:, None], numbers].reshape(-1)
    # The rows that a tile is for: a lane of each query's register per tile.
    cover = by_query(jnp.swapaxes(plan.cover[0], 0, 1).astype(jnp.int32))
    cover = pad_axis(pad_axis(cover, 0, rows), 1, tile_ops.lanes(n))
    layer = jnp.asarray(self.keys.layer, jnp.int32).reshape(1)
    scalars = (layer, pages, row, tile, count.reshape(1), *self.leaves)
    specs, arrays = self.pages()
    heads_block = lambda ki, i, *_: (ki, 0, 0)
    all_rows = lambda ki, i, *_: (0, 0)
    at = lambda ki, i, layer, pages, row, tile, *_: (row[i], tile[i], 0, 0)
    sizes = (j, tile_ops.LANES, tile_ops.LANES)
    sums = pl.pallas_call(
      functools.partial(_shared_kernel, *self.static),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(kv // self.heads, jnp.maximum(count, 1)),
        in_specs=[
          pl.BlockSpec((self.heads, rows, h), heads_block),
          pl.BlockSpec((rows, 2), all_rows),
          pl.BlockSpec(cover.shape, all_rows),
          pl.BlockSpec((1, 1, 2, self.block), at),
          *specs,
        ],
        out_specs=[
          pl.BlockSpec((self.heads, rows, n), heads_block) for n in sizes
        ],
      ),
      out_shape=[self.out_type(kv, rows, n) for n in sizes],
      compiler_params=self.params(q),
      cost_estimate=self.cost(q, n),
      interpret=self.kernel.interpret,
      name="ringjax_decode_shared",
    )(
      *scalars, flat, pad_axis(q_at, 0, rows), cover, self.at, *arrays
    )  # fmt: skip

    def by_row(x: jax.Array) -> jax.Array:
      x = x[:, : b * row_queries].reshape(kv, b, row_queries, -1)
      return pad_axis(jnp.swapaxes(x, 0, 1), 2, _round_up(row_queries, _ROWS))

    return tuple(map(by_row, sums))

  def fold_row_tiles(
    self, q: Float[Array, "B K G T H"], carry: tuple[Any, ...]
  ) -> tuple[Any, ...]:
    """Fold each row's tiles that are not shared into the sums."""
    plan, (b, kv, g, t, h) = self.keys.shared, q.shape
    assert plan is not None
    columns, rows = self.at.shape[1], carry[0].shape[2]
    # The tiles in which each row sees a slot.
    context = self.args.context
    q_at = Coords(*(jnp.broadcast_to(x, (b, t))[:, :, None] for x in context.q))
    k_at = Coords(*(self.at[:, :, n].reshape(b, 1, -1) for n in (0, 1)))
    pairs = visible(context.mask, q_at, k_at)
    pairs = jnp.broadcast_to(pairs, (b, t, columns * self.block))
    pairs = pairs.reshape(b, t, columns, self.block)
    needed, full = jnp.any(pairs, (1, 3)), jnp.all(pairs, (1, 3))
    tile_index = jnp.arange(columns, dtype=jnp.int32)[None]
    needed = needed & (tile_index >= plan.shared_counts[0][:, None])
    kinds = jnp.where(needed, jnp.where(full, 2, 1), 0).astype(jnp.int8)
    steps = tile_ops.TileSteps.of(kinds)
    words = steps.words
    row, column = tile_ops.row_of(words), tile_ops.column_of(words)
    offsets = jnp.arange(self.pages_per_tile, dtype=jnp.int32)[None]
    numbers = column[:, None] * self.pages_per_tile + offsets
    pages = self.table[row[:, None], numbers].reshape(-1)
    layer = jnp.asarray(self.keys.layer, jnp.int32).reshape(1)
    scalars = (layer, pages, words, *self.leaves)
    specs, arrays = self.pages()
    row_block = lambda ki, i, layer, pages, words, *_: (
      tile_ops.row_of(words[i]), ki, 0, 0,
    )  # fmt: skip
    at = lambda ki, i, layer, pages, words, *_: (
      tile_ops.row_of(words[i]), tile_ops.column_of(words[i]), 0, 0,
    )  # fmt: skip
    of_row_queries = lambda ki, i, layer, pages, words, *_: (
      tile_ops.row_of(words[i]), 0, 0,
    )  # fmt: skip
    spec = lambda x: pl.BlockSpec((1, self.heads, *x.shape[2:]), row_block)
    operand = pad_axis(q.reshape(b, kv, g * t, h), 2, rows)
    # Where all queries of a row have one position, it is two scalars.
    scalars += tuple(_per_row(x, b) for x in context.q) if t == 1 else ()
    several_at = []
    if t > 1:
      by_row = jnp.stack(tile_ops.by_row(context.q, q.shape), 2)
      several_at = [pad_axis(by_row, 1, rows)]
    operands = [operand, self.at, *several_at]
    return tuple(
      pl.pallas_call(
        functools.partial(_row_kernel, *self.static, t == 1),
        grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars),
          grid=(kv // self.heads, steps.count),
          in_specs=[
            spec(operand),
            pl.BlockSpec((1, 1, 2, self.block), at),
            *(pl.BlockSpec((1, rows, 2), of_row_queries) for _ in several_at),
            *map(spec, carry),
            *specs,
          ],
          out_specs=[*map(spec, carry)],
        ),
        out_shape=[self.out_type(*x.shape) for x in carry],
        # Rows with shared tiles only keep their sums.
        input_output_aliases={
          len(scalars) + len(operands) + n: n for n in range(3)
        },
        compiler_params=self.params(q),
        cost_estimate=self.cost(q, b * columns),
        interpret=self.kernel.interpret,
        name="ringjax_decode_own",
      )(*scalars, *operands, *carry, *arrays)
    )


def shares(keys: PooledView) -> bool:
  """Whether rows may share tiles, by the shapes of the plan."""
  return keys.shared is not None and keys.shared.row.shape[1] > 0


def _per_row(x: Int[Array, "b 1"], rows: int) -> Int[Array, " B"]:
  return jnp.broadcast_to(x[:, 0], (rows,))


def _round_up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple


def _vmem(q: jax.Array, keys: PooledView, heads: int, block: int) -> int:
  """Approximate bytes of vector memory that a step takes."""
  batch = q.shape[0] if shares(keys) else 1
  rows = _round_up(batch * q.shape[2] * q.shape[3], _SUBLANES)
  tiles = 0 if keys.shared is None else keys.shared.cover.shape[1]
  h, j = (tile_ops.lanes(n) for n in keys.shape[3:])
  # Inputs and outputs are double-buffered for the next step.
  in_flight = heads * block * decoder_tpu.slot_bytes(keys)
  in_flight += 4 * heads * rows * (h + j + 2 * tile_ops.LANES)
  gathered = 2 * block * decoder_tpu.slot_bytes(keys)
  # Queries' positions, and which shared tiles a row reads.
  in_flight += 4 * rows * (tile_ops.LANES + tile_ops.lanes(tiles))
  return 2 * in_flight + gathered + 4 * 4 * rows * block


def _fold(
  scores: Scores,
  q_ref: Ref,
  pages: Sequence[Any],
  pages_per_tile: int,
  sums: tuple[Any, ...],
  allowed: Bool[Array, "#n s"] | None,
  seen: Bool[Array, "s 1"] | None = None,
) -> None:
  """Fold a tile into the sums, references [heads, n, ...].

  Finite numbers have the same bits whatever the masks are.

  Args:
    scores: Score function.
    q_ref: Queries of each head.
    pages: Pages of keys and of values.
    pages_per_tile: Number of pages of a tile.
    sums: References to the sums.
    allowed: Slots that each query sees, or None for all.
    seen: Slots that all queries see, where they see the same; others have
      values that may be no numbers.
  """
  acc_ref, m_ref, l_ref = sums
  for head in range(acc_ref.shape[0]):
    q = q_ref[head]
    k, v = decoder_tpu.join_pages(pages, pages_per_tile, head, q.dtype)
    dot = tile_ops.dot(q, k, tile_ops.NT)
    s, c = tile_ops.power(scores, dot, None, decoder_tpu.no_distances)
    if seen is not None:
      assert allowed is not None
      v = jnp.where(seen, v, jnp.zeros_like(v))
      s = jnp.where(allowed, s, -jnp.inf)
    elif allowed is not None:
      v, nan_flags = tile_ops.cleaned(v)
      s = jnp.where(allowed, s + nan_flags, -jnp.inf)
    old_m = m_ref[head, :, 0:1]
    m = jnp.maximum(old_m, jnp.max(s, axis=1, keepdims=True) * c)
    safe = finite_max(m)
    p = jnp.exp2(s * c - safe)
    weight = jnp.exp2(old_m - safe)
    total = jnp.sum(p, axis=1, keepdims=True)
    all_lanes = lambda x: jnp.broadcast_to(x, m_ref.shape[1:])
    l_ref[head] = all_lanes(l_ref[head, :, 0:1] * weight + total)
    m_ref[head] = all_lanes(m)
    product = tile_ops.dot(p.astype(v.dtype), v, tile_ops.NN)
    acc_ref[head] = acc_ref[head] * weight + product


def _mask(structure: PyTree, leaves: Sequence[Any]) -> Mask:
  return jax.tree.unflatten(structure, [ref[0] for ref in leaves])


def _shared_kernel(
  scores: Scores,
  structure: PyTree,
  pages_per_tile: int,
  *refs: Any,
) -> None:
  first = 5 + structure.num_leaves
  count, leaves = refs[4], refs[5:first]
  q_ref, q_at, cover, k_at, *pages = refs[first:-3]
  sums = refs[-3:]
  i = pl.program_id(1)

  @pl.when(i == 0)
  def _() -> None:
    for ref, value in zip(sums, (0.0, -jnp.inf, 0.0), strict=True):
      ref[...] = jnp.full_like(ref, value)

  @pl.when(i < count[0])
  def _() -> None:
    lane = lax.broadcasted_iota(jnp.int32, cover.shape, 1)
    covered = jnp.where(lane == i, cover[...], 0)
    covered = jnp.sum(covered.astype(jnp.float32), axis=1, keepdims=True) > 0
    rows = Coords(q_at[:, 0:1], q_at[:, 1:2])
    columns = Coords(k_at[0, 0, 0:1, :], k_at[0, 0, 1:2, :])
    allowed = visible(_mask(structure, leaves), rows, columns) & covered
    _fold(scores, q_ref, pages, pages_per_tile, sums, allowed)


def _row_kernel(
  scores: Scores,
  structure: PyTree,
  pages_per_tile: int,
  one_position: bool,
  *refs: Any,
) -> None:
  first = 3 + structure.num_leaves
  words, leaves = refs[2], refs[3:first]
  q_at: Any = None
  if one_position:
    pos, seg, q_ref, k_at, *remaining = refs[first:-3]
  else:
    q_ref, k_at, q_at, *remaining = refs[first:-3]
  carry, pages, sums = remaining[:3], remaining[3:], refs[-3:]
  word = words[pl.program_id(1)]

  @pl.when(word & tile_ops.FIRST != 0)
  def _() -> None:
    for ref, value in zip(sums, carry, strict=True):
      ref[...] = value[...]

  row_sums = tuple(ref.at[0] for ref in sums)
  fold_row = functools.partial(
    _fold, scores, q_ref.at[0], pages, pages_per_tile, row_sums
  )

  @pl.when(word & tile_ops.MASKED != 0)
  def _() -> None:
    columns = Coords(k_at[0, 0, 0:1, :], k_at[0, 0, 1:2, :])
    if not one_position:
      rows = Coords(q_at[0, :, 0:1], q_at[0, :, 1:2])
      fold_row(visible(_mask(structure, leaves), rows, columns))
      return
    row = tile_ops.row_of(word)
    queries = Coords(jnp.full((1, 1), pos[row]), jnp.full((1, 1), seg[row]))
    allowed = visible(_mask(structure, leaves), queries, columns)
    seen = tile_ops.column(allowed.astype(jnp.float32)) > 0
    fold_row(allowed, seen)

  @pl.when(word & tile_ops.FULL != 0)
  def _() -> None:
    fold_row(None)
