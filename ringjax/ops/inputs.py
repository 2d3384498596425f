"""Arguments that are checked in the same way everywhere."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.errors import DtypeError, InputTypeError, OptionError

# Of weights and of what is kept of tokens.
FLOATS = ("bfloat16", "float16", "float32", "float64")


def as_array(name: str, x: Any) -> jax.Array:
  """x as a JAX array, or an error that names it."""
  numeric = isinstance(x, jax.Array | np.ndarray | np.generic)
  if not numeric or (isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm"):
    raise InputTypeError(
      name,
      type(x).__name__,
      "a JAX or NumPy array",
      "convert it with jnp.asarray",
    )
  narrowed = jax.dtypes.canonicalize_dtype(np.float64) != np.float64
  if x.dtype == np.float64 and narrowed:
    raise DtypeError(
      name,
      "float64 while 64-bit types are off",
      "a dtype of at most 32 bits",
      "cast it, or jax.config.update('jax_enable_x64', True)",
    )
  return jnp.asarray(x)


def float_dtype(name: str, value: Any) -> np.dtype:
  """value as one of `FLOATS`, or an error that names it."""
  try:
    dtype = jnp.dtype(value)
  except (TypeError, ValueError):
    dtype = None
  if value is None or dtype is None or dtype.name not in FLOATS:
    raise OptionError(
      name,
      repr(value),
      f"one of {', '.join(FLOATS)}",
      f"pass {name}=jnp.bfloat16",
    )
  if jax.dtypes.canonicalize_dtype(dtype) != dtype:
    raise OptionError(
      name,
      f"{dtype} while 64-bit types are off",
      "a dtype of at most 32 bits",
      f"pass {name}=jnp.float32, or jax.config.update('jax_enable_x64', True)",
    )
  return dtype


def positive_int(name: str, value: Any) -> int:
  """value as an int of at least 1, or an error that names it."""
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole or int(value) < 1:
    raise OptionError(name, repr(value), "a positive int", "count it in tokens")
  return int(value)


def boolean(name: str, x: Any) -> bool:
  """x as a bool, or an error that names it."""
  if not isinstance(x, bool | np.bool_):
    traced = isinstance(x, jax.core.Tracer)
    raise InputTypeError(
      name,
      "a traced value" if traced else repr(x),
      "True or False",
      "pass a Python bool",
    )
  return bool(x)
