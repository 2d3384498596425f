"""The linear maps of a model's layers, by their paths, and others in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.nn.linear import Linear


def linear_maps(model: Transformer) -> Iterator[tuple[str, Linear]]:
  """All linear maps of the layers, by path, in the order of the tree."""
  leaves = jax.tree_util.tree_flatten_with_path(
    model.stack, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )[0]
  for path, _ in leaves:
    owner: Any = model.stack
    for key in path[:-1]:
      owner = (
        getattr(owner, key.name) if hasattr(key, "name") else owner[key.idx]
      )
    if isinstance(owner, Linear) and _last(path) == "weight":
      name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
      yield f"stack.{name}", owner


# Maps that choose or gate, and those that layers use as arrays: one that latent
# attention takes apart, and what is multiplied within a shard.
_KEPT = (".router", ".shared_gate", ".beta", ".step", ".attention.kv",
         ".step_down", ".low", ".into", ".out_of")  # fmt: skip


def rounded_maps(model: Transformer, name: str) -> dict[str, Linear]:
  """The maps that can be rounded: called as such, and choosing nothing.

  Args:
    model: the model.
    name: what is to be made, for errors.

  Raises:
    OptionError: a model without them, or with layers in another memory.
  """
  refuse_placed(model, f"make {name}", "load it without placement= and memory=")
  maps = {k: v for k, v in linear_maps(model) if not k.endswith(_KEPT)}
  if not maps:
    raise OptionError(
      "model",
      f"a {model.config.family} without linear maps that can be rounded",
      "one with weights of floats",
      "pass the model that rj.models.load returns",
    )
  return maps


def _last(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path[-1:], simple=True)


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
