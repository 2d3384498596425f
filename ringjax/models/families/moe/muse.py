"""Muse Spark: gated residuals, and experts between norms in latents.

Most layers have a window and a rotation, every fourth has neither.
"""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import (
  Family,
  TextModel,
  Wrapper,
  attention,
  biases,
  causal,
  gated,
  llama_names,
  model,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import Experts, Gated, Grouped
from ringjax.nn.linear import Norm
from ringjax.nn.streams import ResidualGate
from ringjax.ops.rope import Rope

_TYPE = "muse_spark_text"
_FULL, _SLIDES = "full_attention", "sliding_attention"


def _ropes(r: ConfigReader, last_of_four: list[bool]) -> list[Rope | None]:
  """Rotation of each layer, None for layers without."""
  for key in ("rope_scaling", "rope_theta"):
    # transformers has these among `rope_parameters` alone.
    r.only(key, None)
  rope = r.rope(theta=10000.0 if r.has("rope_parameters") else 500000.0)
  bases = r.value(
    "layer_rope_theta", default=[0 if x else rope.theta for x in last_of_four]
  )
  want = f"{len(last_of_four)} numbers, each 0 or {rope.theta}, as rope_theta"
  if (
    not isinstance(bases, list)
    or len(bases) != len(last_of_four)
    or not all(x in (0, rope.theta) for x in bases)
  ):
    raise r.error("layer_rope_theta", bases, want)
  return [rope if x else None for x in bases]


def _attentions(r: ConfigReader, norm: Norm) -> list[Attention]:
  count = r.layers()
  last_of_four = [(count - 1 - i) % 4 == 0 for i in range(count)]
  types = r.layer_types([_FULL if x else _SLIDES for x in last_of_four])
  window = r.whole("sliding_window", absent=2048)
  for kind in types:
    if kind not in (_FULL, _SLIDES):
      raise r.error("layer_types", kind, f"{_FULL} or {_SLIDES}")
    if kind == _SLIDES and window is None:
      raise r.error("sliding_window", None, "the number of tokens of a window")
  scale = r.positive("qk_scale_factor", default=5.4730064863875)
  return [
    attention(
      r,
      rope,
      scale=scale * r.head_dim() ** -0.5,
      mask=causal(window, kind),
      qk_norm=norm,
      out_norm=norm,
      gated=True,
      **biases(r),
    )
    for kind, rope in zip(types, _ropes(r, last_of_four), strict=True)
  ]


def _feedforwards(
  r: ConfigReader, centred: Norm, post_norm: Norm, logit_scale: float
) -> list[Experts | Gated]:
  count = r.layers()
  kinds = r.value("mlp_layer_types", default=["sparse"] * count)
  if (
    not isinstance(kinds, list)
    or len(kinds) != count
    or not all(kind in ("dense", "sparse") for kind in kinds)
  ):
    want = f"{count} names, each dense or sparse"
    raise r.error("mlp_layer_types", kinds, want)
  number = r.whole("num_local_experts", least=2, default=256)
  sparse = Experts(
    experts=number,
    chosen=r.whole("num_experts_per_tok", default=8, most=number),
    hidden=r.whole("moe_intermediate_size", default=4096),
    act=r.act("hidden_act", default="silu"),
    router=Grouped(
      scale=r.positive("routed_scaling_factor", default=1.0),
      logit_scale=logit_scale,
    ),
    correction=True,
    latent=r.whole("moe_hidden_size", default=4096),
    latent_norm=centred,
    out_norm=post_norm,
  )
  dense = gated(r)
  return [dense if kind == "dense" else sparse for kind in kinds]


def _muse(r: ConfigReader) -> TransformerConfig:
  eps = r.positive("rms_norm_eps", default=1e-5)
  post_eps = r.positive("post_norm_eps", default=1e-8)
  plain = Norm(eps=eps, weight=False)
  centred = Norm(eps=eps, offset=1.0)
  post_norm = Norm(eps=post_eps, offset=1.0, scaled_input=True)
  logit_scale = r.positive("output_multiplier", default=0.1767766952966369)
  # The whole model has its own head, whatever the text model says.
  r.only("tie_word_embeddings", False)
  temperature = r.positive("residual_gate_temperature", default=0.3)
  config = model(
    r,
    "muse_spark",
    _attentions(r, plain),
    _feedforwards(r, centred, post_norm, logit_scale),
    centred,
    layer={
      "post": True,
      "post_norms": (Norm(eps=post_eps, weight=False), post_norm),
      "residual_gate": ResidualGate(temperature=temperature),
    },
    embed_norm=plain,
    logit_scale=logit_scale,
    logit_cap=r.positive("final_logit_softcapping", default=20.0),
  )
  return dataclasses.replace(config, norm=Norm(eps=eps))


_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FAMILIES = (
  Family(
    name="muse_spark",
    config=_muse,
    types=(_TYPE,),
    names=llama_names(
      {
        "attention.gate": "self_attn.gate_proj",
        "pre_feedforward": "pre_feedforward_layernorm",
        "post_feedforward": "post_feedforward_layernorm",
        "feedforward.router": "mlp.gate",
        "feedforward.into": "mlp.pre_expert_proj",
        "feedforward.latent_norm": "mlp.pre_expert_norm",
        "feedforward.out_norm": "mlp.experts.post_expert_norm",
        "feedforward.out_of": "mlp.post_expert_proj",
      },
      leaves={
        "attention_sum.gate": "post_attention_residual_gate.gate",
        "feedforward_sum.gate": "post_feedforward_residual_gate.gate",
        "feedforward.correction": "mlp.gate.e_score_correction_bias",
        "feedforward.down": _FUSED[1],
      },
      columns={_FUSED[0]: (("feedforward.gate", "feedforward.up"), False)},
      swapped=lambda name: name in _FUSED,
    ),
    wrapper=Wrapper(
      type="muse_spark",
      texts=(TextModel(type=_TYPE, architecture="MuseSparkTextModel"),),
    ),
  ),
)
