"""Logits depend on distances of tokens, to the end of int32."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.models import small
from tests import checkpoints

T = 24
PLACES = (1000, 131_072, 2**20, 10**7, 2**30, 2**31 - 1 - T)
# Of the standard deviation of logits.
MOST = 1e-3


@functools.cache
def model(name):
  if name == "small":
    return rj.models.load(small.path(), dtype="float32")
  # Heads that look at few tokens: a wrong angle is seen in the logits.
  config = checkpoints.config(name) | {"initializer_range": 0.2}
  return rj.models.create(config, seed=1)


def prompt(vocab):
  return np.random.default_rng(0).integers(1, vocab, (1, T)).astype(np.int32)


def positions(count, first):
  return (first + np.arange(count, dtype=np.int32))[None]


def same_everywhere(logits_at):
  """`logits_at(p)` with all positions p further on, for each p."""
  want = np.asarray(logits_at(0))
  assert np.isfinite(want).all()
  for place in PLACES:
    change = np.abs(np.asarray(logits_at(place)) - want).max()
    assert change < MOST * want.std(), (place, change, want.std())


@pytest.mark.parametrize(
  "name",
  [
    "small",
    "llama3",
    "llama_yarn",
    *(
      pytest.param(name, marks=pytest.mark.long)
      for name in (
        "llama2",
        "llama_linear",
        "llama_dynamic",
        "phi3_longrope",
        "gemma4",
        "cohere2",
        "glm4",
        "nanochat",
        "deepseek_v3",
        "deepseek_v32",
        "mimo_v2_flash",
        "qwen3_next",
        "gpt_oss",
        "mpt",
      )
    ),
  ],
)
def test_a_shift_of_all_positions_changes_nothing(name):
  call = model(name)
  tokens = prompt(call.config.vocab)
  scaled = any(rope.scaling.by_length for rope in call.config.ropes)
  options = dict(length=3 * 64) if scaled else {}
  same_everywhere(lambda p: call(tokens, positions=positions(T, p), **options))


@pytest.mark.parametrize(
  "kind",
  [
    "unrotated",
    *(
      pytest.param(kind, marks=pytest.mark.long)
      for kind in ("dense", "windowed")
    ),
  ],
  ids=str,
)
def test_nor_does_one_of_a_cache(kind):
  """Of a prefill, and of drafts that read what it left."""
  call = model("small")
  tokens = prompt(call.config.vocab)
  most = T - 8

  def logits_at(place):
    cache = call.init_cache(1, T, kind=kind)
    pos = positions(T, place)
    read, cache = call(tokens[:, :most], positions=pos[:, :most], cache=cache)
    new, _ = call(
      tokens[:, most:],
      positions=pos[:, most:],
      cache=cache,
      attend=rj.models.CachedAttention(),
    )
    return jnp.concatenate([read, new], 1)

  same_everywhere(logits_at)


def test_nor_does_a_context_that_moves():
  """Keys that were read at 0, behind which a question is far away."""
  call = model("small")
  tokens = prompt(call.config.vocab)
  most = T - 8
  cache = call.init_cache(1, T, kind="unrotated")
  _, cache = call(tokens[:, :most], cache=cache)
  blocks = cache.export(0, 0, most)

  def logits_at(place):
    pos = positions(T, place)
    at = rj.Coords(pos[0, :most], np.ones(most, np.int32))
    moved = call.init_cache(1, T, kind="unrotated").load(0, blocks, at)
    return call(
      tokens[:, most:],
      positions=pos[:, most:],
      cache=moved,
      attend=rj.models.CachedAttention(),
    )[0]

  same_everywhere(logits_at)
