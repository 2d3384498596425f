"""The shapes of real models: as large as published, and built from nothing."""

from __future__ import annotations

import resource

import jax
import jax.numpy as jnp
import pytest

from ringjax import models
from ringjax.errors import OptionError
from tests.models.test_published import CONFIGS

# Millions of parameters, as their authors count them; the LWM is a Llama 2 7B,
# and those of 100 and 430 million are ours.
PUBLISHED = {
  "apertus-8b": 8_053,
  "bamba-9b": 9_780,
  "bloom-7b1": 7_069,
  "deepseek-v2-lite": 15_706,
  "deepseek-v3": 671_000,
  # 14 million more in each layer, of the index.
  "deepseek-v3.2": 671_880,
  "deepseek-v4-flash": 284_000,
  # 1.6 trillion with the layer that guesses further tokens.
  "deepseek-v4-pro": 1_573_000,
  "ernie-4.5-0.3b": 361,
  "exaone-3.0-7.8b": 7_818,
  "exaone-4.0-32b": 32_003,
  "falcon-7b": 6_920,
  "falcon-h1-0.5b": 521,
  "falcon-mamba-7b": 7_273,
  "gemma-3-27b": 27_010,
  "gemma-3n-e4b": 6_866,
  # 5.1 billion with the encoders of images and sound.
  "gemma-4-e2b": 4_650,
  "glm-4.5-air": 106_850,
  # 31 billion with the layer that guesses further tokens.
  "glm-4.7-flash": 29_943,
  # Without the layer that guesses further tokens.
  "glm-5.2": 744_000,
  "gpt-j-6b": 6_053,
  "gpt-oss-20b": 20_910,
  "gpt2-xl": 1_558,
  "jamba-mini": 51_600,
  "kimi-linear-48b": 49_100,
  "lfm2-1.2b": 1_170,
  "llama-100m": 100,
  "llama-2-7b": 6_738,
  "llama-3.1-70b": 70_554,
  "llama-3.1-8b": 8_030,
  "llama-3.2-1b": 1_236,
  "longcat-flash-560b": 560_000,
  "lwm-7b-1m": 6_738,
  "mamba-2.8b": 2_768,
  "mamba-codestral-7b": 7_285,
  "mimo-v2-flash": 308_800,
  "minimax-m2": 228_700,
  "mistral-7b": 7_248,
  "mistral-small-4": 119_000,
  "mixture-430m": 431,
  "mpt-7b": 6_650,
  # With the encoders of images and sound.
  "muse-spark-816b": 816_000,
  "nemotron-3-nano-30b": 31_600,
  "opt-6.7b": 6_658,
  "qwen2.5-7b-1m": 7_616,
  "qwen3-30b-a3b": 30_532,
  "qwen3-32b": 32_762,
  "qwen3-8b": 8_191,
  "qwen3.5-9b": 9_000,
  "seed-oss-36b": 36_150,
  "solar-open-100b": 102_600,
}


def test_every_preset_is_here():
  assert set(PUBLISHED) == set(models.PRESETS)


@pytest.mark.one_case
@pytest.mark.long_cases(50)
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_number_of_parameters(name):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  model = models.abstract(name)
  leaves = jax.tree.leaves(model)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  millions = sum(x.size for x in leaves) / 1e6
  assert millions == pytest.approx(PUBLISHED[name], rel=0.01)
  # In kilobytes: a hundredth of the smallest of them would already be seen.
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize(
  ("name", "published"),
  [
    ("deepseek-v3", "DeepSeek-V3"),
    ("falcon-7b", "falcon-7b"),
    ("gemma-3-27b", "gemma-3-27b-it"),
    ("gpt-oss-20b", "gpt-oss-20b"),
    ("llama-2-7b", "Llama-2-7b-hf"),
    ("llama-3.1-8b", "Llama-3.1-8B"),
    ("llama-3.2-1b", "Llama-3.2-1B"),
    ("mistral-7b", "Mistral-7B-v0.3"),
    ("qwen2.5-7b-1m", "Qwen2.5-7B-Instruct-1M"),
    ("qwen3-8b", "Qwen3-8B"),
  ],
)
def test_computes_what_the_published_one_does(name, published):
  """Rotations, scales and masks, of which a count of numbers says nothing."""
  ours, _ = models.read_config(models.PRESETS[name])
  theirs, _ = models.read_config(CONFIGS[published])
  assert ours == theirs


def test_dtype():
  wide = {"deepseek-v3": 1}
  for name in ("llama-3.1-8b", "deepseek-v3"):
    kinds = [x.dtype for x in jax.tree.leaves(models.abstract(name))]
    assert set(kinds) <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    # The offsets of a router's ranking stay wide.
    assert kinds.count(jnp.dtype(jnp.float32)) == wide.get(name, 0)
  model = models.abstract("llama-100m", dtype=jnp.float32)
  assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype(jnp.float32)}


def test_the_contexts_they_were_made_for():
  made_for = {
    "lwm-7b-1m": 2**20,
    # Beyond that it computes another attention than is here.
    "qwen2.5-7b-1m": 2**18,
    "llama-3.1-8b": 2**17,
    # Linear scaling by 8 is in the number already.
    "gemma-3-27b": 2**17,
  }
  for name, context in made_for.items():
    config = models.abstract(name).config
    assert (config.max_positions, config.longest) == (context, context)


def test_a_preset_that_is_none():
  with pytest.raises(OptionError, match=r"llama-9.*llama-3\.1-8b"):
    models.abstract("llama-9")


def test_a_preset_is_not_changed_by_who_takes_it():
  from ringjax.models.presets import preset

  preset("gpt-oss-20b")["rope_parameters"]["factor"] = 1.0
  preset("gpt-oss-20b")["hidden_size"] = 1
  assert preset("gpt-oss-20b")["hidden_size"] == 2880
  assert preset("gpt-oss-20b")["rope_parameters"]["factor"] == 32.0
