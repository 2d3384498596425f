"""Arrays that a layer reads in part: the same numbers, and no copy of all."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.nn.weights.adapter_rows import adapter_rows
from ringjax.nn.weights.layer_array import LayerArray
from ringjax.train.methods.lora import with_adapters
from tests import checkpoints

MIXTURE = {
  "model_type": "mixtral",
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
  "num_local_experts": 11,
  "num_experts_per_tok": 2,
}
MODELS = {
  "mixtral": MIXTURE,
  # Biases of experts, and layers of two kinds in turn.
  "gpt_oss": checkpoints.config("gpt_oss")
  | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
  },
  # The first layers have no experts, the others have a shared one, too.
  "deepseek_v3": checkpoints.config("deepseek_v3"),
}
CODED = {
  "floats": lambda model: model,
  "codes": rj.models.with_coded_weights,
  "nibbles": lambda model: rj.models.with_coded_weights(
    model, bits=4, group=16
  ),
}


def step(model, tokens, positions, cache):
  return model(tokens, positions=positions, cache=cache)


def logits(model, **room):
  """Logits of a prompt, and of two steps after it."""
  ids = np.arange(16, dtype=np.int32).reshape(2, 8) * 7 % 64
  cache, rows = model.init_cache(2, 16, **room), []
  for first, end in ((0, 6), (6, 7), (7, 8)):
    at = jnp.broadcast_to(
      jnp.arange(first, end, dtype=jnp.int32), (2, end - first)
    )
    out, cache = jax.jit(step)(model, ids[:, first:end], at, cache)
    rows.append(out)
  return jnp.concatenate(rows, 1)


def program(model, rows=2):
  """The compiled text of a step of decoding."""
  shapes = jax.eval_shape(lambda: jnp.zeros((rows, 1), jnp.int32))
  cache = model.init_cache(rows, 16)
  lowered = jax.jit(step).lower(model, shapes, shapes, cache)
  return lowered.compile().as_text()


def written(text, *shape):
  """Lines that make an array of a shape, or of one layer of it."""
  sizes = ",".join(map(str, shape))
  return re.findall(rf"= \w+\[(?:1,)?{sizes}\]\S* [a-z-]+\(.*", text)


def test_an_entry_is_that_of_the_layer():
  stacked = jnp.arange(24.0).reshape(2, 3, 4)
  array = LayerArray(stacked=stacked, layer=jnp.int32(1))
  assert array.shape == (3, 4) and array.dtype == stacked.dtype
  np.testing.assert_array_equal(array[jnp.int32(2)], stacked[1, 2])
  np.testing.assert_array_equal(
    array[jnp.asarray([2, 0, 2])], stacked[1, [2, 0, 2]]
  )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:codes of layers that are not one loop")
@pytest.mark.parametrize("codes", CODED)
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_a_loop_are_layers_one_by_one(tmp_path, name, codes):
  config = MODELS[name]
  rj.models.save(rj.models.create(config, seed=0), tmp_path / "model")
  loop, single = (
    CODED[codes](rj.models.load(tmp_path / "model", scan=scan))
    for scan in (True, False)
  )
  assert max(run.repeats for run in loop.stack.runs) > 1
  assert max(run.repeats for run in single.stack.runs) == 1
  np.testing.assert_allclose(logits(loop), logits(single), rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["host", "device=.4,host=.6"])
def test_placed_layers_have_the_same_experts(tmp_path, placement):
  rj.models.save(rj.models.create(MIXTURE, seed=0), tmp_path / "model")
  want = logits(rj.models.load(tmp_path / "model"))
  placed = rj.models.load(tmp_path / "model", placement=placement)
  np.testing.assert_allclose(logits(placed), want, rtol=0, atol=5e-6)


@pytest.mark.long
@pytest.mark.parametrize("codes", CODED)
def test_a_step_copies_no_layer_s_experts(codes):
  model = CODED[codes](rj.models.create(MIXTURE, seed=0))
  experts = model.stack.blocks[0][0].feedforward
  shapes = [
    x.shape[1:]
    for x in jax.tree.leaves((experts.gate, experts.up, experts.down))
  ]
  assert all(shape[0] == 11 for shape in shapes)
  text = program(model)
  assert not [line for shape in shapes for line in written(text, *shape)]
  if codes == "floats":
    # A call that may have a gradient slices them: the lines would be seen.
    tokens = jnp.zeros((2, 1), jnp.int32)
    text = jax.jit(lambda m, x: m(x)).lower(model, tokens).compile().as_text()
    assert written(text, 11, 32, 48)


@pytest.mark.long
@pytest.mark.parametrize("axis", ["ffn", "experts"])
def test_sharded_experts_are_the_same_and_never_all_gathered(axis):
  config = MIXTURE | {"num_local_experts": 6}
  model = rj.models.create(config, seed=0)
  mesh = jax.make_mesh(
    (2, 2), ("seq", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  rules = rj.models.Rules(**{"ffn": None, "experts": None, axis: "model"})
  placed = rj.models.place(model, mesh, rules)
  np.testing.assert_allclose(logits(placed), logits(model), rtol=0, atol=5e-6)
  text = program(placed)
  assert not re.search(r"\[3,6,\d+,\d+\]\S* all-gather", text)
  if axis == "ffn":
    assert not written(text, 6, 32, 24) + written(text, 6, 32, 48)


@pytest.mark.long
def test_rows_read_their_adapters_alone():
  config = {k: v for k, v in MIXTURE.items() if "experts" not in k}
  model = rj.models.create(config | {"model_type": "mistral"}, seed=0)
  lora = rj.train.Lora(rank=2)
  adapters = [
    (lora, jax.tree.map(lambda x: x + 0.1, lora.start(model, seed=n)))
    for n in range(12)
  ]
  adapted, rows = with_adapters(model, adapters), jnp.asarray([3, 0])
  with adapter_rows(rows):
    text, got = program(adapted), logits(adapted)
  merged = lora.model(adapters[2][1], model)
  np.testing.assert_allclose(got[0], logits(merged)[0], rtol=0, atol=1e-4)
  np.testing.assert_allclose(got[1], logits(model)[1], rtol=0, atol=1e-4)
  factors = adapted.stack.blocks[0][0].attention.q.a.get_value()
  assert factors.shape == (3, 13, 32, 2)
  assert not written(text, 13, 32, 2)


@pytest.mark.long
def test_a_gradient_is_that_of_slices(tmp_path):
  rj.models.save(rj.models.create(MIXTURE, seed=0), tmp_path / "model")
  tokens = np.arange(8, dtype=np.int32)[None]
  loop, single = (
    jax.grad(lambda m: jnp.sum(m(tokens) ** 2))(
      rj.models.load(tmp_path / "model", scan=scan)
    ).stack
    for scan in (True, False)
  )
  want = jnp.stack(
    [blocks[0].feedforward.up.get_value()[0] for blocks in single.blocks]
  )
  got = loop.blocks[0][0].feedforward.up.get_value()
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
