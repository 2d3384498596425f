"""Linear maps by 8-bit integers, and maps that note what goes into them.

Guarantees: an `IntegerLinear` takes the place of a `Linear`; what it makes of a
token depends on that token alone, to the bit.
Memory: a byte a weight, and a float32 for each output.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int8

from ringjax.nn.linear import Linear
from ringjax.ops.integer_product import integer_product


class IntegerLinear(nnx.Module):
  """y = x . (codes x scales) + bias, by products of integers.

  Arrays have a leading axis of layers while their layers share one, and behind
  it one of experts if it takes the place of an `ExpertLinear`.

  Attributes:
    codes: int8 [*in, *out].
    scales: float32 [*out].
    scale: float32 [], of the activations.
    active: int32 [], not 0 where what leaves 8 bits is multiplied too.
    shadow: channels that may leave them before all are looked at; 0: none is.
  """

  def __init__(
    self,
    base: Linear,
    codes: Int8[Array, " ..."],
    scales: Float[Array, " ..."],
    scale: Float[Array, " ..."],
    active: Int[Array, " ..."],
    *,
    shadow: int,
  ):
    self.contracted, self.shadow = base.contracted, shadow
    axes = tuple(base.weight.get_metadata()["axes"])
    lead = axes[: base.lead]
    out = axes[base.lead + self.contracted :]
    kept = lambda x, axes, **more: nnx.Param(x, axes=axes, wide=True, **more)
    self.codes, self.scales = kept(codes, axes), kept(scales, lead + out)
    # These are of all layers, also where codes of some are elsewhere.
    self.scale = kept(scale, lead, every=True)
    self.active = kept(active, lead, every=True)
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    n = self.contracted
    codes = self.codes[...]
    out = codes.shape[n:]
    inner = math.prod(codes.shape[:n])
    lead = x.shape[: x.ndim - n]
    y = integer_product(
      x.reshape(*lead, inner),
      codes.reshape(inner, -1),
      self.scales[...].reshape(-1),
      self.scale[...],
      shadow=self.shadow,
      active=self.active[...] != 0,
    ).reshape(*lead, *out)
    if self.bias is None:
      return y
    return y + self.bias[...][(None,) * (x.ndim - n)].astype(y.dtype)


class NotedLinear(nnx.Module):
  """A `Linear` that tells how large each channel of its input was.

  Attributes:
    base: the map.
    number: int32 [], of the layer, or [L] while layers share an array; of an
      `ExpertLinear` [L, E].
  """

  def __init__(
    self,
    base: Linear,
    number: Int[Array, " ..."],
    note: Callable[[np.ndarray, np.ndarray], None],
  ):
    self.base, self.contracted, self.note = base, base.contracted, note
    self.number = nnx.Param(number, axes=(), wide=True, every=True)

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    lead = x.ndim - self.contracted
    size = jnp.max(jnp.abs(x), axis=tuple(range(lead))).astype(jnp.float32)
    jax.debug.callback(self._note, self.number[...], size.reshape(-1))
    return self.base(x)

  def _note(self, number: Any, size: Any) -> None:
    self.note(np.asarray(number), np.asarray(size))
