"""Bytes that a training keeps on each device, compared with the free ones.

Guarantees: parameters, moments and gradients are counted by their shapes and
shardings, before any of them is allocated. Activations are an estimate: what
layers keep for the backward pass, without the buffers of a single layer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ringjax.errors import MemoryEstimateError
from ringjax.models.transformer import TransformerConfig
from ringjax.parallel.memory import device_free_bytes
from ringjax.train.optimizers.host_moments import HOST
from ringjax.train.step import TrainState
from ringjax.typing import ArrayLeaf

_REMEDY = (
  "shard over more devices (Rules(embed=AXIS); --mesh), pass "
  "moments_in='host', or train adapters (Recipe(lora=); "
  "--config.lora.rank=16)"
)
_SMALLER = (
  "shorten the rows or raise accumulate (Stage(length=, accumulate=); "
  "--config.stages), keep fewer activations (Recipe(remat='nothing'); "
  "--config.remat=nothing), or shard over more devices (mesh=; --mesh)"
)


class TrainingMemory(NamedTuple):
  """Bytes on each device.

  Fields:
    parameters: Bytes of the trained parameters.
    moments: Bytes of the optimizer's state, without those in the host's memory.
    gradients: Bytes of the gradients.
    activations: Estimate of what layers keep for the backward pass.
    save: Copy of the state while it is saved, on CPUs.
  """

  parameters: int
  moments: int
  gradients: int
  activations: int
  save: int


def training_memory(
  state: TrainState,
  config: TransformerConfig,
  rows: Sequence[tuple[int, int]],
  *,
  mesh: Mesh | None,
  axis: str | None,
  remat: str,
  itemsize: int,
  saves: bool,
) -> TrainingMemory:
  """Counts the bytes that a training keeps on each device.

  Args:
    state: Shapes of the state, with their shardings.
    config: Sizes of the model.
    rows: Rows and tokens of a row of a micro-batch, for each stage.
    mesh: Devices; None is one.
    axis: Mesh axis that shards the sequence, or None.
    remat: Activations that are kept, of `remat.POLICIES`.
    itemsize: Bytes of a number of the computation.
    saves: Whether the state is copied on the host that has the devices.
  """
  parameters = _bytes(state.params)
  moments = _bytes(state.optimizer)
  size = 1 if mesh is None else mesh.size
  # The axes other than "model" and the sequence's divide the batch.
  seq_shards = 1 if mesh is None or axis is None else mesh.shape[axis]
  batch_shards = (
    1 if mesh is None else size // seq_shards // mesh.shape.get("model", 1)
  )
  tokens = max(
    math.ceil(count / min(count, batch_shards)) * math.ceil(length / seq_shards)
    for count, length in rows
  )
  width = 0 if remat == "offload" else config.embed * len(config.layers)
  if remat == "attention":
    width += sum(
      getattr(x.attention, "heads", 0) * getattr(x.attention, "head_dim", 0)
      for x in config.layers
    )
  # Each part of the state once; the devices of the host share these bytes.
  state_bytes = sum(
    math.prod(x.shape) * x.dtype.itemsize
    for x in jax.tree.leaves((state.params, state.optimizer))
  )
  return TrainingMemory(
    parameters,
    moments,
    parameters,
    tokens * width * itemsize,
    math.ceil(state_bytes / size) if saves else 0,
  )


def check_memory(
  needs: TrainingMemory, mesh: Mesh | None, *, resident: bool
) -> None:
  """Refuses a training whose state does not fit, and warns of a tight one.

  Args:
    needs: Bytes on each device.
    mesh: Devices; None is one.
    resident: Whether the parameters are on the devices already.

  Raises:
    MemoryEstimateError: If moments and gradients have no room.
  """
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  device = devices[0]
  free = device_free_bytes(device, len(devices))
  if free is None:
    return
  state = needs.moments + needs.gradients
  if not resident:
    state += needs.parameters
  total = state + needs.activations + needs.save
  if total <= free:
    return
  devices_text = f"each of {len(devices)} device(s)"
  if device.platform == "cpu" and len(devices) > 1:
    devices_text += ", which share the host's memory"
  listed = ", ".join(f"{k} {_short(x)}" for k, x in needs._asdict().items())
  if state > free:
    raise MemoryEstimateError(
      "training",
      f"{_short(state)} more on {devices_text}",
      f"at most the {_short(free)} that are free on each; bytes are {listed}",
      _REMEDY,
    )
  warnings.warn(
    f"training may not fit: about {_short(total)} more on {devices_text} "
    f"({listed}), and {_short(free)} are free on each; {_SMALLER}",
    RuntimeWarning,
    stacklevel=2,
  )


def _bytes(tree: PyTree) -> int:
  """Bytes of a tree's arrays in one device's memory, by their shardings."""

  def shard_bytes(x: ArrayLeaf) -> int:
    shape = tuple(x.shape)
    sharding = getattr(x, "sharding", None)
    if getattr(sharding, "memory_kind", None) == HOST:
      return 0
    if sharding is not None:
      shape = sharding.shard_shape(shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(shard_bytes, jax.tree.leaves(tree)))


def _short(nbytes: int) -> str:
  """Bytes in few digits, "1.6 GB"."""
  for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
    if nbytes >= size:
      return f"{nbytes / size:.1f} {unit}"
  return f"{nbytes} bytes"
