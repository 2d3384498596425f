"""Models whose feedforward neurons are on disk, read as tokens need them.

Guarantees: without predictors the answers are those of the resident model, up
to the order of sums. With predictors, or with a threshold, they are not:
predictors may miss neurons, and a threshold leaves small ones out. The choice
depends on the token alone, not on drafts, other rows, chunks or windows.
Cost: see `nn.weights.neuron_feedforward`; a prompt reads a layer once a chunk.
Memory: of the feedforward, on the devices the projection that decides or the
predictors; in the host's memory the windows, all allocated at the start.
Ref: Alizadeh et al. 2023, LLM in a Flash, arXiv 2312.11514.
"""

from __future__ import annotations

import copy
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringjax.checks import local_path, positive_int
from ringjax.checks import number as checked_number
from ringjax.errors import (
  CheckpointMismatchError,
  MemoryEstimateError,
  MeshError,
  OptionError,
)
from ringjax.models.transformer import Transformer
from ringjax.models.weights import calibration as files
from ringjax.models.weights.neuron_predictors import NeuronPredictors
from ringjax.models.weights.weight_placement import as_bytes
from ringjax.nn.feedforward import ACTIVATIONS, Gated, GatedLayer, Plain
from ringjax.nn.linear import Linear
from ringjax.nn.weights.neuron_feedforward import NeuronFeedforward
from ringjax.nn.weights.placed_layers import ReadFault, naming_faults
from ringjax.store.flash.neuron_file import (
  NeuronFile,
  NeuronLayer,
  write_neuron_file,
)
from ringjax.store.flash.neuron_store import BLOCK, NeuronReport, NeuronStore

FILE = "neurons.bin"
# Activations that are exactly zero for most neurons.
SPARSE = ("relu", "relu2")
# Fewest rows of a window: fewer would not hold a token's neurons.
LEAST_ROWS = 8


def write_neurons(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  bundled: bool = True,
) -> pathlib.Path:
  """Writes a model's feedforward neurons for `sparse_model`.

  Layers are written one after another: a model with placement= is never in
  memory as a whole.

  Args:
    model: Model of floats, on one device.
    folder: Folder to write neurons.bin to.
    bundled: Whether a neuron's parts are adjacent, so that one read gets all
      of them.

  Returns:
    Path of the file.

  Raises:
    OptionError: If the model has mixtures of experts or codes.
    MeshError: If the model is on a mesh.
    CheckpointMismatchError: If weights are not finite.
    CheckpointWriteError: If the disk does not take them.
  """
  check_neurons(model)
  places: dict[int, tuple[int, int, int]] = {}
  layers: dict[int, NeuronLayer] = {}
  for g, p in _kinds(model):
    run, base = model.stack.runs[g], model.stack.blocks[g][p].feedforward
    gate = ("gate",) if isinstance(base, GatedLayer) else ()
    for n in range(run.repeats):
      number = run.number(p, n)
      places[number] = (g, p, n)
      layers[number] = NeuronLayer(
        number=number,
        neurons=base.spec.hidden,
        embed=model.config.embed,
        parts=(*gate, "up", "down"),
      )

  def arrays(number: int) -> list[np.ndarray]:
    base = _layer(model, *places[number]).feedforward
    into = [base.gate, base.up] if isinstance(base, GatedLayer) else [base.up]
    arrays_in = [np.asarray(x.weight.get_value()).T for x in into]
    return [*arrays_in, np.asarray(base.down.weight.get_value())]

  root = pathlib.Path(local_path("folder", folder))
  root.mkdir(parents=True, exist_ok=True)
  return write_neuron_file(
    root / FILE,
    [layers[number] for number in sorted(layers)],
    arrays,
    dtype=_dtype(model),
    model=files.model_digest(model),
    bundled=bundled,
  )


def check_sparse(model: Transformer, threshold: int | float = 0.0) -> None:
  """Checks that tokens leave out neurons of a model.

  Raises:
    OptionError: If an activation is zero for no neuron and there is no
      threshold, or the threshold is below 0.
  """
  checked_number("threshold", threshold, least=0)
  for g, p in _kinds(model):
    act = model.stack.blocks[g][p].feedforward.spec.act
    if act not in SPARSE and not threshold:
      raise OptionError(
        "model",
        f"the activation {act!r}, which is zero for no neuron",
        f"one of {', '.join(SPARSE)}, or a threshold",
        "pass threshold=.05, which changes the answers, or a ReLU model",
      )


