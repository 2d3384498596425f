"""Models whose feedforward neurons are on disk, read when a token needs them.

Guarantees: without predictors the answers are those of the resident model, up
to the order of sums. With predictors, or with a threshold, they are not:
predictors may miss neurons, and a threshold leaves small ones out. Which, the
token alone decides: no answer depends on drafts, other rows, chunks or windows.
Cost: see `nn.neuron_feedforward`; a prompt reads each layer once a chunk.
Memory: of the feedforward, on the devices the deciding projection or the
predictors; in the host's memory the windows, allocated at once.
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

from ringjax.checks import number as checked_number
from ringjax.checks import positive_int
from ringjax.errors import (
  CheckpointMismatchError,
  MemoryEstimateError,
  MeshError,
  OptionError,
)
from ringjax.models import calibration as files
from ringjax.models.neuron_predictors import NeuronPredictors
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import as_bytes
from ringjax.nn.feedforward import ACTIVATIONS, Gated, GatedLayer, Plain
from ringjax.nn.linear import Linear
from ringjax.nn.neuron_feedforward import NeuronFeedforward
from ringjax.nn.placed import ReadFault, naming_faults
from ringjax.store.neuron_file import (
  NeuronFile,
  NeuronLayer,
  write_neuron_file,
)
from ringjax.store.neuron_store import BLOCK, NeuronReport, NeuronStore

FILE = "neurons.bin"
# Activations that are zero for most neurons by themselves.
SPARSE = ("relu", "relu2")
# Of a window: fewer would hold no token's neurons.
LEAST_ROWS = 8


def write_neurons(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  bundled: bool = True,
) -> pathlib.Path:
  """Writes a model's feedforward neurons for `sparse_model`; the file's path.

  Layers are written one after another: a model with placement= is never in
  memory as a whole.

  Args:
    model: the model, of floats, on one device.
    folder: gets neurons.bin.
    bundled: whether a neuron's parts follow one another, so that one read gets
      all of them.

  Raises:
    OptionError: a model with mixtures of experts or codes.
    MeshError: a model on a mesh.
    CheckpointMismatchError: weights that are not finite.
    CheckpointWriteError: the disk does not take them.
  """
  check_neurons(model)
  place: dict[int, tuple[int, int, int]] = {}
  layers: dict[int, NeuronLayer] = {}
  for g, p in _kinds(model):
    run, base = model.stack.runs[g], model.stack.blocks[g][p].feedforward
    gate = ("gate",) if isinstance(base, GatedLayer) else ()
    for n in range(run.repeats):
      number = run.number(p, n)
      place[number] = (g, p, n)
      layers[number] = NeuronLayer(
        number=number,
        neurons=base.spec.hidden,
        embed=model.config.embed,
        parts=(*gate, "up", "down"),
      )

  def arrays(number: int) -> list[np.ndarray]:
    base = _layer(model, *place[number]).feedforward
    into = [base.gate, base.up] if isinstance(base, GatedLayer) else [base.up]
    found = [np.asarray(x.weight.get_value()).T for x in into]
    return [*found, np.asarray(base.down.weight.get_value())]

  where = pathlib.Path(folder)
  where.mkdir(parents=True, exist_ok=True)
  return write_neuron_file(
    where / FILE,
    [layers[number] for number in sorted(layers)],
    arrays,
    dtype=_dtype(model),
    model=files.model_digest(model),
    bundled=bundled,
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
  """A model that reads its feedforward neurons from disk as tokens need them.

  It answers and drafts as the model does. A call of the model counts as one
  step of the window, whatever rows and drafts it has: the window holds what
  the last `window` calls needed. The given model's feedforward weights are not
  kept: let go of it, or load it with placement="disk".

  Args:
    model: the model, of floats, on one device; its layers may be placed.
    folder: with what `write_neurons` wrote of it.
    predictors: say which neurons a token needs, see
      `rj.train.train_predictors`; or the folder that they were saved to.
      None: the gate, or the up-projection of a plain layer, stays on the device
      and says it exactly.
    window: calls that a neuron stays in memory for.
    memory: bytes that all windows may take, as a number or a text; the layers
      share it evenly. None: half of the neurons.
    threshold: neurons whose activation is at most that large count as zero
      (FATReLU): lossy. Needed for activations that are not zero by themselves,
      such as SiLU.
    threads: reads of the disk at a time.

  Raises:
    OptionError: an activation that is smooth, without a threshold; a model
      with mixtures of experts or codes; an argument out of range.
    MeshError: a model on a mesh, or several processes.
    CheckpointFormatError: no file, or no whole one.
    CheckpointMismatchError: a file or predictors of another model.
    MemoryEstimateError: less memory than a few neurons of each layer take.
  """
  check_neurons(model)
  positive_int("window", window)
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
  file = NeuronFile(pathlib.Path(folder) / FILE, threads=threads)
  mine = files.model_digest(model)
  if file.model != mine:
    raise CheckpointMismatchError(
      f"{file.path}",
      f"neurons of the model {file.model or 'without a digest'}",
      f"those of this one, {mine}",
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
    predictors.check(mine, threshold)
  first = int(predictors is None)
  store = NeuronStore(
    file, _max_rows(file, first, window, memory), window=window, first=first
  )
  fault = ReadFault()

  def pruned(block: Any, numbers: Sequence[int], lead: tuple[int, ...]) -> Any:
    """A layer, or layers that share arrays, without what is on disk."""
    found = jax.tree.map(lambda x: x, block)
    found.feedforward = NeuronFeedforward(
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
    return found

  blocks = []
  for g, run in enumerate(model.stack.runs):
    kinds = []
    for p in range(len(run.layers)):
      numbers = [run.number(p, n) for n in range(run.repeats)]
      if (placed := model.stack.placed) is None or placed[g][p] is None:
        block = model.stack.blocks[g][p]
        kinds.append(pruned(block, numbers, (run.repeats,)))
        continue
      each = [
        pruned(_layer(model, g, p, n), [number], ())
        for n, number in enumerate(numbers)
      ]
      kinds.append(jax.tree.map(lambda *x: jnp.stack(x), *each))
    blocks.append(nnx.List(kinds))
  made = copy.copy(model)
  made.stack = copy.copy(model.stack)
  made.stack.blocks = nnx.List(blocks)
  made.stack.placed, made.stack.hosted = None, None
  made.stack.neuron_fault = fault
  return made


def neuron_report(model: Transformer, *, reset: bool = False) -> NeuronReport:
  """What a model's neurons on disk came to so far.

  Args:
    model: made by `sparse_model`.
    reset: counts from zero afterwards.

  Raises:
    OptionError: another model.
  """
  if model.stack.neuron_fault is None:
    raise OptionError(
      "model",
      "one whose weights are all resident",
      "one with its feedforward neurons on disk",
      "pass what rj.models.sparse_model returns",
    )
  feedforward: Any = model.stack.blocks[0][0].feedforward
  found = feedforward.store.report()
  if reset:
    feedforward.store.reset()
  return found


def check_neurons(model: Transformer) -> None:
  """Refuses a model whose feedforwards are not plain or gated maps of floats.

  Raises:
    OptionError: mixtures of experts, codes, or neurons on disk.
    MeshError: a model on a mesh, or several processes.
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
  """The weights of one layer, wherever they are."""
  fetch = jax.jit(lambda stack, n: stack.layer(g, p, n))
  with naming_faults(model.stack.faults):
    return jax.block_until_ready(fetch(model.stack, n))


def _max_rows(
  file: NeuronFile, parts: int, window: int, memory: int | str | None
) -> dict[int, int]:
  """Rows of each layer's window."""
  each = {}
  for n, layer in file.layers.items():
    row = (len(layer.parts) - parts) * layer.embed * file.dtype.itemsize
    # With the numbers of a window's neurons, see `NeuronWindow.nbytes`.
    each[n] = (row + 4 * (window + 2), 8 * layer.neurons, layer.neurons)
  if memory is None:
    return {n: -(-most // 2) for n, (_, _, most) in each.items()}
  given = as_bytes(memory) // len(each)
  found = {
    n: min(most, (given - fixed) // row)
    for n, (row, fixed, most) in each.items()
  }
  if min(found.values()) < LEAST_ROWS:
    wanted = max(LEAST_ROWS * row + fixed for row, fixed, _ in each.values())
    raise MemoryEstimateError(
      "memory",
      f"{as_bytes(memory):,} bytes for {len(each)} layers",
      f"at least {len(each) * wanted:,}, for {LEAST_ROWS} neurons of each",
      "pass more",
    )
  return found
