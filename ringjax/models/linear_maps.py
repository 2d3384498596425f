"""The linear maps of a model's layers, by their paths, and others in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.nn.feedforward import ExpertsLayer
from ringjax.nn.linear import ExpertLinear, Linear


def linear_maps(model: Transformer) -> Iterator[tuple[str, Linear]]:
  """All linear maps of the layers, by path, in the order of the tree.

  Those of experts are left out, see `expert_maps`.
  """
  for name, owner, last in _parameters(model):
    if isinstance(owner, Linear) and last == "weight":
      yield name, owner


def expert_maps(model: Transformer) -> Iterator[tuple[str, ExpertLinear]]:
  """The maps of the mixtures' experts, by path: gates, ups and downs."""
  for name, owner, last in _parameters(model):
    if isinstance(owner, ExpertsLayer) and last in ExpertsLayer.MAPS:
      yield f"{name}.{last}", ExpertLinear(getattr(owner, last))


def _parameters(model: Transformer) -> Iterator[tuple[str, Any, str]]:
  """Of each parameter of the layers: its module, by path, and its name there."""
  leaves = jax.tree_util.tree_flatten_with_path(
    model.stack, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )[0]
  for path, _ in leaves:
    owner: Any = model.stack
    for key in path[:-1]:
      owner = (
        getattr(owner, key.name) if hasattr(key, "name") else owner[key.idx]
      )
    name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
    last = jax.tree_util.keystr(path[-1:], simple=True)
    yield f"stack.{name}", owner, last


# Maps that choose or gate, and one that latent attention takes apart.
_KEPT = (".router", ".shared_gate", ".beta", ".step", ".attention.kv")


def rounded_maps(model: Transformer, name: str) -> dict[str, Linear]:
  """The maps that can be rounded: called as such, and choosing nothing.

  Those of experts are among them.

  Args:
    model: the model.
    name: what is to be made, for errors.

  Raises:
    OptionError: a model without them, or with layers in another memory.
  """
  refuse_placed(model, f"make {name}", "load it without placement= and memory=")
  maps = {k: v for k, v in linear_maps(model) if not k.endswith(_KEPT)}
  maps |= dict(expert_maps(model))
  if not maps:
    raise OptionError(
      "model",
      f"a {model.config.family} without linear maps that can be rounded",
      "one with weights of floats",
      "pass the model that rj.models.load returns",
    )
  return maps


def inner_size(linear: Linear) -> int:
  """Channels of the input of a map whose weight is stacked over layers."""
  first = 1 + linear.lead
  shape = linear.weight.get_value().shape
  return math.prod(shape[first : first + linear.contracted])


def replaced(model: Transformer, maps: Mapping[str, nnx.Module]) -> Transformer:
  """The model with other modules in place of some maps; it shares the rest."""
  made = jax.tree.map(lambda x: x, model)
  for path, module in maps.items():
    *above, name = path.split(".")
    owner: Any = made
    for step in above:
      owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
    setattr(owner, name, module)
  return made