def sparse_model(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  predictors: NeuronPredictors | str | os.PathLike[str] | None = None,
  window: int = 5,
  memory: int | str | None = None,
  threshold: int | float = 0.0,
  threads: int = 8,
) -> Transformer:
  """Makes a model that reads its feedforward neurons from disk as needed.

  It generates and drafts as the model does. A call of the model counts as one
  step of the window, whatever rows and drafts it has: the window holds what
  the last `window` calls needed. The given model's feedforward weights are not
  kept: drop it, or load it with placement="disk".

  Args:
    model: Model of floats, on one device; its layers may be placed.
    folder: Folder that `write_neurons` wrote for this model.
    predictors: Predictors of the neurons that a token needs, see
      `rj.train.train_predictors`; or the folder that they were saved to.
      None: the gate, or the up-projection of a plain layer, stays on the device
      and decides exactly.
    window: Number of calls that a neuron stays in memory for.
    memory: Bytes that all windows may take, as a number or a text; the layers
      share it evenly. None: half of the neurons.
    threshold: Largest activation that counts as zero (FATReLU): lossy. Needed
      for activations that are not exactly zero, such as SiLU.
    threads: Number of concurrent reads of the disk.

  Raises:
    OptionError: If an activation is smooth and there is no threshold; if the
      model has mixtures of experts or codes; if an argument is out of range.
    MeshError: If the model is on a mesh, or there are several processes.
    CheckpointFormatError: If the file is missing or incomplete.
    CheckpointMismatchError: If the file or predictors are of another model.
    MemoryEstimateError: If a few neurons of each layer need more memory.
  """
  check_neurons(model)
  positive_int("window", window)
  check_sparse(model, threshold)
  file = NeuronFile(
    pathlib.Path(local_path("folder", folder)) / FILE, threads=threads
  )
  digest = files.model_digest(model)
  if file.model != digest:
    raise CheckpointMismatchError(
      f"{file.path}",
      f"neurons of the model {file.model or 'without a digest'}",
      f"those of this one, {digest}",
      "write them again with rj.models.write_neurons",
    )
  dtype = _dtype(model)
  if file.dtype != dtype:
    raise CheckpointMismatchError(
      f"{file.path}",
      f"neurons of {file.dtype}",
      f"the model's dtype, {dtype}",
      "write them again, of the model in this dtype",
    )
  if predictors is not None:
    if not isinstance(predictors, NeuronPredictors):
      predictors = NeuronPredictors.load(predictors)
    predictors.check(digest, threshold)
  first_part = int(predictors is None)
  store = NeuronStore(
    file,
    _max_rows(file, first_part, window, memory),
    window=window,
    first=first_part,
  )
  fault = ReadFault()

  def pruned(block: Any, numbers: Sequence[int], lead: tuple[int, ...]) -> Any:
    """A layer, or layers that share arrays, without the weights on disk."""
    result = jax.tree.map(lambda x: x, block)
    result.feedforward = NeuronFeedforward(
      block.feedforward,
      jnp.asarray(numbers, jnp.int32).reshape(lead),
      store=store,
      fault=fault,
      sizes=store.sizes(numbers[0]),
      block=min(BLOCK, file.layers[numbers[0]].neurons),
      predictor=None
      if predictors is None
      else predictors.module(numbers, lead, dtype),
      threshold=float(threshold),
    )
    return result

  blocks = []
  for g, run in enumerate(model.stack.runs):
    kinds = []
    for p in range(len(run.layers)):
      numbers = [run.number(p, n) for n in range(run.repeats)]
      if (placed := model.stack.placed) is None or placed[g][p] is None:
        block = model.stack.blocks[g][p]
        kinds.append(pruned(block, numbers, (run.repeats,)))
        continue
      layers = [
        pruned(_layer(model, g, p, n), [number], ())
        for n, number in enumerate(numbers)
      ]
      kinds.append(jax.tree.map(lambda *x: jnp.stack(x), *layers))
    blocks.append(nnx.List(kinds))
  result = copy.copy(model)
  result.stack = copy.copy(model.stack)
  result.stack.blocks = nnx.List(blocks)
  result.stack.placed, result.stack.hosted = None, None
  result.stack.neuron_fault = fault
  return result


