"""launch.serve in several processes, which are one server."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import io
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ringjax as rj
from launch import serve, train
from launch.serving import flag_modes, restarts
from launch.shared import common, console, group
from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.parallel import joint_outcome
from tests.launch.conftest import PATIENCE_S, command

LOST = 3
PROMPT = [*b"def main("]
RECIPE = "from launch.train import default_config as get_config\n"
# Two network namespaces, which stand for hosts, and their addresses.
HOSTS = {"ringjax-test-0": "10.77.0.1", "ringjax-test-1": "10.77.0.2"}


def free_ports(count):
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for free in sockets:
      free.bind(("localhost", 0))
    return [free.getsockname()[1] for free in sockets]


@contextlib.contextmanager
def serving(folder, *argv, processes=2, each=((), ())):
  """Processes of a server, each with some flags of its own, and their ports."""
  coordinator, *ports = free_ports(processes + 1)
  with contextlib.ExitStack() as stack:
    running = [
      stack.enter_context(
        command(
          "-m", "launch.serve", f"--model={folder}", f"--port={port}",
          "--rows=2", "--longest=256", "--piece=16", "--pieces=2",
          "--mesh=seq:2", f"--coordinator=localhost:{coordinator}",
          f"--num_processes={processes}", f"--process_id={rank}", *argv,
          *each[rank],
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
def test_two_processes_serve_until_one_is_killed(folder, tmp_path):
  """Clients get the model's text, and an error once a process is lost."""
  pytest.importorskip("uvicorn")
  each = [(f"--log_calls={tmp_path / str(rank)}",) for rank in range(2)]
  with serving(folder, "--failure_timeout=20", each=each) as (processes, ports):
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
    calls = rj.serve.cluster.read_calls(tmp_path / "0")
    assert {call.phase for call in calls} == {"prefill", "decode"}
    assert {call.devices for call in calls} == {2}
    assert not (tmp_path / "1").exists()
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


# Processes that are killed in the test of random moments.
KILLS = int(os.environ.get("RINGJAX_KILLS", "20"))


def served_by(supervisor):
  """Process id of the server that a supervisor has started, or None."""
  pid = supervisor.pid
  children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
  return int(children.split()[0]) if children else None


def metric(port, name):
  """Value of a metric."""
  link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
  with contextlib.closing(link):
    link.request("GET", "/metrics")
    text = link.getresponse().read().decode()
  (line,) = [x for x in text.splitlines() if x.startswith(f"ringjax_{name} ")]
  return int(line.split()[1])


COUNTS = "right", "failed"


class Client(threading.Thread):
  """Asks for the same answers until it is told to end.

  Attributes:
    wrong: Texts that are no beginning of the right one, or ended too early.
    right, failed: Number of complete answers, and of those with an error.
  """

  def __init__(self, port, expected):
    super().__init__(daemon=True)
    self.wrong, self.right, self.failed = [], 0, 0
    self._port, self._expected = port, expected
    self.told = threading.Event()

  def run(self):
    for number in itertools.count():
      if self.told.is_set():
        return
      prompt, text = self._expected[number % len(self._expected)]
      try:
        self._ask(prompt, text, stream=number % 3 == 0)
      except (OSError, http.client.HTTPException):
        # The process that serves was killed, or is not there yet.
        self.failed += 1
        self.told.wait(1.0)

  def _ask(self, prompt, text, stream):
    body = dict(prompt=prompt, max_tokens=len(text), stream=stream)
    with post(self._port, **body) as response:
      if response.status != 200:
        error = json.loads(response.read())["error"]
        right = response.status == 503 and response.getheader("retry-after")
        if not right:
          self.wrong.append((response.status, error))
        self.failed += 1
        self.told.wait(1.0)
        return
      if not stream:
        (choice,) = json.loads(response.read())["choices"]
        if choice["text"] != text:
          self.wrong.append((choice["text"], text))
        self.right += 1
        return
      self._read_stream(response, text)

  def _read_stream(self, response, text):
    sent, error, done = "", False, False
    try:
      for line in response:
        data = line.decode().removeprefix("data: ").strip()
        done |= data == "[DONE]"
        if not data or done:
          continue
        event = json.loads(data)
        error |= "error" in event
        sent += "".join(x["text"] for x in event.get("choices", ()))
    finally:
      complete = done and not error
      if sent != text if complete else not text.startswith(sent):
        self.wrong.append((sent, text))
    if not done:
      raise ConnectionResetError
    self.right += complete
    self.failed += error


