"""Reasoning in answers: read from each format, wherever a text is cut."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.serve import Request, RowSampling
from ringjax.serve.api.grammar import GrammarCompiler
from ringjax.serve.api.reasoning import (
  FORMATS,
  ReasoningReader,
  reasoning_format,
)
from tests.serve.scripted import ScriptedEngine
from tests.serve.test_http import app, chat, choices, error
from tests.serve.test_http_live import serving

# Of each format: text in a template, end of a prompt that opens the reasoning
# (None: no template does), and an answer whose parts are "Hm, 1 < 2" and "Yes
# <b>!".
CASES = {
  "think": (
    "</think>",
    "<think>\n",
    "<think>\nHm, 1 < 2\n</think>\n\nYes <b>!",
  ),
  "mistral": ("[THINK]", None, "[THINK]Hm, 1 < 2[/THINK]Yes <b>!"),
  "seed_oss": (
    "<seed:think>",
    "<seed:think>",
    "<seed:think>Hm, 1 < 2</seed:think>Yes <b>!",
  ),
  "granite": (
    "'Here is my thought process:'",
    None,
    "Here is my thought process: Hm, 1 < 2\n\nHere is my response:\nYes <b>!",
  ),
  "gpt_oss": (
    "<|channel|>",
    None,
    "<|channel|>analysis<|message|>Hm, 1 < 2<|end|><|start|>assistant"
    "<|channel|>final<|message|>Yes <b>!",
  ),
}
THOUGHT, SAID = "Hm, 1 < 2", "Yes <b>!"


def form(name):
  return reasoning_format(name, "")


def answers():
  """Reader, text and whether it begins without a mark, of each case."""
  for name, (_, prompt, text) in CASES.items():
    yield name, ReasoningReader.of_prompt(form(name), "<|assistant|>\n"), text
    if prompt is not None:
      reader = ReasoningReader.of_prompt(form(name), "<|assistant|>\n" + prompt)
      yield name, reader, text.removeprefix(prompt)
      # A model may repeat the mark.
      yield name, reader, text


def test_each_format_has_a_case_and_a_sign():
  assert {x.name for x in FORMATS} == set(CASES)
  for name, (sign, *_) in CASES.items():
    assert reasoning_format("auto", f"{{{{ x }}}}{sign}") is form(name)
  assert reasoning_format("qwen3", "") is form("think")
  assert reasoning_format("auto", "{{ messages }}") is None
  assert reasoning_format("none", "<think>") is None
  with pytest.raises(OptionError, match="seed_oss"):
    reasoning_format("thoughts", "")


@pytest.mark.parametrize(("name", "reader", "text"), [*answers()])
def test_a_text_that_is_cut_anywhere(name, reader, text):
  whole = reader.read(text, True)
  assert whole[:2] == (THOUGHT, SAID) and text[whole.end :] == SAID
  growing = [reader.read(text[:n], False) for n in range(len(text))]
  for before, after in itertools.pairwise([*growing, whole]):
    assert after.reasoning.startswith(before.reasoning)
    assert after.content.startswith(before.content)
  for size in range(len(text)):
    cut = reader.read(text[:size], True)
    # Within the reasoning there is no content, and the other way around.
    assert (
      not cut.content
      or SAID.startswith(cut.content)
      or (text[:size] == cut.content and not cut.reasoning)
    )
    if cut.content and cut.reasoning:
      assert cut.reasoning == THOUGHT
  assert reader.read(text + " \n", True).content == SAID + " \n"


@pytest.mark.parametrize("name", CASES)
def test_texts_without_reasoning_are_content(name):
  reader = ReasoningReader.of_prompt(form(name), "<|assistant|>")
  for text in ("Yes", "\n <b>", "", "1 </think> [/THINK] 2"):
    assert reader.read(text, True)[:2] == ("", text)
  closed = "".join(form(name).begin + form(name).end)
  reader = ReasoningReader.of_prompt(form(name), f"<|assistant|>{closed}\n\n")
  assert reader.grammar("{}", {}) == "{}"
  assert reader.read("Yes", True)[:2] == ("", "Yes")


def test_other_words_of_granite():
  reader = ReasoningReader.of_prompt(form("granite"), "")
  text = "Here's my thought process: a\nHere's my response: b"
  assert reader.read(text, True)[:2] == ("a", "b")


TEMPLATE = (
  "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
  "{% if tools %}<tool_call>{% endif %}<|assistant|>"
  "{% if enable_thinking is defined and not enable_thinking %}"
  "<think>\n\n</think>\n\n{% elif opened %}<think>{% endif %}"
)
OPENED = {"chat_template_kwargs": {"opened": True}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def served(*texts, template=TEMPLATE, **options):
  return app(ScriptedEngine(*texts), chat_template=template, **options)


@pytest.mark.parametrize("opened", [False, True])
def test_chats_answer_with_reasoning(opened):
  text = CASES["think"][2].removeprefix("<think>" if opened else "")
  at, more = served(text), OPENED if opened else {}
  answer = chat(at, **more, logprobs=True)
  (choice,) = choices(answer)
  assert choice["message"] == {
    "role": "assistant",
    "content": SAID,
    "refusal": None,
    "reasoning_content": THOUGHT,
    "reasoning": THOUGHT,
  }
  assert len(choice["logprobs"]["content"]) == len(text)
  thought = answer.json["usage"]["completion_tokens_details"]
  assert thought == {"reasoning_tokens": len(text) - len(SAID)}
  # Cut in the thoughts, and in the mark after them.
  for size in (12, text.index("</think>") + 3):
    (choice,) = choices(chat(at, **more, max_tokens=size))
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert choice["message"]["reasoning"] in text[:size]
  (choice,) = choices(chat(at, **more, stop=["1"]))
  assert choice["message"]["reasoning"] == "Hm,"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_after_thoughts_that_mention_them(stream):
  text = f"<think>Use <tool_call>?</think>\n\nSo: {CALL}"
  answer = chat(served(text), tools=TOOLS, stream=stream)
  if stream:
    deltas = [e["choices"][0]["delta"] for e in answer.events]
    joined = lambda name: "".join(x.get(name) or "" for x in deltas)
    content, thought = joined("content"), joined("reasoning_content")
    (call,) = [x for delta in deltas for x in delta.get("tool_calls", [])]
  else:
    (choice,) = choices(answer)
    message = choice["message"]
    content, thought = message["content"], message["reasoning_content"]
    (call,) = message["tool_calls"]
  assert (content, thought) == ("So:", "Use <tool_call>?")
  assert json.loads(call["function"]["arguments"]) == {"x": 1}


def test_channels_beside_tools_are_streamed_and_counted():
  text = CASES["gpt_oss"][2]
  at = served(text, template="{{ tools }}<|channel|>{{ messages }}")
  answer = chat(at, tools=TOOLS)
  message = choices(answer)[0]["message"]
  assert (message["reasoning"], message["content"]) == (THOUGHT, SAID)
  details = answer.json["usage"]["completion_tokens_details"]
  assert details == {"reasoning_tokens": len(text) - len(SAID)}
  events = chat(at, tools=TOOLS, stream=True).events
  deltas = [event["choices"][0]["delta"] for event in events]
  for name, whole in (("reasoning", THOUGHT), ("content", SAID)):
    parts = [delta[name] for delta in deltas if delta.get(name)]
    assert "".join(parts) == whole and len(parts) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_that_stay_in_the_text_have_no_calls(stream):
  thought = f"<think>Use {CALL}?</think>\n\n"
  at = served(f"{thought}So: {CALL}", thought, reasoning_parser="none")
  for calls in (1, 0):
    answer = chat(at, tools=TOOLS, stream=stream)
    parts = (
      [e["choices"][0]["delta"] for e in answer.events]
      if stream
      else [choices(answer)[0]["message"]]
    )
    content = "".join(part.get("content") or "" for part in parts)
    assert content == thought + "So:" * calls
    assert not any("reasoning" in part for part in parts)
    assert sum(len(part.get("tool_calls", ())) for part in parts) == calls


@pytest.mark.parametrize("stream", [False, True])
def test_channels_that_stay_in_the_text_have_no_calls(stream):
  template = "{{ tools }}<|channel|>{{ messages }}"
  plain = CASES["gpt_oss"][2]
  thought = "<|channel|>analysis<|message|>Use f?<|end|>"
  call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>"
  call += 'json<|message|>{"x": 1}<|call|>'
  texts = plain, thought + call, thought, plain + "<|end|>" + call
  at = served(*texts, template=template, reasoning_parser="none")
  wanted = (plain, 0), (thought, 1), (thought, 0), (plain + "<|end|>", 1)
  for content, calls in wanted:
    answer = chat(at, tools=TOOLS, stream=stream)
    parts = (
      [e["choices"][0]["delta"] for e in answer.events]
      if stream
      else [choices(answer)[0]["message"]]
    )
    assert "".join(part.get("content") or "" for part in parts) == content
    assert not any("reasoning" in part for part in parts)
    assert sum(len(part.get("tool_calls", ())) for part in parts) == calls
    if not stream:
      assert "completion_tokens_details" not in answer.json["usage"]
    elif len(content) > len(thought):
      assert sum(bool(part.get("content")) for part in parts) > 1


def test_parsers_by_name():
  text = CASES["seed_oss"][2]
  plain = TEMPLATE.replace("think>", "x>")
  (choice,) = choices(chat(served(text, template=plain)))
  assert choice["message"]["content"] == text
  named = served(text, template=plain, reasoning_parser="seed_oss")
  assert choices(chat(named))[0]["message"]["reasoning"] == THOUGHT
  left = served(CASES["think"][2], reasoning_parser="none")
  assert "</think>" in choices(chat(left))[0]["message"]["content"]
  with pytest.raises(OptionError, match="reasoning_parser"):
    served("", reasoning_parser="qwen")


def test_histories_with_reasoning():
  at = served("ok", template=TEMPLATE + "{{ messages[1].reasoning_content }}")
  said = {"role": "assistant", "content": "a", "reasoning": "because"}
  body = {"messages": [{"role": "user", "content": "Hi"}, said]}
  chat(at, **body)
  prompt = Bytes().decode(at.engine.requests[-1].prompt)
  assert prompt.endswith("because")
  # GPT-OSS's template has another name, and one text before calls.
  at = served(
    "ok",
    template="{{ tool_calls }}<|channel|>{{ messages[1].thinking }}"
    "|{{ messages[1].content }}",
  )
  chat(at, **body)
  prompt = Bytes().decode(at.engine.requests[-1].prompt)
  assert prompt == "<|channel|>because|a"
  function = {"name": "f", "arguments": "{}"}
  calls = [{"id": "1", "type": "function", "function": function}]
  chat(at, messages=[body["messages"][0], said | {"tool_calls": calls}])
  prompt = Bytes().decode(at.engine.requests[-1].prompt)
  assert prompt == "<|channel|>because\na|"
  said["reasoning"] = 3
  error(chat(at, **body), 400, "messages[1].reasoning")


def test_openai_s_client_streams_reasoning():
  openai = pytest.importorskip("openai")
  text = CASES["think"][2]
  with (
    serving(ScriptedEngine(text), chat_template=TEMPLATE) as (port, _),
    openai.OpenAI(
      base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client,
  ):
    messages = [{"role": "user", "content": "Hi"}]
    said = client.chat.completions.create(model="ringjax", messages=messages)
    assert said.choices[0].message.reasoning_content == THOUGHT
    stream = client.chat.completions.create(
      model="ringjax", messages=messages, n=2, stream=True
    )
    thoughts, contents = ["", ""], ["", ""]
    for event in stream:
      for choice in event.choices:
        delta = choice.delta
        # Content begins after the reasoning.
        assert not (contents[choice.index] and hasattr(delta, "reasoning"))
        thoughts[choice.index] += getattr(delta, "reasoning_content", "")
        contents[choice.index] += delta.content or ""
    assert thoughts == [THOUGHT] * 2 and contents == [SAID] * 2


# ---------------------------------------------------------------------------
# Grammars
# ---------------------------------------------------------------------------


def grammar_mask(reader, specials=None):
  pytest.importorskip("llguidance")
  within = lambda grammar: reader.grammar(grammar, specials or {})
  return GrammarCompiler(Bytes(), 262).mask(None, "[ab]{3}", 1, within)


def allowed(mask, text):
  ids = np.flatnonzero(mask(np.frombuffer(text.encode(), np.uint8)))
  return {chr(i) if i < 256 else i for i in ids.tolist()}


@pytest.mark.parametrize(("name", "reader", "text"), [*answers()])
def test_a_grammar_holds_after_the_reasoning(name, reader, text):
  mask, start = grammar_mask(reader), text.removesuffix(SAID)
  first = allowed(mask, "")
  if reader.read("x", False).content:
    # The content may come at once, where channels have no mark of their own.
    begins = {form(name).begin[0][0]}
    assert first == begins | (set() if name == "gpt_oss" else {"a", "b"})
  else:
    assert len(first) > 150
  thought = text[: text.index(THOUGHT) + 5]
  assert len(allowed(mask, thought)) > 150
  # It can't end within the reasoning.
  assert 257 not in allowed(mask, thought)
  assert {"a", "b"} <= allowed(mask, start) <= {*"ab \t\r\n"}
  assert allowed(mask, start + "aba") == {257}


def test_marks_that_are_special_tokens_hold_too():
  specials = {"[THINK]": 258, "[/THINK]": 259}
  for prompt, first in (("x", {"a", "b", 258}), ("[THINK]", None)):
    reader = ReasoningReader.of_prompt(form("mistral"), prompt)
    mask = grammar_mask(reader, specials)
    ids = [] if first is None else [258]
    if first is not None:
      assert allowed(mask, "") == first
    tokens = lambda *more, ids=ids: np.array([*ids, *more], np.int32)
    inside = np.flatnonzero(mask(tokens(60, 47)))
    assert 259 in inside and 257 not in inside and inside.size > 150
    content = np.flatnonzero(mask(tokens(60, 259)))
    assert set(content) == {ord(x) for x in "ab \t\r\n"}


def test_an_engine_holds_the_answer_to_the_grammar(talking):
  reader = ReasoningReader.of_prompt(form("think"), "<think>")
  mask, script = grammar_mask(reader), b"\xc3\xa4 or {</think>"

  def scripted(tokens):
    only = np.zeros(talking.vocab, bool)
    if len(tokens) < len(script):
      only[script[len(tokens)]] = True
      assert mask(tokens)[only].all()
      return only
    return mask(tokens)

  request = Request(
    prompt=[1, 2],
    max_new_tokens=60,
    sampling=RowSampling(temperature=1.0, seed=2, logit_bias={10: -9.0}),
    stop=[257],
    mask=scripted,
  )
  (answer,) = talking.submit(request).result().answers
  thought, content, _ = reader.read(answer.text, True)
  assert thought == "ä or {" and answer.finish == "stop"
  assert len(content) == 3 and set(content) <= {"a", "b"}
