"""Long-context benchmarks from the files that they publish, by their own rules.

`suite_of("ruler:path=DIR")` reads one, `suite_answers` asks a model.
"""

from ringjax.eval.suites.asking import (
  ReadingMode,
  SuiteAnswer,
  asks_chats,
  effective_lengths,
  score_table,
  suite_answers,
)
from ringjax.eval.suites.judge import AnswerJudge, JudgeError, JudgeQuestion
from ringjax.eval.suites.question import EffectiveLength, LongQuestion, Suite
from ringjax.eval.suites.suite_registry import SUITES, suite_of, templates_of

__all__ = [
  "SUITES",
  "AnswerJudge",
  "EffectiveLength",
  "JudgeError",
  "JudgeQuestion",
  "LongQuestion",
  "ReadingMode",
  "Suite",
  "SuiteAnswer",
  "asks_chats",
  "effective_lengths",
  "score_table",
  "suite_answers",
  "suite_of",
  "templates_of",
]
