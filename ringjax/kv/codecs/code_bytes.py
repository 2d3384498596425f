"""Codes of a few bits and small numbers, packed into bytes.

Guarantees: `unpack(pack(codes, bits), bits, n)` are the codes; `bits` bits a
code, without gaps but for codes that fill up the last bytes.
Cost: a shift and a mask a code. A byte holds codes that are far apart, so that
a processor reads neighbours at a time: with 4 bits code i is beside code
i + n/2, with 2 bits beside three others; 3 bits are 2 and 1.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

BITS = (1, 2, 3, 4, 8)


def padded(count: int) -> int:
  """Codes with those that fill up the last byte of each part."""
  return -(-count // 8) * 8


def packed_bytes(count: int, bits: int) -> int:
  """Bytes of so many codes."""
  return padded(count) * bits // 8


def pack(
  codes: UInt8[Array, "*batch n"], bits: int
) -> UInt8[Array, "*batch x"]:
  """Codes below 2**bits as bytes."""
  count = codes.shape[-1]
  pad = [(0, 0)] * (codes.ndim - 1) + [(0, padded(count) - count)]
  codes = jnp.pad(codes, pad)
  parts, low = [], 0
  for size in _sizes(bits):
    each = (codes >> np.uint8(low)) & np.uint8((1 << size) - 1)
    planes = jnp.split(each, 8 // size, -1)
    byte = planes[0]
    for n, plane in enumerate(planes[1:], 1):
      byte = byte | (plane << np.uint8(n * size))
    parts.append(byte)
    low += size
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def unpack(
  data: UInt8[Array, "*batch x"], bits: int, count: int
) -> UInt8[Array, "*batch n"]:
  """The `count` codes that `pack` packed."""
  found, low, first, many = None, 0, 0, padded(count)
  for size in _sizes(bits):
    width = many * size // 8
    byte = lax.slice_in_dim(data, first, first + width, axis=-1)
    mask = np.uint8((1 << size) - 1)
    planes = [(byte >> np.uint8(n * size)) & mask for n in range(8 // size)]
    part = planes[0] if size == 8 else jnp.concatenate(planes, -1)
    part = part << np.uint8(low)
    found = part if found is None else found | part
    low, first = low + size, first + width
  assert found is not None
  return lax.slice_in_dim(found, 0, count, axis=-1)


def to_bytes(x: Shaped[Array, "*batch n"]) -> UInt8[Array, "*batch x"]:
  """The bytes of numbers."""
  data = lax.bitcast_convert_type(x, jnp.uint8)
  return data.reshape(*x.shape[:-1], -1)


def half_bytes(x: Float[Array, "*batch n"]) -> UInt8[Array, "*batch x"]:
  """Numbers as float16, two bytes each; what is beyond it is its largest."""
  largest = float(jnp.finfo(jnp.float16).max)
  return to_bytes(jnp.clip(x, -largest, largest).astype(jnp.float16))


def from_bytes(
  data: UInt8[Array, "*batch x"], first: int, count: int, dtype: type
) -> Shaped[Array, "*batch n"]:
  """The numbers whose bytes begin at `first`."""
  size = np.dtype(dtype).itemsize
  cut = lax.slice_in_dim(data, first, first + count * size, axis=-1)
  if size == 1:
    return lax.bitcast_convert_type(cut, dtype)
  return lax.bitcast_convert_type(
    cut.reshape(*cut.shape[:-1], count, size), dtype
  )


def _sizes(bits: int) -> tuple[int, ...]:
  """Powers of two that add up to `bits`, the largest first."""
  return tuple(size for size in (8, 4, 2, 1) if bits & size)
