"""H2O: keep the tokens with the most attention from all queries.

Ref: Zhang et al. 2023, H2O, arXiv 2306.14048.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.errors import OptionError
from ringjax.kv.policies.policy import Look, Policy, floored_share, highest


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyHitters(Policy):
  """Keeps the tokens with the largest attention mass, summed over all queries.

  Masses are summed up from one eviction to the next. While a prompt is read,
  each layer adds its queries' masses at once. Queries of single tokens, and of
  a call with `rj.models.CachedAttention()`, which may be drafts, are recorded
  until the next eviction. `ExactConfig.recent` keeps the newest tokens. The
  paper's form is `score="sum", newest=0.5`, with an int `budget`.

  Attributes:
    score: "mean", a token's mass divided by the number of queries that could
      see it, or "sum", the mass itself as in the paper, which favours old
      tokens.
    newest: Part of the budget for the newest tokens of the row: a number of
      tokens, int, or a share of the budget from 0 to 1. The paper uses 0.5.
  """

  score: str = "mean"
  newest: int | float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    newest = self.newest
    share = isinstance(newest, float) and 0 <= newest <= 1
    is_count = isinstance(newest, int) and not isinstance(newest, bool)
    # 1 == 1.0 in Python, so that policies would share compiled programs.
    if not share and not (is_count and newest >= 2):
      raise OptionError(
        "newest",
        repr(newest),
        "an int of at least 2, or a float from 0 to 1",
        "pass newest=0.5 for half of the budget, newest=512 for so many tokens",
      )
    if self.score not in ("mean", "sum"):
      raise OptionError(
        "score", repr(self.score), "'mean' or 'sum'", "pass score='sum'"
      )

  @property
  def queries(self) -> int | None:
    return None

  sums: ClassVar[bool] = True

  @property
  def ranks(self) -> bool:
    inherits_kept = type(self).kept is HeavyHitters.kept
    return (super().ranks or inherits_kept) and not self.newest

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    if self.score == "sum":
      return look.sums()
    queries = jnp.maximum(look.length[:, None, None] - look.pos, 1)
    return look.sums() / queries.astype(jnp.float32)

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    if not self.newest:
      return super().kept(scores, counts)
    if isinstance(self.newest, float):
      newest = floored_share(counts, self.newest)
    else:
      newest = jnp.minimum(counts, self.newest)
    # Tokens are in order, and empty slots last.
    real = scores > -jnp.inf
    age = jnp.sum(real, -1, keepdims=True, dtype=jnp.int32)
    age = age - lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    is_newest = real & (age <= newest[:, :, None, None])
    return highest(jnp.where(is_newest, jnp.inf, scores), counts[:, :, None])
