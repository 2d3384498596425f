"""A saved folder is the one that was loaded, tensors and files beside them."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax.models.hf.tensors import parameters
from tests import checkpoints
from tests.models.test_checkpoint import same_bits, stored

FILES = {
  "added_tokens.json": '{"<x>": 100}',
  "chat_template.jinja": "{{ messages }}",
  "generation_config.json": '{"temperature": 0.5}',
  "merges.txt": "a b",
  "preprocessor_config.json": "{}",
  "special_tokens_map.json": "{}",
  "tokenizer.json": "{}",
  "tokenizer_config.json": "{}",
}
CODE = {"modeling_youtu.py": "raise SystemExit", "notes.txt": "of ours"}
# One layer that guesses, behind the fixture's last one.
GUESSES = {
  "model.layers.2.eh_proj.weight": np.ones((4, 4), np.float32),
  "model.layers.2.enorm.weight": np.ones(4, ml_dtypes.bfloat16),
  "model.layers.2.mlp.down_proj.weight": np.full((2, 3), 0.1, np.float32),
  "model.layers.2.counter": np.arange(3),
}


def published(folder, more=None, **settings):
  """A folder with a layer that guesses, and files beside the weights."""
  config = {**checkpoints.config("youtu"), "num_nextn_predict_layers": 1}
  assert config["num_hidden_layers"] == 2
  tensors = {**checkpoints.tensors("youtu"), **(more or GUESSES)}
  checkpoints.write_folder(tensors, config | settings, folder)
  for name, text in {**FILES, **CODE}.items():
    (folder / name).write_text(text)
  return folder


def config_of(folder):
  return json.loads((folder / "config.json").read_text())


def files_of(folder):
  return {
    path.name: path.read_text()
    for path in folder.iterdir()
    if path.name != "config.json" and path.suffix != ".safetensors"
  }


def changed(model):
  """The model with another number in its last norm."""
  weight = parameters(model)["norm.weight"]
  weight.set_value(weight.get_value().at[0].add(1))
  return model


def test_all_that_is_not_read_is_kept(tmp_path, recwarn):
  folder = published(tmp_path / "a")
  rj.models.save(rj.models.load(folder), tmp_path / "b")
  same_bits(stored(tmp_path / "b"), stored(folder))
  assert config_of(tmp_path / "b") == config_of(folder)
  assert files_of(tmp_path / "b") == FILES
  assert not [w for w in recwarn if "left out" in str(w.message)]
  # And from there once more, where one file has its place already.
  (tmp_path / "c").mkdir()
  (tmp_path / "c" / "tokenizer.json").write_text("[]")
  model = rj.models.load(tmp_path / "b")
  rj.models.save(model, tmp_path / "c", overwrite=True)
  same_bits(stored(tmp_path / "c"), stored(folder))
  assert files_of(tmp_path / "c") == {**FILES, "tokenizer.json": "[]"}


def test_other_weights_have_no_guesses(tmp_path):
  folder = published(tmp_path / "a")
  model = changed(rj.models.load(folder))
  with pytest.warns(RuntimeWarning, match=r"4 tensors.*layers\.2\.eh_proj"):
    rj.models.save(model, tmp_path / "b")
  kept = stored(folder)
  assert stored(tmp_path / "b").keys() == kept.keys() - GUESSES.keys()
  config = {**config_of(folder), "num_nextn_predict_layers": 0}
  assert config_of(tmp_path / "b") == config
  assert files_of(tmp_path / "b") == FILES
  rj.models.load(tmp_path / "b")


@pytest.mark.long
def test_rounded_weights_keep_them(tmp_path):
  """Of the same numbers, to the bits that there are."""
  folder = published(tmp_path / "a")
  rj.models.save(rj.models.load(folder, dtype=jnp.bfloat16), tmp_path / "b")
  got, want = stored(tmp_path / "b"), stored(folder)
  assert got.keys() == want.keys()
  same_bits({k: got[k] for k in GUESSES}, {k: want[k] for k in GUESSES})
  assert config_of(tmp_path / "b")["dtype"] == "bfloat16"


def test_a_folder_that_is_gone(tmp_path):
  folder = published(tmp_path / "a")
  model = rj.models.load(folder)
  shutil.rmtree(folder)
  with pytest.warns(RuntimeWarning, match="can't be read any more"):
    rj.models.save(model, tmp_path / "b")
  assert config_of(tmp_path / "b")["num_nextn_predict_layers"] == 0


def test_more_tokens(tmp_path):
  """What makes a model of another keeps its folder."""
  folder = published(tmp_path / "a")
  model = rj.models.load(folder)
  grown = rj.models.with_more_tokens(model, 3)
  with pytest.warns(RuntimeWarning, match="embed_tokens"):
    rj.models.save(grown, tmp_path / "b")
  assert config_of(tmp_path / "b")["num_nextn_predict_layers"] == 0
  assert files_of(tmp_path / "b") == FILES


def test_models_of_two_folders_are_of_one_form(tmp_path):
  a, b = (
    rj.models.load(published(tmp_path / name, **more))
    for name, more in (("a", {}), ("b", {"more": {}}))
  )
  assert nnx.graphdef(a) == nnx.graphdef(b)


def test_quantised_guesses_are_left_out(tmp_path):
  name = "model.layers.0.self_attn.o_proj.weight"
  tensors = checkpoints.tensors("youtu")
  codes = tensors[name].astype(ml_dtypes.float8_e4m3fn)
  more = {**GUESSES, name: codes, f"{name}_scale_inv": np.ones((1, 1), "f4")}
  how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
  folder = published(tmp_path / "a", more, quantization_config=how)
  with pytest.warns(RuntimeWarning, match="that folder is quantised"):
    rj.models.save(rj.models.load(folder), tmp_path / "b")
  assert stored(tmp_path / "b").keys() == tensors.keys()
  assert config_of(tmp_path / "b")["num_nextn_predict_layers"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2", "qwen3_next"])
def test_families(name, tmp_path):
  config, tensors = checkpoints.config(name), checkpoints.tensors(name)
  more = {
    "deepseek_v3": "model.layers.3.eh_proj.weight",
    "qwen3_next": "mtp.layers.0.mlp.gate.weight",
  }
  if name in more:
    tensors[more[name]] = np.ones((4, 4), np.float32)
    if name == "deepseek_v3":
      config["num_nextn_predict_layers"] = 1
  folder = checkpoints.write_folder(tensors, config, tmp_path / "a", shards=3)
  rj.models.save(rj.models.load(folder), tmp_path / "b")
  same_bits(stored(tmp_path / "b"), stored(folder))
  assert config_of(tmp_path / "b") == config_of(folder)
