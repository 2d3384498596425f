"""Integers and floats of eight bits and fewer, with their stored scales.

Guarantees: a weight is (code - zero) * scale, computed in float32 and rounded
once to the model's dtype. Bits, orders and zeros are as the writers of each
format store them:

  compressed-tensors  codes of a row of [M, N] next to each other, the first in
                      the lowest bits of an int32, plus 2^(bits-1); zeros too,
                      packed along M
  GPTQ                codes of a column of [N, M], so along the inputs; zeros
                      along the outputs and, in version 1, one too small; an
                      input may be in any group (g_idx)
  AWQ                 codes of [N, M] along the outputs, in each int32 in the
                      order 0 2 4 6 1 3 5 7
  bitsandbytes int8   codes of a row and its scale: the largest magnitude,
                      which is the code 127

Cost: a device reads the codes of its part and unpacks them itself.
Ref: Frantar et al. 2022, arXiv 2210.17323 (GPTQ); Lin et al. 2023, arXiv
2306.00978 (AWQ); Dettmers et al. 2022, arXiv 2208.07339 (LLM.int8());
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.models.hf.names import Form


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor on disk that is a part of a packed one, or all of a plain one.

  Attributes:
    name: Name on disk.
    shape: Shape on disk.
    dtype: Dtype that it is read as; None: the dtype of its parameter.
    axes: Axes of the form that its axes belong to, None for none.
  """

  name: str
  shape: tuple[int, ...]
  dtype: DTypeLike | None = None
  axes: tuple[int | None, ...] = ()


def unpacked(
  words: Int[Array, "A C"], bits: int, axis: int, count: int
) -> Int[Array, "A2 C2"]:
  """Unpacks 32-bit words along an axis into int32 codes, lowest bits first.

  Args:
    words: Packed codes, int32 [A, C].
    bits: Bits of a code, a divisor of 32.
    axis: Axis along which a word holds its codes.
    count: Number of codes along the axis; those after them are padding.
  """
  shifts = jnp.arange(0, 32, bits, dtype=jnp.int32)
  columns = jnp.expand_dims(words, axis + 1)
  shape = [1] * columns.ndim
  shape[axis + 1] = shifts.size
  # The shift copies a word's sign bit into high bits, which the mask removes.
  codes = (columns >> shifts.reshape(shape)) & (2**bits - 1)
  shape_out = list(words.shape)
  shape_out[axis] *= shifts.size
  codes = codes.reshape(shape_out)
  return jax.lax.slice_in_dim(codes, 0, count, axis=axis)


