"""Qwen3-Next and Qwen 3.5: three gated delta nets to one gated attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ringjax.models.families.family import (
  Family,
  Wrapper,
  attention,
  experts,
  gated,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.families.moe.mixtures import (
  QWEN_EXPERTS,
  qwen_feedforwards,
  shared_names,
)
from ringjax.models.families.predict_layers import MTP
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.block import Feedforward
from ringjax.nn.feedforward import Experts, Softmax
from ringjax.nn.recurrent_layers.delta import Delta


def delta(r: ConfigReader) -> Delta:
  """Gated delta net of a config."""
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


def _hybrid(
  r: ConfigReader, name: str, feedforward: Feedforward | Sequence[Feedforward]
) -> TransformerConfig:
  norm = rms(r, offset=1.0)
  r.must_be("hidden_act", "silu", default="silu")
  r.must_be("attention_bias", False, default=False)
  every = r.whole("full_attention_interval", default=4)
  types = r.layer_types(pattern(r, every, "linear_attention"))
  mixers = {
    "linear_attention": delta(r),
    "full_attention": attention(
      # Images have three positions for the rotation; tokens of text have one.
      r,
      r.rope(partial=0.25, beside=("mrope_section", "mrope_interleaved")),
      qk_norm=norm,
      gated=True,
    ),
  }
  for kind in types:
    if kind not in mixers:
      raise r.error("layer_types", kind, f"one of {', '.join(mixers)}")
  attentions = [mixers[kind] for kind in types]
  return model(r, name, attentions, feedforward, norm)


def qwen_experts(r: ConfigReader) -> Experts:
  """Experts of a config, with a shared one that has a gate."""
  return experts(
    r,
    Softmax(renormalise=r.flag("norm_topk_prob", default=True)),
    count=("num_experts", "num_local_experts"),
    shared=r.whole("shared_expert_intermediate_size", default=512),
    shared_gate=True,
  )


def _qwen3_next(r: ConfigReader) -> TransformerConfig:
  return _hybrid(r, "qwen3_next", qwen_feedforwards(r, qwen_experts(r)))


def _qwen3_5(r: ConfigReader) -> TransformerConfig:
  return _hybrid(r, "qwen3_5", gated(r))


def _qwen3_5_moe(r: ConfigReader) -> TransformerConfig:
  # Its files have keys of layers that the model lacks.
  r.ignore("intermediate_size", "mlp_only_layers")
  r.only("decoder_sparse_step", 1)
  r.only("norm_topk_prob", True)
  return _hybrid(r, "qwen3_5_moe", qwen_experts(r))


def tensor_names(config: TransformerConfig, apart: bool = False) -> TensorNames:
  """Tensor names; `apart` if a delta net's maps are in several tensors."""
  fused: dict[str, Fusion] = {}
  for layer in config.layers:
    mixer = layer.attention
    if isinstance(mixer, Attention):
      fused["self_attn.q_proj"] = Fusion(
        parts=("attention.q", "attention.gate"), groups=mixer.heads
      )
      continue
    assert isinstance(mixer, Delta)
    if apart:
      fused["linear_attn.in_proj_qkv"] = Fusion(
        parts=tuple(f"attention.{x}" for x in "qkv"), beside="attention.z"
      )
    else:
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
      "attention.z": "linear_attn.in_proj_z",
      "attention.beta": "linear_attn.in_proj_b",
      "attention.step": "linear_attn.in_proj_a",
      "attention.norm": "linear_attn.norm",
      "attention.out": "linear_attn.out_proj",
      "feedforward.router": "mlp.gate",
      **shared_names("mlp.shared_expert"),
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
    names=tensor_names,
    # A layer that predicts the token after the next one.
    unread=lambda config: ("mtp.",),
    predict=MTP,
  ),
  Family(
    name="qwen3_5",
    config=_qwen3_5,
    names=functools.partial(tensor_names, apart=True),
    types=("qwen3_5_text",),
    unread=lambda config: ("mtp.",),
    predict=MTP,
    wrapper=Wrapper(type="qwen3_5", architecture="Qwen3_5ForCausalLM"),
  ),
  Family(
    name="qwen3_5_moe",
    config=_qwen3_5_moe,
    names=functools.partial(tensor_names, apart=True),
    types=("qwen3_5_moe_text",),
    unread=lambda config: ("mtp.",),
    predict=MTP,
    wrapper=Wrapper(type="qwen3_5_moe", architecture="Qwen3_5MoeForCausalLM"),
  ),
)
