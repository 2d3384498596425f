"""What a policy of eviction is: which tokens each KV head keeps.

A policy scores the tokens of a layer by what it looks at, and chooses those
that stay. It sees all of a row's tokens in the order of their positions,
however they lie over devices, and holds no array of queries times keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.kv.reading import KeyReading
from ringjax.typing import Index


@runtime_checkable
class Look(Protocol):
  """What a policy may look at, of one layer: B rows, K heads, S tokens.

  Tokens are in the order of documents and positions; empty ones are last.

  Attributes:
    real: bool [B, K, S], which are tokens.
    pos: int32 [B, K, S], their positions.
    length: int32 [B], the position behind each row's last token.
    layer: int32 [], the layer's number in the model.
    first_head: the number of the first of the K heads.
    limit: tokens of a row that the cache was made for.
    reading: how queries read the keys.
    mean: float32 [B, K, G, H], of the queries before their rotation, if the
      policy says `moments`.
    covariance: float32 [B, K, G, H, H], of these.
    marked: bool [B, K, S], which are tokens of the policy's `marks`.
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

  @property
  def marked(self) -> Bool[Array, "B K S"]: ...

  def by_token(
    self, f: Callable[..., Any], *given: Any
  ) -> Float[Array, "B K S"]:
    """f(keys [B, K, s, H], values [B, K, s, J]) -> [B, K, s], of all tokens.

    Keys are rotated; of latent layers values are the keys. What is `given`,
    [B, K, S], goes to f as [B, K, s].
    """
    ...

  def extremes(
    self, f: Callable[..., Any], part: Int[Array, "B K S"], count: int
  ) -> tuple[Float[Array, "B K _ D"], Float[Array, "B K _ D"]]:
    """The least and the largest of such an f, which gives [B, K, s, D].

    Over the tokens of each of `count` parts; a token of part -1 is in none.
    inf and -inf of a part without tokens.
    """
    ...

  def average(self, f: Callable[..., Any]) -> Float[Array, "B K D"]:
    """The mean over the tokens of such an f, which gives [B, K, s, D]."""
    ...

  def over_heads(self, x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """The mean over all heads of the layer, for each of them."""
    ...

  def column_mass(self) -> Float[Array, "B K G S"]:
    """The mass of attention that the last `queries` give each key."""
    ...

  def kept_mass(self, keep: Bool[Array, "C B K S"]) -> Float[Array, "C B K G"]:
    """What the keys of each choice get of such a query, the mean of them."""
    ...

  def sums(self) -> Float[Array, "B K S"]:
    """Column masses, the mean of the G, with those of earlier evictions."""
    ...

  def repeated(self) -> Float[Array, "B K S"]:
    """The largest weight of a query while the context was repeated."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """A policy of eviction; hashable, compared by value.

  Attributes:
    budget: how many tokens each head keeps: an int, or a share of the tokens
      of its row, above 0 and at most 1.
  """

  budget: int | float = 0.5

  @property
  def queries(self) -> int | None:
    """How many of the newest queries it looks at.

    None: all since the last eviction.
    """
    return 0

  @property
  def choices(self) -> tuple[str, ...]:
    """Sets of tokens of which each head takes one, by name.

    The score of a token that stays is then the number of its set, from 1.
    """
    return ()

  @property
  def marks(self) -> tuple[int, ...]:
    """Ids of the tokens that it is to see as `Look.marked`."""
    return ()

  @property
  def alike(self) -> str | None:
    """Which heads keep the same tokens of a row, whatever the text is.

    "heads", all of a layer, or "layers", those of all layers: positions are
    then stored once for them. None: each may keep others.
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
  # Whether it reads keys, values or queries, and not positions alone.
  reads: ClassVar[bool] = True

  @property
  def moves(self) -> int:
    """How many of the first tokens keep to the newest, whatever is between.

    Where it is not 0, a token's position for attention is its index among the
    tokens that are kept: these first ones and, without a gap, the newest.
    """
    return 0

  @property
  def sums_prompts(self) -> bool:
    """Whether a prompt's queries are summed up as they come, and not noted."""
    return self.sums and self.queries is None

  @property
  def ranks(self) -> bool:
    """Whether each head keeps the highest of its scores, by the budget."""
    mine = type(self)
    return all(
      getattr(mine, name) is getattr(Policy, name)
      for name in ("counts", "kept", "chosen")
    )

  def __post_init__(self) -> None:
    budget = self.budget
    share = isinstance(budget, float) and 0 < budget <= 1
    whole = isinstance(budget, int) and not isinstance(budget, bool)
    # 1 and 1.0 are equal in Python, and so would be what they compile to.
    if not share and not (whole and budget >= 2):
      raise OptionError(
        "budget",
        repr(budget),
        "an int of at least 2, or a float above 0 and at most 1",
        "pass budget=0.5 for half of the tokens, budget=1024 for so many",
      )

  def many(self, length: int) -> int:
    """Tokens that a head keeps of a row of so many."""
    if isinstance(self.budget, float):
      return max(1, int(length * self.budget))
    return self.budget

  def pages(self, count: int, slots: int) -> int:
    """Of a head's `count` pages of so many slots those that a query reads."""
    del slots
    return count

  def traced(self) -> Policy:
    """What programs depend on: not the budget, where `counts` has it."""
    return dataclasses.replace(self, budget=1.0)

  def counts(self, length: int, heads: Sequence[int]) -> Sequence[int]:
    """Tokens that a head keeps of a row of `length`, in each of the layers.

    Args:
      length: tokens that the row has had.
      heads: by layer of the model the KV heads that compete; 0 of layers that
        keep what they need anyway.
    """
    return [self.many(length)] * len(heads)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    """Return the tokens that a head keeps in each layer, a mean over its heads.

    For plans, which have no text: where the text decides, the most it may be.
    The arguments are those of `counts`.
    """
    return [min(length, n) for n in self.counts(length, heads)]

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    """The higher, the sooner a token stays; of one layer.

    `EvictingCache.evict` refuses NaN, and a head with -inf for all tokens.
    """
    raise NotImplementedError

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    """Which tokens stay in layers of one kind.

    Args:
      scores: of all heads; -inf where there is no token.
      counts: what `counts` says.
    """
    return highest(scores, counts[:, :, None])

  def chosen(
    self, scores: Sequence[Any], counts: Sequence[Any]
  ) -> list[jax.Array]:
    """`kept` of each kind of layer."""
    pairs = zip(scores, counts, strict=True)
    return [self.kept(one, count) for one, count in pairs]


def highest(
  scores: Float[Array, "*rows S"], count: Int[Array, "*#rows"]
) -> Bool[Array, "*rows S"]:
  """The `count` highest scores of each row; -inf never; the first of equals."""
  rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
  return (rank < count[..., None]) & (scores > -jnp.inf)


def floored_share(
  count: Int[Array, "*rows"], share: float
) -> Int[Array, "*rows"]:
  """A share of each count, rounded down but for what float32 loses."""
  many = count.astype(jnp.float32) * jnp.float32(share)
  return jnp.floor(many + 1e-4).astype(jnp.int32)


def window_size(name: str, value: object) -> int:
  """A number of queries.

  Raises:
    OptionError: not an int of at least 1.
  """
  return integer(name, value, least=1, remedy="pass 32, for instance")
