"""Tokens that all queries together looked at the most.

Ref: Zhang et al. 2023, H2O, arXiv 2306.14048.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyHitters(Policy):
  """Tokens with the largest mass of attention, a mean over later queries.

  It is summed up from one eviction to the next. Queries are kept until then,
  which for a prompt that is read at once takes as many numbers as its keys of
  as many heads. `CacheKind.recent` keeps the newest tokens as well.
  """

  @property
  def queries(self) -> int | None:
    return None

  sums: ClassVar[bool] = True

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    queries = jnp.maximum(look.length[:, None, None] - look.pos, 1)
    return look.sums() / queries.astype(jnp.float32)
