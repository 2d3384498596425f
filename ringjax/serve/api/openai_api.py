"""OpenAI's API as data: parses bodies to requests, writes answers as bodies.

Guarantees: a parameter is used, or refused with an error object that says what
came, what was expected and what to do; none is ignored in silence. Texts of
messages and prompts never become special tokens. A text that no context can
hold is refused before it is rendered or encoded. Nothing here knows of HTTP or
of sockets.

Accepted parameters that are not part of OpenAI's API: `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `guided_regex`, `beams`, `length_penalty`,
and vLLM's `stop_token_ids`, `include_stop_str_in_output`,
`skip_special_tokens`, `chat_template_kwargs`; /tokenize and /detokenize are
vLLM's.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, PyTree

from ringjax.data import ChatTemplate, Stream
from ringjax.data.text.special_tokens import Specials, TokenIds
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, PeerError, RingjaxError, message
from ringjax.infer.scoring.text_scorer import TokenScores
from ringjax.infer.stopping import Stop
from ringjax.serve.api.api_parameters import (
  CHAT,
  COMPLETION,
  DETOKENIZE,
  TOKENIZE,
  ApiError,
  Parser,
  check_search,
  checked,
  from_error,
  is_ids,
  kind_of,
  messages_of,
  refused,
  tools_of,
  utf8,
)
from ringjax.serve.api.grammar import GrammarCompiler
from ringjax.serve.api.reasoning import (
  ReasoningReader,
  Thoughts,
  reasoning_format,
)
from ringjax.serve.api.tool_calls import (
  ToolAnswer,
  ToolReader,
  call_bodies,
  check_place,
  forced_schema,
  format_of,
)
from ringjax.serve.request import Answer, Handle, RejectedError, Request
from ringjax.serve.row_sampler import RowSampling

_DEFAULT_NEW = 16
# OpenAI's default temperature.
_TEMPERATURE = 1.0
_FINISH = {"stop": "stop", "length": "length"}
# Log-probability of a masked token in OpenAI's API: JSON has no infinity.
_NEVER = -9999.0
# Special tokens that /tokenizer_info names.
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# Name of reasoning in the messages of a template: GPT-OSS's.
_THINKING = re.compile(r"""\.thinking\b|['"]thinking['"]""")
# Number of last tokens of a prompt that contain a mark of reasoning.
_MARK_TOKENS = 64
# Assumed characters of the longest token of a tokenizer without bytes: a word
# may be a token that stands for all unknown ones.
_LONG_TOKEN = 256


def rejected(error: Exception) -> ApiError:
  """Make the error of a request that is rejected for now."""
  return ApiError(
    429,
    f"{error}; try again later",
    kind="rate_limit_error",
    code="rejected",
    headers={"retry-after": "1"},
  )


# ---------------------------------------------------------------------------
# From bodies to requests
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiCall:
  """Parsed API call: its requests and how to answer them.

  Attributes:
    requests: Requests, one for each prompt.
    model: Name by which the model was called.
    n: Number of answers of each request that are returned.
    chat: Whether the answers are messages.
    stream: Whether answers are streamed as they grow.
    usage: Whether a stream ends with its usage.
    logprobs: Number of alternatives that each token comes with, or None.
    stop_ids: Token ids that the body asks to stop at.
    echoes: Text before the answers of each prompt.
    prompt_top: Number of alternatives that each token of an echoed prompt comes
      with, or None for no log-probabilities of prompts.
    continues: Whether prompts are continued, not only echoed.
    tools: Reader of calls of tools, or None where none may be called.
    reasoning: Reader of the answers' reasoning, or None.
    id: Id of the answer.
    created: Time of the call, seconds since 1970.
  """

  requests: tuple[Request, ...]
  model: str
  n: int
  chat: bool
  stream: bool
  usage: bool
  logprobs: int | None
  stop_ids: tuple[int, ...]
  echoes: tuple[str, ...]
  prompt_top: int | None
  continues: bool
  tools: ToolReader | None
  reasoning: ReasoningReader | None
  id: str
  created: int

  @property
  def answers(self) -> int:
    """Number of answers to compute, with the hypotheses of beam searches."""
    return sum(request.rows for request in self.requests)

  @property
  def stops(self) -> Stop:
    """Stop conditions of the answers and options of their texts."""
    return self.requests[0].stops


