"""OpenAI's API over an engine: what is asked is answered or refused."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.serve import Engine, Handle, Request, RowSampling, TokenLogprobs
from ringjax.serve.api import http
from ringjax.serve.api.api_parameters import COMPLETION, parse_json
from ringjax.serve.api.fair_threads import FairThreads
from ringjax.serve.api.grammar import GrammarMask
from ringjax.serve.tenants import TenantShares
from tests.helpers import refused

TEXT = "def f(x):\n  return x + "


@pytest.fixture(scope="module")
def engine(talking):
  return talking


def app(engine, **options):
  return rj.serve.app(engine, trusted_template=True, **options)


def strict(text):
  """As a parser reads it that knows JSON alone."""

  def constant(name):
    raise AssertionError(f"{name} in {text}")

  return json.loads(text, parse_constant=constant)


class Wire:
  """A client's side of one request to an ASGI application."""

  def __init__(self, app, path, body=None, *, method=None, headers=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    found = {"content-type": "application/json", **dict(headers)}
    self.scope = {
      "type": "http",
      "method": method,
      "path": path,
      "headers": [(k.encode(), v.encode()) for k, v in found.items()],
    }
    self.app, self.status, self.data = app, None, b""
    self.headers, self.ended = {}, False
    # A client that does not read lets nobody send.
    self.reads = asyncio.Event()
    self.reads.set()
    self.got = asyncio.Event()
    self._inbox = asyncio.Queue()
    self._inbox.put_nowait({"type": "http.request", "body": data})

  def leave(self):
    self._inbox.put_nowait({"type": "http.disconnect"})

  async def run(self):
    await self.app(self.scope, self._inbox.get, self._send)
    return self

  async def _send(self, event):
    await self.reads.wait()
    if event["type"] == "http.response.start":
      self.status = event["status"]
      self.headers = {k.decode(): v.decode() for k, v in event["headers"]}
    else:
      self.data += event.get("body", b"")
      self.ended = not event.get("more_body", False)
    self.got.set()

  @property
  def json(self):
    return strict(self.data)

  @property
  def events(self):
    """Of a stream that was completed."""
    *events, last, rest = self.data.decode().split("\n\n")
    assert last == "data: [DONE]" and rest == "" and self.ended
    return [strict(event.removeprefix("data: ")) for event in events]


def ask(app, path, body=None, **options):
  """An answer to one request."""

  async def main():
    return await Wire(app, path, body, **options).run()

  return asyncio.run(main())


def complete(app, **body):
  return ask(app, "/v1/completions", {"prompt": TEXT, "seed": 1} | body)


def chat(app, **body):
  messages = [{"role": "user", "content": "Hi"}]
  return ask(
    app, "/v1/chat/completions", {"messages": messages, "seed": 1} | body
  )


def choices(answer):
  assert answer.status == 200, answer.data
  return answer.json["choices"]


def error(answer, status, *words):
  """An error object: a status, what it is about, and words of its text."""
  assert answer.status == status, answer.data
  found = answer.json["error"]
  assert set(found) == {"message", "type", "param", "code"}
  # What a client reads speaks of what it has sent.
  for word in ("rj.", "Greedy", "Python", "--", "=", "True", "False", "None"):
    assert word not in found["message"].replace("rows=", ""), found["message"]
  for word in words:
    assert word in found["message"], found["message"]
  return found


def free(engine):
  """Waits until nothing is under way; pages that are idle."""
  for _ in range(2000):
    if not engine.busy:
      engine.scheduler.tree.check()
      tree = engine.scheduler.tree
      return tree.available() == tree.groups[0].pages
    with engine._work:
      engine._work.wait(0.01)
  return False


def joined(events, chat=False):
  """Texts and reasons of a stream's choices."""
  texts, reasons = {}, {}
  for event in events:
    for one in event["choices"]:
      n = one["index"]
      part = one["delta"].get("content", "") if chat else one["text"]
      texts[n] = texts.get(n, "") + part
      if one["finish_reason"]:
        assert n not in reasons
        reasons[n] = one["finish_reason"]
  return texts, reasons


# ---------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_streams_are_what_comes_at_once(engine, n):
  at = app(engine)
  body = dict(max_tokens=24, temperature=1.0, n=n, logprobs=2)
  whole = complete(at, **body)
  options = {"include_usage": True}
  streamed = complete(at, **body, stream=True, stream_options=options)
  assert streamed.headers["content-type"].startswith("text/event-stream")
  *events, last = streamed.events
  texts, reasons = joined(events)
  found = choices(whole)
  assert [texts[i] for i in range(n)] == [c["text"] for c in found]
  assert [reasons[i] for i in range(n)] == [c["finish_reason"] for c in found]
  assert last["choices"] == []
  # The second time the prompt was found.
  read, made = 1 + len(TEXT), last["usage"]["completion_tokens"]
  assert last["usage"] == {
    "prompt_tokens": read,
    "completion_tokens": made,
    "total_tokens": read + made,
    "prompt_tokens_details": {"cached_tokens": n * (read - 1) // 16 * 16}
    if n == 1
    else last["usage"]["prompt_tokens_details"],
  }
  assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
  for index, one in enumerate(found):
    parts = [
      c["logprobs"] for e in events for c in e["choices"] if c["index"] == index
    ]
    for name, values in one["logprobs"].items():
      assert [x for part in parts for x in part[name]] == values, name


def test_text_is_that_of_the_tokens(engine):
  at, tokenizer = app(engine), engine.tokenizer
  body = dict(max_tokens=40, temperature=1.5, seed=3)
  (found,) = choices(complete(at, **body))
  prompt = tokenizer.encode(TEXT, bos=True)
  how = RowSampling(temperature=1.5, seed=3)
  request = Request(
    prompt=prompt, max_new_tokens=40, sampling=how, stop=tokenizer.eos_ids
  )
  tokens = engine.submit(request).result().tokens
  want = tokenizer.decode(tokens)
  # Some of its bytes are no characters.
  assert found["text"] == want and "\ufffd" in want
  events = complete(at, **body, stream=True).events
  assert joined(events)[0][0] == want and len(events) > 2
  assert choices(complete(at, **body | {"seed": 4}))[0]["text"] != want
  ids = choices(complete(at, **body, prompt=prompt.tolist()))
  assert ids[0]["text"] == want


def test_several_prompts(engine):
  at = app(engine)
  many = choices(
    complete(at, prompt=["a", "bc"], n=2, max_tokens=4, temperature=0)
  )
  assert [c["index"] for c in many] == [0, 1, 2, 3]
  for first, prompt in ((0, "a"), (2, "bc")):
    (one,) = choices(complete(at, prompt=prompt, max_tokens=4, temperature=0))
    assert many[first]["text"] == many[first + 1]["text"] == one["text"]
  ids = complete(at, prompt=[[256, 97], [256, 98, 99]], max_tokens=4, echo=True)
  assert [c["text"][:n] for n, c in zip((1, 2), choices(ids), strict=True)] == [
    "a",
    "bc",
  ]
  best = complete(at, best_of=3, n=2, max_tokens=5)
  assert len(choices(best)) == 2
  assert best.json["usage"]["completion_tokens"] > 10


def test_beams(engine):
  at, body = app(engine), dict(beams=3, n=2, max_tokens=8, logprobs=1)
  found = choices(complete(at, **body, length_penalty=0.5))
  request = Request(
    prompt=engine.tokenizer.encode(TEXT, bos=True),
    max_new_tokens=8,
    beams=3,
    n=2,
    length_penalty=0.5,
    stop=engine.tokenizer.eos_ids,
  )
  want = engine.submit(request).result().answers
  assert [x["text"] for x in found] == [x.text for x in want]
  for x, y in zip(found, want, strict=True):
    assert sum(x["logprobs"]["token_logprobs"]) == pytest.approx(
      y.total_logprob, abs=1e-6
    )
  (one,) = choices(chat(at, beams=2, max_tokens=4))
  assert one["finish_reason"] == "length"


def test_logprobs_and_offsets(engine):
  at = app(engine)
  (one,) = choices(complete(at, max_tokens=12, temperature=0, logprobs=3))
  found = one["logprobs"]
  assert len(found["tokens"]) == len(found["text_offset"]) == 12
  for lp, top in zip(
    found["token_logprobs"], found["top_logprobs"], strict=True
  ):
    assert len(top) == 3 and max(top.values()) == lp
  (one,) = choices(chat(at, max_tokens=5, logprobs=True, top_logprobs=2))
  content = one["logprobs"]["content"]
  assert len(content) == 5
  for token in content:
    assert len(token["top_logprobs"]) == 2 and len(token["bytes"]) >= 1
  # 0 others: the token's own alone.
  (one,) = choices(chat(at, max_tokens=2, logprobs=True))
  assert [x["top_logprobs"] for x in one["logprobs"]["content"]] == [[], []]


def test_stops(engine):
  at = app(engine)
  only = {str(ord(c)): 100 for c in "ab"}
  body = dict(max_tokens=40, temperature=1.0, logit_bias=only, seed=5)
  (plain,) = choices(complete(at, **body))
  assert set(plain["text"]) == {"a", "b"} and plain["finish_reason"] == "length"
  stop = plain["text"][10:14]
  want = plain["text"][: plain["text"].find(stop)]
  (cut,) = choices(complete(at, **body, stop=[stop], logprobs=0))
  assert cut["text"] == want and cut["finish_reason"] == "stop"
  assert len(cut["logprobs"]["tokens"]) == len(want)
  events = complete(at, **body, stop=stop, stream=True).events
  assert joined(events) == ({0: want}, {0: "stop"})
  # The model's own end.
  body["logit_bias"] = {"257": 100}
  answer = complete(at, **body, logprobs=0)
  (end,) = choices(answer)
  assert (end["text"], end["finish_reason"]) == ("", "stop")
  assert end["logprobs"]["tokens"] == []
  assert answer.json["usage"]["completion_tokens"] == 1
  assert choices(complete(at, **body, ignore_eos=True))[0]["finish_reason"] == (
    "length"
  )


def test_texts_and_ids_of_special_tokens_stop(engine):
  at = app(engine)
  # 260 is <|user|>, 259 <|system|>; neither is shown unless asked for.
  body = dict(max_tokens=6, temperature=0, logit_bias={"260": 100}, logprobs=0)
  hidden = {"skip_special_tokens": False}
  for more, text, count, reason in (
    ({"stop": ["<|user|>"]}, "", 1, "<|user|>"),
    ({"stop_token_ids": [260]}, "", 1, 260),
    ({"stop": ["|><|user|><|us"]}, "", 3, "|><|user|><|us"),
    ({"stop": ["<|system|>"]}, "", 6, None),
    ({"stop": ["<|user|>"], **hidden}, "", 1, "<|user|>"),
    ({"stop": ["r|><|"], **hidden}, "<|use", 2, "r|><|"),
    (hidden, "<|user|>" * 6, 6, None),
    (
      {"stop_token_ids": [260], "include_stop_str_in_output": True, **hidden},
      "<|user|>",
      1,
      260,
    ),
    (
      {"stop": ["r|><"], "include_stop_str_in_output": True, **hidden},
      "<|user|><",
      2,
      "r|><",
    ),
  ):
    answer = complete(at, **body, **more)
    (one,) = choices(answer)
    assert one["text"] == text and one["stop_reason"] == reason
    assert one["finish_reason"] == ("length" if reason is None else "stop")
    assert answer.json["usage"]["completion_tokens"] == count
    if text:
      assert set(one["logprobs"]["tokens"]) == {"<|user|>"}
    events = complete(at, **body, **more, stream=True).events
    assert joined(events)[0][0] == text
    assert events[-1]["choices"][0]["stop_reason"] == reason
    # A search forks what it has seen of a text.
    beams = body | {"beams": 2, "max_tokens": 4}
    (one,) = choices(complete(at, **beams, **more))
    assert one["stop_reason"] == reason
  # The model's own end is nobody's wish, and is left out unless it is one.
  body["logit_bias"] = {"257": 100}
  (one,) = choices(complete(at, **body))
  assert (one["finish_reason"], one["stop_reason"]) == ("stop", None)
  (one,) = choices(complete(at, **body, stop_token_ids=[257], ignore_eos=True))
  assert (one["finish_reason"], one["stop_reason"]) == ("stop", 257)


def test_temperatures_that_are_next_to_nothing(engine):
  at = app(engine)
  greedy = choices(complete(at, max_tokens=20, temperature=0))
  for temperature in (1e-4, 1e-12, 1e-30, 1e-44, 1e-300):
    body = dict(max_tokens=20, temperature=temperature)
    assert choices(complete(at, **body)) == greedy
    assert choices(complete(at, **body, top_p=0.5, min_p=0.1)) == greedy
  # Between two that are as likely, chance decides.
  both = {"97": 100, "98": 100}
  body = dict(max_tokens=40, logit_bias=both, temperature=1e-4)
  prompt = engine.tokenizer.encode(TEXT, bos=True)
  near = RowSampling(
    temperature=1e-4, logit_bias={97: 100.0, 98: 100.0}, seed=1
  )
  request = Request(prompt=prompt, max_new_tokens=40, sampling=near)
  tokens = engine.submit(request).result().tokens
  assert set(tokens.tolist()) <= {97, 98}
  (one,) = choices(complete(at, **body))
  assert one["text"] == engine.tokenizer.decode(tokens)


@pytest.mark.parametrize("chat", [False, True])
def test_bodies_with_tokens_that_may_not_come(engine, chat):
  model = app(engine)._model
  body = {"max_tokens": 4, "logprobs": 2} | {"prompt": TEXT}
  make = model.completion
  if chat:
    said = [{"role": "user", "content": "Hi"}]
    body = {"messages": said, "logprobs": True, "top_logprobs": 2}
    make = model.chat
  call = make(body, "")
  handle = Handle(engine, call.requests[0], 0.0)
  never = float("-inf")
  handle.answers[0].tokens, handle.answers[0].text = [97, 98], "ab"
  handle.answers[0].logprobs = [
    TokenLogprobs(token=97, logprob=-1.0, top=((97, -1.0), (98, never))),
    TokenLogprobs(token=98, logprob=never, top=((97, never), (98, never))),
  ]
  handle.answers[0].finish = "length"
  found = strict(json_text(model.complete_body(call, [handle])))
  logprobs = found["choices"][0]["logprobs"]
  if chat:
    own = [x["logprob"] for x in logprobs["content"]]
    tops = [len(x["top_logprobs"]) for x in logprobs["content"]]
  else:
    own = logprobs["token_logprobs"]
    tops = [len(x) for x in logprobs["top_logprobs"]]
  assert own == [-1.0, -9999.0] and tops == [1, 0]


@pytest.mark.long
def test_json_says_nothing_of_tokens_that_may_not_come(engine):
  pytest.importorskip("llguidance")
  at = app(engine)
  body = dict(guided_regex="[ab]{3}", max_tokens=4, logprobs=20)
  for more in ({"temperature": 1.0}, {"beams": 2}):
    # `json` knows no infinities.
    (one,) = choices(complete(at, **body, **more))
    assert len(one["text"]) == 3
  tops = one["logprobs"]["top_logprobs"]
  assert [set(top) <= {"a", "b"} for top in tops[:3]] == [True] * 3
  talk = body | {"logprobs": True, "top_logprobs": 20, "beams": 2}
  (one,) = choices(chat(at, **talk))
  assert len(one["logprobs"]["content"][0]["top_logprobs"]) == 2


NEUTRAL = {
  "tools": [],
  "tool_choice": "none",
  "functions": [],
  "function_call": "none",
  "parallel_tool_calls": True,
  "user": "me",
  "safety_identifier": "me",
  "prompt_cache_key": "k",
  "store": False,
  "metadata": {"a": "b"},
  "service_tier": "auto",
  "reasoning_effort": "low",
  "logit_bias": {},
  "frequency_penalty": 0,
  "presence_penalty": 0.0,
  "n": 1,
  "stop": [],
  "stop_token_ids": [],
  "top_logprobs": 0,
  "logprobs": False,
  "response_format": {"type": "text"},
  "stream_options": {"include_usage": False},
  "modalities": ["text"],
  "verbosity": "medium",
  "top_k": -1,
  "min_p": 0.0,
  "top_p": 1,
  "repetition_penalty": 1.0,
  "ignore_eos": False,
  "skip_special_tokens": True,
  "include_stop_str_in_output": False,
  "min_tokens": 0,
  "use_beam_search": False,
  "chat_template_kwargs": {},
}


def test_what_asks_for_nothing_changes_nothing(engine):
  at, plain = app(engine), dict(max_tokens=4, temperature=1.0)
  (want,) = choices(chat(at, **plain))
  (found,) = choices(chat(at, **plain, **NEUTRAL))
  assert found == want
  # null is as if it was left out, whatever it is.
  nulls = dict.fromkeys([*NEUTRAL, "audio", "suffix", "best_of"])
  assert choices(chat(at, **plain, **nulls)) == [want]
  only = {"best_of": 1, "echo": False, "suffix": "", "logprobs": False}
  apart = set(NEUTRAL) & set(COMPLETION)
  both = {k: v for k, v in NEUTRAL.items() if k in apart} | only
  assert choices(complete(at, **plain, **both)) == choices(
    complete(at, **plain)
  )
  assert complete(at, **plain, best_of=1, stream=True).events


@pytest.mark.parametrize(
  "body",
  [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"functions": [{"name": "f"}]},
    {"store": True},
    {"service_tier": "priority"},
    {"modalities": ["text", "audio"]},
    {"verbosity": "high"},
    {"min_tokens": 3},
    {"use_beam_search": True},
    {"continue_final_message": True},
  ],
)
def test_what_is_not_supported_is_refused_by_name(engine, body):
  found = error(chat(app(engine), **body, max_tokens=2), 400, "supported")
  assert found["param"] == next(iter(body))
  assert found["code"] == "unsupported_parameter"


TOOLS = (
  "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
  "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
  "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
  "{{ c.function.arguments | tojson }}]{% endfor %}{{ eos_token }}{% endfor %}"
  "{% if enable_thinking is defined and not enable_thinking %}NO{% endif %}"
  "{{ reasoning_effort }}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


CALLING = TOOLS.replace(
  "{{ reasoning_effort }}",
  "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}",
)
SUM = {
  "type": "function",
  "function": {
    "name": "sum",
    "parameters": {
      "type": "object",
      "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
      "required": ["a"],
      "additionalProperties": False,
    },
    "strict": True,
  },
}
NAMED = {"type": "function", "function": {"name": "sum"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required_is_forced_by_a_grammar(engine, choice):
  at = app(engine, chat_template=CALLING)
  other = {"type": "function", "function": {"name": "other"}}
  body = dict(tools=[SUM, other][: 1 + (choice == NAMED)], tool_choice=choice)
  (one,) = choices(chat(at, **body, max_tokens=64, temperature=0))
  assert one["finish_reason"] == "tool_calls"
  (call,) = one["message"]["tool_calls"]
  assert one["message"]["content"] is None and len(call["id"]) == 9
  assert call["function"]["name"] == "sum"
  assert json.loads(call["function"]["arguments"])["a"] <= 9
  events = chat(at, **body, max_tokens=64, temperature=0, stream=True).events
  deltas = [event["choices"][0]["delta"] for event in events]
  assert not any(delta.get("content") for delta in deltas)
  (streamed,) = [x for delta in deltas for x in delta.get("tool_calls", [])]
  assert streamed["index"] == 0
  assert streamed["function"] == call["function"]
  # An answer that is cut off is no call.
  (one,) = choices(chat(at, **body, max_tokens=3, temperature=0))
  assert one["finish_reason"] == "length" and "tool_calls" not in one["message"]


def test_a_call_in_an_answer_is_read(engine):
  at = app(engine, chat_template=CALLING)
  written = r'ab <tool_call>\n\{"name": "sum", "arguments": \{"a": [34]\}\}\n'
  regex = written + "</tool_call>"
  body = dict(tools=[SUM], guided_regex=regex, max_tokens=80, temperature=0)
  (one,) = choices(chat(at, **body))
  assert one["finish_reason"] == "tool_calls"
  assert one["message"]["content"] == "ab"
  (call,) = one["message"]["tool_calls"]
  assert json.loads(call["function"]["arguments"])["a"] in (3, 4)
  events = chat(at, **body, stream=True).events
  deltas = [event["choices"][0]["delta"] for event in events]
  assert "".join(x.get("content") or "" for x in deltas) == "ab"
  assert deltas[-1]["tool_calls"][0]["function"] == call["function"]
  # The tools are in the prompt, and without a choice they are not.
  told = chat(at, tools=[SUM], max_tokens=1).json["usage"]["prompt_tokens"]
  untold = chat(at, tools=[SUM], tool_choice="none", max_tokens=1)
  assert told > untold.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
  ("body", "words"),
  [
    ({"tools": [{"type": "function"}]}, ["tools[0].function"]),
    ({"tools": [SUM, SUM]}, ["two of one name"]),
    ({"tools": [SUM], "tool_choice": "sum"}, ["tool_choice"]),
    ({"tools": [SUM], "tool_choice": NAMED | {"type": "custom"}}, ["custom"]),
    ({"tools": [SUM], "tool_choice": NAMED | {"mode": "auto"}}, ["mode"]),
    ({"tools": [{"type": "function", "function": {"name": "f",
      "strict": "yes"}}]}, ["strict", "true or false"]),
    ({"tools": [SUM], "tool_choice": "required", "guided_regex": "a"},
     ["guided_regex", "one of them"]),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
     ["letters"]),
    ({"tools": [{"type": "function", "function": {"name": "f",
      "parameters": []}}]}, ["JSON schema"]),
  ],
)  # fmt: skip
def test_tools_that_are_wrong_are_refused(engine, body, words):
  error(chat(app(engine, chat_template=CALLING), **body), 400, *words)


def test_calls_of_tools_in_a_history(engine):
  at = app(engine, chat_template=TOOLS)
  call = {"id": "c1", "type": "function"}
  # As openai's client returns a message that it has parsed.
  call["function"] = {"name": "f", "arguments": '{"x": [1, null]}',
                      "parsed_arguments": {"x": [1, None]}}  # fmt: skip
  messages = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [call],
     "refusal": None, "parsed": None, "reasoning_content": "hm"},
    {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
  ]  # fmt: skip
  more = {"chat_template_kwargs": {"enable_thinking": False}}
  body = {"messages": messages, **more}
  ids = ask(at, "/tokenize", body).json["tokens"]
  text = ask(at, "/detokenize", {"tokens": ids}).json["prompt"]
  assert text == (
    "<|begin|><|user|>Hi<|end|>"
    '<|assistant|>(hm)[f{"x": [1, null]}]<|end|>'
    "<|tool|>7<|end|>NO<|assistant|>"
  )
  (one,) = choices(chat(at, **body, temperature=0, max_tokens=5))
  again = complete(at, prompt=ids, temperature=0, max_tokens=5)
  assert one["message"]["content"] == choices(again)[0]["text"]
  said = chat(at, reasoning_effort="low", temperature=0, max_tokens=5)
  assert said.json["usage"]["prompt_tokens"] == 1 + len("_Hi__") + len("low")
  # Tools that may not be called are not told of.
  tools = [{"type": "function", "function": {"name": "f"}}]
  assert choices(chat(at, tools=tools, tool_choice="none", max_tokens=2))
  for wrong, word in (
    ({"function": {"name": "f", "arguments": "{"}}, "JSON object"),
    ({"function": {"name": 3, "arguments": "{}"}}, "string"),
    ({"type": "other", "function": {"name": "f"}}, "function"),
  ):
    messages[1]["tool_calls"] = [wrong]
    found = error(chat(at, messages=messages), 400, "tool_calls[0]", word)
    assert found["param"] == "messages"
  # A template that would leave them out.
  messages[1]["tool_calls"] = [call]
  error(chat(app(engine), messages=messages), 400, "chat template", "no place")
  taken = {"chat_template_kwargs": {"messages": []}}
  error(chat(at, **taken), 400, "the server sets")


def test_adapters_by_name(engine):
  at = app(engine, model_name="base")
  ids = [one["id"] for one in ask(at, "/v1/models").json["data"]]
  assert ids == ["base", "tuned"]
  found = ask(at, "/v1/models/tuned").json
  assert (found["id"], found["parent"]) == ("tuned", "base")
  assert ask(at, "/v1/models/base").json["max_model_len"] == engine.longest
  error(ask(at, "/v1/models/other"), 404, "tuned")
  body = dict(max_tokens=12, temperature=0)
  base = complete(at, **body, model="base")
  tuned = complete(at, **body, model="tuned")
  assert (base.json["model"], tuned.json["model"]) == ("base", "tuned")
  assert choices(base) != choices(tuned)
  prompt = engine.tokenizer.encode(TEXT, bos=True)
  request = Request(
    prompt=prompt, max_new_tokens=12, adapter="tuned", stop=[257]
  )
  want = engine.submit(request).result().answers[0].text
  assert choices(tuned)[0]["text"] == want
  assert chat(at, **body, model="tuned", stream=True).events[0]["model"] == (
    "tuned"
  )
  refused(OptionError, lambda: app(engine, model_name="tuned"), "model_name")


def test_tokenize_and_version(engine):
  at = app(engine)
  found = ask(at, "/tokenize", {"prompt": "a\u00e9", "return_token_strs": True})
  assert found.json == {
    "count": 4,
    "max_model_len": engine.longest,
    "tokens": [256, 97, 0xC3, 0xA9],
    "token_strs": ["<|begin|>", "a", "\ufffd", "\ufffd"],
  }
  bare = {"prompt": "<|user|>", "add_special_tokens": False}
  assert ask(at, "/tokenize", bare).json["tokens"] == list(b"<|user|>")
  talk = {"messages": [{"role": "user", "content": "Hi"}]}
  assert ask(at, "/tokenize", talk).json["count"] == 6
  shut = talk | {"add_generation_prompt": False}
  assert ask(at, "/tokenize", shut).json["count"] == 5
  # Also what is longer than a context: it is only counted.
  assert ask(at, "/tokenize", {"prompt": "a" * 500}).json["count"] == 501
  assert ask(at, "/detokenize", {"tokens": []}).json == {"prompt": ""}
  for path, body in (
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "a", **talk}),
    ("/detokenize", {"tokens": [999]}),
    ("/detokenize", {"tokens": "a"}),
    ("/detokenize", {}),
  ):
    error(ask(at, path, body), 400)
  error(ask(at, "/tokenize", {"prompt": "a", "model": "x"}), 404)
  assert ask(at, "/version").json["version"]


