"""Calls of tools: read from answers of each format, and forced by a grammar."""

from __future__ import annotations

import itertools
import json

import pytest

from ringjax.data.text.chat import ChatTemplate
from ringjax.errors import OptionError
from ringjax.serve.api.tool_calls import (
  FORMATS,
  ToolReader,
  forced_schema,
  format_of,
)

TOOLS = {
  "weather": {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
  },
  "now": {},
}
BAR, LINE = "\uff5c", "\u2581"


def deepseek(words):
  return f"<{BAR}{words.replace(' ', LINE)}{BAR}>"


ARGUMENTS = '{"city": "São Paulo", "days": 2}'
# Texts of the call of `weather`, and of `now` after it, by format.
ANSWERS = {
  "Hermes": (
    "<tool_call>",
    '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
  ),
  "Qwen Coder": (
    "<tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nSão Paulo\n"
    "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
    "</tool_call>",
    "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
  ),
  "GLM": (
    "<tool_call>",
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo"
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>",
    "\n<tool_call>now\n</tool_call>",
  ),
  "Mistral list": (
    "[TOOL_CALLS]",
    '[TOOL_CALLS] [{"name": "weather", "arguments": %s}',
    ', {"name": "now", "arguments": {}}]',
  ),
  "Mistral": (
    "[TOOL_CALLS]",
    "[TOOL_CALLS]weather[ARGS]%s",
    "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}",
  ),
  "DeepSeek V3": (
    deepseek("tool calls begin"),
    deepseek("tool calls begin")
    + deepseek("tool call begin")
    + "function"
    + deepseek("tool sep")
    + "weather\n```json\n%s\n```"
    + deepseek("tool call end"),
    "\n"
    + deepseek("tool call begin")
    + "function"
    + deepseek("tool sep")
    + "now\n```json\n{}\n```"
    + deepseek("tool call end")
    + deepseek("tool calls end"),
  ),
  "DeepSeek V3.1": (
    deepseek("tool calls begin"),
    deepseek("tool calls begin")
    + deepseek("tool call begin")
    + "weather"
    + deepseek("tool sep")
    + "%s"
    + deepseek("tool call end"),
    deepseek("tool call begin")
    + "now"
    + deepseek("tool sep")
    + "{}"
    + deepseek("tool call end"),
  ),
  "Llama 3": (
    "<|python_tag|>",
    '{"name": "weather", "parameters": %s}',
    '; {"name": "now", "parameters": {}}',
  ),
  "Llama 3 with its tag": (
    "<|python_tag|>",
    '<|python_tag|>{"name": "weather", "parameters": %s}',
    '\n{"name": "now", "parameters": {}}',
  ),
  "GPT-OSS": (
    "<|channel|>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.weather <|constrain|>json<|message|>%s<|call|>",
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
    "<|call|>",
  ),
}


def reader(name, **more):
  return ToolReader(
    tools=TOOLS, form=format_of(f"{{{{ tools }}}}{ANSWERS[name][0]}"), **more
  )


def filled(text):
  return text % ARGUMENTS if "%s" in text else text


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_of_each_format_are_read(name):
  _, one, more = ANSWERS[name]
  two = filled(one) + more
  closed = filled(one) + ("]" if name == "Mistral list" else "")
  for text, names in ((closed, ["weather"]), (two, ["weather", "now"])):
    parts = reader(name).read(text, True)
    assert [call.name for call in parts.calls] == names and not parts.content
    assert parts.calls[0].arguments == json.loads(ARGUMENTS)
    assert not reader(name).read(text, False).content
  assert len(reader(name, parallel=False).read(two, True).calls) == 1
  assert parts.reasoning == ("Hm." if name == "GPT-OSS" else "")


@pytest.mark.parametrize(
  "name", [x for x in ANSWERS if x not in ("GPT-OSS", "Llama 3")]
)
def test_text_before_a_call_is_shown_and_no_part_of_a_mark_is(name):
  _, one, _ = ANSWERS[name]
  text = "Let me see. \n" + filled(one)
  text += "]" if name == "Mistral list" else ""
  shown = [reader(name).read(text[:n], False).content for n in range(len(text))]
  assert all("Let me see.".startswith(part) for part in shown)
  assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
  parts = reader(name).read(text, True)
  assert parts.content == "Let me see." and len(parts.calls) == 1


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_no_call_of_a_known_tool_stays_text(name):
  _, one, _ = ANSWERS[name]
  unknown = filled(one).replace("weather", "other")
  broken = filled(one).replace("{", "(").replace("weather", "weath(er")
  for text in (unknown, broken):
    parts = reader(name).read(text, True)
    assert not parts.calls and "Paulo" in parts.content
  plain = "Sunny, 3 < 4 and [so on"
  assert reader(name).read(plain, True).content == plain


