"""Tiny folders with a layer that predicts one token further."""

from __future__ import annotations

import functools

import numpy as np

import ringjax as rj
from tests import checkpoints

FAMILIES = (
  "glm4_moe",
  "deepseek_v3",
  "glm4_moe_lite",
  "qwen3_next",
  "qwen3_5",
  "qwen3_5_moe",
  "ernie4_5_moe",
  "longcat_flash",
  "mimo_v2_flash",
  "hy_v3",
)


def _of_longcat(key):
  """Name of the first of a layer's two parts; None for others."""
  if key.startswith(("mlp.", "classifier")) or ".1." in key:
    return None
  return key.replace("mlps.0.", "transformer_layer.mlp.").replace(".0.", ".")


def layer_tensors(name, seed=7):
  """The tensors of the layer, by their names in a folder of a fixture."""
  config, tensors = checkpoints.config(name), checkpoints.tensors(name)
  count = config.get("num_hidden_layers", config.get("num_layers"))
  width = config["hidden_size"]
  draw = np.random.default_rng(seed)
  # A layer of the model that has the parts of this one, and its outer names.
  source, start, block = count - 1, f"model.layers.{count}.", ""
  outer = dict(embed="enorm", hidden="hnorm", join="eh_proj",
               norm="shared_head.norm")  # fmt: skip
  copies = True
  if name.startswith("qwen3"):
    attends = [k for k in tensors if k.endswith("self_attn.q_proj.weight")]
    source = int(attends[-1].split(".")[2])
    start, block = "mtp.", "layers.0."
    outer = dict(embed="pre_fc_norm_embedding", hidden="pre_fc_norm_hidden",
                 join="fc", norm="norm")  # fmt: skip
    copies = False
  renamed = lambda key: key
  if name == "longcat_flash":
    start, block, renamed = "model.mtp.", "layers.0.", _of_longcat
    outer = dict(embed="layers.0.enorm.m", hidden="layers.0.hnorm.m",
                 join="layers.0.eh_proj", norm="norm")  # fmt: skip
  if name == "mimo_v2_flash":
    start, copies = "model.mtp.layers.0.", False
    outer["norm"] = "final_layernorm"
    # With the feedforward of the first layer, which is dense.
    tensors = {
      key.replace("layers.0.mlp", f"layers.{source}.mlp"): x
      for key, x in tensors.items()
      if f"layers.{source}.mlp" not in key
    }
    renamed = lambda key: key.replace("post_attention_l", "pre_mlp_l")
  if name == "hy_v3":
    outer["norm"], copies = "final_layernorm", False
  if name.startswith("ernie"):
    start, block, source, copies = "model.", "mtp_block.0.", 0, False
    outer = dict(embed="mtp_emb_norm.0", hidden="mtp_hidden_norm.0",
                 join="mtp_linear_proj.0")  # fmt: skip
  made = {}

  def weight(name, shape, scale):
    base = 0.0 if "norm" not in name or checkpoints_are_one_plus else 1.0
    made[name] = (base + scale * draw.normal(size=shape)).astype(np.float32)

  checkpoints_are_one_plus = name.startswith("qwen3")
  path = f"model.layers.{source}."
  for key, x in tensors.items():
    if key.startswith(path) and (end := renamed(key.removeprefix(path))):
      scale = 0.1 if x.ndim == 1 else 1.5 / x.shape[-1] ** 0.5
      weight(start + block + end, x.shape, scale)
  for part, inner in outer.items():
    shape = (width, 2 * width) if part == "join" else (width,)
    scale = 1.0 / (2 * width) ** 0.5 if part == "join" else 0.1
    weight(f"{start}{inner}.weight", shape, scale)
  if copies:
    made[f"{start}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
  if copies and name != "longcat_flash":
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    made[f"{start}shared_head.head.weight"] = head
  return made


def settings(name):
  """config.json of a fixture with the layer."""
  config = checkpoints.config(name)
  key = "num_nextn_predict_layers"
  if name.startswith("qwen3_5"):
    key = "mtp_num_hidden_layers"
  keyless = "qwen3_next", "longcat_flash", "mimo_v2_flash"
  return config if name in keyless else config | {key: 1}


def write(name, folder, **more):
  """Writes a fixture with the layer as a folder; returns the folder."""
  tensors = checkpoints.tensors(name) | layer_tensors(name) | more
  return checkpoints.write_folder(tensors, settings(name), folder, shards=2)


@functools.cache
def model(name="glm4_moe", seed=1):
  """A random model with the layer, of so few tokens that drafts are right."""
  config = checkpoints.config(name) | {"vocab_size": 7}
  config |= {"initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2}
  return rj.models.create(config, seed=seed, predict_layers=True)


def prompts_of(model, lengths=(9, 23, 4)):
  draw = np.random.default_rng(0)
  return [draw.integers(0, model.config.vocab, n).astype(np.int32)
          for n in lengths]  # fmt: skip


def same(model, draft, count, lengths, **how):
  """The report of a call whose tokens are those of one without drafts."""
  prompts, reports = prompts_of(model, lengths), []
  want = rj.infer.generate(model, prompts, max_new_tokens=count, **how)
  got = rj.infer.generate(
    model, prompts, max_new_tokens=count, speculate=draft,
    report=reports.append, **how,
  )  # fmt: skip
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.lengths, want.lengths)
  return reports[0].speculation
