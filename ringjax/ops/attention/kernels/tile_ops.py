"""Building blocks of the Pallas kernels: tile lists, scalars, products, scores.

A step of a TPU kernel is a tile (row of queries, column of keys) from a list
that `tile_kinds` gives. The kernel's pipeline reads the list ahead (scalar
prefetch), and the list's length is the grid's: skipped tiles cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8, Shaped

from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Coords
from ringjax.parallel import chips

LANES = 128
# The default for an unknown TPU: little vector memory, and slow links.
SOME = "tpu-v5p"
# Flags of a step in the list, in addition to its row and column.
FIRST, LAST, MASKED, FULL = 1, 2, 4, 8
COLUMN_BITS, ROW_BITS = 14, 13
# Most steps of a list, which is stored in scalar memory.
MOST_STEPS = 1 << 16

# Rows of a register of bfloat16.
_SUBLANES = 16

# Statistics are to base 2 while in VMEM: the exponential is exp2 anyway.
# `Ref` is a Pallas reference to an array or to a part of one: JAX has no common
# class for both.
Ref = Any
LOG2_E = math.log2(math.e)

NT = (((1,), (1,)), ((), ()))  # [a, h] [b, h] -> [a, b]
NN = (((1,), (0,)), ((), ()))  # [a, h] [h, b] -> [a, b]


class TileSteps(NamedTuple):
  """Steps of a kernel: the tiles that count, row by row.

  Fields:
    words: Steps, int32 [rows * columns], of which `count` are used: the row,
      the column, and whether it is its row's first or last and needs a mask.
    count: Number of steps, int32 [], at least 1.
  """

  words: jax.Array
  count: jax.Array

  @classmethod
  def of(cls, kinds: Int8[Array, "rows columns"]) -> TileSteps:
    """List the steps of the tile kinds of `tile_kinds`."""
    counts = kinds != 0
    place = jnp.cumsum(counts, 1, dtype=jnp.int32)
    first = counts & (place == 1)
    last = counts & (place == place[:, -1:])
    set_bit = lambda condition, bit: jnp.where(
      condition, jnp.int32(bit), jnp.int32(0)
    )
    index = lambda axis: lax.broadcasted_iota(jnp.int32, kinds.shape, axis)
    words = (
      set_bit(first, FIRST)
      | set_bit(last, LAST)
      | set_bit(kinds == 1, MASKED)
      | set_bit(kinds == 2, FULL)
      | index(1) << 4
      | index(0) << (4 + COLUMN_BITS)
    ).reshape(-1)
    order = jnp.argsort(~counts.reshape(-1), stable=True)
    count = jnp.sum(counts, dtype=jnp.int32)
    words = words[order]
    # An empty list becomes one step that passes a row through.
    words = words | jnp.where(count == 0, jnp.int32(FIRST | LAST), jnp.int32(0))
    return cls(words, jnp.maximum(count, 1))


def lanes(n: int) -> int:
  """Round `n` lanes up to whole registers."""
  return -(-n // LANES) * LANES


def widened(x: Shaped[Array, "M 128"], size: int) -> Shaped[Array, "M _"]:
  """Repeat rows of equal numbers to [M, size]."""
  if size % LANES:
    return jnp.broadcast_to(x[:, :1], (x.shape[0], size))
  return jnp.concatenate([x] * (size // LANES), 1)


def core(chip: str | None) -> chips.Core:
  """Core that the compiler assumes for a chip, or the default."""
  return chips.core(chip or SOME)


def unreadable(terms: Terms, context: Context) -> str | None:
  """Reason why a kernel that masks by coordinates declines, or None."""
  if terms.bias is not None or context.allow is not None:
    return "a bias or mask array, of which it would read every pair"
  if any(jnp.ndim(leaf) > 1 for leaf in jax.tree.leaves(context.mask)):
    return "a mask with an array of more than one axis"
  return None


def undecoded(
  q: Float[Array, "B K G T H"],
  keys: KVView,
  args: ScoreArgs,
  *,
  dtypes: tuple[str, ...],
  widest: int,
  numbers: Sequence[Any] = (),
) -> str | None:
  """Reason why a kernel of these dtypes and heads declines a call, or None.

  Args:
    q: Queries.
    keys: View of the keys and values.
    args: Score function and its arrays.
    dtypes: Names of the dtypes that the kernel multiplies.
    widest: Largest head dim.
    numbers: Stored keys and values that are multiplied as they are.
  """
  for x in (q, *numbers):
    if x.dtype.name not in dtypes:
      return f"{x.dtype}: it multiplies {' and '.join(dtypes)}"
  if args.scores.dropout_rate:
    return "dropout, which is for training"
  dim, value = q.shape[4], keys.shape[4]
  if max(dim, value) > widest:
    return f"heads of {dim} and {value}: at most {widest}"
  if not value:
    return "values without numbers"
  return unreadable(args.terms, args.context)


def by_row(at: Coords, shape: tuple[int, ...]) -> Coords:
  """Coordinates [B, G * T] of queries [B, K, G, T, H], head by head."""
  b, _, g, t, _ = shape
  tiled = (jnp.tile(jnp.broadcast_to(c, (b, t)), (1, g)) for c in at)
  return Coords(*tiled)


def slopes_by_row(slopes: Float[Array, "K G"], t: int) -> Float[Array, "K _"]:
  """Repeat ALiBi slopes [K, G] for the rows of `by_row`: [K, G * T]."""
  return jnp.repeat(slopes.astype(jnp.float32), t, 1)


def score(
  scores: Scores,
  dot: Float[Array, " ..."],
  slope: Float[Array, "_ _"] | Float[Array, ""] | None,
  far: Callable[[], Array],
) -> tuple[Float[Array, " ..."], Float[Array, " ..."] | None]:
  """Scores, and tanh of the soft cap or None, from query-key products.

  Args:
    scores: Score function.
    dot: Products of queries and keys.
    slope: ALiBi slope, of each query or of all, or None.
    far: Function that gives the distances, called if there is a slope.
  """
  s, tanh = dot * scores.scale, None
  if scores.soft_cap is not None:
    tanh = jnp.tanh(s * (1 / scores.soft_cap))
    s = tanh * scores.soft_cap
  return (s if slope is None else s - slope * far()), tanh


def power(
  scores: Scores,
  dot: Float[Array, " ..."],
  slope: Float[Array, "_ _"] | Float[Array, ""] | None,
  far: Callable[[], Array],
) -> tuple[Float[Array, " ..."], float]:
  """Factor scores as (x, c): exp(score) is 2 ** (c * x), c above 0.

  Plain scores are a multiple of the products, which saves a pass over them.
  """
  if scores.soft_cap is None and slope is None and scores.scale > 0:
    return dot, scores.scale * LOG2_E
  return score(scores, dot, slope, far)[0], LOG2_E


def row_of(word: Int[Array, " ..."]) -> Int[Array, " ..."]:
  return word >> (4 + COLUMN_BITS)


def column_of(word: Int[Array, " ..."]) -> Int[Array, " ..."]:
  return (word >> 4) & ((1 << COLUMN_BITS) - 1)


class Scalars(NamedTuple):
  """Operands of a kernel in scalar memory.

  Fields:
    words: Steps.
    leaves: Arrays of the mask, each [1] or [B].
    slopes: ALiBi slopes, float32 [K * G], or None.
    heads: Head indices for dropout, int32 [K * G], or None.
    seed: Dropout seed, int32 [1] or [B], or None.
  """

  words: Ref
  leaves: tuple[Ref, ...]
  slopes: Ref | None
  heads: Ref | None
  seed: Ref | None

  @classmethod
  def of(cls, terms: Terms, context: Context, steps: TileSteps) -> Scalars:
    leaves = [
      jnp.asarray(a, jnp.int32).reshape(-1)
      for a in jax.tree.leaves(context.mask)
    ]
    slopes = terms.slopes
    return cls(
      steps.words,
      tuple(leaves),
      None if slopes is None else slopes.astype(jnp.float32).reshape(-1),
      None if context.heads is None else context.heads.reshape(-1),
      None
      if context.seed is None
      else lax.bitcast_convert_type(context.seed, jnp.int32),
    )


def dot(
  a: Shaped[Array, "m n"],
  b: Shaped[Array, "h w"],
  dims: tuple[
    tuple[tuple[int, ...], tuple[int, ...]],
    tuple[tuple[int, ...], tuple[int, ...]],
  ],
) -> Float[Array, "_ _"]:
  """Multiply two matrices, `NT` or `NN`, with float32 accumulation."""
  exact = a.dtype == jnp.float32
  return lax.dot_general(
    a,
    b,
    dims,
    precision=lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def column(x: Shaped[Array, "1 n"]) -> Shaped[Array, "n 1"]:
  """Transpose a row, as whole registers of 8 rows."""
  return jnp.broadcast_to(x, (8, x.shape[1])).T[:, 0:1]


def finite(x: Shaped[Array, " ..."]) -> Bool[Array, " ..."]:
  """Mark the elements that are neither infinite nor NaN."""
  return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def cleaned(
  v: Shaped[Array, "k J"],
) -> tuple[Shaped[Array, "k J"], Float[Array, "1 k"]]:
  """Replace non-finite values by 0; a row [1, k] of marks is NaN for such keys.

  A product transposes the column of marks into the row.
  """
  nonfinite = ~finite(v)
  marks = nonfinite.astype(jnp.float32).astype(jnp.bfloat16)
  ones = jnp.ones((_SUBLANES, v.shape[1]), jnp.bfloat16)
  num_bad = dot(ones, marks, NT)[0:1]
  flag = jnp.where(num_bad > 0, jnp.nan, 0.0)
  return jnp.where(nonfinite, jnp.zeros_like(v), v), flag


def clean(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """Replace non-finite elements by 0."""
  return jnp.where(finite(x), x, jnp.zeros_like(x))


def pair(at: Coords, batch: int) -> Int[Array, "{batch} 2 T"]:
  """Stack coordinates of every example to [B, 2, T]: a token is a lane.

  One token per row would take a whole register row of memory each.
  """
  broadcast = [jnp.broadcast_to(c, (batch, c.shape[1])) for c in at]
  return jnp.stack(broadcast, 1)
