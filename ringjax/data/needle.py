"""Questions that only a fact somewhere in a long text answers.

Guarantees: an example is a function of its generator. Prompt and answer, with
the ids that begin and end a text, are at most `length` tokens, and only a few
less. Each fact is a line of its own; the first of those that are asked for
stands above the line in which `depth` of the filler lies, from 0, above the
first, to 1, below the last. Nothing of a fact stands anywhere else, and no two
keys or values are the same.

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

from ringjax.checks import positive_int
from ringjax.data.documents import hide_all
from ringjax.data.filler import Filler, Library, Unhidden
from ringjax.data.special_tokens import joined
from ringjax.errors import OptionError

# A line of a text, and what a text ends with; in just these words.
NEEDLE = "# The passkey of {name} is {number}.\n"
QUESTION = "\n# Question: What is the passkey for {name}?\n# Answer:"
# What is answered, followed by the id that ends a text.
ANSWER = " The passkey for {name} is {number}.\n"

# Tokens that may be missing to `length` when it took long to come near.
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
    answer: what follows.
    wanted: what the answer must name.
    facts: keys and values, first those that are asked for.
    depth: where the first of those stands, from 0 to 1.
    tokens: of prompt and answer, with the ids that begin and end them.
  """

  prompt: str
  answer: str
  wanted: tuple[str, ...]
  facts: tuple[tuple[str, str], ...]
  depth: float
  tokens: int


class _Asked(NamedTuple):
  """What is hidden and what is asked.

  `groups` are facts that stand in their order; the first group is asked for.
  """

  groups: list[list[tuple[str, str]]]
  question: str
  answer: str
  wanted: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What all tasks share.

  Attributes:
    tokenizer: a `Tokenizer` or `Bytes`, whose tokens are counted.
    filler: the text in which facts are hidden.
    needle: a fact's line, with {name} and {number}.
    question: what ends the prompt.
    answer: what follows it.
  """

  tokenizer: Any
  filler: Filler = _FILLER
  needle: str = NEEDLE
  question: str = QUESTION
  answer: str = ANSWER

  # What in a completion may be meant as part of the answer.
  named: ClassVar[re.Pattern[str]] = re.compile(r"\d+")

  def _ask(self, rng: np.random.Generator) -> _Asked:
    raise NotImplementedError

  def make(
    self, rng: np.random.Generator, length: int, depth: float | None = None
  ) -> Example:
    """An example.

    Args:
      rng: decides everything. The same one gives the same facts and filler at
        whatever depth.
      length: tokens of prompt and answer, and of what begins and ends them.
      depth: where the first of the facts stands that are asked for, 0 to 1;
        the others of those come behind it. None for anywhere.

    Raises:
      OptionError: `length` holds not even the facts, or `depth` is no depth.
      DataError: the filler has no text that tells nothing.
    """
    if depth is not None and not 0 <= depth <= 1:
      raise OptionError(
        "depth", depth, "a number from 0 to 1", "pass 0.5, or None"
      )
    asked = self._ask(rng)
    facts = [fact for group in asked.groups for fact in group]
    lines = [self.needle.format(name=n, number=v) for n, v in facts]
    depths = [d for g in asked.groups for d in np.sort(rng.random(len(g)))]
    if depth is not None:
      first = len(asked.groups[0])
      behind = [depth + (1 - depth) * d for d in depths[1:first]]
      depths[:first] = [depth, *behind]
    needles = [(float(d), line) for d, line in zip(depths, lines, strict=True)]
    telling = [word for fact in facts for word in fact]
    lead = self.needle.partition("{")[0]
    text = Unhidden(
      self.filler.lines(rng), [*telling, lead] if lead.strip() else telling
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
    """How much of what is wanted a completion names, from 0 to 1.

    Of what it names only as many count, from the first on, as are wanted:
    naming everything scores nothing.
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
    """A whole text, with what begins and ends it."""
    ids = self.tokenizer.encode(text, bos=self.tokenizer.adds_bos)
    return joined([ids, np.array(self.tokenizer.eos_ids[:1], np.int32)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiKey(Task):
  """Several keys, each with a value; one is asked for.

  Attributes:
    keys: how many.
    digits: of each value.
  """

  keys: int = 4
  digits: int = 5

  def __post_init__(self) -> None:
    _check_counts(self.keys, self.digits)

  def _ask(self, rng: np.random.Generator) -> _Asked:
    keys = names(rng, self.keys)
    values = numbers(rng, self.keys, self.digits)
    fact = {"name": keys[0], "number": values[0]}
    return _Asked(
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

  def _ask(self, rng: np.random.Generator) -> _Asked:
    (name,) = names(rng, 1)
    values = numbers(rng, self.values, self.digits)
    return _Asked(
      groups=[[(name, value) for value in values]],
      question=self.question.format(name=name),
      answer=self.answer.format(name=name, number=", ".join(values)),
      wanted=values,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
  """Chains of assignments; which variables have the value of the first?

  The first variable of a chain is given a number, each other one the variable
  before it, further down in the text.

  Attributes:
    chains: how many, each of a number of its own.
    hops: assignments of a variable in each.
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
    if self.hops < 0:
      raise OptionError("hops", self.hops, "0 or more", "raise it")

  def _ask(self, rng: np.random.Generator) -> _Asked:
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
    return _Asked(
      groups=groups,
      question=self.question.format(number=values[0]),
      answer=self.answer.format(name=", ".join(variables[:each])),
      wanted=variables[:each],
    )


# Tasks by the names that scripts and configs call them.
TASKS: dict[str, type[Task]] = {
  "passkey": Passkey,
  "multikey": MultiKey,
  "multivalue": MultiValue,
  "variables": VariableTracking,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Practice:
  """Examples of a task to train on, as `Loader` takes them.

  Attributes:
    task: what is asked.
    length: tokens of the longest; a row must hold it.
    shortest: tokens of the shortest; None for all the same.
  """

  task: Task
  length: int
  shortest: int | None = None

  def __post_init__(self) -> None:
    positive_int("length", self.length)
    if self.shortest is None:
      return
    positive_int("shortest", self.shortest)
    if self.shortest > self.length:
      raise OptionError(
        "shortest", self.shortest, f"at most length, {self.length}", "lower it"
      )

  def example(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of an example, at a random depth."""
    length = self.length
    if self.shortest is not None:
      length = int(rng.integers(self.shortest, length + 1))
    return self.task.training(self.task.make(rng, length))


def _fit(size_of: Callable[[int], int], length: int) -> tuple[int, int]:
  """How many characters of filler fill `length` tokens, and the tokens.

  By the rate so far, which is nearly constant; if that does not come near, by
  halves.
  """
  bare = size_of(0)
  if bare > length:
    raise OptionError(
      "length",
      length,
      f"{bare} tokens at least, which facts and question take",
      "raise it",
    )
  # What fits, its tokens, and what is known not to fit.
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
  """Different words that nobody knows and a person can say."""

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
  """There must be numbers enough to draw different ones."""
  if not 1 <= digits <= 18 or not 1 <= count <= 10**digits // 20 + 1:
    raise OptionError(
      "digits",
      f"{count} values of {digits} digits",
      "1 to 18 digits, and a value in twenty numbers at most",
      "raise digits, or ask for fewer values",
    )
