"""Questions that need two documents which a model reads separately.

Guarantees: an example is a function of its generator. Its segments are those of
`ringjax.data.arranged`: no document sees another, link tokens and the question
see all. Only the answer has weights as labels.
"""

from __future__ import annotations

import dataclasses
import string

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import integer, positive_int
from ringjax.data.tasks.link_tokens import LinkTokens, arranged
from ringjax.data.text.special_tokens import joined
from ringjax.data.text.tokenizer import AnyTokenizer

_NUMBER = "# {name} is {number}.\n"
_SAME = "# {name} is the same.\n"
_QUESTION = "# {name} is "
_LETTERS = np.array(list(string.ascii_lowercase))
# Fraction of other documents that refer to the one before.
_REFERRING = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continued:
  """Documents that give a number to a name, or say that it is the same.

  "The same" is the number of the document before, which has one. A question is
  about the name of such a document, so it needs two: if each was read alone,
  nothing in the first says whose number it also is, and nothing in the second
  which number that is.

  Attributes:
    tokenizer: A `Tokenizer` or `Bytes`.
    links: Link tokens after each document, or None.
    documents: Number of documents.
    letters: Largest number of letters of a name.
    digits: Digits of a number.
  """

  tokenizer: AnyTokenizer
  links: LinkTokens | None = None
  documents: int = 4
  letters: int = 4
  digits: int = 2

  def __post_init__(self) -> None:
    integer("documents", self.documents, least=2)
    for name, symbols in (("letters", len(_LETTERS)), ("digits", 9)):
      size = positive_int(name, getattr(self, name))
      integer(
        "documents",
        self.documents,
        most=symbols**size,
        remedy=f"pass fewer documents, or more {name}",
      )
    if self.links is not None:
      # Refuses more documents than the links have slots.
      self.links.ids(self.documents - 1)

  def example(
    self, rng: np.random.Generator
  ) -> tuple[
    Int[np.ndarray, " T"], Float[np.ndarray, " T"], Int[np.ndarray, " T"]
  ]:
    """Makes an example, a function of `rng` alone.

    Returns:
      ids int32 [T], their weights as labels, float32 [T], and segments [T].
    """
    names, numbers = self._names(rng), self._numbers(rng)
    asked_index = int(rng.integers(1, self.documents))
    refers = rng.random(self.documents) < _REFERRING
    refers[asked_index] = True
    for n in range(self.documents):
      # No document refers to one that refers itself.
      has_number_before = n > 0 and not refers[n - 1] and n + 1 != asked_index
      refers[n] &= n == asked_index or has_number_before
    ids = lambda text: self.tokenizer.encode(text, bos=False)
    texts = [
      (_SAME if refers_back else _NUMBER).format(name=name, number=number)
      for name, number, refers_back in zip(names, numbers, refers, strict=True)
    ]
    question = ids(_QUESTION.format(name=names[asked_index]))
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    answer = joined([ids(numbers[asked_index - 1]), end])
    begin = self.tokenizer.bos_id
    prompt = arranged(
      [ids(text) for text in texts],
      joined([question, answer]),
      self.links,
      None if begin is None else [begin],
      # Otherwise a document's tokens would know their distance from the
      # beginning, and so the order of the documents.
      shared=False,
    )
    weights = np.zeros(len(prompt.tokens), np.float32)
    weights[-len(answer) :] = 1
    return prompt.tokens, weights, prompt.segments

  def _names(self, rng: np.random.Generator) -> list[str]:
    """Draws different names."""
    names: dict[str, None] = {}
    while len(names) < self.documents:
      size = int(rng.integers(1, self.letters + 1))
      names.setdefault("".join(rng.choice(_LETTERS, size)))
    return list(names)

  def _numbers(self, rng: np.random.Generator) -> list[str]:
    """Draws different numbers."""
    low, high = 10 ** (self.digits - 1), 10**self.digits
    numbers = rng.choice(high - low, self.documents, replace=False) + low
    return [str(number) for number in numbers.tolist()]
