"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): twelve tasks of 100k
tokens and more.

The rules are those of the benchmark's `compute_scores.py`: numbers and words
that an answer begins with or contains, F1 of words or Chinese characters, and
ROUGE-Lsum. Messages are ringjax's own unless templates are passed, with the
names that the benchmark's `prompt.py` uses, e.g. {context}, {question} and
{OPTION_A}.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError
from ringjax.eval.suites.answer_rules import (
  characters_f1,
  rouge_lsum,
  words_f1,
)
from ringjax.eval.suites.question import (
  LongQuestion,
  Suite,
  field,
  files_of,
  parts_of_template,
  rows_of,
)
from ringjax.paths import as_path

_LETTERS = "ABCD"


def _words(text: str, marks: str) -> list[str]:
  return text.strip().translate({ord(mark): " " for mark in marks}).split()


def _first_number(answers: tuple[Any, ...], completion: str) -> float:
  """Whether the first run of digits is the answer."""
  digits = re.search(r"[0-9]+", completion)
  return float(digits is not None and digits[0] == answers[0])


def _has_word(answers: tuple[Any, ...], completion: str) -> float:
  """Whether the answer is one of the words."""
  return float(answers[0] in _words(completion, "\n:\"'.,?!{}"))


def _has_name(answers: tuple[Any, ...], completion: str) -> float:
  """Whether the answer is one of the words in capitals."""
  words = _words(completion, "\n:\"'.,?!{}")
  return float(answers[0] in [word.upper() for word in words])


def _last_integer(answers: tuple[Any, ...], completion: str) -> float:
  """Whether the last word is the answer, an integer."""
  words = _words(completion, "\n.`'\":")
  try:
    return float(int(words[-1]) == answers[0])
  except (IndexError, ValueError):
    return 0.0


def _first_value(answers: tuple[Any, ...], completion: str) -> float:
  """Whether the first number without a sign is the answer."""
  number = re.search(r"\d+\.\d+|\d+", completion)
  if number is None:
    return 0.0
  value = answers[0]
  if isinstance(value, int):
    # The benchmark fails on 1.5 here; it counts as wrong.
    return float("." not in number[0] and int(number[0]) == value)
  return float(float(number[0]) == value)


def _leading_values(answers: tuple[Any, ...], completion: str) -> float:
  """Share of values that are right before the first wrong one."""
  numbers = [int(x) for x in re.findall(r"[0-9]+", completion)]
  values = answers[0] if isinstance(answers[0], list) else [*answers]
  right = 0
  for value, number in zip(values, numbers, strict=False):
    if value != number:
      break
    right += 1
  return right / len(values)


def _after(text: str, phrases: tuple[str, ...]) -> str | None:
  """Text after the first phrase in order that occurs, and one character."""
  for phrase in phrases:
    at = text.find(phrase)
    if at >= 0:
      return text[at + len(phrase) + 1 :]
  return None


