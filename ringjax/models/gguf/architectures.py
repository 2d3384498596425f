"""What GGUF's metadata and names are in a Hugging Face folder.

Guarantees: the config and the tensors of each architecture in `ARCHITECTURES`;
another one, and a rope scaling that is not known, is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float

from ringjax.data.gguf_file import GgufFiles
from ringjax.errors import ConfigError
from ringjax.models.hf.safe_files import shown

# The name behind a layer's prefix, by GGUF's behind "blk.N.".
_LLAMA = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_GEMMA = _LLAMA | {
  "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTURE = _LLAMA | {
  "ffn_gate_inp": "mlp.gate",
  "ffn_gate_exps": "mlp.experts.{}.gate_proj",
  "ffn_up_exps": "mlp.experts.{}.up_proj",
  "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_PHI3 = _LLAMA | {
  "attn_qkv": "self_attn.qkv_proj",
  "ffn_up": "mlp.gate_up_proj",
}
_STARCODER2 = _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_OUTER = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
}
# Not tensors of the model: they are in its config.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight",
            "rope_factors_short.weight")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """One architecture.

  Attributes:
    type: the model_type.
    names: of a layer's tensors, without ".weight".
    fixed: what the config says of all models of it.
    keys: further keys of the config, by those of the metadata.
    norm_eps: the config's name of the norms' epsilon.
    permuted: whether rows of queries and keys are in the order of pairs.
    norm_one: whether norms are stored with one added.
  """

  type: str
  names: Mapping[str, str]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  norm_eps: str = "rms_norm_eps"
  permuted: bool = False
  norm_one: bool = False


_GEMMA_KEYS = {
  "attention.key_length": "head_dim",
  "attention.sliding_window": "sliding_window",
}
ARCHITECTURES = {
  "llama": Architecture(type="llama", names=_LLAMA, permuted=True),
  "qwen2": Architecture(type="qwen2", names=_LLAMA),
  "qwen3": Architecture(
    type="qwen3", names=_LLAMA, keys={"attention.key_length": "head_dim"}
  ),
  "qwen3moe": Architecture(
    type="qwen3_moe",
    names=_MIXTURE,
    fixed={"norm_topk_prob": True, "decoder_sparse_step": 1,
           "mlp_only_layers": []},
    keys={
      "attention.key_length": "head_dim",
      "expert_count": "num_experts",
      "expert_used_count": "num_experts_per_tok",
      "expert_feed_forward_length": "moe_intermediate_size",
    },
  ),
  "gemma2": Architecture(
    type="gemma2",
    names=_GEMMA,
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    keys=_GEMMA_KEYS | {
      "attn_logit_softcapping": "attn_logit_softcapping",
      "final_logit_softcapping": "final_logit_softcapping",
    },
    norm_one=True,
  ),
  "gemma3": Architecture(
    type="gemma3_text",
    names=_GEMMA,
    fixed={
      "hidden_activation": "gelu_pytorch_tanh",
      "sliding_window_pattern": 6,
      "rope_local_base_freq": 10_000.0,
    },
    keys=_GEMMA_KEYS,
    norm_one=True,
  ),
  "phi3": Architecture(type="phi3", names=_PHI3),
  "starcoder2": Architecture(
    type="starcoder2",
    names=_STARCODER2,
    fixed={"use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    norm_eps="norm_epsilon",
  ),
}  # fmt: skip
# Layers of the two Gemmas of 27B, whose scores have a scale of their own.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_KEYS = {
  "context_length": "max_position_embeddings",
  "block_count": "num_hidden_layers",
  "feed_forward_length": "intermediate_size",
  "embedding_length": "hidden_size",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
}
_IDS = {
  "bos_token_id": "bos_token_id",
  "eos_token_id": "eos_token_id",
  "padding_token_id": "pad_token_id",
}


def _refuse(key: str, got: object, want: str) -> NoReturn:
  raise ConfigError(
    f"GGUF: {key}", shown(got), want, "convert the model's original weights"
  )


def architecture(metadata: Mapping[str, Any]) -> Architecture:
  """The architecture of a file.

  Raises:
    ConfigError: one that is not known.
  """
  name = metadata.get("general.architecture")
  if not isinstance(name, str) or name not in ARCHITECTURES:
    _refuse("general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
  return ARCHITECTURES[name]


def config_of(files: GgufFiles) -> dict[str, Any]:
  """The config.json of a model.

  Raises:
    ConfigError: a key that is missing or of a value that is not known.
  """
  metadata = files.metadata
  arch = architecture(metadata)
  prefix = metadata["general.architecture"]
  said = {
    key.removeprefix(f"{prefix}."): x
    for key, x in metadata.items()
    if key.startswith(f"{prefix}.")
  }
  said.setdefault("attention.head_count_kv", said.get("attention.head_count"))
  config: dict[str, Any] = {"model_type": arch.type, **arch.fixed}
  for key, name in {**_KEYS, **arch.keys}.items():
    if said.get(key) is not None:
      config[name] = said[key]
    elif key in _KEYS:
      _refuse(f"{prefix}.{key}", "no such key", "it")
  for name in _KEYS.values():
    if type(config[name]) is not int or config[name] < 1:
      _refuse(name, config[name], "one positive number for all layers")
  ending = "rms_epsilon" if arch.norm_eps == "rms_norm_eps" else "epsilon"
  epsilon = f"attention.layer_norm_{ending}"
  if epsilon not in said:
    _refuse(f"{prefix}.{epsilon}", "no such key", "it")
  config[arch.norm_eps] = said[epsilon]
  embedding = files.tensors.get("token_embd.weight")
  if embedding is None:
    _refuse("token_embd.weight", "no such tensor", "an embedding")
  config["vocab_size"] = embedding.shape[0]
  config["tie_word_embeddings"] = "output.weight" not in files.tensors
  config["rope_theta"] = said.get("rope.freq_base", 10_000.0)
  if arch.type == "llama":
    _llama_config(files, config, said)
  if arch.norm_one:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    config.setdefault("head_dim", 256)
    wide = _SCALED_BY_WIDTH[prefix] == config["num_hidden_layers"]
    config["query_pre_attn_scalar"] = (
      width // heads if wide else config["head_dim"]
    )
  _rope(files, config, said)
  for key, name in _IDS.items():
    if (token := metadata.get(f"tokenizer.ggml.{key}")) is not None:
      config[name] = token
  kinds = {0: "float32", 1: "float16"}
  largest = max(files.tensors.values(), key=lambda t: t.nbytes)
  config["dtype"] = kinds.get(largest.type, "bfloat16")
  return config


def _llama_config(
  files: GgufFiles, config: dict[str, Any], said: Mapping[str, Any]
) -> None:
  if said.get("expert_count", 0):
    _refuse("llama.expert_count", said["expert_count"], "no experts")
  width, heads = config["hidden_size"], config["num_attention_heads"]
  config["head_dim"] = said.get("attention.key_length", width // heads)
  if said.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
    _refuse("llama.rope.dimension_count", said["rope.dimension_count"],
            f"all {config['head_dim']} of a head")  # fmt: skip
  config["attention_bias"] = "blk.0.attn_q.bias" in files.tensors


def _rope(
  files: GgufFiles, config: dict[str, Any], said: Mapping[str, Any]
) -> None:
  """The scaling of the rotation, by metadata or by tensors of factors."""
  kind = said.get("rope.scaling.type", "none")
  factor = said.get("rope.scaling.factor", said.get("rope.scale_linear"))
  length = said.get("rope.scaling.original_context_length")
  if "rope_freqs.weight" in files.tensors:
    config["rope_scaling"] = _llama3(files.floats("rope_freqs.weight"))
  elif "rope_factors_long.weight" in files.tensors:
    config["rope_scaling"] = {"type": "longrope"} | {
      f"{x}_factor": files.floats(f"rope_factors_{x}.weight").tolist()
      for x in ("long", "short")
    }
    if length is not None:
      config["original_max_position_embeddings"] = length
  elif kind == "linear" or (kind == "none" and factor not in (None, 0, 1)):
    config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
  elif kind == "yarn":
    scaling = {
      "rope_type": "yarn", "factor": factor,
      "original_max_position_embeddings": length,
    }  # fmt: skip
    for key in ("beta_fast", "beta_slow"):
      if (x := said.get(f"rope.scaling.yarn_{key}")) is not None:
        scaling[key] = x
    config["rope_scaling"] = {k: v for k, v in scaling.items() if v is not None}
  elif kind != "none":
    _refuse("rope.scaling.type", kind, "none, linear, yarn, or factors")


def _llama3(factors: Float[np.ndarray, " H"]) -> dict[str, Any]:
  """The scaling of Llama 3 that these factors come from.

  A file has the factors alone; the limits are those of all models so far.
  """
  return {
    "rope_type": "llama3", "factor": float(factors.max()),
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }  # fmt: skip


def check_factors(files: GgufFiles, config: Mapping[str, Any]) -> None:
  """Refuses factors that the config's scaling would not make again."""
  if "rope_freqs.weight" not in files.tensors:
    return
  factors = files.floats("rope_freqs.weight").astype(np.float64)
  scaling, half = config["rope_scaling"], factors.size
  length = scaling["original_max_position_embeddings"]
  waves = 2 * np.pi * float(config["rope_theta"]) ** (np.arange(half) / half)
  low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
  part = np.clip((length / waves - low) / (high - low), 0, 1)
  want = 1 / ((1 - part) / scaling["factor"] + part)
  if half * 2 != config["head_dim"] or not np.allclose(want, factors, 1e-3):
    _refuse("rope_freqs.weight", "factors of another scaling",
            "those of Llama 3: 1 and 4 at 8,192 tokens")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source:
  """Where the numbers of a tensor with a Hugging Face name come from.

  Attributes:
    name: of the tensor in the file.
    shape: of what is made of it.
    expert: its number in the first axis, or None.
    pairs: heads whose rows are in the order of pairs, or 0.
    less: what is taken away from each number.
  """

  name: str
  shape: tuple[int, ...]
  expert: int | None = None
  pairs: int = 0
  less: float = 0.0

  def floats(self, files: GgufFiles) -> Float[np.ndarray, ...]:
    """The numbers, float32."""
    x = files.floats(self.name, self.expert)
    if self.pairs:
      rows = x.reshape(self.pairs, -1, 2, *x.shape[1:])
      x = rows.swapaxes(1, 2).reshape(x.shape)
    return x - np.float32(self.less) if self.less else x


