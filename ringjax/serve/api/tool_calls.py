"""Calls of tools: the formats in which models write them, read from answers.

Guarantees: text becomes a call only if all of it is of the model's format, of a
tool that the body has, with an object of arguments; anything else stays the
answer's text. Text that may be the start of a call is not shown before it is
known not to be.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringjax.errors import OptionError
from ringjax.json_text import json_text

Tools = Mapping[str, Mapping[str, Any]]
# Mistral's templates take ids of nine letters and digits only.
_ID_CHARS, _ID_SIZE = string.ascii_letters + string.digits, 9
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
  """A call of a tool.

  Fields:
    name: Name of the function.
    arguments: Arguments by their names.
  """

  name: str
  arguments: dict[str, Any]


class ToolAnswer(NamedTuple):
  """Parts of an answer.

  Fields:
    content: Text that may be shown.
    calls: Calls of tools; only of an answer that has ended.
    reasoning: Text in which the model thinks, or "".
  """

  content: str
  calls: tuple[ToolCall, ...] = ()
  reasoning: str = ""


class ToolFormat(NamedTuple):
  """Format of the calls of a family of models.

  Fields:
    name: Name, for people.
    signs: Texts in a chat template, one of which shows the format.
    marks: Texts with which calls begin; "{" only at the start of an answer.
    read: Function of an answer's text from the first mark on and the tools,
      which returns the calls, or None if it is no call.
    channels: Whether answers are channels, of which one is shown (Harmony).
  """

  name: str
  signs: tuple[str, ...]
  marks: tuple[str, ...]
  read: Callable[[str, Tools], list[ToolCall] | None]
  channels: bool = False


# ---------------------------------------------------------------------------
# Formats
# ---------------------------------------------------------------------------


def _call(value: object, tools: Tools) -> ToolCall | None:
  """Call of an object with a name and arguments or parameters."""
  if not isinstance(value, dict):
    return None
  arguments = value.get("arguments", value.get("parameters", {}))
  if isinstance(arguments, str):
    arguments = _json(arguments)
  name = value.get("name")
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  return ToolCall(name, arguments) if name in tools else None


def _json(text: str) -> Any:
  """Value of a text of JSON; None for other texts."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return None


def _objects(text: str, separators: str) -> list[Any] | None:
  """JSON values, one after another, with `separators` between them."""
  values = []
  text = text.strip()
  while text:
    try:
      value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
      return None
    values.append(value)
    text = text[end:].lstrip(separators)
  return values


def _all_calls(
  values: Sequence[Any] | None, tools: Tools
) -> list[ToolCall] | None:
  """Calls of objects; None if one of them is no call."""
  calls = [_call(value, tools) for value in values or ()]
  return [x for x in calls if x is not None] if calls and all(calls) else None


def _by_schema(text: str, name: str, key: str, tools: Tools) -> Any:
  """Value of an argument that is written as text, by the tool's schema."""
  parameters = tools[name].get("properties", {})
  schema = parameters.get(key, {}) if isinstance(parameters, dict) else {}
  kind = schema.get("type") if isinstance(schema, dict) else None
  if kind == "string":
    return text
  value = _json(text)
  return text if value is None and text.strip() != "null" else value


_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(
  r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL
)
_PARAMETER = re.compile(
  r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL
)
_ARGUMENT = re.compile(
  r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)


def _read_blocks(text: str, tools: Tools) -> list[ToolCall] | None:
  """<tool_call> blocks: JSON (Hermes, Qwen), or tags (Qwen Coder, GLM)."""
  if _BLOCK.sub("", text).strip():
    return None
  calls: list[ToolCall] = []
  for block in _BLOCK.findall(text):
    if (function := _FUNCTION.fullmatch(block)) is not None:
      name, pairs = function[1].strip(), _PARAMETER.findall(function[2])
    elif block.startswith("{"):
      call = _call(_json(block), tools)
      if call is None:
        return None
      calls.append(call)
      continue
    else:
      name = block.partition("<arg_key>")[0].strip()
      pairs = _ARGUMENT.findall(block)
    if name not in tools:
      return None
    arguments = {key: _by_schema(x, name, key, tools) for key, x in pairs}
    calls.append(ToolCall(name, arguments))
  return calls or None


