"""Llama 4, its text model."""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import (
  Family,
  Wrapper,
  attention,
  biases,
  experts,
  llama_names,
  model,
  rms,
  rope_flags,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Temperature
from ringjax.nn.feedforward import Gated, Sigmoid
from ringjax.ops.mask import Causal, Chunked


def _config(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  rope = r.rope(theta=500000.0, interleaved=True)
  rotated = rope_flags(r)
  types = r.layer_types(
    ["chunked_attention" if x else "full_attention" for x in rotated]
  )
  step = r.whole("interleave_moe_layer_step", default=1)
  mixed = r.numbers_of_layers("moe_layers", range(step - 1, count, step))
  chunk = r.whole("attention_chunk_size", default=8192)
  norm = rms(r, default=1e-5)
  rotated_norm = dataclasses.replace(norm, weight=False)
  rotated_norm = rotated_norm if r.flag("use_qk_norm", default=True) else None
  temperature = Temperature(
    scale=r.positive("attn_scale", default=0.1),
    floor=r.positive("floor_scale", default=8192),
  )
  # Older files have a number in place of true.
  tuned = r.value("attn_temperature_tuning", default=True)
  if not isinstance(tuned, int) or tuned < 0:
    raise r.error("attn_temperature_tuning", tuned, "true or false")
  act = r.act("hidden_act", default="silu")
  dense = Gated(hidden=r.whole("intermediate_size_mlp"), act=act)
  sparse = experts(
    r,
    Sigmoid(),
    count=("num_local_experts",),
    hidden="intermediate_size",
    scale_input=True,
    shared=r.whole("intermediate_size"),
  )
  options = {**biases(r), "qk_norm_late": True}

  attentions = [
    attention(
      r,
      rope if rotates else None,
      qk_norm=rotated_norm if rotates else None,
      temperature=temperature if tuned and not rotates else None,
      mask=Causal() & Chunked(chunk) if "chunked" in kind else Causal(),
      **options,
    )
    for rotates, kind in zip(rotated, types, strict=True)
  ]
  feedforwards = [sparse if i in mixed else dense for i in range(count)]
  return model(r, "llama4", attentions, feedforwards, norm)


_NAMES = llama_names(
  {
    "feedforward.gate": "feed_forward.gate_proj",
    "feedforward.up": "feed_forward.up_proj",
    "feedforward.down": "feed_forward.down_proj",
    "feedforward.router": "feed_forward.router",
    "feedforward.shared.gate": "feed_forward.shared_expert.gate_proj",
    "feedforward.shared.up": "feed_forward.shared_expert.up_proj",
    "feedforward.shared.down": "feed_forward.shared_expert.down_proj",
  },
  leaves={"feedforward.down": "feed_forward.experts.down_proj"},
  columns={
    "feed_forward.experts.gate_up_proj": (
      ("feedforward.gate", "feedforward.up"),
      False,
    ),
  },
)
_WRAPPER = Wrapper(
  type="llama4",
  defaults={
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
  },
  architecture="Llama4ForCausalLM",
)

FAMILIES = (
  Family(
    name="llama4",
    config=_config,
    names=_NAMES,
    types=("llama4_text",),
    wrapper=_WRAPPER,
  ),
)
