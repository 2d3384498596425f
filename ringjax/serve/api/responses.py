"""OpenAI's Responses API over chats: parses bodies, writes bodies and events.

Guarantees: a response is the answer to a chat: what it says of sampling, tools,
grammars and reasoning is that of /v1/chat/completions. The events of a stream
end with the response that a body without `stream` gets. Stored responses take a
bounded number of bytes, the least recently used go first, and no tenant finds
those of another.
Ref: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringjax.errors import OptionError, RingjaxError
from ringjax.json_text import Json, json_text
from ringjax.serve.api.api_parameters import (
  RESPONSE,
  ApiError,
  checked,
  kind_of,
  members,
  refused,
)
from ringjax.serve.api.openai_api import (
  AnswerPart,
  ApiCall,
  ApiModel,
  check_answer,
)
from ringjax.serve.api.response_items import (
  answer_message,
  call_item,
  message_item,
  messages_of_input,
  new_id,
  reasoning_item,
  size_of,
  text_part,
)
from ringjax.serve.request import Handle

# Parameters that a chat has by the same name.
_SAME = (
  "model",
  "temperature",
  "top_p",
  "stream",
  "parallel_tool_calls",
  "seed",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "logit_bias",
  "chat_template_kwargs",
)
# Parameters of a chat by those of a response, for errors.
_NAMES = {
  "messages": "input",
  "max_completion_tokens": "max_output_tokens",
  "response_format": "text.format",
}
_LOGPROBS = "message.output_text.logprobs"


class StoredResponse(NamedTuple):
  """A response that a later one may follow.

  Fields:
    body: Body of the response.
    messages: Messages of the conversation up to it, without instructions.
    nbytes: Bytes of both as JSON.
  """

  body: dict[str, Any]
  messages: list[dict[str, Any]]
  nbytes: int


class ResponseStore:
  """Responses by tenant and id, up to a number of bytes."""

  def __init__(self, most_bytes: int):
    self._most, self._nbytes = most_bytes, 0
    self._stored: collections.OrderedDict[tuple[str, str], StoredResponse] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()

  def add(
    self, tenant: str, body: dict[str, Any], messages: list[dict[str, Any]]
  ) -> None:
    """Store a response; the least recently used ones make room for it."""
    nbytes = len(json_text(body)) + size_of(messages)
    with self._lock:
      self._stored[tenant, body["id"]] = StoredResponse(body, messages, nbytes)
      self._nbytes += nbytes
      while self._nbytes > self._most:
        _, dropped = self._stored.popitem(last=False)
        self._nbytes -= dropped.nbytes

  def get(
    self, tenant: str, response_id: str, param: str | None = None
  ) -> StoredResponse:
    """Look up a response.

    Raises:
      ApiError: If it is not stored, or another tenant's.
    """
    with self._lock:
      stored = self._stored.get((tenant, response_id))
      if stored is None:
        raise self._missing(response_id, param)
      self._stored.move_to_end((tenant, response_id))
      return stored

  def delete(self, tenant: str, response_id: str) -> dict[str, Any]:
    """Delete a response; the body of the answer.

    Raises:
      ApiError: As `get`.
    """
    with self._lock:
      stored = self._stored.pop((tenant, response_id), None)
      if stored is None:
        raise self._missing(response_id, None)
      self._nbytes -= stored.nbytes
    return {"id": response_id, "object": "response", "deleted": True}

  def _missing(self, response_id: str, param: str | None) -> ApiError:
    error = refused(
      param or "response_id",
      repr(response_id[:80]),
      "the id of a stored response; this server keeps the newest ones, up to "
      f"{self._most:,} bytes",
      "send the whole conversation as input",
      code="response_not_found",
    )
    error.status = 404 if param is None else 400
    return error


class ResponseCall(NamedTuple):
  """Parsed call of /v1/responses.

  Fields:
    call: Call of the chat that answers it.
    messages: Messages of the conversation, without instructions.
    shown: Members of the body that repeat parameters.
    stores: Whether the response is stored.
    id: Id of the response.
  """

  call: ApiCall
  messages: list[dict[str, Any]]
  shown: dict[str, Any]
  stores: bool
  id: str

  def body(
    self,
    output: list[dict[str, Any]],
    status: str,
    usage: dict[str, Any] | None = None,
  ) -> dict[str, Any]:
    """Body of the response so far.

    Args:
      output: Items of the answer.
      status: "in_progress", "completed" or "incomplete".
      usage: Usage object of the chat, once it has ended.
    """
    cut = status == "incomplete"
    return {
      "id": self.id,
      "object": "response",
      "created_at": self.call.created,
      "status": status,
      "error": None,
      "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
      "model": self.call.model,
      "output": output,
      "usage": None if usage is None else _usage(usage),
      "store": self.stores,
      **self.shown,
    }


def response_call(
  model: ApiModel,
  body: dict[str, Any],
  tenant: str,
  salt: str,
  store: ResponseStore,
) -> ResponseCall:
  """Parse a body of /v1/responses.

  Args:
    model: The served model.
    body: JSON object of the body.
    tenant: Tenant of the client, or "".
    salt: Salt of its prefixes, see `Request`.
    store: Responses that it may follow.

  Raises:
    ApiError: If a parameter is unknown, of a wrong type or out of range, or the
      previous response is not stored.
  """
  params = checked(body, RESPONSE)
  earlier: list[dict[str, Any]] = []
  if "previous_response_id" in params:
    previous = params["previous_response_id"]
    earlier = store.get(tenant, previous, "previous_response_id").messages
  if "input" not in params:
    raise refused("input", "no input", "a text or items", "pass input")
  try:
    messages = earlier + messages_of_input(params["input"], earlier)
    chat, shown = _chat_body(params)
  except RingjaxError as error:
    # The message begins with the name of the parameter.
    param = str(error).partition(":")[0].partition("[")[0].partition(".")[0]
    raise ApiError(400, str(error), param=param) from None
  chat["messages"] = list(messages)
  if "instructions" in params:
    system = {"role": "system", "content": params["instructions"]}
    chat["messages"].insert(0, system)
  try:
    call = model.chat(chat, salt)
  except ApiError as error:
    raise _renamed(error) from None
  shown["previous_response_id"] = params.get("previous_response_id")
  shown["instructions"] = params.get("instructions")
  stores = params.get("store", True)
  return ResponseCall(call, messages, shown, stores, new_id("resp"))


def _chat_body(
  params: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Body of a chat without messages, and what the response repeats.

  Raises:
    OptionError: If a parameter has no meaning for a chat.
  """
  chat = {name: params[name] for name in _SAME if name in params}
  if "max_output_tokens" in params:
    chat["max_completion_tokens"] = params["max_output_tokens"]
  include = params.get("include", ())
  if "stream_options" in params and not params.get("stream"):
    raise OptionError(
      "stream_options", "it without stream", "both", "pass stream: true"
    )
  if ("top_logprobs" in params or _LOGPROBS in include) and params.get(
    "stream"
  ):
    raise OptionError(
      "include" if _LOGPROBS in include else "top_logprobs",
      "log-probabilities, with stream",
      "one of them",
      "leave one out, or stream /v1/chat/completions",
    )
  if "top_logprobs" in params and _LOGPROBS not in include:
    raise OptionError(
      "top_logprobs",
      f"{params['top_logprobs']}, without include",
      "both",
      f'pass include: ["{_LOGPROBS}"]',
    )
  if _LOGPROBS in include:
    chat["logprobs"] = True
    chat["top_logprobs"] = params.get("top_logprobs", 0)
  if "tools" in params:
    chat["tools"] = _tools(params["tools"])
  choice = params.get("tool_choice", "auto")
  if isinstance(choice, dict):
    named = members("tool_choice", choice, "type", "name")
    choice = {
      "type": named.get("type"),
      "function": {"name": named.get("name")},
    }
  chat["tool_choice"] = choice
  reasoning = members("reasoning", params.get("reasoning", {}), *_REASONING)
  for name in ("summary", "generate_summary"):
    if reasoning.get(name) not in (None, "auto"):
      raise OptionError(
        f"reasoning.{name}",
        kind_of(reasoning[name]),
        "null or auto: reasoning is sent as the model wrote it",
        "leave it out",
      )
  if "effort" in reasoning:
    chat["reasoning_effort"] = reasoning["effort"]
  text_options = members("text", params.get("text", {}), "format", "verbosity")
  if text_options.get("verbosity") not in (None, "medium"):
    raise OptionError(
      "text.verbosity",
      kind_of(text_options["verbosity"]),
      "null or medium: others are not supported",
      "leave it out",
    )
  form = text_options.get("format", {"type": "text"})
  chat["response_format"] = _response_format(form)
  shown = {
    "max_output_tokens": params.get("max_output_tokens"),
    "parallel_tool_calls": params.get("parallel_tool_calls", True),
    "temperature": params.get("temperature", 1.0),
    "top_p": params.get("top_p", 1.0),
    "top_logprobs": params.get("top_logprobs", 0),
    "tools": params.get("tools", []),
    "tool_choice": params.get("tool_choice", "auto"),
    "reasoning": {"effort": reasoning.get("effort"), "summary": None},
    "text": {"format": form},
    "metadata": params.get("metadata", {}),
    "truncation": "disabled",
    "background": False,
  }
  return chat, shown


