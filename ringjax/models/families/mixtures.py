"""Mixtures of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  causal,
  gated,
  model,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Experts, Softmax


def _mixtral(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  count = r.whole("num_local_experts", "num_experts")
  layer = Layer(
    attention=attention(
      r,
      r.rope(r.head_dim(heads), theta=1000000.0),
      mask=causal(r.whole("sliding_window", default=None)),
    ),
    feedforward=Experts(
      experts=count,
      chosen=r.whole("num_experts_per_tok", most=count),
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="silu"),
      router=Softmax(renormalise=True),
    ),
    norm=rms(r, default=1e-5),
  )
  return model(r, "mixtral", [layer] * r.layers())


def _mixtral_names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={**LLAMA, "feedforward.router": "block_sparse_moe.gate"},
    experts={
      "feedforward.gate": "block_sparse_moe.experts.{}.w1.weight",
      "feedforward.up": "block_sparse_moe.experts.{}.w3.weight",
      "feedforward.down": "block_sparse_moe.experts.{}.w2.weight",
    },
  )


def _qwen3_moe(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  heads, _ = r.heads()
  norm = rms(r)
  bias = r.flag("attention_bias", default=False)
  slides = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", default=r.unsaid("sliding_window", 4096))
  r.ignore("max_window_layers")
  r.only("qkv_bias", False)
  r.only("use_qk_norm", True)
  r.only("shared_expert_intermediate_size", 0)
  attend = attention(
    r,
    r.rope(r.head_dim(heads)),
    bias=bias,
    out_bias=bias,
    qk_norm=norm,
    mask=causal(window if slides else None),
  )
  number = r.whole("num_local_experts", "num_experts")
  experts = Experts(
    experts=number,
    chosen=r.whole("num_experts_per_tok", most=number),
    hidden=r.whole("moe_intermediate_size"),
    act=r.act("hidden_act", default="silu"),
    router=Softmax(renormalise=r.flag("norm_topk_prob", default=False)),
  )
  dense = gated(r)
  without = r.numbers_of_layers("mlp_only_layers", [])
  step = r.whole("decoder_sparse_step", default=1)
  layers = [
    Layer(
      attention=attend,
      feedforward=(dense if i in without or (i + 1) % step != 0 else experts),
      norm=norm,
    )
    for i in range(count)
  ]
  return model(r, "qwen3_moe", layers)


# Where experts and a plain feedforward share a name, both are found under it.
QWEN_EXPERTS = {
  "feedforward.gate": "mlp.experts.{}.gate_proj.weight",
  "feedforward.up": "mlp.experts.{}.up_proj.weight",
  "feedforward.down": "mlp.experts.{}.down_proj.weight",
}


def _qwen3_moe_names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={**LLAMA, "feedforward.router": "mlp.gate"}, experts=QWEN_EXPERTS
  )


FAMILIES = (
  Family(
    name="mixtral", types=("mixtral",), config=_mixtral, names=_mixtral_names
  ),
  Family(
    name="qwen3_moe",
    types=("qwen3_moe",),
    config=_qwen3_moe,
    names=_qwen3_moe_names,
  ),
)
