"""A model with a new layer that predicts one token further, to be trained.

Guarantees: the model's own weights are those of the other model, not copied,
and so are its logits.
"""

from __future__ import annotations

import copy
import json
import os

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Shaped

from ringjax import fetched_models
from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.models.contents import read_config, text_config
from ringjax.models.families import FAMILIES, Family
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.models.hf.tensors import parameters
from ringjax.models.parameter_arrays import arrays_of, filled
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import refuse_codes
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.block import Block, Layer
from ringjax.nn.param import Rules
from ringjax.nn.stack import Run


def check_family(family: Family, name: str = "predict_layers") -> None:
  """Refuses a family without a layer that predicts further tokens.

  Args:
    family: Family of a model.
    name: Name of the argument or flag, for the error.

  Raises:
    OptionError: If it has none here.
  """
  if family.predict is None:
    families = ", ".join(
      name for name, x in FAMILIES.items() if x.predict is not None
    )
    raise OptionError(
      name,
      f"a {family.name}",
      f"a model of one of {families}",
      "leave it out",
    )


def refuse_predicting(model: Transformer, what: str) -> None:
  """Refuses a model with a layer that predicts one token further.

  Args:
    model: Any model.
    what: Description of what is not possible, for the error.

  Raises:
    OptionError: If it has such a layer.
  """
  refuse_head(model, what)
  if model.config.predicts is not None:
    raise OptionError(
      "model",
      f"one with a layer that predicts further tokens, to {what}",
      "a model without one",
      "load it without predict_layers",
    )


def refuse_head(model: Transformer, what: str) -> None:
  """Refuses a model with an EAGLE-3 or DFlash head.

  Args:
    model: Any model.
    what: Description of what is not possible, for the error.

  Raises:
    OptionError: If it has such a head.
  """
  if model.config.predicts is not None and model.config.predicts.taps:
    raise OptionError(
      "model",
      f"one with a head that reads several layers, to {what}",
      "the target alone; rj.models.eagle3.save or dflash.save writes the head",
      "pass rj.models.eagle3.without_head(model), or that of dflash",
    )


def has_predict_layer(path: str | os.PathLike[str]) -> bool:
  """Whether a folder has a layer that predicts one token further."""
  folder = open_model(fetched_models.resolve(path))
  parsed, family = read_config(folder.config, strict=False)
  layout = family.predict
  return layout is not None and layout.stored(parsed, folder.tensors)


def with_predict_layer(
  model: Transformer, *, seed: int = 0, rules: Rules | None = None
) -> Transformer:
  """Adds a layer that predicts one token further to a model.

  Attention, feedforward and their norms begin as those of a layer of the model,
  the map that joins embedding and hidden state as their mean.

  Args:
    model: Model of a family whose folders may have such a layer.
    seed: Seed of parts that no layer has.
    rules: Rules that shard the new weights over the model's mesh.

  Returns:
    The model with the layer; `save` writes both.

  Raises:
    OptionError: If the model has one, its family has none, or its layers are
      codes or not on the devices.
  """
  integer("seed", seed, least=0)
  refuse_placed(model, "add a layer", "load it without placement=")
  refuse_codes(model, "add a layer")
  source = json.loads(model.source)
  _, family = text_config(source)
  check_family(family, "model")
  if model.config.predicts is not None:
    raise OptionError(
      "model",
      "one that has a layer that predicts further tokens",
      "a model without one",
      "train that layer",
    )
  assert family.predict is not None
  layout = family.predict
  config = layout.with_layer(model.config)
  layer, embed = config.layers[-1], config.embed
  old = _arrays_like(model, layout.layer(model.config))

  def build(key: jax.Array) -> Block:
    from ringjax.models.checkpoint import cast

    return cast(layer.build(nnx.Rngs(key), embed), model.dtype)

  keys = jax.random.split(jax.random.key(seed), 1)
  empty = jax.eval_shape(jax.vmap(build), keys)
  form = parameters(empty)

  def make(
    keys: jax.Array, old: dict[str, Shaped[Array, " ..."]]
  ) -> dict[str, Shaped[Array, " ..."]]:
    fresh = arrays_of(jax.vmap(build)(keys))
    arrays = {
      path: old[path][None].astype(x.dtype) if path in old else x
      for path, x in fresh.items()
    }
    mean = jnp.tile(jnp.eye(embed), (2, 1)) / 2
    join = arrays["join.weight"]
    arrays["join.weight"] = mean[None].astype(join.dtype)
    return arrays

  mesh, rules = model.mesh, rules or Rules()
  if mesh is None:
    arrays = jax.jit(make)(keys, old)
  else:
    shardings = {path: rules.sharding(p, mesh) for path, p in form.items()}
    arrays = jax.jit(make, out_shardings=shardings)(keys, old)
  result = copy.copy(model)
  result.config = config
  result.source = json.dumps(
    source | {layout.key: 1}, sort_keys=True, allow_nan=True
  )
  result.stack = copy.copy(model.stack)
  run = Run(len(model.config.layers), (layer,), 1)
  result.stack.runs = (*model.stack.runs, run)
  result.stack.blocks = nnx.List(
    [*model.stack.blocks, nnx.List([filled(empty, arrays)])]
  )
  return result


def _arrays_like(
  model: Transformer, layer: Layer
) -> dict[str, Shaped[Array, " ..."]]:
  """Arrays of the last layer of a model that has the parts of `layer`."""
  for g, run in reversed(tuple(enumerate(model.stack.runs))):
    for position, spec in reversed(tuple(enumerate(run.layers))):
      if spec == layer:
        block = model.stack.layer(g, position, run.repeats - 1)
        return arrays_of(block)
  return {}
