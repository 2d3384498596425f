"""Drafts from the longest end of a text that occurred before, however long.

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
  """Drafts what followed the longest end of the text that occurred before.

  Attributes:
    count: tokens of a draft.
    least: the shortest end that is taken for a hint.
    remember: tokens of earlier texts, prompts and answers, that are looked at
      too, the newest ones; 0: none.
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
      # No id: nothing goes on from one text to the next.
      row.add([-1])
    row.add(text)
    if not self.remember:
      return row
    held = list(text)
    self._earlier.append(held)
    while sum(map(len, self._earlier)) > self.remember and (
      len(self._earlier) > 1
    ):
      self._earlier.popleft()
    return _Remembered(row, held)


class _Remembered:
  """A text that is remembered as it grows."""

  def __init__(self, row: SuffixAutomaton, held: list[int]):
    self._row, self._held = row, held

  def add(self, tokens: Sequence[int]) -> None:
    self._held.extend(tokens)
    self._row.add(tokens)

  def guess(self, count: int) -> list[int]:
    return self._row.guess(count)


class SuffixAutomaton:
  """All parts of a text that grows, each with where it was first.

  Memory: at most two states a token.
  """

  def __init__(self, least: int = 1):
    self._least = least
    self._text: list[int] = []
    # Of each state: its longest part, the state of the longest shorter end
    # that occurs elsewhere too, and where a part's first occurrence ends.
    self._length, self._link, self._end = [0], [-1], [0]
    self._next: list[dict[int, int]] = [{}]
    self._last = 0

  def add(self, tokens: Sequence[int]) -> None:
    """Appends tokens; amortised constant time each."""
    for token in tokens:
      self._text.append(token)
      self._extend(token)

  def matched(self) -> tuple[int, int]:
    """The longest end of the text that occurred before, and where it ended."""
    state = self._link[self._last]
    if state <= 0:
      return 0, 0
    return self._length[state], self._end[state]

  def guess(self, count: int) -> list[int]:
    """What followed it, up to the end of that text."""
    length, end = self.matched()
    if length < self._least:
      return []
    found = continued(self._text, end, count)
    return found[: found.index(-1)] if -1 in found else found

  def _extend(self, token: int) -> None:
    size = self._length[self._last] + 1
    new = self._state(size, {}, 0, len(self._text))
    state = self._last
    while state >= 0 and token not in self._next[state]:
      self._next[state][token] = new
      state = self._link[state]
    if state >= 0:
      after = self._next[state][token]
      if self._length[after] == self._length[state] + 1:
        self._link[new] = after
      else:
        copy = self._state(
          self._length[state] + 1,
          dict(self._next[after]),
          self._link[after],
          self._end[after],
        )
        self._link[after] = self._link[new] = copy
        while state >= 0 and self._next[state].get(token) == after:
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
