"""Flash attention kernel for TPU that masks by position and carries sums.

Guarantees: equals `Blockwise` wherever it serves (`decline` says where it does
not), values and gradients. A hop of a ring is one kernel: the statistics of
earlier hops come in and go out, so that nothing is merged outside. The tiles
that count are found from the coordinates at run time, so that one kernel serves
every layout and every hop, and a tile in which no pair is allowed takes no
step.
Cost: 4 q_block k_block H FLOPs a tile forward, 10 backward.
Memory: VMEM only: two tiles of scores; backward also float32 gradients of
`key_span` keys, which is why longer shards are cut.
Ref: Dao 2023, arXiv 2307.08691; keys-first tiles as in JAX's splash attention
(the statistics of a query are one lane, maxima run over sublanes).

A step is a tile (row of queries, column of keys) of a list that `tile_kinds`
gives (`tile_ops.TileSteps`). Steps of a row follow each other: its
accumulators stay in VMEM.

  forward   grid [B, N, steps]      acc^T [J, q], m, l [1, q] of a row
  backward  grid [B, K, G, steps]   dq^T [H, q] of a row; dk, dv of all keys
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import PyTree

from ringjax.checks import positive_int
from ringjax.ops.attention import scores as scoring
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  LocalAlgorithm,
  QGradients,
  Residuals,
  check_positive,
  finite_flag,
  pad_axis,
  pad_operands,
  tile_kinds,
)
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Coords, Mask, distance, visible
from ringjax.ops.softmax import Partial, finite_max
from ringjax.parallel import chips, collectives
from ringjax.typing import Index

# Fewest bytes that the tiles of a backward step need next to the gradients.
_LEAST_VMEM = 48 << 20
# Scores of a tile that fit the vector memory that the compiler grants unasked.
_USUAL = 1 << 21
# Bytes for each score of a tile in a backward step.
_BACKWARD_BYTES = 16


@dataclasses.dataclass(frozen=True)
class FlashTPU(LocalAlgorithm):
  """A Pallas kernel for TPU as local algorithm.

  Attributes:
    q_block: Queries of a tile, a multiple of 128; None: 1024, or fewer.
    kv_block: Keys of a tile, a multiple of 128; None: 1024, or fewer.
    key_span: Most keys of one backward kernel, whose gradients are in VMEM;
      fewer where those would take more than a quarter of it.
    chip: Machine of `chips.MACHINES` whose rates give the kernel's cost
      estimate and whose VMEM limits the keys; None: `tile_ops.SOME`.
    interpret: Whether to run without a TPU, slowly, for tests.
  """

  q_block: int | None = None
  kv_block: int | None = None
  key_span: int = 16_384
  chip: str | None = None
  interpret: bool = False

  def __post_init__(self) -> None:
    positive_int("key_span", self.key_span)
    check_positive(self, "q_block", "kv_block")

  def blocks(self, q_length: int, k_length: int) -> tuple[int, int]:
    """Return the tile for these local lengths, (q_block, kv_block)."""
    fit = lambda preferred, length: min(preferred, tile_ops.lanes(length))
    return (
      self.q_block or fit(1024, q_length),
      self.kv_block or fit(1024, k_length),
    )

  def decline(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    qb, kb = self.blocks(x.q.shape[3], x.k.shape[2])
    misaligned = any(n % tile_ops.LANES for n in (qb, kb, self.key_span))
    if misaligned and not self.interpret:
      return f"tiles of {qb} x {kb}: no multiples of {tile_ops.LANES}"
    if x.q.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{x.q.dtype}: it multiplies bfloat16 and float32"
    if x.k.dtype != x.q.dtype or x.v.dtype != x.q.dtype:
      return "queries, keys and values of different dtypes"
    if x.q.shape[4] > 256 or x.v.shape[3] > 256:
      return f"heads of {x.q.shape[4]} and {x.v.shape[3]}: at most 256"
    if x.q.shape[3] < tile_ops.LANES and not self.interpret:
      return f"{x.q.shape[3]} queries: a tile has at least {tile_ops.LANES}"
    rows, columns = -(-x.q.shape[3] // qb), -(-x.k.shape[2] // kb)
    if (
      rows >= 1 << tile_ops.ROW_BITS
      or columns >= 1 << tile_ops.COLUMN_BITS
      or rows * columns > tile_ops.MOST_STEPS
    ):
      return f"{rows} x {columns} tiles a shard: more than its list holds"
    core = tile_ops.core(self.chip)
    if core.vmem_bytes < _LEAST_VMEM:
      return f"the vector memory of {core.name}: too small for its tiles"
    if _BACKWARD_BYTES * qb * kb > core.vmem_bytes // 4 * 3:
      return f"tiles of {qb} x {kb}: too large for {core.name}'s vector memory"
    return tile_ops.unreadable(terms, context)

  # Declining does not depend on the machine that runs this process.
  foreseen = decline

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these keys into `carry` ([B, K, G, T, ...])."""
    check_serves(self, args.scores, x, args.terms, args.context)
    length = x.q.shape[3]
    qb, kb = self.blocks(length, x.k.shape[2])
    x, args = pad_operands(x, args, qb, kb)
    context = args.context
    carry = Partial(*(pad_axis(c, 3, x.q.shape[3]) for c in carry))
    kinds = tile_kinds(context.mask, context.q, context.k, qb, kb)
    carry = _forward(self, x, args, tile_ops.TileSteps.of(kinds), carry)
    return Partial(*(c[:, :, :, :length] for c in carry))

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add these keys' gradients to `carry`, the (dq, dterms) so far."""
    check_serves(self, args.scores, x, args.terms, args.context)
    q_length, k_length = x.q.shape[3], x.k.shape[2]
    qb, kb = self.blocks(q_length, min(k_length, _span(self, x)))
    x, args = pad_operands(x, args, qb, kb)
    context, padded = args.context, x.q.shape[3]
    residuals = residuals.padded(padded)
    dq = jnp.transpose(pad_axis(carry[0], 4, padded), (0, 1, 3, 2, 4))
    kinds = tile_kinds(context.mask, context.q, context.k, qb, kb)
    slopes = carry[1].slopes
    dks, dvs = [], []
    span = _span(self, x) // kb
    for j in range(0, kinds.shape[1], span):
      take_span = lambda a, axis, j=j: lax.slice_in_dim(
        a, j * kb, min((j + span) * kb, a.shape[axis]), axis=axis
      )
      span_x = x._replace(k=take_span(x.k, 2), v=take_span(x.v, 2))
      span_args = args.of_keys(Coords(*(take_span(c, 1) for c in context.k)), 0)
      steps = tile_ops.TileSteps.of(kinds[:, j : j + span])
      dq, dk, dv, distance_grad = _backward(
        self, span_x, span_args, steps, residuals, dq
      )
      dks.append(dk)
      dvs.append(dv)
      if slopes is not None:
        slopes = slopes - jnp.sum(distance_grad, (0, 3))
    concat = lambda parts: jnp.concatenate(parts, 2)[:, :, :k_length]
    return Gradients(
      jnp.transpose(dq, (0, 1, 3, 2, 4))[..., :q_length],
      concat(dks),
      concat(dvs),
      carry[1]._replace(slopes=slopes),
    )


