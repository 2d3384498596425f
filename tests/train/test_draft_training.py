"""Training of a draft block beside its frozen target."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from launch.train import default_config, recipe_of
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.kv.base import KV
from ringjax.models import longspec
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.mask import Coords
from ringjax.train import batch as batches
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.objective import Objective, each_token
from tests import checkpoints
from tests.helpers import refused

LONG = pytest.mark.long
DRAW = np.random.default_rng(0)
DOCUMENTS = rj.data.Documents([DRAW.integers(0, 90, 40) for _ in range(12)])


def draft(name="llama3", **options):
  target = rj.models.create(checkpoints.config(name), seed=1, **options)
  return longspec.with_draft(target, longspec.LongSpecConfig(window=8))


def rows(count=2, length=32):
  tokens = DRAW.integers(0, 90, (count, length + 1)).astype(np.int32)
  at = np.broadcast_to(np.arange(length, dtype=np.int32), (count, length))
  whole = batches.whole_rows(tokens)
  return whole._replace(positions=at, segments=np.ones_like(at))


def recipe(**options):
  given = {
    "stages": (rj.train.Stage(steps=2, length=32, batch=2),),
    "optimizer": rj.train.Optimizer(learning_rate=1e-2, schedule="constant"),
    "draft": DraftTraining(longest=256),
    "packer": rj.data.Cut(),
  }
  return rj.train.Recipe(**given | options)


def trained_gradients(method, model, batch):
  """Gradients of what a method trains; those of the frozen weights are 0."""

  def loss(params, frozen):
    joined = method.model(params, frozen)
    return Objective().sums(joined, batch, ContextParallel()).loss

  trained, frozen = jax.jit(jax.grad(loss, argnums=(0, 1)))(
    method.start(model), model
  )
  assert all(not np.any(x) for x in jax.tree.leaves(frozen))
  return trained


@pytest.mark.long
def test_the_target_has_gradients_of_zero_and_the_block_others():
  method, mine = DraftTraining(longest=256), draft()
  batch = batches.place(method.rows(rows(), 0), ContextParallel())
  batch = jax.tree.map(lambda x: x[0], batch)
  trained = trained_gradients(method, mine, batch)
  for path, x in jax.tree_util.tree_leaves_with_path(trained):
    # A softmax does not see what a bias adds to all of its keys.
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    assert np.any(x) or "attention.k.bias" in name, name


def losses_that_change(lags, mine):
  """Of each row which tokens' losses change with the twelfth token."""
  method = DraftTraining(longest=64)
  made = method.rows(rows(len(lags)), 0)
  made = made._replace(lag=np.array(lags, np.int32)[:, None])
  other = made.tokens.copy()
  other[:, 12] = (other[:, 12] + 1) % 90
  losses = []
  for tokens in (made.tokens, other):
    batch = batches.place(made._replace(tokens=tokens), ContextParallel())
    batch = jax.tree.map(lambda x: x[0], batch)
    losses.append(each_token(mine, batch, ContextParallel()))
  return [np.flatnonzero(x).tolist() for x in np.asarray(losses[0] - losses[1])]


@pytest.mark.long
def test_a_loss_depends_on_keys_that_are_as_far_behind_alone(monkeypatch):
  mine, lags = draft(), (1, 2, 3)
  weight = mine.block.attention.o.weight
  # Without attention of its own a change comes through the target's keys.
  weight[...] = 0 * weight[...]
  want = [[12, *range(12 + lag, 32)] for lag in lags]
  assert losses_that_change(lags, mine) == want
  # Keys that are one nearer are seen.
  nearer = lambda k, v, at: KV(k, v, Coords(at.pos - 1, at.seg))
  monkeypatch.setattr(longspec, "KV", nearer)
  assert losses_that_change(lags, mine) != want


def test_positions_jump_behind_the_first_ones_and_are_drawn_by_the_row():
  method = DraftTraining(longest=1000, anchors=4, lags=3)
  given = rows(400)
  # Two documents in each row.
  at = np.concatenate([np.arange(20), np.arange(12)]).astype(np.int32)
  given = given._replace(positions=np.broadcast_to(at, (400, 32)))
  made, again = method.rows(given, 7), method.rows(given, 7)
  moved = made.positions - at
  assert (moved[:, :4] == 0).all() and (moved[:, 20:24] == 0).all()
  offsets = moved[:, 4]
  behind = np.r_[4:20, 24:32]
  assert (moved[:, behind] == offsets[:, None]).all()
  assert 0 <= offsets.min() < 20 and 950 < offsets.max() <= 1000 - 32
  assert made.lag.shape == (400, 1)
  shares = np.bincount(made.lag[:, 0], minlength=5) / 400
  assert shares[0] == shares[4] == 0 and abs(shares[1:4] - 1 / 3).max() < 0.1
  np.testing.assert_array_equal(made.positions, again.positions)
  np.testing.assert_array_equal(made.lag, again.lag)
  assert (made.positions != method.rows(given, 8).positions).any()
  plain = DraftTraining(longest=0).rows(given, 7)
  np.testing.assert_array_equal(plain.positions, given.positions)


