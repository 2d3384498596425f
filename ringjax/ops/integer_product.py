"""Products of 8-bit integers, and of what activations have beyond 8 bits.

Guarantees: a row's result depends on the row alone, to the bit: not on other
rows or on how they are cut into calls. The sums of `integer_product` are of
integers; `outlier_product` adds the channels of a row in their order, where
those that add nothing change nothing.
Cost: one int8 product [T, I] x [I, O], and T x O multiplications for each
channel in which some row leaves 8 bits.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858 (shadow outliers).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8

# The largest code. -128 is left out, as -(-128) is no int8.
LARGEST = 127
# Channels that are added at a time.
_BLOCK = 8


def codes_of(
  weight: Float[Array, "I O"], *, channels: bool = True
) -> tuple[Int8[Array, "I O"], Float[Array, " O"]]:
  """A weight as int8 and float32 scales: weight = codes x scales, rounded.

  Args:
    weight: [I, O].
    channels: a scale for each output; else all are equal, as of one tensor.
  """
  size = jnp.abs(weight.astype(jnp.float32))
  most = jnp.max(size, axis=0) if channels else jnp.max(size)
  scale = jnp.broadcast_to(most, weight.shape[1:]) / jnp.float32(LARGEST)
  scale = jnp.where(scale > 0, scale, jnp.float32(1))
  codes = jnp.round(weight.astype(jnp.float32) / scale[None])
  return jnp.clip(codes, -LARGEST, LARGEST).astype(jnp.int8), scale


def integer_product(
  x: Float[Array, "*batch I"],
  codes: Int8[Array, "I O"],
  scales: Float[Array, " O"],
  scale: Float[Array, ""],
) -> Float[Array, "*batch O"]:
  """clip(x) . (codes x scales) by a product of integers, float32.

  Args:
    x: activations; they are clipped to `LARGEST` scales.
    codes: of the weight, see `codes_of`.
    scales: the same.
    scale: of the activations, positive: what one unit of a code is.
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
  """(x - clip(x)) . weight by products of floats, float32.

  Args:
    x: activations.
    codes: of the weight, see `codes_of`; what channels without a row have.
    scales: the same.
    scale: of the activations; what is beyond `LARGEST` of them is multiplied.
    rows: the weight of some channels, in floats.
    slots: int32, the row of each channel; H for one that has none.
    active: whether there is anything to multiply, where that differs from
      layer to layer; default: there is.
  """
  wide = x.astype(jnp.float32)
  most = jnp.float32(LARGEST) * scale
  beyond = wide - jnp.clip(wide, -most, most)
  if active is not None:
    beyond = jnp.where(active, beyond, 0)
  inner, ahead = x.shape[-1], (None,) * (x.ndim - 1)
  leaves = jnp.any(beyond != 0, axis=tuple(range(x.ndim - 1)))
  count = jnp.sum(leaves, dtype=jnp.int32)
  size = -(-inner // _BLOCK) * _BLOCK
  order = jnp.flatnonzero(leaves, size=size, fill_value=0).astype(jnp.int32)

  def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    first, y = state
    channel = lax.dynamic_slice_in_dim(order, first, _BLOCK)
    real = first + jnp.arange(_BLOCK, dtype=jnp.int32) < count
    take = lambda x, at, axis: jnp.take(x, at, axis=axis, mode="clip")
    weight = take(codes, channel, 0).astype(jnp.float32) * scales[None]
    if rows.shape[0]:
      slot = take(slots, channel, 0)
      kept = take(rows, slot, 0).astype(jnp.float32)
      weight = jnp.where((slot < rows.shape[0])[:, None], kept, weight)
    part = jnp.where(real[ahead], take(beyond, channel, -1), 0)
    # Products of one channel after the other: a product of matrices would sum
    # them in an order that depends on how many rows and channels there are.
    part, weight = lax.optimization_barrier((part, weight))
    for n in range(_BLOCK):
      y = y + part[..., n : n + 1] * weight[n][ahead]
    return first + _BLOCK, y

  start = jnp.zeros((*x.shape[:-1], codes.shape[1]), jnp.float32)
  # Sharded as the codes and the activations are.
  start = start + beyond[..., :1] * 0 + (scales * 0)[ahead]
  return lax.while_loop(
    lambda state: state[0] < count, add, (count * 0, start)
  )[1]
