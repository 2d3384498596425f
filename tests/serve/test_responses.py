"""OpenAI's Responses API: what is asked is answered as a chat would."""

from __future__ import annotations

import json

import pytest

from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.serve.api.api_parameters import ApiError
from ringjax.serve.api.response_items import messages_of_input
from ringjax.serve.api.responses import ResponseStore
from tests.serve.scripted import ScriptedEngine
from tests.serve.test_http import app, ask, error
from tests.serve.test_http_live import serving

# What is asked for and rendered, so that a test reads it in the prompt.
TEMPLATE = (
  "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
  "({{ m.reasoning_content }}){% endif %}{{ m.content }}"
  "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
  "{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
  "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
  "{{ reasoning_effort }}<assistant>{# <think> #}"
)
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOL = {
  "type": "function",
  "name": "f",
  "parameters": {"type": "object"},
  "strict": None,
}
ANSWER = f"<think>\nHm 1.\n</think>\n\nSo: {CALL}"


def served(*answers, **options):
  engine = ScriptedEngine(*answers)
  return app(engine, chat_template=TEMPLATE, **options)


def respond(at, given="Hi", **body):
  headers = body.pop("headers", {})
  return ask(at, "/v1/responses", {"input": given} | body, headers=headers)


def prompt(at):
  """Text of the last prompt that the engine got."""
  return Bytes().decode(at.engine.requests[-1].prompt)


def events(answer):
  assert answer.status == 200, answer.data
  parsed = []
  for event in answer.data.decode().removesuffix("\n\n").split("\n\n"):
    name, data = event.split("\n")
    parsed.append(json.loads(data.removeprefix("data: ")))
    assert name == f"event: {parsed[-1]['type']}"
  assert [e["sequence_number"] for e in parsed] == list(range(len(parsed)))
  return parsed


def without_ids(body):
  """A body with the ids that differ from call to call left out."""
  drop = ("id", "item_id", "call_id", "created_at", "cached_tokens")
  if isinstance(body, dict):
    return {k: without_ids(x) for k, x in body.items() if k not in drop}
  return [without_ids(x) for x in body] if isinstance(body, list) else body


def test_a_response_has_reasoning_a_message_and_calls():
  at = served(ANSWER)
  body = respond(at, tools=[TOOL], instructions="Be brief.").json
  assert prompt(at) == "<system>Be brief.<user>Hi<tool_call>f<assistant>"
  assert body["status"] == "completed" and body["incomplete_details"] is None
  thought, message, call = body["output"]
  assert thought["type"] == "reasoning" and thought["summary"] == []
  assert thought["content"] == [{"type": "reasoning_text", "text": "Hm 1."}]
  assert message["content"][0]["text"] == "So:"
  assert (call["name"], json.loads(call["arguments"])) == ("f", {"x": 1})
  used = body["usage"]
  thoughts = len("<think>\nHm 1.\n</think>\n\n")
  assert used["output_tokens_details"] == {"reasoning_tokens": thoughts}
  assert used["output_tokens"] == len(ANSWER) + 1
  assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
  assert body["tools"] == [TOOL] and body["instructions"] == "Be brief."


@pytest.mark.parametrize("size", [None, 9, 12, 30])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_stream_ends_with_the_response(size, tools):
  at = served(ANSWER)
  body = dict(tools=tools, store=False)
  body |= {} if size is None else {"max_output_tokens": size}
  whole = respond(at, **body).json
  assert whole["status"] == ("completed" if size is None else "incomplete")
  if size is not None:
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "function_call" not in {x["type"] for x in whole["output"]}
  options = {"include_obfuscation": False}
  parsed = events(respond(at, **body, stream=True, stream_options=options))
  kinds = [event["type"] for event in parsed]
  assert kinds[:2] == ["response.created", "response.in_progress"]
  assert kinds[-1] == f"response.{whole['status']}"
  assert without_ids(parsed[-1]["response"]) == without_ids(whole)
  assert {event["response"]["id"] for event in parsed if "response" in event}
  # Deltas of an item make what it is at its end.
  items = {}
  for event in parsed:
    if event["type"].endswith(".delta"):
      n = event["output_index"]
      items[n] = items.get(n, "") + event["delta"]
  for n, item in enumerate(parsed[-1]["response"]["output"]):
    parts = item.get("content") or [{"text": item.get("arguments", "")}]
    assert items.get(n, "") == parts[0]["text"]
    added, *_, done = [e for e in parsed if e.get("output_index") == n]
    assert added["type"] == "response.output_item.added"
    assert done["type"] == "response.output_item.done" and done["item"] == item
    assert added["item"]["id"] == item["id"]


