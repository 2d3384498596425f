"""EAGLE-3 heads of tiny targets: their folders, and their published forward.

The forward is that of `LlamaForCausalLMEagle3` in SpecForge and SGLang, in
float64, over a whole text.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.kv.base import NoCache
from ringjax.models.first_layers import first_layers
from ringjax.models.transformer import tokens_of
from ringjax.nn.sharding_context import ContextParallel
from tests import checkpoints

# Layers of the target whose outputs a head reads.
OUTPUTS = (0, 2, 3)
# Ids of the draft vocabulary, of a target with more of them.
IDS = np.array([0, 1, 2, 3, 5, 6, 8, 11, 12, 13])


@functools.cache
def target(vocab=14, layers=5, family="llama3", seed=1):
  """A model of so few tokens that drafts are right by chance."""
  config = checkpoints.config(family) | {
    "vocab_size": vocab, "num_hidden_layers": layers,
    "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
  }  # fmt: skip
  for key in ("layer_types",):
    if key in config:
      config[key] = (config[key] * layers)[:layers]
  return rj.models.create(config, seed=seed)


def settings(width=64, vocab=14, draft_vocab=10, **more):
  """config.json of a head."""
  return {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": width,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": vocab,
    "draft_vocab_size": draft_vocab,
    "eagle_config": {
      "use_aux_hidden_state": True,
      "eagle_aux_hidden_state_layer_ids": [*OUTPUTS],
    },
  } | more


def tensors(config, embed=64, ids=IDS, seed=3, start="midlayer."):
  """Random tensors of a head, by their published names."""
  draw, width = np.random.default_rng(seed), config["hidden_size"]
  made = {}

  def weight(name, out, into):
    x = draw.normal(size=(out, into)) * 1.5 / into**0.5
    made[f"{name}.weight"] = x.astype(np.float32)

  def norm(name, size):
    x = 1 + 0.2 * draw.normal(size=size)
    made[f"{name}.weight"] = x.astype(np.float32)

  heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
  dim, hidden = config["head_dim"], config["intermediate_size"]
  count = len(OUTPUTS)
  weight("fc", width, count * embed)
  for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
    weight(f"{start}self_attn.{part}_proj", n * dim, 2 * width)
  weight(f"{start}self_attn.o_proj", width, heads * dim)
  weight(f"{start}mlp.gate_proj", hidden, width)
  weight(f"{start}mlp.up_proj", hidden, width)
  weight(f"{start}mlp.down_proj", width, hidden)
  for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
    norm(f"{start}{part}", width)
  norm("norm", width)
  if config.get("fc_norm"):
    for n in range(count):
      norm(f"fc_norm.{n}", embed)
  weight("lm_head", config["draft_vocab_size"], width)
  if width != embed:
    weight("embed_tokens", config["vocab_size"], width)
  if ids is not None:
    made["d2t"] = ids - np.arange(len(ids))
    mask = np.zeros(config["vocab_size"], bool)
    mask[ids] = True
    made["t2d"] = mask
  return made


def write(folder, config=None, **more):
  """Writes a head's folder; returns its path."""
  config = settings() if config is None else config
  made = tensors(config) | more
  return checkpoints.write_folder(made, config, folder)


@functools.cache
def model(family="llama3"):
  """A target with a head, which drafts some right tokens."""
  base = target(family=family)
  width = base.config.embed
  config = settings(width=width)
  made = tensors(config, embed=width)
  folder = pathlib.Path(tempfile.mkdtemp(prefix="ringjax-head-")) / "head"
  checkpoints.write_folder(made, config, folder)
  return rj.models.eagle3.load(folder, base)


# ---------------------------------------------------------------------------
# The published forward
# ---------------------------------------------------------------------------


def streams(base, tokens, outputs=OUTPUTS):
  """Output of layers of a target for a text [T], float64 [T, n D]."""
  states = []
  for n in outputs:
    part = first_layers(base, n + 1)
    attend = ContextParallel(axis=None)
    ids = jnp.asarray(tokens, jnp.int32)[None]
    places = tokens_of(part, attend, ids.shape, None, None, None)
    x, _ = part.through_layers(ids, places, NoCache(len(part.kinds)), attend)
    states.append(np.asarray(x[0], np.float64))
  return np.concatenate(states, -1)