def test_chats(engine):
  at = app(engine)
  answer = chat(at, max_completion_tokens=9, temperature=0)
  (one,) = choices(answer)
  assert answer.json["object"] == "chat.completion"
  assert one["message"]["role"] == "assistant"
  tokens = rj.data.ChatTemplate.of(engine.tokenizer, trusted=True).tokens(
    [{"role": "user", "content": "Hi"}], engine.tokenizer
  )
  want = rj.infer.generate(engine.model, [tokens], max_new_tokens=9)
  assert one["message"]["content"] == engine.tokenizer.decode(want[0])
  events = chat(at, max_tokens=9, temperature=0, stream=True).events
  assert events[0]["choices"][0]["delta"]["role"] == "assistant"
  assert joined(events, True)[0][0] == one["message"]["content"]
  # A member that is null is one that is left out.
  parts = [
    {"type": "text", "text": "H", "cache_control": None},
    {"type": "text", "text": "i"},
  ]
  messages = [{"role": "user", "content": parts, "name": None}]
  again = chat(at, max_tokens=9, temperature=0, messages=messages)
  assert choices(again)[0]["message"] == one["message"]
  # As long as there is room.
  long = chat(at, ignore_eos=True)
  assert long.json["usage"]["total_tokens"] == engine.longest


def test_models_health_and_metrics(engine):
  at = app(engine, model_name="mine")
  assert ask(at, "/health").json == {"status": "ok"}
  one, _ = ask(at, "/v1/models").json["data"]
  assert (one["id"], one["object"]) == ("mine", "model")
  assert choices(complete(at, model="mine", max_tokens=3))
  answer = ask(at, "/metrics")
  assert answer.headers["content-type"].startswith("text/plain")
  lines = answer.data.decode().splitlines()
  values = dict(x.rsplit(" ", 1) for x in lines if not x.startswith("#"))
  assert int(values["ringjax_new_tokens_total"]) == engine.counters.new_tokens
  assert values["ringjax_first_token_seconds_count"] == "1"
  assert values["ringjax_token_seconds_count"] == "2"
  path = 'path="/v1/completions",status="200"'
  assert values[f"ringjax_http_answers_total{{{path}}}"] == "1"
  pages = [int(values[f"ringjax_pages{x}"]) for x in ("_free", "_cached", "")]
  assert pages[0] + pages[1] + int(values["ringjax_pages_used"]) == pages[2]
  client = pytest.importorskip("prometheus_client.parser")
  found = list(client.text_string_to_metric_families(answer.data.decode()))
  assert len(found) > 15


