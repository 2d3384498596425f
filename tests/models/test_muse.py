"""Muse Spark: its gates and norms on shards, and what is refused."""

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
def test_experts_on_shards_have_the_same_logits_and_gradients(tmp_path):
  """Also of the norms that all experts share, and of the gates."""
  folder = checkpoints.write(NAME, tmp_path)
  mesh, rules = mesh_of(expert=4), rj.models.Rules(experts="expert")
  alone = rj.models.load(folder)
  sharded = rj.models.load(folder, mesh=mesh, rules=rules)
  tokens = EXPECTED.tokens

  def loss(model):
    return jnp.mean(jnp.square(model(tokens)))

  np.testing.assert_allclose(
    sharded(tokens), EXPECTED.logits, rtol=0, atol=5e-5
  )
  want, got = (jax.jit(jax.grad(loss))(m) for m in (alone, sharded))
  flat_want = jax.tree_util.tree_leaves_with_path(want)
  seen = set()
  for (path, x), y in zip(flat_want, jax.tree.leaves(got), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(y, x, rtol=0, atol=1e-4 * (1 + np.abs(x).max()))
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    seen |= {
      part
      for part in (
        "out_norm",
        "latent_norm",
        "attention_sum",
        "feedforward_sum",
      )
      if part in name and np.abs(x).max() > 0
    }
  assert seen == {
    "out_norm", "latent_norm", "attention_sum", "feedforward_sum"
  }  # fmt: skip
