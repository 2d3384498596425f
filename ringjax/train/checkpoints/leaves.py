"""Leaves of a tree: their names, and how they are saved and restored.

Guarantees: a leaf is restored bit for bit, or is refused by its name.
Random keys are saved as their data; of arrays without elements, which Orbax
refuses, only the shape.
"""

from __future__ import annotations

import urllib.parse
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import PyTree, Shaped

from ringjax.errors import InputTypeError, MeshError, OptionError
from ringjax.train.checkpoints.manifest import Leaf

_NUMBERS = (np.ndarray, np.generic, bool, int, float)


def named(tree: PyTree) -> dict[str, Any]:
  """The leaves of a tree by their paths, "opt/0/mu/w", in the tree's order.

  Raises:
    OptionError: If two have the same path, or a dict's keys have no order.
  """
  by_name: dict[str, Any] = {}
  try:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
  except ValueError as error:
    raise OptionError(
      "tree", str(error), "keys of one type in a dict", "make all of them str"
    ) from None
  for path, leaf in leaves:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # An empty name would not be a part of a path.
    name = "/".join(urllib.parse.quote(p, safe="") or "%" for p in parts) or "%"
    if name in by_name:
      raise OptionError(
        "tree", f"two leaves {name}", "one of each path", "rename one of them"
      )
    by_name[name] = leaf
  return by_name


def leaf_of(name: str, value: object) -> Leaf:
  """Shape and dtype of a leaf, an array, its shape, or a number.

  Raises:
    InputTypeError: If it is another kind of value.
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
  """Raises InputTypeError if a leaf's buffers are deleted."""
  if isinstance(value, jax.Array) and value.is_deleted():
    raise InputTypeError(
      f"leaf {name}",
      "an array that was deleted or donated",
      "one with its buffers",
      "save before the arrays are donated",
    )


def copied(value: object) -> PyTree:
  """A copy for Orbax that stays valid when the caller's array is donated."""
  if not isinstance(value, jax.Array):
    return np.array(value)
  if _is_key(value):
    return jax.random.key_data(value)
  sharding = value.sharding
  on_host = sharding.memory_kind not in (None, "device")
  if on_host or any(d.platform == "cpu" for d in sharding.device_set):
    # Otherwise Orbax's copy on the host would be the array itself.
    return _copied_once(value)
  return value


def native_dtype(dtype: np.dtype) -> np.dtype:
  """A dtype in this machine's order of bytes, which its name does not say."""
  return dtype if dtype.isnative else dtype.newbyteorder("=")


def local_boxes(
  value: object, *, first: bool
) -> list[tuple[tuple[int, ...], Shaped[np.ndarray, ...]]]:
  """Parts of a leaf that this process saves, each part in one process.

  They stay valid when the caller's array is donated.

  Args:
    value: Leaf, which may be sharded over processes.
    first: Whether this process saves values that all processes have.

  Returns:
    (index of the first element along each axis, values) of each part.
  """
  if not isinstance(value, jax.Array):
    x = np.array(value)
    x = x.astype(native_dtype(x.dtype), copy=False)
    return [((0,) * x.ndim, x)] if first else []
  data = jax.random.key_data(value) if _is_key(value) else value
  boxes = []
  for shard in data.addressable_shards:
    if shard.replica_id == 0:
      pairs = zip(shard.index, data.shape, strict=True)
      start = (s.indices(n)[0] for s, n in pairs)
      # On CPUs `asarray` is the buffer itself.
      boxes.append((tuple(start), np.array(shard.data, order="C")))
  return boxes


def _copied_once(value: jax.Array) -> jax.Array:
  """Copies an array to host memory, each part once.

  A plain copy takes the memory of every replica, and CPU devices share theirs.
  One process drops the replicas, of which Orbax would copy a part each. With
  several processes each may have to write some, and they share one buffer.
  """
  sharding = value.sharding
  if jax.process_count() == 1 and isinstance(sharding, NamedSharding):
    sharding = _one_replica(sharding)
  copies: dict[str, np.ndarray] = {}
  shards = []
  for shard in value.addressable_shards:
    if shard.device not in sharding.device_set:
      continue
    index = str(shard.index)
    if index not in copies:
      copies[index] = _aligned_copy(shard.data)
    place = SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind)
    shards.append(jax.device_put(copies[index], place, may_alias=True))
  return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def _one_replica(at: NamedSharding) -> NamedSharding:
  """Restricts a sharding to the devices that hold its first replica."""
  names = {
    name
    for entry in at.spec
    if entry is not None
    for name in (entry if isinstance(entry, tuple) else (entry,))
  }
  first = tuple(
    slice(None) if name in names else slice(1) for name in at.mesh.axis_names
  )
  mesh = Mesh(
    at.mesh.devices[first], at.mesh.axis_names, axis_types=at.mesh.axis_types
  )
  return NamedSharding(mesh, at.spec, memory_kind=at.memory_kind)


def _aligned_copy(data: jax.Array) -> np.ndarray:
  """A copy that a CPU device uses as its buffer: it begins at 64 bytes."""
  source = np.asarray(data)
  room = np.empty(source.nbytes + 64, np.uint8)
  start = -room.ctypes.data % 64
  copy = room[start : start + source.nbytes].view(source.dtype)
  copy = copy.reshape(source.shape)
  np.copyto(copy, source)
  return copy


def target(name: str, like: PyTree) -> PyTree:
  """Target for Orbax, to restore a leaf like this one.

  Raises:
    MeshError: If its sharding does not divide its shape.
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
  x = jax.ShapeDtypeStruct(like.shape, like.dtype)
  if _is_key(like):
    x = jax.eval_shape(jax.random.key_data, x)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def finished(like: PyTree, wanted: PyTree, x: PyTree) -> PyTree:
  """Converts a restored leaf to the kind of `like`.

  Args:
    like: Leaf of the caller's tree.
    wanted: The leaf's `target`.
    x: Value that Orbax read; None for an array without elements.
  """
  if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
    if x is None:
      x = jax.numpy.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)
    kind = _key_kind(like) if _is_key(like) else None
    return x if kind is None else jax.random.wrap_key_data(x, impl=kind)
  x = np.zeros(wanted.shape, wanted.dtype) if x is None else np.asarray(x)
  if isinstance(like, np.ndarray):
    return x
  # NumPy scalars stay NumPy scalars.
  return x[()] if isinstance(like, np.generic) else type(like)(x.item())


def _is_key(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_kind(x: jax.Array | jax.ShapeDtypeStruct) -> str:
  """Name of the generator of random keys, from which they are rebuilt."""
  names: list[str] = []
  jax.eval_shape(
    lambda keys: names.append(str(jax.random.key_impl(keys))),
    jax.ShapeDtypeStruct(x.shape, x.dtype),
  )
  return names[0]
