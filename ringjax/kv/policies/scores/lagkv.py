"""LagKV: keep the tokens that stand out from those that follow them.

Ref: Liang et al. 2025, LagKV, arXiv 2504.04704.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import boolean, integer
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
  """Keeps tokens whose keys and values vary most, scaled by the next part.

  The tokens after the first `sinks` are cut into parts of `lag`. Each dim of a
  token's key is scaled by the minimum and maximum of that dim over the next
  part. The standard deviation over dims, after a softmax over the tokens of the
  part, is the score of the key; a token's score is the mean of the scores of
  its key and of its value. No query is used. The first tokens stay, and so do
  the last whole part and the tokens after it. A head that holds fewer tokens
  than two parts keeps the newest.

  Attributes:
    sinks: Number of first tokens that stay; they count in the budget.
    lag: Number of tokens of a part.
    across: Whether scores are compared over all parts. If not, each part is
      ranked separately, so that all parts lose the same number of tokens.
  """

  sinks: int = 4
  lag: int = 128
  across: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("sinks", self.sinks, least=0)
    integer("lag", self.lag, least=2)
    boolean("across", self.across)

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    shape = look.pos.shape
    count = -(-shape[2] // self.lag)
    rank = jnp.arange(shape[2], dtype=jnp.int32)[None, None] - self.sinks
    num_tokens = (
      jnp.sum(look.real, 2, dtype=jnp.int32, keepdims=True) - self.sinks
    )
    num_parts = jnp.maximum(num_tokens, 0) // self.lag
    part = jnp.where(rank < 0, -1, rank // self.lag)
    part = jnp.where(part < num_parts, part, -1)

    def by_part(x: jax.Array) -> Float[Array, "B K P l"]:
      padding = self.sinks + count * self.lag - shape[2]
      x = jnp.pad(x, ((0, 0), (0, 0), (0, max(0, padding))))
      x = x[..., self.sinks : self.sinks + count * self.lag]
      return x.reshape(*shape[:2], count, self.lag)

    def mass(f: Callable[[Array, Array], Array]) -> Float[Array, "B K P l"]:
      low, high = look.extremes(f, part, count)
      # Range of the next part; the scores of the last part are not used.
      low, high = (jnp.roll(x, -1, 2) for x in (low, high))
      width = high - low
      width = jnp.where((width > 0) & jnp.isfinite(width), width, 1.0)
      low = jnp.where(jnp.isfinite(low), low, 0.0)

      def spread(k: jax.Array, v: jax.Array, index: jax.Array) -> jax.Array:
        at_index = lambda x: jnp.take_along_axis(
          x, jnp.maximum(index, 0)[..., None], 2
        )
        return jnp.std((f(k, v) - at_index(low)) / at_index(width), -1, ddof=1)

      return jax.nn.softmax(by_part(look.by_token(spread, part)), -1)

    scores = (mass(lambda k, v: k) + mass(lambda k, v: v)) / 2
    if not self.across:
      order = jnp.argsort(jnp.argsort(scores, -1), -1)
      scores = order.astype(jnp.float32) / self.lag
    scores = scores.reshape(*shape[:2], count * self.lag)
    scores = jnp.pad(scores, ((0, 0), (0, 0), (self.sinks, 0)))[..., : shape[2]]
    scores = jnp.where((part >= 0) & (part < num_parts - 1), scores, 1.0)
    newest = rank.astype(jnp.float32) / jnp.maximum(num_tokens, 1).astype(
      jnp.float32
    )
    newest = jnp.where(rank < 0, 1.0, newest)
    return jnp.where(num_parts < 2, newest, scores)
