"""Blocks of ggml's types, unpacked on the devices.

Guarantees: a number of a block is level * step + least in float32, where the
product is exact, so that it is bit for bit the number that the package gguf
dequantises. Types that are not in `BLOCKS` are dequantised by that package.
Ref: https://github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c, for
the bytes of each type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt8

_Bytes: TypeAlias = UInt8[Array, "..."]
# Codes or levels [*lead, block]; steps and least numbers [*lead, block/group].
_Parts: TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockType:
  """A block type of ggml.

  Attributes:
    name: Name of the type in ggml.
    size: Numbers of a block.
    nbytes: Bytes of a block.
    group: Numbers that share a step.
    levels: Level of each code of 4 bits; None: codes are levels, of 8 bits.
    step: Narrowest dtype that holds every step.
    minimum: Narrowest dtype that holds every least number; None: without them.
    parts: Function of the bytes of blocks that returns their codes, steps and
      least numbers.
  """

  name: str
  size: int
  nbytes: int
  group: int
  levels: tuple[int, ...] | None
  step: str
  minimum: str | None
  parts: Callable[[_Bytes], _Parts]

  def split(self, raw: UInt8[Array, "*lead bytes"]) -> _Parts:
    """Codes [*lead, I] and, for each group of a row, steps and least numbers.

    Args:
      raw: Bytes of whole rows.
    """
    blocks = raw.reshape(*raw.shape[:-1], -1, self.nbytes)
    rows = lambda x: x.reshape(*raw.shape[:-1], -1)
    codes, step, minima = self.parts(blocks)
    return rows(codes), rows(step), None if minima is None else rows(minima)

  def levels_of(self, codes: Shaped[Array, "*lead I"]) -> Int[Array, "*lead I"]:
    """Levels int8 of codes."""
    if self.levels is None:
      return codes.astype(jnp.int8)
    return jnp.asarray(np.array(self.levels, np.int8))[codes]

  def floats(self, raw: UInt8[Array, "*lead bytes"]) -> Float[Array, "*lead I"]:
    """Numbers of whole rows, float32."""
    codes, step, minima = self.split(raw)
    per_number = lambda x: jnp.repeat(x.astype(jnp.float32), self.group, -1)
    x = self.levels_of(codes).astype(jnp.float32) * per_number(step)
    return x if minima is None else x + per_number(minima)


def _half(x: _Bytes, at: int) -> Float[Array, "... 1"]:
  """The float16 at a byte offset of each block."""
  number = jax.lax.bitcast_convert_type(x[..., at : at + 2], jnp.float16)
  return number[..., None]


def _wide(x: _Bytes, at: int) -> Float[Array, "... 1"]:
  return _half(x, at).astype(jnp.float32)


def _nibbles(x: _Bytes) -> _Bytes:
  """Low halves of bytes, then their high halves."""
  return jnp.concatenate([x & 15, x >> 4], -1)


def _bits(x: _Bytes, width: int, run: int) -> _Bytes:
  """Numbers of `width` bits, lowest first, each of whole runs of bytes.

  Args:
    x: Bytes.
    width: Bits of a number.
    run: Bytes whose lowest numbers come first, then their next ones.
  """
  fields = x.reshape(*x.shape[:-1], -1, 1, run)
  fields = fields >> _shifts(width, fields.ndim, -2)
  mask = jnp.uint8(2**width - 1)
  return (fields & mask).reshape(*x.shape[:-1], -1)


def _shifts(width: int, rank: int, axis: int) -> jax.Array:
  """Shifts of the numbers of `width` bits in a byte, along an axis."""
  shape = [1] * rank
  shape[axis] = 8 // width
  return jnp.arange(0, 8, width, dtype=jnp.uint8).reshape(shape)


def _signed(x: jax.Array, less: int) -> jax.Array:
  return x.astype(jnp.int8) - jnp.int8(less)


def _q4_0(x: _Bytes) -> _Parts:
  return _nibbles(x[..., 2:]), _half(x, 0), None


def _q4_1(x: _Bytes) -> _Parts:
  return _nibbles(x[..., 4:]), _half(x, 0), _half(x, 2)


def _fifth(x: _Bytes) -> _Bytes:
  """Fifth bits of 32 codes, from 4 bytes, shifted to their place."""
  bits = (x[..., None] >> _shifts(1, x.ndim + 1, -1)) & 1
  return bits.reshape(*x.shape[:-1], -1) << 4


def _q5_0(x: _Bytes) -> _Parts:
  codes = _nibbles(x[..., 6:]) | _fifth(x[..., 2:6])
  return _signed(codes, 16), _half(x, 0), None


def _q5_1(x: _Bytes) -> _Parts:
  codes = _nibbles(x[..., 8:]) | _fifth(x[..., 4:8])
  return _signed(codes, 0), _half(x, 0), _half(x, 2)


def _q8_0(x: _Bytes) -> _Parts:
  codes = jax.lax.bitcast_convert_type(x[..., 2:], jnp.int8)
  return codes, _half(x, 0), None


def _q2_k(x: _Bytes) -> _Parts:
  scales, codes = x[..., :16], _bits(x[..., 16:80], 2, 32)
  step = _wide(x, 80) * (scales & 15).astype(jnp.float32)
  return codes, step, -(_wide(x, 82) * (scales >> 4).astype(jnp.float32))


def _q3_k(x: _Bytes) -> _Parts:
  low = _nibbles(x[..., 96:104])
  scales = low | (_bits(x[..., 104:108], 2, 4) << 4)
  step = _wide(x, 108) * _signed(scales, 32).astype(jnp.float32)
  low, high = _bits(x[..., 32:96], 2, 32), _bits(x[..., :32], 1, 32)
  # Level + 4: a separate high bit says whether 4 is subtracted.
  return low + (high << 2), step, None


def _six(x: _Bytes) -> tuple[jax.Array, jax.Array]:
  """Eight scales and eight minima of six bits, float32, from 12 bytes."""
  a, b, c = x[..., :4], x[..., 4:8], x[..., 8:]
  scales = jnp.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], -1)
  minima = jnp.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], -1)
  return scales.astype(jnp.float32), minima.astype(jnp.float32)


def _q4_k(x: _Bytes) -> _Parts:
  scales, minima = _six(x[..., 4:16])
  codes = _bits(x[..., 16:], 4, 32)
  return codes, _wide(x, 0) * scales, -(_wide(x, 2) * minima)


def _q5_k(x: _Bytes) -> _Parts:
  scales, minima = _six(x[..., 4:16])
  codes = _bits(x[..., 48:], 4, 32) | (_bits(x[..., 16:48], 1, 32) << 4)
  step, offset = _wide(x, 0) * scales, -(_wide(x, 2) * minima)
  return _signed(codes, 0), step, offset


def _q6_k(x: _Bytes) -> _Parts:
  codes = _bits(x[..., :128], 4, 64) | (_bits(x[..., 128:192], 2, 32) << 4)
  scales = jax.lax.bitcast_convert_type(x[..., 192:208], jnp.int8)
  step = _wide(x, 208) * scales.astype(jnp.float32)
  return _signed(codes, 32), step, None


def _mxfp4(x: _Bytes) -> _Parts:
  power = x[..., :1].astype(jnp.uint32)
  # Half of 2^(e-127), as levels are doubled.
  bits = jnp.where(
    power < 2, jnp.uint32(0x00200000) << power, (power - 1) << 23
  )
  step = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return _nibbles(x[..., 1:]), step, None


def _iq4_nl(x: _Bytes) -> _Parts:
  return _nibbles(x[..., 2:]), _half(x, 0), None


def _iq4_xs(x: _Bytes) -> _Parts:
  low = x[..., 4:8]
  low = jnp.stack([low & 15, low >> 4], -1).reshape(*low.shape[:-1], 8)
  high = x[..., 2:4, None] >> _shifts(2, x.ndim + 1, -1)
  high = (high & 3).reshape(*low.shape[:-1], 8)
  step = _wide(x, 0) * _signed(low | (high << 4), 32).astype(jnp.float32)
  return _bits(x[..., 8:], 4, 16), step, None


_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (
  -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
)  # fmt: skip
_PLAIN = tuple(range(16))


def _type(
  name: str,
  size: int,
  nbytes: int,
  parts: Callable[[_Bytes], _Parts],
  levels: tuple[int, ...] | None = None,
  group: int = 32,
  step: str = "float16",
  least: str | None = None,
) -> BlockType:
  return BlockType(
    name=name, size=size, nbytes=nbytes, group=group, levels=levels, step=step,
    minimum=least, parts=parts,
  )  # fmt: skip


# Block types by their numbers in ggml.
BLOCKS: dict[int, BlockType] = {
  2: _type("Q4_0", 32, 18, _q4_0, tuple(range(-8, 8))),
  3: _type("Q4_1", 32, 20, _q4_1, _PLAIN, least="float16"),
  6: _type("Q5_0", 32, 22, _q5_0),
  7: _type("Q5_1", 32, 24, _q5_1, least="float16"),
  8: _type("Q8_0", 32, 34, _q8_0),
  10: _type("Q2_K", 256, 84, _q2_k, _PLAIN, 16, "float32", "float32"),
  11: _type("Q3_K", 256, 110, _q3_k, tuple(range(-4, 12)), 16, "float32"),
  12: _type("Q4_K", 256, 144, _q4_k, _PLAIN, 32, "float32", "float32"),
  13: _type("Q5_K", 256, 176, _q5_k, None, 32, "float32", "float32"),
  14: _type("Q6_K", 256, 210, _q6_k, None, 16, "float32"),
  20: _type("IQ4_NL", 32, 18, _iq4_nl, _IQ4),
  23: _type("IQ4_XS", 256, 136, _iq4_xs, _IQ4, 32, "float32"),
  39: _type("MXFP4", 32, 17, _mxfp4, _MXFP4, 32, "bfloat16"),
}
# Types of plain numbers by their numbers in ggml.
PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}
