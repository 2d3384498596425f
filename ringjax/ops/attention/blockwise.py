"""Blockwise attention: tiles of scores and an online softmax, never T x S.

Guarantees: equals `reference` for every mask and every extra of the scores,
forward and backward; a tile in which no pair is allowed costs nothing, and a
tile in which every pair is allowed costs no mask.
Cost: 4 q_block k_block H FLOPs a tile forward (two products), 10 backward
(five: the scores are computed again), one exponential a pair each time.
Memory: a few score tiles; the statistics are one number a row.
Ref: Rabe and Staats 2021, arXiv 2112.05682; Dao 2023, arXiv 2307.08691.

The bounds of the coordinates decide which tiles are computed: `tile_kinds`
sorts every tile into none, some or all, and the loops run over lists of just
the tiles that count, so that the trip count is the number of tiles. Products
are fast on long tiles, the edge of a mask needs short ones: several full tiles
are computed at once, one below another, where all of these are full.

The backward pass computes scores with keys first, [k, q]: then all five
products have an untransposed left operand, which is what CPU matrix kernels
are fast at, and it needs no transposed copy of a tile. Operands that a product
needs transposed are transposed once a shard.

A non-finite key, value, query or cotangent reaches only the rows and columns
that may see it: in tiles with a mask the operands of the products are cleaned
and the row is marked NaN through its scores instead (0 * NaN is NaN, so a
zero weight alone would not keep it out).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Shaped

from ringjax.checks import boolean, positive_int
from ringjax.ops.attention.scores import (
  BACKWARD,
  FORWARD,
  ScoreArgs,
  ScoreTile,
  Terms,
)
from ringjax.ops.mask import Coords, Mask, extent
from ringjax.ops.softmax import Partial, finite_max, wide_dtype
from ringjax.parallel import collectives, processor
from ringjax.typing import Index

Carry = TypeVar("Carry")
Arrays = TypeVar("Arrays", bound=tuple)
# The gradients (dq, dterms) of earlier calls.
QGradients = tuple[jax.Array, Terms]

# Most queries and keys of a tile, and queries of joined tiles without a mask.
_BLOCK, _JOINED = 256, 512


class Local(NamedTuple):
  """Operands of a local algorithm, in its order of axes.

  Fields:
    q: Queries, [B, K, G, T, H].
    k: Keys, [B, K, S, H].
    v: Values, [B, K, S, J].
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array


class Keys(NamedTuple):
  """Keys and values in the layout of `forward_tile`.

  Fields:
    k: Transposed keys, [B, K, H, S].
    v: Values, [B, K, S, J].
    flag: 0 where a value is finite, else NaN, [B, K, S].
  """

  k: jax.Array
  v: jax.Array
  flag: jax.Array

  @classmethod
  def of(cls, x: Local) -> Keys:
    """Prepare the operands of a local algorithm."""
    k = _in_memory(jnp.swapaxes(x.k, 2, 3))
    return cls(k, x.v, finite_flag(x.v, wide_dtype(x.v.dtype)))


