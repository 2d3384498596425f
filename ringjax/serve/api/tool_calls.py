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


def _blocks(text: str, start: str, end: str) -> list[str] | None:
  """Texts between tags; None if anything but spaces is outside of them.

  By searches for fixed texts: an answer of any length takes linear time.
  """
  blocks, at = [], 0
  while (begin := text.find(start, at)) >= 0:
    close = text.find(end, begin + len(start))
    if close < 0 or text[at:begin].strip():
      return None
    blocks.append(text[begin + len(start) : close])
    at = close + len(end)
  return None if text[at:].strip() else blocks


def _pairs(
  text: str, key: tuple[str, str], value: tuple[str, str]
) -> list[tuple[str, str]] | None:
  """Keys and values, each between its two tags, and nothing else."""
  pairs = []
  text = text.strip()
  while text:
    if not text.startswith(key[0]):
      return None
    name, found_key, text = text[len(key[0]) :].partition(key[1])
    text = text.removeprefix("\n") if not value[0] else text.lstrip()
    if not found_key or not text.startswith(value[0]):
      return None
    argument, found_value, text = text[len(value[0]) :].partition(value[1])
    if not found_value:
      return None
    pairs.append((name.strip(), argument))
    text = text.lstrip()
  return pairs


def _read_blocks(text: str, tools: Tools) -> list[ToolCall] | None:
  """<tool_call> blocks: JSON (Hermes, Qwen), or tags (Qwen Coder, GLM)."""
  calls: list[ToolCall] = []
  for block in _blocks(text, "<tool_call>", "</tool_call>") or ():
    call = _read_block(block.strip(), tools)
    if call is None:
      return None
    calls.append(call)
  return calls or None


def _read_block(block: str, tools: Tools) -> ToolCall | None:
  """Call of one block."""
  if block.startswith("{"):
    return _call(_json(block), tools)
  if block.startswith("<function="):
    if not block.endswith("</function>"):
      return None
    name, _, parameters = block.removeprefix("<function=").partition(">")
    pairs = _pairs(
      parameters.removesuffix("</function>"),
      ("<parameter=", ">"),
      ("", "</parameter>"),
    )
    pairs = pairs and [(key, x.removesuffix("\n")) for key, x in pairs]
  else:
    name, tag, arguments = block.partition("<arg_key>")
    pairs = _pairs(
      tag + arguments,
      ("<arg_key>", "</arg_key>"),
      ("<arg_value>", "</arg_value>"),
    )
  name = name.strip()
  if name not in tools or pairs is None:
    return None
  return ToolCall(
    name, {key: _by_schema(x, name, key, tools) for key, x in pairs}
  )


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
_FENCE = "\n```json\n", "\n```"


def _read_deepseek(text: str, tools: Tools) -> list[ToolCall] | None:
  """Names and arguments between DeepSeek's own tokens."""
  begin = text.removeprefix(_DEEPSEEK_MARKS[0]).strip()
  begin = begin.removesuffix(_deepseek("tool calls end"))
  values = []
  blocks = _blocks(begin, _DEEPSEEK_MARKS[1], _deepseek("tool call end"))
  for block in blocks or ():
    block = block.removeprefix("function" + _SEPARATOR)
    name, fence, arguments = block.partition(_FENCE[0])
    if fence:
      arguments, closed, remainder = arguments.partition(_FENCE[1])
      if not closed or remainder.strip():
        return None
    else:
      name, _, arguments = block.partition(_SEPARATOR)
    values.append({"name": name.strip(), "arguments": _json(arguments)})
  return _all_calls(values, tools)


class _Channel(NamedTuple):
  """A message of an answer in channels (GPT-OSS's Harmony).

  Fields:
    header: Texts before the message: recipient, channel and type.
    text: Text of the message.
    ended: Whether a token ended it.
    span: Slice of the answer with the header, the message and its end.
  """

  header: str
  text: str
  ended: bool
  span: slice

  @property
  def is_call(self) -> bool:
    """Whether the message is to a function."""
    return _RECIPIENT.search(self.header) is not None


_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
# Texts with which an answer in channels begins.
CHANNEL_MARKS = ("<|channel|>", "<|start|>", *_MESSAGE_ENDS)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def _channels(text: str) -> list[_Channel]:
  """Messages of an answer in channels."""
  channels: list[_Channel] = []
  remainder, at = text, 0
  while True:
    header, mark, remainder = remainder.partition("<|message|>")
    if not mark:
      return channels
    places = [remainder.find(end) for end in _MESSAGE_ENDS]
    place = min((n for n in places if n >= 0), default=-1)
    ended = place >= 0
    message = remainder[:place] if ended else remainder
    remainder = remainder[place:].partition("|>")[2] if ended else ""
    span = slice(at, len(text) - len(remainder))
    channels.append(_Channel(header, message, ended, span))
    at = span.stop


def _read_channels(text: str, tools: Tools) -> list[ToolCall] | None:
  """Messages to functions, of channels; None if one of them is no call."""
  values = []
  for channel in _channels(text):
    if (to := _RECIPIENT.search(channel.header)) is not None:
      # The token that ends a call may be the one that ended the answer.
      arguments = _json(channel.text)
      values.append({"name": to[1], "arguments": arguments})
  return _all_calls(values, tools)


