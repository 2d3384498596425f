"""Models whose feedforward neurons are on disk answer as resident ones do."""

from __future__ import annotations

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  MemoryEstimateError,
  MeshError,
  OptionError,
)
from ringjax.models import small
from ringjax.models.weights.neurons import FILE
from ringjax.store.flash.neuron_file import NeuronFile
from tests import checkpoints
from tests.helpers import refused

PROMPTS = [[5, 6, 7, 8, 9] * 3, [9, 10, 11], [1, 2, 3, 4, 5, 6, 7]]


def create(name, **more):
  config = checkpoints.config(name) | {"hidden_act": "relu"} | more
  return rj.models.create(config, seed=3)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
  """A gated model of 3 layers and its neurons."""
  path = tmp_path_factory.mktemp("gated")
  model = create(
    "llama_gqa_bias", num_hidden_layers=3, intermediate_size=83, mlp_bias=True
  )
  rj.models.write_neurons(model, path)
  return model, path


def answers(model, prompts=PROMPTS, **how):
  new = rj.infer.generate(model, prompts, max_new_tokens=9, **how)
  return new.tokens


@pytest.mark.long
@pytest.mark.parametrize("window", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_gated_model_answers_the_same(gated, window):
  model, path = gated
  sparse = rj.models.sparse_model(model, path, window=window, memory="1MB")
  got = answers(sparse)
  np.testing.assert_array_equal(got, answers(model))
  found = rj.models.neuron_report(sparse)
  record = 2 * model.config.embed * 4
  assert found.bytes_read == found.fresh * record
  assert found.layers == 3 and found.neurons == 3 * 83
  # The prompts are few tokens, and one call; then each token but the last.
  assert (found.calls, found.whole_calls) == (3 * 9, 0)
  assert 0 < found.fresh < found.needed < found.calls * 83
  assert found.used >= found.needed
  if window > 1:
    assert found.used > found.needed and found.hit_share > 0.1
  tokens = np.arange(2 * 5).reshape(2, 5)
  np.testing.assert_allclose(
    sparse(tokens), model(tokens), atol=2e-5, rtol=2e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "starcoder2"])
def test_a_plain_model_with_biases_answers_the_same(tmp_path, name):
  """Of layers on disk, whose feedforwards are never all in memory."""
  model = create(name)
  rj.models.save(model, tmp_path / "model")
  placed = rj.models.load(tmp_path / "model", placement="disk=.5,device=.5")
  rj.models.write_neurons(placed, tmp_path)
  sparse = rj.models.sparse_model(placed, tmp_path, window=2)
  assert sparse.stack.placed is None
  weights = lambda m: sum(x.nbytes for x in jax.tree.leaves(m))
  found = rj.models.neuron_report(sparse)
  assert weights(sparse) <= weights(model) - found.disk_bytes / 2 + 100
  np.testing.assert_array_equal(answers(sparse), answers(model))


@pytest.mark.slow
def test_few_rows_read_layers_whole_and_many_memory_is_kept(gated):
  """Calls that need more than a window holds are answered all the same."""
  model, path = gated
  sparse = rj.models.sparse_model(model, path, memory=30_000)
  found = rj.models.neuron_report(sparse)
  windows = [w.nbytes for w in store_of(sparse)._windows.values()]
  assert sum(windows) <= 30_000
  assert max(found.max_rows.values()) < 83 // 2
  np.testing.assert_array_equal(answers(sparse), answers(model))
  found = rj.models.neuron_report(sparse)
  assert found.whole_calls > 3 * len(PROMPTS)
  refused(
    MemoryEstimateError,
    lambda: rj.models.sparse_model(model, path, memory=9_000),
    "memory",
    "at least",
  )


def store_of(sparse):
  return sparse.stack.blocks[0][0].feedforward.store


@pytest.mark.long
def test_bundling_halves_the_reads(tmp_path):
  """Of a plain model, whose neurons have two parts; the bytes are the same."""
  model = create("gpt_neox", num_hidden_layers=1, intermediate_size=83)
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  parts = {
    "down": normal(model.config.embed, 5),
    "up": normal(5, 83),
    "bias": normal(83) - 2,
  }
  digest = write_both(model, tmp_path)
  predictors = rj.models.NeuronPredictors(digest, 0.0, {0: parts}, {})
  found = []
  for bundled in (True, False):
    sparse = rj.models.sparse_model(
      model,
      tmp_path / str(bundled),
      predictors=predictors,
      window=2,
      memory="1MB",
    )
    for n in range(4):
      sparse(np.arange(3)[None] + n)
    found.append(rj.models.neuron_report(sparse))
  bundled, apart = found
  assert bundled.fresh == apart.fresh > 0
  assert bundled.bytes_read == apart.bytes_read
  # The last column may be followed by the first row.
  assert 0 <= 2 * bundled.reads - apart.reads <= bundled.calls == 4


