"""Dense attention over the keys at hand: one tile, plainly differentiable.

Law: equals `reference`; every JAX transformation applies (forward mode and
derivatives of any order), because there is no loop and no custom rule.
Cost: every pair is computed, masked or not.
Memory: local queries x local keys. Use it for short shards, as the fallback
for `jax.jvp`, `jax.hessian` and the like: `strategy=Ring(Dense())`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax

from ringjax.ops.attention.blockwise import Keys, Local, forward_tile
from ringjax.ops.attention.scores import Context, Scores, Terms, Tile
from ringjax.ops.softmax import Partial


@dataclasses.dataclass(frozen=True)
class Dense:
  """The local algorithm without tiles."""

  # JAX differentiates `forward` itself.
  differentiable = True
  # It moves nothing.
  axes = ()

  def span(self, keys: int) -> int:
    return keys

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """Folds these keys into `carry` ([B, K, G, T, ...])."""
    tile = Tile(0, 0, x.q.shape[3], x.k.shape[2], column)
    carry = carry._replace(m=lax.stop_gradient(carry.m))
    return forward_tile(
      scores,
      Keys.of(x),
      terms,
      context,
      tile,
      x.q,
      context.q,
      carry,
      masked=True,
    )
