"""Linear maps between groups of axes, embeddings, and norms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ringjax.nn.param import param
from ringjax.ops.norm import layer_norm, rms_norm


class Linear(nnx.Module):
  """y[..., out] = x[..., in] . weight[in, out] + bias[out].

  `inputs` and `outputs` are groups of axes, such as (D,) and (N, H).
  """

  def __init__(
    self,
    rngs: nnx.Rngs,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    bias: bool = False,
  ):
    self.contracted = len(inputs)
    self.weight = param(rngs, inputs + outputs, axes, fan_in=math.prod(inputs))
    self.bias = (
      param(rngs, outputs, axes[len(inputs) :], value=0.0) if bias else None
    )

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    bias = None if self.bias is None else self.bias[...]
    return linear_product(x, self.weight[...], self.contracted, bias)


def linear_product(
  x: Float[Array, ...],
  weight: Float[Array, ...],
  contracted: int,
  bias: Float[Array, ...] | None = None,
  *,
  wide: bool = False,
) -> Float[Array, ...]:
  """y[..., out] = x[..., in] . weight[in, out] + bias[out].

  Args:
    x: of the weight's dtype.
    weight: the same.
    contracted: the number of axes in `in`.
    bias: [*out].
    wide: y is float32; else it is of x's dtype.
  """
  n, lead = contracted, x.ndim - contracted
  # Of a single column XLA's CPU compiler makes a product with a vector, whose
  # sums for a row depend on where it is among the others.
  alone = weight.shape[n:] == (1,)
  if alone:
    weight = jnp.pad(weight, [(0, 0)] * n + [(0, 1)])

  def dot(x: jax.Array) -> jax.Array:
    return lax.dot_general(
      x,
      weight,
      ((tuple(range(lead, x.ndim)), tuple(range(n))), ((), ())),
      preferred_element_type=jnp.float32 if wide else x.dtype,
    )

  y = _rows(dot, x, n)
  y = y[..., :1] if alone else y
  return y if bias is None else y + bias[(None,) * lead].astype(y.dtype)


class Embedding(nnx.Module):
  """One vector for each token id; used backwards it is the tied head."""

  def __init__(self, rngs: nnx.Rngs, vocab: int, embed: int):
    self.weight = param(rngs, (vocab, embed), ("vocab", "embed"), fan_in=embed)

  def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
    return jnp.take(self.weight[...], tokens, axis=0, mode="clip")

  def logits(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """The logits of hidden states, float32."""
    return _logits(h, self.weight[...], 1)


class Head(nnx.Module):
  """Logits by a weight of their own, [D, V]."""

  def __init__(
    self, rngs: nnx.Rngs, embed: int, vocab: int, *, bias: bool = False
  ):
    self.weight = param(rngs, (embed, vocab), ("embed", "vocab"), fan_in=embed)
    self.bias = param(rngs, (vocab,), ("vocab",)) if bias else None

  def logits(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """The logits of hidden states, float32."""
    y = _logits(h, self.weight[...], 0)
    if self.bias is None:
      return y
    return y + self.bias[...][(None,) * (y.ndim - 1)].astype(y.dtype)


def _logits(h: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
  """float32 [..., V] from [..., D] and a weight whose `axis` is D."""

  def dot(h: jax.Array) -> jax.Array:
    return lax.dot_general(
      h,
      weight,
      (((h.ndim - 1,), (axis,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

  return _rows(dot, h, 1)


def _rows(
  dot: Callable[[jax.Array], jax.Array], x: jax.Array, contracted: int
) -> jax.Array:
  """dot(x), where the last axes of x are contracted and the others rows."""
  last = x.ndim - contracted - 1
  one = last >= 0 and math.prod(x.shape[: last + 1]) == 1
  if not one or x.dtype.itemsize >= 4:
    return dot(x)

  def beside(x: jax.Array) -> jax.Array:
    pad = [(0, int(i == last)) for i in range(x.ndim)]
    return lax.slice_in_dim(dot(jnp.pad(x, pad)), 0, 1, axis=last)

  # For a single row XLA's CPU compiler makes a narrow weight wide, which takes
  # up to ten times as long as the product of two rows, of which one is zeros.
  return lax.platform_dependent(x, cpu=beside, default=dot)


class Identity(nnx.Module):
  """Leaves its input as it is."""

  def __call__(self, x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    return x


class RMSNorm(nnx.Module):
  """Root mean square norm over the last axes; `shape` None has no weight."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    shape: tuple[int, ...] | None,
    axes: tuple[str | None, ...],
    *,
    eps: float,
    offset: float = 0.0,
  ):
    self.eps, self.offset = eps, offset
    self.over = 1 if shape is None else len(shape)
    self.weight = (
      None if shape is None else param(rngs, shape, axes, value=1 - offset)
    )

  def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    weight = None if self.weight is None else self.weight[...]
    return rms_norm(x, weight, self.eps, axes=self.over, offset=self.offset)


class LayerNorm(nnx.Module):
  """Layer norm over the last axis."""

  def __init__(self, rngs: nnx.Rngs, dims: int, *, eps: float, bias: bool):
    self.eps = eps
    self.weight = param(rngs, (dims,), (None,), value=1.0)
    self.bias = param(rngs, (dims,), (None,)) if bias else None

  def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    bias = None if self.bias is None else self.bias[...]
    return layer_norm(x, self.weight[...], bias, self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
  """Which norm a model uses.

  Attributes:
    eps: added to the variance.
    offset: 1 where the stored weight is the distance from one.
    layer: LayerNorm instead of RMSNorm.
    bias: whether a LayerNorm has a bias.
  """

  eps: float
  offset: float = 0.0
  layer: bool = False
  bias: bool = True

  def build(self, rngs: nnx.Rngs, dims: int) -> Any:
    """The module that normalises vectors of `dims` numbers."""
    if self.layer:
      return LayerNorm(rngs, dims, eps=self.eps, bias=self.bias)
    return RMSNorm(rngs, (dims,), (None,), eps=self.eps, offset=self.offset)