# ---------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("body", "param", "words"),
  [
    ({"prompt": None}, "prompt", ["prompt"]),
    ({"prompt": []}, "prompt", ["list"]),
    ({"prompt": ""}, None, None),
    ({"prompt": [1, "a"]}, "prompt", ["token ids"]),
    ({"prompt": [1, 999]}, "prompt", ["0 to 261"]),
    ({"prompt": [True]}, "prompt", []),
    ({"prompt": "\ud800"}, "prompt", []),
    ({"prompt": ["a"] * 300}, "prompt", ["128"]),
    ({"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
    ({"max_tokens": 2.5}, "max_tokens", ["2.5"]),
    ({"max_tokens": 10**30}, "prompt", ["160"]),
    ({"temperature": -1}, "temperature", []),
    ({"temperature": "hot"}, "temperature", ["'hot'"]),
    ({"temperature": 1e9}, "temperature", []),
    ({"top_p": 0}, "top_p", []),
    ({"n": 0}, "n", []),
    ({"n": 1000}, "n", ["128"]),
    ({"n": 3, "best_of": 2}, "best_of", []),
    ({"best_of": 2, "stream": True}, "best_of", ["stream"]),
    ({"beams": 2, "stream": True}, "beams", ["stream"]),
    ({"beams": 2, "n": 3}, "beams", ["3"]),
    ({"beams": 5}, "beams", ["at most 4"]),
    ({"beams": 2, "temperature": 1.0}, "temperature", ["beams"]),
    ({"length_penalty": 2.0}, "length_penalty", ["beams"]),
    ({"stream": 1}, "stream", []),
    ({"stream_options": {"include_usage": True}}, "stream_options", []),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", ["x"]),
    ({"logprobs": 21}, "logprobs", ["20"]),
    ({"logprobs": True}, "logprobs", []),
    ({"stop": ""}, "stop", []),
    ({"stop": [1]}, "stop", []),
    ({"stop": ["a"] * 200}, "stop", ["128"]),
    ({"presence_penalty": 3}, "presence_penalty", ["-2 to 2"]),
    ({"logit_bias": {"a": 1}}, "logit_bias", ["'a'"]),
    ({"logit_bias": {"300": 1}}, None, ["261"]),
    ({"logit_bias": {str(i): 1 for i in range(99)}}, "logit_bias", ["64"]),
    ({"logit_bias": {"1": 1e400}}, "body", ["Infinity"]),
    ({"seed": -1}, "seed", []),
    ({"user": 3}, "user", []),
    ({"suffix": "x"}, "suffix", ["supported", "leave it out"]),
    ({"wat": {}}, "wat", ["supported"]),
    ({"model": "other"}, "model", ["'ringjax'"]),
    ({"response_format": {"type": "xml"}}, "response_format", ["json_schema"]),
    ({"response_format": "json"}, "response_format", []),
    ({"max_tokens": 159}, "prompt", ["160 together"]),
  ],
)
def test_parameters_are_refused(engine, body, param, words):
  answer = complete(app(engine), **{"max_tokens": 2} | body)
  if words is None:
    # This tokenizer has a token before each text.
    assert answer.status == 200
    return
  found = error(answer, 404 if param == "model" else 400, *words)
  if param is not None:
    assert found["param"] == param
  assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
  ("body", "param"),
  [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "pirate", "content": "Hi"}]}, "messages"),
    (
      {"messages": [{"role": "user", "content": "Hi", "name": "a"}]},
      "messages",
    ),
    (
      {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
      "messages",
    ),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"prompt": "a"}, "prompt"),
  ],
)
def test_chats_are_refused(engine, body, param):
  assert error(chat(app(engine), **body), 400)["param"] == param


