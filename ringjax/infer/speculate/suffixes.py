"""Drafts from the longest suffix of a text that occurred before.

Ref: Blumer et al. 1985, suffix automata; Hu et al. 2024, SAM decoding,
arXiv 2411.10666.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ringjax.checks import integer
from ringjax.infer.speculate.drafter import TextDrafter, TextReader
from ringjax.infer.speculate.lookup import continued


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffixes(TextDrafter):
  """Drafts the tokens that followed the longest suffix that occurred before.

  Attributes:
    count: Number of tokens in a draft.
    least: Minimum length of a suffix that gives a draft.
    remember: Number of the newest tokens of earlier texts (prompts and answers)
      that are searched, too; 0: none.
  """

  name: ClassVar[str] = "suffix"

  count: int = 8
  least: int = 1
  remember: int = 0
  _earlier: collections.deque[list[int]] = dataclasses.field(
    default_factory=collections.deque, repr=False, compare=False
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("least", self.least, least=1)
    integer("remember", self.remember, least=0)

  def reader(self, text: Sequence[int]) -> TextReader:
    row = SuffixAutomaton(self.least)
    for earlier in self._earlier:
      row.add(earlier[-self.remember :])
      # -1 is no token id: no match crosses from one text to the next.
      row.add([-1])
    row.add(text)
    if not self.remember:
      return row
    remembered = list(text)
    self._earlier.append(remembered)
    while sum(map(len, self._earlier)) > self.remember and (
      len(self._earlier) > 1
    ):
      self._earlier.popleft()
    return _Remembered(row, remembered)


class _Remembered:
  """A reader that also records its text for later texts."""

  def __init__(self, row: SuffixAutomaton, tokens: list[int]):
    self._row, self._tokens = row, tokens

  def add(self, tokens: Sequence[int]) -> None:
    self._tokens.extend(tokens)
    self._row.add(tokens)

  def guess(self, count: int) -> list[int]:
    return self._row.guess(count)


class SuffixAutomaton:
  """Suffix automaton of a growing text, with the first end of each substring.

  Memory: at most two states a token.
  """

  def __init__(self, least: int = 1):
    self._least = least
    self._text: list[int] = []
    # For each state: length of its longest substring, its suffix link (-1 for
    # the root), and the end of its first occurrence in the text.
    self._length, self._link, self._end = [0], [-1], [0]
    self._next: list[dict[int, int]] = [{}]
    self._last = 0

  def add(self, tokens: Sequence[int]) -> None:
    """Appends tokens; amortised constant time each."""
    for token in tokens:
      self._text.append(token)
      self._extend(token)

  def matched(self) -> tuple[int, int]:
    """Length of the longest suffix that occurred before, and its first end."""
    state = self._link[self._last]
    if state <= 0:
      return 0, 0
    return self._length[state], self._end[state]

  def guess(self, count: int) -> list[int]:
    """Guesses the tokens after the match, up to the end of its text."""
    length, end = self.matched()
    if length < self._least:
      return []
    continuation = continued(self._text, end, count)
    return (
      continuation[: continuation.index(-1)]
      if -1 in continuation
      else continuation
    )

  def _extend(self, token: int) -> None:
    size = self._length[self._last] + 1
    new = self._state(size, {}, 0, len(self._text))
    state = self._last
    while state >= 0 and token not in self._next[state]:
      self._next[state][token] = new
      state = self._link[state]
    if state >= 0:
      successor = self._next[state][token]
      if self._length[successor] == self._length[state] + 1:
        self._link[new] = successor
      else:
        copy = self._state(
          self._length[state] + 1,
          dict(self._next[successor]),
          self._link[successor],
          self._end[successor],
        )
        self._link[successor] = self._link[new] = copy
        while state >= 0 and self._next[state].get(token) == successor:
          self._next[state][token] = copy
          state = self._link[state]
    self._last = new

  def _state(
    self, length: int, following: dict[int, int], link: int, end: int
  ) -> int:
    self._length.append(length)
    self._link.append(link)
    self._end.append(end)
    self._next.append(following)
    return len(self._length) - 1
