"""What a model's call refuses, and the context that a config states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax import models
from ringjax.errors import DtypeError, InputTypeError, ShapeError

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 16,
  "hidden_size": 8,
  "intermediate_size": 8,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def model():
  return models.create(CONFIG, seed=0)


TOKENS = np.arange(10, dtype=np.int32).reshape(2, 5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("rows", "kind", "says"),
  [
    (np.array([4]), ShapeError, r"shape \(1,\); wanted \[2, n\]"),
    (np.array([4, 4]), ShapeError, r"shape \(2,\)"),
    (np.array([[4]]), ShapeError, r"shape \(1, 1\)"),
    (np.array(4), ShapeError, r"shape \(\)"),
    (np.array([[4], [5]]), ShapeError, r"5 at \[1, 0\]; wanted 0 to 4"),
    (np.array([[0, -1], [0, 0]]), ShapeError, r"-1 at \[0, 1\]"),
    (np.array([[4.0], [4.0]], np.float32), DtypeError, "float32"),
    ([[4], [4]], InputTypeError, "list"),
  ],
)
def test_rows_that_are_none(model, rows, kind, says):
  with pytest.raises(kind, match=says) as caught:
    model(TOKENS, rows=rows)
  assert str(caught.value).startswith("rows: got ")
  assert len(str(caught.value)) < 400


def test_rows_are_those_of_all(model):
  whole = np.asarray(model(TOKENS))
  rows = np.array([[4, 0], [1, 1]], np.int32)
  got = np.asarray(model(TOKENS, rows=rows))
  want = np.take_along_axis(whole, rows[..., None], 1)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  # Inside of a jit their range is unknown, and their shape is not.
  inside = jax.jit(lambda r: model(TOKENS, rows=r))(jnp.asarray(rows))
  np.testing.assert_allclose(inside, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("change", "longest"),
  [
    ({}, None),
    (dict(max_position_embeddings=64), 64),
    (dict(max_position_embeddings=64, sliding_window=8), 64),
    (
      dict(
        max_position_embeddings=64,
        rope_scaling=dict(rope_type="linear", factor=4.0),
      ),
      256,
    ),
    (
      dict(
        max_position_embeddings=64,
        rope_scaling=dict(
          rope_type="yarn", factor=4.0, original_max_position_embeddings=64
        ),
      ),
      256,
    ),
    (
      dict(
        max_position_embeddings=64,
        rope_scaling=dict(rope_type="dynamic", factor=2.0),
      ),
      None,
    ),
  ],
)
def test_the_context_that_a_config_states(change, longest):
  config = CONFIG | change
  if "sliding_window" in change:
    config |= dict(
      model_type="mistral",
      architectures=["MistralForCausalLM"],
      num_key_value_heads=2,
    )
  assert models.abstract(config).config.longest == longest
