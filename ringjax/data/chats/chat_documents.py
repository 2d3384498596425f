"""Chats as documents with a loss on answers; pairs as two segments of one.

Guarantees: documents are made once, in the order of the lines, so they have one
fingerprint, and a run that resumes reads the same. Nothing is cut, left out or
repeated unless the caller asks for it, and then it is counted.

A document of a pair is the prompt with the preferred answer, segment 1, and the
prompt with the other answer, segment 2. Its segments do not see each other, so
both answers of a pair are in one row, and one row has several pairs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import one_of, positive_int
from ringjax.data.batches.packing import Documents
from ringjax.data.chats.answer_tokens import AnswerTokens, answer_tokens
from ringjax.data.chats.chat_lines import Chat, Message, PreferencePair
from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError, OptionError, RingjaxError, TemplateError

TURNS = ("all", "last", "each")
TOO_LONG = ("refuse", "truncate", "skip")
INVALID = ("refuse", "skip")


def template_time(date: str | None, source: str) -> datetime.datetime:
  """Time that a chat template reads, the same in each run of a training.

  Args:
    date: Date as YYYY-MM-DD, or None.
    source: Source of the template.

  Raises:
    OptionError: If it is no date, or the template writes today's and there is
      none.
  """
  if date is None and "strftime_now" in source:
    raise OptionError(
      "date",
      "none, for a template that writes today's",
      "a date: a run that resumes tomorrow reads the same chats",
      "pass date='2026-01-31', for instance",
    )
  try:
    day = datetime.date.fromisoformat("2026-01-01" if date is None else date)
  except (TypeError, ValueError):
    raise OptionError(
      "date",
      repr(date),
      "a date as YYYY-MM-DD",
      "pass '2026-01-31', for instance",
    ) from None
  return datetime.datetime.combine(day, datetime.time())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatEncoding:
  """Settings of the encoding of chats and pairs.

  Attributes:
    tokenizer: Tokenizer of the model.
    length: Tokens of a row, T, of which a document has at most as many.
    template: Chat template; None: that of the tokenizer.
    too_long: Treatment of documents of more tokens: "refuse"; "truncate" cuts
      the end of a chat, and of each answer of a pair; "skip" leaves them out.
    invalid: Treatment of chats that the template or the tokenizer refuses:
      "refuse" or "skip".
    date: Date as YYYY-MM-DD, for templates that write today's.
    variables: Further variables of the template.
  """

  tokenizer: AnyTokenizer
  length: int
  template: ChatTemplate | None = None
  too_long: str = "refuse"
  invalid: str = "refuse"
  date: str | None = None
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    positive_int("length", self.length)
    one_of("too_long", self.too_long, TOO_LONG)
    one_of("invalid", self.invalid, INVALID)
    template_time(self.date, "")

  @functools.cached_property
  def _template(self) -> ChatTemplate:
    template = self.template or ChatTemplate.of(self.tokenizer)
    template_time(self.date, template.source)
    return template

  def encode(
    self,
    messages: Sequence[Message],
    learned: Collection[int],
    tools: Sequence[Mapping[str, Any]] | None,
  ) -> AnswerTokens:
    """Tokens of a chat; see `answer_tokens`."""
    return answer_tokens(
      self._template,
      messages,
      self.tokenizer,
      learned=learned,
      tools=tools,
      now=template_time(self.date, self._template.source),
      **self.variables,
    )


@dataclasses.dataclass
class ExampleCounts:
  """Numbers of examples by their treatment.

  Attributes:
    used: Documents made.
    truncated: Documents that were cut to the length.
    too_long: Examples left out because of their length, or because no answer
      is left of them after a cut.
    invalid: Examples left out because the template or tokenizer refused them.
    first_error: Error of the first of these.
  """

  used: int = 0
  truncated: int = 0
  too_long: int = 0
  invalid: int = 0
  first_error: str = ""

  def notes(self) -> list[str]:
    """A sentence for each number of examples that are not used whole."""
    parts = (
      (self.truncated, "cut to the length of a row"),
      (self.too_long, "left out, longer than a row"),
      (self.invalid, f"left out as invalid, the first: {self.first_error}"),
    )
    total = self.used + self.too_long + self.invalid
    return [
      f"{n} of {total} examples {treatment}" for n, treatment in parts if n
    ]


class ChatDocuments(Documents):
  """Chats as documents, whose labels are answers.

  Attributes:
    counts: Numbers of examples by their treatment.
  """

  def __init__(
    self, chats: Iterable[Chat], encoding: ChatEncoding, *, turns: str = "all"
  ):
    """Encodes chats.

    Args:
      chats: Chats, as `read_chats` returns them.
      encoding: Settings of the encoding.
      turns: Answers that have a loss: "all" of a chat, the "last", or "each" in
        a separate example that ends with it, for templates that render an
        answer differently once messages follow.

    Raises:
      DataError: If a chat is refused or too long, or none is left.
      OptionError: If `turns` is unknown.
    """
    one_of("turns", turns, TURNS)
    self.counts = counts = ExampleCounts()
    tokens, weights = [], []
    lengths = _Lengths(encoding, counts)
    for place, messages, learned, tools in _examples(chats, turns):
      with _placed_errors(place, encoding, counts):
        example = encoding.encode(messages, learned, tools)
        if lengths.exceeded(place, len(example.ids)):
          if encoding.too_long != "truncate":
            continue
          example = _cut(example, encoding.length)
          if not _has_labels(example):
            counts.too_long += 1
            continue
          counts.truncated += 1
        counts.used += 1
        tokens.append(example.ids)
        weights.append(example.answered.astype(np.float32))
    lengths.check()
    _check_any(counts, "chat")
    super().__init__(tokens, weights)


class PairDocuments:
  """Pairs of answers as documents of two segments.

  Attributes:
    lengths: Tokens of each document, int64 [N].
    fingerprint: Digest of all tokens and weights.
    counts: Numbers of examples by their treatment.
  """

  def __init__(self, pairs: Iterable[PreferencePair], encoding: ChatEncoding):
    """Encodes pairs.

    Args:
      pairs: Pairs, as `read_pairs` returns them.
      encoding: Settings of the encoding.

    Raises:
      DataError: If a pair is refused, too long, of equal tokens, or none is
        left.
    """
    self.counts = counts = ExampleCounts()
    lengths = _Lengths(encoding, counts)
    documents: list[tuple[AnswerTokens, AnswerTokens]] = []
    for pair in pairs:
      with _placed_errors(pair.place, encoding, counts):
        chosen = _answer(pair, pair.chosen, encoding)
        rejected = _answer(pair, pair.rejected, encoding)
        if np.array_equal(chosen.ids, rejected.ids):
          raise DataError(
            pair.place,
            "chosen and rejected that are the same tokens",
            "two answers",
            "leave the line out",
          )
        size = len(chosen.ids) + len(rejected.ids)
        if lengths.exceeded(pair.place, size):
          if encoding.too_long != "truncate":
            continue
          chosen = _cut(chosen, encoding.length // 2)
          rejected = _cut(rejected, encoding.length // 2)
          differ = not np.array_equal(chosen.ids, rejected.ids)
          if not (differ and _has_labels(chosen) and _has_labels(rejected)):
            counts.too_long += 1
            continue
          counts.truncated += 1
        counts.used += 1
        documents.append((chosen, rejected))
    lengths.check()
    _check_any(counts, "pair")
    self._documents = documents
    self.lengths = np.array(
      [len(a.ids) + len(b.ids) for a, b in documents], np.int64
    )
    hashed = hashlib.sha256(b"pairs" + self.lengths.tobytes())
    for pair_tokens in documents:
      for ids, answered in pair_tokens:
        hashed.update(np.int64(len(ids)).tobytes())
        hashed.update(ids.tobytes() + answered.tobytes())
    self.fingerprint = hashed.hexdigest()[:16]

  def __len__(self) -> int:
    return len(self._documents)

  def read(
    self, document: int, start: int, stop: int
  ) -> tuple[
    Int[np.ndarray, " n"], Float[np.ndarray, " n"], Int[np.ndarray, " n"]
  ]:
    """Tokens `start` to `stop` of a pair, their weights and segments."""
    chosen, rejected = self._documents[document]
    ids = np.concatenate([chosen.ids, rejected.ids])
    weights = np.concatenate([chosen.answered, rejected.answered])
    segments = np.repeat([1, 2], [len(chosen.ids), len(rejected.ids)])
    part = slice(start, stop)
    return (
      ids[part],
      weights[part].astype(np.float32),
      segments[part].astype(np.int32),
    )


def _examples(
  chats: Iterable[Chat], turns: str
) -> Iterator[tuple[str, list[Message], list[int], Any]]:
  """Place, messages, answers to learn and tools of each example."""
  for chat in chats:
    if turns == "each":
      for turn in chat.learned:
        yield chat.place, chat.messages[: turn + 1], [turn], chat.tools
    else:
      learned = chat.learned[-1:] if turns == "last" else chat.learned
      yield chat.place, chat.messages, learned, chat.tools


def _answer(
  pair: PreferencePair, answer: list[Message] | str, encoding: ChatEncoding
) -> AnswerTokens:
  """Tokens of the prompt with one of its answers."""
  prompt = pair.prompt
  if isinstance(prompt, str) or isinstance(answer, str):
    assert isinstance(prompt, str)
    assert isinstance(answer, str)
    return _plain_answer(prompt, answer, encoding.tokenizer)
  messages = [*prompt, *answer]
  learned = [
    n
    for n in range(len(prompt), len(messages))
    if messages[n]["role"] == "assistant"
  ]
  return encoding.encode(messages, learned, pair.tools)


def _plain_answer(
  prompt: str, answer: str, tokenizer: AnyTokenizer
) -> AnswerTokens:
  """Tokens of two texts without a template, and of the id that ends a text."""
  prompt_ids = tokenizer.encode(prompt, bos=tokenizer.adds_bos)
  ids = tokenizer.encode(prompt + answer, bos=tokenizer.adds_bos)
  if (
    not np.array_equal(prompt_ids, ids[: len(prompt_ids)])
    or not tokenizer.eos_ids
  ):
    raise TemplateError(
      "prompt",
      f"{prompt[-20:]!r} with {answer[:20]!r}, which share a token"
      if tokenizer.eos_ids
      else "texts for a tokenizer without an id that ends a text",
      "answers that begin with a token of their own, and an eos_token",
      "move the white space between them to the answer, or use messages",
    )
  ids = np.concatenate([ids, np.array(tokenizer.eos_ids[:1], np.int32)])
  return AnswerTokens(ids, np.arange(len(ids)) >= len(prompt_ids))


def _cut(example: AnswerTokens, length: int) -> AnswerTokens:
  return AnswerTokens(example.ids[:length], example.answered[:length])


def _has_labels(example: AnswerTokens) -> bool:
  # The first token of a document is never a label.
  return bool(example.answered[1:].any())


@contextlib.contextmanager
def _placed_errors(
  place: str, encoding: ChatEncoding, counts: ExampleCounts
) -> Iterator[None]:
  """Names the place of an error, or counts it."""
  try:
    yield
  except RingjaxError as error:
    text = str(error)
    text = text if text.startswith(place) else f"{place}: {text}"
    if encoding.invalid == "refuse":
      raise DataError(text) from None
    counts.invalid += 1
    counts.first_error = counts.first_error or text


class _Lengths:
  """Lengths of the examples that are longer than a row."""

  def __init__(self, encoding: ChatEncoding, counts: ExampleCounts):
    self._encoding, self._counts = encoding, counts
    self._number, self._longest, self._place = 0, 0, ""

  def exceeded(self, place: str, length: int) -> bool:
    """Whether an example is longer than a row; counts it if it is left out."""
    if length <= self._encoding.length:
      return False
    self._number += 1
    if length > self._longest:
      self._longest, self._place = length, place
    self._counts.too_long += self._encoding.too_long == "skip"
    return True

  def check(self) -> None:
    """Refuses examples that are too long, if they are not to be cut.

    Raises:
      DataError: If there are any.
    """
    if self._number and self._encoding.too_long == "refuse":
      raise DataError(
        "length",
        f"{self._number} examples of more than {self._encoding.length} tokens, "
        f"the longest of {self._longest}, {self._place[-40:]}",
        "examples that fit a row",
        f"pass length={self._longest} or more, too_long='truncate' or 'skip'",
      )


def _check_any(counts: ExampleCounts, kind: str) -> None:
  if not counts.used:
    raise DataError(
      f"{kind}s",
      f"none to learn from; {'; '.join(counts.notes()) or 'no line'}",
      f"at least one {kind}",
      f"pass files with {kind}s, or a greater length",
    )
