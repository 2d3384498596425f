"""Text without meaning for a task, in which its facts are hidden.

Guarantees: a filler gives lines without end, by nothing but the generator that
it is given; each ends in a newline. `Unhidden` drops the lines that would tell
a fact.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ringjax.data import documents
from ringjax.errors import DataError

# So many lines, or documents, in a row without a use: there will be none.
_PATIENCE = 10_000


@runtime_checkable
class Filler(Protocol):
  """Where lines come from."""

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Lines without end, each with its newline."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
  """The lines of a text from a random one on, round and round.

  Attributes:
    text: what they are taken from.

  Raises:
    DataError: it is empty.
  """

  text: str = dataclasses.field(repr=False)

  def __post_init__(self) -> None:
    if not self.text:
      raise DataError("text", "no text", "a line at least", "pass some text")

  @functools.cached_property
  def _lines(self) -> list[str]:
    return _split(self.text)

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Lines without end, each with its newline."""
    at = int(rng.integers(len(self._lines)))
    while True:
      yield self._lines[at]
      at = (at + 1) % len(self._lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
  """The sources of Python's standard library, from a random line on.

  Attributes:
    characters: how much of them is used. The beginning is of files that the
      model in `ringjax.models.tiny` has not seen.
  """

  characters: int = 1 << 21

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Lines without end, each with its newline."""
    return _library(self.characters).lines(rng)


@functools.lru_cache(2)
def _library(characters: int) -> Lines:
  return Lines(text=documents.standard_library(characters).text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
  """The texts of documents that lie there as ids, in a random order.

  Attributes:
    source: a `Corpus`, or `Documents`.
    tokenizer: which made the ids.
  """

  source: Any
  tokenizer: Any

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Lines without end, each with its newline.

    Raises:
      DataError: documents without text.
    """
    lengths, empty = self.source.lengths, 0
    while empty < _PATIENCE and len(lengths):
      document = int(rng.integers(len(lengths)))
      ids, _ = self.source.read(document, 0, int(lengths[document]))
      found = _split(self.tokenizer.decode(ids))
      empty = 0 if found else empty + 1
      yield from found
    raise DataError(
      "source", "documents without text", "some text", "pass another filler"
    )


# What many papers use: nothing in it is like a fact, so it is easier.
NOISE = Lines(
  text=(
    "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again.\n"
  )
)


class Unhidden:
  """A filler's text as far as it was asked for, without what would tell.

  Args:
    lines: without end.
    telling: what no line may hold.
  """

  def __init__(self, lines: Iterator[str], telling: list[str]):
    self._lines = lines
    # The longest first, so that one that begins with another is found.
    words = sorted(set(telling), key=lambda word: (-len(word), word))
    self._telling = re.compile("|".join(map(re.escape, words)))
    self._text = ""

  def first(self, characters: int) -> str:
    """The beginning of the text.

    Raises:
      DataError: the filler ends, or its lines all tell.
    """
    size, parts, dropped = len(self._text), [self._text], 0
    while size < characters:
      line = next(self._lines, None)
      if line is None or dropped == _PATIENCE:
        raise DataError(
          "filler",
          f"no more than {size} characters that tell nothing",
          f"{characters}",
          "pass a filler of other text",
        )
      if self._telling.search(line):
        dropped += 1
        continue
      parts.append(line)
      size, dropped = size + len(line), 0
    self._text = "".join(parts)
    return self._text[:characters]


def _split(text: str) -> list[str]:
  """Lines with their newlines, which the last gets too; by newlines only."""
  lines = text.split("\n")
  return [f"{line}\n" for line in (lines if lines[-1] else lines[:-1])]
