"""Texts that train retrieval, as sources of a `Loader`.

Guarantees: an example is a function of its generator, and `length` tokens long.
Its tokens are of three kinds: recalled, which earlier ones determine; text; and
random, which are unpredictable and have weight 0. As labels, all recalled
tokens together weigh 1 / `text` times as much as the text, however few they
are; an example weighs as much as a document of its length.

A model learns this in the order of the classes: to repeat what followed the
last time (Copies; the induction heads of Olsson et al. 2022, arXiv 2209.11895),
to do so by a name (Pairs), and from anywhere in a long text (Questions, with
the lines that `ringjax.data.tasks.needle` hides).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import integer, number
from ringjax.data.tasks.filler import Filler
from ringjax.data.tasks.needle import ANSWER, NEEDLE, QUESTION, names, numbers
from ringjax.data.text.special_tokens import joined
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError

# Kinds of tokens.
RANDOM, TEXT, RECALLED = range(3)
_PAIR = "{name} is {number}.\n"
_DIGITS = (4, 6)
# Fractions of names that are words of the text, and that are random letters.
_WORDS, _LETTERS = 0.5, 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
  """Base of the sources of texts that teach recall.

  Attributes:
    tokenizer: A `Tokenizer` or `Bytes`.
    filler: Source of the text.
    length: Tokens of an example, T.
    text: Weight of the text's tokens relative to the recalled ones.
  """

  tokenizer: AnyTokenizer
  filler: Filler
  length: int
  text: float = 0.5

  def __post_init__(self) -> None:
    number("text", self.text, least=0)
    integer("length", self.length, least=self._least)

  @property
  def _least(self) -> int:
    """Fewest tokens of a useful example."""
    return 32

  def example(
    self, rng: np.random.Generator
  ) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Makes an example, a function of `rng` alone.

    Returns:
      ids int32 [T], and their weights as labels, float32 [T].
    """
    parts = [(self._begin(), RANDOM), *self._parts(rng)]
    ids = joined([part for part, _ in parts])
    kinds = np.concatenate(
      [np.broadcast_to(kind, len(part)) for part, kind in parts]
    )
    weights = np.zeros(len(ids))
    for kind, share in ((RECALLED, 1.0), (TEXT, self.text)):
      of_kind = kinds == kind
      weights[of_kind] = share / max(1, of_kind.sum())
    total = weights.sum()
    if total:
      weights *= len(ids) / total
    return ids, weights.astype(np.float32)

  def _parts(self, rng: np.random.Generator) -> list[tuple[np.ndarray, Any]]:
    """Ids after the beginning of the text, and the kind(s) of each part."""
    raise NotImplementedError

  def _ids(self, text: str) -> np.ndarray:
    return self.tokenizer.encode(text, bos=False)

  def _begin(self) -> np.ndarray:
    bos_id = self.tokenizer.bos_id
    return np.array([] if bos_id is None else [bos_id], np.int32)

  def _lines(self, rng: np.random.Generator, room: int) -> list[np.ndarray]:
    """Lines of the filler, `room` tokens in all; the first may be cut."""
    lines: list[np.ndarray] = []
    for line in self.filler.lines(rng):
      if room <= 0:
        break
      lines.append(self._ids(line))
      room -= len(lines[-1])
    while room < 0:
      # Cut from the front: lines keep their ends.
      first = lines.pop(0)
      if len(first) > -room:
        lines.insert(0, first[-room:])
      room = min(0, room + len(first))
    return lines

  def _names(self, rng: np.random.Generator, count: int) -> list[str]:
    """Different names of all sorts."""
    words: Iterator[str] = self._words(rng)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
      draw = rng.random()
      if draw < _WORDS:
        name = next(words)
      elif draw < _WORDS + _LETTERS:
        letters = rng.integers(26, size=rng.integers(3, 9))
        name = "".join(chr(ord("a") + c) for c in letters)
      else:
        (name,) = names(rng, 1)
      drawn.setdefault(name)
    return list(drawn)

  def _words(self, rng: np.random.Generator) -> Iterator[str]:
    """Words of the filler; a text without words gives names instead."""
    lines_without = 0
    for line in self.filler.lines(rng):
      words = re.findall(r"[a-z]{3,10}", line)
      lines_without = 0 if words else lines_without + 1
      if words:
        yield words[int(rng.integers(len(words)))]
      elif lines_without > 100:
        break
    while True:
      yield from names(rng, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies(Recall):
  """Random tokens, text, and the same tokens again.

  The fewer different tokens, the more of them determine the next one.

  Attributes:
    fewest: Smallest number of different tokens that are drawn from.
    most: Upper bound of the ids that are drawn from.
  """

  fewest: int = 8
  most: int = 256

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 2 <= self.fewest <= self.most <= self.tokenizer.vocab_size:
      raise OptionError(
        "fewest, most",
        f"{self.fewest}, {self.most}",
        f"2 <= fewest <= most <= {self.tokenizer.vocab_size}, the vocabulary",
        "pass numbers in that order",
      )

  def _parts(self, rng: np.random.Generator) -> list[tuple[np.ndarray, Any]]:
    letters = int(2 ** rng.uniform(np.log2(self.fewest), np.log2(self.most)))
    room = self.length - len(self._begin())
    count = int(room * rng.uniform(0.3, 0.48))
    chosen = rng.choice(rng.permutation(self.most)[:letters], count)
    chosen = chosen.astype(np.int32)
    # The number of first tokens after which the next one is unique.
    unique_after = min(count, int(np.ceil(np.log(4 * count) / np.log(letters))))
    kinds = np.where(np.arange(count) < unique_after, RANDOM, RECALLED)
    text = joined(self._lines(rng, room - 2 * count))
    return [(chosen, RANDOM), (text, TEXT), (chosen, kinds)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomTokens(Recall):
  """Random tokens, all of which count as recalled.

  Only a context that holds them determines them: CEPE's warm-up on these
  teaches cross-attention to look up, which text teaches more slowly.

  Attributes:
    most: Upper bound of the ids that are drawn from.
  """

  most: int = 256

  def _parts(self, rng: np.random.Generator) -> list[tuple[np.ndarray, Any]]:
    count = self.length - len(self._begin())
    return [(rng.integers(0, self.most, count).astype(np.int32), RECALLED)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Recall):
  """Lines that name a number each, text, the same lines in another order.

  An example has many answers, so that looking up is learned in minutes.
  """

  def _parts(self, rng: np.random.Generator) -> list[tuple[np.ndarray, Any]]:
    room = self.length - len(self._begin())
    pairs: list[tuple[str, str]] = []
    # More pairs than these have no room.
    for name in self._names(rng, max(1, room // 16)):
      pair = (name, number_of(rng))
      size = sum(len(part) for part, _ in self._pair(*pair))
      if 2 * size > room:
        break
      room -= 2 * size
      pairs.append(pair)
    first = [(ids, TEXT) for p in pairs for ids, _ in self._pair(*p)]
    order = rng.permutation(len(pairs))
    repeated = [part for i in order for part in self._pair(*pairs[i])]
    return [*first, (joined(self._lines(rng, room)), TEXT), *repeated]

  def _pair(self, name: str, number: str) -> list[tuple[np.ndarray, int]]:
    start, end = _PAIR.split("{number}")
    return [
      (self._ids(start.format(name=name)), TEXT),
      (self._ids(number), RECALLED),
      (self._ids(end), TEXT),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions(Recall):
  """A text with facts at random places, and questions about some at its end.

  The lines are those of `ringjax.data.tasks.needle.Passkey`.

  Attributes:
    facts: Largest number of facts.
    questions: Largest number of questions.
  """

  facts: int = 8
  questions: int = 4

  @property
  def _least(self) -> int:
    # For tokenizers with a token a byte; others need less.
    return 64 + 56 * self.facts + 128 * self.questions

  def __post_init__(self) -> None:
    if not 1 <= self.questions <= self.facts:
      raise OptionError(
        "questions",
        f"{self.questions} of {self.facts} facts",
        "1 to facts",
        "pass as many facts as questions, or more",
      )
    super().__post_init__()

  def _parts(self, rng: np.random.Generator) -> list[tuple[np.ndarray, Any]]:
    num_questions = int(rng.integers(1, self.questions + 1))
    count = int(rng.integers(num_questions, self.facts + 1))
    facts = [
      {"name": name, "number": number_of(rng)}
      for name in self._names(rng, count)
    ]
    tail: list[tuple[np.ndarray, Any]] = []
    for i in rng.permutation(num_questions):
      tail += self._answered(facts[i], sure=not tail)
    needles = [self._ids(NEEDLE.format(**fact)) for fact in facts]
    used = sum(len(part) for part, _ in tail) + sum(map(len, needles))
    lines = self._lines(rng, self.length - len(self._begin()) - used)
    # Each fact is above one of the lines, or below the last.
    places = np.sort(rng.integers(len(lines) + 1, size=count))
    body, start = [], 0
    for place, needle in zip(places.tolist(), needles, strict=True):
      body += [*lines[start:place], needle]
      start = place
    return [(joined([*body, *lines[start:]]), TEXT), *tail]

  def _answered(
    self, fact: dict[str, str], *, sure: bool
  ) -> list[tuple[np.ndarray, Any]]:
    """A question and its answer, the first words recalled if `sure`."""
    question = self._ids(QUESTION.format(**fact))
    answer_start, answer_end = ANSWER.split("{number}")
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    return [
      (question, TEXT),
      (self._ids(answer_start.format(**fact)), RECALLED if sure else TEXT),
      (self._ids(fact["number"]), RECALLED),
      (joined([self._ids(answer_end), end]), RECALLED),
    ]


def number_of(rng: np.random.Generator) -> str:
  """A number of 4 to 6 digits."""
  low, high = _DIGITS
  return numbers(rng, 1, int(rng.integers(low, high + 1)))[0]
