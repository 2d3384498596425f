"""Maps of a mixture's experts: for kernels of grouped products, and shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax import tree
from ringjax.nn.param import Rules, axis_names
from ringjax.nn.weights.block_codes import BlockCodesLinear
from ringjax.nn.weights.coded import Coded8Linear
from ringjax.nn.weights.layer_array import LayerArray, stacked_entry
from ringjax.ops.experts.grouped_product_tpu import ExpertMaps


def expert_maps(
  weight: nnx.Module | LayerArray | Float[Array, "E D F"] | None,
) -> ExpertMaps | None:
  """Maps of all experts, in place in their stack; None for another module.

  Args:
    weight: Weights [E, D, F], an array or of a stack of layers, or a module
      that replaces an `ExpertLinear`.
  """
  if isinstance(weight, LayerArray):
    return ExpertMaps(stacked=weight.stacked, index=(weight.layer,))
  if isinstance(weight, jax.Array):
    return ExpertMaps(stacked=weight)
  # A class derived from these may compute something else.
  if type(weight) is Coded8Linear and weight.bias is None:
    codes, step = map(stacked_entry, (weight.codes, weight.step))
    return ExpertMaps(
      stacked=codes.stacked, step=step.stacked, index=codes.index
    )
  if type(weight) is BlockCodesLinear and weight.bias is None:
    codes, step = map(stacked_entry, (weight.codes, weight.step))
    least = None if weight.least is None else stacked_entry(weight.least)
    maps = ExpertMaps(
      stacked=codes.stacked,
      step=step.stacked,
      least=None if least is None else least.stacked,
      index=codes.index,
      levels=weight.layout.levels,
    )
    # The last group of some maps ends after their inputs.
    covers_inputs = (maps.inputs,) == weight.inputs
    return maps if covers_inputs else None
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertAxes:
  """Mesh axes that shard a mixture's experts, and the width of each expert.

  They are those of the default `Rules`, but for the axes of the experts.

  Attributes:
    over: Axes that shard the experts, the last one moving fastest.
    mesh: Mesh of the call.
  """

  over: tuple[str, ...]
  mesh: Mesh | AbstractMesh

  @property
  def rules(self) -> Rules:
    """Rules that shard the experts over these axes."""
    return Rules(experts=self.over or None)

  def spec(self, parameter: nnx.Variable) -> P:
    """Sharding of a parameter of one layer's experts."""
    metadata, shape = parameter.get_metadata(), parameter.get_value().shape
    axes = metadata["axes"]
    shape = list(shape[len(shape) - len(axes) :])
    # Several axes may be stored as one, of which the first has to divide.
    shape[-1] = metadata.get("last_axis", shape[-1])
    return self.rules.spec(axes, tuple(shape), self.mesh)

  def specs(self, weight: nnx.Variable | nnx.Module | None) -> Any:
    """Shardings in the places of the arrays of a map, or of its biases."""
    if isinstance(weight, nnx.Variable):
      return self._in_place_of(weight)
    return jax.tree.map(
      lambda x: x.replace(self._in_place_of(x)),
      weight,
      is_leaf=lambda x: isinstance(x, nnx.Variable),
    )

  def width(self, weight: nnx.Variable | nnx.Module, *, down: bool) -> set[str]:
    """Mesh axes that shard the width F of a map [E, D, F], or [E, F, D]."""
    if isinstance(weight, BlockCodesLinear):
      return set()
    parameter = weight.codes if isinstance(weight, Coded8Linear) else weight
    assert isinstance(parameter, nnx.Variable)
    entries = (*self.spec(parameter), None, None, None)
    return {*axis_names(entries[1 if down else 2])}

  def _in_place_of(self, parameter: nnx.Variable) -> Any:
    spec, value = self.spec(parameter), parameter.get_value()
    if not isinstance(value, LayerArray):
      return spec
    return tree.with_leaves(value, stacked=P(None, *spec), layer=P())
