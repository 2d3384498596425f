"""Layout of an encoded vector's bytes, for kernels that decode in registers.

A codec states it as a `CodeFormat`. An element of a vector is

  level(code) * scale + zero

with codes of a few bits, packed as `parts` lays them out, a scale and a zero of
each group of the vector (float16, after the codes) or of each channel
(constants), and after these a few elements that are kept exactly in place of
their codes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Shaped

from ringjax.typing import ArrayLeaf

# On a TPU the bytes of a token in a cache are padded to a multiple of the
# first, numbers to one of the second: its memory would be padded to that
# anyway.
_ROWS, _LANES = 8, 128


def stored_codes(
  lead: tuple[int, ...], slots: int, width: int, platform: str
) -> tuple[tuple[int, ...], Any]:
  """Shape and dtype of the codes of slots, of `width` bytes a token.

  [..., S, X] and uint8. On a TPU tokens are last, as it pads the last axis of
  an
  array to 128, and the dtype is int8: it marks which of the two layouts it is.
  """
  if platform != "tpu":
    return (*lead, slots, width), jnp.uint8
  return (*lead, -(-width // _ROWS) * _ROWS, slots), jnp.int8


def filled_up(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Pad an array of slots of numbers to what a TPU's memory pads it to.

  Without padding it would be stored smaller between two programs, and copied
  into each of them. Codes are padded by `stored_codes`.
  """
  *leading, width = x.shape
  if x.dtype == jnp.int8:
    return x
  shape = *leading, -(-width // _LANES) * _LANES
  return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)


def token_axis(x: Shaped[ArrayLeaf, " ..."]) -> int:
  """Index of the token axis in an array of slots, or in data for it.

  It is the last one of coordinates [B, S] and of codes [..., X, S], which are
  int8, see `stored_codes`; in others [..., S, D] it is the one before.
  """
  return x.ndim - (1 if x.ndim == 2 or x.dtype == jnp.int8 else 2)


def row_major(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """Store an array in memory in the order of its axes, the last one fastest.

  TPU's compiler would store slots as it suits the write of one token, or the
  reading of a tile, and copy the slots of all layers, in each layer, between
  the two.
  """
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def as_stored(
  data: Shaped[Array, "*b T X"], like: Shaped[Array, " ..."]
) -> Shaped[Array, " ..."]:
  """Convert numbers or bytes of tokens to the layout of an array of slots.

  Data from such an array already has it.
  """
  if data.dtype == jnp.int8:
    return data
  if like.dtype != jnp.int8:
    widths = [(0, 0)] * (data.ndim - 1) + [(0, like.shape[-1] - data.shape[-1])]
    return jnp.pad(data, widths) if widths[-1][1] else data
  padding = like.shape[-2] - data.shape[-1]
  data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, padding)])
  return lax.bitcast_convert_type(jnp.swapaxes(data, -1, -2), jnp.int8)


def as_bytes(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """View a slice of an array of slots as bytes of tokens; keep numbers."""
  if x.dtype != jnp.int8:
    return x
  return lax.bitcast_convert_type(jnp.swapaxes(x, -1, -2), jnp.uint8)


def padded(count: int) -> int:
  """Round up a number of codes to fill the last byte of each part."""
  return -(-count // 8) * 8


def packed_bytes(count: int, bits: int) -> int:
  """Number of bytes of `count` codes of `bits` bits."""
  return padded(count) * bits // 8


class CodePart(NamedTuple):
  """Some bits of all codes of a vector.

  Byte n holds those of the codes n, n + width, n + 2 width, ..., the first in
  its lowest bits.

  Fields:
    size: Bits of each code: 1, 2, 4 or 8.
    low: Index of the lowest of them in the code.
    first: Index of the first byte.
    width: Number of bytes.
  """

  size: int
  low: int
  first: int
  width: int


def parts(count: int, bits: int) -> tuple[CodePart, ...]:
  """Parts of `count` packed codes: powers of two, the largest first."""
  code_parts, low, first = [], 0, 0
  for size in (8, 4, 2, 1):
    if bits & size:
      width = packed_bytes(count, size)
      code_parts.append(CodePart(size, low, first, width))
      low, first = low + size, first + width
  return tuple(code_parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeFormat:
  """Layout of the bytes of a vector.

  Attributes:
    dim: Number of elements of the vector.
    bits: Bits of a code.
    groups: Number of groups of neighbours, of equal size but for the last.
    halves: Number of float16 numbers of a group after the codes: 0; 1, its
      scale; 2, its scale and zero. Scales of all groups come first.
    levels: Levels of the codes, ascending; None: a code is its own level, or,
      with `by_constants`, the last of the constants has them.
    by_constants: Whether the constants have levels [2**bits].
    by_channel: Whether the constants begin with scale and zero of channels,
      [dim] each.
    outliers: Number of elements kept exactly, whose codes are 0: after the
      scales their places (a byte, or two above 256 elements), then the elements
      as float16.
    sinks: Whether the lowest bit of the first outlier marks a vector whose
      channel scales are times a factor and whose zero is the sink; both are
      constants after the zero: [1] and [dim].
  """

  dim: int
  bits: int
  groups: int = 1
  halves: int = 0
  levels: tuple[float, ...] | None = None
  by_constants: bool = False
  by_channel: bool = False
  outliers: int = 0
  sinks: bool = False

  @property
  def parts(self) -> tuple[CodePart, ...]:
    """Parts of the codes."""
    return parts(self.dim, self.bits)

  @property
  def codes(self) -> int:
    """Number of bytes of the codes."""
    return packed_bytes(self.dim, self.bits)

  @property
  def group(self) -> int:
    """Number of elements of a group."""
    return -(-self.dim // self.groups)

  @property
  def mirrored(self) -> bool:
    """Whether levels are known, and the lower ones mirror the upper ones."""
    levels = self.levels or (1.0,)
    pairs = zip(levels, reversed(levels), strict=True)
    return all(abs(a + b) < 1e-5 for a, b in pairs)

  @property
  def looked_up(self) -> bool:
    """Whether codes are looked up in a table of levels."""
    return self.by_constants or self.levels is not None
