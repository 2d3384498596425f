"""launch.beside: prompts in, answers out, attention elsewhere."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys

import numpy as np
import pytest

import ringjax as rj
from launch import beside
from ringjax.data import Tokenizer
from ringjax.models import tiny
from tests.helpers import script
from tests.launch.conftest import ROOT, environment

run = functools.partial(script, beside)

TEXTS = ("the passkey is 1234", "import os", "def f(x):", "a", "if x is None")


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "prompts.txt"
  path.write_text("\n\n".join(TEXTS))
  return str(path)


@pytest.mark.slow
def test_answers_of_worker_processes(file, tmp_path):
  key = tmp_path / "key"
  key.write_text("0123456789abcdef")
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  with subprocess.Popen(
    [
      sys.executable, "-m", "launch.beside", f"--listen=127.0.0.1:{port}",
      f"--key_file={key}",
    ],
    cwd=ROOT,
    env=environment(),
    stderr=subprocess.PIPE,
    text=True,
  ) as worker:  # fmt: skip
    assert worker.stderr is not None
    assert f"127.0.0.1:{port}" in worker.stderr.readline()
    remote = run(
      f"--addresses=127.0.0.1:{port}", f"--key_file={key}", "--rows=2",
      "--every=4", "--max_new_tokens=8", file,
    )  # fmt: skip
    worker.kill()
  local = run("--workers=2", "--max_new_tokens=8", file)
  model = rj.models.load(tiny.path())
  tokenizer = Tokenizer.load(tiny.path())
  want = rj.infer.generate(
    model, [tokenizer.encode(x) for x in TEXTS], max_new_tokens=8,
    stop=tuple(i for i in tokenizer.eos_ids if i < model.config.vocab),
  )  # fmt: skip
  for status, out, err in (remote, local):
    assert status == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [one["prompt"] for one in answers] == list(TEXTS)
    for one, row in zip(answers, want, strict=True):
      np.testing.assert_array_equal(one["tokens"], row)
    assert "of prompts" in err and "waited for workers" in err
  assert [json.loads(x)["start"] for x in remote[1].splitlines()] == [
    0, 4, 8, 12, 16,
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--listen=here",), "--key_file"),
    (("--listen=here", "--key_file=x"), "HOST:PORT"),
    (("--addresses=a:1", "--workers=2", "--key_file=x"), "--workers"),
    (("--addresses=a:1", "--key_file=/none", "FILE"), "--key_file"),
    (("--every=4", "FILE"), "--rows"),
    (("--cache=windowed",), "no prompt"),
    (("/none.txt",), "/none.txt"),
  ],
)
def test_refusals(file, argv, words):
  status, out, err = run(*(file if x == "FILE" else x for x in argv))
  assert status == 2 and out == "" and words in err, err
