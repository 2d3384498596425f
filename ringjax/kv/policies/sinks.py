"""The first tokens and the newest.

Ref: Xiao et al. 2024, StreamingLLM, arXiv 2309.17453.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import integer
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinks(Policy):
  """The first tokens of a row, and of the others the newest.

  Attributes:
    sinks: how many of the first stay; they count in the budget.
  """

  sinks: int = 4

  reads: ClassVar[bool] = False

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("sinks", self.sinks, least=0)

  @property
  def alike(self) -> str | None:
    # A class that inherits may score otherwise.
    return "layers" if type(self) is Sinks else None

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    pos = look.pos.astype(jnp.float32)
    return jnp.where(look.pos < self.sinks, jnp.float32(2**31), pos)
