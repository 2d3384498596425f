"""Qwen3-Next: three gated delta nets to one gated attention, and experts."""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  experts,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.families.mixtures import QWEN_EXPERTS, qwen_feedforwards
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention import Attention
from ringjax.nn.delta import Delta
from ringjax.nn.feedforward import Softmax


def _delta(r: ConfigReader) -> Delta:
  key_heads = r.whole("linear_num_key_heads", default=16)
  heads = r.whole("linear_num_value_heads", default=32)
  if heads % key_heads:
    want = f"a multiple of the {key_heads} key heads"
    raise r.error("linear_num_value_heads", heads, want)
  return Delta(
    key_heads=key_heads,
    heads=heads,
    key=r.whole("linear_key_head_dim", default=128),
    value=r.whole("linear_value_head_dim", default=128),
    taps=r.whole("linear_conv_kernel_dim", default=4, least=2),
    eps=r.positive("rms_norm_eps", default=1e-6),
  )


def _qwen3_next(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, offset=1.0)
  r.must_be("hidden_act", "silu", default="silu")
  r.must_be("attention_bias", False, default=False)
  every = r.whole("full_attention_interval", default=4)
  types = r.layer_types(pattern(r, every, "linear_attention"))
  mixers = {
    "linear_attention": _delta(r),
    "full_attention": attention(
      r, r.rope(partial=0.25), qk_norm=norm, gated=True
    ),
  }
  for kind in types:
    if kind not in mixers:
      raise r.error("layer_types", kind, f"one of {', '.join(mixers)}")
  sparse = experts(
    r,
    Softmax(renormalise=r.flag("norm_topk_prob", default=True)),
    count=("num_experts", "num_local_experts"),
    shared=r.whole("shared_expert_intermediate_size", default=512),
    shared_gate=True,
  )
  attentions = [mixers[kind] for kind in types]
  feedforwards = qwen_feedforwards(r, sparse)
  return model(r, "qwen3_next", attentions, feedforwards, norm)


def _names(config: TransformerConfig) -> TensorNames:
  fused: dict[str, Fusion] = {}
  for layer in config.layers:
    mixer = layer.attention
    if isinstance(mixer, Attention):
      fused["self_attn.q_proj"] = Fusion(
        parts=("attention.q", "attention.gate"), groups=mixer.heads
      )
      continue
    assert isinstance(mixer, Delta)
    fused["linear_attn.in_proj_qkvz"] = Fusion(
      parts=tuple(f"attention.{x}" for x in "qkvz"),
      groups=mixer.key_heads,
    )
    fused["linear_attn.in_proj_ba"] = Fusion(
      parts=("attention.beta", "attention.step"), groups=mixer.key_heads
    )
    fused["linear_attn.conv1d"] = Fusion(
      parts=tuple(f"attention.{x}_taps" for x in "qkv")
    )
  return llama_names(
    {
      "attention.norm": "linear_attn.norm",
      "attention.out": "linear_attn.out_proj",
      "feedforward.router": "mlp.gate",
      "feedforward.shared.gate": "mlp.shared_expert.gate_proj",
      "feedforward.shared.up": "mlp.shared_expert.up_proj",
      "feedforward.shared.down": "mlp.shared_expert.down_proj",
      "feedforward.shared_gate": "mlp.shared_expert_gate",
    },
    leaves={
      "attention.log_rate": "linear_attn.A_log",
      "attention.offset": "linear_attn.dt_bias",
    },
    fused=fused,
    experts=QWEN_EXPERTS,
  )(config)


FAMILIES = (
  Family(
    name="qwen3_next",
    config=_qwen3_next,
    names=_names,
    # A layer that guesses the token after the next one.
    unread=lambda config: ("mtp.",),
  ),
)
