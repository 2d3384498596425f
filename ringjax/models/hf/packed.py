"""Unpacks weights of eight and of four bits into floats.

Guarantees: a value is its code times the scale of its block. Of four bits that
is exact in float32 and in bfloat16; of eight bits it is rounded once to
float32, as the authors of the format do it, and then to the model's dtype.
Cost: a device reads the codes of its own part and unpacks them itself.
Ref: OCP Microscaling Formats 1.0, "MXFP4"; DeepSeek-AI 2024, arXiv 2412.19437,
3.3, for blocks of float8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, UInt8

from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.names import Form, FusedColumns


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor on disk that is a part of a packed one, or all of a plain one.

  Attributes:
    name: its name.
    shape: its shape.
    dtype: what it is read as; None: the dtype of its parameter.
    axes: the axes of the form that its axes belong to, None for none.
  """

  name: str
  shape: tuple[int, ...]
  dtype: DTypeLike | None = None
  axes: tuple[int | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Float8:
  """Codes float8_e4m3 [M, N], and a float32 scale for each block.

  Attributes:
    form: how parameters are stored in the floats, [M, N].
    block: rows and columns of a block; the last one may be smaller.
  """

  form: Form
  block: tuple[int, int]

  @property
  def stored(self) -> tuple[int, ...]:
    return self.form.stored

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    """The tensors on disk, in the order in which `unpack` takes them."""
    shape = self.stored
    blocks = tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))
    return (
      StoredTensor(name, shape, jnp.float8_e4m3fn, (0, 1)),
      StoredTensor(f"{name}_scale_inv", blocks, jnp.float32, (None, None)),
    )

  def unpack(
    self, codes: Float[Array, " ..."], scales: Float[Array, " ..."]
  ) -> jax.Array:
    """The floats, float32 [M, N]."""
    for axis, (n, b) in enumerate(zip(codes.shape, self.block, strict=True)):
      scales = jnp.repeat(scales, b, axis)
      scales = jax.lax.slice_in_dim(scales, 0, n, axis=axis)
    return codes.astype(jnp.float32) * scales

  def split(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.split(self.unpack(*x))

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.cuts(axes)


# Of a code's lower three bits; the fourth is the sign.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BLOCK4 = 32


@dataclasses.dataclass(frozen=True)
class Float4:
  """MXFP4: codes of four bits, two in a byte, and a power of two for 32.

  The floats are [E, I, O]; on disk the codes are [E, O, I/32, 16] and
  their scales as [E, O, I/32].

  Attributes:
    form: how parameters are stored in the floats.
  """

  form: Form

  @property
  def stored(self) -> tuple[int, ...]:
    return self.form.stored

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    """The tensors on disk, in the order in which `unpack` takes them."""
    e, i, o = self.stored
    blocks = (e, o, i // _BLOCK4)
    return (
      StoredTensor(
        f"{name}_blocks", (*blocks, _BLOCK4 // 2), jnp.uint8, (0, 2, 1, None)
      ),
      StoredTensor(f"{name}_scales", blocks, jnp.uint8, (0, 2, 1)),
    )

  def _rows(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The floats, bfloat16 [E, O, I]: it holds each of them."""
    low, high = codes & 15, codes >> 4
    code = jnp.stack([low, high], -1).reshape(*scales.shape, _BLOCK4)
    value = jnp.asarray(_FLOAT4, jnp.bfloat16)[code & 7]
    value = jnp.where(code & 8, -value, value)
    # A power of two by its exponent; 255, which stands for NaN, becomes inf.
    bits = scales.astype(jnp.uint32) << 23
    # 2^-127 has no exponent of its own.
    bits = jnp.where(scales == 0, jnp.uint32(1 << 22), bits)
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    power = power.astype(jnp.bfloat16)
    return (value * power[..., None]).reshape(*scales.shape[:2], -1)

  def unpack(
    self, codes: UInt8[Array, " ..."], scales: UInt8[Array, " ..."]
  ) -> jax.Array:
    """The floats, bfloat16 [E, I, O]."""
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


Packed = Float8 | Float4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """How a folder's weights are packed.

  Attributes:
    block: the shape of a block of float8; None: they are MXFP4.
  """

  block: tuple[int, int] | None = None

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    """The form of a tensor, by the tensors on disk."""
    if self.block is not None:
      codes = have.get(name)
      packed = codes is not None and codes.dtype == jnp.float8_e4m3fn
      return Float8(form, self.block) if packed else form
    packed = name not in have and f"{name}_blocks" in have
    fits = len(form.stored) == 3 and form.stored[1] % _BLOCK4 == 0
    return Float4(form) if packed and fits else form


def packing(config: Mapping[str, Any]) -> Packing | None:
  """How `quantization_config` says that weights are packed; None: not at all.

  Raises:
    ConfigError: a way that is not supported.
  """
  given = config.get("quantization_config")
  if not given:
    return None
  r = ConfigReader({}).part("quantization_config", given)
  kind = r.value("quant_method", default=None)
  # Which tensors are packed is seen from the tensors.
  r.ignore("modules_to_not_convert")
  if kind == "mxfp4":
    r.finish()
    return Packing()
  if kind != "fp8":
    raise error(
      "quantization_config",
      given,
      "plain weights, or quant_method mxfp4 or fp8",
      "take the unquantised checkpoint, or write one with transformers: "
      "model.dequantize().save_pretrained(folder)",
    )
  # Activations are not rounded here.
  r.only("activation_scheme", "dynamic")
  r.only("fmt", "e4m3")
  r.ignore("scale_fmt")
  block = r.value("weight_block_size", default=None)
  sound = isinstance(block, list) and len(block) == 2
  if not sound or any(type(n) is not int or not 0 < n < 2**31 for n in block):
    raise r.error(
      "weight_block_size",
      block,
      "the rows and columns of a block",
      "take a checkpoint with scales for blocks",
    )
  r.finish()
  return Packing(block=(block[0], block[1]))
