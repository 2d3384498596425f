"""Questions that need two documents which a model reads apart.

Guarantees: an example is a function of its generator. Its segments are those of
`ringjax.data.arranged`: no document sees another, link tokens and the question
see all. Only the answer has weights as labels.
"""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import numpy as np

from ringjax.checks import integer, positive_int
from ringjax.data.link_tokens import LinkTokens, arranged
from ringjax.data.special_tokens import joined

_NUMBER = "# {name} is {number}.\n"
_SAME = "# {name} is the same.\n"
_QUESTION = "# {name} is "
_LETTERS = np.array(list(string.ascii_lowercase))
# The share of documents behind one with a number that refer to it.
_REFERRING = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continued:
  """Documents that give a number to a name, or say that it is the same.

  "The same" is the number of the document before, which has one. Questions are
  about names of such documents, so each needs two: where they were read apart,
  nothing in the first says whose number it also is, and nothing in the second
  which number that is.

  Attributes:
    tokenizer: a `Tokenizer` or `Bytes`.
    links: link tokens behind each document, or None.
    documents: how many there are.
    questions: the most that are asked.
    letters: of a name, at most.
    digits: of a number.
  """

  tokenizer: Any
  links: LinkTokens | None = None
  documents: int = 8
  questions: int = 1
  letters: int = 3
  digits: int = 2

  def __post_init__(self) -> None:
    integer("documents", self.documents, least=2)
    positive_int("questions", self.questions)
    for name, symbols in (("letters", len(_LETTERS)), ("digits", 9)):
      size = positive_int(name, getattr(self, name))
      integer(
        "documents",
        self.documents,
        most=symbols**size,
        remedy=f"pass fewer documents, or more {name}",
      )
    if self.links is not None:
      # Refuses more documents than it has slots.
      self.links.ids(self.documents - 1)

  def example(
    self, rng: np.random.Generator
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An example, a function of `rng` alone.

    Returns:
      ids int32 [T], their weights as labels, float32 [T], and segments [T].
    """
    names, numbers = self._names(rng), self._numbers(rng)
    refers = self._refers(rng)
    ids = lambda text: self.tokenizer.encode(text, bos=False)
    texts = [
      (_SAME if same else _NUMBER).format(name=name, number=number)
      for name, number, same in zip(names, numbers, refers, strict=True)
    ]
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    parts: list[np.ndarray] = []
    for n in rng.permutation(np.flatnonzero(refers))[: self.questions]:
      parts.append(ids(_QUESTION.format(name=names[n])))
      parts.append(joined([ids(numbers[n - 1]), end]))
    begin = self.tokenizer.bos_id
    made = arranged(
      [ids(text) for text in texts],
      joined(parts),
      self.links,
      None if begin is None else [begin],
      # As in KVLink: documents do not see what begins the prompt.
      shared=False,
    )
    weights = np.zeros(len(made.tokens), np.float32)
    weights[len(weights) - sum(map(len, parts)) :] = np.concatenate(
      [np.full(len(part), n % 2) for n, part in enumerate(parts)]
    )
    return made.tokens, weights, made.segments

  def _refers(self, rng: np.random.Generator) -> np.ndarray:
    """Which documents refer to the one before, bool [documents]: one or more.

    None refers to one that refers itself.
    """
    found = rng.random(self.documents) < _REFERRING
    found[0] = False
    for n in range(1, self.documents):
      found[n] &= not found[n - 1]
    if not found.any():
      found[rng.integers(1, self.documents)] = True
    return found

  def _names(self, rng: np.random.Generator) -> list[str]:
    """Different names."""
    found: dict[str, None] = {}
    while len(found) < self.documents:
      size = int(rng.integers(1, self.letters + 1))
      found.setdefault("".join(rng.choice(_LETTERS, size)))
    return list(found)

  def _numbers(self, rng: np.random.Generator) -> list[str]:
    """Different numbers."""
    low, high = 10 ** (self.digits - 1), 10**self.digits
    found = rng.choice(high - low, self.documents, replace=False) + low
    return [str(number) for number in found.tolist()]
