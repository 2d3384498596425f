"""One device's copies of what lies on a mesh."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

from ringjax.errors import MeshError

Tree = TypeVar("Tree")


def last_device(mesh: Any, axis: str | None) -> Any:
  """The last device along an axis, the first along all others; or the first.

  Raises:
    MeshError: it belongs to another process, or some device of the mesh does.
  """
  for device in mesh.devices.flat:
    if device.process_index != jax.process_index():
      raise MeshError(
        "mesh",
        f"devices of process {device.process_index} too",
        "devices of this process only, to bring arrays to one of them",
        "let a chain of processes read: python -m launch.prefill",
      )
  where = [0] * mesh.devices.ndim
  if axis is not None:
    where[mesh.axis_names.index(axis)] = -1
  return mesh.devices[tuple(where)]


def here(tree: Tree, device: Any) -> Tree:
  """The copies on `device` of arrays that lie whole on it; nothing is copied.

  Raises:
    MeshError: an array lies elsewhere, or only a part of it there.
  """

  def one(x: jax.Array) -> jax.Array:
    for shard in x.addressable_shards:
      if shard.device == device and shard.data.shape == x.shape:
        return shard.data
    raise MeshError(
      "array",
      f"shape {x.shape} that does not lie whole on {device}",
      "a copy there",
      "use a mesh whose only axis of several devices is the sequence's",
    )

  return jax.tree.map(one, tree)


def move(x: jax.Array, device: Any) -> jax.Array:
  """An array, wherever its shards lie, whole on one device."""
  return jax.device_put(x, SingleDeviceSharding(device))
