"""DeepSeek-V4: what its configs say, what is refused, and an engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax import models
from ringjax.errors import ConfigError, OptionError
from ringjax.models.families import FAMILIES
from ringjax.models.weights.linear_maps import rounded_maps
from ringjax.nn.residuals import HyperConnection
from ringjax.ops.rope import Yarn
from ringjax.serve import Engine, Request
from tests import checkpoints
from tests.models.hf.test_packings import FORMATS

NAME = "deepseek_v4"


def read(**changes):
  config = checkpoints.config(NAME) | changes
  return models.read_config(
    {key: x for key, x in config.items() if x != "absent"}
  )[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = checkpoints.write(NAME, tmp_path_factory.mktemp(NAME) / "model")
  return models.load(folder)


def rates(config):
  compressions = (layer.attention.compression for layer in config.layers)
  return [0 if x is None else x.rate for x in compressions]


def test_published_sizes():
  flash, pro = (
    models.read_config(models.PRESETS[f"deepseek-v4-{name}"])[0]
    for name in ("flash", "pro")
  )
  assert rates(flash) == [0, 0, *[4, 128] * 20, 4]
  assert rates(pro) == [128, 128, *[4, 128] * 29, 4]
  assert flash.longest == pro.longest == 1 << 20
  by_id = [layer.feedforward.by_id for layer in flash.layers]
  assert by_id == [129280] * 3 + [0] * 40
  plain, scaled = (flash.layers[n].attention.keys.rope for n in (0, 2))
  assert (plain.theta, scaled.theta) == (10000.0, 160000.0)
  # Scaled where keys are compressed, without a factor of the cosines.
  assert type(scaled.scaling) is Yarn and scaled.scaling.magnitude == 1.0
  assert type(plain.scaling) is not Yarn and plain.dims == scaled.dims == 64


def test_kinds_that_are_not_listed():
  kinds = lambda **changes: read(
    num_hidden_layers=6, mlp_layer_types="absent", **changes
  )
  listed = kinds(layer_types="absent")
  assert rates(listed) == [8, 8, 8, 4, 8, 4]
  assert [x.feedforward.by_id > 0 for x in listed.layers] == [True] * 3 + [
    False
  ] * 3
  older = kinds(
    layer_types="absent",
    compress_rates="absent",
    compress_ratios=[0, 4, 128, 4, 0, 0, 0],
    compress_rate_csa=2,
    num_hash_layers=1,
  )
  assert rates(older) == [0, 2, 128, 2, 0, 0]
  assert [x.feedforward.by_id > 0 for x in older.layers] == [True] + [False] * 5


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("attention_bias", True),
    ("compress_ratios", [0, 8, 128, 4]),
    ("compress_rates", {"compressed_sparse_attention": 0}),
    ("hc_mult", 0),
    ("hc_sinkhorn_iters", 0),
    ("index_head_dim", 4),
    ("layer_types", ["full_attention"] * 4),
    ("mlp_layer_types", ["moe", "dense", "moe", "moe"]),
    ("n_shared_experts", 2),
    ("num_experts_per_tok", 7),
    ("num_key_value_heads", 4),
    ("o_groups", 3),
    ("scoring_func", "softmax"),
    ("swiglu_limit", 0.0),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  removed = {"layer_types": "absent"} if key == "compress_ratios" else {}
  with pytest.raises(ConfigError, match=key):
    read(**removed, **{key: value})


def test_streams_are_mixed_by_doubly_stochastic_weights():
  spec = HyperConnection(count=3, iterations=40, floor=1e-6, eps=1e-6)
  layer = spec.build(nnx.Rngs(0), 8)
  x = jax.random.normal(jax.random.key(1), (2, 5, 3, 8))
  part_input, state = layer.begin(x)
  assert part_input.shape == (2, 5, 8)
  for axis in (-1, -2):
    np.testing.assert_allclose(jnp.sum(state.mixing, axis), 1, atol=1e-4)
  np.testing.assert_allclose(
    layer(state, jnp.zeros_like(part_input)).sum(2), x.sum(2), atol=1e-3
  )


@pytest.mark.parametrize("kind", ["snapkv", rj.kv.CacheConfig(device=16)])
def test_caches_that_drop_or_move_keys_are_refused(model, kind):
  with pytest.raises(OptionError, match="compressed keys"):
    model.init_cache(1, 64, kind=kind)


def test_more_is_refused(model):
  prompt = checkpoints.expected(NAME).prompt
  with pytest.raises(OptionError, match="compressed keys"):
    model.init_cache(1, 64, placement="host")
  with pytest.raises(OptionError, match="compressed keys"):
    model.init_cache(1, 64).growing(16, 128)
  cache = model.init_cache(1, 64)
  with pytest.raises(OptionError, match="recurrent"):
    model(prompt[:1, :4], cache=cache, parents=np.int32([-1, 0, 0, 1]))
  with pytest.raises(OptionError, match="recurrent"):
    cache.truncate(2)


def test_what_chooses_and_weighs_keys_is_not_rounded(model):
  paths = rounded_maps(model, "codes")
  names = {path.split(".attention.")[1] for path in paths if "attent" in path}
  assert {"q_down", "q", "kv", "compressor.value", "o"} <= names
  assert not [x for x in names if "index" in x or x.endswith("gate")]
  adapted = rj.train.Lora(targets=("gate", "value")).start(model)
  assert adapted and not [path for path in adapted if "index" in path]


@pytest.mark.slow
def test_published_folders_are_unpacked(tmp_path):
  """Blocks of float8, experts of four bits, and scales that are exponents."""
  kind, random = FORMATS["deepseek_v4"], np.random.default_rng(3)
  config = checkpoints.config(NAME) | {"moe_intermediate_size": 32}
  maps = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
  packed, plain = {}, {}
  for name, array in checkpoints.tensors(NAME).items():
    published = FAMILIES[NAME].spellings(name)[-1]
    packed[published] = plain[name] = array
    if name.removesuffix(".weight").endswith(maps):
      shape = (32 if size == 26 else size for size in array.shape)
      codes, floats = kind.encode(random, published, *shape)
      packed |= codes
      plain[name] = floats.astype(np.float32)
  assert sum(x.dtype == np.int8 for x in packed.values()) == 4 * 6
  write = checkpoints.write_folder
  stated = {"quantization_config": kind.config, "expert_dtype": "fp4"}
  folder = write(packed, config | stated, tmp_path / "packed")
  ids = checkpoints.expected(NAME).prompt
  expected = models.load(write(plain, config, tmp_path / "plain"))(ids)
  np.testing.assert_array_equal(models.load(folder)(ids), expected)


@pytest.mark.slow
def test_an_engine_gives_what_generate_gives(model):
  """Rows of several lengths, more than there are places."""
  prompt = checkpoints.expected(NAME).prompt
  prompts = [prompt[0, :7], prompt[1, :13], prompt[0, 3:24]]
  engine = Engine(
    model, rows=2, capacity=128, longest=48, page=16, piece=8, pieces=2
  )
  handles = [
    engine.submit(Request(prompt=x, max_new_tokens=6)) for x in prompts
  ]
  engine.run()
  want = rj.infer.generate(model, prompts, max_new_tokens=6)
  for handle, row in zip(handles, np.asarray(want), strict=True):
    assert handle.result().tokens.tolist() == row.tolist()
