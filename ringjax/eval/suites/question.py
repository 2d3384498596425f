"""Questions of long-context benchmarks, and the contract of a suite.

A suite reads the files that a benchmark publishes, and scores completions by
the benchmark's own rule. To add one, write a `Suite` and an entry of
`suite_registry.SUITES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError, OptionError
from ringjax.eval.suites.judge import JudgeQuestion
from ringjax.paths import AnyPath

# Ways to shorten a prompt that is longer than the model's context.
CUTS = ("middle", "context_end", "never")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongQuestion:
  """A question about a long text.

  The last user message is `opening + context + closing`; the answer begins with
  `answer_prefix`, which the model is given.

  Attributes:
    id: Name of the question, unique in its suite.
    task: Name of the task, a row of the table of scores.
    context: Long text.
    opening, closing: Text of the message before and after `context`.
    answer_prefix: Beginning of the answer.
    history: Messages before the last one, with "role" and "content".
    answers: Correct answers, as the suite's rule reads them.
    max_new_tokens: Maximum tokens of an answer.
    groups: Further rows of the table that the question counts in.
    length: Nominal number of tokens; None where the benchmark states none.
    details: Further values that the suite's rule reads.
  """

  id: str
  task: str
  context: str
  opening: str = ""
  closing: str = ""
  answer_prefix: str = ""
  history: tuple[Mapping[str, str], ...] = ()
  answers: tuple[Any, ...] = ()
  max_new_tokens: int
  groups: tuple[str, ...] = ()
  length: int | None = None
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def text(self) -> str:
    """The last user message."""
    return self.opening + self.context + self.closing


class EffectiveLength(NamedTuple):
  """Longest length at which a model still answers well enough.

  Attributes:
    length: Tokens; None if no length reaches the threshold.
    threshold: Lowest score that counts, 0 to 1.
    rule: Rule of the threshold, as a phrase.
  """

  length: int | None
  threshold: float
  rule: str


# Scores by (task, id of the question without its length), then by length.
ScoresByLength = Mapping[int, Mapping[tuple[str, str], float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
  """Base of the suites: the questions of a benchmark and its rule.

  Attributes:
    path: File or folder of the benchmark, or an address of objects.
    templates: Texts of messages by task, "" for all tasks, in place of
      ringjax's own; None where the files contain whole prompts.
    cut: Way to shorten prompts that do not fit, one of `CUTS`.
    mean_over: Items of equal weight in the mean score: "tasks" or "questions".
    placeholders: Names that a template must contain; none if the benchmark's
      files contain whole prompts.
  """

  path: str = ""
  templates: Mapping[str, str] | None = None

  cut: ClassVar[str] = "never"
  mean_over: ClassVar[str] = "tasks"
  placeholders: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self) -> None:
    """Checks the options.

    Raises:
      OptionError: If there is no path, or a template does not fit.
    """
    name = type(self).__name__.lower()
    if not self.path:
      raise OptionError(
        f"path of {name}",
        "none",
        "a file or folder of the benchmark",
        f"write {name}:path=PLACE",
      )
    if self.templates and not self.placeholders:
      raise OptionError(
        "templates",
        f"some for {name}",
        "none: its files contain whole prompts",
        "leave them out",
      )
    for task, template in (self.templates or {}).items():
      missing = [x for x in self.placeholders if x not in template]
      if missing:
        raise OptionError(
          f"template of {task or 'all tasks'}",
          f"{template[:40]!r} without {', '.join(missing)}",
          f"a text with {', '.join(self.placeholders)}",
          "add these; brackets and $ signs are part of the names",
        )

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    """Reads the questions, in the order of the files.

    Args:
      tokenizer: Tokenizer of the model, whose tokens lengths count.

    Raises:
      DataError: If a file is missing or is not one of this benchmark.
    """
    raise NotImplementedError

  def score(self, question: LongQuestion, completion: str) -> float:
    """Score of a completion, 0 to 1, by the benchmark's rule."""
    raise NotImplementedError

  @property
  def judged(self) -> bool:
    """Whether a judge scores completions, and `score` does not."""
    return False

  def judge_questions(
    self, question: LongQuestion, completion: str
  ) -> tuple[JudgeQuestion, ...]:
    """Prompts for a judge about a completion, if the suite is judged."""
    raise NotImplementedError

  def judged_score(
    self, question: LongQuestion, numbers: Mapping[str, int | float]
  ) -> float:
    """Score, 0 to 1, of the numbers of all replies of a judge, by name."""
    raise NotImplementedError

  def effective_length(self, scores: ScoresByLength) -> EffectiveLength | None:
    """Longest length with good answers; None if the benchmark defines none."""
    del scores
    return None

  def _template(self, task: str, default: str) -> str:
    """Template of a task: the given one, else ringjax's own."""
    templates = self.templates or {}
    return templates.get(task, templates.get("", default))


