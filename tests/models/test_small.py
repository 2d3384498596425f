"""The second model that ships: its folder, and what it recalls."""

import json

import jax
import numpy as np
import pytest

from ringjax import models
from ringjax.data import Bytes
from ringjax.data.tasks import documents
from ringjax.data.tasks.filler import Lines
from ringjax.data.tasks.recall import Pairs, Questions
from ringjax.data.tasks.recall_tasks import Links
from ringjax.eval.recall_accuracy import recall_accuracy
from ringjax.models import small

# Least shares of answers that are right in texts of 1,024 bytes.
LEAST = {
  "pairs": (Pairs, {}, 0.7),
  "questions": (Questions, {"facts": 4, "questions": 2}, 0.7),
  "links": (Links, {"facts": 4, "questions": 1}, 0.6),
}


@pytest.fixture(scope="module")
def model():
  return models.load(small.path(), dtype="float32")


def test_folder(tmp_path):
  folder = small.path()
  assert (folder / "README.md").is_file()
  assert (folder / "model.safetensors").stat().st_size <= 12e6
  config = json.loads((folder / "config.json").read_text())
  tokenizer = Bytes(chat_template=None)
  assert config["model_type"] == "llama"
  assert config["vocab_size"] == tokenizer.vocab_size
  assert config["bos_token_id"] == tokenizer.bos_id
  assert config["eos_token_id"] in tokenizer.eos_ids
  tokenizer.save(tmp_path)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    there = json.loads((folder / name).read_text())
    assert there == json.loads((tmp_path / name).read_text())


def test_all_layers_rotate_and_see_everything(model):
  for layer in model.config.layers:
    assert layer.attention.rope is not None
    assert layer == model.config.layers[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", LEAST)
def test_recalls(model, kind):
  cls, options, least = LEAST[kind]
  source = cls(
    tokenizer=Bytes(),
    filler=Lines(text="\n".join(documents.library(held_out=True)[:20])),
    length=1024,
    **options,
  )
  assert recall_accuracy(model, source, examples=8).answers >= least


@pytest.mark.long
def test_knows_the_look_of_python(model):
  text = "\n".join(documents.library(held_out=True)[:1]).encode()[:2000]
  tokens = np.append(256, np.frombuffer(text, np.uint8)).astype(np.int32)
  logits = jax.nn.log_softmax(model(tokens[None, :-1])[0], -1)
  nats = -np.mean(np.take_along_axis(np.asarray(logits), tokens[1:, None], 1))
  assert nats / np.log(2) < 3.2
