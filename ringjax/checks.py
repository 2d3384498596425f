"""Checks of arguments, a line each: the same rule and wording everywhere.

Each returns the value in its plain type or raises an error that states what
came, what was expected and what to do.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ringjax.errors import (
  DtypeError,
  InputTypeError,
  OptionError,
  RingjaxError,
  ShapeError,
)

# Dtypes of weights and of cached keys and values.
FLOATS = ("bfloat16", "float16", "float32", "float64")

# Number of options after which their order in an error is by likeness.
_MANY_OPTIONS = 24
# Beginning of an address, such as gs://, but not of a drive, as in C:/.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/?/")


def as_array(name: str, x: object) -> Shaped[Array, " ..."]:
  """Convert x to a JAX array, or raise an error that names it."""
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


def float_dtype(name: str, value: object) -> np.dtype:
  """Convert value to one of `FLOATS`, or raise an error that names it."""
  try:
    dtype_like: Any = value
    dtype = jnp.dtype(dtype_like)
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


def integer(
  name: str,
  value: object,
  *,
  least: int | None = None,
  most: int | None = None,
  error: type[RingjaxError] = OptionError,
  remedy: str | None = None,
) -> int:
  """Convert `value` to an int from `least` to `most`, or raise an error."""
  is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  low = -math.inf if least is None else least
  high = math.inf if most is None else most
  if not is_int or not low <= int(value) <= high:
    expected = f"an int{_range(least, most)}"
    raise error(
      name, repr(value), expected, remedy or f"pass {name} as {expected}"
    )
  return int(value)


def positive_int(
  name: str,
  value: object,
  *,
  error: type[RingjaxError] = OptionError,
  remedy: str | None = None,
) -> int:
  """Convert `value` to an int of at least 1, or raise an error."""
  return integer(name, value, least=1, error=error, remedy=remedy)


def number(
  name: str,
  value: object,
  *,
  least: int | float | None = None,
  most: int | float | None = None,
  above: int | float | None = None,
  error: type[RingjaxError] = OptionError,
  remedy: str | None = None,
) -> float:
  """Convert `value` to a finite float in a range, or raise an error.

  Args:
    name: Name of the argument.
    value: Value of the argument.
    least: Smallest valid value, or None.
    most: Largest valid value, or None.
    above: Value that has to be exceeded, in place of `least`.
    error: Class of the error.
    remedy: Remedy in the error; default: pass such a number.
  """
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  try:
    as_float = float(value) if is_number else math.nan
  except OverflowError:
    # An int beyond the range of floats.
    as_float = math.inf
  in_range = math.isfinite(as_float)
  in_range = in_range and (least is None or as_float >= least)
  in_range = in_range and (above is None or as_float > above)
  if not in_range or (most is not None and as_float > most):
    expected = f"a number{_range(least, most, above)}"
    raise error(
      name, repr(value), expected, remedy or f"pass {name} as {expected}"
    )
  return as_float


def one_of(
  name: str,
  value: object,
  options: Iterable[Any],
  *,
  error: type[RingjaxError] = OptionError,
  remedy: str | None = None,
) -> Any:
  """Return `value` if it is among `options`, or raise an error with them."""
  options = tuple(options)
  # `in` is not used: it fails for unhashable values and for arrays.
  if not any(type(value) is type(x) and value == x for x in options):
    texts = [*map(str, options)]
    if len(texts) > _MANY_OPTIONS:
      # A long list is cut: what may have been meant comes first.
      near = difflib.get_close_matches(str(value), texts, 6)
      texts = [*near, *(text for text in texts if text not in near)]
    shown = ", ".join(texts)
    raise error(
      name,
      repr(value),
      f"one of {shown}",
      remedy or "pass one of these",
    )
  return value


def _range(
  least: int | float | None,
  most: int | float | None,
  above: int | float | None = None,
) -> str:
  """Words for a range after a blank: `from 1 to 8`, `of at least 1`."""
  # Ints in full: 2**31 - 1 in six digits would be another number.
  shown = lambda x: str(x) if isinstance(x, int) else f"{x:g}"
  if above is not None:
    return f" above {shown(above)}" + (
      f", at most {shown(most)}" if most is not None else ""
    )
  if least is not None and most is not None:
    return f" from {shown(least)} to {shown(most)}"
  if least is not None:
    return f" of at least {shown(least)}"
  return "" if most is None else f" of at most {shown(most)}"


def token_rows(tokens: object, least: int = 1) -> Int[np.ndarray, "N T"]:
  """Convert texts of one length to an array of ids, or raise ShapeError.

  Args:
    tokens: Token ids, int [N, T], N and T above 0.
    least: Fewest tokens of a text.
  """
  ids = np.asarray(tokens)
  valid = ids.ndim == 2 and np.issubdtype(ids.dtype, np.integer)
  if not valid or ids.shape[0] < 1 or ids.shape[1] < least:
    longer = "" if least == 1 else f", of {least} tokens or more"
    raise ShapeError(
      "tokens",
      f"{ids.dtype} {list(ids.shape)}",
      f"integers [N, T], a row for each text{longer}",
      "cut the texts into rows of equal length",
    )
  return ids


def instance(name: str, value: object, kind: type) -> None:
  """Raise unless `value` is of a class.

  Raises:
    OptionError: If it is not.
  """
  if not isinstance(value, kind):
    raise OptionError(
      name, repr(value), f"a {kind.__name__}", f"pass {kind.__name__}(...)"
    )


def is_address(path: str | os.PathLike[str]) -> bool:
  """Whether a path is an address such as gs://bucket/name."""
  return _SCHEME.match(os.fspath(path)) is not None


def local_path(name: str, path: str | os.PathLike[str]) -> str:
  """Path of a file system, or an error for an address of another storage."""
  text = os.fspath(path)
  if is_address(text):
    raise OptionError(
      name,
      text,
      "a path of a local or mounted file system",
      "mount the storage, as a file system that all hosts share, and pass the "
      "folder; or copy the files",
    )
  return text


def boolean(name: str, x: object) -> bool:
  """Convert x to a bool, or raise an error that names it."""
  if not isinstance(x, bool | np.bool_):
    traced = isinstance(x, jax.core.Tracer)
    raise InputTypeError(
      name,
      "a traced value" if traced else repr(x),
      "True or False",
      "pass a Python bool",
    )
  return bool(x)
