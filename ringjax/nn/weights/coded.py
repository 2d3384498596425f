"""Linear maps whose weights are stored as 8-bit or 4-bit codes on devices.

Guarantees: y is that of the decoded weight, up to rounding.
Cost: with 8 bits the codes are read instead of floats: on a TPU v5e 59.6 MB for
a map of 4,096 by 14,336 and one token, against 117.6 of bfloat16, by the
compiler's own count. With 4 bits groups are read one after another for up to 64
tokens; for more, one map's floats are made at a time.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865 (4 bits in groups of 64, from
the least to the largest number of a group).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, UInt8

from ringjax.nn.linear import ExpertLinear, Linear, linear_product
from ringjax.parallel import collectives

# Maximum tokens of a call whose products are made group by group.
_FEW = 64


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


def of_nibbles(
  codes: UInt8[Array, "G half O"],
  step: Float[Array, "G O"],
  least: Float[Array, "G O"],
  dtype: DTypeLike,
) -> Float[Array, "I O"]:
  """Decode the codes of `nibbles`, rounded, and including the padding."""
  codes_of_group = jnp.concatenate([codes >> 4, codes & 15], 1).astype(
    jnp.float32
  )
  numbers = codes_of_group * step[:, None] + least[:, None]
  return numbers.astype(dtype).reshape(-1, codes.shape[2])


class Coded4Linear(nnx.Module):
  """A `Linear` of 4-bit codes in groups.

  Arrays have a leading axis of layers while their layers share one, and after
  it one of experts if it replaces an `ExpertLinear`.

  Attributes:
    codes: Codes of the weight, uint8 [G, half, *out].
    step: Step of each group, float32 [G, *out].
    least: Smallest number of each group, float32 [G, *out].
    inputs: Sizes of the axes that are contracted.

  On a mesh those of experts are sharded by expert alone, whatever axis their
  widths have: `Rules(experts="model", ffn=None)` shards them.
  """

  def __init__(
    self,
    base: Linear,
    codes: UInt8[Array, " ..."],
    step: Float[Array, " ..."],
    least: Float[Array, " ..."],
    *,
    inputs: tuple[int, ...],
  ):
    self.contracted, self.inputs = base.contracted, inputs
    axes = tuple(base.weight.get_metadata()["axes"])
    # Groups are sharded like the first input axis.
    lead, first = axes[: base.lead], axes[base.lead]
    out = axes[base.lead + self.contracted :]
    if isinstance(base, ExpertLinear):
      # Shards run different experts at the same time, so they must not wait for
      # each other within a product, as they would for sharded groups.
      first, out = None, (None,) * len(out)
    marks = {"wide": True, "by_index": base.by_index}
    self.codes = nnx.Param(codes, axes=(*lead, first, None, *out), **marks)
    self.step = nnx.Param(step, axes=(*lead, first, *out), **marks)
    self.least = nnx.Param(least, axes=(*lead, first, *out), **marks)
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    lead = x.shape[: x.ndim - self.contracted]
    codes, step, smallest = (
      p[...] for p in (self.codes, self.step, self.least)
    )
    groups, half, *out = codes.shape
    codes = codes.reshape(groups, half, -1)
    step, smallest = step.reshape(groups, -1), smallest.reshape(groups, -1)
    x = x.reshape(*lead, math.prod(self.inputs))
    num_padding = 2 * half * groups - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, num_padding)])
    if math.prod(lead) <= _FEW:
      y = _by_groups(x, codes, step, smallest)
    else:
      y = linear_product(x, of_nibbles(codes, step, smallest, x.dtype), 1)
    y = y.reshape(*lead, *out)
    if self.bias is None:
      return y
    return y + self.bias[...][(None,) * len(lead)].astype(y.dtype)


def _by_groups(
  x: Float[Array, "*batch I"],
  codes: UInt8[Array, "G half O"],
  step: Float[Array, "G O"],
  least: Float[Array, "G O"],
) -> Float[Array, "*batch O"]:
  """x . weight, of x's dtype; no group's floats leave the product."""
  groups, half, outer = codes.shape
  parts = x.reshape(*x.shape[:-1], groups, 2 * half)

  def add(y: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    x, codes, step, smallest = group
    dot = lambda x, c: linear_product(x, c.astype(x.dtype), 1, wide=True)
    sums = dot(x[..., :half], codes >> 4) + dot(x[..., half:], codes & 15)
    total = jnp.sum(x, -1, keepdims=True, dtype=jnp.float32)
    rows = (None,) * (y.ndim - 1)
    return y + sums * step[rows] + total * smallest[rows], None

  start = collectives.zeros((*x.shape[:-1], outer), jnp.float32, x)
  scan_inputs = (jnp.moveaxis(parts, -2, 0), codes, step, least)
  return lax.scan(add, start, scan_inputs)[0].astype(x.dtype)
