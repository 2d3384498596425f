"""Linear maps between groups of axes, embeddings, and norms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.nn.param import param
from ringjax.nn.row_tiles import TiledWeight, current_row_tiles
from ringjax.ops.narrow_product import (
  FLOAT,
  current_products,
  narrow_product,
)
from ringjax.ops.norm import layer_norm, rms_norm, scaled_rms_norm


def stream_dtype(dtype: DTypeLike) -> np.dtype:
  """Dtype of the residual stream of a model of `dtype`.

  For float16 weights it is float32: in Gemma's models, and wherever embeddings
  are multiplied, sums of layers exceed float16's range, which ends at 65,504.
  """
  is_float16 = np.dtype(dtype) == np.float16
  return np.dtype(np.float32 if is_float16 else dtype)


def part_dtype(module: nnx.Module, stream: DTypeLike) -> np.dtype:
  """Dtype in which a part of a layer computes, given the residual stream's.

  It is the stream's, but float16 for a part with float16 weights; steps of
  codes, which keep their dtype when a model is cast, do not count.
  """
  leaves = jax.tree.leaves(
    module, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  weights = [
    x.get_value() if isinstance(x, nnx.Variable) else x
    for x in leaves
    if not (isinstance(x, nnx.Variable) and x.get_metadata().get("wide"))
  ]
  dtypes = {x.dtype for x in weights}
  narrow = stream == jnp.float32 and np.dtype(np.float16) in dtypes
  return np.dtype(np.float16 if narrow else stream)


class Linear(nnx.Module):
  """y[..., out] = x[..., in] . weight[in, out] + bias[out].

  `inputs` and `outputs` are groups of axes, such as (D,) and (N, H); of rows in
  `nn.row_tiles` outputs are one axis. The weight of a `wide` one stays float32
  when the model is cast.
  """

  # Number of leading axes of the weight before `inputs` and `outputs`.
  lead = 0

  def __init__(
    self,
    rngs: nnx.Rngs,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    bias: bool = False,
    wide: bool = False,
  ):
    self.contracted = len(inputs)
    self.weight = param(
      rngs,
      inputs + outputs,
      axes,
      fan_in=math.prod(inputs),
      wide=wide,
      by_rows=True,
    )
    self.bias = (
      param(rngs, outputs, axes[len(inputs) :], value=0.0) if bias else None
    )

  @property
  def by_index(self) -> bool:
    """Whether a call reads some entries of its weight, see `param`."""
    return bool(self.weight.get_metadata().get("by_index"))

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    bias = None if self.bias is None else self.bias[...]
    tiles = current_row_tiles()
    if tiles is None and current_products() != FLOAT:
      return self._narrow(x, bias)
    if tiles is None:
      return linear_product(x, self.weight[...], self.contracted, bias)
    return tiles.product(x, self.tiled_weight(), bias)

  def tiled_weight(self) -> TiledWeight:
    """The weight for rows in tiles."""
    return TiledWeight.of_floats(self.weight, self.contracted)

  def _narrow(
    self, x: Float[Array, ...], bias: Float[Array, ...] | None
  ) -> Float[Array, ...]:
    """The result by a product of 8-bit numbers."""
    weight, split = self.weight[...], x.ndim - self.contracted
    inner = math.prod(x.shape[split:])
    y = narrow_product(
      current_products(), x.reshape(-1, inner), weight.reshape(inner, -1)
    )
    y = y.reshape(*x.shape[:split], *weight.shape[self.contracted :])
    return y if bias is None else y + bias[(None,) * split].astype(y.dtype)


class ExpertLinear(Linear):
  """The maps of a mixture's experts, without biases.

  It is the map of one expert once its arrays are indexed along the first axis.

  Attributes:
    weight: Weights of all experts, [E, in, out].
  """

  lead = 1

  def __init__(self, weight: nnx.Param):
    self.contracted, self.weight = 1, weight
    self.bias: nnx.Param | None = None


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
    x: Input, of the weight's dtype.
    weight: Weight, [*in, *out].
    contracted: Number of axes in `in`.
    bias: Bias, [*out], or None.
    wide: Whether y is float32; else it is of x's dtype.
  """
  n, lead = contracted, x.ndim - contracted
  # For a single column XLA's CPU compiler makes a product with a vector, whose
  # sums for a row depend on its place among the others.
  single_column = weight.shape[n:] == (1,)
  if single_column:
    weight = jnp.pad(weight, [(0, 0)] * n + [(0, 1)])

  def dot(x: jax.Array) -> jax.Array:
    return lax.dot_general(
      x,
      weight,
      ((tuple(range(lead, x.ndim)), tuple(range(n))), ((), ())),
      preferred_element_type=jnp.float32 if wide else x.dtype,
    )

  y = _rows(dot, x, n)
  y = y[..., :1] if single_column else y
  return y if bias is None else y + bias[(None,) * lead].astype(y.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPositions:
  """A learned vector for each position, which is added to the token's.

  Attributes:
    count: Number of positions.
    offset: Number of rows of the table before that of position 0.
  """

  count: int
  offset: int = 0


class PositionTable(nnx.Module):
  """The module of `LearnedPositions`: each token takes its position's row.

  So it is the same however the tokens are sharded. Positions after the last
  one, which only padding has, take the last row.
  """

  def __init__(self, rngs: nnx.Rngs, spec: LearnedPositions, embed: int):
    self.offset = spec.offset
    rows = spec.count + spec.offset
    self.weight = param(rngs, (rows, embed), (None, "embed"), fan_in=embed)

  def __call__(self, pos: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return jnp.take(self.weight[...], pos + self.offset, axis=0, mode="clip")


class Embedding(nnx.Module):
  """One vector for each token id; transposed it is the tied head.

  Args:
    rngs: Random keys of the weights.
    vocab: V, size of the vocabulary.
    embed: D, width of the vectors.
    scale: Factor on the vectors.
    norm: Norm after that, or None.
    positions: Learned positions that are added, or None.
  """

  def __init__(
    self,
    rngs: nnx.Rngs,
    vocab: int,
    embed: int,
    *,
    scale: float = 1.0,
    norm: Norm | None = None,
    positions: LearnedPositions | None = None,
  ):
    self.scale = scale
    self.weight = param(rngs, (vocab, embed), ("vocab", "embed"), fan_in=embed)
    self.norm = Identity() if norm is None else norm.build(rngs, embed)
    self.positions = (
      None if positions is None else PositionTable(rngs, positions, embed)
    )

  def __call__(
    self,
    tokens: Int[Array, "*batch"],
    pos: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "*batch D"]:
    """Input of the first layer, see `stream_dtype`.

    `pos` is required for learned positions.
    """
    x = jnp.take(self.weight[...], tokens, axis=0, mode="clip")
    x = x.astype(stream_dtype(x.dtype))
    if self.scale != 1.0:
      x = x * jnp.asarray(self.scale, x.dtype)
    if self.positions is not None:
      assert pos is not None
      x = x + self.positions(pos).astype(x.dtype)
    return self.norm(x)

  def logits(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """The logits of hidden states, float32."""
    return _logits(h, self.weight[...], 1)


class Head(nnx.Module):
  """Logits by a separate weight, [D, V]."""

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
  """dot(x), where the last axes of x are contracted and the others are rows."""
  last = x.ndim - contracted - 1
  single_row = last >= 0 and math.prod(x.shape[: last + 1]) == 1
  if not single_row or x.dtype.itemsize >= 4:
    return dot(x)

  def two_rows(x: jax.Array) -> jax.Array:
    pad = [(0, int(i == last)) for i in range(x.ndim)]
    return lax.slice_in_dim(dot(jnp.pad(x, pad)), 0, 1, axis=last)

  # For a single row XLA's CPU compiler widens a narrow weight, which takes
  # up to ten times as long as the product of two rows, one of them zeros.
  return lax.platform_dependent(x, cpu=two_rows, default=dot)


class Identity(nnx.Module):
  """Returns its input unchanged."""

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
    scaled_input: bool = False,
  ):
    self.eps, self.offset, self.scaled_input = eps, offset, scaled_input
    self.over = 1 if shape is None else len(shape)
    self.weight = (
      None if shape is None else param(rngs, shape, axes, value=1 - offset)
    )

  def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    weight = None if self.weight is None else self.weight[...]
    if self.scaled_input and weight is not None:
      return scaled_rms_norm(x, weight, self.eps, offset=self.offset)
    return rms_norm(x, weight, self.eps, axes=self.over, offset=self.offset)


class LayerNorm(nnx.Module):
  """Layer norm over the last axis; `shape` None has neither weight nor bias."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    shape: tuple[int, ...] | None,
    axes: tuple[str | None, ...],
    *,
    eps: float,
    bias: bool,
    offset: float = 0.0,
  ):
    self.eps, self.offset = eps, offset
    no_weight = shape is None
    self.weight = (
      None if no_weight else param(rngs, shape, axes, value=1 - offset)
    )
    self.bias = None if no_weight or not bias else param(rngs, shape, axes)

  def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    get = lambda p: None if p is None else p[...]
    weight, bias = get(self.weight), get(self.bias)
    # Without a weight there is no offset to add.
    offset = 0.0 if weight is None else self.offset
    return layer_norm(x, weight, bias, self.eps, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
  """Kind of norm that a model uses.

  Attributes:
    eps: Epsilon that is added to the variance.
    offset: 1 if the stored weight is the distance from one.
    layer: Whether it is a LayerNorm instead of an RMSNorm.
    bias: Whether a LayerNorm has a bias.
    weight: Whether it has a weight; without one it has no bias either.
    scaled_input: Whether an RMSNorm's weight multiplies its input, not its
      output.
  """

  eps: float
  offset: float = 0.0
  layer: bool = False
  bias: bool = True
  weight: bool = True
  scaled_input: bool = False

  def build(
    self, rngs: nnx.Rngs, *dims: int, together: bool = False
  ) -> LayerNorm | RMSNorm | Identity:
    """Make the module that normalises vectors.

    Args:
      rngs: Random keys of the weights.
      *dims: Shape of the weight, whose last axis is normalised.
      together: Whether all of its axes are one vector (RMSNorm).
    """
    shape = dims if self.weight else None
    axes = (None,) * len(dims)
    if self.layer:
      return LayerNorm(
        rngs, shape, axes, eps=self.eps, bias=self.bias, offset=self.offset
      )
    assert together or len(dims) == 1 or shape is None
    return RMSNorm(
      rngs,
      shape,
      axes,
      eps=self.eps,
      offset=self.offset,
      scaled_input=self.scaled_input,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNorm(Norm):
  """No norm: vectors stay as they are, without a parameter."""

  eps: float = 1.0

  def build(
    self, rngs: nnx.Rngs, *dims: int, together: bool = False
  ) -> Identity:
    del rngs, dims, together
    return Identity()
