"""How the bytes of an encoded vector hold its numbers.

A codec says it so that a kernel can decode in registers. A number of a vector
is

  level(code) * scale + zero

with codes of a few bits, packed as `parts` says, a scale and a zero of each
group of the vector (float16, behind the codes) or of each channel (constants),
and behind these a few numbers that are kept exactly in place of their codes.
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

# On a TPU a cache stores so many bytes of a token or a multiple, and so many
# numbers: what its memory would fill up anyway.
_ROWS, _LANES = 8, 128


def stored_codes(
  lead: tuple[int, ...], slots: int, width: int, platform: str
) -> tuple[tuple[int, ...], Any]:
  """Shape and dtype of the codes of slots, of `width` bytes a token.

  [..., S, X] and uint8. On a TPU tokens are last, for it fills up the last axis
  of an array to 128, and the dtype is int8: it says which of the two it is.
  """
  if platform != "tpu":
    return (*lead, slots, width), jnp.uint8
  return (*lead, -(-width // _ROWS) * _ROWS, slots), jnp.int8


def filled_up(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """An array of slots of numbers, filled up to what a TPU's memory has.

  It would store fewer otherwise between two programs, and copy the array into
  each of them. Codes are as `stored_codes` says.
  """
  *lead, width = x.shape
  if x.dtype == jnp.int8:
    return x
  shape = *lead, -(-width // _LANES) * _LANES
  return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)


def token_axis(x: Shaped[ArrayLeaf, " ..."]) -> int:
  """Which axis of an array of slots, or of what goes into them, is tokens.

  It is the last one of coordinates [B, S] and of codes [..., X, S], which are
  int8, see `stored_codes`; of others [..., S, D] it is the one before.
  """
  return x.ndim - (1 if x.ndim == 2 or x.dtype == jnp.int8 else 2)


def row_major(x: Shaped[Array, " ..."]) -> jax.Array:
  """The same array, in memory as its axes stand: the last one fastest.

  TPU's compiler would store slots as the write of one token likes it, or as the
  reading of a tile does, and copy the slots of all layers, in each layer,
  between the two.
  """
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def as_stored(
  data: Shaped[Array, "*b T X"], like: Shaped[Array, " ..."]
) -> Shaped[Array, " ..."]:
  """Numbers or bytes of tokens in the form of an array of slots, which those
  that come out of such an array have."""
  if data.dtype == jnp.int8:
    return data
  if like.dtype != jnp.int8:
    wide = [(0, 0)] * (data.ndim - 1) + [(0, like.shape[-1] - data.shape[-1])]
    return jnp.pad(data, wide) if wide[-1][1] else data
  over = like.shape[-2] - data.shape[-1]
  data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, over)])
  return lax.bitcast_convert_type(jnp.swapaxes(data, -1, -2), jnp.int8)


def as_bytes(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """Bytes of tokens, of a part of an array of slots; numbers as they are."""
  if x.dtype != jnp.int8:
    return x
  return lax.bitcast_convert_type(jnp.swapaxes(x, -1, -2), jnp.uint8)


def padded(count: int) -> int:
  """Codes with those that fill up the last byte of each part."""
  return -(-count // 8) * 8


class CodePart(NamedTuple):
  """Some bits of all codes of a vector.

  Byte n holds those of the codes n, n + width, n + 2 width, ..., the first in
  its lowest bits.

  Fields:
    size: bits of each code: 1, 2, 4 or 8.
    low: the lowest of them in the code.
    first: the first byte.
    width: bytes.
  """

  size: int
  low: int
  first: int
  width: int


def parts(count: int, bits: int) -> tuple[CodePart, ...]:
  """The parts of `count` packed codes: powers of two, the largest first."""
  found, low, first = [], 0, 0
  for size in (8, 4, 2, 1):
    if bits & size:
      width = padded(count) * size // 8
      found.append(CodePart(size, low, first, width))
      low, first = low + size, first + width
  return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeFormat:
  """The bytes of a vector.

  Attributes:
    dim: numbers of the vector.
    bits: of a code.
    groups: of neighbours, of equal size but for the last.
    halves: float16 numbers of a group behind the codes: 0; 1, its scale; 2, its
      scale and zero. Scales of all groups come first.
    levels: of the codes, ascending; None: a code is its own level, or, with
      `by_constants`, the last of the constants has them.
    by_constants: whether the constants have levels [2**bits].
    by_channel: whether the constants begin with scale and zero of channels,
      [dim] each.
    outliers: numbers kept exactly, whose codes are 0: behind the scales their
      places (a byte, or two above 256 numbers), then the numbers as float16.
    sinks: whether the lowest bit of the first of these says that the scale of
      channels is times a factor and that the zero is the sink, which are
      constants behind the zero: [1] and [dim].
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
    """Of the codes."""
    return parts(self.dim, self.bits)

  @property
  def codes(self) -> int:
    """Bytes of the codes."""
    return padded(self.dim) * self.bits // 8

  @property
  def group(self) -> int:
    """Numbers of a group."""
    return -(-self.dim // self.groups)

  @property
  def mirrored(self) -> bool:
    """Whether levels are known, of which the lower mirror the upper ones."""
    levels = self.levels or (1.0,)
    pairs = zip(levels, reversed(levels), strict=True)
    return all(abs(a + b) < 1e-5 for a, b in pairs)

  @property
  def looked_up(self) -> bool:
    """Whether levels are others than the codes."""
    return self.by_constants or self.levels is not None
