"""Consecutive layers of a model, loaded without the others.

Guarantees: the tensors of a folder or GGUF file are those of its whole model,
as `checkpoint.load` checks it, and the numbers of the layers here are the
numbers that it loads. A tensor of another layer is not read.
Memory: the layers; the embedding with the first layer, the norm and the head
with the last one, which has the embedding too where it is the head.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from ringjax import fetched_models
from ringjax.checks import float_dtype, integer
from ringjax.errors import OptionError
from ringjax.models import cepe, checkpoint
from ringjax.models.contents import contents, read_source
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.models.hf.tensors import CheckpointTensor, parameters
from ringjax.models.partition.tensor_shares import digest_of
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.nn.stack import Stack

_BLOCKS = "stack.blocks."


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerRange:
  """Consecutive layers of a model, and what comes before or after them.

  Attributes:
    whole: Shapes of the whole model, without numbers.
    model: Layers as a model, whose config lists these alone; `embed`, `norm`
      and `head` are None where other processes have them.
    first: Number of the first layer.
    digest: Digest of the folder's config and of its tensors' names and shapes.
  """

  whole: Transformer
  model: Transformer
  first: int
  digest: str

  @property
  def end(self) -> int:
    """Number of the layer after the last one."""
    return self.first + len(self.model.config.layers)

  def weights(self) -> dict[str, Shaped[Array, " ..."]]:
    """Weights by their paths in the whole model, those of each layer apart.

    A weight of layer 3 has the path "3.attention.q.weight", for instance.
    """
    weights: dict[str, jax.Array] = {}
    for path, param in parameters(self.model).items():
      value = param.get_value()
      if not path.startswith(_BLOCKS):
        weights[path] = value
        continue
      run, position, name = path.removeprefix(_BLOCKS).split(".", 2)
      part = self.model.stack.runs[int(run)]
      for repeat in range(part.repeats):
        number = self.first + part.number(int(position), repeat)
        weights[f"{number}.{name}"] = value[repeat]
    return weights


def config_of(
  path: str | os.PathLike[str], *, strict: bool = True
) -> TransformerConfig:
  """Architecture of the model in a folder or GGUF file; reads no weights."""
  config, _, _ = read_source(open_model(path).config, strict=strict)
  return config


def load_layers(
  path: str | os.PathLike[str],
  first: int,
  end: int,
  *,
  dtype: DTypeLike | None = None,
  strict: bool = True,
) -> LayerRange:
  """Loads some layers of a Hugging Face folder or GGUF file, on one device.

  Args:
    path: Folder, file or name, as for `rj.models.load`.
    first: Number of the first layer.
    end: Number of the layer after the last one.
    dtype: Dtype of the weights; default: as for `rj.models.load`, where these
      layers have to fit and not all.
    strict: Whether an unread key of config.json that may change the computation
      is an error.

  Raises:
    ConfigError: If the architecture is unknown, or the config contradictory.
    CheckpointFormatError: If a file is broken.
    CheckpointMismatchError: If tensors of any layer are missing or too many, or
      those of these layers are not finite, or a tied head differs.
    MemoryEstimateError: If the weights do not fit.
    OptionError: If there are no such layers, the folder has an encoder, or the
      model has weights that all layers share.
  """
  path = fetched_models.resolve(path)
  folder = open_model(path)
  config, source, family = read_source(folder.config, strict=strict)
  count = len(config.layers)
  integer("first", first, least=0, most=count - 1)
  integer("end", end, least=first + 1, most=count)
  _check(path, config)
  stored = checkpoint.stored_dtype(folder, source) if dtype is None else dtype
  stored = float_dtype("dtype", stored)
  part = _shapes(config, first, end, stored)
  if dtype is None and checkpoint.wide_on_cpu(parameters(part), stored):
    stored = jnp.dtype(jnp.float32)
    part = _shapes(config, first, end, stored)
  full_shapes = jax.eval_shape(
    lambda: checkpoint.cast(Transformer(config, nnx.Rngs(0)), stored)
  )
  params = parameters(part)
  shardings = dict.fromkeys(params)
  checkpoint.check_memory(params, shardings, None)
  whole_contents = contents(folder, family, full_shapes, source)
  own_tensors = [
    tensor
    for t in whole_contents.tensors
    if (tensor := _own(t, full_shapes.stack, part, first)) is not None
  ]
  own_contents = dataclasses.replace(whole_contents, tensors=own_tensors)
  arrays = checkpoint.read_parameters(own_contents, params, shardings)
  embedding = arrays.get(checkpoint.EMBEDDING)
  if embedding is not None:
    checkpoint.check_heads(folder, own_contents.heads, embedding)
  return LayerRange(
    whole=full_shapes,
    model=checkpoint.with_arrays(part, arrays),
    first=first,
    digest=digest_of(folder),
  )


def _check(path: str | os.PathLike[str], config: TransformerConfig) -> None:
  """Refuses models whose layers need more than the layers before them."""
  fault = ""
  if (pathlib.Path(path) / cepe.CONFIG).exists():
    fault = "a folder with an encoder beside its decoder"
  elif config.inputs is not None or config.streams is not None:
    fault = f"{config.family}, whose layers share further weights or streams"
  if fault:
    raise OptionError(
      "model",
      fault,
      "layers, an embedding, a norm and a head",
      "load the whole model with rj.models.load",
    )


def _shapes(
  config: TransformerConfig, first: int, end: int, dtype: DTypeLike
) -> Transformer:
  """A model of shapes of some layers, with what their process has beside."""
  layers = config.layers[first:end]
  is_last = end == len(config.layers)

  def build() -> Transformer:
    part: Any = Transformer(
      dataclasses.replace(config, layers=layers), nnx.Rngs(0)
    )
    if first and not (is_last and config.tied):
      part.embed = None
    if not is_last:
      part.norm = part.head = None
    return checkpoint.cast(part, dtype)

  return jax.eval_shape(build)


def _own(
  tensor: CheckpointTensor, whole: Stack, part: Transformer, first: int
) -> CheckpointTensor | None:
  """A tensor with the places of its pieces in a part; None if it has none."""
  places: dict[int, tuple[int, int, int]] = {}
  for run_index, run in enumerate(part.stack.runs):
    for position in range(len(run.layers)):
      for repeat in range(run.repeats):
        number = first + run.number(position, repeat)
        places[number] = run_index, position, repeat
  params = parameters(part)
  targets: list[tuple[str, tuple[int, ...]]] = []
  for path, index in tensor.targets:
    if path.startswith(_BLOCKS):
      run, position, name = path.removeprefix(_BLOCKS).split(".", 2)
      number = whole.runs[int(run)].number(int(position), index[0])
      if number not in places:
        return None
      run_index, own_position, repeat = places[number]
      path = f"{_BLOCKS}{run_index}.{own_position}.{name}"
      index = (repeat, *index[1:])
    elif path not in params:
      return None
    targets.append((path, index))
  return dataclasses.replace(tensor, targets=tuple(targets))
