"""Smaller floating-point numbers, those of 8 bits with a scale a vector.

Guarantees: of a 16-bit format the numbers come back bit for bit if the cache
has that dtype; float8 has a relative error of at most 2**-4 (e4m3) or 2**-3
(e5m2), below the smallest normal number of the scale an absolute one.
Memory: a byte a number and two a vector; of 16-bit formats two a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from ringjax.checks import one_of
from ringjax.kv.codecs import code_bytes

FORMATS = {
  "bfloat16": jnp.bfloat16,
  "float16": jnp.float16,
  "e4m3": jnp.float8_e4m3fn,
  "e5m2": jnp.float8_e5m2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floats:
  """Numbers of another floating-point format.

  Attributes:
    format: "e4m3" or "e5m2" (8 bits), "bfloat16" or "float16".
  """

  format: str = "e4m3"

  def __post_init__(self) -> None:
    one_of("format", self.format, tuple(FORMATS))

  @property
  def _scaled(self) -> bool:
    return FORMATS[self.format] not in (jnp.bfloat16, jnp.float16)

  def width(self, dim: int) -> int:
    return sum(self.byte_parts(dim).values())

  def byte_parts(self, dim: int) -> dict[str, int]:
    """Bytes of a vector: codes, scales."""
    number_bytes = jnp.dtype(FORMATS[self.format]).itemsize
    return {"codes": number_bytes * dim, "scales": 2 * self._scaled}

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    del constants
    dtype = FORMATS[self.format]
    if not self._scaled:
      return code_bytes.to_bytes(x.astype(dtype))
    x = x.astype(jnp.float32)
    top = np.float32(jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(x), -1, keepdims=True)
    scale = (largest / top).astype(jnp.float16)
    safe_scale = jnp.where(scale > 0, scale.astype(jnp.float32), 1)
    small = jnp.clip(x / safe_scale, -top, top).astype(dtype)
    return jnp.concatenate(
      [code_bytes.to_bytes(small), code_bytes.to_bytes(scale)], -1
    )

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    del constants
    x = code_bytes.from_bytes(data, 0, dim, FORMATS[self.format])
    if not self._scaled:
      return x.astype(dtype)
    scale = code_bytes.halves(data, dim, 1)
    return (x.astype(jnp.float32) * scale).astype(dtype)
