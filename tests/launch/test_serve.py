"""launch.serve, and OpenAI's client before it, over loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import sys

import pytest

from launch import serve
from launch.shared import common, console
from ringjax.data import Tokenizer
from ringjax.errors import OptionError
from tests import object_servers
from tests.helpers import refused, until
from tests.launch.conftest import PATIENCE_S, command

BODY = {"prompt": "def main(", "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def serving(folder, *argv):
  """A server in a process of its own: (process, port)."""
  options = ["--port=0", "--rows=4", "--longest=2048", f"--model={folder}"]
  with command("-m", "launch.serve", *options, *argv) as process:
    for line in process.stderr:
      if line.startswith("serving at"):
        yield process, int(line.rsplit(":", 1)[1].split("/")[0])
        return
    raise AssertionError(f"it ended with {process.wait()}")


@contextlib.contextmanager
def post(port, body, path="/v1/completions", key=None):
  """Sends a request; its connection, to read from or not."""
  headers = {"Content-Type": "application/json"}
  if key:
    headers["Authorization"] = f"Bearer {key}"
  with contextlib.closing(connection(port)) as link:
    link.request("POST", path, json.dumps(body), headers)
    yield link


def connection(port):
  return http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)


def metric(port, name, key=None):
  headers = {} if key is None else {"Authorization": f"Bearer {key}"}
  with contextlib.closing(connection(port)) as link:
    link.request("GET", "/metrics", headers=headers)
    text = link.getresponse().read().decode()
  return int(dict(x.rsplit(" ", 1) for x in text.splitlines())[name])


def parsed(*argv):
  return common.parse("serve", serve.define, argv)


def test_flags_are_checked_before_a_model_is_loaded(tmp_path, capsys):
  pytest.importorskip("uvicorn")
  broken = tmp_path / "broken"
  broken.write_text("{% for %}")
  uneven = tmp_path / "uneven.json"
  uneven.write_text("[[0, 1], [0]]")
  part = ["--important=0.5", f"--store={tmp_path / 'kept'}"]
  for argv, word in (
    (["--cache=nothing"], "--cache"),
    ([f"--api_keys={tmp_path / 'no'}"], "api_keys"),
    (["--host=256.1.1.1"], "--host"),
    ([f"--chat_template={tmp_path / 'no'}"], "--chat_template"),
    ([f"--chat_template={broken}"], "template"),
    (["--speculate=self"], "--speculate"),
    (["--speculate=lookup:count=0"], "count"),
    (["--adapters=folder"], "NAME=DIR"),
    (["--adapters=a=x,a=y"], "each name once"),
    (["--important=0.5"], "--store"),
    (["--store_bytes=99"], "pass --store=DIR too"),
    (["--important=2", f"--store={tmp_path / 'kept'}"], "--important"),
    ([f"--store={tmp_path / 'kept'}", "--role=router"], "--host_store"),
    (["--probe_heads=0"], "--important=0.25 too"),
    ([*part, "--probe_heads=first"], "--probe_heads"),
    ([*part, "--probe_heads="], "--probe_heads"),
    ([*part, f"--probe_heads={tmp_path / 'no.json'}"], "No such file"),
    ([*part, f"--probe_heads={uneven}"], "equally many for each layer"),
  ):
    assert serve.run(parsed("--port=0", *argv)) == 2
    assert word in capsys.readouterr().err


def test_a_port_that_is_taken():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    refused(OptionError, lambda: serve._listener("127.0.0.1", port), "--port=0")


def test_an_interruption_while_the_model_is_loaded(monkeypatch, capsys):
  def interrupted(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(Tokenizer, "load", interrupted)
  assert serve.run(parsed("--port=0")) == console.INTERRUPTED
  assert "interrupted while loading the model" in capsys.readouterr().err


def test_without_uvicorn(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  assert serve.run(parsed()) == 2
  assert "ringjax[serve]" in capsys.readouterr().err


def read(link):
  """A whole answer, which has to be one."""
  response = link.getresponse()
  found = json.loads(response.read())
  assert response.status == 200, found
  return found


@pytest.mark.long
def test_a_server_of_its_own(chat_folder):
  pytest.importorskip("uvicorn")
  with serving(chat_folder, "--stall=1", "--grace=60") as (process, port):
    short, long = BODY | {"max_tokens": 8}, BODY | {"max_tokens": 1900}
    with post(port, short) as link:
      alone = read(link)["choices"][0]["text"]
    talk = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    with post(port, talk, "/v1/chat/completions") as link:
      assert read(link)["choices"][0]["message"]["role"] == "assistant"
    # One that leaves, and one that does not read.
    cancelled = lambda: metric(port, "ringjax_requests_cancelled_total")
    with post(port, long | {"stream": True}) as link:
      response = link.getresponse()
      assert response.status == 200
      response.close()
    until(lambda: cancelled() == 1)
    with socket.socket() as small:
      small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      small.connect(("127.0.0.1", port))
      data = json.dumps(long | {"stream": True, "logprobs": 20}).encode()
      small.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
      )
      until(lambda: cancelled() == 2)
    until(lambda: metric(port, "ringjax_pages_used") == 0)
    # Answers do not depend on what else was served.
    with post(port, short) as link:
      assert read(link)["choices"][0]["text"] == alone
    # What is under way is finished when it is told to end.
    with post(port, BODY | {"max_tokens": 300}) as link:
      until(lambda: metric(port, "ringjax_rows_running") == 1)
      process.send_signal(signal.SIGTERM)
      assert read(link)["usage"]["completion_tokens"] == 300
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_another_server_finds_prefixes_in_an_object_storage(chat_folder):
  pytest.importorskip("uvicorn")
  body = BODY | {"prompt": "def main(x): return x\n" * 26, "max_tokens": 3}
  answers = []
  with object_servers.served("s3") as bucket:
    for _ in range(2):
      store = f"--store={bucket}/pages"
      with serving(chat_folder, store) as (process, port):
        with post(port, body) as link:
          answers.append(read(link))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
  details = [x["usage"]["prompt_tokens_details"] for x in answers]
  assert [x["cached_tokens"] for x in details] == [0, 544]
  assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.slow
def test_a_store_of_which_a_part_is_read(tmp_path, chat_folder):
  pytest.importorskip("uvicorn")
  # More than one segment, and few tokens behind it.
  body = BODY | {"prompt": "def main(x): return x\n" * 26, "max_tokens": 3}
  store, details = [f"--store={tmp_path / 'kept'}"], "prompt_tokens_details"
  answers = []
  heads = ["--important=1", "--probe_heads=0"]
  for options in ([], heads, heads, []):
    with serving(chat_folder, *store, *options) as (process, port):
      with post(port, body) as link:
        answers.append(json.loads(link.getresponse().read()))
      if options:
        # A request cannot ask for another part: it is refused by name.
        for name, value in (("exact", True), ("important", 1)):
          with post(port, body | {name: value}) as link:
            response = link.getresponse()
            error = json.loads(response.read())["error"]
            assert response.status == 400 and error["param"] == name
      if len(answers) == 3:
        assert metric(port, "ringjax_important_rows_total") == 1
        assert metric(port, "ringjax_important_tokens_total") == 512
        assert metric(port, "ringjax_important_bytes_total") > 0
      process.send_signal(signal.SIGTERM)
      assert process.wait(PATIENCE_S) == 0
  texts = {answer["choices"][0]["text"] for answer in answers}
  assert len(texts) == 1
  used = [answer["usage"][details] for answer in answers]
  assert [x.get("kept_tokens") for x in used] == [None, None, 512, None]
  # Pages and prefixes of which parts are read are kept apart.
  found = [x["cached_tokens"] for x in used]
  assert found == [0, 0, 512, 544]


@pytest.mark.slow
def test_the_end_of_grace_and_several_devices(tmp_path, chat_folder):
  pytest.importorskip("uvicorn")
  keys = tmp_path / "keys"
  keys.write_text("secret red\n")
  with serving(
    chat_folder,
    "--mesh=seq:4",
    "--cache=int8",
    "--grace=1",
    "--speculate=lookup:count=3,adapt=false",
    f"--api_keys={keys}",
    "--admin=red",
  ) as (process, port):
    with post(port, BODY) as link:
      response = link.getresponse()
      assert response.status == 401
      response.close()
    with post(port, BODY | {"max_tokens": 4}, key="secret") as link:
      assert read(link)["usage"]["completion_tokens"] == 4
    body = BODY | {"max_tokens": 60}
    with post(port, body, key="secret") as link:
      assert read(link)["usage"]["completion_tokens"] == 60
    assert metric(port, "ringjax_drafted_tokens_total", "secret") > 0
    body = BODY | {"max_tokens": 1900, "stream": True}
    with post(port, body, key="secret") as link:
      response = link.getresponse()
      assert response.status == 200
      process.send_signal(signal.SIGINT)
      *_, last, end, rest = response.read().decode().split("\n\n")
      assert (end, rest) == ("data: [DONE]", "")
      assert json.loads(last.removeprefix("data: "))["error"]["code"]
      assert process.wait(PATIENCE_S) == 0
      said = process.stderr.read()
      assert "Traceback" not in said and said.endswith("ended\n")


@pytest.mark.long
def test_openai_client(chat_folder):
  openai = pytest.importorskip("openai")
  pytest.importorskip("uvicorn")
  with (
    serving(chat_folder) as (_, port),
    openai.OpenAI(
      base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client,
  ):
    (model,) = client.models.list().data
    ask = dict(model=model.id, prompt="def main(", max_tokens=12, seed=3)
    whole = client.completions.create(**ask, n=2, logprobs=2)
    parts = list(
      client.completions.create(
        **ask,
        n=2,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
      )
    )
    for choice in whole.choices:
      text = "".join(
        one.text
        for part in parts
        for one in part.choices
        if one.index == choice.index
      )
      assert text == choice.text
      assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs)
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    talk = dict(
      model=model.id,
      messages=[{"role": "user", "content": "Hi"}],
      max_completion_tokens=6,
      temperature=0,
    )
    said = client.chat.completions.create(
      **talk, logprobs=True, top_logprobs=2, extra_body={"top_k": 5}
    )
    stream = client.chat.completions.create(**talk, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in stream)
    assert text == said.choices[0].message.content
    assert said.choices[0].logprobs.content[0].top_logprobs
    with pytest.raises(openai.BadRequestError, match="suffix"):
      client.completions.create(**ask, suffix="x")
    with pytest.raises(openai.NotFoundError, match="model"):
      client.completions.create(**ask | {"model": "other"})
