"""HELMET (Yen et al. 2024, arXiv 2410.02694): recall, documents, re-ranking,
stories and summaries.

`nq`, `triviaqa`, `hotpotqa` and `popqa` (questions about many documents),
`json_kv` (a value of a JSON object) and `msmarco` (documents in order of
relevance) have their rules here; `narrativeqa`, `infbench_sum` and
`multi_lexsum` are scored by a judge (helmet_judged.py). RULER's files are read
by the suite `ruler`. Messages are ringjax's own unless templates are passed,
with HELMET's names {demos}, {context} and {question}.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ringjax.checks import one_of, positive_int
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError, OptionError
from ringjax.eval.suites.answer_rules import ndcg, normalized
from ringjax.eval.suites.helmet_judged import (
  JUDGED_TASKS,
  demo_key,
  judge_questions,
  judged_score,
  points_by_id,
  row_fields,
  solved,
)
from ringjax.eval.suites.judge import JudgeQuestion
from ringjax.eval.suites.question import (
  LongQuestion,
  Suite,
  field,
  parts_of_template,
  rows_of,
  texts_field,
)
from ringjax.paths import as_path

TASKS = (
  "nq", "triviaqa", "hotpotqa", "popqa", "json_kv", "msmarco", *JUDGED_TASKS,
)  # fmt: skip
_TEMPLATES = {
  "json_kv": "{context}\n\nWhich value does a key of this JSON object have?\n\n"
  "{demos}Key: {question}",
  "msmarco": "Order documents by their relevance to a query, the best first: "
  "Ranking: ID3 > ID1 > ID2\n\n{demos}{context}\n\nQuery: {question}",
  **{name: task.template for name, task in JUDGED_TASKS.items()},
  "": "Answer a question by documents, in few words.\n\n{demos}{context}\n\n"
  "Question: {question}",
}
_PREFIXES = {
  "json_kv": "Corresponding value:",
  "msmarco": "Ranking:",
  **{name: task.prefix for name, task in JUDGED_TASKS.items()},
}
_TOKENS = {
  "json_kv": 100,
  "msmarco": 200,
  **{name: task.max_new_tokens for name, task in JUDGED_TASKS.items()},
}
# Documents that the gain of a ranking counts.
_RANKED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Helmet(Suite):
  """A task's test file of HELMET.

  Attributes:
    task: One of `TASKS`.
    demos: File of worked examples, where the test file has none.
    keypoints: infbench_sum: HELMET's file of the key points of its books.
    shots: Number of worked examples before the question.
    popularity: popqa: base-10 logarithm of page views that questions are below.
  """

  task: str = ""
  demos: str = ""
  keypoints: str = ""
  shots: int = 2
  popularity: float = 3.0

  cut: ClassVar[str] = "context_end"

  @property
  def placeholders(self) -> tuple[str, ...]:  # pyrefly: ignore
    summary = self.task in ("infbench_sum", "multi_lexsum")
    return ("{context}",) if summary else ("{context}", "{question}")

  def __post_init__(self) -> None:
    super().__post_init__()
    one_of("task of helmet", self.task, TASKS)
    if self.shots:
      positive_int("shots", self.shots)
    if bool(self.keypoints) != (self.task == "infbench_sum"):
      raise OptionError(
        f"keypoints of {self.task}",
        self.keypoints or "none",
        "HELMET's longbook_sum_eng_keypoints.jsonl for infbench_sum, and none "
        "for other tasks",
        "write keypoints=FILE, or leave it out",
      )
    if self.task == "json_kv":
      if self.demos:
        raise OptionError(
          "demos",
          self.demos,
          "none: the test file of json_kv has its own",
          "leave it out",
        )
    elif bool(self.demos) != bool(self.shots):
      raise OptionError(
        "demos and shots",
        f"{self.demos or 'no file'}, {self.shots} shots",
        "a file for shots, or neither",
        "write demos=FILE, or shots=0",
      )

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    del tokenizer
    demos = list(self._rows(self.demos)) if self.demos else []
    points = points_by_id(self.keypoints) if self.keypoints else {}
    for place, row in self._rows(self.path):
      if self.judged:
        yield self._judged_question(place, row, demos, points)
      elif self.task == "json_kv":
        yield self._json_question(place, row)
      else:
        yield self._document_question(place, row, demos)

  @property
  def judged(self) -> bool:
    return self.task in JUDGED_TASKS

  def judge_questions(
    self, question: LongQuestion, completion: str
  ) -> tuple[JudgeQuestion, ...]:
    return judge_questions(question, completion)

  def judged_score(
    self, question: LongQuestion, numbers: Mapping[str, int | float]
  ) -> float:
    return judged_score(question, numbers)

  def score(self, question: LongQuestion, completion: str) -> float:
    if self.judged:
      raise OptionError(
        f"score of {self.task}",
        "no judge",
        "the numbers of a judge",
        "use judge_questions and judged_score",
      )
    if self.task == "json_kv":
      return _has_answer(question, completion, "corresponding value:")
    # Answers end with their line.
    line = completion.split("\n")[0]
    if self.task == "msmarco":
      return ndcg(question.details["relevance"], ranking_of(line), _RANKED)
    return _has_answer(question, line, "Answer:")

  def _rows(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, row in rows_of(as_path(path)):
      if self.task == "popqa":
        views = field(row, "s_pop", (int, float), place)
        if math.log10(views) >= self.popularity:
          continue
      # Cases without a short summary are none of the benchmark's.
      if self.task != "multi_lexsum" or row.get("summary/short"):
        yield place, row

  def _long_question(
    self, place: str, context: str, demos: str, question: str, **fields: Any
  ) -> LongQuestion:
    default = _TEMPLATES.get(self.task, _TEMPLATES[""])
    opening, closing = parts_of_template(
      self._template(self.task, default),
      "{context}",
      {"{question}": question, "{demos}": demos},
    )
    prefix = _PREFIXES.get(self.task, "Answer:")
    return LongQuestion(
      id=f"{self.task}/{place.rpartition(' ')[2]}",
      task=self.task,
      opening=opening,
      context=context,
      closing=closing,
      answer_prefix=f"\n{prefix}",
      max_new_tokens=_TOKENS.get(self.task, 20),
      **fields,
    )

  def _json_question(self, place: str, row: Mapping[str, Any]) -> LongQuestion:
    pairs = field(row, "demos", list, place)[: self.shots]
    demos = "".join(
      f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in pairs
    )
    return self._long_question(
      place,
      field(row, "context", str, place),
      demos,
      field(row, "question", str, place),
      answers=tuple(texts_field(row, "answer", place)),
    )

  def _document_question(
    self,
    place: str,
    row: Mapping[str, Any],
    demos: Sequence[tuple[str, dict[str, Any]]],
  ) -> LongQuestion:
    ranks = self.task == "msmarco"
    name = "query" if ranks else "question"
    question = field(row, name, str, place)
    key = "qid" if ranks else "id" if "id" in row else "question"
    documents = field(row, "ctxs", list, place)
    if ranks:
      fields: dict[str, Any] = {
        "details": {
          "relevance": {f"{x['id']}": int(x["label"]) for x in documents}
        }
      }
    else:
      fields = {"answers": tuple(texts_field(row, "answers", place))}
    return self._long_question(
      place,
      self._documents(documents),
      "".join(
        f"{self._documents(demo['ctxs'])}\n\n{self._solved(demo)}\n\n"
        for demo in self._chosen(demos, key, row[key])
      ),
      question,
      **fields,
    )

  def _judged_question(
    self,
    place: str,
    row: Mapping[str, Any],
    demos: Sequence[tuple[str, dict[str, Any]]],
    points: Mapping[str, list[str]],
  ) -> LongQuestion:
    context, question, fields = row_fields(self.task, row, place)
    name = demo_key(self.task, row, place)
    if self.task == "infbench_sum":
      if name not in points:
        raise DataError(
          f"{place}: id",
          name,
          f"an id of {self.keypoints}",
          "pass the file of key points that belongs to these books",
        )
      fields["details"] = {"points": points[name]}
    by_name = {demo_key(self.task, x, y): (x, y) for y, x in demos}
    order = [key for key in by_name if key != name]
    chosen = [by_name[order[n]] for n in _order(name, len(order))[: self.shots]]
    examples = [solved(self.task, demo, source) for demo, source in chosen]
    texts = "".join(f"{example}\n\n" for example in examples)
    shown = f"Examples for other texts:\n\n{texts}" if examples else ""
    return self._long_question(place, context, shown, question, **fields)

  def _documents(self, documents: Sequence[Mapping[str, Any]]) -> str:
    """Documents as text, with ids where they are ranked."""
    texts = []
    for document in documents:
      title = document.get("title")
      title = "" if title is None else f" (Title: {title})"
      name = f"[ID: {document['id']}] " if self.task == "msmarco" else ""
      texts.append(f"{name}Document{title}: {document['text']}")
    return "\n\n".join(texts)

  def _solved(self, demo: Mapping[str, Any]) -> str:
    """Question and answer of a worked example."""
    if self.task != "msmarco":
      return f"Question: {demo['question']}\nAnswer: {demo['answers'][0]}"
    ranked = sorted(demo["ctxs"], key=lambda x: int(x["label"]), reverse=True)
    ids = " > ".join(f"{x['id']}" for x in ranked)
    return f"Query: {demo['query']}\nRanking: {ids}"

  def _chosen(
    self,
    demos: Sequence[tuple[str, dict[str, Any]]],
    key: str,
    value: Any,
  ) -> list[dict[str, Any]]:
    """Worked examples of a question, the same whatever the order of questions.

    Seeded by the question as HELMET seeds the shuffle of its library.
    """
    rows = [demo for _, demo in demos]
    if self.task in ("popqa", "msmarco"):
      rows = [demo for demo in rows if demo.get(key) != value]
    chosen: dict[str, dict[str, Any]] = {}
    for n in _order(value, len(rows)):
      chosen.setdefault(f"{rows[n][key]}", rows[n])
    return [*chosen.values()][: self.shots]


def _order(value: Any, count: int) -> list[int]:
  """Order of `count` worked examples for the question of a value."""
  digest = hashlib.sha256(f"{value}".encode()).hexdigest()
  draw = np.random.default_rng(int(digest, 16) % 2**31)
  return draw.permutation(count).tolist()


def _has_answer(question: LongQuestion, text: str, prefix: str) -> float:
  """Whether normalised text, or the part after a prefix, has an answer."""
  parsed = re.search(f"{re.escape(prefix)}(.*)(?:\n|$)", text, re.IGNORECASE)
  texts = [text, parsed[1]] if parsed else [text, text.split("\n")[0]]
  return float(
    any(
      normalized(answer) in normalized(part)
      for answer in question.answers
      for part in texts
    )
  )


def ranking_of(text: str) -> list[str]:
  """Ids of the longest chain "3 > 1 > 2" of a text, each once."""
  plain = re.sub(r"[\[\]:]", "", text).lower().replace("id", "")
  chains = [x[0] for x in re.finditer(r"\d+(?:\s*>\s*\d+)*", plain)]
  if not chains:
    return [plain]
  return list(dict.fromkeys(re.findall(r"\d+", max(chains, key=len))))
