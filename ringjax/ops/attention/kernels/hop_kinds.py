"""Classify the mask of a hop, and run a vendor's kernel where it fits.

Guarantees: the kind that `kinds` reports always holds. A kernel that knows
"all keys" and "row i sees keys 0..i" then equals `Blockwise`, values and
gradients, wherever a hop is one of

  none   no query sees a key       nothing is touched
  full   every query sees all      the kernel, without a mask
  causal row i sees keys 0..i      the kernel, causal
  strict row i sees keys 0..i-1    the kernel, causal, rows shifted by one
  pieces halves that are these     a loop over the pieces (zigzag, gather)
  other                            `Blockwise`

A program is the same on all shards and for all hops: only the coordinates
tell which hop it is, so a `switch` depends on them, at O(T) comparisons.
Cost: a hop's products for `full`; half of them for `causal` and `strict`, as
far as the kernel skips tiles. The tests for NaN read the operands once more.

A kernel divides and rounds its output, which becomes a partial of weight
exp(lse) and is merged in float32. Its gradients have to be for *all* keys, so
it gets the log-sum-exp over all of them and, in place of the output, an array
whose product with the cotangent is the `delta` of all of them (`stand_in`).

A NaN would reach rows that do not see it: kernels multiply it with a zero of
their mask. A hop with non-finite operands is `other`, which keeps NaN apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
  loop,
)
from ringjax.ops.attention.scores import Context, ScoreArgs
from ringjax.ops.mask import (
  And,
  Causal,
  Coords,
  Everything,
  Mask,
  SameSegment,
  extent,
)
from ringjax.ops.softmax import Partial, merge
from ringjax.parallel import collectives

NONE, FULL, CAUSAL, STRICT, OTHER, PIECES = range(6)
NAMES = ("none", "full", "causal", "strict", "other", "pieces")

# A log-sum-exp for rows that see nothing: exp(score - lse) is 0, and unlike
# infinity it survives a kernel's change of base.
_FAR = 1e30
# Tolerances of the stand-in for `delta`: relative to it, bfloat16's rounding,
# and relative to the cotangents' sum, the finest step of float16.
_NEAR, _STEP = 2.0**-8, 2.0**-24


@runtime_checkable
class VendorKernel(Protocol):
  """A vendor's attention, without a mask or causal: row i sees keys 0..i."""

  def outputs(
    self, x: Local, scale: float, causal: bool
  ) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
    """Return out [B, K, G, T, J] and log-sum-exp, float32 [B, K, G, T]."""
    ...

  def gradients(
    self, x: Local, rows: Rows, scale: float, causal: bool
  ) -> tuple[
    Float[Array, "B K G T H"], Float[Array, "B K S H"], Float[Array, "B K S J"]
  ]:
    """Return (dq [B, K, G, T, H], dk [B, K, S, H], dv [B, K, S, J]).

    Gradients of p = exp(score - lse) and ds = p (do v - sum(do out)), for any
    `out` and `lse` of `rows`.
    """
    ...


class Rows(NamedTuple):
  """Per-row operands of a vendor's backward pass.

  Fields:
    do: Cotangent of the output, [B, K, G, T, J].
    out: Output, or its replacement by `stand_in`, [B, K, G, T, J].
    lse: Log-sum-exp, float32 [B, K, G, T].
  """

  do: jax.Array
  out: jax.Array
  lse: jax.Array


def _conjuncts(mask: Mask) -> list[Mask]:
  """List the masks that all have to allow a pair."""
  if isinstance(mask, And):
    return _conjuncts(mask.left) + _conjuncts(mask.right)
  return [mask]


def has_known_kinds(mask: Mask) -> bool:
  """Whether hops under this mask are mostly of a kind other than `OTHER`."""
  simple_masks = (Causal, Everything, SameSegment)
  return all(isinstance(term, simple_masks) for term in _conjuncts(mask))


