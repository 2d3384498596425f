"""Linear maps whose weights are stored as 8-bit codes, and codes of 4 bits.

Those of 4 bits are for `block_codes`.

Guarantees: y is that of the decoded weight, up to rounding.
Cost: the codes are read instead of floats: on a TPU v5e 59.6 MB for a map of
4,096 by 14,336 and one token, against 117.6 of bfloat16, by the compiler's own
count.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865 (4 bits in groups of 64, from
the least to the largest number of a group).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8, UInt8

from ringjax.nn.linear import Linear, linear_product


class Coded8Linear(nnx.Module):
  """A `Linear` of int8 codes, with a step for each output.

  Arrays have a leading axis of layers while their layers share one, and after
  it one of experts if it replaces an `ExpertLinear`.

  Attributes:
    codes: Codes of the weight, int8 [*in, *out].
    step: Step of each output, float32 [*out].
  """

  def __init__(
    self, base: Linear, codes: Int8[Array, " ..."], step: Float[Array, " ..."]
  ):
    self.contracted = base.contracted
    axes = tuple(base.weight.get_metadata()["axes"])
    lead, out = axes[: base.lead], axes[base.lead + self.contracted :]
    marks = {"wide": True, "by_index": base.by_index}
    self.codes = nnx.Param(codes, axes=axes, **marks)
    self.step = nnx.Param(step, axes=lead + out, **marks)
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    lead = x.ndim - self.contracted
    codes = self.codes[...].astype(x.dtype)
    y = linear_product(x, codes, self.contracted, wide=True)
    y = (y * self.step[...][(None,) * lead]).astype(x.dtype)
    if self.bias is None:
      return y
    return y + self.bias[...][(None,) * lead].astype(y.dtype)


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
