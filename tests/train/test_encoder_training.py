"""Training of an encoder beside a frozen decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from launch.train import default_config, recipe_of
from ringjax.errors import OptionError, ShapeError
from ringjax.models import cepe
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train.methods.encoder_training import ContextSplit, EncoderTraining
from ringjax.train.methods.induction import CrossInductionHeads
from ringjax.train.step import Objective
from tests import checkpoints
from tests.helpers import refused
from tests.train.test_draft_training import trained_gradients

LONG, MORE = pytest.mark.long, ("qwen3", "gemma2")
ENCODER = cepe.Encoder(layers=1, width=16, heads=2, hidden=24, chunk=8)
DRAW = np.random.default_rng(0)
DOCUMENTS = rj.data.Documents([DRAW.integers(0, 90, 40) for _ in range(12)])
AFTER = ContextSplit(chunk=4, chunks=4)
SAME = ContextSplit(chunk=4, chunks=8, repeated=True)


def decoder(name="llama_gqa_bias", **options):
  return rj.models.create(checkpoints.config(name), seed=1, **options)


def model(name="llama_gqa_bias", **options):
  return cepe.with_encoder(decoder(name, **options), ENCODER)


def rows(split=AFTER, *, teacher=False, count=2):
  """A batch of documents in memory, not placed yet."""
  tokens = DRAW.integers(0, 90, (count, 33)).astype(np.int32)
  whole = batches.whole_rows(tokens)
  at = np.broadcast_to(np.arange(32, dtype=np.int32), (count, 32))
  whole = whole._replace(positions=at, segments=np.ones_like(at))
  return split.split(whole, 0, teacher=teacher)


def recipe(**options):
  stages = (
    rj.train.Stage(steps=2, length=32, batch=2, context=SAME),
    rj.train.Stage(steps=2, length=32, batch=2, context=AFTER),
  )
  given = {
    "stages": stages,
    "optimizer": rj.train.Optimizer(learning_rate=1e-2),
    "cepe": True,
    "packer": rj.data.Cut(),
  }
  return rj.train.Recipe(**given | options)


@pytest.mark.long
@pytest.mark.parametrize(
  "name", ["llama_gqa_bias", *(pytest.param(x, marks=LONG) for x in MORE)]
)
def test_frozen_weights_have_gradients_of_zero_and_no_others(name):
  method, mine = EncoderTraining(), model(name)
  batch = jax.tree.map(lambda x: x[0], batches.place(rows(), ContextParallel()))
  trained = trained_gradients(method, mine, batch)
  for path, x in jax.tree_util.tree_leaves_with_path(trained):
    assert np.any(x), jax.tree_util.keystr(path)


@pytest.mark.long
def test_a_training_that_was_stopped_resumes_bit_for_bit(tmp_path):
  def train(folder, steps):
    last = rj.train.Stage(steps=steps, length=32, batch=2, context=AFTER)
    # The first steps of either number of steps are the same.
    constant = rj.train.Optimizer(learning_rate=1e-2, schedule="constant")
    how = recipe(stages=(last,), optimizer=constant)
    with rj.train.Checkpoints(tmp_path / folder, config={}) as saved:
      return rj.train.train(
        how, model(), rj.train.Mixture([DOCUMENTS]), checkpoints=saved
      )

  whole = train("whole", 3)
  assert train("short", 2).step == 2
  resumed = train("short", 3)
  assert resumed.step == 3
  same = jax.tree.map(np.array_equal, whole.model, resumed.model)
  assert all(jax.tree.leaves(same))
  # The encoder has changed, and its decoder has not.
  begun, made = model(), whole.model
  same = jax.tree.map(np.array_equal, begun.decoder, made.decoder)
  assert all(jax.tree.leaves(same))
  moved = jax.tree.map(np.array_equal, begun.encoder, made.encoder)
  assert not any(jax.tree.leaves(moved))


@pytest.mark.slow
@LONG
def test_meshes_train_the_same():
  one = rj.train.train(recipe(), model(), rj.train.Mixture([DOCUMENTS])).model
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  many = rj.train.train(
    recipe(layout="striped"),
    model(mesh=mesh),
    rj.train.Mixture([DOCUMENTS]),
    mesh=mesh,
    axis="seq",
  ).model
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-3)


# ---------------------------------------------------------------------------
# Contexts
# ---------------------------------------------------------------------------


def test_rows_are_cut_into_context_and_the_rest():
  whole = rows(SAME, teacher=True)
  assert whole.tokens.shape == (2, 32)
  np.testing.assert_array_equal(
    whole.context.tokens.reshape(2, 32), whole.tokens
  )
  after = rows(AFTER, teacher=True)
  assert after.tokens.shape == after.labels.shape == (2, 16)
  joined = np.concatenate(
    [after.context.tokens.reshape(2, 16), after.tokens], 1
  )
  np.testing.assert_array_equal(joined, after.whole.tokens)
  np.testing.assert_array_equal(after.positions[0], np.arange(16))


def test_contexts_are_masked_as_often_as_asked():
  split = ContextSplit(chunk=16, chunks=2000)
  tokens = DRAW.integers(0, 90, (1, 32001)).astype(np.int32)
  ones = np.ones((1, 32001), np.int32)
  packed = batches.Batch(tokens, tokens, ones.astype(np.float32), ones, ones)
  made, again, other = (split.split(packed, seed) for seed in (3, 3, 4))
  kept = made.context.segments.sum(-1)
  assert abs(np.mean(kept < 16) - 0.3) < 0.04
  assert abs(np.mean(kept == 0) - 0.03) < 0.015
  # What is lost is a suffix.
  assert (np.diff(made.context.segments, axis=-1) <= 0).all()
  np.testing.assert_array_equal(made.context.segments, again.context.segments)
  assert (made.context.segments != other.context.segments).any()


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=LONG)])
def test_distillation_adds_the_divergence_from_the_decoder_alone(shards):
  mesh = rj.make_mesh((shards,), ("seq",), devices=jax.devices()[:shards])
  mine = model(mesh=mesh)
  attend = ContextParallel(mesh=mesh, axis="seq", layout=rj.Zigzag())
  split = ContextSplit(chunk=4, chunks=4, hit=0.0)
  made = rows(split, teacher=True)
  batch = jax.tree.map(lambda x: x[0], batches.place(made, attend))
  sums = lambda **options: jax.jit(
    lambda m, b: Objective(**options).sums(m, b, attend)
  )(mine, batch)
  plain, taught = sums(), sums(distil=2.0, top=5)
  # The teacher reads the whole rows.
  p = jax.nn.log_softmax(mine.decoder(made.whole.tokens)[:, 16:])
  states = cepe.encode(mine, made.context.tokens)
  q = jax.nn.log_softmax(mine(made.tokens, states=states))
  p, which = jax.lax.top_k(p, 5)
  far = jnp.exp(p) * (p - jnp.take_along_axis(q, which, -1))
  np.testing.assert_allclose(
    taught.loss - plain.loss, 2 * far.sum(), rtol=0, atol=1e-3
  )
  np.testing.assert_allclose(taught.nll, plain.nll, rtol=1e-6)


@pytest.mark.long
def test_fresh_heads_look_up_what_followed_a_token():
  config = checkpoints.config("llama3")
  config |= {"tie_word_embeddings": True, "num_hidden_layers": 1}
  base, seed = rj.models.create(config, seed=1), 1
  # Hidden states that are of their tokens alone.
  for block in base.stack.blocks[0]:
    for weight in (block.attention.o.weight, block.feedforward.down.weight):
      weight[...] = jnp.zeros_like(weight[...])
  wide = cepe.Encoder(layers=2, width=96, heads=2, hidden=24, chunk=8)
  fresh = cepe.with_encoder(base, wide, seed=seed)
  # Different tokens, so that the one before tells the next.
  ids = np.random.default_rng(seed).permutation(90)[None, :33].astype(np.int32)
  mine = CrossInductionHeads(match=4.0, copied=8.0).apply(fresh)
  states = cepe.encode(mine, ids[:, :32].reshape(1, 4, 8)[:, ::-1])
  logits = mine(ids[:, :-1], states=states)
  seen = np.arange(32) % 8 < 7  # The next one is in the same chunk.
  right = lambda x: np.mean((np.argmax(x, -1) == ids[:, 1:])[:, seen])
  assert right(logits) > 0.8 > 0.1 > right(base(ids[:, :-1]))


# ---------------------------------------------------------------------------
# Errors and configs
# ---------------------------------------------------------------------------


@pytest.mark.long
def test_recipes_that_cannot_be():
  stage = lambda **options: rj.train.Stage(
    **{"steps": 1, "length": 32, "batch": 2} | options
  )
  long = ContextSplit(chunk=16, chunks=2)
  refused(OptionError, lambda: stage(context=long), "rows of at least 33")
  train = lambda how, made: rj.train.train(
    how, made, rj.train.Mixture([DOCUMENTS])
  )
  refused(OptionError, lambda: train(recipe(), decoder()), "encoder")
  big = recipe(stages=(stage(context=long, length=40),))
  refused(OptionError, lambda: train(big, model()), "chunks of 16", "at most 8")
  lora = rj.train.Lora(rank=2)
  refused(OptionError, lambda: recipe(lora=lora), "frozen")
  distil = Objective(distil=2.0)
  refused(OptionError, lambda: recipe(objective=distil), "distil")
  mesh = rj.make_mesh((8,), ("seq",))
  odd = ContextSplit(chunk=4, chunks=3)
  how = recipe(stages=(stage(context=odd, length=28),))
  refused(
    ShapeError,
    lambda: rj.train.train(
      how,
      model(mesh=mesh),
      rj.train.Mixture([DOCUMENTS]),
      mesh=mesh,
      axis="seq",
    ),
    "12 tokens over 8 shards",
  )


def test_configs_name_the_encoder_and_its_contexts():
  config = default_config()
  config.cepe = {"width": 64}
  config.start = {"kind": "cross_lookup"}
  config.stages = (
    {
      "steps": 1,
      "length": 96,
      "batch": 2,
      "context": {"chunk": 16, "chunks": 2},
    },
  )
  config.distil = 2.0
  made = recipe_of(config)
  assert made.cepe and made.stages[0].context == ContextSplit(
    chunk=16, chunks=2
  )
  assert made.stages[0].decoded == 64 and made.objective.distil == 2.0
  config.cepe = {"width": 64, "init": "random"}
  refused(OptionError, lambda: recipe_of(config), "cepe.init", "copy")
  config.cepe = {}
  refused(OptionError, lambda: recipe_of(config), "cross_lookup")
