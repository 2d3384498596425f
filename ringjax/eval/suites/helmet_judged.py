"""Tasks of HELMET that another model judges: stories and summaries.

Rows, criteria and formulas of `narrativeqa`, `infbench_sum` and `multi_lexsum`.
The criteria are HELMET's (its paper, section 3, and the program that scores):
fluency is 0 or 1, an answer's correctness 0 to 3; of a summary the key points
that it has are counted, and its sentences that the expert's summary supports.
The words of the prompts are ringjax's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ringjax.errors import DataError
from ringjax.eval.suites.judge import JudgeQuestion
from ringjax.eval.suites.question import (
  LongQuestion,
  field,
  rows_of,
  texts_field,
)
from ringjax.paths import as_path

# Highest correctness of an answer.
_CORRECT = 3


@dataclasses.dataclass(frozen=True)
class JudgedTask:
  """A judged task.

  Attributes:
    max_new_tokens: Maximum tokens of an answer.
    prefix: Beginning of an answer.
    template: Message, with the names of `Helmet`.
    text: Kind of text, in the prompts of a summary's judge.
  """

  max_new_tokens: int
  prefix: str
  template: str
  text: str = ""


JUDGED_TASKS = {
  "narrativeqa": JudgedTask(
    100,
    "Answer:",
    "Answer a question about a story in as few words as possible.\n\n"
    "{demos}{context}\n\nQuestion: {question}",
  ),
  "infbench_sum": JudgedTask(
    1200,
    "Summary:",
    "Summarise a book in 1,000 to 1,200 words: its plot, its characters and "
    "how it ends.\n\n{demos}{context}\n\nNow write the summary.",
    "a book",
  ),
  "multi_lexsum": JudgedTask(
    400,
    "Summary:",
    "Summarise a lawsuit by its documents in one paragraph of 200 to 250 "
    "words: background, parties and outcome.\n\n{demos}{context}\n\nNow write "
    "the summary.",
    "a civil lawsuit",
  ),
}
_FLUENCY = (
  "fluency is 1 for a text that is coherent, grammatical and does not repeat "
  "itself, even if its last sentence is cut off, and 0 for a text that is "
  "incoherent, repeats itself in the same or other words, or has no content."
)
_ANSWER = (
  "You judge an answer to a question about a story, which you do not see, by "
  "answers that are known to be right.\n\n"
  "fluency is 1 for a coherent answer without repetitions, 0 for gibberish, "
  "repetitions or an answer that is incomplete.\n"
  "correctness is 0 if the answer agrees with none of the right ones; 1 if it "
  "agrees with a part of one, such as the date but not the person; 2 if it "
  "agrees with one and adds what has nothing to do with the question; 3 if it "
  "agrees with one and all of it is about the question. A longer answer with "
  "details that belong to the question is 3 too.\n\n"
  "Question: {question}\nRight answers: {answers}\nAnswer: {answer}\n\n"
  "Give your reasons, then end with JSON of this form: "
  '{{"fluency": 1, "correctness": 2}}'
)
_FLUENT = (
  "You judge how a text reads.\n\n"
  + _FLUENCY
  + '\n\nText: "{summary}"\n\nEnd with JSON of this form: {{"fluency": 1}}'
)
_RECALL = (
  "You judge a summary of {text} by key points, which an expert's summary has."
  " Count the key points whose facts the summary states.\n\n"
  "Key points:\n{points}\n\nSummary: {summary}\n\nGo through the key points "
  "one by one, then end with JSON of this form, with their count: "
  '{{"recall": 2}}'
)
_PRECISION = (
  "You judge a summary of {text} by an expert's summary. Count the sentences "
  "of the summary, and those that are supported. A sentence is supported if "
  "its main facts agree with the expert's summary, even if minor details such "
  "as names or dates are not in that; it is unsupported if a main fact is "
  "missing there or contradicted, or if it adds other facts or comments.\n\n"
  "Expert's summary: {expert}\n\nSummary: {summary}\n\nGo through the "
  "sentences one by one, then end with JSON of this form, with both counts: "
  '{{"precision": 3, "sentence_count": 7}}'
)


def row_fields(
  task: str, row: Mapping[str, Any], place: str
) -> tuple[str, str, dict[str, Any]]:
  """Context, question and further fields of a `LongQuestion`."""
  if task == "narrativeqa":
    document = field(row, "document", dict, place)
    question = _text(row, "question", place)
    answers = field(row, "answers", list, place)
    texts = [field(x, "text", str, f"{place}: answers") for x in answers]
    return (
      field(document, "text", str, f"{place}: document"),
      question,
      {"answers": tuple(texts), "details": {"question": question}},
    )
  if task == "infbench_sum":
    (expert, *_) = texts_field(row, "answer", place)
    return field(row, "context", str, place), "", {"answers": (expert,)}
  sources = texts_field(row, "sources", place)
  points = _points(row, "summary/short_keypoints", place)
  expert = field(row, "summary/long", str, place)
  details = {"points": points}
  return "\n\n".join(sources), "", {"answers": (expert,), "details": details}


def solved(task: str, demo: Mapping[str, Any], place: str) -> str:
  """A worked example: an answer without its text."""
  if task == "narrativeqa":
    answers = field(demo, "answers", list, place)
    answer = field(answers[0], "text", str, place)
    return f"Question: {_text(demo, 'question', place)}\nAnswer: {answer}"
  if task == "infbench_sum":
    (expert, *_) = texts_field(demo, "answer", place)
    return f"Summary: {expert}"
  return f"Summary: {field(demo, 'summary/short', str, place)}"


def demo_key(task: str, row: Mapping[str, Any], place: str) -> str:
  """Name by which a worked example differs from the others."""
  if task == "narrativeqa":
    return _text(row, "question", place)
  return f"{field(row, 'id', (str, int), place)}"


def points_by_id(path: str) -> dict[str, list[str]]:
  """Key points of the books of InfiniteBench, by id, of HELMET's file."""
  return {
    f"{field(row, 'id', (str, int), place)}": _points(row, "keypoints", place)
    for place, row in rows_of(as_path(path))
  }


