"""Quest: keep all tokens; a query reads the pages with the best bounds.

Ref: Tang et al. 2024, Quest, arXiv 2406.10774.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select(Policy):
  """Keeps all tokens; while decoding, each query reads only its best pages.

  `budget` is the part of a KV head that a query reads: a share of the row's
  pages, or a number of tokens. Pages are ranked by an upper bound of the
  product of the query with the page's keys; the queries of a group choose
  together. On a mesh each shard of the sequence reads the best of its local
  pages. The tokens of a prompt read all pages. A choice does not depend on
  drafts, other tokens of a call or other rows.
  """

  selects: ClassVar[bool] = True
  budgeted: ClassVar[bool] = False

  @property
  def alike(self) -> str | None:
    # A class that inherits may score otherwise.
    return "layers" if type(self) is Select else None

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    return jnp.zeros(look.pos.shape, jnp.float32)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    return [length] * len(heads)

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    del counts
    return scores > -jnp.inf

  def pages(self, count: int, slots: int) -> int:
    if isinstance(self.budget, float):
      return max(1, min(count, -int(-self.budget * count // 1)))
    return max(1, min(count, -(-self.budget // slots)))

  def traced(self) -> Policy:
    return self
