"""Decoders with LayerNorm.

OLMo, Cohere, Nemotron, Jais 2, Phi, StableLM, BLOOM and MPT.
"""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  gated,
  llama_names,
  model,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention, alibi_slopes
from ringjax.nn.feedforward import Plain
from ringjax.nn.linear import Norm


def _norm(
  r: ConfigReader, key: str = "layer_norm_eps", **options: bool
) -> Norm:
  return Norm(eps=r.positive(key, default=1e-5), layer=True, **options)


def _olmo(r: ConfigReader) -> TransformerConfig:
  clip = r.positive("clip_qkv", default=None)
  return model(
    r,
    "olmo",
    attention(r, r.rope(), clip=clip, **biases(r)),
    gated(r),
    Norm(eps=1e-5, layer=True, weight=False),
  )


def _cohere(r: ConfigReader) -> TransformerConfig:
  norm = _norm(r, bias=False)
  apart = r.flag("use_qk_norm", default=False)
  attend = attention(
    r,
    r.rope(theta=500000.0, interleaved=True),
    qk_norm=norm if apart else None,
    qk_norm_per_head=apart,
    **biases(r),
  )
  return model(
    r,
    "cohere",
    attend,
    gated(r),
    norm,
    layer={"parallel": True, "shared_norm": True},
    tied=True,
    logit_scale=r.positive("logit_scale", default=0.0625),
  )


def _nemotron(r: ConfigReader) -> TransformerConfig:
  norm = dataclasses.replace(_norm(r, "norm_eps"), offset=1.0)
  feedforward = Plain(
    hidden=r.whole("intermediate_size"),
    act=r.act("hidden_act", default="relu2"),
    bias=r.flag("mlp_bias", default=False),
  )
  attend = attention(r, r.rope(partial=0.5), **biases(r))
  return model(r, "nemotron", attend, feedforward, norm)


def _jais2(r: ConfigReader) -> TransformerConfig:
  feedforward = Plain(
    hidden=r.whole("intermediate_size"),
    act=r.act("hidden_act", default="relu2"),
    bias=r.flag("mlp_bias", default=True),
  )
  attend = attention(r, r.rope(), **biases(r, default=True))
  return model(r, "jais2", attend, feedforward, _norm(r))


def _phi(r: ConfigReader) -> TransformerConfig:
  norm = _norm(r)
  normed = r.flag("qk_layernorm", default=False)
  attend = attention(
    r,
    r.rope(partial=0.5),
    qk_norm=norm if normed else None,
    bias=True,
    out_bias=True,
  )
  return model(
    r,
    "phi",
    attend,
    Plain(
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="gelu_new"),
      bias=True,
    ),
    norm,
    layer={"parallel": True, "shared_norm": True},
    head_bias=True,
  )


def _stablelm(r: ConfigReader) -> TransformerConfig:
  norm = _norm(r)
  apart = r.flag("qk_layernorm", default=False)
  parallel = r.flag("use_parallel_residual", default=False)
  attend = attention(
    r,
    r.rope(partial=0.25),
    qk_norm=dataclasses.replace(norm, bias=False) if apart else None,
    qk_norm_per_head=apart,
    bias=r.flag("use_qkv_bias", default=False),
  )
  layer = {"parallel": parallel, "shared_norm": parallel}
  return model(r, "stablelm", attend, gated(r), norm, layer=layer)


def _bloom(r: ConfigReader) -> TransformerConfig:
  heads = r.whole("n_head", "num_attention_heads")
  embed = r.whole("hidden_size", "n_embed")
  if embed % heads:
    raise r.error("hidden_size", embed, f"a multiple of {heads} heads")
  norm = _norm(r, "layer_norm_epsilon")
  r.must_be("apply_residual_connection_post_layernorm", False, default=False)
  # How training summed the parts of a tensor-parallel map.
  r.ignore("slow_but_exact", "skip_bias_add", "skip_bias_add_qkv")
  r.ignore("attention_softmax_in_fp32", "masked_softmax_fusion", "seq_length")
  r.ignore("bias_dropout_fusion", "offset_alibi", "unk_token_id", "n_inner")
  return model(
    r,
    "bloom",
    Attention(
      heads=heads,
      kv_heads=heads,
      head_dim=embed // heads,
      alibi=alibi_slopes(heads),
      bias=True,
      out_bias=True,
    ),
    Plain(hidden=4 * embed, act="gelu_tanh", bias=True),
    norm,
    embed_norm=norm,
    tied=True,
  )


