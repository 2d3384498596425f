"""Of a model of text and images the text model is read, exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ringjax import models
from ringjax.errors import CheckpointMismatchError, ConfigError
from ringjax.models.contents import contents, text_config
from ringjax.models.families.with_images import REFUSED
from ringjax.models.hf.folder import Folder
from tests import checkpoints
from tests.helpers import refused

NAMES = checkpoints.image_names()
# The rest has a rotation, heads or experts of its own, or nothing new.
QUICK = ("qwen3_vl",)
LONG = ("gemma3", "mistral3", "mistral_large4_images", "qwen3_vl_moe")
# Names of each kind: of today, of old, and of what hears, too.
SHORT = ("qwen3_vl", "llava", "gemma3", "smolvlm", "emu3", "qwen2_5_omni")
# Float32 against float64.
TOLERANCE = 5e-5


def outer(name, spelling="v5"):
  return checkpoints.config(name, spelling)


def found(folder):
  """What a folder holds, without its numbers."""
  opened = Folder.open(folder)
  source, family = text_config(opened.config)
  return contents(opened, family, models.abstract(source), source)


def older(key):
  """The names of tensors before transformers 5."""
  if key.startswith("model.language_model."):
    return key.replace("model.language_model.", "language_model.model.")
  if key.startswith("lm_head."):
    return f"language_model.{key}"
  return key.removeprefix("model.")


def marks(name):
  if name in QUICK:
    return ()
  return pytest.mark.long if name in LONG else pytest.mark.slow


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=marks(n)) for n in NAMES]
)
def test_text_is_as_transformers_reads_it(name, tmp_path):
  expected = checkpoints.expected(name)
  model = models.load(checkpoints.write(name, tmp_path))
  got = model(expected.tokens)
  np.testing.assert_allclose(got, expected.logits, rtol=0, atol=TOLERANCE)
  ids = np.concatenate([expected.prompt, expected.greedy], 1)
  p = expected.prompt.shape[1]
  chosen = np.argmax(model(ids), -1)[:, p - 1 : -1]
  np.testing.assert_array_equal(chosen, expected.greedy)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in NAMES
  ],
)
def test_what_sees_is_left_by_its_name(name, tmp_path):
  held = found(checkpoints.write(name, tmp_path))
  shapes = checkpoints.shapes(name)
  seeing = {key for key in shapes if checkpoints.sees(key, outer(name))}
  assert set(held.unused) == seeing and seeing
  assert {t.stored_name for t in held.tensors} == set(shapes) - seeing


def test_a_layer_that_predicts_is_left_by_its_name(tmp_path):
  """It has the name of a layer after the others of the text model."""
  name = "glm5_next_images"
  number = outer(name)["text_config"]["num_hidden_layers"]
  extra = f"model.language_model.layers.{number}.eh_proj.weight"
  arrays = checkpoints.tensors(name) | {extra: np.zeros((2, 3), np.float32)}
  folder = checkpoints.write_folder(arrays, outer(name), tmp_path)
  assert extra in found(folder).unused


@pytest.mark.parametrize("name", ["llava", "mistral3", "internvl"])
def test_older_names_of_tensors(name, tmp_path):
  arrays = {older(k): x for k, x in checkpoints.tensors(name).items()}
  folder = checkpoints.write_folder(arrays, outer(name), tmp_path)
  stored = {t.stored_name for t in found(folder).tensors}
  assert stored == {k for k in arrays if k.startswith("language_model.")}


def test_keys_beside_each_other_mean_the_same(tmp_path):
  """Qwen's files of 2024 have no text_config, and the tensors of a Qwen 2."""
  old, new = outer("qwen2_5_vl", "v4"), outer("qwen2_5_vl")
  assert "text_config" not in old
  assert models.read_config(old)[0] == models.read_config(new)[0]
  arrays = {
    key.replace(".language_model.", ".").replace("model.visual", "visual"): x
    for key, x in checkpoints.tensors("qwen2_5_vl").items()
  }
  model = models.load(checkpoints.write_folder(arrays, old, tmp_path))
  expected = checkpoints.expected("qwen2_5_vl")
  got = model(expected.tokens[:, :11])
  want = expected.logits[:, :11]
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_experts_either_way_round(tmp_path):
  """As published, [experts, in, out], and as transformers 5 writes them."""
  name = "qwen3_vl_moe"
  arrays = checkpoints.tensors(name)
  turned = {
    k: x.swapaxes(1, 2) if ".experts." in k else x for k, x in arrays.items()
  }
  one = models.load(checkpoints.write(name, tmp_path / "new"))
  other = models.load(
    checkpoints.write_folder(turned, outer(name), tmp_path / "old")
  )
  tokens = checkpoints.expected(name).tokens[:1, :5]
  np.testing.assert_array_equal(one(tokens), other(tokens))


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    pytest.param("qwen3_vl", "qwen3", marks=pytest.mark.long),
    pytest.param("qwen3_vl_moe", "qwen3_moe", marks=pytest.mark.slow),
  ],
)
def test_saved_as_the_text_model_that_it_is(name, kind, tmp_path):
  model = models.load(checkpoints.write(name, tmp_path / "whole"))
  models.save(model, tmp_path / "text")
  config = json.loads((tmp_path / "text" / "config.json").read_text())
  assert config["model_type"] == kind and "vision_config" not in config
  again = models.load(tmp_path / "text")
  tokens = checkpoints.expected(name).tokens[:1, :7]
  np.testing.assert_array_equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
  ("name", "whole"),
  [
    ("qwen2_5_omni", "qwen2_5_omni"),
    pytest.param("qwen3_omni_moe", "qwen3_omni_moe", marks=pytest.mark.long),
  ],
)
def test_of_a_model_that_speaks_one_part_is_read(name, whole, tmp_path):
  thinker = outer(name)
  assert thinker["model_type"] == f"{whole}_thinker"
  config = {
    "model_type": whole,
    "thinker_config": thinker,
    "talker_config": {"text_config": {"hidden_size": 3}},
    "enable_audio_output": True,
  }
  arrays = checkpoints.tensors(name)
  spoken = {"talker.model.layers.0.mlp.weight": np.ones(3, np.float32)}
  inner = {f"thinker.{key}": x for key, x in arrays.items()}
  folder = checkpoints.write_folder(inner | spoken, config, tmp_path)
  seeing = {key for key in inner if checkpoints.sees(key)}
  held = found(folder)
  assert set(held.unused) == seeing | set(spoken)
  assert models.read_config(config)[0] == models.read_config(thinker)[0]
  stray = {"thinker.other.weight": np.ones(3, np.float32)}
  folder = checkpoints.write_folder(inner | stray, config, tmp_path)
  refused(CheckpointMismatchError, lambda: found(folder), "thinker.other")


