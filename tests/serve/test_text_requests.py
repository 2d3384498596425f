"""Texts that a server reads and does not continue: echoes and embeddings."""

from __future__ import annotations

import base64
import types

import jax
import numpy as np
import pytest

from ringjax.data import Bytes
from ringjax.serve import Request
from tests.serve.scripted import ScriptedEngine
from tests.serve.test_http import app, ask, choices, complete, error
from tests.serve.test_http_live import serving

TEXT = "Zwölf Boxkämpfer"


@pytest.fixture(scope="module")
def engine(talking):
  return talking


@pytest.fixture(scope="module")
def at(engine):
  return app(engine)


def logprobs_of(engine, ids):
  """Log-probabilities [T - 1, V] of the tokens after each of a text."""
  row = np.zeros((1, 64), np.int32)
  row[0, : len(ids)] = ids
  # The engine's model with no adapter.
  logits = engine.base(row)[0, : len(ids) - 1]
  return np.asarray(jax.nn.log_softmax(logits))


def embed(at, given, **body):
  return ask(at, "/v1/embeddings", {"input": given} | body)


def vectors(answer):
  assert answer.status == 200, answer.data
  return np.array([x["embedding"] for x in answer.json["data"]])


# ---------------------------------------------------------------------------
# Echoes with log-probabilities
# ---------------------------------------------------------------------------


def check_echo(engine, choice, ids, new, top):
  """Compares the entries of a prompt, which come before those of the answer."""
  entries, want = choice["logprobs"], logprobs_of(engine, ids)
  assert {len(x) for x in entries.values()} == {len(ids) + new}
  assert entries["token_logprobs"][0] is None
  assert entries["top_logprobs"][0] is None
  at = np.arange(len(ids) - 1)
  values = entries["token_logprobs"][1 : len(ids)]
  np.testing.assert_allclose(values, want[at, ids[1:]], atol=2e-5)
  for n, tops in enumerate(entries["top_logprobs"][1 : len(ids)]):
    # Two bytes that are no characters may not share a name.
    assert len(tops) == top
    np.testing.assert_allclose(
      list(tops.values()), np.sort(want[n])[::-1][:top], atol=2e-5
    )
    is_greedy = np.argmax(want[n]) == ids[n + 1]
    assert (values[n] == max(tops.values())) == is_greedy
  assert entries["text_offset"] == sorted(entries["text_offset"])