@pytest.mark.parametrize("digits", [309, 4300])
def test_integers_that_no_float_holds(engine, digits):
  at, huge = app(engine), "9" * digits
  for name in (
    "temperature", "top_p", "n", "max_tokens", "seed", "presence_penalty",
    "top_k", "min_p", "repetition_penalty", "beams", "length_penalty",
    "best_of", "logprobs", "stop_token_ids", "prompt", "logit_bias", "user",
    "stream", "stop",
  ):  # fmt: skip
    shown = {
      "stop_token_ids": f"[{huge}]",
      "prompt": f"[1, {huge}]",
      "logit_bias": f'{{"1": {huge}}}',
    }.get(name, huge)
    first = "" if name == "prompt" else '"prompt": "a", '
    data = f'{{{first}"{name}": {shown}}}'.encode()
    error(ask(at, "/v1/completions", data), 400)
  for name, shown in (
    ("max_completion_tokens", huge),
    ("top_logprobs", huge),
    ("chat_template_kwargs", f'{{"x": {huge}}}'),
  ):
    body = '"logprobs": true, "messages": [{"role": "user", "content": "a"}]'
    data = f'{{{body}, "{name}": {shown}}}'.encode()
    error(ask(at, "/v1/chat/completions", data), 400)
  error(ask(at, "/detokenize", f'{{"tokens": [{huge}]}}'.encode()), 400)


