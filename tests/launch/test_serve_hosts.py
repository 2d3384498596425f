"""launch.serve in several processes, which are one server."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import time

import numpy as np
import pytest

import ringjax as rj
from launch import serve
from launch.serving import flag_modes
from launch.shared import common
from ringjax.data import Bytes
from ringjax.errors import OptionError
from tests.launch.conftest import PATIENCE_S, command

LOST = 3
PROMPT = [*b"def main("]


def free_ports(count):
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for free in sockets:
      free.bind(("localhost", 0))
    return [free.getsockname()[1] for free in sockets]


@contextlib.contextmanager
def serving(folder, *argv, processes=2):
  """Processes of a server, and their ports."""
  coordinator, *ports = free_ports(processes + 1)
  with contextlib.ExitStack() as stack:
    running = [
      stack.enter_context(
        command(
          "-m", "launch.serve", f"--model={folder}", f"--port={port}",
          "--rows=2", "--longest=256", "--piece=16", "--pieces=2",
          "--mesh=seq:2", f"--coordinator=localhost:{coordinator}",
          f"--num_processes={processes}", f"--process_id={rank}", *argv,
        )
      )
      for rank, port in enumerate(ports)
    ]  # fmt: skip
    yield running, ports


def get(port, path):
  """Status and body of a path; None if nothing answers yet."""
  link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
  try:
    with contextlib.closing(link):
      link.request("GET", path)
      response = link.getresponse()
      return response.status, json.loads(response.read())
  except OSError:
    return None


def wait_until_ready(processes, ports):
  end = time.monotonic() + PATIENCE_S
  while any((get(port, "/ready") or (0,))[0] != 200 for port in ports):
    assert all(process.poll() is None for process in processes), [
      process.communicate() for process in processes
    ]
    assert time.monotonic() < end
    time.sleep(0.1)


@contextlib.contextmanager
def post(port, **body):
  """Response to a completion, to read from."""
  link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
  body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True} | body
  headers = {"Content-Type": "application/json"}
  with contextlib.closing(link):
    link.request("POST", "/v1/completions", json.dumps(body), headers)
    yield link.getresponse()


@pytest.mark.long
def test_two_processes_serve_until_one_is_killed(folder):
  """Clients get the model's text, and an error once a process is lost."""
  pytest.importorskip("uvicorn")
  with serving(folder, "--failure_timeout=20") as (processes, ports):
    wait_until_ready(processes, ports)
    assert get(ports[1], "/health") == (200, {"status": "ok"})
    assert get(ports[1], "/v1/models")[0] == 404
    with post(ports[0], max_tokens=12) as response:
      text = json.loads(response.read())["choices"][0]["text"]
    with rj.serve.Engine(
      rj.models.load(folder), rows=2, longest=256, tokenizer=Bytes()
    ) as engine:
      request = rj.serve.Request(prompt=PROMPT, max_new_tokens=12)
      assert text == engine.submit(request).result().answers[0].text
    with post(ports[0], max_tokens=200, stream=True) as response:
      assert b"data: " in response.readline()
      processes[1].send_signal(signal.SIGKILL)
      events = response.read()
    assert b"rank 1" in events and b"start them again" in events
    assert events.endswith(b"data: [DONE]\n\n")
    _, log = processes[0].communicate(timeout=PATIENCE_S)
    assert processes[0].returncode == LOST
    assert "rank 1" in log and "while serving" in log


def check_echo(folder, logprobs):
  """A text that both processes have read has the numbers of one."""
  scorer = rj.infer.TextScorer(rj.models.load(folder))
  (score,) = scorer.scores([PROMPT])
  assert logprobs[0] is None
  np.testing.assert_allclose(logprobs[1:], score.logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("told", [(1, 0), (1,)])
def test_two_processes_end_by_a_signal(folder, told):
  """By one at all of them, or at one that serves no clients."""
  pytest.importorskip("uvicorn")
  with serving(folder) as (processes, ports):
    wait_until_ready(processes, ports)
    with post(ports[0], max_tokens=0, echo=True, logprobs=1) as response:
      (choice,) = json.loads(response.read())["choices"]
      check_echo(folder, choice["logprobs"]["token_logprobs"])
    with post(ports[0], max_tokens=100, stream=True) as response:
      assert b"data: " in response.readline()
      for number in told:
        processes[number].send_signal(signal.SIGTERM)
      events = response.read()
    assert b'"length"' in events and events.endswith(b"data: [DONE]\n\n")
    for process in processes:
      out, log = process.communicate(timeout=PATIENCE_S)
      assert process.returncode == 0, out + log


@pytest.mark.slow
def test_process_0_that_is_killed_ends_the_others(folder):
  pytest.importorskip("uvicorn")
  with serving(folder) as (processes, ports):
    wait_until_ready(processes, ports)
    processes[0].send_signal(signal.SIGKILL)
    _, log = processes[1].communicate(timeout=PATIENCE_S)
    assert processes[1].returncode == LOST and "rank 0" in log


def test_flags_of_several_processes(tmp_path):
  def parsed(*argv):
    return common.parse("serve", serve.define, argv)

  processes = (
    "--coordinator=localhost:1", "--num_processes=2", "--process_id=0"
  )  # fmt: skip
  assert flag_modes.mode_of(parsed(*processes)) == "alone"
  assert flag_modes.mode_of(parsed(*processes, "--role=router")) == "stages"
  joins = (*processes, "--join=h:1", "--role=prefill", "--cluster_key=k")
  assert flag_modes.mode_of(parsed(*joins)) == "stages"
  with pytest.raises(OptionError, match="failure_timeout"):
    flag_modes.check(
      parsed("--role=router", "--failure_timeout=9", "--cluster_key=k"),
      flag_modes.MODES["alone"].used | {"failure_timeout"},
    )
