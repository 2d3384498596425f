"""Interfaces of drafters, which guess tokens that a target model checks.

Guarantees: a wrong guess costs time and changes no answer.

A `Drafter` holds the options; its `begin` makes a `Drafting`, which serves one
call of `generate` and knows the texts of its rows.
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
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.choosing.block_attention import BlockAttention
from ringjax.nn.attention_layers.choosing.native_attention import (
  NativeAttention,
)
from ringjax.nn.attention_layers.choosing.pooled_block_attention import (
  PooledBlockAttention,
)
from ringjax.nn.attention_layers.compressed import CompressedAttention
from ringjax.nn.attention_layers.folded_attention import FoldedAttention
from ringjax.nn.attention_layers.pooled_latent import PooledLatent

# Attention whose positions or summaries are those of one path of tokens.
OF_ONE_PATH = (
  FoldedAttention,
  CompressedAttention,
  PooledLatent,
  PooledBlockAttention,
  BlockAttention,
  NativeAttention,
)


class Target(NamedTuple):
  """The target model of a draft, with its session and prompts.

  Fields:
    model: Target model.
    session: Session of the target, which has read the prompts.
    sampler: Sampler of the target, as an argument of jit.
    texts: Tokens that the session has read in each row, earlier turns included;
      the prompts alone after contexts. int32 [T].
    drawn: Whether drafted tokens are drawn from a distribution that the draft
      states, see `verifiers.rejection`; else the sampler chooses them by the
      draft's logits.
    count: Maximum number of new tokens in a row.
  """

  model: Transformer
  session: Session
  sampler: Callable[..., Any]
  texts: Sequence[np.ndarray]
  drawn: bool
  count: int


class Draft(NamedTuple):
  """Drafted tokens after the last chosen token of each row.

  Fields:
    tokens: Drafted token ids, int32 [B, n].
    count: Number of drafted tokens, int32 [B]; the others are padding.
    parents: Index of the token that each follows, int32 [B, n], -1 for the last
      chosen one; None: each follows the one before.
    probs: Distribution that each was drawn from, float32 [B, n, V]; None: they
      were chosen deterministically.
  """

  tokens: Int[Array | np.ndarray, "B n"]
  count: Int[Array | np.ndarray, " B"]
  parents: Int[Array, "B n"] | None = None
  probs: Float[Array, "B n V"] | None = None


@runtime_checkable
class Drafting(Protocol):
  """State of a drafter for the rows of one call."""

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    """Drafts tokens for one round.

    Args:
      new: New tokens of each row since the round before, int32 [n].
      state: Decode state; its token is the last of `new`.
      most: Maximum useful tokens of each row, int [B]; 0 for a row that has
        ended.
    """
    ...


class TreeShape(NamedTuple):
  """Shape of a tree of drafted tokens.

  Fields:
    widths: Number of tokens at each depth.
    best: Number of tokens that are checked, of all.
    beam: Number of tokens of a depth that are continued; None: all.
  """

  widths: tuple[int, ...]
  best: int
  beam: int | None = None

  @property
  def continued(self) -> int:
    """Number of tokens that are continued, at all depths but the last."""
    return sum(min(width, self.beam or width) for width in self.widths[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter:
  """Base class of drafters, which are equal if all their options are.

  Models and tokenizers are equal to themselves alone.

  Attributes:
    count: Maximum number of drafted tokens in sequence.
    verify: Acceptance rule, one of `verifiers.VERIFIERS`: "match", which gives
      the tokens of a call without drafts, or "rejection".
    adapt: Whether drafts get shorter, down to none, where longer ones cost more
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
    """Number of tokens on the longest path of a draft."""
    return self.count

  @property
  def nodes(self) -> int:
    """Number of drafted tokens that are checked in a round, n."""
    return self.count

  @property
  def tree(self) -> bool:
    """Whether drafts are trees: some token may have several children."""
    return self.nodes != self.depth

  def check(self, target: Transformer) -> None:
    """Refuses an unsuitable target, before its prompt is read.

    Raises:
      OptionError: If this drafter does not support the target.
    """

  def begin(self, target: Target) -> Drafting:
    """Starts drafting for a target."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeDrafter(Drafter):
  """Base class of drafters of chains and trees.

  Attributes:
    count: Number of tokens in a chain; for a tree, the number of widths.
    widths: Number of tokens of a tree at each depth, those with the likeliest
      paths by the draft; None: a chain.
    best: Number of a tree's tokens that are checked, in each row those with
      the likeliest paths: deep where the draft is sure, broad where it is not;
      None: all. For verify="match".
    beam: Number of a depth's tokens that the draft continues, those with the
      likeliest paths; the others are leaves (EAGLE-2); None: all. For
      verify="match".
  """

  widths: tuple[int, ...] | None = None
  best: int | None = None
  beam: int | None = None

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
          "multiples of one another: each token gets as many drawn after it",
          "pass widths=(2, 4, 4), for instance",
        )
      object.__setattr__(self, "count", len(self.widths))
    for name, largest in (("best", sum(self.widths or ())), ("beam", None)):
      number = getattr(self, name)
      if number is None:
        continue
      # For drawn tokens, the choice of those that are checked must not depend
      # on the tokens: it would change their distribution.
      if self.widths is None or self.verify != "match":
        raise OptionError(
          name,
          f"{number} with widths={self.widths}, verify={self.verify!r}",
          "a tree, whose tokens are not drawn",
          f"pass widths= and leave verify out, or leave {name} out",
        )
      integer(name, number, least=1, most=largest)

  @property
  def nodes(self) -> int:
    if self.best is not None:
      return self.best
    return sum(self.widths or (1,) * self.count)

  @property
  def drafted(self) -> int:
    """Maximum number of drafted tokens that the draft model reads."""
    widths = self.widths or (1,) * self.count
    return sum(min(width, self.beam or width) for width in widths)

  def check_tree(self, target: Transformer) -> None:
    """Refuses a tree, before a prompt is read, that a target can't check.

    Raises:
      OptionError: If a depth has more tokens than there are paths, or a layer
        of the target reads one path of tokens only.
    """
    if self.widths is None:
      return
    continued, vocab = 1, target.config.vocab
    for depth, width in enumerate(self.widths):
      if width > continued * vocab:
        raise OptionError(
          "widths",
          f"{width} tokens at depth {depth + 1}, after {continued}",
          f"at most {continued * vocab}, with {vocab} ids",
          "pass smaller widths",
        )
      continued = min(width, self.beam or width)
    for layer in target.config.layers:
      if isinstance(layer.attention, OF_ONE_PATH):
        raise OptionError(
          "widths",
          f"{self.widths}, for a {target.config.family} with layers of "
          f"{type(layer.attention).__name__}",
          "a chain: these layers read one path of tokens",
          "leave widths out",
        )

  def shape(self, count: int) -> int | TreeShape:
    """Shape of a draft: a chain of `count` tokens, or the tree."""
    if self.widths is None:
      return count
    return TreeShape(self.widths, self.nodes, self.beam)

  @property
  def tree(self) -> bool:
    return self.widths is not None


@runtime_checkable
class TextReader(Protocol):
  """Drafter for one text, from the text alone."""

  def add(self, tokens: Sequence[int]) -> None:
    """Appends tokens to the text."""
    ...

  def guess(self, count: int) -> list[int]:
    """Guesses the next tokens, at most `count`."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDrafter(Drafter):
  """Base class of drafters that search texts on the host."""

  def reader(self, text: Sequence[int]) -> TextReader:
    """Makes the reader of a row from its prompt."""
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
    for row, new_tokens, limit in zip(self._rows, new, most, strict=True):
      row.add(new_tokens.tolist())
      guesses.append(row.guess(min(int(limit), self._count)) if limit else [])
    count = np.array(list(map(len, guesses)), np.int32)
    tokens = np.zeros((len(count), width_of(count, self._count)), np.int32)
    for row, guess in zip(tokens, guesses, strict=True):
      row[: len(guess)] = guess
    return Draft(tokens, count)


def width_of(counts: np.ndarray, most: int) -> int:
  """Padded width of drafts, a power of two: few programs are compiled."""
  longest = int(counts.max(initial=0))
  return min(most, 1 << (longest - 1).bit_length()) if longest else 0
