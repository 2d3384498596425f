"""KeyDiff: keep the tokens whose keys are unlike the others.

Ref: Park et al. 2025, KeyDiff, arXiv 2504.15364.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
  """Keeps the keys with the largest angle to the mean direction of all keys."""

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    mean = look.average(lambda k, v: _direction(k))

    def unlike(k: Array, v: Array) -> Array:
      del v
      return -jnp.einsum("bksh,bkh->bks", _direction(k), _direction(mean))

    return look.by_token(unlike)


def _direction(x: Array) -> Array:
  size = jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))
  return x / jnp.maximum(size, 1e-12)
