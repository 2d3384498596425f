"""Linear maps with a low-rank adapter for each row of a batch.

Guarantees: a row with adapter n is mapped by x (W + s A_n B_n); a row with
adapter 0, which is zeros, as without adapters.
Cost: 2 r (in + out) FLOPs a token more; W is read once for all rows.
Ref: Hu et al. 2021, LoRA, arXiv 2106.09685; Sheng et al. 2023, S-LoRA,
arXiv 2311.03285.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.nn.linear import Linear
from ringjax.nn.weights.adapter_rows import current_adapter_rows


class AdaptedLinear(nnx.Module):
  """A `Linear` with low-rank adapters that are added to it.

  Attributes:
    base: Wrapped map.
    a: First factors, [adapters, *in, r], or with a leading axis of layers.
    b: Second factors, [adapters, r, *out], likewise; includes the scales.
  """

  def __init__(
    self, base: Linear, a: Float[Array, " ..."], b: Float[Array, " ..."]
  ):
    self.base = base
    self.contracted = base.contracted
    # A call reads the factors of its rows' adapters, not those of all.
    self.a = nnx.Param(a, by_index=True)
    self.b = nnx.Param(b, by_index=True)

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    y, rows = self.base(x), current_adapter_rows()
    if rows is None:
      return y
    n = self.contracted
    if x.ndim != n + 2 or x.shape[0] != rows.shape[0]:
      raise OptionError(
        "adapters",
        f"{x.shape[: x.ndim - n]} tokens for the adapters of {rows.shape[0]} "
        "rows",
        "a map of tokens [B, T], row by row",
        "leave this map out of the adapters' targets",
      )
    a, b = self.a.get_value()[rows], self.b.get_value()[rows]
    inner, rank = math.prod(x.shape[2:]), b.shape[1]
    low = jnp.einsum(
      "bti,bir->btr",
      x.reshape(*x.shape[:2], inner),
      a.reshape(a.shape[0], inner, rank).astype(x.dtype),
    )
    update = jnp.einsum(
      "btr,bro->bto", low, b.reshape(*b.shape[:2], -1).astype(x.dtype)
    )
    return y + update.reshape(y.shape).astype(y.dtype)


class SummedLinear(nnx.Module):
  """A `Linear` of a frozen weight and the product of two small ones.

  For weights that are fetched when a layer runs: the sum exists only then.

  Attributes:
    base: Map with the frozen weight.
    a: First factor, [*in, r], or with a leading axis of layers.
    b: Second factor, [r, *out], likewise.
    scale: Factor on the product.
  """

  def __init__(
    self,
    base: Linear,
    a: Float[Array, " ..."],
    b: Float[Array, " ..."],
    scale: float,
  ):
    self.base, self.scale = base, scale
    self.contracted = base.contracted
    self.a, self.b = nnx.Param(a), nnx.Param(b)

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    weight = self.base.weight.get_value()
    split = self.contracted
    into = math.prod(weight.shape[:split])
    a = self.a.get_value()
    b = self.b.get_value().reshape(a.shape[-1], -1)
    update = jnp.matmul(a.reshape(into, -1), b).reshape(weight.shape)
    update = update * jnp.asarray(self.scale, a.dtype)
    summed = (weight.astype(update.dtype) + update).astype(weight.dtype)
    summed_map = jax.tree.map(lambda x: x, self.base)
    summed_map.weight = self.base.weight.replace(summed)
    return summed_map(x)
