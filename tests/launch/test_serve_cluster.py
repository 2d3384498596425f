"""A cluster of processes over loopback: they join, die and change roles."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import threading

import pytest

from launch import serve
from launch.serving.flag_modes import MODES, NO_FLAG
from launch.shared.flag_helpers import flag_name, names_of
from launch.shared.group import FAILED
from ringjax.serve import EngineConfig
from ringjax.serve.cluster import ask_router, read_calls
from tests.launch.conftest import PATIENCE_S, command
from tests.launch.test_serve import (
  metric,
  parsed,
  post,
  read,
  until,
)
from tests.launch.test_serve_hosts import free_ports

LONGEST, KEY = 512, bytes(range(32))


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
      assert self._news.wait_for(look, 3 * PATIENCE_S), self.lines
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
      "--silence=60",
    ]
    if role == "router":
      options += ["--port=0", "--cluster_port=0", "--patience=120"]
    else:
      options += [f"--join={self.join}", "--capacity=2048"]
      if not any(x.startswith("--stages") for x in argv):
        options.append("--rows=4")
    argv = ("-m", "launch.serve", *options, *argv)
    return Process(self._stack.enter_context(command(*argv)))

  def instances(self, router, roles):
    """Starts instances; waits until all have joined."""
    self.join = router.said(r"instances join at (\S+)")
    made = {
      name: self.start(role, f"--name={name}", *argv)
      for name, (role, *argv) in roles.items()
    }
    for one in made.values():
      one.said("(joined)")
    return made

  def ask(self, **fields):
    """Roles of instances, by name, behind a command."""
    host, _, port = self.join.rpartition(":")
    found = ask_router((host, int(port)), KEY, silence_s=60, **fields)
    return {x["name"]: x["role"] for x in found["instances"]}


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


@contextlib.contextmanager
def processes(tmp_path, folder):
  key = tmp_path / "key"
  key.write_bytes(KEY)
  with contextlib.ExitStack() as stack:
    yield Processes(stack, folder, key)


def test_flags_of_a_cluster(tmp_path, capsys):
  pytest.importorskip("uvicorn")
  short = tmp_path / "short"
  short.write_bytes(b"x")
  key = tmp_path / "key"
  key.write_bytes(bytes(32))
  joins = ["--join=127.0.0.1:1", f"--cluster_key={key}"]
  stages = ["--role=prefill", *joins, "--stages=2"]
  for argv, word in (
    (["--role=prefill"], "--join"),
    (["--role=router"], "--cluster_key"),
    (["--role=router", f"--cluster_key={short}"], "16 bytes"),
    (["--role=router", f"--cluster_key={tmp_path / 'no'}"], "--cluster_key"),
    (["--role=router", "--join=a:1", f"--cluster_key={key}"], "--join"),
    (["--stream=4096"], "--stream"),
    (["--layer_parts=2"], "--join"),
    (["--device_pages=9"], "--join"),
    (["--role=router", f"--cluster_key={key}", "--device_pages=9"], "--join"),
    (["--policy=conductor"], "--role=router"),
    (["--num_processes=2", "--port=0"], "pass all three"),
    (["--stages=2"], "--role=prefill --join=HOST:PORT"),
    (["--role=decode", *joins, "--stages=2"], "stages read prompts"),
    ([*stages, "--num_processes=2"], "starts the processes itself"),
    (["--role=prefill", *joins, "--num_processes=2"], "all three"),
    ([*stages, "--cache=int8"], "--cache=dense"),
    ([*stages, "--adapters=a=b"], "--adapters"),
    ([*stages, "--speculate=lookup"], "--speculate"),
    ([*stages, "--layer_parts=2"], "--layer_parts"),
    ([*stages, "--device_pages=9"], "--device_pages"),
    ([*stages, "--host_store=9"], "--host_store"),
    ([*stages, "--mesh=seq:2"], "--mesh"),
    ([*stages, "--rows=2"], "--rows"),
    ([*stages, "--budget=64"], "--budget"),
    ([*stages, "--preempt=swap"], "--preempt"),
    (["--role=router", f"--cluster_key={key}", "--rows=2"], "--rows"),
    (["--role=router", f"--cluster_key={key}", "--piece=8"], "--replan"),
    ([*joins, "--max_num_seqs=4", "--api_keys=x"], "--api_keys"),
    (["--cluster_port=1"], "--role=router"),
    ([*joins, "--instances", "--rows=2"], "--rows"),
    ([*stages[:-1], "--stages=99"], "layers"),
    ([*stages, "--longest=99999999"], "--longest"),
    (["--role=router", f"--cluster_key={key}", "--policy=best"], "conductor"),
    (["--chip=h100"], "--role=router"),
    (["--role=router", f"--cluster_key={key}", "--chip=h0"], "h0"),
    (
      ["--role=router", f"--cluster_key={key}", "--chip=h100", "--times=x"],
      "one of the two",
    ),
    (
      ["--role=router", f"--cluster_key={key}", "--instance_devices=2"],
      "--times or --chip",
    ),
    (
      ["--role=router", f"--cluster_key={key}", "--chip=h100"],
      "a policy that predicts times",
    ),
    (
      ["--role=router", f"--cluster_key={key}", "--bandwidth=1e9"],
      "a policy that predicts times",
    ),
    ([*joins, "--instances", "--role=prefill"], "--role"),
    (["--role=router", f"--cluster_key={key}", "--log_calls=x"], "instance"),
    (["--role=prefill", "--join=a:1", "--stream=4096"], "--role=router"),
    (["--replan=60"], "--role=router"),
    (["--role=router", f"--cluster_key={key}", "--replan=60"], "--slo"),
    (
      ["--role=router", f"--cluster_key={key}", "--slo=ttft=1"],
      "--replan=600",
    ),
    (["--join=a", f"--cluster_key={key}"], "HOST:PORT"),
    (["--join=a:70000", f"--cluster_key={key}"], "HOST:PORT"),
    (["--instances"], "--join"),
    (["--join=a:1", f"--cluster_key={key}", "--set_role=x"], "NAME=ROLE"),
    (["--join=127.0.0.1:1", f"--cluster_key={key}", "--instances"], "reached"),
  ):
    asks = any(x.startswith(("--instances", "--set_role")) for x in argv)
    assert serve.run(parsed(*argv, *[] if asks else ["--port=0"])) == 2
    assert word in capsys.readouterr().err


def test_every_flag_has_a_mode_that_uses_it():
  names = names_of(serve.define)
  used = {name for mode in MODES.values() for name in mode.used}
  assert used == names, "launch/serving/flag_modes.py says which mode uses it"


def test_every_option_of_an_engine_is_a_flag():
  options = {*EngineConfig.options()}
  assert {*NO_FLAG} <= options
  flag_names = {flag_name(EngineConfig, x) for x in options - {*NO_FLAG}}
  assert flag_names <= names_of(serve.define)


def serves(router):
  return int(router.said(r"serving at http://127.0.0.1:(\d+)"))


def all_of(port, numbers, meanwhile=lambda: None):
  """Answers to requests that are asked at once."""
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    found = [pool.submit(answer, port, n) for n in numbers]
    meanwhile()
    return [x.result() for x in found]


@pytest.mark.long
def test_a_cluster_of_processes(tmp_path, folder):
  pytest.importorskip("uvicorn")
  numbers, many = range(12), "--device_pages=100000000"
  with processes(tmp_path, folder) as cluster:
    router = cluster.start("router")
    made = cluster.instances(
      router,
      {
        "p0": ("prefill", "--mesh=seq:2"),
        "p1": ("prefill", "--page=16", "--layer_parts=2", many),
        "d0": ("decode", many, "--host=0.0.0.0"),
        "d1": ("decode",),
      },
    )
    port = serves(router)
    want = all_of(port, numbers)
    assert metric(port, "ringjax_requests_moved_total") > 6

    def change():
      # Two swap their roles, and the other two are killed.
      cluster.ask(what="set_role", name="p1", role="decode")
      cluster.ask(what="set_role", name="d1", role="prefill")
      made["p0"].kill()
      made["d0"].kill()

    assert all_of(port, numbers, change) == want
    until(lambda: metric(port, "ringjax_instances_lost_total") == 2)
    assert cluster.ask(what="instances") == {"p1": "decode", "d1": "prefill"}
    assert metric(port, "ringjax_requests_failed_total") == 0
    # A router that is killed: instances join the next one at its address.
    router.kill()
    at = cluster.join.rpartition(":")[2]
    router = cluster.start("router", f"--cluster_port={at}")
    port = serves(router)
    until(lambda: len(cluster.ask(what="instances")) == 2)
    assert all_of(port, numbers) == want
    # Who is told to end does so.
    for one in (made["d1"], made["p1"], router):
      one.process.send_signal(signal.SIGTERM)
      assert one.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_the_conductor_starts_without_a_file(tmp_path, folder):
  pytest.importorskip("uvicorn")
  log = tmp_path / "calls.csv"
  with processes(tmp_path, folder) as cluster:
    router = cluster.start(
      "router", "--policy=conductor:threshold=2", "--bandwidth=1e9"
    )
    made = cluster.instances(
      router,
      {
        "p0": ("prefill", f"--log_calls={log}"),
        "p1": ("prefill",),
        "d0": ("decode",),
      },
    )
    for one in made.values():
      one.said(r"measured for the router: prompts of 1,000 tokens (\S+) s")
    port = serves(router)
    want = all_of(port, range(12))
    assert metric(port, "ringjax_requests_failed_total") == 0
    assert metric(port, "ringjax_requests_moved_total") > 6
    # What a killed instance has logged is what a router then predicts by.
    made["p0"].kill()
    calls = read_calls(log)
    prompts = [x for x in calls if x.phase == "prefill"]
    assert len(prompts) >= 8 and {x.phase for x in calls} == {
      "prefill", "decode",
    }  # fmt: skip
    router.kill()
    at = cluster.join.rpartition(":")[2]
    router = cluster.start(
      "router", f"--cluster_port={at}", "--policy=local", f"--times={log}"
    )
    port = serves(router)
    until(lambda: len(cluster.ask(what="instances")) == 2)
    assert all_of(port, range(12)) == want


@pytest.mark.slow
def test_an_instance_of_two_processes(tmp_path, folder):
  """Each has a layer; the answers are those of an instance that has both."""
  pytest.importorskip("uvicorn")
  numbers = range(8)
  with processes(tmp_path, folder) as cluster:
    router = cluster.start("router")
    made = cluster.instances(
      router, {"p": ("prefill",), "d": ("decode", "--page=16")}
    )
    port = serves(router)
    expected = all_of(port, numbers)
    made["p"].process.send_signal(signal.SIGTERM)
    assert made["p"].process.wait(PATIENCE_S) == 0
    moved = metric(port, "ringjax_requests_moved_total")
    stages = cluster.instances(router, {"s": ("prefill", "--stages=2")})["s"]
    weights = [
      int(stages.said(rf"rank {n} of 2, .*? (\d+(?:,\d+)*) bytes")
          .replace(",", ""))
      for n in range(2)
    ]  # fmt: skip
    # The embedding is the head, and in both.
    table, norm = 262 * 32 * 4, 32 * 4
    assert weights[1] - norm == weights[0]
    layer = weights[0] - table
    assert 0 < layer < weights[0]
    assert all_of(port, numbers) == expected
    assert metric(port, "ringjax_requests_moved_total") == 2 * moved > 0
    assert metric(port, "ringjax_requests_again_total") == 0
    child = int(stages.said(r"rank 0 of 2, process (\d+)"))
    stages.process.send_signal(signal.SIGTERM)
    assert stages.process.wait(PATIENCE_S) == 0
    assert is_gone(child)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_of_an_instance_is_lost(tmp_path, folder, number):
  """The instance ends and names it; another one reads the prompts."""
  pytest.importorskip("uvicorn")
  numbers = range(12)
  with processes(tmp_path, folder) as cluster:
    router = cluster.start("router")
    made = cluster.instances(
      router,
      {
        "s": ("prefill", "--stages=2", "--silence=30"),
        "p": ("prefill",),
        "d": ("decode",),
      },
    )
    port = serves(router)
    expected = all_of(port, numbers)
    child = int(made["s"].said(r"rank 0 of 2, process (\d+)"))
    lose = lambda: os.kill(child, number)
    assert all_of(port, numbers, lose) == expected
    assert made["s"].process.wait(PATIENCE_S) == FAILED
    word = "is gone" if number == signal.SIGKILL else "has said nothing"
    made["s"].said(f"(rank 0 {word})")
    assert is_gone(child)
    until(lambda: metric(port, "ringjax_instances_lost_total") == 1)
    assert metric(port, "ringjax_requests_failed_total") == 0
    assert all_of(port, numbers) == expected


def is_gone(process):
  """Whether a process has ended."""
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return True
  return False


@pytest.mark.slow
def test_a_hot_prefix_is_copied_between_processes(tmp_path, folder):
  """While its reader is busy, over a link too slow for a request to wait."""
  pytest.importorskip("uvicorn")
  text = "def f(x):\n" + "".join(f"  x = x + {n}\n" for n in range(24))

  def ask(n):
    asked = {"prompt": f"{text}  y = {n}", "max_tokens": 4, "temperature": 0}
    with post(port, asked | {"ignore_eos": True}) as link:
      return read(link)["choices"][0]["text"]

  with processes(tmp_path, folder) as cluster:
    router = cluster.start(
      "router",
      "--policy=conductor:threshold=2,hot_s=0.000001",
      "--bandwidth=1e4",
    )
    made = cluster.instances(router, {"a": ("both",), "b": ("both",)})
    port = serves(router)
    want = ask(0)
    copied = lambda: metric(port, "ringjax_prefixes_copied_total")

    def busy():
      with concurrent.futures.ThreadPoolExecutor(8) as pool:
        [*pool.map(ask, range(1, 9))]
      return copied()

    until(busy, PATIENCE_S)
    assert metric(port, "ringjax_copied_bytes_total") > 0
    assert metric(port, "ringjax_requests_failed_total") == 0
    # Either of them answers alone.
    made["a"].kill()
    assert ask(0) == want


@pytest.mark.slow
def test_two_hundred_requests_are_those_of_one_engine(tmp_path, folder):
  pytest.importorskip("uvicorn")
  numbers, many = range(200), "--device_pages=100000000"
  argv = ["--port=0", f"--model={folder}", f"--longest={LONGEST}", "--rows=4"]
  with command("-m", "launch.serve", *argv) as process:
    want = all_of(serves(Process(process)), numbers)
  with processes(tmp_path, folder) as cluster:
    router = cluster.start("router")
    made = cluster.instances(
      router,
      {
        "p0": ("prefill", "--mesh=seq:4", many),
        "p1": ("prefill", "--page=16"),
        "d0": ("decode", "--mesh=seq:2", many),
        "d1": ("decode", "--page=64", many),
      },
    )
    port = serves(router)
    finished = lambda: metric(port, "ringjax_requests_finished_total")

    def change():
      until(lambda: finished() > 40)
      made["p0"].kill()
      made["d0"].kill()
      late = cluster.instances(router, {"late": ("decode",)})["late"]
      until(lambda: finished() > 120)
      late.process.send_signal(signal.SIGTERM)
      assert late.process.wait(PATIENCE_S) == 0

    assert all_of(port, numbers, change) == want
    assert metric(port, "ringjax_requests_failed_total") == 0
    assert metric(port, "ringjax_instances_lost_total") == 2


def pair_of(cluster, *argv):
  """Two processes of one engine, the first of which joins."""
  (coordinator,) = free_ports(1)
  pair = [
    cluster.start(
      "both", "--mesh=seq:2", f"--coordinator=localhost:{coordinator}",
      "--num_processes=2", f"--process_id={rank}", "--failure_timeout=20",
      "--port=0", *argv,
    )
    for rank in range(2)
  ]  # fmt: skip
  pair[0].said("(joined|serve: )")
  assert not any("serve: " in x for x in pair[0].lines), pair[0].lines
  return pair


@pytest.mark.slow
def test_an_engine_of_two_processes_is_an_instance(tmp_path, folder):
  """It answers alone and beside another one, which goes on when it is lost."""
  pytest.importorskip("uvicorn")
  numbers = range(12)
  with processes(tmp_path, folder) as cluster:
    router = cluster.start("router")
    cluster.instances(router, {"single": ("both",)})
    port = serves(router)
    want = all_of(port, numbers)
    pair = pair_of(cluster, "--name=pair")
    assert cluster.ask(what="instances") == {"pair": "both", "single": "both"}
    assert all_of(port, numbers, pair[1].kill) == want
    assert pair[0].process.wait(PATIENCE_S) == FAILED
    until(lambda: metric(port, "ringjax_instances_lost_total") == 1)
    assert metric(port, "ringjax_requests_failed_total") == 0
    pair = pair_of(cluster, "--name=again")
    assert all_of(port, numbers) == want
    # Whichever of them is told to end.
    pair[1].process.send_signal(signal.SIGTERM)
    for one in pair:
      assert one.process.wait(PATIENCE_S) == 0
    assert cluster.ask(what="instances") == {"single": "both"}
    for argv, words in (
      (("--role=decode",), "--role=both"),
      (("--host_store=1000",), "do not move"),
    ):
      with pytest.raises(AssertionError, match=words):
        pair_of(cluster, *argv)
