"""Longer contexts by a scaling of RoPE, compared with transformers."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PromptError
from ringjax.models import tiny
from ringjax.models.contents import read_source
from ringjax.models.rope_scaling import (
  ContextExtension,
  LongRopeExtension,
  SelfExtendExtension,
  YarnExtension,
  context_extension,
  extended_config,
  full_rope,
  read_extended,
)
from ringjax.train import extend
from tests import checkpoints

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "rope_scaling.npz"
STEP = 5
LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 16,
  "hidden_size": 16,
  "intermediate_size": 8,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "max_position_embeddings": 64,
}
DIVISORS = "(1.0,1.5,2.0,3.0,4.0,5.0)"
# Cases of tests/fixtures/rope_scaling.py, as a user would write them.
CASES = {
  "llama2 yarn": "yarn:factor=4",
  "llama2 yarn betas": "yarn:factor=4,original_max_position_embeddings=16,"
  "beta_fast=8,beta_slow=.1,truncate=false",
  "llama2 linear": "linear:factor=4",
  "llama2 llama3": "llama3:factor=8,original_max_position_embeddings=24",
  "llama2 dynamic": "dynamic:factor=4,original_max_position_embeddings=16",
  "llama2 longrope": "longrope:factor=4,original_max_position_embeddings=16,"
  f"long_factor={DIVISORS}",
  "llama2 ntk": "ntk:factor=4",
  "mistral yarn": "yarn:factor=4",
  "qwen2 yarn": "yarn:factor=4",
  "qwen3 yarn": "yarn:factor=4",
  "phi3 longrope": "longrope:factor=4,original_max_position_embeddings=16,"
  f"long_factor={DIVISORS}",
  "gemma3_text yarn": "yarn:factor=4",
  # This replaces the model's factor of 8; its original context is 16.
  "gemma3_text linear": "linear:factor=4",
  # The model has YaRN with its own betas and weights, which stay.
  "deepseek_v3 yarn": "yarn:factor=8",
}
CONTEXTS = {
  "llama2 yarn betas": 64, "llama2 llama3": 192, "llama2 dynamic": None,
  "llama2 longrope": 64, "phi3 longrope": 64, "gemma3_text linear": 64,
  "deepseek_v3 yarn": 256,
}  # fmt: skip
QUICK = ("gemma3_text yarn",)


def fixture(case):
  """Read tokens, logits of some, cosines and sines of transformers."""
  with np.load(FIXTURE) as file:
    return {
      key: file[f"{case}: {key}"] for key in ("tokens", "logits", "cos", "sin")
    }


def base_config(case):
  """config.json of a case's model, before it is scaled."""
  config = checkpoints.config(case.split()[0])
  if case == "gemma3_text yarn":
    config["rope_parameters"]["full_attention"] = {
      "rope_type": "default", "rope_theta": 1e6,
    }  # fmt: skip
  return config


@pytest.mark.parametrize("case", CASES)
def test_cosines_and_sines_are_those_of_transformers(case):
  config, _, _ = read_extended(base_config(case), CASES[case])
  expected = fixture(case)
  length = expected["cos"].shape[0]
  tables = full_rope(config).tables(jnp.arange(length)[None], length)
  for table, name in zip(tables, ("cos", "sin"), strict=True):
    np.testing.assert_allclose(table[0], expected[name], rtol=0, atol=1e-5)
  assert config.longest == CONTEXTS.get(case, 512)


@pytest.mark.long_cases(5)
@pytest.mark.parametrize(
  "case",
  [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in CASES],
)
def test_logits_are_those_of_transformers(case, tmp_path):
  name = case.split()[0]
  folder = checkpoints.write_folder(
    checkpoints.tensors(name), base_config(case), tmp_path / "model"
  )
  model = rj.models.load(folder, dtype="float32", rope_scaling=CASES[case])
  expected = fixture(case)
  logits = model(expected["tokens"])[:, ::STEP]
  np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-4)
  # The plain model computes something else.
  plain = rj.models.load(folder, dtype="float32")(expected["tokens"])
  plain = plain[:, ::STEP]
  assert np.abs(plain - expected["logits"]).max() > 1e-2


