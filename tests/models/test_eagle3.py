"""Folders of EAGLE-3 heads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import ringjax as rj
from ringjax.errors import CheckpointMismatchError, ConfigError
from tests import checkpoints, eagle_heads
from tests.helpers import refused


def saved(model, folder):
  """The tensors and the config that `save` writes."""
  rj.models.eagle3.save(model, folder)
  config = json.loads((folder / "config.json").read_text())
  return load_file(folder / "model.safetensors"), config


def equal(got, want):
  assert got.keys() == want.keys()
  for name, x in want.items():
    assert got[name].dtype == x.dtype, name
    np.testing.assert_array_equal(got[name], x)


SPECULATORS = {
  "speculators_model_type": "eagle3",
  "speculators_version": "0.3.0",
  "architectures": ["Eagle3Speculator"],
  # Names code that is not run.
  "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
  "embed_requires_grad": False,
  "draft_vocab_size": len(eagle_heads.IDS),
  "norm_before_residual": True,
  "eagle_aux_hidden_state_layer_ids": [n + 1 for n in eagle_heads.OUTPUTS],
}


def test_a_head_is_saved_to_the_bit(tmp_path):
  base, config = eagle_heads.target(), eagle_heads.settings()
  folder = eagle_heads.write(tmp_path / "head", config)
  model = rj.models.eagle3.load(folder, base)
  tensors, kept = saved(model, tmp_path / "saved")
  equal(tensors, eagle_heads.tensors(config))
  assert kept == config
  tokens = np.arange(11, dtype=np.int32)[None]
  np.testing.assert_array_equal(model(tokens), base(tokens))
  assert rj.models.eagle3.without_head(model).config == base.config
  again = rj.models.eagle3.load(tmp_path / "saved", base)
  np.testing.assert_array_equal(
    again.predicted_logits(tokens), model.predicted_logits(tokens)
  )


def test_speculators_name_layers_by_their_inputs(tmp_path):
  base, inner = eagle_heads.target(), eagle_heads.settings()
  tensors = eagle_heads.tensors(inner, start="layers.0.")
  for key in ("eagle_config", "draft_vocab_size", "architectures"):
    inner.pop(key)
  config = SPECULATORS | {"transformer_layer_config": inner}
  folder = checkpoints.write_folder(tensors, config, tmp_path / "head")
  model = rj.models.eagle3.load(folder, base)
  layer = model.config.predicts
  assert layer.taps == (1, 3, 4) and layer.normed_residual
  got, kept = saved(model, tmp_path / "saved")
  equal(got, tensors)
  assert kept == config


def test_a_new_head_has_the_published_names(tmp_path):
  base = eagle_heads.target()
  texts = [np.array([3, 3, 5, 9, 9, 9]), np.array([2, 5])]
  ids = rj.models.eagle3.frequent_ids(texts, 4, 14)
  assert ids.tolist() == [2, 3, 5, 9]
  model = rj.models.eagle3.with_head(base, ids=ids, hidden=40)
  tensors, config = saved(model, tmp_path / "head")
  assert tensors.keys() == eagle_heads.tensors(eagle_heads.settings()).keys()
  assert (tensors["d2t"] + np.arange(4)).tolist() == ids.tolist()
  assert np.flatnonzero(tensors["t2d"]).tolist() == ids.tolist()
  assert config["draft_vocab_size"] == 4
  # L = 5: the layers 2, 2 and 2, by those before them.
  inner = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
  assert inner == [1, 1, 1]
  again = rj.models.eagle3.load(tmp_path / "head", base)
  tokens = np.arange(9, dtype=np.int32)[None]
  np.testing.assert_array_equal(
    again.predicted_logits(tokens), model.predicted_logits(tokens)
  )


@pytest.mark.parametrize(
  ("more", "word"),
  [
    ({"hidden_size": 48}, "width of the target"),
    ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ({"draft_vocab_size": 9}, "shape of d2t"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden"),
    (
      {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},
      "layers of the target",
    ),
    ({"parallel_drafting": True}, "parallel_drafting"),
    ({"attention_bias": True}, None),
  ],
  ids=str,
)
def test_other_heads_are_refused(tmp_path, more, word):
  config = eagle_heads.settings()
  folder = checkpoints.write_folder(
    eagle_heads.tensors(config), config | more, tmp_path / "head"
  )
  load = lambda: rj.models.eagle3.load(folder, eagle_heads.target())
  error = ConfigError if word else CheckpointMismatchError
  refused(error, load, word or "missing")


def test_ids_that_come_twice_are_refused(tmp_path):
  config = eagle_heads.settings()
  twice = np.zeros(10, np.int64) - np.arange(10)
  folder = eagle_heads.write(tmp_path / "head", config, d2t=twice)
  load = lambda: rj.models.eagle3.load(folder, eagle_heads.target())
  refused(ConfigError, load, "different ids")
