"""Several residual streams, of which a layer computes one (AltUp).

Guarantees: before a layer all streams are predicted, each as a weighted sum of
all; one of them goes through the layer, and its output corrects them all. It
acts on each token alone, so it is the same however tokens are sharded.
Cost: another stream is D numbers per token, without wider layers.
Ref:  Baykal et al. 2023, Alternating Updates for Efficient Transformers, arXiv
2301.13310.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.nn.linear import Linear, Norm
from ringjax.nn.param import param
from ringjax.nn.residuals import StreamMean, stream_weights, sum_of_streams
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
  """Number of residual streams, and the stream that a layer computes.

  Attributes:
    count: Number of streams, A.
    active: Index of the stream that goes through a layer.
    scaled: Whether it is scaled, by learned numbers, where it gates a layer's
      input.
    norm: Norm of the router's input.
  """

  count: int
  active: int
  scaled: bool
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int) -> StreamEnds:
    return StreamEnds(rngs, self, embed)

  def numbers(self, embed: int) -> int:
    """Numbers of a token between layers."""
    return self.count * embed

  def mixer(self, rngs: nnx.Rngs, embed: int) -> StreamMixer:
    """Make one layer's mixer of the streams."""
    return StreamMixer(rngs, self, embed)


class StreamEnds(nnx.Module):
  """The module of `Streams`: expands to streams and merges them."""

  def __init__(self, rngs: nnx.Rngs, spec: Streams, embed: int):
    self.spec = spec
    square = lambda: param(
      rngs, (spec.count - 1, embed, embed), (None, None, None), fan_in=embed
    )
    self.begin, self.end = square(), square()

  def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A D"]:
    """Expand embeddings to streams by maps, all of one size."""
    mapped = jnp.einsum(
      "btd,ade->btae",
      x,
      self.begin[...].astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    return jnp.concatenate([x[:, :, None], _with_rms_of(mapped, x)], 2)

  def merged(self, x: Float[Array, "*b A D"]) -> Float[Array, "*b D"]:
    """Mean of the first stream and of maps of the others."""
    first = x[..., 0, :]
    mapped = jnp.einsum(
      "...ad,ade->...ae",
      x[..., 1:, :],
      self.end[...].astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    all_streams = jnp.concatenate(
      [first[..., None, :], _with_rms_of(mapped, first)], -2
    )
    return jnp.mean(all_streams, -2)


def _with_rms_of(
  x: Float[Array, "*b A D"], like: Float[Array, "*b D"]
) -> Float[Array, "*b A D"]:
  """Scale vectors to the root mean square of another one."""
  square = lambda y: jnp.mean(
    jnp.square(y.astype(jnp.float32)), -1, keepdims=True
  )
  target_rms = jnp.sqrt(square(like))[..., None, :]
  rms = jnp.sqrt(jnp.maximum(square(x), jnp.float32(1e-5)))
  return (x.astype(jnp.float32) * target_rms / rms).astype(x.dtype)


class StreamMixer(nnx.Module):
  """One layer's predictions and corrections of the streams."""

  def __init__(self, rngs: nnx.Rngs, spec: Streams, embed: int):
    self.spec = spec
    a = spec.count
    self.router = Linear(rngs, (embed,), (a,), ("embed", None))
    self.norm = spec.norm.build(rngs, embed)
    self.prediction = Linear(rngs, (a,), (a, a), (None, None, None))
    self.correction = Linear(rngs, (a,), (a,), (None, None))
    self.scale = param(rngs, (embed,), (None,), value=1.0)

  def _modes(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A"]:
    """Mixing coefficients of the streams."""
    small = jnp.asarray(1 / x.shape[-1], x.dtype)
    return jnp.tanh(self.router(self.norm(x) * small))

  def predict(self, x: Float[Array, "B T A D"]) -> Float[Array, "B T A D"]:
    """Predict the streams before a layer."""
    coefs = self.prediction(self._modes(x[:, :, self.spec.active]))
    return x + jnp.einsum(
      "btlk,btkd->btld", coefs, x, preferred_element_type=x.dtype
    )

  def correct(
    self, x: Float[Array, "B T A D"], made: Float[Array, "B T D"]
  ) -> Float[Array, "B T A D"]:
    """Correct the streams after a layer.

    Args:
      x: Streams as predicted by `predict`.
      made: Output of the layer for the active stream.
    """
    difference = made - x[:, :, self.spec.active]
    coefs = self.correction(self._modes(made)) + jnp.ones((), made.dtype)
    return x + coefs[..., None] * difference[:, :, None]

  def active(self, x: Float[Array, "B T A D"]) -> Float[Array, "B T D"]:
    """Gate of a layer's input, [B, T, D]."""
    active = x[:, :, self.spec.active]
    if not self.spec.scaled:
      return active
    return active * self.scale[...].astype(x.dtype)[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperStreams:
  """Begin and end of the streams of hyper-connections, see `residuals`.

  All streams begin as the embedding; a weighted sum of them is read at the end.

  Attributes:
    count: Number of streams, A.
    floor: Number that is added to the weights.
    eps: Epsilon of the norm.
  """

  count: int
  floor: float
  eps: float

  def numbers(self, embed: int) -> int:
    """Number of numbers of a token between layers."""
    return self.count * embed

  def build(self, rngs: nnx.Rngs, embed: int) -> HyperStreamEnds:
    return HyperStreamEnds(rngs, self, embed)


class HyperStreamEnds(nnx.Module):
  """The module of `HyperStreams`."""

  def __init__(self, rngs: nnx.Rngs, spec: HyperStreams, embed: int):
    self.spec = spec
    a = spec.count
    self.map = param(
      rngs, (a, a * embed), (None, None), fan_in=a * embed, wide=True
    )
    self.base = param(rngs, (a,), (None,), wide=True)
    self.scale = param(rngs, (1,), (None,), value=1.0, wide=True)

  def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A D"]:
    """Copy embeddings to all streams."""
    shape = (*x.shape[:2], self.spec.count, x.shape[2])
    return jnp.broadcast_to(x[:, :, None], shape)

  def merged(self, x: Float[Array, "*b A D"]) -> Float[Array, "*b D"]:
    """Weighted sum of the streams."""
    raw = stream_weights(x, self.map[...], self.spec.eps)
    scale, base = (
      y[...].astype(raw.dtype).reshape((1,) * (raw.ndim - 1) + (-1,))
      for y in (self.scale, self.base)
    )
    weights = jax.nn.sigmoid(raw * scale + base) + self.spec.floor
    return sum_of_streams(x, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanStreams:
  """Streams of hyper-connections, the mean of which is read at the end.

  All streams begin as the embedding.

  Attributes:
    count: Number of streams, A.
  """

  count: int

  def numbers(self, embed: int) -> int:
    """Number of numbers of a token between layers."""
    return self.count * embed

  def build(self, rngs: nnx.Rngs, embed: int) -> MeanStreamEnds:
    del rngs, embed
    return MeanStreamEnds(self)


class MeanStreamEnds(nnx.Module):
  """The module of `MeanStreams`, without parameters."""

  def __init__(self, spec: MeanStreams):
    self.spec = spec

  def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A D"]:
    """Copy embeddings to all streams."""
    shape = (*x.shape[:2], self.spec.count, x.shape[2])
    return jnp.broadcast_to(x[:, :, None], shape)

  def merged(self, x: Float[Array, "*b A D"]) -> Float[Array, "*b D"]:
    """Mean of the streams."""
    return jnp.mean(x.astype(wide_dtype(x.dtype)), -2).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMeanStreams:
  """Streams of hyper-connections, a gated mean of which is read at the end.

  All streams begin as the embedding; see `residuals.StreamMean` for the end.

  Attributes:
    count: Number of streams, A.
    rank: Rank of the map from the streams to the gates.
    eps: Epsilon of the norm.
  """

  count: int
  rank: int
  eps: float

  def numbers(self, embed: int) -> int:
    """Number of numbers of a token between layers."""
    return self.count * embed

  def build(self, rngs: nnx.Rngs, embed: int) -> GatedMeanStreamEnds:
    return GatedMeanStreamEnds(rngs, self, embed)


class GatedMeanStreamEnds(StreamMean):
  """The module of `GatedMeanStreams`."""

  def __init__(self, rngs: nnx.Rngs, spec: GatedMeanStreams, embed: int):
    super().__init__(rngs, spec.count, spec.rank, embed, eps=spec.eps)
    self.spec = spec

  def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A D"]:
    """Copy embeddings to all streams."""
    shape = (*x.shape[:2], self.spec.count, x.shape[2])
    return jnp.broadcast_to(x[:, :, None], shape)

  def merged(self, x: Float[Array, "*b A D"]) -> Float[Array, "*b D"]:
    """Mean of the normed streams, by gates of each number."""
    return self.mean(self.norm(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
  """A low-rank residual parallel to attention: x + norm(right(left(x))).

  Ref: Menghani et al. 2024, LAUREL: Learned Augmented Residual Layer, arXiv
  2411.07501.

  Attributes:
    rank: Rank of the map.
    norm: Norm after it.
  """

  rank: int
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int) -> LowRankLayer:
    return LowRankLayer(rngs, self, embed)


class LowRankLayer(nnx.Module):
  """The module of `LowRank`."""

  def __init__(self, rngs: nnx.Rngs, spec: LowRank, embed: int):
    self.left = Linear(rngs, (embed,), (spec.rank,), ("embed", None))
    self.right = Linear(rngs, (spec.rank,), (embed,), (None, "embed"))
    self.norm = spec.norm.build(rngs, embed)

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return x + self.norm(self.right(self.left(x)))
