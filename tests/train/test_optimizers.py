"""Muon, and moments of 8 bits."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax as rj
from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import Optimizer, loop, step
from ringjax.train import batch as batches
from ringjax.train.memory_needs import training_memory
from ringjax.train.optimizers.coded_moments import (
  block_count,
  decode,
  encode,
  scale_of,
)
from ringjax.train.optimizers.muon import Matrix, matrices, scale_by_muon

CONFIG = {
  "model_type": "llama",
  "vocab_size": 48,
  "hidden_size": 32,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 33)).astype(np.int32)


def steps_taken(mesh=None, steps=3, config=CONFIG, **options):
  """Losses, the last state and the compiled step of some steps."""
  attend = ContextParallel()
  model = rj.models.create(config, seed=1)
  if mesh is not None:
    attend = ContextParallel(mesh=mesh, axis="seq")
    model = rj.models.place(model, mesh, rj.models.Rules(embed="data"))
  optimizer = Optimizer(learning_rate=1e-2, schedule="constant", **options)
  optimizer = optimizer.build(10, mesh)
  run = step.make_step(optimizer, attend, step.Objective())
  state = step.start(optimizer, model, mesh)
  rows = batches.place(batches.whole_rows(TOKENS), attend)
  form = step.form(optimizer, state.params, mesh)
  for x, wanted in zip(
    jax.tree.leaves(state.optimizer),
    jax.tree.leaves(form.optimizer),
    strict=True,
  ):
    assert x.shape == wanted.shape
    if x.ndim and wanted.sharding is not None:
      assert wanted.sharding.is_equivalent_to(x.sharding, x.ndim)
  compiled = run.lower(state, None, rows).compile()
  losses = []
  for _ in range(steps):
    state, metrics = compiled(state, None, rows)
    losses.append(float(metrics.loss))
  return losses, state, compiled


def mesh_of_four():
  return rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])


# ---------------------------------------------------------------------------
# Muon
# ---------------------------------------------------------------------------


def orthogonal(x):
  """Five iterations on one matrix, in float64."""
  turned = x.shape[0] > x.shape[1]
  x = x.T if turned else x
  x = x / np.linalg.norm(x)
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  x = x.T if turned else x
  return 0.2 * np.sqrt(max(x.shape)) * x


@jax.numpy_dtype_promotion("standard")
def test_muon_is_its_reference():
  """Three updates of adapters, of embeddings, and optax's first one."""
  draw = np.random.default_rng(0)
  shapes = {"a": (2, 3, 4, 5), "b": (2, 5, 7), "new": (4, 6)}
  gradients = [
    {
      "map": {
        k: draw.normal(size=v).astype(np.float32) for k, v in shapes.items()
      }
    }
    for _ in range(3)
  ]
  muon, adam = scale_by_muon(0.9, 0.95), optax.scale_by_adam(0.9, 0.95)
  params = jax.tree.map(jnp.zeros_like, gradients[0])
  state, adam_state = muon.init(params), adam.init(params)
  momentum = jax.tree.map(np.zeros_like, gradients[0])["map"]
  for gradient in gradients:
    got, state = muon.update(gradient, state)
    plain, adam_state = adam.update(gradient, adam_state)
    np.testing.assert_allclose(
      got["map"]["new"], plain["map"]["new"], rtol=1e-5, atol=1e-6
    )
    for name, rows in (("a", 12), ("b", 5)):
      g = gradient["map"][name]
      momentum[name] = 0.9 * momentum[name] + g
      moved = 0.9 * momentum[name] + g
      for n in range(2):
        np.testing.assert_allclose(
          np.asarray(got["map"][name][n]).reshape(rows, -1),
          orthogonal(moved[n].astype(np.float64).reshape(rows, -1)),
          rtol=2e-3,
          atol=2e-4,
        )
  peer = optax.contrib.scale_by_muon(
    beta=0.9,
    weight_dimension_numbers={
      "b": optax.contrib.MuonDimensionNumbers(1, 2),
    },
  )
  first = {"b": jnp.asarray(gradients[0]["map"]["b"])}
  want, _ = peer.update(first, peer.init(first))
  got, _ = muon.update(gradients[0], muon.init(params))
  np.testing.assert_allclose(
    got["map"]["b"], 0.2 * np.sqrt(7) * want["b"], rtol=2e-3, atol=2e-4
  )


