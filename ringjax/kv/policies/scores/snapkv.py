"""SnapKV: keep the tokens that the newest queries attend to.

Ref: Li et al. 2024, SnapKV, arXiv 2404.14469.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
  """Keeps the tokens with the largest attention mass of the newest queries.

  The newest tokens themselves stay.

  Attributes:
    window: Number of newest queries.
    kernel: Number of neighbouring tokens over which masses are pooled, odd.
    pool: Kind of pooling, "mean" or "max".
  """

  window: int = 32
  kernel: int = 5
  pool: str = "mean"

  @property
  def queries(self) -> int | None:
    return self.window

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("window", self.window, least=1)
    if integer("kernel", self.kernel, least=1) % 2 == 0:
      raise OptionError("kernel", self.kernel, "an odd number", "pass kernel=5")
    if self.pool not in ("mean", "max"):
      raise OptionError(
        "pool", repr(self.pool), "'mean' or 'max'", "pass pool='max'"
      )

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    mass = jnp.mean(look.column_mass(), 2)
    newest = look.pos >= (look.length - self.window)[:, None, None]
    mass = jnp.where(look.real & ~newest, mass, 0)
    margin = self.kernel // 2
    padded = jnp.pad(mass, ((0, 0), (0, 0), (margin, margin)))
    size = mass.shape[2]
    shifted = [
      jax.lax.slice_in_dim(padded, n, n + size, axis=2)
      for n in range(self.kernel)
    ]
    if self.pool == "max":
      pooled = functools.reduce(jnp.maximum, shifted)
    else:
      pooled = sum(shifted) / self.kernel
    return jnp.where(newest, jnp.inf, pooled)
