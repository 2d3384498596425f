"""Configs and tensor names of a Hugging Face folder, from GGUF's metadata.

Guarantees: the config and the names of each architecture in `ARCHITECTURES`;
another architecture, or an unknown rope scaling, is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float

from ringjax.data.gguf.gguf_file import GgufFiles
from ringjax.errors import ConfigError
from ringjax.models.hf.safe_files import shown
from ringjax.models.hf.unknown_keys import GGUF_KEYS
from ringjax.ops.rope import yarn_magnitude

# Names after a layer's prefix, by GGUF's names after "blk.N.".
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
_GEMMA4 = _GEMMA | {
  "ffn_gate_inp": "router.proj",
  "ffn_gate_inp.scale": "router.scale",
  "ffn_gate_up_exps.weight": "experts.gate_up_proj",
  "ffn_down_exps.weight": "experts.down_proj",
  "ffn_down_exps.scale": "router.per_expert_scale",
  "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
  "post_ffw_norm_1": "post_feedforward_layernorm_1",
  "post_ffw_norm_2": "post_feedforward_layernorm_2",
  "inp_gate": "per_layer_input_gate",
  "proj": "per_layer_projection",
  "post_norm": "post_per_layer_input_norm",
  "layer_output_scale.weight": "layer_scalar",
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
_SHARED = _MIXTURE | {
  "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
  "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
  "ffn_up_shexp": "mlp.shared_expert.up_proj",
  "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SPARSE = _LLAMA | {
  "ffn_gate_inp": "block_sparse_moe.gate",
  "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
  "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
  "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
  "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_GPT_OSS = _LLAMA | {
  "attn_sinks.weight": "self_attn.sinks",
  "post_attention_norm": "post_attention_layernorm",
  "ffn_gate_inp": "mlp.router",
  "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
  "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
  "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
  "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
  "ffn_down_exps.weight": "mlp.experts.down_proj",
  "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_LFM2 = {
  "attn_norm": "operator_norm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.out_proj",
  "attn_q_norm": "self_attn.q_layernorm",
  "attn_k_norm": "self_attn.k_layernorm",
  "shortconv.conv": "conv.conv",
  "shortconv.in_proj": "conv.in_proj",
  "shortconv.out_proj": "conv.out_proj",
  "ffn_norm": "ffn_norm",
  "ffn_gate": "feed_forward.w1",
  "ffn_up": "feed_forward.w3",
  "ffn_down": "feed_forward.w2",
}
_STABLELM = _LLAMA | {
  "attn_q_norm": "self_attn.q_layernorm.norms.{}",
  "attn_k_norm": "self_attn.k_layernorm.norms.{}",
}
_GPT2 = {
  "attn_norm": "ln_1",
  "attn_qkv": "attn.c_attn",
  "attn_output": "attn.c_proj",
  "ffn_norm": "ln_2",
  "ffn_up": "mlp.c_fc",
  "ffn_down": "mlp.c_proj",
}
_BLOOM = {
  "attn_norm": "input_layernorm",
  "attn_qkv": "self_attention.query_key_value",
  "attn_output": "self_attention.dense",
  "ffn_norm": "post_attention_layernorm",
  "ffn_up": "mlp.dense_h_to_4h",
  "ffn_down": "mlp.dense_4h_to_h",
}
_MAMBA = {
  "attn_norm": "norm",
  "ssm_in": "mixer.in_proj",
  "ssm_conv1d": "mixer.conv1d",
  "ssm_x": "mixer.x_proj",
  "ssm_dt": "mixer.dt_proj",
  "ssm_a": "mixer.A_log",
  "ssm_d": "mixer.D",
  "ssm_out": "mixer.out_proj",
}
_STARCODER2 = _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_OUTER = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
}
_OLD_OUTER = {
  "token_embd": "transformer.word_embeddings",
  "token_embd_norm": "transformer.word_embeddings_layernorm",
  "output_norm": "transformer.ln_f",
  "output": "lm_head",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """A model architecture of GGUF files.

  Attributes:
    type: The model_type of the config.
    names: Names of a layer's tensors, without ".weight"; one with it is
      complete.
    layer: Prefix of a layer's names.
    outer: Names of the tensors outside of layers.
    fixed: Entries of the config that all of its models share.
    keys: Keys of the config, by those of the metadata, where they differ from
      `_KEYS` or are additional; "" for one that the config lacks, None for
      one that is not read.
    norm_eps: Key of the norms' epsilon in the config.
    rotates: Whether the config has a rotary embedding.
    permuted: Whether rows of queries and keys are in the order of pairs.
    norm_one: Whether norms are stored with one added.
    split_qkv: Whether all queries, then all keys, then all values are stored,
      which the model has by groups of heads.
    turned: Parts whose maps are [in, out] in a folder.
  """

  type: str
  names: Mapping[str, str]
  layer: str = "model.layers.{}."
  outer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _OUTER)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  keys: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
  norm_eps: str = "rms_norm_eps"
  rotates: bool = True
  permuted: bool = False
  norm_one: bool = False
  split_qkv: bool = False
  turned: tuple[str, ...] = ()


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
  "gemma4": Architecture(
    type="gemma4_text", names=_GEMMA4,
    outer=_OUTER | {
      "per_layer_token_embd": "model.embed_tokens_per_layer",
      "per_layer_model_proj": "model.per_layer_model_projection",
      "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    keys={
      "attention.key_length": "global_head_dim",
      "attention.key_length_swa": "head_dim",
      "attention.sliding_window": "sliding_window",
      "attention.shared_kv_layers": "num_kv_shared_layers",
      "embedding_length_per_layer_input": "hidden_size_per_layer_input",
      "final_logit_softcapping": "final_logit_softcapping",
      "expert_count": "num_experts",
      "expert_used_count": "top_k_experts",
      "expert_feed_forward_length": "moe_intermediate_size",
    },
    rotates=False,
  ),
  "phi3": Architecture(
    type="phi3", names=_PHI3,
    keys={"attention.sliding_window": "sliding_window"},
  ),
  "starcoder2": Architecture(
    type="starcoder2",
    names=_STARCODER2,
    fixed={"use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    norm_eps="norm_epsilon",
  ),
  "bloom": Architecture(
    type="bloom", names=_BLOOM, layer="transformer.h.{}.", outer=_OLD_OUTER,
    keys={
      "context_length": "seq_length",
      "block_count": "n_layer",
      "feed_forward_length": "",
      "attention.head_count": "n_head",
      "attention.head_count_kv": "",
    },
    norm_eps="layer_norm_epsilon", rotates=False, split_qkv=True,
  ),
  "falcon": Architecture(
    type="falcon", names=_BLOOM, layer="transformer.h.{}.", outer=_OLD_OUTER,
    keys={
      "feed_forward_length": "ffn_hidden_size",
      "attention.head_count_kv": "num_kv_heads",
    },
    norm_eps="layer_norm_epsilon", split_qkv=True,
  ),
  "gpt2": Architecture(
    type="gpt2", names=_GPT2, layer="transformer.h.{}.",
    outer={
      "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
      "output_norm": "transformer.ln_f", "output": "lm_head",
    },
    keys={
      "context_length": "n_positions",
      "block_count": "n_layer",
      "feed_forward_length": "n_inner",
      "embedding_length": "n_embd",
      "attention.head_count": "n_head",
      "attention.head_count_kv": "",
    },
    norm_eps="layer_norm_epsilon", rotates=False,
    turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
  ),
  "gpt-oss": Architecture(
    type="gpt_oss", names=_GPT_OSS,
    keys={
      "attention.key_length": "head_dim",
      "attention.sliding_window": "sliding_window",
      "expert_count": "num_local_experts",
      "expert_used_count": "num_experts_per_tok",
    },
    turned=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
  ),
  "lfm2": Architecture(
    type="lfm2", names=_LFM2,
    outer=_OUTER | {
      "token_embd_norm": "model.embedding_norm",
      "output_norm": "model.embedding_norm",
    },
    fixed={"block_auto_adjust_ff_dim": False},
    keys={"shortconv.l_cache": "conv_L_cache"},
    norm_eps="norm_eps",
  ),
  "mamba": Architecture(
    type="mamba", names=_MAMBA, layer="backbone.layers.{}.",
    outer={
      "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f",
      "output": "lm_head",
    },
    # Files state zeros, or a length of their own choice.
    keys={
      "context_length": None,
      "feed_forward_length": None,
      "attention.head_count": None,
      "attention.head_count_kv": None,
      "ssm.inner_size": "intermediate_size",
      "ssm.conv_kernel": "conv_kernel",
      "ssm.state_size": "state_size",
      "ssm.time_step_rank": "time_step_rank",
    },
    norm_eps="layer_norm_epsilon", rotates=False,
  ),
  "minimax-m2": Architecture(
    type="minimax_m2", names=_SPARSE,
    keys={
      "attention.key_length": "head_dim",
      "rope.dimension_count": "rotary_dim",
      "expert_count": "num_local_experts",
      "expert_used_count": "num_experts_per_tok",
    },
  ),
  "nemotron": Architecture(
    type="nemotron", names=_LLAMA, norm_eps="norm_eps", norm_one=True,
  ),
  "qwen2moe": Architecture(
    type="qwen2_moe", names=_SHARED,
    fixed={"norm_topk_prob": False, "decoder_sparse_step": 1,
           "mlp_only_layers": []},
    keys={
      "expert_count": "num_experts",
      "expert_used_count": "num_experts_per_tok",
      "expert_feed_forward_length": "moe_intermediate_size",
      "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
  ),
  "stablelm": Architecture(
    type="stablelm", names=_STABLELM, norm_eps="layer_norm_eps",
    keys={"use_parallel_residual": "use_parallel_residual"},
  ),
}  # fmt: skip
# Mixtral's files state the architecture of Llama, with experts.
_MIXTRAL = Architecture(
  type="mixtral",
  names=_SPARSE,
  keys={
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
  },
  permuted=True,
)
# Falcon-Mamba's files state the architecture of Mamba, and that time steps, B
# and C are normalised, but not by which epsilon.
_FALCON_MAMBA = dataclasses.replace(
  ARCHITECTURES["mamba"], type="falcon_mamba", fixed={"mixer_rms_eps": 1e-6}
)
# Number of layers of the two Gemmas of 27B, which scale scores by the width.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
_KEYS = {
  "context_length": "max_position_embeddings",
  "block_count": "num_hidden_layers",
  "feed_forward_length": "intermediate_size",
  "embedding_length": "hidden_size",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
}
# Keys that are required, if they are read.
_SIZES = (*_KEYS, "ssm.inner_size", "ssm.conv_kernel", "ssm.state_size",
          "ssm.time_step_rank")  # fmt: skip
# Keys that are required where the config reads them, though no tensor shows
# what they state: a config's default may be another model's.
_STATED = {
  "gemma3": ("attention.sliding_window",),
  "gemma4": ("attention.sliding_window",),
  "gpt-oss": ("attention.sliding_window", "expert_used_count"),
  "qwen2moe": ("expert_used_count",),
  "qwen3moe": ("expert_used_count",),
  "minimax-m2": ("expert_used_count", "rope.dimension_count"),
}
# Keys whose value is a number.
_NUMBERS = (
  "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count",
  "rope.scale_linear", "rope.scaling.factor",
  "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
  "rope.scaling.yarn_beta_slow", "attention.key_length",
  "attention.key_length_swa", "attention.sliding_window",
  "rope.scaling.attn_factor",
  "attention.shared_kv_layers", "attention.layer_norm_epsilon",
  "attention.layer_norm_rms_epsilon", "expert_count", "expert_used_count",
)  # fmt: skip
# Keys without a meaning for the computation. The sizes are also those of
# tensors, which are checked.
_HARMLESS = frozenset({
  "vocab_size", "tensor_data_layout", "pooling_type", "decoder_start_token_id",
  "expert_feed_forward_length", "expert_shared_feed_forward_length",
  "expert_shared_count", "rope.scaling.finetuned", "ssm.dt_b_c_rms",
})  # fmt: skip
# Values with which other keys change nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
  "attention.causal": (True,),
  "attention.clamp_kqv": (0,),
  "attention.max_alibi_bias": (0,),
  "attention.scale": (0,),
  "attention.sliding_window": (0,),
  "attn_logit_softcapping": (0,),
  "embedding_scale": (0, 1),
  "expert_count": (0,),
  "expert_group_count": (0, 1),
  "expert_group_used_count": (0, 1),
  "expert_used_count": (0,),
  "expert_weights_scale": (0, 1),
  "final_logit_softcapping": (0,),
  "leading_dense_block_count": (0,),
  "logit_scale": (0, 1),
  "nextn_predict_layers": (0,),
  "residual_scale": (0, 1),
  "rope.scaling.alpha": (0,),
  "rope.scaling.attn_factor": (0, 1),
  "rope.scaling.factor": (0, 1),
  "rope.scaling.type": ("none",),
  "rope.scaling.yarn_attn_factor": (1,),
  "rope.scaling.yarn_ext_factor": (-1, 1),
  "rope.scaling.yarn_log_multiplier": (0,),
}
# Number of the function that weighs experts, where it is not 1, softmax.
_GATING = {"minimax-m2": 2, "gpt-oss": 3}
_WITHOUT_ROTATION = ("bloom", "gpt2", "mamba")
_IDS = {
  "bos_token_id": "bos_token_id",
  "eos_token_id": "eos_token_id",
  "padding_token_id": "pad_token_id",
}


class _Entries(dict[str, Any]):
  """Metadata that records which keys were read.

  Attributes:
    read: The keys that were asked for.
  """

  def __init__(self, entries: Mapping[str, Any]):
    super().__init__(entries)
    self.read: set[str] = set()

  def get(self, key: str, default: Any = None) -> Any:
    self.read.add(key)
    return super().get(key, default)

  def __getitem__(self, key: str) -> Any:
    self.read.add(key)
    return super().__getitem__(key)

  def __contains__(self, key: object) -> bool:
    self.read.add(str(key))
    return super().__contains__(key)


def refuse(key: str, got: object, want: str) -> NoReturn:
  """Raises the error that a model is refused with."""
  raise ConfigError(
    f"GGUF: {key}", shown(got), want, "convert the model's original weights"
  )


def architecture(metadata: Mapping[str, Any]) -> Architecture:
  """The architecture of a file.

  Raises:
    ConfigError: If it is not known.
  """
  name = metadata.get("general.architecture")
  if not isinstance(name, str) or name not in ARCHITECTURES:
    refuse("general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
  if name == "llama" and metadata.get("llama.expert_count"):
    return _MIXTRAL
  if name == "mamba" and metadata.get("mamba.ssm.dt_b_c_rms"):
    return _FALCON_MAMBA
  return ARCHITECTURES[name]


def said_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Metadata of the architecture, without the prefix of their keys.

  Raises:
    ConfigError: If a value has another type.
  """
  prefix = f"{metadata['general.architecture']}."
  entries = {
    key.removeprefix(prefix): x
    for key, x in metadata.items()
    if key.startswith(prefix)
  }
  for key in _NUMBERS:
    if type(x := entries.get(key, 0)) not in (int, float):
      refuse(prefix + key, x, "a number")
  kv_heads = entries.setdefault(
    "attention.head_count_kv", entries.get("attention.head_count")
  )
  if metadata["general.architecture"] == "lfm2" and isinstance(kv_heads, list):
    # One number for each layer, 0 for a convolution.
    entries["layer_types"] = [
      "full_attention" if n else "conv" for n in kv_heads
    ]
    entries["attention.head_count_kv"] = max(kv_heads, default=0)
  if metadata["general.architecture"] == "gemma4":
    _by_layer(entries)
  return entries


