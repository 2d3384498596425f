"""Products of 8-bit numbers in training, forward and backward.

Guarantees: y = Q(x) . Q(w), with a scale for each token of x and each output of
w; the gradients of x and w are products of 8-bit numbers, too, with scales for
what is not summed over. The gradient of y is rounded at random, to either
neighbour, so that both gradients are right on average; the random numbers
follow from its bits, and a step that is computed again is the same. Sums are
int32 or float32. With `float8`, x and w are E4M3, the gradient of y is E5M2.
Cost: three products of 8-bit numbers in place of three of 16 bits; chips that
lack such products, as CPUs do, and TPU v5p for float8, take longer than before.
Ref: Jouppi et al. 2020, AQT's scheme, github.com/google/aqt; Wang et al. 2018,
arXiv 1812.08011 (random rounding); Micikevicius et al. 2022, FP8 Formats for
Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

FLOAT, INT8, FLOAT8 = PRODUCTS = ("float", "int8", "float8")
# Largest numbers of int8 codes, E4M3 and E5M2.
_LARGEST = {jnp.int8: 127.0, jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}

_PRODUCTS: contextvars.ContextVar[str] = contextvars.ContextVar(
  "narrow_products", default=FLOAT
)


@contextlib.contextmanager
def narrow_products(kind: str) -> Iterator[None]:
  """Set the products of linear maps while a model is traced.

  Args:
    kind: One of `PRODUCTS`.
  """
  token = _PRODUCTS.set(kind)
  try:
    yield
  finally:
    _PRODUCTS.reset(token)


def current_products() -> str:
  """The products that `narrow_products` has set, else "float"."""
  return _PRODUCTS.get()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def narrow_product(
  kind: str, x: Float[Array, "N I"], weight: Float[Array, "I O"]
) -> Float[Array, "N O"]:
  """Compute x . weight by a product of 8-bit numbers, of x's dtype.

  Args:
    kind: "int8" or "float8".
    x: Activations.
    weight: Weight, of the same dtype.
  """
  return _dot(kind, x, weight, (1, 0)).astype(x.dtype)


def _forward(
  kind: str, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return narrow_product(kind, x, weight), (x, weight)


def _backward(
  kind: str, operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, weight = operands
  key = _key(gradient)
  of_x = _dot(kind, gradient, weight, (1, 1), jax.random.fold_in(key, 0))
  of_weight = _dot(kind, gradient, x, (0, 0), jax.random.fold_in(key, 1))
  return of_x.astype(x.dtype), of_weight.T.astype(weight.dtype)


narrow_product.defvjp(_forward, _backward)


def _key(x: jax.Array) -> jax.Array:
  """Random key that follows from the bits of an array."""
  unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
  # A sum of integers does not depend on how the array is sharded.
  return jax.random.key(jnp.sum(bits, dtype=jnp.uint32))


def _dot(
  kind: str,
  a: Float[Array, "_ _"],
  b: Float[Array, "_ _"],
  contracted: tuple[int, int],
  key: Key[Array, ""] | None = None,
) -> Float[Array, "_ _"]:
  """Product over an axis of each, float32; with a key, a is a gradient."""
  narrow = jnp.int8 if kind == INT8 else jnp.float8_e4m3fn
  of_gradient = jnp.float8_e5m2 if kind == FLOAT8 else narrow
  first, second = contracted
  a_numbers, a_scale = narrowed(
    a, first, narrow if key is None else of_gradient, key
  )
  b_numbers, b_scale = narrowed(b, second, narrow)
  y = lax.dot_general(
    a_numbers,
    b_numbers,
    (((first,), (second,)), ((), ())),
    preferred_element_type=jnp.int32 if kind == INT8 else jnp.float32,
  )
  return y.astype(jnp.float32) * a_scale[:, None] * b_scale[None]


def narrowed(
  x: Float[Array, "_ _"],
  axis: int,
  dtype: type,
  key: Key[Array, ""] | None = None,
) -> tuple[Array, Float[Array, " _"]]:
  """Round an array to 8-bit numbers, with a scale for each entry of an axis.

  Args:
    x: Array of two axes.
    axis: Axis that is summed over, whose numbers share a scale.
    dtype: int8, float8_e4m3fn or float8_e5m2.
    key: Random key, to round to either neighbour at random; None: to the
      nearest.
  """
  scaled = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(scaled), axis)
  scale = jnp.where(largest > 0, largest, 1) / jnp.float32(_LARGEST[dtype])
  scaled = scaled / jnp.expand_dims(scale, axis)
  if key is None:
    numbers = jnp.round(scaled) if dtype == jnp.int8 else scaled
  else:
    numbers = _rounded_at_random(scaled, dtype, key)
  return numbers.astype(dtype), scale


def _rounded_at_random(
  x: jax.Array, dtype: type, key: Key[Array, ""]
) -> jax.Array:
  """Numbers of `dtype`, as float32, whose mean is x."""
  chance = jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.float32)
  # 256 numbers in the middle of 256 parts of 0 to 1.
  chance = (chance + 0.5) / 256
  if dtype == jnp.int8:
    return jnp.clip(jnp.floor(x + chance), -127, 127)
  # Numbers of E5M2 of one binade, and below the least one, have equal steps.
  exponent = jnp.maximum(jnp.frexp(x)[1] - 1, -14)
  step = jnp.ldexp(jnp.ones_like(x), exponent - 2)
  return jnp.clip(jnp.floor(x / step + chance) * step, -57344.0, 57344.0)
