"""Gemma 1, 2 and 3 (text)."""

from __future__ import annotations

import math

from ringjax.models.families.family import (
  IMAGE_KEYS,
  Family,
  Wrapper,
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


def _act(r: ConfigReader) -> str:
  """Gemma 1's: always the tanh form, also where older files say "gelu"."""
  act = r.act("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
  r.ignore("hidden_act")
  return "gelu_tanh" if act == "gelu" else act


def _gemma(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  bias = r.flag("attention_bias", default=False)
  layer = Layer(
    attention=attention(r, r.rope(r.head_dim(heads)), bias=bias, out_bias=bias),
    feedforward=gated(r, act=_act(r)),
    norm=rms(r, 1.0),
  )
  r.must_be("use_bidirectional_attention", False, default=False)
  return model(
    r,
    "gemma",
    [layer] * r.layers(),
    tied=True,
    embed_scale=math.sqrt(r.whole("hidden_size")),
  )


def _gemma2(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  default = ["sliding_attention", "full_attention"] * count
  types = r.layer_types(count, default[:count])
  cap = lambda key, default: r.positive(key, default=r.unsaid(key, default))
  return _sandwich(
    r,
    "gemma2",
    types,
    4096,
    soft_cap=cap("attn_logit_softcapping", 50.0),
    logit_cap=cap("final_logit_softcapping", 30.0),
  )


def _gemma3(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  every = r.whole(
    "sliding_window_pattern", "_sliding_window_pattern", default=6
  )
  types = r.layer_types(
    count,
    [
      "full_attention" if (i + 1) % every == 0 else "sliding_attention"
      for i in range(count)
    ],
  )
  r.must_be("attn_logit_softcapping", None, default=None)
  cap = r.positive("final_logit_softcapping", default=None)
  return _sandwich(r, "gemma3", types, 4096, logit_cap=cap, norms=True)


def _sandwich(
  r: ConfigReader,
  name: str,
  types: tuple[str, ...],
  window: int,
  *,
  logit_cap: float | None,
  soft_cap: float | None = None,
  norms: bool = False,
) -> TransformerConfig:
  heads, _ = r.heads()
  h = r.head_dim(heads)
  act = r.act("hidden_activation", default="gelu_pytorch_tanh")
  # An older name beside it, that does not count.
  r.ignore("hidden_act")
  norm, feedforward = rms(r, 1.0), gated(r, act=act)
  bias = r.flag("attention_bias", default=False)
  scale = r.positive("query_pre_attn_scalar", default=256.0) ** -0.5
  window = r.whole("sliding_window", default=window)
  # An older name beside it.
  r.only("sliding_window_size", window)

  def layer(kind: str) -> Layer:
    slides = kind == "sliding_attention"
    if norms and slides:
      rope = r.rope(h, kind=kind, theta_key="rope_local_base_freq", plain=True)
    elif norms:
      rope = r.rope(h, kind=kind, theta=1000000.0)
    else:
      rope = r.rope(h, kind=kind)
    return Layer(
      attention=attention(
        r,
        rope,
        bias=bias,
        out_bias=bias,
        scale=scale,
        soft_cap=soft_cap,
        qk_norm=norm if norms else None,
        mask=causal(window if slides else None),
      ),
      feedforward=feedforward,
      norm=norm,
      post=True,
    )

  r.ignore("rope_local_base_freq")
  r.must_be("use_bidirectional_attention", False, default=False)
  return model(
    r,
    name,
    [layer(t) for t in types],
    tied=True,
    embed_scale=math.sqrt(r.whole("hidden_size")),
    logit_cap=logit_cap,
    # Gemma 3 states its context after linear RoPE scaling.
    scaling_counted=name == "gemma3",
  )


def _names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={
      **LLAMA,
      "post_attention": "post_attention_layernorm",
      "pre_feedforward": "pre_feedforward_layernorm",
      "post_feedforward": "post_feedforward_layernorm",
    }
  )


_GEMMA3 = Wrapper(
  type="gemma3",
  keys=(
    *IMAGE_KEYS,
    "mm_tokens_per_image",
  ),
  defaults={
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
  },
  architecture="Gemma3ForCausalLM",
  others=(
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
  ),
)

FAMILIES = (
  Family(name="gemma", types=("gemma",), config=_gemma),
  Family(name="gemma2", types=("gemma2",), config=_gemma2, names=_names),
  Family(
    name="gemma3",
    types=("gemma3_text",),
    config=_gemma3,
    names=_names,
    wrapper=_GEMMA3,
  ),
)
