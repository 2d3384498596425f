"""Mixtures of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  causal,
  experts,
  gated,
  llama_names,
  model,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Experts, Gated, Softmax


def _mixtral(r: ConfigReader) -> TransformerConfig:
  mask = causal(r.whole("sliding_window", default=None))
  return model(
    r,
    "mixtral",
    attention(r, r.rope(theta=1000000.0), mask=mask),
    experts(r, Softmax(renormalise=True), hidden="intermediate_size"),
    rms(r, default=1e-5),
  )


def qwen_feedforwards(
  r: ConfigReader, sparse: Experts
) -> list[Experts | Gated]:
  """Each layer's feedforward: `sparse`, but for those that the file names."""
  dense = gated(r)
  without = r.numbers_of_layers("mlp_only_layers", [])
  step = r.whole("decoder_sparse_step", default=1)
  return [
    dense if i in without or (i + 1) % step else sparse
    for i in range(r.layers())
  ]


def _qwen3_moe(r: ConfigReader) -> TransformerConfig:
  norm = rms(r)
  slides = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", absent=4096)
  r.ignore("max_window_layers")
  r.only("qkv_bias", False)
  r.only("use_qk_norm", True)
  r.only("shared_expert_intermediate_size", 0)
  attend = attention(
    r,
    r.rope(),
    qk_norm=norm,
    mask=causal(window if slides else None),
    **biases(r),
  )
  renormalise = r.flag("norm_topk_prob", default=False)
  sparse = experts(r, Softmax(renormalise=renormalise))
  return model(r, "qwen3_moe", attend, qwen_feedforwards(r, sparse), norm)


# Where experts and a plain feedforward share a name, both are found under it.
QWEN_EXPERTS = {
  "feedforward.gate": "mlp.experts.{}.gate_proj.weight",
  "feedforward.up": "mlp.experts.{}.up_proj.weight",
  "feedforward.down": "mlp.experts.{}.down_proj.weight",
}

FAMILIES = (
  Family(
    name="mixtral",
    config=_mixtral,
    names=llama_names(
      {"feedforward.router": "block_sparse_moe.gate"},
      experts={
        "feedforward.gate": "block_sparse_moe.experts.{}.w1.weight",
        "feedforward.up": "block_sparse_moe.experts.{}.w3.weight",
        "feedforward.down": "block_sparse_moe.experts.{}.w2.weight",
      },
    ),
  ),
  Family(
    name="qwen3_moe",
    config=_qwen3_moe,
    names=llama_names({"feedforward.router": "mlp.gate"}, experts=QWEN_EXPERTS),
  ),
)