def write_both(model, folder):
  """Neurons in both orders; the model's digest."""
  for bundled in (True, False):
    path = rj.models.write_neurons(
      model, folder / str(bundled), bundled=bundled
    )
  return NeuronFile(path).model


@pytest.mark.parametrize("how", ["early:layers=2", "model"])
@pytest.mark.long
def test_drafts_share_a_call_of_the_window(gated, how):
  model, path = gated
  if how == "model":
    how = rj.infer.speculate.DraftModel(model=model)
  sparse = rj.models.sparse_model(model, path, window=3, memory="1MB")
  reports = []
  got = answers(sparse, speculate=how, report=reports.append)
  np.testing.assert_array_equal(got, answers(model))
  found = rj.models.neuron_report(sparse)
  assert reports[0].speculation.accepted > 0
  if how == "early:layers=2":
    # Its two layers are those of the same windows.
    assert found.calls > 3 * 9
  else:
    assert found.calls < 3 * 9


@pytest.mark.long
def test_a_session_goes_on(gated):
  """A second turn, with a cache of codes."""
  model, path = gated
  sparse = rj.models.sparse_model(model, path, window=2)
  found = []
  for m in (model, sparse):
    session = rj.infer.Session(m, 64, batch=3, cache_kind="int8")
    first = answers(m, cache=session)
    found.append(np.concatenate([first, answers(m, cache=session)], 1))
  np.testing.assert_array_equal(*found)


def test_sums_of_whole_numbers_are_exact_for_any_window(tmp_path):
  """Where rounding plays no part, every bit is that of the resident layer."""
  model = create("llama3", num_hidden_layers=2, intermediate_size=61)
  blocks = model.stack.blocks[0][0].feedforward
  rng = np.random.default_rng(0)
  for linear in (blocks.gate, blocks.up, blocks.down):
    shape = linear.weight.get_value().shape
    linear.weight = linear.weight.replace(
      jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
    )
  rj.models.write_neurons(model, tmp_path)
  x = [
    jnp.asarray(rng.integers(-2, 3, (2, 3, model.config.embed)), jnp.float32)
    for _ in range(12)
  ]
  attend = rj.models.ContextParallel(axis=None)
  layer = lambda m, n: jax.tree.map(lambda a: a[n], m.stack.blocks[0][0])
  run = jax.jit(lambda f, x: f(x, attend))
  for window in (1, 2, 7):
    sparse = rj.models.sparse_model(model, tmp_path, window=window)
    for n in range(2):
      have, want = layer(sparse, n).feedforward, layer(model, n).feedforward
      for each in x:
        np.testing.assert_array_equal(run(have, each), run(want, each))


@pytest.mark.slow
def test_a_threshold_is_said_and_one_for_all_paths(tmp_path):
  """SiLU is refused by name; with a threshold few tokens and many agree."""
  model = create("llama3", hidden_act="silu", intermediate_size=61)
  rj.models.write_neurons(model, tmp_path)
  refused(
    OptionError,
    lambda: rj.models.sparse_model(model, tmp_path),
    "'silu'",
    "threshold",
  )
  sparse = rj.models.sparse_model(model, tmp_path, threshold=0.05, memory="1MB")
  none = rj.models.sparse_model(model, tmp_path, threshold=1e-30)
  tokens = np.arange(70)[None] % 60
  many = np.asarray(sparse(tokens))
  exact = np.asarray(model(tokens))
  assert np.abs(many - exact).max() > 1e-3
  np.testing.assert_allclose(none(tokens), exact, atol=2e-5)
  few = np.asarray(sparse(tokens[:, :20]))
  np.testing.assert_allclose(few, many[:, :20], atol=2e-5)
  found = rj.models.neuron_report(sparse)
  assert 0 < found.needed <= found.used


