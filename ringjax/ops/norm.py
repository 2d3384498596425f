"""Normalisation of each token's vector, with float32 statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.ops.softmax import wide_dtype


def rms_norm(
  x: Float[Array, "*shape"],
  weight: Float[Array, " ..."] | None,
  eps: float,
  *,
  axes: int = 1,
  offset: float = 0.0,
) -> jax.Array:
  """x / rms(x) * (offset + weight) over the last `axes` axes, in x's dtype.

  Args:
    x: [..., D], or [..., N, H] with axes=2.
    weight: the shape of the last `axes` axes, or None for no weight.
    eps: added to the mean square.
    axes: how many axes make a vector.
    offset: 1 where checkpoints store the weight's distance from one.
  """
  over = tuple(range(-axes, 0))
  wide = x.astype(wide_dtype(x.dtype))
  mean = jnp.mean(jnp.square(wide), over, keepdims=True)
  y = wide * jax.lax.rsqrt(mean + jnp.asarray(eps, wide.dtype))
  if weight is not None:
    scale = weight.astype(wide.dtype) + jnp.asarray(offset, wide.dtype)
    y = y * scale[(None,) * (x.ndim - axes)]
  return y.astype(x.dtype)


def layer_norm(
  x: Float[Array, "*batch D"],
  weight: Float[Array, " ..."] | None,
  bias: Float[Array, " ..."] | None,
  eps: float,
  *,
  offset: float = 0.0,
) -> Float[Array, "*batch D"]:
  """(x - mean) / std * (offset + weight) + bias, in x's dtype.

  Args:
    x: [..., D]; mean and variance are over the last axis.
    weight: [D], or of more of x's last axes: [N, D] for a weight of each head;
      None for no weight.
    bias: as `weight`.
    eps: added to the variance.
    offset: 1 where checkpoints store the weight's distance from one.
  """
  wide = x.astype(wide_dtype(x.dtype))
  centred = wide - jnp.mean(wide, -1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
  y = centred * jax.lax.rsqrt(variance + jnp.asarray(eps, wide.dtype))
  lead = lambda w: w.astype(wide.dtype)[(None,) * (x.ndim - w.ndim)]
  if weight is not None:
    y = y * (lead(weight) + jnp.asarray(offset, wide.dtype))
  if bias is not None:
    y = y + lead(bias)
  return y.astype(x.dtype)
