"""Tokens that all queries together looked at the most.

Ref: Zhang et al. 2023, H2O, arXiv 2306.14048.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyHitters(Policy):
  """Tokens with the largest mass of attention of all queries.

  It is summed up from one eviction to the next: by layers while a prompt is
  read; queries of single tokens are kept until the next eviction, and so are
  those of a call of `rj.models.CachedAttention()`, which may be drafts.
  `CacheKind.recent` keeps the newest tokens as well.

  Attributes:
    score: "mean", a token's mass over the number of queries that could see it,
      or "sum", the mass itself as in the paper, which favours old tokens.
  """

  score: str = "mean"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.score not in ("mean", "sum"):
      raise OptionError(
        "score", repr(self.score), "'mean' or 'sum'", "pass score='sum'"
      )

  @property
  def queries(self) -> int | None:
    return None

  sums: ClassVar[bool] = True

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    if self.score == "sum":
      return look.sums()
    queries = jnp.maximum(look.length[:, None, None] - look.pos, 1)
    return look.sums() / queries.astype(jnp.float32)
