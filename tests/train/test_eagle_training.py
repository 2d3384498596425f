"""Training of an EAGLE-3 head over its own predictions."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ringjax as rj
from launch.train import default_config, recipe_of
from ringjax.errors import OptionError
from ringjax.models.hf.tensors import parameters
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train.methods.predict_training import PredictTraining
from ringjax.train.objective import Objective
from tests import eagle_heads, predicting
from tests.helpers import refused

STEPS, DECAY, LENGTHS = 3, 0.8, (5, 8)
DRAW = np.random.default_rng(0)
DOCUMENTS = rj.data.Documents([DRAW.integers(0, 14, 40) for _ in range(12)])
MIXTURE = rj.train.Mixture([DOCUMENTS])


@functools.cache
def documents():
  draw = np.random.default_rng(1)
  # The last token of each is a label alone.
  return [draw.integers(0, 14, n + 1).astype(np.int32) for n in LENGTHS]


def packed():
  """A row with the documents one after the other."""
  join = lambda parts: np.concatenate(list(parts)).astype(np.int32)[None]
  return batches.Batch(
    join(x[:-1] for x in documents()),
    join(x[1:] for x in documents()),
    np.ones((1, sum(LENGTHS)), np.float32),
    join(np.arange(n) for n in LENGTHS),
    join(np.full(n, i + 1) for i, n in enumerate(LENGTHS)),
  )


def recipe(steps=2, **options):
  given = {
    "stages": (rj.train.Stage(steps=steps, length=32, batch=2),),
    "optimizer": rj.train.Optimizer(
      name="sgd", learning_rate=0.1, schedule="constant"
    ),
    "objective": Objective(predict_loss=1.0, predict_steps=STEPS),
    "predict_only": True,
    "packer": rj.data.Cut(),
  }
  return rj.train.Recipe(**given | options)


def published_loss(base, weights, config):
  """Mean of the losses of drafts that begin at each token, float64."""
  sums, counts = np.zeros(STEPS), np.zeros(STEPS)
  table = np.asarray(base.embed.weight.get_value(), np.float64)
  for document, states, logits in target_numbers(base):
    fused = eagle_heads.fused(weights, config, states)
    for start in range(1, len(document) - 1):
      state = fused[:start]
      for step in range(min(STEPS, len(document) - 1 - start)):
        at = start + step
        embedded = table[document[1 : at + 1]]
        g = eagle_heads.layer(
          weights, config, embedded, state, np.arange(float(at))
        )
        counts[step] += 1
        if logits[at].argmax() in eagle_heads.IDS:
          p = np.exp(logits[at][eagle_heads.IDS])
          q = eagle_heads.logits(weights, config, g)[-1]
          log_q = q - np.log(np.exp(q).sum())
          sums[step] -= (p / p.sum() * log_q).sum()
        state = np.concatenate([state, g[-1:]])
  decay = DECAY ** np.arange(STEPS)
  return (sums / counts * decay).sum() / decay.sum()


@functools.cache
def target_numbers(base):
  return [
    (
      x,
      eagle_heads.streams(base, x[:-1]),
      np.asarray(base(x[None, :-1])[0], np.float64),
    )
    for x in documents()
  ]


@pytest.mark.long
def test_loss_and_gradient_of_drafts_from_each_token(tmp_path):
  """Unrolled over all tokens at once as of one draft after the other."""
  base, config = eagle_heads.target(), eagle_heads.settings()
  weights = eagle_heads.tensors(config)
  folder = eagle_heads.write(tmp_path / "head", config)
  model = rj.models.eagle3.load(folder, base)
  method, attend = PredictTraining(), ContextParallel()
  batch = jax.tree.map(lambda x: x[0], batches.place(packed(), attend))
  objective = Objective(predict_loss=1.0, predict_steps=STEPS)

  @jax.jit
  def loss(params):
    sums = objective.sums(method.model(params, model), batch, attend)
    return (sums.loss - sums.nll) / sums.weight

  got, gradient = jax.value_and_grad(loss)(method.start(model))
  want = published_loss(base, weights, config)
  np.testing.assert_allclose(got, want, rtol=2e-5)
  gradients = {k: p.get_value() for k, p in parameters(gradient).items()}
  # Along a change of maps that all keys, values and states go through.
  paths = {
    "fc": "fuse", "midlayer.self_attn.k_proj": "attention.k",
    "midlayer.self_attn.v_proj": "attention.v", "lm_head": "head",
  }  # fmt: skip
  draw, slope, up, down = np.random.default_rng(2), 0.0, {}, {}
  for name, path in paths.items():
    key, by = f"{name}.weight", 1e-4
    change = draw.normal(size=weights[key].shape)
    up[key], down[key] = weights[key] + by * change, weights[key] - by * change
    slope += (np.asarray(gradients[f"{path}.weight"]).reshape(
      change.shape[::-1]).T * change).sum()  # fmt: skip
  losses = [published_loss(base, weights | x, config) for x in (up, down)]
  np.testing.assert_allclose(slope, (losses[0] - losses[1]) / 2e-4, rtol=1e-3)


@pytest.mark.slow
def test_meshes_and_layouts_train_the_same(tmp_path):
  """The head alone changes, and its folder is as published."""
  start = eagle_heads.model()
  one = rj.train.train(recipe(), start, MIXTURE).model
  devices = jax.devices()[:4]
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=devices)
  for layout in ("striped", "zigzag"):
    placed = rj.models.place(start, mesh)
    many = rj.train.train(
      recipe(layout=layout), placed, MIXTURE, mesh=mesh, axis="seq"
    ).model
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=2e-5), one, many
    )
  before, after = parameters(start), parameters(one)
  changed = {
    path
    for path in after
    if not np.array_equal(after[path].get_value(), before[path].get_value())
  }
  assert changed == {x for x in after if x.startswith("stack.blocks.1.")}
  rj.models.eagle3.save(one, tmp_path / "head")
  back = rj.models.eagle3.load(tmp_path / "head", eagle_heads.target())
  tokens = np.arange(12, dtype=np.int32)[None]
  np.testing.assert_array_equal(
    back.predicted_logits(tokens), one.predicted_logits(tokens)
  )


def test_refusals():
  train = lambda how, model: rj.train.train(how, model, MIXTURE)
  head = eagle_heads.model()
  refused(
    OptionError, lambda: train(recipe(predict_only=False), head), "predict_only"
  )
  refused(
    OptionError, lambda: train(recipe(), eagle_heads.target()), "with_head"
  )
  few = rj.data.Documents([DRAW.integers(0, 7, 40) for _ in range(12)])
  one_token = lambda: rj.train.train(
    recipe(), predicting.model(), rj.train.Mixture([few])
  )
  refused(OptionError, one_token, "predict_steps")


def test_configs_name_the_head():
  config = default_config()
  config.eagle = {"taps": (1, 2, 3), "steps": 4}
  made = recipe_of(config)
  assert made.predict_only
  assert made.objective.predict_steps == 4
  for entries, more, word in (
    ({"width": 3}, {}, "width"),
    ({"head": "x", "hidden": 8}, {}, "hidden"),
    ({"steps": 2}, {"predict_loss": 0.1}, "predict_loss"),
    ({"steps": 0}, {}, "predict_steps"),
    ({"draft_vocab": -1}, {}, "draft_vocab"),
    ({"steps": 2}, {"lora": {"rank": 4}}, "leave lora out"),
    ({"steps": 2}, {"weights": "int8"}, "leave weights out"),
    ({"steps": 2}, {"posttraining": {"loss": "dpo"}}, "leave posttraining out"),
  ):
    config = default_config()
    config.eagle = entries
    config.update(more)
    refused(OptionError, functools.partial(recipe_of, config), word)
