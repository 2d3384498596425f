"""What holds on pretrained models; `python -m launch.fetch` brings them."""

from __future__ import annotations

import functools
import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import ringjax as rj
from tests.launch.conftest import PATIENCE_S
from tests.launch.test_serve import serving
from tests.real import make

pytestmark = pytest.mark.real
SMOL, GEMMA = "smollm2-135m", "gemma3-270m"
RECIPE = f"""
from launch.train import default_config

def get_config():
  config = default_config()
  config.init_from = {SMOL!r}
  config.stages = ({{"steps": 4, "length": 128, "batch": 1}},)
  config.optimizer = {{"learning_rate": 1e-4}}
  config.sources = ({{"kind": "library", "weight": 1.0}},)
  config.save_every, config.log_every = 2, 1
  return config
"""
FACTS = json.loads(make.FACTS.read_text("utf-8"))


@functools.cache
def model(name):
  return rj.models.load(name, dtype="float32")


def launched(script, *argv):
  """The JSON object that a script prints."""
  found = subprocess.run(
    [sys.executable, "-m", f"launch.{script}", *argv, "--json"],
    capture_output=True, check=False, text=True,
  )  # fmt: skip
  assert not found.returncode, found.stderr[-3000:]
  return json.loads(found.stdout)


@pytest.mark.parametrize("name", [SMOL, GEMMA])
def test_probabilities_are_those_of_transformers(real_model, name):
  real_model(name)
  facts = FACTS[name]
  ids = np.array([facts["ids"]], np.int32)
  logits = np.asarray(model(name)(ids))[0, :-1].astype(np.float64)
  logits -= logits.max(-1, keepdims=True)
  logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  said = logprobs[np.arange(ids.size - 1), ids[0, 1:]]
  np.testing.assert_allclose(said, facts["logprobs"], atol=2e-3)
  new = rj.infer.generate(
    model(name), ids[:, :40], max_new_tokens=len(facts["answer"])
  )
  assert new.tokens[0].tolist() == facts["answer"]


@pytest.mark.parametrize("name", [SMOL, GEMMA])
def test_a_tokenizer_is_that_of_transformers(real_model, name):
  tokenizer = rj.data.Tokenizer.load(real_model(name))
  ids = tokenizer.encode(make.TEXT, bos=name == GEMMA)
  assert ids.tolist() == FACTS[name]["ids"]
  assert tokenizer.decode(tokenizer.encode(make.TEXT, bos=False)) == make.TEXT
  if (chat := FACTS[name]["chat"]) is None:
    assert tokenizer.chat_template is None
  else:
    assert rj.data.ChatTemplate.of(tokenizer).text(make.CHAT) == chat


def test_a_conversation_over_http(real_model):
  real_model(SMOL)
  import openai

  asked = [{"role": "user", "content": "What is the capital of France?"}]
  with serving(SMOL) as (_, port):
    client = openai.OpenAI(
      base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE_S
    )
    ask = functools.partial(
      client.chat.completions.create, model=SMOL, temperature=0, max_tokens=24
    )
    answer = ask(messages=asked).choices[0].message.content
    parts = ask(messages=asked, stream=True)
    told = "".join(part.choices[0].delta.content or "" for part in parts)
    assert "Paris" in answer and told == answer
    more = {"role": "user", "content": "Say its name again, and nothing else."}
    turns = [*asked, {"role": "assistant", "content": answer}, more]
    assert "Paris" in ask(messages=turns).choices[0].message.content


def test_a_code_is_found_in_a_long_text_over_four_devices(real_model):
  real_model(SMOL)
  found = launched(
    "generate", f"--model={SMOL}", "--devices=4", "--context=6000"
  )
  assert found["passkey"] in found["answer"]


def test_caches_are_in_the_order_of_their_papers(real_model):
  real_model(SMOL)
  kinds = ("dense", "int8", "int2", "kivi2", "sinks:budget=.2", "h2o:budget=.2")
  found = launched(
    "evaluate", "caches", f"--model={SMOL}", "--lengths=1024", "--rows=2",
    *(f"--cache={kind}" for kind in kinds),
  )  # fmt: skip
  _, int8, int2, kivi, sinks, heavy = (kind["loss"] for kind in found["kinds"])
  assert abs(int8) < 0.02
  assert kivi < int2 / 4
  assert heavy < sinks


def test_contexts_are_in_the_order_of_their_papers(real_model):
  real_model(SMOL)
  found = launched(
    "evaluate", "contexts", f"--model={SMOL}", "--lengths=4096",
    "--contexts=16", "--rows=1", "--devices=1",
  )  # fmt: skip
  nll = {cost["way"]: cost["nll"] for cost in found["costs"]}
  assert nll["full"] < nll["recompute"] < nll["ape"] < nll["parallel"]
  assert nll["recompute"] <= nll["moved"] + 0.02


def test_a_training_that_is_killed_goes_on(real_model, tmp_path):
  real_model(SMOL)
  recipe = tmp_path / "recipe.py"
  recipe.write_text(RECIPE)
  argv = [
    sys.executable, "-m", "launch.train", f"--config={recipe}", "--devices=1",
    "--mesh=seq:1",
  ]  # fmt: skip

  def losses(folder):
    lines = (folder / "log.jsonl").read_text("utf-8").splitlines()
    logs = [json.loads(line) for line in lines]
    return {x["step"]: x["loss"] for x in logs if "loss" in x}

  whole, killed = tmp_path / "whole", tmp_path / "killed"
  subprocess.run([*argv, f"--out={whole}"], check=True, capture_output=True)
  with subprocess.Popen(
    [*argv, f"--out={killed}"], stderr=subprocess.PIPE, text=True
  ) as process:
    assert process.stderr is not None
    for line in process.stderr:
      if line.startswith("step") and line.split()[1] == "3":
        break
    process.send_signal(signal.SIGKILL)
  subprocess.run([*argv, f"--out={killed}"], check=True, capture_output=True)
  assert losses(killed) == losses(whole)
  assert pathlib.Path(killed / "model").is_dir()