@pytest.mark.long
def test_what_is_not_supported_is_refused_by_name(gated, tmp_path):
  model, path = gated
  sparse = lambda m=model, **how: rj.models.sparse_model(m, path, **how)
  for how in ({"window": 0}, {"threshold": -1}, {"memory": "much"}):
    refused(OptionError, lambda how=how: sparse(**how), *how)
  refused(
    CheckpointMismatchError,
    lambda: sparse(create("llama_gqa_bias")),
    "of the model",
  )
  refused(
    OptionError, lambda: rj.models.write_neurons(create("mixtral"), tmp_path),
    "mixtral", "Experts",
  )  # fmt: skip
  coded = rj.models.with_coded_weights(model)
  refused(
    OptionError, lambda: rj.models.write_neurons(coded, tmp_path), "codes"
  )
  mesh = rj.make_mesh((2,), ("seq",))
  refused(
    MeshError,
    lambda: sparse(rj.models.place(model, mesh)),
    "mesh",
  )
  made, tokens = sparse(), np.ones((1, 3), int)
  refused(OptionError, lambda: rj.models.save(made, tmp_path / "s"), "neurons")
  refused(OptionError, lambda: sparse(made), "neurons on disk")
  refused(OptionError, lambda: rj.models.neuron_report(model), "resident")
  refused(
    OptionError,
    lambda: jax.grad(lambda m: m(tokens).sum(), allow_int=True)(made),
    "gradient",
  )


