"""NoLiMa (Modarressi et al. 2025, arXiv 2502.05167): no words in common.

A needle names a character, and the question asks for it in other words. The
needle takes the place of a line break of a book, at a depth; a score is 1 if
the answer contains a correct name. Needle sets with distractors are refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int

from ringjax.checks import positive_int
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError, OptionError
from ringjax.eval.suites.question import (
  EffectiveLength,
  LongQuestion,
  ScoresByLength,
  Suite,
  field,
  files_of,
  longest_passing,
  parts_of_template,
  rows_of,
  texts_field,
)
from ringjax.paths import AnyPath, as_path

_TEMPLATE = (
  "{haystack}\n\nAnswer a question about this part of a book by what it says "
  "or clearly implies.\n\nQuestion: {question}\n\nAnswer with the name alone."
)
# Lengths of the benchmark's tables.
LENGTHS = (250, 500, 1000, 2000, 4000, 8000, 16000, 32000)
# Lengths whose best score is a pair's base score, and the share of it that
# counts as good enough.
_BASE_LENGTH, _SHARE = 1000, 0.85


class _Book(NamedTuple):
  """A book: ids, int32 [T], and the places of ids with a line break."""

  name: str
  ids: Int[np.ndarray, " T"]
  breaks: Int[np.ndarray, " N"]


class _NeedleTest(NamedTuple):
  """A needle and its question; {CHAR} is replaced by a drawn name."""

  name: str
  seed: int
  needle: str
  question: str
  answers: tuple[str, ...]
  characters: tuple[str, ...]
  system: str
  template: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoLiMa(Suite):
  """NoLiMa's data folder: needlesets/*.json and haystack/rand_shuffle/*.txt.

  Attributes:
    needles: Needle set, a file of the folder.
    books: Folder of the books, in the folder.
    lengths: Numbers of tokens of the text around the needle; None: `LENGTHS`.
    depths: Number of depths of the needle, from 0 to 1.
    seed: Random seed of the names.
  """

  needles: str = "needlesets/needle_set.json"
  books: str = "haystack/rand_shuffle"
  lengths: tuple[int, ...] | None = None
  depths: int = 26
  seed: int = 42

  placeholders: ClassVar[tuple[str, ...]] = ("{haystack}", "{question}")

  def __post_init__(self) -> None:
    super().__post_init__()
    positive_int("depths", self.depths)
    for length in self.lengths or ():
      positive_int("lengths", length)
    if self.lengths == ():
      raise OptionError(
        "lengths", "none", "one or more", "write lengths=(1000,4000)"
      )

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    root = as_path(self.path)
    tests = list(self._tests(root / self.needles))
    paths = files_of(root / self.books, "*.txt")
    for number, path in enumerate(paths):
      book = _book(path, tokenizer)
      for length in self.lengths or LENGTHS:
        for test in tests:
          generator = np.random.RandomState(test.seed + number)
          for depth in np.linspace(0, 1, self.depths):
            yield self._question(
              test, book, length, float(depth), generator, tokenizer
            )

  def _question(
    self,
    test: _NeedleTest,
    book: _Book,
    length: int,
    depth: float,
    generator: np.random.RandomState,
    tokenizer: AnyTokenizer,
  ) -> LongQuestion:
    """The question of a test, with its needle at a depth of a book."""
    needle, question, answers = test.needle, test.question, test.answers
    if "{CHAR}" in needle:
      name = str(generator.choice(test.characters))
      needle = needle.replace("{CHAR}", name)
      question = question.replace("{CHAR}", name)
      answers = (name,)
    opening, closing = parts_of_template(
      test.template, "{haystack}", {"{question}": question}
    )
    history = ({"role": "system", "content": test.system},) * bool(test.system)
    return LongQuestion(
      id=f"{test.name}/{book.name}/{depth:.4f}/{length}",
      task=test.name,
      history=history,
      opening=opening,
      context=_placed(needle, book, length, depth, tokenizer),
      closing=closing,
      answers=answers,
      max_new_tokens=192,
      length=length,
    )

  def score(self, question: LongQuestion, completion: str) -> float:
    return float(any(x in completion for x in question.answers))

  def effective_length(self, scores: ScoresByLength) -> EffectiveLength | None:
    """Longest length with 85 % of the base score.

    The base score is the mean over pairs of question and needle of the best of
    a pair's mean scores at lengths up to 1,000; None without such a length.
    """
    by_length = {
      length: _means_by_task(by_question)
      for length, by_question in scores.items()
    }
    short = [means for n, means in by_length.items() if n <= _BASE_LENGTH]
    if not short:
      return None
    base = np.mean(
      [max(means.get(task, 0.0) for means in short) for task in short[0]]
    )
    means = {
      length: float(np.mean([*by_task.values()]))
      for length, by_task in by_length.items()
      # The table of the paper begins at 1,000 tokens.
      if length >= _BASE_LENGTH
    }
    return longest_passing(
      means, _SHARE * float(base), f"85 % of the base score {100 * base:.1f} %"
    )

  def _tests(self, path: AnyPath) -> Iterator[_NeedleTest]:
    """The tests of a needle set."""
    for place, row in rows_of(path):
      if row.get("distractors"):
        raise DataError(
          f"{place}: distractors",
          "a needle set with distractors",
          "one without",
          "pass needles=needlesets/needle_set.json",
        )
      text = lambda name, row=row, place=place: field(row, name, str, place)
      number = re.match(r"\d{4}", text("id"))
      if number is None:
        raise DataError(
          f"{place}: id",
          repr(text("id")),
          "four digits at its beginning",
          "pass a needle set of NoLiMa, as it is published",
        )
      characters = row.get("character_set") or []
      template = row.get("task_template") or _TEMPLATE
      for kind, question in field(row, "questions", dict, place).items():
        for name, test in field(row, "tests", dict, place).items():
          answers = test.get("gold_answers") or []
          needle = text("needle")
          if "{CHAR}" in needle:
            characters = texts_field(row, "character_set", place)
          elif not answers:
            answers = texts_field(test, "gold_answers", f"{place}, {name}")
          arguments = field(test, "input_args", list, f"{place}, {name}")
          yield _NeedleTest(
            name=f"{text('id')}_{name}_{kind}",
            seed=self.seed + int(number[0]),
            needle=_filled(needle, arguments),
            question=_filled(question, arguments),
            answers=(answers,) if isinstance(answers, str) else tuple(answers),
            characters=tuple(characters),
            system=row.get("system_prompt") or "",
            template=self._template("", template),
          )


def _filled(text: str, arguments: Sequence[Any]) -> str:
  """Text with {1}, {2}, ... replaced by the arguments of a test."""
  for number, argument in enumerate(arguments, 1):
    text = text.replace(f"{{{number}}}", f"{argument}")
  return text


def _book(path: AnyPath, tokenizer: AnyTokenizer) -> _Book:
  ids = np.asarray(tokenizer.encode(path.read_text("utf-8")), np.int32)
  has_break: dict[int, bool] = {
    int(i): "\n" in tokenizer.decode([int(i)]) for i in np.unique(ids)
  }
  breaks = [0, *(n for n, i in enumerate(ids) if has_break[int(i)])]
  return _Book(path.stem, ids, np.asarray(breaks, np.int32))


def _placed(
  needle: str, book: _Book, length: int, depth: float, tokenizer: AnyTokenizer
) -> str:
  """Text of `length` tokens of a book with a needle at a depth.

  The needle stands at the first line break at or after that depth of the
  book's first `length` tokens, and the text begins so that it is that deep.

  Raises:
    DataError: If the book is too short.
  """
  distances = book.breaks / (length + 1) - depth
  distances = np.where(distances < 0, np.inf, distances)
  at = int(book.breaks[int(np.argmin(distances))])
  start = at - round(length * depth)
  if np.isinf(distances.min()) or start < 0 or start + length > len(book.ids):
    raise DataError(
      f"book {book.name}",
      f"{len(book.ids):,} tokens",
      f"enough for a text of {length:,} tokens and a line break",
      "leave this length out, or pass longer books",
    )
  ids = book.ids.tolist()
  first = tokenizer.decode(ids[start : at + 1])
  first = first[: max(first.rfind("\n"), 0)]
  second = tokenizer.decode(ids[at + 1 : start + length])
  return f"{first} {needle}\n{second}"


def _means_by_task(
  by_question: Mapping[tuple[str, str], float],
) -> dict[str, float]:
  scores = defaultdict(list)
  for (task, _), score in by_question.items():
    scores[task].append(score)
  return {task: float(np.mean(x)) for task, x in scores.items()}
