"""Linear maps by 8-bit integers, and maps that record their inputs' size.

Guarantees: an `IntegerLinear` replaces a `Linear`; its result for a token
depends on that token alone, to the bit.
Memory: a byte a weight, a float32 for each output, and the float weights of
channels that are often outliers.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int8

from ringjax.nn.linear import Linear
from ringjax.ops.integer_product import integer_product, outlier_product


class IntegerLinear(nnx.Module):
  """y = x . (codes x scales) + bias, by products of integers.

  The part of an activation beyond 8 bits is multiplied in floats (shadow).

  Arrays have a leading axis of layers while their layers share one, and after
  it one of experts if it replaces an `ExpertLinear`.

  Attributes:
    codes: Codes of the weight, int8 [*in, *out].
    scales: Scale of each output, float32 [*out].
    scale: Scale of the activations, float32 [].
    active: Whether the part beyond 8 bits is multiplied, too, int32 [].
    rows: Weights of some channels, float [H, *out]; None: activations are
      clipped to 8 bits in all layers.
    slots: Row of each channel, int32 [I]; H for a channel without one.
  """

  def __init__(
    self,
    base: Linear,
    codes: Int8[Array, " ..."],
    scales: Float[Array, " ..."],
    scale: Float[Array, " ..."],
    active: Int[Array, " ..."],
    *,
    rows: Float[Array, " ..."] | None = None,
    slots: Int[Array, " ..."] | None = None,
  ):
    self.contracted = base.contracted
    axes = tuple(base.weight.get_metadata()["axes"])
    lead = axes[: base.lead]
    out = axes[base.lead + self.contracted :]
    wide_param = lambda x, axes, **more: nnx.Param(
      x, axes=axes, wide=True, by_index=base.by_index, **more
    )
    self.codes, self.scales = (
      wide_param(codes, axes),
      wide_param(scales, lead + out),
    )
    # These exist for all layers, also where codes of some are elsewhere.
    self.scale = wide_param(scale, lead, every=True)
    self.active = wide_param(active, lead, every=True)
    shadow = rows is not None
    self.rows = wide_param(rows, (*lead, None, *out)) if shadow else None
    self.slots = (
      wide_param(slots, (*lead, None), every=True) if shadow else None
    )
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    y = self.main(x)
    if self.rows is not None:
      y = y + self.beside(x)
    return y.astype(x.dtype)

  def main(self, x: Float[Array, ...]) -> Float[Array, ...]:
    """The product of clipped activations and the bias, float32."""
    codes = self.codes[...]
    y = self._outputs(
      x, integer_product(self._flat(x), *self._coded(), self.scale[...])
    )
    if self.bias is None:
      return y
    bias = self.bias[...][(None,) * (y.ndim - codes.ndim + self.contracted)]
    return y + bias.astype(jnp.float32)

  def beside(self, x: Float[Array, ...]) -> Float[Array, ...]:
    """Product of the part beyond 8 bits, float32; for a map with rows."""
    assert self.rows is not None and self.slots is not None
    rows = self.rows[...]
    y = outlier_product(
      self._flat(x),
      *self._coded(),
      self.scale[...],
      rows.reshape(rows.shape[0], math.prod(rows.shape[1:])),
      self.slots[...],
      active=self.active[...] != 0,
    )
    return self._outputs(x, y)

  def _flat(self, x: jax.Array) -> jax.Array:
    """x as [..., I], with one axis of channels."""
    lead = x.shape[: x.ndim - self.contracted]
    return x.reshape(*lead, math.prod(x.shape[len(lead) :]))

  def _coded(self) -> tuple[jax.Array, jax.Array]:
    """Codes [I, O] and their scales [O]."""
    codes = self.codes[...]
    inner = math.prod(codes.shape[: self.contracted])
    return codes.reshape(inner, -1), self.scales[...].reshape(-1)

  def _outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """y as [..., *out], for the leading axes of x."""
    out = self.codes[...].shape[self.contracted :]
    return y.reshape(*x.shape[: x.ndim - self.contracted], *out)


def largest_size(x: Float[Array, "N I"]) -> Float[Array, " I"]:
  """Largest absolute value of each channel."""
  return jnp.max(jnp.abs(x), axis=0)


def mean_square(x: Float[Array, "N I"]) -> Float[Array, " I"]:
  """Mean square of each channel, in float32."""
  return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=0)


class NotedLinear(nnx.Module):
  """A `Linear` that reports a number for each input channel of a call.

  Attributes:
    base: Wrapped map.
    number: Number of the layer, int32 [], or [L] while layers share an array;
      for an `ExpertLinear` [L, E].
    note: Function that is called with the layer and the numbers, float32 [I].
    measure: Function from inputs [N, I] to the numbers [I].
  """

  def __init__(
    self,
    base: Linear,
    number: Int[Array, " ..."],
    note: Callable[[np.ndarray, np.ndarray], None],
    measure: Callable[[Float[Array, "N I"]], Float[Array, " I"]] = largest_size,
  ):
    self.base, self.contracted, self.note = base, base.contracted, note
    self.measure = measure
    self.number = nnx.Param(number, axes=(), wide=True, every=True)

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    inner = math.prod(x.shape[x.ndim - self.contracted :])
    values = self.measure(x.reshape(-1, inner)).astype(jnp.float32)
    jax.debug.callback(self._note, self.number[...], values)
    return self.base(x)

  def _note(
    self, number: Array | np.ndarray, values: Array | np.ndarray
  ) -> None:
    self.note(np.asarray(number), np.asarray(values))
