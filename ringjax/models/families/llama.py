"""Llama and the families that differ from it in a detail or two."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringjax.models.families.family import (
  Family,
  attention,
  causal,
  gated,
  model,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Plain
from ringjax.nn.linear import Norm
from ringjax.ops.rope import LongRope


def _llama(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  bias = r.flag("attention_bias", default=False)
  layer = Layer(
    attention=attention(r, r.rope(r.head_dim(heads)), bias=bias, out_bias=bias),
    feedforward=gated(r, bias=r.flag("mlp_bias", default=False)),
    norm=rms(r),
  )
  return model(r, "llama", [layer] * r.layers())


def _mistral(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  window = r.whole("sliding_window", default=r.unsaid("sliding_window", 4096))
  layer = Layer(
    attention=attention(r, r.rope(r.head_dim(heads)), mask=causal(window)),
    feedforward=gated(r),
    norm=rms(r),
  )
  return model(r, "mistral", [layer] * r.layers())


def qwen_windows(r: ConfigReader, count: int) -> list[int | None]:
  """Each layer's window: later layers slide, where windows are on."""
  on = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", default=r.unsaid("sliding_window", 4096))
  first = r.whole("max_window_layers", default=28, least=0)
  default = [
    "sliding_attention" if on and i >= first else "full_attention"
    for i in range(count)
  ]
  types = r.layer_types(count, default)
  # Off is off, also where the file names layers that would slide.
  return [window if on and t == "sliding_attention" else None for t in types]


