"""MiniMax-M3: what its configs say, and blocks that an index chooses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax import models
from ringjax.errors import ConfigError, OptionError
from ringjax.models.weights.linear_maps import rounded_maps
from ringjax.nn.attention_layers.choosing.index_block_attention import (
  IndexBlockAttention,
)
from ringjax.nn.feedforward import Experts
from tests import checkpoints

NAME = "minimax_m3_vl"
EXPECTED = checkpoints.expected(NAME)
SPARSE = [False, True, True]


def read(**changes):
  config = checkpoints.config(NAME) | changes
  return models.read_config(
    {key: x for key, x in config.items() if x != "absent"}
  )[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return checkpoints.write(NAME, tmp_path_factory.mktemp(NAME) / "model")


@pytest.fixture(scope="module")
def model(folder):
  return models.load(folder)


def test_the_spelling_of_published_files():
  newer = read()
  sparse = [isinstance(x.attention, IndexBlockAttention) for x in newer.layers]
  assert sparse == SPARSE
  assert [isinstance(x.feedforward, Experts) for x in newer.layers] == SPARSE
  index = newer.layers[1].attention.index
  keys = {
    "use_sparse_attention": True,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_disable_index_value": [0, 1, 1],
    "sparse_num_index_heads": 2,
    "sparse_index_dim": index.dim,
    "sparse_block_size": index.block,
    "sparse_topk_blocks": index.count,
    "sparse_local_block": index.local,
    "sparse_attention_freq": [0, 1, 1],
  }
  absent = [key for key in checkpoints.config(NAME) if key[:6] == "index_"]
  properties = {
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1,
    "rope_parameters": "absent",
    "rope_theta": 30.0,
    "partial_rotary_factor": 0.5,
  }
  older = read(
    **properties,
    **dict.fromkeys((*absent, "layer_types", "mlp_layer_types"), "absent"),
    sparse_attention_config=keys,
    moe_layer_freq=[0, 1, 1],
    hidden_act="swigluoai",
  )
  assert older == newer
  dense = read(layer_types=None)
  assert not any(
    isinstance(x.attention, IndexBlockAttention) for x in dense.layers
  )


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("hidden_act", "gelu"),
    ("index_block_size", 0),
    ("index_head_dim", 6),
    ("index_local_blocks", 5),
    ("index_n_heads", 4),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("moe_layer_freq", [0, 2, 1]),
    ("num_experts_per_tok", 7),
    ("rotary_dim", 16),
    ("sparse_attention_config", {"sparse_topk_blocks": -1}),
    ("sparse_attention_config", {"sparse_init_block": 1}),
    ("sparse_attention_config", {"sparse_disable_index_value": [1, 0, 1]}),
    ("qk_norm_type", "per_layer"),
    ("attention_output_gate", True),
    ("swiglu_alpha", 0.0),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  removed = {"mlp_layer_types": None} if key == "moe_layer_freq" else {}
  with pytest.raises(ConfigError, match=key):
    read(**removed, **{key: value})


@pytest.mark.parametrize(
  "kind", ["snapkv", "sinks", rj.kv.CacheConfig(device=16)]
)
def test_caches_that_drop_or_move_keys_are_refused(model, kind):
  with pytest.raises(OptionError, match="IndexBlockAttention"):
    model.init_cache(1, 64, kind=kind)
  with pytest.raises(OptionError, match="IndexBlockAttention"):
    model.init_cache(1, 64, placement="host")


def test_positions_are_not_folded(folder):
  with pytest.raises(OptionError, match="IndexBlockAttention"):
    models.load(folder, rope_scaling="self_extend:factor=4")


def test_what_chooses_keys_is_not_rounded(model):
  paths = rounded_maps(model, "codes")
  names = {path.split(".attention.")[1] for path in paths if "attent" in path}
  assert names == {"q", "k", "v", "o"}


@pytest.mark.long
def test_packed_documents_at_the_end_of_a_block(model):
  """Each equals the document alone in a row."""
  first, second = EXPECTED.tokens[:1, :24], EXPECTED.tokens[1:, :15]
  segments = np.repeat(np.int32([1, 2]), [24, 15])[None]
  packed = model(np.concatenate([first, second], 1), segment_ids=segments)
  np.testing.assert_allclose(
    packed[:, :24], EXPECTED.logits[:1, :24], atol=5e-5
  )
  np.testing.assert_allclose(
    packed[:, 24:], EXPECTED.logits[1:, :15], atol=5e-5
  )


@pytest.mark.long
def test_the_loss_of_labels_does_not_reach_the_index(model):
  loss = lambda model: jnp.mean(jnp.square(model(EXPECTED.tokens)))
  gradients = jax.tree_util.tree_leaves_with_path(nnx.grad(loss)(model))
  index = [x for path, x in gradients if "index" in jax.tree_util.keystr(path)]
  assert index and not any(jnp.any(x) for x in index)
  keys = [x for path, x in gradients if "k_norm" in jax.tree_util.keystr(path)]
  assert all(jnp.all(jnp.isfinite(x)) for x in keys)
  assert any(jnp.any(x) for x in keys)


@pytest.mark.long
def test_heads_on_shards_choose_their_blocks(folder):
  """Prompt and decoding, with kv heads and the sequence on shards."""
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  model = models.load(folder, mesh=mesh, dtype=jnp.float32)
  new = rj.infer.generate(model, EXPECTED.prompt, max_new_tokens=6, mesh=mesh)
  np.testing.assert_array_equal(new, EXPECTED.greedy[:, :6])


@pytest.mark.long
@pytest.mark.parametrize("capacity", [64, 192])
def test_a_tree_of_drafts_reads_what_its_paths_read(model, capacity):
  """Keys of chosen blocks are masked, or gathered out of a larger cache."""
  rng, parents = np.random.default_rng(5), [-1, 0, 0, 1, 3]
  prompt = rng.integers(0, 101, (2, 37), np.int32)
  drafted = rng.integers(0, 101, (2, 5), np.int32)
  cache = model.init_cache(2, capacity)
  _, cache = model(prompt, cache=cache)
  got, _ = model(drafted, cache=cache, parents=np.asarray(parents))
  for path in ([0, 1, 3, 4], [0, 2]):
    want = model(np.concatenate([prompt, drafted[:, path]], 1))
    np.testing.assert_allclose(got[:, path], want[:, 37:], atol=5e-5)