def channel_texts(text: str, *, calls: bool = False) -> ToolAnswer:
  """Shown text and reasoning of channels.

  Args:
    text: The answer.
    calls: Whether messages to functions are calls, and not shown.
  """
  shown, reasoning = [], []
  for channel in _channels(text):
    name = channel.header.rpartition("<|channel|>")[2].strip()
    if calls and channel.is_call:
      continue
    is_shown = not name.startswith("analysis")
    (shown if is_shown else reasoning).append(channel.text)
  return ToolAnswer("".join(shown), (), "".join(reasoning))


def _growing_channels(text: str) -> ToolAnswer:
  """Parts of an answer that has not ended: analyses, then a final message.

  What follows another message waits for the end, which tells text from calls.
  """
  reasoning = ""
  for channel in _channels(text):
    _, mark, name = channel.header.rpartition("<|channel|>")
    if not mark or channel.is_call:
      break
    if name.strip().startswith("final"):
      return ToolAnswer(channel.text, (), reasoning)
    if not name.strip().startswith("analysis"):
      break
    reasoning += channel.text
  return ToolAnswer("", (), reasoning)


def _channels_as_written(text: str, ended: bool) -> str:
  """Text of channels with their marks, without calls.

  What follows a call of an answer that has not ended waits for the end.
  """
  texts, at = [], 0
  for channel in _channels(text):
    at = channel.span.stop
    if not channel.is_call:
      texts.append(text[channel.span])
    elif not ended:
      return "".join(texts)
  # The header of a message that has not begun may be that of a call.
  return "".join(texts) + text[at:] if ended else "".join(texts)


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
    shown: Whether reasoning in channels stays in the content, with its marks.
  """

  tools: Tools
  form: ToolFormat | None
  parallel: bool = True
  shown: bool = False

  def read(self, text: str, ended: bool) -> ToolAnswer:
    """Parts of an answer's text so far.

    Args:
      text: The text, without reasoning before it.
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
      return ToolAnswer(text if ended else certain(text, form.marks))
    content = text[:start].rstrip()
    if not ended:
      return ToolAnswer(content)
    calls = form.read(text[start:], self.tools)
    return ToolAnswer(text) if calls is None else self._with(content, calls)

  def _read_channels(self, text: str, ended: bool) -> ToolAnswer:
    """Parts of an answer in channels."""
    if not ended:
      text = certain(text, CHANNEL_MARKS)
      if self.shown:
        return ToolAnswer(_channels_as_written(text, False))
      return _growing_channels(text)
    if "<|channel|>" not in text:
      return ToolAnswer(text)
    assert self.form is not None
    calls = self.form.read(text, self.tools)
    if self.shown:
      if calls is None:
        return ToolAnswer(text)
      return self._with(_channels_as_written(text, True), calls)
    parts = channel_texts(text, calls=calls is not None)
    return (
      parts
      if calls is None
      else self._with(parts.content, calls, parts.reasoning)
    )

  def _with(
    self, content: str, calls: Sequence[ToolCall], reasoning: str = ""
  ) -> ToolAnswer:
    allowed_calls = calls if self.parallel else calls[:1]
    return ToolAnswer(content, tuple(allowed_calls), reasoning)


def _first_mark(text: str, marks: Sequence[str]) -> int | None:
  """Place of the first mark in a text."""
  places = [text.find(mark) for mark in marks if mark != "{"]
  if "{" in marks and text.lstrip().startswith("{"):
    places.append(0)
  return min((place for place in places if place >= 0), default=None)


def certain(text: str, marks: Sequence[str]) -> str:
  """Text without an end that may be the start of a mark."""
  uncertain = 0
  for mark in marks:
    for size in range(1, min(len(mark), len(text) + 1)):
      if text.endswith(mark[:size]):
        uncertain = max(uncertain, size)
  # Spaces before a mark are not shown.
  return text[: len(text) - uncertain].rstrip()


def forced_schema(tools: Tools) -> dict[str, Any]:
  """JSON schema of an answer that is a call of one of some tools.

  A tool's definitions go to the root, under its number: its references are to
  its own root.
  """
  options, definitions = [], {}
  for number, (name, schema) in enumerate(tools.items()):
    at = f"#/$defs/tool{number}"
    arguments = _moved(schema, at) or {"type": "object"}
    definitions[f"tool{number}"] = arguments
    options.append(
      {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": at}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
      }
    )
  schema = options[0] if len(options) == 1 else {"anyOf": options}
  # Without spaces, of which a model could write any number.
  guidance = {"x-guidance": {"whitespace_flexible": False}}
  return {**schema, "$defs": definitions, **guidance}


def _moved(schema: Any, root: str) -> Any:
  """A schema whose references to its root are to another place."""
  if isinstance(schema, list):
    return [_moved(x, root) for x in schema]
  if not isinstance(schema, dict):
    return schema
  moved = {key: _moved(x, root) for key, x in schema.items()}
  target = moved.get("$ref")
  if isinstance(target, str) and target.startswith("#"):
    moved["$ref"] = root + target[1:]
  return moved


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
