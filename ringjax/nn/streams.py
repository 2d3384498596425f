"""Several residual streams, of which a layer computes one (AltUp).

Guarantees: before a layer all streams are predicted, each as a sum of all; one
of them goes through the layer, and what came out corrects them all. Tokens are
alone in it, so it is the same however they are sharded.
Cost: a stream more is D numbers a token, and no wider layer.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
  """How many residual streams, and which one a layer computes.

  Attributes:
    count: A.
    active: the one that goes through a layer.
    scaled: whether it is scaled, by learned numbers, where a layer's input is
      gated by it.
    norm: of what decides how streams are mixed.
  """

  count: int
  active: int
  scaled: bool
  norm: Norm

  def build(self, rngs: nnx.Rngs, embed: int) -> StreamEnds:
    return StreamEnds(rngs, self, embed)

  def mixer(self, rngs: nnx.Rngs, embed: int) -> StreamMixer:
    """How one layer mixes them."""
    return StreamMixer(rngs, self, embed)


class StreamEnds(nnx.Module):
  """The module of `Streams`: where they begin and where they end."""

  def __init__(self, rngs: nnx.Rngs, spec: Streams, embed: int):
    self.spec = spec
    square = lambda: param(
      rngs, (spec.count - 1, embed, embed), (None, None, None), fan_in=embed
    )
    self.begin, self.end = square(), square()

  def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A D"]:
    """The embeddings and maps of them, all of one size."""
    mapped = jnp.einsum(
      "btd,ade->btae",
      x,
      self.begin[...].astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    return jnp.concatenate([x[:, :, None], _sized(mapped, x)], 2)

  def merged(self, x: Float[Array, "*b A D"]) -> Float[Array, "*b D"]:
    """The mean of the first stream and of maps of the others."""
    first = x[..., 0, :]
    mapped = jnp.einsum(
      "...ad,ade->...ae",
      x[..., 1:, :],
      self.end[...].astype(x.dtype),
      preferred_element_type=x.dtype,
    )
    every = jnp.concatenate([first[..., None, :], _sized(mapped, first)], -2)
    return jnp.mean(every, -2)


def _sized(
  x: Float[Array, "*b A D"], like: Float[Array, "*b D"]
) -> Float[Array, "*b A D"]:
  """Vectors with the root mean square of another one."""
  square = lambda y: jnp.mean(
    jnp.square(y.astype(jnp.float32)), -1, keepdims=True
  )
  want = jnp.sqrt(square(like))[..., None, :]
  have = jnp.sqrt(jnp.maximum(square(x), jnp.float32(1e-5)))
  return (x.astype(jnp.float32) * want / have).astype(x.dtype)


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
    """What decides how streams are mixed."""
    small = jnp.asarray(1 / x.shape[-1], x.dtype)
    return jnp.tanh(self.router(self.norm(x) * small))

  def predict(self, x: Float[Array, "B T A D"]) -> Float[Array, "B T A D"]:
    """The streams before a layer."""
    coefs = self.prediction(self._modes(x[:, :, self.spec.active]))
    return x + jnp.einsum(
      "btlk,btkd->btld", coefs, x, preferred_element_type=x.dtype
    )

  def correct(
    self, x: Float[Array, "B T A D"], made: Float[Array, "B T D"]
  ) -> Float[Array, "B T A D"]:
    """The streams behind a layer.

    Args:
      x: as `predict` has made them.
      made: of the active one by the layer.
    """
    new = made - x[:, :, self.spec.active]
    coefs = self.correction(self._modes(made)) + jnp.ones((), made.dtype)
    return x + coefs[..., None] * new[:, :, None]

  def active(self, x: Float[Array, "B T A D"]) -> jax.Array:
    """What gates a layer's input, [B, T, D]."""
    found = x[:, :, self.spec.active]
    if not self.spec.scaled:
      return found
    return found * self.scale[...].astype(x.dtype)[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
  """A residual of low rank beside attention: x + norm(right(left(x))).

  Ref: Menghani et al. 2024, LAUREL: Learned Augmented Residual Layer, arXiv
  2411.07501.

  Attributes:
    rank: of the map.
    norm: behind it.
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