def test_muon_moves_the_matrices_of_maps():
  """Heads count as one axis, experts each for itself, routers not at all."""
  mixture = CONFIG | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
  }
  model = rj.models.abstract(mixture)
  leaves = jax.tree_util.tree_flatten_with_path(model)[0]
  names = [
    jax.tree_util.keystr(k, simple=True, separator=".") for k, _ in leaves
  ]
  axes = dict(zip(names, matrices(model), strict=True))
  ending = lambda end: next(v for k, v in axes.items() if end in k)
  assert ending("attention.q.weight") == Matrix(1, 1)
  assert ending("attention.o.weight") == Matrix(1, 2)
  assert ending("feedforward.down") == Matrix(2, 1)
  for name in ("embed.weight", "head.weight", "router.weight", "norm.weight"):
    assert ending(name) is None


@pytest.mark.long
def test_muon_gives_each_device_whole_matrices():
  mesh = mesh_of_four()
  losses, _, compiled = steps_taken(mesh, name="muon")
  want, _, _ = steps_taken(name="muon")
  np.testing.assert_allclose(losses, want, rtol=1e-4)
  assert losses[-1] < losses[0]
  text = compiled.as_text()
  # Two layers on two devices: parts are exchanged.
  assert re.search(r" all-to-all", text)


# ---------------------------------------------------------------------------
# Moments
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("squares", [False, True])
def test_codes_of_moments_are_right_on_average(squares):
  """Blocks of unequal sizes, a block of zeros, and tiny numbers."""
  draw = np.random.default_rng(0)
  x = draw.normal(size=(3, 301)).astype(np.float32) ** 3
  x[1] *= 1e-6
  x[2, :172] = 0
  x = x * x if squares else x
  draws = []
  for n in range(200):
    scale = scale_of(jnp.asarray(x))
    codes = encode(jnp.asarray(x), scale, jax.random.key(n), squares=squares)
    draws.append(np.asarray(decode(codes, scale)))
  assert codes.dtype == (jnp.uint8 if squares else jnp.int8)
  # 43 numbers each, of which four are zeros.
  assert scale.shape == (3, 7)
  assert np.all(draws[0][2, :172] == 0)
  largest = np.abs(x).max(1, keepdims=True)
  mean = np.mean(draws, 0)
  assert np.all(np.abs(mean - x) <= 2e-3 * largest)
  assert np.all(np.abs(draws[0] - x) <= 0.02 * largest)
  if squares:
    # An update divides by the root.
    assert np.all(draws[0][x > 1e-30] > 0)


