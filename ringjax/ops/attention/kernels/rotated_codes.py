"""Keys that a kernel for TPU rotates between their codes and the product.

Guarantees: angles are those of `Rope.tables`, and cosines and sines are exact
up to float32's rounding, at any position.
Cost: two products of float32 a number; of each position the cosines and sines,
once for all heads of a tile.

A key x scale + zero of channels, rotated to its position p, and a query:

  q . R(p) (x scale + zero) = sum x cos(p f) (q scale) + x sin(p f) (r scale)
                            + sum   cos(p f) (q zero)  +   sin(p f) (r zero)

where r is q, rotated by -90 degrees. So each row of codes becomes two rows of
the product's right operand, the scales are in the queries, and the second line
is a product of the cosines and sines alone, of all heads at once. An outlier is
what it has more than a code 0 would have, e at the place d, whose products with
the queries are added:

  e cos(p f) q[d] + e sin(p f) r[d]

Of a vector that is coded from the sink the first line is times the factor, and
the second is of the sink in place of zero.
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
  """Which rows of codes turn, and which rows of the tables turn them.

  Fields:
    rows: R, of codes that are rotated at a time: a piece.
    slots: for each piece the number of the R rows of the tables that turn it;
      None where none of its rows turns.
    count: rows of the cosines, and of the sines.
  """

  rows: int
  slots: tuple[int | None, ...]
  count: int

  @property
  def products(self) -> int:
    """Rows of the product's right operand."""
    return self.rows * sum(1 if n is None else 2 for n in self.slots)


class RotatedRows(NamedTuple):
  """The numbers of a vector and their frequencies, row by row.

  Fields:
    turns: the rows.
    dims: int [pieces, R], which number of the vector each row is.
    pairs: int [count], which frequency a row of the tables has; -1 for none.
  """

  turns: Turns
  dims: np.ndarray
  pairs: np.ndarray

  @classmethod
  def of(
    cls, dims: Int[np.ndarray, "pieces R"], rotation: Rotation | None, dim: int
  ) -> RotatedRows:
    """Of rows that hold the numbers `dims` of vectors of `dim` numbers."""
    pair = np.full(dim, -1)
    if rotation is not None and rotation.rope is not None:
      rope = rotation.rope
      pair[rotation.first : rotation.first + rope.turned] = rope.pairs
    found: dict[tuple[int, ...], int] = {}
    slots = [
      None if max(own) < 0 else found.setdefault(tuple(own), len(found))
      for own in pair[dims].tolist()
    ]
    pairs = np.asarray([*found], int).reshape(-1)
    turns = Turns(dims.shape[1], tuple(slots), pairs.size)
    return cls(turns, dims, pairs)

  def frequencies(self, rotation: Rotation) -> Int[Array, "2 count 128"]:
    """Of each row of the tables, in all lanes; 0 where nothing turns.

    The fields of `Frequencies`, one behind the other, as int32.
    """
    assert rotation.rope is not None
    each = rotation.rope.frequencies(rotation.length)
    each = each.rearranged(lambda x: jnp.pad(x, (0, 1))[self.pairs])
    words = jnp.stack([each.units, as_words(each.rest)])
    return jnp.broadcast_to(words[..., None], (*words.shape, tile_ops.LANES))

  def each(self, rotation: Rotation | None, dim: int) -> Frequencies:
    """Of each number of a vector, [H]; 0 for those that turn not."""
    zeros = Frequencies(jnp.zeros(dim, jnp.int32), jnp.zeros(dim, jnp.float32))
    if rotation is None or rotation.rope is None:
      return zeros
    rope = rotation.rope
    turned = slice(rotation.first, rotation.first + rope.turned)
    pairs = rope.frequencies(rotation.length)
    put = lambda into, x: into.at[turned].set(x[rope.pairs])
    return Frequencies(*map(put, zeros, pairs))

  def queries(
    self,
    q: Float[Array, "B K R H"],
    rotation: Rotation | None,
    scale: Float[Array, "K H"],
    zero: Float[Array, "K H"],
  ) -> ChannelQueries:
    """What the rows of a tile multiply.

    Args:
      q: queries.
      rotation: of the keys.
      scale: of channels.
      zero: of channels.
    """
    wide, crossed = q.astype(jnp.float32), jnp.zeros(q.shape, jnp.float32)
    if self.pairs.size:
      assert rotation is not None and rotation.rope is not None
      crossed = rotation.quarter(wide)
      size = np.ones((1, 1, 1, q.shape[3]), np.float32)
      turned = slice(rotation.first, rotation.first + rotation.rope.turned)
      size[..., turned] = rotation.rope.scaling.magnitude
      wide, crossed = (x * size for x in (wide, crossed))
    by_head = lambda x: x.astype(jnp.float32)[None, :, None]
    straight, across = (x * by_head(scale) for x in (wide, crossed))
    parts, still = [], np.zeros((1, 1, 1, q.shape[3]), np.float32)
    into = np.zeros((q.shape[3], self.pairs.size), np.float32)
    for slot, dims in zip(self.turns.slots, self.dims, strict=True):
      parts.append(straight[..., dims])
      if slot is None:
        still[..., dims] = 1
        continue
      parts.append(across[..., dims])
      into[dims, slot * dims.size + np.arange(dims.size)] = 1
    zeros = [
      jnp.einsum(
        "bkrh,hu->bkru",
        x * by_head(zero),
        jnp.asarray(into),
        precision=lax.Precision.HIGHEST,
      )
      for x in (wide, crossed)
    ]
    rest = jnp.sum(wide * by_head(zero) * still, -1, keepdims=True)
    joined = lambda x: jnp.concatenate(x, -1).astype(q.dtype)
    return ChannelQueries(joined(parts), joined(zeros), rest, wide, crossed)


