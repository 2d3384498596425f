"""A Hadamard transform, then rounding to the best levels of a Gaussian.

Guarantees: no calibration. After the transform the numbers of a vector are
nearly Gaussian, whatever they were before, and the levels are the best ones
for a Gaussian. The length of a vector is kept.
Memory: `bits` bits a number and two bytes a vector.
Ref: Zandieh et al. 2025, TurboQuant, arXiv 2504.19874; Lloyd 1982, "Least
squares quantization in PCM"; the signs as in Ashkboos et al. 2024, QuaRot,
arXiv 2404.00456.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from ringjax.checks import one_of
from ringjax.kv.codecs import code_bytes
from ringjax.kv.codecs.levels import lookup, nearest
from ringjax.ops.attention.cached.code_format import CodeFormat, packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hadamard:
  """A vector's length, and its direction, transformed and rounded to levels.

  Attributes:
    bits: 2, 3 or 4.
  """

  bits: int = 4

  def __post_init__(self) -> None:
    one_of("bits", self.bits, code_bytes.LEVEL_BITS)

  def width(self, dim: int) -> int:
    return sum(self.byte_parts(dim).values())

  def byte_parts(self, dim: int) -> dict[str, int]:
    """Bytes of a vector: codes, scales."""
    codes = packed_bytes(dim, self.bits)
    return {"codes": codes, "scales": 2}

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    del constants
    dim = x.shape[-1]
    x = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    unit = x / jnp.where(length > 0, length, 1)
    levels = np.asarray(gaussian_levels(self.bits))
    codes = nearest(transform(unit) * np.float32(math.sqrt(dim)), levels)
    decoded = jnp.asarray(lookup(codes, levels))
    # As long as it was: rounding shortens.
    norm = jnp.sqrt(jnp.sum(decoded * decoded, -1, keepdims=True))
    scale = length / norm
    return jnp.concatenate(
      [code_bytes.pack(codes, self.bits), code_bytes.half_bytes(scale)], -1
    )

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    transformed = self.decode_transformed(data, dim, jnp.float32, constants)
    return self.transform(transformed, back=True).astype(dtype)

  def transform(
    self, x: Float[Array, "*batch D"], *, back: bool = False
  ) -> Float[Array, "*batch D"]:
    """The basis in which vectors are encoded: inner products are the same."""
    return transform(x, back=back)

  def decode_transformed(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    """Decodes without the inverse transform: in the basis of `transform`."""
    del constants
    start = packed_bytes(dim, self.bits)
    scale = code_bytes.halves(data, start, 1)
    codes = code_bytes.unpack(data, self.bits, dim)
    decoded = lookup(codes, np.asarray(gaussian_levels(self.bits))) * scale
    return decoded.astype(dtype)

  def code_format(self, dim: int) -> CodeFormat:
    """Layout of a vector's bytes, which are codes of transformed numbers."""
    return CodeFormat(
      dim=dim, bits=self.bits, halves=1, levels=gaussian_levels(self.bits)
    )


@functools.cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
  """The 2**bits levels of least squared error for a normal distribution."""
  count = 2**bits
  density = lambda x: np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
  below = np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)
  levels = np.linspace(-2.0, 2.0, count)
  for _ in range(2000):
    edges = np.concatenate([[-40.0], (levels[1:] + levels[:-1]) / 2, [40.0]])
    mass = np.diff(below(edges))
    levels = -np.diff(density(edges)) / mass
  return tuple(float(x) for x in levels.astype(np.float32))


def transform(
  x: Float[Array, "*batch D"], *, back: bool = False
) -> Float[Array, "*batch D"]:
  """Signs, then Hadamard's matrix on equal blocks; `back` is the inverse.

  A block is the largest power of two that divides D, and of two blocks or more
  a rotation mixes numbers that are at the same place.
  """
  dim = x.shape[-1]
  block = dim & -dim
  signs = jnp.asarray(_signs(dim)).reshape(*(1,) * (x.ndim - 1), dim)
  if not back:
    x = x * signs
  if block < dim:
    mix = jnp.asarray(_mix(dim // block))
    mix = mix.T if back else mix
    cut = x.reshape(*x.shape[:-1], dim // block, block)
    if back:
      cut = _hadamard(cut)
    cut = jnp.einsum(
      "...ij,ik->...kj", cut, mix, preferred_element_type=x.dtype
    )
    x = (cut if back else _hadamard(cut)).reshape(x.shape)
  else:
    x = _hadamard(x)
  return x * signs if back else x


def _hadamard(x: jax.Array) -> jax.Array:
  """x times Hadamard's matrix over its last axis, which is its own inverse."""
  block, step = x.shape[-1], 1
  while step < block:
    pairs = x.reshape(*x.shape[:-1], block // (2 * step), 2, step)
    a, b = pairs[..., 0, :], pairs[..., 1, :]
    x = jnp.stack([a + b, a - b], -2).reshape(x.shape)
    step *= 2
  return x * np.float32(1 / math.sqrt(block))


@functools.cache
def _signs(dim: int) -> np.ndarray:
  signs = np.random.default_rng(dim).integers(0, 2, dim) * 2 - 1
  return signs.astype(np.float32)


@functools.cache
def _mix(count: int) -> np.ndarray:
  """An orthogonal matrix without small entries: of the cosine transform."""
  n = np.arange(count)
  matrix = np.cos(np.pi * (n[:, None] + 0.5) * n[None] / count)
  matrix *= math.sqrt(2 / count)
  matrix[:, 0] *= math.sqrt(0.5)
  return matrix.astype(np.float32)
