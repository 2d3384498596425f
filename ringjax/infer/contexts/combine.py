"""Ways to combine contexts that were encoded apart, by their names.

| name | contexts are read | positions |
| --- | --- | --- |
| `full` | anew, as one text | consecutive |
| `parallel` | as they were encoded, behind one prefix | the same for all |
| `ape` | so, with a temperature and a scale | the same for all |
| `select` | so, those that queries look at most | the same for all |
| `recompute` | moved, and some of their tokens anew | consecutive |
| `kvlink` | moved, with link tokens behind each | consecutive |
| `cepe` | by the model's encoder, in chunks | none |
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.link_tokens import LinkTokens
from ringjax.errors import OptionError
from ringjax.option_text import named


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combine:
  """A base class of ways to combine contexts.

  Attributes:
    prefix: ids of the tokens before all contexts, such as a system prompt.
      Contexts that are encoded here see it; those of `KVLink` do not.
    moves: whether contexts get consecutive positions.
  """

  moves: ClassVar[bool] = False
  name: ClassVar[str] = ""

  prefix: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    try:
      ids = np.asarray(self.prefix)
    except ValueError:
      ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
      raise OptionError(
        "prefix",
        repr(self.prefix),
        "ids of tokens",
        "encode the text of the prefix first",
      )
    object.__setattr__(self, "prefix", tuple(int(n) for n in ids))

  @property
  def shared_prefix(self) -> tuple[int, ...]:
    """The prefix that contexts see when they are encoded."""
    return self.prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Combine):
  """Prefix, contexts and question are read as one text."""

  name: ClassVar[str] = "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Combine):
  """Contexts are at the same positions, behind the prefix; none sees another.

  The question comes behind the longest one.
  """

  name: ClassVar[str] = "parallel"


@dataclasses.dataclass(frozen=True, kw_only=True)
class APE(Parallel):
  """As `Parallel`, with a temperature and a scale (arXiv 2502.05431).

  Attributes:
    temperature: T; scores of contexts' keys are divided by it.
    scale: S; the log-sum-exp of these scores, by which contexts are weighed
      against prefix, question and answer, is multiplied by S T.
  """

  name: ClassVar[str] = "ape"

  temperature: int | float = 0.9
  scale: int | float = 0.9

  def __post_init__(self) -> None:
    super().__post_init__()
    for field in ("temperature", "scale"):
      value = number(field, getattr(self, field), above=0)
      object.__setattr__(self, field, float(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection(Parallel):
  """As `Parallel`; queries read what they look at most (arXiv 2412.16545).

  A context's weight is the sum of its five largest attention probabilities.

  Attributes:
    keep: how many contexts are read.
    by: "query": each token and head selects for itself; "token": each token,
      its heads together; "head": the tokens of a question together, and each
      one of the answer for itself; "call": so, and heads together. A question
      whose tokens select together is read in one call.
  """

  name: ClassVar[str] = "select"

  keep: int = 2
  by: str = "call"

  def __post_init__(self) -> None:
    super().__post_init__()
    positive_int("keep", self.keep)
    one_of(
      "by",
      self.by,
      ("query", "token", "head", "call"),
      remedy="leave it out for 'call'",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute(Combine):
  """Contexts one behind the other; tokens that differ most are computed anew.

  Which these are, the keys of the second layer say: those of one text, against
  those of contexts apart (CacheBlend, arXiv 2405.16444).

  Attributes:
    fraction: of the contexts' tokens, from 0 (none: keys are moved alone) to 1
      (all: as `Full`).
  """

  moves: ClassVar[bool] = True
  name: ClassVar[str] = "recompute"

  fraction: int | float = 0.15

  def __post_init__(self) -> None:
    super().__post_init__()
    value = number("fraction", self.fraction, least=0, most=1)
    object.__setattr__(self, "fraction", float(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLink(Combine):
  """Contexts one behind the other, link tokens behind each (arXiv 2502.16002).

  Contexts see neither the prefix nor each other; link tokens and the question
  see all.

  Attributes:
    links: ids of the link tokens that the model was trained with; None: none.
  """

  moves: ClassVar[bool] = True
  name: ClassVar[str] = "kvlink"

  links: LinkTokens | None = None

  @property
  def shared_prefix(self) -> tuple[int, ...]:
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cepe(Combine):
  """The model's encoder reads contexts, in chunks (arXiv 2402.16617).

  For models with an encoder, `ringjax.models.cepe`; without a prefix.

  Attributes:
    chunk: tokens of a chunk; 0: the longest that the encoder reads.
  """

  name: ClassVar[str] = "cepe"

  chunk: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("chunk", self.chunk, least=0)


WAYS: dict[str, type[Combine]] = {
  way.name: way
  for way in (Full, Parallel, APE, Selection, Recompute, KVLink, Cepe)
}


def combine_of(how: object, name: str = "combine") -> Combine:
  """A way to combine: as it is, or by its name and options.

  Args:
    how: a `Combine`, or a text such as "ape:temperature=0.8,scale=0.9".
    name: of the argument or flag, for errors.

  Raises:
    OptionError: no such way, or other options than it has.
  """
  return named(how, Combine, WAYS, name)