def _by_layer(entries: dict[str, Any]) -> None:
  """Reduces Gemma 4's numbers per layer to those of a config, or refuses."""
  slides, widths = (
    entries.get(key)
    for key in ("attention.sliding_window_pattern", "feed_forward_length")
  )
  count, kv_heads = (
    entries.get("block_count"),
    entries["attention.head_count_kv"],
  )
  if not isinstance(slides, list) or len(slides) != count:
    refuse(
      "gemma4.attention.sliding_window_pattern", slides, "one of each layer"
    )
  count = len(slides)
  shared = entries.get("attention.shared_kv_layers", 0)
  if type(shared) is not int or not 0 <= shared < len(slides):
    refuse("gemma4.attention.shared_kv_layers", shared, f"below {count}")
  if isinstance(kv_heads, list):
    by_kind = {
      kind: {n for n, x in zip(kv_heads, slides, strict=False) if x == kind}
      for kind in (True, False)
    }
    if len(kv_heads) != count or any(len(x) > 1 for x in by_kind.values()):
      refuse("gemma4.attention.head_count_kv", kv_heads, "one for each kind")
    full = next(iter(by_kind[False]), None)
    entries["attention.head_count_kv"] = next(iter(by_kind[True]), full)
    entries["full_kv_heads"] = full
  if isinstance(widths, list):
    first = widths[0] if widths else 0
    doubled = [first * (1 + (i >= count - shared)) for i in range(count)]
    if widths not in (doubled, [first] * count):
      refuse("gemma4.feed_forward_length", widths, "twice in layers that share")
    entries["feed_forward_length"] = first
    entries["double_wide"] = widths == doubled and shared > 0