@pytest.mark.long
def test_a_trained_draft_changes_no_token_and_its_training_resumes(tmp_path):
  def train(folder, steps):
    how = recipe(stages=(rj.train.Stage(steps=steps, length=32, batch=2),))
    with rj.train.Checkpoints(tmp_path / folder, config={}) as saved:
      return rj.train.train(
        how, draft(), rj.train.Mixture([DOCUMENTS]), checkpoints=saved
      )

  whole = train("whole", 3)
  assert train("short", 2).step == 2
  resumed = train("short", 3)
  same = jax.tree.map(np.array_equal, whole.model, resumed.model)
  assert all(jax.tree.leaves(same))
  begun, made = draft(), whole.model
  same = jax.tree.map(np.array_equal, begun.target, made.target)
  assert all(jax.tree.leaves(same))
  moved = jax.tree.map(np.array_equal, begun.block, made.block)
  assert not all(jax.tree.leaves(moved))
  longspec.save(made, tmp_path / "draft")
  target, prompts = begun.target, [[1, 2, 3, 4], [5, 6]]
  want = rj.infer.generate(target, prompts, max_new_tokens=8)
  drafter = speculate.LongSpec(model=str(tmp_path / "draft"), adapt=False)
  got = rj.infer.generate(target, prompts, max_new_tokens=8, speculate=drafter)
  np.testing.assert_array_equal(got.tokens, want.tokens)


@LONG
def test_meshes_train_the_same():
  # Of gradients of zero other optimizers make steps by rounding alone.
  sgd = rj.train.Optimizer(name="sgd", learning_rate=0.1)
  data = rj.train.Mixture([DOCUMENTS])
  one = rj.train.train(recipe(optimizer=sgd), draft(), data).model
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  many = rj.train.train(
    recipe(optimizer=sgd, layout="striped"), draft(mesh=mesh), data, mesh=mesh,
    axis="seq",
  ).model  # fmt: skip
  for a, b in zip(
    jax.tree.leaves(one.block), jax.tree.leaves(many.block), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_recipes_that_cannot_be():
  refused(OptionError, lambda: recipe(cepe=True), "together")
  stage = rj.train.Stage(steps=1, length=300, batch=2)
  refused(OptionError, lambda: recipe(stages=(stage,)), "300 tokens")
  refused(OptionError, lambda: recipe(layout="documents"), "striped")
  train = lambda how, model: rj.train.train(
    how, model, rj.train.Mixture([DOCUMENTS])
  )
  refused(OptionError, lambda: train(recipe(), draft().target), "with_draft")
  refused(OptionError, lambda: train(recipe(draft=None), draft()), "draft")


def test_configs_name_the_draft_and_its_training():
  config = default_config()
  config.draft = {"window": 16}
  config.draft_training = {"longest": 8192, "lags": 2}
  made = recipe_of(config)
  assert made.draft == DraftTraining(longest=8192, lags=2)
  config.draft = {"window": 16, "init": "best"}
  refused(OptionError, lambda: recipe_of(config), "draft.init", "copy")
  config.draft = {}
  refused(OptionError, lambda: recipe_of(config), "without a draft")


@LONG
def test_the_perplexity_of_a_draft_is_the_loss_of_its_training():
  """Rows have the positions and lags that the training draws for them."""
  method, block = DraftTraining(longest=256), draft()
  given = rows()
  ids = [np.append(row, end[-1]) for row, end in zip(*given[:2], strict=True)]
  options = {"length": 32, "rows": 2, "bos": None}
  for seed in (0, 3):
    batch = batches.place(method.rows(given, seed), ContextParallel())
    batch = jax.tree.map(lambda x: x[0], batch)
    expected = np.asarray(each_token(block, batch, ContextParallel())).mean()
    curve = rj.eval.perplexity(block, ids, draft=method, seed=seed, **options)
    assert curve.mean == pytest.approx(expected, rel=1e-5)
  evaluate = lambda model, **more: rj.eval.perplexity(
    model, ids, **options | more
  )
  refused(OptionError, lambda: evaluate(block), "draft", "DraftTraining()")
  refused(OptionError, lambda: evaluate(block.target, draft=method), "draft")
  chunked = {"draft": method, "prefill": "chunked", "chunk": 16}
  refused(OptionError, lambda: evaluate(block, **chunked), "at once")
  few = DraftTraining(longest=16)
  refused(OptionError, lambda: evaluate(block, draft=few), "longest")
