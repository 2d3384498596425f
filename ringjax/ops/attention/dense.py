"""Dense attention over the keys at hand: one tile, plainly differentiable.

Guarantees: equals `reference`; every JAX transformation applies (forward mode
and derivatives of any order), because there is no loop and no custom rule.
Cost: every pair is computed, masked or not.
Memory: local queries x local keys. Use it for short shards, as the fallback
for `jax.jvp`, `jax.hessian` and the like: `strategy=Ring(Dense())`.

A key or value that is not finite and that no query may see changes nothing. One
that some row sees makes that row NaN, and then, since plain differentiation
multiplies its cotangent by weights of zero, the gradients of all keys at hand;
`Blockwise` keeps those apart.
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
  """The local algorithm without tiles."""

  # JAX differentiates `forward` itself.
  differentiable = True

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Folds these keys into `carry` ([B, K, G, T, ...])."""
    context = args.context
    tile = ScoreTile(args, FORWARD, 0, 0, context.q, context.k)
    carry = carry._replace(m=lax.stop_gradient(carry.m))
    wide = wide_dtype(x.k.dtype)
    # Products of finite numbers only: their derivatives multiply keys by the
    # zeros of the pairs that the mask leaves out.
    s = product("bkgqh,bkth->bkgqt", cleaned(x.q), cleaned(x.k))
    return fold_tile(
      tile,
      s + finite_flag(x.q, wide)[..., None],
      x.v,
      finite_flag(x.k, wide) + finite_flag(x.v, wide),
      carry,
    )