def test_what_no_context_holds_is_not_encoded(engine, monkeypatch):
  def never(*_, **__):
    raise AssertionError("it is encoded")

  monkeypatch.setattr(engine.tokenizer, "encode", never)
  monkeypatch.setattr(engine.tokenizer, "encode_parts", never)
  at = app(engine)
  for prompt in ("a" * 200, ["a", "a" * 200], [1] * 200, [[1], [1] * 200]):
    if isinstance(prompt, list) and prompt[0] == "a":
      prompt = prompt[1:]
    found = error(complete(at, prompt=prompt), 400, "160 tokens")
    assert found["code"] == "context_length_exceeded"
  long = [{"role": "user", "content": "a" * 200}]
  found = error(chat(at, messages=long), 400, "160 tokens")
  assert found["code"] == "context_length_exceeded"


def test_the_limit_of_an_engine_that_a_request_exceeds_is_named(
  engine, monkeypatch
):
  def limited(*_, **__):
    raise rj.PromptError("prompt", "2 tokens", "1 of a row at most", "ask less")

  monkeypatch.setattr(engine, "submit", limited)
  refusal = complete(app(engine), prompt=[1, 2], max_tokens=5)
  found = error(refusal, 400, "2 tokens and 5 new ones; wanted 1 of a row")
  assert found["code"] == "context_length_exceeded"


