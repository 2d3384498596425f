"""Rotation of decoded keys inside a Pallas TPU kernel, before the product.

Guarantees: angles are those of `Rope.tables`, and cosines and sines are exact
up to float32's rounding, at any position.
Cost: two products of float32 per element; the cosines and sines of each
position once for all heads of a tile.

The product of a query and a key with per-channel scale and zero, x scale +
zero, rotated to its position p:

  q . R(p) (x scale + zero) = sum x cos(p f) (q scale) + x sin(p f) (r scale)
                            + sum   cos(p f) (q zero)  +   sin(p f) (r zero)

where r is q, rotated by -90 degrees. So each row of codes becomes two rows of
the product's right operand, the scales are in the queries, and the second line
is a product of the cosines and sines alone, for all heads at once. An outlier
is the excess e over the decoded code 0 at dim d, whose products with the
queries are added:

  e cos(p f) q[d] + e sin(p f) r[d]

For a vector that is coded from the sink the first line is times the factor,
and the second has the sink in place of zero.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.rope import Rotation
from ringjax.ops.turns import Frequencies

# Rows of a register of float32.
_ROWS = 8
# Terms of the polynomials of cosines and sines: errors of 4e-5 and 5e-4, a
# quarter of bfloat16's rounding, and of float32's rounding.
_TERMS = {"bfloat16": (5, 4), "float32": (7, 7)}


class Turns(NamedTuple):
  """Plan of the rows of codes that rotate, and of the tables' rows they use.

  Fields:
    rows: Rows of codes that are rotated at once, R: one piece.
    slots: Index, in units of R rows of the tables, that rotates each piece;
      None for a piece without rotation.
    count: Rows of the cosines, and of the sines.
  """

  rows: int
  slots: tuple[int | None, ...]
  count: int

  @property
  def products(self) -> int:
    """Rows of the product's right operand."""
    return self.rows * sum(1 if n is None else 2 for n in self.slots)


class RotatedRows(NamedTuple):
  """Elements of a vector and their frequencies, row by row.

  Fields:
    plan: Plan of the rotation.
    dims: Element of the vector that each row holds, int [pieces, R].
    pairs: Frequency that each row of the tables has, int [count]; -1: none.
  """

  plan: Turns
  dims: np.ndarray
  pairs: np.ndarray

  @classmethod
  def of(
    cls, dims: Int[np.ndarray, "pieces R"], rotation: Rotation | None, dim: int
  ) -> RotatedRows:
    """Plan the rotation of rows that hold elements `dims` of `dim`."""
    pair = np.full(dim, -1)
    if rotation is not None and rotation.rope is not None:
      rope = rotation.rope
      pair[rotation.first : rotation.first + rope.turned] = rope.pairs
    slot_of_pairs: dict[tuple[int, ...], int] = {}
    slots = [
      None
      if max(row_pairs) < 0
      else slot_of_pairs.setdefault(tuple(row_pairs), len(slot_of_pairs))
      for row_pairs in pair[dims].tolist()
    ]
    pairs = np.asarray([*slot_of_pairs], int).reshape(-1)
    rotation_plan = Turns(dims.shape[1], tuple(slots), pairs.size)
    return cls(rotation_plan, dims, pairs)

  def frequencies(self, rotation: Rotation) -> Int[Array, "2 count 128"]:
    """Frequencies of the tables' rows in all lanes; 0 without rotation.

    The fields of `Frequencies`, stacked, as int32.
    """
    frequencies = rotation.frequencies.rearranged(
      lambda x: jnp.pad(x, (0, 1))[self.pairs]
    )
    words = jnp.stack([frequencies.units, as_words(frequencies.fractions)])
    return jnp.broadcast_to(words[..., None], (*words.shape, tile_ops.LANES))

  def element_frequencies(
    self, rotation: Rotation | None, dim: int
  ) -> Frequencies:
    """Frequencies of a vector's elements, [H]; 0 without rotation."""
    zeros = Frequencies(jnp.zeros(dim, jnp.int32), jnp.zeros(dim, jnp.float32))
    if rotation is None or rotation.rope is None:
      return zeros
    rope = rotation.rope
    rotated_dims = slice(rotation.first, rotation.first + rope.turned)
    pairs = rotation.frequencies
    scatter = lambda into, x: into.at[rotated_dims].set(x[rope.pairs])
    return Frequencies(*map(scatter, zeros, pairs))

  def queries(
    self,
    q: Float[Array, "B K R H"],
    rotation: Rotation | None,
    scale: Float[Array, "K H"],
    zero: Float[Array, "K H"],
  ) -> ChannelQueries:
    """Queries with per-channel scales, as left operands of the tile's rows.

    Args:
      q: Queries, [B, K, R, H].
      rotation: Rotation of the keys.
      scale: Scales of the channels.
      zero: Zeros of the channels.
    """
    straight_q, crossed = q.astype(jnp.float32), jnp.zeros(q.shape, jnp.float32)
    if self.pairs.size:
      assert rotation is not None and rotation.rope is not None
      crossed = rotation.quarter(straight_q)
      size = np.ones((1, 1, 1, q.shape[3]), np.float32)
      rotated_dims = slice(
        rotation.first, rotation.first + rotation.rope.turned
      )
      size[..., rotated_dims] = rotation.rope.scaling.magnitude
      straight_q, crossed = (x * size for x in (straight_q, crossed))
    per_head = lambda x: x.astype(jnp.float32)[None, :, None]
    straight, across = (x * per_head(scale) for x in (straight_q, crossed))
    parts, unrotated = [], np.zeros((1, 1, 1, q.shape[3]), np.float32)
    to_tables = np.zeros((q.shape[3], self.pairs.size), np.float32)
    for slot, dims in zip(self.plan.slots, self.dims, strict=True):
      parts.append(straight[..., dims])
      if slot is None:
        unrotated[..., dims] = 1
        continue
      parts.append(across[..., dims])
      to_tables[dims, slot * dims.size + np.arange(dims.size)] = 1
    zeros = [
      jnp.einsum(
        "bkrh,hu->bkru",
        x * per_head(zero),
        jnp.asarray(to_tables),
        precision=lax.Precision.HIGHEST,
      )
      for x in (straight_q, crossed)
    ]
    unrotated_zeros = jnp.sum(
      straight_q * per_head(zero) * unrotated, -1, keepdims=True
    )
    concat = lambda x: jnp.concatenate(x, -1).astype(q.dtype)
    return ChannelQueries(
      concat(parts), concat(zeros), unrotated_zeros, straight_q, crossed
    )


