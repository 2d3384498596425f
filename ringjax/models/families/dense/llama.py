"""Llama and the families that differ from it in a detail or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  causal,
  gated,
  llama_names,
  model,
  pattern,
  rms,
  rope_flags,
)
from ringjax.models.families.predict_layers import NEXTN, unread
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.block import Feedforward
from ringjax.nn.feedforward import Plain
from ringjax.nn.linear import Norm
from ringjax.nn.residuals import ScaledResidual
from ringjax.ops.rope import LongRope


def _llama(r: ConfigReader) -> TransformerConfig:
  return model(
    r,
    "llama",
    attention(r, r.rope(), **biases(r)),
    gated(r, bias=r.flag("mlp_bias", default=False)),
    rms(r),
  )


def _mistral(r: ConfigReader) -> TransformerConfig:
  mask = causal(r.whole("sliding_window", absent=4096))
  attend = attention(r, r.rope(), mask=mask)
  return model(r, "mistral", attend, gated(r), rms(r))


def qwen(
  r: ConfigReader,
  name: str,
  feedforward: Feedforward | Sequence[Feedforward],
  **options: Any,
) -> TransformerConfig:
  """Qwen's decoders: if windows are on, later layers have one."""
  windows_on = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", least=int(windows_on), absent=4096)
  first = r.whole("max_window_layers", default=28, least=0)
  types = r.layer_types(
    [
      "sliding_attention" if windows_on and i >= first else "full_attention"
      for i in range(r.layers())
    ]
  )
  # Off means no windows, even if the file names layers that would slide.
  window = window if windows_on else None
  rope = r.rope()
  attentions = [
    attention(r, rope, mask=causal(window, kind), **options) for kind in types
  ]
  return model(r, name, attentions, feedforward, rms(r))


def _qwen2(r: ConfigReader) -> TransformerConfig:
  return qwen(r, "qwen2", gated(r), bias=True)


def _qwen3(r: ConfigReader) -> TransformerConfig:
  return qwen(r, "qwen3", gated(r), qk_norm=rms(r), **biases(r))


def _phi3(r: ConfigReader) -> TransformerConfig:
  mask = causal(r.whole("sliding_window", default=None))
  r.only("attention_bias", False)
  r.only("lm_head_bias", False)
  r.only("full_attn_mod", 1)
  r.only("interpolate_factor", 1)
  rope = r.rope()
  if isinstance(rope.scaling, LongRope):
    # transformers has 4096 instead, even if the rotation has another value.
    r.whole("original_max_position_embeddings")
  attend = attention(r, rope, mask=mask)
  return model(r, "phi3", attend, gated(r), rms(r, default=1e-5))


_FUSED_GATE = {
  "mlp.gate_up_proj": Fusion(parts=("feedforward.gate", "feedforward.up"))
}
_FUSED_QKV = {
  "self_attn.qkv_proj": Fusion(
    parts=("attention.q", "attention.k", "attention.v")
  )
}


def _smollm3(r: ConfigReader) -> TransformerConfig:
  rope = r.rope(theta=2000000.0)
  rotated = rope_flags(r)
  slides = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", default=None)
  types = r.layer_types(
    [
      "sliding_attention" if slides and not x else "full_attention"
      for x in rotated
    ]
  )
  r.ignore("max_window_layers")
  window = window if slides else None
  options = biases(r)
  attentions = [
    attention(r, rope if x else None, mask=causal(window, kind), **options)
    for x, kind in zip(rotated, types, strict=True)
  ]
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  return model(r, "smollm3", attentions, feedforward, rms(r), tied=True)


def _granite(r: ConfigReader) -> TransformerConfig:
  bias = r.flag("mlp_bias", default=False)
  return granite(r, "granite", gated(r, bias=bias))


def granite(
  r: ConfigReader, name: str, feedforward: Feedforward
) -> TransformerConfig:
  """Granite's decoders: scaled embeddings, residuals, scores and logits."""
  scale = r.positive("attention_multiplier", default=1.0)
  attend = attention(r, r.rope(), scale=scale, **biases(r))
  return model(r, name, attend, feedforward, rms(r), **granite_scales(r))


def granite_scales(r: ConfigReader) -> dict[str, Any]:
  """Options of `model`: Granite's multipliers."""
  factor = r.positive("residual_multiplier", default=1.0)
  return {
    "layer": {"residuals": (ScaledResidual(add=factor),) * 2},
    "embed_scale": r.positive("embedding_multiplier", default=1.0),
    "logit_scale": 1 / r.positive("logits_scaling", default=1.0),
  }


