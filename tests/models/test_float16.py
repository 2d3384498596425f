"""Models whose residual stream leaves the range of float16 compute in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from tests import checkpoints

# Behind this no number is finite in float16.
LARGEST = 65504.0


def loud(folder, dtype):
  """A model whose embeddings leave float16's range once they are scaled."""
  model = rj.models.load(folder, dtype=dtype)
  graph, state = nnx.split(model)
  scale = model.config.embed_scale

  def louder(path, x):
    if "embed" not in jax.tree_util.keystr(path) or x.ndim != 2:
      return x
    # Rounded to float16, so that both models have the same weights.
    wide = x.astype(jnp.float32)
    most = min(4 * LARGEST / scale, 0.9 * LARGEST)
    wide = wide * (most / jnp.max(jnp.abs(wide)))
    return wide.astype(jnp.float16).astype(x.dtype)

  return nnx.merge(graph, jax.tree_util.tree_map_with_path(louder, state))


@pytest.mark.long
@pytest.mark.parametrize(
  "name",
  [
    "gemma2",
    *(
      pytest.param(name, marks=pytest.mark.long)
      for name in ("gemma3_text", "gemma3n", "gemma4_moe", "granite")
    ),
  ],
)
def test_a_stream_beyond_float16_is_float32(name, tmp_path):
  checkpoints.write(name, tmp_path)
  rng = np.random.default_rng(0)
  found = {}
  for dtype in (jnp.float32, jnp.float16):
    model = loud(tmp_path, dtype)
    tokens = rng.integers(0, model.config.vocab, (2, 12)).astype(np.int32)
    rng = np.random.default_rng(0)
    found[dtype] = np.asarray(model(tokens))
  want, got = found[jnp.float32], found[jnp.float16]
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


def test_weights_and_keys_stay_float16(tmp_path):
  checkpoints.write("llama3", tmp_path)
  model = rj.models.load(tmp_path, dtype=jnp.float16)
  assert model.dtype == jnp.float16
  assert model.init_cache(1, 8).dtype == jnp.float16
  hidden = jax.eval_shape(
    lambda model: model.embed(jnp.zeros((1, 4), jnp.int32)), model
  )
  assert hidden.dtype == jnp.float32
