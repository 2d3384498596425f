"""Leaves of a tree: their names, what is saved of them, what comes back.

Guarantees: a leaf comes back as what it was, to the bit, or is refused by its
name. Random keys are saved as their data; of arrays without elements, which
Orbax refuses, only the shape.
"""

from __future__ import annotations

import urllib.parse
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ringjax.errors import InputTypeError, MeshError, OptionError
from ringjax.train.manifest import Leaf


class LeafToSave:
  """A leaf on its way to the disk."""

  def __init__(self, name: str, value: Any):
    self._value = value
    self._is_key = False
    if isinstance(value, jax.Array):
      if value.is_deleted():
        raise InputTypeError(
          f"leaf {name}",
          "an array that was deleted or donated",
          "one that is still there",
          "save before the arrays are given away",
        )
      self._is_key = _is_key(value.dtype)
      dtype = _key_name(value) if self._is_key else value.dtype.name
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float)):
      self._value = _array(name, value)
      dtype = self._value.dtype.name
    else:
      raise _no_leaf(name, value)
    self.leaf = Leaf(shape=tuple(self._value.shape), dtype=dtype)
    self.is_stored = 0 not in self.leaf.shape

  def copy(self) -> Any:
    """Arrays that stay what they are when the caller's are donated."""
    x = self._value
    if isinstance(x, np.ndarray):
      return x.copy()
    if self._is_key:
      return jax.random.key_data(x)
    near = x.sharding.memory_kind not in (None, "device")
    if near or any(d.platform == "cpu" for d in x.sharding.device_set):
      # Else Orbax's copy on the host would be the array itself.
      return jax.device_put(x, x.sharding, may_alias=False)
    return x


class LeafToRestore:
  """A leaf that is to be restored.

  Attributes:
    leaf: what it has to be.
  """

  def __init__(self, name: str, like: Any):
    self._name, self._like = name, like
    self._key: str | None = None
    if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
      dtype = like.dtype.name if not _is_key(like.dtype) else _key_name(like)
      if _is_key(like.dtype):
        self._key = dtype[4:-1]
      self.leaf = Leaf(shape=tuple(like.shape), dtype=dtype)
      self._sharding = like.sharding or SingleDeviceSharding(
        jax.local_devices()[0]
      )
      try:
        self._sharding.shard_shape(tuple(like.shape))
      except ValueError as error:
        raise MeshError(
          name,
          f"{self._sharding.spec if hasattr(self._sharding, 'spec') else ''}"
          f" for shape {list(like.shape)}",
          "a sharding that divides it",
          f"change it ({str(error)[:80]})",
        ) from None
    elif isinstance(like, (np.ndarray, np.generic, bool, int, float)):
      x = _array(name, like)
      self.leaf = Leaf(shape=x.shape, dtype=x.dtype.name)
    else:
      raise _no_leaf(name, like)

  def target(self, leaf: Leaf) -> Any:
    """What Orbax is asked for."""
    if not isinstance(self._like, (jax.Array, jax.ShapeDtypeStruct)):
      return np.broadcast_to(np.zeros((), _dtype(leaf.dtype)), leaf.shape)
    x = self._data()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)

  def _data(self) -> jax.ShapeDtypeStruct:
    """What lies on disk for a JAX array."""
    x = jax.ShapeDtypeStruct(self._like.shape, self._like.dtype)
    return x if self._key is None else jax.eval_shape(jax.random.key_data, x)

  def finished(self, x: Any, leaf: Leaf) -> Any:
    """What the caller gets; `x` is None where nothing is stored."""
    if isinstance(self._like, (jax.Array, jax.ShapeDtypeStruct)):
      if x is None:
        data = self._data()
        x = jax.numpy.zeros(data.shape, data.dtype, device=self._sharding)
      if self._key is not None:
        x = jax.random.wrap_key_data(x, impl=self._key)
      return x
    if x is None:
      x = np.zeros(leaf.shape, _dtype(leaf.dtype))
    if isinstance(self._like, np.ndarray):
      return np.asarray(x)
    # NumPy's numbers stay NumPy's.
    if isinstance(self._like, np.generic):
      return np.asarray(x)[()]
    return type(self._like)(np.asarray(x).item())


def named(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their paths, "opt/0/mu/w", in the tree's order.

  Raises:
    OptionError: two have the same, or a dict's keys have no order.
  """
  found: dict[str, Any] = {}
  try:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
  except ValueError as error:
    raise OptionError(
      "tree", str(error), "keys of one type in a dict", "rename some"
    ) from None
  for path, leaf in leaves:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # "%" stands for nothing, which would be no part of a path.
    name = "/".join(urllib.parse.quote(p, safe="") or "%" for p in parts) or "%"
    if name in found:
      raise OptionError(
        "tree", f"two leaves {name}", "one of each path", "rename one"
      )
    found[name] = leaf
  return found


def _array(name: str, value: Any) -> np.ndarray:
  x = np.asarray(value)
  if x.dtype.hasobject or x.dtype.kind in "USMm":
    raise _no_leaf(name, value)
  return x


def _dtype(name: str) -> np.dtype:
  return np.dtype(jax.numpy.dtype(name))


def _is_key(dtype: Any) -> bool:
  return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _key_name(x: Any) -> str:
  """The dtype of random keys, with the name by which they are made again."""
  said: list[str] = []

  def look(keys: Any) -> None:
    said.append(f"key<{jax.random.key_impl(keys)}>")

  jax.eval_shape(look, jax.ShapeDtypeStruct(x.shape, x.dtype))
  return said[0]


def _no_leaf(name: str, value: Any) -> InputTypeError:
  return InputTypeError(
    f"leaf {name}",
    type(value).__name__,
    "an array or a number",
    "put what is no array into `extra`",
  )
