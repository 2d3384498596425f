"""What a drafter is: it guesses what comes, and a target model checks it.

Guarantees: a wrong guess costs time and changes no answer.

A `Drafter` is a value with the options; `begin` makes of it a `Drafting`, which
goes through one call of `generate` and knows the texts of its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int

from ringjax.checks import integer, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.infer.decode import DecodeState
from ringjax.infer.session import Session
from ringjax.infer.speculate.verifiers import VERIFIERS
from ringjax.kv.cache_kind import CacheKind
from ringjax.models.transformer import Transformer


class Target(NamedTuple):
  """What is drafted for.

  Fields:
    model: the target.
    session: its conversation, which has read the prompts.
    sampler: which chooses its tokens, as an argument of jit.
    texts: int32 [T], the prompt of each row.
    drawn: whether drafted tokens are to be drawn from a law that the draft
      states, see `verifiers.rejection`; else they are to be what the sampler
      chooses by the draft's logits.
    count: new tokens of a row at most.
  """

  model: Transformer
  session: Session
  sampler: Callable[..., Any]
  texts: Sequence[np.ndarray]
  drawn: bool
  count: int


class Draft(NamedTuple):
  """Drafted tokens behind the last chosen token of each row.

  Fields:
    tokens: int32 [B, n].
    count: int32 [B], how many of them there are; the others are padding.
    parents: int32 [B, n], which token each follows, -1 for the last chosen one;
      None: each follows the one before.
    probs: float32 [B, n, V], the law that each was drawn from; None: they were
      chosen without chance.
  """

  tokens: Int[Array | np.ndarray, "B n"]
  count: Int[Array | np.ndarray, " B"]
  parents: Int[Array, "B n"] | None = None
  probs: Float[Array, "B n V"] | None = None


@runtime_checkable
class Drafting(Protocol):
  """A drafter at work on the rows of one call."""

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    """Drafts a round.

    Args:
      new: of each row the tokens since the round before, int32 [n].
      state: the `DecodeState`; its token is the last of `new`.
      most: int [B], how many tokens of a row are of use; 0 for a row that has
        ended.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter:
  """A base class of drafters.

  Attributes:
    count: tokens of a draft at most, one after the other.
    verify: the rule by which they stay, one of `verifiers.VERIFIERS`: "match",
      which gives the tokens of a call without drafts, or "rejection".
    adapt: whether drafts get shorter, down to none, where longer ones cost more
      time than they save.
  """

  name: ClassVar[str] = ""

  count: int = 4
  verify: str = "match"
  adapt: bool = True

  def __post_init__(self) -> None:
    positive_int("count", self.count)
    one_of("verify", self.verify, tuple(VERIFIERS))
    one_of("adapt", self.adapt, (True, False))

  @property
  def depth(self) -> int:
    """Tokens of the longest path of a draft."""
    return self.count

  @property
  def nodes(self) -> int:
    """Drafted tokens of a round, n."""
    return self.count

  @property
  def tree(self) -> bool:
    """Whether some token has several behind it."""
    return self.nodes != self.depth

  def check(self, target: Transformer) -> None:
    """Refuses a target, before its prompt is read.

    Raises:
      OptionError: it can't draft for this one.
    """

  def begin(self, target: Target) -> Drafting:
    """Goes to work."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TreeDrafter(Drafter):
  """A base class of drafters of chains and trees.

  Attributes:
    count: tokens of a chain; of a tree it is the number of widths.
    widths: of a tree, how many tokens it has at each depth: those whose paths
      are the likeliest by the draft; None: a chain.
    best: of a tree, how many of its tokens are checked, in each row those
      whose paths are the likeliest: deep where the draft is sure, broad where
      it is not; None: all. For verify="match".
  """

  widths: tuple[int, ...] | None = None
  best: int | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.widths is not None:
      if not isinstance(self.widths, tuple | list) or not self.widths:
        raise OptionError(
          "widths",
          repr(self.widths),
          "how many tokens the tree has at each depth",
          "pass widths=(2, 4, 4), for instance, or None for a chain",
        )
      for width in self.widths:
        positive_int("widths", width)
      object.__setattr__(self, "widths", tuple(self.widths))
      drawn = zip(self.widths[1:], self.widths, strict=False)
      if self.verify != "match" and any(b % a for b, a in drawn):
        raise OptionError(
          "widths",
          f"{self.widths} with verify={self.verify!r}",
          "multiples of one another: each token gets as many drawn behind it",
          "pass widths=(2, 4, 4), for instance",
        )
      object.__setattr__(self, "count", len(self.widths))
    if self.best is not None:
      # Which drawn tokens are checked must not depend on which were drawn.
      if self.widths is None or self.verify != "match":
        raise OptionError(
          "best",
          f"{self.best} with widths={self.widths}, verify={self.verify!r}",
          "a tree, whose tokens are not drawn",
          "pass widths= and leave verify out, or leave best out",
        )
      integer("best", self.best, least=1, most=sum(self.widths))

  @property
  def nodes(self) -> int:
    if self.best is not None:
      return self.best
    return self.drafted

  @property
  def drafted(self) -> int:
    """Tokens that the draft model chooses for a draft."""
    return sum(self.widths or (1,) * self.count)

  @property
  def tree(self) -> bool:
    return self.widths is not None


@runtime_checkable
class TextReader(Protocol):
  """What drafts for one text, from the text alone."""

  def add(self, tokens: Sequence[int]) -> None:
    """Appends tokens to the text."""
    ...

  def guess(self, count: int) -> list[int]:
    """What may follow, `count` tokens at most."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDrafter(Drafter):
  """A base class of drafters that look at texts, on the host."""

  def reader(self, text: Sequence[int]) -> TextReader:
    """Begins with a text."""
    raise NotImplementedError

  def begin(self, target: Target) -> Drafting:
    rows = [self.reader(text.tolist()) for text in target.texts]
    return _TextDrafting(rows, self.count)


class _TextDrafting:
  """Drafts from the text of each row alone."""

  def __init__(self, rows: Sequence[TextReader], count: int):
    self._rows, self._count = rows, count

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    del state
    guesses = []
    for row, came, top in zip(self._rows, new, most, strict=True):
      row.add(came.tolist())
      guesses.append(row.guess(min(int(top), self._count)) if top else [])
    count = np.array(list(map(len, guesses)), np.int32)
    tokens = np.zeros((len(count), width_of(count, self._count)), np.int32)
    for row, found in zip(tokens, guesses, strict=True):
      row[: len(found)] = found
    return Draft(tokens, count)


def width_of(counts: np.ndarray, most: int) -> int:
  """A width for drafts of these lengths: few, so that few are compiled."""
  longest = int(counts.max(initial=0))
  return min(most, 1 << (longest - 1).bit_length()) if longest else 0


def alike(one: Drafter, other: Drafter) -> bool:
  """Whether two drafters draft alike: for names make one anew in each call."""
  same = lambda a, b: (
    a is b or (isinstance(a, int | str | tuple | CacheKind) and a == b)
  )
  names = [f.name for f in dataclasses.fields(one) if f.init]
  return type(one) is type(other) and all(
    same(getattr(one, name), getattr(other, name)) for name in names
  )
