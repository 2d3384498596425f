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
from jaxtyping import Array, Float, Int

from ringjax.errors import OptionError
from ringjax.nn.linear import Linear, linear_product
from ringjax.nn.row_tiles import current_row_tiles
from ringjax.nn.weights.adapter_rows import current_adapter_rows
from ringjax.nn.weights.block_codes import BlockCodesLinear
from ringjax.nn.weights.coded import Coded8Linear

# Maps that an adapter can be added to.
AdaptableMap = Linear | Coded8Linear | BlockCodesLinear


class AdaptedLinear(nnx.Module):
  """A map, of floats or codes, with low-rank adapters that are added to it.

  Attributes:
    base: Wrapped map.
    a: First factors, [adapters, *in, r], or with a leading axis of layers.
    b: Second factors, [adapters, r, *out], likewise; includes the scales.
  """

  def __init__(
    self,
    base: AdaptableMap,
    a: Float[Array, " ..."],
    b: Float[Array, " ..."],
  ):
    self.base = base
    self.contracted = base.contracted
    # A call reads the factors of its rows' adapters, not those of all.
    self.a = nnx.Param(a, by_index=True)
    self.b = nnx.Param(b, by_index=True)

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    y, tiles = self.base(x), current_row_tiles()
    if tiles is not None:
      return tiles.add_by_row(y, x, self._update)
    rows = current_adapter_rows()
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
    return y + self._update(x, rows).reshape(y.shape).astype(y.dtype)

  def _update(
    self, x: Float[Array, "B T ..."], rows: Int[Array, " B"]
  ) -> Float[Array, "B T O"]:
    """Product with the factors of the rows' adapters, outputs in one axis."""
    a, b = self.a.get_value()[rows], self.b.get_value()[rows]
    inner, rank = math.prod(x.shape[2:]), b.shape[1]
    low = jnp.einsum(
      "bti,bir->btr",
      x.reshape(*x.shape[:2], inner),
      a.reshape(a.shape[0], inner, rank).astype(x.dtype),
    )
    return jnp.einsum(
      "btr,bro->bto", low, b.reshape(*b.shape[:2], -1).astype(x.dtype)
    )


class LowRankSum(nnx.Module):
  """A frozen map with one low-rank adapter, added when a layer runs.

  A weight of floats, fetched then, becomes W + s A B, so that results are those
  of layers on the devices to the bit; of codes it is base(x) + s (x A) B.

  Attributes:
    base: Map with the frozen weight.
    a: First factor, [*in, r], or with a leading axis of layers.
    b: Second factor, [r, *out], likewise.
    scale: Factor on the product.
  """

  def __init__(
    self,
    base: AdaptableMap,
    a: Float[Array, " ..."],
    b: Float[Array, " ..."],
    scale: float,
  ):
    self.base, self.scale = base, scale
    self.contracted = base.contracted
    self.a = nnx.Param(a, axes=(), wide=False)
    self.b = nnx.Param(b, axes=(), wide=False)

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    if isinstance(self.base, Linear):
      return self._summed(self.base, self.a.get_value(), self.b.get_value())(x)
    y, tiles = self.base(x), current_row_tiles()
    if tiles is not None:
      return tiles.map_tiles(self._added, y, x.reshape(*x.shape[:2], -1))
    lead = x.shape[: x.ndim - self.contracted]
    return self._added(y, x.reshape(*lead, math.prod(x.shape[len(lead) :])))

  def _added(
    self, y: Float[Array, ...], x: Float[Array, "*lead I"]
  ) -> Float[Array, ...]:
    """Outputs y of the base map, and the adapter's, for its inputs x."""
    a, b = self.a.get_value(), self.b.get_value()
    rank = a.shape[-1]
    low = linear_product(x, a.reshape(-1, rank).astype(x.dtype), 1)
    low = low * jnp.asarray(self.scale, x.dtype)
    update = linear_product(low, b.reshape(rank, -1).astype(x.dtype), 1)
    return y + update.reshape(y.shape).astype(y.dtype)

  def _summed(
    self, base: Linear, a: Float[Array, " ..."], b: Float[Array, " ..."]
  ) -> Linear:
    """The map of the summed weight, in the weight's dtype."""
    weight = base.weight.get_value()
    factors = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
    update = jnp.matmul(*factors).reshape(weight.shape)
    update = update * jnp.asarray(self.scale, a.dtype)
    total = (weight.astype(update.dtype) + update).astype(weight.dtype)
    summed = jax.tree.map(lambda x: x, base)
    summed.weight = base.weight.replace(total)
    return summed