@pytest.mark.parametrize(
  ("length", "shards", "size"),
  [
    (4096, 64, 64),
    (5120, 64, 80),
    (2048, 64, 32),
    (25600, 128, 200),
    (768, 16, 48),
    (151936, 4, 32),
    # A prime: two blocks, the last one padded.
    (509, 1, 255),
  ],
)
def test_blocks_of_moments_lie_on_one_shard(length, shards, size):
  count = block_count(length)
  assert count % shards == 0
  assert -(-length // count) == size


@pytest.mark.parametrize("length", [2560, 2036])
def test_moments_of_eight_bits_of_explicitly_sharded_axes(length):
  """Whole blocks are updated where they are, others are gathered."""
  mesh = jax.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  sharding = jax.NamedSharding(mesh, jax.P(None, "seq"))
  optimizer = Optimizer(moments="int8", clip=None).build(10, mesh)
  draw = np.random.default_rng(0)
  w = draw.normal(size=(4, length)).astype(np.float32)
  sharded = {"w": jax.device_put(w, sharding)}
  state = step.start(optimizer, sharded, mesh).optimizer
  with jax.numpy_dtype_promotion("standard"):
    update = jax.jit(optimizer.update).lower(sharded, state, sharded).compile()
  assert ("all-gather" in update.as_text()) == (length == 2036)
  got, _ = update(sharded, state, sharded)
  assert got["w"].sharding.spec == sharding.spec
  alone = {"w": jnp.asarray(w)}
  with jax.numpy_dtype_promotion("standard"):
    want, _ = jax.jit(optimizer.update)(alone, optimizer.init(alone), alone)
  np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw"])
def test_moments_of_eight_bits_train_alike(name):
  got, state, _ = steps_taken(name=name, moments="int8")
  want, _, _ = steps_taken(name=name)
  np.testing.assert_allclose(got, want, rtol=0.02)
  sizes = sum(x.nbytes for x in jax.tree.leaves(state.optimizer))
  params = sum(x.nbytes for x in jax.tree.leaves(state.params))
  # Eight bytes a number in float32; embeddings are small, and stay floats.
  assert sizes < 1.1 * params


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_moments_of_eight_bits_of_bfloat16_parameters(name):
  """They are codes from the first update on, not the bfloat16 of optax."""
  params = {"w": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}
  optimizer = Optimizer(name=name, moments="int8").build(10)
  state = jax.eval_shape(optimizer.init, params)
  with jax.numpy_dtype_promotion("standard"):
    _, updated = jax.eval_shape(optimizer.update, params, state, params)
  assert updated == state
  large = [x for x in jax.tree.leaves(state) if x.shape == (64, 256)]
  assert large
  assert all(x.dtype.itemsize == 1 for x in large)


def test_blocks_of_other_sizes_are_refused_by_name(tmp_path):
  """As those of runs that another version has saved."""
  stages = (rj.train.Stage(steps=2, length=16, batch=2),)
  optimizer = Optimizer(moments="int8")
  recipe = rj.train.Recipe(stages=stages, optimizer=optimizer)
  model = rj.models.abstract(LARGER, dtype="float32")
  state = step.form(optimizer.build(2), model)
  halved = lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], 1), x.dtype)
  moments = state.optimizer[1]
  scales = jax.tree.map(lambda x: halved(x) if x.ndim else x, moments.scales)
  coded = moments._replace(scales=scales)
  state = state._replace(
    optimizer=(*state.optimizer[:1], coded, *state.optimizer[2:])
  )
  data = rj.train.Mixture([rj.data.Documents([row[:17] for row in TOKENS])])
  with rj.train.Checkpoints(tmp_path) as saved:
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state._asdict())
    saved.save(1, zeros)
    with pytest.raises(CheckpointMismatchError, match="moments: got 'int8' of"):
      rj.train.train(recipe, model, data, checkpoints=saved)
    # Another difference is named as it is.
    in_floats = dataclasses.replace(recipe, optimizer=Optimizer())
    with pytest.raises(CheckpointMismatchError, match="step 1: optimizer"):
      rj.train.train(in_floats, model, data, checkpoints=saved)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lion", "muon", "sgd"])
def test_moments_of_eight_bits_on_a_mesh(name):
  options = {"name": name, "moments": "int8"}
  got, _, _ = steps_taken(mesh_of_four(), **options)
  want, _, _ = steps_taken(**options)
  np.testing.assert_allclose(got, want, rtol=0.02)


def test_bytes_of_moments_are_counted_where_they_are():
  """Of 8 bits, a byte a number of large arrays, and their blocks' scales."""
  model = rj.models.abstract(CONFIG, dtype="float32")

  def counted(**options):
    form = step.form(Optimizer(**options).build(10), model)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(form.optimizer)]
    needs = training_memory(
      form,
      model.config,
      [(2, 32)],
      mesh=None,
      axis=None,
      remat="attention",
      itemsize=4,
      saves=False,
    )
    return needs.moments, sorted(sizes)

  moments, sizes = counted()
  assert moments == sum(sizes)
  eight_bits, eight_bit_sizes = counted(moments="int8")
  # Small arrays stay floats.
  assert eight_bits == sum(eight_bit_sizes) < 0.6 * moments


def test_moments_that_do_not_go_together_are_refused():
  with pytest.raises(OptionError, match="sums of rows"):
    Optimizer(name="adafactor", moments="int8")
  with pytest.raises(OptionError, match="moments"):
    Optimizer(moments="float16")


# Layers that no axis of a mesh divides, and embeddings that are not small.
LARGER = CONFIG | {"vocab_size": 160, "num_hidden_layers": 3}


