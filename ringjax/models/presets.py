"""Shapes of real models, as their config.json has them; no weights."""

from __future__ import annotations

import copy
from typing import Any

from ringjax.errors import OptionError

_LLAMA3_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 500000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


def _llama(
  layers: int, embed: int, hidden: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
  return {
    "model_type": "llama",
    "num_hidden_layers": layers,
    "hidden_size": embed,
    "intermediate_size": hidden,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "rms_norm_eps": 1e-5,
    **more,
  }


_LLAMA31 = dict(
  vocab_size=128256,
  max_position_embeddings=131072,
  rope_parameters=_LLAMA3_ROPE,
)

PRESETS: dict[str, dict[str, Any]] = {
  "llama-2-7b": _llama(
    32, 4096, 11008, 32, 32, vocab_size=32000, max_position_embeddings=4096
  ),
  "llama-3.2-1b": _llama(
    16,
    2048,
    8192,
    32,
    8,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_parameters={**_LLAMA3_ROPE, "factor": 32.0},
    head_dim=64,
    tie_word_embeddings=True,
  ),
  "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, **_LLAMA31),
  "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8, **_LLAMA31),
  "lwm-7b-1m": _llama(
    32,
    4096,
    11008,
    32,
    32,
    vocab_size=32000,
    max_position_embeddings=1048576,
    rope_theta=50000000.0,
  ),
  "llama-100m": _llama(
    12,
    768,
    2048,
    12,
    4,
    vocab_size=32000,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    tie_word_embeddings=True,
  ),
  "mistral-7b": {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
  },
  "qwen2.5-7b-1m": {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 152064,
    "max_position_embeddings": 1010000,
    "rope_theta": 10000000.0,
    "dual_chunk_attention_config": {
      "chunk_size": 262144,
      "local_size": 8192,
      "original_max_position_embeddings": 262144,
    },
  },
  "qwen3-8b": {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
  },
  "gemma-3-27b": {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "rope_parameters": {
      "full_attention": {
        "rope_type": "linear",
        "factor": 8.0,
        "rope_theta": 1000000.0,
      },
      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
  },
  "falcon-7b": {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
  },
  "gpt-oss-20b": {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 150000.0,
      "factor": 32.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "truncate": False,
      "original_max_position_embeddings": 4096,
    },
  },
  "deepseek-v3": {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 10000.0,
      "factor": 40.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "mscale": 1.0,
      "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096,
    },
  },
}


def preset(name: str) -> dict[str, Any]:
  """The config of a preset, to change and to pass on."""
  if name not in PRESETS:
    raise OptionError(
      "config",
      repr(name),
      f"one of {', '.join(sorted(PRESETS))}",
      "or pass a dict as in config.json",
    )
  return copy.deepcopy(PRESETS[name])