def test_a_rotation_of_hunyuan_as_it_was_published():
  """Four positions, all alike, and a base that is fixed."""
  config = outer("hunyuan_vl")
  rotation = dict(config["text_config"].pop("rope_parameters"))
  old = {
    "type": "xdrope",
    "xdrope_section": rotation["mrope_section"],
    "alpha": rotation["alpha"],
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
  }
  config["text_config"] |= {
    "rope_scaling": old, "rope_theta": rotation["rope_theta"]
  }  # fmt: skip
  new = models.read_config(outer("hunyuan_vl"))[0]
  assert models.read_config(config)[0] == new


def test_paligemma_as_it_was_published():
  text = {"hidden_size": 2048, "intermediate_size": 16384,
          "model_type": "gemma", "num_attention_heads": 8,
          "num_hidden_layers": 18, "num_image_tokens": 256,
          "num_key_value_heads": 1, "vocab_size": 257216}  # fmt: skip
  config = {"model_type": "paligemma", "hidden_size": 2048,
            "ignore_index": -100, "image_token_index": 257152,
            "projection_dim": 2048, "vocab_size": 257216,
            "text_config": text, "vision_config": {}}  # fmt: skip
  found, family = models.read_config(config)
  assert family.name == "gemma" and found.tied and found.vocab == 257216
  assert found.max_positions == 8192
  assert found.layers[0].attention.head_dim == 256


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [1, 4], [-1], "all"])
def test_layers_that_look_at_images_leave_some_others(layers):
  config = outer("mllama")
  config["text_config"]["cross_attention_layers"] = layers
  refused(
    ConfigError, lambda: models.read_config(config), "cross_attention_layers"
  )