def kinds(
  mask: Mask, q: Coords, k: Coords, rows: int = 1, columns: int = 1
) -> Int[Array, "{rows} {columns}"]:
  """Classify each of `rows` x `columns` equal pieces, int32.

  Examples of the batch share the answer: pieces of several kinds are `OTHER`.
  Padding tokens are only known to be seen by no query.
  """
  split = lambda at, n: Coords(*(c.reshape(c.shape[0], n, -1) for c in at))
  q, k = split(q, rows), split(k, columns)
  row = jax.tree.map(lambda c: c[:, :, None], extent(q))
  column = jax.tree.map(lambda c: c[:, None, :], extent(k))
  any_allowed, all_allowed = mask.bound(row, column)
  real = row.all & column.all
  all_allowed = jnp.all(all_allowed & real, 0)
  any_allowed = jnp.any(any_allowed & row.some & column.some, 0)
  constant = lambda kind: jnp.int32(kind)
  hop_kind = jnp.where(any_allowed, constant(OTHER), constant(NONE))
  has_term = lambda kind: any(
    isinstance(term, kind) for term in _conjuncts(mask)
  )
  if has_known_kinds(mask) and has_term(Causal):
    if has_term(SameSegment):
      real &= row.first_seg == row.last_seg
      real &= column.first_seg == column.last_seg
      real &= row.first_seg == column.first_seg
    causal, strict = (jnp.all(x & real, 0) for x in _causal_kinds(q.pos, k.pos))
    undecided = hop_kind == OTHER
    hop_kind = jnp.where(undecided & strict, constant(STRICT), hop_kind)
    hop_kind = jnp.where(undecided & causal, constant(CAUSAL), hop_kind)
  return jnp.where(all_allowed, constant(FULL), hop_kind)


def _causal_kinds(q: jax.Array, k: jax.Array) -> tuple[Any, Any]:
  """Whether `k <= q` is (causal, strict), for positions [B, pieces, T]."""
  if q.shape[-1] != k.shape[-1]:
    never = jnp.zeros((1, 1, 1), bool)
    return never, never
  # Keys in order: comparing each query with the key at its step and the next
  # one decides for all the others.
  order = jnp.all(k[..., 1:] >= k[..., :-1], -1)[:, None, :]
  q, k = q[:, :, None], k[:, None]
  below_diagonal = jnp.all(k <= q, -1) & jnp.all(k[..., 1:] > q[..., :-1], -1)
  above_diagonal = jnp.all(k > q, -1) & jnp.all(k[..., :-1] <= q[..., 1:], -1)
  return order & below_diagonal, order & above_diagonal


