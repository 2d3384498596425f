"""Muse Spark and Glimmer: gates and norms on shards, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError
from tests import checkpoints
from tests.helpers import mesh_of

NAME = "muse_spark"
EXPECTED = checkpoints.expected(NAME)


def read(**changes):
  config = checkpoints.config(NAME) | changes
  present = {key: x for key, x in config.items() if x != "absent"}
  return rj.models.read_config(present)[0]


@pytest.mark.parametrize(
  ("name", "theta"), [("muse_spark", 500000.0), ("muse_glimmer", 10000.0)]
)
def test_bases_without_keys_of_the_rotation(name, theta):
  config = checkpoints.config(name)
  for key in ("rope_parameters", "layer_rope_theta"):
    del config[key]
  layers = rj.models.read_config(config)[0].layers
  ropes = [getattr(x.attention.rope, "theta", None) for x in layers]
  assert ropes == [theta, theta, None]


def test_layers_without_a_rotation_are_counted_from_the_last():
  config = read(layer_types="absent", layer_rope_theta="absent")
  assert [x.attention.reach for x in config.layers] == [8, 8, None]
  assert [len(x.attention.ropes) for x in config.layers] == [1, 1, 0]
  longer = read(
    num_hidden_layers=6,
    layer_types="absent",
    layer_rope_theta="absent",
    mlp_layer_types="absent",
    rope_parameters={"rope_type": "default", "rope_theta": 300.0},
  )
  full = [x.attention.reach is None for x in longer.layers]
  assert full == [False, True, False, False, False, True]
  assert longer.layers[0].attention.rope.theta == 300.0


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("layer_rope_theta", [10000.0, 500.0, 0]),
    ("layer_rope_theta", [10000.0, 0]),
    ("layer_types", ["sliding_attention", "chunked_attention"] * 2),
    ("layer_types", ["chunked_attention"] * 3),
    ("mlp_layer_types", ["dense", "sparse", "odd"]),
    ("num_experts_per_tok", 9),
    ("rope_theta", 500.0),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("sliding_window", None),
    ("tie_word_embeddings", True),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  with pytest.raises(ConfigError, match=key):
    read(**{key: value})


@pytest.mark.long
def test_experts_on_shards_have_the_same_logits_and_gradients():
  """Also of the norms that all experts share, and of the gates."""
  config = checkpoints.config(NAME) | {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "layer_rope_theta": [0],
    "mlp_layer_types": ["sparse"],
  }
  model = rj.models.create(config, seed=1)
  sharded = rj.models.place(
    model, mesh_of(expert=4), rj.models.Rules(experts="expert")
  )
  tokens = EXPECTED.tokens[:, :12]

  def squares(model):
    logits = model(tokens)
    return jnp.mean(jnp.square(logits)), logits

  run = jax.jit(jax.grad(squares, has_aux=True))
  (want, logits), (got, logits_of_shards) = run(model), run(sharded)
  np.testing.assert_allclose(logits_of_shards, logits, rtol=0, atol=1e-5)
  seen = set()
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
  ):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(y, x, rtol=0, atol=1e-5 * (1 + np.abs(x).max()))
    if x.any():
      seen |= {
        *jax.tree_util.keystr(path, simple=True, separator=".").split(".")
      }
  assert seen >= {
    "out_norm",
    "latent_norm",
    "attention_residual",
    "feedforward_residual",
  }
