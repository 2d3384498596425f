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
is a product of the cosines and sines alone, of all heads at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.rope import Rotation

# Rows of a register of float32.
_ROWS = 8
# A turn is 2**32; a radian is so much of it: an integer and the rest.
_RADIAN = 2**32 / (2 * math.pi)
_WHOLE = round(_RADIAN)
# Least squared errors up to an eighth of a turn (Cephes).
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


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


class Places(NamedTuple):
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
  ) -> Places:
    """Of rows that hold the numbers `dims` of vectors of `dim` numbers."""
    pair = np.full(dim, -1)
    if rotation is not None and rotation.rope is not None:
      rope = rotation.rope
      pair[rotation.first : rotation.first + rope.dims] = rope.pairs
    found: dict[tuple[int, ...], int] = {}
    slots = [
      None if max(own) < 0 else found.setdefault(tuple(own), len(found))
      for own in pair[dims].tolist()
    ]
    pairs = np.asarray([*found], int).reshape(-1)
    turns = Turns(dims.shape[1], tuple(slots), pairs.size)
    return cls(turns, dims, pairs)

  def frequencies(self, rotation: Rotation) -> Float[Array, "count 128"]:
    """Of each row of the tables, in all lanes; 0 where nothing turns."""
    assert rotation.rope is not None
    each = rotation.rope.frequencies(rotation.length)
    each = jnp.concatenate([each, jnp.zeros(1, jnp.float32)])[self.pairs]
    return jnp.broadcast_to(each[:, None], (each.size, tile_ops.LANES))

  def queries(
    self,
    q: Float[Array, "B K R H"],
    rotation: Rotation | None,
    scale: Float[Array, "K H"],
    zero: Float[Array, "K H"],
  ) -> tuple[
    Float[Array, "B K R E"], Float[Array, "B K R Z"], Float[Array, "B K R 1"]
  ]:
    """What multiplies codes, cosines and sines, and what is added.

    Args:
      q: queries.
      rotation: of the keys.
      scale: of channels.
      zero: of channels.

    Returns:
      left operands of the rows of codes and of the tables, in q's dtype, and
      what neither has, float32.
    """
    wide = crossed = q.astype(jnp.float32)
    if self.pairs.size:
      assert rotation is not None and rotation.rope is not None
      crossed = rotation.quarter(wide)
      size = np.ones((1, 1, 1, q.shape[3]), np.float32)
      turned = slice(rotation.first, rotation.first + rotation.rope.dims)
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
    of_tables = [
      jnp.einsum(
        "bkrh,hu->bkru",
        x * by_head(zero),
        jnp.asarray(into),
        precision=lax.Precision.HIGHEST,
      )
      for x in (wide, crossed)
    ]
    rest = jnp.sum(wide * by_head(zero) * still, -1, keepdims=True)
    return (
      jnp.concatenate(parts, -1).astype(q.dtype),
      jnp.concatenate(of_tables, -1).astype(q.dtype),
      rest,
    )


def rotated(
  turns: Turns, pieces: list[jax.Array], tables: Any, lanes: slice, dtype: Any
) -> Shaped[Array, "E S"]:
  """The right operand: rows of codes times their cosines and sines.

  Args:
    turns: the rows.
    pieces: levels, float32 [R, S] each.
    tables: cosines and sines, float32 [2 count, keys], a reference.
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


def cos_sin(
  angle: Float[Array, "n S"],
) -> tuple[Float[Array, "n S"], Float[Array, "n S"]]:
  """Cosines and sines of radians, of which |angle| < 2**31.

  The angle is a part of a turn by integers, which drop whole turns exactly.
  """
  whole = jnp.floor(angle)
  rest = (angle - whole) * np.float32(_RADIAN) + whole * np.float32(
    _RADIAN - _WHOLE
  )
  phase = whole.astype(jnp.int32) * _WHOLE + rest.astype(jnp.int32)
  quarter = (phase + (1 << 29)) >> 30
  x = (phase - (quarter << 30)).astype(jnp.float32) * np.float32(1 / _RADIAN)
  z = x * x
  a, b, c = map(np.float32, _SIN)
  sin = ((a * z + b) * z + c) * (z * x) + x
  a, b, c = map(np.float32, _COS)
  cos = (((a * z + b) * z + c) * z - np.float32(0.5)) * z + np.float32(1)
  odd = quarter & 1 != 0
  sin, cos = jnp.where(odd, cos, sin), jnp.where(odd, sin, cos)

  def signed(x: jax.Array, quarter: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = bits ^ ((quarter << 30) & -0x80000000)
    return lax.bitcast_convert_type(bits, jnp.float32)

  return signed(cos, quarter + 1), signed(sin, quarter)


def fill(
  tables: Any,
  frequencies: Float[Array, "count 128"],
  pos: Int[Array, "1 keys"],
  lanes: slice,
) -> None:
  """Writes the cosines and sines of some keys' positions."""
  count = frequencies.shape[0]
  at = pos[:, lanes].astype(jnp.float32)
  for first in range(0, count, _ROWS):
    rows = frequencies[first : first + _ROWS]
    angle = tile_ops.widened(rows, at.shape[1]) * at
    cos, sin = cos_sin(angle)
    tables[first : first + rows.shape[0], lanes] = cos
    tables[count + first : count + first + rows.shape[0], lanes] = sin
