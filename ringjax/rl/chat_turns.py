"""Prompts and turns of conversations, by a chat template.

Guarantees: the tokens after an answer are those that the template writes
between an answer and the opening of the next one, whatever the answer says:
they are found with a short answer in its place. Tokens that were sampled are
never encoded again, so their log-probabilities stay those of the engine. Texts
of messages hold no special tokens; only the template writes these.
Cost: three renderings for each turn of each conversation, about 1 ms each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from ringjax.data.chats.chat_documents import template_time
from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import TemplateError

Message = Mapping[str, Any]
# An answer in place of the sampled one, whose tokens are not encoded again.
_ANSWER: Message = {"role": "assistant", "content": "OK."}
_QUESTION: Message = {"role": "user", "content": "Go on."}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTurns:
  """Tokens that a chat template writes around sampled answers.

  Attributes:
    template: Chat template of the model.
    tokenizer: Tokenizer of the model.
    variables: Further variables of the template, such as
      {"enable_thinking": False}.
    date: Date as YYYY-MM-DD, for templates that write today's.
  """

  template: ChatTemplate
  tokenizer: AnyTokenizer
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  date: str | None = None

  def __post_init__(self) -> None:
    template_time(self.date, self.template.source)

  def opened(self, messages: Sequence[Message]) -> Int32[np.ndarray, " n"]:
    """Prompt of some messages with the opening of an answer, int32 [n].

    Args:
      messages: Messages, as `ChatTemplate.tokens` takes them.

    Raises:
      RingjaxError: See `ChatTemplate.tokens`.
    """
    return self._tokens(messages, opened=True)

  @functools.cached_property
  def end_id(self) -> int:
    """Id of the token that ends an answer.

    Raises:
      TemplateError: If the template writes no special token after an answer.
    """
    closed_ids, end = self._closed([_QUESTION])
    return int(closed_ids[end - 1])

  def check_turns(self) -> None:
    """Refuses a template whose turns can't be told from an answer.

    Raises:
      TemplateError: See `between`.
    """
    self.between([_QUESTION], [_QUESTION])

  def between(
    self, messages: Sequence[Message], new: Sequence[Message]
  ) -> Int32[np.ndarray, " n"]:
    """Tokens after an answer up to the opening of the next one, int32 [n].

    The token that ends the answer is the policy's, and is not among them.

    Args:
      messages: Messages before the answer, with one of the assistant for each
        earlier answer.
      new: Messages that follow the answer.

    Raises:
      TemplateError: If the template writes no special token after an answer, or
        other text before it when messages follow.
      RingjaxError: See `ChatTemplate.tokens`.
    """
    closed_ids, end = self._closed(messages)
    chat_ids = self._tokens(answered(messages, new), opened=True)
    if not np.array_equal(chat_ids[:end], closed_ids[:end]):
      raise TemplateError(
        "chat template",
        "other text before the end of an answer when messages follow it",
        "the same tokens, after which the answer was sampled",
        "train with one turn, or with a template that keeps earlier messages",
      )
    return chat_ids[end:]

  def _closed(
    self, messages: Sequence[Message]
  ) -> tuple[Int32[np.ndarray, " n"], int]:
    """Tokens of messages with an answer, and the index after its last one."""
    opened = self._tokens(messages, opened=True)
    closed = self._tokens(answered(messages, ()), opened=False)
    is_special = [self.tokenizer.is_special(int(x)) for x in closed]
    ends = np.flatnonzero(is_special)
    if not ends.size or ends[-1] < _shared(opened, closed):
      raise TemplateError(
        "chat template",
        "no special token after an answer",
        "a token that ends it, after which the next turn begins",
        "train with one turn, or with a template that writes one",
      )
    return closed, int(ends[-1]) + 1

  def _tokens(
    self, messages: Sequence[Message], *, opened: bool
  ) -> Int32[np.ndarray, " n"]:
    ids = self.template.tokens(
      messages,
      self.tokenizer,
      add_generation_prompt=opened,
      now=template_time(self.date, self.template.source),
      **self.variables,
    )
    return np.asarray(ids, np.int32)


def answered(
  messages: Sequence[Message], new: Sequence[Message]
) -> list[Message]:
  """Messages, an answer in place of the sampled one, and new messages."""
  return [*messages, _ANSWER, *new]


def _shared(a: np.ndarray, b: np.ndarray) -> int:
  """Number of tokens with which both begin."""
  count = min(len(a), len(b))
  differ = np.flatnonzero(a[:count] != b[:count])
  return int(differ[0]) if differ.size else count
