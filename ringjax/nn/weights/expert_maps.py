"""Maps of a mixture's experts as the kernels of grouped products read them."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

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
