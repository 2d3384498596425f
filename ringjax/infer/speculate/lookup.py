"""Drafts from the text itself: tokens that followed the same n-gram before.

Ref: Saxena 2023, prompt lookup decoding; Yang et al. 2023, LLMA,
arXiv 2304.04487.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ringjax.checks import positive_int
from ringjax.infer.speculate.drafter import TextDrafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(TextDrafter):
  """Drafts the tokens that followed the last occurrence of the last n-gram.

  Attributes:
    count: Number of tokens in a draft.
    ngram: Maximum number of last tokens to look up; if they did not occur
      before, one less, down to one.
  """

  name: ClassVar[str] = "lookup"

  count: int = 8
  ngram: int = 3

  def __post_init__(self) -> None:
    super().__post_init__()
    positive_int("ngram", self.ngram)

  def reader(self, text: Sequence[int]) -> _NgramIndex:
    index = _NgramIndex(self.ngram)
    index.add(text)
    return index


class _NgramIndex:
  """A text with the last position of each n-gram, except the one at its end."""

  def __init__(self, ngram: int):
    self._text: list[int] = []
    # At index n - 1: position of the token after each n-gram.
    self._following: list[dict[tuple[int, ...], int]] = [
      {} for _ in range(ngram)
    ]

  def add(self, tokens: Sequence[int]) -> None:
    text = self._text
    for token in tokens:
      end = len(text)
      for n, positions in enumerate(self._following):
        if end > n:
          positions[tuple(text[end - n - 1 :])] = end
      text.append(token)

  def guess(self, count: int) -> list[int]:
    text = self._text
    for n in range(min(len(self._following), len(text)), 0, -1):
      start = self._following[n - 1].get(tuple(text[-n:]))
      if start is not None:
        return continued(text, start, count)
    return []


def continued(text: Sequence[int], start: int, count: int) -> list[int]:
  """Takes `count` tokens from `start` on, repeated from there at the end."""
  continuation = list(text[start : start + count])
  while len(continuation) < count:
    continuation.append(continuation[len(continuation) - (len(text) - start)])
  return continuation
