"""Codes of a few bits and small numbers, packed into bytes.

Guarantees: `unpack(pack(codes, bits), bits, n)` are the codes; `bits` bits a
code, without gaps but for codes that fill up the last bytes.
Cost: a shift and a mask a code. A byte holds codes that are far apart, so that
a processor reads neighbours at a time: with 4 bits code i shares a byte with
code i + n/2, with 2 bits with three others; 3 bits are bytes of 2 and of 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from ringjax.ops.attention.cached.code_format import padded, parts

# Bits of codes that can be packed; of codes that are integers times a step; of
# codes of levels in a table.
BITS = (1, 2, 3, 4, 8)
INTEGER_BITS = (2, 3, 4, 8)
LEVEL_BITS = (2, 3, 4)


def pack(
  codes: UInt8[Array, "*batch n"], bits: int
) -> UInt8[Array, "*batch x"]:
  """Codes below 2**bits as bytes."""
  count = codes.shape[-1]
  pad = [(0, 0)] * (codes.ndim - 1) + [(0, padded(count) - count)]
  codes = jnp.pad(codes, pad)
  plane_bytes = []
  for size, low, _, _ in parts(count, bits):
    fields = (codes >> np.uint8(low)) & np.uint8((1 << size) - 1)
    planes = jnp.split(fields, 8 // size, -1)
    byte = jnp.zeros_like(planes[0])
    for n, plane in enumerate(planes):
      byte = byte | (plane << np.uint8(n * size))
    plane_bytes.append(byte)
  return (
    plane_bytes[0]
    if len(plane_bytes) == 1
    else jnp.concatenate(plane_bytes, -1)
  )


def unpack(
  data: UInt8[Array, "*batch x"], bits: int, count: int
) -> UInt8[Array, "*batch n"]:
  """The `count` codes that `pack` packed."""

  def cut(first: int, width: int) -> jax.Array:
    return lax.slice_in_dim(data, first, first + width, axis=-1)

  def codes(data: jax.Array, size: int) -> jax.Array:
    """Codes of `size` bits, unpacked once for all their uses."""
    if size == 8:
      return data
    if size == 4:
      nibbles = [data & np.uint8(15), data >> np.uint8(4)]
      return lax.optimization_barrier(jnp.concatenate(nibbles, -1))
    # More parts: copies of the bytes, one after another, and shifts by place.
    repeated = lax.optimization_barrier(
      jnp.concatenate([data] * (8 // size), -1)
    )
    place = lax.broadcasted_iota(jnp.int32, repeated.shape, repeated.ndim - 1)
    shift = (place // data.shape[-1] * size).astype(jnp.uint8)
    return (repeated >> shift) & np.uint8((1 << size) - 1)

  all_codes = None
  for size, low, first, width in parts(count, bits):
    part = codes(cut(first, width), size)
    part = part << np.uint8(low)
    all_codes = part if all_codes is None else all_codes | part
  assert all_codes is not None
  return lax.slice_in_dim(all_codes, 0, count, axis=-1)


def to_bytes(x: Shaped[Array, "*batch n"]) -> UInt8[Array, "*batch x"]:
  """The bytes of numbers."""
  data = lax.bitcast_convert_type(x, jnp.uint8)
  return data.reshape(*x.shape[:-1], -1)


def half_bytes(x: Float[Array, "*batch n"]) -> UInt8[Array, "*batch x"]:
  """Numbers as float16, two bytes each, clipped to its range."""
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


def halves(
  data: UInt8[Array, "*batch x"], first: int, count: int
) -> Float[Array, "*batch n"]:
  """Numbers that `half_bytes` packed, as float32.

  They are converted once, not at each use in the numbers of a vector.
  """
  numbers = from_bytes(data, first, count, jnp.float16).astype(jnp.float32)
  return lax.optimization_barrier(numbers)
