"""Scripts whose files are objects: training, texts, models, reports."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest

import ringjax as rj
from launch import (
  calibrate,
  convert,
  evaluate,
  generate,
  serve,
  tokenize,
  train,
)
from launch.shared import common
from ringjax import paths
from ringjax.data import Corpus
from ringjax.models import tiny
from ringjax.train.checkpoints import object_lease
from tests import object_servers
from tests.helpers import script
from tests.launch.test_train import SMALL, weights

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")


@pytest.fixture
def bucket():
  with object_servers.served("memory") as address:
    yield address


def test_texts_become_a_corpus(bucket):
  texts = paths.as_path(bucket) / "texts"
  (texts / "a.txt").write_text("first")
  (texts / "b.jsonl").write_text('{"text": "second"}\n')
  status, out, err = script(
    tokenize, "--tokenizer=bytes", f"--out={bucket}/all.tokens", "--json",
    f"{bucket}/texts",
  )  # fmt: skip
  assert status == 0, err
  assert json.loads(out)["documents"] == len(
    Corpus.open(f"{bucket}/all.tokens")
  )
  status, _, err = script(
    tokenize, "--tokenizer=bytes", f"--out={bucket}/x", f"{bucket}/none"
  )
  assert status == 2 and "is not there" in err


@pytest.mark.parametrize(
  ("module", "flag"),
  [
    (generate, "adapter"),
    (serve, "api_keys"),
    (serve, "log_calls"),
    (evaluate, "plot"),
    (train, "profile"),
  ],
)
def test_flags_that_take_no_address_say_so(module, flag, bucket):
  with pytest.raises(Exception, match="copy the files"):
    common.parse(module.NAME, module.define, [f"--{flag}={bucket}/x"])


def test_the_curve_of_a_log_at_an_address(bucket):
  log = paths.as_path(bucket) / "log.jsonl"
  line = '{"step": %d, "stage": 0, "loss": 2.5, "gradient_norm": 1, '
  line += '"learning_rate": 1, "tokens_per_s": 1}\n'
  # A run that resumed has computed the second step twice; a kill cut the last.
  log.write_text(line % 1 + line % 2 + line % 2 + line[:9])
  status, out, err = script(evaluate, "curves", f"--log={log}")
  assert status == 0, err
  assert [row.split()[0] for row in out.splitlines()] == ["step", "1", "2"]
  status, _, err = script(evaluate, "curves", f"--log={bucket}/none")
  assert status == 2 and "no such object" in err and "--log" in err


def test_a_draft_model_takes_no_address():
  draft = "--speculate=model:model=memory://b/m"
  status, _, err = script(generate, draft, "--prompt=a")
  assert status == 2 and "copy the files" in err


def test_a_calibration_of_a_model_at_an_address_needs_a_folder(bucket):
  status, _, err = script(calibrate, f"--model={bucket}/m")
  assert status == 2 and "of an object storage" in err and "--out" in err


def test_an_output_is_tried_before_anything_is_computed(bucket):
  def fault(number, name, address):
    raise PermissionError("denied")

  with (
    object_servers.with_faults(fault),
    pytest.raises(Exception, match="credentials"),
  ):
    common.parse("evaluate", evaluate.define, [f"--out={bucket}/x.json"])


def log_steps(out):
  log = (paths.as_path(out) / "log.jsonl").read_text().splitlines()
  return [json.loads(line)["step"] for line in log]


@pytest.mark.slow
def test_a_training_is_stopped_and_resumed(bucket, tmp_path, monkeypatch):
  monkeypatch.setattr(object_lease, "LEASE_S", 1.0)
  config = tmp_path / "small.py"
  config.write_text(SMALL.replace('{"steps": 3,', '{"steps": 2,'))
  flags = (f"--config={config}", "--mesh=seq:2", "--config.log_every=1")
  flags = (*flags, "--config.save_every=2")
  assert script(train, *flags, f"--out={tmp_path}/out")[0] == 0
  inner = train._TrainingRun._report
  stops = [4]

  def report(self, recipe, model, mesh, stage, metrics):
    inner(self, recipe, model, mesh, stage, metrics)
    if metrics.step == 4:
      # A step is saved after its lines: a kill in the save loses none.
      saved = log_steps(f"{bucket}/run")
      assert saved == [1, 2, 3, 4] or not stops
    if metrics.step in stops:
      stops.clear()
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(train._TrainingRun, "_report", report)
  out = f"{bucket}/run"
  status, _, err = script(train, *flags, f"--out={out}")
  assert status == 143, err
  status, _, err = script(train, *flags, f"--out={out}")
  assert status == 0 and f"wrote {out}/model" in err
  for a, b in zip(
    weights(tmp_path / "out" / "model"), weights(f"{out}/model"), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert log_steps(out) == [1, 2, 3, 4, 5, 6]
  assert rj.data.Tokenizer.load(f"{out}/model").vocab_size
  # A run that has ended writes its model again.
  status, _, err = script(train, *flags, f"--out={out}")
  assert status == 0, err
  # From there to a training of adapters, and to other scripts.
  status, _, err = script(
    train, f"--config={config}", f"--init_from={out}/model",
    f"--out={bucket}/lora", '--config.lora.rank=2',
    "--config.lora.targets=('q',)",
  )  # fmt: skip
  assert status == 0, err
  status, _, err = script(train, *flags, f"--out={out}", "--metrics=wandb")
  assert status == 2 and "--out with --metrics" in err


@pytest.mark.long
def test_a_model_at_an_address_answers(bucket):
  rj.models.save(rj.models.load(tiny.path()), f"{bucket}/m")
  # What a killed evaluation has measured counts.
  needle = (
    "needle", f"--model={bucket}/m", f"--out={bucket}/needle.json",
    "--task=passkey", "--lengths=128", "--trials=1",
  )  # fmt: skip
  status, _, err = script(evaluate, *needle, "--depths=0.5")
  assert status == 0, err
  status, _, err = script(evaluate, *needle, "--depths=0.5,1")
  assert status == 0 and "1 of 2 cells already" in err
  text = paths.as_path(bucket) / "prompt.txt"
  text.write_text("def read(path):")
  status, out, err = script(
    generate, f"--model={bucket}/m", f"--prompt_file={text}",
    "--max_new_tokens=2", "--json",
  )  # fmt: skip
  assert status == 0, err
  assert json.loads(out)
  status, _, err = script(
    convert, f"--model={bucket}/m", f"--out={bucket}/m2", "--dtype=bfloat16"
  )
  assert status == 0, err
  converted = json.loads((paths.as_path(bucket) / "m2/config.json").read_text())
  assert converted["dtype"] == "bfloat16"
  status, _, err = script(
    convert, f"--model={bucket}/m", f"--out={bucket}/m2", "--dtype=bfloat16"
  )
  assert status == 2 and "a new or an empty folder" in err