class _TileScores(NamedTuple):
  """Score function of a tile, keys first: [k, q].

  Fields:
    scores: Static part of the score function.
    mask: Mask whose arrays are scalars.
    slope, head, seed: Scalars, or None.
    q: Coordinates of the queries, [1, q].
    k: Coordinates of the keys, [k, 1].
  """

  scores: Scores
  mask: Mask
  slope: Any
  head: Any
  seed: Any
  q: Coords
  k: Coords

  @classmethod
  def of(
    cls,
    scores: Scores,
    structure: PyTree,
    scalars: tile_ops.Scalars,
    b: Index,
    n: Index,
    q_at: Ref,
    k_at: Ref,
  ) -> _TileScores:
    leaf_of_example = lambda ref: ref[0 if ref.shape[0] == 1 else b]
    leaves = [leaf_of_example(ref) for ref in scalars.leaves]
    return cls(
      scores,
      jax.tree.unflatten(structure, leaves),
      None if scalars.slopes is None else scalars.slopes[n],
      None if scalars.heads is None else scalars.heads[n],
      None if scalars.seed is None else leaf_of_example(scalars.seed),
      Coords(q_at[0, 0:1, :], q_at[0, 1:2, :]),
      Coords(
        tile_ops.column(k_at[0, 0:1, :]), tile_ops.column(k_at[0, 1:2, :])
      ),
    )

  def of_queries(self, cut: slice) -> _TileScores:
    """Restrict to a slice of the queries."""
    return self._replace(q=Coords(*(c[:, cut] for c in self.q)))

  def power(self, dot: jax.Array) -> tuple[jax.Array, float]:
    """Factor the tile's scores as `tile_ops.power` does."""
    return tile_ops.power(self.scores, dot, self.slope, self.distance)

  def score(self, dot: jax.Array) -> tuple[jax.Array, Any]:
    """Score the tile's products, and tanh, as `tile_ops.score` does."""
    return tile_ops.score(self.scores, dot, self.slope, self.distance)

  def distance(self) -> jax.Array:
    return distance(self.q.pos, self.k.pos)

  def allowed(self) -> jax.Array:
    return visible(self.mask, self.q, self.k)

  def dropout_weight(self) -> jax.Array:
    """Dropout weight of each pair."""
    word = lambda a: lax.bitcast_convert_type(a, jnp.uint32)
    return scoring.dropout_weights(
      self.scores.dropout_rate,
      word(jnp.full((1, 1), self.seed, jnp.int32)),
      word(jnp.full((1, 1), self.head, jnp.int32)),
      word(self.q.pos),
      word(self.k.pos),
      jnp.float32,
    )