def test_saved_without_layers_that_look_at_images(tmp_path):
  """Nor rows of the embedding that stand for one."""
  model = models.load(checkpoints.write("mllama", tmp_path / "whole"))
  models.save(model, tmp_path / "text")
  again = models.load(tmp_path / "text")
  assert len(again.config.layers) == 2
  tokens = checkpoints.expected("mllama").tokens[:1, :7]
  np.testing.assert_array_equal(again(tokens), model(tokens))


def test_a_refusal_says_why():
  for kind, why in REFUSED.items():
    refused(
      ConfigError, lambda kind=kind: models.read_config({"model_type": kind}),
      kind, why,
    )  # fmt: skip


def test_a_text_model_that_is_not_known_there():
  config = outer("mistral3")
  config["text_config"]["model_type"] = "gemma2"
  refused(
    ConfigError, lambda: models.read_config(config), "gemma2", "ministral3"
  )


@pytest.mark.parametrize("kind", [[], {}, 7])
def test_a_type_that_is_no_name(kind):
  config = outer("mistral3")
  refused(
    ConfigError,
    lambda: models.read_config({**config, "model_type": kind}),
    "model_type",
  )
  config["text_config"]["model_type"] = kind or [1]
  refused(
    ConfigError, lambda: models.read_config(config), "text_config.model_type"
  )


def test_what_a_text_config_leaves_out_is_transformers_default():
  """As LLaVA 1.5 was published."""
  text = {"model_type": "llama", "max_position_embeddings": 4096,
          "rms_norm_eps": 1e-5, "vocab_size": 32064}  # fmt: skip
  config = {"model_type": "llava", "ignore_index": -100, "text_config": text,
            "vocab_size": 32064, "vision_config": {}}  # fmt: skip
  found, family = models.read_config(config)
  assert family.name == "llama" and not found.tied
  assert (found.embed, len(found.layers), found.vocab) == (4096, 32, 32064)
  assert found.layers[0].feedforward.hidden == 11008


def test_a_head_is_tied_where_the_text_model_says_so():
  """transformers 5 writes true into the outer config of every Mistral 3."""
  config = outer("mistral3") | {"tie_word_embeddings": True}
  assert not models.read_config(config)[0].tied
  config["text_config"]["tie_word_embeddings"] = True
  assert models.read_config(config)[0].tied
  # Of Qwen 3 the outer one counts.
  config = outer("qwen3_vl") | {"tie_word_embeddings": True}
  config["text_config"]["tie_word_embeddings"] = False
  assert models.read_config(config)[0].tied


def test_a_tensor_of_neither_is_refused(tmp_path):
  arrays = checkpoints.tensors("qwen3_vl")
  arrays["model.audio.weight"] = np.ones(3, np.float32)
  folder = checkpoints.write_folder(arrays, outer("qwen3_vl"), tmp_path)
  refused(CheckpointMismatchError, lambda: found(folder), "model.audio.weight")


def test_a_rotation_by_three_positions_of_a_text_model_alone_is_ignored():
  """A Qwen 3 has no images: transformers ignores what its file says of them."""
  config = checkpoints.config("qwen3")
  plain, _ = models.read_config(config)
  config["rope_parameters"]["mrope_section"] = [4, 2, 2]
  with pytest.warns(UserWarning, match="mrope_section"):
    assert models.read_config(config)[0] == plain
