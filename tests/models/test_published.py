"""Real models: what their config.json says is understood, key by key.

`published.json` has the keys of the published files, and their values but for
the factors of LongRoPE, of which only the number is true. No weights.
"""

from __future__ import annotations

import json
import pathlib
import random

import jax
import pytest

from ringjax import models
from ringjax.errors import ConfigError
from ringjax.ops.mask import Causal, Chunked
from tests.models.test_config import mutate, survives

CONFIGS = json.loads(
  (pathlib.Path(__file__).parent / "published.json").read_text()
)

# Layers, query heads, kv heads (1 if latent), vocabulary, positions, millions
# of parameters of the text model.
SIZES = {
  "Llama-2-7b-hf": (32, 32, 32, 32000, 4096, 6738),
  "Llama-3.1-8B": (32, 32, 8, 128256, 131072, 8030),
  "Llama-3.2-1B": (16, 32, 8, 128256, 131072, 1236),
  "Mistral-7B-v0.1": (32, 32, 8, 32000, 32768, 7242),
  "Mistral-7B-v0.3": (32, 32, 8, 32768, 32768, 7248),
  "Mixtral-8x7B-v0.1": (32, 32, 8, 32000, 32768, 46703),
  "Qwen2.5-7B": (28, 28, 4, 152064, 131072, 7616),
  # Its attention is plain up to a chunk; beyond that it folds distances.
  "Qwen2.5-7B-Instruct-1M": (28, 28, 4, 152064, 262144, 7616),
  "DeepSeek-R1-Distill-Qwen-7B": (28, 28, 4, 152064, 131072, 7616),
  "Qwen3-8B": (36, 32, 8, 151936, 40960, 8191),
  "Qwen3-30B-A3B": (48, 32, 4, 151936, 40960, 30532),
  "Qwen3-Coder-30B-A3B-Instruct": (48, 32, 4, 151936, 262144, 30532),
  "Qwen3-Next-80B-A3B-Instruct": (48, 16, 2, 151936, 262144, 79674),
  "gemma-7b": (28, 16, 16, 256000, 8192, 8538),
  "gemma-2-9b": (42, 16, 8, 256000, 8192, 9242),
  "gemma-3-1b-pt": (26, 4, 1, 262144, 32768, 1000),
  "gemma-3-4b-it": (34, 8, 4, 262208, 131072, 3880),
  "gemma-3-27b-it": (62, 32, 16, 262208, 131072, 27009),
  "Phi-3-mini-128k-instruct": (32, 32, 32, 32064, 131072, 3821),
  "Phi-3.5-mini-instruct": (32, 32, 32, 32064, 131072, 3821),
  "Phi-4-mini-instruct": (32, 24, 8, 200064, 131072, 3836),
  "falcon-7b": (32, 71, 1, 65024, 2048, 6922),
  "falcon-40b": (60, 128, 8, 65024, 2048, 41303),
  "falcon-rw-1b": (24, 32, 32, 50304, 2048, 1312),
  "gpt-neox-20b": (44, 64, 64, 50432, 2048, 20555),
  "gpt-oss-20b": (24, 64, 8, 201088, 131072, 20915),
  "DeepSeek-V3": (61, 128, 1, 129280, 163840, 671026),
  "OLMo-2-1124-7B": (32, 32, 32, 100352, 4096, 7299),
  "Olmo-3-1025-7B": (32, 32, 32, 100278, 65536, 7298),
  "c4ai-command-r7b-12-2024": (32, 32, 8, 256000, 8192, 8028),
  "SmolLM2-135M": (30, 9, 3, 49152, 8192, 135),
  "SmolLM3-3B": (36, 16, 4, 128256, 65536, 3075),
  "Llama-4-Scout-17B-16E-Instruct": (48, 40, 8, 202048, 10485760, 107770),
  "GLM-4-9B-0414": (40, 32, 2, 151552, 32768, 9400),
  "granite-3.1-8b-base": (40, 32, 8, 49152, 131072, 8171),
  "starcoder2-7b": (32, 36, 4, 49152, 16384, 7174),
}