_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def sources_of(
  files: GgufFiles, config: Mapping[str, Any]
) -> dict[str, Source]:
  """All tensors of a model by their Hugging Face names.

  A name that is not known stays, so that it is refused as any other one.
  """
  arch = architecture(files.metadata)
  sources: dict[str, Source] = {}
  heads = {
    "attn_q": config["num_attention_heads"],
    "attn_k": config["num_key_value_heads"],
  }
  for name, tensor in files.tensors.items():
    if name in _FACTORS:
      continue
    part, _, leaf = name.rpartition(".")
    new, pairs = name, 0
    if match := _LAYER.fullmatch(name):
      part = match[2]
      if part in arch.names:
        new = f"model.layers.{match[1]}.{arch.names[part]}.{leaf}"
      pairs = heads.get(part, 0) if arch.permuted else 0
    elif part in _OUTER:
      new = f"{_OUTER[part]}.{leaf}"
    less = 1.0 if arch.norm_one and part.endswith("norm") else 0.0
    if pairs and tensor.shape[0] % (2 * pairs):
      _refuse(name, list(tensor.shape), f"rows of {pairs} heads")
    if "{}" in new:
      for expert in range(tensor.shape[0]):
        sources[new.format(expert)] = Source(name, tensor.shape[1:], expert)
    else:
      sources[new] = Source(name, tensor.shape, None, pairs, less)
  return sources
