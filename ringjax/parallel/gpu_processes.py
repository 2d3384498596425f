"""GPUs of several processes on one machine."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence


def visible_gpus(
  variables: Mapping[str, str], folder: str = "/dev"
) -> tuple[str, ...]:
  """NVIDIA GPUs that processes of this machine may use; empty on CPUs.

  Args:
    variables: Environment variables.
    folder: Folder of the device files.
  """
  platforms = variables.get("JAX_PLATFORMS", "")
  if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
    return ()
  visible = variables.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:
    words = (word.strip() for word in visible.split(","))
    return tuple(word for word in words if word and word != "-1")
  files_of = pathlib.Path(folder).glob("nvidia[0-9]*")
  numbers = (path.name.removeprefix("nvidia") for path in files_of)
  return tuple(sorted((n for n in numbers if n.isdigit()), key=int))


def gpu_variables(rank: int, size: int, gpus: Sequence[str]) -> dict[str, str]:
  """Environment variables that assign a GPU to a rank, round-robin.

  Args:
    rank: Rank of the process.
    size: Number of processes.
    gpus: GPUs of the machine, see `visible_gpus`.
  """
  if not gpus:
    return {}
  variables = {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}
  if size > len(gpus):
    # Several processes share a GPU: none may preallocate 75 % of its memory.
    variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  return variables
