"""The reference: attention as one softmax over all keys, in plain JAX.

Guarantees: what every other path must equal. Arrays are whole and in natural
order (or any order, with coordinates to match).
Memory: T x S.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ringjax.ops.mask import Causal, Coords, Mask, visible
from ringjax.typing import Attended, Keys, LogSumExp, Queries, Values


def reference(
  q: Queries,
  k: Keys,
  v: Values,
  mask: Mask | None = None,
  q_at: Coords | None = None,
  k_at: Coords | None = None,
) -> tuple[Attended, LogSumExp]:
  """(out, lse) of causal (by default) attention, scores scaled by H**-0.5."""
  count = lambda x: Coords(
    jnp.arange(x.shape[1])[None], jnp.ones((1, x.shape[1]), jnp.int32)
  )
  q_at, k_at = q_at or count(q), k_at or count(k)
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
  s = jnp.einsum("BTNH,BSNH->BNTS", q, k, precision="highest")
  s = s * q.shape[-1] ** -0.5
  pairs = (Coords(*(c[:, None, :, None] for c in q_at)),
           Coords(*(c[:, None, None, :] for c in k_at)))  # fmt: skip
  yes = visible(Causal() if mask is None else mask, *pairs)
  s = jnp.where(yes, s, -jnp.inf)
  some = jnp.any(yes, -1, keepdims=True)
  p = jnp.where(some, jax.nn.softmax(jnp.where(some, s, 0)), 0)
  out = jnp.einsum("BNTS,BSNJ->BTNJ", p, v, precision="highest")
  lse = jnp.where(some[..., 0], jax.nn.logsumexp(s, -1), -jnp.inf)
  return out, jnp.swapaxes(lse, 1, 2)