def test_bodies_are_read_beside_the_loop(engine, monkeypatch):
  seen = []

  def watched(data):
    seen.append((threading.current_thread().name, len(data)))
    return parse_json(data)

  monkeypatch.setattr(http, "parse_json", watched)
  at = app(engine)
  assert complete(at, max_tokens=1).status == 200
  error(complete(at, prompt="a" * 100_000), 400)
  names = [name.rpartition("_")[0] for name, _ in seen]
  assert names == ["ringjax short bodies", "ringjax long bodies"]


def test_requests_are_refused(engine):
  at = app(engine, body_bytes=1000)
  path = "/v1/completions"
  error(ask(at, "/v1/nothing"), 404, "/v1/models")
  answer = ask(at, path, method="GET")
  error(answer, 405, "POST")
  assert answer.headers["allow"] == "POST"
  kind = {"content-type": "text/plain"}
  error(ask(at, path, {}, headers=kind), 415, "application/json")
  error(complete(at, prompt="a" * 1000), 413, "1,000")
  length = {"content-length": "1" * 30}
  error(ask(at, path, {}, headers=length), 413)
  for data in (b"", b"{", b"[]", b'{"n":NaN}', b"\xff", b'{"n":1,"n":2}'):
    error(ask(at, path, data), 400, "JSON")
  deep = app(engine)
  error(ask(deep, path, b"[" * 100_000), 400, "JSON")
  error(ask(deep, path, b'{"n":' + b"9" * 9999 + b"}"), 400)


def test_what_an_application_is_made_of(engine, tmp_path):
  bare = Engine(engine.model, rows=1, capacity=32, longest=32, page=16)
  refused(OptionError, lambda: app(bare), "tokenizer")
  refused(OptionError, lambda: app(engine, queue=0), "queue")
  refused(OptionError, lambda: app(engine, stall=0.0), "stall")
  path = tmp_path / "keys"
  path.write_text("# who\nsecret-a red\n\nsecret-b blue # both\n")
  keys = {"secret-a": "red", "secret-b": "blue"}
  assert rj.serve.read_keys(path) == keys
  for text in ("secret", "k a\nk b", "", "k a b"):
    path.write_text(text)
    caught = refused(OptionError, lambda: rj.serve.read_keys(path), "api_keys")
    assert "secret" not in str(caught)
  refused(OptionError, lambda: rj.serve.read_keys(tmp_path / "no"), "api_keys")


def malformed(rng):
  """A body that was sound before something was changed in it."""
  body = {
    "prompt": "ab",
    "max_tokens": 1,
    "temperature": 0.5,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"3": 1},
    "stream": False,
  }
  values = [
    None, True, -1, 0, 2**70, 1.5, "", "a", "\x00", [], [[]], {}, {"a": None},
    [1, [2]], [None], "9" * 50, -0.0, 1e308, [{}], {"type": 1}, [[1], ["a"]],
  ]  # fmt: skip
  known = [*body, "logprobs", "echo", "seed", "best_of", "response_format",
           "stream_options", "top_k", "beams", "min_p", "user", "guided_regex",
           "messages", "tools"]  # fmt: skip
  for _ in range(rng.randint(1, 3)):
    body[rng.choice(known)] = rng.choice(values)
  data = bytearray(json.dumps(body).encode())
  for _ in range(rng.choice([0, 0, 1, 3])):
    data[rng.randrange(len(data))] = rng.randrange(256)
  return bytes(data[: rng.choice([None, None, rng.randrange(len(data))])])


async def _survives(at, count, seed):
  rng = random.Random(seed)
  statuses = []
  for _ in range(count):
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    wire = await Wire(at, path, malformed(rng)).run()
    assert wire.status in (200, 400, 404), (wire.status, wire.data)
    assert wire.status == 200 or wire.json["error"]["message"]
    statuses.append(wire.status)
  return statuses


def test_malformed_bodies(engine):
  statuses = asyncio.run(_survives(app(engine), 300, 0))
  assert {200, 400} <= set(statuses) and statuses.count(400) > 200
  assert free(engine)


@pytest.mark.slow
def test_many_malformed_bodies(engine):
  asyncio.run(_survives(app(engine), 10_000, 1))
  assert free(engine)


# ---------------------------------------------------------------------------
# Clients
# ---------------------------------------------------------------------------


def test_tenants(engine):
  at = app(engine, keys={"key-a": "red", "key-b": "blue", "key-c": "red"})
  prompt = "a tenant's own text, which is long enough for two pages of it"

  def cached(key):
    answer = ask(
      at,
      "/v1/completions",
      {"prompt": prompt, "max_tokens": 1},
      headers={"authorization": f"Bearer {key}"},
    )
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

  assert [cached(f"key-{x}") for x in "abac"] == [0, 0, 48, 48]
  for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "x"}):
    for path, body in (("/v1/models", None), ("/v1/completions", {})):
      answer = ask(at, path, body, headers=headers)
      assert error(answer, 401, "key")["code"] == "invalid_api_key"
  assert ask(at, "/health").status == 200


