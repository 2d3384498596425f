"""Tokens that all queries together looked at the most.

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
  """Tokens with the largest mass of attention of all queries.

  It is summed up from one eviction to the next: by layers while a prompt is
  read; queries of single tokens are kept until the next eviction, and so are
  those of a call of `rj.models.CachedAttention()`, which may be drafts.
  `CacheKind.recent` keeps the newest tokens as well. The paper's form is
  `score="sum", newest=0.5`, with an int `budget`.

  Attributes:
    score: "mean", a token's mass over the number of queries that could see it,
      or "sum", the mass itself as in the paper, which favours old tokens.
    newest: how many tokens of the budget are the newest of the row: an int, or
      a share of the budget from 0 to 1. The paper's is 0.5.
  """

  score: str = "mean"
  newest: int | float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    newest = self.newest
    share = isinstance(newest, float) and 0 <= newest <= 1
    whole = isinstance(newest, int) and not isinstance(newest, bool)
    # 1 and 1.0 are equal in Python, and so would be what they compile to.
    if not share and not (whole and newest >= 2):
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
    kept = type(self).kept is HeavyHitters.kept
    return (super().ranks or kept) and not self.newest

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
    behind = jnp.sum(real, -1, keepdims=True, dtype=jnp.int32)
    behind = behind - lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    near = real & (behind <= newest[:, :, None, None])
    return highest(jnp.where(near, jnp.inf, scores), counts[:, :, None])