def _read_llama(text: str, tools: Tools) -> list[ToolCall] | None:
  """JSON objects, which are all of the answer (Llama 3)."""
  text = text.removeprefix("<|python_tag|>")
  return _all_calls(_objects(text, " \n;"), tools)


def _read_mistral(text: str, tools: Tools) -> list[ToolCall] | None:
  """[TOOL_CALLS] before a list, or before each name and its arguments."""
  values: list[Any] = []
  for part in text.split("[TOOL_CALLS]")[1:]:
    part = part.strip()
    if part.startswith("["):
      lists = _objects(part, " \n")
      if lists is None or len(lists) != 1:
        return None
      values += lists[0]
      continue
    name, _, arguments = part.partition("{")
    name = name.replace("[ARGS]", "").partition("[CALL_ID]")[0].strip()
    values.append({"name": name, "arguments": _json("{" + arguments)})
  return _all_calls(values, tools)


def _deepseek(words: str) -> str:
  """Text of one of DeepSeek's special tokens."""
  return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_DEEPSEEK_MARKS = _deepseek("tool calls begin"), _deepseek("tool call begin")
_SEPARATOR = _deepseek("tool sep")
_DEEPSEEK = re.compile(
  rf"{_DEEPSEEK_MARKS[1]}(?:function{_SEPARATOR})?([^\n<]+)"
  rf"(?:\n```json\n(.*?)\n```|{_SEPARATOR}(.*?))"
  rf"(?:{_deepseek('tool call end')}|\Z)",
  re.DOTALL,
)


def _read_deepseek(text: str, tools: Tools) -> list[ToolCall] | None:
  """Names and arguments between DeepSeek's own tokens."""
  values = [
    {"name": name.strip(), "arguments": _json(fenced or plain)}
    for name, fenced, plain in _DEEPSEEK.findall(text)
  ]
  return _all_calls(values, tools)


_CHANNEL = re.compile(
  r"(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<header>[^<]*)"
  r"(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<text>.*?)"
  r"(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
  re.DOTALL,
)
_RECIPIENT = re.compile(r"to=functions\.(\S+)")


def _read_channels(text: str, tools: Tools) -> list[ToolCall] | None:
  """Messages to functions, of channels (GPT-OSS's Harmony)."""
  values = []
  for channel in _CHANNEL.finditer(text):
    header = f"{channel['to']} {channel['header']}"
    if (to := _RECIPIENT.search(header)) is not None:
      arguments = _json(channel["text"])
      values.append({"name": to[1], "arguments": arguments})
  return _all_calls(values, tools)


def _channel_texts(text: str) -> ToolAnswer:
  """Shown text and reasoning of channels, without messages to functions."""
  shown, reasoning = [], []
  for channel in _CHANNEL.finditer(text):
    if _RECIPIENT.search(f"{channel['to']} {channel['header']}"):
      continue
    analysis = channel["header"].strip().startswith("analysis")
    (reasoning if analysis else shown).append(channel["text"])
  return ToolAnswer("".join(shown), (), "".join(reasoning))


