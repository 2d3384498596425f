"""Models of text and images whose text model is a family of its own.

Of a folder the text model alone is read. A rotation by time, height and width
(M-RoPE) is the plain one there: a token of text has its position thrice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import TextModel, Wrapper, llama_names

_QWEN_KEYS = (
  "image_token_id",
  "video_token_id",
  "vision_config",
  "vision_end_token_id",
  "vision_start_token_id",
  "vision_token_id",
)
_LLAVA_KEYS = (
  "image_seq_length",
  "image_token_id",
  "image_token_index",
  "multimodal_projector_bias",
  "projector_hidden_act",
  "vision_config",
  "vision_feature_layer",
  "vision_feature_select_strategy",
)
_LLAVA_OTHERS = ("vision_tower.", "multi_modal_projector.")


def _sizes(
  vocab: int,
  hidden: int,
  inner: int,
  layers: int,
  heads: int,
  positions: int,
  **more: Any,
) -> Mapping[str, Any]:
  """What transformers has by default, as keys of a config.json."""
  return {
    "vocab_size": vocab,
    "hidden_size": hidden,
    "intermediate_size": inner,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "max_position_embeddings": positions,
    **more,
  }


_LLAMA = TextModel(
  type="llama",
  architecture="LlamaForCausalLM",
  defaults=_sizes(32000, 4096, 11008, 32, 32, 2048),
)
# What its files say of parts that transformers' Llama has not.
_SMOL = dataclasses.replace(
  _LLAMA,
  fixed=dict.fromkeys(
    (
      "_flash_attn_2_enabled",
      "neftune_noise_alpha",
      "perceiver_config",
      "pixel_shuffle_factor",
      "qk_layer_norms",
      "use_resampler",
    )
  ),
)
_MISTRAL = TextModel(
  type="mistral",
  architecture="MistralForCausalLM",
  defaults=_sizes(32000, 4096, 14336, 32, 32, 131072),
)
_MINISTRAL3 = TextModel(type="ministral3", architecture="Ministral3ForCausalLM")
_QWEN2 = TextModel(
  type="qwen2",
  architecture="Qwen2ForCausalLM",
  defaults=_sizes(151936, 4096, 22016, 32, 32, 32768),
)
_QWEN3 = TextModel(type="qwen3", architecture="Qwen3ForCausalLM")
_COHERE2 = TextModel(
  type="cohere2",
  architecture="Cohere2ForCausalLM",
  defaults=_sizes(256000, 8192, 22528, 40, 64, 8192),
  # The scale is that of the text model's own head, which this one has not.
  fixed={"logit_scale": 1.0},
)


_LFM2 = TextModel(type="lfm2", architecture="Lfm2ForCausalLM")
_GLM4 = TextModel(
  type="glm4",
  architecture="Glm4ForCausalLM",
  defaults=_sizes(
    151552,
    4096,
    13696,
    40,
    32,
    32768,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
  ),
  fixed={"attention_bias": True},
)


def _qwen2_vl(kind: str) -> Wrapper:
  """Its text model is a Qwen 2 with defaults of its own."""
  more = dict(
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    max_window_layers=80,
  )
  text = TextModel(
    type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=_sizes(152064, 8192, 29568, 80, 64, 32768, **more),
  )
  return Wrapper(
    type=kind,
    keys=_QWEN_KEYS,
    texts={f"{kind}_text": text, kind: text},
    others=("visual.",),
    flat=True,
    text_ties=True,
  )


_QWEN3_VL = Wrapper(
  type="qwen3_vl",
  keys=_QWEN_KEYS,
  texts={
    "qwen3_vl_text": TextModel(
      type="qwen3",
      architecture="Qwen3ForCausalLM",
      defaults=_sizes(151936, 4096, 22016, 32, 32, 128000, rope_theta=5e5),
    )
  },
  others=("visual.",),
)
_QWEN3_VL_MOE = Wrapper(
  type="qwen3_vl_moe",
  keys=_QWEN_KEYS,
  texts={
    "qwen3_vl_moe_text": TextModel(
      type="qwen3_moe",
      architecture="Qwen3MoeForCausalLM",
      defaults=_sizes(
        151936,
        2048,
        5632,
        24,
        16,
        128000,
        num_key_value_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        rope_theta=5e5,
      ),
      # Not a choice: what the experts of a token weigh sums to 1.
      fixed={"norm_topk_prob": True},
    )
  },
  others=("visual.",),
  # All experts in one tensor: [experts, in, out], or as transformers 5 writes
  # it, [experts, out, in].
  turned=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
  names=llama_names(
    {"feedforward.router": "mlp.gate"},
    leaves={"feedforward.down": "mlp.experts.down_proj"},
    columns={
      "mlp.experts.gate_up_proj": (
        ("feedforward.gate", "feedforward.up"),
        False,
      ),
    },
  ),
)


def _llava(
  kind: str,
  texts: Mapping[str, TextModel],
  *keys: str,
  others: tuple[str, ...] = _LLAVA_OTHERS,
) -> Wrapper:
  """A text model behind a projector, like LLaVA's."""
  return Wrapper(
    type=kind,
    keys=(*_LLAVA_KEYS, *keys),
    texts=texts,
    others=others,
    # The outer one is transformers' default, whatever the text model's is.
    text_ties=True,
  )


