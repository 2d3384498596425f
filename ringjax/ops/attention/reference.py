"""Reference attention: one softmax over all keys, in plain JAX.

Guarantees: every other path must equal it. Arrays are whole and in natural
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
  """Causal (by default) attention (out, lse), scores scaled by H**-0.5."""
  natural = lambda x: Coords(
    jnp.arange(x.shape[1])[None], jnp.ones((1, x.shape[1]), jnp.int32)
  )
  q_at, k_at = q_at or natural(q), k_at or natural(k)
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
  s = jnp.einsum("BTNH,BSNH->BNTS", q, k, precision="highest")
  s = s * q.shape[-1] ** -0.5
  pairs = (Coords(*(c[:, None, :, None] for c in q_at)),
           Coords(*(c[:, None, None, :] for c in k_at)))  # fmt: skip
  allowed = visible(Causal() if mask is None else mask, *pairs)
  s = jnp.where(allowed, s, -jnp.inf)
  sees_key = jnp.any(allowed, -1, keepdims=True)
  p = jnp.where(sees_key, jax.nn.softmax(jnp.where(sees_key, s, 0)), 0)
  out = jnp.einsum("BNTS,BSNJ->BTNJ", p, v, precision="highest")
  lse = jnp.where(sees_key[..., 0], jax.nn.logsumexp(s, -1), -jnp.inf)
  return out, jnp.swapaxes(lse, 1, 2)
