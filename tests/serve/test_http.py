"""OpenAI's API over an engine: what is asked is answered or refused."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.serve import Engine, Request, RowSampling
from ringjax.serve.calls import compute
from ringjax.serve.grammar import GrammarMask
from tests.helpers import refused

TEXT = "def f(x):\n  return x + "


@pytest.fixture(scope="module")
def engine():
  """A model of random weights: its bytes are any, often no whole character."""
  model = rj.models.create(
    dict(
      model_type="llama",
      vocab_size=262,
      hidden_size=32,
      intermediate_size=64,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=256,
    ),
    seed=0,
  )
  with Engine(
    model,
    rows=4,
    capacity=512,
    longest=160,
    page=16,
    piece=16,
    pieces=2,
    tokenizer=Bytes(),
  ) as made:
    before = compute._cache_size()
    for _ in range(2):
      made.submit(Request(prompt=[1], max_new_tokens=2, share=False)).result()
    # One for prompts and one for answers, compiled once.
    assert compute._cache_size() == before + 2
    yield made.start()


def app(engine, **options):
  return rj.serve.app(engine, trusted_template=True, **options)


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
    return json.loads(self.data)

  @property
  def events(self):
    """Of a stream that was completed."""
    *events, last, rest = self.data.decode().split("\n\n")
    assert last == "data: [DONE]" and rest == "" and self.ended
    return [json.loads(event.removeprefix("data: ")) for event in events]


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
  parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
  messages = [{"role": "user", "content": parts}]
  again = chat(at, max_tokens=9, temperature=0, messages=messages)
  assert choices(again)[0]["message"] == one["message"]
  # As long as there is room.
  long = chat(at, ignore_eos=True)
  assert long.json["usage"]["total_tokens"] == engine.longest


def test_models_health_and_metrics(engine):
  at = app(engine, model_name="mine")
  assert ask(at, "/health").json == {"status": "ok"}
  (one,) = ask(at, "/v1/models").json["data"]
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
    ({"echo": True, "logprobs": 1}, "echo", ["logprobs"]),
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