@pytest.mark.parametrize("new", [0, 1])
def test_prompts_that_are_echoed_have_log_probabilities(engine, at, new):
  ids = Bytes().encode(TEXT, bos=True).tolist()
  body = dict(echo=True, logprobs=2, max_tokens=new, temperature=0)
  answer = complete(at, prompt=TEXT, **body)
  (choice,) = choices(answer)
  assert choice["text"].startswith(TEXT) and choice["finish_reason"] == "length"
  assert (choice["text"] == TEXT) == (new == 0)
  check_echo(engine, choice, ids, new, 2)
  usage = answer.json["usage"]
  assert usage["prompt_tokens"] == len(ids)
  assert usage["completion_tokens"] == new
  # Ids, several, of unequal lengths, each with its own answers.
  rows = [[5], [7, 9, 200, 31], list(range(40))]
  many = choices(complete(at, prompt=rows, n=2, **body | {"temperature": 1}))
  assert len(many) == 6
  for n, choice in enumerate(many):
    check_echo(engine, choice, rows[n // 2], new, 2)
  events = complete(at, prompt=rows, **body, stream=True).events
  for n, row in enumerate(rows):
    parts = [
      c["logprobs"] for e in events for c in e["choices"] if c["index"] == n
    ]
    joined = {
      name: [x for part in parts for x in part[name]] for name in parts[0]
    }
    check_echo(engine, {"logprobs": joined}, row, new, 2)


def test_the_end_of_an_answer_counts_as_a_token_of_an_echo(engine, at):
  """Evaluations leave the last entry out, whatever token it is of."""
  body = dict(echo=True, logprobs=1, max_tokens=1, logit_bias={"257": 100})
  (choice,) = choices(complete(at, prompt=[5, 6, 7], temperature=0, **body))
  assert choice["finish_reason"] == "stop"
  check_echo(engine, choice, [5, 6, 7], 1, 1)


def test_echoes_of_adapters_and_without_alternatives(engine, at):
  ids = [5, 6, 7, 200]
  body = dict(prompt=ids, echo=True, logprobs=0, max_tokens=0)
  base, tuned = (
    choices(complete(at, **body, model=name))[0]["logprobs"]
    for name in ("ringjax", "tuned")
  )
  assert base["top_logprobs"] is None and len(base["tokens"]) == 4
  assert base["token_logprobs"] != tuned["token_logprobs"]
  (first,) = engine.texts.scores([ids], adapter="tuned")
  assert tuned["token_logprobs"][1:] == first.logprobs.tolist()


def test_answers_and_texts_wait_for_one_another(engine, at):
  """An answer that is under way is the same with texts between its steps."""
  request = Request(prompt=[3, 4, 5], max_new_tokens=30, share=False)
  want = engine.submit(request).result().tokens.tolist()
  handle = engine.submit(request)
  answers = [embed(at, [TEXT, "b"]) for _ in range(3)]
  assert handle.result().tokens.tolist() == want
  for answer in answers[1:]:
    assert (vectors(answer) == vectors(answers[0])).all()


# ---------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------


def test_embeddings(engine, at):
  texts = [TEXT, "a", "b" * 50]
  answer = embed(at, texts)
  rows = vectors(answer)
  assert rows.shape == (3, 32)
  assert [x["index"] for x in answer.json["data"]] == [0, 1, 2]
  tokens = sum(len(Bytes().encode(x, bos=True)) for x in texts)
  assert answer.json["usage"] == dict(prompt_tokens=tokens, total_tokens=tokens)
  np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
  # Alone, as ids, and as what the library computes.
  ids = [Bytes().encode(x, bos=True).tolist() for x in texts]
  np.testing.assert_allclose(vectors(embed(at, ids)), rows, atol=1e-5)
  np.testing.assert_allclose(vectors(embed(at, ids[1]))[0], rows[1], atol=1e-5)
  means = vectors(embed(at, texts, pooling="mean"))
  np.testing.assert_allclose(
    means, engine.texts.embeddings(ids, pooling="mean"), atol=1e-5
  )
  assert np.abs(means - rows).max() > 1e-3
  tuned = vectors(embed(at, texts, model="tuned"))
  assert np.abs(tuned - rows).max() > 1e-3
  # The first numbers, of length 1 again.
  first = vectors(embed(at, texts, dimensions=5))
  want = rows[:, :5] / np.linalg.norm(rows[:, :5], axis=1, keepdims=True)
  np.testing.assert_allclose(first, want, atol=1e-5)
  data = embed(at, texts, encoding_format="base64").json["data"]
  for row, entry in zip(rows, data, strict=True):
    decoded = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, row, atol=1e-6)


@pytest.mark.parametrize(
  ("body", "words"),
  [
    ({}, ["no input"]),
    ({"input": []}, ["none empty"]),
    ({"input": [["a"]]}, ["none empty"]),
    ({"input": [1, 262]}, ["0 to 261"]),
    ({"input": ["a"] * 2049}, ["2048"]),
    ({"input": "a" * 400}, ["tokens at most"]),
    ({"input": "a", "dimensions": 33}, ["1 to 32"]),
    ({"input": "a", "dimensions": 0}, ["dimensions"]),
    ({"input": "a", "pooling": "first"}, ["last, mean"]),
    ({"input": "a", "encoding_format": "hex"}, ["base64"]),
    ({"input": "a", "task": "x"}, ["supported"]),
  ],
)
def test_embeddings_that_are_wrong_are_refused(at, body, words):
  error(ask(at, "/v1/embeddings", body), 400, *words)


def test_what_can_not_be_echoed_is_refused(at):
  error(complete(at, max_tokens=0), 400, "without echo")
  error(complete(at, max_tokens=0, echo=False, logprobs=1), 400, "max_tokens")
  error(embed(at, "a", model="other"), 404, "other")


def test_echoes_without_log_probabilities_are_not_read():
  at = app(ScriptedEngine("yes"))
  assert choices(complete(at, echo=True))[0]["text"].endswith("yes")
  assert choices(complete(at, echo=True, max_tokens=0))


def test_tokens_of_special_texts_and_the_facts_of_the_tokenizer(at):
  info = ask(at, "/tokenizer_info").json
  assert info["bos_token"] == "<|begin|>" and info["eos_token"] == "<|end|>"
  assert "messages" in info["chat_template"] and info["add_bos_token"] is True
  ids = ask(at, "/tokenize", {"prompt": "<|end|>"}).json["tokens"]
  assert ids == [257]
  assert len(ask(at, "/tokenize", {"prompt": "<|end|>."}).json["tokens"]) > 5


def test_openai_s_client_embeds(engine):
  openai = pytest.importorskip("openai")
  with (
    serving(engine, model_name="base") as (port, _),
    openai.OpenAI(
      base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client,
  ):
    # By default this client asks for base64 and decodes it.
    values = client.embeddings.create(model="base", input=[TEXT, "a"])
    plain = client.embeddings.create(
      model="base", input=[TEXT, "a"], encoding_format="float", dimensions=32
    )
    for choice, other in zip(values.data, plain.data, strict=True):
      np.testing.assert_allclose(choice.embedding, other.embedding, atol=1e-6)
    said = client.completions.create(
      model="base", prompt=[TEXT, "a"], echo=True, logprobs=1, max_tokens=0
    )
    assert said.choices[1].logprobs.token_logprobs[0] is None


def test_clients_that_leave_end_the_reading(engine):
  """The error that a batch raises ends the reading of the others."""
  seen = []

  def leave(count):
    seen.append(count)
    raise ConnectionError

  many = types.SimpleNamespace(texts=[[1] * 100] * 40)
  with pytest.raises(ConnectionError):
    engine.texts.embeddings(many.texts, on_batch=leave)
  assert len(seen) == 1 and seen[0] < 40