class Gradients(NamedTuple):
  """Float32 gradients of one call of a local algorithm.

  Fields:
    q: [B, K, H, G, T], keys-first order: transposed once at the end.
    k: [B, K, S, H].
    v: [B, K, S, J].
    terms: Gradients of bias, slopes and sinks, None where absent.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  terms: Terms


class Residuals(NamedTuple):
  """Operands of the backward pass: queries, statistics and cotangents.

  Fields:
    do: Cotangent of the output, [B, K, G, T, J].
    lse: Log-sum-exp over all keys (and the sink), [B, K, G, T]; inf instead of
      -inf, because exp(s - inf) is the 0 that an empty row needs.
    delta: Sum of do * out, minus the cotangent of lse, [B, K, G, T].
    flag: 0 where all of a row is finite, else NaN, [B, K, G, T].
    q_flipped: Queries, [B, K, H, G, T].
    do_flipped: Cotangent, [B, K, J, G, T].
  """

  do: jax.Array
  lse: jax.Array
  delta: jax.Array
  flag: jax.Array
  q_flipped: jax.Array
  do_flipped: jax.Array

  @classmethod
  def of(
    cls,
    q: Shaped[Array, "B K G T H"],
    do: Shaped[Array, "B K G T J"],
    lse: Float[Array, "B K G T"],
    delta: Float[Array, "B K G T"],
  ) -> Residuals:
    """Prepare queries, log-sum-exp and cotangents of the forward pass."""
    # If `do` is a constant, such as the gradient of a sum, XLA would fold the
    # operations below while it compiles, for seconds.
    do = _in_memory(do)
    return cls(
      do,
      jnp.where(lse == -jnp.inf, jnp.inf, lse),
      delta,
      finite_flag(q, lse.dtype) + finite_flag(do, lse.dtype) + delta * 0,
      _in_memory(jnp.transpose(q, (0, 1, 4, 2, 3))),
      _in_memory(jnp.transpose(do, (0, 1, 4, 2, 3))),
    )

  def padded(self, length: int) -> Residuals:
    """Pad the queries to `length`."""
    return Residuals(
      *(pad_axis(r, 3, length) for r in self[:4]),
      *(pad_axis(r, 4, length) for r in self[4:]),
    )


class TileLists(NamedTuple):
  """Tiles that count, for each row of tiles, of queries or of keys.

  Fields:
    full: Indices of the tiles that need no mask, first, int32 [rows, n]; tiles
      that are computed together, see `joined`, have one index.
    full_count: Number of them, int32 [rows].
    masked: Indices of the other tiles that count, first, int32 [rows, n].
    masked_count: Number of them, int32 [rows].
  """

  full: jax.Array
  full_count: jax.Array
  masked: jax.Array
  masked_count: jax.Array


def tile_kinds(
  mask: Mask,
  q: Coords,
  k: Coords,
  q_block: int,
  k_block: int,
  *,
  by_keys: bool = False,
) -> Int[Array, "_ _"]:
  """Classify tiles: 0 none, 1 some, 2 all pairs of a tile are allowed.

  The result is int8 [T/q_block, S/k_block]. Bounds, not pairs, decide: a tile
  of kind 1 may have no allowed pair, but one of kind 0 has none for sure.
  Examples
  of the batch share the answer: a tile counts if it counts for one of them.
    With
  `by_keys` it is [S/k_block, T/q_block], without a transposition.
  """
  into_tiles = lambda x, n: x.reshape(x.shape[0], -1, n)
  rows = extent(Coords(into_tiles(q.pos, q_block), into_tiles(q.seg, q_block)))
  cols = extent(Coords(into_tiles(k.pos, k_block), into_tiles(k.seg, k_block)))
  rows = jax.tree.map(lambda x: jnp.expand_dims(x, 1 if by_keys else 2), rows)
  cols = jax.tree.map(lambda x: jnp.expand_dims(x, 2 if by_keys else 1), cols)
  any_allowed, all_allowed = mask.bound(rows, cols)
  any_allowed = jnp.any(any_allowed & rows.some & cols.some, 0)
  all_allowed = jnp.all(all_allowed & rows.all & cols.all, 0)
  # A tile with all pairs allowed also has some allowed.
  return any_allowed.astype(jnp.int8) + all_allowed.astype(jnp.int8)


def tile_lists(
  kinds: Int8[Array, "rows columns"],
  masked: bool,
  many: int = 1,
  *,
  by_keys: bool = False,
) -> TileLists:
  """List the tiles that count.

  Args:
    kinds: Kinds of `tile_kinds`, int8 [rows of queries, columns of keys].
    masked: Whether all tiles need a mask.
    many: Rows of queries whose tiles are computed together, see `joined`.
    by_keys: Whether `kinds` is [columns of keys, rows of queries], as of
      `tile_kinds` with by_keys; then there is a list for each column.
  """
  axis = 1 if by_keys else 0
  full = (kinds == 2) & (not masked)
  grouped = (*kinds.shape[:axis], -1, many, *kinds.shape[axis + 1 :])
  full = jnp.all(full.reshape(grouped), axis + 1)
  masked_kinds = (kinds != 0) & ~jnp.repeat(full, many, axis)

  def sort_first(counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Sorting bools ends the process: XLA's CPU compiler of JAX 0.10.2 has no
    # instruction for a bool [8, 4] that is repeated to [8, 8].
    skipped = 1 - counted.astype(jnp.int32)
    order = jnp.argsort(skipped, axis=1, stable=True)
    return order.astype(jnp.int32), jnp.sum(counted, 1, dtype=jnp.int32)

  return TileLists(*sort_first(full), *sort_first(masked_kinds))


class LocalAlgorithm:
  """Base class of local algorithms, which send nothing.

  With `forward` and `backward` it is an `attend.Algorithm`.
  """

  # Reverse mode goes through `backward`, not through `forward`.
  differentiable: ClassVar[bool] = False
  axes: ClassVar[tuple[str, ...]] = ()

  def span(self, keys: int) -> int:
    """Number of keys that a call sees whose operands hold `keys`."""
    return keys


def check_positive(options: object, *names: str) -> None:
  """Raise OptionError for a field that is neither None nor a positive int."""
  for name in names:
    if getattr(options, name) is not None:
      positive_int(name, getattr(options, name))


@dataclasses.dataclass(frozen=True)
class Blockwise(LocalAlgorithm):
  """The local algorithm that serves everything, on every platform.

  Attributes:
    q_block: Queries of a tile; None chooses by the local length. In long shards
      several tiles without a mask are joined, up to 512 queries.
    kv_block: Keys of a tile; None chooses by the local length.
    wide: Whether bfloat16 operands are multiplied as float32: no less exact,
      with copies of a shard's operands of twice their size. None: the call sets
      it if the processor has no products of bfloat16.
  """

  q_block: int | None = None
  kv_block: int | None = None
  wide: bool | None = None

  def __post_init__(self) -> None:
    check_positive(self, "q_block", "kv_block")
    if self.wide is not None:
      boolean("wide", self.wide)

  def blocks(self, q_length: int, k_length: int) -> tuple[int, int]:
    """Return the tile for these local lengths, (q_block, k_block)."""
    return (
      _even(q_length, self.q_block or _default_block(q_length)),
      _even(k_length, self.kv_block or _default_block(k_length)),
    )

  def on_device(
    self, platform: str, kind: str, alone: bool = True
  ) -> Blockwise:
    """Specialize to a device, as `AutoKernel.on_device` does."""
    del kind, alone
    if self.wide is not None:
      return self
    widen = platform == "cpu" and not processor.multiplies_bfloat16()
    return dataclasses.replace(self, wide=widen)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these keys into `carry` ([B, K, G, T, ...])."""
    x = self._operands(x)
    length = x.q.shape[3]
    qb, kb = self.blocks(length, x.k.shape[2])
    x, args = pad_operands(x, args, qb, kb)
    context = args.context
    carry = Partial(*(pad_axis(c, 3, x.q.shape[3]) for c in carry))
    keys = Keys.of(x)
    kinds = tile_kinds(context.mask, context.q, context.k, qb, kb)
    rows_together = joined(kinds.shape[0], qb)
    lists = tile_lists(kinds, context.allow is not None, rows_together)
    full = (lists.full, lists.full_count, False)
    masked = (lists.masked, lists.masked_count, True)

    def fold(carry: Partial, size: int, *chosen: tuple) -> Partial:
      """Fold the tiles of these lists, whose rows are `size` queries."""

      def row(i: jax.Array, carry: Partial) -> Partial:
        slice_row = lambda a: lax.dynamic_slice_in_dim(a, i * size, size, 3)
        q, q_at = slice_row(x.q), cut_coords(context.q, i * size, size)
        row_carry = Partial(*map(slice_row, carry))
        for tiles, counts, masked in chosen:

          def step(
            n: Index,
            row_carry: Partial,
            tiles: jax.Array = tiles,
            masked: bool = masked,
          ) -> Partial:
            start = tiles[i, n] * kb
            k_at = cut_coords(context.k, start, kb)
            tile = ScoreTile(args, FORWARD, i * size, start, q_at, k_at)
            return self.fold(tile, keys, q, row_carry, masked)

          row_carry = loop(counts[i], step, row_carry)
        return Partial(
          *(
            lax.dynamic_update_slice_in_dim(c, o, i * size, 3)
            for c, o in zip(carry, row_carry, strict=True)
          )
        )

      return loop(chosen[0][0].shape[0], row, carry)

    if rows_together == 1:
      # Rows of one height: each row's carry is sliced and written once.
      carry = fold(carry, qb, full, masked)
    else:
      carry = fold(fold(carry, rows_together * qb, full), qb, masked)
    return Partial(*(c[:, :, :, :length] for c in carry))

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add these keys' gradients to `carry`, the (dq, dterms) so far."""
    x, residuals = self._operands(x), self._operands(residuals)
    q_length, k_length = x.q.shape[3], x.k.shape[2]
    qb, kb = self.blocks(q_length, k_length)
    x, args = pad_operands(x, args, qb, kb)
    residuals = residuals.padded(x.q.shape[3])
    context = args.context
    k_flipped = _in_memory(jnp.swapaxes(x.k, 2, 3))
    kinds = tile_kinds(context.mask, context.q, context.k, qb, kb, by_keys=True)
    rows_together = joined(kinds.shape[1], qb)
    lists = tile_lists(
      kinds, context.allow is not None, rows_together, by_keys=True
    )
    dq = pad_axis(carry[0], 4, x.q.shape[3])
    dterms = _pad_terms(carry[1], x.q.shape[3], x.k.shape[2] - k_length)
    zero = lambda like: collectives.zeros(like.shape, dq.dtype, (dq, x))

    def row(j: jax.Array, carry: tuple) -> tuple:
      dq, dk, dv, dterms = carry
      start = j * kb
      slice_keys = lambda a, axis: lax.dynamic_slice_in_dim(a, start, kb, axis)
      k, v, flipped = (
        slice_keys(x.k, 2),
        slice_keys(x.v, 2),
        slice_keys(k_flipped, 3),
      )
      k_at = cut_coords(context.k, start, kb)

      def step(masked: bool, tiles: jax.Array, n: Index, sums: tuple) -> tuple:
        size = qb if masked else rows_together * qb
        first = tiles[j, n] * size
        q_at = cut_coords(context.q, first, size)
        tile = ScoreTile(args, BACKWARD, first, start, q_at, k_at)
        return _backward_tile(tile, x.q, residuals, k, flipped, v, sums, masked)

      sums = (dq, zero(k), zero(v), dterms)
      for tiles, counts, masked in (
        (lists.full, lists.full_count, False),
        (lists.masked, lists.masked_count, True),
      ):
        sums = loop(counts[j], functools.partial(step, masked, tiles), sums)
      dq, dk_j, dv_j, dterms = sums
      update = lax.dynamic_update_slice_in_dim
      return dq, update(dk, dk_j, start, 2), update(dv, dv_j, start, 2), dterms

    dq, dk, dv, dterms = loop(
      kinds.shape[0], row, (dq, zero(x.k), zero(x.v), dterms)
    )
    return Gradients(
      dq[..., :q_length],
      dk[:, :, :k_length],
      dv[:, :, :k_length],
      _cut_terms(dterms, carry[1]),
    )

  def fold(
    self,
    tile: ScoreTile,
    keys: Keys,
    q: Shaped[Array, "B K G q H"],
    carry: Partial,
    masked: bool,
  ) -> Partial:
    """Fold a tile of these queries into `carry`, as `forward_tile` does."""
    return forward_tile(tile, keys, q, carry, masked)

  def _operands(self, x: Arrays) -> Arrays:
    """Convert `x` to the dtype in which it is multiplied."""
    if not self.wide:
      return x
    # Converted all at once: XLA would convert a tile's operands for each tile.
    widen = lambda a: _in_memory(a.astype(jnp.float32))
    return jax.tree.map(lambda a: widen(a) if a.dtype == jnp.bfloat16 else a, x)