def neuron_report(model: Transformer, *, reset: bool = False) -> NeuronReport:
  """Reports the reads of a model's neurons on disk so far.

  Args:
    model: Model by `sparse_model`.
    reset: Whether to reset the counters afterwards.

  Raises:
    OptionError: If the model is another one.
  """
  if model.stack.neuron_fault is None:
    raise OptionError(
      "model",
      "one whose weights are all resident",
      "one with its feedforward neurons on disk",
      "pass what rj.models.sparse_model returns",
    )
  feedforward = model.stack.blocks[0][0].feedforward
  report = feedforward.store.report()
  if reset:
    feedforward.store.reset()
  return report


def check_neurons(model: Transformer) -> None:
  """Refuses a model whose feedforwards are not plain or gated maps of floats.

  Raises:
    OptionError: If it has mixtures of experts, codes, or neurons on disk.
    MeshError: If it is on a mesh, or there are several processes.
  """
  devices = 1 if model.mesh is None else model.mesh.size
  if devices > 1 or jax.process_count() > 1:
    raise MeshError(
      "model",
      f"a mesh of {devices} devices, in {jax.process_count()} process(es)",
      "a model on one device, whose neurons are on disk",
      "load it without mesh=",
    )
  for layer in model.config.layers:
    if not isinstance(layer.feedforward, Plain | Gated):
      raise OptionError(
        "model",
        f"a {model.config.family} with {type(layer.feedforward).__name__}",
        "plain or gated feedforwards in all layers",
        "load it with placement=, which streams whole layers",
      )
    feed = layer.feedforward
    if isinstance(feed, Gated) and (feed.gate_scale, feed.scale) != (1.0, 1.0):
      raise OptionError(
        "model",
        f"a {model.config.family}, whose feedforwards are multiplied",
        "feedforwards without multipliers",
        "load it with placement=, which streams whole layers",
      )
    if getattr(layer.feedforward, "sparsity", 0):
      raise OptionError(
        "model",
        f"a {model.config.family} whose gates are shut by what all of them are",
        "gates that are open by themselves",
        "load it with placement=, which streams whole layers",
      )
    if layer.feedforward.act not in ACTIVATIONS:
      raise OptionError(
        "model",
        f"the activation {layer.feedforward.act!r}, which has weights",
        f"one of {', '.join(ACTIVATIONS)}",
        "load it with placement=, which streams whole layers",
      )
  for g, p in _kinds(model):
    base = model.stack.blocks[g][p].feedforward
    maps = [getattr(base, name, None) for name in ("gate", "up", "down")]
    if not all(x is None or type(x) is Linear for x in maps) or maps[2] is None:
      raise OptionError(
        "model",
        "feedforwards of codes, with adapters, or with neurons on disk",
        "weights of floats in memory, or in the folder",
        "pass the model that rj.models.load returns",
      )


def _dtype(model: Transformer) -> np.dtype:
  weight = model.stack.blocks[0][0].feedforward.down.weight.get_value()
  return np.dtype(weight.dtype)


def _kinds(model: Transformer) -> Iterator[tuple[int, int]]:
  """(run, position) of each kind of layer."""
  for g, run in enumerate(model.stack.runs):
    for p in range(len(run.layers)):
      yield g, p


def _layer(model: Transformer, g: int, p: int, n: int) -> Any:
  """Fetches the weights of one layer from any memory."""
  fetch = jax.jit(lambda stack, n: stack.layer(g, p, n))
  with naming_faults(model.stack.faults):
    return jax.block_until_ready(fetch(model.stack, n))


def _max_rows(
  file: NeuronFile, parts: int, window: int, memory: int | str | None
) -> dict[int, int]:
  """Number of rows of each layer's window."""
  by_layer = {}
  for n, layer in file.layers.items():
    row = (len(layer.parts) - parts) * layer.embed * file.dtype.itemsize
    # With the ids of a window's neurons, see `NeuronWindow.nbytes`.
    by_layer[n] = (row + 4 * (window + 2), 8 * layer.neurons, layer.neurons)
  if memory is None:
    return {n: -(-neurons // 2) for n, (_, _, neurons) in by_layer.items()}
  per_layer = as_bytes(memory) // len(by_layer)
  rows = {
    n: min(neurons, (per_layer - fixed) // row)
    for n, (row, fixed, neurons) in by_layer.items()
  }
  if min(rows.values()) < LEAST_ROWS:
    wanted = max(
      LEAST_ROWS * row + fixed for row, fixed, _ in by_layer.values()
    )
    raise MemoryEstimateError(
      "memory",
      f"{as_bytes(memory):,} bytes for {len(by_layer)} layers",
      f"at least {len(by_layer) * wanted:,}, for {LEAST_ROWS} neurons of each",
      "pass more",
    )
  return rows