def spread(
  x: Shaped[Array, "A C"], axis: int, size: int, group: int
) -> Shaped[Array, "A2 C2"]:
  """Repeats the numbers of groups along an axis for each of `size` members."""
  x = jnp.repeat(x, group, axis)
  return jax.lax.slice_in_dim(x, 0, size, axis=axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedForm:
  """Base of the packed forms of tensors [M, N].

  Attributes:
    form: Form in which parameters are stored in the unpacked floats.
  """

  form: Form

  @property
  def stored(self) -> tuple[int, ...]:
    return self.form.stored

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    """Tensors on disk, in the order of `unpack`'s arguments."""
    raise NotImplementedError

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, "M N"]:
    """The unpacked floats, float32 [M, N]."""
    raise NotImplementedError

  def split(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.split(self.unpack(*x))

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.cuts(axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(PackedForm):
  """Codes [M, N], one number each, and scales for blocks of them.

  Attributes:
    dtype: Dtype of the codes: int8 or a float8.
    scale: Ending of the scales' name, in place of ".weight".
    scale_shape: Shape of the scales on disk.
    block: Rows and columns that share a scale.
    zero: Ending of the zeros' name, of the scales' shape; or None.
    factor: Factor of the scales.
  """

  dtype: str
  scale: str
  scale_shape: tuple[int, ...]
  block: tuple[int, int]
  zero: str | None = None
  factor: float = 1.0

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    base, unsharded = (
      name.removesuffix(".weight"),
      (None,) * len(self.scale_shape),
    )
    tensors = [
      StoredTensor(name, self.stored, jnp.dtype(self.dtype), (0, 1)),
      StoredTensor(base + self.scale, self.scale_shape, jnp.float32, unsharded),
    ]
    if self.zero is not None:
      zero = base + self.zero
      tensors.append(StoredTensor(zero, self.scale_shape, jnp.int8, unsharded))
    return tuple(tensors)

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, "M N"]:
    codes, *numbers = (y.astype(jnp.float32) for y in x)
    scales, *zeros = (self._per_code(y) for y in numbers)
    for zero in zeros:
      codes = codes - zero
    return codes * (scales * jnp.float32(self.factor))

  def _per_code(self, x: jax.Array) -> jax.Array:
    """A number for each code, [M, N] or broadcastable to it."""
    m, n = self.stored
    rows, columns = -(-m // self.block[0]), -(-n // self.block[1])
    x = x.reshape(rows, columns)
    if rows > 1:
      x = spread(x, 0, m, self.block[0])
    return spread(x, 1, n, self.block[1]) if columns > 1 else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows(PackedForm):
  """compressed-tensors: codes in words along the rows of [M, N].

  Attributes:
    bits: Bits of a code.
    groups: Groups of each row, with a scale each.
    size: Columns of a group, if there is no `order`.
    zeros: Whether zeros are stored.
    order: Whether a further tensor has the group of each column.
  """

  bits: int
  groups: int
  size: int
  zeros: bool = False
  order: bool = False

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    (m, n), per_word = self.stored, 32 // self.bits
    shape, scales = (m, -(-n // per_word)), (m, self.groups)
    tensors = [
      StoredTensor(f"{name}_packed", shape, jnp.int32, (0, 1)),
      StoredTensor(f"{name}_scale", scales, jnp.float32, (0, None)),
    ]
    if self.zeros:
      shape = (-(-m // per_word), self.groups)
      tensors.append(
        StoredTensor(f"{name}_zero_point", shape, jnp.int32, (0, None))
      )
    if self.order:
      tensors.append(StoredTensor(f"{name}_g_idx", (n,), jnp.int32, (None,)))
    return tuple(tensors)

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, "M N"]:
    (m, n), others = self.stored, list(x[2:])
    codes, scales = unpacked(x[0], self.bits, 1, n), x[1]
    half = jnp.int32(2 ** (self.bits - 1))
    zeros = jnp.full((m, self.groups), half)
    if self.zeros:
      zeros = unpacked(others.pop(0), self.bits, 0, m)
    if self.order:
      per_column = lambda y: jnp.take(y, others[0], 1)
    else:
      per_column = lambda y: spread(y, 1, n, self.size)
    return (codes - per_column(zeros)).astype(jnp.float32) * per_column(scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gptq(PackedForm):
  """GPTQ: codes in words along the inputs of [N, M].

  Attributes:
    bits: Bits of a code.
    groups: Groups of inputs.
    size: Inputs of a group, if there is no `order`.
    order: Whether a further tensor has the group of each input.
    less: Offset by which zeros are too small on disk.
  """

  bits: int
  groups: int
  size: int
  order: bool
  less: int

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    (m, n), per_word = self.stored, 32 // self.bits
    base = name.removesuffix("weight")
    tensors = [
      StoredTensor(f"{base}qweight", (-(-n // per_word), m), jnp.int32, (1, 0)),
      StoredTensor(
        f"{base}qzeros", (self.groups, -(-m // per_word)), jnp.int32, (None, 0)
      ),
      StoredTensor(f"{base}scales", (self.groups, m), jnp.float32, (None, 0)),
    ]
    if self.order:
      tensors.append(StoredTensor(f"{base}g_idx", (n,), jnp.int32, (None,)))
    return tuple(tensors)

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, "M N"]:
    m, n = self.stored
    codes = unpacked(x[0], self.bits, 0, n)
    zeros = unpacked(x[1], self.bits, 1, m)
    zeros = (zeros + self.less) & (2**self.bits - 1)
    if self.order:
      per_input = lambda y: jnp.take(y, x[3], 0)
    else:
      per_input = lambda y: spread(y, 0, n, self.size)
    return ((codes - per_input(zeros)).astype(jnp.float32) * per_input(x[2])).T


# Columns of a word's codes, from the lowest bits on.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Awq(PackedForm):
  """AWQ's gemm: codes of four bits in words along the outputs of [N, M].

  Attributes:
    groups: Groups of inputs.
    size: Inputs of a group.
    zeros: Whether zeros are stored; else each is the middle, 8.
  """

  groups: int
  size: int
  zeros: bool = True

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    m, n = self.stored
    base, words = name.removesuffix("weight"), -(-m // len(_AWQ))
    shapes = {"qweight": (n, words), "scales": (self.groups, m)}
    if self.zeros:
      shapes["qzeros"] = (self.groups, words)
    return tuple(
      StoredTensor(
        base + key,
        shape,
        jnp.float32 if key == "scales" else jnp.int32,
        (1 if key == "qweight" else None, 0),
      )
      for key, shape in shapes.items()
    )

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, "M N"]:
    m, n = self.stored
    per_input = lambda y: spread(y, 0, n, self.size)
    zeros = self._codes(x[2], m) if self.zeros else jnp.full_like(x[1], 8)
    codes = self._codes(x[0], m).astype(jnp.float32)
    return ((codes - per_input(zeros.astype(jnp.float32))) * per_input(x[1])).T

  def _codes(self, words: jax.Array, count: int) -> jax.Array:
    """Codes, int32 [A, M], in the order of the outputs."""
    codes = unpacked(words, 4, 1, words.shape[1] * len(_AWQ))
    codes = codes.reshape(words.shape[0], -1, len(_AWQ))
    return codes[..., np.argsort(_AWQ)].reshape(words.shape[0], -1)[:, :count]
