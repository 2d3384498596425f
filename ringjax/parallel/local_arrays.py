"""Arrays of a mesh on some of its devices, and shards on the host."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.errors import MeshError

Tree = TypeVar("Tree")


def last_device(mesh: Mesh, axis: str | None) -> jax.Device:
  """Return the mesh's last device along `axis`, the first along other axes.

  Raises:
    MeshError: If a device of the mesh belongs to another process.
  """
  for device in mesh.devices.flat:
    if device.process_index != jax.process_index():
      raise MeshError(
        "mesh",
        f"devices of process {device.process_index} too",
        "devices of this process only, to bring arrays to one of them",
        "let a chain of processes read: python -m ringjax.launch.prefill",
      )
  index = [0] * mesh.devices.ndim
  if axis is not None:
    index[mesh.axis_names.index(axis)] = -1
  return mesh.devices[tuple(index)]


def local_copy(tree: Tree, device: jax.Device) -> Tree:
  """Return the existing copies on `device` of arrays that it has whole.

  Raises:
    MeshError: If the device has no array, or only a part of one.
  """

  def whole_shard(x: jax.Array) -> jax.Array:
    for shard in x.addressable_shards:
      if shard.device == device and shard.data.shape == x.shape:
        return shard.data
    raise MeshError(
      "array",
      f"shape {x.shape} that is not whole on {device}",
      "a copy there",
      "use a mesh whose only axis of several devices is the sequence's",
    )

  return jax.tree.map(whole_shard, tree)


def on_part(
  tree: Tree, mesh: Mesh, axis: str, dimension: int | None = None
) -> Tree:
  """Return arrays on a mesh of some of their devices, without moving data.

  A dimension that `axis` shards is as long as its shards on these devices.
  Devices that have no shard of it yet get zeros.

  Args:
    tree: Arrays on a mesh with the same axes.
    mesh: Mesh of some of its devices along `axis`, or of others too.
    axis: Axis along which there are more or fewer devices.
    dimension: Dimension of all arrays that `axis` shards, also where their mesh
      has one device along it: a program's results name no axis of one device.
      None for what the arrays' shardings say.

  Raises:
    MeshError: If a device has no copy of an array that `axis` does not shard.
  """

  def extend(x: jax.Array) -> jax.Array:
    spec = x.sharding.spec  # pyrefly: ignore
    if dimension is not None:
      entries = [*spec, *(None,) * (x.ndim - len(spec))]
      entries[dimension] = axis
      while entries[-1] is None:
        entries.pop()
      spec = P(*entries)
    local_shards = {shard.device: shard.data for shard in x.addressable_shards}
    part, *_ = local_shards.values()
    shape, sharded = [*part.shape], False
    for n, entry in enumerate(spec):
      names = entry if isinstance(entry, tuple) else (entry,)
      shape[n] *= math.prod(mesh.shape[name] for name in names if name)
      sharded |= axis in names
    missing = [d for d in mesh.devices.flat if d not in local_shards]
    if missing and not sharded:
      raise MeshError(
        "mesh",
        f"{missing[0]}, which has no copy of an array of shape {x.shape}",
        "devices on which the array is",
        "place it on all devices first: rj.models.place(model, mesh)",
      )
    for device in missing:
      local_shards[device] = jnp.zeros(part.shape, x.dtype, device=device)
    return jax.make_array_from_single_device_arrays(
      tuple(shape),
      NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind),
      [local_shards[device] for device in mesh.devices.flat],
    )

  return jax.tree.map(extend, tree)


class HostShards(NamedTuple):
  """Shards of an array on one process's devices, in the host's memory.

  Fields:
    sharding: Sharding of the array.
    shape: Shape of the whole array.
    shards: Each device of this process with its shard.
  """

  sharding: Sharding
  shape: tuple[int, ...]
  shards: tuple[tuple[jax.Device, np.ndarray], ...]

  @property
  def nbytes(self) -> int:
    """Bytes of the shards of this process."""
    return sum(shard.nbytes for _, shard in self.shards)


def to_host(tree: Tree) -> Tree:
  """Copies arrays to the host: whole ones, or the shards of this process.

  Each process copies its own shards of arrays that other processes have shards
  of, as `HostShards`; `to_devices` copies these back.
  """

  def copy(x: jax.Array) -> np.ndarray | HostShards:
    if x.is_fully_addressable:
      return jax.device_get(x)
    shards = [(shard.device, shard.data) for shard in x.addressable_shards]
    local_copies = jax.device_get(shards)
    return HostShards(x.sharding, x.shape, tuple(local_copies))

  return jax.tree.map(copy, tree)


def whole_on_host(tree: Tree) -> Tree:
  """Copies arrays to the host, whole also where other processes have shards.

  All processes of the arrays' mesh make the same call. Of an array that is
  spread over processes, each device needs memory for all of it meanwhile.
  """

  def copy(x: Any) -> Any:
    spread = isinstance(x, jax.Array) and not (
      x.is_fully_addressable or x.is_fully_replicated
    )
    if spread:
      return multihost_utils.process_allgather(x, tiled=True)
    return jax.device_get(x)

  return jax.tree.map(copy, tree)


def to_devices(tree: Tree) -> Tree:
  """Makes arrays of the `HostShards` of `to_host`; others stay as they are."""

  def copy(x: np.ndarray | HostShards) -> np.ndarray | jax.Array:
    if not isinstance(x, HostShards):
      return x
    return jax.make_array_from_single_device_arrays(
      x.shape,
      x.sharding,
      [jax.device_put(shard, device) for device, shard in x.shards],
    )

  return jax.tree.map(copy, tree, is_leaf=lambda x: isinstance(x, HostShards))


# The name by which other layers call it.
here = local_copy


def move(x: Shaped[Array, " ..."], device: jax.Device) -> Shaped[Array, " ..."]:
  """Copy an array, wherever its shards are, whole to one device."""
  if not x.size:
    # JAX fails on arrays without bytes when it counts their shards.
    return jax.device_put(np.zeros(x.shape, x.dtype), device)
  return jax.device_put(x, SingleDeviceSharding(device))
