"""KVzip: keep the tokens that the model needs to repeat its context.

Ref: Kim et al. 2025, KVzip, arXiv 2505.23416.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import boolean, integer
from ringjax.kv.policies.policy import Look, Policy, highest


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
  """Keeps tokens with the largest weight of a query that repeats the context.

  Once the context is read, the model is asked to repeat it, chunk by chunk. A
  chunk's token is scored by the largest weight that any query of the repetition
  gives it, so that the choice does not depend on later questions.
  `rj.infer.generate` repeats the prompt that it reads into an empty cache and
  evicts once; later tokens stay. All heads of all layers share one budget.
  Reading takes two to three times as long. The repetition needs memory for a
  chunk's queries, as much as for keys of the same number of heads.

  Attributes:
    sinks: Number of first tokens that stay; they count in the budget, and
      every chunk is repeated with them.
    chunk: Number of tokens that are repeated at once.
    prefix: Number of a row's first tokens that are not repeated, such as a
      template's; except for the sinks, they are evicted first.
    by_layer: Whether each layer has its own budget, shared by its heads.
  """

  sinks: int = 4
  chunk: int = 2048
  prefix: int = 0
  by_layer: bool = False

  repeats: ClassVar[bool] = True
  budgeted: ClassVar[bool] = False

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("sinks", self.sinks, least=0)
    integer("chunk", self.chunk, least=1, remedy="pass chunk=2048")
    integer("prefix", self.prefix, least=0)
    boolean("by_layer", self.by_layer)

  def traced(self) -> Policy:
    return dataclasses.replace(self, budget=1.0, chunk=1, prefix=0)

  def counts(self, length: int, heads: Sequence[int]) -> Sequence[int]:
    """Total number of tokens of all heads: of the layer, or of all layers."""
    if self.by_layer:
      return [self._total(length, n) for n in heads]
    return [self._total(length, sum(heads))] * len(heads)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    shares = heads if self.by_layer else [sum(heads)] * len(heads)
    layer_counts = zip(self.counts(length, heads), shares, strict=True)
    return [count / max(1, share) for count, share in layer_counts]

  def _total(self, length: int, heads: int) -> int:
    if isinstance(self.budget, int):
      return min(length, self.budget) * heads
    # In floats 1 - 0.9 is less than a tenth.
    removed = int(length * heads * (1 - self.budget) + 1e-6)
    return length * heads - removed

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    return jnp.where(look.pos < self.sinks, jnp.inf, look.repeated())

  def chosen(
    self,
    scores: Sequence[Float[Array, "_ B _ _"]],
    counts: Sequence[Int[Array, "_ B"]],
  ) -> list[Bool[Array, "_ B _ _"]]:
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
    masks, start = [], 0
    for x, part in zip(scores, flat, strict=True):
      layers, b, *dims = x.shape
      kind_mask = keep[:, start : start + part.shape[1]].reshape(
        b, layers, *dims
      )
      masks.append(jnp.swapaxes(kind_mask, 0, 1))
      start += part.shape[1]
    return masks
