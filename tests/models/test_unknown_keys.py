"""Keys of config.json that nothing reads: ignored, or refused by name."""

from __future__ import annotations

import json
import pathlib
import random
import re
import warnings

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import CheckpointMismatchError, ConfigError
from tests import checkpoints

NAMES = [*checkpoints.names(), *checkpoints.image_names()]
KNOWN = json.loads(
  (pathlib.Path(rj.models.__path__[0]) / "known_keys.json").read_text("utf-8")
)
# As finetunes and converters have left them in files.
SEEN = [
  "unk_token_id", "_model_name_or_path", "mask_token_id", "cls_token_id",
  "_flash_attn_2_enabled", "_unsloth_fixed", "added_tokens", "adapter_layers",
  "attn_bias_type", "axolotl_config", "base_model", "calibration", "codebook",
  "converted_from", "data_mix", "dataset", "dpo_beta", "embedding_scale_note",
  "eval_loss", "experiment", "flash_attn", "freeze_trunk", "fsdp", "gguf",
  "git_hash", "hub_id", "lora_alpha", "lora_r", "lr", "mergekit", "merged_from",
  "model_author", "model_name", "neftune_alpha", "num_epochs", "onnx",
  "padding_side", "prompt_format", "rescale_note", "reward_head", "seed",
  "sft_steps", "special_tokens", "template", "tokenizer_path", "train_steps",
  "trl_version", "unsloth_note", "use_cut_cross_entropy", "use_fused_ce",
  "use_lora", "vllm_version", "wandb_id", "warmup", "weight_note", "zero_stage",
]  # fmt: skip
VALUES = [True, False, 0, 3, 0.5, "text", [1, 2], {"inner": 1}]


def made_up(count):
  """Names of keys that no program has."""
  dice = random.Random(7)
  parts = ["attn", "custom", "dropout", "head", "layer", "norm", "rope", "use"]
  return [
    f"{dice.choice(parts)}_{dice.choice(parts)}_xq{n}" for n in range(count)
  ]


KEYS = [*SEEN, *made_up(200 - len(SEEN))]


def known_to(config):
  """Keys that transformers knows of a model."""
  kinds = [config["model_type"]]
  inner = config.get("text_config") or {}
  kinds += [inner["model_type"]] if "model_type" in inner else []
  tables = [KNOWN.get(kind, []) for kind in ("everywhere", *kinds)]
  return {key for table in tables for key in table}


