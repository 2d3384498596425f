"""Gemma 3n's text model.

It has several residual streams, a low-rank residual, sparse gates, and the
parts that Gemma 4 has, too.
"""

from __future__ import annotations

import dataclasses
import math

from ringjax.models.families.dense.gemma4 import (
  NAMES,
  layer_groups,
  layer_inputs,
  unread_keys,
)
from ringjax.models.families.family import (
  Family,
  Wrapper,
  attention,
  biases,
  causal,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import Gated
from ringjax.nn.streams import LowRank, Streams

_SLIDES = "sliding_attention"


def _attentions(r: ConfigReader) -> list[Attention]:
  types = r.layer_types(pattern(r, 5))
  for kind in types:
    if kind not in (_SLIDES, "full_attention"):
      want = f"{_SLIDES} or full_attention"
      raise r.error("layer_types", kind, want)
  window = r.whole("sliding_window", default=512)
  shared = r.whole("num_kv_shared_layers", default=15, least=0)
  norm, options = rms(r), biases(r)
  groups = layer_groups(r, types, shared)

  def rope(kind: str) -> dict:
    slides = kind == _SLIDES
    return dict(
      theta=10000.0 if slides else 1000000.0,
      theta_key="rope_local_base_freq" if slides else "rope_theta",
      plain=slides,
    )

  r.ignore("rope_local_base_freq")
  return [
    attention(
      r,
      r.rope(kind=kind, **rope(kind)),
      scale=1.0,
      mask=causal(window, kind),
      qk_norm=norm,
      value_norm=dataclasses.replace(norm, weight=False),
      **group,
      **options,
    )
    for kind, group in zip(types, groups, strict=True)
  ]


def _feedforwards(r: ConfigReader, act: str) -> list[Gated]:
  count = r.layers()
  widths = r.value("intermediate_size", default=16384)
  widths = widths if isinstance(widths, list) else [widths] * count
  valid_widths = all(type(x) is int and 0 < x < 2**31 for x in widths)
  if len(widths) != count or not valid_widths:
    want = f"a whole number, or one for each of {count} layers"
    raise r.error("intermediate_size", widths, want)
  sparsity = [0.95 if i < 10 < count else 0.0 for i in range(count)]
  parts = r.value("activation_sparsity_pattern", default=sparsity)
  is_fraction = lambda x: type(x) in (int, float) and 0 <= x < 1
  if not isinstance(parts, list) or len(parts) != count:
    want = f"a list of {count} numbers from 0 to below 1"
    raise r.error("activation_sparsity_pattern", parts, want)
  if not all(map(is_fraction, parts)):
    want = "numbers from 0 to below 1"
    raise r.error("activation_sparsity_pattern", parts, want)
  return [
    Gated(hidden=width, act=act, sparsity=float(part))
    for width, part in zip(widths, parts, strict=True)
  ]


def _config(r: ConfigReader) -> TransformerConfig:
  act = r.act("hidden_activation", default="gelu_pytorch_tanh")
  norm, attentions = rms(r), _attentions(r)
  count = r.whole("altup_num_inputs", default=4, least=2, most=64)
  if count * r.whole("hidden_size") ** 2 > 2**40:
    raise r.error("altup_num_inputs", count, "maps of 2^40 numbers in all")
  # A training setting.
  r.ignore("altup_coef_clip")
  inputs = layer_inputs(r, act, default=262144)
  if inputs is None:
    raise r.error("hidden_size_per_layer_input", 0, "a number above 0")
  streams = Streams(
    count=count,
    active=r.whole("altup_active_idx", default=0, least=0, most=count - 1),
    scaled=r.flag("altup_correct_scale", default=True),
    norm=norm,
  )
  return model(
    r,
    "gemma3n",
    attentions,
    _feedforwards(r, act),
    norm,
    layer={
      "post": True,
      "inputs": inputs,
      "low_rank": LowRank(rank=r.whole("laurel_rank", default=64), norm=norm),
      "streams": streams,
    },
    tied=True,
    embed_scale=math.sqrt(r.whole("hidden_size")),
    logit_cap=r.positive("final_logit_softcapping", absent=30.0),
    inputs=inputs,
    streams=streams,
  )


def _names(config: TransformerConfig) -> object:
  common = NAMES(config)
  return llama_names(
    {
      **common.parts,
      "low_rank.left": "laurel.linear_left",
      "low_rank.right": "laurel.linear_right",
      "low_rank.norm": "laurel.post_laurel_norm",
      "streams.router": "altup.modality_router",
      "streams.norm": "altup.router_norm",
      "streams.prediction": "altup.prediction_coefs",
      "streams.correction": "altup.correction_coefs",
    },
    leaves={"streams.scale": "altup.correct_output_scale"},
    inputs=common.inputs,
    streams={
      "begin": "model.altup_projections.{}.weight",
      "end": "model.altup_unembed_projections.{}.weight",
    },
  )(config)


_WRAPPER = Wrapper(
  type="gemma3n",
  defaults={
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 15,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
  },
  architecture="Gemma3nForCausalLM",
)
FAMILIES = (
  Family(
    name="gemma3n",
    config=_config,
    names=_names,  # pyrefly: ignore
    types=("gemma3n_text",),
    unread=unread_keys,
    wrapper=_WRAPPER,
  ),
)