_REASONING = ("effort", "summary", "generate_summary")


def _tools(given: Json) -> list[Any]:
  """Tools of a chat's body.

  Raises:
    OptionError: If a tool is not a function.
  """
  if not isinstance(given, list):
    raise OptionError("tools", kind_of(given), "a list", "pass a list")
  tools = []
  for n, tool in enumerate(given):
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
      raise OptionError(
        f"tools[{n}]",
        f"a tool of type {json_text(kind)[:60]}",
        "functions: this server has no tools of its own",
        "leave it out",
      )
    function = {name: x for name, x in tool.items() if name != "type"}
    tools.append({"type": "function", "function": function})
  return tools


def _response_format(form: Json) -> Json:
  """Format of a chat's body: the schema is a member there."""
  if isinstance(form, dict) and form.get("type") == "json_schema":
    schema = {name: x for name, x in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
  return form


def _renamed(error: ApiError) -> ApiError:
  """Error of a chat's body in the names of the Responses API."""
  body = error.body["error"]
  name = body["param"]
  if name in _NAMES:
    body["param"] = _NAMES[name].partition(".")[0]
    body["message"] = body["message"].replace(name, _NAMES[name], 1)
  return error


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
  """Usage object of a response, from that of a chat."""
  thought = usage.get("completion_tokens_details", {})
  cached = usage["prompt_tokens_details"]["cached_tokens"]
  return {
    "input_tokens": usage["prompt_tokens"],
    "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
    "output_tokens": usage["completion_tokens"],
    "output_tokens_details": {
      "reasoning_tokens": thought.get("reasoning_tokens", 0)
    },
    "total_tokens": usage["total_tokens"],
  }


# ---------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------


class ResponseStream:
  """Events of a response as its answer grows.

  The parts of an answer come in the order of items: reasoning, then a message,
  then calls. `take` returns the events of what is new.

  Attributes:
    body: Body of the response once all events were taken, before that empty.
  """

  def __init__(self, model: ApiModel, response: ResponseCall, handle: Handle):
    self._model, self._response, self._handle = model, response, handle
    (self._answer,) = model.streams(
      response.call, handle, handle.answers, 0, 0, ()
    )
    self._number = 0
    self._output: list[dict[str, Any]] = []
    # Item that grows: its kind, id and text so far.
    self._kind, self._id, self._text = "", "", ""
    self._whole = AnswerPart("", None, None)
    self._logprobs: list[dict[str, Any]] = []
    self.body: dict[str, Any] = {}

  def take(self) -> list[dict[str, Any]]:
    """Events since the last call.

    Raises:
      ApiError: If the answer could not be computed.
    """
    events: list[dict[str, Any]] = []
    if not self._number:
      for kind in ("response.created", "response.in_progress"):
        started = self._response.body([], "in_progress")
        events.append(self._event(kind, response=started))
    part = self._answer.take()
    self._whole = self._whole._replace(
      text=self._whole.text + part.text,
      reasoning=self._whole.reasoning + part.reasoning,
      calls=self._whole.calls + part.calls,
    )
    self._logprobs += (part.logprobs or {}).get("content", [])
    for kind, delta in (("reasoning", part.reasoning), ("text", part.text)):
      if delta:
        events += self._grown(kind, delta)
    if part.finish is None:
      return events
    is_cut = part.finish == "length"
    status = "incomplete" if is_cut else "completed"
    if not self._kind and not self._output and not part.calls:
      events += self._begun("text")
    events += self._closed(status)
    for call in part.calls:
      events += self._called(call)
    usage = self._model.usage(self._response.call, [self._handle])
    self.body = self._response.body(self._output, status, usage)
    return [*events, self._event(f"response.{status}", response=self.body)]

  @property
  def ended(self) -> bool:
    """Whether the last event was taken."""
    return bool(self.body)

  @property
  def messages(self) -> list[dict[str, Any]]:
    """Messages of the conversation, with the answer."""
    return [*self._response.messages, answer_message(self._whole)]

  def _event(self, kind: str, **more: Any) -> dict[str, Any]:
    event = {"type": kind, "sequence_number": self._number, **more}
    self._number += 1
    return event

  def _at(self) -> dict[str, Any]:
    """Place of the item that grows, in an event."""
    return {
      "item_id": self._id,
      "output_index": len(self._output),
      "content_index": 0,
    }

  def _begun(self, kind: str) -> list[dict[str, Any]]:
    """Events of the beginning of reasoning or of a message."""
    self._kind, self._text = kind, ""
    self._id = new_id("rs" if kind == "reasoning" else "msg")
    make = reasoning_item if kind == "reasoning" else message_item
    content: Any = "" if kind == "reasoning" else []
    item = make(self._id, content, "in_progress")
    index = len(self._output)
    return [
      self._event("response.output_item.added", output_index=index, item=item),
      self._event(
        "response.content_part.added", **self._at(), part=self._part("")
      ),
    ]

  def _part(self, content: str) -> dict[str, Any]:
    """Part of the item that grows."""
    if self._kind == "reasoning":
      return {"type": "reasoning_text", "text": content}
    # Entries of tokens before the text are of its reasoning.
    thought = self._model.reasoning_tokens(
      self._response.call, self._handle.answers[0]
    )
    logprobs = self._logprobs[thought:] if self._logprobs else []
    return text_part(content, logprobs)

  def _grown(self, kind: str, delta: str) -> list[dict[str, Any]]:
    """Events of new reasoning or new text."""
    events: list[dict[str, Any]] = []
    if self._kind != kind:
      events = self._closed("completed") + self._begun(kind)
    self._text += delta
    if kind == "reasoning":
      grown = self._event(
        "response.reasoning_text.delta", **self._at(), delta=delta
      )
    else:
      grown = self._event(
        "response.output_text.delta", **self._at(), delta=delta, logprobs=[]
      )
    return [*events, grown]

  def _closed(self, status: str) -> list[dict[str, Any]]:
    """Events of the end of the item that grows, if there is one."""
    if not self._kind:
      return []
    at, content = self._at(), self._text
    part = self._part(content)
    if self._kind == "reasoning":
      end = self._event("response.reasoning_text.done", **at, text=content)
      item = reasoning_item(self._id, content, status)
    else:
      end = self._event(
        "response.output_text.done",
        **at,
        text=content,
        logprobs=part["logprobs"],
      )
      item = message_item(self._id, [part], status)
    events = [
      end,
      self._event("response.content_part.done", **at, part=part),
      self._done(item),
    ]
    self._kind = ""
    return events

  def _done(self, item: dict[str, Any]) -> dict[str, Any]:
    """Event of an item that is complete, which joins the output."""
    index = len(self._output)
    self._output.append(item)
    return self._event(
      "response.output_item.done", output_index=index, item=item
    )

  def _called(self, call: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a call, which comes whole."""
    item_id, index = new_id("fc"), len(self._output)
    item = call_item(item_id, call, "completed")
    begun = item | {"arguments": "", "status": "in_progress"}
    at = {"item_id": item_id, "output_index": index}
    arguments, name = item["arguments"], item["name"]
    return [
      self._event("response.output_item.added", output_index=index, item=begun),
      self._event(
        "response.function_call_arguments.delta", **at, delta=arguments
      ),
      self._event(
        "response.function_call_arguments.done",
        **at,
        arguments=arguments,
        name=name,
      ),
      self._done(item),
    ]


def ended_response(
  model: ApiModel, response: ResponseCall, handles: Sequence[Handle]
) -> ResponseStream:
  """Stream of a response whose answer has ended, all events of it taken.

  Raises:
    ApiError: If the answer could not be computed.
  """
  (handle,) = handles
  for answer in handle.answers:
    check_answer(answer)
  stream = ResponseStream(model, response, handle)
  stream.take()
  return stream