def test_a_file_that_shrinks_is_an_error_of_the_call(gated, tmp_path):
  model, _ = gated
  rj.models.write_neurons(model, tmp_path)
  sparse = rj.models.sparse_model(model, tmp_path)
  tokens = np.arange(5)[None]
  want = np.asarray(sparse(tokens))
  whole = (tmp_path / FILE).read_bytes()
  os.truncate(tmp_path / FILE, len(whole) // 2)
  refused(CheckpointFormatError, lambda: answers(sparse), FILE, "changed")
  refused(CheckpointFormatError, lambda: sparse(tokens[:, :4] + 7), FILE)
  (tmp_path / FILE).write_bytes(whole)
  again = rj.models.sparse_model(model, tmp_path)
  np.testing.assert_allclose(again(tokens), want, atol=1e-6)


def learned(tmp_path, threshold=0.0):
  """A model, its predictors, and texts."""
  model = create("llama3", num_hidden_layers=2, intermediate_size=61)
  texts = np.random.default_rng(0).integers(0, 60, (16, 40))
  made = rj.train.train_predictors(
    model, texts, rank=99, epochs=40, threshold=threshold
  )
  rj.models.write_neurons(model, tmp_path)
  made.save(tmp_path)
  return model, made, texts


@pytest.mark.long
def test_predictors_miss_few_neurons_and_leave_many_out(tmp_path):
  model, made, texts = learned(tmp_path)
  for n in range(2):
    did = made.measured[n]
    assert did["false_negatives"] < 0.1
    # Saying yes to all would miss none.
    assert did["active"] - 0.05 < did["predicted"] < 0.85
  sparse = rj.models.sparse_model(
    model, tmp_path, predictors=tmp_path, window=2, memory="1MB"
  )
  exact = np.asarray(model(texts[:1, :1]))
  far = np.abs(np.asarray(sparse(texts[:1, :1])) - exact).max()
  assert far < np.abs(exact).max() / 4
  found = rj.models.neuron_report(sparse)
  record = 3 * model.config.embed * 4
  assert found.bytes_read == found.fresh * record
  assert 0 < found.needed < found.neurons
  # Read whole, a prompt sums for each token what it sums alone.
  tokens = texts[:2, :39]
  many, few = np.asarray(sparse(tokens)), np.asarray(sparse(tokens[1:, :20]))
  np.testing.assert_allclose(few[0], many[1, :20], atol=2e-5)
  assert np.abs(many - np.asarray(model(tokens))).max() > 1e-3
  again = rj.train.train_predictors(model, texts, rank=99, epochs=40)
  for n, parts in again.layers.items():
    for name, x in parts.items():
      np.testing.assert_array_equal(x, made.layers[n][name])


def roughly_predicted(folder):
  """A model on disk whose predictors name some of the neurons."""
  model = create("llama3", num_hidden_layers=2, intermediate_size=61,
                 initializer_range=0.3)  # fmt: skip
  rj.models.write_neurons(model, folder)
  draw = np.random.default_rng(5)
  normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
  layers = {
    n: {"down": normal(model.config.embed, 6), "up": normal(6, 61),
        "bias": normal(61) - 14}
    for n in range(2)
  }  # fmt: skip
  digest = NeuronFile(folder / FILE).model
  predictors = rj.models.NeuronPredictors(digest, 0.0, layers, {})
  return lambda **how: rj.models.sparse_model(
    model, folder, predictors=predictors, memory="1MB", **how
  )


@pytest.mark.long
def test_a_token_sums_what_its_own_predictor_names(tmp_path):
  """Not what other tokens, earlier calls or a whole layer brought."""
  made = roughly_predicted(tmp_path)
  tokens = np.random.default_rng(2).integers(1, 60, (2, 40)).astype(np.int32)

  def read(sparse, cuts):
    cache, parts = sparse.init_cache(2, 48), []
    for part in np.split(tokens, cuts, axis=1):
      logits, cache = sparse(part, cache=cache)
      parts.append(np.asarray(logits))
    return np.concatenate(parts, 1)

  # 80 tokens are read from whole layers, then 20 in each call.
  used = made(window=7)
  want = read(used, [])
  size = np.abs(want).max()
  assert size > 0.5
  for sparse in (used, made(window=1)):
    got = read(sparse, [10, 20, 30])
    np.testing.assert_allclose(got, want, atol=1e-5 * size)
  alone = np.asarray(used(tokens[1:, :10]))
  np.testing.assert_allclose(alone, want[1:, :10], atol=1e-5 * size)


@pytest.mark.slow
def test_predictors_take_speculation(tmp_path):
  made = roughly_predicted(tmp_path)
  want = answers(made(window=5))
  got = answers(made(window=5), speculate="lookup:count=4,adapt=false")
  np.testing.assert_array_equal(got, want)


def test_predictors_of_another_model_are_refused(gated, tmp_path):
  model, path = gated
  shape = lambda *dims: np.zeros(dims, np.float32)
  parts = {
    "down": shape(model.config.embed, 4),
    "up": shape(4, 83),
    "bias": shape(83),
  }
  layers = dict.fromkeys(range(3), parts)
  other = rj.models.NeuronPredictors("other", 0.0, layers, {0: {"active": 0.5}})
  other.save(tmp_path)
  loaded = rj.models.NeuronPredictors.load(tmp_path)
  assert loaded.model == "other" and loaded.measured[0] == {"active": 0.5}
  refused(
    CheckpointMismatchError,
    lambda: rj.models.sparse_model(model, path, predictors=tmp_path),
    "model other",
  )
  refused(
    CheckpointFormatError,
    lambda: rj.models.sparse_model(model, path, predictors=tmp_path / "none"),
    "none",
  )
  texts = np.ones((8, 9), int)
  train = rj.train.train_predictors
  silu = create("llama3", hidden_act="silu")
  refused(OptionError, lambda: train(silu, texts), "'silu'")
  refused(OptionError, lambda: train(model, texts[:3]), "at least 8")


@pytest.mark.slow
def test_the_second_small_model_with_relu_is_predicted(tmp_path):
  """At most 5 % of active neurons are missed, and .005 nat a byte are lost."""
  for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
    shutil.copy(small.path() / name, tmp_path)
  config = json.loads((small.path() / "config.json").read_text())
  (tmp_path / "config.json").write_text(
    json.dumps(config | {"hidden_act": "relu"})
  )
  model = rj.models.load(tmp_path)
  tokenizer = Tokenizer.load(tmp_path)
  texts = lambda held_out, rows, length: np.asarray(
    [
      ids[:length]
      for ids in map(tokenizer.encode, documents.library(held_out=held_out))
      if len(ids) >= length
    ][:rows]
  )
  made = rj.train.train_predictors(model, texts(False, 32, 256))
  rj.models.write_neurons(model, tmp_path)
  sparse = rj.models.sparse_model(
    model, tmp_path, predictors=made, window=1, memory="16MB"
  )

  def loss(model):
    total = count = 0
    for row in texts(True, 3, 160):
      cache = model.init_cache(1, 160)
      logits, cache = model(row[None, :80], cache=cache)
      for at in range(80, 160):
        chance = jax.nn.log_softmax(logits[0, -1])
        total, count = total - float(chance[row[at]]), count + 1
        logits, cache = model(row[None, at : at + 1], cache=cache)
    return total / count

  assert loss(sparse) < loss(model) + 0.005
  for did in made.measured.values():
    assert did["false_negatives"] <= 0.05
    assert did["predicted"] < did["active"] + 0.05 < 0.75
