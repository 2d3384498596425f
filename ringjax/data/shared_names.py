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

_LIST = "# {names}.\n"
_QUESTION = "\n="
_LETTERS = np.array(list(string.ascii_letters))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedNames:
  """Documents that list names, one of which is in two of them: which one?

  No document says alone which of its names it is, and the question names none.
  It is short, so that few tokens but the links see more than one document.

  Attributes:
    tokenizer: a `Tokenizer` or `Bytes`.
    links: link tokens behind each document, or None.
    documents: how many there are.
    names: of each document.
    letters: of a name.
  """

  tokenizer: Any
  links: LinkTokens | None = None
  documents: int = 2
  names: int = 5
  letters: int = 2

  def __post_init__(self) -> None:
    integer("documents", self.documents, least=2)
    for name in ("names", "letters"):
      positive_int(name, getattr(self, name))
    integer(
      "names",
      self.names,
      most=len(_LETTERS) ** self.letters // self.documents,
      remedy="pass fewer names, or more letters",
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
    lists, shared = self._lists(rng)
    ids = lambda text: self.tokenizer.encode(text, bos=False)
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    answer = joined([ids(shared), end])
    texts = [_LIST.format(names=" ".join(names)) for names in lists]
    # Each document begins as if it were alone.
    made = arranged(
      [self.tokenizer.encode(text, bos=True) for text in texts],
      joined([ids(_QUESTION), answer]),
      self.links,
    )
    weights = np.zeros(len(made.tokens), np.float32)
    weights[-len(answer) :] = 1
    return made.tokens, weights, made.segments

  def _lists(self, rng: np.random.Generator) -> tuple[list[list[str]], str]:
    """The names of each document, and the one that is in two of them."""
    found: dict[str, None] = {}
    while len(found) < self.documents * self.names - 1:
      found.setdefault("".join(rng.choice(_LETTERS, self.letters)))
    names = list(found)
    lists = [names[n :: self.documents] for n in range(self.documents)]
    # The last list is one short.
    shared = str(rng.choice(lists[int(rng.integers(self.documents - 1))]))
    lists[-1].insert(int(rng.integers(self.names)), shared)
    return [lists[n] for n in rng.permutation(self.documents)], shared
