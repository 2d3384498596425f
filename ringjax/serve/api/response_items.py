"""Items of OpenAI's Responses API, as messages of a chat and back.

Guarantees: an item or a part that is not supported is refused by its place and
type. What a model wrote between two other items becomes one message of the
assistant: its reasoning, its text and its calls.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.json_text import Json, json_text
from ringjax.serve.api.api_parameters import kind_of, members, text
from ringjax.serve.api.openai_api import AnswerPart

# Members of an item besides its type, and whether clients send back more.
_ITEM_MEMBERS = {
  "message": ("role", "content", "id", "status", "phase"),
  "reasoning": ("id", "summary", "content", "encrypted_content", "status"),
  "function_call": ("id", "call_id", "name", "arguments", "status"),
  "function_call_output": ("id", "call_id", "output", "status"),
}
_PARTS = ("input_text", "output_text", "text", "reasoning_text")
# Members of a part of an answer besides its text, which clients send back: they
# describe it, and no model reads them.
_DESCRIPTIONS = ("annotations", "logprobs")


def messages_of_input(
  given: Json, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
  """Messages of a chat, from the input of a body.

  Args:
    given: A text, or a list of items.
    earlier: Messages before it, in which calls have names that outputs of
      functions refer to.

  Raises:
    OptionError: If it is something else, or an item is not supported.
  """
  if isinstance(given, str):
    return [{"role": "user", "content": given}]
  if not isinstance(given, list) or not given:
    raise OptionError(
      "input",
      kind_of(given) if given != [] else "an empty list",
      "a text, or a list of items",
      "pass one of them",
    )
  messages: list[dict[str, Any]] = []
  names = _call_names(earlier)
  for n, item in enumerate(given):
    name = f"input[{n}]"
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _ITEM_MEMBERS:
      raise OptionError(
        name,
        f"an item of type {json_text(kind)[:60]}",
        f"items of type {', '.join(_ITEM_MEMBERS)}",
        "leave it out",
      )
    parsed = members(name, item, "type", *_ITEM_MEMBERS[kind])
    _add(messages, kind, name, parsed, names)
  return messages


def _add(
  messages: list[dict[str, Any]],
  kind: str,
  name: str,
  item: dict[str, Any],
  names: dict[str, str],
) -> None:
  """Append an item to messages, or to the assistant's last one.

  Args:
    messages: Messages so far.
    kind: Type of the item.
    name: Name of the item in errors.
    item: Members of the item.
    names: Names of functions by the ids of their calls, to which those of a
      call are added.
  """
  if kind == "function_call_output":
    call_id = text(f"{name}.call_id", item.get("call_id"))
    output = {
      "role": "tool",
      "content": _content(f"{name}.output", item.get("output")),
      "tool_call_id": call_id,
    }
    if call_id in names:
      output["name"] = names[call_id]
    messages.append(output)
    return
  role = item.get("role")
  if kind == "message" and role != "assistant":
    if role not in ("user", "system", "developer"):
      raise OptionError(
        f"{name}.role",
        kind_of(role),
        "user, assistant, system or developer",
        "pass one of them",
      )
    content = _content(f"{name}.content", item.get("content"))
    messages.append({"role": role, "content": content})
    return
  last = messages[-1] if messages else None
  # Reasoning begins a message, and so does a text after another text.
  if (
    last is None
    or last["role"] != "assistant"
    or kind == "reasoning"
    or (kind == "message" and (last["content"] or "tool_calls" in last))
  ):
    last = dict[str, Any](role="assistant", content="")
    messages.append(last)
  if kind == "message":
    last["content"] = _content(f"{name}.content", item.get("content"))
  elif kind == "reasoning":
    parts = item.get("content") or item.get("summary") or []
    if parts:
      last["reasoning_content"] = _content(f"{name}.content", parts)
  else:
    call_id = text(f"{name}.call_id", item.get("call_id"))
    function = {
      "name": text(f"{name}.name", item.get("name")),
      "arguments": text(f"{name}.arguments", item.get("arguments")),
    }
    names[call_id] = function["name"]
    call = {"id": call_id, "type": "function", "function": function}
    last.setdefault("tool_calls", []).append(call)


def _call_names(messages: Sequence[dict[str, Any]]) -> dict[str, str]:
  """Names of the functions of calls, by the ids of the calls."""
  return {
    call["id"]: call["function"]["name"]
    for message in messages
    for call in message.get("tool_calls", ())
  }


def _content(name: str, given: Json) -> str:
  """Text of a content, or of its parts together."""
  if isinstance(given, str):
    return given
  if not isinstance(given, list):
    raise OptionError(
      name, kind_of(given), "a text or a list of parts", "pass a text"
    )
  texts = []
  for n, part in enumerate(given):
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in (*_PARTS, "summary_text"):
      raise OptionError(
        f"{name}[{n}]",
        f"a part of type {json_text(kind)[:60]}",
        f"parts of type {', '.join(_PARTS)}",
        "leave it out: images, files and sounds are not read",
      )
    others = _DESCRIPTIONS if kind == "output_text" else ()
    parsed = members(f"{name}[{n}]", part, "type", "text", *others)
    texts.append(text(f"{name}[{n}].text", parsed.get("text")))
  return "".join(texts)


def new_id(prefix: str) -> str:
  """A new id of an item or of a response."""
  return f"{prefix}_{uuid.uuid4().hex}"


def reasoning_item(item_id: str, thought: str, status: str) -> dict[str, Any]:
  """Item of a model's reasoning."""
  content = [{"type": "reasoning_text", "text": thought}] if thought else []
  return {
    "id": item_id,
    "type": "reasoning",
    "summary": [],
    "content": content,
    "status": status,
  }


def text_part(
  content: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
  """Part of a message of the assistant."""
  return {
    "type": "output_text",
    "text": content,
    "annotations": [],
    "logprobs": list(logprobs),
  }


def message_item(
  item_id: str, parts: list[dict[str, Any]], status: str
) -> dict[str, Any]:
  """Item of a message of the assistant."""
  return {
    "id": item_id,
    "type": "message",
    "role": "assistant",
    "status": status,
    "content": parts,
  }


def call_item(
  item_id: str, call: dict[str, Any], status: str
) -> dict[str, Any]:
  """Item of a call, from a call of a chat's message."""
  return {
    "id": item_id,
    "type": "function_call",
    "call_id": call["id"],
    "name": call["function"]["name"],
    "arguments": call["function"]["arguments"],
    "status": status,
  }


def answer_message(part: AnswerPart) -> dict[str, Any]:
  """Message of a chat, from a whole answer."""
  message: dict[str, Any] = {"role": "assistant", "content": part.text}
  if part.reasoning:
    message["reasoning_content"] = part.reasoning
  if part.calls:
    message["tool_calls"] = list(part.calls)
  return message


def size_of(messages: Sequence[dict[str, Any]]) -> int:
  """Number of bytes of messages as JSON."""
  return len(json_text(list(messages)))
