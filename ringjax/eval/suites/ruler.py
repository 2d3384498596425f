"""RULER (Hsieh et al. 2024, arXiv 2404.06654): its generated files and rule.

Each `validation.jsonl` has whole prompts, the beginning of the answer and the
correct values. A score is the share of values that the answer contains, for
questions about documents (`qa`) 1 if it contains any.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError
from ringjax.eval.suites.answer_rules import contained
from ringjax.eval.suites.question import (
  EffectiveLength,
  LongQuestion,
  ScoresByLength,
  Suite,
  field,
  files_of,
  length_bin,
  longest_passing,
  rows_of,
  texts_field,
)
from ringjax.paths import AnyPath, as_path


class _TaskRule(NamedTuple):
  """Rule of tasks whose names begin alike."""

  max_new_tokens: int
  any_value: bool = False


# By the first part of a task's name in RULER's synthetic.yaml.
_RULES = {
  "niah": _TaskRule(128),
  "vt": _TaskRule(30),
  "cwe": _TaskRule(120),
  "fwe": _TaskRule(50),
  "qa": _TaskRule(32, any_value=True),
}
# Score of Llama 2 (7B) at 4,096 tokens, which counts as good enough.
THRESHOLD = 0.856
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruler(Suite):
  """RULER's files: a folder LENGTH/data/TASK/validation.jsonl, or a part."""

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    del tokenizer
    for path in files_of(as_path(self.path), "*.jsonl"):
      # Predictions of an earlier run lie beside the data.
      if path.parent.name == "pred":
        continue
      task = _task_of(path)
      rule = _RULES[task.partition("_")[0]]
      for n, (place, row) in enumerate(rows_of(path)):
        text = field(row, "input", str, place)
        # The instruction is the first line and the question the last one.
        first, last = text.find("\n") + 1, text.rfind("\n") + 1
        last = max(first, last)
        length = _nominal_length(path)
        if length is None:
          length = length_bin(field(row, "length", int, place))
        yield LongQuestion(
          id=f"{task}/{row.get('index', n)}/{length}",
          task=task,
          opening=text[:first],
          context=text[first:last],
          closing=text[last:],
          answer_prefix=row.get("answer_prefix") or "",
          answers=tuple(texts_field(row, "outputs", place)),
          max_new_tokens=rule.max_new_tokens,
          length=length,
          details={"any_value": rule.any_value},
        )

  def score(self, question: LongQuestion, completion: str) -> float:
    text = _CONTROL.sub("\n", completion.strip()).strip()
    matches = contained(question.answers, text)
    if question.details["any_value"]:
      return float(any(matches))
    return sum(matches) / len(matches)

  def effective_length(self, scores: ScoresByLength) -> EffectiveLength:
    means = {}
    for length, by_question in scores.items():
      by_task = defaultdict(list)
      for (task, _), score in by_question.items():
        by_task[task].append(score)
      means[length] = float(np.mean([np.mean(x) for x in by_task.values()]))
    return longest_passing(
      means, THRESHOLD, "mean over tasks of 85.6 %, Llama 2 (7B) at 4,096"
    )


def _task_of(path: AnyPath) -> str:
  """Task of a file, by the names of its folder and of itself."""
  for name in (path.parent.name, path.stem):
    if name.partition("_")[0] in _RULES:
      return name
  raise DataError(
    "path",
    f"{path}",
    f"TASK/validation.jsonl with a TASK that begins with {', '.join(_RULES)}",
    "keep RULER's names of folders",
  )


def _nominal_length(path: AnyPath) -> int | None:
  """Length that a folder or a file's name states: 131072, validation_4096."""
  folders = f"{path.parent}".split("/")
  for name in (path.stem, *reversed(folders)):
    number = re.fullmatch(r"(?:\w+_)?(\d{3,})", name)
    if number:
      return int(number[1])
  return None
