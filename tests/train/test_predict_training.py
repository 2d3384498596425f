"""Training of the layer that predicts one token further."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.models.hf.tensors import parameters
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train.objective import Objective
from tests import checkpoints
from tests.helpers import refused

DRAW = np.random.default_rng(0)
DOCUMENTS = rj.data.Documents([DRAW.integers(0, 90, 40) for _ in range(12)])
MIXTURE = rj.train.Mixture([DOCUMENTS])


def model(name="llama3", **options):
  config = checkpoints.config(name)
  return rj.models.create(config, seed=1, predict_layers=True, **options)


def rows(length=32):
  """Two rows, of documents of 12 and 20 tokens."""
  tokens = DRAW.integers(0, 90, (2, length + 1)).astype(np.int32)
  at, segments = np.arange(length, dtype=np.int32), np.ones(length, np.int32)
  at, segments = np.where(at < 12, at, at - 12), np.where(at < 12, 1, 2)
  both = lambda x: np.broadcast_to(x.astype(np.int32), (2, length))
  whole = batches.whole_rows(tokens)
  return whole._replace(positions=both(at), segments=both(segments))


def recipe(factor=0.3, **options):
  given = {
    "stages": (rj.train.Stage(steps=2, length=32, batch=2),),
    "optimizer": rj.train.Optimizer(
      name="sgd", learning_rate=0.1, schedule="constant"
    ),
    "objective": Objective(predict_loss=factor),
    "packer": rj.data.Cut(),
  }
  return rj.train.Recipe(**given | options)


def test_loss_as_from_logits():
  """The mean over labels of tokens that have one before in their document."""
  whole, placed = model(), batches.place(rows(), ContextParallel())
  packed = jax.tree.map(lambda x: x[0], placed)
  sums = jax.jit(
    lambda factor: Objective(predict_loss=factor).sums(
      whole, packed, ContextParallel()
    ),
    static_argnums=0,
  )
  got, plain = sums(0.3), sums(0.0)
  logits = whole.predicted_logits(
    packed.tokens, positions=packed.positions, segment_ids=packed.segments
  )
  law = np.asarray(jax.nn.log_softmax(logits), np.float64)
  nll = -np.take_along_axis(law, np.asarray(packed.labels)[..., None], -1)
  nll = nll[..., 0]
  used = (np.asarray(packed.weights) > 0) & (np.asarray(packed.positions) > 0)
  want = nll[used].mean()
  np.testing.assert_allclose(got.predicted / got.weight, want, rtol=2e-5)
  extra = (got.loss - plain.loss) / got.weight
  np.testing.assert_allclose(extra, 0.3 * want, rtol=2e-4)
  np.testing.assert_allclose(got.nll, plain.nll, rtol=1e-6)


@pytest.mark.slow
def test_meshes_and_layouts_train_the_same():
  one = rj.train.train(recipe(), model(), MIXTURE).model
  devices = jax.devices()[:4]
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=devices)
  for layout in ("striped", "zigzag"):
    many = rj.train.train(
      recipe(layout=layout), model(mesh=mesh), MIXTURE, mesh=mesh, axis="seq"
    ).model
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=2e-5), one, many
    )


@pytest.mark.long
def test_alone_and_resumed(tmp_path):
  """Other weights stay; a run that stops continues as one that does not."""

  def train(folder, steps):
    stages = (rj.train.Stage(steps=steps, length=32, batch=2),)
    how = recipe(1.0, predict_only=True, stages=stages)
    with rj.train.Checkpoints(tmp_path / folder, config={}) as saved:
      return rj.train.train(how, model(), MIXTURE, checkpoints=saved)

  whole = train("whole", 3)
  assert train("short", 2).step == 2
  resumed = train("short", 3)
  same = jax.tree.map(np.array_equal, whole.model, resumed.model)
  assert all(jax.tree.leaves(same))
  before, after = parameters(model()), parameters(whole.model)
  equal = lambda path: np.array_equal(
    after[path].get_value(), before[path].get_value()
  )
  changed = {path for path in after if not equal(path)}
  layer = {path for path in after if path.startswith("stack.blocks.1.")}
  assert changed <= layer
  assert len(changed) > len(layer) // 2
  rj.models.save(whole.model, tmp_path / "model")
  back = rj.models.load(tmp_path / "model", predict_layers=True)
  tokens = np.arange(12, dtype=np.int32)[None]
  np.testing.assert_array_equal(
    back.predicted_logits(tokens), whole.model.predicted_logits(tokens)
  )


@pytest.mark.long
def test_alone_with_a_longer_context(tmp_path):
  """The layer has the positions of the extended model, as its folder says."""
  longer = rj.train.RopeScaling(context=4096, method="yarn")
  stage = rj.train.Stage(steps=1, length=32, batch=2, rope_scaling=longer)
  how = recipe(1.0, predict_only=True, stages=(stage,))
  trained = rj.train.train(how, model("llama2"), MIXTURE).model
  rj.models.save(trained, tmp_path / "model")
  back = rj.models.load(tmp_path / "model", predict_layers=True)
  assert "yarn" in back.source
  tokens = np.arange(12, dtype=np.int32)[None]
  np.testing.assert_array_equal(
    back.predicted_logits(tokens), trained.predicted_logits(tokens)
  )


def test_refusals():
  refused(OptionError, lambda: recipe(0.0, predict_only=True), "predict_loss")
  train = lambda how, model: rj.train.train(how, model, MIXTURE)
  plain = rj.models.create(checkpoints.config("llama3"), seed=1)
  refused(OptionError, lambda: train(recipe(), plain), "with_predict_layer")
  refused(OptionError, lambda: train(recipe(0.0), model()), "weight decay")
  refused(
    OptionError, lambda: recipe(lora=rj.train.Lora(), predict_only=True), "lora"
  )
  warm = (rj.train.Stage(steps=2, length=32, batch=2, index_warm_up=True),)
  refused(OptionError, lambda: recipe(stages=warm), "index_warm_up")
