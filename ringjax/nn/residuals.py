"""Residuals: sums of a layer's stream and a part's output.

Guarantees: each acts on each token alone, so it is the same however tokens are
sharded.

A residual is a frozen dataclass with `of_norm`, whether the stream that it adds
to is the normed input of the part, and `build(rngs, embed)`, which returns a
module: its `begin` gives a part's input, and what it keeps of the stream; a
call of these and of the part's output gives the stream after the part.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ringjax.nn.linear import Linear, RMSNorm
from ringjax.nn.param import param
from ringjax.ops.norm import rms_norm
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledResidual:
  """keep x + add y, of a stream x and a part's output y.

  Attributes:
    keep: Factor of the stream.
    add: Factor of the output.
    of_norm: Whether the stream is the normed input of the part, as in
      MiniMax-01.
  """

  keep: float = 1.0
  add: float = 1.0
  of_norm: bool = False

  def build(self, rngs: nnx.Rngs, embed: int) -> ScaledResidual:
    """Return itself, as it has no parameters."""
    del rngs, embed
    return self

  def begin(
    self, x: Float[Array, "B T D"]
  ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Input of the part, and the stream."""
    return x, x

  def __call__(
    self, x: Float[Array, "B T D"], y: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Add a part's output y to the stream x."""
    return _times(x, self.keep) + _times(y, self.add)


def _times(x: Float[Array, "B T D"], factor: float) -> Float[Array, "B T D"]:
  """x times a factor, in x's dtype."""
  return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedResidual:
  """A learned sum of a part's input and output: alpha x + beta y, elementwise.

  beta = sigmoid(gate / temperature), and alpha^2 = 1 - beta^2, or `floor` if
  that is larger.

  Attributes:
    temperature: Divisor of the gate.
    floor: Smallest square of alpha.
  """

  temperature: float
  floor: float = 1e-3
  of_norm: ClassVar[bool] = False

  def build(self, rngs: nnx.Rngs, embed: int) -> GatedResidualLayer:
    return GatedResidualLayer(rngs, self, embed)


class GatedResidualLayer(nnx.Module):
  """The module of `GatedResidual`."""

  def __init__(self, rngs: nnx.Rngs, spec: GatedResidual, embed: int):
    self.spec = spec
    self.gate = param(rngs, (embed,), (None,), value=0.0, wide=True)

  def begin(
    self, x: Float[Array, "B T D"]
  ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Input of the part, and the stream."""
    return x, x

  def __call__(
    self, x: Float[Array, "B T D"], y: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Add a part's output y to its input x."""
    gate = self.gate[...].astype(jnp.float32) / self.spec.temperature
    beta = jax.nn.sigmoid(gate)
    square = jax.nn.sigmoid(-gate) * (1 + beta)
    alpha = jnp.sqrt(jnp.maximum(square, jnp.float32(self.spec.floor)))
    alpha, beta = alpha[None, None], beta[None, None]
    total = alpha * x.astype(jnp.float32) + beta * y.astype(jnp.float32)
    return total.astype(x.dtype)


class StreamState(NamedTuple):
  """Streams during a part, and how its output is added to them.

  Fields:
    streams: Streams before the part, [B, T, A, D].
    weights: Weight of the output in each stream, [B, T, A].
    mixing: Weight of each stream before the part in each after it, float32
      [B, T, A, A]: rows are streams before it. None: streams are not mixed.
  """

  streams: Float[Array, "B T A D"]
  weights: Float[Array, "B T A"]
  mixing: Float[Array, "B T A A"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnection:
  """Manifold-constrained hyper-connections of A streams.

  A part reads a weighted sum of the streams. Each stream after it is a sum of
  the streams before it and of the output. All weights are computed from the
  token's normed streams; those of streams in streams are made doubly stochastic
  by iterations of Sinkhorn and Knopp.

  Ref: Xie et al. 2026, mHC; as in DeepSeek-V4, section 2.2.

  Attributes:
    count: Number of streams, A.
    iterations: Number of normalisations of the columns.
    floor: Number that is added to weights and sums.
    eps: Epsilon of the norm.
  """

  count: int
  iterations: int
  floor: float
  eps: float
  of_norm: ClassVar[bool] = False

  def build(self, rngs: nnx.Rngs, embed: int) -> HyperConnectionLayer:
    return HyperConnectionLayer(rngs, self, embed)


class HyperConnectionLayer(nnx.Module):
  """The module of `HyperConnection`."""

  def __init__(self, rngs: nnx.Rngs, spec: HyperConnection, embed: int):
    self.spec = spec
    a = spec.count
    size = (2 + a) * a
    self.map = param(
      rngs, (size, a * embed), (None, None), fan_in=a * embed, wide=True
    )
    self.base = param(rngs, (size,), (None,), wide=True)
    self.scale = param(rngs, (3,), (None,), value=1.0, wide=True)

  def begin(
    self, x: Float[Array, "B T A D"]
  ) -> tuple[Float[Array, "B T D"], StreamState]:
    """Input of the part, and the streams with the weights of its output."""
    spec = self.spec
    a, floor = spec.count, spec.floor
    input_weights, output_weights, mixing = _scaled_sections(
      stream_weights(x, self.map[...], spec.eps),
      self.scale[...],
      self.base[...],
      (a, 2 * a),
    )
    input_weights = jax.nn.sigmoid(input_weights) + floor
    output_weights = 2 * jax.nn.sigmoid(output_weights)
    mixing = mixing.reshape(*mixing.shape[:2], a, a)
    mixing = jax.nn.softmax(mixing, -1) + floor
    by_columns = lambda m: m / (jnp.sum(m, -2, keepdims=True) + floor)
    by_rows = lambda m: m / (jnp.sum(m, -1, keepdims=True) + floor)
    mixing = lax.fori_loop(
      1,
      spec.iterations,
      lambda _, m: by_columns(by_rows(m)),
      by_columns(mixing),
    )
    return sum_of_streams(x, input_weights), StreamState(
      x, output_weights, mixing
    )

  def __call__(
    self, state: StreamState, y: Float[Array, "B T D"]
  ) -> Float[Array, "B T A D"]:
    """Streams after a part with output y."""
    x = state.streams
    assert state.mixing is not None
    # Products with A streams are no work for a matrix unit.
    mixing, weights = (
      state.mixing.astype(x.dtype),
      state.weights.astype(x.dtype),
    )
    mixed = jnp.sum(mixing[..., None] * x[:, :, :, None], 2)
    return weights[..., None] * y[:, :, None] + mixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndependentConnection:
  """Hyper-connections of A streams that are not mixed with each other.

  A part reads a weighted sum of the streams, and its output is added to each
  of them by a weight. All weights are computed from the token's normed streams.

  Ref: Tencent 2026, Hunyuan 4.

  Attributes:
    count: Number of streams, A.
    magnitude: Largest weight of an output, without `floor`.
    floor: Number that is added to weights.
    eps: Epsilon of the norm.
  """

  count: int
  magnitude: float
  floor: float
  eps: float
  of_norm: ClassVar[bool] = False

  def build(self, rngs: nnx.Rngs, embed: int) -> IndependentConnectionLayer:
    return IndependentConnectionLayer(rngs, self, embed)


class IndependentConnectionLayer(nnx.Module):
  """The module of `IndependentConnection`."""

  def __init__(self, rngs: nnx.Rngs, spec: IndependentConnection, embed: int):
    self.spec = spec
    size, fan_in = 2 * spec.count, spec.count * embed
    self.map = param(
      rngs, (size, fan_in), (None, None), fan_in=fan_in, wide=True
    )
    self.base = param(rngs, (size,), (None,), wide=True)
    self.scale = param(rngs, (2,), (None,), value=1.0, wide=True)

  def begin(
    self, x: Float[Array, "B T A D"]
  ) -> tuple[Float[Array, "B T D"], StreamState]:
    """Input of the part, and the streams with the weights of its output."""
    spec = self.spec
    input_weights, output_weights = _scaled_sections(
      stream_weights(x, self.map[...], spec.eps),
      self.scale[...],
      self.base[...],
      (spec.count,),
    )
    input_weights = jax.nn.sigmoid(input_weights) + spec.floor
    output_weights = jax.nn.sigmoid(output_weights) * spec.magnitude
    return sum_of_streams(x, input_weights), StreamState(
      x, output_weights + spec.floor, None
    )

  def __call__(
    self, state: StreamState, y: Float[Array, "B T D"]
  ) -> Float[Array, "B T A D"]:
    """Streams after a part with output y."""
    return _with_output(state, y)


class StreamNorm(RMSNorm):
  """RMSNorm of each of several streams, with a weight for each of them."""

  def __init__(self, rngs: nnx.Rngs, count: int, embed: int, *, eps: float):
    super().__init__(rngs, (count, embed), (None, None), eps=eps, offset=1.0)

  def __call__(self, x: Float[Array, "*b A D"]) -> Float[Array, "*b A D"]:
    float_dtype = wide_dtype(x.dtype)
    assert self.weight is not None
    scale = self.weight[...].astype(float_dtype)
    scale = scale + jnp.asarray(self.offset, float_dtype)
    normed = rms_norm(x.astype(float_dtype), None, self.eps)
    return (normed * scale[(None,) * (x.ndim - 2)]).astype(x.dtype)


class StreamMean(nnx.Module):
  """Mean of normed streams, each number of which has a gate.

  Gates are sigmoids of a map of low rank of all normed streams.

  Args:
    rngs: Random keys of the weights.
    count: Number of streams, A.
    rank: Rank of the map.
    embed: Numbers of a stream, D.
    eps: Epsilon of the norm.
  """

  def __init__(
    self, rngs: nnx.Rngs, count: int, rank: int, embed: int, *, eps: float
  ):
    self.norm = StreamNorm(rngs, count, embed, eps=eps)
    self.down = Linear(rngs, (count, embed), (rank,), (None, "embed", None))
    self.up = Linear(rngs, (rank,), (count, embed), (None, None, "embed"))

  def mean(self, normed: Float[Array, "*b A D"]) -> Float[Array, "*b D"]:
    """Mean of streams that are normed, by their gates."""
    float_dtype = wide_dtype(normed.dtype)
    inner = self.down(normed) / jnp.asarray(normed.shape[-2], normed.dtype)
    gates = jax.nn.sigmoid(self.up(jax.nn.silu(inner)).astype(float_dtype))
    mean = jnp.mean(gates * normed.astype(float_dtype), -2)
    return mean.astype(normed.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConnection:
  """Hyper-connections of A streams whose input has a gate for each number.

  A part reads a mean of the normed streams, see `StreamMean`, and its output is
  added to each of them by a weight. Streams are not mixed with each other.

  Ref: Qwen Team 2026, Qwen4-Exp.

  Attributes:
    count: Number of streams, A.
    rank: Rank of the map from the streams to the gates.
    eps: Epsilon of the norm.
  """

  count: int
  rank: int
  eps: float
  of_norm: ClassVar[bool] = False

  def build(self, rngs: nnx.Rngs, embed: int) -> LowRankConnectionLayer:
    return LowRankConnectionLayer(rngs, self, embed)


class LowRankConnectionLayer(StreamMean):
  """The module of `LowRankConnection`."""

  def __init__(self, rngs: nnx.Rngs, spec: LowRankConnection, embed: int):
    super().__init__(rngs, spec.count, spec.rank, embed, eps=spec.eps)
    self.weights = Linear(
      rngs, (spec.count, embed), (spec.count,), (None, "embed", None)
    )

  def begin(
    self, x: Float[Array, "B T A D"]
  ) -> tuple[Float[Array, "B T D"], StreamState]:
    """Input of the part, and the streams with the weights of its output."""
    normed = self.norm(x)
    weights = self.weights(normed).astype(wide_dtype(x.dtype))
    count = jnp.asarray(x.shape[2], weights.dtype)
    weights = 2 * jax.nn.sigmoid(weights / count)
    return self.mean(normed), StreamState(x, weights, None)

  def __call__(
    self, state: StreamState, y: Float[Array, "B T D"]
  ) -> Float[Array, "B T A D"]:
    """Streams after a part with output y."""
    return _with_output(state, y)


def _with_output(
  state: StreamState, y: Float[Array, "B T D"]
) -> Float[Array, "B T A D"]:
  """Streams that are not mixed, after a part with output y."""
  x, weights = state.streams, state.weights
  terms = weights[..., None] * y[:, :, None].astype(weights.dtype)
  return (terms + x.astype(weights.dtype)).astype(x.dtype)


def _scaled_sections(
  weights: Float[Array, "B T m"],
  scales: Float[Array, " n"],
  base: Float[Array, " m"],
  ends: tuple[int, ...],
) -> list[Float[Array, "B T _"]]:
  """Sections of a token's weights, each times its scale, and with a base.

  Args:
    weights: Weights of a token.
    scales: Scale of each section.
    base: Numbers that are added to the scaled weights.
    ends: Ends of all sections but the last.
  """
  sections = jnp.split(weights, ends, -1)
  bases = jnp.split(base.astype(weights.dtype), ends)
  scales = scales.astype(weights.dtype)
  return [
    section * scales[n] + bases[n][None, None]
    for n, section in enumerate(sections)
  ]


def stream_weights(
  x: Float[Array, "*b A D"], weight: Float[Array, "m X"], eps: float
) -> Float[Array, "*b m"]:
  """Maps of a token's streams, normed together: float32 or wider."""
  float_dtype = wide_dtype(x.dtype)
  flat = x.reshape(*x.shape[:-2], -1).astype(float_dtype)
  return jnp.einsum(
    "...d,md->...m",
    rms_norm(flat, None, eps),
    weight.astype(float_dtype),
    preferred_element_type=float_dtype,
  )


def sum_of_streams(
  x: Float[Array, "*b A D"], weights: Float[Array, "*b A"]
) -> Float[Array, "*b D"]:
  """Weighted sum of streams, in their dtype."""
  terms = weights[..., None] * x.astype(weights.dtype)
  return jnp.sum(terms, -2).astype(x.dtype)


Residual = (
  ScaledResidual
  | GatedResidual
  | HyperConnection
  | IndependentConnection
  | LowRankConnection
)
