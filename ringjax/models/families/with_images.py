"""Models of text and images whose text model is one of other families.

Only the text model of a folder is read. A rotation by time, height and width
(M-RoPE) is the plain one there: all three positions of a text token are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import TextModel, Wrapper, llama_names

# Keys of a config.json next to `text_config` that don't affect text tokens.
KEYS = (
  "_pad_token_id",
  "adapter_layer_norm_eps",
  "alignment_intermediate_size",
  "audio_config",
  "audio_end_token_id",
  "audio_soft_tokens_per_image",
  "audio_start_token_id",
  "audio_token_id",
  "audio_token_index",
  "boa_token_id",
  "boi_token_id",
  "boi_token_index",
  "deepstack_layer_map",
  "density_router_hidden_size",
  "density_router_loss_weight",
  "density_router_threshold",
  "do_image_splitting",
  "downsample_factor",
  "downsample_mode",
  "downsample_rate",
  "downsample_ratio",
  "drop_vision_last_layer",
  "encoder_patch_size",
  "eoa_token_id",
  "eoa_token_index",
  "eoi_token_id",
  "eoi_token_index",
  "force_image_size",
  "high_res_vision_config",
  "ignore_index",
  "im_end_id",
  "im_newline_id",
  "im_start_id",
  "image_end_token_id",
  "image_grid_pinpoints",
  "image_seq_length",
  "image_size",
  "image_start_token_id",
  "image_token_id",
  "image_token_index",
  "insert_layer_id",
  "max_image_tokens",
  "max_num_patches",
  "max_pixels_tolerance",
  "max_tiles",
  "merge_kernel_size",
  "merged_hidden_size",
  "merger_times",
  "min_image_tokens",
  "min_tiles",
  "mm_tokens_per_image",
  "multimodal_projector_bias",
  "out_hidden_size",
  "patch_size",
  "perceiver_config",
  "position_id_per_seconds",
  "projection_dim",
  "projection_hidden_size",
  "projection_layer_norm_eps",
  "projector_bias",
  "projector_dropout",
  "projector_hidden_act",
  "projector_hidden_size",
  "projector_layernorm_eps",
  "projector_pooling_ratio",
  "projector_use_layernorm",
  "qformer_config",
  "scale_factor",
  "seconds_per_chunk",
  "spatial_merge_size",
  "spatial_pool_mode",
  "spatial_pool_stride",
  "spatial_target_layers",
  "spatial_vision_layer",
  "tile_size",
  "use_image_newline_parameter",
  "use_image_special_tokens",
  "use_thumbnail",
  "user_token_id",
  "video_end_token_id",
  "video_pruning_rate",
  "video_seq_length",
  "video_start_token_id",
  "video_temporal_patch_size",
  "video_token_id",
  "video_token_index",
  "vision_aspect_ratio",
  "vision_config",
  "vision_end_token_id",
  "vision_feature_layer",
  "vision_feature_layers",
  "vision_feature_select_strategy",
  "vision_hidden_size",
  "vision_soft_tokens_per_image",
  "vision_start_token_id",
  "vision_token_id",
  "vision_use_cls_token",
  "visual_indicator_token_ids",
  "vocabulary_map",
  "vq_config",
)
# Prefixes of the names of its tensors, some of them after "model.".
OTHERS = (
  "aligner.",
  "audio_tower.",
  "connector.",
  "embed_audio.",
  "embed_vision.",
  "generation_",
  "high_res_vision_",
  "image_newline",
  "image_tower.",
  "layerwise_projectors.",
  "merger.",
  "mlp1.",
  "mlp_AR.",
  "mm_projector.",
  "multi_modal_projector.",
  "patch_merge_mlp.",
  "patch_merger.",
  "pre_mm_projector_norm.",
  "projector.",
  "spatial_projectors.",
  "video_tower.",
  "vision_embedder.",
  "vision_encoder.",
  "vision_language_adapter.",
  "vision_model.",
  "vision_projection.",
  "vision_tower.",
  "vision_adapter.",
  "visual.",
  "visual_embeddings_table.",
  "vit.",
  "vqmodel.",
)


def _sizes(
  vocab: int,
  hidden: int,
  inner: int,
  layers: int,
  heads: int,
  positions: int,
  **more: Any,
) -> Mapping[str, Any]:
  """Default sizes of transformers, as keys of a config.json."""
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
# Its files have keys of parts that transformers' Llama lacks.
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
_EMU3 = TextModel(
  type="llama",
  text_model_type="emu3_text_model",
  architecture="LlamaForCausalLM",
  defaults=_sizes(
    184622,
    4096,
    14336,
    32,
    32,
    9216,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
  ),
)
# Layers that attend to images do not run without an image.
_MLLAMA = TextModel(
  type="llama",
  text_model_type="mllama_text_model",
  architecture="LlamaForCausalLM",
  defaults=_sizes(
    128256,
    4096,
    14336,
    40,
    32,
    131072,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
  ),
  fixed={"dropout": None},
  skips="cross_attention_layers",
  rows=8,
)
_MISTRAL = TextModel(
  type="mistral",
  architecture="MistralForCausalLM",
  defaults=_sizes(32000, 4096, 14336, 32, 32, 131072),
)
_MINISTRAL3 = TextModel(type="ministral3", architecture="Ministral3ForCausalLM")
_MISTRAL4 = TextModel(type="mistral4", architecture="Mistral4ForCausalLM")
_QWEN2 = TextModel(
  type="qwen2",
  architecture="Qwen2ForCausalLM",
  defaults=_sizes(151936, 4096, 22016, 32, 32, 32768),
)
_QWEN2_VL = dataclasses.replace(
  _QWEN2,
  defaults=_sizes(
    152064,
    8192,
    29568,
    80,
    64,
    32768,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    max_window_layers=80,
  ),
)
_QWEN2_5_OMNI = dataclasses.replace(
  _QWEN2,
  text_model_type="qwen2_5_omni_text",
  defaults=_sizes(
    152064, 3584, 18944, 28, 28, 32768, num_key_value_heads=4, rope_theta=1e6
  ),
)
_QWEN3 = TextModel(
  type="qwen3",
  architecture="Qwen3ForCausalLM",
  defaults=_sizes(151936, 4096, 22016, 32, 32, 32768),
)
_QWEN3_VL = dataclasses.replace(
  _QWEN3,
  text_model_type="qwen3_vl_text",
  defaults=_sizes(151936, 4096, 22016, 32, 32, 128000, rope_theta=5e5),
)
_QWEN3_VL_MOE = TextModel(
  type="qwen3_moe",
  text_model_type="qwen3_vl_moe_text",
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
  # Not an option of this model: the weights of a token's experts sum to 1.
  fixed={"norm_topk_prob": True},
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
_QWEN3_OMNI = TextModel(
  type="qwen3_moe",
  text_model_type="qwen3_omni_moe_text",
  architecture="Qwen3MoeForCausalLM",
  defaults=_sizes(
    3584,
    2048,
    18944,
    28,
    28,
    32768,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    rope_theta=1e6,
  ),
)
_QWEN3_5 = TextModel(type="qwen3_5_text", architecture="Qwen3_5ForCausalLM")
_COHERE2 = TextModel(
  type="cohere2",
  architecture="Cohere2ForCausalLM",
  defaults=_sizes(256000, 8192, 22528, 40, 64, 8192),
  # The scale is for the text model's own head, which this model lacks.
  fixed={"logit_scale": 1.0},
)
_GEMMA = TextModel(
  type="gemma",
  architecture="GemmaForCausalLM",
  defaults=_sizes(256000, 3072, 24576, 28, 16, 8192),
  # Tokens of a prompt see later ones only if a call marks them
  # (`token_type_ids`); without it transformers' mask is causal.
  fixed={"num_image_tokens": None, "use_bidirectional_attention": None},
)
_GEMMA2 = dataclasses.replace(
  _GEMMA,
  type="gemma2",
  architecture="Gemma2ForCausalLM",
  defaults=_sizes(256000, 2304, 9216, 26, 8, 8192),
)
_GEMMA4_UNIFIED = TextModel(
  type="gemma4_text",
  text_model_type="gemma4_unified_text",
  architecture="Gemma4ForCausalLM",
  defaults=_sizes(
    262144,
    2304,
    9216,
    30,
    8,
    262144,
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=1024,
  ),
  # Tokens of an image see each other, tokens of text do not.
  fixed={"hidden_size_per_layer_input": 0, "use_bidirectional_attention": None},
)
_GRANITE4 = TextModel(
  type="granite",
  text_model_type="granite4_vision_text",
  architecture="GraniteForCausalLM",
  defaults=_sizes(32000, 4096, 11008, 32, 32, 2048),
)
_GRANITE_DOCLING = dataclasses.replace(
  _GRANITE4,
  text_model_type="granite_docling_text",
  defaults=_sizes(
    133800,
    1024,
    2048,
    28,
    16,
    32768,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
    embedding_multiplier=12.0,
    logits_scaling=4.0,
    residual_multiplier=0.263,
    attention_multiplier=0.015625,
  ),
)
# The head is not the text model's own: its logits are not divided.
_GRANITE_UNDIVIDED = dataclasses.replace(
  _GRANITE4, text_model_type="granite", fixed={"logits_scaling": 1.0}
)
_GLM4V = TextModel(
  type="glm4",
  text_model_type="glm4v_text",
  architecture="Glm4ForCausalLM",
  defaults=_sizes(
    151552,
    4096,
    13696,
    40,
    32,
    32768,
    num_key_value_heads=2,
    head_dim=None,
    rms_norm_eps=1e-5,
    partial_rotary_factor=1.0,
  ),
  fixed={"attention_bias": True},
)
_GLM_OCR = dataclasses.replace(
  _GLM4V,
  text_model_type="glm_ocr_text",
  defaults={
    **_GLM4V.defaults,
    **_sizes(59392, 1024, 4096, 16, 16, 131072, num_key_value_heads=8),
  },
  fixed={"attention_bias": False},
)
_GLM4V_MOE = TextModel(
  type="glm4_moe",
  text_model_type="glm4v_moe_text",
  architecture="Glm4MoeForCausalLM",
  defaults=_sizes(
    151424,
    4096,
    10944,
    46,
    96,
    65536,
    num_key_value_heads=8,
    head_dim=None,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    attention_bias=True,
    moe_intermediate_size=1408,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_routed_experts=128,
    first_k_dense_replace=1,
  ),
)
_HUNYUAN = TextModel(
  type="hunyuan_v1_dense",
  text_model_type="hunyuan_vl_text",
  architecture="HunYuanDenseV1ForCausalLM",
  defaults=_sizes(290943, 4096, 11008, 32, 32, 2048),
)
# An ERNIE 4.5 whose rotation pairs dims of two halves, as Llama's does.
_PADDLE = TextModel(
  type="llama",
  text_model_type="paddleocr_vl_text",
  architecture="LlamaForCausalLM",
  defaults=_sizes(
    103424,
    1024,
    3072,
    18,
    16,
    131072,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    tie_word_embeddings=True,
  ),
  renamed={"use_bias": ("attention_bias", "mlp_bias")},
)
_EXAONE4 = TextModel(
  type="exaone4",
  architecture="Exaone4ForCausalLM",
  defaults=_sizes(102400, 4096, 16384, 32, 32, 2048),
)
_DEEPSEEK_V3 = TextModel(
  type="deepseek_v3", architecture="DeepseekV3ForCausalLM"
)
_LFM2 = TextModel(
  type="lfm2",
  architecture="Lfm2ForCausalLM",
  defaults=_sizes(65536, 2560, 12288, 32, 32, 128000),
)
_NEMOTRON_H = TextModel(type="nemotron_h", architecture="NemotronHForCausalLM")


def _around(kind: str, *texts: TextModel, **options: Any) -> Wrapper:
  """A model around one of several text models.

  The outer config has transformers' default for the tied head, whatever the
  text model's is.
  """
  return Wrapper(type=kind, texts=texts, text_ties=True, **options)


def _qwen2_vl(kind: str) -> Wrapper:
  """Qwen2-VL's models; files of 2024 are flat, and their text has that type."""
  text_types = (f"{kind}_text", kind)
  texts = (
    dataclasses.replace(_QWEN2_VL, text_model_type=text_type)
    for text_type in text_types
  )
  return _around(kind, *texts, flat=True)


