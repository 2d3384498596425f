"""Parameters of OpenAI's API: names, types, ranges, and errors about them.

Guarantees: a parameter has the type and range that is stated here, or is
refused with an error object that says what came, what was expected and what to
do, in the words of the API. null stands for a parameter that is left out. A
parameter that is not supported is taken where its value asks for nothing
(`tools: []`, `echo: false`), and refused otherwise.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ringjax.checks import integer, number
from ringjax.data.text.chat import ROLES
from ringjax.errors import OptionError, RingjaxError, message
from ringjax.infer.sampling import PARAMETERS
from ringjax.infer.scoring.text_scorer import POOLINGS
from ringjax.json_text import Json, json_text
from ringjax.serve.row_sampler import BIASES, TOP

_UNSUPPORTED = "unsupported_parameter"


class Absent(enum.Enum):
  """Result of a parser for a value that means the same as no parameter."""

  ABSENT = enum.auto()


ABSENT = Absent.ABSENT
Parser = Callable[[str, Any], Any]


class ApiError(Exception):
  """Error that is answered as an error object of OpenAI's API.

  Attributes:
    status: HTTP status.
    body: Error object of the body.
    headers: HTTP headers of the answer.
  """

  def __init__(
    self,
    status: int,
    text: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(text)
    self.status, self.headers = status, dict(headers or {})
    self.body = {
      "error": {"message": text, "type": kind, "param": param, "code": code}
    }


def refused(
  param: str,
  got: object,
  want: object,
  remedy: object,
  *,
  code: str | None = None,
) -> ApiError:
  """Make the error of a parameter: what came, what was expected, what to do."""
  return ApiError(
    400, message(param, got, want, remedy), param=param, code=code
  )


def from_error(error: RingjaxError) -> ApiError:
  """Make the API error of a package error, which names an argument."""
  parsed = re.match(r"\w+(?=: got )", str(error))
  name = parsed[0] if parsed else None
  # Names of `Stop`'s arguments in the API.
  api_names = {"strings": "stop", "ids": "stop_token_ids"}
  name = None if name is None else api_names.get(name, name)
  return ApiError(400, str(error), param=name)


def parse_json(data: bytes) -> dict[str, Any]:
  """Parse the JSON object of a body.

  Raises:
    ApiError: If the body is not UTF-8, not JSON or not an object, or has a name
      twice.
  """

  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
      raise ValueError("a name occurs twice in an object")
    return parsed

  def constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")

  try:
    parsed = json.loads(
      data.decode("utf-8"), object_pairs_hook=once, parse_constant=constant
    )
  except (ValueError, RecursionError) as error:
    why = " ".join(str(error).split())[:100]
    raise refused(
      "body",
      why,
      "a JSON object in UTF-8",
      "send what a JSON encoder makes of an object, each name once",
    ) from None
  if not isinstance(parsed, dict):
    raise refused("body", kind_of(parsed), "a JSON object", "pass an object")
  return parsed


def checked(
  body: dict[str, Any], known: Mapping[str, Parser]
) -> dict[str, Any]:
  """Parse the parameters of a body that are set, by the parsers of `known`.

  Raises:
    ApiError: If a name is unknown or a value is refused.
  """
  parsed = {}
  for name, value in body.items():
    if value is None:
      continue
    if name not in known:
      names = ", ".join(sorted(set(known) - _SILENT))
      raise refused(
        name[:60],
        kind_of(value),
        f"parameters that are supported: {names}",
        "leave it out",
        code=_UNSUPPORTED,
      )
    try:
      result = known[name](name, value)
    except RingjaxError as error:
      raise ApiError(400, str(error), param=name) from None
    if result is not ABSENT:
      parsed[name] = result
  return parsed


# ---------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------


def kind_of(value: object) -> str:
  """JSON type of a value, in words."""
  if value is None or isinstance(value, bool):
    return json_text(value)
  names: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
  }
  return names.get(type(value), repr(value)[:80])


def flag(name: str, value: object) -> bool:
  """Parse a value that is true or false."""
  if not isinstance(value, bool):
    raise OptionError(name, kind_of(value), "true or false", "pass one of them")
  return value


def text(name: str, value: object) -> str:
  """Parse a value that is a string."""
  if not isinstance(value, str):
    raise OptionError(name, kind_of(value), "a string", "pass a string")
  return value


def members(name: str, value: object, *known: str) -> dict[str, Any]:
  """Parse an object with known members; null ones are left out."""
  if not isinstance(value, dict):
    raise OptionError(name, kind_of(value), "an object", "pass an object")
  given = {key: x for key, x in value.items() if x is not None}
  unknown = sorted(set(given) - set(known))
  if unknown:
    raise OptionError(
      f"{name}.{unknown[0][:60]}",
      "a member that is not known",
      f"some of {', '.join(known)}",
      "leave it out",
    )
  return given


def is_ids(value: object) -> TypeGuard[list[int]]:
  """Whether a value is a list of integers that is not empty."""
  return (
    isinstance(value, list)
    and bool(value)
    and all(type(i) is int for i in value)
  )


def utf8(name: str, value: str) -> None:
  """Raises OptionError for a text that has no UTF-8 form."""
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as error:
    raise OptionError(
      name,
      f"half a pair of surrogates at character {error.start}",
      "text that has a UTF-8 form",
      "send whole characters",
    ) from None


def _plain(name: str, value: Json, want: str) -> str | int | float | None:
  """Check that a value may be a number: no bool, list or object."""
  if isinstance(value, bool | list | dict):
    raise OptionError(name, kind_of(value), want, "pass one")
  return value


def _whole(least: int, most: int | None = None) -> Parser:
  def parse(name: str, value: Json) -> int:
    value = _plain(name, value, "an integer")
    return integer(name, value, least=least, most=most)

  return parse


def _real(
  least: int | float | None,
  most: int | float | None,
  above: int | float | None = None,
) -> Parser:
  def parse(name: str, value: Json) -> float:
    value = _plain(name, value, "a number")
    return number(name, value, least=least, most=most, above=above)

  return parse


def _range_of(name: str) -> Parser:
  """Parser with the range of a sampling parameter."""
  rule = PARAMETERS[name]
  return _real(rule.least, rule.most, rule.above)


_TOP_K, _COUNT, _BIAS = _whole(1, 2**31 - 1), _whole(0, TOP), _real(-100, 100)


def _top_k(name: str, value: Json) -> int | Absent:
  # 0 and -1 stand for all tokens in vLLM.
  if type(value) is int and value in (0, -1):
    return ABSENT
  return _TOP_K(name, value)


def _count(name: str, value: Json) -> int | Absent:
  """Parse the number of log-probabilities; false means none, as in chats."""
  return ABSENT if value is False else _COUNT(name, value)


def _stop(name: str, value: Json) -> tuple[str, ...] | Absent:
  parsed = [value] if isinstance(value, str) else value
  # The same limits as those of `Stop`.
  if (
    not isinstance(parsed, list)
    or len(parsed) > 128
    or not all(isinstance(x, str) and 0 < len(x) <= 4096 for x in parsed)
  ):
    too_many = isinstance(parsed, list) and len(parsed) > 128
    raise OptionError(
      name,
      f"{len(parsed)} texts" if too_many else kind_of(value),
      "a string or a list of at most 128 strings, of 1 to 4096 characters",
      "pass texts",
    )
  return tuple(parsed) or ABSENT


def _stop_ids(name: str, value: Json) -> tuple[int, ...] | Absent:
  if value == [] and isinstance(value, list):
    return ABSENT
  if not is_ids(value) or len(value) > 128:
    raise OptionError(
      name, kind_of(value), "a list of at most 128 token ids", "pass integers"
    )
  return tuple(value)


def _bias(name: str, value: Json) -> dict[int, float] | Absent:
  if not isinstance(value, dict):
    raise OptionError(
      name, kind_of(value), "an object", 'pass {"token id": bias}'
    )
  if len(value) > BIASES:
    raise OptionError(
      name, f"{len(value)} tokens", f"at most {BIASES}", "leave some out"
    )
  parsed = {}
  for key, bias in value.items():
    if not re.fullmatch(r"[0-9]{1,9}", key):
      raise OptionError(
        name, f"the key {key[:40]!r}", "token ids", "pass ids as keys"
      )
    parsed[int(key)] = _BIAS(name, bias)
  return parsed or ABSENT


def _stream_options(name: str, value: Json) -> bool | Absent:
  parsed = members(name, value, "include_usage", "include_obfuscation")
  _refuse_padding(name, parsed)
  usage = parsed.get("include_usage", False)
  return flag(f"{name}.include_usage", usage) or ABSENT


def _response_stream_options(name: str, value: Json) -> bool:
  _refuse_padding(name, members(name, value, "include_obfuscation"))
  return True


def _refuse_padding(name: str, options: Mapping[str, Json]) -> None:
  if options.get("include_obfuscation", False) is not False:
    raise OptionError(
      f"{name}.include_obfuscation",
      "true",
      "false: parts of a stream are not padded",
      "leave it out",
    )


def _response_format(name: str, value: Json) -> dict[str, Any] | Absent:
  """Parse a response format: nothing for text, or the schema as an object."""
  parsed = members(name, value, "type", "json_schema")
  kind = parsed.get("type")
  if kind == "text" and len(parsed) == 1:
    return ABSENT
  if kind == "json_object" and len(parsed) == 1:
    return {"type": "object"}
  if kind == "json_schema" and "json_schema" in parsed:
    inner = members(
      f"{name}.json_schema",
      parsed["json_schema"],
      "name",
      "description",
      "schema",
      "strict",
    )
    if isinstance(inner.get("schema"), dict):
      return inner["schema"]
  raise OptionError(
    name,
    json_text(value)[:100],
    'type "text", "json_object", or "json_schema" with '
    "json_schema.schema, an object",
    "pass one of them",
  )


def _variables(name: str, value: Json) -> dict[str, Any] | Absent:
  """Parse variables of a chat template; as in transformers, unused ones are
  ignored."""
  if not isinstance(value, dict):
    raise OptionError(
      name, kind_of(value), "an object", 'pass {"enable_thinking": false}'
    )
  reserved = sorted(
    {"messages", "tools", "add_generation_prompt", "now", "tokenizer"}
    & set(value)
  )
  if reserved:
    raise OptionError(
      f"{name}.{reserved[0]}",
      "a name that the server sets",
      "further variables of the chat template",
      "leave it out",
    )
  return value or ABSENT


def _anything(name: str, value: Json) -> Json:
  return value


def _nothing(kind: Parser) -> Parser:
  """Parser of a parameter that is checked and then ignored."""

  def parse(name: str, value: Json) -> Absent:
    kind(name, value)
    return ABSENT

  return parse


def _only(*values: Json) -> Parser:
  """Parser of an unsupported parameter that accepts only neutral values."""

  def parse(name: str, value: Json) -> Absent:
    # Compare types as well, as 1 == True.
    if any(type(x) is type(value) and x == value for x in values):
      return ABSENT
    shown = ", ".join(map(json_text, values))
    raise refused(
      name,
      json_text(value)[:80],
      f"null or {shown}: others are not supported",
      "leave it out",
      code=_UNSUPPORTED,
    )

  return parse


def _choice(*values: str) -> Parser:
  def parse(name: str, value: Json) -> str:
    if value not in values or not isinstance(value, str):
      raise OptionError(
        name, json_text(value)[:80], f"one of {', '.join(values)}", "pass one"
      )
    return value

  return parse


def _metadata(name: str, value: Json) -> dict[str, str]:
  if not isinstance(value, dict) or not all(
    isinstance(x, str) for x in value.values()
  ):
    raise OptionError(
      name, kind_of(value), "an object of strings", "pass strings"
    )
  return value


# Further output that a response may be asked for. Reasoning is sent whole, and
# clients send it back, so nothing has to be encrypted for that.
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")


def _include(name: str, value: Json) -> list[str]:
  if not isinstance(value, list) or not all(x in _INCLUDED for x in value):
    raise OptionError(
      name,
      json_text(value)[:80],
      f"a list of {', '.join(_INCLUDED)}",
      "leave others out",
    )
  return value


_BOTH: dict[str, Parser] = {
  "model": text,
  "max_tokens": _whole(1),
  "temperature": _real(0, 100),
  "top_p": _range_of("top_p"),
  "n": _whole(1),
  "stream": flag,
  "stream_options": _stream_options,
  "stop": _stop,
  "presence_penalty": _real(-2, 2),
  "frequency_penalty": _real(-2, 2),
  "logit_bias": _bias,
  "seed": _whole(0, 2**63 - 1),
  "response_format": _response_format,
  "top_k": _top_k,
  "min_p": _real(0, 1),
  "repetition_penalty": _range_of("repetition_penalty"),
  "ignore_eos": flag,
  "guided_regex": text,
  "beams": _whole(1),
  "length_penalty": _real(-10, 10),
  "stop_token_ids": _stop_ids,
  "include_stop_str_in_output": flag,
  "skip_special_tokens": flag,
}
# Parameters that change no answer, and those with only neutral values.
_UNUSED: dict[str, Parser] = {
  "user": _nothing(text),
  "safety_identifier": _nothing(text),
  "prompt_cache_key": _nothing(text),
  "metadata": _nothing(_metadata),
  "store": _only(False),
  "service_tier": _only("auto", "default"),
  "min_tokens": _only(0),
  "use_beam_search": _only(False),
  "spaces_between_special_tokens": _only(True),
}
_UNUSED_COMPLETION: dict[str, Parser] = {"suffix": _only("")}
_UNUSED_CHAT: dict[str, Parser] = {
  "functions": _only([]),
  "function_call": _only("none", "auto"),
  "modalities": _only(["text"]),
  "verbosity": _only("medium"),
  "add_generation_prompt": _only(True),
  "continue_final_message": _only(False),
}
COMPLETION: dict[str, Parser] = {
  **_BOTH,
  **_UNUSED,
  **_UNUSED_COMPLETION,
  "prompt": _anything,
  # 0 with echo: the prompt alone.
  "max_tokens": _whole(0),
  "best_of": _whole(1),
  "logprobs": _count,
  "echo": flag,
}
CHAT: dict[str, Parser] = {
  **_BOTH,
  **_UNUSED,
  **_UNUSED_CHAT,
  "messages": _anything,
  "max_completion_tokens": _whole(1),
  "logprobs": flag,
  "top_logprobs": _whole(0, TOP),
  "tools": _anything,
  "tool_choice": _anything,
  "parallel_tool_calls": flag,
  "reasoning_effort": _choice(
    "none", "minimal", "low", "medium", "high", "xhigh"
  ),
  "chat_template_kwargs": _variables,
}
TOKENIZE: dict[str, Parser] = {
  "model": text,
  "prompt": text,
  "messages": _anything,
  "add_special_tokens": flag,
  "return_token_strs": flag,
  "add_generation_prompt": flag,
  "chat_template_kwargs": _variables,
}
RESPONSE: dict[str, Parser] = {
  **{
    name: _BOTH[name]
    for name in (
      "model",
      "temperature",
      "top_p",
      "stream",
      "seed",
      "top_k",
      "min_p",
      "repetition_penalty",
      "presence_penalty",
      "frequency_penalty",
    )
  },
  **{
    name: _UNUSED[name]
    for name in (
      "user",
      "safety_identifier",
      "prompt_cache_key",
      "service_tier",
    )
  },
  # Checked by the chat that answers.
  "logit_bias": _anything,
  "chat_template_kwargs": _anything,
  "input": _anything,
  "stream_options": _response_stream_options,
  "tools": _anything,
  "tool_choice": _anything,
  "reasoning": _anything,
  "text": _anything,
  "instructions": text,
  "previous_response_id": text,
  "max_output_tokens": _whole(1),
  "parallel_tool_calls": flag,
  "store": flag,
  "metadata": _metadata,
  "top_logprobs": _whole(0, TOP),
  "include": _include,
  "background": _only(False),
  "truncation": _only("disabled"),
}
EMBEDDING: dict[str, Parser] = {
  "model": text,
  "input": _anything,
  "encoding_format": _choice("float", "base64"),
  "dimensions": _whole(1),
  "pooling": _choice(*POOLINGS),
  "user": _nothing(text),
}
DETOKENIZE: dict[str, Parser] = {"model": text, "tokens": _anything}
_SILENT = frozenset({*_UNUSED, *_UNUSED_COMPLETION, *_UNUSED_CHAT})


def check_search(given: Mapping[str, Any]) -> None:
  """Refuses parameters that conflict with a beam search or need one.

  Args:
    given: Parameters of the body.

  Raises:
    ApiError: If there is such a parameter.
  """
  beams = given.get("beams")
  if beams is None:
    if given.get("length_penalty", 1.0) != 1.0:
      raise refused(
        "length_penalty",
        f"{given['length_penalty']:g}, without beams",
        "a beam search",
        "pass beams, or leave it out",
      )
    return
  for name in ("temperature", "best_of"):
    if given.get(name):
      raise refused(
        name,
        f"{given[name]:g}, with beams",
        "none: a beam search draws nothing, and gives n of its hypotheses",
        "leave it out, or beams",
      )
  if beams < given.get("n", 1):
    raise refused(
      "beams", beams, f"at least n, {given['n']}", "ask for fewer answers"
    )


class ToolChoice(NamedTuple):
  """Tools of a chat body that its answer may call.

  Fields:
    tools: Descriptions of the tools, for the chat template.
    schemas: Schema of the arguments of each tool that may be called.
    forced: Whether the answer has to be a call.
  """

  tools: list[dict[str, Any]]
  schemas: dict[str, dict[str, Any]]
  forced: bool


_FUNCTION_NAME = re.compile(r"[\w.-]{1,64}")


def tools_of(given: Mapping[str, Any]) -> ToolChoice | None:
  """Parse the tools of a chat body; None if none may be called.

  Args:
    given: Parameters of a chat body.

  Raises:
    ApiError: If the tools or the choice among them are invalid.
  """
  tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
  if not isinstance(tools, list):
    raise refused("tools", kind_of(tools), "a list", "pass a list")
  try:
    schemas = dict(_tool(f"tools[{n}]", x) for n, x in enumerate(tools))
  except RingjaxError as error:
    raise ApiError(400, str(error), param="tools") from None
  if len(schemas) < len(tools):
    raise refused("tools", "two of one name", "one of a name", "rename one")
  # With "none" no tool may be called, so they are left out of the prompt.
  if choice in ("auto", "none") and not (schemas and choice == "auto"):
    return None
  named = _named_tool(choice) if isinstance(choice, dict) else None
  known = choice in ("auto", "required") if named is None else named in schemas
  if not known:
    raise refused(
      "tool_choice",
      json_text(choice)[:80],
      '"none", "auto", "required" or a function of tools',
      'pass {"type": "function", "function": {"name": NAME}}',
    )
  if choice == "required" and not schemas:
    raise refused(
      "tool_choice", "required, without tools", "tools", "pass them"
    )
  if named is not None:
    schemas = {named: schemas[named]}
  return ToolChoice(tools, schemas, choice != "auto")


def _named_tool(choice: dict[str, Any]) -> str:
  """Name of the only tool that may be called; "" if the choice is invalid."""
  try:
    chosen = members("tool_choice", choice, "type", "function")
    function = members("tool_choice", chosen.get("function"), "name")
  except OptionError:
    return ""
  kind, name = chosen.get("type", "function"), function.get("name")
  return name if kind == "function" and isinstance(name, str) else ""


def _tool(name: str, given: Json) -> tuple[str, dict[str, Any]]:
  """Name of a tool, and the schema of its arguments."""
  tool = members(name, given, "type", "function")
  if tool.get("type") != "function":
    raise OptionError(
      f"{name}.type", kind_of(tool.get("type")), '"function"', "pass it"
    )
  function = members(
    f"{name}.function",
    tool.get("function"),
    "name",
    "description",
    "parameters",
    "strict",
  )
  title = function.get("name")
  if not isinstance(title, str) or not _FUNCTION_NAME.fullmatch(title):
    raise OptionError(
      f"{name}.function.name",
      json_text(title)[:80],
      "up to 64 letters, digits, _ . and -",
      "rename it",
    )
  schema = function.get("parameters", {})
  if not isinstance(schema, dict):
    raise OptionError(
      f"{name}.function.parameters",
      kind_of(schema),
      "a JSON schema, an object",
      "pass one",
    )
  if "description" in function:
    text(f"{name}.function.description", function["description"])
  if "strict" in function:
    flag(f"{name}.function.strict", function["strict"])
  return title, schema


def messages_of(given: object, *, calls: bool) -> list[dict[str, Any]]:
  """Parse messages for chat templates; parts of a text are joined.

  Args:
    given: Messages of the body.
    calls: Whether the chat template supports tool calls.

  Raises:
    ApiError: If they are not valid messages.
  """
  if not isinstance(given, list) or not given:
    raise refused(
      "messages",
      kind_of(given) if given is not None else "no messages",
      "a list of messages",
      'pass [{"role": "user", "content": "..."}]',
    )
  parsed = []
  for n, chat_message in enumerate(given):
    try:
      parsed.append(_message(f"messages[{n}]", chat_message, calls))
    except RingjaxError as error:
      raise ApiError(400, str(error), param="messages") from None
  return parsed


# Members of a message besides its role and content, by role.
_OF_ROLE = {
  "tool": ("tool_call_id", "name"),
  "function": ("name",),
  "assistant": (
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "refusal",
    "audio",
    "annotations",
    "function_call",
    "name",
    "parsed",
  ),
}


def _message(name: str, given: Json, calls: bool) -> dict[str, Any]:
  if not isinstance(given, dict):
    raise OptionError(name, kind_of(given), "an object", "pass an object")
  role = given.get("role")
  role_members = _OF_ROLE.get(role, ()) if isinstance(role, str) else ()
  parsed = members(name, given, "role", "content", *role_members)
  # What openai's client has made of the content, which says the same.
  parsed.pop("parsed", None)
  for key in ("refusal", "audio", "annotations", "function_call"):
    if parsed.pop(key, None) not in (None, []):
      raise OptionError(
        f"{name}.{key}", "a value", "null: it is not supported", "leave it out"
      )
  for key in ("tool_call_id", "name", "reasoning_content", "reasoning"):
    if key in parsed:
      text(f"{name}.{key}", parsed[key])
  # Templates know the older one of the two names.
  if reasoning := parsed.pop("reasoning", ""):
    parsed.setdefault("reasoning_content", reasoning)
  content = parsed.get("content")
  if isinstance(content, list) and all(map(_is_text_part, content)):
    content = "".join(part["text"] for part in content)
  result = parsed.pop("tool_calls", [])
  if result:
    parsed["tool_calls"] = _tool_calls(f"{name}.tool_calls", result, calls)
    content = "" if content is None else content
  if not isinstance(content, str) or not isinstance(role, str):
    raise OptionError(
      name,
      f"role {kind_of(role)}, content {kind_of(content)}",
      "a role, and a text or parts of type text",
      "pass these",
    )
  if role not in ROLES:
    raise OptionError(
      f"{name}.role", role, f"one of {', '.join(ROLES)}", "pass one of them"
    )
  utf8(f"{name}.content", content)
  return parsed | {"role": role, "content": content}


def _is_text_part(part: Json) -> bool:
  """Whether a part of a content is a text, all other members null."""
  return (
    isinstance(part, dict)
    and {key for key, x in part.items() if x is not None} == {"type", "text"}
    and part["type"] == "text"
    and isinstance(part["text"], str)
  )


def _tool_calls(name: str, given: Json, calls: bool) -> list[dict[str, Any]]:
  """Parse tool calls, with arguments as objects for templates."""
  if not calls:
    raise OptionError(
      name,
      "calls of tools",
      "none: this model's chat template has no place for them",
      "leave them out",
    )
  if not isinstance(given, list):
    raise OptionError(name, kind_of(given), "a list", "pass a list")
  parsed = []
  for n, call in enumerate(given):
    at = f"{name}[{n}]"
    call = members(at, call, "id", "type", "function", "index")
    # `parsed_arguments` is what openai's client has made of the arguments.
    called = members(
      f"{at}.function",
      call.get("function"),
      "name",
      "arguments",
      "parsed_arguments",
    )
    stated = called.get("arguments", "{}")
    try:
      given_as = json.loads(stated) if isinstance(stated, str) else stated
    except (ValueError, RecursionError):
      given_as = None
    if not isinstance(given_as, dict):
      raise OptionError(
        f"{at}.function.arguments",
        kind_of(stated),
        "a string that is a JSON object",
        "pass what the call had",
      )
    function = {
      "name": text(f"{at}.function.name", called.get("name")),
      "arguments": given_as,
    }
    result: dict[str, Any] = {"type": "function", "function": function}
    if "id" in call:
      result["id"] = text(f"{at}.id", call["id"])
    if call.get("type", "function") != "function":
      raise OptionError(
        f"{at}.type", kind_of(call["type"]), '"function"', "pass it"
      )
    parsed.append(result)
  return parsed
