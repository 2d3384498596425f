"""TOVA: keep the tokens that the newest query attends to.

Ref: Oren et al. 2024, TOVA, arXiv 2401.06104.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tova(Policy):
  """Keeps tokens with the largest mass of the newest query, a mean over heads.

  All heads of a layer keep the same tokens.
  """

  @property
  def alike(self) -> str | None:
    # A class that inherits may score otherwise.
    return "heads" if type(self) is Tova else None

  @property
  def queries(self) -> int | None:
    return 1

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    mass = look.over_heads(jnp.mean(look.column_mass(), 2))
    newest = look.pos >= (look.length - 1)[:, None, None]
    return jnp.where(newest, jnp.inf, mass)
