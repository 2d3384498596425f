"""Retrieval tasks: questions that only a fact in a long text answers.

Guarantees: an example is a function of its generator. Prompt and answer, with
the ids that begin and end a text, are at most `length` tokens, and only a few
less. Each fact is a separate line; the first of those that are asked for is
at `depth` of the other lines, from 0, above the first, to 1, below the last.
No other line has a part of a fact. The facts of a text have different values.

The tasks are like those of RULER, Hsieh et al. 2024 (arXiv 2404.06654): needles
in a haystack (MultiKey and its kinds, MultiValue), assignments to follow
(VariableTracking), words to count (CommonWords, FrequentWords) and a question
about two documents (TwoDocuments). All their words are generated. With one
token a byte, Passkey is what the model in `ringjax.models.tiny` was trained on.

Cost: an example is encoded up to ten times; once is enough if a character
is a token.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import uuid
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.tasks.documents import hide_all
from ringjax.data.tasks.filler import NOISE, Filler, Library, TextWithout
from ringjax.data.text.special_tokens import joined
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError

# A fact's line, and the end of a prompt; models were trained on these words.
NEEDLE = "# The passkey of {name} is {number}.\n"
QUESTION = "\n# Question: What is the passkey for {name}?\n# Answer:"
# The answer, followed by the id that ends a text.
ANSWER = " The passkey for {name} is {number}.\n"

# Tokens by which an example may be shorter than `length`, after _TRIES tries.
_NEAR, _TRIES, _MOST_TRIES = 3, 8, 40
_FILLER = Library()
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CAPITAL_LETTERS = 5
_CODE = re.compile(rf"\b[A-Z]{{{_CAPITAL_LETTERS}}}\b")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Kinds of keys and values, and of the lines between which facts are hidden.
_FORMS = ("word number", "word uuid", "uuid uuid")
_HAYSTACKS = ("filler", "noise", "needles")
# Number of words in a list that may repeat, ranks over which frequencies are
# normalised, and groups of a haystack that are shuffled together.
_REPEATED, _RANKS, _BLOCK = 100, 10_000, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """A question about a text.

  Attributes:
    prompt: Text, with the question at its end.
    answer: Correct completion.
    wanted: Keys or values that a completion must name.
    facts: Keys and values, first those that are asked for.
    depth: Depth of the first fact's first line, from 0 to 1.
    tokens: Tokens of prompt and answer, with the ids that begin and end them.
  """

  prompt: str
  answer: str
  wanted: tuple[str, ...]
  facts: tuple[tuple[str, str], ...]
  depth: float
  tokens: int


class _Question(NamedTuple):
  """Facts, the lines that state them, and the question about them.

  Each group of lines keeps its order; the first group begins at `depth`.
  """

  facts: list[tuple[str, str]]
  groups: list[list[str]]
  question: str
  answer: str
  wanted: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """Base of the tasks: facts hidden in a text, and a question about them.

  Attributes:
    tokenizer: A `Tokenizer` or `Bytes`, whose tokens are counted.
    filler: Text in which facts are hidden, unless the task has lines for that.
    needle: Line of a fact, with {name} and {number}.
    question: End of the prompt.
    answer: Correct completion.
    placed: Whether `make` takes a depth; else the facts are all over the text.
  """

  tokenizer: AnyTokenizer
  filler: Filler = _FILLER
  needle: str = NEEDLE
  question: str = QUESTION
  answer: str = ANSWER

  placed: ClassVar[bool] = True

  @property
  def _named(self) -> re.Pattern[str]:
    """The parts of a completion that count as named."""
    return re.compile(r"\d+")

  def _ask(self, rng: np.random.Generator, length: int) -> _Question:
    """Draws the facts and the question of a text of `length` tokens."""
    raise NotImplementedError

  def _haystack(self, rng: np.random.Generator) -> Iterator[str] | None:
    """Endless lines of the task's own haystack, or None for the filler's."""
    return None

  def _line(self, fact: tuple[str, str]) -> str:
    return self.needle.format(name=fact[0], number=fact[1])

  def make(
    self, rng: np.random.Generator, length: int, depth: float | None = None
  ) -> Example:
    """Makes an example.

    Args:
      rng: Generator of the example. Facts and filler do not depend on `depth`.
      length: Tokens of prompt and answer, with the ids that begin and end them.
      depth: Depth of the first fact that is asked for, 0 to 1. None for a
        random one; without effect on tasks that are not `placed`.

    Raises:
      OptionError: If `length` is too short for the facts, or `depth` out of
        range.
      DataError: If the filler has not enough text without the facts' words.
    """
    if depth is not None:
      number("depth", depth, least=0, most=1)
    question = self._ask(rng, length)
    lines = [line for group in question.groups for line in group]
    depths = [d for g in question.groups for d in np.sort(rng.random(len(g)))]
    if depth is not None and self.placed:
      first = len(question.groups[0])
      lower = [depth + (1 - depth) * d for d in depths[1:first]]
      depths[:first] = [depth, *lower]
    needles = list(zip(map(float, depths), lines, strict=True))
    words = [word for fact in question.facts for word in fact]
    haystack = self._haystack(rng)
    if haystack is None:
      haystack = self.filler.lines(rng)
      lead = self.needle.partition("{")[0]
      words += [lead] if lead.strip() else []
    text = TextWithout(haystack, words)
    prompt_of = lambda characters: (
      hide_all(text.first(characters), needles) + question.question
    )
    size_of = lambda characters: self._size(
      prompt_of(characters) + question.answer
    )
    characters, tokens = _fit(size_of, length)
    return Example(
      prompt=prompt_of(characters),
      answer=question.answer,
      wanted=tuple(question.wanted),
      facts=tuple(question.facts),
      depth=needles[0][0],
      tokens=tokens,
    )

  def score(self, example: Example, completion: str) -> float:
    """Fraction of `wanted` that a completion names, from 0 to 1.

    Only the first named values count, as many as are wanted: naming everything
    does not score.
    """
    named = dict.fromkeys(self._named.findall(completion))
    first = set(list(named)[: len(example.wanted)])
    return len(first.intersection(example.wanted)) / len(example.wanted)

  def training(
    self, example: Example
  ) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Turns an example into ids and weights to train on.

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

  def _size(self, text: str) -> int:
    """A text's tokens, with those that begin and end it."""
    return len(self._ids(text))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiKey(Task):
  """Several keys, each with a value, of which some are asked for.

  Attributes:
    keys: Number of keys.
    asked: Number of keys that are asked for; the first one is at `depth`, the
      others come after it.
    digits: Digits of each value that is a number.
    form: Kinds of key and value: "word number", "word uuid" or "uuid uuid".
    haystack: Other lines: "filler"; "noise", a few repeated sentences; or
      "needles", lines like the facts' with other keys and values.
  """

  keys: int = 4
  asked: int = 1
  digits: int = 5
  form: str = _FORMS[0]
  haystack: str = _HAYSTACKS[0]

  def __post_init__(self) -> None:
    _check_counts(self.keys, self.digits)
    integer("asked", self.asked, least=1, most=self.keys)
    one_of("form", self.form, _FORMS)
    one_of("haystack", self.haystack, _HAYSTACKS)

  @property
  def _named(self) -> re.Pattern[str]:
    return _UUID if self.form.endswith("uuid") else super()._named

  def _ask(self, rng: np.random.Generator, length: int) -> _Question:
    keys = _distinct(self.keys, lambda: self._key(rng))
    values = _distinct(self.keys, lambda: self._value(rng))
    facts = list(zip(keys, values, strict=True))
    lines = [self._line(fact) for fact in facts]
    # Sorted by key: the question does not show the order in the text.
    asked_facts = sorted(facts[: self.asked])
    fact = {
      "name": ", ".join(key for key, _ in asked_facts),
      "number": ", ".join(value for _, value in asked_facts),
    }
    return _Question(
      facts=facts,
      groups=[lines[: self.asked], *([x] for x in lines[self.asked :])],
      question=self.question.format(**fact),
      answer=self.answer.format(**fact),
      wanted=values[: self.asked],
    )

  def _haystack(self, rng: np.random.Generator) -> Iterator[str] | None:
    if self.haystack == "needles":
      keys = _different(lambda: self._key(rng))
      return (self._line((key, self._value(rng))) for key in keys)
    return NOISE.lines(rng) if self.haystack == "noise" else None

  def score(self, example: Example, completion: str) -> float:
    """Fraction of `wanted` that a completion names; keys don't count."""
    for key, _ in example.facts:
      completion = completion.replace(key, " ")
    return super().score(example, completion)

  def _key(self, rng: np.random.Generator) -> str:
    return _uuid(rng) if self.form.startswith("uuid") else _word(rng)

  def _value(self, rng: np.random.Generator) -> str:
    return (
      _uuid(rng) if self.form.endswith("uuid") else _number(rng, self.digits)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passkey(MultiKey):
  """One key with one value, which is asked for."""

  keys: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiQuery(MultiKey):
  """Several keys, each with a value; all are asked for in one question."""

  question: str = "\n# Question: What are the passkeys for {name}?\n# Answer:"
  answer: str = " The passkeys for {name} are {number}.\n"
  asked: int = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiValue(Task):
  """One key, given several values on as many lines; all are asked for.

  Attributes:
    values: Number of values.
    digits: Digits of each value.
  """

  question: str = "\n# Question: What are all passkeys for {name}?\n# Answer:"
  answer: str = " The passkeys for {name} are {number}.\n"
  values: int = 4
  digits: int = 5

  def __post_init__(self) -> None:
    _check_counts(self.values, self.digits)

  def _ask(self, rng: np.random.Generator, length: int) -> _Question:
    (name,) = names(rng, 1)
    values = numbers(rng, self.values, self.digits)
    facts = [(name, value) for value in values]
    return _Question(
      facts=facts,
      groups=[[self._line(fact) for fact in facts]],
      question=self.question.format(name=name),
      answer=self.answer.format(name=name, number=", ".join(values)),
      wanted=values,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
  """Chains of assignments; all variables of one value are asked for.

  The first variable of a chain is assigned a number, each other one, further
  down in the text, the variable before it.

  Attributes:
    chains: Number of chains, each with another number.
    hops: Assignments from a variable in each chain.
    digits: Digits of a number.
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

  def __post_init__(self) -> None:
    _check_counts(self.chains, self.digits)
    integer("hops", self.hops, least=0)

  @property
  def _named(self) -> re.Pattern[str]:
    return _CODE

  def _ask(self, rng: np.random.Generator, length: int) -> _Question:
    per_chain = self.hops + 1
    variables = _distinct(self.chains * per_chain, lambda: _code(rng))
    values = numbers(rng, self.chains, self.digits)
    chains = []
    for i, value in enumerate(values):
      chain = variables[i * per_chain : (i + 1) * per_chain]
      chains.append(list(zip(chain, [value, *chain[:-1]], strict=True)))
    return _Question(
      facts=[fact for chain in chains for fact in chain],
      groups=[[self._line(fact) for fact in chain] for chain in chains],
      question=self.question.format(number=values[0]),
      answer=self.answer.format(name=", ".join(variables[:per_chain])),
      wanted=variables[:per_chain],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordList(Task):
  """Base of the tasks about a list of words, a word a line, in random order.

  A fact is a word and how often it appears in the list.

  Attributes:
    words: Number of words that are asked for, those that appear most often.
    others: Occurrences of each word that is not a fact.
  """

  needle: str = "{name}\n"
  question: str = (
    "\n# Question: Which {number} words appear most often in the list above?\n"
    "# Answer:"
  )
  answer: str = " The words are {name}.\n"
  words: int = 10
  others: int = 3

  placed: ClassVar[bool] = False

  def __post_init__(self) -> None:
    integer("words", self.words, least=1, most=_REPEATED)
    positive_int("others", self.others)

  @property
  def _named(self) -> re.Pattern[str]:
    return _CODE

  def _counts(self, words: list[str], length: int) -> list[int]:
    """Number of occurrences of each of the first words, in falling order."""
    raise NotImplementedError

  def _ask(self, rng: np.random.Generator, length: int) -> _Question:
    words = _distinct(_REPEATED, lambda: _code(rng))
    facts = list(
      zip(words, map(str, self._counts(words, length)), strict=False)
    )
    lines = [self._line(fact) for fact in facts for _ in range(int(fact[1]))]
    wanted = words[: self.words]
    question, answer = self._ends(wanted)
    return _Question(
      facts=facts,
      groups=[[lines[i] for i in rng.permutation(len(lines))]],
      question=question,
      answer=answer,
      wanted=wanted,
    )

  def _ends(self, wanted: list[str]) -> tuple[str, str]:
    """The question, and its answer."""
    return (
      self.question.format(number=self.words),
      self.answer.format(name=", ".join(wanted)),
    )

  def _haystack(self, rng: np.random.Generator) -> Iterator[str] | None:
    words = _different(lambda: _code(rng))
    return _shuffled(rng, ([self._line((w, ""))] * self.others for w in words))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords(WordList):
  """A list in which some words appear many times and the others few times.

  The longer the list, the more other words it has.

  Attributes:
    times: Occurrences of each of the words that are asked for.
  """

  times: int = 30

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("times", self.times, least=self.others + 1)

  def _counts(self, words: list[str], length: int) -> list[int]:
    return [self.times] * self.words


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequentWords(WordList):
  """A list of words whose frequencies follow Zipf's law.

  The word of rank r appears in proportion to r ** -exponent. Words that would
  appear at most `others` times are replaced by other words. The longer the
  list, the more often each word appears.

  Attributes:
    exponent: Exponent of the law, 0.1 to 8.
  """

  words: int = 3
  others: int = 1
  exponent: float = 2.0

  def __post_init__(self) -> None:
    super().__post_init__()
    number("exponent", self.exponent, least=0.1, most=8)

  def _counts(self, words: list[str], length: int) -> list[int]:
    law = np.arange(1, _RANKS + 1) ** -float(self.exponent)
    shares = law[: len(words)] / law.sum()
    # Tokens of an average line, and of the text without the list.
    tokens = [len(self.tokenizer.encode(self._line((w, "")))) for w in words]
    line_tokens = float(shares @ np.asarray(tokens)) / float(shares.sum())
    other_tokens = self._size("".join(self._ends(words[: self.words])))
    # Each word that is asked for needs a line more than the next word.
    last_share, next_share = law[self.words - 1 : self.words + 1] / law.sum()
    lines = max(1 / (last_share - next_share), (self.others + 1) / last_share)
    shortest = other_tokens + math.ceil(line_tokens * lines)
    if length < shortest:
      raise _too_short(length, shortest)
    counts = np.floor((length - other_tokens) / line_tokens * shares).astype(
      int
    )
    return counts[counts > self.others].tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoDocuments(Task):
  """A question that two documents answer together, among others like them.

  A document is a line. One says in which town a person was born, the other how
  many people live there; the first of the two is at `depth`. The rest of the
  text is documents about other people and towns.

  Attributes:
    born: First document, with {name} and {town}.
    needle: Second document, with the town's {name}, and {number}.
    digits: Digits of a number.
  """

  born: str = (
    "Document: {name} was born in {town}, went to school there and moved away "
    "to become a painter.\n"
  )
  needle: str = (
    "Document: {name} is a town on a river. It has {number} inhabitants and "
    "an old bridge.\n"
  )
  question: str = (
    "\n# Question: How many inhabitants has the town in which {name} was born?"
    "\n# Answer:"
  )
  answer: str = " The town in which {name} was born has {number} inhabitants.\n"
  digits: int = 5

  def __post_init__(self) -> None:
    _check_counts(1, self.digits)

  def _ask(self, rng: np.random.Generator, length: int) -> _Question:
    name, town = (x.capitalize() for x in names(rng, 2))
    (value,) = numbers(rng, 1, self.digits)
    first, second = self._documents(name, town, value)
    fact = {"name": name, "number": value}
    return _Question(
      facts=[(name, town), (town, value)],
      groups=[[first], [second]],
      question=self.question.format(**fact),
      answer=self.answer.format(**fact),
      wanted=[value],
    )

  def _documents(self, name: str, town: str, value: str) -> list[str]:
    return [self.born.format(name=name, town=town), self._line((town, value))]

  def _haystack(self, rng: np.random.Generator) -> Iterator[str] | None:
    words = _different(lambda: _word(rng).capitalize())
    value = lambda: _number(rng, self.digits)
    return _shuffled(
      rng, (self._documents(name, next(words), value()) for name in words)
    )


# Tasks by their names in scripts and configs.
TASKS: dict[str, Callable[..., Task]] = {
  "passkey": Passkey,
  "passkey_noise": functools.partial(Passkey, haystack="noise"),
  "passkey_uuid": functools.partial(Passkey, form="word uuid"),
  "multikey": MultiKey,
  "multikey_needles": functools.partial(Passkey, haystack="needles"),
  "multikey_uuids": functools.partial(
    Passkey, haystack="needles", form="uuid uuid"
  ),
  "multivalue": MultiValue,
  "multiquery": MultiQuery,
  "variables": VariableTracking,
  "common_words": CommonWords,
  "frequent_words": FrequentWords,
  "two_documents": TwoDocuments,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExamples:
  """Examples of a task to train on, as a source of `Loader`.

  Attributes:
    task: Task that makes the examples.
    length: Tokens of the longest example; a row must hold it.
    shortest: Tokens of the shortest example; None if all have `length`.
  """

  task: Task
  length: int
  shortest: int | None = None

  def __post_init__(self) -> None:
    positive_int("length", self.length)
    if self.shortest is not None:
      integer("shortest", self.shortest, least=1, most=self.length)

  def example(
    self, rng: np.random.Generator
  ) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Ids and weights of an example, at a random depth."""
    length = self.length
    if self.shortest is not None:
      length = int(rng.integers(self.shortest, length + 1))
    return self.task.training(self.task.make(rng, length))


def _fit(size_of: Callable[[int], int], length: int) -> tuple[int, int]:
  """Fits filler to `length` tokens: (characters of filler, tokens of all).

  Interpolates by tokens a character, which is nearly constant; if that is not
  near after some tries, bisects.
  """
  size_without = size_of(0)
  if size_without > length:
    raise _too_short(length, size_without)
  # Characters that fit, their tokens, and characters that do not fit.
  fitting, tokens, too_many = 0, size_without, None
  at = length - size_without
  for tries in range(_MOST_TRIES):
    if tokens == length or (too_many is not None and too_many - fitting <= 1):
      break
    if tries >= _TRIES and length - tokens <= _NEAR:
      break
    size = size_of(at)
    if size <= length:
      fitting, tokens = at, size
    else:
      too_many = at
    rate = max(size - size_without, 1) / at
    step = at + round((length - size) / rate)
    if too_many is None:
      at = max(step, fitting + 1)
    elif tries < _TRIES:
      at = min(max(step, fitting + 1), too_many - 1)
    else:
      at = (fitting + too_many) // 2
  return fitting, tokens


def _too_short(length: int, least: int) -> OptionError:
  return OptionError(
    "length",
    length,
    f"{least} tokens at least, which facts and question take",
    f"pass length={least} or more",
  )


def names(rng: np.random.Generator, count: int) -> list[str]:
  """Draws different pronounceable words that are in no dictionary."""
  return _distinct(count, lambda: _word(rng))


def numbers(rng: np.random.Generator, count: int, digits: int) -> list[str]:
  """Draws different numbers of `digits` digits."""
  return _distinct(count, lambda: _number(rng, digits))


def _word(rng: np.random.Generator) -> str:
  syllables = int(rng.integers(2, 5))
  first = rng.integers(len(_CONSONANTS), size=syllables)
  second = rng.integers(len(_VOWELS), size=syllables)
  pairs = zip(first, second, strict=True)
  return "".join(_CONSONANTS[c] + _VOWELS[v] for c, v in pairs)


def _number(rng: np.random.Generator, digits: int) -> str:
  smallest = 10 ** (digits - 1)
  return str(rng.integers(smallest, 10 * smallest))


def _code(rng: np.random.Generator) -> str:
  """Capital letters, which `_CODE` finds in a text."""
  return "".join(_CAPITALS[i] for i in rng.integers(26, size=_CAPITAL_LETTERS))


def _uuid(rng: np.random.Generator) -> str:
  return str(uuid.UUID(bytes=rng.bytes(16)))


def _different(draw: Callable[[], str]) -> Iterator[str]:
  """Endless different draws: repeated ones are skipped."""
  seen: set[str] = set()
  while True:
    text = draw()
    if text not in seen:
      seen.add(text)
      yield text


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
  return list(itertools.islice(_different(draw), count))


def _shuffled(
  rng: np.random.Generator, groups: Iterator[list[str]]
) -> Iterator[str]:
  """The lines of groups without end, shuffled some groups at a time."""
  while True:
    lines = [x for group in itertools.islice(groups, _BLOCK) for x in group]
    yield from (lines[i] for i in rng.permutation(len(lines)))


def _check_counts(count: int, digits: int) -> None:
  """Checks that there are enough numbers to draw different ones."""
  if not 1 <= digits <= 18 or not 1 <= count <= 10**digits // 20 + 1:
    raise OptionError(
      "digits",
      f"{count} values of {digits} digits",
      "1 to 18 digits, and a value in twenty numbers at most",
      "pass more digits, or fewer values",
    )