def config_of(files: GgufFiles) -> dict[str, Any]:
  """Makes the config.json of a model.

  Raises:
    ConfigError: If a key is missing or its value is not supported.
  """
  metadata = files.metadata
  arch = architecture(metadata)
  prefix = metadata["general.architecture"]
  entries = _Entries(said_of(metadata))
  config: dict[str, Any] = {"model_type": arch.type, **arch.fixed}
  for key, name in {**_KEYS, **arch.keys}.items():
    x = entries.get(key)
    if name is None:
      continue
    if key in _SIZES and (type(x) is not int or x < 1):
      want = "one positive number for all layers"
      refuse(f"{prefix}.{key}", "no such key" if x is None else x, want)
    if name and x is not None:
      config[name] = x
  stated = list(_STATED.get(prefix, ()))
  if entries.get("expert_count"):
    stated.append("expert_used_count")
  for key in stated:
    if entries.get(key) is None:
      refuse(f"{prefix}.{key}", "no such key", "a number")
  for ending in ("rms_epsilon", "epsilon"):
    epsilon = f"attention.layer_norm_{ending}"
    if epsilon in entries:
      config[arch.norm_eps] = entries[epsilon]
  if arch.norm_eps not in config:
    refuse(
      f"{prefix}.attention.layer_norm_epsilon",
      "neither this key nor layer_norm_rms_epsilon",
      "one of them",
    )
  embedding = files.tensors.get("token_embd.weight")
  if embedding is None:
    refuse("token_embd.weight", "no such tensor", "an embedding")
  config["vocab_size"] = embedding.shape[0]
  config["tie_word_embeddings"] = "output.weight" not in files.tensors
  if arch.rotates:
    config["rope_theta"] = entries.get("rope.freq_base", 10_000.0)
    _rope(files, config, entries)
  if add_keys := _FURTHER.get(arch.type):
    add_keys(files, config, entries)
  if unread := _unread(metadata, entries, config):
    config[GGUF_KEYS] = unread
  for key, name in _IDS.items():
    if (token := metadata.get(f"tokenizer.ggml.{key}")) is not None:
      config[name] = token
  kinds = {0: "float32", 1: "float16"}
  largest = max(files.tensors.values(), key=lambda t: t.nbytes)
  config["dtype"] = kinds.get(largest.type, "bfloat16")
  return config


