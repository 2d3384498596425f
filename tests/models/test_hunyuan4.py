"""Hunyuan 4: what its configs and tensors say, and streams without mixing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax import models
from ringjax.errors import ConfigError
from ringjax.models.weights.linear_maps import rounded_maps
from ringjax.nn.feedforward import Gated
from ringjax.nn.residuals import IndependentConnection
from tests import checkpoints

NAME = "hy_v4"


def read(**changes):
  config = checkpoints.config(NAME) | changes
  return models.read_config(
    {key: x for key, x in config.items() if x != "absent"}
  )[0]


def test_kinds_that_are_not_listed():
  kinds = dict.fromkeys(
    ("indexer_types", "mlp_layer_types", "layer_types"), "absent"
  )
  config = read(num_hidden_layers=7, **kinds)
  reads = [layer.attention.index.reads for layer in config.layers]
  assert reads == [False, False, True, True, True, False, True]
  plain = [isinstance(layer.feedforward, Gated) for layer in config.layers]
  assert plain == [True] + [False] * 6
  assert read(**dict.fromkeys(kinds)) == read(**kinds)


def test_the_spelling_of_published_files():
  """They state the family's properties, and name layers otherwise."""
  kinds = ["dense", "sparse", "sparse", "sparse"]
  older = read(
    enable_ihc=True,
    enable_lm_head_fp32=True,
    gated_mla=True,
    gating_type="elementwise",
    learnable_sink=True,
    scoring_func="sigmoid",
    layer_types=["deepseek_sparse_attention"] * 4,
    mlp_layer_types="absent",
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
    mtp_loss_factor=0.1,
  )
  assert older == read(mlp_layer_types=kinds)


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("gated_mla", False),
    ("gating_type", "headwise"),
    ("hc_magnitude", 0.0),
    ("hc_mult", 0),
    ("hidden_act", "gelu"),
    ("index_head_dim", 6),
    ("indexer_types", ["shared", "full", "full", "full"]),
    ("layer_types", ["full_attention"] * 4),
    ("mlp_layer_types", ["dense", "moe", "moe", "moe"]),
    ("q_lora_rank", None),
    ("swiglu_limit", 0.0),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  with pytest.raises(ConfigError, match=key):
    read(**{key: value})


def test_streams_are_added_to_and_not_mixed():
  spec = IndependentConnection(count=3, magnitude=1.5, floor=0.01, eps=1e-6)
  layer = spec.build(nnx.Rngs(0), 8)
  layer.base[...] = jnp.array([50.0, -50.0, -50.0, 50.0, -50.0, 0.0])
  layer.scale[...] = jnp.array([0.0, 0.0])
  x = jax.random.normal(jax.random.key(1), (2, 5, 3, 8))
  y = jax.random.normal(jax.random.key(2), (2, 5, 8))
  part_input, state = layer.begin(x)
  output = layer(state, y)
  x, y = np.asarray(x), np.asarray(y)
  weights = np.array([1.01, 0.01, 0.01])[:, None]
  np.testing.assert_allclose(part_input, (x * weights).sum(2), atol=1e-5)
  weights = np.array([1.51, 0.01, 0.76])[:, None]
  expected = x + weights * y[:, :, None]
  np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.long
def test_spellings_of_tensors(tmp_path):
  """As transformers saves them, and as it reads them, too."""
  arrays, config = checkpoints.tensors(NAME), checkpoints.config(NAME)
  write = checkpoints.write_folder
  expected = models.load(write(arrays, config, tmp_path / "read"))
  saved = lambda name: (
    name.replace(".hc_attn_layer.", ".hc_pre.hc_attn_layer.")
    .replace(".hc_mlp_layer.", ".hc_pre.hc_mlp_layer.")
    .replace(".hc_head.", ".hc_pre.hc_head.")
    .replace(".gate_proj.", ".linear_gate.")
  )
  inner = lambda name: name.replace("_layer.hc_", "_layer.hc_pre.hc_").replace(
    ".hc_head.", ".hc_head.hc_pre."
  )
  ids = np.arange(3, 20)[None]
  for spelling in (saved, inner):
    renamed = {spelling(name): x for name, x in arrays.items()}
    assert set(renamed) != set(arrays)
    folder = write(renamed, config, tmp_path / spelling("x"))
    np.testing.assert_array_equal(models.load(folder)(ids), expected(ids))


@pytest.mark.long
def test_what_chooses_keys_is_not_rounded(tmp_path):
  model = models.load(checkpoints.write(NAME, tmp_path / "model"))
  paths = rounded_maps(model, "codes")
  names = {path.split(".attention.")[1] for path in paths if "attent" in path}
  assert names == {"gate", "kv_down", "o", "q", "q_down"}
