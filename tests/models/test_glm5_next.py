"""GLM-5.3-Flash: what its configs say, and blocks that pooled keys choose."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import models
from ringjax.errors import ConfigError, OptionError
from ringjax.models.weights.linear_maps import rounded_maps
from ringjax.nn.attention_layers.pooled_latent import PooledLatent
from ringjax.nn.feedforward import Gated
from tests import checkpoints
from tests.helpers import make_mesh

NAME = "glm5_next"
EXPECTED = checkpoints.expected(NAME)


def read(**changes):
  config = checkpoints.config(NAME) | changes
  return models.read_config(
    {key: x for key, x in config.items() if x != "absent"}
  )[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return checkpoints.write(NAME, tmp_path_factory.mktemp(NAME) / "model")


@pytest.fixture(scope="module")
def model(folder):
  return models.load(folder)


@pytest.mark.long
def test_a_sequence_on_shards(folder):
  """Delta attention hands its state on, and blocks are those of all shards."""
  mesh, layout = make_mesh(4, "auto"), rj.Striped()
  model = models.load(folder, mesh=mesh, dtype=jnp.float32)
  order = layout.padded_order(40, 4)
  attend = models.ContextParallel(mesh=mesh, axis="seq", layout=layout)
  logits = model(EXPECTED.tokens[:, order], attend=attend)
  np.testing.assert_allclose(
    np.asarray(logits)[:, np.argsort(order)], EXPECTED.logits, atol=5e-5
  )


def test_what_a_file_leaves_out():
  absent = dict.fromkeys(
    ("indexer_types", "layer_types", "linear_lower_bound", "mlp_layer_types"),
    "absent",
  )
  config = read(num_hidden_layers=5, **absent)
  latent = [isinstance(x.attention, PooledLatent) for x in config.layers]
  assert latent == [False, False, False, True, False]
  assert config.layers[0].attention.lower_limit == -5.0
  plain = [isinstance(x.feedforward, Gated) for x in config.layers]
  assert plain == [True, True, True, False, False]
  unlimited = read(linear_lower_bound=None)
  assert unlimited.layers[0].attention.lower_limit is None


def test_the_spelling_of_published_files():
  newer = read()
  delta = newer.layers[0].attention
  kinds = checkpoints.config(NAME)["layer_types"]
  older = read(
    layer_types=[x.replace("indexed", "full") for x in kinds],
    indexer_types="absent",
    index_topk_pattern="FFFF",
    linear_attn_config={
      "head_dim": delta.dim,
      "num_heads": delta.heads,
      "short_conv_kernel_size": delta.taps,
      "gate_lower_bound": delta.lower_limit,
      "safe_gate": True,
    },
    linear_head_dim=64,
    linear_num_heads=2,
  )
  assert older == newer
  null = read(linear_attn_config={"gate_lower_bound": None})
  assert null.layers[0].attention.lower_limit == -5.0
  # Files of the text alone have its keys beside those of the whole model.
  assert read(model_type=NAME, image_token_id=7) == newer
  # An index of a layer that has none is not looked at.
  shared = ["shared", "full", "shared", "full"]
  assert read(indexer_types=shared) == newer


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("hc_mult", 0),
    ("hidden_act", "gelu"),
    ("index_kpool", 5),
    ("index_kpool_always_select_tail", False),
    ("indexer_types", ["full", "full", "full", "shared"]),
    ("layer_types", ["linear_attention", "sliding_attention"] * 2),
    ("linear_lower_bound", 0.5),
    ("num_key_value_heads", 2),
    ("qk_rope_head_dim", 8),
    ("q_lora_rank", 0),
    ("swiglu_limit", 0.0),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  word = "index_topk" if key == "index_kpool" else key
  with pytest.raises(ConfigError, match=word):
    read(**{key: value})


@pytest.mark.parametrize(
  "kind", ["snapkv", "sinks", rj.kv.CacheConfig(device=16)]
)
def test_caches_that_drop_or_move_keys_are_refused(kind):
  model = models.abstract(checkpoints.config(NAME), dtype=jnp.float32)
  with pytest.raises(OptionError, match="PooledLatent"):
    model.init_cache_spec(1, 64, kind=kind)
  with pytest.raises(OptionError, match="PooledLatent"):
    model.init_cache_spec(1, 64, placement="host")


@pytest.mark.long
def test_what_chooses_keys_is_not_rounded(model):
  paths = rounded_maps(model, "codes")
  assert not [path for path in paths if ".index" in path]


@pytest.mark.long
def test_rows_turns_and_single_tokens(model):
  """Unequal rows, a later turn and a prompt in chunks equal a whole pass."""
  tokens, logits = EXPECTED.tokens, EXPECTED.logits
  lengths = np.int32([26, 19])
  segments = (np.arange(26) < lengths[:, None]).astype(np.int32)
  cache = model.init_cache(2, 48)
  first, cache = model(tokens[:, :26], segment_ids=segments, cache=cache)
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(
      first[row, :length], logits[row, :length], atol=5e-5
    )
  np.testing.assert_array_equal(cache.length, lengths)
  for step in range(9):
    ids = jnp.stack([tokens[b, n + step] for b, n in enumerate(lengths)])
    new, cache = model(ids[:, None], cache=cache)
    for row, length in enumerate(lengths):
      np.testing.assert_allclose(
        new[row, 0], logits[row, length + step], atol=5e-5
      )


@pytest.mark.long
def test_packed_documents_that_begin_with_a_block(model):
  """Each equals the document alone in a row."""
  first, second = EXPECTED.tokens[:1, :24], EXPECTED.tokens[1:, :27]
  segments = np.repeat(np.int32([1, 2]), [24, 27])[None]
  packed = model(np.concatenate([first, second], 1), segment_ids=segments)
  np.testing.assert_allclose(
    packed[:, :24], EXPECTED.logits[:1, :24], atol=5e-5
  )
  np.testing.assert_allclose(
    packed[:, 24:], EXPECTED.logits[1:, :27], atol=5e-5
  )