def _qwen2(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  rope = r.rope(r.head_dim(heads))
  norm, feedforward = rms(r), gated(r)
  layers = [
    Layer(
      attention=attention(r, rope, bias=True, mask=causal(window)),
      feedforward=feedforward,
      norm=norm,
    )
    for window in qwen_windows(r, r.layers())
  ]
  return model(r, "qwen2", layers)


def _qwen3(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  rope = r.rope(r.head_dim(heads))
  norm, feedforward = rms(r), gated(r)
  bias = r.flag("attention_bias", default=False)
  layers = [
    Layer(
      attention=attention(
        r, rope, bias=bias, out_bias=bias, qk_norm=norm, mask=causal(window)
      ),
      feedforward=feedforward,
      norm=norm,
    )
    for window in qwen_windows(r, r.layers())
  ]
  return model(r, "qwen3", layers)


def _phi3(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  mask = causal(r.whole("sliding_window", default=None))
  r.only("attention_bias", False)
  r.only("lm_head_bias", False)
  r.only("full_attn_mod", 1)
  r.only("interpolate_factor", 1)
  rope = r.rope(r.head_dim(heads))
  if isinstance(rope.scaling, LongRope):
    # transformers has 4096 in its place, also where the rotation says another.
    r.whole("original_max_position_embeddings")
  layer = Layer(
    attention=attention(r, rope, mask=mask),
    feedforward=gated(r),
    norm=rms(r, default=1e-5),
  )
  return model(r, "phi3", [layer] * r.layers())


def _fused(config: TransformerConfig, qkv: bool) -> dict[str, Fusion]:
  del config
  fused = {
    "mlp.gate_up_proj": Fusion(parts=("feedforward.gate", "feedforward.up"))
  }
  if qkv:
    fused["self_attn.qkv_proj"] = Fusion(
      parts=("attention.q", "attention.k", "attention.v")
    )
  return fused


def _phi3_names(config: TransformerConfig) -> TensorNames:
  return TensorNames(parts=LLAMA, fused=_fused(config, qkv=True))


def _smollm3(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  heads, _ = r.heads()
  rope = r.rope(r.head_dim(heads), theta=2000000.0)
  every = r.whole("no_rope_layer_interval", default=4)
  default = [int((i + 1) % every != 0) for i in range(count)]
  with_rope = r.flags("no_rope_layers", count, default)
  slides = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", default=None)
  types = r.layer_types(
    count,
    [
      "sliding_attention" if slides and not rope_ else "full_attention"
      for rope_ in with_rope
    ],
  )
  r.ignore("max_window_layers")
  bias = r.flag("attention_bias", default=False)
  norm = rms(r)
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  layers = [
    Layer(
      attention=attention(
        r,
        rope if turns else None,
        bias=bias,
        out_bias=bias,
        mask=causal(window if slides and kind == "sliding_attention" else None),
      ),
      feedforward=feedforward,
      norm=norm,
    )
    for turns, kind in zip(with_rope, types, strict=True)
  ]
  return model(r, "smollm3", layers, tied=True)


def _granite(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  bias = r.flag("attention_bias", default=False)
  layer = Layer(
    attention=attention(
      r,
      r.rope(r.head_dim(heads)),
      bias=bias,
      out_bias=bias,
      scale=r.positive("attention_multiplier", default=1.0),
    ),
    feedforward=gated(r, bias=r.flag("mlp_bias", default=False)),
    norm=rms(r),
    residual_scale=r.positive("residual_multiplier", default=1.0),
  )
  return model(
    r,
    "granite",
    [layer] * r.layers(),
    embed_scale=r.positive("embedding_multiplier", default=1.0),
    logit_scale=1 / r.positive("logits_scaling", default=1.0),
  )


def _starcoder2(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  bias = r.flag("use_bias", default=True)
  layer = Layer(
    attention=attention(
      r,
      r.rope(r.head_dim(heads)),
      bias=bias,
      out_bias=bias,
      mask=causal(r.whole("sliding_window", default=None)),
    ),
    feedforward=Plain(
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="gelu_pytorch_tanh"),
      bias=bias,
    ),
    norm=Norm(eps=r.positive("norm_epsilon", default=1e-5), layer=True),
  )
  # What they were called in GPT-BigCode; `hidden_act` and `norm_epsilon` count.
  r.ignore("activation_function", "layer_norm_epsilon")
  # Of the precision of the attention's weights: always float32 here.
  r.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
  r.only("mlp_type", "default")
  r.only("norm_type", "layer_norm")
  r.only("scale_attn_weights", True)
  return model(r, "starcoder2", [layer] * r.layers(), tied=True)


def _starcoder2_names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={
      **LLAMA,
      "feedforward.up": "mlp.c_fc",
      "feedforward.down": "mlp.c_proj",
    }
  )


def _glm(r: ConfigReader, name: str, post: bool) -> TransformerConfig:
  heads, _ = r.heads()
  layer = Layer(
    attention=attention(
      r,
      r.rope(r.head_dim(heads), partial=0.5, interleaved=True),
      bias=r.flag("attention_bias", default=True),
    ),
    feedforward=gated(r),
    norm=rms(r, default=1.5625e-07),
    post=post,
  )
  return model(r, name, [layer] * r.layers())


def _glm_names(config: TransformerConfig) -> TensorNames:
  parts = {
    **LLAMA,
    "post_attention": "post_self_attn_layernorm",
    "post_feedforward": "post_mlp_layernorm",
  }
  return TensorNames(parts=parts, fused=_fused(config, qkv=False))


def _olmo(
  r: ConfigReader, name: str, window: bool, theta: float
) -> TransformerConfig:
  count = r.layers()
  heads, _ = r.heads()
  h = r.head_dim(heads)
  norm, feedforward = rms(r, default=1e-5), gated(r)
  bias = r.flag("attention_bias", default=False)

  def layer(kind: str) -> Layer:
    slides = kind == "sliding_attention"
    rope = r.rope(h, kind=kind, theta=theta, plain=slides)
    return Layer(
      attention=attention(
        r,
        rope,
        bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_whole=True,
        mask=causal(r.whole("sliding_window") if slides else None),
      ),
      feedforward=feedforward,
      norm=norm,
      pre=False,
      post=True,
    )

  default = [
    "full_attention" if not window or (i + 1) % 4 == 0 else "sliding_attention"
    for i in range(count)
  ]
  types = r.layer_types(count, default) if window else default
  return model(r, name, [layer(t) for t in types])


def _olmo_names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={
      **{k: v for k, v in LLAMA.items() if not k.startswith("pre_")},
      "post_attention": "post_attention_layernorm",
      "post_feedforward": "post_feedforward_layernorm",
    }
  )


def _cohere2(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  heads, _ = r.heads()
  rope = r.rope(r.head_dim(heads), interleaved=True)
  every = r.whole(
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "layer_switch",
    default=4,
  )
  types = r.layer_types(
    count,
    [
      "full_attention" if (i + 1) % every == 0 else "sliding_attention"
      for i in range(count)
    ],
  )
  bias = r.flag("attention_bias", default=False)
  norm = Norm(
    eps=r.positive("layer_norm_eps", default=1e-5), layer=True, bias=False
  )
  window = r.whole("sliding_window", default=4096)
  full = Layer(
    attention=attention(r, bias=bias, out_bias=bias),
    feedforward=gated(r),
    norm=norm,
    parallel=True,
    shared_norm=True,
  )
  slides = dataclasses.replace(
    full,
    attention=dataclasses.replace(
      full.attention, rope=rope, mask=causal(window)
    ),
  )
  r.only("use_qk_norm", False)
  r.only("order_of_interleaved_layers", "local_attn_first")
  r.only("position_embedding_type", "rope_gptj")
  r.only("use_gated_activation", True)
  r.only("use_parallel_block", True)
  # Where a training kept its embedding; `tie_word_embeddings` says the rest.
  r.ignore("use_embedding_sharing", "use_parallel_embedding")
  layers = [slides if t == "sliding_attention" else full for t in types]
  scale = r.positive("logit_scale", default=0.0625)
  return model(r, "cohere2", layers, tied=True, logit_scale=scale)


def _family(name: str, config: Any, names: Any = None) -> Family:
  if names is None:
    return Family(name=name, types=(name,), config=config)
  return Family(name=name, types=(name,), config=config, names=names)


FAMILIES = (
  _family("llama", _llama),
  _family("mistral", _mistral),
  _family("qwen2", _qwen2),
  _family("qwen3", _qwen3),
  _family("phi3", _phi3, _phi3_names),
  _family("smollm3", _smollm3),
  _family("granite", _granite),
  _family("starcoder2", _starcoder2, _starcoder2_names),
  _family("glm", lambda r: _glm(r, "glm", post=False), _glm_names),
  _family("glm4", lambda r: _glm(r, "glm4", post=True), _glm_names),
  _family("olmo2", lambda r: _olmo(r, "olmo2", False, 10000.0), _olmo_names),
  _family("olmo3", lambda r: _olmo(r, "olmo3", True, 500000.0), _olmo_names),
  _family("cohere2", _cohere2),
)
