"""Questions that only a fact somewhere in a long text answers.

Guarantees: an example is a function of its generator. Prompt and answer, with
the ids that begin and end a text, are at most `length` tokens, and only a few
less. Each fact is a line of its own; the first of those that are asked for is
at `depth` of the filler's lines, from 0, above the first, to 1, below the last.
No part of a fact is anywhere else, and no two keys or values are the same.

Passkey, MultiKey and MultiValue are the needles of a haystack, and
VariableTracking follows assignments: RULER, Hsieh et al. 2024 (arXiv
2404.06654). With one token a byte, Passkey is what the model in
`ringjax.models.tiny` was trained on.

Cost: an example is encoded up to ten times; once is enough where a character
is a token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.data.documents import hide_all
from ringjax.data.filler import Filler, Library, TextWithout
from ringjax.data.special_tokens import joined
from ringjax.errors import OptionError

# A fact's line, and the end of a prompt; models were trained on these words.
NEEDLE = "# The passkey of {name} is {number}.\n"
QUESTION = "\n# Question: What is the passkey for {name}?\n# Answer:"
# The answer, followed by the id that ends a text.
ANSWER = " The passkey for {name} is {number}.\n"

# Tokens by which an example may be shorter than `length` after some tries.
_NEAR, _TRIES, _MOST_TRIES = 3, 8, 40
_FILLER = Library()
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CAPITAL_LETTERS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """A question about a text.

  Attributes:
    prompt: the text, and the question at its end.
    answer: the right completion.
    wanted: keys or values that a completion must name.
    facts: keys and values, first those that are asked for.
    depth: of the first of those, from 0 to 1.
    tokens: of prompt and answer, with the ids that begin and end them.
  """

  prompt: str
  answer: str
  wanted: tuple[str, ...]
  facts: tuple[tuple[str, str], ...]
  depth: float
  tokens: int


class _Question(NamedTuple):
  """Facts to be hidden, and the question about them.

  Each group of facts keeps its order; the first group is asked for.
  """

  groups: list[list[tuple[str, str]]]
  question: str
  answer: str
  wanted: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """Base of the tasks: facts hidden in a text, and a question about them.

  Attributes:
    tokenizer: a `Tokenizer` or `Bytes`, whose tokens are counted.
    filler: the text in which facts are hidden.
    needle: a fact's line, with {name} and {number}.
    question: the end of the prompt.
    answer: the right completion.
  """

  tokenizer: Any
  filler: Filler = _FILLER
  needle: str = NEEDLE
  question: str = QUESTION
  answer: str = ANSWER

  # The parts of a completion that count as named.
  named: ClassVar[re.Pattern[str]] = re.compile(r"\d+")

  def _ask(self, rng: np.random.Generator) -> _Question:
    raise NotImplementedError

  def make(
    self, rng: np.random.Generator, length: int, depth: float | None = None
  ) -> Example:
    """An example.

    Args:
      rng: determines the example. Facts and filler do not depend on `depth`.
      length: tokens of prompt and answer, and of what begins and ends them.
      depth: of the first fact that is asked for, 0 to 1; the others of those
        come after it. None for a random one.

    Raises:
      OptionError: `length` is too short for the facts, or `depth` out of range.
      DataError: the filler has not enough text without the facts' words.
    """
    if depth is not None:
      number("depth", depth, least=0, most=1)
    asked = self._ask(rng)
    facts = [fact for group in asked.groups for fact in group]
    lines = [self.needle.format(name=n, number=v) for n, v in facts]
    depths = [d for g in asked.groups for d in np.sort(rng.random(len(g)))]
    if depth is not None:
      first = len(asked.groups[0])
      behind = [depth + (1 - depth) * d for d in depths[1:first]]
      depths[:first] = [depth, *behind]
    needles = [(float(d), line) for d, line in zip(depths, lines, strict=True)]
    words = [word for fact in facts for word in fact]
    lead = self.needle.partition("{")[0]
    text = TextWithout(
      self.filler.lines(rng), [*words, lead] if lead.strip() else words
    )
    prompt_of = lambda characters: (
      hide_all(text.first(characters), needles) + asked.question
    )
    size_of = lambda characters: len(
      self._ids(prompt_of(characters) + asked.answer)
    )
    characters, tokens = _fit(size_of, length)
    return Example(
      prompt=prompt_of(characters),
      answer=asked.answer,
      wanted=tuple(asked.wanted),
      facts=tuple(facts),
      depth=needles[0][0],
      tokens=tokens,
    )

  def score(self, example: Example, completion: str) -> float:
    """The share of `wanted` that a completion names, from 0 to 1.

    Only as many of the named count, from the first on, as are wanted: naming
    everything does not score.
    """
    found = dict.fromkeys(self.named.findall(completion))
    first = set(list(found)[: len(example.wanted)])
    return len(first.intersection(example.wanted)) / len(example.wanted)

  def training(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
    """An example to learn from.

    Returns:
      ids int32 [T] of prompt and answer, and weights float32 [T] of each as a
      label: 1 on the answer and the id that ends it, else 0.
    """
    ids = self._ids(example.prompt + example.answer)
    prompt = self.tokenizer.encode(example.prompt, bos=self.tokenizer.adds_bos)
    # A tokenizer may join the end of the prompt with the answer.
    shared = min(len(prompt), len(ids))
    differ = np.flatnonzero(prompt[:shared] != ids[:shared])
    start = int(differ[0]) if differ.size else shared
    return ids, (np.arange(len(ids)) >= start).astype(np.float32)

  def _ids(self, text: str) -> np.ndarray:
    """A text's ids, with those that begin and end a text."""
    ids = self.tokenizer.encode(text, bos=self.tokenizer.adds_bos)
    return joined([ids, np.array(self.tokenizer.eos_ids[:1], np.int32)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiKey(Task):
  """Several keys, each with a value, of which one is asked for.

  Attributes:
    keys: how many.
    digits: of each value.
  """

  keys: int = 4
  digits: int = 5

  def __post_init__(self) -> None:
    _check_counts(self.keys, self.digits)

  def _ask(self, rng: np.random.Generator) -> _Question:
    keys = names(rng, self.keys)
    values = numbers(rng, self.keys, self.digits)
    fact = {"name": keys[0], "number": values[0]}
    return _Question(
      groups=[[pair] for pair in zip(keys, values, strict=True)],
      question=self.question.format(**fact),
      answer=self.answer.format(**fact),
      wanted=values[:1],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passkey(MultiKey):
  """One key with one value, which is asked for."""

  keys: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiValue(Task):
  """One key, given several values on as many lines; all are asked for.

  Attributes:
    values: how many.
    digits: of each value.
  """

  question: str = "\n# Question: What are all passkeys for {name}?\n# Answer:"
  answer: str = " The passkeys for {name} are {number}.\n"
  values: int = 4
  digits: int = 5

  def __post_init__(self) -> None:
    _check_counts(self.values, self.digits)

  def _ask(self, rng: np.random.Generator) -> _Question:
    (name,) = names(rng, 1)
    values = numbers(rng, self.values, self.digits)
    return _Question(
      groups=[[(name, value) for value in values]],
      question=self.question.format(name=name),
      answer=self.answer.format(name=name, number=", ".join(values)),
      wanted=values,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
  """Chains of assignments, in which the variables of one value are asked for.

  The first variable of a chain is assigned a number, each other one, further
  down in the text, the variable before it.

  Attributes:
    chains: how many, each with a number of its own.
    hops: assignments from a variable in each.
    digits: of a number.
  """

  needle: str = "VAR {name} = {number}\n"
  question: str = (
    "\n# Question: Which variables are assigned the value {number}, directly "
    "or by others?\n# Answer:"
  )
  answer: str = " The variables are {name}.\n"
  chains: int = 2
  hops: int = 4
  digits: int = 5

  named: ClassVar[re.Pattern[str]] = re.compile(
    rf"\b[A-Z]{{{_CAPITAL_LETTERS}}}\b"
  )

  def __post_init__(self) -> None:
    _check_counts(self.chains, self.digits)
    integer("hops", self.hops, least=0)

  def _ask(self, rng: np.random.Generator) -> _Question:
    each = self.hops + 1
    variables = _distinct(
      self.chains * each,
      lambda: "".join(
        _CAPITALS[i] for i in rng.integers(26, size=_CAPITAL_LETTERS)
      ),
    )
    values = numbers(rng, self.chains, self.digits)
    groups = []
    for i, value in enumerate(values):
      chain = variables[i * each : (i + 1) * each]
      groups.append(list(zip(chain, [value, *chain[:-1]], strict=True)))
    return _Question(
      groups=groups,
      question=self.question.format(number=values[0]),
      answer=self.answer.format(name=", ".join(variables[:each])),
      wanted=variables[:each],
    )


# Tasks by their names in scripts and configs.
TASKS: dict[str, type[Task]] = {
  "passkey": Passkey,
  "multikey": MultiKey,
  "multivalue": MultiValue,
  "variables": VariableTracking,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExamples:
  """Examples of a task to train on, as a source of `Loader`.

  Attributes:
    task: makes the examples.
    length: tokens of the longest; a row must hold it.
    shortest: tokens of the shortest; None if all have `length`.
  """

  task: Task
  length: int
  shortest: int | None = None

  def __post_init__(self) -> None:
    positive_int("length", self.length)
    if self.shortest is not None:
      integer("shortest", self.shortest, least=1, most=self.length)

  def example(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of an example, at a random depth."""
    length = self.length
    if self.shortest is not None:
      length = int(rng.integers(self.shortest, length + 1))
    return self.task.training(self.task.make(rng, length))


def _fit(size_of: Callable[[int], int], length: int) -> tuple[int, int]:
  """How many characters of filler fill `length` tokens, and the tokens.

  Interpolates by tokens a character, which is nearly constant; if that does
  not come near in some tries, bisects.
  """
  bare = size_of(0)
  if bare > length:
    raise OptionError(
      "length",
      length,
      f"{bare} tokens at least, which facts and question take",
      f"pass length={bare} or more",
    )
  # Characters that fit, their tokens, and characters that do not fit.
  low, have, high = 0, bare, None
  at = length - bare
  for tries in range(_MOST_TRIES):
    if have == length or (high is not None and high - low <= 1):
      break
    if tries >= _TRIES and length - have <= _NEAR:
      break
    size = size_of(at)
    if size <= length:
      low, have = at, size
    else:
      high = at
    rate = max(size - bare, 1) / at
    step = at + round((length - size) / rate)
    if high is None:
      at = max(step, low + 1)
    elif tries < _TRIES:
      at = min(max(step, low + 1), high - 1)
    else:
      at = (low + high) // 2
  return low, have


def names(rng: np.random.Generator, count: int) -> list[str]:
  """Different pronounceable words that are in no dictionary."""

  def name() -> str:
    syllables = int(rng.integers(2, 5))
    first = rng.integers(len(_CONSONANTS), size=syllables)
    second = rng.integers(len(_VOWELS), size=syllables)
    pairs = zip(first, second, strict=True)
    return "".join(_CONSONANTS[c] + _VOWELS[v] for c, v in pairs)

  return _distinct(count, name)


def numbers(rng: np.random.Generator, count: int, digits: int) -> list[str]:
  """Different numbers of so many digits."""
  least = 10 ** (digits - 1)
  return _distinct(count, lambda: str(rng.integers(least, 10 * least)))


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
  found: dict[str, None] = {}
  while len(found) < count:
    found.setdefault(draw())
  return list(found)


def _check_counts(count: int, digits: int) -> None:
  """Checks that there are enough numbers to draw different ones."""
  if not 1 <= digits <= 18 or not 1 <= count <= 10**digits // 20 + 1:
    raise OptionError(
      "digits",
      f"{count} values of {digits} digits",
      "1 to 18 digits, and a value in twenty numbers at most",
      "pass more digits, or fewer values",
    )
