"""The model that ships with the package: its folder, and what it can do."""

import json
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax import models
from ringjax.data.tasks.needle import MultiKey
from ringjax.data.text.bytelevel import Bytes
from ringjax.models import tiny

# Files of the standard library that it was not trained on.
HELD_OUT = ("calendar.py", "copy.py", "random.py", "shutil.py", "tempfile.py")
END = 257


@pytest.fixture(scope="module")
def model():
  return models.load(tiny.path())


def prompt(name, number, depth, length):
  """A text of about `length` bytes with a needle, and the question for it."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  text = "\n".join(
    (root / file).read_text(encoding="utf-8") for file in HELD_OUT
  )
  lines = text[:length].splitlines(keepends=True)
  at = int(depth * (len(lines) - 1))
  lines.insert(at, tiny.NEEDLE.format(name=name, number=number))
  text = "".join(lines) + tiny.QUESTION.format(name=name)
  return Bytes().encode(text, bos=True)


def answer(model, tokens, most=64):
  """Greedy decoding to the end of the text, by a cache."""
  cache = model.init_cache(1, len(tokens) + most)
  rows = jnp.asarray([[len(tokens) - 1]])
  logits, cache = model(tokens[None], cache=cache, rows=rows)
  found = []
  for at in range(len(tokens), len(tokens) + most):
    found.append(int(jnp.argmax(logits[0, -1])))
    if found[-1] == END:
      break
    at = jnp.full((1, 1), at, jnp.int32)
    logits, cache = model(
      np.array([found[-1:]], np.int32), positions=at, cache=cache
    )
  return Bytes().decode(found)


def test_folder():
  folder = tiny.path()
  names = {file.name for file in folder.iterdir()}
  assert names >= {
    "README.md",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
  }
  assert (folder / "model.safetensors").stat().st_size <= 8e6
  config = json.loads((folder / "config.json").read_text())
  tokenizer = Bytes()
  assert config["vocab_size"] == tokenizer.vocab_size
  assert config["bos_token_id"] == tokenizer.bos_id
  assert config["eos_token_id"] in tokenizer.eos_ids
  assert config["pad_token_id"] == tokenizer.pad_id


def test_tokenizer_is_that_of_bytes(tmp_path):
  Bytes(chat_template=None).save(tmp_path)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    there = json.loads((tiny.path() / name).read_text())
    assert there == json.loads((tmp_path / name).read_text())


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "number", "depth"),
  [
    ("amber", "48213", 0.1),
    pytest.param("falcon", "7305", 0.6, marks=pytest.mark.slow),
  ],
)
def test_answers_a_needle(model, name, number, depth):
  tokens = prompt(name, number, depth, 4000)
  want = tiny.ANSWER.format(name=name, number=number)
  assert answer(model, tokens) == want


@pytest.mark.slow
def test_finds_needles_at_every_depth(model):
  """One forward of the text and its answer: greedy decoding would give it."""
  want = tiny.ANSWER.format(name="quartz", number="590162")
  after = np.append(Bytes().encode(want), END)
  rows = []
  for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
    tokens = prompt("quartz", "590162", depth, 4000)
    rows.append(np.concatenate([tokens, after]))
  tokens = np.stack(rows).astype(np.int32)
  first = tokens.shape[1] - len(after) - 1
  at = np.tile(np.arange(first, tokens.shape[1] - 1), (len(rows), 1))
  found = np.argmax(jax.device_get(model(tokens, rows=at)), -1)
  np.testing.assert_array_equal(found, np.tile(after, (len(rows), 1)))


@pytest.mark.long
@pytest.mark.parametrize("keys", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_answers_examples_as_they_are_made_for_training(model, keys):
  task = MultiKey(tokenizer=Bytes(), keys=keys)
  for seed in range(2):
    ids, weights = task.training(task.make(np.random.default_rng(seed), 4000))
    want = np.flatnonzero(weights)
    rows = np.full((1, 64), want[0] - 1)
    rows[0, : len(want)] = want - 1
    found = np.argmax(jax.device_get(model(ids[None], rows=rows)), -1)[0]
    np.testing.assert_array_equal(found[: len(want)], ids[want])


@pytest.mark.long
def test_knows_the_look_of_python(model):
  """Held-out sources cost it much less than 8 bits a byte."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  text = (root / "random.py").read_bytes()[:4000]
  tokens = np.append(256, np.frombuffer(text, np.uint8)).astype(np.int32)
  logits = jax.nn.log_softmax(model(tokens[None, :-1])[0], -1)
  nats = -np.mean(np.take_along_axis(np.asarray(logits), tokens[1:, None], 1))
  assert nats / np.log(2) < 2.8