FORMATS = (
  ToolFormat(
    "GPT-OSS",
    ("<|channel|>",),
    ("<|channel|>", "<|start|>", " to=functions."),
    _read_channels,
    channels=True,
  ),
  ToolFormat("DeepSeek", _DEEPSEEK_MARKS, _DEEPSEEK_MARKS, _read_deepseek),
  ToolFormat("Mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), _read_mistral),
  ToolFormat(
    "Hermes, Qwen, GLM", ("<tool_call>",), ("<tool_call>",), _read_blocks
  ),
  ToolFormat(
    "Llama 3",
    ("<|python_tag|>", '"parameters": dictionary', '"parameters":'),
    ("<|python_tag|>", "{"),
    _read_llama,
  ),
)


def check_place(template: str) -> None:
  """Refuse tools for a chat template that does not write them.

  Raises:
    OptionError: If it does not.
  """
  if not re.search(r"\btools\b", template):
    raise OptionError(
      "tools",
      "tools for a model whose chat template has no place for them",
      "none: they are not supported there",
      "leave them out, or serve with a template that writes them",
    )


def format_of(template: str) -> ToolFormat:
  """Format of the calls that a chat template describes.

  Raises:
    OptionError: If the template has no place for tools, or none of the known
      formats.
  """
  check_place(template)
  for form in FORMATS:
    if any(sign in template for sign in form.signs):
      return form
  raise OptionError(
    "tools",
    "tools for a model whose format of calls is not known",
    f"one of {'; '.join(form.name for form in FORMATS)}",
    'leave them out, or pass tool_choice "required", whose answers are JSON',
  )


# ---------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolReader:
  """Reads the calls of an answer.

  Attributes:
    tools: Schema of the arguments of each tool, by its name.
    form: Format of the calls; None: the answer is one call, as JSON.
    parallel: Whether an answer may have several calls.
  """

  tools: Tools
  form: ToolFormat | None
  parallel: bool = True

  def read(self, text: str, ended: bool) -> ToolAnswer:
    """Parts of an answer's text so far.

    Args:
      text: The text.
      ended: Whether it is all of the text.
    """
    form = self.form
    if form is None:
      call = _call(_json(text), self.tools) if ended else None
      if call is not None:
        return ToolAnswer("", (call,))
      return ToolAnswer(text if ended else "")
    if form.channels and text:
      return self._read_channels(text, ended)
    start = _first_mark(text, form.marks)
    if start is None:
      return ToolAnswer(text if ended else _certain(text, form.marks))
    content = text[:start].rstrip()
    if not ended:
      return ToolAnswer(content)
    calls = form.read(text[start:], self.tools)
    return ToolAnswer(text) if calls is None else self._with(content, calls)

  def _read_channels(self, text: str, ended: bool) -> ToolAnswer:
    """Parts of an answer in channels, which are shown when it has ended."""
    if not ended:
      return ToolAnswer("")
    if "<|channel|>" not in text:
      return ToolAnswer(text)
    parts = _channel_texts(text)
    assert self.form is not None
    calls = self.form.read(text, self.tools)
    if calls is None:
      called = _RECIPIENT.search(text) is not None
      return ToolAnswer(text) if called else parts
    return self._with(parts.content, calls)._replace(reasoning=parts.reasoning)

  def _with(self, content: str, calls: Sequence[ToolCall]) -> ToolAnswer:
    return ToolAnswer(content, tuple(calls if self.parallel else calls[:1]))


def _first_mark(text: str, marks: Sequence[str]) -> int | None:
  """Place of the first mark in a text."""
  places = [text.find(mark) for mark in marks if mark != "{"]
  if "{" in marks and text.lstrip().startswith("{"):
    places.append(0)
  return min((place for place in places if place >= 0), default=None)


def _certain(text: str, marks: Sequence[str]) -> str:
  """Text without an end that may be the start of a mark."""
  uncertain = 0
  for mark in marks:
    for size in range(1, min(len(mark), len(text) + 1)):
      if text.endswith(mark[:size]):
        uncertain = max(uncertain, size)
  # Spaces before a mark are not shown.
  return text[: len(text) - uncertain].rstrip()


def forced_schema(tools: Tools) -> dict[str, Any]:
  """JSON schema of an answer that is a call of one of some tools."""
  options = [
    {
      "type": "object",
      "properties": {
        "name": {"const": name},
        "arguments": dict(schema) or {"type": "object"},
      },
      "required": ["name", "arguments"],
      "additionalProperties": False,
    }
    for name, schema in tools.items()
  ]
  schema = options[0] if len(options) == 1 else {"anyOf": options}
  # Without spaces, of which a model could write any number.
  return schema | {"x-guidance": {"whitespace_flexible": False}}


def call_bodies(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
  """Calls as members of a message of OpenAI's API."""
  new_id = lambda: "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_SIZE))
  return [
    {
      "id": new_id(),
      "type": "function",
      "function": {
        "name": call.name,
        "arguments": json_text(call.arguments, ensure_ascii=False),
      },
    }
    for call in calls
  ]
