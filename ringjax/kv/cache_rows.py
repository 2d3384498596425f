"""Rows of arrays of a cache: gathered, replaced and placed as before.

Arrays of several layers have their rows on axis 1, tables and cursors on axis
0. Arrays in host memory are changed there.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax.errors import OptionError, ShapeError
from ringjax.kv.base import HOST, RowIndices


def row_indices(rows: RowIndices, batch: int, *, traced: bool = False) -> Any:
  """Validated row indices, int [n], of a cache of `batch` rows.

  Raises:
    ShapeError: If they are not a list of indices of rows.
  """
  indices = jnp.asarray(rows) if traced else np.asarray(rows)
  valid = indices.ndim == 1 and jnp.issubdtype(indices.dtype, jnp.integer)
  if valid and not isinstance(indices, jax.core.Tracer):
    host = np.asarray(indices)
    valid = host.size > 0 and bool(((host >= 0) & (host < batch)).all())
  if not valid:
    raise ShapeError(
      "examples",
      f"{rows}",
      f"integers [B'] from 0 to {batch - 1}",
      "name the rows, e.g. jnp.array([0, 0])",
    )
  return indices


def take_rows(
  arrays: PyTree, rows: Int[Array | np.ndarray, " n"], axis: int
) -> PyTree:
  """Gather rows of an axis, sharded as before if the shards divide them."""

  def take(x: jax.Array) -> jax.Array:
    if _in_host_memory(x):
      return jax.device_put(
        np.take(on_host(x, "take"), np.asarray(rows), axis),
        rows_sharding(x, rows.size, axis),
      )
    gathered = jnp.take(x, jnp.asarray(rows, jnp.int32), axis, mode="clip")
    if isinstance(x, jax.core.Tracer) or not isinstance(
      x.sharding, NamedSharding
    ):
      return gathered
    return jax.device_put(gathered, rows_sharding(x, rows.size, axis))

  return jax.tree.map(take, arrays)


def replace_rows(
  arrays: PyTree,
  rows: Int[Array | np.ndarray, " n"],
  others: PyTree,
  axis: int,
) -> PyTree:
  """Replace rows of an axis by all rows of other arrays, placed as before."""

  def replace(x: jax.Array, new: jax.Array) -> jax.Array:
    place = (slice(None),) * axis + (rows,)
    if _in_host_memory(x):
      numbers = np.array(on_host(x, "insert"))
      numbers[place] = on_host(new, "insert")
      return jax.device_put(numbers, x.sharding)
    return placed_as(x.at[place].set(new), x)

  return jax.tree.map(replace, arrays, others)


def placed_as(arrays: PyTree, old: PyTree) -> PyTree:
  """Put arrays on the shardings of old ones; traced ones stay."""

  def put(x: jax.Array, old: jax.Array) -> jax.Array:
    if isinstance(old, jax.core.Tracer) or not isinstance(
      old.sharding, NamedSharding
    ):
      return x
    return jax.device_put(x, old.sharding)

  return jax.tree.map(put, arrays, old)


def rows_sharding(
  x: Shaped[Array, " ..."], rows: int, axis: int
) -> jax.sharding.Sharding:
  """Sharding for `rows` rows: as `x`, unsharded if they do not divide."""
  sharding = x.sharding
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh, spec = sharding.mesh, [*sharding.spec]
  row_axes = (spec[axis] if axis < len(spec) else None) or ()
  names = row_axes if isinstance(row_axes, tuple) else (row_axes,)
  if rows % math.prod(mesh.shape[name] for name in names):
    spec[axis] = None
  return NamedSharding(mesh, P(*spec), memory_kind=sharding.memory_kind)


def on_host(
  x: Shaped[Array, "*shape"], doing: str
) -> Shaped[np.ndarray, "*shape"]:
  """Copy an array to this host.

  Raises:
    OptionError: If parts of it are on other hosts.
  """
  if not x.is_fully_addressable:
    raise OptionError(
      "cache",
      f"{doing} of blocks in the memory of several processes",
      "devices of this process alone",
      "make the cache on a mesh of this process's devices",
    )
  return np.asarray(x)


def _in_host_memory(x: jax.Array) -> bool:
  if isinstance(x, jax.core.Tracer):
    return False
  return x.sharding.memory_kind == HOST
