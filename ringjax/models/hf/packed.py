"""Unpacks weights of eight and of four bits into floats.

Guarantees: a value is its code times the scale of its block. With four bits
that is exact in float32 and in bfloat16; with eight bits it is rounded once to
float32, as the authors of the format do it, and then to the model's dtype.
Cost: a device reads the codes of its part and unpacks them itself.
Ref: OCP Microscaling Formats 1.0, "MXFP4"; DeepSeek-AI 2024, arXiv 2412.19437,
3.3, for blocks of float8.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Integer, Shaped, UInt8

from ringjax.models.hf.codes import PackedForm, StoredTensor
from ringjax.models.hf.names import Form, FusedColumns


@dataclasses.dataclass(frozen=True)
class Float8:
  """Codes float8_e4m3 [M, N], and a scale for each block.

  Attributes:
    form: Form of the parameters in the floats [M, N].
    block: Rows and columns of a block; the last one may be smaller.
    scale: Name of the scales; None: that of the codes and "_scale_inv".
    exponents: Whether scales are powers of two, stored as exponents, uint8;
      otherwise they are float32.
  """

  form: Form
  block: tuple[int, int]
  scale: str | None = None
  exponents: bool = False

  @property
  def stored(self) -> tuple[int, ...]:
    return self.form.stored

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    """Tensors on disk, in the order of `unpack`'s arguments."""
    shape = self.stored
    blocks = tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))
    return (
      StoredTensor(name, shape, jnp.float8_e4m3fn, (0, 1)),
      StoredTensor(
        self.scale or f"{name}_scale_inv",
        blocks,
        jnp.uint8 if self.exponents else jnp.float32,
        (None, None),
      ),
    )

  def unpack(
    self, codes: Float[Array, " ..."], scales: Shaped[Array, " ..."]
  ) -> Float[Array, "M N"]:
    """The unpacked floats, float32 [M, N]."""
    if self.exponents:
      scales = powers_of_two(scales)
    for axis, (n, b) in enumerate(zip(codes.shape, self.block, strict=True)):
      scales = jnp.repeat(scales, b, axis)
      scales = jax.lax.slice_in_dim(scales, 0, n, axis=axis)
    return codes.astype(jnp.float32) * scales

  def split(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.split(self.unpack(*x))

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.cuts(axes)


# Values of a code's lower three bits; the fourth is the sign.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BLOCK4 = 32


def powers_of_two(exponents: UInt8[Array, " ..."]) -> Float[Array, " ..."]:
  """2^(e - 127) of exponents e, float32; 255, which is NaN, becomes inf."""
  bits = exponents.astype(jnp.uint32) << 23
  # 2^-127 has no exponent bits in float32: it is a subnormal number.
  bits = jnp.where(exponents == 0, jnp.uint32(1 << 22), bits)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def float4_values(
  codes: Integer[Array, "*shape"],
) -> BFloat16[Array, "*shape 2"]:
  """Values of two codes in each byte, the lower bits first."""
  pair = jnp.stack([codes & 15, (codes >> 4) & 15], -1)
  value = jnp.asarray(_FLOAT4, jnp.bfloat16)[pair & 7]
  return jnp.where(pair & 8, -value, value)


@dataclasses.dataclass(frozen=True)
class Float4:
  """MXFP4: codes of four bits, two in a byte, and a power of two for 32.

  The floats are [E, I, O]; on disk the codes are [E, O, I/32, 16] and
  their scales as [E, O, I/32].

  Attributes:
    form: Form of the parameters in the floats.
  """

  form: Form

  @property
  def stored(self) -> tuple[int, ...]:
    return self.form.stored

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    """Tensors on disk, in the order of `unpack`'s arguments."""
    e, i, o = self.stored
    blocks = (e, o, i // BLOCK4)
    return (
      StoredTensor(
        f"{name}_blocks", (*blocks, BLOCK4 // 2), jnp.uint8, (0, 2, 1, None)
      ),
      StoredTensor(f"{name}_scales", blocks, jnp.uint8, (0, 2, 1)),
    )

  def _rows(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The floats, bfloat16 [E, O, I], which holds each of them exactly."""
    value = float4_values(codes).reshape(*scales.shape, BLOCK4)
    power = powers_of_two(scales).astype(jnp.bfloat16)
    return (value * power[..., None]).reshape(*scales.shape[:2], -1)

  def unpack(
    self, codes: UInt8[Array, " ..."], scales: UInt8[Array, " ..."]
  ) -> Float[Array, "E I O"]:
    """The unpacked floats, bfloat16 [E, I, O]."""
    return self._rows(codes, scales).swapaxes(1, 2)

  @property
  def _interleaved(self) -> bool:
    return isinstance(self.form, FusedColumns) and self.form.interleaved

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    # Interleaved columns are rows on disk, and pairs of them stay together.
    return axes if self._interleaved else self.form.cuts(axes)

  def split(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
    if not self._interleaved:
      return self.form.split(self.unpack(*x))
    # Interleaved columns are rows on disk: each device keeps its own.
    pairs = [a.reshape(a.shape[0], -1, 2, *a.shape[2:]) for a in x]
    return tuple(
      self._rows(*(a[:, :, j] for a in pairs)).swapaxes(1, 2) for j in range(2)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float4Rows(PackedForm):
  """Codes of four bits, two in a byte, and exponents for 32 of a row.

  Attributes:
    scale: Name of the exponents, uint8 [M, N / 32].
  """

  scale: str

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    """Tensors on disk, in the order of `unpack`'s arguments."""
    m, n = self.stored
    return (
      StoredTensor(name, (m, n // 2), jnp.int8, (0, None)),
      StoredTensor(self.scale, (m, n // BLOCK4), jnp.uint8, (0, None)),
    )

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, "M N"]:
    """The unpacked floats, bfloat16 [M, N], all of them exact."""
    codes, exponents = x
    values = float4_values(codes).reshape(*exponents.shape, BLOCK4)
    powers = powers_of_two(exponents).astype(jnp.bfloat16)
    return (values * powers[..., None]).reshape(exponents.shape[0], -1)


Packed = Float8 | Float4 | PackedForm
