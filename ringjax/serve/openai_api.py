"""OpenAI's API as data: bodies to requests, answers to bodies.

Guarantees: a parameter is used, or refused with an error object that says what
came, what was expected and what to do; none is ignored in silence. Texts of
messages and prompts never become special tokens. Nothing here knows of HTTP or
of sockets.

What stands for nothing in OpenAI's API and is taken too: `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `guided_regex`, `beams`, `length_penalty`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from ringjax.checks import boolean, integer, number
from ringjax.data import ChatTemplate, Stream
from ringjax.data.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, PeerError, RingjaxError, message
from ringjax.infer.stopping import Stop
from ringjax.json_text import json_text
from ringjax.serve.grammar import GrammarCompiler
from ringjax.serve.request import Answer, Handle, RejectedError, Request
from ringjax.serve.row_sampler import TOP, RowSampling

_DEFAULT_NEW = 16
# Nothing was said about sampling: OpenAI's default.
_TEMPERATURE = 1.0
_FINISH = {"stop": "stop", "length": "length"}


class ApiError(Exception):
  """An answer that is an error object of OpenAI's API.

  Attributes:
    status: of HTTP.
    body: the object.
    headers: that go with it.
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
  """The error of a parameter: what came, what was expected, what to do."""
  return ApiError(
    400, message(param, got, want, remedy), param=param, code=code
  )


def from_error(error: RingjaxError) -> ApiError:
  """The same of an error of the package, whose text begins with a name."""
  found = re.match(r"\w+(?=: got )", str(error))
  name = found[0] if found else None
  # `Stop` calls texts so.
  name = "stop" if name == "strings" else name
  return ApiError(400, str(error), param=name)


def rejected(error: Exception) -> ApiError:
  """The error of a request that is not taken now."""
  return ApiError(
    429,
    f"{error}; try again later",
    kind="rate_limit_error",
    code="rejected",
    headers={"retry-after": "1"},
  )


# ---------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------


def _kind(value: Any) -> str:
  """The value's JSON type, in words."""
  names = {str: "a string", list: "a list", dict: "an object", bool: "a bool"}
  return names.get(type(value), repr(value)[:80])


def _text(name: str, value: Any) -> str:
  if not isinstance(value, str):
    raise OptionError(name, _kind(value), "a string", "pass a string")
  return value


def _whole(least: int, most: int | None = None) -> Callable[[str, Any], int]:
  return lambda name, value: integer(name, value, least=least, most=most)


def _real(
  least: int | float | None = None, most: int | float | None = None
) -> Any:
  return lambda name, value: number(name, value, least=least, most=most)


def _stop(name: str, value: Any) -> tuple[str, ...]:
  found = [value] if isinstance(value, str) else value
  if not isinstance(found, list) or not all(
    isinstance(x, str) and x for x in found
  ):
    raise OptionError(
      name,
      _kind(value),
      "a string or a list of strings, none of them empty",
      "pass texts",
    )
  return tuple(found)


def _bias(name: str, value: Any) -> dict[int, float]:
  if not isinstance(value, dict):
    raise OptionError(
      name, _kind(value), "an object", 'pass {"token id": bias}'
    )
  found = {}
  for key, bias in value.items():
    if not re.fullmatch(r"\d{1,9}", key):
      raise OptionError(
        name, f"the key {key[:40]!r}", "token ids", "pass ids as keys"
      )
    found[int(key)] = number(name, bias, least=-100, most=100)
  return found


def _members(name: str, value: Any, *known: str) -> dict[str, Any]:
  """An object without members that are not known; null ones are left out."""
  if not isinstance(value, dict):
    raise OptionError(name, _kind(value), "an object", "pass an object")
  unknown = sorted(set(value) - set(known))
  if unknown:
    raise OptionError(
      f"{name}.{unknown[0][:60]}",
      "a member that is not known",
      f"some of {', '.join(known)}",
      "leave it out",
    )
  return {key: x for key, x in value.items() if x is not None}


