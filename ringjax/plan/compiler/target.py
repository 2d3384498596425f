"""Slices and hosts of accelerators that programs are compiled for.

Guarantees: a target is a name, "v5e:4x4" or "h100:2x8", and says how many
devices it has, how much memory a program may fill, and which compiler knows it.

GPUs: JAX's CUDA plugin compiles for a GPU that is described by its data sheet,
without a driver. It chooses tiles of products by default, as it can't try them
on a GPU, calls no cuDNN, and states no cycles.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import Any

from ringjax.errors import OptionError
from ringjax.parallel import chips

# v4 has two cores that XLA uses as one device.
_CONFIGS = {"tpu-v4": {"chip_config_name": "megacore"}}
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Multiprocessors, clock in GHz, and bytes of the second cache: NVIDIA H100 and
# H200 data sheets (SXM). Both are Hopper chips of compute capability 9.0.
_HOPPER = (132, 1.98, 52428800)
_GPUS = {
  "h100": ("NVIDIA H100 80GB HBM3", *_HOPPER),
  "h200": ("NVIDIA H200", *_HOPPER),
}
# What Hopper's limits are, from the CUDA programming guide, and the versions of
# CUDA and cuDNN that JAX's wheels are built for.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: {cuda} minor: 0 }}
device_description_str: "{kind}"
"""


@dataclasses.dataclass(frozen=True)
class TpuTarget:
  """A slice of TPUs, which libtpu compiles for.

  Attributes:
    topology: Name, e.g. "v5p:4x4x8".
  """

  topology: str

  @property
  def core(self) -> chips.Core:
    """Figures that the compiler assumes."""
    return chips.core(self.topology)

  @property
  def devices(self) -> int:
    """Number of devices."""
    return chips.devices(self.topology)

  @property
  def hbm_bytes(self) -> int:
    """Memory of a device that a program may fill, in bytes."""
    return self.core.hbm_bytes

  def missing(self) -> str | None:
    """Reason why nothing can be compiled for it here; None if it can."""
    if os.environ.get("TPU_LIBRARY_PATH"):
      return None
    if importlib.util.find_spec("libtpu") is None:
      return "libtpu is not installed: pip install -e '.[aot]'"
    return None

  def job(self) -> dict[str, Any]:
    """Arguments of `topologies.get_topology_desc`, and the platform."""
    sides = chips.sides(self.topology)
    return {
      "platform": "tpu",
      "name": self.topology,
      "options": {
        "wrap": self.core.wraps(sides),
        **_CONFIGS.get(self.core.name, {}),
        **_host(sides),
      },
    }


@dataclasses.dataclass(frozen=True)
class GpuTarget:
  """Hosts of NVIDIA GPUs, which JAX's CUDA plugin compiles for.

  Attributes:
    chip: Name of the GPU, of `chips.CHIPS`.
    hosts: Number of hosts.
    gpus: Number of GPUs of a host.
  """

  chip: str
  hosts: int
  gpus: int

  @property
  def topology(self) -> str:
    """Name, e.g. "h100:2x8"."""
    return f"{self.chip}:{self.hosts}x{self.gpus}"

  @property
  def devices(self) -> int:
    """Number of devices."""
    return self.hosts * self.gpus

  @property
  def hbm_bytes(self) -> int:
    """Memory of a device in bytes."""
    return int(chips.CHIPS[self.chip].hbm_bytes)

  def missing(self) -> str | None:
    """Reason why nothing can be compiled for it here; None if it can."""
    if any(map(importlib.util.find_spec, _PLUGINS)):
      return None
    return "JAX's CUDA plugin is not installed: pip install -e '.[aot-cuda]'"

  def job(self) -> dict[str, Any]:
    """Arguments of `topologies.get_topology_desc`, and the platform."""
    kind, cores, clock, cache = _GPUS[self.chip]
    installed = next(filter(importlib.util.find_spec, _PLUGINS), _PLUGINS[0])
    description = _DESCRIPTION.format(
      kind=kind,
      cores=cores,
      clock=clock,
      cache=cache,
      bandwidth=int(chips.CHIPS[self.chip].hbm_bandwidth),
      memory=self.hbm_bytes,
      cuda=installed.removeprefix("jax_cuda").removesuffix("_plugin"),
    )
    return {
      "platform": "cuda",
      "name": "",
      "options": {
        "target_config": description,
        "topology": f"1x{self.hosts}x{self.gpus}",
      },
    }


def target(topology: str) -> TpuTarget | GpuTarget:
  """Find what a name stands for: "v5e:4x4", "h100:8" or "h100:2x8".

  Raises:
    OptionError: If the accelerator is unknown, or the sizes have another form.
  """
  chip, _, sizes = str(topology).lower().partition(":")
  if chip not in _GPUS:
    known = [core.topology for core in chips.CORES.values()]
    if chip not in (*known, *chips.CORES):
      raise OptionError(
        "topology",
        repr(topology),
        f"a slice of {', '.join(known)}, or hosts of {' or '.join(_GPUS)}",
        "pass e.g. v5e:4x4, v5p:4x4x8, h100:8 or h100:2x8",
      )
    chips.sides(topology)
    return TpuTarget(topology)
  parts = sizes.split("x")
  positive = all(part.isdecimal() and int(part) > 0 for part in parts)
  if not positive or len(parts) > 2:
    raise OptionError(
      "topology",
      repr(topology),
      f"{chip}:8, {chip}:2x8 or another number of hosts and GPUs",
      "write the GPUs of a host, after the number of hosts if several",
    )
  hosts, gpus = (1, *map(int, parts))[-2:]
  return GpuTarget(chip, hosts, gpus)


def _host(sides: tuple[int, ...]) -> dict[str, Any]:
  """Host configuration of a slice that is narrower than a host.

  A host has 2 x 2 chips by default, and older compilers insist on it.
  """
  if min(sides[:2]) > 1:
    return {}
  bounds = [min(side, 2) for side in sides[:2]]
  return {"chips_per_host_bounds": [*bounds, 1]}
