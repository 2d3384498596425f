"""Layers that predict one token further: read, computed as published, saved."""

from __future__ import annotations

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.kv.base import NoCache
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import tokens_of
from ringjax.nn.sharding_context import ContextParallel
from tests import checkpoints, predicting
from tests.helpers import refused
from tests.models.test_checkpoint import same_bits, stored

OTHERS = [x for x in predicting.FAMILIES if x != "glm4_moe"]


def config_of(folder):
  return json.loads((folder / "config.json").read_text())


def tokens_for(model, seed=0):
  draw = np.random.default_rng(seed)
  return draw.integers(0, model.config.vocab, (2, 13)).astype(np.int32)


def hidden_of(model, tokens):
  """The model's output after its last norm, float64 [B, T, D]."""
  attend, tokens = ContextParallel(axis=None), jnp.asarray(tokens)
  places = tokens_of(model, attend, tokens.shape, None, None, None)
  h, _ = model.hidden(tokens, places, NoCache(len(model.kinds)), attend)
  return np.asarray(h, np.float64)


# ---------------------------------------------------------------------------
# The published forward pass in float64
# ---------------------------------------------------------------------------


def rms(x, weight, eps=1e-3, offset=0.0):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (weight + offset)


def joined(name, made, embedding, tokens, hidden):
  """Input of the layer for the pairs (h of t - 1, token at t), t >= 1."""
  offset = float(name.startswith("qwen3"))
  pick = lambda *ends: next(
    np.asarray(x, np.float64) for k, x in made.items() if k.endswith(ends)
  )
  e = rms(embedding[tokens[1:]], pick("enorm.weight", "_embedding.weight",
          "emb_norm.0.weight", "enorm.m.weight"), offset=offset)  # fmt: skip
  h = rms(hidden[:-1], pick("hnorm.weight", "_hidden.weight",
          "hidden_norm.0.weight", "hnorm.m.weight"), offset=offset)  # fmt: skip
  y = np.concatenate([e, h], -1)
  return y @ pick("eh_proj.weight", "mtp.fc.weight", "proj.0.weight").T