def parts_of_template(
  template: str, context: str, values: Mapping[str, str]
) -> tuple[str, str]:
  """Text before and after the context of a filled template.

  Text of the data is never taken for a placeholder.

  Args:
    template: Text with the placeholders `context` and those of `values`.
    context: Placeholder of the long text.
    values: Texts by placeholder.
  """
  opening, _, closing = template.partition(context)
  return _filled(opening, values), _filled(closing, values)


def _filled(text: str, values: Mapping[str, str]) -> str:
  if not values:
    return text
  names = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
  return re.sub(names, lambda match: values[match[0]], text)


def rows_of(path: AnyPath) -> Iterator[tuple[str, dict[str, Any]]]:
  """Rows of a data file, each with its place for error messages.

  Args:
    path: Lines of JSON (.jsonl), a JSON array or object with "data" (.json), or
      a table (.parquet, needs pyarrow).

  Raises:
    DataError: If the file cannot be read as such.
    OptionError: If pyarrow is missing.
  """
  if not path.is_file():
    raise DataError(
      "path", f"{path}, which is no file", "a file of data", "check the path"
    )
  if path.suffix == ".parquet":
    rows: Sequence[Any] = _parquet_rows(path)
    name = "row"
  elif path.suffix == ".json":
    rows = json_value(path.read_text("utf-8"), f"{path}")
    if isinstance(rows, dict) and "data" in rows:
      rows = rows["data"]
    name = "item"
  else:
    lines = path.read_text("utf-8").split("\n")
    rows = [
      json_value(line, f"{path}, line {n}")
      for n, line in enumerate(lines, 1)
      if line.strip()
    ]
    name = "row"
  if not isinstance(rows, list):
    raise DataError(
      f"{path}",
      type(rows).__name__,
      "an array of objects",
      "pass a file of the benchmark",
    )
  for n, row in enumerate(rows, 1):
    place = f"{path}, {name} {n}"
    if not isinstance(row, dict):
      raise DataError(
        place, type(row).__name__, "an object", "pass a file of the benchmark"
      )
    yield place, row


def field(
  row: Mapping[str, Any], name: str, kind: type | tuple[type, ...], place: str
) -> Any:
  """A field of a row.

  Raises:
    DataError: If it is missing or of another type.
  """
  value = row.get(name)
  kinds = kind if isinstance(kind, tuple) else (kind,)
  # A bool is an int to Python.
  if not isinstance(value, kinds) or (
    isinstance(value, bool) and bool not in kinds
  ):
    wanted = " or ".join(x.__name__ for x in kinds)
    got = f"{type(value).__name__}" if name in row else "none"
    raise DataError(
      f"{place}: {name}",
      got,
      f"a {wanted}",
      "pass a file of the benchmark, as it is published",
    )
  return value


def texts_field(row: Mapping[str, Any], name: str, place: str) -> list[str]:
  """A field with texts, or a single text, as a list that is not empty."""
  value = field(row, name, (str, list), place)
  texts = [value] if isinstance(value, str) else value
  if not texts or not all(isinstance(text, str) for text in texts):
    raise DataError(
      f"{place}: {name}",
      f"{value!r}"[:60],
      "a text or a list of texts",
      "pass a file of the benchmark, as it is published",
    )
  return texts


def files_of(path: AnyPath, pattern: str) -> list[AnyPath]:
  """Files of a folder by a pattern of names, sorted; a file is itself.

  Raises:
    DataError: If no file has such a name.
  """
  if path.is_file():
    return [path]
  files = sorted(path.rglob(pattern), key=str) if path.is_dir() else []
  if not files:
    raise DataError(
      "path",
      f"{path} without files {pattern}",
      "a file or folder of the benchmark",
      "check the path",
    )
  return files


def length_bin(tokens: int) -> int:
  """The power of two that is at least a number of tokens."""
  return 1 << max(tokens - 1, 0).bit_length()


def longest_passing(
  means: Mapping[int, float], threshold: float, rule: str
) -> EffectiveLength:
  """Longest length whose mean, and that of all shorter ones, is good enough."""
  passing = None
  for length in sorted(means):
    if means[length] < threshold:
      break
    passing = length
  return EffectiveLength(passing, threshold, rule)


def json_value(text: str, place: str) -> Any:
  """Parses JSON.

  Raises:
    DataError: If the text is other than JSON, with its place.
  """
  try:
    return json.loads(text)
  except ValueError as error:
    raise DataError(
      place, f"no JSON: {error}", "JSON", "pass a file of the benchmark"
    ) from None


def _parquet_rows(path: AnyPath) -> list[dict[str, Any]]:
  try:
    parquet = importlib.import_module("pyarrow.parquet")
  except ModuleNotFoundError:
    raise OptionError(
      "path",
      f"{path}, and pyarrow is not installed",
      "pyarrow, or lines of JSON",
      "pip install pyarrow",
    ) from None
  with path.open("rb") as file:
    return parquet.read_table(file).to_pylist()
