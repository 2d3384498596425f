"""The server under OpenAI's API over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading

import pytest

import ringjax as rj
from launch.serving import http_server
from tests.helpers import until

uvicorn = pytest.importorskip("uvicorn")
PATIENCE_S = 240
TEXT = "def f(x):\n  return x + "
PATH = "/v1/completions"


class Lasting:
  """An application whose engine outlives it."""

  def __init__(self, app):
    self.app, self.end = app, app.end

  async def __call__(self, scope, receive, send):
    if scope["type"] != "lifespan":
      await self.app(scope, receive, send)
      return
    for event in ("startup", "shutdown"):
      await receive()
      await send({"type": f"lifespan.{event}.complete"})


@contextlib.contextmanager
def serving(engine, *, stall=60.0, grace=1, **options):
  """A server in a thread of this process: (port, server)."""
  app = rj.serve.app(engine, trusted_template=True, stall=stall, **options)
  server = http_server.server(uvicorn, Lasting(app), grace=grace, stall=stall)
  with socket.create_server(("127.0.0.1", 0)) as listener:
    run = lambda: server.run(sockets=[listener])
    thread = threading.Thread(target=run)
    thread.start()
    try:
      until(lambda: server.started)
      yield listener.getsockname()[1], server
    finally:
      server.should_exit = True
      thread.join()


def connection(port):
  return contextlib.closing(
    http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
  )


def asked(link, path=PATH, body=None, **headers):
  """Status and object of an answer."""
  data = json.dumps(body).encode() if body is not None else None
  kind = {"Content-Type": "application/json"} if data else {}
  link.request("POST" if data else "GET", path, data, kind | headers)
  answer = link.getresponse()
  return answer.status, json.loads(answer.read())


def half(port, data):
  """A connection that has sent a part of a request."""
  link = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
  link.sendall(data)
  return link


HEAD = (
  b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
  b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
)


@pytest.mark.long
def test_half_of_a_request_is_not_waited_for_without_end(talking):
  with serving(talking, stall=0.5) as (port, server):
    heads = [half(port, data) for data in (b"", b"POST /v1", HEAD[:60])]
    bodies = [half(port, HEAD), half(port, HEAD + b'{"prompt"')]
    # One that was served, and then sends half a head.
    again = half(port, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    # Head and body may come one after the other.
    answer = b""
    while not answer.endswith(b"}"):
      answer += again.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200")
    again.sendall(b"GET /hea")
    for link in [*heads, again]:
      assert link.recv(1 << 16) == b""
    for link in bodies:
      assert link.recv(1 << 16).startswith(b"HTTP/1.1 408")
    until(lambda: not server.server_state.connections)
    for link in (*heads, *bodies, again):
      link.close()
    with connection(port) as link:
      body = {"prompt": TEXT, "max_tokens": 3}
      assert asked(link, body=body)[0] == 200


def test_refusals_arrive_whatever_was_sent_with_them(talking):
  keys = {"key": "red"}
  with (
    serving(talking, keys=keys, body_bytes=1 << 20, queue=1) as (port, _),
    connection(port) as link,
  ):
    key = {"Authorization": "Bearer key"}
    large = {"prompt": "a" * 900_000}
    for _ in range(3):
      # Each over one connection, which stays as it is.
      status, found = asked(link, body=large)
      assert (status, found["error"]["code"]) == (401, "invalid_api_key")
      status, found = asked(link, "/v1/nothing", large, **key)
      assert status == 404
      status, found = asked(link, body={"prompt": "a" * 2_000_000}, **key)
      assert status == 413
      status, found = asked(link, body=large, **key)
      assert found["error"]["code"] == "context_length_exceeded"
      full = {"prompt": TEXT, "n": 6, "max_tokens": 3}
      assert asked(link, body=full, **key)[0] == 400
      fits = {"prompt": TEXT, "max_tokens": 3}
      assert asked(link, body=fits, **key)[0] == 200


def test_many_clients_that_keep_their_connections(talking):
  """None of them is cut off: each is answered, or told that it is too much."""
  statuses, broken = [], []

  def client(port, number):
    try:
      with connection(port) as link:
        for turn in range(3):
          body = {"prompt": TEXT, "max_tokens": 2, "seed": number + turn}
          statuses.append(asked(link, body=body)[0])
    except (OSError, http.client.HTTPException) as error:
      broken.append(error)

  with serving(talking, queue=8) as (port, _):
    threads = [
      threading.Thread(target=client, args=(port, n)) for n in range(40)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert not broken
  assert len(statuses) == 120 and set(statuses) <= {200, 429}
  assert 200 in statuses


def test_connections_outlive_those_of_clients():
  openai = pytest.importorskip("openai")
  theirs = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 5.0
  assert 2 * theirs < http_server.KEEP_ALIVE_S


def test_streams_end_when_the_server_does(talking, caplog):
  with (
    caplog.at_level(logging.ERROR),
    serving(talking, grace=0) as (port, server),
    connection(port) as link,
    connection(port) as other,
    half(port, HEAD) as mute,
  ):
    body = {"prompt": TEXT, "max_tokens": 130, "ignore_eos": True, "n": 40}
    headers = {"Content-Type": "application/json"}
    link.request("POST", PATH, json.dumps(body | {"stream": True}), headers)
    stream = link.getresponse()
    assert stream.status == 200 and stream.readline().startswith(b"data: ")
    other.request("POST", PATH, json.dumps(body), headers)
    server.should_exit = True
    *_, last, end, rest = stream.read().decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    whole = other.getresponse()
    assert whole.status == 503
    assert json.loads(whole.read())["error"]["type"] == "server_error"
    assert mute.recv(1 << 16).startswith(b"HTTP/1.1 503")
  assert not caplog.records


def test_openai_s_client(talking):
  openai = pytest.importorskip("openai")
  with (
    serving(talking, model_name="base") as (port, _),
    openai.OpenAI(
      base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client,
  ):
    assert [m.id for m in client.models.list().data] == ["base", "tuned"]
    assert client.models.retrieve("tuned").id == "tuned"
    talk = dict(
      model="tuned",
      messages=[{"role": "user", "content": "Hi"}],
      max_tokens=4,
      seed=1,
      temperature=1e-4,
      tools=[],
      tool_choice="none",
      parallel_tool_calls=False,
      user="me",
      store=False,
      service_tier="auto",
      logit_bias={"260": 100},
      stop=["<|user|>"],
    )
    said = client.chat.completions.create(**talk)
    assert said.choices[0].message.content == ""
    assert said.choices[0].finish_reason == "stop"
    assert said.usage.completion_tokens == 1
    more = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    with client.chat.completions.create(
      **talk, extra_body=more, stream=True
    ) as stream:
      parts = [part.choices[0] for part in stream]
    text = "".join(part.delta.content or "" for part in parts)
    assert text == "<|user|>" and parts[-1].finish_reason == "stop"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    talk |= {"tools": [tool], "tool_choice": "auto"}
    with pytest.raises(openai.BadRequestError, match="no place for them"):
      client.chat.completions.create(**talk)
    with pytest.raises(openai.NotFoundError, match="'tuned'"):
      client.models.retrieve("other")
