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
) -> Float[Array, " *shape"]:
  """RMS norm x / rms(x) * (offset + weight) over the last `axes` axes.

  Args:
    x: Input, [..., D], or [..., N, H] with axes=2.
    weight: Weight of the shape of the last `axes` axes, or None.
    eps: Constant added to the mean square.
    axes: Number of axes that make a vector.
    offset: 1 if checkpoints store the weight's distance from one.
  """
  reduced_axes = tuple(range(-axes, 0))
  float_x = x.astype(wide_dtype(x.dtype))
  mean = jnp.mean(jnp.square(float_x), reduced_axes, keepdims=True)
  y = float_x * jax.lax.rsqrt(mean + jnp.asarray(eps, float_x.dtype))
  if weight is not None:
    scale = weight.astype(float_x.dtype) + jnp.asarray(offset, float_x.dtype)
    y = y * scale[(None,) * (x.ndim - axes)]
  return y.astype(x.dtype)


def scaled_rms_norm(
  x: Float[Array, "*batch D"],
  weight: Float[Array, "*#batch D"],
  eps: float,
  *,
  offset: float = 0.0,
) -> Float[Array, "*batch D"]:
  """RMS norm of x * (offset + weight) over the last axis, in x's dtype.

  Args:
    x: Input, [..., D].
    weight: Weight, [D], or with axes that broadcast against x's.
    eps: Constant added to the mean square.
    offset: 1 if checkpoints store the weight's distance from one.
  """
  dtype = wide_dtype(x.dtype)
  scale = weight.astype(dtype) + jnp.asarray(offset, dtype)
  scale = scale[(None,) * (x.ndim - scale.ndim)]
  return rms_norm((x.astype(dtype) * scale).astype(x.dtype), None, eps)


def layer_norm(
  x: Float[Array, "*batch D"],
  weight: Float[Array, " ..."] | None,
  bias: Float[Array, " ..."] | None,
  eps: float,
  *,
  offset: float = 0.0,
) -> Float[Array, "*batch D"]:
  """Layer norm (x - mean) / std * (offset + weight) + bias, in x's dtype.

  Args:
    x: Input, [..., D]; mean and variance are over the last axis.
    weight: Weight [D], or of more of x's last axes: [N, D] for a weight of each
      head; or None.
    bias: Bias shaped like `weight`, or None.
    eps: Constant added to the variance.
    offset: 1 if checkpoints store the weight's distance from one.
  """
  float_x = x.astype(wide_dtype(x.dtype))
  centred = float_x - jnp.mean(float_x, -1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
  y = centred * jax.lax.rsqrt(variance + jnp.asarray(eps, float_x.dtype))
  expand = lambda w: w.astype(float_x.dtype)[(None,) * (x.ndim - w.ndim)]
  if weight is not None:
    y = y * (expand(weight) + jnp.asarray(offset, float_x.dtype))
  if bias is not None:
    y = y + expand(bias)
  return y.astype(x.dtype)
