"""Interface of eviction policies, which choose the tokens each KV head keeps.

A policy scores the tokens of a layer by a `Look` at them, and chooses those
that stay. It sees all of a row's tokens in the order of their positions,
whatever the sharding, and never holds an array of queries times keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.kv.query_reading import KeyReading
from ringjax.typing import Index


@runtime_checkable
class Look(Protocol):
  """A policy's view of one layer: B rows, K heads, S tokens.

  Tokens are in the order of documents and positions; empty ones are last.

  Attributes:
    real: Whether a slot holds a token, bool [B, K, S].
    pos: Positions of the tokens, int32 [B, K, S].
    length: The position after each row's last token, int32 [B].
    layer: Index of the layer in the model, int32 [].
    first_head: Index of the first of the K heads in the layer.
    limit: Maximum number of tokens in a row.
    reading: Rotation, mask and scale of the queries.
    mean: Mean of the queries before rotation, float32 [B, K, G, H], if the
      policy sets `moments`.
    covariance: Covariance of the queries, float32 [B, K, G, H, H].
    marked: Whether a token's id is in the policy's `marks`, bool [B, K, S].
    fixed: Choice of each head that keeps its choice, from 1, int32 [B, K]; 0
      for a head that chooses. None if the policy has no choices.
  """

  real: Bool[Array, "B K S"]
  pos: Int[Array, "B K S"]
  length: Int[Array, " B"]
  layer: Index
  first_head: Index
  limit: int
  reading: KeyReading
  mean: Float[Array, "B K G H"] | None
  covariance: Float[Array, "B K G H H"] | None
  fixed: Int[Array, "B K"] | None

  @property
  def marked(self) -> Bool[Array, "B K S"]: ...

  def by_token(
    self, f: Callable[..., Any], *given: Any
  ) -> Float[Array, "B K S"]:
    """Map f(keys [B, K, s, H], values [B, K, s, J]) -> [B, K, s] over tokens.

    Keys are rotated; in latent layers the values are the keys. Arrays `given`,
    [B, K, S], are passed to f as [B, K, s].
    """
    ...

  def extremes(
    self, f: Callable[..., Any], part: Int[Array, "B K S"], count: int
  ) -> tuple[Float[Array, "B K _ D"], Float[Array, "B K _ D"]]:
    """Minimum and maximum of an f as in `by_token` that returns [B, K, s, D].

    Taken over the tokens of each of `count` parts; tokens of part -1 are left
    out. Parts without tokens give inf and -inf.
    """
    ...

  def average(self, f: Callable[..., Any]) -> Float[Array, "B K D"]:
    """Mean over tokens of an f as in `by_token` that returns [B, K, s, D]."""
    ...

  def over_heads(self, x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Mean over all heads of the layer, repeated for each head."""
    ...

  def column_mass(self) -> Float[Array, "B K G S"]:
    """Attention mass that the last `queries` queries give each key."""
    ...

  def kept_mass(self, keep: Bool[Array, "C B K S"]) -> Float[Array, "C B K G"]:
    """Mean attention mass of these queries on the keys of each choice."""
    ...

  def sums(self) -> Float[Array, "B K S"]:
    """Column masses, averaged over G, plus those of earlier evictions."""
    ...

  def repeated(self) -> Float[Array, "B K S"]:
    """Largest attention weight of a key while the context was repeated."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """Base class of eviction policies; hashable, compared by value.

  Attributes:
    budget: Number of tokens of each head: an int, or a float share of the
      tokens of its row, above 0 and at most 1. It includes those that come
      until the next eviction, of which at most a sixteenth of it is left free;
      a larger `room` exceeds it, see `CacheConfig.counts`.
  """

  budget: int | float = 0.5

  @property
  def queries(self) -> int | None:
    """Number of newest queries that the policy looks at.

    None for all since the last eviction.
    """
    return 0

  @property
  def fixed_queries(self) -> int | None:
    """Number of newest queries that it looks at once choices are fixed."""
    return self.queries

  @property
  def choices(self) -> tuple[str, ...]:
    """Names of token sets, of which each head chooses one.

    The score of a token that stays is then the number of its set, from 1.
    """
    return ()

  @property
  def marks(self) -> tuple[int, ...]:
    """Ids of the tokens to mark in `Look.marked`."""
    return ()

  @property
  def alike(self) -> str | None:
    """Heads that keep the same tokens of a row for any text.

    "heads" for all heads of a layer, "layers" for those of all layers: their
    positions are then stored once. None if each head may keep others.
    """
    return None

  # Whether it looks at the mean and the covariance of all queries.
  moments: ClassVar[bool] = False
  # Whether all tokens stay, and queries read some pages of them.
  selects: ClassVar[bool] = False
  # Whether column masses are summed up over evictions.
  sums: ClassVar[bool] = False
  # Whether it scores tokens by a repetition of the context.
  repeats: ClassVar[bool] = False
  # Whether the budget includes the tokens until the next eviction.
  budgeted: ClassVar[bool] = True
  # Whether it reads keys, values or queries, and not positions alone.
  reads: ClassVar[bool] = True

  @property
  def moves(self) -> int:
    """Number of first tokens whose positions move up to the newest tokens.

    If not 0, a token's position for attention is its index among the
    tokens that are kept: these first ones and, without a gap, the newest.
    """
    return 0

  @property
  def sums_prompts(self) -> bool:
    """Whether to sum up a prompt's queries instead of recording them."""
    return self.sums and self.queries is None

  @property
  def ranks(self) -> bool:
    """Whether each head keeps the highest of its scores, by the budget."""
    policy_class = type(self)
    return all(
      getattr(policy_class, name) is getattr(Policy, name)
      for name in ("counts", "kept", "chosen")
    )

  def __post_init__(self) -> None:
    budget = self.budget
    share = isinstance(budget, float) and 0 < budget <= 1
    is_count = isinstance(budget, int) and not isinstance(budget, bool)
    # 1 == 1.0 in Python, so that policies would share compiled programs.
    if not share and not (is_count and budget >= 2):
      raise OptionError(
        "budget",
        repr(budget),
        "an int of at least 2, or a float above 0 and at most 1",
        "pass budget=0.5 for half of the tokens, budget=1024 for so many",
      )

  def many(self, length: int) -> int:
    """Number of tokens that a head keeps of a row of `length` tokens."""
    if isinstance(self.budget, float):
      return max(1, int(length * self.budget))
    return self.budget

  def pages(self, count: int, slots: int) -> int:
    """Number of pages that a query reads of a head's `count` pages."""
    del slots
    return count

  def traced(self) -> Policy:
    """Policy without its budget, as the static argument of programs."""
    return dataclasses.replace(self, budget=1.0)

  def counts(self, length: int, heads: Sequence[int]) -> Sequence[int]:
    """Number of tokens that a head keeps of a row, for each layer.

    Args:
      length: Number of tokens that the row has had.
      heads: Number of KV heads under the policy, for each layer of the model; 0
        for layers that never evict.
    """
    return [self.many(length)] * len(heads)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    """Return the tokens that a head keeps in each layer, a mean over its heads.

    For plans, which have no text: where the text decides, the most it may be.
    The arguments are those of `counts`.
    """
    return [min(length, n) for n in self.counts(length, heads)]

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    """Score the tokens of one layer; those with higher scores stay.

    `EvictingCache.evict` refuses NaN, and a head with -inf for all tokens.
    """
    raise NotImplementedError

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    """Mask of the tokens that stay, in layers of one kind.

    Args:
      scores: Scores of all heads; -inf for empty slots.
      counts: Number of tokens per head, by `counts`.
    """
    return highest(scores, counts[:, :, None])

  def chosen(
    self,
    scores: Sequence[Float[Array, "_ B _ _"]],
    counts: Sequence[Int[Array, "_ B"]],
  ) -> list[Bool[Array, "_ B _ _"]]:
    """Masks of the tokens that stay, for each kind of layer, by `kept`."""
    pairs = zip(scores, counts, strict=True)
    return [self.kept(kind_scores, count) for kind_scores, count in pairs]


def highest(
  scores: Float[Array, "*rows S"], count: Int[Array, "*#rows"]
) -> Bool[Array, "*rows S"]:
  """Mask of the `count` highest scores per row; never -inf; ties: the first."""
  rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
  return (rank < count[..., None]) & (scores > -jnp.inf)


def floored_share(
  count: Int[Array, "*rows"], share: float
) -> Int[Array, "*rows"]:
  """Share of each count, rounded down with a tolerance for float32 errors."""
  scaled = count.astype(jnp.float32) * jnp.float32(share)
  return jnp.floor(scaled + 1e-4).astype(jnp.int32)


def window_size(name: str, value: object) -> int:
  """Check a number of queries.

  Raises:
    OptionError: If it is not an int of at least 1.
  """
  return integer(name, value, least=1, remedy="pass 32, for instance")
