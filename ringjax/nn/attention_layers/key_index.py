"""Index of a layer whose queries read only the keys with the best scores.

Guarantees: the scores of DeepSeek-V3.2's lightning indexer without its two
optimisations for speed, a Hadamard rotation of both sides and 8-bit numbers,
which change products only by rounding.
Cost: a map of the queries' latent to I heads of E numbers, and one key of E
numbers per token, which is stored after the layer's own key.
Training: no gradient flows through a choice, nor from an index to the layer's
input: the index learns from `rj.index_loss`, see `choice_sums`.
Ref:  DeepSeek-AI 2025, DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ringjax.nn.attention_layers.attention import LearnedTemperature
from ringjax.nn.linear import Identity, LayerNorm, Linear
from ringjax.nn.tokens import Tokens
from ringjax.ops.rope import Rope
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyIndex:
  """An index of keys.

  Attributes:
    heads: Number of its query heads, I; they share the keys.
    dim: Size of a key, E.
    count: Maximum number of keys that a query reads.
    eps: Epsilon of the norm of the keys.
    interleaved: Whether neighbouring dims are a pair, not those of halves.
    rotated_last: Whether the last dims of the index are rotated, not the first.
    shared: Whether layers hand on queries, weights and keys of the index, see
      `shared_index`.
    reads: Whether the layer has no index, but reads what the last layer before
      it with an index handed on.
    normed: Whether its queries are of the layer's normed input (LayerNorm).
    temperature: Scaling of its queries by position, or None.
  """

  heads: int
  dim: int
  count: int
  eps: float = 1e-6
  interleaved: bool = False
  rotated_last: bool = False
  shared: bool = False
  reads: bool = False
  normed: bool = False
  temperature: LearnedTemperature | None = None

  @property
  def handed(self) -> int:
    """Number of numbers per token that layers hand on."""
    return self.heads * (self.dim + 1) + self.dim

  def exchange(
    self, parts: tuple[Array, ...], tokens: Tokens, dtype: DTypeLike
  ) -> tuple[Array, ...]:
    """Queries, weights and keys of the layer's choice.

    Args:
      parts: Queries, weights and keys that the layer's index computed; empty
        for a layer without an index.
      tokens: Tokens of the layer, which get what it hands on.
      dtype: Dtype of queries and keys.
    """
    if not self.shared:
      return parts
    handed = tokens.handed
    assert handed is not None
    if not self.reads:
      queries, weights, keys = parts
      flat = queries.reshape(*queries.shape[:2], -1), weights, keys
      handed = jnp.concatenate([x.astype(handed.dtype) for x in flat], -1)
      tokens.handed = handed
    ends = self.heads * self.dim, self.heads * (self.dim + 1)
    queries, weights, keys = jnp.split(handed, ends, -1)
    queries = queries.reshape(*queries.shape[:2], self.heads, self.dim)
    weights = weights.astype(wide_dtype(dtype))
    return queries.astype(dtype), weights, keys.astype(dtype)

  def build(
    self, rngs: nnx.Rngs, embed: int, query: int, rope: Rope | None
  ) -> KeyIndexLayer:
    """Make the module, whose queries are computed from `query` numbers.

    `rope` rotates the layer's keys. The first dims of the index, or the last
    ones, are rotated by the same angles, in the pairs that `interleaved` says.
    """
    return KeyIndexLayer(rngs, self, embed, query, rope)


class KeyIndexLayer(nnx.Module):
  """The module of `KeyIndex`."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    spec: KeyIndex,
    embed: int,
    query: int,
    rope: Rope | None,
  ):
    self.spec = spec
    rotated = 0 if rope is None else rope.dims
    mixes = rope is not None and rope.interleaved and not spec.interleaved
    self._mixed = rotated if mixes else 0
    self._moved = rotated if spec.rotated_last else 0
    norm = lambda size: LayerNorm(
      rngs, (size,), (None,), eps=spec.eps, bias=True
    )
    self.q_norm = norm(query) if spec.normed else Identity()
    self.q = Linear(rngs, (query,), (spec.heads, spec.dim), (None, None, None))
    self.k = Linear(rngs, (embed,), (spec.dim,), ("embed", None))
    self.k_norm = norm(spec.dim)
    self.weights = Linear(
      rngs, (embed,), (spec.heads,), ("embed", None), wide=True
    )
    temperature = spec.temperature
    self.temperature = (
      None if temperature is None else temperature.build(rngs, spec.heads, None)
    )

  def queries(
    self, x: Float[Array, "B T D"], latent: Float[Array, "B T Q"]
  ) -> tuple[Float[Array, "B T I E"], Float[Array, "B T I"]]:
    """Queries before their rotation, and the weights of their scores."""
    spec = self.spec
    x, latent = lax.stop_gradient((x, latent))
    weights = self.weights(x.astype(jnp.float32)).astype(wide_dtype(x.dtype))
    scale = (spec.heads * spec.dim) ** -0.5
    q = self._paired(self.q(self.q_norm(latent)))
    return q, weights * jnp.asarray(scale, weights.dtype)

  def scaled(
    self, q: Float[Array, "B T I E"], pos: Int[Array, "#B T"]
  ) -> Float[Array, "B T I E"]:
    """Queries times factors of their positions, if the index has any."""
    return q if self.temperature is None else self.temperature(q, pos)

  def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
    """Keys before their rotation."""
    return self._paired(self.k_norm(self.k(lax.stop_gradient(x))))

  def _paired(self, x: jax.Array) -> jax.Array:
    """Put the rotated dims first, and interleave their two halves.

    So one rotation serves these and the layer's own keys; products of queries
    and keys are the same in any order.
    """
    if self._moved:
      x = jnp.roll(x, self._moved, -1)
    if not self._mixed:
      return x
    halves = jnp.split(x[..., : self._mixed], 2, -1)
    turned = jnp.stack(halves, -1).reshape(*x.shape[:-1], self._mixed)
    return jnp.concatenate([turned, x[..., self._mixed :]], -1)
