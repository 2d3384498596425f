"""Dense attention over the local keys: one tile, plainly differentiable.

Guarantees: equals `reference`; every JAX transformation applies (forward mode
and derivatives of any order), because there is no loop and no custom rule.
Cost: every pair is computed, masked or not.
Memory: local queries x local keys. Use it for short shards, as the fallback
for `jax.jvp`, `jax.hessian` and the like: `strategy=Ring(Dense())`.

A non-finite key or value that no query may see changes nothing. One that some
row sees makes that row NaN, and then, since plain differentiation multiplies
its cotangent by weights of zero, the gradients of all local keys; `Blockwise`
keeps those apart.
"""

from __future__ import annotations

import dataclasses

from jax import lax

from ringjax.ops.attention.blockwise import (
  Local,
  LocalAlgorithm,
  cleaned,
  finite_flag,
  fold_tile,
  product,
)
from ringjax.ops.attention.scores import FORWARD, ScoreArgs, ScoreTile
from ringjax.ops.softmax import Partial, wide_dtype


@dataclasses.dataclass(frozen=True)
class Dense(LocalAlgorithm):
  """Local algorithm without tiles."""

  # JAX differentiates `forward` itself.
  differentiable = True

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these keys into `carry` ([B, K, G, T, ...])."""
    context = args.context
    tile = ScoreTile(args, FORWARD, 0, 0, context.q, context.k)
    carry = carry._replace(m=lax.stop_gradient(carry.m))
    dtype = wide_dtype(x.k.dtype)
    # Only finite numbers are multiplied: derivatives of the products multiply
    # keys by the zeros of the pairs that the mask excludes.
    s = product("bkgqh,bkth->bkgqt", cleaned(x.q), cleaned(x.k))
    return fold_tile(
      tile,
      s + finite_flag(x.q, dtype)[..., None],
      x.v,
      finite_flag(x.k, dtype) + finite_flag(x.v, dtype),
      carry,
    )