class ChannelQueries(NamedTuple):
  """Queries of keys whose scales and zeros are those of channels.

  Fields:
    rows: [B, K, R, E] in the queries' dtype, of the right operand's rows.
    zeros: [B, K, R, 2 count], the same, of cosines and sines alone.
    rest: float32 [B, K, R, 1], products with zeros that turn not.
    straight: float32 [B, K, R, H], what cosines of a key's numbers multiply.
    crossed: the same of sines.
  """

  rows: Float[Array, "B K R E"]
  zeros: Float[Array, "B K R _"]
  rest: Float[Array, "B K R 1"]
  straight: Float[Array, "B K R H"]
  crossed: Float[Array, "B K R H"]


def rotated(
  turns: Turns,
  pieces: list[Float[Array, "R S"]],
  tables: Ref,
  lanes: slice,
  dtype: DTypeLike,
) -> Shaped[Array, "E S"]:
  """The right operand: rows of codes times their cosines and sines.

  Args:
    turns: the rows.
    pieces: levels, float32 [R, S] each.
    tables: of `fill`, or None if nothing turns.
    lanes: which keys.
    dtype: of the product.
  """
  found = []
  for slot, x in zip(turns.slots, pieces, strict=True):
    if slot is None:
      found.append(x)
      continue
    first = slot * turns.rows
    for start in (first, turns.count + first):
      found.append(x * tables[start : start + turns.rows, lanes])
  return jnp.concatenate(found, 0).astype(dtype)


def as_words(x: Float[Array, "*N"]) -> Int[Array, "*N"]:
  """The bits of float32, which no arithmetic may take for a number."""
  return lax.bitcast_convert_type(x, jnp.int32)


def as_numbers(words: Int[Array, "*N"]) -> Float[Array, "*N"]:
  """What `as_words` was given."""
  return lax.bitcast_convert_type(words, jnp.float32)


def cos_sin(
  frequencies: Frequencies,
  pos: Int[Array, "*M"],
  dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "*L"], Float[Array, "*L"]]:
  """Cosines and sines of positions' angles, exact enough for `dtype`.

  The arrays broadcast.
  """
  units, _ = frequencies.phase(pos)
  x = units.astype(jnp.float32) * np.float32(2.0**-32)
  cos, sin = _polynomials(_TERMS[jnp.dtype(dtype).name])
  z = x * x
  value = lambda terms: functools.reduce(lambda y, c: y * z + c, terms)
  return value(cos), value(sin) * x


@functools.cache
def _polynomials(
  terms: tuple[int, int],
) -> tuple[list[np.float32], list[np.float32]]:
  """Of cos(2 pi x) and sin(2 pi x) / x by x**2 < 1/4, the highest first."""
  x = np.cos(np.pi * (np.arange(1000) + 0.5) / 1000) / 2

  def fitted(y: np.ndarray, count: int) -> list[np.float32]:
    made = np.polynomial.Chebyshev.fit(x * x, y, count - 1, domain=[0, 0.25])
    found = made.convert(kind=np.polynomial.Polynomial).coef
    return [np.float32(c) for c in found[::-1]]

  turn = 2 * np.pi * x
  of_cos, of_sin = terms
  return fitted(np.cos(turn), of_cos), fitted(np.sin(turn) / x, of_sin)


def fill(
  tables: Ref,
  frequencies: Int[Array, "2 count 128"],
  pos: Int[Array, "1 keys"],
  lanes: slice,
  dtype: DTypeLike,
) -> None:
  """Writes the cosines and sines of some keys' positions.

  Args:
    tables: a reference, float32 [2 count, keys].
    frequencies: of the rows, see `RotatedRows.frequencies`.
    pos: positions.
    lanes: which keys.
    dtype: for which they are exact enough.
  """
  count = frequencies.shape[1]
  at = pos[:, lanes]
  for first in range(0, count, _ROWS):
    units, rest = (
      tile_ops.widened(x[first : first + _ROWS], at.shape[1])
      for x in (frequencies[0], as_numbers(frequencies[1]))
    )
    both = cos_sin(Frequencies(units, rest), at, dtype)
    for start, x in zip((first, count + first), both, strict=True):
      tables[start : start + units.shape[0], lanes] = x
