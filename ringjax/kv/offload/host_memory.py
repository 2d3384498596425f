"""Memory of the hosts that devices read: its check, and arrays in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import HOST


def default_device() -> jax.Device:
  """Device of arrays without a sharding."""
  config: Any = jax.config
  device = config.jax_default_device
  if isinstance(device, jax.Device):
    return device
  return jax.local_devices(backend=device)[0]


def check_host_memory(
  device: jax.Device, option: str, got: str, remedy: str
) -> None:
  """Check that a device reads the hosts' memory.

  Args:
    device: Device of the cache.
    option: Option that asks for it.
    got: Value of the option.
    remedy: Setting that needs no such memory.

  Raises:
    OptionError: If it does not.
  """
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise OptionError(
      option,
      f"{got}, on a {device.platform} with the memories {kinds}",
      f"devices that read {HOST} memory",
      remedy,
    )


def host_zeros(x: jax.ShapeDtypeStruct) -> Shaped[Array, " ..."]:
  """Zeros of this shape and sharding, created in the hosts' memory."""
  if x.sharding is None or x.sharding.memory_kind != HOST:
    return jnp.zeros(x.shape, x.dtype, device=x.sharding)
  part = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
  if isinstance(x.sharding, SingleDeviceSharding):
    return jax.device_put(part, x.sharding)
  return jax.make_array_from_callback(x.shape, x.sharding, lambda _: part)
