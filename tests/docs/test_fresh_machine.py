"""The commands of the page of a fresh machine, in its order.

A hub on loopback has the model and an emulator the bucket, by the settings of
their clients; everything else is what the page says.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

import ringjax as rj
from launch import evaluate, serve, tokenize, train
from launch.shared import common
from ringjax import paths
from ringjax.models import small
from tests import object_servers
from tests.launch.test_serve_hosts import free_ports, get
from tests.launch.test_train import weights
from tests.models.hf import mock_hub

# Of the library that reads configs.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how" / "fresh_machine.md").read_text("utf-8")
COMMANDS = dict(
  re.findall(r"<!-- commands: (.+?) -->\n```bash\n(.*?)```", PAGE, re.DOTALL)
)
NAME, BUCKET = "Qwen/Qwen2.5-0.5B-Instruct", "s3://my-bucket"
SCRIPTS = {x.NAME: x for x in (evaluate, serve, tokenize, train)}
# What a wheel is built of.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ringjax", "launch")
# Calls as Hermes and Qwen write them, by which the server knows the format.
TEMPLATE = (
  "{% for t in tools or [] %}{{ t | tojson }} <tool_call>\n"
  '{"name": ..., "arguments": ...}\n</tool_call>\n{% endfor %}'
  "{% for m in messages %}{% if m.role == 'user' %}<|user|>"
  "{% elif m.role == 'assistant' %}<|assistant|>{% else %}<|system|>{% endif %}"
  "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
  "{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = [{"role": "user", "content": "How warm is it in Oslo?"}]


def words_of(block):
  """Words of the commands of ringjax in a block, without heredocs."""
  plain = re.sub(r"<<'EOF'\n.*?\nEOF\n", "\n", block, flags=re.DOTALL)
  for line in plain.replace("\\\n", " ").splitlines():
    if line.startswith("ringjax-"):
      yield shlex.split(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_scripts_have_the_flags_of_the_page(name, tmp_path, monkeypatch):
  """Configs are read too, and values are checked as far as parsing does."""
  monkeypatch.chdir(tmp_path)
  (config,) = re.findall(
    r"cat > finetune.py <<'EOF'\n(.*?)EOF\n", PAGE, re.DOTALL
  )
  (tmp_path / "finetune.py").write_text(config)
  with object_servers.served("memory") as bucket:
    for command, *argv in words_of(COMMANDS[name].replace(BUCKET, bucket)):
      script = SCRIPTS.get(command.removeprefix("ringjax-"))
      if script is not None:
        common.parse_words(script.NAME, script.define, argv)
      else:
        assert command == "ringjax-lm-eval"
  assert "```bash" not in re.sub(
    r"<!-- commands: .+? -->\n```bash\n", "", PAGE
  ), "a block of commands without a name"


class Machine:
  """A folder in which a user types the commands of the page.

  Args:
    folder: Empty folder.
    settings: Environment variables of the clients of the hub and the bucket.
    texts: Texts of the page, and what stands in their place.
  """

  def __init__(self, folder, settings, texts):
    self.folder, self._texts = folder, texts
    environment = {
      key: value
      for key, value in os.environ.items()
      if not key.startswith(("JAX_", "XLA_", "HF_", "PYTHONPATH", "VIRTUAL_"))
    }
    path = [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    self._environment = environment | settings | {
      "PATH": os.pathsep.join(path),
      "JAX_PLATFORMS": "cpu",
      # Not what these commands are about, and half of their time.
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "HF_HOME": str(folder / "huggingface"),
      "PYTHONUNBUFFERED": "1",
    }  # fmt: skip

  @contextlib.contextmanager
  def started(self, name, folder=None, **changes):
    """The process of a block of commands, which does not outlive the block.

    Its output is in the file `log` of the process.
    """
    text = COMMANDS[name]
    for old, new in (self._texts | changes.pop("texts", {})).items():
      text = text.replace(old, new)
    if (self.folder / "env").exists():
      text = f". env/bin/activate\n{text}"
    log = self.folder / f"{name}.log"
    with log.open("wb") as output:
      process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder or self.folder,
        env=self._environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
      try:
        yield Running(name, process, log)
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()

  def run(self, name, servers=(), **options):
    """Runs a block to its end while servers live; returns its output."""
    with self.started(name, **options) as running:
      while running.process.poll() is None:
        for server in servers:
          server.check()
        time.sleep(0.1)
      assert not running.process.returncode, running.text()
      return running.text()


class Running:
  """A block of commands that runs."""

  def __init__(self, name, process, log):
    self.name, self.process, self._log = name, process, log

  def text(self):
    return self._log.read_text("utf-8", "replace")

  def check(self):
    assert self.process.poll() is None, f"{self.name}: {self.text()}"

  def kill(self):
    """Kills all processes of the block, as the loss of a machine does."""
    os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()

  def interrupt(self):
    """Sends Ctrl-C."""
    os.killpg(self.process.pid, signal.SIGINT)


@contextlib.contextmanager
def lost_request(monkeypatch, key_end):
  """A request for an object that never comes back.

  Yields an event that is set once it has come.
  """
  models = pytest.importorskip("moto.s3.models")
  put, come, over = (
    models.S3Backend.put_object, threading.Event(), threading.Event()
  )  # fmt: skip

  def put_object(self, bucket_name, key_name, *args, **options):
    if key_name.endswith(key_end):
      come.set()
      over.wait()
      raise ConnectionResetError("the client is lost")
    return put(self, bucket_name, key_name, *args, **options)

  with monkeypatch.context() as patch:
    patch.setattr(models.S3Backend, "put_object", put_object)
    try:
      yield come
    finally:
      over.set()


def answer_of(place, tokenizer, count):
  """The greedy answer of a model to the page's question."""
  template = rj.data.ChatTemplate(TEMPLATE, tokenizer.special_names)
  ids = template.tokens(QUESTION, tokenizer)
  ends = tokenizer.eos_ids
  model = rj.models.load(place)
  new = rj.infer.generate(model, [ids], max_new_tokens=count, stop=ends)[0]
  return tokenizer.decode([i for i in new.tolist() if i not in ends])