def forward_tile(
  tile: ScoreTile,
  keys: Keys,
  q: Shaped[Array, "B K G q H"],
  carry: Partial,
  masked: bool,
) -> Partial:
  """Fold a tile of these queries into `carry`; with a mask if `masked`."""
  return fold_tile(
    tile,
    product("bkgqh,bkht->bkgqt", q, tile.cut_k(keys.k, 3)),
    tile.cut_k(keys.v, 2),
    tile.cut_k(keys.flag, 2) if masked else None,
    carry,
  )


def fold_tile(
  tile: ScoreTile,
  s: Float[Array, "B K G q k"],
  v: Shaped[Array, "_ K k J"],
  flag: Float[Array, "B K k"] | None,
  carry: Partial,
  weigh: Callable[[Array, Array], Array] | None = None,
  allowed: Array | None = None,
) -> Partial:
  """Fold a tile of bare products into `carry`.

  Args:
    tile: Coordinates of the tile, in the order `FORWARD`.
    s: Products of its queries and keys.
    v: Values of its keys.
    flag: Finite flag as in `Keys`, or None for a tile without a mask.
    carry: Partial of its queries over other keys.
    weigh: Function that sums values by weights [B, K, G, q, k], in place of a
      product.
    allowed: Pairs that are allowed, in addition to the tile's mask.
  """
  scores = tile.args.scores
  scale = jnp.asarray(scores.scale, s.dtype)
  if not tile.args.plain:
    s, _ = tile.scores_of(s)
    scale = jnp.ones_like(scale)
  if flag is not None:
    s = s + FORWARD.head_key(flag)
    allowed_pairs = (
      tile.allowed() if allowed is None else tile.allowed() & allowed
    )
    s = jnp.where(allowed_pairs, s, -jnp.inf)
    v = cleaned(v)
  # A positive scale keeps the order of bare products: scaling their maximum
  # spares a pass over the tile.
  m = lax.stop_gradient(jnp.maximum(carry.m, jnp.max(s, -1) * scale))
  safe = finite_max(m)
  p = jnp.exp(s * scale - safe[..., None])
  weight = jnp.exp(carry.m - safe)
  total = carry.l * weight + jnp.sum(p, -1)
  if scores.dropout_rate:
    p = p * tile.dropout_weight(p.dtype)
  p = p.astype(v.dtype)
  acc = product("bkgqt,bktj->bkgqj", p, v) if weigh is None else weigh(p, v)
  return Partial(carry.acc * weight[..., None] + acc, m, total)


