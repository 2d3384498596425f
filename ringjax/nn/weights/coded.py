"""Linear maps whose weights are stored as 8-bit codes, and codes of 4 bits.

Those of 4 bits are for `block_codes`.

Guarantees: y is that of the decoded weight, up to rounding; so is the gradient
of x, see `coded_product`.
Cost: the codes are read instead of floats: on a TPU v5e 59.6 MB for a map of
4,096 by 14,336 and one token, against 117.6 of bfloat16, by the compiler's own
count.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865 (4 bits in groups of 64, from
the least to the largest number of a group).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8, UInt8

from ringjax.nn.linear import Linear, linear_product
from ringjax.nn.row_tiles import (
  OutputCodes,
  TiledWeight,
  current_row_tiles,
  default_shards,
  in_place,
)
from ringjax.nn.weights.coded_product import coded_product


class Coded8Linear(nnx.Module):
  """A `Linear` of int8 codes, with a step for each output.

  Arrays have a leading axis of layers while their layers share one, and after
  it one of experts if it replaces an `ExpertLinear`.

  Attributes:
    codes: Codes of the weight, int8 [*in, O], with all output axes in one, so
      that no product has to rearrange them; it is sharded as the first output
      axis would be.
    step: Step of each output, float32 [O].
    inputs: Sizes of the axes that are contracted.
    outputs: Sizes of the output axes.
    axes: Names of the axes of the weight, of an expert's first.
    widened: Whether the decoded weight stays float32 when a model is cast.
    by_index: Whether a call reads some entries of the weight, see `param`.
  """

  def __init__(
    self, base: Linear, codes: Int8[Array, " ..."], step: Float[Array, " ..."]
  ):
    """Take codes [*lead, *in, *out] and steps [*lead, *out] for a map."""
    self.contracted = base.contracted
    metadata = base.weight.get_metadata()
    axes = self.axes = tuple(metadata["axes"])
    self.widened, self.by_index = bool(metadata["wide"]), base.by_index
    lead, out = axes[: base.lead], axes[base.lead + self.contracted :]
    split = codes.ndim - len(out)
    self.inputs = tuple(codes.shape[split - self.contracted : split])
    self.outputs = tuple(codes.shape[split:])
    marks = {
      "wide": True,
      "by_index": base.by_index,
      "by_rows": not base.lead,
      # A shard has whole entries of the first output axis.
      "last_axis": self.outputs[0],
    }
    self.codes = nnx.Param(
      codes.reshape(*codes.shape[:split], math.prod(self.outputs)),
      axes=axes[: base.lead + self.contracted + 1],
      **marks,
    )
    leading = step.shape[: step.ndim - len(out)]
    step = step.reshape(*leading, math.prod(self.outputs))
    self.step = nnx.Param(step, axes=(*lead, out[0]), **marks)
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    if (tiles := current_row_tiles()) is not None:
      bias = None if self.bias is None else self.bias[...]
      return tiles.product(x, self.tiled_weight(), bias)
    lead = x.ndim - self.contracted
    arrays = self.codes[...], self.step[...]
    y = coded_product(
      functools.partial(_product, self.contracted),
      functools.partial(_transposed, self.contracted),
      x,
      arrays,
    )
    if len(self.outputs) > 1:
      y = y.reshape(*x.shape[:lead], *self.outputs)
    if self.bias is None:
      return y
    return y + self.bias[...][(None,) * lead].astype(y.dtype)

  def tiled_weight(self) -> TiledWeight:
    """The weight for rows in tiles."""
    (codes, index), (step, _) = (
      in_place(parameter.get_value()) for parameter in (self.codes, self.step)
    )
    return TiledWeight(
      stacked=OutputCodes(codes=codes, step=step),
      index=index,
      contracted=self.contracted,
      inputs=math.prod(self.inputs),
      shards=default_shards(self.codes, self.contracted),
    )

  def weight(self) -> Float[Array, " ..."]:
    """The decoded weight, float32 [*lead, *in, *out]."""
    codes, step = self.codes.get_value(), self.step.get_value()
    last = step.ndim - 1
    step = jnp.expand_dims(step, range(last, last + self.contracted))
    weight = codes.astype(jnp.float32) * step
    return weight.reshape(*codes.shape[:-1], *self.outputs)


def _product(
  contracted: int, x: jax.Array, arrays: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """x . (codes x step), of x's dtype."""
  codes, step = arrays
  y = linear_product(x, codes.astype(x.dtype), contracted, wide=True)
  return (y * step[(None,) * (x.ndim - contracted)]).astype(x.dtype)


def _transposed(
  contracted: int, gradient: jax.Array, arrays: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """Gradient of x from that of y."""
  codes, step = arrays
  lead = gradient.ndim - step.ndim
  scaled = (gradient * step[(None,) * lead]).astype(gradient.dtype)
  inputs = tuple(range(contracted))
  turned = jnp.moveaxis(codes, inputs, range(step.ndim, codes.ndim))
  return linear_product(scaled, turned.astype(gradient.dtype), step.ndim)


def nibbles(
  weight: Float[Array, "I O"], group: int
) -> tuple[UInt8[Array, "G half O"], Float[Array, "G O"], Float[Array, "G O"]]:
  """Encode a weight as 4-bit codes, two per byte, with steps and minima.

  Args:
    weight: Weight, [I, O]; I is padded with zeros to whole groups.
    group: Number of weights of an output that share a step, even. A byte has a
      code of the group's first half, times 16, plus one of its second half.
  """
  inner, outer = weight.shape
  padded = jnp.pad(weight.astype(jnp.float32), ((0, -inner % group), (0, 0)))
  parts = padded.reshape(-1, group, outer)
  smallest, largest = parts.min(1), parts.max(1)
  step = (largest - smallest) / jnp.float32(15)
  step = jnp.where(step > 0, step, jnp.float32(1))
  codes = jnp.round((parts - smallest[:, None]) / step[:, None])
  codes = jnp.clip(codes, 0, 15).astype(jnp.uint8)
  high, low = jnp.split(codes, 2, 1)
  return (high << 4) | low, step, smallest


def level_nibbles(
  weight: Float[Array, "I O"],
  group: int,
  *,
  levels: tuple[int, ...] | tuple[float, ...],
  step_of: Callable[[Array], Array],
) -> tuple[UInt8[Array, "G half O"], Float[Array, "G O"], None]:
  """Encode a weight as the nearest of 16 levels, two codes per byte.

  Args:
    weight: Weight, [I, O]; I is padded with zeros to whole groups.
    group: Number of weights of an output that share a step, see `nibbles`.
    levels: Level of each code, not decreasing.
    step_of: Function from a group's largest size to its step, before that is
      rounded to bfloat16.

  Returns:
    Codes, steps in bfloat16, and None for the least numbers.
  """
  inner, outer = weight.shape
  padded = jnp.pad(weight.astype(jnp.float32), ((0, -inner % group), (0, 0)))
  parts = padded.reshape(-1, group, outer)
  step = step_of(jnp.max(jnp.abs(parts), 1)).astype(jnp.bfloat16)
  step = jnp.where(step > 0, step, jnp.bfloat16(1))
  numbers = parts / step.astype(jnp.float32)[:, None]
  codes = jnp.zeros(numbers.shape, jnp.uint8)
  for low, high in itertools.pairwise(levels):
    # Equal levels at the end: the first of them is taken.
    if low < high:
      middle = jnp.float32((low + high) / 2)
      codes = codes + (numbers > middle).astype(jnp.uint8)
  high, low = jnp.split(codes, 2, 1)
  return (high << 4) | low, step, None