def wait_until_ready(server, port):
  while (get(int(port), "/ready") or (0,))[0] != 200:
    server.check()
    time.sleep(0.1)


def cached_tokens(port):
  """Tokens of a prompt that a server had in its cache."""
  body = {"prompt": "A prompt of some pages. " * 8, "max_tokens": 1}
  request = urllib.request.Request(
    f"http://127.0.0.1:{port}/v1/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
  )
  with urllib.request.urlopen(request) as response:
    usage = json.loads(response.read())["usage"]
  return usage["prompt_tokens_details"]["cached_tokens"]


def curve(log):
  """Losses by step, and the steps as they stand in a log."""
  rows = [json.loads(line) for line in log.read_text().splitlines()]
  return {row["step"]: row["loss"] for row in rows}, [x["step"] for x in rows]


def check_served(machine, hub):
  """Two processes answer openai's client by the model of the hub."""
  with machine.started("serve 0") as first, machine.started("serve 1") as other:
    shown = machine.run("ask", servers=(first, other))
    first.interrupt()
    ends = first.process.wait(), other.process.wait()
    assert ends == (0, 0), first.text() + other.text()
  (arguments,) = re.findall("call: temperature (.*)\n", shown)
  assert json.loads(arguments)["city"] in ("Oslo", "Rome")
  assert hub.downloads().count("model.safetensors") == 1
  tokenizer = rj.data.Tokenizer.load(small.path())
  want = answer_of(small.path(), tokenizer, 24)
  assert shown.startswith(f"{want}\ncall: "), (shown, want)


def check_measured(machine):
  """The local task of lm_eval has a score."""
  machine.run("measure")
  (results,) = (machine.folder / "results").rglob("results_*.json")
  scores = json.loads(results.read_text())["results"]["capitals"]
  assert scores["acc,none"] in (0, 0.5, 1)


def check_trained(machine, bucket, monkeypatch):
  """A training that is killed in its second save has the curve of another."""
  machine.run("texts")
  run, whole = (paths.as_path(f"{bucket}/{x}") for x in ("run", "whole"))
  with (
    lost_request(monkeypatch, "run/checkpoints/.ringjax/8.json") as come,
    machine.started("train") as training,
  ):
    while not come.wait(0.1):
      training.check()
    training.kill()
  assert not (run / "model" / "config.json").exists()
  machine.run("train")
  machine.run("train", texts={"/run ": "/whole "})
  losses, steps = curve(run / "log.jsonl")
  # Steps after the last saved one were computed twice.
  assert steps == [*range(1, 9), *range(5, 13)]
  assert losses == curve(whole / "log.jsonl")[0]
  arrays = weights(f"{run}/model"), weights(f"{whole}/model")
  for a, b in zip(*arrays, strict=True):
    np.testing.assert_array_equal(a, b)
  rows = machine.run("curve").splitlines()
  assert [int(row.split()[0]) for row in rows[-12:]] == [*range(1, 13)]


def check_trained_served(machine, bucket, port):
  """A server of the trained model finds what an earlier one has cached."""
  tokenizer = rj.data.Tokenizer.load(small.path())
  want = answer_of(f"{bucket}/run/model", tokenizer, 24)
  for again in (False, True):
    with machine.started("serve trained") as server:
      wait_until_ready(server, port)
      assert (cached_tokens(port) > 0) == again
      shown = machine.run("ask", servers=(server,))
      assert shown.startswith(f"{want}\ncall: "), (shown, want)
      server.interrupt()
      assert server.process.wait() == 0, server.text()


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch):
  folder, checkout = tmp_path / "machine", tmp_path / "checkout"
  folder.mkdir()
  checkout.mkdir()
  for name in SOURCES:
    source = ROOT / name
    if source.is_dir():
      ignored = shutil.ignore_patterns("__pycache__")
      shutil.copytree(source, checkout / name, symlinks=True, ignore=ignored)
    else:
      shutil.copy(source, checkout / name)
  names = ("8000", "8001", "7788")
  ports = dict(zip(names, map(str, free_ports(3)), strict=True))
  with mock_hub.serve() as hub, object_servers.served("s3") as bucket:
    hub.repos[NAME] = {
      x.name: x.read_bytes()
      for x in pathlib.Path(small.path()).iterdir()
      if x.suffix in (".json", ".safetensors")
    } | {"chat_template.jinja": TEMPLATE.encode()}
    settings = {"HF_ENDPOINT": hub.url}
    settings |= {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
    machine = Machine(folder, settings, ports | {BUCKET: bucket})
    machine.run("wheel", folder=checkout)
    shutil.move(checkout / "dist", folder / "dist")
    machine.run("install")
    check_served(machine, hub)
    check_measured(machine)
    check_trained(machine, bucket, monkeypatch)
    check_trained_served(machine, bucket, ports["8000"])