def _backward_tile(
  tile: ScoreTile,
  q: jax.Array,
  residuals: Residuals,
  k: jax.Array,
  k_flipped: jax.Array,
  v: jax.Array,
  carry: tuple,
  masked: bool,
) -> tuple:
  dq, dk, dv, dterms = carry
  scores, row = tile.args.scores, BACKWARD.row
  q = tile.cut_q(q, 3)
  do, lse, delta, flag = (tile.cut_q(r, 3) for r in residuals[:4])
  q_flipped, do_flipped = (tile.cut_q(r, 4) for r in residuals[4:])
  s, tanh = tile.scores_of(product("bkth,bkhgq->bktgq", k, q_flipped))
  if masked:
    p = jnp.exp(s - row(lse + flag))
    p = jnp.where(tile.allowed(), p, 0)
    q, k_flipped, v, do, delta = map(cleaned, (q, k_flipped, v, do, delta))
    do_flipped = cleaned(do_flipped)
  else:
    p = jnp.exp(s - row(lse))
  dp = product("bktj,bkjgq->bktgq", v, do_flipped)
  dropped_p = p
  if scores.dropout_rate:
    weights = tile.dropout_weight(p.dtype)
    dropped_p, dp = p * weights, dp * weights
  ds = p * (dp - row(delta))
  dterms = _add_dterms(dterms, tile, ds)
  if tanh is not None:
    ds = ds * (1 - tanh * tanh)
  ds = (ds * jnp.asarray(scores.scale, ds.dtype)).astype(q.dtype)
  dv = dv + product("bktgq,bkgqj->bktj", dropped_p.astype(do.dtype), do)
  dk = dk + product("bktgq,bkgqh->bkth", ds, q)
  dq_tile = product("bkht,bktgq->bkhgq", k_flipped, ds)
  dq_tile = dq_tile + tile.cut_q(dq, 4)
  dq = lax.dynamic_update_slice_in_dim(dq, dq_tile, tile.q_start, 4)
  return dq, dk, dv, dterms


