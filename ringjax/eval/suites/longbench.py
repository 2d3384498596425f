"""LongBench v2 (Bai et al. 2024, arXiv 2412.15204): 503 choices of four.

A score is 1 if the letter after "The correct answer is" is the right one. The
message is ringjax's own unless a template is passed: `prompts/0shot.txt` of the
benchmark, for scores that can be compared with published ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar

from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError
from ringjax.eval.suites.question import (
  LongQuestion,
  Suite,
  field,
  parts_of_template,
  rows_of,
)
from ringjax.paths import as_path

_LETTERS = "ABCD"
_TEMPLATE = (
  "Read this text, then choose the right answer to a question about it.\n\n"
  "$DOC$\n\nQuestion: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n\n"
  'Answer with "The correct answer is (X)", where X is one letter.'
)
_LETTER = (
  re.compile(r"The correct answer is \(([A-D])\)"),
  re.compile(r"The correct answer is ([A-D])"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongBench(Suite):
  """LongBench v2's data.json, or the same rows as .jsonl or .parquet."""

  cut: ClassVar[str] = "middle"
  mean_over: ClassVar[str] = "questions"
  placeholders: ClassVar[tuple[str, ...]] = (
    "$DOC$",
    "$Q$",
    *(f"$C_{letter}$" for letter in _LETTERS),
  )

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    del tokenizer
    for place, row in rows_of(as_path(self.path)):
      text = lambda name, row=row, place=place: field(row, name, str, place)
      answer = text("answer")
      if answer not in _LETTERS:
        raise DataError(
          f"{place}: answer",
          repr(answer),
          "A, B, C or D",
          "pass LongBench v2's data, not that of the first LongBench",
        )
      values = {"$Q$": text("question").strip()} | {
        f"$C_{letter}$": text(f"choice_{letter}").strip() for letter in _LETTERS
      }
      template = self._template("", _TEMPLATE)
      opening, closing = parts_of_template(template, "$DOC$", values)
      yield LongQuestion(
        id=text("_id"),
        task=text("domain"),
        groups=(text("difficulty"), text("length")),
        opening=opening,
        context=text("context").strip(),
        closing=closing,
        answers=(answer,),
        max_new_tokens=128,
      )

  def score(self, question: LongQuestion, completion: str) -> float:
    text = completion.strip().replace("*", "")
    for pattern in _LETTER:
      if match := pattern.search(text):
        return float(match[1] in question.answers)
    return 0.0