@pytest.mark.parametrize("spelling", ["v4", "v5"])
@pytest.mark.parametrize("name", ["llama2", "gemma3_text", "qwen2", "olmo3"])
def test_layers_with_a_window_keep_their_rotation(name, spelling):
  config = checkpoints.config(name, spelling)
  plain, _ = rj.models.read_config(config)
  text = "linear:factor=32" if name == "gemma3_text" else "yarn:factor=4"
  if name == "olmo3":
    text = "yarn:factor=16"
  scaled, _, _ = read_extended(config, text)
  pairs = list(zip(plain.layers, scaled.layers, strict=True))
  nested = name in ("gemma3_text", "olmo3")
  for old, new in pairs:
    windowed = nested and old.attention.reach is not None
    assert (old.attention.rope == new.attention.rope) == windowed
    assert old.attention.rope.theta == new.attention.rope.theta


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3", "ntk"])
@pytest.mark.parametrize(
  "change",
  [
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_theta": 500.0}},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    {"rope_scaling": {"type": "default"}, "rope_theta": 500.0},
  ],
)
def test_null_and_missing_keys_are_a_model_without_scaling(change, kind):
  config, source, _ = read_extended(LLAMA | change, f"{kind}:factor=4")
  (rope,) = config.ropes
  theta = 500.0 if "500" in str(change) else 10000.0
  growth = 4.0 ** (8 / 6) if kind == "ntk" else 1.0
  assert rope.theta == pytest.approx(theta * growth)
  assert config.longest == (None if kind == "dynamic" else 256)
  # What is written is what was computed.
  assert rj.models.read_config(source)[0] == config


@pytest.mark.long
def test_a_saved_folder_has_the_scaling(tmp_path):
  rj.models.save(rj.models.create(LLAMA), tmp_path / "plain")
  model = rj.models.load(tmp_path / "plain", rope_scaling="yarn:factor=4")
  rj.models.save(model, tmp_path / "long")
  again = rj.models.load(tmp_path / "long")
  assert again.config == model.config and again.config.longest == 256
  config = json.loads((tmp_path / "long" / "config.json").read_text())
  assert config["max_position_embeddings"] == 256
  assert config["rope_scaling"] == {
    "rope_type": "yarn", "factor": 4,
    "original_max_position_embeddings": 64,
  }  # fmt: skip
  tokens = np.arange(16, dtype=np.int32)[None]
  np.testing.assert_array_equal(again(tokens), model(tokens))


def test_a_scaling_replaces_one_of_its_kind():
  once = extended_config(LLAMA, context_extension("yarn:factor=2,beta_fast=8"))
  twice = extended_config(once, context_extension("yarn:factor=8"))
  config, _ = rj.models.read_config(twice)
  (rope,) = config.ropes
  assert (rope.scaling.factor, rope.scaling.original) == (8, 64)
  assert rope.scaling.fast == 8 and config.longest == 512


@pytest.mark.parametrize(
  ("name", "text", "match"),
  [
    ("llama3", "yarn:factor=4", "'llama3' already.*pass llama3:factor=8"),
    ("phi3_longrope", "linear:factor=2", "'longrope' already"),
    ("gemma4", "yarn:factor=2", "'proportional' already"),
    ("gpt2", "yarn:factor=2", "learned 64 positions"),
    ("bloom", "yarn:factor=2", "0 rotary embeddings"),
    ("cohere2", "linear:factor=2", "0 rotary embeddings"),
    ("mamba2", "linear:factor=2", "0 rotary embeddings"),
  ],
)
def test_models_that_a_scaling_does_not_fit_are_refused(name, text, match):
  with pytest.raises(ConfigError, match=match):
    read_extended(checkpoints.config(name), text)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("text", "match"),
  [
    ("yarn", "'yarn' without a factor"),
    ("yarn:factor=.5", "factor"),
    ("yarn:factor=four", "factor"),
    ("yarn:theta=4", "options of 'yarn'"),
    ("linear:factor=2,beta_fast=4", "options of 'linear'"),
    ("trained:factor=2", "one of linear, ntk, dynamic, yarn, llama3, longrope"),
    ("longrope:factor=2", "no numbers as long_factor"),
    ("longrope:factor=2,long_factor=(1,2)", "2 numbers as long_factor"),
    ("yarn:factor=2,original_max_position_embeddings=0", "original_max"),
    ("yarn:factor=2,beta_fast=0", "'yarn', of which.*other values"),
    ("dual_chunk:factor=4,chunk_size=1000,local_size=10", "at most the 64"),
    ("dual_chunk:factor=4,chunk_size=32,local_size=40", "below chunk_size"),
  ],
)
def test_texts_that_describe_no_scaling_are_refused(text, match):
  with pytest.raises(OptionError, match=match):
    read_extended(LLAMA, text)


def test_a_config_without_a_context_needs_the_original_one():
  config = {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}
  with pytest.raises(ConfigError, match="original_max_position_embeddings="):
    read_extended(config, "yarn:factor=4")
  parsed, _, _ = read_extended(
    config, "yarn:factor=4,original_max_position_embeddings=32"
  )
  assert parsed.longest == 128


