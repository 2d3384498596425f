"""FastGen: each KV head keeps the fewest kinds of tokens that it looks at.

Ref: Ge et al. 2024, FastGen, arXiv 2310.01801. The paper leaves open how much
of the attention is recovered is measured: here by the mean over the profile's
queries of the mass that the kept tokens have in the whole attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer, number
from ringjax.kv.policies.policy import Look, Policy, floored_share, highest

# Newest queries by which heads with fixed choices find their frequent tokens.
_FIXED_QUERIES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastGen(Policy):
  """Each KV head keeps the fewest tokens that recover enough of its attention.

  Nested choices: the first tokens; also punctuation, if its ids are given; also
  the most frequent tokens; also the nearest tokens; all tokens. A head takes
  the smallest with which every query head of the group recovers `recovered`.
  As in the paper, heads keep what they chose for a prompt: `generate` and
  `Session` fix the choices at the end of the first prompt after which `window`
  queries are known. Until then heads choose at each eviction.

  Attributes:
    budget: Budget of the frequent tokens.
    local: Budget of the nearest tokens, a share of the row or a number.
    recovered: Sufficient attention mass, above 0 and at most 1.
    special: Number of first tokens of a row that are special.
    window: Number of newest queries to profile.
    punctuation: Ids of punctuation tokens, in any order; see
      `rj.data.punctuation_ids`. Empty to leave out this choice.
  """

  budget: int | float = 0.3
  local: int | float = 0.3
  recovered: int | float = 0.95
  special: int = 1
  window: int = 512
  punctuation: tuple[int, ...] = ()

  budgeted: ClassVar[bool] = False

  @property
  def choices(self) -> tuple[str, ...]:
    sets, additions = ["special"], ["frequent", "local"]
    if self.punctuation:
      additions = ["punctuation", *additions]
    for name in additions:
      sets.append(f"{sets[-1]} + {name}")
    return (*sets, "full")

  @property
  def marks(self) -> tuple[int, ...]:
    return self.punctuation

  @property
  def queries(self) -> int | None:
    return self.window

  @property
  def fixed_queries(self) -> int | None:
    return min(self.window, _FIXED_QUERIES)

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
    for token_id in self.punctuation:
      integer(
        "punctuation",
        token_id,
        least=0,
        remedy="pass rj.data.punctuation_ids(tokenizer)",
      )
    # Equal sets of ids are equal policies.
    ids = tuple(sorted({int(x) for x in self.punctuation}))
    object.__setattr__(self, "punctuation", ids)

  def traced(self) -> Policy:
    return self

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    keep, choice = self.profile(look)
    picked = jnp.take_along_axis(keep, choice[None, :, :, None], 0)[0]
    number = (choice + 1).astype(jnp.float32)[..., None]
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
    """Tokens that each choice keeps, and the choice of each head."""
    length = look.length[:, None, None]
    special = look.real & (look.pos < self.special)
    named = [special]
    if self.punctuation:
      named.append(special | look.marked)
    assert look.fixed is not None and self.fixed_queries is not None
    is_fixed = look.fixed > 0
    window = jnp.where(is_fixed, self.fixed_queries, self.window)[..., None]
    queries = jnp.minimum(jnp.maximum(length - look.pos, 1), window)
    mass = jnp.mean(look.column_mass(), 2) / queries.astype(jnp.float32)
    mass = jnp.where(look.real & ~named[-1], mass, -jnp.inf)
    num_frequent = self._many(self.budget, look.length)
    frequent = highest(
      mass, jnp.broadcast_to(num_frequent[:, None], mass.shape[:2])
    )
    nearest = (
      look.pos >= length - self._many(self.local, look.length)[:, None, None]
    )
    nearest = look.real & nearest
    sets = jnp.stack(
      [
        *named,
        named[-1] | frequent,
        named[-1] | frequent | nearest,
        look.real,
      ]
    )
    # The newest token always sees itself.
    sets = sets | (look.real & (look.pos >= length - 1))[None]
    recovered_mass = jnp.min(look.kept_mass(sets), -1)
    enough = recovered_mass >= jnp.float32(self.recovered) - 1e-6
    if self.recovered == 1:
      enough = jnp.zeros_like(enough)
    enough = enough.at[-1].set(True)
    choice = jnp.argmax(enough, 0).astype(jnp.int32)
    return sets, jnp.where(is_fixed, look.fixed - 1, choice)

  def _many(
    self, budget: int | float, length: Int[Array, " B"]
  ) -> Int[Array, " B"]:
    if isinstance(budget, int):
      return jnp.full(length.shape, budget, jnp.int32)
    return jnp.maximum(floored_share(length, budget), 1)
