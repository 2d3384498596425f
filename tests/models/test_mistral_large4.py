"""Mistral Large 4: what its configs say, learned rotations and scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax import models
from ringjax.errors import ConfigError, OptionError
from ringjax.nn.attention_layers.attention import LearnedTemperature
from ringjax.nn.feedforward import Gated
from ringjax.ops.rope import Rope, Yarn
from tests import checkpoints

NAME = "mistral_large4"
EXPECTED = checkpoints.expected(NAME)


def read(**changes):
  config = checkpoints.config(NAME) | changes
  return models.read_config(
    {key: x for key, x in config.items() if x != "absent"}
  )[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return models.load(
    checkpoints.write(NAME, tmp_path_factory.mktemp(NAME) / "model")
  )


def test_what_a_file_leaves_out():
  absent = dict.fromkeys(
    (
      "indexer_types",
      "kv_source_layers",
      "layer_types",
      "mlp_layer_types",
      "no_rope_layers",
      "rope_parameters",
    ),
    "absent",
  )
  config = read(num_hidden_layers=5, **absent)
  rotates = [x.attention.rope is not None for x in config.layers]
  assert rotates == [True, True, True, False, True]
  assert not any(x.attention.index.reads for x in config.layers)
  assert config.streams is None
  plain = [isinstance(x.feedforward, Gated) for x in config.layers]
  assert plain == [True] + [False] * 4
  rope = config.learned_rope
  assert rope.learned
  assert rope.scaling == Yarn(factor=2048.0, original=512, attention=1.0)
  assert read(num_hidden_layers=5, **dict.fromkeys(absent)) == config
  # Layers without a rotation have as many dims without one.
  sizes = {x.attention.plain + x.attention.shared for x in config.layers}
  assert len(sizes) == 1


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("final_logit_softcapping", 0.0),
    ("index_head_dim", 6),
    ("indexer_types", ["shared", "full", "full", "full"]),
    ("indexer_types", ["full", "full", "shared", "full"]),
    ("kv_source_layers", [0, 0, 2]),
    ("kv_source_layers", [0, 1, 3, 3]),
    ("kv_source_layers", [0, 0, 0, 3]),
    ("kv_source_layers", [0, 0, 2, 0]),
    ("kv_source_layers", "0"),
    ("layer_types", ["full_attention"] * 4),
    ("no_rope_layers", [1, 1, 0]),
    ("q_lora_rank", 28),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
    (
      "rope_parameters",
      {"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  word = "partial_rotary_factor" if "partial" in str(value) else key
  with pytest.raises(ConfigError, match=word):
    read(**{key: value})


@pytest.mark.parametrize("interleaved", [False, True])
def test_learned_factors_are_exact_at_far_positions(interleaved):
  rope = Rope(theta=1e4, dims=10, interleaved=interleaved, learned=True)
  log_factors = np.float32([0.7, -0.9, 0.0, 3.1, -4.2])
  positions = np.int32([[0, 1, 77, 131_072, 2**30 + 5]])
  tables = rope.tables(jnp.asarray(positions), None, jnp.asarray(log_factors))
  factors = np.asarray(jnp.exp(jnp.asarray(log_factors)), np.longdouble)
  frequencies = np.longdouble(1e4) ** -(np.arange(5) / np.longdouble(5))
  angles = positions[..., None] * (frequencies * factors)
  for table, expected in zip(
    tables, (np.cos(angles), np.sin(angles)), strict=True
  ):
    np.testing.assert_allclose(table, expected, atol=2e-6)


def test_a_learned_rotation_without_its_factors_is_refused():
  rope = Rope(theta=1e4, dims=8, learned=True)
  with pytest.raises(OptionError, match="learned factors"):
    rope.tables(jnp.arange(4)[None], None)


def test_scales_by_position():
  layer = LearnedTemperature().build(nnx.Rngs(0), 3)
  q = jax.random.normal(jax.random.key(1), (2, 5, 3, 8))
  pos = jnp.int32([[0, 1, 2, 3, 4], [7, 8, 100, 101, 102]])
  np.testing.assert_array_equal(layer(q, pos), q)
  layer.scale[...] = jnp.array([0.5, -1.0, 0.0])
  layer.bias[...] = jnp.array([1.0, 0.3, 2.0])
  factors = np.log(np.asarray(pos) + 1.0)[..., None] * [0.5, -1.0, 0.0]
  factors += [1.0, 0.3, 2.0]
  np.testing.assert_allclose(layer(q, pos), q * factors[..., None], rtol=1e-5)


def test_layers_that_read_latents_keep_none():
  layers = [x.attention for x in read().layers]
  assert [x.reads for x in layers] == [False, True, False, False]
  assert [x.group for x in layers] == ["rotated", "rotated", None, None]
  model = models.abstract(checkpoints.config(NAME))
  assert sum(kind.layers for kind in model.kinds) == 3
  unshared = read(kv_source_layers=[0, 1, 2, 3])
  assert unshared == read(kv_source_layers=None)
  assert unshared == read(kv_source_layers="absent")
  assert not any(x.attention.reads for x in unshared.layers)
  # Of two sources a layer reads the last one.
  sources = [0, 0, 2, 2, 4]
  changes = dict(
    num_hidden_layers=5,
    no_rope_layers=[1] * 5,
    indexer_types=["full", "shared"] * 2 + ["full"],
    mlp_layer_types="absent",
    layer_types="absent",
  )
  layers = read(kv_source_layers=sources, **changes).layers
  assert [x.attention.reads for x in layers] == [0, 1, 0, 1, 0]
  present = {k: x for k, x in changes.items() if x != "absent"}
  config = checkpoints.config(NAME) | present | {"kv_source_layers": sources}
  config |= {
    "layer_types": ["indexed_attention"] * 5,
    "mlp_layer_types": ["sparse"] * 5,
  }
  model = models.abstract(config, dtype=jnp.float32)
  # Pairs of layers are alike, but not in a loop.
  assert [run.repeats for run in model.stack.runs] == [1] * 5
  logits = jax.eval_shape(model, EXPECTED.tokens)
  assert logits.shape == EXPECTED.logits.shape
  with pytest.raises(ConfigError, match="kv_source_layers"):
    read(kv_source_layers=[0, 0, 2, 0, 4], **changes)


@pytest.mark.long
def test_the_factors_change_the_logits_and_are_not_trained(model):
  tokens = jnp.asarray(EXPECTED.tokens)

  def loss(model):
    return jnp.mean(jnp.square(model(tokens)))

  gradients = jax.jit(jax.grad(loss))(model)
  assert not np.asarray(gradients.rope_factors[...]).any()
  temperature = gradients.stack.blocks[0][0].attention.temperature
  assert np.abs(np.asarray(temperature.scale[...])).max() > 0
  graph, params = nnx.split(model)
  changed = nnx.merge(graph, jax.tree.map(lambda x: x, params))
  changed.rope_factors[...] = jnp.zeros_like(changed.rope_factors[...])
  assert np.abs(np.asarray(changed(tokens)) - EXPECTED.logits).max() > 0.05


@pytest.mark.long
def test_keys_that_a_cache_rotates_later(model):
  """They get the factors, and equal those that are stored rotated."""
  cache = model.init_cache(2, 48, kind="unrotated")
  first, cache = model(EXPECTED.tokens[:, :29], cache=cache)
  second, _ = model(EXPECTED.tokens[:, 29:], cache=cache)
  logits = np.concatenate([first, second], 1)
  np.testing.assert_allclose(logits, EXPECTED.logits, atol=5e-5)


@pytest.mark.parametrize(
  "kind",
  [
    "expected",
    "snapkv:unrotated=True",
    rj.kv.CacheConfig(
      policy=rj.kv.AdaKV(budget=0.5, by=rj.kv.ExpectedAttention())
    ),
  ],
  ids=str,
)
def test_keys_that_are_rotated_outside_of_a_call_are_refused(kind):
  model = models.abstract(checkpoints.config(NAME), dtype=jnp.float32)
  with pytest.raises(OptionError, match="learned factors"):
    model.init_cache_spec(2, 48, kind=kind)