def _add_dterms(dterms: Terms, tile: ScoreTile, ds: jax.Array) -> Terms:
  """Add a tile's gradients of bias and slopes."""
  bias, slopes = dterms.bias, dterms.slopes
  if slopes is not None:
    slopes = slopes - jnp.sum(ds * tile.distance(ds.dtype), (0, 2, 4))
  if bias is not None:
    part = BACKWARD.unpair(ds)
    summed = tuple(i for i in range(5) if bias.shape[i] == 1)
    part = jnp.sum(part, summed, keepdims=True)
    part = part + tile.cut_pair(bias)
    bias = lax.dynamic_update_slice(bias, part, tile.corner(bias))
  return Terms(bias, slopes, dterms.sinks)


def loop(
  count: Index, body: Callable[[Any, Carry], Carry], start: Carry
) -> Carry:
  """Run a fori_loop with an int32 index also when 64-bit types are on."""
  stop = np.int32(count) if isinstance(count, int) else count
  return lax.fori_loop(np.int32(0), stop, body, start)


def product(
  equation: str, a: Shaped[Array, " ..."], b: Shaped[Array, " ..."]
) -> Float[Array, " ..."]:
  """Einsum that accumulates in float32 and never casts its operands."""
  exact = a.dtype in (jnp.float32, jnp.float64)
  return jnp.einsum(
    equation,
    a,
    b,
    preferred_element_type=wide_dtype(a.dtype),
    precision=lax.Precision.HIGHEST if exact else None,
  )