def _unread(
  metadata: Mapping[str, Any], entries: _Entries, config: Mapping[str, Any]
) -> dict[str, Any]:
  """Metadata of the architecture that may change the computation, unread."""
  name = metadata["general.architecture"]
  heads = config.get("num_attention_heads", config.get("n_head", 1))
  width = entries.get("embedding_length") // heads
  head = entries.get("attention.key_length", width)
  without = {
    **_WITHOUT_EFFECT,
    "attention.value_length": (head,),
    "attention.value_length_swa": (entries.get("attention.key_length_swa"),),
    "expert_gating_func": (0, _GATING.get(name, 1)),
    "expert_weights_norm": (config.get("norm_topk_prob", True),),
    "rope.dimension_count": (head,),
    "rope.dimension_count_swa": (entries.get("attention.key_length_swa"),),
    "rope.freq_base_swa": (entries.get("rope.freq_base"),),
  }
  if name == "bloom":
    without["attention.max_alibi_bias"] = (8,)
  unread = {}
  for key in sorted(metadata):
    entry = key.removeprefix(f"{name}.")
    if entry == key or entry in entries.read or entry in _HARMLESS:
      continue
    if entry.startswith("rope.") and name in _WITHOUT_ROTATION:
      continue
    x = metadata[key]
    window = entry == "attention.sliding_window" and type(x) is int
    if window and x >= entries.get("context_length"):
      continue
    if not any(x == value for value in without.get(entry, ())):
      unread[key] = x
  return unread


