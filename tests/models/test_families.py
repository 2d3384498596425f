"""Every family computes what transformers computes, on weights of its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax import models
from tests import checkpoints

NAMES, NAMES_V4 = checkpoints.names(), checkpoints.names_v4()

# Float32 against float64.
TOLERANCE = 5e-5


def turns(names, some):
  """All names, those that are not `some` as slow ones."""
  assert set(some) <= set(names)
  slow = pytest.mark.slow
  return [n if n in some else pytest.param(n, marks=slow) for n in names]


def load(name, folder, *, spelling="v5", dtype="float32", **options):
  path = checkpoints.write(
    name, folder / "model", spelling=spelling, dtype=dtype
  )
  return models.load(path, dtype=dtype, **options)


def close(got, want, atol=TOLERANCE):
  assert got.dtype == jnp.float32 and got.shape == want.shape
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def check_greedy(model, expected):
  """Of all that was said, each token was the most likely one.

  One pass over prompt and answer says what sixteen passes would: where they
  are as long as `expected.tokens` it is the program that computed its logits.
  """
  p = expected.prompt.shape[1]
  ids = np.concatenate([expected.prompt, expected.greedy], 1)
  chosen = jnp.argmax(model(ids), -1)[:, p - 1 : -1]
  np.testing.assert_array_equal(chosen, expected.greedy)


# Another form of a family of which one is quick.
VARIANTS = (
  "deepseek_v3_noq", "falcon_11b", "gpt_bigcode_heads", "gpt_neox_serial",
  "llama_dynamic",
  "llama_gqa_bias", "llama_linear", "llama_yarn", "mistral_nowindow_headdim",
  "phi3_longrope_long", "qwen2_window",
)  # fmt: skip


# Families whose parts the others have too, or are tested by themselves.
RECOMBINED = (
  "arcee", "bailing_hybrid", "bamba", "cwm", "deepseek_v2_lite",
  "deepseek_v4", "dots1", "ernie4_5", "exaone",
  "exaone_moe", "falcon_h1", "falcon_mamba", "flex_olmo", "gemma4_moe",
  "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "glm_moe_dsa_shared",
  "gpt_bigcode", "gptj",
  "granitemoehybrid_dense", "granitemoeshared", "helium", "hunyuan_v1_dense",
  "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "internlm3",
  "iquestcoder", "jais2", "jamba", "lfm2", "lfm2_moe", "longcat_flash",
  "minimax",
  "minimax_m2", "minimax_m3_vl", "ministral", "mistral4",
  "mistral_large4", "mpt",
  "muse_glimmer", "nemotron_h", "olmoe", "opt", "qwen2_moe", "qwen3_5_moe",
  "qwen4_exp", "seed_oss", "solar_open", "stablelm_parallel", "vaultgemma",
  "youtu", "zamba2",
  # Of each line of models the newest is in the default run.
  "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone4", "falcon_40b",
  "falcon_7b", "gemma", "gemma2", "gemma3n", "gemma4", "glm", "granitemoe",
  "olmo", "olmo2", "olmo_hybrid",
)  # fmt: skip


def marks(name):
  if name in VARIANTS:
    return pytest.mark.slow
  if name in RECOMBINED:
    return pytest.mark.long
  return pytest.mark.smoke if name == "llama3" else ()


@pytest.mark.long_cases(12)
@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=marks(n)) for n in NAMES]
)
def test_equals_transformers(name, tmp_path):
  model, expected = load(name, tmp_path), checkpoints.expected(name)
  assert model.config.family in models.list()
  close(model(expected.tokens), expected.logits)
  check_greedy(model, expected)


@pytest.mark.parametrize(
  "name", turns(NAMES_V4, ("gemma3_text", "phi3_longrope"))
)
def test_older_spelling(name, tmp_path):
  """Equal configs are tested for all of them in test_config.py."""
  model, expected = (
    load(name, tmp_path, spelling="v4"),
    checkpoints.expected(name),
  )
  close(model(expected.tokens), expected.logits)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "name", turns(NAMES, ("gemma3_text", "deepseek_v3", "llama4_text"))
)
def test_layers_one_by_one(name, tmp_path):
  """Without the loop over equal layers the numbers are the same."""
  model, expected = (
    load(name, tmp_path, scan=False),
    checkpoints.expected(name),
  )
  assert all(run.repeats == 1 for run in model.stack.runs)
  close(model(expected.tokens), expected.logits)


@pytest.mark.long
def test_layers_fall_into_loops():
  """Of the fixtures above some do loop, over one layer and over several."""
  kinds = set()
  for name in NAMES:
    config = checkpoints.config(name)
    for run in models.abstract(config).stack.runs:
      if run.repeats > 1:
        kinds.add(len(run.layers))
  assert kinds >= {1, 2}


@pytest.mark.parametrize("name", turns(NAMES, ("llama3", "falcon_7b")))
def test_bfloat16(name, tmp_path):
  """Weights and activations of 8 bits are near, token by token.

  A rounding is off by 2^-9 of a number, and some fifty follow each other. A
  token that is near the border between two experts goes to the other one, so
  the bound is on the middle of all tokens.
  """
  model, expected = (
    load(name, tmp_path, dtype="bfloat16"),
    checkpoints.expected(name),
  )
  assert model.dtype == jnp.bfloat16
  got = model(expected.tokens)
  assert got.dtype == jnp.float32
  norm = lambda x: np.linalg.norm(x, axis=-1)
  off = norm(np.asarray(got) - expected.logits) / norm(expected.logits)
  # Each layer of Zamba2 norms what a gate leaves of a state.
  most = 0.06 if name == "zamba2" else 0.03
  assert 1e-4 < np.median(off) < most and np.quantile(off, 0.8) < 0.1
