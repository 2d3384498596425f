"""Linear maps of a model's layers by their paths, and their replacement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.feedforward import ExpertsLayer
from ringjax.nn.linear import ExpertLinear, Linear
from ringjax.nn.weights.adapted import AdaptableMap
from ringjax.nn.weights.block_codes import BlockCodesLinear
from ringjax.nn.weights.coded import Coded8Linear

M = TypeVar("M", bound=nnx.Module)

# Maps whose weights are codes, which stay codes while they are multiplied.
CODED = (Coded8Linear, BlockCodesLinear)


def linear_maps(model: Transformer) -> Iterator[tuple[str, Linear]]:
  """All linear maps of the layers, by path, in the order of the tree.

  Maps of experts are left out, see `maps_of`.
  """
  for path, linear in maps_of(model.stack, "stack.").items():
    if not isinstance(linear, ExpertLinear):
      yield path, linear


def maps_of(module: nnx.Module, prefix: str) -> dict[str, Linear]:
  """The linear maps in a module by their paths, including those of experts.

  Args:
    module: A stack, or a block.
    prefix: Prefix of the paths.
  """
  maps: dict[str, Linear] = {}
  for name, owner, last, leaf in _owners(module):
    if isinstance(owner, Linear) and last == "weight":
      maps[f"{prefix}{name}"] = owner
    elif isinstance(owner, ExpertsLayer) and last in ExpertsLayer.MAPS:
      maps[f"{prefix}{name}.{last}"] = ExpertLinear(leaf)  # pyrefly: ignore
  return maps


def adaptable_maps(model: Transformer) -> dict[str, AdaptableMap]:
  """Linear maps of the layers by path, of floats or of codes.

  They are in the order of `linear_maps`, also where some are codes; maps of
  experts are left out.
  """
  maps: dict[str, AdaptableMap] = {}
  for name, owner, last, leaf in _owners(model.stack):
    is_expert = "experts" in (leaf.get_metadata().get("axes") or ())
    is_float = isinstance(owner, Linear) and last == "weight"
    is_code = isinstance(owner, CODED) and last == "codes"
    if (is_float or is_code) and not is_expert:
      maps[f"stack.{name}"] = owner
  return maps


def _owners(
  module: nnx.Module,
) -> Iterator[tuple[str, Any, str, nnx.Variable]]:
  """Parameters of a module: path and module of the owner, name, parameter."""
  leaves = jax.tree_util.tree_flatten_with_path(
    module, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )[0]
  for path, leaf in leaves:
    if not isinstance(leaf, nnx.Variable):
      # Arrays in the host's memory are parts of placed layers.
      continue
    owner: Any = module
    for key in path[:-1]:
      owner = (
        getattr(owner, key.name) if hasattr(key, "name") else owner[key.idx]
      )
    name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
    last = jax.tree_util.keystr(path[-1:], simple=True)
    yield name, owner, last, leaf


# Part of the paths of an index of keys: attention.index.q, attention.index_q.
INDEX_PATH = ".attention.index"
# Maps that choose or gate, which are not rounded.
_CHOOSING = (
  ".router",
  ".shared_gate",
  ".beta",
  ".step",
  ".step_down",
  ".index.q",
  ".index.k",
  ".index.weights",
  ".index_q",
  ".index_weights",
  ".index_compressor.value",
  ".index_compressor.gate",
  ".compressor.gate",
  ".native.gates",
)


def used_as_array(model: Transformer, path: str) -> bool:
  """Whether a layer uses a map's arrays directly, so no module can replace it.

  Such are maps that latent attention splits, and products within a shard: the
  layers' modules list them as `ARRAYS`.
  """
  owner, name = _owner(model, path)
  return name in getattr(owner, "ARRAYS", ())


def _owner(module: nnx.Module, path: str) -> tuple[Any, str]:
  """Module that a path's last part belongs to, and the name of that part."""
  *above, name = path.split(".")
  owner: Any = module
  for step in above:
    owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
  return owner, name


def rounded_maps(model: Transformer, name: str) -> dict[str, Linear]:
  """The maps that can be rounded: called as modules, and choosing nothing.

  Maps of experts are included.

  Args:
    model: Model to look in.
    name: Result that the caller makes of the maps, for errors.

  Raises:
    OptionError: If no map can be rounded, or the model has neurons on disk.
  """
  if model.stack.neuron_fault is not None:
    refuse_placed(model, f"make {name}", "load it without neurons on disk")
  all_maps = maps_of(model.stack, "stack.")
  maps = {
    k: v
    for k, v in all_maps.items()
    if not k.endswith(_CHOOSING) and not used_as_array(model, k)
  }
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


def replaced(model: M, maps: Mapping[str, nnx.Module | nnx.Variable]) -> M:
  """The model with other modules in place of some maps; it shares the rest.

  Args:
    model: A model, or a module of one.
    maps: New modules, or parameters, by their paths in it.
  """
  copy_of_model = jax.tree.map(lambda x: x, model)
  for path, module in maps.items():
    owner, name = _owner(copy_of_model, path)
    setattr(owner, name, module)
  return copy_of_model