def meaning(config, **options):
  """What a config means, and what was warned of."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, _ = rj.models.read_config(config, **options)
  return model, [str(x.message) for x in caught]


@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_keys_that_nothing_reads(name):
  config = checkpoints.config(name)
  keys = [key for key in KEYS if key not in known_to(config)]
  assert len(keys) >= 195
  plain, said = meaning(config)
  assert said == []
  more = {key: VALUES[n % len(VALUES)] for n, key in enumerate(keys)}
  model, said = meaning({**more, **config})
  assert model == plain
  assert len(said) == 1
  # Twenty by name; some families read one or two of these.
  match = re.search(r"and (\d+) more$", said[0])
  assert match is not None and 170 <= int(match[1]) <= 180


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_transformers_reads_and_we_do_not(name):
  """Any of those that the class knows, as one of them stands for all."""
  config = checkpoints.config(name)
  plain, _ = meaning(config)
  more = {**config, "logits_mup_width_multiplier": 2.0}
  with pytest.raises(ConfigError, match=r"logits_mup_width.*strict=False"):
    rj.models.read_config(more)
  model, said = meaning(more, strict=False)
  assert model == plain
  assert len(said) == 1 and "logits_mup_width_multiplier" in said[0]


@pytest.mark.parametrize("name", NAMES)
def test_code_of_a_folder_may_read_any_key(name):
  config = {
    **checkpoints.config(name),
    "auto_map": {"AutoModelForCausalLM": "modeling_x.Model"},
  }
  plain, said = meaning(config)
  assert said == []
  more = {**config, "_model_name_or_path": "x"}
  with pytest.raises(ConfigError, match=r"_model_name.*code of the folder"):
    rj.models.read_config(more)
  model, said = meaning(more, strict=False)
  assert model == plain
  assert len(said) == 1 and "_model_name_or_path" in said[0]


@pytest.mark.parametrize(
  ("key", "value"),
  [("device_map", "auto"), ("token", "hf_x"), ("transformers_weights", "x"),
   ("use_return_dict", True), ("base_model_tp_plan", {"layers": "colwise"}),
   ("keys_to_ignore_at_inference", ["past_key_values"]),
   ("_attn_implementation_internal", "sdpa"),
   ("layer_types", ["full_attention"] * 2)],
)  # fmt: skip
def test_a_key_that_only_loading_reads_says_nothing(key, value):
  config = checkpoints.config("llama3")
  model, said = meaning({**config, key: value})
  assert model == meaning(config)[0] and said == []


def test_layers_with_windows_are_refused_where_nothing_reads_them():
  types = ["sliding_attention", "full_attention"]
  config = {**checkpoints.config("llama3"), "layer_types": types}
  with pytest.raises(ConfigError, match="layer_types"):
    rj.models.read_config(config)


def test_code_of_a_tokenizer_reads_no_key_of_a_model():
  code = {"AutoTokenizer": ["x.T", None], "AutoProcessor": "x.P"}
  config = {**checkpoints.config("llama3"), "auto_map": code}
  _, said = meaning({**config, "unk_token_id": 0})
  assert len(said) == 1 and "unk_token_id" in said[0]


def test_a_key_within_the_rotation():
  config = checkpoints.config("llama3")
  plain, _ = meaning(config)
  rope = config["rope_parameters"]
  more = {**config, "rope_parameters": {**rope, "note_xq": 1}}
  model, said = meaning(more)
  assert model == plain
  assert "rope_parameters.note_xq" in said[0]
  known = {**config, "rope_parameters": {**rope, "mscale": 2.0}}
  with pytest.raises(ConfigError, match="mscale"):
    rj.models.read_config(known)


def test_a_key_of_another_family():
  """Llama's class has no cap of its scores; Gemma 2's has one."""
  key = "attn_logit_softcapping"
  model, said = meaning({**checkpoints.config("llama3"), key: 50.0})
  assert model == meaning(checkpoints.config("llama3"))[0]
  assert key in said[0]


def test_a_folder_with_such_keys(tmp_path):
  """Loads, and is saved, where `strict` has left keys out without these."""
  folder = tmp_path / "model"
  checkpoints.write("llama3", folder)
  file = folder / "config.json"
  config = json.loads(file.read_text("utf-8"))
  plain = rj.models.load(folder)
  file.write_text(json.dumps({**config, "unk_token_id": 0}), "utf-8")
  with pytest.warns(UserWarning, match="unk_token_id") as caught:
    model = rj.models.load(folder)
  assert len(caught) == 1
  tokens = np.arange(12, dtype=np.int32)[None]
  assert np.array_equal(model(tokens), plain(tokens))
  rj.models.save(model, tmp_path / "again")
  again = json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))
  assert again["unk_token_id"] == 0
  more = {**config, "sliding_window": 8, "auto_map": {"AutoConfig": "x.Y"}}
  file.write_text(json.dumps(more), "utf-8")
  with pytest.raises(ConfigError, match="sliding_window"):
    rj.models.load(folder)
  with pytest.warns(UserWarning, match="sliding_window"):
    model = rj.models.load(folder, strict=False)
  assert np.array_equal(model(tokens), plain(tokens))
  rj.models.save(model, tmp_path / "third")
  rj.models.load(tmp_path / "third")


def test_a_tensor_that_nobody_reads_stays_an_error(tmp_path):
  from safetensors.numpy import load_file, save_file

  folder = tmp_path / "model"
  checkpoints.write("llama3", folder)
  file = next(folder.glob("*.safetensors"))
  tensors = load_file(file) | {"model.extra.weight": np.zeros(3, np.float32)}
  save_file(tensors, file)
  with pytest.raises(CheckpointMismatchError, match="extra"):
    rj.models.load(folder, strict=False)
