"""What a config.json may say: one meaning for both spellings, or an error."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from ringjax import models
from ringjax.errors import ConfigError, RingjaxError
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import forward
from ringjax.nn.sharding_context import ContextParallel
from tests import checkpoints

NAMES, NAMES_V4 = checkpoints.names(), checkpoints.names_v4()
LIMIT = 400

# Words of the machine room, which no user asked about.
JAX_WORDS = re.compile(r"jax|xla|tracer|pytree|nnx|beartype|jaxtyping", re.I)


def read(config):
  return models.read_config(config)[0]


def refused(config, *words, kind=ConfigError):
  with pytest.raises(kind) as caught:
    models.read_config(config)
  text = str(caught.value)
  assert len(text) < LIMIT and not JAX_WORDS.search(text), text
  for word in words:
    assert word in text, text
  return text


# ---------------------------------------------------------------------------
# One meaning
# ---------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES_V4)
def test_both_spellings_mean_the_same(name):
  old = checkpoints.config(name, "v4")
  assert old != checkpoints.config(name)
  assert read(old) == read(checkpoints.config(name))


def test_every_family_has_a_fixture():
  types = {checkpoints.config(name)["model_type"] for name in NAMES}
  families = {
    models.read_config(checkpoints.config(name))[1].name for name in NAMES
  }
  assert families == set(models.list()), (
    "make the fixture with tests/fixtures/make.py NAME, then run defaults.py "
    "NAME and known_keys.py there"
  )
  assert len(types) == len(families)


@pytest.mark.one_case
@pytest.mark.long_cases(100)
@pytest.mark.parametrize("name", NAMES)
def test_shape_of_a_model_is_that_of_its_tensors(name):
  """As many numbers as the checkpoint has, without making the model."""
  config = checkpoints.config(name)
  model = jax.eval_shape(lambda: models.create(config, dtype=jnp.float32))
  count = sum(x.size for x in jax.tree.leaves(model))
  shapes = checkpoints.shapes(name)
  stored = sum(
    math.prod(shape)
    for key, shape in shapes.items()
    if not key.endswith(checkpoints.TABLES)
  )
  # The last part of a table on disk may be shorter than the others.
  first = {
    key.partition(".shard_")[0]: shape
    for key, shape in shapes.items()
    if key.endswith(".shard_0.weight")
  }
  stored += sum(
    math.prod(first[key.partition(".shard_")[0]]) - math.prod(shape)
    for key, shape in shapes.items()
    if ".shard_" in key
  )
  assert count == stored


def test_keys_that_are_null_are_absent():
  config = checkpoints.config("llama3")
  assert read({**config, "anything_at_all": None}) == read(config)


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("activation", "swiglu"),
    ("gradient_checkpointing", False),
    ("is_llama_config", True),
    ("max_sequence_length", 2048),
    ("rope_interleaved", False),
    ("transformers.js_config", {"kv_cache_dtype": {"fp16": "float16"}}),
  ],
)
def test_keys_of_known_models_that_change_nothing(key, value):
  config = checkpoints.config("llama3")
  assert read({**config, key: value}) == read(config)


@pytest.mark.parametrize(
  ("name", "spelling", "key", "means"),
  [
    ("mistral", "v5", "sliding_window", 4096),
    ("gemma2", "v5", "attn_logit_softcapping", 50.0),
    ("gemma2", "v5", "final_logit_softcapping", 30.0),
    ("gemma3_text", "v4", "rope_local_base_freq", 10000.0),
    ("olmo2", "v4", "rope_theta", 10000.0),
    ("olmo3", "v4", "rope_theta", 500000.0),
    ("qwen2_window", "v4", "sliding_window", 4096),
    ("qwen3_moe", "v5", "sliding_window", 4096),
  ],
)
def test_a_key_that_is_not_there_means_what_transformers_means(
  name, spelling, key, means
):
  config = checkpoints.config(name, spelling)
  if "use_sliding_window" in config:
    config["use_sliding_window"] = True
  config[key] = means
  want = read(config)
  assert read({**config, key: means / 2 if means > 1e4 else 7}) != want
  del config[key]
  assert read(config) == want


@pytest.mark.parametrize(
  ("name", "key"),
  [
    ("mistral", "sliding_window"),
    ("qwen2_window", "sliding_window"),
    ("qwen3_moe", "sliding_window"),
    ("gemma2", "attn_logit_softcapping"),
    ("gemma2", "final_logit_softcapping"),
  ],
)
def test_null_is_without(name, key):
  config = checkpoints.config(name)
  if "use_sliding_window" in config:
    config["use_sliding_window"] = True
  found = read({**config, key: None})
  assert found.logit_cap is None or key != "final_logit_softcapping"
  for layer in found.layers:
    assert layer.attention.soft_cap is None or "attn" not in key
    assert layer.attention.reach is None or key != "sliding_window"


@pytest.mark.parametrize(
  ("name", "spelling", "key"),
  [
    ("gpt_oss", "v5", "rope_parameters"),
    ("gpt_oss", "v4", "rope_scaling"),
    ("phi3_longrope", "v5", "original_max_position_embeddings"),
    ("phi3_longrope", "v5", "max_position_embeddings"),
    ("llama_dynamic", "v5", "max_position_embeddings"),
  ],
)
def test_what_stretches_a_context_is_not_guessed(name, spelling, key):
  config = checkpoints.config(name, spelling)
  del config[key]
  word = "rope_parameters" if key == "rope_scaling" else key
  refused(config, word, "nothing")


@pytest.mark.parametrize(
  ("name", "said", "act"),
  [
    ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),
    ("gemma2", {"hidden_act": "gelu"}, "gelu_tanh"),
    ("gemma2", {"hidden_activation": "gelu"}, "gelu"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "gelu"),
    ("gemma3_text", {"hidden_act": "relu"}, "gelu_tanh"),
  ],
)
def test_which_gelu_gemma_means(name, said, act):
  config = checkpoints.config(name)
  config.pop("hidden_activation", None)
  found = read({**config, **said})
  assert {layer.feedforward.act for layer in found.layers} == {act}


def test_the_config_is_not_changed():
  for name in NAMES:
    config = checkpoints.config(name)
    before = copy.deepcopy(config)
    read(config)
    assert config == before


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("kind", "near"),
  [("mamba3", "mamba2"), ("", "llama"), (None, "llama"), (3, "gemma2"),
   ("LLAMA", "llama4"), ("llama ", "llama"), ("qwen3-moe", "qwen3_moe")],
)  # fmt: skip
def test_an_unknown_architecture(kind, near):
  config = {**checkpoints.config("llama3"), "model_type": kind}
  refused(config, "model_type", repr(kind), near)


def test_no_architecture():
  refused({"hidden_size": 8}, "model_type")


def test_code_in_a_checkpoint():
  """Is never run: a known type says what the model is without it."""
  config = checkpoints.config("llama3")
  code = {"AutoModelForCausalLM": "modeling_evil.Evil"}
  assert read({**config, "auto_map": code}) == read(config)
  odd = {**config, "auto_map": code, "model_type": "evil"}
  refused(odd, "auto_map", "code", "'evil'")


def test_quantised_weights():
  config = checkpoints.config("llama3")
  for name in ("llama3", "deepseek_v3"):
    config = checkpoints.config(name)
    config["quantization_config"] = {"quant_method": "aqlm"}
    refused(config, "quantization_config", "aqlm")


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("llama3", "hidden_size", 0),
    ("llama3", "hidden_size", 2.0),
    ("llama3", "hidden_size", True),
    ("llama3", "hidden_size", 10**400),
    ("llama3", "num_hidden_layers", 1001),
    ("llama3", "num_key_value_heads", 3),
    ("falcon_40b", "num_kv_heads", 3),
    ("llama3", "hidden_act", "mish"),
    ("llama3", "rms_norm_eps", "small"),
    ("llama3", "rms_norm_eps", -1e-5),
    ("llama3", "rms_norm_eps", 10**400),
    ("llama3", "tie_word_embeddings", 1),
    ("llama3", "vocab_size", None),
    ("llama3", "rope_parameters", []),
    ("gemma2", "layer_types", ["full_attention"]),
    ("gemma2", "layer_types", ["full_attention", "full_attention", "odd"]),
    ("gemma3_text", "use_bidirectional_attention", True),
    ("smollm3", "no_rope_layers", [[], 1, 1]),
    ("llama4_text", "moe_layers", 3),
    ("qwen3_moe", "mlp_only_layers", 0.5),
    ("mixtral", "num_experts_per_tok", 1000),
    ("deepseek_v3", "n_group", 3),
    ("deepseek_v3", "topk_group", 1000),
    ("deepseek_v3", "num_experts_per_tok", 1000),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("falcon_7b", "apply_residual_connection_post_layernorm", True),
    ("llama3", "rope_interleaved", True),
    ("llama3", "activation", "gelu"),
  ],
)
def test_a_value_that_cannot_be(name, key, value):
  refused({**checkpoints.config(name), key: value}, key)


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("llama3", "rope_type", "mrope"),
    ("llama3", "rope_type", 3),
    ("llama3", "rope_theta", "big"),
    ("llama3", "rope_theta", 0),
    ("llama3", "partial_rotary_factor", [0.5]),
    ("llama3", "partial_rotary_factor", 2.0),
    ("llama3", "factor", 0),
    ("llama3", "high_freq_factor", 0.5),
    ("llama3", "original_max_position_embeddings", -1),
    ("llama_yarn", "rope_theta", 1.0),
    ("llama_yarn", "truncate", "no"),
    ("phi3_longrope", "short_factor", [1.0]),
    ("phi3_longrope", "long_factor", "abc"),
  ],
)
def test_a_rotation_that_cannot_be(name, key, value):
  config = checkpoints.config(name)
  config["rope_parameters"][key] = value
  refused(config, key)


@pytest.mark.parametrize("name", ["llama2", "qwen3", "cwm", "glm"])
def test_a_plain_rotation_of_a_part(name):
  config = checkpoints.config(name)
  config["rope_parameters"] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
  }
  if name == "glm":
    dim = config["head_dim"]
    assert read(config).layers[0].attention.rope.dims == dim // 2
    return
  # transformers turns whole heads of these, and a part of stretched ones.
  refused(config, "partial_rotary_factor", "0.5", "whole heads")
  config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
  attend = read(config).layers[0].attention
  assert attend.rope.dims == attend.head_dim // 2


def test_rotations_of_layers_of_a_kind_that_is_not_named():
  config = checkpoints.config("gemma3_text")
  del config["rope_parameters"]["sliding_attention"]
  refused(config, "rope_parameters", "sliding_attention")


# ---------------------------------------------------------------------------
# Fuzz
# ---------------------------------------------------------------------------

NASTY = (
  None, True, False, 0, 1, -1, 2, 3, 7, 1000, 2**31 - 1, 2**63, 10**400, 0.5,
  -0.5, 1e308, 1e-308, math.nan, math.inf, "", "x", "full_attention", "yarn",
  [], [1], [[]], [None], {}, {"a": 1}, ["full_attention"],
)  # fmt: skip


def places(x, before=()):
  """The path of every value, however deep."""
  if isinstance(x, dict | list):
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
      yield (*before, key)
      yield from places(value, (*before, key))


def mutate(config, r):
  config = copy.deepcopy(config)
  for _ in range(r.choice([1, 1, 2, 3])):
    *path, last = r.choice(list(places(config)))
    at = config
    for key in path:
      at = at[key]
    way, value = r.random(), copy.deepcopy(r.choice(NASTY))
    if way < 0.2:
      del at[last]
    elif way < 0.8:
      at[last] = value
    elif isinstance(at, dict):
      at["new_trick"] = value
    else:
      at.insert(last, value)
  return config


@pytest.mark.parametrize(
  ("kind", "heads", "dim", "kv"),
  [
    ("llama", 32, 64, 32),
    ("mistral", 32, 64, 8),
    ("gemma2", 8, 256, 4),
    ("qwen3", 64, 128, 32),
    ("gpt_oss", 64, 64, 8),
    ("glm4", 32, 128, 2),
  ],
)
def test_heads_that_a_file_leaves_out(kind, heads, dim, kv):
  """As transformers has them; null means what follows from the others."""
  size = {"hidden_size": 64 * heads, "num_attention_heads": heads}
  left_out = ConfigReader({"model_type": kind, **size})
  assert left_out.heads() == (heads, kv) and left_out.head_dim() == dim
  null = {"head_dim": None, "num_key_value_heads": None}
  said = ConfigReader({"model_type": kind, **size, **null})
  assert said.heads() == (heads, heads) and said.head_dim() == 64


def survives(config):
  """The meaning of a config, or None where it was refused as it should be."""
  try:
    with warnings.catch_warnings():
      # Of keys that transformers ignores, too.
      warnings.simplefilter("ignore", UserWarning)
      return read(config)
  except RingjaxError as error:
    assert len(str(error)) < LIMIT and not JAX_WORDS.search(str(error))
    return None


@pytest.mark.one_case
@pytest.mark.long_cases(70)
@pytest.mark.parametrize(
  ("name", "spelling"),
  [*((n, "v5") for n in NAMES), *((n, "v4") for n in NAMES_V4)],
)
def test_fuzz(name, spelling):
  base = checkpoints.config(name, spelling)
  r = random.Random(f"{name} {spelling}")
  kept = [survives(mutate(base, r)) for _ in range(60)]
  assert any(x is None for x in kept) and any(x is not None for x in kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:config.json. keys that are not:UserWarning")
@pytest.mark.parametrize(
  "part",
  [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 10))],
)
def test_what_is_accepted_can_be_built_and_called(part):
  """In the abstract: the shapes of a config may be as large as they like."""
  r = random.Random(part)
  tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  call = lambda model, tokens: forward(
    model, ContextParallel(), tokens, None, None, None, None, None
  )
  done = 0
  while done < 40:
    base = checkpoints.config(r.choice(NAMES))
    config = mutate(base, r)
    meaning = survives(config)
    if meaning is None or meaning == read(base):
      continue
    done += 1
    model = models.abstract(config)
    logits = jax.eval_shape(call, model, tokens)
    assert logits.shape == (1, 8, meaning.vocab)
