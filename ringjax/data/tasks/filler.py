"""Filler text, in which the facts of a task are hidden.

Guarantees: a filler yields endless lines, a function of the generator that it
gets; each ends in a newline. `TextWithout` drops lines with given words.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from ringjax.data.batches.loader import DocumentSource
from ringjax.data.tasks import documents
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError

# Number of unusable lines, or documents, in a row after which the search ends.
_MOST_USELESS = 10_000


@runtime_checkable
class Filler(Protocol):
  """A source of lines."""

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Yields endless lines, each with its newline."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
  """Lines of a text, from a random one on; the start follows the end.

  Attributes:
    text: Text of the lines.

  Raises:
    DataError: If it is empty.
  """

  text: str = dataclasses.field(repr=False)

  def __post_init__(self) -> None:
    if not self.text:
      raise DataError(
        "text", "no text", "one line at least", "pass a text that is not empty"
      )

  @functools.cached_property
  def _lines(self) -> list[str]:
    return _split(self.text)

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Yields endless lines, each with its newline."""
    at = int(rng.integers(len(self._lines)))
    while True:
      yield self._lines[at]
      at = (at + 1) % len(self._lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
  """The sources of Python's standard library, from a random line on.

  Attributes:
    characters: Number of characters that are used. The beginning is of files
      that the model in `ringjax.models.tiny` was not trained on.
  """

  characters: int = 1 << 21

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Yields endless lines, each with its newline."""
    return _library(self.characters).lines(rng)


@functools.lru_cache(2)
def _library(characters: int) -> Lines:
  return Lines(text=documents.standard_library(characters).text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
  """Texts of documents of ids, in a random order.

  Attributes:
    source: A `Corpus`, or `Documents`.
    tokenizer: Tokenizer that made the ids.
  """

  source: DocumentSource
  tokenizer: AnyTokenizer

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    """Yields endless lines, each with its newline.

    Raises:
      DataError: If the documents have no text.
    """
    lengths, empty = self.source.lengths, 0
    while empty < _MOST_USELESS and len(lengths):
      document = int(rng.integers(len(lengths)))
      ids = self.source.read(document, 0, int(lengths[document]))[0]
      lines = _split(self.tokenizer.decode(ids))
      empty = 0 if lines else empty + 1
      yield from lines
    raise DataError(
      "source", "documents without text", "some text", "pass other documents"
    )


# The filler of many papers: nothing in it is like a fact, so it is easier.
NOISE = Lines(
  text=(
    "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again.\n"
  )
)


class TextWithout:
  """The lines of a filler without those that contain certain words.

  Args:
    lines: Endless lines.
    words: Words that no line may contain.
  """

  def __init__(self, lines: Iterator[str], words: list[str]):
    self._lines = lines
    self._words = re.compile("|".join(map(re.escape, sorted(set(words)))))
    self._text = ""

  def first(self, characters: int) -> str:
    """The beginning of the text.

    Raises:
      DataError: If the filler ends, or all its lines contain one of the
        words.
    """
    size, parts, dropped = len(self._text), [self._text], 0
    while size < characters:
      line = next(self._lines, None)
      if line is None or dropped == _MOST_USELESS:
        raise DataError(
          "filler",
          f"no more than {size} characters without the words of the facts",
          f"{characters}",
          "pass a filler of other text",
        )
      if self._words.search(line):
        dropped += 1
        continue
      parts.append(line)
      size, dropped = size + len(line), 0
    self._text = "".join(parts)
    return self._text[:characters]


def _split(text: str) -> list[str]:
  """The lines of a text, each with a newline; no other line ends count."""
  lines = text.split("\n")
  return [f"{line}\n" for line in (lines if lines[-1] else lines[:-1])]