def _mpt(r: ConfigReader) -> TransformerConfig:
  heads, embed = r.whole("n_heads"), r.whole("d_model")
  if embed % heads:
    raise r.error("d_model", embed, f"a multiple of {heads} heads")
  part = r.part("attn_config", r.value("attn_config", default={}))
  part.must_be("attn_type", "multihead_attention", "multihead_attention")
  part.must_be("alibi", True, default=True)
  part.only("qk_ln", False)
  part.only("prefix_lm", False)
  part.only("attn_uses_sequence_id", False)
  part.only("alibi_bias_max", 8)
  # The kernel that computes it, and a dropout.
  part.ignore("attn_impl", "attn_pdrop", "model_type")
  attend = Attention(
    heads=heads,
    kv_heads=heads,
    head_dim=embed // heads,
    alibi=alibi_slopes(heads),
    scale=part.positive("softmax_scale", default=None),
    clip=part.positive("clip_qkv", default=None),
  )
  part.finish()
  r.only("expansion_ratio", 4)
  r.only("embedding_fraction", 1.0)
  r.only("no_bias", True)
  r.only("logit_scale", None)
  # Without meaning for the form in transformers, which has ALiBi.
  r.ignore("learned_pos_emb", "norm_type", "init_device", "init_config")
  r.ignore("emb_pdrop", "verbose", "fc_type", "ffn_config")
  return model(
    r,
    "mpt",
    attend,
    Plain(hidden=4 * embed, act="gelu"),
    Norm(
      eps=r.positive("layer_norm_epsilon", default=1e-5),
      layer=True,
      bias=False,
    ),
    tied=True,
  )


_PHI_NAMES = llama_names(
  {
    "attention.o": "self_attn.dense",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
  },
  norm="model.final_layernorm",
)
_BLOOM_NAMES = lambda config: TensorNames(
  layer="transformer.h.{}.",
  parts={
    "attention.o": "self_attention.dense",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
    "pre_attention": "input_layernorm",
    "pre_feedforward": "post_attention_layernorm",
  },
  fused={
    "self_attention.query_key_value": Fusion(
      parts=("attention.q", "attention.k", "attention.v"),
      groups=config.layers[0].attention.heads,
    )
  },
  embed="transformer.word_embeddings",
  embed_norm="transformer.word_embeddings_layernorm",
  norm="transformer.ln_f",
  base="transformer.",
)
_MPT_NAMES = TensorNames(
  layer="transformer.blocks.{}.",
  parts={
    "attention.o": "attn.out_proj",
    "feedforward.up": "ffn.up_proj",
    "feedforward.down": "ffn.down_proj",
    "pre_attention": "norm_1",
    "pre_feedforward": "norm_2",
  },
  fused={
    "attn.Wqkv": Fusion(parts=("attention.q", "attention.k", "attention.v"))
  },
  embed="transformer.wte",
  norm="transformer.norm_f",
)
FAMILIES = (
  Family(name="olmo", config=_olmo),
  Family(name="cohere", config=_cohere),
  Family(name="nemotron", config=_nemotron),
  Family(name="jais2", config=_jais2),
  Family(name="phi", config=_phi, names=_PHI_NAMES),
  Family(
    name="stablelm",
    config=_stablelm,
    names=llama_names(
      leaves={},
      experts={
        "attention.q_norm.weight": "self_attn.q_layernorm.norms.{}.weight",
        "attention.k_norm.weight": "self_attn.k_layernorm.norms.{}.weight",
      },
    ),
  ),
  Family(name="bloom", config=_bloom, names=_BLOOM_NAMES),
  Family(name="mpt", config=_mpt, names=lambda config: _MPT_NAMES),
)