def _starcoder2(r: ConfigReader) -> TransformerConfig:
  mask = causal(r.whole("sliding_window", default=None))
  options = biases(r, "use_bias", default=True)
  # The names in GPT-BigCode; `hidden_act` and `norm_epsilon` count.
  r.ignore("activation_function", "layer_norm_epsilon")
  # Precision of the attention's weights: always float32 here.
  r.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
  r.only("mlp_type", "default")
  r.only("norm_type", "layer_norm")
  r.only("scale_attn_weights", True)
  return model(
    r,
    "starcoder2",
    attention(r, r.rope(), mask=mask, **options),
    Plain(
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="gelu_pytorch_tanh"),
      bias=options["bias"],
    ),
    Norm(eps=r.positive("norm_epsilon", default=1e-5), layer=True),
    tied=True,
  )


def _glm(r: ConfigReader, name: str, post: bool) -> TransformerConfig:
  rope = r.rope(partial=0.5, interleaved=True)
  attend = attention(r, rope, bias=r.flag("attention_bias", default=True))
  norm = rms(r, default=1.5625e-07)
  return model(r, name, attend, gated(r), norm, layer={"post": post})


_GLM_NAMES = llama_names(
  {
    "post_attention": "post_self_attn_layernorm",
    "post_feedforward": "post_mlp_layernorm",
  },
  fused=_FUSED_GATE,
)


def olmo(
  r: ConfigReader,
  name: str,
  types: tuple[str, ...],
  theta: float,
  *,
  feedforward: Feedforward | None = None,
  eps: float = 1e-5,
) -> TransformerConfig:
  """OLMo's decoders since the second, which have norms after their parts."""
  norm = rms(r, default=eps)
  options = {**biases(r), "qk_norm": norm, "qk_norm_whole": True}

  def attention_of(kind: str) -> Attention:
    slides = kind == "sliding_attention"
    rope = r.rope(kind=kind, theta=theta, plain=slides)
    mask = causal(r.whole("sliding_window") if slides else None)
    return attention(r, rope, mask=mask, **options)

  attentions = [attention_of(kind) for kind in types]
  layer = {"pre": False, "post": True}
  return model(r, name, attentions, feedforward or gated(r), norm, layer=layer)


def _olmo2(r: ConfigReader) -> TransformerConfig:
  return olmo(r, "olmo2", ("full_attention",) * r.layers(), 10000.0)


def _olmo3(r: ConfigReader) -> TransformerConfig:
  return olmo(r, "olmo3", r.layer_types(pattern(r, 4)), 500000.0)


OLMO_PARTS: dict[str, str] = {
  **{k: v for k, v in LLAMA.items() if not k.startswith("pre_")},
  "post_attention": "post_attention_layernorm",
  "post_feedforward": "post_feedforward_layernorm",
}
_OLMO_NAMES = TensorNames(parts=OLMO_PARTS)


def _cohere2(r: ConfigReader) -> TransformerConfig:
  rope = r.rope(interleaved=True)
  keys = "sliding_window_pattern", "_sliding_window_pattern", "layer_switch"
  types = r.layer_types(pattern(r, r.whole(*keys, default=4)))
  options = biases(r)
  norm = Norm(
    eps=r.positive("layer_norm_eps", default=1e-5), layer=True, bias=False
  )
  window = r.whole("sliding_window", default=4096)
  r.only("use_qk_norm", False)
  r.only("order_of_interleaved_layers", "local_attn_first")
  r.only("position_embedding_type", "rope_gptj")
  r.only("use_gated_activation", True)
  r.only("use_parallel_block", True)
  # Training options of the embedding; `tie_word_embeddings` decides here.
  r.ignore("use_embedding_sharing", "use_parallel_embedding")
  ropes = {"sliding_attention": rope}
  attentions = [
    attention(r, ropes.get(kind), mask=causal(window, kind), **options)
    for kind in types
  ]
  return model(
    r,
    "cohere2",
    attentions,
    gated(r),
    norm,
    layer={"parallel": True, "shared_norm": True},
    tied=True,
    logit_scale=r.positive("logit_scale", default=0.0625),
  )


FAMILIES = (
  Family(name="llama", config=_llama, unread=unread, predict=NEXTN),
  Family(name="mistral", config=_mistral),
  Family(name="qwen2", config=_qwen2, unread=unread, predict=NEXTN),
  Family(name="qwen3", config=_qwen3, unread=unread, predict=NEXTN),
  Family(
    name="phi3",
    config=_phi3,
    names=llama_names(fused={**_FUSED_GATE, **_FUSED_QKV}),
  ),
  Family(name="smollm3", config=_smollm3),
  Family(name="granite", config=_granite),
  Family(
    name="starcoder2",
    config=_starcoder2,
    names=llama_names(
      {"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}
    ),
  ),
  Family(
    name="glm",
    config=lambda r: _glm(r, "glm", post=False),
    names=_GLM_NAMES,
  ),
  Family(
    name="glm4",
    config=lambda r: _glm(r, "glm4", post=True),
    names=_GLM_NAMES,
  ),
  Family(name="olmo2", config=_olmo2, names=lambda config: _OLMO_NAMES),
  Family(name="olmo3", config=_olmo3, names=lambda config: _OLMO_NAMES),
  Family(name="cohere2", config=_cohere2),
)
