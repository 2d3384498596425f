"""Drafts from the text itself: what followed the same words before.

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
  """Drafts what followed the last tokens where they occurred last.

  Attributes:
    count: tokens of a draft.
    ngram: how many last tokens are looked up at most; if they did not occur
      before, one less, down to one.
  """

  name: ClassVar[str] = "lookup"

  count: int = 8
  ngram: int = 3

  def __post_init__(self) -> None:
    super().__post_init__()
    positive_int("ngram", self.ngram)

  def reader(self, text: Sequence[int]) -> _Looked:
    made = _Looked(self.ngram)
    made.add(text)
    return made


class _Looked:
  """A text and where its n-grams were last, but for that at its end."""

  def __init__(self, ngram: int):
    self._text: list[int] = []
    # By length less one: where the token behind an n-gram is.
    self._behind: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram)]

  def add(self, tokens: Sequence[int]) -> None:
    text = self._text
    for token in tokens:
      end = len(text)
      for n, behind in enumerate(self._behind):
        if end > n:
          behind[tuple(text[end - n - 1 :])] = end
      text.append(token)

  def guess(self, count: int) -> list[int]:
    text = self._text
    for n in range(min(len(self._behind), len(text)), 0, -1):
      start = self._behind[n - 1].get(tuple(text[-n:]))
      if start is not None:
        return continued(text, start, count)
    return []


def continued(text: Sequence[int], start: int, count: int) -> list[int]:
  """`count` tokens from `start` on; what is repeated goes on being repeated."""
  found = list(text[start : start + count])
  while len(found) < count:
    found.append(found[len(found) - (len(text) - start)])
  return found