@pytest.mark.slow
def test_a_server_comes_back_whenever_a_process_is_killed(folder, tmp_path):
  """Clients get right texts or errors, and stored prefixes are found again."""
  pytest.importorskip("uvicorn")
  options = ("--failure_timeout=20", "--restarts=1000", "--page=16")
  stores = [(f"--store={tmp_path / str(rank)}",) for rank in range(2)]
  random_numbers = random.Random(KILLS)
  with serving(folder, *options, each=stores) as (supervisors, ports):
    wait_until_ready(supervisors, ports)
    expected = []
    for prompt in ([*b"def main(" * 7], [*b"class A:" * 9], PROMPT):
      body = dict(prompt=prompt, max_tokens=60)
      with post(ports[0], **body) as response:
        (choice,) = json.loads(response.read())["choices"]
        expected.append((prompt, choice["text"]))
    clients = [Client(ports[0], expected) for _ in range(3)]
    for client in clients:
      client.start()
    for number in range(KILLS):
      rank = random_numbers.randrange(2)
      time.sleep(random_numbers.uniform(0, 3))
      pids = [served_by(supervisor) for supervisor in supervisors]
      os.kill(pids[rank], signal.SIGKILL)
      end = time.monotonic() + PATIENCE_S
      while any(
        served_by(supervisor) in (pid, None)
        for supervisor, pid in zip(supervisors, pids, strict=True)
      ):
        assert time.monotonic() < end
        time.sleep(0.05)
      wait_until_ready(supervisors, ports)
      assert metric(ports[0], "restarts_total") == number + 1
      right, failed = (sum(getattr(x, n) for x in clients) for n in COUNTS)
      print(f"{number}: process {rank}; answers {right}, errors {failed}")
      assert not any(client.wrong for client in clients)
    for client in clients:
      client.told.set()
      client.join(PATIENCE_S)
      assert not client.is_alive() and not client.wrong and client.right
    for prompt, text in expected:
      with post(ports[0], prompt=prompt, max_tokens=60) as response:
        (choice,) = json.loads(response.read())["choices"]
        assert choice["text"] == text
    assert metric(ports[0], "stored_tokens_total") > 0
    supervisors[1].send_signal(signal.SIGTERM)
    for supervisor in supervisors:
      out, log = supervisor.communicate(timeout=PATIENCE_S)
      assert supervisor.returncode == 0, out + log


# A server's process without a model. Its arguments: a file for what it was
# answered, and what each start does: it ends with a status, or is killed, ...
PROCESS = """
import http.client, json, os, signal, socket, sys
listener, link, count = map(int, os.environ["RINGJAX_SERVE_PROCESS"].split())
listener, link = socket.socket(fileno=listener), socket.socket(fileno=link)
answers = []
for method, path in (("GET", "/ready"), ("POST", "/v1/completions")):
  client = http.client.HTTPConnection(*listener.getsockname())
  client.request(method, path, b"x" * 100000 if method == "POST" else None)
  response = client.getresponse()
  answers.append([response.status, response.getheader("retry-after")])
  assert "started" in response.read().decode()
  client.close()
with open(sys.argv[1], "a") as file:
  file.write(json.dumps([count, answers]) + "\\n")
action, _, status = sys.argv[2 + count].rpartition(":")
if action == "serves":
  link.sendall(b".AS")
if action == "silent":
  link.sendall(b".A")
if action == "hangs":
  link.close()
if action in ("silent", "hangs"):
  signal.pause()
if action == "told":
  os.kill(os.getppid(), int(status))
  signal.pause()
if action == "killed":
  os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(status))
"""


def supervised(
  record, monkeypatch, actions, text, most=9, silence_s=PATIENCE_S
):
  """Status of a supervisor of processes that do these actions."""
  arguments = [sys.executable, "-c", PROCESS, str(record), *actions]
  monkeypatch.setattr(sys, "orig_argv", arguments)
  monkeypatch.setattr(restarts, "_PAUSE_S", 0.0)
  monkeypatch.setattr(restarts, "_END_S", 2.0)
  numbers = signal.SIGTERM, signal.SIGINT
  handlers = [signal.getsignal(number) for number in numbers]
  try:
    with socket.create_server(("127.0.0.1", 0)) as listener:
      supervisor = restarts.Supervisor(
        listener,
        console.Screen("serve", text),
        restarts=most,
        silence_s=silence_s,
      )
      return supervisor.run()
  finally:
    for number, handler in zip(numbers, handlers, strict=True):
      signal.signal(number, handler)