class ApiModel:
  """Facts of the served model with which bodies are read and written.

  Attributes:
    name: Name by which clients call it.
    adapters: Names by which clients call it with an adapter.
    tokenizer: Tokenizer of its texts.
    created: Time when it was first served, seconds since 1970.
    longest: Maximum number of tokens of a prompt and its answer together.
  """

  def __init__(
    self,
    name: str,
    tokenizer: AnyTokenizer,
    *,
    vocab: int,
    longest: int,
    most_answers: int,
    adapters: Sequence[str] = (),
    chat_template: str | None = None,
    trusted_template: bool = False,
    reasoning_parser: str = "auto",
  ):
    """Make the API of a model.

    Args:
      name: Name by which clients call it.
      tokenizer: Tokenizer of its texts.
      vocab: Number of token ids of the model.
      longest: Maximum number of tokens of a prompt and its answer together.
      most_answers: Maximum number of answers of one body.
      adapters: Names of the engine's adapters.
      chat_template: Jinja source in place of the tokenizer's, or None.
      trusted_template: Whether the template is trusted, see
        `ringjax.data.ChatTemplate`.
      reasoning_parser: Name of the format of reasoning in answers, "auto" for
        that which the chat template shows, or "none".

    Raises:
      OptionError: If an adapter has the name of the model, or no format of
        reasoning has the name.
      TemplateError: If the template is invalid.
    """
    if name in adapters:
      raise OptionError(
        "model_name",
        f"{name!r}, which an adapter has too",
        "another name",
        "pass another model_name",
      )
    self.name, self.tokenizer = name, tokenizer
    self.adapters = tuple(adapters)
    self.created = int(time.time())
    self._vocab, self.longest, self._most = vocab, longest, most_answers
    self._template = None
    if chat_template is not None:
      self._template = ChatTemplate(
        chat_template, tokenizer.special_names, trusted=trusted_template
      )
    elif tokenizer.chat_template is not None:
      self._template = ChatTemplate.of(tokenizer, trusted=trusted_template)
    source = "" if self._template is None else self._template.source
    self._reasoning = reasoning_format(reasoning_parser, source)
    self._template_reasoning = reasoning_format("auto", source)
    self._eos = tuple(i for i in tokenizer.eos_ids if i < vocab)
    self._grammars = GrammarCompiler(tokenizer, vocab)
    # No text of more characters has as few tokens.
    self._most_chars = longest * _longest_token(tokenizer)

  def completion(self, body: dict[str, Any], salt: str) -> ApiCall:
    """Parse a body of /v1/completions.

    Args:
      body: JSON object of the body.
      salt: Salt of its prefixes, see `Request`.

    Raises:
      ApiError: If a parameter is unknown, of a wrong type or out of range.
    """
    params = self._given(body, COMPLETION)
    if "prompt" not in params:
      raise refused("prompt", "no prompt", "a prompt", "pass prompt")
    n, best = params.get("n", 1), params.get("best_of")
    wanted, echo = params.get("logprobs"), params.get("echo", False)
    new = params.get("max_tokens", _DEFAULT_NEW)
    if new == 0 and not echo:
      raise refused(
        "max_tokens",
        "0, without echo",
        "at least 1, or the prompt alone with echo",
        "ask for tokens, or pass echo: true",
      )
    answers_each = params.get("beams") or best or n
    prompts = params["prompt"]
    if isinstance(prompts, list) and prompts and type(prompts[0]) is not int:
      self._check_answers("prompt", answers_each, len(prompts))
    prompts = self.texts("prompt", prompts, self._most)
    return self._call(
      params,
      [self.encoded("prompt", x) for x in prompts],
      salt,
      new=new,
      logprobs=wanted,
      best_of=best,
      prompt_top=wanted if echo else None,
      echoes=[self._shown(x) if echo else "" for x in prompts],
    )

  def chat(self, body: dict[str, Any], salt: str) -> ApiCall:
    """Parse a body of /v1/chat/completions.

    Args and errors are those of `completion`.
    """
    params = self._given(body, CHAT)
    if "max_tokens" in params and "max_completion_tokens" in params:
      raise refused(
        "max_tokens",
        "max_tokens and max_completion_tokens",
        "one of them",
        "leave max_tokens out",
      )
    if params.get("top_logprobs") and not params.get("logprobs"):
      raise refused(
        "top_logprobs",
        "top_logprobs without logprobs",
        "both",
        "pass logprobs: true",
      )
    tools = self._tools(params)
    prompt = self._rendered(params)
    new = params.get("max_completion_tokens", params.get("max_tokens"))
    if new is None:
      new = max(1, self.longest - prompt.size)
    wanted = params.get("top_logprobs", 0) if params.get("logprobs") else None
    return self._call(
      params,
      [prompt],
      salt,
      new=new,
      logprobs=wanted,
      chat=True,
      tools=tools,
      reasoning=self._thinking(prompt, tools),
    )

  def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
    """Answer a body of /tokenize: ids of a prompt, or of messages.

    Raises:
      ApiError: If a parameter is unknown, of a wrong type or out of range.
    """
    params = checked(body, TOKENIZE)
    self.adapter(params)
    if ("prompt" in params) == ("messages" in params):
      raise refused(
        "prompt", "both or none of prompt and messages", "one", "pass one"
      )
    if "messages" in params:
      opens = params.get("add_generation_prompt", True)
      ids = self._rendered(params, opens=opens, whole=True)
    else:
      bos = params.get("add_special_tokens", True) and self.tokenizer.adds_bos
      special = None
      if params["prompt"] in self._named_specials().values():
        special = self.tokenizer.specials.by_text.get(params["prompt"])
      try:
        utf8("prompt", params["prompt"])
        ids = self.tokenizer.encode(params["prompt"], bos=bos)
        # Clients ask for the ids of /tokenizer_info's texts.
        ids = ids if special is None else np.array([special.id], np.int32)
      except RingjaxError as error:
        raise ApiError(400, str(error), param="prompt") from None
    tokens = ids.tolist()
    names = None
    if params.get("return_token_strs"):
      names = [self.tokenizer.window([i]) for i in tokens]
    return {
      "count": len(tokens),
      "max_model_len": self.longest,
      "tokens": tokens,
      "token_strs": names,
    }

  def tokenizer_info(self) -> dict[str, Any]:
    """Answer /tokenizer_info: special tokens by name, and the chat template."""
    source = None if self._template is None else self._template.source
    return {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "model_max_length": self.longest,
      "add_bos_token": self.tokenizer.adds_bos,
      "chat_template": source,
      **self._named_specials(),
    }

  def _named_specials(self) -> dict[str, str]:
    """Texts of the special tokens of /tokenizer_info, by their names."""
    texts = {name: self.tokenizer.special_names.get(name) for name in _NAMED}
    return {name: x for name, x in texts.items() if isinstance(x, str)}

  def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
    """Answer a body of /detokenize: the text of ids, with special tokens.

    Raises:
      ApiError: If a parameter is unknown, of a wrong type or out of range.
    """
    params = checked(body, DETOKENIZE)
    self.adapter(params)
    tokens: Any = params.get("tokens")
    if tokens != [] and not is_ids(tokens):
      raise refused("tokens", kind_of(tokens), "a list of token ids", "pass it")
    if tokens:
      self._check_ids("tokens", tokens)
    return {"prompt": self.tokenizer.decode(tokens, special=True)}

  def _given(
    self, body: dict[str, Any], known: Mapping[str, Parser]
  ) -> dict[str, Any]:
    params = checked(body, known)
    self.adapter(params)
    if params.get("best_of") == 1 == params.get("n", 1):
      del params["best_of"]
    for name in ("best_of", "beams"):
      if name in params and params.get("stream"):
        raise refused(
          name, f"{params[name]}, with stream", "one of them", "leave one out"
        )
    if "stream_options" in params and not params.get("stream"):
      raise refused(
        "stream_options",
        "stream_options without stream",
        "both",
        "pass stream: true",
      )
    return params

  def adapter(self, given: Mapping[str, Any]) -> str:
    """Adapter that a body asks for by the model's name; "" for none."""
    name = given.get("model", self.name)
    self.check_name(name)
    return "" if name == self.name else name

  def check_name(self, name: str) -> None:
    """Raises ApiError if no model has this name."""
    if name not in (self.name, *self.adapters):
      names = ", ".join(map(repr, (self.name, *self.adapters)))
      raise ApiError(
        404,
        message("model", repr(name), names, "pass such a name"),
        param="model",
        code="model_not_found",
      )

  def _tools(self, params: dict[str, Any]) -> ToolReader | None:
    """Reader of the calls that a chat's answer may have.

    Of a call that is required the answer is JSON, by a grammar.
    """
    choice = tools_of(params)
    # What the template gets; with "none" it gets no tools.
    params["tools"] = None if choice is None else choice.tools
    if choice is None:
      return None
    for name in ("response_format", "guided_regex"):
      if choice.forced and name in params:
        raise refused(
          name,
          f"{name} beside a call that is required",
          "one of them",
          "leave one out",
        )
    source = "" if self._template is None else self._template.source
    try:
      check_place(source)
      form = None if choice.forced else format_of(source)
    except RingjaxError as error:
      raise ApiError(
        400, str(error), param="tools", code="unsupported_parameter"
      ) from None
    if choice.forced:
      params["response_format"] = forced_schema(choice.schemas)
    return ToolReader(
      tools=choice.schemas,
      form=form,
      parallel=params.get("parallel_tool_calls", True),
      shown=self._reasoning is None,
    )

  def _thinking(
    self, prompt: np.ndarray, tools: ToolReader | None
  ) -> ReasoningReader | None:
    """Reader of the reasoning in the answers to a chat, or None.

    Calls in channels are read together with the reasoning, by `tools`. Where
    reasoning stays in the content, it is read for its calls alone.
    """
    form, shown = self._reasoning, False
    calls = None if tools is None else tools.form
    if form is None and calls is not None:
      form, shown = self._template_reasoning, True
    if form is None or (calls is not None and calls.channels):
      return None
    end = self.tokenizer.decode(prompt[-_MARK_TOKENS:], special=True)
    return ReasoningReader.of_prompt(form, end, shown=shown)

  def _rendered(
    self, given: dict[str, Any], *, opens: bool = True, whole: bool = False
  ) -> np.ndarray:
    """Token ids of a chat, int32 [T].

    Args:
      given: Parameters of the body.
      opens: Whether the prompt ends with the opening of an answer.
      whole: Whether to encode all of a chat that is longer than any context.
    """
    template = self._template
    if template is None:
      raise refused(
        "messages",
        "messages for a model without a chat template",
        "a prompt",
        "use /v1/completions",
      )
    calls = "tool_calls" in template.source
    messages = messages_of(given.get("messages"), calls=calls)
    if not whole:
      # A template may leave out parts of an assistant's messages.
      chars = sum(
        len(chat_message["content"])
        for chat_message in messages
        if chat_message["role"] != "assistant"
      )
      self._check_length("messages", chars, self._most_chars)
    if _THINKING.search(template.source):
      joins = "<|channel|>" in template.source
      messages = [_with_thinking(x, joins) for x in messages]
    variables = dict(given.get("chat_template_kwargs", {}))
    if given.get("tools"):
      variables["tools"] = given["tools"]
    if "reasoning_effort" in given:
      variables.setdefault("reasoning_effort", given["reasoning_effort"])
    tokenizer = _Encoder(self.tokenizer, None if whole else self.longest)
    try:
      return template.tokens(
        messages, tokenizer, add_generation_prompt=opens, **variables
      )
    except RingjaxError as error:
      raise ApiError(400, str(error), param="messages") from None

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
    prompt_top: int | None = None,
    chat: bool = False,
    tools: ToolReader | None = None,
    reasoning: ReasoningReader | None = None,
  ) -> ApiCall:
    check_search(given)
    n, beams = given.get("n", 1), given.get("beams")
    answers_each = beams or best_of or n
    self._check_answers("n", answers_each, len(prompts))
    longest = max(prompt.size for prompt in prompts)
    if longest + new > self.longest:
      # A prompt above the limit was encoded only in part.
      over = longest > self.longest
      read = f"over {self.longest:,}" if over else f"{longest:,}"
      raise refused(
        "messages" if chat else "prompt",
        f"{read} tokens and {min(new, 10**30):,} new ones",
        f"{self.longest:,} together at most",
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
    for name in ("logit_bias", "stop_token_ids"):
      if name in given:
        self._check_ids(name, list(given[name]))
    stop_ids = given.get("stop_token_ids", ())
    eos = () if given.get("ignore_eos") else self._eos
    try:
      # Without a seed two calls draw different tokens.
      sampling = RowSampling(
        temperature=given.get("temperature", 0.0 if beams else _TEMPERATURE),
        seed=given.get("seed", secrets.randbits(63)),
        **{name: given[name] for name in numbers if name in given},
      )
      stop = Stop(
        ids=(*eos, *stop_ids),
        strings=given.get("stop", ()),
        included=given.get("include_stop_str_in_output", False),
        special=not given.get("skip_special_tokens", True)
        or self._shows_specials(tools, reasoning),
      )
      requests = tuple(
        Request(
          prompt=prompt,
          max_new_tokens=max(1, new),
          sampling=sampling,
          stop=stop,
          n=n,
          best_of=best_of,
          beams=beams,
          length_penalty=given.get("length_penalty", 1.0),
          logprobs=logprobs,
          salt=salt,
          adapter=self.adapter(given),
          mask=self._grammars.mask(
            schema, regex, answers_each, self._around(reasoning)
          ),
        )
        for prompt in prompts
      )
    except RingjaxError as error:
      raise from_error(error) from None
    return ApiCall(
      requests=requests,
      model=given.get("model", self.name),
      n=n,
      chat=chat,
      stream=given.get("stream", False),
      usage=given.get("stream_options", False),
      logprobs=logprobs,
      stop_ids=stop_ids,
      echoes=tuple(echoes) or ("",) * len(prompts),
      prompt_top=prompt_top,
      continues=new > 0,
      tools=tools,
      reasoning=reasoning,
      id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
      created=int(time.time()),
    )

  def _shows_specials(
    self, tools: ToolReader | None, reasoning: ReasoningReader | None
  ) -> bool:
    """Whether a mark is a special token, which texts leave out."""
    marks = () if tools is None or tools.form is None else tools.form.marks
    marks += () if reasoning is None else reasoning.form.marks
    return any(mark in self.tokenizer.specials.by_text for mark in marks)

  def _around(self, reasoning: ReasoningReader | None) -> Callable[[str], str]:
    """Function that adds reasoning before the answers of a grammar."""
    if reasoning is None or reasoning.shown:
      return lambda grammar: grammar
    by_text = self.tokenizer.specials.by_text
    specials = {text: token.id for text, token in by_text.items()}
    return lambda grammar: reasoning.grammar(grammar, specials)

  def _check_answers(self, param: str, each: int, prompts: int) -> None:
    if each * prompts > self._most:
      raise refused(
        param,
        f"{prompts} prompts, {each} answers of each",
        f"at most {self._most} answers of one body",
        "ask for fewer",
      )

  def texts(
    self, param: str, given: PyTree, most: int
  ) -> list[str | list[int]]:
    """Parse a text or several, each as characters or as token ids.

    Args:
      param: Name of the parameter.
      given: Value of the parameter.
      most: Maximum number of texts.

    Raises:
      ApiError: If it is something else, or there are more texts.
    """
    if isinstance(given, str):
      return [given]
    if isinstance(given, list) and given:
      if type(given[0]) is int:
        # Check the length before the checks of each id.
        self._check_length(param, len(given), self.longest, "ids")
        if is_ids(given):
          return [given]
      elif len(given) > most:
        raise refused(
          param,
          f"{len(given)} texts",
          f"at most {most}",
          "send fewer at a time",
        )
      else:
        if all(isinstance(x, str) for x in given):
          return given
        for prompt in given:
          if isinstance(prompt, list):
            self._check_length(param, len(prompt), self.longest, "ids")
        if all(map(is_ids, given)):
          return given
    raise refused(
      param,
      kind_of(given),
      "a string, a list of token ids, or a list of either, none empty",
      "pass one of them",
    )

  def _check_length(
    self, param: str, size: int, most: int, unit: str = "characters"
  ) -> None:
    """Refuse a prompt whose size alone shows that it is too long.

    Args:
      param: Name of the parameter.
      size: Number of its characters, or ids.
      most: Maximum size.
      unit: Unit of the size.
    """
    if size > most:
      raise refused(
        param,
        f"{size:,} {unit}",
        f"{self.longest:,} tokens at most",
        "shorten it",
        code="context_length_exceeded",
      )

  def _check_ids(self, param: str, ids: Sequence[int]) -> None:
    if min(ids) < 0 or max(ids) >= self._vocab:
      # Formatting with str: a float can't hold ints of hundreds of digits.
      shown = " to ".join(str(i)[:12] for i in (min(ids), max(ids)))
      raise refused(
        param,
        f"ids from {shown}",
        f"ids from 0 to {self._vocab - 1}",
        "encode the text with this model's tokenizer",
      )

  def encoded(
    self, name: str, prompt: str | list[int]
  ) -> Int[np.ndarray, " T"]:
    """Token ids of a text of the parameter `name`, int32 [T]; checks ids."""
    if isinstance(prompt, str):
      self._check_length(name, len(prompt), self._most_chars)
      try:
        utf8(name, prompt)
        ids = self.tokenizer.encode(
          prompt, bos=self.tokenizer.adds_bos, enough=self.longest
        )
      except RingjaxError as error:
        raise ApiError(400, str(error), param=name) from None
      if not ids.size:
        raise refused(name, "an empty text", "some text", "pass a text")
      return ids
    self._check_ids(name, prompt)
    return np.asarray(prompt, np.int32)

  def _shown(self, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
      return prompt
    return self.tokenizer.decode(prompt)

  # -------------------------------------------------------------------------
  # From answers to bodies
  # -------------------------------------------------------------------------

  def models(self) -> dict[str, Any]:
    """Body of /v1/models."""
    names = (self.name, *self.adapters)
    return {"object": "list", "data": [self.model(name) for name in names]}

  def model(self, name: str) -> dict[str, Any]:
    """Body of /v1/models/{id}.

    Raises:
      ApiError: If no model has this name.
    """
    self.check_name(name)
    return {
      "id": name,
      "object": "model",
      "created": self.created,
      "owned_by": "ringjax",
      "root": self.name,
      "parent": None if name == self.name else self.name,
      "max_model_len": self.longest,
    }

  def streams(
    self,
    call: ApiCall,
    handle: Handle,
    answers: Sequence[Answer],
    number: int,
    first: int,
    scores: Sequence[TokenScores],
  ) -> list[AnswerStream]:
    """Streams of the answers to one prompt of a call.

    Args:
      call: The call.
      handle: Handle of the prompt's request.
      answers: Answers of it to stream.
      number: Number of the prompt.
      first: Index of the first of these choices.
      scores: Log-probabilities of all prompts, or ().
    """
    echo = Echo(call.echoes[number], handle.request.prompt, None)
    if scores:
      echo = echo._replace(scores=scores[number])
    return [
      AnswerStream(self.tokenizer, answer, first + n, call, echo)
      for n, answer in enumerate(answers)
    ]

  def complete_body(
    self,
    call: ApiCall,
    handles: Sequence[Handle],
    scores: Sequence[TokenScores] = (),
  ) -> dict[str, Any]:
    """Body of an answer that is complete.

    Args:
      call: The call.
      handles: Handles of its requests.
      scores: Log-probabilities of the prompts' tokens, if they are echoed.

    Raises:
      ApiError: If an answer could not be computed.
    """
    choices = []
    for number, handle in enumerate(handles):
      for answer in handle.answers:
        check_answer(answer)
      answers = handle.result().answers
      for shown in self.streams(
        call, handle, answers, number, len(choices), scores
      ):
        part = shown.take()
        choice: dict[str, Any] = {
          "index": shown.index,
          "finish_reason": part.finish,
          "stop_reason": shown.stop_reason,
        }
        if call.chat:
          choice["message"] = {
            "role": "assistant",
            "content": part.text,
            "refusal": None,
          }
          choice["message"] |= _reasoning_members(part.reasoning)
          if part.calls:
            choice["message"] |= {
              "content": part.text or None,
              "tool_calls": list(part.calls),
            }
        else:
          choice["text"] = part.text
        choices.append(choice | {"logprobs": part.logprobs})
    kind = "chat.completion" if call.chat else "text_completion"
    return self._head(call, kind) | {
      "choices": choices,
      "usage": self.usage(call, handles),
    }

  def usage(self, call: ApiCall, handles: Sequence[Handle]) -> dict[str, Any]:
    """Usage object of a call whose answers have ended."""
    if self._thought_reader(call) is None:
      return usage(handles)
    answers = [answer for handle in handles for answer in handle.answers]
    thought = sum(self.reasoning_tokens(call, answer) for answer in answers)
    return usage(handles, thought)

  def reasoning_tokens(self, call: ApiCall, answer: Answer) -> int:
    """Number of tokens of an answer before its content."""
    reader = self._thought_reader(call)
    if reader is None:
      return 0
    end = reader.read(answer.text, True).end
    stream, chars = Stream(self.tokenizer, special=call.stops.special), 0
    for count, token in enumerate(answer.tokens):
      if chars >= end:
        return count
      chars += len(stream.feed(token))
    return len(answer.tokens) if end else 0

  def _thought_reader(self, call: ApiCall) -> ReasoningReader | None:
    """Reader of reasoning that answers have apart from their content."""
    if call.reasoning is not None:
      return None if call.reasoning.shown else call.reasoning
    if call.tools is None or call.tools.form is None or call.tools.shown:
      return None
    if not call.tools.form.channels or self._template_reasoning is None:
      return None
    # `call.tools` reads calls and reasoning together.
    return ReasoningReader.of_prompt(self._template_reasoning, "")

  def chunk(
    self, call: ApiCall, choices: list[dict[str, Any]]
  ) -> dict[str, Any]:
    """Body of a part of a stream."""
    kind = "chat.completion.chunk" if call.chat else "text_completion"
    body = self._head(call, kind) | {"choices": choices}
    # Each part has the member "usage", which is null except in the last part.
    return body | {"usage": None} if call.usage else body

  def _head(self, call: ApiCall, kind: str) -> dict[str, Any]:
    return {
      "id": call.id,
      "object": kind,
      "created": call.created,
      "model": call.model,
    }


class _Encoder:
  """Tokenizer of chats that stops encoding once a text is too long."""

  def __init__(self, tokenizer: AnyTokenizer, enough: int | None):
    self.specials: Specials = tokenizer.specials
    self.added = tokenizer.added
    self.special_names = tokenizer.special_names
    self.chat_template = tokenizer.chat_template
    self._tokenizer, self._enough = tokenizer, enough

  def encode_parts(self, parts: Sequence[str | int]) -> np.ndarray:
    """Token ids of texts and special ids, up to about `enough` of them."""
    return self._tokenizer.encode_parts(parts, enough=self._enough)


def _longest_token(tokenizer: AnyTokenizer) -> int:
  """Upper bound of the characters of a text's token."""
  ids = range(tokenizer.vocab_size)
  if not tokenizer.by_bytes:
    return _LONG_TOKEN
  return max(
    (len(tokenizer.piece(i)) for i in ids if not tokenizer.is_special(i)),
    default=1,
  )


def _with_thinking(chat_message: dict[str, Any], joins: bool) -> dict[str, Any]:
  """A message with its reasoning by the name that GPT-OSS's template has.

  Args:
    chat_message: Message of a history.
    joins: Whether text before calls is reasoning, too, of which the template
      allows one field only.
  """
  thinking = chat_message.get("reasoning_content")
  if not thinking:
    return chat_message
  if joins and chat_message.get("tool_calls") and chat_message["content"]:
    thinking = f"{thinking}\n{chat_message['content']}"
    chat_message = chat_message | {"content": ""}
  return chat_message | {"thinking": thinking}


def _reasoning_members(reasoning: str) -> dict[str, str]:
  """Members of a message or a delta, by the two names that clients know."""
  if not reasoning:
    return {}
  return {"reasoning_content": reasoning, "reasoning": reasoning}


def check_answer(answer: Answer) -> None:
  """Raises ApiError if an answer ended before it was complete."""
  if isinstance(answer.error, RejectedError):
    raise rejected(answer.error)
  if isinstance(answer.error, OptionError):
    raise from_error(answer.error)
  if answer.finish == "error":
    lost = isinstance(answer.error, PeerError)
    raise ApiError(
      503 if lost else 500,
      f"the answer could not be made: {answer.error}",
      kind="server_error",
      headers={"retry-after": "5"} if lost else None,
    )
  if answer.finish in ("cancelled", "deadline"):
    raise ApiError(
      503,
      f"the answer was given up: {answer.finish}; try again",
      kind="server_error",
      code=answer.finish,
    )


def usage(
  handles: Sequence[Handle], reasoning_tokens: int | None = None
) -> dict[str, Any]:
  """Usage object: numbers of prompt and answer tokens.

  Args:
    handles: Handles of a call.
    reasoning_tokens: Number of the answers' tokens that are reasoning, if it is
      read.
  """
  read = sum(len(h.request.prompt) for h in handles)
  generated = sum(len(a.tokens) for h in handles for a in h.answers)
  details = {"cached_tokens": sum(h.cached_tokens for h in handles)}
  kept_counts = [h.kept_tokens for h in handles if h.kept_tokens is not None]
  if kept_counts:
    details["kept_tokens"] = sum(kept_counts)
  counts = {
    "prompt_tokens": read,
    "completion_tokens": generated,
    "total_tokens": read + generated,
    "prompt_tokens_details": details,
  }
  if reasoning_tokens is not None:
    thought = {"reasoning_tokens": reasoning_tokens}
    counts["completion_tokens_details"] = thought
  return counts


class AnswerPart(NamedTuple):
  """New part of an answer since the last one was taken.

  Fields:
    text: Text that may be shown.
    logprobs: Log-probabilities of its tokens, or None.
    finish: Finish reason of the answer, or None.
    calls: Calls of tools, as members of a message; only of the last part.
    reasoning: Text in which the model thinks.
  """

  text: str
  logprobs: dict[str, Any] | None
  finish: str | None
  calls: tuple[dict[str, Any], ...] = ()
  reasoning: str = ""


class Echo(NamedTuple):
  """Prompt of an answer, as it comes before the answer's text.

  Fields:
    text: Text of the prompt, or "" if it is not echoed.
    prompt: Token ids of the prompt, int32 [T].
    scores: Log-probabilities of its tokens, or None.
  """

  text: str
  prompt: TokenIds
  scores: TokenScores | None


class AnswerStream:
  """An answer as it grows, part by part; it may grow in another thread.

  Attributes:
    index: Index of the choice.
    begun: Whether a part of it was taken.
    ended: Whether all of it was taken.
  """

  def __init__(
    self,
    tokenizer: AnyTokenizer,
    answer: Answer,
    index: int,
    call: ApiCall,
    echo: Echo,
  ):
    self.index, self.answer = index, answer
    self.begun = self.ended = False
    self._tokenizer, self._call, self._echo = tokenizer, call, echo
    self._sent = self._sent_reasoning = self._entries = self._new = 0
    self._decoder = Stream(tokenizer, special=call.stops.special)
    self._offsets: list[int] = []
    self._chars = 0

  @property
  def stop_reason(self) -> int | str | None:
    """Stop text or stop id of the body that ended it, or None."""
    by = self.answer.stopped
    is_requested = isinstance(by, str) or by in self._call.stop_ids
    return by if is_requested else None

  def take(self) -> AnswerPart:
    """Take the text and log-probabilities since the last call.

    Raises:
      ApiError: If the answer could not be computed.
    """
    answer = self.answer
    # Read it before the text, which is complete once `finish` is set.
    finish = answer.finish
    check_answer(answer)
    text = answer.text
    parts = self._parts(text, finish is not None)
    new = parts.content[self._sent :]
    self._sent = len(parts.content)
    reasoning = parts.reasoning[self._sent_reasoning :]
    self._sent_reasoning = len(parts.reasoning)
    logprobs = None
    if self._call.logprobs is not None:
      logprobs = self._logprobs(len(text), finish is not None)
    if not self.begun:
      new = self._echo.text + new
      if logprobs is not None and self._echo.scores is not None:
        of_prompt = self._prompt_logprobs(self._echo.scores)
        logprobs = {
          name: values if values is None else of_prompt[name] + values
          for name, values in logprobs.items()
        }
    self.begun, self.ended = True, finish is not None
    reason = finish and _FINISH[finish]
    calls = tuple(call_bodies(parts.calls))
    if calls and reason == "stop":
      reason = "tool_calls"
    return AnswerPart(new, logprobs, reason, calls, reasoning)

  def _parts(self, text: str, ended: bool) -> ToolAnswer:
    """Content, calls and reasoning of the text so far."""
    thoughts = Thoughts("", text)
    if self._call.reasoning is not None:
      thoughts = self._call.reasoning.read(text, ended)
    if self._call.tools is None:
      return ToolAnswer(thoughts.content, (), thoughts.reasoning)
    parts = self._call.tools.read(thoughts.content, ended)
    if self._call.reasoning is not None and self._call.reasoning.shown:
      return parts._replace(content=text[: thoughts.end] + parts.content)
    return parts._replace(reasoning=thoughts.reasoning or parts.reasoning)

  def choice(self, first: bool, part: AnswerPart) -> dict[str, Any] | None:
    """A part as a choice of a stream, or None if it is empty."""
    new = part.text or part.reasoning or part.finish
    new = new or (part.logprobs and self._new)
    if not new and not first:
      return None
    body: dict[str, Any] = {"index": self.index}
    if self._call.chat:
      delta: dict[str, Any] = {}
      if part.text or first:
        delta["content"] = part.text
      delta |= _reasoning_members(part.reasoning)
      if part.calls:
        delta["tool_calls"] = [
          {"index": n, **call} for n, call in enumerate(part.calls)
        ]
      body["delta"] = {"role": "assistant", **delta} if first else delta
    else:
      body["text"] = part.text
    body |= {"logprobs": part.logprobs, "finish_reason": part.finish}
    return body | {"stop_reason": self.stop_reason} if part.finish else body

  def _logprobs(self, shown: int, ended: bool) -> dict[str, Any]:
    """Log-probabilities of tokens whose text is shown."""
    answer, tokens = self.answer, list(self.answer.logprobs)
    for token in tokens[len(self._offsets) :]:
      self._offsets.append(self._chars)
      self._chars += len(self._decoder.feed(token.token))
    upto = len(tokens)
    if ended and isinstance(answer.stopped, int) and self._echo.scores is None:
      # The stop id is not part of the text unless the body asks for it. With
      # the prompt's tokens all tokens are wanted: evaluations leave the last
      # one out by its place.
      upto -= not self._call.stops.included
    cut = not ended or isinstance(answer.stopped, str)
    while cut and upto and self._offsets[upto - 1] >= shown:
      upto -= 1
    entries = [
      (tokens[n], self._offsets[n]) for n in range(self._entries, upto)
    ]
    self._new = len(entries)
    self._entries = max(self._entries, upto)
    num_logprobs = self._call.logprobs
    if self._call.chat:
      content = [
        self._token(token.token, token.logprob)
        | {"top_logprobs": [self._token(*pair) for pair in _likely(token.top)]}
        for token, _ in entries
      ]
      return {"content": content, "refusal": None}
    return {
      "tokens": [self._name(token.token) for token, _ in entries],
      "token_logprobs": [max(token.logprob, _NEVER) for token, _ in entries],
      "top_logprobs": [
        {self._name(i): x for i, x in _likely(token.top)}
        for token, _ in entries
      ]
      if num_logprobs
      else None,
      "text_offset": [len(self._echo.text) + at for _, at in entries],
    }

  def _prompt_logprobs(self, scores: TokenScores) -> dict[str, list[Any]]:
    """Log-probabilities of the prompt; its first token has none."""
    tokens = np.asarray(self._echo.prompt).tolist()
    decoder, offsets, chars = Stream(self._tokenizer), [], 0
    for token in tokens:
      offsets.append(chars)
      chars += len(decoder.feed(token))
    tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
    likely = [
      {
        self._name(int(i)): max(float(x), _NEVER)
        for i, x in zip(ids, values, strict=True)
      }
      for ids, values in tops
    ]
    logprobs = [max(float(x), _NEVER) for x in scores.logprobs]
    return {
      "tokens": [self._name(token) for token in tokens],
      "token_logprobs": [None, *logprobs],
      "top_logprobs": [None, *likely],
      "text_offset": offsets,
    }

  def _bytes(self, token: int) -> bytes:
    if self._tokenizer.by_bytes:
      return self._tokenizer.piece(token)
    return self._tokenizer.window([token]).encode("utf-8")

  def _name(self, token: int) -> str:
    """Text of a token, or its bytes if they are not valid UTF-8."""
    data = self._bytes(token)
    try:
      return data.decode("utf-8")
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

  def _token(self, token: int, logprob: float) -> dict[str, Any]:
    data = self._bytes(token)
    return {
      "token": self._name(token),
      "logprob": max(logprob, _NEVER),
      "bytes": list(data),
    }


def _likely(
  top: Sequence[tuple[int, float]],
) -> list[tuple[int, float]]:
  """Drop masked tokens, whose log-probability is not finite."""
  return [(i, x) for i, x in top if math.isfinite(x)]
