"""Tokens of a chat, and which of them its assistant wrote.

Guarantees: the ids are those of `ChatTemplate.tokens` for the whole chat. An
answer's tokens are those that {% generation %} marks where the template has it;
where single answers are learned, the marks must not change when messages
follow. Else they are the tokens between the rendering of the messages before
it, with the opening of an answer, and that of the messages up to it: both must
be prefixes, token by token, of the whole chat, so that the model learns each
token after the tokens that it reads before it when it answers. An answer ends
with the last special token that the template writes for it; white space after
that is the template's. A chat for which this does not hold is refused.
Cost: two renderings for each answer, about 1 ms each.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import TemplateError


class AnswerTokens(NamedTuple):
  """Tokens of a chat.

  Fields:
    ids: Token ids, int32 [T].
    answered: Whether each token is of an answer to learn, bool [T].
  """

  ids: Int[np.ndarray, " T"]
  answered: Bool[np.ndarray, " T"]


def answer_tokens(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  tokenizer: AnyTokenizer,
  *,
  learned: Collection[int],
  tools: Sequence[Mapping[str, Any]] | None = None,
  now: datetime.datetime | None = None,
  **more: Any,
) -> AnswerTokens:
  """Encodes a chat and marks the tokens of some of its answers.

  Args:
    template: Chat template of the model.
    messages: Messages of the chat, as `ChatTemplate.tokens` takes them.
    tokenizer: Tokenizer of the model.
    learned: Indices of the assistant's messages to mark.
    tools: JSON schemas of functions, for templates that know them.
    now: Time for templates that write the date.
    **more: Further variables of the template.

  Raises:
    TemplateError: If the tokens of an answer can't be told from the others.
    RingjaxError: See `ChatTemplate.tokens`.
  """
  options: dict[str, Any] = {"tools": tools, "now": now, **more}
  if template.marks_answers:
    return _by_marks(template, messages, tokenizer, learned, options)
  return _by_prefixes(template, messages, tokenizer, learned, options)


def answer_end(template: ChatTemplate, tokenizer: AnyTokenizer) -> int | None:
  """Id of the special token with which the answers of a template end, or None.

  White space may follow it. None, too, for a template whose answers can't be
  told from a chat of a question and an answer: it may be one of prompts alone.
  """
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
  ]
  try:
    ids, answered = answer_tokens(template, messages, tokenizer, learned=(1,))
  except TemplateError:
    return None
  for token in reversed(ids[answered].tolist()):
    if token in tokenizer.specials.ids:
      return token
    if tokenizer.window([token]).strip():
      break
  return None


def _by_marks(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  tokenizer: AnyTokenizer,
  learned: Collection[int],
  options: dict[str, Any],
) -> AnswerTokens:
  ids, spans = template.marked_answers(messages, tokenizer, **options)
  answered = np.zeros(len(ids), bool)
  roles = [message["role"] for message in messages]

  def count(turns: int) -> int:
    """Number of ranges that are marked in the first messages."""
    if not turns:
      return 0
    first_ids, first_spans = template.marked_answers(
      messages[:turns], tokenizer, **options
    )
    # A template may mark only the last answer, or change it later.
    unchanged = [*first_spans] == [*spans[: len(first_spans)]] and all(
      np.array_equal(first_ids[start:stop], ids[start:stop])
      for start, stop in first_spans
    )
    if not unchanged:
      raise _unknown_span(
        f"{{% generation %}} around other text of the messages up to message "
        f"{turns - 1} than in the whole chat",
        "the same marks whatever follows",
      )
    return len(first_spans)

  ranges = [range(len(spans))]
  if not len(learned) == roles.count("assistant") == len(spans):
    # A template may mark several ranges of one message.
    ranges = [range(count(turn), count(turn + 1)) for turn in sorted(learned)]
  for numbers in ranges:
    if not numbers:
      raise _unknown_span(
        "no {% generation %} around an answer", "it around each answer"
      )
    for start, stop in spans[numbers.start : numbers.stop]:
      answered[start:stop] = True
  return AnswerTokens(ids, answered)


def _by_prefixes(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  tokenizer: AnyTokenizer,
  learned: Collection[int],
  options: dict[str, Any],
) -> AnswerTokens:
  def tokens(count: int, opened: bool) -> np.ndarray:
    return template.tokens(
      messages[:count], tokenizer, add_generation_prompt=opened, **options
    )

  ids = tokens(len(messages), False)
  answered = np.zeros(len(ids), bool)
  for turn in sorted(learned):
    if not turn:
      raise TemplateError(
        "messages",
        "an answer of the assistant before any other message",
        "a message that it answers",
        'give this answer "weight": 0, or add a message before it',
      )
    prompt_ids = tokens(turn, True)
    answered_ids = ids if turn + 1 == len(messages) else tokens(turn + 1, False)
    for name, prefix in (("before", prompt_ids), ("up to", answered_ids)):
      if not np.array_equal(prefix, ids[: len(prefix)]):
        raise _unknown_span(
          f"a rendering of the messages {name} message {turn} that is no "
          "prefix of the whole chat's",
          "a template that only adds text for further messages, or "
          "{% generation %} in it",
        )
    stop = _without_white_space(
      ids, len(prompt_ids), len(answered_ids), tokenizer
    )
    if stop == len(prompt_ids):
      raise _unknown_span(f"no token for message {turn}", "an answer")
    answered[len(prompt_ids) : stop] = True
  return AnswerTokens(ids, answered)


def _without_white_space(
  ids: np.ndarray, start: int, stop: int, tokenizer: AnyTokenizer
) -> int:
  """End of an answer without white space after its last special token."""
  special = [i for i in range(start, stop) if tokenizer.is_special(int(ids[i]))]
  if not special:
    return stop
  end = special[-1] + 1
  return stop if tokenizer.decode(ids[end:stop]).strip() else end


def _unknown_span(got: str, want: str) -> TemplateError:
  return TemplateError(
    "chat template",
    got,
    want,
    "train on turns='each' (an example for each answer) or 'last', or pass "
    "a template with {% generation %} around answers",
  )