def memories(tree):
  """Numbers of arrays of two axes or more, by memory kind."""
  kinds = [x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 1]
  return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.mark.parametrize(
  ("name", "sharded"),
  [
    pytest.param("adamw", False, marks=pytest.mark.long),
    pytest.param("muon", True, marks=pytest.mark.long),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (("lion", True), ("sgd", False), ("adamw", True))
    ),
  ],
)
def test_moments_in_host_memory_train_to_the_same_numbers(name, sharded):
  mesh = mesh_of_four() if sharded else None
  options = {"config": LARGER, "name": name}
  losses, want, _ = steps_taken(mesh, **options)
  got_losses, got, _ = steps_taken(mesh, moments_in="host", **options)
  np.testing.assert_allclose(got_losses, losses, rtol=1e-6)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
  assert "pinned_host" not in memories((want, got.params))
  # Vectors, and attention's keys and values, are small.
  assert memories(got.optimizer)["pinned_host"] >= 4


def test_a_step_that_is_not_finite_leaves_moments_in_host_memory():
  """Both where layers follow each other and of a whole parameter."""
  model = rj.models.create(LARGER, seed=1)
  optimizer = Optimizer(moments_in="host").build(10)
  run = step.make_step(optimizer, ContextParallel(), step.Objective())
  rows = batches.place(batches.whole_rows(TOKENS), ContextParallel())
  state, _ = run(step.start(optimizer, model), None, rows)
  before = jax.tree.map(np.array, state)
  wrong = rows._replace(weights=jnp.full_like(rows.weights, jnp.nan))
  state, metrics = run(state, None, wrong)
  assert not metrics.finite and int(state.skipped) == 1
  for x, y in zip(
    jax.tree.leaves(before.optimizer),
    jax.tree.leaves(state.optimizer),
    strict=True,
  ):
    np.testing.assert_array_equal(x, y)


@pytest.mark.long
def test_moments_resume_in_the_other_memory(tmp_path):
  """A saved state is the same tree, wherever its moments are."""
  documents = rj.data.Documents([row[:17] for row in TOKENS])

  def trained(steps, checkpoints=None, **options):
    recipe = rj.train.Recipe(
      stages=(rj.train.Stage(steps=steps, length=16, batch=2),),
      optimizer=Optimizer(schedule="constant", **options),
    )
    model = rj.models.create(LARGER, seed=1)
    mixture = rj.train.Mixture([documents])
    return rj.train.train(recipe, model, mixture, checkpoints=checkpoints)

  want = trained(4)
  with rj.train.Checkpoints(tmp_path) as saved:
    trained(2, saved, moments_in="host")
  with rj.train.Checkpoints(tmp_path) as saved:
    trained(3, saved)
  with rj.train.Checkpoints(tmp_path) as saved:
    got = trained(4, saved, moments_in="host")
  assert got.step == want.step == 4
  for x, y in zip(*map(jax.tree.leaves, (got.model, want.model)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


def test_bytes_of_moments_on_the_host_are_none_of_the_device():
  model = rj.models.abstract(LARGER, dtype="float32")
  moments = [
    training_memory(
      step.form(Optimizer(moments_in=memory).build(10), model),
      model.config,
      [(2, 32)],
      mesh=None,
      axis=None,
      remat="attention",
      itemsize=4,
      saves=False,
    ).moments
    for memory in ("device", "host")
  ]
  assert 0 < moments[1] < moments[0] / 4


def test_what_moments_in_host_memory_do_not_go_with():
  with pytest.raises(OptionError, match="sums of rows"):
    Optimizer(name="adafactor", moments_in="host")
  with pytest.raises(OptionError, match="moments_in: got 'host' with moments"):
    Optimizer(moments="int8", moments_in="host")
  with pytest.raises(OptionError, match="moments_in"):
    Optimizer(moments_in="disk")
  mesh = rj.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
  with pytest.raises(OptionError, match="'host' on a mesh with an axis 'stage"):
    Optimizer(moments_in="host").build(10, mesh)
  with pytest.raises(OptionError, match="replay_every: got 2 with moments_in"):
    rj.train.Recipe(
      stages=(rj.train.Stage(steps=1, length=16, batch=2),),
      optimizer=Optimizer(moments_in="host"),
      loop_config=loop.LoopConfig(replay_every=2),
    )
