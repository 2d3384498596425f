"""GPT-NeoX and GPT-OSS."""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import (
  Family,
  attention,
  causal,
  model,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Clamped, Experts, Plain, Softmax
from ringjax.nn.linear import Norm


def _neox(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  bias = r.flag("attention_bias", default=True)
  layer = Layer(
    attention=attention(
      r,
      r.rope(r.head_dim(heads), partial=0.25),
      bias=bias,
      out_bias=bias,
    ),
    feedforward=Plain(
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="gelu"),
      bias=True,
    ),
    norm=Norm(eps=r.positive("layer_norm_eps", default=1e-5), layer=True),
    parallel=r.flag("use_parallel_residual", default=True),
  )
  return model(r, "gpt_neox", [layer] * r.layers())


def _neox_names(config: TransformerConfig) -> TensorNames:
  return TensorNames(
    layer="gpt_neox.layers.{}.",
    parts={
      "attention.o": "attention.dense",
      "feedforward.up": "mlp.dense_h_to_4h",
      "feedforward.down": "mlp.dense_4h_to_h",
      "pre_attention": "input_layernorm",
      "pre_feedforward": "post_attention_layernorm",
    },
    fused={
      "attention.query_key_value": Fusion(
        parts=("attention.q", "attention.k", "attention.v"),
        groups=config.layers[0].attention.heads,
      )
    },
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    buffers=("attention.bias", "masked_bias", "rotary_emb.inv_freq"),
  )


def _oss(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  heads, _ = r.heads()
  bias = r.flag("attention_bias", default=True)
  experts = r.whole("num_local_experts", "num_experts")
  # Without one transformers stretches the context by 32: it is to be said.
  r.value("rope_parameters", "rope_scaling")
  full = Layer(
    attention=attention(
      r,
      r.rope(r.head_dim(heads), theta=150000.0),
      bias=bias,
      out_bias=bias,
      sinks=True,
    ),
    feedforward=Experts(
      experts=experts,
      chosen=r.whole("num_experts_per_tok", "experts_per_token", most=experts),
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="silu"),
      router=Softmax(renormalise=True),
      bias=True,
      router_bias=True,
      clamped=Clamped(
        alpha=r.positive("swiglu_alpha", default=1.702),
        limit=r.positive("swiglu_limit", default=7.0),
      ),
    ),
    norm=rms(r, default=1e-5),
  )
  r.ignore("experts_per_token")
  slides = dataclasses.replace(
    full,
    attention=dataclasses.replace(
      full.attention, mask=causal(r.whole("sliding_window", default=128))
    ),
  )
  default = ["sliding_attention", "full_attention"] * count
  types = r.layer_types(count, default[:count])
  layers = [slides if t == "sliding_attention" else full for t in types]
  return model(r, "gpt_oss", layers)


def _oss_names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={
      **{k: v for k, v in LLAMA.items() if not k.startswith("feedforward")},
      "feedforward.router": "mlp.router",
    },
    leaves={
      "attention.sinks": "self_attn.sinks",
      "feedforward.down": "mlp.experts.down_proj",
      "feedforward.down_bias": "mlp.experts.down_proj_bias",
    },
    columns={
      "mlp.experts.gate_up_proj": (
        ("feedforward.gate", "feedforward.up"),
        True,
      ),
      "mlp.experts.gate_up_proj_bias": (
        ("feedforward.gate_bias", "feedforward.up_bias"),
        True,
      ),
    },
  )


FAMILIES = (
  Family(name="gpt_neox", types=("gpt_neox",), config=_neox, names=_neox_names),
  Family(name="gpt_oss", types=("gpt_oss",), config=_oss, names=_oss_names),
)
