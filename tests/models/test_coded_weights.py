"""Models of 8 and 4 bits: near the model, and the same on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.models import tiny, work_profile
from ringjax.nn.weights.coded import nibbles
from tests import checkpoints
from tests.helpers import refused

MIXTURE = {
  "model_type": "mixtral",
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 50,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "num_local_experts": 3,
  "num_experts_per_tok": 2,
}


def decoded(codes, step, least):
  """Numbers that the codes of one map stand for, including the padding."""
  parts = np.concatenate([np.asarray(codes) >> 4, np.asarray(codes) & 15], 1)
  numbers = parts.astype(np.float32) * np.asarray(step)[:, None]
  return (numbers + np.asarray(least)[:, None]).reshape(-1, codes.shape[2])


@pytest.mark.long
@pytest.mark.parametrize(("group", "inner"), [(64, 100), (6, 31)])
def test_codes_are_the_nearest(group, inner):
  weight = np.random.default_rng(0).normal(size=(inner, 7)).astype(np.float32)
  weight[3:40] += 5
  codes, step, least = nibbles(jnp.asarray(weight), group)
  groups = -(-inner // group)
  assert codes.nbytes == groups * group * 7 // 2
  assert step.shape == least.shape == (groups, 7)
  got = decoded(codes, step, least)
  # Each group by itself: its own least and largest number.
  for n in range(groups):
    part = np.zeros((group, 7), np.float32)
    rows = weight[n * group : (n + 1) * group]
    part[: len(rows)] = rows
    width = (part.max(0) - part.min(0)) / 15
    away = np.abs(got[n * group : (n + 1) * group] - part)
    assert (away <= width * 0.5001 + 1e-6).all()
  same = nibbles(jnp.full((8, 2), 3.0), 4)
  np.testing.assert_array_equal(decoded(*same), 3.0)


@pytest.mark.long
@pytest.mark.parametrize("bits", [8, 4])
def test_few_tokens_and_many_have_one_result(bits):
  """Of few, products are made group by group; of many, of decoded weights."""
  model = rj.models.load(tiny.path())
  made = rj.models.with_coded_weights(model, bits=bits)
  linear = jax.tree.map(lambda x: x[0], made.stack.blocks[0][0]).feedforward.up
  x = np.random.default_rng(0).normal(size=(3, 40, linear_inputs(model)))
  x = jnp.asarray(x, jnp.float32)
  many = linear(x)
  few = jnp.stack(
    [linear(row[None])[0] for row in x.reshape(-1, 8, x.shape[-1])]
  )
  np.testing.assert_allclose(
    few.reshape(many.shape), many, rtol=2e-5, atol=2e-5
  )
  exact = jax.tree.map(lambda x: x[0], model.stack.blocks[0][0]).feedforward.up(
    x
  )
  far = float(jnp.linalg.norm(many - exact) / jnp.linalg.norm(exact))
  assert 0 < far < {8: 0.01, 4: 0.12}[bits]


def linear_inputs(model):
  return model.config.embed


def make_coded(model):
  return rj.models.with_coded_weights(model)


def make_integers(model):
  text = np.arange(32, dtype=np.int32)[None]
  ranges = rj.infer.activation_ranges(model, text)
  # Of so few channels, all would be outliers somewhere.
  return rj.infer.integer_model(model, ranges, hot=0.05)


def answers(model, **how):
  prompts = [[5, 6, 7, 8] * 5, [9, 10, 11]]
  return rj.infer.generate(model, prompts, max_new_tokens=6, **how).tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", [
  "gemma2",
  *(
    pytest.param(name, marks=pytest.mark.long)
    for name in ("qwen3_moe", "deepseek_v3", "qwen3_next")
  ),
])  # fmt: skip
def test_every_way_gives_the_same(tmp_path, name):
  checkpoints.write(name, tmp_path / "model")
  model = rj.models.load(tmp_path / "model")
  made = rj.models.with_coded_weights(model)
  tokens = np.random.default_rng(1).integers(0, 90, (2, 21)).astype(np.int32)
  want, got = model(tokens), made(tokens)
  assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)
  alone = answers(made)
  np.testing.assert_array_equal(
    answers(made, speculate="lookup:adapt=false"), alone
  )
  np.testing.assert_array_equal(answers(made, chunk=7), alone)
  mesh = jax.make_mesh(
    (2, 2), ("seq", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  placed = rj.models.place(made, mesh)
  np.testing.assert_array_equal(answers(placed), alone)
  four = rj.models.with_coded_weights(model, bits=4, group=8)
  assert jnp.linalg.norm(four(tokens) - want) < 0.5 * jnp.linalg.norm(want)
  experts = rj.models.Rules(experts="model", ffn=None)
  for rules in (None, experts)[: 1 + name.endswith("moe")]:
    sharded = rj.models.place(four, mesh, rules)
    np.testing.assert_array_equal(answers(sharded), answers(four))


@pytest.mark.long
@pytest.mark.parametrize("bits", [8, 4])
def test_experts_have_codes_of_their_own(bits):
  """An expert's numbers are those of a map that is rounded alone."""
  model = rj.models.create(MIXTURE, seed=1)
  sparse = model.stack.blocks[0][0].feedforward
  # A large expert takes no steps from the others.
  sparse.down = sparse.down.replace(
    sparse.down.get_value().at[0, 1].multiply(9.0)
  )
  made = rj.models.with_coded_weights(model, bits=bits)
  coded = made.stack.blocks[0][0].feedforward
  size = lambda layer: sum(
    x.nbytes for x in jax.tree.leaves((layer.gate, layer.up, layer.down))
  )
  outputs = 3 * (50 + 50 + 32)
  if bits == 8:
    assert size(coded) == size(sparse) / 4 + 4 * outputs
  else:
    assert size(coded) == size(sparse) / 8 + 8 * outputs
  random = np.random.default_rng(0)
  for name in ("gate", "up", "down"):
    weight = getattr(sparse, name).get_value()[0]
    x = jnp.asarray(random.normal(size=(5, weight.shape[1])), jnp.float32)
    for n in range(3):
      mine = jax.tree.map(lambda a, n=n: a[0, n], getattr(coded, name))
      if bits == 8:
        step = jnp.abs(weight[n]).max(0) / 127
        numbers = jnp.round(weight[n] / step[None]) * step[None]
      else:
        parts = nibbles(weight[n], weight.shape[1])
        numbers = decoded(*parts)
      np.testing.assert_allclose(mine(x), x @ numbers, rtol=1e-4, atol=1e-4)