def rms_norm(x, weight, eps):
  return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def turned(x, pos, theta):
  """Rotation of halves, [T, N, H]."""
  half = x.shape[-1] // 2
  angle = pos[:, None] * theta ** (-np.arange(half) / half)
  cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(weights, config, embedded, hidden, pos, start="midlayer."):
  """Output of the layer for embeddings [T, D] and states [T, D]."""
  w = {k: np.asarray(x, np.float64) for k, x in weights.items()}
  eps = config["rms_norm_eps"]
  normed = lambda name, x: rms_norm(x, w[f"{name}.weight"], eps)
  mapped = lambda name, x: x @ w[f"{start}{name}.weight"].T
  f = normed(f"{start}hidden_norm", hidden)
  residual = f if config.get("norm_before_residual") else hidden
  x = np.concatenate([normed(f"{start}input_layernorm", embedded), f], -1)
  heads, dim = config["num_attention_heads"], config["head_dim"]
  split = lambda y: y.reshape(len(y), -1, dim)
  q, k, v = (split(mapped(f"self_attn.{p}_proj", x)) for p in "qkv")
  q, k = (turned(y, pos, config["rope_theta"]) for y in (q, k))
  k, v = (np.repeat(y, heads // y.shape[1], 1) for y in (k, v))
  scores = np.einsum("tnh,snh->nts", q, k) * dim**-0.5
  scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  out = np.einsum("nts,snh->tnh", p, v).reshape(len(x), -1)
  x = residual + mapped("self_attn.o_proj", out)
  y = normed(f"{start}post_attention_layernorm", x)
  gate = mapped("mlp.gate_proj", y)
  y = gate / (1 + np.exp(-gate)) * mapped("mlp.up_proj", y)
  return x + mapped("mlp.down_proj", y)


def fused(weights, config, states):
  """The map f of the states of several layers, [T, n D]."""
  w = {k: np.asarray(x, np.float64) for k, x in weights.items()}
  if config.get("fc_norm"):
    parts = np.split(states, len(OUTPUTS), -1)
    states = np.concatenate([
      rms_norm(x, w[f"fc_norm.{n}.weight"], config["rms_norm_eps"])
      for n, x in enumerate(parts)
    ], -1)  # fmt: skip
  return states @ w["fc.weight"].T


def logits(weights, config, g):
  """Logits of the draft vocabulary for outputs of the layer."""
  w = {k: np.asarray(x, np.float64) for k, x in weights.items()}
  normed = rms_norm(g, w["norm.weight"], config["rms_norm_eps"])
  return normed @ w["lm_head.weight"].T


def drafts(base, weights, config, text, count):
  """Ids that a head drafts after a text, and the logits of each."""
  own = weights.get("embed_tokens.weight")
  table = np.asarray(
    base.embed.weight.get_value() if own is None else own, np.float64
  )
  states = fused(weights, config, streams(base, text))[: len(text) - 1]
  ids, drafted, each = list(text), [], []
  offsets = weights.get("d2t", np.zeros(config["draft_vocab_size"], int))
  for _ in range(count):
    embedded = table[np.asarray(ids[1:])]
    # A position is that of the token of the state.
    pos = np.arange(len(embedded), dtype=np.float64)
    g = layer(weights, config, embedded, states, pos)
    each.append(logits(weights, config, g)[-1])
    best = int(each[-1].argmax())
    drafted.append(best + int(offsets[best]))
    handed = g[-1:]
    if config.get("norm_output"):
      handed = rms_norm(
        handed, np.asarray(weights["norm.weight"], np.float64),
        config["rms_norm_eps"],
      )  # fmt: skip
    states = np.concatenate([states, handed])
    ids.append(drafted[-1])
  return drafted, each