def _choice(answers: tuple[Any, ...], completion: str) -> float:
  """Whether a letter of a choice, or its text, is chosen."""
  text = completion.strip()
  if not text:
    return 0.0
  if text[0] in _LETTERS:
    return float(text[0] in answers)
  if text in answers:
    return 1.0
  text = re.sub(" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
  phrases = ("answer is:", "answer:", "answer is", "option is")
  chosen = _after(text, phrases)
  if chosen is not None:
    return float(bool(chosen) and chosen.startswith(tuple(answers)))
  # A word of letters in a row, such as "BC", is none of the answers.
  letters = [word for word in text.split() if word in _LETTERS]
  return float(bool(letters) and letters[0] in answers)


def _function(answers: tuple[Any, ...], completion: str) -> float:
  """Whether the letter or the name of a function is chosen."""
  text = completion.strip()
  name, letter = answers
  if text[:2] in (f"{letter}.", f"{letter}:"):
    return 1.0
  text = re.sub(r"[\n`'\"\-*]|[Oo]ption", " ", text)
  text = re.sub(" +", " ", text)
  phrases = ("answer is:", "is:", "answer:", "correct option is:")
  chosen = _after(text, phrases)
  return float(bool(chosen) and chosen.startswith((letter, name)))


class _InfiniteTask(NamedTuple):
  """A task: longest answer, rule and message."""

  max_new_tokens: int
  rule: Callable[[tuple[Any, ...], str], float]
  template: str


_OPTIONS = "\nA. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n"
TASKS = {
  "passkey": _InfiniteTask(6, _first_number, "{context}\n\n{input}"),
  "number_string": _InfiniteTask(12, _first_number, "{context}\n\n{input}"),
  "kv_retrieval": _InfiniteTask(50, _has_word, "{context}\n\n{input}"),
  "longdialogue_qa_eng": _InfiniteTask(
    40,
    _has_name,
    "In this script one name of a character is hidden as $$MASK$$.\n\n"
    "{context}\n\nWhich name is it? Answer with the name alone.",
  ),
  "longbook_sum_eng": _InfiniteTask(
    1200,
    lambda answers, text: max(rouge_lsum(x, text) for x in answers),
    "{context}\n\nWrite a summary of this book.",
  ),
  "longbook_choice_eng": _InfiniteTask(
    40,
    _choice,
    "{context}\n\nA question about this book: {question}" + _OPTIONS + "Answer "
    "with one letter.",
  ),
  "longbook_qa_eng": _InfiniteTask(
    40,
    words_f1,
    "{context}\n\nA question about this book, to answer in few words: "
    "{question}",
  ),
  "longbook_qa_chn": _InfiniteTask(
    40, characters_f1, "{context}\n\n关于本书的问题：{question}\n简短作答："
  ),
  "math_find": _InfiniteTask(3, _first_value, "{context}\n\n{input}"),
  "math_calc": _InfiniteTask(
    30000,
    _leading_values,
    "Expression: {context}\n\nList the value after each operation.",
  ),
  "code_run": _InfiniteTask(
    5,
    _last_integer,
    "{context}\n\nWhat does {func_call} return? Answer with the number.",
  ),
  "code_debug": _InfiniteTask(
    5,
    _function,
    "{context}\n\nWhich of these functions has a bug?" + _OPTIONS + "Answer "
    "with one letter.",
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniteBench(Suite):
  """InfiniteBench's TASK.jsonl files: a folder of them, or one."""

  cut: ClassVar[str] = "middle"
  placeholders: ClassVar[tuple[str, ...]] = ("{context}",)

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    del tokenizer
    for path in files_of(as_path(self.path), "*.jsonl"):
      task = path.stem
      if task not in TASKS:
        raise DataError(
          "path",
          f"{path}",
          f"TASK.jsonl of {', '.join(TASKS)}"[:200],
          "keep InfiniteBench's names of files",
        )
      for n, (place, row) in enumerate(rows_of(path)):
        values = _values(task, row, place)
        template = self._template(task, TASKS[task].template)
        opening, closing = parts_of_template(template, "{context}", values)
        yield LongQuestion(
          id=f"{task}/{row.get('id', n)}",
          task=task,
          opening=opening,
          context=field(row, "context", str, place),
          closing=closing,
          answers=_answers(task, row, place),
          max_new_tokens=TASKS[task].max_new_tokens,
        )

  def score(self, question: LongQuestion, completion: str) -> float:
    return TASKS[question.task].rule(question.answers, completion)


def _values(task: str, row: Mapping[str, Any], place: str) -> dict[str, str]:
  """Texts of a row by the placeholders of templates."""
  question = field(row, "input", str, place)
  values = {"{input}": question, "{question}": question}
  if task in ("longbook_choice_eng", "code_debug"):
    options = field(row, "options", list, place)
    if len(options) != len(_LETTERS):
      raise DataError(
        f"{place}: options",
        f"{len(options)} options",
        "four",
        "pass a file of InfiniteBench",
      )
    values |= {
      f"{{OPTION_{letter}}}": f"{option}"
      for letter, option in zip(_LETTERS, options, strict=True)
    }
  if task == "code_run":
    call = re.search(r"(func_[0-9]+)\(-?[0-9]+\)", question)
    if call is None:
      raise DataError(
        f"{place}: input",
        repr(question[:60]),
        "a call such as func_1(2)",
        "pass a file of InfiniteBench",
      )
    values |= {"{func_call}": call[0], "{func}": call[1]}
  if task == "math_find":
    # "The largest number of the list" asks for "the largest number".
    target = re.search(r"The .+ of", question)
    wanted = target[0].lower()[:-3] if target else "the number"
    values["{prefix}"] = f"What is {wanted} in this list?"
  return values


def _answers(task: str, row: Mapping[str, Any], place: str) -> tuple[Any, ...]:
  """Correct answers; of choices the text and its letter."""
  answer = field(row, "answer", (str, list, int, float), place)
  answers = answer if isinstance(answer, list) else [answer]
  if not answers:
    raise DataError(
      f"{place}: answer", "none", "one or more", "pass a file of InfiniteBench"
    )
  if task in ("longbook_choice_eng", "code_debug") and len(answers) == 1:
    options = field(row, "options", list, place)
    if answers[0] not in options:
      raise DataError(
        f"{place}: answer",
        repr(answers[0])[:60],
        "one of the options",
        "pass a file of InfiniteBench",
      )
    answers = [answers[0], _LETTERS[options.index(answers[0])]]
  return tuple(answers)