# How many layers see only so many tokens before their own, those that are in
# a chunk of that many, and the rotations; the others see all and turn plainly.
WINDOWS = {
  "Mistral-7B-v0.1": {4096: 32},
  "Phi-3-mini-128k-instruct": {262144: 32},
  "Phi-3.5-mini-instruct": {262144: 32},
  "Phi-4-mini-instruct": {262144: 32},
  "gemma-2-9b": {4096: 21},
  "gemma-3-1b-pt": {512: 22},
  "gemma-3-4b-it": {1024: 29},
  "gemma-3-27b-it": {1024: 52},
  "gpt-oss-20b": {128: 12},
  "Olmo-3-1025-7B": {4096: 24},
  "c4ai-command-r7b-12-2024": {4096: 24},
  "starcoder2-7b": {4096: 32},
  "Llama-4-Scout-17B-16E-Instruct": {8192: 36},
}
ROPES = {
  "Llama-3.1-8B": {"Llama3"},
  "Llama-3.2-1B": {"Llama3"},
  "Llama-4-Scout-17B-16E-Instruct": {"Llama3"},
  "gemma-3-4b-it": {"Unscaled", "Linear"},
  "gemma-3-27b-it": {"Unscaled", "Linear"},
  "Phi-3-mini-128k-instruct": {"LongRope"},
  "Phi-3.5-mini-instruct": {"LongRope"},
  "Phi-4-mini-instruct": {"LongRope"},
  "gpt-oss-20b": {"Yarn"},
  "DeepSeek-V3": {"Yarn"},
  "Olmo-3-1025-7B": {"Unscaled", "Yarn"},
  # ALiBi.
  "falcon-rw-1b": set(),
}
TIED = {
  "Llama-3.2-1B",
  "Phi-4-mini-instruct",
  "SmolLM2-135M",
  "SmolLM3-3B",
  "c4ai-command-r7b-12-2024",
  "falcon-40b",
  "falcon-7b",
  "falcon-rw-1b",
  "gemma-2-9b",
  "gemma-3-1b-pt",
  "gemma-3-27b-it",
  "gemma-3-4b-it",
  "gemma-7b",
  "granite-3.1-8b-base",
  "starcoder2-7b",
}


def test_every_file_has_its_facts():
  assert set(SIZES) == set(CONFIGS)
  for facts in (WINDOWS, ROPES, TIED):
    assert set(facts) <= set(CONFIGS)


def windows(config):
  found = {}
  for layer in config.layers:
    mask = getattr(layer.attention, "mask", None)
    reach = None if mask is None else mask.reach[0]
    if reach is not None:
      found[reach + 1] = found.get(reach + 1, 0) + 1
  return found


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_it_says(name):
  config, _ = models.read_config(CONFIGS[name])
  layers, heads, kv_heads, vocab, positions, _ = SIZES[name]
  assert len(config.layers) == layers
  full = config.layers[-1].attention
  assert (full.heads, getattr(full, "kv_heads", 1)) == (heads, kv_heads)
  assert (config.vocab, config.max_positions) == (vocab, positions)
  assert windows(config) == WINDOWS.get(name, {})
  ropes = {type(rope.scaling).__name__ for rope in config.ropes}
  assert ropes == ROPES.get(name, {"Unscaled"})
  assert config.tied == (name in TIED)


# The sizes of the others are those of a preset, or of another one here.
QUICK = {
  "Qwen3-Next-80B-A3B-Instruct",
  "gemma-3-27b-it",
  "gemma-3-4b-it",
  "Phi-3.5-mini-instruct",
  "gpt-neox-20b",
  "OLMo-2-1124-7B",
  "SmolLM3-3B",
  "Llama-4-Scout-17B-16E-Instruct",
}


@pytest.mark.parametrize(
  "name",
  [
    n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
    for n in sorted(CONFIGS)
  ],
)
def test_number_of_parameters(name):
  millions = SIZES[name][-1]
  model = models.abstract(CONFIGS[name])
  count = sum(x.size for x in jax.tree.leaves(model))
  assert count / 1e6 == pytest.approx(millions, abs=1)


def test_details_of_wrapped_ones():
  scout, _ = models.read_config(CONFIGS["Llama-4-Scout-17B-16E-Instruct"])
  first, last = scout.layers[0].attention, scout.layers[3].attention
  assert first.rope is not None and last.rope is None
  # Older files have the number 4 for true.
  assert last.temperature is not None and first.temperature is None
  assert first.mask == Causal() & Chunked(8192)
  scaling = first.rope.scaling
  assert scaling.low == scaling.high == 1.0
  gemma, family = models.read_config(CONFIGS["gemma-3-27b-it"])
  assert family.name == gemma.family == "gemma3"
  assert gemma.layers[0].attention.scale == 168**-0.5
  assert gemma.layers[5].attention.rope.theta == 1e6


