"""QK-clip: heads with large attention logits, against logits made in full."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import models
from ringjax.data import Documents
from ringjax.errors import OptionError
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.attention import api
from ringjax.train import (
  Lora,
  Mixture,
  Objective,
  Optimizer,
  Recipe,
  Stage,
  step,
  train,
)
from ringjax.train import batch as batches
from tests import checkpoints
from tests.helpers import mesh_of, refused
from tests.train.test_expert_balance import packed

BASE = {
  "model_type": "llama",
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
}
MODELS = {
  "own key heads": BASE,
  "shared key heads": BASE | {"num_key_value_heads": 2},
  "biases": BASE | {"model_type": "qwen2"},
  "a window": BASE | {"model_type": "mistral", "sliding_window": 9},
  "latent": checkpoints.config("deepseek_v3")
  | {"num_hidden_layers": 2, "first_k_dense_replace": 2},
}


def made(name: str):
  """A model whose odd heads have large logits, and biases other than 0."""
  model = models.create(MODELS[name], seed=1)
  for run in model.stack.blocks:
    for block in run:
      q = block.attention.q
      value = np.array(q.weight.get_value())
      odd = np.arange(value.shape[2]) % 2
      gain = np.where(odd, 60.0, 1.0)[:, None]
      q.weight.set_value(jnp.asarray(value * gain, jnp.float32))
      for linear in (q, getattr(block.attention, "k", None)):
        if linear is not None and linear.bias is not None:
          linear.bias.set_value(jnp.full_like(linear.bias.get_value(), 0.3))
  return model


def stepped(model, rows, *, mesh=None, rules=None, accumulate=1, **options):
  """The model after a step whose learning rate is 0, and its metrics."""
  axes = {} if mesh is None else {"mesh": mesh, "axis": "seq"}
  attend = ContextParallel(**axes)
  model = jax.tree.map(jnp.copy, model)
  if mesh is not None:
    model = models.place(model, mesh, rules)
  optimizer = Optimizer(name="muon", learning_rate=0.0).build(10, mesh)
  run = step.make_step(optimizer, attend, Objective(), **options)
  state = step.start(optimizer, model, mesh)
  state, metrics = run(state, None, batches.place(rows, attend, accumulate))
  return jax.device_get((state.params, metrics))


def full_maxima(q, k, rows, scale, window=None):
  """Largest logits [N] over all pairs of tokens that may see each other."""
  seg, pos = rows.segments, rows.positions
  q, k = (np.asarray(x, np.float64) for x in (q, k))
  k = np.repeat(k, q.shape[2] // k.shape[2], 2)
  scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
  distance = pos[:, :, None] - pos[:, None]
  sees = (seg[:, :, None] == seg[:, None]) & (seg[:, None] > 0)
  sees &= distance >= 0
  if window is not None:
    sees &= distance < window
  return np.where(sees[:, None], scores, -np.inf).max((0, 2, 3))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
  "mesh", [None, pytest.param(dict(seq=4), marks=pytest.mark.long)]
)
def test_maxima_are_those_of_all_pairs(mesh, window):
  rows = packed(2, 28)
  draw = np.random.default_rng(0)
  q = draw.normal(size=(2, 28, 4, 8)).astype(np.float32) * 5
  k = draw.normal(size=(2, 28, 2, 8)).astype(np.float32)
  mask = rj.Causal() & rj.SameSegment()
  if window is not None:
    mask = mask & rj.Window(window)
  got = api.attention_score_maxima(
    q,
    k,
    mask=mask,
    q_positions=rows.positions,
    kv_positions=rows.positions,
    q_segment_ids=rows.segments,
    kv_segment_ids=rows.segments,
    scale=0.3,
    **({} if mesh is None else {"mesh": mesh_of(**mesh), "axis": "seq"}),
  )
  assert np.all(np.asarray(got)[rows.segments == 0] == -np.inf)
  want = full_maxima(q, k, rows, 0.3, window)
  np.testing.assert_allclose(np.asarray(got).max((0, 1)), want, rtol=1e-5)


def logits_of(model, rows):
  """Largest logits of each layer's heads, [L, N]."""
  attend = ContextParallel()
  batch = jax.tree.map(lambda x: x[0], batches.place(rows, attend, 1))
  run = jax.jit(Objective(record_scores=True).sums, static_argnums=2)
  return np.concatenate(run(model, batch, attend).scores.heads)


def changed(before, after):
  """Names of the parameters that differ in a bit."""
  leaves = lambda x: jax.tree_util.tree_flatten_with_path(jax.device_get(x))[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator=".").split("attention.")[
      -1
    ]
    for (path, a), (_, b) in zip(leaves(before), leaves(after), strict=True)
    if not np.array_equal(a, b)
  }


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("name", "parameters"),
  [
    ("shared key heads", {"q.weight"}),
    ("own key heads", {"q.weight", "k.weight"}),
    ("biases", {"q.weight", "k.weight", "q.bias", "k.bias"}),
    ("a window", {"q.weight", "k.weight"}),
    ("latent", {"q.weight", "kv.weight"}),
  ],
)
def test_logits_are_at_most_the_threshold_after_a_step(name, parameters):
  rows, model = packed(2, 28), made(name)
  before = logits_of(model, rows)
  threshold = float(before[0].max()) / 4
  clipped, metrics = stepped(model, rows, qk_clip=threshold)
  assert metrics.scores.largest == before.max()
  assert metrics.scores.clipped == (before > threshold).sum()
  # The input of the first layer is the same after the step.
  want = np.minimum(before[0], threshold)
  assert np.any(want < before[0])
  np.testing.assert_allclose(logits_of(clipped, rows)[0], want, rtol=1e-5)
  names = {x.removesuffix(".value") for x in changed(model, clipped)}
  assert names == parameters
  weights = [x.stack.blocks[0][0].attention.q.weight for x in (model, clipped)]
  old, new = (np.asarray(x.get_value())[0] for x in weights)
  stays = before[0] <= threshold
  np.testing.assert_array_equal(new[:, stays], old[:, stays])


