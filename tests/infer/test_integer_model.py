"""Models of 8-bit integers: near the model, and each token for itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.errors import (
  CheckpointMismatchError,
  OptionError,
  PromptError,
  ShapeError,
)
from ringjax.infer.llm_npu.integer_model import FILE
from ringjax.models.weights.linear_maps import replaced
from tests.helpers import SMALL, refused

FAMILIES = ("llama3", "qwen3_moe", "deepseek_v3", "qwen3_next")
CONFIG = {
  **SMALL,
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 3,
}


def texts(model, rows=2, length=33, seed=4):
  rng = np.random.default_rng(seed)
  return rng.integers(0, model.config.vocab, (rows, length)).astype(np.int32)


def distance(model, other, tokens):
  """How far logits are, relative to their size."""
  want, got = model(tokens), other(tokens)
  return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.fixture(scope="module")
def uneven():
  """A model of which some channels are far larger than others."""
  model = rj.models.create(CONFIG, seed=0)
  for blocks in model.stack.blocks:
    for norm in (blocks[0].pre_attention, blocks[0].pre_feedforward):
      weight = norm.weight.get_value()
      norm.weight = norm.weight.replace(weight.at[..., 5:8].multiply(40.0))
    for owner, names in (("attention", "qkv"), ("feedforward", ("gate", "up"))):
      for name in names:
        linear = getattr(getattr(blocks[0], owner), name)
        weight = linear.weight.get_value()
        linear.weight = linear.weight.replace(
          weight.at[:, 5:8].multiply(1 / 40.0)
        )
  return model


@pytest.mark.slow
def test_outliers_beside_are_worth_it(uneven):
  tokens = texts(uneven, 4, 48)
  ranges = rj.infer.activation_ranges(uneven, tokens)
  sizes = np.concatenate(list(ranges.sizes.values()), axis=None)
  assert np.isfinite(sizes).all()
  assert (sizes > 0).mean() > 0.9
  far = lambda **how: distance(
    uneven, rj.infer.integer_model(uneven, ranges, **how), texts(uneven, seed=9)
  )
  shadowed, plain = far(shadow=8), far(shadow=0)
  assert 0 < 3 * shadowed < plain < 1
  # Outliers meet the weights as they are, and not their codes.
  assert shadowed < 0.06 < 0.1 < far(shadow=8, hot=0.0) < 0.2
  # Few channels have almost all of them.
  assert far(shadow=8, hot=0.05) < 0.08
  # Where it matters least it can be left out: of outputs and downs.
  assert far(shadow=8, prune=0.25) < 1.5 * shadowed
  assert far(shadow=8, prune=1.0) == pytest.approx(plain, rel=1e-6)
  assert shadowed < far(shadow=8, scales="tensor") < plain


MIXTURE = {
  "model_type": "mixtral",
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "num_local_experts": 4,
  "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def mixture():
  """Experts that read channels some of which are far larger than others."""
  model = rj.models.create(MIXTURE, seed=2)
  block = model.stack.blocks[0][0]
  sparse, norm = block.feedforward, block.pre_feedforward
  scaled = lambda p, at, by: p.replace(p.get_value().at[at].multiply(by))
  norm.weight = scaled(norm.weight, (..., slice(5, 8)), 40.0)
  router = sparse.router
  router.weight = scaled(router.weight, (0, slice(5, 8)), 1 / 40.0)
  for name in ("gate", "up"):
    param = getattr(sparse, name)
    at = (0, slice(None), slice(5, 8))
    setattr(sparse, name, scaled(param, at, 1 / 40.0))
  return model


@pytest.mark.slow
def test_experts_are_integers(mixture):
  """Errors grow without shadow, and with ranges that clip."""
  tokens = texts(mixture, 2, 40)
  ranges = rj.infer.activation_ranges(mixture, tokens)
  make = lambda ranges, **how: rj.infer.integer_model(mixture, ranges, **how)
  # Where the experts alone are integers.
  only = lambda made: replaced(
    mixture,
    {
      f"stack.blocks.0.0.feedforward.{name}": getattr(
        made.stack.blocks[0][0].feedforward, name
      )
      for name in ("gate", "up", "down")
    },
  )
  small = dataclasses.replace(
    ranges, sizes={k: x / 8 for k, x in ranges.sizes.items()}
  )
  shadowed, plain, clipped = (
    distance(mixture, only(made), tokens)
    for made in (
      make(ranges, shadow=6), make(ranges, shadow=0), make(small, shadow=0)
    )
  )  # fmt: skip
  assert 0 < 2 * shadowed < plain < clipped
  made = make(ranges).stack.blocks[0][0].feedforward
  assert made.up.codes.get_value().dtype == jnp.int8
  assert made.up.codes.get_value().shape == (1, 4, 32, 48)
  assert made.down.scales.get_value().shape == (1, 4, 32)
  size = lambda layer: sum(
    x.nbytes for x in jax.tree.leaves((layer.gate, layer.up, layer.down))
  )
  whole = size(mixture.stack.blocks[0][0].feedforward)
  # A byte a weight, a float for each output and expert, two for a map.
  coded = whole / 4 + 4 * 4 * (48 + 48 + 32 + 3 * 2)
  assert size(make(ranges, shadow=0).stack.blocks[0][0].feedforward) == coded
  # With outliers beside, a number for each channel and the floats of some.
  rows = sum(x.rows.get_value().nbytes for x in (made.gate, made.up, made.down))
  assert size(made) == coded + 4 * 4 * (32 + 32 + 48) + rows
  assert 0 < rows < whole / 2


@pytest.mark.slow
def test_ranges_of_experts_are_of_their_tokens(mixture):
  """Of all experts of a layer, and of no padding."""
  made = jax.tree.map(lambda x: x, mixture)
  o = made.stack.blocks[0][0].attention.o
  o.weight = o.weight.replace(o.weight.get_value() * 0)
  tokens = texts(made, 1, 13)
  found = rj.infer.activation_ranges(made, tokens).sizes
  block = jax.tree.map(lambda x: x[0], made.stack.blocks[0][0])
  read = np.asarray(block.pre_feedforward(made.embed(jnp.asarray(tokens))))[0]
  w = {
    name: np.asarray(getattr(block.feedforward, name).get_value())
    for name in ("gate", "up")
  }
  logits = read @ np.asarray(block.feedforward.router.weight.get_value())
  inner = []
  for row, chosen in zip(read, np.argsort(-logits)[:, :2], strict=True):
    for e in chosen:
      gate = row @ w["gate"][e]
      inner.append(gate / (1 + np.exp(-gate)) * (row @ w["up"][e]))
  base = "stack.blocks.0.0.feedforward."
  for name, want in (("gate", read), ("up", read), ("down", np.array(inner))):
    np.testing.assert_allclose(
      found[base + name], np.abs(want).max(0)[None], rtol=2e-5, err_msg=name
    )


def test_ranges_are_those_of_the_inputs():
  model = rj.models.create({**CONFIG, "num_hidden_layers": 1}, seed=1)
  tokens = texts(model, 3, 17)
  told = []
  found = rj.infer.activation_ranges(
    model, tokens, progress=lambda done, every: told.append((done, every))
  )
  assert told == [(1, 3), (2, 3), (3, 3)]
  first = jax.tree.map(lambda x: x[0], model.stack.blocks[0][0])
  read = first.pre_attention(model.embed(jnp.asarray(tokens)))
  want = np.abs(np.asarray(read)).max((0, 1))
  for name in "qkv":
    got = found.sizes[f"stack.blocks.0.0.attention.{name}"]
    np.testing.assert_allclose(got, want[None], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
  pytest.param(name, marks=[pytest.mark.long] * (name != "llama3"))
  for name in FAMILIES
])  # fmt: skip
def test_a_token_is_read_alone(loaded, name):
  model, _ = loaded(name)
  ranges = rj.infer.activation_ranges(model, texts(model))
  made = rj.infer.integer_model(model, ranges, shadow=4)
  assert distance(model, made, texts(model, seed=1)) < 0.1
  prompts = [texts(model, 1, n, n)[0] for n in (9, 30, 4)]
  answer = lambda model, prompts, **how: (
    rj.infer.generate(model, prompts, max_new_tokens=6, **how).tokens
  )
  want = answer(made, prompts)
  for n, prompt in enumerate(prompts):
    np.testing.assert_array_equal(answer(made, [prompt])[0], want[n])
  np.testing.assert_array_equal(answer(made, prompts, chunk=7), want)
  np.testing.assert_array_equal(
    answer(made, prompts, speculate="lookup:adapt=false"), want
  )
  for devices in (2, 4):
    shards, mesh = loaded(name, devices)
    sharded = rj.infer.integer_model(shards, ranges, shadow=4)
    np.testing.assert_array_equal(answer(sharded, prompts, mesh=mesh), want)


@pytest.mark.slow
def test_experts_may_be_sharded(mixture):
  """Over experts and over their widths, with tokens beside them."""
  ranges = rj.infer.activation_ranges(mixture, texts(mixture))
  made = rj.infer.integer_model(mixture, ranges, shadow=6)
  mesh = jax.make_mesh(
    (2, 2), ("seq", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  prompts = [texts(mixture, 1, n, n)[0] for n in (21, 8)]
  answer = lambda model: (
    rj.infer.generate(model, prompts, max_new_tokens=5).tokens
  )
  want = answer(made)
  np.testing.assert_array_equal(
    rj.infer.generate(made, prompts[1:], max_new_tokens=5).tokens[0], want[1]
  )
  for rules, where in (
    (rj.models.Rules(), P(None, None, None, "model")),
    (rj.models.Rules(experts="model", ffn=None), P(None, "model")),
  ):
    placed = rj.models.place(made, mesh, rules)
    up = placed.stack.blocks[0][0].feedforward.up
    assert up.codes.get_value().sharding.spec == where
    assert up.scales.get_value().sharding.spec[-1] == "model"
    np.testing.assert_array_equal(answer(placed), want)
    # Measured and rounded on the mesh, it is the same model.
    floats = rj.models.place(mixture, mesh, rules)
    found = rj.infer.activation_ranges(floats, texts(mixture))
    for path, x in found.sizes.items():
      np.testing.assert_allclose(x, ranges.sizes[path], rtol=1e-4)
    again = rj.infer.integer_model(floats, ranges, shadow=6)
    np.testing.assert_array_equal(answer(again), want)


@pytest.mark.slow
def test_heads_and_widths_may_be_sharded(uneven):
  ranges = rj.infer.activation_ranges(uneven, texts(uneven))
  made = rj.infer.integer_model(uneven, ranges, shadow=8)
  mesh = jax.make_mesh(
    (2, 2), ("seq", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  placed = rj.models.place(made, mesh)
  codes = placed.stack.blocks[0][0].feedforward.up.codes.get_value()
  assert codes.sharding.spec[-1] == "model"
  prompts = [texts(uneven, 1, n, n)[0] for n in (21, 8)]
  answer = lambda model: (
    rj.infer.generate(model, prompts, max_new_tokens=5).tokens
  )
  np.testing.assert_array_equal(answer(placed), answer(made))


@pytest.mark.long
def test_integers_read_and_floats_answer(uneven):
  ranges = rj.infer.activation_ranges(uneven, texts(uneven))
  made = rj.infer.integer_model(uneven, ranges, shadow=8)
  prompt = texts(uneven, 1, 30)
  session = rj.infer.Session(uneven, 64)
  rj.infer.read_context(made, prompt[:, :-1], cache=session)
  ask = lambda: (
    rj.infer.generate(
      uneven, prompt[:, -1:], max_new_tokens=5, cache=session
    ).tokens
  )
  refused(OptionError, ask, "other weights")
  session.hand_over(uneven)
  got = ask()
  assert got.shape == (1, 5)
  other = rj.models.create({**CONFIG, "num_hidden_layers": 2}, seed=0)
  refused(OptionError, lambda: session.hand_over(other), "another config")


@pytest.mark.long
def test_few_programs_for_many_lengths(uneven):
  """Chunks share their programs: few are compiled for 50 lengths."""
  ranges = rj.infer.activation_ranges(uneven, texts(uneven))
  made = rj.infer.integer_model(uneven, ranges, shadow=8)
  compiled = []
  session = rj.infer.Session(uneven, 128)
  rng = np.random.default_rng(0)
  lengths = rng.permutation(np.arange(17, 117))[:50]
  count = lambda event, *_, **__: compiled.append(event)
  for n, length in enumerate(lengths):
    if n == 8:
      jax.monitoring.register_event_duration_secs_listener(count)
    session.restart()
    rj.infer.read_context(
      made, texts(uneven, 1, int(length), n), cache=session, chunk=16
    )
  jax.monitoring.unregister_event_duration_listener(count)
  assert compiled.count("/jax/core/compile/backend_compile_duration") <= 8


@pytest.mark.long
def test_ranges_are_kept_beside_the_model(uneven, tmp_path):
  ranges = rj.infer.activation_ranges(uneven, texts(uneven))
  path = ranges.save(tmp_path)
  assert path == tmp_path / FILE
  back = rj.infer.ActivationRanges.load(tmp_path, uneven)
  assert back.sizes.keys() == ranges.sizes.keys()
  made = rj.infer.integer_model(uneven, tmp_path)
  assert distance(uneven, made, texts(uneven)) < 0.3
  other = rj.models.create(CONFIG, seed=8)
  refused(
    CheckpointMismatchError,
    lambda: rj.infer.ActivationRanges.load(tmp_path, other),
    "ranges of the model",
  )


def test_bad_input(uneven):
  ranges = rj.infer.activation_ranges(uneven, texts(uneven))
  make = lambda **how: rj.infer.integer_model(uneven, ranges, **how)
  refused(OptionError, lambda: make(shadow=-1), "shadow")
  refused(OptionError, lambda: make(prune=1.5), "prune")
  refused(OptionError, lambda: make(scales="row"), "channel")
  refused(OptionError, lambda: make(hot=1.5), "hot")
  empty = np.zeros((0, 5), np.int32)
  refused(
    ShapeError, lambda: rj.infer.activation_ranges(uneven, empty), "[N, T]"
  )
  far = texts(uneven) + 10**6
  refused(PromptError, lambda: rj.infer.activation_ranges(uneven, far), "id")
  made = make()
  refused(
    (OptionError, CheckpointMismatchError),
    lambda: rj.infer.integer_model(made, ranges),
    "model",
  )
