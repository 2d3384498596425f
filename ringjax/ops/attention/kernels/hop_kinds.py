"""Classifies the mask of a hop, and runs a vendor's kernel where it fits.

Guarantees: `kinds` never says of a hop what is not so. A kernel that knows
"all keys" and "row i sees keys 0..i" then equals `Blockwise`, values and
gradients, wherever a hop is one of

  none   no query sees a key       nothing is touched
  full   every query sees all      the kernel, without a mask
  causal row i sees keys 0..i      the kernel, causal
  strict row i sees keys 0..i-1    the kernel, causal, rows shifted by one
  pieces halves that are these     a loop over the pieces (zigzag, gather)
  other                            `Blockwise`

A program is the same on all shards and for all hops: only the coordinates
know which hop it is, so a `switch` asks them, at O(T) comparisons.
Cost: of `full`, a hop's products; of `causal` and `strict` half of them, as
far as the kernel skips tiles. The tests for NaN read the operands once more.

A kernel divides and rounds its output, which becomes a partial of weight
exp(lse) and is merged in float32. Its gradients are those of *all* keys, so it
is given the log-sum-exp of all of them and, in place of the output, something
whose product with the cotangent is the `delta` of all of them (`stand_in`).

A NaN would reach rows that do not see it: kernels multiply it with a zero of
their mask. A hop of operands that are not finite is `other`, which keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

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

# A log-sum-exp of rows that see nothing: exp(score - it) is 0, and unlike
# infinity it survives a kernel's change of base.
_FAR = 1e30
# By how much what stands for `delta` may be off, of it: bfloat16's rounding,
# and of the cotangents' sum: the finest step of float16.
_NEAR, _STEP = 2.0**-8, 2.0**-24


@runtime_checkable
class VendorKernel(Protocol):
  """A vendor's attention, without a mask or causal: row i sees keys 0..i."""

  def outputs(
    self, x: Local, scale: float, causal: bool
  ) -> tuple[jax.Array, jax.Array]:
    """(out [B, K, G, T, J], float32 log-sum-exp [B, K, G, T])."""
    ...

  def gradients(
    self, x: Local, rows: Rows, scale: float, causal: bool
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq [B, K, G, T, H], dk [B, K, S, H], dv [B, K, S, J]).

    Of p = exp(score - lse) and ds = p (do v - sum(do out)), whatever `out`
    and `lse` of `rows` are.
    """
    ...


class Rows(NamedTuple):
  """What a vendor's backward pass gets of the rows.

  Fields:
    do: [B, K, G, T, J], the cotangent of the output.
    out: [B, K, G, T, J], the output, or what stands for it (`stand_in`).
    lse: float32 [B, K, G, T], the log-sum-exp.
  """

  do: jax.Array
  out: jax.Array
  lse: jax.Array


def _terms(mask: Mask) -> list[Mask]:
  """The masks of which all have to allow a pair."""
  if isinstance(mask, And):
    return _terms(mask.left) + _terms(mask.right)
  return [mask]


def known(mask: Mask) -> bool:
  """Whether hops under this mask are mostly of a kind that has a name."""
  simple = (Causal, Everything, SameSegment)
  return all(isinstance(term, simple) for term in _terms(mask))


def kinds(
  mask: Mask, q: Coords, k: Coords, rows: int = 1, columns: int = 1
) -> jax.Array:
  """The kind of each of `rows` x `columns` equal pieces, int32.

  Examples of the batch share the answer: one of several kinds is `OTHER`.
  Of padding tokens nothing is known but that no query sees them.
  """
  cut = lambda at, n: Coords(*(c.reshape(c.shape[0], n, -1) for c in at))
  q, k = cut(q, rows), cut(k, columns)
  row = jax.tree.map(lambda c: c[:, :, None], extent(q))
  column = jax.tree.map(lambda c: c[:, None, :], extent(k))
  some, every = mask.bound(row, column)
  real = row.all & column.all
  every = jnp.all(every & real, 0)
  some = jnp.any(some & row.some & column.some, 0)
  number = lambda kind: jnp.int32(kind)
  found = jnp.where(some, number(OTHER), number(NONE))
  has = lambda kind: any(isinstance(term, kind) for term in _terms(mask))
  if known(mask) and has(Causal):
    if has(SameSegment):
      real &= row.first_seg == row.last_seg
      real &= column.first_seg == column.last_seg
      real &= row.first_seg == column.first_seg
    causal, strict = (jnp.all(x & real, 0) for x in _stairs(q.pos, k.pos))
    open_ = found == OTHER
    found = jnp.where(open_ & strict, number(STRICT), found)
    found = jnp.where(open_ & causal, number(CAUSAL), found)
  return jnp.where(every, number(FULL), found)


def _stairs(q: jax.Array, k: jax.Array) -> tuple[Any, Any]:
  """Whether `k <= q` is (causal, strict), of positions [B, pieces, T]."""
  if q.shape[-1] != k.shape[-1]:
    no = jnp.zeros((1, 1, 1), bool)
    return no, no
  # Of keys in order the one at the step speaks for all before and behind it.
  order = jnp.all(k[..., 1:] >= k[..., :-1], -1)[:, None, :]
  q, k = q[:, :, None], k[:, None]
  below = jnp.all(k <= q, -1) & jnp.all(k[..., 1:] > q[..., :-1], -1)
  above = jnp.all(k > q, -1) & jnp.all(k[..., :-1] <= q[..., 1:], -1)
  return order & below, order & above


class HopPlan(NamedTuple):
  """How a hop is computed.

  Fields:
    choice: int32 [], of the kinds and `PIECES`.
    grid: int32 [2, columns], the kinds of the pieces; None where the lengths
      give none.
  """

  choice: jax.Array
  grid: jax.Array | None

  @classmethod
  def of(cls, context: Context, sound: Bool[Array, ""]) -> HopPlan:
    """`sound`: whether a kernel may have these operands."""
    at, mask = (context.q, context.k), context.mask
    choice = kinds(mask, *at)[0, 0]
    grid = None
    t, s = (c.pos.shape[1] for c in at)
    half = t // 2
    if half and t % 2 == 0 and s % half == 0:
      grid = kinds(mask, *at, 2, s // half)
      cut = (choice == OTHER) & jnp.all(grid != OTHER)
      choice = jnp.where(cut, jnp.int32(PIECES), choice)
    choice = jnp.where(sound | (choice == NONE), choice, jnp.int32(OTHER))
    return cls(choice, grid)

  def switch(
    self, branches: list[Any], axes: frozenset[str], *operands: Any
  ) -> PyTree:
    """The results of the chosen branch, in the order of the kinds."""
    used = branches if self.grid is not None else branches[:PIECES]
    typed = [_typed(branch, axes) for branch in used]
    return lax.switch(self.choice, typed, *operands)


def forward(
  kernel: VendorKernel, fallback: Any, x: Local, args: ScoreArgs, carry: Partial
) -> Partial:
  """A local algorithm's `forward` by a `VendorKernel`, or by `fallback`."""
  if not _bare(args):
    return fallback.forward(x, args, carry)
  # Branches have to agree over which axes their results differ.
  both = (x, args.context, carry)
  axes = collectives.varying_axes(both)
  x, context, carry = collectives.vary(both, axes)
  args, scale = args._replace(context=context), args.scores.scale
  plan = HopPlan.of(context, _finite(*x))

  def fold(causal: bool, x: Local, carry: Partial) -> Partial:
    out, lse = kernel.outputs(x, scale, causal)
    return merge(carry, Partial.of(out, lse))

  def strict(x: Local, carry: Partial) -> Partial:
    out, lse = kernel.outputs(_up(x), scale, True)
    # What was the first row is the last one now, and saw too much.
    first = _last_row(lse)
    lse = jnp.where(first, -jnp.inf, lse)
    out = jnp.where(first[..., None], jnp.zeros_like(out), out)
    found = Partial.of(_roll(out, 1), _roll(lse, 1))
    return merge(carry, found)

  simple = [
    lambda x, carry: carry,
    functools.partial(fold, False),
    functools.partial(fold, True),
    strict,
  ]
  simple = [_typed(branch, axes) for branch in simple]

  def other(x: Local, carry: Partial) -> Partial:
    return fallback.forward(x, args, carry)

  def pieces(x: Local, carry: Partial) -> Partial:
    def piece(n: jax.Array, carry: Partial) -> Partial:
      part = _Piece.of(plan, x, n)
      one = Partial(*(part.cut_q(c) for c in carry))
      one = lax.switch(part.kind, simple, part.cut(x), one)
      return Partial(*map(part.put_q, carry, one))

    return loop(_size(plan), piece, carry)

  return plan.switch([*simple, other, pieces], axes, x, carry)