def judge_questions(
  question: LongQuestion, completion: str
) -> tuple[JudgeQuestion, ...]:
  """Prompts for a judge, one for each criterion or group of them."""
  task = JUDGED_TASKS[question.task]
  if question.task == "narrativeqa":
    prompt = _ANSWER.format(
      question=question.details["question"],
      answers="; ".join(question.answers),
      answer=_answer_part(completion, task.prefix),
    )
    highest = {"fluency": 1, "correctness": _CORRECT}
    return (JudgeQuestion(prompt, highest),)
  summary, points = completion.strip(), question.details["points"]
  listed = "\n".join(f"{n}. {point}" for n, point in enumerate(points, 1))
  texts = dict(
    text=task.text, points=listed, expert=question.answers[0], summary=summary
  )
  precision = {"precision": "sentence_count", "sentence_count": None}
  return (
    JudgeQuestion(_FLUENT.format(**texts), {"fluency": 1}),
    JudgeQuestion(_RECALL.format(**texts), {"recall": len(points)}),
    JudgeQuestion(_PRECISION.format(**texts), precision),
  )


def judged_score(
  question: LongQuestion, numbers: Mapping[str, int | float]
) -> float:
  """Score, 0 to 1, of a judge's numbers.

  Fluency times correctness of answers; fluency times F1 of summaries.
  """
  if question.task == "narrativeqa":
    return numbers["fluency"] * numbers["correctness"] / _CORRECT
  points, sentences = question.details["points"], numbers["sentence_count"]
  recall = numbers["recall"] / len(points) if points else 0.0
  precision = numbers["precision"] / sentences if sentences else 0.0
  if not recall + precision:
    return 0.0
  f1 = 2 * recall * precision / (recall + precision)
  return numbers["fluency"] * f1


def _answer_part(completion: str, prefix: str) -> str:
  """The part after a prefix, else the whole, as one line."""
  line = completion.replace("\n", " ")
  match = re.search(f"{re.escape(prefix)}(.*)$", line, re.IGNORECASE)
  text = (match[1] if match else line).strip()
  # A model may repeat the prefix.
  again = re.match(re.escape(prefix), text, re.IGNORECASE)
  return (text[again.end() :] if again else text).strip()


def _text(row: Mapping[str, Any], name: str, place: str) -> str:
  """The text of an object, as NarrativeQA's questions are."""
  return field(field(row, name, dict, place), "text", str, f"{place}: {name}")


def _points(row: Mapping[str, Any], name: str, place: str) -> list[str]:
  points: Sequence[Any] = field(row, name, list, place)
  if not all(isinstance(point, str) for point in points):
    raise DataError(
      f"{place}: {name}",
      f"{points!r}"[:60],
      "a list of texts",
      "pass HELMET's file with key points",
    )
  return [*points]
