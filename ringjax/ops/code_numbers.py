"""Numbers that codes of a weight stand for, as arrays and in kernels.

Guarantees: a weight is level(code) * step + minimum in float32, rounded once,
to the dtype that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.typing import ArrayLeaf

# A Pallas reference to an array, for which JAX has no common class.
Ref = Any
# Level of each code of 4 bits, 16 of them; None: codes of 8 bits, which are
# their levels.
Levels = tuple[int, ...] | tuple[float, ...] | None
_LANES = 128
# Rows of a register of bytes, and of bfloat16.
_BYTE_ROWS, _HALF_ROWS = 32, 16


def is_consecutive(levels: Levels) -> bool:
  """Whether a code's level is the code plus a whole number."""
  if levels is None:
    return True
  first = int(levels[0])
  are_integers = all(isinstance(x, int) for x in levels)
  return are_integers and levels == tuple(range(first, first + 16))


def levels_of(
  codes: Int[Array, "*shape"], levels: Levels, dtype: DTypeLike
) -> Shaped[Array, "*shape"]:
  """Level of each code of 0 to 15.

  Args:
    codes: Codes, of any whole numbers.
    levels: Level of each code.
    dtype: Dtype of levels that are not consecutive; others are of the codes'.
  """
  assert levels is not None
  if is_consecutive(levels):
    return codes + np.asarray(levels[0], codes.dtype)
  # A choice for each bit: a TPU would look up numbers of a table one after
  # another.
  choices: list[Any] = list(np.array(levels, dtype))
  for bit in (1, 2, 4, 8):
    is_set = (codes & np.asarray(bit, codes.dtype)) != 0
    choices = [
      jnp.where(is_set, high, low)
      for low, high in zip(choices[::2], choices[1::2], strict=True)
    ]
  return choices[0]


def numbers_of(
  codes: Shaped[Array, "*lead rows O"], levels: Levels
) -> tuple[Shaped[Array, "*lead rows O"], ...]:
  """Levels of a group's codes: of its first half, and of its second one.

  For 8 bits there is one part. They are int8, or float32 if not whole.
  """
  if levels is None:
    return (codes.astype(jnp.int8),)
  are_integers = all(isinstance(x, int) for x in levels)
  dtype = np.dtype(np.int8 if are_integers else np.float32)
  halves = (codes >> 4).astype(jnp.int8), (codes & 15).astype(jnp.int8)
  return tuple(levels_of(x, levels, dtype) for x in halves)


def floats_of(
  codes: Shaped[Array, "G rows O"],
  step: Float[Array, "G O"],
  minimum: Float[Array, "G O"] | None,
  levels: Levels,
  dtype: DTypeLike,
) -> Float[Array, "I O"]:
  """The decoded weight.

  Args:
    codes: Codes of groups; two of 4 bits share a byte.
    step: Step of each group.
    minimum: Number that is added to a group's weights, or None.
    levels: Level of each code.
    dtype: Dtype of the result.
  """
  x = jnp.concatenate(numbers_of(codes, levels), 1).astype(jnp.float32)
  x = x * step.astype(jnp.float32)[:, None]
  if minimum is not None:
    x = x + minimum.astype(jnp.float32)[:, None]
  return x.astype(dtype).reshape(-1, x.shape[-1])


def reason_against_decoding(
  codes: Shaped[ArrayLeaf, "*lead G rows O"],
  group: int,
  scales: Sequence[Shaped[ArrayLeaf, "*lead G O"] | None],
) -> str | None:
  """Reason not to decode groups by `write_floats`, or None.

  Args:
    codes: Codes of groups.
    group: Number of weights of a group.
    scales: Steps, and least numbers if there are any.
  """
  if reason := reason_of_scales(scales):
    return reason
  groups, rows = codes.shape[-3:-1]
  if rows % _HALF_ROWS or groups * rows % _BYTE_ROWS:
    return f"groups of {group}: it takes multiples of 16 rows of codes"
  if rows % _BYTE_ROWS and _BYTE_ROWS % rows:
    return f"groups of {group}: half of a register of codes is left"
  return None


