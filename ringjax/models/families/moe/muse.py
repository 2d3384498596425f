"""Muse Spark and Muse Glimmer, their text models.

Most layers have a window and a rotation, every fourth has neither. Muse Spark
also has gated residuals, and experts between norms in latents.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
from ringjax.nn.residuals import GatedResidual
from ringjax.ops.rope import Rope

_FULL, _SLIDES = "full_attention", "sliding_attention"


def _ropes(
  r: ConfigReader, last_of_four: list[bool], theta: float
) -> list[Rope | None]:
  """Rotation of each layer, None for layers without.

  Args:
    r: Reader of the config.
    last_of_four: Whether a layer has none if the file does not say.
    theta: Base without `rope_parameters`.
  """
  for key in ("rope_scaling", "rope_theta"):
    # transformers has these among `rope_parameters` alone.
    r.only(key, None)
  rope = r.rope(theta=10000.0 if r.has("rope_parameters") else theta)
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


def _attentions(
  r: ConfigReader,
  norm: Norm,
  *,
  scale: float,
  theta: float = 10000.0,
  out_norm: Norm | None = None,
) -> list[Attention]:
  """Attention of each layer.

  Args:
    r: Reader of the config.
    norm: Norm of queries and keys.
    scale: Default of `qk_scale_factor`.
    theta: Base of the rotation without `rope_parameters`.
    out_norm: Norm of each head's output, or None.
  """
  count = r.layers()
  last_of_four = [(count - 1 - i) % 4 == 0 for i in range(count)]
  types = r.layer_types([_FULL if x else _SLIDES for x in last_of_four])
  window = r.whole("sliding_window", absent=2048)
  for kind in types:
    if kind not in (_FULL, _SLIDES):
      raise r.error("layer_types", kind, f"{_FULL} or {_SLIDES}")
    if kind == _SLIDES and window is None:
      raise r.error("sliding_window", None, "the number of tokens of a window")
  scale = r.positive("qk_scale_factor", default=scale)
  return [
    attention(
      r,
      rope,
      scale=scale * r.head_dim() ** -0.5,
      mask=causal(window, kind),
      qk_norm=norm,
      out_norm=out_norm,
      gated=True,
      **biases(r),
    )
    for kind, rope in zip(types, _ropes(r, last_of_four, theta), strict=True)
  ]


def _feedforwards(
  r: ConfigReader, centred: Norm, post_norm: Norm, logit_scale: float
) -> list[Experts | Gated]:
  default = ["sparse"] * r.layers()
  kinds = r.kinds("mlp_layer_types", ("dense", "sparse"), default)
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


def _spark(r: ConfigReader) -> TransformerConfig:
  eps = r.positive("rms_norm_eps", default=1e-5)
  post_eps = r.positive("post_norm_eps", default=1e-8)
  plain = Norm(eps=eps, weight=False)
  centred = Norm(eps=eps, offset=1.0)
  post_norm = Norm(eps=post_eps, offset=1.0, scaled_input=True)
  logit_scale = r.positive("output_multiplier", default=0.1767766952966369)
  temperature = r.positive("residual_gate_temperature", default=0.3)
  config = model(
    r,
    "muse_spark",
    _attentions(
      r, plain, scale=5.4730064863875, theta=500000.0, out_norm=plain
    ),
    _feedforwards(r, centred, post_norm, logit_scale),
    centred,
    layer={
      "post": True,
      "post_norms": (Norm(eps=post_eps, weight=False), post_norm),
      "residuals": (GatedResidual(temperature=temperature),) * 2,
    },
    embed_norm=plain,
    **_head(r, logit_scale),
  )
  return dataclasses.replace(config, norm=Norm(eps=eps))


def _glimmer(r: ConfigReader) -> TransformerConfig:
  eps = r.positive("rms_norm_eps", default=1e-5)
  post_norm = Norm(eps=r.positive("post_norm_eps", default=1e-8), offset=1.0)
  plain = Norm(eps=eps, weight=False)
  logit_scale = r.positive("output_multiplier", default=0.19611613513818404)
  config = model(
    r,
    "muse_glimmer",
    _attentions(r, plain, scale=3.87),
    gated(r, act=r.act("hidden_activation", default="silu")),
    Norm(eps=eps, offset=1.0),
    layer={"post": True, "post_norms": (post_norm, post_norm)},
    embed_norm=plain,
    **_head(r, logit_scale),
  )
  return dataclasses.replace(config, norm=Norm(eps=eps))


def _head(r: ConfigReader, logit_scale: float) -> dict[str, Any]:
  """Options of the logits."""
  # The whole model has its own head, whatever the text model says.
  r.only("tie_word_embeddings", False)
  cap = r.positive("final_logit_softcapping", default=20.0)
  return {"logit_scale": logit_scale, "logit_cap": cap}


def _around(name: str, architecture: str) -> Wrapper:
  """The model around a text model."""
  text = TextModel(type=f"{name}_text", architecture=architecture)
  return Wrapper(type=name, texts=(text,))


_PARTS = {
  "attention.gate": "self_attn.gate_proj",
  "pre_feedforward": "pre_feedforward_layernorm",
  "post_feedforward": "post_feedforward_layernorm",
}
_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FAMILIES = (
  Family(
    name="muse_spark",
    config=_spark,
    types=("muse_spark_text",),
    names=llama_names(
      {
        **_PARTS,
        "feedforward.router": "mlp.gate",
        "feedforward.into": "mlp.pre_expert_proj",
        "feedforward.latent_norm": "mlp.pre_expert_norm",
        "feedforward.out_norm": "mlp.experts.post_expert_norm",
        "feedforward.out_of": "mlp.post_expert_proj",
      },
      leaves={
        "attention_residual.gate": "post_attention_residual_gate.gate",
        "feedforward_residual.gate": "post_feedforward_residual_gate.gate",
        "feedforward.correction": "mlp.gate.e_score_correction_bias",
        "feedforward.down": _FUSED[1],
      },
      columns={_FUSED[0]: (("feedforward.gate", "feedforward.up"), False)},
      swapped=lambda name: name in _FUSED,
    ),
    wrapper=_around("muse_spark", "MuseSparkTextModel"),
  ),
  Family(
    name="muse_glimmer",
    config=_glimmer,
    names=llama_names({**_PARTS, "post_attention": "post_attention_layernorm"}),
    types=("muse_glimmer_text",),
    wrapper=_around("muse_glimmer", "MuseGlimmerTextModel"),
  ),
)
