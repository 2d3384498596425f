"""FastGen: each KV head keeps the fewest kinds of tokens that it looks at.

Ref: Ge et al. 2024, FastGen, arXiv 2310.01801. The paper leaves open how much
of the attention is recovered is measured: here by the mean over the profile's
queries of the mass that the kept tokens have in the whole attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer, number
from ringjax.kv.policies.policy import Look, Policy, floored_share, highest


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastGen(Policy):
  """Each KV head keeps the fewest tokens that recover enough of its attention.

  Choices, of which each holds the one before: the first tokens; punctuation as
  well, if its ids are given; the most frequent ones as well; the nearest ones
  as well; all. The smallest is taken of which every query head of the group
  recovers `recovered`. A head chooses anew at each eviction; the paper's keep
  what they chose for the prompt.

  Attributes:
    budget: of the frequent tokens.
    local: of the nearest ones, a share of the row or a number of tokens.
    recovered: the mass of attention that is enough, above 0 and at most 1.
    special: how many of the first tokens of a row are special.
    window: how many of the newest queries are profiled.
    punctuation: ids of the tokens that are punctuation, in any order; see
      `rj.data.punctuation_ids`. None: there is no such choice.
  """

  budget: int | float = 0.3
  local: int | float = 0.3
  recovered: int | float = 0.95
  special: int = 1
  window: int = 512
  punctuation: tuple[int, ...] = ()

  @property
  def choices(self) -> tuple[str, ...]:
    sets, more = ["special"], ["frequent", "local"]
    if self.punctuation:
      more = ["punctuation", *more]
    for name in more:
      sets.append(f"{sets[-1]} + {name}")
    return (*sets, "full")

  @property
  def marks(self) -> tuple[int, ...]:
    return self.punctuation

  @property
  def queries(self) -> int | None:
    return self.window

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("special", self.special, least=1)
    integer("window", self.window, least=1)
    Policy(budget=self.local)
    number(
      "recovered",
      self.recovered,
      above=0.0,
      most=1.0,
      remedy="pass recovered=0.95",
    )
    for one in self.punctuation:
      integer(
        "punctuation",
        one,
        least=0,
        remedy="pass rj.data.punctuation_ids(tokenizer)",
      )
    # Equal sets of ids are equal policies.
    ids = tuple(sorted({int(x) for x in self.punctuation}))
    object.__setattr__(self, "punctuation", ids)

  def traced(self) -> Policy:
    return self

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    keep, which = self.profile(look)
    picked = jnp.take_along_axis(keep, which[None, :, :, None], 0)[0]
    number = (which + 1).astype(jnp.float32)[..., None]
    return jnp.where(picked, number, 0.0)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    return [length] * len(heads)

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    del counts
    return scores > 0

  def profile(
    self, look: Look
  ) -> tuple[Bool[Array, "C B K S"], Int[Array, "B K"]]:
    """What each choice keeps, and which of them each head takes."""
    length = look.length[:, None, None]
    special = look.real & (look.pos < self.special)
    named = [special]
    if self.punctuation:
      named.append(special | look.marked)
    queries = jnp.minimum(jnp.maximum(length - look.pos, 1), self.window)
    mass = jnp.mean(look.column_mass(), 2) / queries.astype(jnp.float32)
    mass = jnp.where(look.real & ~named[-1], mass, -jnp.inf)
    many = self._many(self.budget, look.length)
    frequent = highest(mass, jnp.broadcast_to(many[:, None], mass.shape[:2]))
    near = (
      look.pos >= length - self._many(self.local, look.length)[:, None, None]
    )
    near = look.real & near
    sets = jnp.stack(
      [
        *named,
        named[-1] | frequent,
        named[-1] | frequent | near,
        look.real,
      ]
    )
    # The newest token always sees itself.
    sets = sets | (look.real & (look.pos >= length - 1))[None]
    found = jnp.min(look.kept_mass(sets), -1)
    enough = found >= jnp.float32(self.recovered) - 1e-6
    if self.recovered == 1:
      enough = jnp.zeros_like(enough)
    enough = enough.at[-1].set(True)
    return sets, jnp.argmax(enough, 0)

  def _many(
    self, budget: int | float, length: Int[Array, " B"]
  ) -> Int[Array, " B"]:
    if isinstance(budget, int):
      return jnp.full(length.shape, budget, jnp.int32)
    return jnp.maximum(floored_share(length, budget), 1)