SHARED = (
  _qwen2_vl("qwen2_vl"),
  _qwen2_vl("qwen2_5_vl"),
  _QWEN3_VL,
  _QWEN3_VL_MOE,
  _llava(
    "mistral3",
    {"mistral": _MISTRAL, "ministral3": _MINISTRAL3},
    "spatial_merge_size",
  ),
  _llava(
    "llava",
    {"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2},
    "ignore_index",
    "vocab_size",
  ),
  _llava(
    "llava_next",
    {"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2},
    "ignore_index",
    "image_grid_pinpoints",
    "use_image_newline_parameter",
    "vocab_size",
    others=(*_LLAVA_OTHERS, "image_newline"),
  ),
  _llava(
    "llava_onevision",
    {"qwen2": _QWEN2},
    "image_grid_pinpoints",
    "use_image_newline_parameter",
    "video_token_index",
    "video_token_id",
    "vision_aspect_ratio",
    others=(*_LLAVA_OTHERS, "image_newline"),
  ),
  _llava(
    "vipllava",
    {"llama": _LLAMA},
    "ignore_index",
    "projector_layernorm_eps",
    "vision_feature_layers",
    "vocab_size",
  ),
  _llava(
    "internvl",
    {"qwen2": _QWEN2, "qwen3": _QWEN3, "llama": _LLAMA},
    "downsample_ratio",
  ),
  _llava(
    "cohere2_vision",
    {"cohere2": _COHERE2},
    "alignment_intermediate_size",
    "downsample_factor",
  ),
  _llava(
    "aya_vision",
    {"cohere2": _COHERE2},
    "adapter_layer_norm_eps",
    "alignment_intermediate_size",
    "downsample_factor",
  ),
  _llava(
    "lfm2_vl",
    {"lfm2": _LFM2},
    "do_image_splitting",
    "downsample_factor",
    "encoder_patch_size",
    "max_image_tokens",
    "max_num_patches",
    "max_pixels_tolerance",
    "max_tiles",
    "min_image_tokens",
    "min_tiles",
    "projector_bias",
    "projector_hidden_size",
    "projector_use_layernorm",
    "tile_size",
    "use_image_special_tokens",
    "use_thumbnail",
  ),
  Wrapper(
    type="glm4v",
    keys=(
      *_QWEN_KEYS,
      "image_end_token_id",
      "image_start_token_id",
      "video_end_token_id",
      "video_start_token_id",
    ),
    texts={"glm4v_text": _GLM4},
    others=("visual.",),
    text_ties=True,
  ),
  _llava(
    "idefics3",
    {"llama": _SMOL},
    "_pad_token_id",
    "scale_factor",
    "use_cache",
    others=("vision_model.", "connector."),
  ),
  _llava(
    "smolvlm",
    {"llama": _SMOL},
    "_pad_token_id",
    "scale_factor",
    others=("vision_model.", "connector."),
  ),
)
