"""Products of 8-bit integers, and what an activation has beyond 8 bits.

Guarantees: all sums are of integers, so that a row's result depends on the row
alone, to the bit: not on other rows, on how they are cut into calls or on how
many channels are looked at again. With `shadow` a product is that of
round(x / scale), up to `REACH`.
Cost: one int8 product [T, I] x [I, O], and two of the channels that leave 8
bits; where those are more than `shadow`, two of all channels.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858 (shadow outliers).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, Shaped

# The largest code. -128 is left out, as -(-128) is no int8.
LARGEST = 127
# An activation beyond 8 bits is a code and 256 of these more.
_STEP = 256
# The largest activation, in units of its scale.
REACH = LARGEST * _STEP + LARGEST


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
  *,
  shadow: int = 0,
  active: Bool[Array, ""] | None = None,
) -> Float[Array, "*batch O"]:
  """x . (codes x scales) by products of integers, of x's dtype.

  Args:
    x: activations.
    codes: of the weight, see `codes_of`.
    scales: the same.
    scale: of the activations, positive: what one unit of a code is.
    shadow: channels of which what is beyond 8 bits is multiplied by itself; 0:
      activations are clipped to 127 scales.
    active: whether this call multiplies it, where that differs from layer to
      layer; default: it does.
  """
  units = jnp.round(x.astype(jnp.float32) / scale)
  units = jnp.clip(units, -REACH, REACH).astype(jnp.int32)
  main = jnp.clip(units, -LARGEST, LARGEST)
  y = _dot(main, codes).astype(jnp.float32)
  if shadow:
    on = jnp.asarray(True) if active is None else active
    count = min(shadow, codes.shape[0])
    y = y + _beyond(jnp.where(on, units - main, 0), codes, count)
  return (y * (scales * scale)[(None,) * (x.ndim - 1)]).astype(x.dtype)


def _beyond(
  beyond: Int32[Array, "*batch I"], codes: Int8[Array, "I O"], count: int
) -> Float[Array, "*batch O"]:
  """beyond . codes, by the channels that are not zero if they are few."""
  leaves = jnp.any(beyond != 0, axis=tuple(range(beyond.ndim - 1)))
  every = jnp.sum(leaves, dtype=jnp.int32)
  # Which of the few a channel is. Products choose them, and not indices: a
  # mesh may shard any of these axes.
  place = jnp.where(leaves, jnp.cumsum(leaves, dtype=jnp.int32) - 1, count)
  chosen = place[:, None] == jnp.arange(count, dtype=jnp.int32)[None]

  def few() -> jax.Array:
    picked = _dot(codes.T, chosen).astype(jnp.int8).T
    return sum_of(lambda part: _dot(_dot(part, chosen), picked))

  def sum_of(product: Callable[[jax.Array], jax.Array]) -> jax.Array:
    high = (beyond + _STEP // 2) // _STEP
    upper = product(high).astype(jnp.float32) * jnp.float32(_STEP)
    return upper + product(beyond - high * _STEP).astype(jnp.float32)

  return lax.cond(
    every <= count, few, lambda: sum_of(lambda part: _dot(part, codes))
  )


def _dot(x: Int[Array, "*batch I"], y: Shaped[Array, "I O"]) -> jax.Array:
  """int32 [*batch, O] of numbers that have 8 bits."""
  return lax.dot_general(
    x.astype(jnp.int8),
    y.astype(jnp.int8),
    (((x.ndim - 1,), (0,)), ((), ())),
    preferred_element_type=jnp.int32,
  )
