"""Gemma 1, 2 and 3 (text), and VaultGemma."""

from __future__ import annotations

import math
from typing import Any

from ringjax.models.families.family import (
  Family,
  Wrapper,
  attention,
  biases,
  causal,
  gated,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention


def _gemma(r: ConfigReader) -> TransformerConfig:
  act = r.act("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
  # Always the tanh form, even if older files say "gelu".
  act = "gelu_tanh" if act == "gelu" else act
  return _model(r, "gemma", attention(r, r.rope(), **biases(r)), act)


def _model(
  r: ConfigReader, name: str, attentions: Any, act: str, **options: Any
) -> TransformerConfig:
  """Model with the common parts of all Gemma families here."""
  r.must_be("use_bidirectional_attention", False, default=False)
  return model(
    r,
    name,
    attentions,
    gated(r, act=act),
    rms(r, 1.0),
    tied=True,
    embed_scale=math.sqrt(r.whole("hidden_size")),
    **options,
  )


def _gemma2(
  r: ConfigReader, name: str = "gemma2", post: bool = True
) -> TransformerConfig:
  return _sandwich(
    r,
    name,
    r.layer_types(pattern(r, 2)),
    {"soft_cap": r.positive("attn_logit_softcapping", absent=50.0)},
    logit_cap=r.positive("final_logit_softcapping", absent=30.0),
    layer={"post": post},
  )


def _vaultgemma(r: ConfigReader) -> TransformerConfig:
  """Gemma 2 without norms after its parts."""
  return _gemma2(r, "vaultgemma", post=False)


def _gemma3(r: ConfigReader) -> TransformerConfig:
  keys = "sliding_window_pattern", "_sliding_window_pattern"
  r.must_be("attn_logit_softcapping", None, default=None)
  return _sandwich(
    r,
    "gemma3",
    r.layer_types(pattern(r, r.whole(*keys, default=6))),
    {"qk_norm": rms(r, 1.0)},
    layer={"post": True},
    logit_cap=r.positive("final_logit_softcapping", default=None),
    # It states its context after linear RoPE scaling.
    scaling_counted=True,
  )


def _sandwich(
  r: ConfigReader,
  name: str,
  types: tuple[str, ...],
  attends: dict[str, Any],
  **options: Any,
) -> TransformerConfig:
  """Gemma 2 and later ones, some of whose layers have a sliding window."""
  act = r.act("hidden_activation", default="gelu_pytorch_tanh")
  # An older name of the same key, which does not count.
  r.ignore("hidden_act", "rope_local_base_freq")
  scale = r.positive("query_pre_attn_scalar", default=256.0) ** -0.5
  attends = {"scale": scale, **attends, **biases(r)}
  window = r.whole("sliding_window", absent=4096)
  # An older name of the same key.
  r.only("sliding_window_size", window)

  def attention_of(kind: str) -> Attention:
    if name != "gemma3":
      rope = r.rope(kind=kind)
    elif kind == "sliding_attention":
      rope = r.rope(kind=kind, theta_key="rope_local_base_freq", plain=True)
    else:
      rope = r.rope(kind=kind, theta=1000000.0)
    return attention(r, rope, mask=causal(window, kind), **attends)

  attentions = [attention_of(kind) for kind in types]
  return _model(r, name, attentions, act, **options)


_NAMES = llama_names(
  {
    "post_attention": "post_attention_layernorm",
    "pre_feedforward": "pre_feedforward_layernorm",
    "post_feedforward": "post_feedforward_layernorm",
  }
)
_GEMMA3 = Wrapper(
  type="gemma3",
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
)

FAMILIES = (
  Family(name="gemma", config=_gemma),
  Family(name="gemma2", config=_gemma2, names=_NAMES),
  Family(
    name="vaultgemma",
    config=_vaultgemma,
    names=llama_names({"pre_feedforward": "pre_feedforward_layernorm"}),
  ),
  Family(
    name="gemma3",
    config=_gemma3,
    names=_NAMES,
    types=("gemma3_text",),
    wrapper=_GEMMA3,
  ),
)