# With another value each of these would change what is computed.
@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("Qwen2.5-7B", "use_mrope", True),
    ("Qwen3-Next-80B-A3B-Instruct", "use_sliding_window", True),
    ("gemma-2-9b", "sliding_window_size", 2048),
    ("Qwen3-Coder-30B-A3B-Instruct", "shared_expert_intermediate_size", 512),
    ("Qwen3-Coder-30B-A3B-Instruct", "use_qk_norm", False),
    ("Phi-4-mini-instruct", "lm_head_bias", True),
    ("falcon-40b", "ff_factor", 2),
    ("starcoder2-7b", "mlp_type", "gated"),
    ("starcoder2-7b", "norm_type", "rms_norm"),
    ("starcoder2-7b", "scale_attn_weights", False),
    ("c4ai-command-r7b-12-2024", "position_embedding_type", "learned"),
    ("c4ai-command-r7b-12-2024", "use_parallel_block", False),
    ("DeepSeek-V3", "moe_layer_freq", 2),
    ("Llama-2-7b-hf", "is_encoder_decoder", True),
    ("Llama-2-7b-hf", "pruned_heads", {"1": [0]}),
    ("gemma-3-27b-it", "text_config", []),
  ],
)
def test_harmless_with_its_own_value_only(name, key, value):
  config = {**CONFIGS[name], key: value}
  with pytest.raises(ConfigError, match=key) as caught:
    models.read_config(config)
  assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
  ("part", "value"),
  [
    ("chunk_size", 0),
    ("original_max_position_embeddings", "all"),
    ("new_trick", 1),
  ],
)
def test_chunks_that_cannot_be(part, value):
  config = json.loads(json.dumps(CONFIGS["Qwen2.5-7B-Instruct-1M"]))
  config["dual_chunk_attention_config"][part] = value
  with pytest.raises(ConfigError, match=f"dual_chunk_attention_config.{part}"):
    models.read_config(config)


def test_the_shortest_bound_of_chunks_counts():
  config = json.loads(json.dumps(CONFIGS["Qwen2.5-7B-Instruct-1M"]))
  positions = lambda: models.read_config(config)[0].max_positions
  config["dual_chunk_attention_config"]["chunk_size"] = 65536
  assert positions() == 65536
  config["max_position_embeddings"] = 32768
  assert positions() == 32768


# How tokens are drawn, and what says nothing at all.
SPARE = {
  "do_sample": True,
  "temperature": 0.6,
  "top_k": 20,
  "top_p": 0.9,
  "repetition_penalty": 1.1,
  "is_composition": False,
  "add_cross_attention": False,
  "pruned_heads": {},
}


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gemma-3-27b-it"])
def test_settings_of_a_generation(name):
  config = {**CONFIGS[name], **SPARE}
  assert models.read_config(config)[0] == models.read_config(CONFIGS[name])[0]


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "SmolLM3-3B"])
def test_layers_that_would_slide_while_windows_are_off(name):
  config = {**CONFIGS[name], "sliding_window": 128}
  config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
  assert windows(models.read_config(config)[0]) == {}
  config["use_sliding_window"] = True
  assert windows(models.read_config(config)[0]) == {
    128: config["num_hidden_layers"]
  }


def test_yarn_that_was_trained():
  config = {
    **CONFIGS["Llama-2-7b-hf"],
    "max_position_embeddings": 65536,
    "rope_scaling": {
      "factor": 16.0,
      "original_max_position_embeddings": 4096,
      "type": "yarn",
      "finetuned": True,
    },
  }
  (rope,) = models.read_config(config)[0].ropes
  assert rope.scaling.factor == 16.0 and rope.scaling.original == 4096


@pytest.mark.one_case
@pytest.mark.parametrize(
  "name",
  [
    "DeepSeek-V3",
    "Llama-4-Scout-17B-16E-Instruct",
    "Qwen2.5-7B-Instruct-1M",
    pytest.param("gemma-3-27b-it", marks=pytest.mark.slow),
    "gpt-oss-20b",
  ],
)
def test_fuzz(name):
  """Objects in a config too: a meaning, or an error in plain words."""
  r = random.Random(name)
  kept = [survives(mutate(CONFIGS[name], r)) for _ in range(150)]
  assert any(x is None for x in kept) and any(x is not None for x in kept)
