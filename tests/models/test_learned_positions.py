"""Models whose embeddings know their positions: GPT-2 and OPT."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PromptError
from ringjax.infer.layerwise import LayerPrograms
from ringjax.models.partition.tensor_shares import SharedModel
from ringjax.train.extend import RopeScaling, extend_context
from tests import checkpoints
from tests.helpers import check_unequal_rows

TABLE = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return rj.models.load(
    checkpoints.write("gpt2", tmp_path_factory.mktemp("learned"))
  )


@pytest.mark.long
def test_positions_behind_the_table_are_refused(model):
  ids = lambda count: np.ones((1, count), np.int32)
  with pytest.raises(PromptError, match=r"position 64.*0 to 63.*n_positions"):
    model(ids(TABLE + 1))
  with pytest.raises(PromptError, match="position 70"):
    model(ids(3), positions=np.asarray([4, 70, 5]))
  cache = model.init_cache(1, 2 * TABLE)
  _, cache = model(ids(TABLE), cache=cache)
  with pytest.raises(PromptError, match="position 64"):
    model(ids(1), cache=cache)
  with pytest.raises(PromptError, match="n_positions"):
    rj.infer.generate(model, ids(60), max_new_tokens=8)
  assert model.config.longest == TABLE


def test_padding_may_be_behind_the_table(model):
  """And says nothing to the tokens before it."""
  tokens = checkpoints.expected("gpt2").tokens
  padded = np.pad(tokens, ((0, 0), (0, TABLE)))
  real = (np.arange(padded.shape[1]) < tokens.shape[1]).astype(np.int32)
  found = model(padded, segment_ids=real)[:, : tokens.shape[1]]
  want = checkpoints.expected("gpt2").logits
  np.testing.assert_allclose(found, want, rtol=0, atol=5e-5)


def test_padding_in_a_layout_s_order(model):
  """What is behind the table are the slots without a token, in any order."""
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  model = jax.tree.map(lambda x: jax.device_put(x, here), model)
  layout = rj.Zigzag()
  attend = rj.models.ContextParallel(mesh=mesh, axis="seq", layout=layout)
  real = np.arange(TABLE + 8) < TABLE
  order = np.asarray(layout.all_positions(TABLE + 8, 4))
  ids = np.ones((1, TABLE + 8), np.int32)
  logits = model(ids, segment_ids=real[order].astype(np.int32), attend=attend)
  assert logits.shape[1] == TABLE + 8
  with pytest.raises(PromptError, match="position 71"):
    model(ids, attend=attend)


def test_keys_that_know_their_place_do_not_move(model):
  with pytest.raises(OptionError, match=r"combine.*gpt2"):
    rj.infer.generate(
      model,
      [[1, 2]],
      max_new_tokens=1,
      contexts=[[[3, 4], [5, 6]]],
      combine="recompute",
    )


@pytest.mark.parametrize(
  "name",
  [
    "gpt2",
    pytest.param("opt", marks=pytest.mark.slow),
    pytest.param("bloom", marks=pytest.mark.slow),
  ],
)
def test_a_folder_that_was_saved_without_its_head(name, tmp_path):
  """Leaves out what stands before all other names."""
  base = {"gpt2": "transformer.", "bloom": "transformer.", "opt": "model."}
  arrays = checkpoints.tensors(name)
  del arrays["lm_head.weight"]
  bare = {key.removeprefix(base[name]): x for key, x in arrays.items()}
  assert set(bare) != set(arrays)
  config = checkpoints.config(name) | {"tie_word_embeddings": True}
  write = lambda arrays, folder: checkpoints.write_folder(
    arrays, config, tmp_path / folder
  )
  want = rj.models.load(write(arrays, "whole"))
  found = rj.models.load(write(bare, "bare"))
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(x, y)


def test_what_cannot_know_positions_says_so(model, tmp_path):
  with pytest.raises(ConfigError, match=r"gpt2.*positions"):
    LayerPrograms(model)
  with pytest.raises(ConfigError, match=r"gpt2.*positions"):
    SharedModel(checkpoints.write("gpt2", tmp_path), (1, 1))
  with pytest.raises(ConfigError, match=r"gpt2.*64 positions"):
    extend_context(model, RopeScaling(context=128))


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("gpt2", "n_embd", 50),
    ("gpt2", "n_positions", 0),
    ("gpt2", "activation_function", "mish"),
    ("gpt2", "scale_attn_weights", "no"),
    ("gpt2", "add_cross_attention", True),
    ("opt", "hidden_size", 50),
    ("opt", "do_layer_norm_before", False),
    ("opt", "_remove_final_layer_norm", True),
    ("opt", "word_embed_proj_dim", 24),
    ("opt", "max_position_embeddings", 2**40),
  ],
)
def test_a_value_that_cannot_be(name, key, value):
  with pytest.raises(ConfigError, match=key):
    rj.models.read_config(checkpoints.config(name) | {key: value})


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind"),
  [("gpt2", "dense"), pytest.param("opt", "int8", marks=pytest.mark.slow)],
)
def test_rows_of_unequal_lengths_over_shards(tmp_path, name, kind):
  check_unequal_rows(tmp_path, name, cache_kind=kind, prefill="striped")
