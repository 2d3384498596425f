"""KeyNorm: keep the tokens whose keys have a small norm.

Ref: Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy for KV
Cache Compression, arXiv 2406.11430.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyNorm(Policy):
  """Keeps keys with the smallest L2 norm, which tend to get most attention."""

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    return look.by_token(lambda k, v: -jnp.sqrt(jnp.sum(jnp.square(k), -1)))