@pytest.mark.long
def test_a_step_below_the_threshold_is_the_step_without_one():
  rows, model = packed(2, 28), made("own key heads")
  got, metrics = stepped(model, rows, qk_clip=1e9)
  want, plain = stepped(model, rows)
  assert not changed(want, got)
  assert metrics.loss == plain.loss
  assert metrics.scores.clipped == 0
  assert plain.scores is None


@pytest.mark.long
def test_a_step_that_is_not_finite_clips_nothing():
  rows, model = packed(2, 28), made("own key heads")
  weights = np.full_like(rows.weights, np.nan)
  got, metrics = stepped(model, rows._replace(weights=weights), qk_clip=1.0)
  assert not metrics.finite
  assert metrics.scores.largest > 1
  assert metrics.scores.clipped == 0
  assert not changed(model, got)


MESHES = {
  "seq": (dict(seq=4), None),
  "data": (dict(data=2, seq=2), None),
  "heads": (
    dict(model=2, seq=2),
    models.Rules(heads="model", kv_heads="model"),
  ),
  "stages": (dict(stage=2, seq=2), None),
}


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "axes", "accumulate"),
  [
    ("shared key heads", "seq", 1),
    ("own key heads", "data", 2),
    ("shared key heads", "heads", 1),
    ("own key heads", "stages", 1),
    ("latent", "seq", 1),
    ("latent", "heads", 1),
  ],
)
@pytest.mark.long_cases(2)
def test_the_mesh_and_micro_batches_make_no_difference(name, axes, accumulate):
  rows, model = packed(4, 32), made(name)
  threshold = float(logits_of(model, rows).max()) / 4
  want, metrics = stepped(model, rows, qk_clip=threshold)
  sizes, rules = MESHES[axes]
  got, sharded = stepped(
    model,
    rows,
    mesh=mesh_of(**sizes),
    rules=rules,
    accumulate=accumulate,
    qk_clip=threshold,
  )
  assert metrics.scores.clipped == sharded.scores.clipped > 0
  np.testing.assert_allclose(
    sharded.scores.largest, metrics.scores.largest, rtol=1e-5
  )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_a_recipe_clips_and_reports():
  model = made("own key heads")
  draw = np.random.default_rng(0)
  documents = Documents([draw.integers(0, 64, 20) for _ in range(20)])
  recipe = Recipe(
    stages=(Stage(steps=2, length=32, batch=2),),
    optimizer=Optimizer(name="muon", qk_clip=2.0),
  )
  scores: list[Any] = []
  train(
    recipe,
    model,
    Mixture([documents]),
    report=lambda stage, report: scores.append(report.scores),
  )
  assert scores[-1].largest > 2
  assert scores[-1].clipped > 0


def test_what_a_threshold_does_not_go_with():
  stages = (Stage(steps=1, length=32, batch=2),)
  optimizer = Optimizer(qk_clip=100.0)
  with pytest.raises(OptionError, match="qk_clip"):
    Optimizer(qk_clip=0.0)
  cases: tuple[dict[str, Any], ...] = (
    dict(lora=Lora()),
    dict(objective=Objective(predict_loss=0.3)),
    dict(objective=Objective(predict_loss=0.3), predict_only=True),
  )
  for options in cases:
    refused(
      OptionError,
      lambda options=options: Recipe(
        stages=stages, optimizer=optimizer, **options
      ),
      "qk_clip: got 100 with",
      "leave qk_clip out",
    )
  for options in ({"predict_loss": 0.3}, {"index_warm_up": True}):
    with pytest.raises(OptionError, match="qk_clip: got 100 with"):
      step.make_step(
        optimizer.build(1),
        ContextParallel(),
        Objective(**options),
        qk_clip=100.0,
      )
  with pytest.raises(OptionError, match="qk_clip: got 100 in a training by"):
    rj.rl.RewardRecipe(
      steps=1,
      rewards=rj.rl.RewardConfig(functions=lambda *_: 0.0),
      optimizer=optimizer,
    )


@pytest.mark.long
def test_models_whose_logits_are_not_clipped():
  attend = ContextParallel()
  stages = (Stage(steps=1, length=32, batch=2),)
  recipe = Recipe(stages=stages, optimizer=Optimizer(qk_clip=100.0))
  for name, words in {
    "qwen3": "norms of queries and keys",
    "gemma2": "a soft cap",
    "longcat_flash": "layers of two attentions",
    "deepseek_v32": "an index that chooses keys",
    "falcon_h1": "layers of Beside",
    "mamba2": "layers without attention",
  }.items():
    model = models.abstract(checkpoints.config(name))
    refused(
      OptionError,
      lambda model=model: rj.train.recipe.check(recipe, model, attend),
      "qk_clip: got 100",
      words,
    )
