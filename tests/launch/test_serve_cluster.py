"""A cluster of processes over loopback: they join, die and change roles."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import queue
import re
import signal
import threading
import time

import pytest

from launch import cluster_roles, serve
from tests.launch.conftest import PATIENCE_S, command
from tests.launch.test_serve import (
  connection,
  metric,
  parsed,
  post,
  read,
  until,
)

LONGEST = 512


class Process:
  """A process of launch.serve, whose messages are read by a thread."""

  def __init__(self, process):
    self.process, self.lines = process, []
    self._news = threading.Condition()
    threading.Thread(target=self._read, daemon=True).start()

  def _read(self):
    for line in self.process.stderr:
      with self._news:
        self.lines.append(line)
        self._news.notify_all()

  def said(self, pattern):
    """The first group of the first line that has it."""

    def look():
      return next(
        (m for x in list(self.lines) if (m := re.search(pattern, x))), None
      )

    with self._news:
      assert self._news.wait_for(look, PATIENCE_S), self.lines
      return look()[1]

  def kill(self):
    self.process.send_signal(signal.SIGKILL)
    self.process.wait()


class Processes:
  """Starts them, and ends them all."""

  def __init__(self, stack, folder, key):
    self._stack, self._folder, self._key = stack, folder, key
    self.join = ""

  def start(self, role, *argv):
    options = [
      f"--role={role}",
      f"--model={self._folder}",
      f"--cluster_key={self._key}",
      f"--longest={LONGEST}",
      "--silence=8",
      "--patience=120",
      *argv,
    ]
    if role == "router":
      options += ["--port=0", "--cluster_port=0"]
    else:
      options += [f"--join={self.join}", "--rows=4", "--capacity=2048"]
    argv = ("-m", "launch.serve", *options)
    return Process(self._stack.enter_context(command(*argv)))

  def ask(self, *argv):
    """What the router answers to a command."""
    argv = (f"--cluster_key={self._key}", f"--join={self.join}", *argv)
    with command("-m", "launch.serve", *argv) as process:
      out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return {x["name"]: x["role"] for x in map(json.loads, out.splitlines())}


def body(n, new=24):
  """Unequal prompts, some greedy and some drawn."""
  text = "def f(x):\n  return " + "x + y * " * (n % 7) + str(n)
  return {
    "prompt": text,
    "max_tokens": new,
    "temperature": float(n % 2),
    "seed": n,
    "ignore_eos": True,
  }


def answer(port, n, **more):
  with post(port, body(n) | more) as link:
    return read(link)["choices"][0]["text"]


def one_engine(folder, numbers, **more):
  """What a single engine answers."""
  argv = ["--port=0", f"--model={folder}", f"--longest={LONGEST}", "--rows=4"]
  with command("-m", "launch.serve", *argv) as process:
    port = int(Process(process).said(r"serving at http://127.0.0.1:(\d+)"))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      return list(pool.map(lambda n: answer(port, n, **more), numbers))


@contextlib.contextmanager
def processes(tmp_path, folder):
  key = tmp_path / "key"
  key.write_bytes(bytes(range(32)))
  with contextlib.ExitStack() as stack:
    yield Processes(stack, folder, key)


def test_flags_of_a_cluster(tmp_path, capsys):
  pytest.importorskip("uvicorn")
  short = tmp_path / "short"
  short.write_bytes(b"x")
  key = tmp_path / "key"
  key.write_bytes(bytes(32))
  for argv, word in (
    (["--role=prefill"], "--join"),
    (["--role=router"], "--cluster_key"),
    (["--role=router", f"--cluster_key={short}"], "16 bytes"),
    (["--role=router", f"--cluster_key={tmp_path / 'no'}"], "--cluster_key"),
    (["--role=router", "--join=a:1", f"--cluster_key={key}"], "--join"),
    (["--join=a", f"--cluster_key={key}"], "HOST:PORT"),
    (["--join=a:70000", f"--cluster_key={key}"], "HOST:PORT"),
    (["--instances"], "--join"),
    (["--join=a:1", f"--cluster_key={key}", "--set_role=x"], "NAME=ROLE"),
    (["--join=127.0.0.1:1", f"--cluster_key={key}", "--instances"], "reached"),
  ):
    assert serve.run(parsed("--port=0", *argv)) == 2
    assert word in capsys.readouterr().err
  assert "shortest_queue" in cluster_roles.POLICIES


@pytest.mark.long
def test_a_cluster_of_processes(tmp_path, folder):
  pytest.importorskip("uvicorn")
  numbers = range(12)
  with processes(tmp_path, folder) as cluster:
    router = cluster.start("router")
    cluster.join = router.said(r"instances join at (\S+)")
    port = int(router.said(r"serving at http://127.0.0.1:(\d+)"))
    first = cluster.start("prefill", "--name=p0", "--page=16", "--mesh=seq:2")
    second = cluster.start("decode", "--name=d0")
    for one in (first, second):
      one.said("(joined)")
    want = [answer(port, n) for n in numbers]
    assert metric(port, "ringjax_requests_moved_total") > 6
    more = [cluster.start(x, f"--name={x[0]}1") for x in ("prefill", "decode")]
    for one in more:
      one.said("(joined)")
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
      again = [pool.submit(answer, port, n, max_tokens=24) for n in numbers]
      # Roles are swapped, and one of each is killed, while they are served.
      assert cluster.ask("--set_role=p1=decode")["p1"] == "decode"
      assert cluster.ask("--set_role=d1=prefill")["d1"] == "prefill"
      first.kill()
      second.kill()
      assert [x.result() for x in again] == want
    assert cluster.ask("--instances") == {"p1": "decode", "d1": "prefill"}
    assert metric(port, "ringjax_requests_failed_total") == 0
    # Who leaves finishes what it has begun, and exits well.
    third = cluster.start("decode", "--name=d2")
    third.said("(joined)")
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
      again = [pool.submit(answer, port, n) for n in numbers]
      more[0].process.send_signal(signal.SIGTERM)
      assert [x.result() for x in again] == want
    assert more[0].process.wait(PATIENCE_S) == 0
    # A router that is killed: instances join the next one at its address.
    router.kill()
    third.said("(lost)")
    host, _, at = cluster.join.rpartition(":")
    again = cluster.start("router", f"--cluster_port={at}")
    port = int(again.said(r"serving at http://127.0.0.1:(\d+)"))
    until(lambda: metric(port, "ringjax_instances_decode") == 1)
    until(lambda: metric(port, "ringjax_instances_prefill") == 0)
    assert cluster.ask("--set_role=d1=both")["d1"] == "both"
    assert answer(port, 3) == want[3]