def _query_slices(queries: int, side: int) -> list[slice]:
  """Slices of a tile's queries, each as wide as a matrix unit."""
  width = side if queries % side == 0 else queries
  return [slice(at, at + width) for at in range(0, queries, width)]


def _fold_interleaved(
  parts: list[slice],
  multiply: Callable[[slice], Any],
  fold: Callable[[slice, Any], None],
) -> None:
  """Fold each part's products, while products of later parts are computed.

  The compiler reorders little by itself: issued early, products keep the
  matrix unit busy during exponentials. More than half of the parts ahead would
  run out of registers.
  """
  lookahead = len(parts) // 2 + 1
  products = [multiply(columns) for columns in parts[:lookahead]]
  for i, columns in enumerate(parts):
    if i + lookahead < len(parts):
      products.append(multiply(parts[i + lookahead]))
    fold(columns, products[i])
    products[i] = None


def _forward(
  kernel: FlashTPU,
  x: Local,
  args: ScoreArgs,
  steps: tile_ops.TileSteps,
  carry: Partial,
) -> Partial:
  b, kv, g, t, h = x.q.shape
  s, j = x.v.shape[2:]
  n = kv * g
  qb, kb = kernel.blocks(t, s)
  context = args.context
  scalars = tile_ops.Scalars.of(args.terms, context, steps)
  leaves, structure = jax.tree.flatten(scalars)
  mask = jax.tree.structure(context.mask)
  row = lambda i, words: tile_ops.row_of(words[i])
  col = lambda i, words: tile_ops.column_of(words[i])
  q_index = lambda bi, ni, i, words, *_: (bi, ni, row(i, words), 0)
  stat_index = lambda bi, ni, i, words, *_: (bi, ni, 0, row(i, words))
  k_index = lambda bi, ni, i, words, *_: (bi, ni // g, col(i, words), 0)
  at_q = lambda bi, ni, i, words, *_: (bi, 0, row(i, words))
  at_k = lambda bi, ni, i, words, *_: (bi, 0, col(i, words))
  v_index = lambda bi, ni, i, words, *_: (bi, ni // g, 0, col(i, words))
  stat = pl.BlockSpec((1, 1, 1, qb), stat_index)
  acc = pl.BlockSpec((1, 1, qb, j), q_index)
  operands = (
    x.q.reshape(b, n, t, h),
    x.k,
    # Transposed here as the product needs it: the kernel would transpose a tile
    # in the matrix unit in each of its steps.
    jnp.swapaxes(x.v, 2, 3),
    finite_flag(x.v, jnp.float32)[:, :, None],
    tile_ops.pair(context.q, b),
    tile_ops.pair(context.k, b),
    carry.acc.reshape(b, n, t, j),
    carry.m.reshape(b, n, 1, t),
    carry.l.reshape(b, n, 1, t),
  )
  # A carry that is the same on all shards differs between them afterwards.
  out_type = [
    collectives.out_type(a.shape, a.dtype, carry, x, context)
    for a in operands[6:]
  ]
  first = len(leaves) + 6
  acc_out, m, l = pl.pallas_call(  # noqa: E741
    functools.partial(
      _forward_kernel,
      args.scores,
      mask,
      structure,
      tile_ops.core(kernel.chip).matrix_side,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(leaves),
      grid=(b, n, steps.count),
      in_specs=[
        pl.BlockSpec((1, 1, qb, h), q_index),
        pl.BlockSpec((1, 1, kb, h), k_index),
        pl.BlockSpec((1, 1, j, kb), v_index),
        pl.BlockSpec((1, 1, 1, kb), v_index),
        pl.BlockSpec((1, 2, qb), at_q),
        pl.BlockSpec((1, 2, kb), at_k),
        acc,
        stat,
        stat,
      ],
      out_specs=[acc, stat, stat],
      scratch_shapes=[
        pltpu.VMEM((j, qb), jnp.float32),
        pltpu.VMEM((1, qb), jnp.float32),
        pltpu.VMEM((1, qb), jnp.float32),
      ],
    ),
    out_shape=out_type,
    input_output_aliases={first + i: i for i in range(3)},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=_vmem_forward(kernel, qb, kb),
    ),
    cost_estimate=_cost(
      kernel, context.mask, (b * n, t, s), 2 * (h + j), operands, False
    ),
    interpret=kernel.interpret,
    name="ringjax_flash_forward",
  )(*leaves, *operands)
  return Partial(
    acc_out.reshape(carry.acc.shape),
    m.reshape(carry.m.shape),
    l.reshape(carry.l.shape),
  )


def _forward_kernel(
  scores: Scores,
  mask: jax.tree_util.PyTreeDef,
  structure: PyTree,
  side: int,
  *refs: Any,
) -> None:
  count = structure.num_leaves
  scalars = jax.tree.unflatten(structure, refs[:count])
  (
      q_ref, k_ref, v_ref, flag_ref, q_at, k_at, acc_in, m_in, l_in,
      acc_out, m_out, l_out, acc, m_ref, l_ref,
  ) = refs[count:]  # fmt: skip
  b, n, i = (pl.program_id(axis) for axis in range(3))
  word = scalars.words[i]

  @pl.when(word & tile_ops.FIRST != 0)
  def _() -> None:
    acc[...] = acc_in[0, 0].T
    m_ref[...] = m_in[0, 0] * tile_ops.LOG2_E
    l_ref[...] = l_in[0, 0]

  def tile(masked: bool) -> None:
    at = _TileScores.of(scores, mask, scalars, b, n, q_at, k_at)
    k, v = k_ref[0, 0], v_ref[0, 0]
    if masked:
      v, flag = tile_ops.clean(v), tile_ops.column(flag_ref[0, 0])

    def fold(q_slice: slice, dot: jax.Array) -> None:
      cut_scores = at.of_queries(q_slice)
      s, c = cut_scores.power(dot)
      if masked:
        s = jnp.where(cut_scores.allowed(), s + flag, -jnp.inf)
      old_m = m_ref[:, q_slice]
      m = jnp.maximum(old_m, jnp.max(s, axis=0, keepdims=True) * c)
      safe = finite_max(m) if masked else m
      p = jnp.exp2(s * c - safe)
      weight = jnp.exp2(old_m - safe)
      m_ref[:, q_slice] = m
      total = jnp.sum(p, axis=0, keepdims=True)
      l_ref[:, q_slice] = l_ref[:, q_slice] * weight + total
      if scores.dropout_rate:
        p = p * cut_scores.dropout_weight()
      acc[:, q_slice] = acc[:, q_slice] * weight + tile_ops.dot(
        v, p.astype(v.dtype), tile_ops.NN
      )

    # A mask's comparisons are cheapest over all queries at once.
    queries = acc.shape[1]
    _fold_interleaved(
      _query_slices(queries, queries if masked else side),
      lambda q_slice: tile_ops.dot(k, q_ref[0, 0, q_slice], tile_ops.NT),
      fold,
    )

  pl.when(word & tile_ops.MASKED != 0)(lambda: tile(True))
  pl.when(word & tile_ops.FULL != 0)(lambda: tile(False))

  @pl.when(word & tile_ops.LAST != 0)
  def _() -> None:
    acc_out[0, 0] = acc[...].T
    m_out[0, 0] = m_ref[...] * (1 / tile_ops.LOG2_E)
    l_out[0, 0] = l_ref[...]


def _backward(
  kernel: FlashTPU,
  x: Local,
  args: ScoreArgs,
  steps: tile_ops.TileSteps,
  residuals: Residuals,
  dq: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Return (dq [B, K, G, H, T], dk [B, K, S, H], dv [B, K, S, J], slopes')."""
  b, kv, g, t, h = x.q.shape
  s, j = x.v.shape[2:]
  n = kv * g
  qb, kb = kernel.blocks(t, min(s, _span(kernel, x)))
  context = args.context
  scalars = tile_ops.Scalars.of(args.terms, context, steps)
  leaves, structure = jax.tree.flatten(scalars)
  mask = jax.tree.structure(context.mask)
  row = lambda i, words: tile_ops.row_of(words[i])
  col = lambda i, words: tile_ops.column_of(words[i])
  q_index = lambda bi, ki, gi, i, words, *_: (bi, ki * g + gi, row(i, words), 0)
  stat_index = lambda bi, ki, gi, i, words, *_: (
    bi, ki * g + gi, 0, row(i, words),
  )  # fmt: skip
  k_index = lambda bi, ki, gi, i, words, *_: (bi, ki, col(i, words), 0)
  kt_index = lambda bi, ki, gi, i, words, *_: (bi, ki, 0, col(i, words))
  at_q = lambda bi, ki, gi, i, words, *_: (bi, 0, row(i, words))
  at_k = lambda bi, ki, gi, i, words, *_: (bi, 0, col(i, words))
  stat = pl.BlockSpec((1, 1, 1, qb), stat_index)
  dq_spec = pl.BlockSpec((1, 1, h, qb), stat_index)
  rows = lambda a: a.reshape(b, n, 1, t)
  varying = lambda shape: collectives.out_type(
    (b, *shape), jnp.float32, dq, x, context
  )
  operands = (
    x.q.reshape(b, n, t, h),
    x.k,
    # Transposed for the product of dQ, see `_forward`.
    jnp.swapaxes(x.k, 2, 3),
    x.v,
    residuals.do.reshape(b, n, t, j),
    rows(residuals.lse),
    rows(residuals.delta),
    rows(residuals.flag),
    tile_ops.pair(context.q, b),
    tile_ops.pair(context.k, b),
    dq.reshape(b, n, h, t),
    collectives.zeros((b, n, 1, t), jnp.float32, (x, context)),
  )
  first = len(leaves) + 10
  in_hbm = pl.BlockSpec(memory_space=pl.ANY)
  dq_out, distance_grad, dk, dv = pl.pallas_call(
    functools.partial(_backward_kernel, args.scores, mask, structure, kb, g),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(leaves),
      grid=(b, kv, g, steps.count),
      in_specs=[
        pl.BlockSpec((1, 1, qb, h), q_index),
        pl.BlockSpec((1, 1, kb, h), k_index),
        pl.BlockSpec((1, 1, h, kb), kt_index),
        pl.BlockSpec((1, 1, kb, j), k_index),
        pl.BlockSpec((1, 1, qb, j), q_index),
        stat,
        stat,
        stat,
        pl.BlockSpec((1, 2, qb), at_q),
        pl.BlockSpec((1, 2, kb), at_k),
        dq_spec,
        stat,
      ],
      out_specs=[dq_spec, stat, in_hbm, in_hbm],
      scratch_shapes=[
        pltpu.VMEM((h, qb), jnp.float32),
        pltpu.VMEM((1, qb), jnp.float32),
        pltpu.VMEM((s, h), jnp.float32),
        pltpu.VMEM((s, j), jnp.float32),
        pltpu.SemaphoreType.DMA,
      ],
    ),
    out_shape=[
      varying((n, h, t)),
      varying((n, 1, t)),
      varying((kv, s, h)),
      varying((kv, s, j)),
    ],
    input_output_aliases={first: 0, first + 1: 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
      vmem_limit_bytes=_vmem(kernel, s, h, j, qb, kb),
    ),
    cost_estimate=_cost(
      kernel, context.mask, (b * n, t, s), 6 * h + 4 * j, operands, True
    ),
    interpret=kernel.interpret,
    name="ringjax_flash_backward",
  )(*leaves, *operands)
  return dq_out.reshape(dq.shape), dk, dv, distance_grad.reshape(b, kv, g, t)


def _backward_kernel(
  scores: Scores,
  mask: jax.tree_util.PyTreeDef,
  structure: PyTree,
  kb: int,
  g: int,
  *refs: Any,
) -> None:
  count = structure.num_leaves
  scalars = jax.tree.unflatten(structure, refs[:count])
  (
      q_ref, k_ref, kt_ref, v_ref, do_ref, lse_ref, delta_ref, flag_ref, q_at,
      k_at, dq_in, far_in, dq_out, far_out, dk_out, dv_out,
      dq, distance_grad, dk, dv, sent,
  ) = refs[count:]  # fmt: skip
  b, kv, head, i = (pl.program_id(axis) for axis in range(4))
  word = scalars.words[i]
  begins = (head == 0) & (i == 0)
  ends = (head == g - 1) & (i == pl.num_programs(3) - 1)

  @pl.when(begins)
  def _() -> None:
    dk[...] = jnp.zeros_like(dk)
    dv[...] = jnp.zeros_like(dv)

  @pl.when(word & tile_ops.FIRST != 0)
  def _() -> None:
    dq[...] = dq_in[0, 0]
    distance_grad[...] = far_in[0, 0]

  def tile(masked: bool) -> None:
    at = _TileScores.of(scores, mask, scalars, b, kv * g + head, q_at, k_at)
    q, k, v, do = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0], do_ref[0, 0]
    kt = kt_ref[0, 0]
    lse, delta = lse_ref[0, 0], delta_ref[0, 0]
    dot = tile_ops.dot(k, q, tile_ops.NT)
    s, c = at.power(dot)
    tanh = None if scores.soft_cap is None else at.score(dot)[1]
    lse = lse * tile_ops.LOG2_E
    if masked:
      p = jnp.exp2(s * c - (lse + flag_ref[0, 0]))
      p = jnp.where(at.allowed(), p, 0.0)
      q, kt, v, do, delta = map(tile_ops.clean, (q, kt, v, do, delta))
    else:
      p = jnp.exp2(s * c - lse)
    dp = tile_ops.dot(v, do, tile_ops.NT)
    dropped_p = p
    if scores.dropout_rate:
      weights = at.dropout_weight()
      dropped_p, dp = p * weights, dp * weights
    ds = p * (dp - delta)
    if at.slope is not None:
      distance_grad[...] += jnp.sum(ds * at.distance(), axis=0, keepdims=True)
    if tanh is not None:
      ds = ds * (1 - tanh * tanh)
    ds = (ds * scores.scale).astype(q.dtype)
    keys = pl.ds(pl.multiple_of(tile_ops.column_of(word) * kb, kb), kb)
    dv[keys, :] += tile_ops.dot(dropped_p.astype(do.dtype), do, tile_ops.NN)
    dk[keys, :] += tile_ops.dot(ds, q, tile_ops.NN)
    dq[...] += tile_ops.dot(kt, ds, tile_ops.NN)

  pl.when(word & tile_ops.MASKED != 0)(lambda: tile(True))
  pl.when(word & tile_ops.FULL != 0)(lambda: tile(False))

  @pl.when(word & tile_ops.LAST != 0)
  def _() -> None:
    dq_out[0, 0] = dq[...]
    far_out[0, 0] = distance_grad[...]

  @pl.when(ends)
  def _() -> None:
    for scratch, out in ((dk, dk_out), (dv, dv_out)):
      copy = pltpu.make_async_copy(scratch, out.at[b, kv], sent)
      copy.start()
      copy.wait()


def _grad_bytes(h: int, j: int) -> int:
  """Bytes of VMEM for the float32 gradients of a key and its value."""
  return 4 * (tile_ops.lanes(h) + tile_ops.lanes(j))


def _span(kernel: FlashTPU, x: Local) -> int:
  """Keys of one backward kernel, in whole tiles."""
  kb = kernel.blocks(x.q.shape[3], x.k.shape[2])[1]
  gradient_vmem = tile_ops.core(kernel.chip).vmem_bytes // 4
  max_keys = gradient_vmem // _grad_bytes(x.k.shape[3], x.v.shape[3])
  return max(min(kernel.key_span, max_keys) // kb, 1) * kb


def _vmem_forward(kernel: FlashTPU, qb: int, kb: int) -> int | None:
  """Bytes that a forward kernel may take; None: the compiler's default."""
  if qb * kb <= _USUAL:
    return None
  capacity = tile_ops.core(kernel.chip).vmem_bytes
  return min(8 * qb * kb + (16 << 20), capacity - capacity // 16)


def _vmem(kernel: FlashTPU, keys: int, h: int, j: int, qb: int, kb: int) -> int:
  """Bytes that a backward kernel may take: its gradients and some tiles."""
  capacity = tile_ops.core(kernel.chip).vmem_bytes
  tile = max(_LEAST_VMEM, _BACKWARD_BYTES * qb * kb)
  return min(keys * _grad_bytes(h, j) + tile, capacity - capacity // 16)


def _cost(
  kernel: FlashTPU,
  mask: Mask,
  sizes: tuple[int, int, int],
  flops: int,
  operands: PyTree,
  backward: bool,
) -> pl.CostEstimate:
  """Cost estimate for XLA's scheduler, so that it overlaps sends with it.

  The scheduler divides FLOPs by the chip's peak, which no kernel reaches: the
  estimate has as many FLOPs as take the time of this kernel.
  """
  rows, t, s = sizes
  pairs = rows * t * s * _share(mask, t, s)
  machine = chips.MACHINES[kernel.chip or tile_ops.SOME]
  efficiency = machine.part("kernel")[backward]
  return pl.CostEstimate(
    flops=int(pairs * flops / efficiency),
    transcendentals=int(pairs),
    bytes_accessed=sum(a.size * a.dtype.itemsize for a in operands),
  )


def _share(mask: Mask, t: int, s: int) -> float:
  """Share of the pairs of a hop that the mask allows, on average."""
  keys_before, keys_after = mask.reach
  share = 1.0 if keys_after is None or keys_after >= s else 0.5
  if keys_before is not None:
    share = min(share, (keys_before + 1 + min(keys_after or 0, s)) / s)
  return max(share, 1 / t)
