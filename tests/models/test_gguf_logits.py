"""Logits of GGUF files of each architecture, next to those of transformers."""

import json
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from tests.fixtures import gguf_logits
from tests.models import test_gguf as files

CASES = files.CASES
_TOKENS = np.arange(12)[None] * 5 % 64
# Logits by transformers, or the error with which it refused a file.
_FACTS = json.loads(gguf_logits.FACTS.read_text("utf-8"))
_READ = [name for name, facts in _FACTS.items() if isinstance(facts, list)]
# What transformers takes for granted in files of some architectures: size of
# a head, by which it also scales queries, and the part that is rotated.
_FIXED = {
  "gemma2": {"head_dim": 256},
  "gemma3": {"head_dim": 256},
  "qwen3": {"head_dim": 128},
  "qwen3moe": {"head_dim": 128},
  "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": False},
}


def _drawn(name, x):
  """Numbers that depend on a tensor's name alone, around those of a new one."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  noise = rng.normal(size=x.shape).astype(np.float32)
  if name.endswith("A_log"):
    return np.log1p(np.abs(noise))
  if x.ndim > 1:
    return noise / np.sqrt(x.shape[-1]).astype(np.float32)
  return 0.1 * noise + (name.endswith("weight") and "norm" in name)


def write(folder, name):
  """Writes FOLDER/NAME.gguf; returns its path."""
  path = folder / f"{name}.gguf"
  config = files._SIZES | CASES[name] | _FIXED.get(name, {})
  without = files._WITHOUT.get(name, ())
  abstract = rj.models.create(
    {key: x for key, x in config.items() if key not in without}, seed=0
  )
  rj.models.save(abstract, folder / f"{name}-new")
  tensors = files.load_file(folder / f"{name}-new" / "model.safetensors")
  tensors = {key: _drawn(key, x) for key, x in tensors.items()}
  tokens = ["<unk>", "\u2581", *(f"<{n}>" for n in range(62))]
  files._write(
    path, name, config, files._tensors(name, config, tensors), tokens=tokens
  )
  return path


@pytest.mark.long
@pytest.mark.parametrize("name", _READ)
def test_logits_are_those_of_transformers(tmp_path, name):
  model = rj.models.load(write(tmp_path, name), dtype=jnp.float32)
  got = np.asarray(model(_TOKENS)).ravel()
  got = got[:: got.size // 32]
  np.testing.assert_allclose(got, _FACTS[name], rtol=1e-4, atol=1e-4)