def _in_memory(x: jax.Array) -> jax.Array:
  """Materialize an array, or a transposition of one, once.

  Without the barrier a transposition moves into the products, where XLA's CPU
  compiler repeats it for every tile, or chooses a slow kernel.
  """
  return lax.optimization_barrier(x)


def cleaned(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """Replace non-finite elements by 0."""
  return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def finite_flag(
  x: Shaped[Array, " ..."], dtype: DTypeLike
) -> Float[Array, " ..."]:
  """Flag each vector: 0 if all of its numbers are finite, else NaN."""
  is_finite = jnp.all(jnp.isfinite(x), -1)
  return jnp.where(
    is_finite, jnp.zeros((), dtype), jnp.full((), jnp.nan, dtype)
  )


def cut_coords(at: Coords, start: Index, size: int) -> Coords:
  """Slice the coordinates of `size` tokens from `start` on."""
  slice_tokens = lambda x: lax.dynamic_slice_in_dim(x, start, size, 1)
  return Coords(slice_tokens(at.pos), slice_tokens(at.seg))


def joined(rows: int, q_block: int) -> int:
  """Number of rows of tiles that are computed at once without a mask."""
  # At most a quarter: in a few rows most tiles are crossed by a mask's edge.
  max_rows = max(1, min(_JOINED // q_block, rows // 4))
  return next(n for n in range(max_rows, 0, -1) if rows % n == 0)


def _default_block(length: int) -> int:
  # Tiles must shrink with the shard, or half-masked hops skip nothing.
  return max(128, min(_BLOCK, length // 4))


def _even(length: int, block: int) -> int:
  """Block that splits `length` into equal parts with the least padding."""
  parts = -(-length // min(block, length))
  block = -(-length // parts)
  return block if parts == 1 else -(-block // 8) * 8


def pad_axis(
  x: Shaped[Array, " ..."], axis: int, length: int
) -> Shaped[Array, " ..."]:
  """Pad dimension `axis` with zeros at its end, up to `length`."""
  if x.shape[axis] == length:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, length - x.shape[axis])
  return jnp.pad(x, widths)


def pad_coords(at: Coords, length: int) -> Coords:
  """Pad coordinates to [B or 1, length] with empty tokens."""
  return Coords(*(pad_axis(c, 1, length) for c in at))


def _pad_pair(
  pair: jax.Array | None, q_length: int, k_extra: int
) -> jax.Array | None:
  if pair is None:
    return None
  if pair.shape[3] != 1:
    pair = pad_axis(pair, 3, q_length)
  if pair.shape[4] != 1 and k_extra:
    # The last shard's last tile reaches beyond the last key; in other shards it
    # covers columns of the next shard, whose keys are masked as padding.
    pair = pad_axis(pair, 4, pair.shape[4] + k_extra)
  return pair


def _pad_terms(terms: Terms, q_length: int, k_extra: int) -> Terms:
  return terms._replace(bias=_pad_pair(terms.bias, q_length, k_extra))


def _cut_terms(terms: Terms, like: Terms) -> Terms:
  if terms.bias is None or like.bias is None:
    return terms
  t, s = like.bias.shape[3:]
  return terms._replace(bias=terms.bias[:, :, :, :t, :s])


def pad_operands(
  x: Local, args: ScoreArgs, qb: int, kb: int
) -> tuple[Local, ScoreArgs]:
  """Pad local lengths to whole tiles; padded tokens have seg 0."""
  q_length = -(-x.q.shape[3] // qb) * qb
  k_length = -(-x.k.shape[2] // kb) * kb
  extra = k_length - x.k.shape[2]
  context = args.context
  args = args._replace(
    terms=_pad_terms(args.terms, q_length, extra),
    context=context._replace(
      q=pad_coords(context.q, q_length),
      k=pad_coords(context.k, k_length),
      allow=_pad_pair(context.allow, q_length, extra),
    ),
  )
  x = Local(
    pad_axis(x.q, 3, q_length),
    pad_axis(x.k, 2, k_length),
    pad_axis(x.v, 2, k_length),
  )
  return x, args
