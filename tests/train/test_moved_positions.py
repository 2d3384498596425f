"""Trainings of layers and heads that draft, at positions of a longer text."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ringjax as rj
from launch.train import default_config, recipe_of
from ringjax.errors import OptionError
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.rope import Rope
from ringjax.train import batch as batches
from ringjax.train.objective import Objective
from tests import eagle_heads, predicting
from tests.helpers import refused

DRAW = np.random.default_rng(0)
DOCUMENTS = rj.data.Documents([DRAW.integers(0, 7, 20) for _ in range(24)])
MIXTURE = rj.train.Mixture([DOCUMENTS])
MOVED = rj.train.PredictTraining(longest=256, anchors=2)
# Each model, and the options of its loss.
CASES = {
  "llama3": (functools.partial(predicting.model, "llama3"), {}),
  "glm4_moe": (predicting.model, {}),
  "mimo_v2_flash": (functools.partial(predicting.model, "mimo_v2_flash"), {}),
  "eagle3": (eagle_heads.model, {"predict_steps": 4}),
}


@functools.cache
def packed():
  """A row of documents of 7, 12 and 5 tokens."""
  lengths = 7, 12, 5
  tokens = DRAW.integers(0, 7, (2, 1 + sum(lengths))).astype(np.int32)
  of_rows = lambda parts: np.tile(np.concatenate(parts), (2, 1)).astype(
    np.int32
  )
  return batches.whole_rows(tokens)._replace(
    positions=of_rows([np.arange(n) for n in lengths]),
    segments=of_rows([np.full(n, i + 1) for i, n in enumerate(lengths)]),
  )


def recipe(case="llama3", **options):
  given = {
    "stages": (rj.train.Stage(steps=2, length=32, batch=2),),
    "optimizer": rj.train.Optimizer(
      name="sgd", learning_rate=0.1, schedule="constant"
    ),
    "objective": Objective(predict_loss=1.0, **CASES[case][1]),
    "predict_only": True,
    "predict_training": MOVED,
  }
  return rj.train.Recipe(**given | options)


@pytest.mark.long
@pytest.mark.parametrize("case", ["llama3", "eagle3"])
def test_where_nothing_is_rotated_positions_do_not_matter(case, monkeypatch):
  """States, masks and labels follow the order of the tokens of a document."""
  tables = Rope.tables
  monkeypatch.setattr(
    Rope, "tables", lambda self, pos, *more: tables(self, 0 * pos, *more)
  )
  make, options = CASES[case]
  model, attend = make(), ContextParallel()
  objective = Objective(predict_loss=1.0, **options)

  @jax.jit
  @jax.value_and_grad
  def loss(params, batch):
    sums = objective.sums(MOVED.model(params, model), batch, attend)
    return sums.loss - sums.nll

  def loss_and_gradient(anchors):
    method = rj.train.PredictTraining(longest=999, anchors=anchors)
    rows = method.rows(packed(), 3)
    moves = (rows.positions != packed().positions).any()
    assert moves == (anchors < 12)
    batch = jax.tree.map(lambda x: x[0], batches.place(rows, attend))
    return loss(method.start(model), batch)

  want, want_gradient = loss_and_gradient(12)
  for anchors in (1, 6):
    got, gradient = loss_and_gradient(anchors)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-5),
      gradient, want_gradient,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "layout"),
  [
    (case, layout)
    for case in CASES
    for layout in ("striped", "zigzag", "documents")
    if (case, layout) != ("eagle3", "documents")
  ],
)
def test_meshes_and_layouts_train_the_same(case, layout):
  make, _ = CASES[case]
  start = make()
  one = rj.train.train(recipe(case), start, MIXTURE).model
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  many = rj.train.train(
    recipe(case, layout=layout), rj.models.place(start, mesh), MIXTURE,
    mesh=mesh, axis="seq",
  ).model  # fmt: skip
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=2e-5), one, many
  )
  plain = recipe(case, predict_training=rj.train.PredictTraining())
  other = rj.train.train(plain, start, MIXTURE).model
  same = jax.tree.map(np.array_equal, one, other)
  assert not all(jax.tree.leaves(same))


def test_recipes_that_cannot_be():
  refused(OptionError, lambda: recipe(predict_only=False), "predict_only")
  lora = rj.train.Lora()
  refused(OptionError, lambda: recipe(lora=lora), "lora and predict_only")
  for name, value, word in (
    ("length", 300, "300 tokens"), ("segments", "separate", "segments"),
  ):  # fmt: skip
    stage = rj.train.Stage(
      **{"steps": 1, "length": 32, "batch": 2, name: value}
    )
    refused(OptionError, lambda stage=stage: recipe(stages=(stage,)), word)
  none = lambda: rj.train.PredictTraining(longest=99, anchors=0)
  refused(OptionError, none, "anchors", "at least 1")
  sparse = rj.train.with_sparse_attention(
    eagle_heads.target(), "index:heads=2,dim=16,count=4"
  )
  chooses = rj.models.eagle3.with_head(sparse)
  train = lambda: rj.train.train(recipe("eagle3"), chooses, MIXTURE)
  refused(OptionError, train, "choose keys")
  mesh = rj.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
  placed = lambda: rj.train.train(
    recipe("eagle3", layout="documents"), eagle_heads.model(), MIXTURE,
    mesh=mesh, axis="seq",
  )  # fmt: skip
  refused(OptionError, placed, "striped")


def test_configs_name_the_positions():
  entries = {"longest": 8192, "anchors": 3}
  want = rj.train.PredictTraining(**entries)
  for name, value, more in (
    ("predict_only", True, {"predict_loss": 1.0}), ("eagle", {"steps": 4}, {}),
  ):  # fmt: skip
    config = default_config()
    config.update(more | {name: value, "draft_training": entries})
    assert recipe_of(config).predict_training == want
    config.draft_training = entries | {"lags": 2}
    refused(OptionError, functools.partial(recipe_of, config), "lags")
