"""Integers between the least and the largest number of a group.

Guarantees: an error of at most half a step, (largest - least) / (2**bits - 1),
and the rounding of the two to float16.
Memory: `bits` bits a number and four bytes a group.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from ringjax.checks import one_of, positive_int
from ringjax.kv.codecs import code_bytes
from ringjax.ops.attention.cached.code_format import CodeFormat, packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Integers:
  """Groups of neighbours in a head, each with a least number and a step.

  Attributes:
    bits: 2, 3, 4 or 8.
    group: numbers of a group; a head that it does not divide has groups of
      equal size that are smaller.
  """

  bits: int = 8
  group: int = 64

  def __post_init__(self) -> None:
    one_of("bits", self.bits, code_bytes.INTEGER_BITS)
    positive_int("group", self.group)

  def width(self, dim: int) -> int:
    return sum(self.byte_parts(dim).values())

  def byte_parts(self, dim: int) -> dict[str, int]:
    """Bytes of a vector: codes, scales."""
    codes = packed_bytes(dim, self.bits)
    return {"codes": codes, "scales": 4 * self._groups(dim)}

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    del constants
    dim = x.shape[-1]
    groups = self._groups(dim)
    size = -(-dim // groups)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, size * groups - dim)]
    cut = jnp.pad(x.astype(jnp.float32), pad, mode="edge")
    cut = cut.reshape(*x.shape[:-1], groups, size)
    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    smallest = half(jnp.min(cut, -1))
    step = half((jnp.max(cut, -1) - smallest) / np.float32(2**self.bits - 1))
    safe = jnp.where(step > 0, step, 1)[..., None]
    codes = jnp.round((cut - smallest[..., None]) / safe)
    codes = jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)
    codes = codes.reshape(*x.shape[:-1], -1)[..., :dim]
    scales = code_bytes.half_bytes(jnp.concatenate([step, smallest], -1))
    return jnp.concatenate([code_bytes.pack(codes, self.bits), scales], -1)

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    del constants
    groups, start = self._groups(dim), packed_bytes(dim, self.bits)
    scales = code_bytes.halves(data, start, 2 * groups)
    codes = code_bytes.unpack(data, self.bits, dim).astype(jnp.float32)
    place = lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1)
    size = -(-dim // groups)

    def of_group(first: int) -> jax.Array:
      # On vector units a select is faster than a reshape.
      scale = scales[..., first : first + 1]
      for n in range(1, groups):
        group_scale = scales[..., first + n : first + n + 1]
        scale = jnp.where(place >= n * size, group_scale, scale)
      return scale

    return (codes * of_group(0) + of_group(groups)).astype(dtype)

  def code_format(self, dim: int) -> CodeFormat:
    """Layout of a vector's bytes."""
    return CodeFormat(
      dim=dim, bits=self.bits, groups=self._groups(dim), halves=2
    )

  def _groups(self, dim: int) -> int:
    return max(1, -(-dim // self.group))
