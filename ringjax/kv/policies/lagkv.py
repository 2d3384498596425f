"""Tokens that stand out from those that follow them.

Ref: Liang et al. 2025, LagKV, arXiv 2504.04704.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import boolean, integer
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
  """Tokens whose keys and values vary the most by the next part's range.

  The tokens behind the first `sinks` are cut into parts of `lag`. Of a token
  each number of its key is scaled by the least and the largest that the next
  part has in that place; the standard deviation of these, by a softmax over
  the token's part, is its score, the mean of that of its key and of its value.
  No query is looked at. The first tokens stay, and so do the last whole part
  and what is behind it. A head that holds fewer tokens than two parts keeps
  the newest.

  Attributes:
    sinks: how many of the first tokens stay; they count in the budget.
    lag: tokens of a part.
    across: whether scores are compared over all parts; else each part is
      ranked for itself, so that all lose as many tokens.
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
    many = jnp.sum(look.real, 2, dtype=jnp.int32, keepdims=True) - self.sinks
    whole = jnp.maximum(many, 0) // self.lag
    part = jnp.where(rank < 0, -1, rank // self.lag)
    part = jnp.where(part < whole, part, -1)

    def by_part(x: jax.Array) -> Float[Array, "B K P l"]:
      over = self.sinks + count * self.lag - shape[2]
      x = jnp.pad(x, ((0, 0), (0, 0), (0, max(0, over))))
      x = x[..., self.sinks : self.sinks + count * self.lag]
      return x.reshape(*shape[:2], count, self.lag)

    def mass(f) -> Float[Array, "B K P l"]:
      low, high = look.extremes(f, part, count)
      # Of the next part; where there is none, the score does not count.
      low, high = (jnp.roll(x, -1, 2) for x in (low, high))
      wide = high - low
      wide = jnp.where((wide > 0) & jnp.isfinite(wide), wide, 1.0)
      low = jnp.where(jnp.isfinite(low), low, 0.0)

      def spread(k, v, which):
        of = lambda x: jnp.take_along_axis(
          x, jnp.maximum(which, 0)[..., None], 2
        )
        return jnp.std((f(k, v) - of(low)) / of(wide), -1, ddof=1)

      return jax.nn.softmax(by_part(look.by_token(spread, part)), -1)

    found = (mass(lambda k, v: k) + mass(lambda k, v: v)) / 2
    if not self.across:
      order = jnp.argsort(jnp.argsort(found, -1), -1)
      found = order.astype(jnp.float32) / self.lag
    found = found.reshape(*shape[:2], count * self.lag)
    found = jnp.pad(found, ((0, 0), (0, 0), (self.sinks, 0)))[..., : shape[2]]
    found = jnp.where((part >= 0) & (part < whole - 1), found, 1.0)
    newest = rank.astype(jnp.float32) / jnp.maximum(many, 1).astype(jnp.float32)
    newest = jnp.where(rank < 0, 1.0, newest)
    return jnp.where(whole < 2, newest, found)
