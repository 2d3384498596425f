"""Tokens that the model needs to repeat its context.

Ref: Kim et al. 2025, KVzip, arXiv 2505.23416.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import boolean, integer
from ringjax.kv.policies.policy import Look, Policy, highest


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
  """Tokens that one query of a repetition of the context looks at the most.

  Once the context is read, the model is asked to repeat it, chunk by chunk; of
  a chunk's tokens each head keeps those that some query of the repetition
  looks at, whatever is asked later. `rj.infer.generate` repeats the prompt
  that it reads into an empty cache, and evicts once; tokens that come later
  stay. The budget is one for all heads of all layers together. Reading costs
  two to three times as much, and the repetition as much memory for queries as
  a chunk's keys of as many heads.

  Attributes:
    sinks: how many of the first tokens stay; they count in the budget, and
      all chunks are repeated with them.
    chunk: tokens that are repeated at once.
    prefix: of a row's first tokens those that are not repeated, such as a
      template's; they go first, but for the sinks.
    by_layer: whether each layer has a budget of its own, for its heads
      together.
  """

  sinks: int = 4
  chunk: int = 2048
  prefix: int = 0
  by_layer: bool = False

  repeats: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("sinks", self.sinks, least=0)
    integer("chunk", self.chunk, least=1, remedy="pass chunk=2048")
    integer("prefix", self.prefix, least=0)
    boolean("by_layer", self.by_layer)

  def traced(self) -> Policy:
    return dataclasses.replace(self, budget=1.0, chunk=1, prefix=0)

  def counts(self, length: int, heads: Sequence[int]) -> Sequence[int]:
    """Tokens of all heads of a layer, or of all layers, together."""
    if self.by_layer:
      return [self._of(length, n) for n in heads]
    return [self._of(length, sum(heads))] * len(heads)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    shares = heads if self.by_layer else [sum(heads)] * len(heads)
    both = zip(self.counts(length, heads), shares, strict=True)
    return [count / max(1, share) for count, share in both]

  def _of(self, length: int, heads: int) -> int:
    if isinstance(self.budget, int):
      return min(length, self.budget) * heads
    # 1 - 0.9 is less than a tenth.
    gone = int(length * heads * (1 - self.budget) + 1e-6)
    return length * heads - gone

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    return jnp.where(look.pos < self.sinks, jnp.inf, look.repeated())

  def chosen(
    self, scores: Sequence[Any], counts: Sequence[Any]
  ) -> list[jax.Array]:
    if self.by_layer:
      return [
        highest(x.reshape(*x.shape[:2], -1), count).reshape(x.shape)
        for x, count in zip(scores, counts, strict=True)
      ]
    # [L, B, K, S] of each kind of layer -> [B, all].
    flat = [jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1) for x in scores]
    if not flat:
      return []
    keep = highest(jnp.concatenate(flat, 1), counts[0][0])
    found, start = [], 0
    for x, part in zip(scores, flat, strict=True):
      layers, b, *rest = x.shape
      mine = keep[:, start : start + part.shape[1]].reshape(b, layers, *rest)
      found.append(jnp.swapaxes(mine, 0, 1))
      start += part.shape[1]
    return found