@pytest.mark.parametrize("name", ANSWERS)
def test_a_call_that_is_cut_off_is_no_call(name):
  _, one, _ = ANSWERS[name]
  text = filled(one)
  for size in range(len(text) - len("<|call|>") - 8, 0, -5):
    assert not reader(name).read(text[:size], True).calls


@pytest.mark.parametrize(
  "text",
  [
    "<tool_call>\n<function=weather>\n<parameter=city>\nrm </parameter> x\n"
    "</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\nand"
    "<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>weather",
    "<tool_call>now</tool_call> and so on",
  ],
)
def test_tags_with_anything_else_are_no_call(text):
  assert reader("Qwen Coder").read(text, True) == (text, (), "")


def test_analyses_that_mention_a_mark_are_reasoning():
  harmony = (
    "<|channel|>analysis<|message|>About to=functions.now hm<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello."
  )
  assert reader("GPT-OSS").read(harmony, True) == (
    "Hello.", (), "About to=functions.now hm"
  )  # fmt: skip


@pytest.mark.parametrize(
  "text",
  [
    "<tool_call>x" + " " * 10**5 + "y",
    "<tool_call><function=now>" + "\n" * 10**5,
    "<tool_call>" + "<parameter=a>" * 10**4,
    "<|channel|>" + "x" * 10**5,
  ],
)
def test_long_answers_without_an_end_are_read_in_linear_time(text):
  """Quadratic searches would take minutes here."""
  for name in ("Hermes", "GPT-OSS"):
    assert not reader(name).read(text, True).calls


def test_references_of_a_schema_stay_its_own():
  tools = {
    "place": {
      "type": "object",
      "properties": {"at": {"$ref": "#/$defs/Point"}, "in": {"$ref": "#"}},
      "$defs": {"Point": {"type": "integer"}},
    }
  }
  schema = forced_schema(tools)
  moved = schema["$defs"]["tool0"]
  assert moved["properties"]["at"] == {"$ref": "#/$defs/tool0/$defs/Point"}
  assert moved["properties"]["in"] == {"$ref": "#/$defs/tool0"}
  pytest.importorskip("llguidance").LLMatcher.grammar_from_json_schema(
    json.dumps(schema)
  )


def test_channels_without_calls_are_shown_and_thought():
  text = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hello.<|return|>"
  )
  assert reader("GPT-OSS").read(text, True)[::2] == ("Hello.", "Hm.")


@pytest.mark.parametrize("name", ["weather", "other"])
def test_channels_grow_to_what_they_are_at_the_end(name):
  call = "commentary to=functions." + name + " json<|message|>{}<|call|>"
  texts = {"analysis": "Hm. <|3", "commentary": "I look.", "final": "Hello. "}
  parts = ["analysis", "commentary", call, "analysis", "final", call]
  for kinds in itertools.permutations(parts, 3):
    text = "<|start|>assistant".join(
      f"<|channel|>{x}<|message|>{texts[x]}<|end|>" if x in texts
      else f"<|channel|>{x}"
      for x in kinds
    )  # fmt: skip
    read = reader("GPT-OSS").read
    growing = [read(text[:n], False) for n in range(len(text))]
    for before, after in itertools.pairwise([*growing, read(text, True)]):
      assert after.content.startswith(before.content)
      assert after.reasoning.startswith(before.reasoning)
    if kinds[:2] == ("analysis", "final"):
      assert growing[-1][::2] == ("Hello. ", "Hm. <|3")


def test_arguments_as_text_follow_the_schema():
  text = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\nnull\n</parameter>\n</function>\n</tool_call>"
  )
  (call,) = reader("Qwen Coder").read(text, True).calls
  assert call.arguments == {"city": "12", "days": None}


def test_a_forced_answer_is_one_call():
  at = ToolReader(tools=TOOLS, form=None)
  text = json.dumps({"name": "weather", "arguments": {"city": "Rome"}})
  assert at.read(text[:9], False).content == ""
  assert at.read(text, True).calls[0].arguments == {"city": "Rome"}
  # Cut off by a limit.
  assert at.read(text[:9], True) == (text[:9], (), "")
  assert len(forced_schema(TOOLS)["anyOf"]) == 2


def test_templates_without_a_place_or_a_known_format_are_refused():
  with pytest.raises(OptionError, match="no place"):
    format_of("{{ messages }}<tool_call>")
  with pytest.raises(OptionError, match="Mistral"):
    format_of("{{ tools }}")
  assert {form.name for form in FORMATS} == {
    "GPT-OSS", "DeepSeek", "Mistral", "Hermes, Qwen, GLM", "Llama 3"
  }  # fmt: skip
  assert ChatTemplate("{{ tools }}").source
