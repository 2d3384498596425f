"""StreamingLLM: keep the first tokens and the newest.

Ref: Xiao et al. 2024, StreamingLLM, arXiv 2309.17453.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinks(Policy):
  """Keeps the first tokens of a row, and the newest of the others.

  Attributes:
    sinks: Number of first tokens that stay; they count in the budget.
    positions: Position of a token for attention: "text", its position in the
      text, or "cache", as in the paper, its index among the tokens in the
      cache. With "cache" a text may be longer than the model's context; the
      budget must be an int.
  """

  sinks: int = 4
  positions: str = "text"

  reads: ClassVar[bool] = False

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("sinks", self.sinks, least=0)
    if self.positions not in ("text", "cache"):
      raise OptionError(
        "positions",
        repr(self.positions),
        "'text' or 'cache'",
        "pass positions='cache' for the index in the cache",
      )
    is_count = isinstance(self.budget, int) and self.budget > self.sinks > 0
    if self.positions == "cache" and not (is_count and type(self) is Sinks):
      raise OptionError(
        "positions",
        f"'cache' with budget={self.budget} and sinks={self.sinks} of "
        f"{type(self).__name__}",
        "rj.kv.Sinks itself, of one sink or more and an int budget above sinks",
        "pass budget=512, for instance",
      )

  @property
  def alike(self) -> str | None:
    # A class that inherits may score otherwise.
    return "layers" if type(self) is Sinks else None

  @property
  def moves(self) -> int:
    return self.sinks if self.positions == "cache" else 0

  def traced(self) -> Policy:
    # The tokens that stay do not depend on positions for attention.
    return dataclasses.replace(self, budget=1.0, positions="text")

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    pos = look.pos.astype(jnp.float32)
    return jnp.where(look.pos < self.sinks, jnp.float32(2**31), pos)
