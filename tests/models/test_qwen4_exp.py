"""Qwen4-Exp: what its configs say, its n-grams, and means of index keys."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax import models
from ringjax.errors import ConfigError
from ringjax.nn.attention_layers.choosing.pooled_block_attention import (
  PooledBlockAttention,
)
from ringjax.ops.recurrent.ngram_ids import (
  hash_factors,
  ngram_ids,
  primes_from,
)
from tests import checkpoints

NAME = "qwen4_exp"
EXPECTED = checkpoints.expected(NAME)


def read(**changes):
  config = checkpoints.config(NAME) | changes
  return models.read_config(
    {key: x for key, x in config.items() if x != "absent"}
  )[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp(NAME) / "model"
  return models.load(checkpoints.write(NAME, folder))


def test_what_a_file_leaves_out():
  config = read(layer_types="absent", num_hidden_layers=5)
  attends = [isinstance(x.attention, PooledBlockAttention)
             for x in config.layers]  # fmt: skip
  assert attends == [False, False, False, True, False]
  none = read(ple_layer_ids=None, eos_token_id=None)
  assert not any(getattr(x, "ngrams", None) for x in none.layers)
  published = [x.replace("indexed", "full")
               for x in checkpoints.config(NAME)["layer_types"]]  # fmt: skip
  assert read(layer_types=published) == read()
  assert read(output_gate_type=None).layers[0].attention.gate == "silu"
  # All dims of a head rotate where no part is named.
  turned = {"rope_type": "default", "rope_theta": 100.0}
  attends = (
    read(rope_parameters=turned, indexer_head_dim=16).layers[1].attention
  )
  assert attends.rope.dims == attends.head_dim == 16


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("eos_token_id", None),
    ("hc_count", 1),
    ("hidden_act", "gelu"),
    ("indexer_budget", 10),
    ("indexer_head_dim", 2),
    ("indexer_kv_heads", 2),
    ("layer_types", ["linear_attention", "sliding_attention"] * 2),
    ("ngram_vocab_size_base", 2**25),
    ("output_gate_type", "tanh"),
    ("ple_embed_dim", 21),
    ("ple_layer_ids", [2]),
    ("ple_layer_ids", [5]),
    (
      "rope_parameters",
      {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
      },
    ),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  with pytest.raises(ConfigError, match=key):
    read(**{key: value})


def test_ids_of_ngrams_are_those_of_64_bits():
  vocab, primes = 248_320, primes_from(20_000_000, 16, 3)
  factors = hash_factors(vocab, 3, 1, 1234)
  tokens = np.random.default_rng(0).integers(0, vocab, (3, 50))
  tokens[:, 0] = vocab - 1
  mixed = 0
  for ids, factor in zip(tokens, factors, strict=True):
    mixed = mixed ^ np.asarray([int(x) * factor for x in ids], object)
  want = np.stack([mixed % n for n in primes], -1).astype(np.int64)
  got = ngram_ids([jnp.asarray(x, jnp.int32) for x in tokens], factors, primes)
  np.testing.assert_array_equal(got, want)


@pytest.mark.long
def test_a_step_reads_means_in_place_of_index_keys(model):
  """So what the index's keys are does not matter until a block ends."""
  tokens = EXPECTED.tokens
  cache = model.init_cache(2, 48)
  _, cache = model(tokens[:, :25], cache=cache)
  spoiled = [
    slots._replace(k=jnp.full_like(slots.k, jnp.nan))
    if getattr(shape, "value", None) == 0 and hasattr(shape, "reading")
    else slots
    for shape, slots in zip(cache.shapes, cache.slots, strict=True)
  ]
  cache = dataclasses.replace(cache, slots=tuple(spoiled))
  got, _ = model(tokens[:, 25:26], cache=cache)
  np.testing.assert_allclose(got[:, 0], EXPECTED.logits[:, 25], atol=5e-5)


@pytest.mark.long
def test_rows_turns_and_single_tokens(model):
  """Unequal rows and later turns of few tokens equal a whole pass."""
  tokens, logits = EXPECTED.tokens, EXPECTED.logits
  lengths = np.int32([26, 19])
  segments = (np.arange(26) < lengths[:, None]).astype(np.int32)
  cache = model.init_cache(2, 48)
  first, cache = model(tokens[:, :26], segment_ids=segments, cache=cache)
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(
      first[row, :length], logits[row, :length], atol=5e-5
    )
  for step in (0, 3, 6):
    ids = [tokens[b, n + step : n + step + 3] for b, n in enumerate(lengths)]
    new, cache = model(jnp.stack(ids), cache=cache)
    for row, length in enumerate(lengths + step):
      np.testing.assert_allclose(
        new[row], logits[row, length : length + 3], atol=5e-5
      )


@pytest.mark.long
@pytest.mark.parametrize("restarts", [False, True])
def test_packed_documents_that_begin_with_a_block(model, restarts):
  """Each equals the document alone in a row, n-grams included.

  Positions are those of the row, or restart with each document.
  """
  first, second = EXPECTED.tokens[:1, :24], EXPECTED.tokens[1:, :15]
  segments = np.repeat(np.int32([1, 2]), [24, 15])[None]
  both = np.concatenate([first, second], 1)
  positions = np.concatenate([np.arange(24), np.arange(15)]).astype(np.int32)
  packed = model(
    both,
    segment_ids=segments,
    positions=positions[None] if restarts else None,
  )
  np.testing.assert_allclose(
    packed[:, :24], EXPECTED.logits[:1, :24], atol=5e-5
  )
  np.testing.assert_allclose(
    packed[:, 24:], EXPECTED.logits[1:, :15], atol=5e-5
  )
