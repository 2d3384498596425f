"""A model whose layers are no loop is the same model as one whose layers are.

Files, stores and peers of one are those of the other.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import ringjax as rj
from ringjax.models.grouping import looped, regrouped
from ringjax.models.weights.calibration import save_calibration
from ringjax.serve import Engine, Request
from ringjax.serve.prefix.store_link import weights_digest
from ringjax.store import Store
from tests.helpers import SMALL

CONFIG = {**SMALL, "num_hidden_layers": 2}
PROMPT = np.arange(1, 41, dtype=np.int32)


@functools.cache
def folder(path):
  rj.models.save(rj.models.create(CONFIG, seed=3), path)
  return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return folder(tmp_path_factory.mktemp("grouping") / "model")


@pytest.fixture(scope="module")
def models(path):
  """The loop, and layers one by one."""
  return tuple(rj.models.load(path, scan=scan) for scan in (True, False))


def test_layers_are_grouped_as_asked(models):
  assert [len(x.stack.runs) for x in models] == [1, 2]


def test_tokens_and_digests_are_the_same(models):
  loop, layers = models
  assert loop.digest == layers.digest
  assert weights_digest(loop) == weights_digest(layers)
  changed = rj.models.create(CONFIG, seed=4)
  assert weights_digest(changed) != weights_digest(loop)
  answers = [
    rj.infer.generate(x, PROMPT[None], max_new_tokens=8).tokens for x in models
  ]
  assert answers[0].tolist() == answers[1].tolist()


def test_arrays_are_regrouped_there_and_back():
  config = {**SMALL, "num_hidden_layers": 5}
  model = rj.models.abstract(config, dtype="float32")
  run = looped(model.stack.runs)
  layers = [dataclasses.replace(run[0], first=n, repeats=1) for n in range(5)]
  arrays = {
    "embed.weight": np.zeros(2),
    "stack.blocks.0.0.q.weight": np.arange(10).reshape(5, 2),
    "stack.blocks.0.0.norm": np.arange(5),
    "tail": np.ones(1),
  }
  single = regrouped(arrays, run, layers)
  assert single["stack.blocks.3.0.q.weight"].tolist() == [[6, 7]]
  again = regrouped(single, layers, run)
  assert [*again] == [*arrays]
  for name, x in arrays.items():
    np.testing.assert_array_equal(again[name], x)
  most = regrouped(single, layers, run, most=2)
  assert most["stack.blocks.0.0.norm"].tolist() == [0, 1]
  # Layers that are stored in different forms can't share an array.
  single["stack.blocks.3.0.norm"] = np.float32([3])
  mixed = regrouped(single, layers, run)
  assert mixed["stack.blocks.0.0.3.norm"] == 3


@pytest.mark.long
def test_a_context_of_one_is_read_by_the_other(models, tmp_path):
  question = np.int32([7, 8, 9])
  answers = []
  for writer, reader in (models, models[::-1], (models[1], models[1])):
    (context,) = rj.infer.ContextLibrary(writer).encode([PROMPT])
    context.save(tmp_path / "context")
    library = rj.infer.ContextLibrary(reader)
    for given in (context, library.load(tmp_path / "context")):
      out = rj.infer.generate(
        reader, [question], contexts=[[given]], max_new_tokens=4
      )
      answers.append(out[0].tolist())
  assert all(x == answers[0] for x in answers)


@pytest.mark.slow
def test_a_calibration_of_one_is_that_of_the_other(models, tmp_path):
  texts = np.random.default_rng(0).integers(1, 60, (2, 32), np.int32)
  made = [rj.infer.calibrate(x, texts) for x in models]
  save_calibration(made[0], tmp_path)
  forms = [{k: x.shape for k, x in x.arrays.items()} for x in made]
  assert forms[0] == forms[1]
  for name, x in made[0].arrays.items():
    if "levels" not in name:
      np.testing.assert_allclose(made[1].arrays[name], x, atol=1e-3)
  answers = [
    rj.infer.generate(
      model, PROMPT[None], max_new_tokens=6,
      cache_kind=f"nuq4:calibration={tmp_path}",
    ).tokens.tolist()
    for model in models
  ]  # fmt: skip
  assert answers[0] == answers[1]


@pytest.mark.slow
def test_the_store_of_one_is_that_of_the_other(models):
  store = Store(host=1 << 24)
  answers, stored = [], []
  for model in models:
    with Engine(
      model, rows=1, capacity=128, longest=64, piece=16, store=store
    ) as engine:
      handle = engine.submit(Request(prompt=PROMPT, max_new_tokens=4))
      answers.append(handle.result().tokens.tolist())
      stored.append(engine.counters.stored_tokens)
  assert answers[0] == answers[1]
  assert stored[0] == 0 < stored[1]


@pytest.mark.slow
def test_ranges_of_one_are_those_of_the_other(models):
  texts = PROMPT[None]
  loop, layers = (rj.infer.activation_ranges(x, texts) for x in models)
  assert loop.sizes.keys() == layers.sizes.keys()
  for name, x in loop.sizes.items():
    np.testing.assert_allclose(layers.sizes[name], x, rtol=1e-4)
  answers = [
    rj.infer.generate(
      rj.infer.integer_model(x, loop), texts, max_new_tokens=6
    ).tokens.tolist()
    for x in models
  ]
  assert answers[0] == answers[1]


@pytest.mark.long
def test_a_prefix_drafts_without_a_loop(models):
  answers = [
    rj.infer.generate(
      x, PROMPT[None], max_new_tokens=8, speculate="early:layers=1"
    ).tokens.tolist()
    for x in models
  ]
  assert answers[0] == answers[1]