def make_nibbles(model):
  return rj.models.with_coded_weights(model, bits=4, group=16)


@pytest.mark.slow
@pytest.mark.parametrize("make", [
  pytest.param(make_integers, marks=pytest.mark.long),
  pytest.param(make_coded, marks=pytest.mark.slow),
  pytest.param(make_nibbles, marks=pytest.mark.slow),
])  # fmt: skip
def test_streamed_layers(tmp_path, make):
  """Codes in host memory, and of what is read from disk: the same numbers."""
  config = MIXTURE | {"num_hidden_layers": 4}
  rj.models.save(rj.models.create(config, seed=1), tmp_path / "model")
  load = lambda **how: rj.models.load(tmp_path / "model", **how)
  floats = load(placement="device=.25,host=.5,disk=.25")
  before = floats.placement_report()
  assert sorted(before.tiers) == ["device", "disk", "host", "host"]
  whole, made = make(load()), make(floats)
  tokens = np.arange(22).reshape(2, 11)
  np.testing.assert_array_equal(made(tokens), whole(tokens))
  after = made.placement_report()
  assert after.tiers == before.tiers
  # Routers and norms stay floats.
  assert after.host_bytes < before.host_bytes * 0.4
  assert after.disk_bytes == before.disk_bytes
  assert made.digest == whole.digest


@pytest.mark.slow
def test_streamed_layers_on_a_mesh(tmp_path):
  """Experts and widths over devices, as resident ones have them."""
  config = MIXTURE | {"num_hidden_layers": 3, "num_local_experts": 4}
  rj.models.save(rj.models.create(config, seed=1), tmp_path / "model")
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  for rules in (None, rj.models.Rules(experts="model", ffn=None)):
    load = lambda rules=rules, **how: rj.models.load(
      tmp_path / "model", mesh=mesh, rules=rules, **how
    )
    for make in (make_nibbles, make_coded):
      whole, made = make(load()), make(load(placement="host=.4,disk=.6"))
      np.testing.assert_array_equal(answers(made), answers(whole))