class ChannelQueries(NamedTuple):
  """Queries for keys with per-channel scales and zeros.

  Fields:
    rows: Left operand for the rotated rows of codes, [B, K, R, E], in the
      queries' dtype.
    zeros: Left operand for the cosines and sines alone, [B, K, R, 2 count], in
      the queries' dtype.
    unrotated_products: Products with the zeros of unrotated elements, float32
      [B, K, R, 1].
    straight: Factors of the cosines of a key's elements, float32 [B, K, R, H].
    crossed: Factors of their sines, float32 [B, K, R, H].
  """

  rows: Float[Array, "B K R E"]
  zeros: Float[Array, "B K R _"]
  unrotated_products: Float[Array, "B K R 1"]
  straight: Float[Array, "B K R H"]
  crossed: Float[Array, "B K R H"]


def rotated(
  turns: Turns,
  pieces: list[Float[Array, "R S"]],
  tables: Ref,
  lanes: slice,
  dtype: DTypeLike,
) -> Shaped[Array, "E S"]:
  """Multiply rows of codes by cosines and sines: the right operand.

  Args:
    turns: Plan of the rotation.
    pieces: Levels, float32 [R, S] each.
    tables: Cosines and sines of `fill`, or None if no row is rotated.
    lanes: Keys to take.
    dtype: Dtype of the product.
  """
  rows = []
  for slot, x in zip(turns.slots, pieces, strict=True):
    if slot is None:
      rows.append(x)
      continue
    first = slot * turns.rows
    for start in (first, turns.count + first):
      rows.append(x * tables[start : start + turns.rows, lanes])
  return jnp.concatenate(rows, 0).astype(dtype)


def as_words(x: Float[Array, "*N"]) -> Int[Array, "*N"]:
  """View float32 as int32, so that no arithmetic changes the bits."""
  return lax.bitcast_convert_type(x, jnp.int32)


def as_numbers(words: Int[Array, "*N"]) -> Float[Array, "*N"]:
  """View the int32 of `as_words` as float32 again."""
  return lax.bitcast_convert_type(words, jnp.float32)


def cos_sin(
  frequencies: Frequencies,
  pos: Int[Array, "*M"],
  dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "*L"], Float[Array, "*L"]]:
  """Cosines and sines of angles at positions, exact enough for `dtype`.

  The arrays broadcast.
  """
  units, _ = frequencies.phase(pos)
  x = units.astype(jnp.float32) * np.float32(2.0**-32)
  cos, sin = _polynomials(_TERMS[jnp.dtype(dtype).name])
  z = x * x
  evaluate = lambda terms: functools.reduce(lambda y, c: y * z + c, terms)
  return evaluate(cos), evaluate(sin) * x


@functools.cache
def _polynomials(
  terms: tuple[int, int],
) -> tuple[list[np.float32], list[np.float32]]:
  """Coefficients of cos(2 pi x) and sin(2 pi x) / x in x**2 < 1/4.

  The highest power is first.
  """
  x = np.cos(np.pi * (np.arange(1000) + 0.5) / 1000) / 2

  def fit(y: np.ndarray, count: int) -> list[np.float32]:
    series = np.polynomial.Chebyshev.fit(x * x, y, count - 1, domain=[0, 0.25])
    coefficients = series.convert(kind=np.polynomial.Polynomial).coef
    return [np.float32(c) for c in coefficients[::-1]]

  turn = 2 * np.pi * x
  cos_terms, sin_terms = terms
  return fit(np.cos(turn), cos_terms), fit(np.sin(turn) / x, sin_terms)


def fill(
  tables: Ref,
  frequencies: Int[Array, "2 count 128"],
  pos: Int[Array, "1 keys"],
  lanes: slice,
  dtype: DTypeLike,
) -> None:
  """Write the cosines and sines of some keys' positions.

  Args:
    tables: Reference to write to, float32 [2 count, keys].
    frequencies: Frequencies of the rows, see `RotatedRows.frequencies`.
    pos: Positions of the keys.
    lanes: Keys to write.
    dtype: Dtype for which they are exact enough.
  """
  count = frequencies.shape[1]
  positions = pos[:, lanes]
  for first in range(0, count, _ROWS):
    units, fractions = (
      tile_ops.widened(x[first : first + _ROWS], positions.shape[1])
      for x in (frequencies[0], as_numbers(frequencies[1]))
    )
    cos_and_sin = cos_sin(Frequencies(units, fractions), positions, dtype)
    for start, x in zip((first, count + first), cos_and_sin, strict=True):
      tables[start : start + units.shape[0], lanes] = x
