"""Leaves of a tree: their names, what is saved of them, what comes back.

Guarantees: a leaf comes back as it was, to the bit, or is refused by its name.
Random keys are saved as their data; of arrays without elements, which Orbax
refuses, only the shape.
"""

from __future__ import annotations

import urllib.parse
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from ringjax.errors import InputTypeError, MeshError, OptionError
from ringjax.train.manifest import Leaf

_NUMBERS = (np.ndarray, np.generic, bool, int, float)


def named(tree: PyTree) -> dict[str, Any]:
  """The leaves of a tree by their paths, "opt/0/mu/w", in the tree's order.

  Raises:
    OptionError: two have the same, or a dict's keys have no order.
  """
  found: dict[str, Any] = {}
  try:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
  except ValueError as error:
    raise OptionError(
      "tree", str(error), "keys of one type in a dict", "make all of them str"
    ) from None
  for path, leaf in leaves:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # An empty name would be no part of a path.
    name = "/".join(urllib.parse.quote(p, safe="") or "%" for p in parts) or "%"
    if name in found:
      raise OptionError(
        "tree", f"two leaves {name}", "one of each path", "rename one of them"
      )
    found[name] = leaf
  return found


def leaf_of(name: str, value: object) -> Leaf:
  """Shape and dtype of a leaf, an array, its shape, or a number.

  Raises:
    InputTypeError: it is something else.
  """
  if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
    dtype = f"key<{_key_kind(value)}>" if _is_key(value) else value.dtype.name
    return Leaf(tuple(value.shape), dtype)
  x = np.asarray(value) if isinstance(value, _NUMBERS) else None
  if x is None or x.dtype.hasobject or x.dtype.kind in "USMm":
    raise InputTypeError(
      f"leaf {name}",
      type(value).__name__,
      "an array or a number",
      "pass what is no array in `extra`",
    )
  return Leaf(x.shape, x.dtype.name)


def check_alive(name: str, value: object) -> None:
  """Raises InputTypeError if a leaf's buffers are gone."""
  if isinstance(value, jax.Array) and value.is_deleted():
    raise InputTypeError(
      f"leaf {name}",
      "an array that was deleted or donated",
      "one with its buffers",
      "save before the arrays are donated",
    )


def copied(value: object) -> PyTree:
  """What Orbax saves: an array that stays when the caller's is donated."""
  if not isinstance(value, jax.Array):
    return np.array(value)
  if _is_key(value):
    return jax.random.key_data(value)
  at = value.sharding
  on_host = at.memory_kind not in (None, "device")
  if on_host or any(d.platform == "cpu" for d in at.device_set):
    # Else Orbax's copy on the host would be the array itself.
    return jax.device_put(value, at, may_alias=False)
  return value


def target(name: str, like: PyTree) -> PyTree:
  """What Orbax is asked for, to restore a leaf like this one.

  Raises:
    MeshError: its sharding does not divide its shape.
  """
  if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
    return np.asarray(like)
  sharding = like.sharding or SingleDeviceSharding(jax.local_devices()[0])
  try:
    sharding.shard_shape(tuple(like.shape))
  except ValueError as error:
    raise MeshError(
      name,
      f"{getattr(sharding, 'spec', '')} for shape {list(like.shape)}",
      "a sharding that divides it",
      f"pass a `like` with another sharding ({str(error)[:80]})",
    ) from None
  x: Any = jax.ShapeDtypeStruct(like.shape, like.dtype)
  if _is_key(like):
    x = jax.eval_shape(jax.random.key_data, x)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def finished(like: PyTree, wanted: PyTree, x: PyTree) -> PyTree:
  """A restored leaf in the kind of `like`.

  Args:
    like: what the caller wants.
    wanted: its `target`.
    x: what Orbax read; None for an array without elements.
  """
  if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
    if x is None:
      x = jax.numpy.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)
    kind = _key_kind(like) if _is_key(like) else None
    return x if kind is None else jax.random.wrap_key_data(x, impl=kind)
  x = np.zeros(wanted.shape, wanted.dtype) if x is None else np.asarray(x)
  if isinstance(like, np.ndarray):
    return x
  # NumPy's numbers stay NumPy's.
  return x[()] if isinstance(like, np.generic) else type(like)(x.item())


def _is_key(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_kind(x: jax.Array | jax.ShapeDtypeStruct) -> str:
  """The name of the generator of random keys, by which they are made again."""
  found: list[str] = []
  jax.eval_shape(
    lambda keys: found.append(str(jax.random.key_impl(keys))),
    jax.ShapeDtypeStruct(x.shape, x.dtype),
  )
  return found[0]
