"""Chats and pairs of answers from JSON lines.

Guarantees: an error names the file and line, what is wrong and what a line
looks like; it ends the reading, or is passed to `on_bad` and the line is left
out.

A chat is {"messages": [...], "tools": [...]}, as OpenAI's fine-tuning API takes
it: messages with role, content, reasoning_content, tool_calls, and for results
of tools role "tool". "tools" may be missing. Arguments of a call may be an
object or its JSON text; the templates get the object. An assistant's message
with "weight": 0 has no loss.

An entry of a message that is null counts as missing, as tables write it, but
for content, which templates know as null.

A pair is {"prompt": ..., "chosen": ..., "rejected": ...}, each a list of
messages or each a text; without "prompt" the messages with which both answers
begin are the prompt. All messages of an answer from the assistant count, and
"weight": 0 is refused there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ringjax.data.batches.texts import OnBad, Path, from_lines
from ringjax.errors import DataError

Message = dict[str, Any]

_CHAT = '{"messages": [{"role": ..., "content": ...}, ...]}'
_PAIR = '{"prompt": [...], "chosen": [...], "rejected": [...]}'


class Chat(NamedTuple):
  """A chat with answers to learn.

  Fields:
    place: File and line, for errors.
    messages: Messages in their order, without weights.
    learned: Indices of the assistant's messages that have a loss.
    tools: JSON schemas of functions, or None.
  """

  place: str
  messages: list[Message]
  learned: list[int]
  tools: list[dict[str, Any]] | None = None


class PreferencePair(NamedTuple):
  """A prompt with a preferred and another answer.

  Fields:
    place: File and line, for errors.
    prompt: Messages, or a text.
    chosen: Preferred answer, messages or a text as the prompt.
    rejected: The other answer.
    tools: JSON schemas of functions, or None.
  """

  place: str
  prompt: list[Message] | str
  chosen: list[Message] | str
  rejected: list[Message] | str
  tools: list[dict[str, Any]] | None = None


def read_chats(
  paths: Iterable[Path], *, on_bad: OnBad | None = None
) -> Iterator[Chat]:
  """Reads the chats of JSON-lines files.

  Args:
    paths: Paths or addresses of the files.
    on_bad: Called with the error of a bad line, which is then left out.

  Raises:
    DataError: If a line is no chat or has no answer to learn, and there is no
      `on_bad`.
  """
  return from_lines(paths, _chat, on_bad=on_bad)


def read_pairs(
  paths: Iterable[Path], *, on_bad: OnBad | None = None
) -> Iterator[PreferencePair]:
  """Reads the pairs of JSON-lines files.

  Args:
    paths: Paths or addresses of the files.
    on_bad: Called with the error of a bad line, which is then left out.

  Raises:
    DataError: If a line is no pair or its answers are equal, and there is no
      `on_bad`.
  """
  return from_lines(paths, _pair, on_bad=on_bad)


def _chat(place: str, content: object) -> Chat:
  entry = _object(place, content, _CHAT)
  messages = _messages(place, "messages", entry.get("messages"), _CHAT)
  learned = []
  for number, message in enumerate(messages):
    weight = _popped_weight(place, f"messages[{number}]", message)
    if weight and message.get("role") == "assistant":
      learned.append(number)
  if not learned:
    raise DataError(
      place,
      "a chat without an assistant's message to learn",
      "at least one, without weight 0",
      "leave the line out",
    )
  return Chat(place, messages, learned, _tools(place, entry))


def _popped_weight(place: str, name: str, message: Message) -> int:
  """Removes the weight of a message, and returns it."""
  weight = message.pop("weight", 1)
  if isinstance(weight, bool) or weight not in (0, 1):
    raise DataError(
      place,
      f"{name} of weight {weight!r}",
      "a weight of 0 or 1",
      "leave it out for an answer to learn",
    )
  return int(weight)


def _pair(place: str, content: object) -> PreferencePair:
  entry = _object(place, content, _PAIR)
  prompt, chosen, rejected = (
    entry.get(name) for name in ("prompt", "chosen", "rejected")
  )
  tools = _tools(place, entry)
  if isinstance(chosen, str) and isinstance(rejected, str):
    if not isinstance(prompt, str):
      raise DataError(
        place,
        f"two texts with a prompt of {type(prompt).__name__}",
        "a text, as the answers are",
        'write "prompt" as a text, or all three as messages',
      )
    pair = PreferencePair(place, prompt, chosen, rejected, tools)
  else:
    answers = [
      _messages(place, name, entry.get(name), _PAIR)
      for name in ("chosen", "rejected")
    ]
    if prompt is None:
      shared = 0
      for a, b in zip(*answers, strict=False):
        if a != b or a.get("role") == "assistant":
          break
        shared += 1
      # An answer of several turns may begin with equal ones.
      messages = answers[0][:shared]
      answers = [answer[shared:] for answer in answers]
    else:
      messages = _messages(place, "prompt", prompt, _PAIR)
    for message in messages:
      # A prompt has no loss.
      message.pop("weight", None)
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
      for number, message in enumerate(answer):
        if not _popped_weight(place, f"{name}[{number}]", message):
          raise DataError(
            place,
            f"{name}[{number}] of weight 0",
            "answers of which all messages count",
            "move the message to the prompt, or leave the weight out",
          )
    pair = PreferencePair(place, messages, answers[0], answers[1], tools)
    for name, answer in (("chosen", answers[0]), ("rejected", answers[1])):
      if not any(message.get("role") == "assistant" for message in answer):
        raise DataError(
          place,
          f"{name} without an assistant's message",
          "an answer",
          "leave the line out",
        )
  if not pair.prompt:
    raise DataError(
      place, "no prompt", "a prompt before both answers", 'write "prompt"'
    )
  if pair.chosen == pair.rejected:
    raise DataError(
      place,
      "chosen and rejected that are equal",
      "two answers",
      "leave the line out",
    )
  return pair


def _object(place: str, content: object, form: str) -> dict[str, Any]:
  if not isinstance(content, dict):
    raise DataError(
      place, type(content).__name__, form, "write an object a line"
    )
  return content


def _messages(
  place: str, name: str, messages: object, form: str
) -> list[Message]:
  """Copies of messages without nulls, the arguments of calls as objects."""
  if not isinstance(messages, list) or not messages:
    raise DataError(
      place,
      f"{name} {str(messages)[:40]!r}",
      form,
      f'write "{name}" as a list of messages',
    )
  for number, message in enumerate(messages):
    if not isinstance(message, dict) or not isinstance(
      message.get("role"), str
    ):
      raise DataError(
        place,
        f"{name}[{number}] {str(message)[:40]!r}",
        'an object with "role" and "content"',
        "repair the line",
      )
  return [
    _with_arguments(
      place,
      {k: v for k, v in message.items() if v is not None or k == "content"},
    )
    for message in messages
  ]


def _with_arguments(place: str, message: Message) -> Message:
  calls = message.get("tool_calls")
  if not calls:
    return dict(message)
  if not isinstance(calls, list):
    raise DataError(
      place, f"tool_calls of {type(calls).__name__}", "a list", "repair it"
    )
  copies = []
  for call in calls:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(
      function.get("arguments"), str
    ):
      try:
        arguments = json.loads(function["arguments"] or "{}")
      except ValueError as error:
        raise DataError(
          place,
          f"arguments of a call that are no JSON: {error}",
          "an object, or its JSON",
          "repair the line",
        ) from None
      call = {**call, "function": {**function, "arguments": arguments}}
    copies.append(call)
  return {**message, "tool_calls": copies}


def _tools(place: str, entry: dict[str, Any]) -> list[dict[str, Any]] | None:
  tools = entry.get("tools")
  if tools is not None and not isinstance(tools, list):
    raise DataError(
      place,
      f"tools of {type(tools).__name__}",
      "a list of schemas of functions",
      "leave it out for none",
    )
  return tools or None