def backward(
  kernel: VendorKernel,
  fallback: Any,
  x: Local,
  args: ScoreArgs,
  residuals: Residuals,
  carry: QGradients,
) -> Gradients:
  """A local algorithm's `backward` by a `VendorKernel`, or by `fallback`."""
  if not _bare(args):
    return fallback.backward(x, args, residuals, carry)
  everything = (x, args.context, residuals, carry)
  axes = collectives.varying_axes(everything)
  x, context, residuals, carry = collectives.vary(everything, axes)
  args, scale = args._replace(context=context), args.scores.scale
  lse = jnp.where(residuals.lse == jnp.inf, _FAR, residuals.lse)
  out, right = stand_in(residuals.do, residuals.delta, lse)
  fine = right & _finite(*x, residuals.do, residuals.delta, lse)
  plan = HopPlan.of(context, fine)
  dq, dterms = carry
  wide = dq.dtype

  def zeros(x: Local) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(x.k.shape, wide), jnp.zeros(x.v.shape, wide)

  rows = Rows(residuals.do, out, lse)

  def add(
    causal: bool, x: Local, rows: Rows, dq: jax.Array, shift: int = 0
  ) -> PyTree:
    mine, dk, dv = kernel.gradients(x, rows, scale, causal)
    mine = _roll(mine, shift) if shift else mine
    dq = dq + _flipped(mine.astype(wide))
    return dq, dk.astype(wide), dv.astype(wide)

  def strict(x: Local, rows: Rows, dq: jax.Array) -> PyTree:
    rows = Rows(*(_roll(a, -1) for a in rows))
    lse = jnp.where(_last_row(rows.lse), _FAR, rows.lse)
    return add(True, _up(x), rows._replace(lse=lse), dq, 1)

  simple = [
    lambda x, rows, dq: (dq, *zeros(x)),
    functools.partial(add, False),
    functools.partial(add, True),
    strict,
  ]
  simple = [_typed(branch, axes) for branch in simple]
  # Blockwise may have gradients of terms; the others leave them alone.
  keeping = [
    lambda x, rows, carry, one=one: (*one(x, rows, carry[0]), carry[1])
    for one in simple
  ]

  def other(x: Local, rows: Rows, carry: QGradients) -> PyTree:
    # Made again, so that what only this branch needs takes no memory else.
    saved = Residuals.of(x.q, *residuals[:3])
    return tuple(fallback.backward(x, args, saved, carry))

  def pieces(x: Local, rows: Rows, carry: QGradients) -> PyTree:
    def piece(n: jax.Array, state: tuple) -> tuple:
      dq, dk, dv = state
      part = _Piece.of(plan, x, n)
      mine = Rows(*(part.cut_q(a) for a in rows))
      one, dk_j, dv_j = lax.switch(
        part.kind, simple, part.cut(x), mine, part.cut_q(dq, 4)
      )
      return part.put_q(dq, one, 4), part.add_k(dk, dk_j), part.add_k(dv, dv_j)

    start = collectives.vary((carry[0], *zeros(x)), axes)
    return *loop(_size(plan), piece, start), carry[1]

  branches = [*keeping, other, pieces]
  return Gradients(*plan.switch(branches, axes, x, rows, (dq, dterms)))