def test_tenants_see_numbers_of_their_own(engine):
  keys = {"key-a": "red", "key-b": 'bl"ue', "key-c": "boss"}
  at = app(engine, keys=keys, admin="boss")
  by = lambda key: {"headers": {"authorization": f"Bearer {key}"}}
  body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0}
  for key, times in (("key-a", 2), ("key-b", 1)):
    for _ in range(times):
      assert ask(at, "/v1/completions", body, **by(key)).status == 200

  def numbers(key):
    lines = ask(at, "/metrics", **by(key)).data.decode().splitlines()
    return dict(x.rsplit(" ", 1) for x in lines if not x.startswith("#"))

  red, blue, boss = map(numbers, ("key-a", "key-b", "key-c"))
  names = ("requests_total", "new_tokens_total", "first_token_seconds_count")
  assert [int(red[f"ringjax_{n}"]) for n in names] == [2, 6, 2]
  assert [int(blue[f"ringjax_{n}"]) for n in names] == [1, 3, 1]
  path = 'ringjax_http_answers_total{path="/v1/completions",status="200"}'
  assert (red[path], blue[path], boss[path]) == ("2", "1", "3")
  # Nothing of the engine, which others load too.
  assert not {"ringjax_pages", "ringjax_rows_running"} & set(red)
  assert int(boss["ringjax_pages"]) > 0
  assert boss['ringjax_tenant_new_tokens_total{tenant="red"}'] == "6"
  assert boss['ringjax_tenant_new_tokens_total{tenant="bl\\"ue"}'] == "3"
  assert not [name for name in red if "tenant" in name]
  refused(OptionError, lambda: app(engine, keys=keys, admin="x"), "admin")
  refused(OptionError, lambda: app(engine, admin="red"), "admin")


def test_a_tenant_leaves_others_their_part(engine):
  at = app(engine, keys={"key-a": "red", "key-b": "blue"}, queue=8)
  by = lambda key: {"headers": {"authorization": f"Bearer {key}"}}

  async def main():
    # Of 12 answers 3 are each one's own, and 6 are for both.
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True, "n": 9}
    wires = [
      Wire(at, "/v1/completions", body | {"stream": True}, **by("key-a"))
      for _ in range(2)
    ]
    runs = [asyncio.ensure_future(wires[0].run())]
    await wires[0].got.wait()
    await wires[1].run()
    assert error(wires[1], 429, "9 answers")["code"] == "queue_full"
    small = {"prompt": TEXT, "max_tokens": 2}
    other = await Wire(at, "/v1/completions", small, **by("key-b")).run()
    assert other.status == 200
    # It has not waited for those that came before.
    assert not wires[0].ended
    wires[0].leave()
    await asyncio.gather(*runs)
    error(
      await Wire(at, "/v1/completions", body | {"n": 10}, **by("key-b")).run(),
      400,
      "at most 9",
    )

  asyncio.run(main())
  assert free(engine)


def test_shares_of_tenants():
  shares = TenantShares(4, lambda: 16)
  assert shares.limit() == 2 + 8
  assert shares.take("a", 10) and not shares.take("a", 1)
  assert shares.take("b", 2) and not shares.take("b", 1)
  shares.give("a", 4)
  assert shares.take("b", 4) and not shares.take("a", 1)
  assert (shares.in_flight("a"), shares.in_flight("b")) == (6, 6)
  # More tenants than places: each may still ask for one answer.
  many = TenantShares(100, lambda: 4)
  assert all(many.take(str(n), 1) for n in range(100))
  alone = TenantShares(0, lambda: 3)
  assert alone.take("", 3) and not alone.take("", 1)


def test_a_full_queue_is_seen_before_a_body(engine):
  at = app(engine, queue=2)

  async def main():
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True, "n": 6}
    first = Wire(at, "/v1/completions", body | {"stream": True})
    run = asyncio.ensure_future(first.run())
    await first.got.wait()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
      late = Wire(at, path, {})
      # Its body never comes.
      await late._inbox.get()
      await late.run()
      assert error(late, 429, "queue")["code"] == "queue_full"
    first.leave()
    await run

  asyncio.run(main())


def test_threads_take_turns_between_clients():
  order = []

  async def main():
    threads = FairThreads(1, "test")
    begin = threading.Event()
    first = asyncio.ensure_future(threads.run("a", begin.wait))
    rest = [
      asyncio.ensure_future(threads.run(client, order.append, (client, n)))
      for client, count in (("a", 4), ("b", 2), ("c", 1))
      for n in range(count)
    ]
    await asyncio.sleep(0)
    # Nobody waits for it any more.
    rest[3].cancel()
    begin.set()
    await asyncio.gather(first, *rest, return_exceptions=True)
    with pytest.raises(ZeroDivisionError):
      await threads.run("a", lambda: 1 // 0)
    threads.close()

  asyncio.run(main())
  assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)]


def test_what_is_given_up_is_told_so(engine):
  at = app(engine)

  async def main():
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True}
    stream = Wire(at, "/v1/completions", body | {"stream": True, "n": 30})
    whole = Wire(at, "/v1/completions", body | {"n": 30})
    mute = Wire(at, "/v1/completions", {})
    await mute._inbox.get()
    wires = [stream, whole, mute]
    asked = engine.counters.requests
    runs = [asyncio.ensure_future(wire.run()) for wire in wires]
    while engine.counters.requests < asked + 2:
      await asyncio.sleep(0.001)
    await stream.got.wait()
    await at.end(0)
    await asyncio.gather(*runs)
    assert stream.events[-1]["error"]["code"] == "cancelled"
    error(whole, 503)
    error(mute, 503)
    late = await Wire(at, "/v1/completions", body).run()
    assert error(late, 503)["code"] == "unavailable"
    # A server that cuts tasks off instead.
    other = app(engine)
    cut = Wire(other, "/v1/completions", body | {"stream": True, "n": 30})
    run = asyncio.ensure_future(cut.run())
    await cut.got.wait()
    run.cancel()
    await run
    assert cut.events[-1]["error"]["code"] == "unavailable"

  asyncio.run(main())
  assert free(engine)


def test_a_client_that_leaves_frees_its_pages(engine):
  at = app(engine)
  before = engine.counters.cancelled

  async def main():
    for stream in (True, False):
      body = {
        "prompt": TEXT, "max_tokens": 130, "stream": stream, "n": 20,
        "ignore_eos": True,
      }  # fmt: skip
      asked = engine.counters.requests
      wire = Wire(at, "/v1/completions", body)
      run = asyncio.ensure_future(wire.run())
      if stream:
        await wire.got.wait()
      while engine.counters.requests == asked:
        await asyncio.sleep(0.001)
      wire.leave()
      await run
      assert not wire.ended

  asyncio.run(main())
  assert free(engine)
  assert engine.counters.cancelled == before + 2
  assert 'status="499"} 2' in at.metrics.text(engine.figures())