def glm_layer(y, w, c):
  """GLM-4.5's layer for one text y [T, D], with its names in w."""
  heads, kv, dim = (c[k] for k in ("num_attention_heads",
                    "num_key_value_heads", "head_dim"))  # fmt: skip
  length, half = len(y), dim // 4
  x = rms(y, w["input_layernorm.weight"])
  maps = {
    p: (x @ w[f"self_attn.{p}_proj.weight"].T + w[f"self_attn.{p}_proj.bias"])
    .reshape(length, -1, dim)
    for p in "qkv"
  }  # fmt: skip
  angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(half) / half)
  cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
  for p in "qk":
    z = rms(maps[p], w[f"self_attn.{p}_norm.weight"])
    a, b, rest = z[..., :half], z[..., half : 2 * half], z[..., 2 * half :]
    maps[p] = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
  k, v = (np.repeat(maps[p], heads // kv, 1) for p in "kv")
  scores = np.einsum("tnh,snh->nts", maps["q"], k) / dim**0.5
  scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  out = np.einsum("nts,snh->tnh", weights, v).reshape(length, -1)
  y = y + out @ w["self_attn.o_proj.weight"].T
  x = rms(y, w["post_attention_layernorm.weight"])

  def feed(path, x):
    gate = x @ w[f"{path}.gate_proj.weight"].T
    up = x @ w[f"{path}.up_proj.weight"].T
    down = w[f"{path}.down_proj.weight"].T
    return gate / (1 + np.exp(-gate)) * up @ down

  score = 1 / (1 + np.exp(-x @ w["mlp.gate.weight"].T))
  judged = score + w["mlp.gate.e_score_correction_bias"]
  routed = np.zeros_like(y)
  for t in range(length):
    groups = np.sort(judged[t].reshape(c["n_group"], -1), -1)[:, -2:].sum(-1)
    best = np.argsort(-groups)[: c["topk_group"]]
    inside = np.isin(np.arange(judged.shape[1]) // (judged.shape[1]
                     // c["n_group"]), best)  # fmt: skip
    chosen = np.argsort(-np.where(inside, judged[t], -np.inf))
    chosen = chosen[: c["num_experts_per_tok"]]
    share = score[t, chosen] / score[t, chosen].sum()
    for n, part in zip(chosen, share, strict=True):
      expert = feed(f"mlp.experts.{n}", x[t])
      routed[t] += c["routed_scaling_factor"] * part * expert
  return y + routed + feed("mlp.shared_experts", x)


@pytest.mark.slow
def test_glm_as_published(tmp_path):
  """And in a text whose tokens are in two documents."""
  folder = predicting.write("glm4_moe", tmp_path / "a")
  model = rj.models.load(folder, predict_layers=True)
  tokens, made = tokens_for(model), predicting.layer_tensors("glm4_moe")
  base = checkpoints.tensors("glm4_moe")
  layer = {
    k.removeprefix("model.layers.3."): np.asarray(x, np.float64)
    for k, x in made.items()
  }
  embedding = np.asarray(base["model.embed_tokens.weight"], np.float64)
  got, hidden = model.predicted_logits(tokens), hidden_of(model, tokens)
  parts = model.predicted_logits(
    tokens, segment_ids=np.where(np.arange(13) < 6, 1, 2),
    positions=np.where(np.arange(13) < 6, np.arange(13), np.arange(13) - 6),
  )  # fmt: skip
  head = np.asarray(base["lm_head.weight"], np.float64)

  def want(text, h):
    y = joined("glm4_moe", made, embedding, text, h)
    g = glm_layer(y, layer, predicting.settings("glm4_moe"))
    return rms(g, layer["shared_head.norm.weight"]) @ head.T

  for row, text in enumerate(tokens):
    expected = want(text, hidden[row])
    np.testing.assert_allclose(got[row, 1:], expected, atol=2e-4)
    first = want(text[:6], hidden[row][:6])
    np.testing.assert_allclose(parts[row, 1:6], first, atol=2e-4)
  second = want(tokens[0, 6:], hidden_of(model, tokens[:1, 6:])[0])
  np.testing.assert_allclose(parts[0, 7:], second, atol=2e-4)


# ---------------------------------------------------------------------------
# Other families, and folders
# ---------------------------------------------------------------------------


def as_a_model(name, made, y, folder):
  """A model of one layer, that of `made`, whose embeddings are y [T, D]."""
  base, config = checkpoints.tensors(name), predicting.settings(name)
  last = f"model.layers.{config.get('num_hidden_layers')}."
  starts = {
    "qwen": "mtp.layers.0.", "erni": "model.mtp_block.0.",
    "long": "model.mtp.layers.0.", "mimo": "model.mtp.layers.0.",
  }  # fmt: skip
  start = starts.get(name[:4], last)
  outer = ("enorm.", "hnorm.", "eh_proj.", "shared_head", "embed_tokens",
           "final_layernorm")  # fmt: skip
  tensors = {
    "model.layers.0." + k.removeprefix(start): x
    for k, x in made.items()
    if k.startswith(start) and not any(part in k for part in outer)
  }
  rows = np.zeros_like(base["model.embed_tokens.weight"])
  rows[: len(y)] = y
  norm = next(
    (x for k, x in made.items()
     if k.endswith(("shared_head.norm.weight", "mtp.norm.weight",
                    "final_layernorm.weight"))),
    base["model.norm.weight"],
  )  # fmt: skip
  head = base.get("lm_head.weight", base["model.embed_tokens.weight"])
  tensors |= {"model.embed_tokens.weight": rows, "model.norm.weight": norm,
              "lm_head.weight": head}  # fmt: skip
  keys = dict(num_hidden_layers=1, tie_word_embeddings=False,
              num_nextn_predict_layers=0, first_k_dense_replace=0)  # fmt: skip
  if name.startswith("qwen3"):
    keys = dict(num_hidden_layers=1, layer_types=["full_attention"])
  if name.startswith("erni"):
    keys["moe_layer_end_index"] = 1
    del keys["first_k_dense_replace"]
  if "mlp_layer_types" in config:
    keys["mlp_layer_types"] = ["sparse"]
    del keys["first_k_dense_replace"]
  if name == "mimo_v2_flash":
    tensors = {k.replace("pre_mlp_l", "post_attention_l"): x
               for k, x in tensors.items()}  # fmt: skip
    keys |= dict(mlp_layer_types=["dense"], layer_types=["sliding_attention"])
    del keys["num_nextn_predict_layers"]
  if name == "longcat_flash":
    # A DeepSeek-V3, with the factors of latents in the weights of their norms.
    tensors = {k.replace("transformer_layer.", ""): x
               for k, x in tensors.items()}  # fmt: skip
    for part, size in (("q", "q_lora_rank"), ("kv", "kv_lora_rank")):
      key = f"model.layers.0.self_attn.{part}_a_layernorm.weight"
      factor = (config["hidden_size"] / config[size]) ** 0.5
      tensors[key] = (tensors[key] * factor).astype(np.float32)
    config = checkpoints.config("deepseek_v3") | {
      key: x for key, x in config.items()
      if key.endswith(("_dim", "_rank", "_size", "_heads", "_parameters"))
      and "ffn" not in key
    } | {"intermediate_size": config["ffn_hidden_size"],
         "rms_norm_eps": config["rms_norm_eps"]}  # fmt: skip
    keys["first_k_dense_replace"] = 1
  checkpoints.write_folder(tensors, config | keys, folder)
  return rj.models.load(folder)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_families_as_a_model_of_that_layer(name, tmp_path):
  """Such models are compared with transformers in `test_families.py`."""
  folder = predicting.write(name, tmp_path / "a")
  model = rj.models.load(folder, predict_layers=True)
  plain = rj.models.load(folder)
  tokens, made = tokens_for(model)[:1], predicting.layer_tensors(name)
  np.testing.assert_array_equal(model(tokens), plain(tokens))
  embedding = checkpoints.tensors(name)["model.embed_tokens.weight"]
  hidden = hidden_of(model, tokens)[0]
  y = joined(name, made, embedding.astype(np.float64), tokens[0], hidden)
  one = as_a_model(name, made, y.astype(np.float32), tmp_path / "one")
  want = one(np.arange(len(y), dtype=np.int32)[None])
  got = model.predicted_logits(tokens)
  np.testing.assert_allclose(got[:, 1:], want, atol=2e-4)
  rj.models.save(model, tmp_path / "b")
  same_bits(stored(tmp_path / "b"), stored(folder))
  assert config_of(tmp_path / "b") == config_of(folder)


def test_saved_as_it_was_loaded(tmp_path, recwarn):
  folder = predicting.write("glm4_moe", tmp_path / "a")
  model = rj.models.load(folder, predict_layers=True)
  rj.models.save(model, tmp_path / "b")
  same_bits(stored(tmp_path / "b"), stored(folder))
  assert config_of(tmp_path / "b") == config_of(folder)
  assert not [w for w in recwarn if "left out" in str(w.message)]
  # Other weights: of the layer, and of the embedding and its copy.
  weights = parameters(model)
  for path in ("norm.weight", "embed.weight"):
    weight = weights[path]
    weight.set_value(weight.get_value().at[0].add(1))
  rj.models.save(model, tmp_path / "c")
  assert config_of(tmp_path / "c") == config_of(folder)
  got = stored(tmp_path / "c")
  assert got.keys() == stored(folder).keys()
  names = "model.embed_tokens.weight", "model.layers.3.embed_tokens.weight"
  np.testing.assert_array_equal(got[names[0]], got[names[1]])
  rj.models.load(tmp_path / "c", predict_layers=True)


@pytest.mark.long
def test_coded_layers(tmp_path):
  """Codes become floats in the layer as in others, and are saved as such."""
  name = "model.layers.3.self_attn.o_proj.weight"
  weight = predicting.layer_tensors("glm4_moe")[name]
  codes = weight.astype(ml_dtypes.float8_e4m3fn)
  how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
  tensors = checkpoints.tensors("glm4_moe") | predicting.layer_tensors(
    "glm4_moe"
  )
  tensors |= {name: codes, f"{name}_scale_inv": np.ones((1, 1), "f4")}
  settings = predicting.settings("glm4_moe") | {"quantization_config": how}
  folder = checkpoints.write_folder(tensors, settings, tmp_path / "a")
  model = rj.models.load(folder, predict_layers=True)
  rj.models.save(model, tmp_path / "b")
  got = stored(tmp_path / "b")
  np.testing.assert_array_equal(got[name], codes.astype(np.float32))
  assert config_of(tmp_path / "b")["num_nextn_predict_layers"] == 1


def test_refusals(tmp_path):
  load = lambda folder: rj.models.load(folder, predict_layers=True)
  plain = checkpoints.write("glm4_moe", tmp_path / "a")
  refused(OptionError, lambda: load(plain), "eh_proj", "leave predict_layers")
  other = checkpoints.write("gpt2", tmp_path / "b")
  refused(OptionError, lambda: load(other), "gpt2", "deepseek_v3")
  head = {"model.layers.3.shared_head.head.weight": np.ones((101, 48), "f4")}
  folder = predicting.write("glm4_moe", tmp_path / "c", **head)
  refused(CheckpointMismatchError, lambda: load(folder), "shared_head.head")
  model = rj.models.load(folder)
  call = lambda: model.predicted_logits(tokens_for(model))
  refused(OptionError, call, "predict_layers=True")
