"""All tokens stay; a query reads those pages that promise it the most.

Ref: Tang et al. 2024, Quest, arXiv 2406.10774.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select(Policy):
  """Nothing goes; while decoding, each query reads its best pages.

  `budget` is what it reads of a KV head: a share of the pages of its row, or
  tokens. The bounds of a page's keys say how large a product with a query can
  be; the queries of a group choose together. On a mesh each shard of the
  sequence reads the best of its own pages. The tokens of a prompt read
  everything. Drafts, other tokens of a call and other rows change no choice.
  """

  selects: ClassVar[bool] = True

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
  ) -> Array:
    del counts
    return scores > -jnp.inf

  def pages(self, count: int, slots: int) -> int:
    if isinstance(self.budget, float):
      return max(1, min(count, -int(-self.budget * count // 1)))
    return max(1, min(count, -(-self.budget // slots)))

  def traced(self) -> Policy:
    return self