def test_every_key_that_bounds_the_context_grows():
  config = LLAMA | {"max_seq_len": 64}
  parsed, source, _ = read_extended(config, "yarn:factor=4")
  assert parsed.longest == source["max_seq_len"] == 256


@pytest.mark.long
def test_a_text_that_is_too_long_names_the_flag_and_a_factor_that_fits():
  model = rj.models.create(LLAMA)
  tokens = np.ones((1, 200), np.int32)
  with pytest.raises(
    PromptError, match="--rope_scaling=yarn:factor=4"
  ) as error:
    rj.infer.generate(model, tokens, max_new_tokens=4)
  assert "rope_scaling='yarn:factor=4'" in str(error.value)
  longer = rj.models.create(
    extended_config(LLAMA, context_extension("yarn:factor=4"))
  )
  rj.infer.generate(longer, tokens, max_new_tokens=4)
  with pytest.raises(PromptError, match="larger factor of the model's own"):
    rj.infer.generate(longer, np.ones((1, 300), np.int32), max_new_tokens=4)


def test_models_whose_rotations_cannot_grow_are_not_told_to():
  config = checkpoints.config("gpt2")
  assert not rj.models.read_config(config)[0].longer_context_remedy(10**6)
  config = json.loads((tiny.path() / "config.json").read_text())
  assert not rj.models.read_config(config)[0].longer_context_remedy(10**6)


def test_ntk_multiplies_the_base_and_the_context_that_a_model_has():
  """Also bases that grew by alpha, and contexts that YaRN has extended."""
  config = checkpoints.config("hunyuan_v1_dense")
  old, new = read_source(config)[0], read_extended(config, "ntk:factor=4")[0]
  rope = full_rope(old)
  base = rope.theta * 4 ** (rope.dims / (rope.dims - 2))
  np.testing.assert_allclose(full_rope(new).theta, base, rtol=1e-6)
  yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
  config = LLAMA | {"rope_scaling": yarn}
  assert read_source(config)[0].longest == 256
  assert read_extended(config, "ntk:factor=2")[0].longest == 512


@pytest.mark.usefixtures("unchecked")
def test_values_of_extensions_made_in_python_are_converted():
  folds = SelfExtendExtension(factor=4, window=np.int64(16))
  for extension in (
    YarnExtension(factor=4, original_max_position_embeddings=np.int64(64)),
    LongRopeExtension(factor=4, long_factor=[2.0] * 4),
    folds,
  ):
    _, source, _ = read_extended(LLAMA, extension)
    assert read_source(json.loads(json.dumps(source)))[0].longest == 256
  with pytest.raises(OptionError, match="one of its subclasses"):
    ContextExtension(factor=4)


@pytest.mark.parametrize("name", checkpoints.names())
def test_what_an_error_advises_is_accepted(name):
  config = checkpoints.config(name)
  old = read_source(config)[0]
  if old.longest is None:
    return
  advice = old.longer_context_remedy(3 * old.longest + 1)
  if "yarn:factor=" in advice:
    new = read_extended(config, "yarn:factor=4")[0]
    assert new.longest > 3 * old.longest
  elif "own scaling" in advice:
    # A scaling of its kind replaces it; LongRoPE keeps its divisors.
    kind = type(full_rope(old).scaling).__name__.lower()
    read_extended(config, f"{kind}:factor=32")


def test_a_family_without_keys_for_a_scaling_is_folded_or_refused():
  """transformers rotates GPT-J by its positions, whatever its file says."""
  config = checkpoints.config("gptj")
  old = read_source(config)[0]
  assert "self_extend:factor=3" in old.longer_context_remedy(3 * old.longest)
  assert read_extended(config, "self_extend:factor=3")[0].longest == 192
  for kind in ("linear", "ntk", "yarn"):
    with pytest.raises(ConfigError, match="gptj.*self_extend"):
      read_extended(config, f"{kind}:factor=4")
  with pytest.raises(ConfigError, match="rope_parameters"):
    read_source(config | {"rope_parameters": {"rope_theta": 500.0}})


def test_folded_positions_are_not_extended_again():
  config = read_extended(LLAMA, "self_extend:factor=4")[1]
  with pytest.raises(ConfigError, match="folded already"):
    read_extended(config, "yarn:factor=2")
  with pytest.raises(ConfigError, match="positions are folded"):
    extend.scaled_config(config, rj.train.RopeScaling(context=512))
  advice = read_source(config)[0].longer_context_remedy(10**6)
  assert "without position_folding" in advice