def test_an_empty_answer_is_a_message():
  at = served("")
  for stream in (False, True):
    answer = respond(at, stream=stream)
    body = events(answer)[-1]["response"] if stream else answer.json
    (item,) = body["output"]
    assert item["content"][0]["text"] == ""


def test_a_response_follows_another():
  at = served(ANSWER, "<think>b</think>Two", "Three")
  first = respond(at, tools=[TOOL], instructions="Be brief.").json
  call_id = first["output"][-1]["call_id"]
  output = {"type": "function_call_output", "call_id": call_id, "output": "7"}
  second = respond(
    at, [output], tools=[TOOL], previous_response_id=first["id"], stream=True
  )
  # Instructions are those of each response.
  assert prompt(at) == (
    '<user>Hi<assistant>(Hm 1.)So:[f{"x": 1}]<tool>7<tool_call>f<assistant>'
  )
  followed = events(second)[-1]["response"]
  assert followed["previous_response_id"] == first["id"]
  respond(at, "And?", previous_response_id=followed["id"])
  whole = prompt(at)
  assert whole.endswith("<tool>7<assistant>(b)Two<user>And?<assistant>")
  # The same conversation as items, which a client has kept.
  items = [
    {"role": "user", "content": "Hi"},
    *first["output"],
    output,
    *followed["output"],
    {"type": "message", "role": "user",
     "content": [{"type": "input_text", "text": "And?"}]},
  ]  # fmt: skip
  respond(at, items)
  assert prompt(at) == whole
  got = ask(at, f"/v1/responses/{first['id']}")
  assert got.json == first
  deleted = ask(at, f"/v1/responses/{first['id']}", method="DELETE")
  assert deleted.json["deleted"] is True
  body = error(ask(at, f"/v1/responses/{first['id']}"), 404, "stored")
  assert body["code"] == "response_not_found"


def test_responses_are_forgotten_in_turn_and_kept_apart():
  keys = {"a": "red", "b": "blue"}
  at = served("x" * 50, keys=keys, response_bytes=3000)
  red = {"authorization": "Bearer a"}
  blue = {"authorization": "Bearer b"}
  ids = [respond(at, headers=red).json["id"] for _ in range(9)]
  follow = lambda id_, who: respond(at, previous_response_id=id_, headers=who)
  assert follow(ids[-1], red).status == 200
  for answer in (follow(ids[0], red), follow(ids[-1], blue)):
    body = error(answer, 400, "previous_response_id", "whole conversation")
    assert body["param"] == "previous_response_id"
  unstored = respond(at, store=False, headers=red).json["id"]
  error(follow(unstored, red), 400, "stored")


def test_a_store_holds_the_newest_bytes():
  store, body = ResponseStore(400), lambda n: {"id": f"r{n}"}
  for n in range(50):
    store.add("", body(n), [{"role": "user", "content": "a" * n}])
    assert store._nbytes <= 400
    # Used, so not the first to go.
    assert store.get("", f"r{n}").body == body(n)
  store.add("", body(99), [{"role": "user", "content": "a" * 500}])
  with pytest.raises(ApiError):
    store.get("", "r99")
  assert store._nbytes == 0


