"""Heads that read several layers of a target: read, added, taken off, written.

Guarantees: the weights of a target are not copied, and its logits stay.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from ringjax.errors import InputTypeError, OptionError
from ringjax.models.checkpoint import cast
from ringjax.models.heads.added_layer import refuse_predicting
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.tensors import CheckpointTensor
from ringjax.models.parameter_arrays import arrays_of, on_host
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.draft_layers.predict_layer import PredictBlock, PredictLayer
from ringjax.nn.param import Rules
from ringjax.nn.stack import Run

L = TypeVar("L", bound=PredictLayer)


def head_layer(model: Transformer, kind: type[L], title: str, module: str) -> L:
  """The layer of a model's head.

  Args:
    model: Any model.
    kind: Class of the layer.
    title: Name of such heads, for the error.
    module: Module of `rj.models` that adds one.

  Raises:
    OptionError: If the model has none.
  """
  layer = model.config.predicts if isinstance(model, Transformer) else None
  if not isinstance(layer, kind):
    raise OptionError(
      "model",
      f"one without {title}",
      "a model with one",
      f"add it with rj.models.{module}.load(folder, target)",
    )
  return layer


def check_target(target: Transformer, what: str) -> None:
  """Refuses a target that a head can't be added to.

  Args:
    target: Any model.
    what: Description of what is not possible, for the error.

  Raises:
    InputTypeError, OptionError: If it is no model, has a head, several streams,
      or layers that are not on the devices.
  """
  if not isinstance(target, Transformer):
    raise InputTypeError(
      "target",
      type(target).__name__,
      "an rj.models.Transformer",
      "make one with rj.models.load",
    )
  refuse_placed(target, "add a head", "load it without placement=")
  refuse_predicting(target, what)
  if target.config.streams is not None:
    raise OptionError(
      "target",
      f"a {target.config.family} with several streams or an index of keys",
      "one residual stream, which the head reads",
      "draft with speculate='lookup', or take another target",
    )


def block_shapes(layer: PredictLayer, target: Transformer) -> Any:
  """The block of a head with shapes only, in the target's dtype."""
  build = lambda: cast(
    layer.build(nnx.Rngs(0), target.config.embed), target.dtype
  )
  return jax.eval_shape(build)


def read_block(
  folder: Folder,
  tensors: Sequence[CheckpointTensor],
  dtype: DTypeLike,
  *,
  others: tuple[str, ...] = (),
) -> dict[str, Shaped[Array, " ..."]]:
  """Reads the parameters of a head, by their paths.

  Args:
    folder: Folder of the head.
    tensors: Tensors of the head.
    dtype: Dtype of the parameters.
    others: Ends of the names of tensors that are read apart.

  Raises:
    CheckpointMismatchError: If tensors are missing, too many, of a wrong shape
      or not finite.
  """

  forms: dict[str, Any] = {t.name: t.form for t in tensors}
  folder.check(
    {name: form.stored for name, form in forms.items()},
    optional=lambda x: x.endswith((*others, "rotary_emb.inv_freq")),
  )
  arrays: dict[str, Any] = {}
  for t in tensors:
    form = forms[t.name]
    like = jax.ShapeDtypeStruct(form.stored, jnp.dtype(dtype))
    (read,) = folder.read({t.name: like}).values()
    (arrays[t.targets[0][0]],) = form.split(read)
  return arrays


def written_tensors(
  block: nnx.Module, tensors: Sequence[CheckpointTensor], dtype: DTypeLike
) -> Iterator[tuple[str, Shaped[Array, " ..."]]]:
  """Names and values of a head's tensors, to be written."""
  arrays = arrays_of(block)
  for t in tensors:
    form: Any = t.form
    yield t.name, form.join((arrays[t.targets[0][0]].astype(dtype),))


def head_block(model: Transformer) -> Any:
  """Weights of a model's head, not stacked."""
  return jax.tree.map(lambda x: x[0], model.stack.blocks[-1][0])


def with_layer(
  target: Transformer,
  layer: PredictLayer,
  block: PredictBlock,
  rules: Rules | None,
) -> Transformer:
  """The target with a head, whose weights are not stacked and sharded yet."""
  stacked = jax.tree.map(lambda x: x[None], block)
  if (mesh := target.mesh) is not None:
    rules = rules or Rules()
    stacked = jax.tree.map(
      lambda p: p.replace(
        jax.device_put(on_host(p.get_value()), rules.sharding(p, mesh))
      ),
      stacked,
      is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
  result = copy.copy(target)
  result.config = dataclasses.replace(
    target.config, layers=(*target.config.layers, layer)
  )
  result.stack = copy.copy(target.stack)
  run = Run(len(target.config.layers), (layer,), 1)
  result.stack.runs = (*target.stack.runs, run)
  result.stack.blocks = nnx.List([*target.stack.blocks, nnx.List([stacked])])
  result.stack.taps = tuple(sorted(set(layer.taps)))
  return result


def without_layer(model: Transformer) -> Transformer:
  """The target of a model with a head."""
  result = copy.copy(model)
  result.config = dataclasses.replace(
    model.config, layers=model.config.layers[:-1]
  )
  result.stack = copy.copy(model.stack)
  result.stack.runs = model.stack.runs[:-1]
  result.stack.blocks = nnx.List([*model.stack.blocks][:-1])
  result.stack.taps = ()
  return result
