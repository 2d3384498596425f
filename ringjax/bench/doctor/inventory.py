"""Inventory of a machine: devices, memories, versions, variables."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from ringjax.bench import timing
from ringjax.bench.doctor.findings import OK, WRONG, Findings
from ringjax.ops import kernel_choice
from ringjax.parallel import chips, gpu_processes, memory

PART = "machine"
_PACKAGES = (
  "ringjax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin",
  "jax-cuda13-plugin", "numpy", "flax",
)  # fmt: skip
# Variables that change programs, and so must be equal in all processes.
_OF_PROGRAMS = (
  kernel_choice.OFF_VARIABLE,
  "JAX_DEBUG_NANS",
  "JAX_DEFAULT_MATMUL_PRECISION",
  "JAX_DISABLE_JIT",
  "JAX_DISABLE_MOST_OPTIMIZATIONS",
  "JAX_ENABLE_X64",
  "LIBTPU_INIT_ARGS",
  "XLA_FLAGS",
)
# Variables of a process. None holds an address or a name of a host.
# Vendor of Google's PCI devices.
_GOOGLE = "0x1ae0"
_OF_PROCESS = (
  "CUDA_VISIBLE_DEVICES",
  "JAX_NUM_CPU_DEVICES",
  "JAX_PLATFORMS",
  "NPROC",
  "TF_GPU_ALLOCATOR",
  "TPU_VISIBLE_CHIPS",
  "XLA_CLIENT_MEM_FRACTION",
  "XLA_PYTHON_CLIENT_ALLOCATOR",
  "XLA_PYTHON_CLIENT_MEM_FRACTION",
  "XLA_PYTHON_CLIENT_PREALLOCATE",
)


def check(
  findings: Findings,
  device: jax.Device,
  mesh: Mesh,
  variables: Mapping[str, str] = os.environ,
  folder: str = "/dev",
) -> None:
  """Adds a finding for each fact.

  Args:
    findings: Findings to add to.
    device: First device of this process.
    mesh: Mesh of all processes' devices.
    variables: Environment variables.
    folder: Folder of the device files.
  """
  facts = {
    "devices": (_devices(device), True),
    "mesh": (_mesh(mesh), True),
    "device memory": (_device_memory(device), False),
    "memory kinds": (_memory_kinds(device), True),
    "host": (_host(), False),
    "versions": (_versions(), True),
    "runtime": (device.client.platform_version.partition("\n")[0], True),
    "variables of programs": (_listed(_OF_PROGRAMS, variables), True),
    "variables of processes": (_listed(_OF_PROCESS, variables), False),
  }
  for name, (text, common) in facts.items():
    findings.add(PART, name, OK, text, common=common)
  with findings.guarded(PART, kernel_choice.OFF_VARIABLE):
    off = ", ".join(sorted(kernel_choice.switched_off()))
    findings.add(PART, "kernels switched off", OK, off or "none", common=True)
  unused = unused_accelerator(device.platform, variables, folder)
  if unused is not None:
    findings.add(PART, "accelerator", WRONG, unused)


def unused_accelerator(
  device_platform: str,
  variables: Mapping[str, str],
  folder: str = "/dev",
) -> str | None:
  """Describes an accelerator that JAX does not use; else None.

  Args:
    device_platform: Platform that JAX uses.
    variables: Environment variables. JAX_PLATFORMS may ask for the CPU.
    folder: Folder of the device files.
  """
  if device_platform != "cpu" or variables.get("JAX_PLATFORMS") == "cpu":
    return None
  # Batch systems set CUDA_VISIBLE_DEVICES where there is no GPU, too.
  if gpu_processes.visible_gpus({}, folder):
    return (
      "an NVIDIA GPU is there, but JAX uses the CPU; install ringjax[cuda12] "
      "or ringjax[cuda13], by the driver"
    )
  if tpu_files(folder):
    return (
      "a TPU is there, but JAX uses the CPU; install ringjax[tpu], and end "
      "other processes that hold the TPU"
    )
  return None


def tpu_files(
  folder: str = "/dev", groups: str = "/sys/kernel/iommu_groups"
) -> tuple[str, ...]:
  """Names of the device files of TPUs; empty on other machines.

  Args:
    folder: Folder of the device files.
    groups: Folder of the PCI devices behind each file of the driver vfio, which
      other devices have, too.
  """
  root = pathlib.Path(folder)
  paths = list(root.glob("accel[0-9]*"))
  for path in root.glob("vfio/[0-9]*"):
    files = pathlib.Path(groups, path.name).glob("devices/*/vendor")
    if any(file.read_text().strip() == _GOOGLE for file in files):
      paths.append(path)
  return tuple(sorted(path.name for path in paths))


def _devices(device: jax.Device) -> str:
  stated = chips.machine_name(device.device_kind)
  if device.platform == "cpu" or stated is None:
    sheet = "no data sheet"
  else:
    sheet = f"data sheet of {stated}"
  of_each = ""
  if jax.process_count() > 1:
    of_each = f", {jax.local_device_count()} of each process"
  return (
    f"{jax.device_count()} {device.device_kind} ({device.platform}){of_each}; "
    f"{sheet}"
  )


def _mesh(mesh: Mesh) -> str:
  sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
  coords = [getattr(d, "coords", None) for d in mesh.devices.flat]
  if not all(coords):
    return sizes
  # Sides of the slice of a TPU.
  sides = "x".join(str(max(side) + 1) for side in zip(*coords, strict=True))
  return f"{sizes}; chips {sides}"


def _device_memory(device: jax.Device) -> str:
  total, used, _ = memory.device_memory(device)
  if total is None or used is None:
    return "the host's" if device.platform == "cpu" else "unknown"
  return f"{total / 1e9:,.1f} GB, {used / 1e9:,.1f} GB in use"


def _memory_kinds(device: jax.Device) -> str:
  kinds = [m.kind for m in device.addressable_memories()]
  return f"{', '.join(kinds)}; default {device.default_memory().kind}"


def _host() -> str:
  about = timing.environment("")["machine"]
  free = memory.host_free_bytes()
  total = memory.host_total_bytes()
  total_text = "unknown memory" if total is None else f"{total / 1e9:,.1f} GB"
  free_text = "" if free is None else f", {free / 1e9:,.1f} GB free"
  return (
    f"{about['cpu']}, {about['cores']} cores, {about['vectors']}, "
    f"{total_text}{free_text}"
  )


def _versions() -> str:
  texts = [f"Python {platform.python_version()}"]
  for name in _PACKAGES:
    try:
      texts.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      continue
  return ", ".join(texts)


def _listed(names: tuple[str, ...], variables: Mapping[str, str]) -> str:
  present = [f"{name}={variables[name]}" for name in names if name in variables]
  return " ".join(present) or "none"
