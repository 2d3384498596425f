"""Linear maps whose weights stay codes of 8 or 4 bits on the devices.

Guarantees: y is that of the decoded weight, in x's dtype, to the bit.
Cost: the codes are read, not the floats that they stand for; where the compiler
does not decode in passing, one map's floats are made at a time.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865 (groups of 64, from the least
to the largest number of a group).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from ringjax.nn.linear import Linear, linear_product

BITS = (8, 4)


def encoded(
  weight: Float[Array, "I O"], bits: int, group: int
) -> tuple[Shaped[Array, "W O"], Float[Array, "G O"], Float[Array, "G O"]]:
  """uint8 codes, two in a byte of 4 bits, and each group's step and least.

  Args:
    weight: [I, O]; I is filled up with zeros to a number of whole groups.
    bits: of a code.
    group: numbers of an output that share a step.
  """
  inner, outer = weight.shape
  wide = jnp.pad(weight.astype(jnp.float32), ((0, -inner % group), (0, 0)))
  parts = wide.reshape(-1, group, outer)
  least, most = parts.min(1), parts.max(1)
  step = (most - least) / jnp.float32(2**bits - 1)
  step = jnp.where(step > 0, step, jnp.float32(1))
  codes = jnp.round((parts - least[:, None]) / step[:, None])
  codes = jnp.clip(codes, 0, 2**bits - 1).astype(jnp.uint8)
  codes = codes.reshape(-1, outer)
  if bits == 4:
    codes = codes[0::2] | (codes[1::2] << 4)
  return codes, step, least


def decoded(
  codes: Shaped[Array, "W O"],
  step: Float[Array, "G O"],
  least: Float[Array, "G O"],
  bits: int,
  inner: int,
  dtype: DTypeLike,
) -> Float[Array, "I O"]:
  """What `encoded` made codes of, rounded; `inner` is I."""
  if bits == 4:
    pair = jnp.stack([codes & 15, codes >> 4], 1)
    codes = pair.reshape(-1, codes.shape[1])
  parts = codes.reshape(step.shape[0], -1, codes.shape[1])
  made = parts.astype(jnp.float32) * step[:, None] + least[:, None]
  return made.reshape(codes.shape)[:inner].astype(dtype)


class CodedLinear(nnx.Module):
  """A `Linear` of codes.

  Arrays have a leading axis of layers while their layers share one.

  Attributes:
    codes: uint8 [W, *out].
    step: float32 [G, *out].
    least: float32 [G, *out].
    bits: of a code.
    inputs: the sizes of the axes that are contracted.
  """

  def __init__(
    self,
    base: Linear,
    codes: Shaped[Array, " ..."],
    step: Float[Array, " ..."],
    least: Float[Array, " ..."],
    *,
    bits: int,
    inputs: tuple[int, ...],
  ):
    self.contracted, self.bits, self.inputs = base.contracted, bits, inputs
    axes = tuple(base.weight.get_metadata()["axes"])
    # Groups of one map are dealt like its first input axis.
    names = (axes[0], *axes[self.contracted :])
    kept = lambda x: nnx.Param(x, axes=names, wide=True)
    self.codes, self.step, self.least = kept(codes), kept(step), kept(least)
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    codes, step, least = (p[...] for p in (self.codes, self.step, self.least))
    out = codes.shape[1:]
    flat = lambda x: x.reshape(x.shape[0], -1)
    weight = decoded(
      flat(codes),
      flat(step),
      flat(least),
      self.bits,
      math.prod(self.inputs),
      x.dtype,
    )
    return linear_product(
      x,
      weight.reshape(*self.inputs, *out),
      self.contracted,
      None if self.bias is None else self.bias[...],
    )
