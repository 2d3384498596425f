"""Adapters over frozen codes: gradients, meshes, folders, what is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.models.parameter_arrays import checksums
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import ContextParallel
from ringjax.nn.weights.adapter_rows import adapter_rows
from ringjax.train import (
  Checkpoints,
  Lora,
  Mixture,
  Optimizer,
  Recipe,
  RopeScaling,
  Stage,
  step,
  train,
)
from ringjax.train import batch as batches
from ringjax.train.methods.lora import with_adapters
from tests.train.test_step import WAYS, documents, far, spread_of

CODES = {
  "int8": {"bits": 8},
  "int4": {"bits": 4, "group": 16},
  "nf4": {"bits": 4, "levels": "nf4", "group": 16},
  "mxfp4": {"bits": 4, "levels": "mxfp4"},
}
ALL = ("q", "k", "v", "o", "gate", "up", "down")
CONFIG = {
  "model_type": "llama",
  "vocab_size": 48,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}
MIXTURE = CONFIG | {
  "model_type": "mixtral",
  "num_local_experts": 4,
  "num_experts_per_tok": 2,
}


def drawn(params):
  """Adapters that do something."""
  draw = np.random.default_rng(2)
  return jax.tree.map(
    lambda x: jnp.asarray(0.1 * draw.standard_normal(x.shape), x.dtype), params
  )


def stepped(lora, params, model, way="one device", **objective):
  """Loss and gradients of one step over rows of unequal documents."""
  attend = spread_of(way)
  mesh = attend.mesh
  if mesh is not None:
    axis = "data" if "data" in mesh.shape else "seq"
    model = rj.models.place(model, mesh, Rules(embed=axis))
    params = jax.device_put(
      params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
  before = jax.device_get(params)
  optimizer = optax.sgd(1.0)
  run = step.make_step(optimizer, attend, step.Objective(**objective), lora)
  state = step.start(optimizer, jax.tree.map(jnp.copy, params), mesh)
  rows = batches.place(documents(), attend, 2)
  after, metrics = run(state, model, rows)
  slopes = jax.tree.map(
    lambda a, b: a - b, before, jax.device_get(after.params)
  )
  return float(metrics.loss), slopes


@pytest.mark.one_case
@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("kind", CODES)
def test_gradients_are_those_of_the_decoded_weights(kind, config):
  model = rj.models.create(config, seed=1)
  coded = rj.models.with_coded_weights(model, **CODES[kind])
  floats = rj.models.with_float_weights(coded)
  assert jax.tree.structure(floats) == jax.tree.structure(model)
  targets = ALL if config is CONFIG else ALL[:4]
  lora = Lora(rank=3, alpha=6.0, targets=targets)
  params = lora.start(coded)
  assert all(
    np.array_equal(x, y)
    for x, y in zip(
      jax.tree.leaves(params), jax.tree.leaves(lora.start(model)), strict=True
    )
  )
  params = drawn(params)
  got, want = (stepped(lora, params, m) for m in (coded, floats))
  assert got[0] == pytest.approx(want[0], rel=1e-5)
  assert far(got[1], want[1]) < 1e-4
  tokens = documents().tokens
  merged = lora.merged(params, coded)
  plain = rj.models.with_float_weights(merged)
  np.testing.assert_allclose(plain(tokens), merged(tokens), atol=1e-4)


@pytest.mark.long
@pytest.mark.long_cases(1)
@pytest.mark.parametrize("way", [x for x in WAYS if x != "one device"])
@pytest.mark.parametrize("kind", CODES)
def test_every_mesh_and_layout_trains_the_same(kind, way):
  coded = rj.models.with_coded_weights(
    rj.models.create(CONFIG, seed=1), **CODES[kind]
  )
  lora = Lora(rank=3, targets=ALL)
  params = drawn(lora.start(coded))
  got, want = (stepped(lora, params, coded, x) for x in (way, "one device"))
  assert got[0] == pytest.approx(want[0], rel=1e-5)
  assert far(got[1], want[1]) < 2e-4


def test_adapters_over_codes_are_saved_and_served(tmp_path):
  """A PEFT folder is that of floats; each row of a batch has its adapter."""
  model = rj.models.create(CONFIG, seed=1)
  coded = rj.models.with_coded_weights(model, **CODES["nf4"])
  lora = Lora(rank=3, alpha=6.0, targets=("q", "down"))
  params = drawn(lora.start(coded))
  rj.train.save_adapter(tmp_path / "codes", coded, lora, params)
  rj.train.save_adapter(tmp_path / "floats", model, lora, params)
  names = ("adapter_config.json", "adapter_model.safetensors")
  for name in names:
    written = [(tmp_path / x / name).read_bytes() for x in ("codes", "floats")]
    assert written[0] == written[1]
  again, arrays = rj.train.load_adapter(tmp_path / "codes", coded)
  assert again == Lora(rank=3, alpha=6.0, targets=("down", "q"))
  assert jax.tree.all(jax.tree.map(np.array_equal, arrays, dict(params)))
  served = with_adapters(coded, [(lora, params)])
  tokens = documents().tokens[:2]
  with adapter_rows(jnp.array([0, 1], jnp.int32)):
    got = jax.jit(lambda m, x: m(x))(served, tokens)
  np.testing.assert_allclose(got[:1], coded(tokens[:1]), atol=1e-4)
  merged = lora.merged(params, coded)
  np.testing.assert_allclose(got[1:], merged(tokens[1:]), atol=1e-4)


@pytest.mark.long
def test_a_training_over_codes_resumes_bit_for_bit(tmp_path):
  """With moments of 8 bits."""
  model = rj.models.create(CONFIG, seed=1)
  coded = rj.models.with_coded_weights(model, **CODES["nf4"])
  draw = np.random.default_rng(0)
  data = Mixture(
    [rj.data.Documents([draw.integers(0, 48, 30) for _ in range(20)])]
  )

  def trained(steps, folder):
    recipe = Recipe(
      stages=(Stage(steps=steps, length=32, batch=2),),
      optimizer=Optimizer(moments="int8", schedule="constant"),
      lora=Lora(rank=32, targets=ALL),
    )
    with Checkpoints(folder) as checkpoints:
      return train(recipe, coded, data, checkpoints=checkpoints)

  whole = trained(4, tmp_path / "whole")
  trained(2, tmp_path / "parts")
  resumed = trained(4, tmp_path / "parts")
  assert resumed.step == whole.step == 4
  for x, y in zip(
    jax.tree.leaves(resumed.adapter[1]),
    jax.tree.leaves(whole.adapter[1]),
    strict=True,
  ):
    np.testing.assert_array_equal(x, y)
  # The codes with their adapters are saved as floats.
  with pytest.raises(OptionError, match="with_float_weights"):
    rj.models.save(whole.model, tmp_path / "codes")
  floats = rj.models.with_float_weights(whole.model)
  rj.models.save(floats, tmp_path / "floats")
  tokens = documents().tokens
  np.testing.assert_allclose(
    rj.models.load(tmp_path / "floats")(tokens), whole.model(tokens), atol=1e-4
  )


@pytest.mark.parametrize("kind", CODES)
def test_a_code_that_differs_is_another_model(kind):
  """Runs that resume, and tables of log-probabilities, compare checksums."""
  model = rj.models.create(CONFIG, seed=1)
  coded = rj.models.with_coded_weights(model, **CODES[kind])
  sums = checksums(coded)
  leaves, form = jax.tree.flatten(coded)
  number = next(n for n, x in enumerate(leaves) if x.dtype.itemsize == 1)
  codes = np.array(leaves[number])
  codes.reshape(-1)[5] ^= 1
  leaves[number] = jnp.asarray(codes)
  others = checksums(jax.tree.unflatten(form, leaves))
  differs = [x != y for x, y in zip(sums, others, strict=True)]
  assert differs == [n == number for n in range(len(leaves))]


def test_what_cannot_be_trained_over_codes_is_refused():
  model = rj.models.create(CONFIG, seed=1)
  coded = rj.models.with_coded_weights(model)
  data = Mixture([rj.data.Documents([np.arange(20)])])
  stages = (Stage(steps=1, length=16, batch=1),)
  with pytest.raises(OptionError, match=r"train adapters of it \(Lora\)"):
    train(Recipe(stages=stages), coded, data)
  with pytest.raises(OptionError, match="train it"):
    step.start(optax.sgd(1.0), coded)
  longer = (
    Stage(steps=1, length=16, batch=1, rope_scaling=RopeScaling(context=4096)),
  )
  with pytest.raises(OptionError, match="codes, to extend its context"):
    train(Recipe(stages=longer, lora=Lora(rank=2)), coded, data)
  ranges = rj.infer.activation_ranges(model, documents().tokens[:1])
  integers = rj.infer.integer_model(model, ranges, hot=0.05)
  with pytest.raises(OptionError, match="have no gradient"):
    Lora(rank=2).start(integers)
  with pytest.raises(OptionError, match="integers"):
    rj.models.with_float_weights(integers)
  make = rj.models.with_coded_weights
  for options, error in (
    ({"levels": "nf4"}, "'even', for 8 bits"),
    ({"bits": 4, "levels": "nf5"}, "even, nf4, mxfp4"),
    ({"bits": 4, "levels": "mxfp4", "group": 64}, "whose groups have 32"),
  ):
    with pytest.raises(OptionError, match=error):
      make(model, **options)


@pytest.mark.long
@pytest.mark.long_cases(1)
@pytest.mark.parametrize("kind", CODES)
def test_no_program_holds_the_floats_of_all_layers(kind):
  """The backward pass keeps codes, even where it keeps all activations."""
  layers, hidden, ffn = 5, 48, 96
  config = CONFIG | {
    "num_hidden_layers": layers,
    "hidden_size": hidden,
    "intermediate_size": ffn,
  }
  coded = rj.models.with_coded_weights(
    rj.models.create(config, seed=1), **CODES[kind]
  )
  lora, optimizer = Lora(rank=2, targets=ALL), optax.sgd(1.0)
  attend = ContextParallel()
  run = step.make_step(optimizer, attend, step.Objective(), lora)
  rows = batches.place(batches.whole_rows(documents().tokens[:1, :8]), attend)
  state = step.start(optimizer, lora.start(coded))
  text = run.lower(state, coded, rows).compile().as_text()
  sizes = [
    np.prod([int(n) for n in dims.split(",")])
    for dims in re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", text)
  ]
  assert hidden * ffn in sizes, "the weight of one map is decoded"
  assert max(sizes) < layers * hidden * ffn