def test_grammars_and_choices_are_those_of_chats(talking):
  pytest.importorskip("llguidance")
  at = app(talking, chat_template=TEMPLATE.replace("{# <think> #}", ""))
  schema = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
  }
  form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
  body = dict(temperature=0, max_output_tokens=60, seed=1)
  bias = {"logit_bias": {str(ord(c)): -100 for c in " \n\t\r"}}
  answer = respond(at, text={"format": form}, **body, **bias).json
  text = answer["output"][0]["content"][0]["text"]
  assert answer["status"] == "completed" and 0 <= json.loads(text)["a"] <= 9
  assert answer["text"] == {"format": form}
  tool = TOOL | {"parameters": schema}
  for choice in ("required", {"type": "function", "name": "f"}):
    answer = respond(at, tools=[tool], tool_choice=choice, **body).json
    (call,) = answer["output"]
    assert call["type"] == "function_call" and "a" in call["arguments"]
  included = dict(include=["message.output_text.logprobs"], top_logprobs=2)
  (item,) = respond(at, **body | {"max_output_tokens": 5}, **included).json[
    "output"
  ]
  entries = item["content"][0]["logprobs"]
  assert len(entries) == 5 and len(entries[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
  ("body", "words"),
  [
    ({"input": None}, ["input", "no input"]),
    ({"input": []}, ["input", "empty list"]),
    ({"input": [{"type": "item_reference", "id": "x"}]}, ["item_reference"]),
    ({"input": [{"role": "tool", "content": "x"}]}, ["input[0].role"]),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     ["input[0].content[0]", "input_image"]),
    ({"input": [{"role": "user", "content": "a", "b": 1}]}, ["input[0].b"]),
    ({"input": [{"role": "user", "content": [
      {"type": "input_text", "text": "a", "b": 1}]}]},
     ["input[0].content[0].b"]),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f",
      "arguments": "{"}]}, ["input[0]", "JSON object"]),
    ({"tools": [{"type": "web_search"}]}, ["tools[0]", "web_search"]),
    ({"tools": {}}, ["tools"]),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, ["tool_choice"]),
    ({"reasoning": {"summary": "detailed"}}, ["reasoning.summary"]),
    ({"reasoning": {"effort": "huge"}}, ["reasoning_effort"]),
    ({"text": {"verbosity": "high"}}, ["text.verbosity"]),
    ({"text": {"format": {"type": "xml"}}}, ["text.format"]),
    ({"background": True}, ["background"]),
    ({"truncation": "auto"}, ["truncation"]),
    ({"conversation": "c"}, ["conversation", "supported"]),
    ({"include": ["file_search_call.results"]}, ["include"]),
    ({"top_logprobs": 2}, ["top_logprobs", "include"]),
    ({"stream_options": {"include_obfuscation": False}},
     ["stream_options", "stream: true"]),
    ({"stream": True, "stream_options": {"include_usage": True}},
     ["stream_options", "include_usage"]),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     ["include_obfuscation", "not padded"]),
    ({"include": ["message.output_text.logprobs"], "stream": True},
     ["include", "stream"]),
    ({"max_output_tokens": 10**6}, ["input", "together"]),
    ({"max_output_tokens": 0}, ["max_output_tokens"]),
    ({"previous_response_id": "resp_x"}, ["previous_response_id", "stored"]),
  ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_name(body, words):
  at = served("x")
  error(ask(at, "/v1/responses", {"input": "Hi"} | body), 400, *words)


def test_items_between_others_are_one_message():
  call = lambda n: {
    "type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"
  }  # fmt: skip
  messages = messages_of_input(
    [
      {"role": "user", "content": "a"},
      {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
      call(1),
      call(2),
      {"type": "function_call_output", "call_id": "c2", "output": "7"},
      {"role": "assistant", "content": "b"},
      {"role": "assistant", "content": "c"},
    ]
  )
  assert [m["role"] for m in messages] == [
    "user", "assistant", "tool", "assistant", "assistant"
  ]  # fmt: skip
  assert messages[1]["reasoning_content"] == "t"
  assert [c["id"] for c in messages[1]["tool_calls"]] == ["c1", "c2"]
  assert messages[2]["name"] == "f"


def test_null_members_of_items_that_clients_send_back():
  call = {
    "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"
  }  # fmt: skip
  items = [{"role": "user", "content": "a"}, call]
  # Of objects of newer clients.
  nulls = {"namespace": None, "caller": None, "status": None}
  assert messages_of_input([x | nulls for x in items]) == messages_of_input(
    items
  )
  with pytest.raises(OptionError, match="namespace"):
    messages_of_input([call | {"namespace": "n"}])
  part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
  part["parsed"] = None
  said = {"type": "message", "role": "assistant", "content": [part]}
  assert messages_of_input([said])[0]["content"] == "b"


def test_openai_s_client_responds():
  openai = pytest.importorskip("openai")
  engine = ScriptedEngine(ANSWER)
  with (
    serving(engine, chat_template=TEMPLATE) as (port, _),
    openai.OpenAI(
      base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client,
  ):
    tools = [TOOL | {"strict": False}]
    ask_for = dict(model="ringjax", input="Hi", tools=tools)
    response = client.responses.create(**ask_for)
    assert response.output_text == "So:"
    assert response.output[0].content[0].text == "Hm 1."
    assert response.output[2].name == "f" and response.usage.total_tokens > 0
    streamed = list(client.responses.create(**ask_for, stream=True))
    assert streamed[-1].response.output_text == "So:"
    deltas = [x for x in streamed if x.type == "response.output_text.delta"]
    assert "".join(x.delta for x in deltas) == "So:"
    # Its own accumulation of events.
    with client.responses.stream(
      **ask_for, previous_response_id=response.id
    ) as stream:
      for _ in stream:
        pass
      final = stream.get_final_response()
    assert final.output_text == "So:" and final.output[2].name == "f"
    assert client.responses.retrieve(response.id).output_text == "So:"
    client.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError, match="stored"):
      client.responses.create(**ask_for, previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError):
      client.responses.retrieve(response.id)
