"""Vocabularies that grow."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax import models
from ringjax.errors import MeshError, OptionError
from tests.helpers import SMALL, refused

TOKENS = np.arange(1, 9, dtype=np.int32)[None]
SHAPES = {
  "untied": SMALL,
  "tied": SMALL | {"tie_word_embeddings": True},
  "gemma": {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
  },
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_known_tokens_stay_and_new_ones_are_near_their_mean(name, tmp_path):
  model = models.create(SHAPES[name], seed=0)
  made = models.with_more_tokens(model, 6)
  assert made.config.vocab == 70 and model.config.vocab == 64
  got = np.asarray(made(TOKENS))
  np.testing.assert_allclose(got[..., :64], model(TOKENS), rtol=0, atol=1e-5)
  table = np.asarray(made.embed.weight[...])
  old, new = table[:64], table[64:]
  assert new.shape == (6, 16)
  far = np.abs(new - old.mean(0)).max()
  assert 0 < far < 0.5 * old.std()
  assert len(np.unique(new, axis=0)) == 6
  if model.head is not None:
    assert made.head.weight[...].shape == (16, 70)
  # It is a model like any other: new ids are read and predicted.
  assert np.isfinite(np.asarray(made(np.array([[64, 69]], np.int32)))).all()
  models.save(made, tmp_path / "model")
  loaded = models.load(tmp_path / "model")
  assert loaded.config.vocab == 70
  for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(made), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(loaded(TOKENS), got)


def test_the_seed_decides():
  model = models.create(SMALL, seed=0)
  rows = lambda seed: np.asarray(
    models.with_more_tokens(model, 3, seed=seed).embed.weight[...]
  )
  np.testing.assert_array_equal(rows(1), rows(1))
  assert (rows(1) != rows(2)).any()


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_sharded_weights_stay_sharded(name):
  mesh = rj.make_mesh((4,), ("model",))
  model = models.create(SHAPES[name], seed=0, mesh=mesh)
  made = models.with_more_tokens(model, 8)
  for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(model), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  alone = models.with_more_tokens(models.create(SHAPES[name], seed=0), 8)
  got = np.asarray(made(TOKENS))
  np.testing.assert_allclose(got, alone(TOKENS), rtol=0, atol=1e-5)
  call = lambda: models.with_more_tokens(model, 5)
  refused(MeshError, call, "n: got 5 more than 64", "n=8")


@pytest.mark.long
def test_numbers_that_are_none():
  model = models.create(SMALL, seed=0)
  for n in (0, -1):
    refused(
      OptionError, lambda n=n: models.with_more_tokens(model, n), "n: got"
    )