def _omni(kind: str, text: TextModel) -> tuple[Wrapper, Wrapper]:
  """Wrappers of a thinker, alone or within a model that also speaks."""
  return (
    Wrapper(type=f"{kind}_thinker", texts=(text,)),
    Wrapper(type=kind, texts=(text,), within="thinker_config"),
  )


SHARED = (
  _around("aya_vision", _COHERE2),
  _around("cohere2_vision", _COHERE2),
  _around("deepseek_vl", _LLAMA),
  _around("deepseek_vl_hybrid", _LLAMA),
  _around("emu3", _EMU3),
  _around("exaone4_5", _EXAONE4),
  _around("fast_vlm", _QWEN2),
  _around("gemma4_unified", _GEMMA4_UNIFIED),
  _around("glm46v", _GLM4V, _GLM4V_MOE),
  _around("glm4v", _GLM4V),
  _around("glm4v_moe", _GLM4V_MOE),
  _around("glm_ocr", _GLM_OCR),
  _around("got_ocr2", _QWEN2),
  _around("granite4_vision", _GRANITE4),
  _around("granite_docling", _GRANITE_DOCLING),
  _around("hunyuan_vl", _HUNYUAN),
  _around("idefics2", _MISTRAL),
  _around("idefics3", _SMOL),
  _around("internvl", _QWEN2, _QWEN3, _LLAMA),
  _around("janus", _LLAMA),
  _around("kimi_k25", _DEEPSEEK_V3),
  _around("lfm2_vl", _LFM2),
  _around("lighton_ocr", _QWEN3),
  _around("llava", _LLAMA, _MISTRAL, _QWEN2),
  _around("llava_next", _LLAMA, _MISTRAL, _QWEN2, _GRANITE_UNDIVIDED),
  _around("llava_next_video", _LLAMA, _MISTRAL, _QWEN2),
  _around("llava_onevision", _QWEN2),
  _around("minicpmv4_6", _QWEN3_5),
  _around("mistral3", _MISTRAL, _MINISTRAL3, _MISTRAL4),
  _around("mllama", _MLLAMA),
  _around("nemotron_h_omni", _NEMOTRON_H),
  _around("ovis2", _QWEN2),
  _around("paddleocr_vl", _PADDLE),
  _around("paligemma", _GEMMA, _GEMMA2),
  _around("perception_lm", _LLAMA),
  _around("qianfan_ocr", _QWEN3),
  *_omni("qwen2_5_omni", _QWEN2_5_OMNI),
  _qwen2_vl("qwen2_5_vl"),
  _qwen2_vl("qwen2_vl"),
  *_omni("qwen3_omni_moe", _QWEN3_OMNI),
  Wrapper(type="qwen3_vl", texts=(_QWEN3_VL,)),
  Wrapper(type="qwen3_vl_moe", texts=(_QWEN3_VL_MOE,)),
  _around("smolvlm", _SMOL),
  _around("video_llama_3", _QWEN2),
  _around("video_llava", _LLAMA),
  _around("vipllava", _LLAMA),
)

# Reasons that other models are not read.
_IMAGELESS = "one that computes nothing without an image"
REFUSED = {
  "aria": "one with a mixture of experts that no family has",
  "blip-2": _IMAGELESS,
  "chameleon": "one whose queries and keys have norms with weights by head",
  "cosmos3_omni": "one whose tensors are named like those of what sees",
  "deepseek_ocr2": "one with experts and no latents, of DeepSeek V2's",
  "ernie4_5_vl_moe": "one that has experts of text and of images in one list",
  "florence2": "one that reads and writes with two stacks",
  "fuyu": "one around a Persimmon",
  "hyperclovax_vision_v2": "one around a HyperCLOVA X",
  "idefics": "one whose layers look at images between others",
  "instructblip": _IMAGELESS,
  "instructblipvideo": _IMAGELESS,
  "molmo2": "one with a second embedding for tokens of images",
  "phi4_multimodal": "one with low-rank weights for each kind of input",
  "unlimited_ocr": "one with experts and no latents, of DeepSeek V2's",
}