def _stream_options(name: str, value: Any) -> bool:
  found = _members(name, value, "include_usage")
  return boolean(f"{name}.include_usage", found.get("include_usage", False))


def _response_format(name: str, value: Any) -> Any:
  """None for text, or the schema as an object."""
  found = _members(name, value, "type", "json_schema")
  kind = found.get("type")
  if kind == "text" and len(found) == 1:
    return None
  if kind == "json_object" and len(found) == 1:
    return {"type": "object"}
  if kind == "json_schema" and "json_schema" in found:
    inner = _members(
      f"{name}.json_schema",
      found["json_schema"],
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


def _anything(name: str, value: Any) -> Any:
  return value


_BOTH: dict[str, Callable[[str, Any], Any]] = {
  "model": _text,
  "max_tokens": _whole(1),
  "temperature": _real(0),
  "top_p": _real(0, 1),
  "n": _whole(1),
  "stream": boolean,
  "stream_options": _stream_options,
  "stop": _stop,
  "presence_penalty": _real(-2, 2),
  "frequency_penalty": _real(-2, 2),
  "logit_bias": _bias,
  "seed": _whole(0, 2**63 - 1),
  "user": _text,
  "response_format": _response_format,
  "top_k": _whole(1),
  "min_p": _real(0, 1),
  "repetition_penalty": _real(),
  "ignore_eos": boolean,
  "guided_regex": _text,
  "beams": _whole(1),
  "length_penalty": _real(-10, 10),
}
COMPLETION: dict[str, Callable[[str, Any], Any]] = {
  **_BOTH,
  "prompt": _anything,
  "best_of": _whole(1),
  "logprobs": _whole(0, TOP),
  "echo": boolean,
}
CHAT: dict[str, Callable[[str, Any], Any]] = {
  **_BOTH,
  "messages": _anything,
  "max_completion_tokens": _whole(1),
  "logprobs": boolean,
  "top_logprobs": _whole(0, TOP),
}


def parse_json(data: bytes) -> dict[str, Any]:
  """The object in a body.

  Raises:
    ApiError: it is none: not UTF-8, not JSON, a name twice, no object.
  """

  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      raise ValueError("a name occurs twice in an object")
    return found

  def constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")

  try:
    found = json.loads(
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
  if not isinstance(found, dict):
    raise refused("body", _kind(found), "a JSON object", "pass an object")
  return found


def _checked(
  body: dict[str, Any], known: Mapping[str, Callable[[str, Any], Any]]
) -> dict[str, Any]:
  """The parameters of a body; those that are null are as if left out."""
  found = {}
  for name, value in body.items():
    if value is None:
      continue
    if name not in known:
      raise refused(
        name[:60],
        _kind(value),
        f"parameters that are supported: {', '.join(sorted(known))}",
        "leave it out",
        code="unsupported_parameter",
      )
    try:
      found[name] = known[name](name, value)
    except RingjaxError as error:
      raise ApiError(400, str(error), param=name) from None
  return found


# ---------------------------------------------------------------------------
# From bodies to requests
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiCall:
  """What a body asks for.

  Attributes:
    requests: one for each prompt.
    n: answers of each that are given back.
    chat: whether the answers are messages.
    stream: whether they are sent as they come.
    usage: whether a stream ends with its usage.
    logprobs: how many others each token comes with, or None.
    echoes: for each prompt the text before its answers.
    id: of the answer.
    created: seconds since 1970.
  """

  requests: tuple[Request, ...]
  n: int
  chat: bool
  stream: bool
  usage: bool
  logprobs: int | None
  echoes: tuple[str, ...]
  id: str
  created: int

  @property
  def answers(self) -> int:
    """How many are made, the hypotheses of beam searches among them."""
    return sum(request.rows for request in self.requests)


class ApiModel:
  """What is needed of the served model to read bodies and write answers.

  Attributes:
    name: by which clients call it.
    tokenizer: of its texts.
    created: when it was first served, seconds since 1970.
  """

  def __init__(
    self,
    name: str,
    tokenizer: AnyTokenizer,
    *,
    vocab: int,
    longest: int,
    most_answers: int,
    trusted_template: bool = False,
  ):
    """Of a model.

    Args:
      name: by which clients call it.
      tokenizer: of its texts.
      vocab: ids that the model has.
      longest: tokens of a prompt and its answer together at most.
      most_answers: of one body.
      trusted_template: see `ringjax.data.ChatTemplate`.
    """
    self.name, self.tokenizer = name, tokenizer
    self.created = int(time.time())
    self._vocab, self._longest, self._most = vocab, longest, most_answers
    self._template = None
    if tokenizer.chat_template is not None:
      self._template = ChatTemplate.of(tokenizer, trusted=trusted_template)
    self._eos = tuple(i for i in tokenizer.eos_ids if i < vocab)
    self._grammars = GrammarCompiler(tokenizer, vocab)

  def completion(self, body: dict[str, Any], salt: str) -> ApiCall:
    """The call of a body of /v1/completions.

    Raises:
      ApiError: a parameter is unknown, of a wrong type or out of range.
    """
    given = self._given(body, COMPLETION)
    if "prompt" not in given:
      raise refused("prompt", "no prompt", "a prompt", "pass prompt")
    n, best = given.get("n", 1), given.get("best_of")
    wanted, echo = given.get("logprobs"), given.get("echo", False)
    if echo and wanted is not None:
      raise refused(
        "echo",
        "true, with logprobs",
        "one of them: prompts have no log-probabilities",
        "leave one out",
      )
    each = given.get("beams") or best or n
    prompts = self._prompts(given["prompt"], each)
    return self._call(
      given,
      [self._encoded("prompt", x) for x in prompts],
      salt,
      new=given.get("max_tokens", _DEFAULT_NEW),
      logprobs=wanted,
      best_of=best,
      echoes=[self._shown(x) if echo else "" for x in prompts],
    )

  def chat(self, body: dict[str, Any], salt: str) -> ApiCall:
    """The call of a body of /v1/chat/completions.

    Raises:
      ApiError: as `completion`.
    """
    given = self._given(body, CHAT)
    if self._template is None:
      raise refused(
        "messages",
        "messages for a model without a chat template",
        "a prompt",
        "use /v1/completions",
      )
    if "max_tokens" in given and "max_completion_tokens" in given:
      raise refused(
        "max_tokens",
        "max_tokens and max_completion_tokens",
        "one of them",
        "leave max_tokens out",
      )
    if "top_logprobs" in given and not given.get("logprobs"):
      raise refused(
        "top_logprobs",
        "top_logprobs without logprobs",
        "both",
        "pass logprobs: true",
      )
    messages = _messages(given.get("messages"))
    try:
      prompt = self._template.tokens(messages, self.tokenizer)
    except RingjaxError as error:
      raise ApiError(400, str(error), param="messages") from None
    new = given.get("max_completion_tokens", given.get("max_tokens"))
    if new is None:
      new = max(1, self._longest - prompt.size)
    wanted = given.get("top_logprobs", 0) if given.get("logprobs") else None
    return self._call(
      given, [prompt], salt, new=new, logprobs=wanted, chat=True
    )

  def _given(
    self, body: dict[str, Any], known: Mapping[str, Callable[[str, Any], Any]]
  ) -> dict[str, Any]:
    given = _checked(body, known)
    name = given.get("model", self.name)
    if name != self.name:
      raise ApiError(
        404,
        message("model", repr(name), repr(self.name), "pass that name"),
        param="model",
        code="model_not_found",
      )
    for name in ("best_of", "beams"):
      if name in given and given.get("stream"):
        raise refused(
          name, f"{given[name]}, with stream", "one of them", "leave one out"
        )
    if "stream_options" in given and not given.get("stream"):
      raise refused(
        "stream_options",
        "stream_options without stream",
        "both",
        "pass stream: true",
      )
    return given

  def _call(
    self,
    given: dict[str, Any],
    prompts: Sequence[np.ndarray],
    salt: str,
    *,
    new: int,
    logprobs: int | None,
    best_of: int | None = None,
    echoes: Sequence[str] = (),
    chat: bool = False,
  ) -> ApiCall:
    n, beams = given.get("n", 1), given.get("beams")
    each = beams or best_of or n
    if each * len(prompts) > self._most:
      raise refused(
        "n",
        f"{each * len(prompts)} answers",
        f"at most {self._most} of one body",
        "ask for fewer",
      )
    longest = max(prompt.size for prompt in prompts)
    if longest + new > self._longest:
      raise refused(
        "messages" if chat else "prompt",
        f"{longest:,} tokens and {new:,} new ones",
        f"{self._longest:,} together at most",
        "shorten it or ask for fewer",
        code="context_length_exceeded",
      )
    schema, regex = given.get("response_format"), given.get("guided_regex")
    if schema is not None and regex is not None:
      raise refused(
        "guided_regex",
        "guided_regex and response_format",
        "one of them",
        "leave one out",
      )
    if given.get("ignore_eos") and (schema is not None or regex is not None):
      raise refused(
        "ignore_eos",
        "true, with a grammar",
        "one of them: a grammar ends with the answer",
        "leave one out",
      )
    numbers = (
      "top_k",
      "top_p",
      "min_p",
      "repetition_penalty",
      "presence_penalty",
      "frequency_penalty",
      "logit_bias",
    )
    eos = () if given.get("ignore_eos") else self._eos
    try:
      # Without a seed two calls draw different tokens.
      sampling = RowSampling(
        temperature=given.get("temperature", 0.0 if beams else _TEMPERATURE),
        seed=given.get("seed", secrets.randbits(63)),
        **{name: given[name] for name in numbers if name in given},
      )
      stop = Stop(ids=eos, strings=given.get("stop", ()))
      requests = tuple(
        Request(
          prompt=prompt,
          max_new_tokens=new,
          sampling=sampling,
          stop=stop,
          n=n,
          best_of=best_of,
          beams=beams,
          length_penalty=given.get("length_penalty", 1.0),
          logprobs=logprobs,
          salt=salt,
          mask=self._grammars.mask(schema, regex, each),
        )
        for prompt in prompts
      )
    except RingjaxError as error:
      raise from_error(error) from None
    return ApiCall(
      requests=requests,
      n=n,
      chat=chat,
      stream=given.get("stream", False),
      usage=given.get("stream_options", False),
      logprobs=logprobs,
      echoes=tuple(echoes) or ("",) * len(prompts),
      id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
      created=int(time.time()),
    )

  def _prompts(self, given: PyTree, each: int) -> list[str | list[int]]:
    """The prompts of a body, texts or ids."""
    ids = lambda x: (
      isinstance(x, list) and bool(x) and all(type(i) is int for i in x)
    )
    if isinstance(given, str) or ids(given):
      return [given]
    several = isinstance(given, list) and given
    if several and len(given) * each > self._most:
      raise refused(
        "prompt",
        f"{len(given)} prompts, {each} answers of each",
        f"at most {self._most} answers of one body",
        "ask for fewer",
      )
    if several and (
      all(isinstance(x, str) for x in given) or all(map(ids, given))
    ):
      return given
    raise refused(
      "prompt",
      _kind(given),
      "a string, a list of token ids, or a list of either, none empty",
      "pass one of them",
    )

  def _encoded(self, name: str, prompt: str | list[int]) -> np.ndarray:
    if isinstance(prompt, str):
      try:
        ids = self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)
      except RingjaxError as error:
        raise ApiError(400, str(error), param=name) from None
      if not ids.size:
        raise refused(name, "an empty text", "some text", "pass a text")
      return ids
    if min(prompt) < 0 or max(prompt) >= self._vocab:
      raise refused(
        name,
        f"ids from {min(prompt):.4g} to {max(prompt):.4g}",
        f"ids from 0 to {self._vocab - 1}",
        "encode the text with this model's tokenizer",
      )
    return np.asarray(prompt, np.int32)

  def _shown(self, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
      return prompt
    return self.tokenizer.decode(prompt)

  # -------------------------------------------------------------------------
  # From answers to bodies
  # -------------------------------------------------------------------------

  def models(self) -> dict[str, Any]:
    """The body of /v1/models."""
    one = {
      "id": self.name,
      "object": "model",
      "created": self.created,
      "owned_by": "ringjax",
      "max_model_len": self._longest,
    }
    return {"object": "list", "data": [one]}

  def whole(self, call: ApiCall, handles: Sequence[Handle]) -> dict[str, Any]:
    """The body of an answer that is complete.

    Raises:
      ApiError: an answer could not be made.
    """
    choices = []
    for handle, echo in zip(handles, call.echoes, strict=True):
      for answer in handle.answers:
        check_answer(answer)
      for answer in handle.result().answers:
        shown = AnswerStream(self.tokenizer, answer, len(choices), call, echo)
        part = shown.take()
        choice: dict[str, Any] = {
          "index": shown.index,
          "finish_reason": part.finish,
        }
        if call.chat:
          choice["message"] = {
            "role": "assistant",
            "content": part.text,
            "refusal": None,
          }
        else:
          choice["text"] = part.text
        choices.append(choice | {"logprobs": part.logprobs})
    kind = "chat.completion" if call.chat else "text_completion"
    return self._head(call, kind) | {
      "choices": choices,
      "usage": usage(handles),
    }

  def chunk(
    self, call: ApiCall, choices: list[dict[str, Any]]
  ) -> dict[str, Any]:
    """The body of a part of a stream."""
    kind = "chat.completion.chunk" if call.chat else "text_completion"
    found = self._head(call, kind) | {"choices": choices}
    # A member of each part, null but in the last.
    return found | {"usage": None} if call.usage else found

  def _head(self, call: ApiCall, kind: str) -> dict[str, Any]:
    return {
      "id": call.id,
      "object": kind,
      "created": call.created,
      "model": self.name,
    }


def _messages(given: PyTree) -> list[dict[str, Any]]:
  """Messages of roles and texts; parts of a text are joined."""
  if not isinstance(given, list) or not given:
    raise refused(
      "messages",
      _kind(given) if given is not None else "no messages",
      "a list of messages",
      'pass [{"role": "user", "content": "..."}]',
    )
  found = []
  for n, one in enumerate(given):
    name = f"messages[{n}]"
    try:
      members = _members(name, one, "role", "content")
    except RingjaxError as error:
      raise ApiError(400, str(error), param="messages") from None
    content = members.get("content")
    if isinstance(content, list) and all(
      isinstance(part, dict)
      and set(part) == {"type", "text"}
      and part["type"] == "text"
      and isinstance(part["text"], str)
      for part in content
    ):
      content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(members.get("role"), str):
      raise ApiError(
        400,
        message(
          name,
          f"role {_kind(members.get('role'))}, content {_kind(content)}",
          "a role, and a text or parts of type text",
          "pass these",
        ),
        param="messages",
      )
    found.append({"role": members["role"], "content": content})
  return found


def check_answer(answer: Answer) -> None:
  """Raises ApiError if an answer ended before it was complete."""
  if isinstance(answer.error, RejectedError):
    raise rejected(answer.error)
  if isinstance(answer.error, OptionError):
    raise from_error(answer.error)
  if answer.finish == "error":
    raise ApiError(
      503 if isinstance(answer.error, PeerError) else 500,
      f"the answer could not be made: {answer.error}",
      kind="server_error",
    )
  if answer.finish in ("cancelled", "deadline"):
    raise ApiError(
      503,
      f"the answer was given up: {answer.finish}; try again",
      kind="server_error",
      code=answer.finish,
    )


def usage(handles: Sequence[Handle]) -> dict[str, Any]:
  """Tokens that were read and made."""
  read = sum(len(h.request.prompt) for h in handles)
  made = sum(len(a.tokens) for h in handles for a in h.answers)
  cached = sum(h.cached_tokens for h in handles)
  return {
    "prompt_tokens": read,
    "completion_tokens": made,
    "total_tokens": read + made,
    "prompt_tokens_details": {"cached_tokens": cached},
  }


class AnswerPart(NamedTuple):
  """What of an answer is new.

  Fields:
    text: that may be shown.
    logprobs: of its tokens, or None.
    finish: why it ended, or None.
  """

  text: str
  logprobs: dict[str, Any] | None
  finish: str | None


class AnswerStream:
  """An answer as it grows, part by part; it may grow in another thread.

  Attributes:
    index: of the choice.
    begun: whether a part of it was taken.
    ended: whether all of it was.
  """

  def __init__(
    self,
    tokenizer: AnyTokenizer,
    answer: Answer,
    index: int,
    call: ApiCall,
    echo: str = "",
  ):
    self.index, self.answer = index, answer
    self.begun = self.ended = False
    self._tokenizer, self._call, self._echo = tokenizer, call, echo
    self._sent = self._entries = self._new = 0
    self._decoder, self._offsets, self._chars = Stream(tokenizer), [], 0

  def take(self) -> AnswerPart:
    """What came since the last time.

    Raises:
      ApiError: the answer could not be made.
    """
    answer = self.answer
    # Before the text, which is complete when this is set.
    finish = answer.finish
    check_answer(answer)
    text = answer.text
    new = text[self._sent :]
    self._sent = len(text)
    logprobs = None
    if self._call.logprobs is not None:
      logprobs = self._logprobs(len(text), finish is not None)
    if not self.begun:
      new = self._echo + new
    self.begun, self.ended = True, finish is not None
    return AnswerPart(new, logprobs, finish and _FINISH[finish])

  def choice(self, first: bool, part: AnswerPart) -> dict[str, Any] | None:
    """A part as a choice of a stream, or None if there is nothing in it."""
    new = part.text or part.finish or (part.logprobs and self._new)
    if not new and not first:
      return None
    found: dict[str, Any] = {"index": self.index}
    if self._call.chat:
      delta = {"content": part.text} if part.text or first else {}
      found["delta"] = {"role": "assistant", **delta} if first else delta
    else:
      found["text"] = part.text
    return found | {"logprobs": part.logprobs, "finish_reason": part.finish}

  def _logprobs(self, shown: int, ended: bool) -> dict[str, Any]:
    """Of tokens whose text is shown."""
    answer, found = self.answer, list(self.answer.logprobs)
    for one in found[len(self._offsets) :]:
      self._offsets.append(self._chars)
      self._chars += len(self._decoder.feed(one.token))
    upto = len(found)
    if ended and isinstance(answer.stopped, int):
      # The id that ends a text is no part of it.
      upto -= 1
    cut = not ended or isinstance(answer.stopped, str)
    while cut and upto and self._offsets[upto - 1] >= shown:
      upto -= 1
    entries = [(found[n], self._offsets[n]) for n in range(self._entries, upto)]
    self._new = len(entries)
    self._entries = max(self._entries, upto)
    many = self._call.logprobs
    if self._call.chat:
      content = [
        self._token(one.token, one.logprob)
        | {"top_logprobs": [self._token(*pair) for pair in one.top]}
        for one, _ in entries
      ]
      return {"content": content, "refusal": None}
    return {
      "tokens": [self._name(one.token) for one, _ in entries],
      "token_logprobs": [one.logprob for one, _ in entries],
      "top_logprobs": [
        {self._name(i): x for i, x in one.top} for one, _ in entries
      ]
      if many
      else None,
      "text_offset": [len(self._echo) + at for _, at in entries],
    }

  def _bytes(self, token: int) -> bytes:
    if self._tokenizer.by_bytes:
      return self._tokenizer.piece(token)
    return self._tokenizer.window([token]).encode("utf-8")

  def _name(self, token: int) -> str:
    """A token's text, or its bytes where these are no text."""
    data = self._bytes(token)
    try:
      return data.decode("utf-8")
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

  def _token(self, token: int, logprob: float) -> dict[str, Any]:
    data = self._bytes(token)
    return {
      "token": self._name(token),
      "logprob": logprob,
      "bytes": list(data),
    }