def _bare(args: ScoreArgs) -> bool:
  """Whether scores are products and the mask is all that hides pairs."""
  extra = args.scores.dropout_rate or args.context.allow is not None
  return args.plain and not extra


def stand_in(
  do: Shaped[Array, "B K G T J"],
  delta: Float[Array, "B K G T"],
  lse: Float[Array, "B K G T"],
) -> tuple[jax.Array, jax.Array]:
  """(out, right): what gives a kernel `delta`, and whether it does.

  A kernel finds sum(do * out) itself. Its `out` may be any: the multiple of
  `do` whose product with it is `delta` also brings the cotangent of the
  log-sum-exp, and takes no memory between the passes. No multiple of 0 does
  where `delta` has the latter's part alone: then it is not right.
  """
  wide = delta.dtype
  many = do.astype(wide)
  # Squares of what is small would be 0.
  most = jnp.max(jnp.abs(many), -1, keepdims=True)
  unit = many / jnp.where(most == 0, jnp.ones_like(most), most)
  norm = most[..., 0] * jnp.sum(unit * unit, -1)
  weight = delta / jnp.where(norm == 0, jnp.ones_like(norm), norm)
  out = (unit * weight[..., None]).astype(do.dtype)
  found = jnp.sum(many * out.astype(wide), -1)
  # Rows that see nothing have probabilities of 0, whatever `delta` is.
  room = _NEAR * jnp.abs(delta) + _STEP * jnp.sum(jnp.abs(many), -1)
  near = jnp.abs(found - delta) <= room
  return out, jnp.all(near | (lse >= _FAR))