class Signals(io.StringIO):
  """A screen at which a signal comes with the message of a restart."""

  def write(self, text):
    if "start 1 of" in text:
      signal.raise_signal(signal.SIGTERM)
    return super().write(text)


@pytest.mark.parametrize(
  "actions",
  [("3", "0"), (f"told:{signal.SIGTERM:d}",), (f"told:{signal.SIGINT:d}",)],
)
def test_a_signal_while_no_process_serves_ends_normally(
  tmp_path, monkeypatch, capfd, actions
):
  """Between two starts, and at one that does not catch signals yet."""
  text, record = Signals(), tmp_path / "starts"
  assert supervised(record, monkeypatch, actions, text) == 0
  assert len(record.read_text().splitlines()) == 1
  assert not capfd.readouterr().err
  assert text.getvalue().splitlines()[-1] == "ended"


@pytest.mark.long
@pytest.mark.parametrize(
  ("actions", "most", "starts", "status"),
  [
    # After a loss, a signal, a refusal that is not the first, and silence.
    (("3", "killed:", "2", "silent:", "hangs:", "0"), 0, 1, 3),
    (("3", "killed:", "2", "silent:", "hangs:", "0"), 1, 2, 137),
    (("3", "killed:", "2", "silent:", "hangs:", "0"), 9, 6, 0),
    # Flags that are refused, and an error of a server that has served.
    (("2", "0"), 9, 1, 2),
    (("serves:2", "0"), 9, 2, 0),
  ],
)
def test_a_supervisor_starts_its_process_again(
  tmp_path, monkeypatch, actions, most, starts, status
):
  # Silence counts from a process's first message on.
  silence_s = PATIENCE_S if "silent:" not in actions[:starts] else 2.0
  text, record = io.StringIO(), tmp_path / "starts"
  ended = supervised(record, monkeypatch, actions, text, most, silence_s)
  assert ended == status
  lines = record.read_text().splitlines()
  expected = [[n, [[503, "5"]] * 2] for n in range(starts)]
  assert [json.loads(line) for line in lines] == expected
  said = text.getvalue()
  assert ("silent for 2 s" in said) == ("silent:" in actions[:starts])
  assert ("not end within 2 s" in said) == ("hangs:" in actions[:starts])


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


def test_flags_of_one_command_are_compared(tmp_path):
  """Paths, ports and what process 0 alone uses may differ, options not."""

  def facts(*argv):
    return group.flag_facts(
      common.parse("serve", serve.define, argv), flag_modes.MAY_DIFFER
    )

  texts = "--adapters=A={0}/x,B={0}/y", "--cache=nuq3:calibration={0}/z"
  base = facts(
    "--store=/a/b", "--rows=4", "--port=1", "--process_id=0",
    f"--log_calls={tmp_path / 'calls'}",
    *(text.format("/c") for text in texts),
  )  # fmt: skip
  texts = tuple(text.format("/d/e") for text in texts)
  same = facts(
    "--store=/c", "--rows=4", "--port=2", "--process_id=1",
    "--store_bytes=1000", *texts,
  )  # fmt: skip
  joint_outcome.check_equal([base, same, base])
  for argv, name in (
    (("--rows=4",), "--store"),
    (("--store=/c", "--rows=5"), "--rows"),
    (("--store=/c", "--rows=4", "--restarts=1"), "--restarts"),
    (("--store=/c", "--rows=4", f"--speculate={'x' * 999}"), "--speculate"),
  ):
    with pytest.raises(OptionError, match=f"^{name}: .* in process 2"):
      joint_outcome.check_equal([base, same, facts(*argv, *texts)])
  other = facts("--store=/c", "--rows=4", texts[1], "--adapters=A=/d")
  with pytest.raises(OptionError, match="^--adapters: got A=a path in process"):
    joint_outcome.check_equal([base, other])


