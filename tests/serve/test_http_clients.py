"""Clients of OpenAI's API with ways of their own, before a live server."""

from __future__ import annotations

import os

import pytest

from tests.serve.test_http_live import serving

pytestmark = [
  pytest.mark.long,
  # These libraries warn of themselves and of what they import.
  pytest.mark.filterwarnings("ignore"),
]
MESSAGES = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "Hi"},
]


@pytest.fixture(scope="module")
def url(talking):
  with serving(talking, model_name="base") as (port, _):
    yield f"http://127.0.0.1:{port}/v1"


def test_litellm(url, monkeypatch):
  monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
  litellm = pytest.importorskip("litellm")
  ask = dict(
    model="hosted_vllm/base",
    api_base=url,
    api_key="none",
    messages=MESSAGES,
    max_tokens=5,
    temperature=0,
    num_retries=0,
  )
  said = litellm.completion(**ask)
  assert said.usage.completion_tokens == 5
  text = said.choices[0].message.content
  stream = litellm.completion(
    **ask, stream=True, stream_options={"include_usage": True}
  )
  parts = [p.choices[0].delta.content or "" for p in stream if p.choices]
  assert "".join(parts) == text
  openai = ask | {"model": "openai/tuned"}
  more = dict(user="me", n=1, seed=3, logit_bias={"260": 100}, tools=None)
  said = litellm.completion(**openai, **more, stop=["<|user|>"])
  assert said.usage.completion_tokens == 1
  with pytest.raises(litellm.BadRequestError, match="160 together"):
    litellm.completion(**ask | {"max_tokens": 500})
  with pytest.raises(litellm.NotFoundError, match="model"):
    litellm.completion(**ask | {"model": "openai/other"})


def test_langchain(url):
  chat = pytest.importorskip("langchain_openai").ChatOpenAI
  messages = pytest.importorskip("langchain_core.messages")
  openai = pytest.importorskip("openai")
  make = lambda **options: chat(
    base_url=url,
    api_key="none",
    model="base",
    max_retries=0,
    temperature=0,
    max_tokens=5,
    **options,
  )
  model = make()
  said = model.invoke([("system", "Be brief."), ("user", "Hi")])
  assert said.usage_metadata["output_tokens"] == 5
  parts = model.stream([("system", "Be brief."), ("user", "Hi")])
  assert "".join(part.content for part in parts) == said.content
  many = model.batch(["a", "b", "c"])
  assert len(many) == 3
  stopped = make(logit_bias={260: 100}).invoke("Hi", stop=["<|user|>"])
  assert stopped.usage_metadata["output_tokens"] == 1
  # A history of calls needs a template that has a place for them.
  history = [
    messages.HumanMessage("Hi"),
    messages.AIMessage(
      "", tool_calls=[{"id": "c", "name": "f", "args": {"x": 1}}]
    ),
    messages.ToolMessage("7", tool_call_id="c"),
  ]
  with pytest.raises(openai.BadRequestError, match="no place"):
    model.invoke(history)
