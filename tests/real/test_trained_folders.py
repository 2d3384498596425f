"""Folders of trained real models, read by transformers and PEFT, and served.

The interpreter of another environment reads them: ORACLE_PYTHON is its path.

  python -m venv oracle; oracle/bin/pip install torch transformers peft
  ORACLE_PYTHON=oracle/bin/python python -m pytest -n 0 -m real \\
      tests/real/test_trained_folders.py
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import ringjax as rj
from tests.launch.test_serve import post, serving

pytestmark = pytest.mark.real
SMOL = "smollm2-135m"
PROMPT = "def mean(values):"
ANSWERED = 8
KINDS = {
  "full": [],
  "lora": ["--config.lora.rank=4"],
  "qlora": ["--config.lora.rank=4", "--config.weights=nf4"],
}
RECIPE = f"""
from launch.train import default_config

def get_config():
  config = default_config()
  config.init_from = {SMOL!r}
  config.save_dtype = "float32"
  config.stages = ({{"steps": 2, "length": 32, "batch": 1}},)
  config.optimizer = {{"learning_rate": 1e-2}}
  return config
"""
READS = """
import json, sys
import torch, transformers
folder, adapter, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = transformers.AutoModelForCausalLM.from_pretrained(
  folder, dtype=torch.float32
)
if adapter:
  import peft
  model = peft.PeftModel.from_pretrained(model, adapter)
with torch.no_grad():
  print(json.dumps(model(torch.tensor([ids])).logits[0].tolist()))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Function from a kind of training to its output folder, after two steps."""
  return functools.cache(
    lambda kind: output_of(kind, tmp_path_factory.mktemp(kind))
  )


def output_of(kind, folder):
  recipe = folder / "recipe.py"
  recipe.write_text(RECIPE)
  argv = [f"--config={recipe}", f"--out={folder / 'out'}", *KINDS[kind]]
  subprocess.run(
    [sys.executable, "-m", "launch.train", "--mesh=seq:1", *argv],
    check=True,
    capture_output=True,
  )
  return folder / "out"


@pytest.fixture
def oracle():
  """Path of the other interpreter; without one the test is skipped."""
  python = os.environ.get("ORACLE_PYTHON")
  if not python:
    pytest.skip("needs ORACLE_PYTHON, an interpreter with transformers, peft")
  return python


def check_logits(want, python, folder, adapter, ids):
  """Compares with transformers' logits [T, V], with an adapter PEFT's."""
  reader = subprocess.run(
    [python, "-c", READS, str(folder), str(adapter or ""), json.dumps(ids)],
    capture_output=True,
    check=False,
    text=True,
    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
  )
  assert not reader.returncode, reader.stderr[-3000:]
  got = np.array(json.loads(reader.stdout))
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
def test_others_read_what_is_trained(
  kind, oracle, real_model, trained, tmp_path
):
  real_model(SMOL)
  out = trained(kind)
  tokenizer = rj.data.Tokenizer.load(out / "model")
  ids = tokenizer.encode(PROMPT).tolist()
  logits = lambda model: np.asarray(model(np.array([ids], np.int32)))[0]
  want = logits(rj.models.load(out / "model", dtype="float32"))
  base = rj.models.load(SMOL, dtype="float32")
  assert np.abs(want - logits(base)).max() > 1e-2
  check_logits(want, oracle, out / "model", None, ids)
  assert (out / "adapter").is_dir() == (kind != "full")
  if kind == "full":
    return
  # PEFT adds to floats; of adapters over codes these are decoded.
  if kind == "qlora":
    coded = rj.models.with_coded_weights(base, bits=4, levels="nf4")
    base = rj.models.with_float_weights(coded)
  rj.models.save(base, tmp_path / "base")
  check_logits(want, oracle, tmp_path / "base", out / "adapter", ids)


def test_a_server_answers_with_and_without_an_adapter(real_model, trained):
  real_model(SMOL)
  out = trained("lora")

  def generated(*argv):
    options = ["--raw", f"--max_new_tokens={ANSWERED}", "--json", *argv]
    process = subprocess.run(
      [
        *(sys.executable, "-m", "launch.generate", f"--model={SMOL}"),
        *(f"--prompt={PROMPT}", *options),
      ],
      capture_output=True,
      check=False,
      text=True,
    )
    assert not process.returncode, process.stderr[-3000:]
    return json.loads(process.stdout)["answer"]

  want = {
    SMOL: generated(),
    "tuned": generated(f"--adapter={out / 'adapter'}"),
  }
  assert want[SMOL] != want["tuned"]
  body = {"prompt": PROMPT, "max_tokens": ANSWERED, "temperature": 0}
  with serving(SMOL, f"--adapters=tuned={out / 'adapter'}") as (_, port):
    for name, answer in want.items():
      with post(port, body | {"model": name}) as link:
        choices = json.loads(link.getresponse().read())["choices"]
      assert choices[0]["text"] == answer