@pytest.mark.filterwarnings("ignore:the load_module")
def test_entries_of_one_config_are_compared(tmp_path):
  """Its files may have other paths; other numbers are named by their entry."""
  (tmp_path / "recipe.py").write_text(RECIPE)

  def facts(folder, length):
    sources = ({"kind": "corpus", "path": folder, "length": length},)
    argv = f"--config={tmp_path / 'recipe.py'}", f"--config.sources={sources}"
    return group.flag_facts(common.parse("train", train.define, argv))

  base = facts("/a/corpus", 64)
  joint_outcome.check_equal([base, facts("gs://b/corpus", 64)])
  with pytest.raises(
    OptionError, match=r"^--config.sources\[0\].length: got 32 in process 1"
  ):
    joint_outcome.check_equal([base, facts("/a/corpus", 32)])


@pytest.mark.slow
def test_processes_with_other_flags_are_refused(folder, tmp_path):
  """All of them, before they load, and none is started again."""
  pytest.importorskip("uvicorn")
  each = (f"--store={tmp_path}",), ()
  with serving(folder, "--restarts=3", each=each) as (supervisors, _):
    for supervisor in supervisors:
      out, log = supervisor.communicate(timeout=PATIENCE_S)
      assert supervisor.returncode == 2, out + log
      assert "--store: got nothing in process 1" in " ".join(log.split())
      assert "loading" not in log and "start 1" not in log


def run_ip(*words):
  return subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def linked_hosts():
  """Makes the namespaces, and a cable between them."""
  with contextlib.ExitStack() as stack:
    try:
      for name in HOSTS:
        run_ip("netns", "add", name)
        stack.callback(run_ip, "netns", "del", name)
        run_ip("-n", name, "link", "set", "lo", "up")
      first, second = HOSTS
      run_ip(
        "-n", first, "link", "add", "cable", "type", "veth",
        "peer", "name", "cable", "netns", second,
      )  # fmt: skip
      for name, address in HOSTS.items():
        run_ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        run_ip("-n", name, "link", "set", "cable", "up")
    except (OSError, subprocess.CalledProcessError) as error:
      pytest.skip(f"namespaces need root and iproute2: {error}")
    yield


@contextlib.contextmanager
def on_host(name):
  """Lets this thread, and processes that it starts, have a host's network."""
  enter = ctypes.CDLL(None).setns
  with open("/proc/self/ns/net") as back, open(f"/run/netns/{name}") as there:
    assert not enter(there.fileno(), 0)
    try:
      yield
    finally:
      assert not enter(back.fileno(), 0)


@pytest.mark.slow
def test_a_cable_that_is_cut_and_mended(folder):
  """Both hosts notice by silence, and serve again once they are connected."""
  pytest.importorskip("uvicorn")
  with linked_hosts(), contextlib.ExitStack() as stack:
    supervisors = []
    for rank, (name, address) in enumerate(HOSTS.items()):
      # Collectives connect to the address that the host's name stands for.
      named = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"']
      with on_host(name):
        supervisors.append(
          stack.enter_context(
            command(
              "-m", "launch.serve", f"--model={folder}", "--port=8000",
              "--rows=2", "--longest=256", "--piece=16", "--pieces=2",
              "--mesh=seq:2", "--coordinator=10.77.0.1:7788",
              "--num_processes=2", f"--process_id={rank}", "--restarts=9",
              "--failure_timeout=20",
              prefix=(*named, address),
            )
          )
        )  # fmt: skip

    def wait():
      for name, supervisor in zip(HOSTS, supervisors, strict=True):
        with on_host(name):
          wait_until_ready([supervisor], [8000])

    wait()
    first = next(iter(HOSTS))
    pids = [served_by(supervisor) for supervisor in supervisors]
    with on_host(first), post(8000, max_tokens=200, stream=True) as response:
      assert b"data: " in response.readline()
      run_ip("-n", first, "link", "set", "cable", "down")
      events = response.read()
    assert b"rank 1" in events and events.endswith(b"data: [DONE]\n\n")
    end = time.monotonic() + PATIENCE_S
    while any(
      served_by(supervisor) in (pid, None)
      for supervisor, pid in zip(supervisors, pids, strict=True)
    ):
      assert time.monotonic() < end
      time.sleep(0.1)
    run_ip("-n", first, "link", "set", "cable", "up")
    wait()
    with on_host(first), post(8000, max_tokens=20) as response:
      assert response.status == 200 and json.loads(response.read())["choices"]