def test_a_client_that_does_not_read_is_given_up(engine):
  at = app(engine, stall=0.1)
  before = engine.counters.cancelled

  async def main():
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True}
    slow = Wire(at, "/v1/completions", body | {"stream": True, "n": 20})
    slow.reads.clear()
    good = Wire(at, "/v1/completions", body | {"max_tokens": 20})
    await asyncio.gather(slow.run(), good.run())
    assert slow.data == b"" and good.status == 200
    # One that does not send its body.
    mute = Wire(at, "/v1/completions", {})
    await mute._inbox.get()
    await mute.run()
    error(mute, 408)

  asyncio.run(main())
  assert free(engine)
  assert engine.counters.cancelled == before + 1


def test_a_full_queue(engine):
  at = app(engine, queue=2)

  async def main():
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True, "n": 6}
    first = Wire(at, "/v1/completions", body | {"stream": True})
    run = asyncio.ensure_future(first.run())
    await first.got.wait()
    more = await Wire(at, "/v1/completions", {"prompt": TEXT}).run()
    assert error(more, 429, "queue")["type"] == "rate_limit_error"
    assert more.headers["retry-after"]
    first.leave()
    await run
    after = await Wire(at, "/v1/completions", {"prompt": TEXT}).run()
    assert after.status == 200
    body["n"] = 7
    error(await Wire(at, "/v1/completions", body).run(), 400, "at most 6")

  asyncio.run(main())


def test_many_clients_at_once(engine):
  at = app(engine)
  seeds = range(12)
  body = lambda seed: {
    "prompt": TEXT, "max_tokens": 10, "seed": seed, "stream": seed % 2 == 0,
  }  # fmt: skip

  async def main():
    wires = [Wire(at, "/v1/completions", body(seed)) for seed in seeds]
    return await asyncio.gather(*(wire.run() for wire in wires))

  for seed, wire in zip(seeds, asyncio.run(main()), strict=True):
    alone = choices(complete(at, seed=seed, max_tokens=10))[0]["text"]
    text = joined(wire.events)[0][0] if seed % 2 == 0 else None
    assert (text if text is not None else choices(wire)[0]["text"]) == alone


def test_the_life_of_an_application(engine):
  own = Engine(
    engine.model,
    rows=1,
    capacity=160,
    longest=160,
    page=16,
    piece=16,
    pieces=1,
    tokenizer=Bytes(),
  )
  at = app(own)

  async def main():
    inbox, sent = asyncio.Queue(), []

    async def send(event):
      sent.append(event["type"])

    life = asyncio.ensure_future(at({"type": "lifespan"}, inbox.get, send))
    inbox.put_nowait({"type": "lifespan.startup"})
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True}
    wires = [
      Wire(at, "/v1/completions", body | {"stream": stream})
      for stream in (True, False)
    ]
    runs = [asyncio.ensure_future(wire.run()) for wire in wires]
    await wires[0].got.wait()
    while own.counters.requests < 2:
      await asyncio.sleep(0.001)
    inbox.put_nowait({"type": "lifespan.shutdown"})
    await life
    await asyncio.gather(*runs)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    # Both say that they were given up.
    assert wires[0].events[-1]["error"]["code"] == "cancelled"
    error(wires[1], 503, "given up")

  asyncio.run(main())
  assert ask(at, "/health").status == 503


def test_a_step_that_fails(engine, monkeypatch):
  own = Engine(
    engine.model, rows=1, capacity=64, longest=64, page=16, tokenizer=Bytes()
  )
  at = app(own)

  def broken(*_):
    raise RuntimeError("no device")

  monkeypatch.setattr(own, "_run", broken)
  own.start()
  error(complete(at, max_tokens=2), 500, "no device")
  error(complete(at, max_tokens=2), 503)
  assert ask(at, "/health").status == 503
  own.close()


def test_grammars_need_their_library(engine):
  schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
  named = {"name": "x", "schema": schema}
  for body in (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": named}},
    {"guided_regex": "[ab]{3}"},
  ):
    answer = complete(app(engine), **body, max_tokens=60, temperature=1.0)
    try:
      import llguidance  # noqa: F401
    except ImportError:
      found = error(answer, 400, "structured", "install")
      assert found["param"] in body
      continue
    (one,) = choices(answer)
    if "guided_regex" in body:
      assert len(one["text"]) == 3 and set(one["text"]) <= {"a", "b"}
    elif one["finish_reason"] == "stop":
      assert isinstance(json.loads(one["text"]), dict)
  text = {"response_format": {"type": "text"}}
  assert choices(complete(app(engine), **text, max_tokens=2))
  both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
  error(complete(app(engine), **both), 400, "one of them")
  endless = {"guided_regex": "a", "ignore_eos": True}
  error(complete(app(engine), **endless), 400, "grammar")


def test_threads_are_let_in_between_steps(engine):
  """A thread that steps again and again does not keep others waiting."""
  long = engine.submit(
    Request(prompt=np.arange(9, dtype=np.int32), max_new_tokens=150)
  )
  lengths = []
  for _ in range(5):
    engine.submit(
      Request(prompt=np.arange(5, dtype=np.int32), max_new_tokens=1)
    )
    lengths.append(len(long.answers[0].tokens))
  # Each came in while the long one was under way.
  assert lengths[-1] < 150
  assert len(long.result().tokens) == 150


class Counting:
  """A matcher that allows the token that is as many as it has consumed."""

  def __init__(self, tokens=()):
    self.tokens, self.wrong = list(tokens), False

  def deep_copy(self):
    return Counting(self.tokens)

  def consume_tokens(self, tokens):
    for token in tokens:
      self.wrong |= token not in (len(self.tokens), 20 + len(self.tokens))
      self.tokens.append(token)
    return not self.wrong

  def is_error(self):
    return self.wrong

  def get_error(self):
    return "no such token"

  def compute_bitmask(self):
    bits = np.zeros(64, np.uint8)
    bits[[len(self.tokens), 20 + len(self.tokens)]] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("answers", [1, 3])
def test_a_grammar_s_mask_follows_each_answer(answers):
  mask = GrammarMask(Counting(), 50, answers)
  rng = np.random.default_rng(0)
  rows = [[] for _ in range(3)]
  for _ in range(40):
    row = rows[rng.integers(3)]
    if len(row) == 15:
      row.clear()  # Another answer of the same request.
    allowed = mask(np.array(row, np.int32))
    assert allowed.shape == (50,) and allowed.dtype == bool
    found = np.flatnonzero(allowed).tolist()
    assert found == [len(row), 20 + len(row)]
    row.append(int(rng.choice(found)))
  refused(OptionError, lambda: mask(np.array([7], np.int32)), "no such token")
