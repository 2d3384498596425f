"""Questions that need two documents which a model reads apart.

Guarantees: an example is a function of its generator. Its segments are those of
`ringjax.data.arranged`: no document sees another, link tokens and the question
see all. Only answers have weights as labels.
"""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import numpy as np

from ringjax.checks import integer, positive_int
from ringjax.data.link_tokens import LinkTokens, arranged
from ringjax.data.special_tokens import joined

_DOCUMENT = "# {name} is {number}.\n"
_QUESTION = "# {first}, {second}: "
_LETTERS = np.array(list(string.ascii_lowercase))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPlace:
  """Documents with a number each, of which two are asked for by their places.

  "# 3, 1: " asks for the numbers of the third and the first document. No
  document says which it is: that depends on those before it, which a document
  that is read apart does not see. Documents have different lengths, so that a
  token's position does not tell it either.

  Attributes:
    tokenizer: a `Tokenizer` or `Bytes`.
    links: link tokens behind each document, or None.
    documents: how many there are, at most 9.
    questions: how many are asked.
    letters: of a name, at most.
  """

  tokenizer: Any
  links: LinkTokens | None = None
  documents: int = 5
  questions: int = 1
  letters: int = 6

  def __post_init__(self) -> None:
    integer("documents", self.documents, least=2, most=9)
    for name in ("questions", "letters"):
      positive_int(name, getattr(self, name))
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
    numbers = rng.permutation(10)[: self.documents]
    texts = [
      _DOCUMENT.format(name=self._name(rng), number=number)
      for number in numbers
    ]
    ids = lambda text: self.tokenizer.encode(text, bos=False)
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    parts: list[np.ndarray] = []
    for _ in range(self.questions):
      a, b = rng.permutation(self.documents)[:2]
      parts.append(ids(_QUESTION.format(first=a + 1, second=b + 1)))
      parts.append(joined([ids(f"{numbers[a]}{numbers[b]}"), end]))
    # Each document begins as if it were alone. One beginning that all see would
    # tell a document's tokens how far behind it they are.
    made = arranged(
      [self.tokenizer.encode(text, bos=True) for text in texts],
      joined(parts),
      self.links,
    )
    weights = np.zeros(len(made.tokens), np.float32)
    weights[len(weights) - sum(map(len, parts)) :] = np.concatenate(
      [np.full(len(part), n % 2) for n, part in enumerate(parts)]
    )
    return made.tokens, weights, made.segments

  def _name(self, rng: np.random.Generator) -> str:
    size = int(rng.integers(1, self.letters + 1))
    return "".join(rng.choice(_LETTERS, size))
