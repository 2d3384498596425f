"""Products of int8 codes, and of the outliers of activations beyond int8.

Guarantees: a row's result depends on the row alone, to the bit: not on other
rows or on how they are split into calls. The sums of `integer_product` are of
integers; `outlier_product` adds the channels of a row in their order, where
those that add zeros change nothing.
Cost: one int8 product [T, I] x [I, O], and T x O multiplications for each
channel in which some row exceeds 8 bits.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858 (shadow outliers).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8

# The largest code. -128 is not used, as -(-128) is no int8.
LARGEST = 127
# Channels that are added at a time.
_BLOCK = 8


def codes_of(
  weight: Float[Array, "I O"], *, channels: bool = True
) -> tuple[Int8[Array, "I O"], Float[Array, " O"]]:
  """Quantize a weight by rounding to int8 codes x float32 scales.

  Args:
    weight: Weight, [I, O].
    channels: Whether each output has a scale; else one scale for the tensor.
  """
  magnitudes = jnp.abs(weight.astype(jnp.float32))
  max_abs = jnp.max(magnitudes, axis=0) if channels else jnp.max(magnitudes)
  scale = jnp.broadcast_to(max_abs, weight.shape[1:]) / jnp.float32(LARGEST)
  scale = jnp.where(scale > 0, scale, jnp.float32(1))
  codes = jnp.round(weight.astype(jnp.float32) / scale[None])
  return jnp.clip(codes, -LARGEST, LARGEST).astype(jnp.int8), scale


def integer_product(
  x: Float[Array, "*batch I"],
  codes: Int8[Array, "I O"],
  scales: Float[Array, " O"],
  scale: Float[Array, ""],
) -> Float[Array, "*batch O"]:
  """Compute clip(x) . (codes x scales) by a product of integers, float32.

  Args:
    x: Activations; they are clipped to `LARGEST` scales.
    codes: Codes of the weight, see `codes_of`.
    scales: Scales of the weight, see `codes_of`.
    scale: Scale of the activations, positive: the value of code 1.
  """
  units = jnp.round(x.astype(jnp.float32) / scale)
  y = lax.dot_general(
    jnp.clip(units, -LARGEST, LARGEST).astype(jnp.int8),
    codes,
    (((x.ndim - 1,), (0,)), ((), ())),
    preferred_element_type=jnp.int32,
  )
  return y.astype(jnp.float32) * (scales * scale)[(None,) * (x.ndim - 1)]


def outlier_product(
  x: Float[Array, "*batch I"],
  codes: Int8[Array, "I O"],
  scales: Float[Array, " O"],
  scale: Float[Array, ""],
  rows: Float[Array, "H O"],
  slots: Int[Array, " I"],
  *,
  active: Bool[Array, ""] | None = None,
) -> Float[Array, "*batch O"]:
  """Compute (x - clip(x)) . weight by products of floats, float32.

  Args:
    x: Activations.
    codes: Codes of the weight, see `codes_of`, for channels without a row.
    scales: Scales of the weight, see `codes_of`.
    scale: Scale of the activations; values beyond `LARGEST` scales are
      outliers.
    rows: Exact weight of some channels, in floats.
    slots: Row of each channel, int32; H for channels without one.
    active: Whether there may be outliers, if that differs between layers;
      default: yes.
  """
  float_x = x.astype(jnp.float32)
  limit = jnp.float32(LARGEST) * scale
  outliers = float_x - jnp.clip(float_x, -limit, limit)
  if active is not None:
    outliers = jnp.where(active, outliers, 0)
  inner, leading = x.shape[-1], (None,) * (x.ndim - 1)
  has_outliers = jnp.any(outliers != 0, axis=tuple(range(x.ndim - 1)))
  count = jnp.sum(has_outliers, dtype=jnp.int32)
  size = -(-inner // _BLOCK) * _BLOCK
  order = jnp.flatnonzero(has_outliers, size=size, fill_value=0).astype(
    jnp.int32
  )

  def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    first, y = state
    channel = lax.dynamic_slice_in_dim(order, first, _BLOCK)
    real = first + jnp.arange(_BLOCK, dtype=jnp.int32) < count
    take = lambda x, at, axis: jnp.take(x, at, axis=axis, mode="clip")
    weight = take(codes, channel, 0).astype(jnp.float32) * scales[None]
    if rows.shape[0]:
      slot = take(slots, channel, 0)
      exact_rows = take(rows, slot, 0).astype(jnp.float32)
      weight = jnp.where((slot < rows.shape[0])[:, None], exact_rows, weight)
    part = jnp.where(real[leading], take(outliers, channel, -1), 0)
    # Products of one channel after the other: a matrix product would sum them
    # in an order that depends on the number of rows and channels.
    part, weight = lax.optimization_barrier((part, weight))
    for n in range(_BLOCK):
      y = y + part[..., n : n + 1] * weight[n][leading]
    return first + _BLOCK, y

  start = jnp.zeros((*x.shape[:-1], codes.shape[1]), jnp.float32)
  # Sharded like the codes and the activations.
  start = start + outliers[..., :1] * 0 + (scales * 0)[leading]
  return lax.while_loop(
    lambda state: state[0] < count, add, (count * 0, start)
  )[1]