def _llama_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  width, heads = config["hidden_size"], config["num_attention_heads"]
  config["head_dim"] = entries.get("attention.key_length", width // heads)
  if (
    entries.get("rope.dimension_count", config["head_dim"])
    != config["head_dim"]
  ):
    refuse("llama.rope.dimension_count", entries["rope.dimension_count"],
           f"all {config['head_dim']} of a head")  # fmt: skip
  bias = "blk.0.attn_q.bias" in files.tensors
  if config["model_type"] == "llama":
    config["attention_bias"] = bias


def _gemma_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  del files
  width, heads = config["hidden_size"], config["num_attention_heads"]
  config.setdefault("head_dim", 256)
  by_width = (
    _SCALED_BY_WIDTH[config["model_type"]] == config["num_hidden_layers"]
  )
  config["query_pre_attn_scalar"] = (
    width // heads if by_width else config["head_dim"]
  )
  if config["model_type"] == "gemma2":
    return
  pattern = entries.get("attention.sliding_window_pattern")
  if isinstance(pattern, list):
    if len(pattern) != config["num_hidden_layers"]:
      refuse("attention.sliding_window_pattern", pattern, "one of each layer")
    config["layer_types"] = [
      "sliding_attention" if slides else "full_attention" for slides in pattern
    ]
    del config["sliding_window_pattern"]
  elif pattern is not None:
    config["sliding_window_pattern"] = pattern
  if (base := entries.get("rope.freq_base_swa")) is not None:
    config["rope_local_base_freq"] = base


def _gemma4_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  slides = entries["attention.sliding_window_pattern"]
  kinds = ("full_attention", "sliding_attention")
  config["layer_types"] = [kinds[bool(x)] for x in slides]
  config["use_double_wide_mlp"] = bool(entries.get("double_wide"))
  shared = config.setdefault("num_kv_shared_layers", 0)
  full = [i for i, x in enumerate(slides[: len(slides) - shared]) if not x]
  config["attention_k_eq_v"] = any(
    f"blk.{i}.attn_v.weight" not in files.tensors for i in full
  )
  if (kv_heads := entries.get("full_kv_heads")) is not None:
    config["num_global_key_value_heads"] = kv_heads
  table = files.tensors.get("per_layer_token_embd.weight")
  if table is None:
    config["hidden_size_per_layer_input"] = 0
  else:
    config["vocab_size_per_layer_input"] = table.shape[0]
  config["enable_moe_block"] = bool(config.get("num_experts"))
  part = 1.0
  if "rope_freqs.weight" in files.tensors:
    factors = files.floats("rope_freqs.weight")
    count = int((factors == 1).sum())
    if not (factors[:count] == 1).all() or not (factors[count:] > 1e29).all():
      refuse("rope_freqs.weight", "factors of another scaling",
             "ones, then those of what does not rotate")  # fmt: skip
    part = count / factors.size
  base = entries.get("rope.freq_base", 1_000_000.0)
  config["rope_parameters"] = {
    "full_attention": {
      "rope_type": "proportional", "rope_theta": base,
      "partial_rotary_factor": part,
    },
    "sliding_attention": {
      "rope_type": "default",
      "rope_theta": entries.get("rope.freq_base_swa", 10_000.0),
    },
  }  # fmt: skip


def _phi3_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  del files
  if not config.get("sliding_window"):
    config["sliding_window"] = None
  if (part := _part_rotated(config, entries)) != 1:
    config["partial_rotary_factor"] = part


def _part_rotated(
  config: Mapping[str, Any], entries: Mapping[str, Any]
) -> float:
  head = config["hidden_size"] // config["num_attention_heads"]
  head = entries.get("attention.key_length", head)
  count = entries.get("rope.dimension_count", head)
  if type(count) is not int or type(head) is not int or not 0 < count <= head:
    refuse("rope.dimension_count", count, f"at most {head}")
  return count / head


def _nemotron_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  config["partial_rotary_factor"] = _part_rotated(config, entries)
  config["attention_bias"] = "blk.0.attn_q.bias" in files.tensors
  config["mlp_bias"] = "blk.0.ffn_up.bias" in files.tensors
  if "attention.key_length" in entries:
    config["head_dim"] = entries["attention.key_length"]


def _stablelm_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  config["partial_rotary_factor"] = _part_rotated(config, entries)
  config["use_qkv_bias"] = "blk.0.attn_q.bias" in files.tensors
  config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in files.tensors


def _falcon_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  del entries
  two_norms = "blk.0.attn_norm_2.weight" in files.tensors
  config["new_decoder_architecture"] = new = (
    two_norms or config["num_kv_heads"] > 1
  )
  config["multi_query"] = not new
  if new:
    config["num_ln_in_parallel_attn"] = 1 + two_norms
  config["bias"] = "blk.0.attn_qkv.bias" in files.tensors


def _gpt_oss_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  del files
  if entries.get("rope.scaling.type") != "yarn":
    refuse("rope.scaling.type", entries.get("rope.scaling.type"), "yarn")
  config["rope_scaling"]["truncate"] = False


def _lfm2_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  del files
  if "layer_types" not in entries:
    refuse("lfm2.attention.head_count_kv", "no list", "a number for each layer")
  config["layer_types"] = entries["layer_types"]


def _mamba_config(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  del entries
  config["use_bias"] = "blk.0.ssm_in.bias" in files.tensors
  config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in files.tensors


# Functions that complete the config, by its model_type.
_FURTHER = {
  "llama": _llama_config,
  "mixtral": _llama_config,
  "gemma2": _gemma_config,
  "gemma3_text": _gemma_config,
  "gemma4_text": _gemma4_config,
  "phi3": _phi3_config,
  "nemotron": _nemotron_config,
  "stablelm": _stablelm_config,
  "falcon": _falcon_config,
  "gpt_oss": _gpt_oss_config,
  "lfm2": _lfm2_config,
  "mamba": _mamba_config,
  "falcon_mamba": _mamba_config,
}


def _rope(
  files: GgufFiles, config: dict[str, Any], entries: Mapping[str, Any]
) -> None:
  """The scaling of the rotation, by metadata or by tensors of factors."""
  kind = entries.get("rope.scaling.type", "none")
  factor = entries.get("rope.scaling.factor", entries.get("rope.scale_linear"))
  length = entries.get("rope.scaling.original_context_length")
  by_factors = {"rope_freqs.weight", "rope_factors_long.weight"}
  if by_factors & files.tensors.keys():
    if kind not in ("none", "longrope"):
      refuse("rope.scaling.type", f"{kind} beside tensors of factors", "none")
    if factor not in (None, 0, 1):
      refuse("rope.scaling.factor", f"{factor} beside tensors of factors", "1")
  if "rope_freqs.weight" in files.tensors:
    config["rope_scaling"] = _llama3(files.floats("rope_freqs.weight"))
  elif "rope_factors_long.weight" in files.tensors:
    config["rope_scaling"] = {"type": "longrope"} | {
      f"{x}_factor": files.floats(f"rope_factors_{x}.weight").tolist()
      for x in ("long", "short")
    }
    if length is not None:
      config["original_max_position_embeddings"] = length
    if magnitude := entries.get("rope.scaling.attn_factor"):
      config["rope_scaling"]["attention_factor"] = magnitude
  elif kind == "linear" or (kind == "none" and factor not in (None, 0, 1)):
    config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
  elif kind == "yarn":
    scaling = {
      "rope_type": "yarn", "factor": factor,
      "original_max_position_embeddings": length,
    }  # fmt: skip
    for key in ("beta_fast", "beta_slow"):
      if (x := entries.get(f"rope.scaling.yarn_{key}")) is not None:
        scaling[key] = x
    part = entries.get("rope.scaling.attn_factor", 1)
    if part not in (0, 1) and factor is not None:
      # llama.cpp multiplies YaRN's own factor by it.
      scaling["attention_factor"] = part * yarn_magnitude(factor)
    config["rope_scaling"] = {k: v for k, v in scaling.items() if v is not None}
  elif kind != "none":
    refuse("rope.scaling.type", kind, "none, linear, yarn, or factors")


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
  """Refuses factors that differ from those of the config's scaling."""
  # Gemma 4's factors say which dims rotate.
  if config["model_type"] == "gemma4_text":
    return
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
    refuse("rope_freqs.weight", "factors of another scaling",
            "those of Llama 3: 1 and 4 at 8,192 tokens")  # fmt: skip
