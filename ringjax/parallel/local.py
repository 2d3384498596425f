"""Copies on one device of arrays that are on a mesh."""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array, Shaped

from ringjax.errors import MeshError

Tree = TypeVar("Tree")


def last_device(mesh: Mesh, axis: str | None) -> jax.Device:
  """Returns the mesh's last device along `axis`, the first along other axes.

  Raises:
    MeshError: a device of the mesh belongs to another process.
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


def local_copy(tree: Tree, device: jax.Device) -> Tree:
  """Returns the copies on `device` of arrays that it has whole; none is made.

  Raises:
    MeshError: the device has no array, or only a part of one.
  """

  def one(x: jax.Array) -> jax.Array:
    for shard in x.addressable_shards:
      if shard.device == device and shard.data.shape == x.shape:
        return shard.data
    raise MeshError(
      "array",
      f"shape {x.shape} that is not whole on {device}",
      "a copy there",
      "use a mesh whose only axis of several devices is the sequence's",
    )

  return jax.tree.map(one, tree)


# The name under which the other layers know it.
here = local_copy


def move(x: Shaped[Array, " ..."], device: jax.Device) -> jax.Array:
  """Copies an array, wherever its shards are, whole to one device."""
  if not x.size:
    # JAX counts its shards by their bytes, of which there are none.
    return jax.device_put(np.zeros(x.shape, x.dtype), device)
  return jax.device_put(x, SingleDeviceSharding(device))