@pytest.mark.long
def test_bytes_and_errors_of_a_trained_model():
  model = rj.models.load(tiny.path())
  text = np.asarray(
    rj.data.Tokenizer.load(tiny.path(), untrusted=False).encode(
      "def ring(n: int) -> int:\n  return n + 1\n" * 8
    ),
    np.int32,
  )[None]

  def loss(model):
    found = jax.nn.log_softmax(model(text)[:, :-1])
    return -float(jnp.take_along_axis(found, text[:, 1:, None], -1).mean())

  size = lambda model: sum(x.nbytes for x in jax.tree.leaves(model.stack))
  eight = rj.models.with_coded_weights(model)
  four = rj.models.with_coded_weights(model, bits=4)
  # Floats of 4 bytes: codes, and a float for each output or two for 64.
  assert size(eight) < size(model) * (1 / 4 + 0.02)
  assert size(four) < size(model) * (1 / 8 + 8 / 256) * 1.1
  plain = loss(model)
  assert abs(loss(eight) - plain) < 0.01
  assert abs(loss(eight) - plain) < abs(loss(four) - plain) < 0.5


@pytest.mark.long
def test_what_is_refused(tmp_path):
  model = rj.models.load(tiny.path())
  for made in (make_coded(model), make_integers(model)):
    save = lambda made=made: rj.models.save(made, tmp_path / "a")
    refused(OptionError, save, "save")
    refused(
      OptionError,
      lambda made=made: rj.train.step.start(optax.sgd(0.1), made),
      "train",
    )
  assert not (tmp_path / "a").exists()
  wide = rj.models.with_coded_weights(model, bits=4, group=10**6)
  size = lambda model: sum(x.nbytes for x in jax.tree.leaves(model.stack))
  assert size(wide) < size(model) / 6
  make = rj.models.with_coded_weights
  refused(OptionError, lambda: make(model, bits=3), "8")
  refused(OptionError, lambda: make(model, bits=4, group=7), "even")
  refused(OptionError, lambda: make(model, group=64), "8 bits")
  refused(OptionError, lambda: make(make(model)), "rounded")
  placed = rj.models.load(tiny.path(), placement="host")
  how = rj.train.Lora(rank=2)
  adapted = how.model(how.start(placed), placed)
  refused(OptionError, lambda: make(adapted), "adapters")


@pytest.mark.long
def test_a_model_whose_layers_are_no_loop_is_warned_of():
  config = MIXTURE | {"num_hidden_layers": 3}
  loop, layers = (
    rj.models.create(config, seed=0, scan=scan) for scan in (True, False)
  )
  rj.models.with_coded_weights(loop)
  with pytest.warns(RuntimeWarning, match="scan=True"):
    rj.models.with_coded_weights(layers)


def test_codes_that_share_a_byte_count_as_two_weights_of_work():
  model = rj.models.create(MIXTURE, seed=1)
  coded = rj.models.with_coded_weights(model, bits=4, group=16)
  want, got = (work_profile.profile(m, 8).token_s for m in (model, coded))
  # Steps and least numbers are two of 16 weights more.
  assert want <= got < 1.5 * want


def test_streamed_codes_count_as_the_weights_that_they_are():
  model = rj.models.load(tiny.path())
  placed = rj.models.load(tiny.path(), placement="host")
  want, got = (
    work_profile.profile(rj.models.with_coded_weights(m, bits=4), 8).token_s
    for m in (model, placed)
  )
  assert got == want


def test_codes_in_host_memory_know_their_shards():
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])

  def shards(**options):
    model = rj.models.load(tiny.path(), mesh=mesh, **options)
    coded = rj.models.with_coded_weights(model, bits=4, group=8)
    return {
      path: module.shards
      for path, module in nnx.iter_modules(coded)
      if hasattr(module, "shards")
    }

  resident = shards()
  assert any(s.inputs or s.outputs for s in resident.values())
  assert shards(placement="host") == resident