class _Piece(NamedTuple):
  """One of the pieces of a hop: its kind, and where it begins."""

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

  def put_q(self, a: jax.Array, one: jax.Array, axis: int = 3) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(a, one, self.row, axis)

  def cut_k(self, a: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(a, self.column, self.length, 2)

  def add_k(self, a: jax.Array, one: jax.Array) -> jax.Array:
    one = self.cut_k(a) + one
    return lax.dynamic_update_slice_in_dim(a, one, self.column, 2)

  def cut(self, x: Local) -> Local:
    return Local(self.cut_q(x.q), self.cut_k(x.k), self.cut_k(x.v))


def _size(plan: HopPlan) -> int:
  assert plan.grid is not None
  return plan.grid.size


def _typed(
  branch: Callable[..., Any], axes: frozenset[str]
) -> Callable[..., Any]:
  """The branch whose results vary over `axes`, as all branches' do."""
  return lambda *operands: collectives.vary(branch(*operands), axes)


def _finite(*arrays: jax.Array) -> jax.Array:
  return jnp.stack([jnp.all(jnp.isfinite(a)) for a in arrays]).all()


def _roll(a: jax.Array, shift: int) -> jax.Array:
  """Rows moved along axis 3, around its ends."""
  return jnp.roll(a, shift, 3)


def _last_row(lse: jax.Array) -> jax.Array:
  """bool like `lse` [B, K, G, T]: the row that `_roll` took around."""
  number = lax.broadcasted_iota(jnp.int32, lse.shape, 3)
  return number == lse.shape[3] - 1


def _up(x: Local) -> Local:
  """Row i + 1 in place of row i: "keys 0..i-1" becomes causal.

  The keys stay as they are and the length is kept, an even one mostly.
  """
  return x._replace(q=_roll(x.q, -1))


def _flipped(dq: jax.Array) -> jax.Array:
  """[B, K, G, T, H] in the order of axes of `Gradients.q`."""
  return jnp.transpose(dq, (0, 1, 4, 2, 3))