def reason_of_scales(
  scales: Sequence[Shaped[ArrayLeaf, " ..."] | None],
) -> str | None:
  """Reason for which a kernel can't read steps or least numbers, or None."""
  for array in scales:
    dtype = None if array is None else np.dtype(array.dtype).name
    if dtype not in (None, "float32", "bfloat16", "float16"):
      return f"steps of {dtype}"
  return None


def with_bits(x: Float[Array, " ..."]) -> Shaped[Array, " ..."]:
  """float16 as its bits, which a kernel decodes: Mosaic has no float16."""
  if x.dtype != jnp.float16:
    return x
  return lax.bitcast_convert_type(x, jnp.uint16)


def floats_of_bits(x: Shaped[Array, " ..."]) -> Float[Array, " ..."]:
  """float32 of steps; those of 16 unsigned bits are float16."""
  if x.dtype != jnp.uint16:
    return x.astype(jnp.float32)
  bits = x.astype(jnp.int32)
  sign, size = (bits & 0x8000) << 16, bits & 0x7FFF
  normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
  small = size.astype(jnp.float32) * jnp.float32(2.0**-24)
  magnitude = jnp.where(size < 0x400, small, normal)
  bits = lax.bitcast_convert_type(magnitude, jnp.int32) | sign
  return lax.bitcast_convert_type(bits, jnp.float32)


def write_levels(codes: Ref, out: Ref) -> None:
  """Write codes of 8 bits as numbers, in a kernel.

  Args:
    codes: Codes, int8 [D, columns] in vector memory.
    out: Result, [D, columns]; D is a multiple of 128.
  """
  depth = out.shape[0]
  chunk = 2 * _LANES if depth % (2 * _LANES) == 0 else _LANES

  def convert(k: Array, _: None) -> None:
    rows = pl.ds(pl.multiple_of(k * chunk, chunk), chunk)
    out[rows, :] = codes[rows, :].astype(jnp.float32).astype(out.dtype)

  lax.fori_loop(0, depth // chunk, convert, None)


def write_floats(
  codes: Ref, scales: Sequence[Ref], out: Ref, group: int, levels: Levels
) -> None:
  """Write the decoded weight of codes in groups, in a kernel.

  Args:
    codes: Codes, [rows of all groups, columns] in vector memory.
    scales: Steps, float32 [G, columns], and least numbers if there are any.
    out: Result, [D, columns].
    group: Number of weights of a group.
    levels: Level of each code.
  """
  step_ref, *minimum_refs = scales
  code_rows = group if levels is None else group // 2
  # Whole registers of codes: one group, or several small ones.
  num_groups = max(1, _BYTE_ROWS // code_rows)
  size = num_groups * code_rows

  def convert(k: Array, _: None) -> None:
    start = pl.multiple_of(k * size, _BYTE_ROWS)
    numbers = codes[pl.ds(start, size), :].astype(jnp.int32)
    for n in range(num_groups):
      number = k * num_groups + n
      step = step_ref[pl.ds(number, 1), :]
      part = numbers[n * code_rows : (n + 1) * code_rows]
      halves = [part]
      if levels is not None:
        halves = [
          levels_of((part >> shift) & 15, levels, np.float32)
          for shift in (4, 0)
        ]
      for half, level in enumerate(halves):
        weight = level.astype(jnp.float32) * step
        for minimum_ref in minimum_refs:
          weight += minimum_ref[pl.ds(number, 1), :]
        row = pl.multiple_of(number * group + half * code_rows, _HALF_ROWS)
        out[pl.ds(row, code_rows), :] = weight.astype(out.dtype)

  lax.fori_loop(0, out.shape[0] // (num_groups * group), convert, None)