class HopPlan(NamedTuple):
  """Plan of how a hop is computed.

  Fields:
    choice: One of the kinds or `PIECES`, int32 [].
    grid: Kinds of the pieces, int32 [2, columns]; None where the lengths do
      not divide into pieces.
  """

  choice: jax.Array
  grid: jax.Array | None

  @classmethod
  def of(cls, context: Context, sound: Bool[Array, ""]) -> HopPlan:
    """Plan a hop; `sound`: whether a kernel may have these operands."""
    at, mask = (context.q, context.k), context.mask
    choice = kinds(mask, *at)[0, 0]
    grid = None
    t, s = (c.pos.shape[1] for c in at)
    half = t // 2
    if half and t % 2 == 0 and s % half == 0:
      grid = kinds(mask, *at, 2, s // half)
      into_pieces = (choice == OTHER) & jnp.all(grid != OTHER)
      choice = jnp.where(into_pieces, jnp.int32(PIECES), choice)
    choice = jnp.where(sound | (choice == NONE), choice, jnp.int32(OTHER))
    return cls(choice, grid)

  def switch(
    self, branches: list[Any], axes: frozenset[str], *operands: Any
  ) -> PyTree:
    """Run the chosen branch; branches are in the order of the kinds."""
    used = branches if self.grid is not None else branches[:PIECES]
    typed = [_varying(branch, axes) for branch in used]
    return lax.switch(self.choice, typed, *operands)


def forward(
  kernel: VendorKernel, fallback: Any, x: Local, args: ScoreArgs, carry: Partial
) -> Partial:
  """Fold a hop into `carry` by a `VendorKernel`, or by `fallback`."""
  if not _is_plain_call(args):
    return fallback.forward(x, args, carry)
  # All branches of a switch must vary over the same mesh axes.
  operands = (x, args.context, carry)
  axes = collectives.varying_axes(operands)
  x, context, carry = collectives.vary(operands, axes)
  args, scale = args._replace(context=context), args.scores.scale
  plan = HopPlan.of(context, _finite(*x))

  def fold(causal: bool, x: Local, carry: Partial) -> Partial:
    out, lse = kernel.outputs(x, scale, causal)
    return merge(carry, Partial.of(out, lse))

  def strict(x: Local, carry: Partial) -> Partial:
    out, lse = kernel.outputs(_up(x), scale, True)
    # The first row has become the last one, and saw too many keys.
    first = _last_row(lse)
    lse = jnp.where(first, -jnp.inf, lse)
    out = jnp.where(first[..., None], jnp.zeros_like(out), out)
    shifted = Partial.of(_roll(out, 1), _roll(lse, 1))
    return merge(carry, shifted)

  kernel_branches = [
    lambda x, carry: carry,
    functools.partial(fold, False),
    functools.partial(fold, True),
    strict,
  ]
  kernel_branches = [_varying(branch, axes) for branch in kernel_branches]

  def run_fallback(x: Local, carry: Partial) -> Partial:
    return fallback.forward(x, args, carry)

  def pieces(x: Local, carry: Partial) -> Partial:
    def piece(n: jax.Array, carry: Partial) -> Partial:
      part = _Piece.of(plan, x, n)
      part_carry = Partial(*(part.cut_q(c) for c in carry))
      part_carry = lax.switch(
        part.kind, kernel_branches, part.cut(x), part_carry
      )
      return Partial(*map(part.put_q, carry, part_carry))

    return loop(_num_pieces(plan), piece, carry)

  return plan.switch([*kernel_branches, run_fallback, pieces], axes, x, carry)


def backward(
  kernel: VendorKernel,
  fallback: Any,
  x: Local,
  args: ScoreArgs,
  residuals: Residuals,
  carry: QGradients,
) -> Gradients:
  """Gradients of a hop by a `VendorKernel`, or by `fallback`."""
  if not _is_plain_call(args):
    return fallback.backward(x, args, residuals, carry)
  operands = (x, args.context, residuals, carry)
  axes = collectives.varying_axes(operands)
  x, context, residuals, carry = collectives.vary(operands, axes)
  args, scale = args._replace(context=context), args.scores.scale
  lse = jnp.where(residuals.lse == jnp.inf, _FAR, residuals.lse)
  out, reproduced = stand_in(residuals.do, residuals.delta, lse)
  usable = reproduced & _finite(*x, residuals.do, residuals.delta, lse)
  plan = HopPlan.of(context, usable)
  dq, dterms = carry
  grad_dtype = dq.dtype

  def zeros(x: Local) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(x.k.shape, grad_dtype), jnp.zeros(x.v.shape, grad_dtype)

  rows = Rows(residuals.do, out, lse)

  def add(
    causal: bool, x: Local, rows: Rows, dq: jax.Array, shift: int = 0
  ) -> PyTree:
    dq_part, dk, dv = kernel.gradients(x, rows, scale, causal)
    dq_part = _roll(dq_part, shift) if shift else dq_part
    dq = dq + _flipped(dq_part.astype(grad_dtype))
    return dq, dk.astype(grad_dtype), dv.astype(grad_dtype)

  def strict(x: Local, rows: Rows, dq: jax.Array) -> PyTree:
    rows = Rows(*(_roll(a, -1) for a in rows))
    lse = jnp.where(_last_row(rows.lse), _FAR, rows.lse)
    return add(True, _up(x), rows._replace(lse=lse), dq, 1)

  kernel_branches = [
    lambda x, rows, dq: (dq, *zeros(x)),
    functools.partial(add, False),
    functools.partial(add, True),
    strict,
  ]
  kernel_branches = [_varying(branch, axes) for branch in kernel_branches]
  # Only blockwise may change the gradients of terms.
  with_terms = [
    lambda x, rows, carry, one=branch: (*one(x, rows, carry[0]), carry[1])
    for branch in kernel_branches
  ]

  def run_fallback(x: Local, rows: Rows, carry: QGradients) -> PyTree:
    # Rebuilt here: arrays that only this branch needs take no memory in others.
    saved_residuals = Residuals.of(x.q, *residuals[:3])
    return tuple(fallback.backward(x, args, saved_residuals, carry))

  def pieces(x: Local, rows: Rows, carry: QGradients) -> PyTree:
    def piece(n: jax.Array, state: tuple) -> tuple:
      dq, dk, dv = state
      part = _Piece.of(plan, x, n)
      part_rows = Rows(*(part.cut_q(a) for a in rows))
      dq_part, dk_j, dv_j = lax.switch(
        part.kind, kernel_branches, part.cut(x), part_rows, part.cut_q(dq, 4)
      )
      return (
        part.put_q(dq, dq_part, 4),
        part.add_k(dk, dk_j),
        part.add_k(dv, dv_j),
      )

    start = collectives.vary((carry[0], *zeros(x)), axes)
    return *loop(_num_pieces(plan), piece, start), carry[1]

  branches = [*with_terms, run_fallback, pieces]
  return Gradients(*plan.switch(branches, axes, x, rows, (dq, dterms)))


def _is_plain_call(args: ScoreArgs) -> bool:
  """Whether scores are products and the mask is all that hides pairs."""
  extra = args.scores.dropout_rate or args.context.allow is not None
  return args.plain and not extra


def stand_in(
  do: Shaped[Array, "B K G T J"],
  delta: Float[Array, "B K G T"],
  lse: Float[Array, "B K G T"],
) -> tuple[Float[Array, "B K G T J"], Bool[Array, ""]]:
  """Return (out, right): an `out` that reproduces `delta`, and if it does.

  A kernel computes sum(do * out) itself and accepts any `out`: the multiple of
  `do` whose product with it is `delta` also brings the cotangent of the
  log-sum-exp, and takes no memory between the passes. Where `do` is 0 no
  multiple reproduces a `delta` from the log-sum-exp alone: `right` is false.
  """
  stat_dtype = delta.dtype
  do_wide = do.astype(stat_dtype)
  # Squares of small numbers would underflow to 0.
  max_abs = jnp.max(jnp.abs(do_wide), -1, keepdims=True)
  unit = do_wide / jnp.where(max_abs == 0, jnp.ones_like(max_abs), max_abs)
  norm = max_abs[..., 0] * jnp.sum(unit * unit, -1)
  weight = delta / jnp.where(norm == 0, jnp.ones_like(norm), norm)
  out = (unit * weight[..., None]).astype(do.dtype)
  product = jnp.sum(do_wide * out.astype(stat_dtype), -1)
  # Rows that see nothing have probabilities of 0, whatever `delta` is.
  tolerance = _NEAR * jnp.abs(delta) + _STEP * jnp.sum(jnp.abs(do_wide), -1)
  close = jnp.abs(product - delta) <= tolerance
  return out, jnp.all(close | (lse >= _FAR))


class _Piece(NamedTuple):
  """A piece of a hop: its kind, and where it begins."""

  kind: jax.Array
  row: jax.Array
  column: jax.Array
  length: int

  @classmethod
  def of(cls, plan: HopPlan, x: Local, n: jax.Array) -> _Piece:
    assert plan.grid is not None
    columns, length = plan.grid.shape[1], x.q.shape[3] // 2
    i, j = n // columns, n % columns
    return cls(plan.grid[i, j], i * length, j * length, length)

  def cut_q(self, a: jax.Array, axis: int = 3) -> jax.Array:
    return lax.dynamic_slice_in_dim(a, self.row, self.length, axis)

  def put_q(self, a: jax.Array, update: jax.Array, axis: int = 3) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(a, update, self.row, axis)

  def cut_k(self, a: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(a, self.column, self.length, 2)

  def add_k(self, a: jax.Array, summand: jax.Array) -> jax.Array:
    total = self.cut_k(a) + summand
    return lax.dynamic_update_slice_in_dim(a, total, self.column, 2)

  def cut(self, x: Local) -> Local:
    return Local(self.cut_q(x.q), self.cut_k(x.k), self.cut_k(x.v))


def _num_pieces(plan: HopPlan) -> int:
  assert plan.grid is not None
  return plan.grid.size


def _varying(
  branch: Callable[..., Any], axes: frozenset[str]
) -> Callable[..., Any]:
  """Wrap a branch so that its results vary over `axes`, as all must."""
  return lambda *operands: collectives.vary(branch(*operands), axes)


def _finite(*arrays: jax.Array) -> jax.Array:
  return jnp.stack([jnp.all(jnp.isfinite(a)) for a in arrays]).all()


def _roll(a: jax.Array, shift: int) -> jax.Array:
  """Roll rows along axis 3."""
  return jnp.roll(a, shift, 3)


def _last_row(lse: jax.Array) -> jax.Array:
  """Mark the row that `_roll` moved around the end, bool [B, K, G, T]."""
  row_index = lax.broadcasted_iota(jnp.int32, lse.shape, 3)
  return row_index == lse.shape[3] - 1


def _up(x: Local) -> Local:
  """Shift queries up by one: "row i sees keys 0..i-1" becomes causal.

  The keys stay as they are and the length is kept, mostly an even one.
  """
  return x._replace(q=_roll(x.q, -1))


def _flipped(dq: jax.Array) -> jax.Array:
  """Transpose [B, K, G, T, H] to the axes of `Gradients.q`."""
  return jnp.transpose(dq, (0, 1, 4, 2, 3))
