"""Arrays of a mesh on one or some of its devices, where they are already."""

from __future__ import annotations

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
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


def on_part(tree: Tree, mesh: Mesh, axis: str) -> Tree:
  """Returns arrays as they are on a mesh of some of their devices; none moves.

  A dimension that `axis` shards is as long as its shards on these devices.
  Devices that have no shard of it yet get zeros.

  Args:
    tree: arrays on a mesh with the same axes.
    mesh: of some of its devices along `axis`, or of others too.
    axis: the axis along which there are more or fewer.

  Raises:
    MeshError: a device has no copy of what `axis` does not shard.
  """

  def one(x: jax.Array) -> jax.Array:
    spec = x.sharding.spec  # pyrefly: ignore
    held = {shard.device: shard.data for shard in x.addressable_shards}
    part, *_ = held.values()
    shape, sharded = [*part.shape], False
    for n, entry in enumerate(spec):
      names = entry if isinstance(entry, tuple) else (entry,)
      shape[n] *= math.prod(mesh.shape[name] for name in names if name)
      sharded |= axis in names
    missing = [d for d in mesh.devices.flat if d not in held]
    if missing and not sharded:
      raise MeshError(
        "mesh",
        f"{missing[0]}, which has no copy of an array of shape {x.shape}",
        "devices on which the array is",
        "place it on all devices first: rj.models.place(model, mesh)",
      )
    for device in missing:
      held[device] = jnp.zeros(part.shape, x.dtype, device=device)
    return jax.make_array_from_single_device_arrays(
      tuple(shape),
      NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind),
      [held[device] for device in mesh.devices.flat],
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
