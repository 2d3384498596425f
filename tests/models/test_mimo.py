"""MiMo-V2-Flash: its authors' spelling, and what is refused."""

from __future__ import annotations

import pytest

from ringjax import models
from ringjax.errors import ConfigError
from ringjax.infer.layerwise import LayerPrograms
from tests import checkpoints


def spelled():
  """The config as the authors' files have it."""
  config = checkpoints.config("mimo_v2_flash")
  for key in ("layer_types", "mlp_layer_types", "rope_parameters"):
    del config[key]
  config["layernorm_epsilon"] = config.pop("rms_norm_eps")
  heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
  return config | {
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "rope_theta": 300.0,
    "swa_rope_theta": 50.0,
    "partial_rotary_factor": 0.334,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "swa_num_attention_heads": heads,
    "swa_num_key_value_heads": 2 * kv_heads,
    "swa_head_dim": config["head_dim"],
    "swa_v_head_dim": config["v_head_dim"],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
  }


def test_both_spellings_mean_the_same():
  """The window of the authors' files counts the tokens before a query."""
  want, _ = models.read_config(checkpoints.config("mimo_v2_flash"))
  assert models.read_config(spelled())[0] == want
  full, slides = want.layers[0].attention, want.layers[1].attention
  assert (full.reach, slides.reach) == (None, 8)
  assert (full.kv_heads, slides.kv_heads) == (2, 4)
  assert (full.sinks, slides.sinks) == (False, True)
  assert full.rope.dims == 8


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("num_key_value_heads", 8),
    ("swa_num_key_value_heads", 2),
    ("swa_head_dim", 16),
    ("add_full_attention_sink_bias", True),
    ("hybrid_layer_pattern", [0, 1]),
    ("mlp_layer_types", ["dense", "sparse", "odd"]),
    ("layer_types", ["full_attention"] * 2 + ["chunked_attention"]),
    ("n_shared_experts", 1),
    ("n_group", 4),
    ("v_head_dim", 0),
    ("attention_value_scale", "no"),
  ],
)
def test_a_value_that_cannot_be(key, value):
  with pytest.raises(ConfigError, match=key):
    models.read_config(spelled() | {key: value})


def test_narrow_values_are_refused_by_what_wants_wide_ones():
  model = models.abstract(checkpoints.config("mimo_v2_flash"))
  with pytest.raises(ConfigError, match=r"mimo_v2_flash.*10 numbers.*24"):
    LayerPrograms(model)
