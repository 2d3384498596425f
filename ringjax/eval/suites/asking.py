"""Answers of a model to a suite, by the way in which prompts are read.

Guarantees: every way gets the same questions and, unless it reads a context in
parts, the same ids; prompts that do not fit are refused before any is read,
unless the benchmark shortens them itself.
Cost: a prompt is read for each question and way.
Memory: one question at a time, and all answers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from ringjax.checks import positive_int
from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, PromptError
from ringjax.eval.suites.judge import AnswerJudge
from ringjax.eval.suites.question import EffectiveLength, LongQuestion, Suite
from ringjax.infer.contexts.combine import combine_of
from ringjax.infer.generate import generate
from ringjax.infer.inputs import within_context
from ringjax.infer.session import on_its_mesh
from ringjax.models.transformer import Transformer

# Options of `generate` that a question sets.
_FIXED = {"max_new_tokens", "stop", "contexts", "combine", "cache"}
# Attempts to shorten a text whose tokens change when it is encoded again.
_ATTEMPTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingMode:
  """Way in which a model reads prompts.

  Attributes:
    options: Options of `rj.infer.generate`, such as prefill, chunk, cache_kind.
    parts: Number of parts that a context is cut into, between lines, which are
      encoded separately; None to read prompts as one text.
    combine: Way to combine parts, a `rj.infer.contexts.Combine` or its text.
  """

  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parts: int | None = None
  combine: object = "parallel"

  def __post_init__(self) -> None:
    fixed = sorted({*self.options} & _FIXED)
    if fixed:
      raise OptionError(
        "options of a reading",
        ", ".join(fixed),
        "options of how a prompt is read; the benchmark sets these",
        "leave them out; contexts in parts are parts= and combine=",
      )
    if self.parts is not None:
      positive_int("parts", self.parts)
    combine_of(self.combine)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteAnswer:
  """The answer to a question.

  Attributes:
    reading: Name of the way in which the prompt was read.
    id, task, groups, length: Fields of the `LongQuestion`.
    score: Score by the benchmark's rule, 0 to 1; None until it is judged.
    tokens: Tokens of the prompt.
    shortened: Whether the prompt was shortened to fit.
    completion: Text of the answer.
    judgement: The judge's "model", "numbers" by name and "replies"; None where
      no judge scores answers, or none has yet.
  """

  reading: str
  id: str
  task: str
  groups: tuple[str, ...]
  length: int | None
  score: float | None
  tokens: int
  shortened: bool
  completion: str
  judgement: Mapping[str, Any] | None = None

  @property
  def key(self) -> tuple[str, str]:
    """Way and question."""
    return self.reading, self.id

  def judged_by(self, model: str) -> bool:
    """Whether a judge of this name has scored the answer."""
    return self.judgement is not None and self.judgement["model"] == model

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    return dataclasses.asdict(self)

  @classmethod
  def from_record(cls, record: Mapping[str, Any]) -> SuiteAnswer:
    """Creates the answer of a `record`."""
    values: dict[str, Any] = {**record, "groups": tuple(record["groups"])}
    return cls(**values)


@on_its_mesh
def suite_answers(
  model: Transformer,
  tokenizer: AnyTokenizer,
  suite: Suite,
  *,
  readings: Mapping[str, ReadingMode] | None = None,
  chat: bool | None = None,
  limit: int | None = None,
  longest: int | None = None,
  judge: AnswerJudge | None = None,
  known: Iterable[SuiteAnswer] = (),
  on_answer: Callable[[SuiteAnswer], Any] = lambda answer: None,
  on_start: Callable[[int, Sequence[SuiteAnswer]], Any] = lambda total, known: (
    None
  ),
  **options: Any,
) -> list[SuiteAnswer]:
  """Asks a model the questions of a benchmark.

  Args:
    model: Model that answers.
    tokenizer: Tokenizer of the model.
    suite: Questions and rule, see `suite_of`.
    readings: Ways to read prompts, by name; default: one with `options`.
    chat: Whether prompts are chats by the tokenizer's template; None: if it has
      one and no context is read in parts.
    limit: Most questions of each task and length, the first ones; None for all.
    longest: Most tokens of prompt and answer; default: the model's context.
    judge: Judge of the answers, for a suite that is `judged`.
    known: Answers of an earlier call with the same arguments. Those that no
      judge, or another one, has judged are judged, and not asked again.
    on_answer: Function of each new answer; of one that is judged twice, before
      and after.
    on_start: Function of the number of answers and of the known ones among
      them, before the first question.
    **options: Options of `rj.infer.generate` for all ways, such as mesh.

  Returns:
    An answer for each way and question, way by way.

  Raises:
    OptionError: If a way needs a context apart and a question has none, or the
      tokenizer has no chat template, or a judge is missing or not needed.
    JudgeError: If the judge fails; answers so far were given to `on_answer`.
    PromptError: If a prompt does not fit.
    DataError: If a file is missing or is not one of the benchmark.
  """
  readings = {"": ReadingMode()} if readings is None else dict(readings)
  if not readings:
    raise OptionError("readings", "none", "one or more", "pass some")
  if limit is not None:
    positive_int("limit", limit)
  if longest is not None:
    positive_int("longest", longest)
  if suite.judged != (judge is not None):
    needs = "a judge" if suite.judged else "none: answers have a rule"
    raise OptionError(
      "judge",
      "none" if judge is None else judge.model,
      needs,
      "pass judge=AnswerJudge(...) (--judge, --judge_model) for "
      "tasks that are judged, and for no others",
    )
  if judge is not None and jax.process_count() > 1:
    raise OptionError(
      "judge",
      f"{jax.process_count()} processes",
      "one process, which asks the judge once",
      "measure judged tasks with the devices of one host",
    )
  chat = asks_chats(tokenizer, readings, chat)
  template = ChatTemplate.of(tokenizer) if chat else None
  bound = model.config.longest if longest is None else longest
  # Read again for each way: all texts of a benchmark may be gigabytes.
  questions = lambda: _limited(suite.questions(tokenizer), limit)
  ids: list[str] = []
  for question in questions():
    _check(model, tokenizer, suite, question, readings, template, bound)
    ids.append(question.id)
  if not ids:
    raise OptionError(
      "suite", "no questions", "one or more", "check the path of its files"
    )
  wanted = {(name, question_id) for name in readings for question_id in ids}
  answers = {answer.key: answer for answer in known if answer.key in wanted}
  on_start(len(wanted), [*answers.values()])
  for name, reading in readings.items():
    for question in questions():
      answer = answers.get((name, question.id))
      if answer is None:
        answer = _answer(
          model, tokenizer, suite, question, name, reading, template, bound,
          options,
        )  # fmt: skip
        answers[answer.key] = answer
        on_answer(answer)
      if judge is not None and not answer.judged_by(judge.model):
        answer = _judged(suite, question, answer, judge)
        answers[answer.key] = answer
        on_answer(answer)
  return [
    answers[name, question_id] for name in readings for question_id in ids
  ]


def asks_chats(
  tokenizer: AnyTokenizer,
  readings: Mapping[str, ReadingMode],
  chat: bool | None,
) -> bool:
  """Whether questions are asked in chats, see `suite_answers`.

  Raises:
    OptionError: If chats are wanted and a context is read in parts.
  """
  parted = [name for name, x in readings.items() if x.parts is not None]
  if chat is None:
    return tokenizer.chat_template is not None and not parted
  if parted and chat:
    raise OptionError(
      f"chat with parts of contexts ({', '.join(parted)})",
      "a chat template",
      "plain prompts where contexts are read in parts",
      "pass chat=False (--nochat), or leave the parts out",
    )
  return chat


def score_table(
  answers: Sequence[SuiteAnswer], suite: Suite
) -> dict[tuple[str, str], dict[int | None, float]]:
  """Mean scores by (way, task or group) and length, then the mean of each way.

  The mean, row "mean", weighs tasks or questions equally, as `suite.mean_over`
  says.
  """
  scores: dict[tuple[str, str], dict[int | None, list[float]]] = {}
  for answer in answers:
    for row in (answer.task, *answer.groups):
      by_length = scores.setdefault((answer.reading, row), {})
      by_length.setdefault(answer.length, []).append(_score(answer))
  table = {
    row: {length: _mean(x) for length, x in by_length.items()}
    for row, by_length in scores.items()
  }
  for name in dict.fromkeys(answer.reading for answer in answers):
    way = [answer for answer in answers if answer.reading == name]
    tasks = dict.fromkeys(answer.task for answer in way)
    means: dict[int | None, float] = {}
    for length in dict.fromkeys(answer.length for answer in way):
      if suite.mean_over == "questions":
        means[length] = _mean([_score(x) for x in way if x.length == length])
      else:
        rows = [table[name, task] for task in tasks]
        means[length] = _mean([row[length] for row in rows if length in row])
    table[name, "mean"] = means
  return table


def effective_lengths(
  answers: Sequence[SuiteAnswer], suite: Suite
) -> dict[str, EffectiveLength]:
  """Effective length of each way, if the benchmark defines one."""
  lengths: dict[str, EffectiveLength] = {}
  for name in dict.fromkeys(answer.reading for answer in answers):
    scores: dict[int, dict[tuple[str, str], float]] = defaultdict(dict)
    for answer in answers:
      if answer.reading == name and answer.length is not None:
        scores[answer.length][answer.task, answer.id] = _score(answer)
    effective = suite.effective_length(scores) if scores else None
    if effective is not None:
      lengths[name] = effective
  return lengths


def _mean(scores: Sequence[float]) -> float:
  return math.fsum(scores) / len(scores)


def _limited(
  questions: Iterable[LongQuestion], limit: int | None
) -> Iterator[LongQuestion]:
  """The first questions of each task and length, with ids that differ."""
  counts: dict[tuple[str, int | None], int] = defaultdict(int)
  names: set[str] = set()
  for question in questions:
    key = question.task, question.length
    if limit is not None and counts[key] >= limit:
      continue
    counts[key] += 1
    name = question.id
    while name in names:
      # Files of several folders may repeat their indices.
      name += "'"
    names.add(name)
    yield dataclasses.replace(question, id=name)


def _check(
  model: Transformer,
  tokenizer: AnyTokenizer,
  suite: Suite,
  question: LongQuestion,
  readings: Mapping[str, ReadingMode],
  template: ChatTemplate | None,
  bound: int | None,
) -> None:
  """Refuses a question that cannot be asked, before any is.

  Raises:
    OptionError, PromptError: See `suite_answers`.
  """
  for name, reading in readings.items():
    if reading.parts is not None:
      _parts(question, reading.parts, name)
  reads_whole = any(x.parts is None for x in readings.values())
  if suite.cut != "never" or bound is None or not reads_whole:
    return
  tokens = len(_ids(question, tokenizer, template)) + question.max_new_tokens
  if tokens > bound:
    raise PromptError(
      f"question {question.id}",
      f"{tokens:,} tokens with its answer",
      f"at most {bound:,}; this benchmark shortens none",
      "leave such lengths out, or take a model with a longer context "
      "(rope_scaling)",
    )
  within_context(model.config, tokens, f"question {question.id}")


def _answer(
  model: Transformer,
  tokenizer: AnyTokenizer,
  suite: Suite,
  question: LongQuestion,
  name: str,
  reading: ReadingMode,
  template: ChatTemplate | None,
  bound: int | None,
  options: Mapping[str, Any],
) -> SuiteAnswer:
  """Asks one question in one way."""
  options = {**options, **reading.options}
  shortened = False
  if reading.parts is not None:
    ids, contexts, combine = _separate(question, reading, tokenizer, name)
    options |= {"contexts": contexts, "combine": combine}
    tokens = len(ids) + sum(map(len, contexts)) + len(combine.prefix)
  else:
    ids = _ids(question, tokenizer, template)
    room = None if bound is None else bound - question.max_new_tokens
    if room is not None and len(ids) > room:
      ids = _shortened(question, tokenizer, template, room, suite.cut)
      shortened = True
    tokens = len(ids)
  ends = tuple(i for i in tokenizer.eos_ids if i < model.config.vocab)
  new = generate(
    model,
    [ids],
    max_new_tokens=question.max_new_tokens,
    stop=ends or None,
    **options,
  )[0]
  text = tokenizer.decode([int(i) for i in new if int(i) not in ends])
  return SuiteAnswer(
    reading=name,
    id=question.id,
    task=question.task,
    groups=question.groups,
    length=question.length,
    score=None if suite.judged else float(suite.score(question, text)),
    tokens=tokens,
    shortened=shortened,
    completion=text,
  )


def _judged(
  suite: Suite, question: LongQuestion, answer: SuiteAnswer, judge: AnswerJudge
) -> SuiteAnswer:
  """The answer with a judge's score.

  Raises:
    JudgeError: If the judge fails, with the name of the question.
  """
  numbers: dict[str, float] = {}
  replies: list[str] = []
  for criterion in suite.judge_questions(question, answer.completion):
    values, reply = judge.numbers(criterion, f"question {question.id}")
    numbers |= values
    replies.append(reply)
  return dataclasses.replace(
    answer,
    score=float(suite.judged_score(question, numbers)),
    judgement={"model": judge.model, "numbers": numbers, "replies": replies},
  )


def _score(answer: SuiteAnswer) -> float:
  """The score of an answer.

  Raises:
    OptionError: If it is not judged yet.
  """
  if answer.score is None:
    raise OptionError(
      "answers",
      f"{answer.id}, which is not judged",
      "answers with scores",
      "ask with a judge, see suite_answers",
    )
  return answer.score


def _ids(
  question: LongQuestion,
  tokenizer: AnyTokenizer,
  template: ChatTemplate | None,
) -> Int[np.ndarray, " T"]:
  """Ids of a prompt that is read as one text, int32 [T]."""
  if template is None:
    texts = [message["content"] for message in question.history]
    text = "\n\n".join([*texts, question.text]) + question.answer_prefix
    return np.asarray(tokenizer.encode(text, bos=tokenizer.adds_bos), np.int32)
  messages = [*question.history, {"role": "user", "content": question.text}]
  ids = [np.asarray(template.tokens(messages, tokenizer), np.int32)]
  if question.answer_prefix:
    ids.append(np.asarray(tokenizer.encode(question.answer_prefix), np.int32))
  return np.concatenate(ids)


def _shortened(
  question: LongQuestion,
  tokenizer: AnyTokenizer,
  template: ChatTemplate | None,
  room: int,
  cut: str,
) -> Int[np.ndarray, " T"]:
  """Ids of a prompt of at most `room` tokens.

  "middle" removes the middle of the user's message, "context_end" the end of
  the context.

  Raises:
    PromptError: If what may not be cut is too long.
  """
  text = question.text if cut == "middle" else question.context
  text_ids = [int(i) for i in tokenizer.encode(text)]
  keep = len(text_ids)
  ids = _ids(question, tokenizer, template)
  for _ in range(_ATTEMPTS):
    # A text that is cut may have other tokens where it was joined.
    keep -= len(ids) - room
    if keep <= 0:
      break
    if cut == "middle":
      head = keep // 2
      shorter_ids = text_ids[:head] + text_ids[len(text_ids) - (keep - head) :]
      text = tokenizer.decode(shorter_ids)
      shorter = dataclasses.replace(
        question, opening="", context=text, closing=""
      )
    else:
      text = tokenizer.decode(text_ids[:keep])
      shorter = dataclasses.replace(question, context=text)
    ids = _ids(shorter, tokenizer, template)
    if len(ids) <= room:
      return ids
  raise PromptError(
    f"question {question.id}",
    f"{room:,} tokens for its prompt",
    f"room for a message of {len(text_ids):,} tokens, shortened",
    "raise longest (--longest), or take a model with a longer context",
  )


def _separate(
  question: LongQuestion,
  reading: ReadingMode,
  tokenizer: AnyTokenizer,
  name: str,
) -> tuple[Int[np.ndarray, " T"], list[Int[np.ndarray, " C"]], Any]:
  """Ids of the question, those of each part, and how they are combined."""
  assert reading.parts is not None
  texts = _parts(question, reading.parts, name)
  contexts = [np.asarray(tokenizer.encode(text), np.int32) for text in texts]
  history = [message["content"] for message in question.history]
  start = "\n\n".join([*history, question.opening])
  prefix = tokenizer.encode(start, bos=tokenizer.adds_bos)
  combine = combine_of(reading.combine)
  combine = dataclasses.replace(combine, prefix=tuple(int(i) for i in prefix))
  ids = tokenizer.encode(question.closing + question.answer_prefix)
  if not len(ids):
    raise OptionError(
      f"parts of {name or 'contexts'}",
      f"question {question.id}, which ends with its context",
      "a question after the context",
      "pass a template with a text after the context",
    )
  return np.asarray(ids, np.int32), contexts, combine


def _parts(question: LongQuestion, count: int, name: str) -> list[str]:
  """A context in parts, cut between lines, else between words.

  Raises:
    OptionError: If it has too few words, or the question has no context.
  """
  pieces = question.context.splitlines(keepends=True)
  if len(pieces) < count:
    pieces = re.findall(r"\S+\s*|\s+", question.context)
  if len(pieces) < count:
    raise OptionError(
      f"parts of {name or 'contexts'}",
      f"{count} for question {question.id}, whose context has {len(pieces)} "
      "words",
      "questions with a context apart (not mrcr's chats)",
      "read prompts as one text",
    )
  groups = np.array_split(np.arange(len(pieces)), count)
  return ["".join(pieces[n] for n in group) for group in groups]
