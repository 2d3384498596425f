"""Strategies that combine separately encoded contexts, by name.

| name | contexts are read | positions |
| --- | --- | --- |
| `full` | again, as one text | consecutive |
| `parallel` | as they were encoded, after one prefix | the same for all |
| `ape` | as `parallel`, with a temperature and a scale | the same for all |
| `select` | as `parallel`, those with most attention | the same for all |
| `recompute` | moved, some of their tokens computed again | consecutive |
| `kvlink` | moved, with link tokens after each | consecutive |
| `cepe` | by the model's encoder, in chunks | none |
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.tasks.link_tokens import LinkTokens
from ringjax.errors import OptionError
from ringjax.option_text import named


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combine:
  """Base class of strategies that combine contexts.

  Attributes:
    prefix: Token ids before all contexts, such as a system prompt. Contexts
      are encoded after it, except with `KVLink`.
    moves: Whether contexts get consecutive positions.
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
    """Token ids of the prefix that contexts see when they are encoded."""
    return self.prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Combine):
  """Reads prefix, contexts and question as one text."""

  name: ClassVar[str] = "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Combine):
  """Places contexts at the same positions after the prefix, apart.

  No context sees another. The question follows the longest one.
  """

  name: ClassVar[str] = "parallel"


@dataclasses.dataclass(frozen=True, kw_only=True)
class APE(Parallel):
  """Parallel contexts with a temperature and a scale (arXiv 2502.05431).

  Attributes:
    temperature: Divisor T of the scores of contexts' keys.
    scale: Factor S: the log-sum-exp of these scores, by which contexts are
      weighed against prefix, question and answer, is multiplied by S T.
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
  """Parallel contexts; a query reads the best ones (arXiv 2412.16545).

  A context's weight is the sum of its five largest attention probabilities.

  Attributes:
    keep: Number of contexts that a query reads.
    by: Unit that selects. "query": each token and head alone; "token": each
      token, its heads together; "head": each head, all tokens of a question
      together and each token of the answer alone; "call": as "head", with all
      heads together. A question whose tokens select together is read in one
      call.
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
  """Places contexts one after the other and recomputes some of their tokens.

  Recomputed are the tokens whose second-layer keys differ most between the
  contexts read as one text and encoded separately (CacheBlend, arXiv
  2405.16444).

  Attributes:
    fraction: Fraction of the contexts' tokens to recompute, from 0 (keys are
      only moved) to 1 (all: as `Full`).
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
  """Places contexts in sequence, link tokens after each (arXiv 2502.16002).

  Contexts see neither the prefix nor each other; link tokens and the question
  see all.

  Attributes:
    links: Link tokens that the model was trained with; None: no link tokens.
  """

  moves: ClassVar[bool] = True
  name: ClassVar[str] = "kvlink"

  links: LinkTokens | None = None

  @property
  def shared_prefix(self) -> tuple[int, ...]:
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cepe(Combine):
  """Encodes contexts in chunks with the model's encoder (arXiv 2402.16617).

  For models with an encoder, `ringjax.models.cepe`; without a prefix.

  Attributes:
    chunk: Number of tokens in a chunk; 0: the longest that the encoder reads.
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
  """Parses a strategy by its name and options; a `Combine` is returned as is.

  Args:
    how: A `Combine`, or a text such as "ape:temperature=0.8,scale=0.9".
    name: Name of the argument or flag, for error messages.

  Raises:
    OptionError: If the name or one of its options is unknown.
  """
  return named(how, Combine, WAYS, name)
