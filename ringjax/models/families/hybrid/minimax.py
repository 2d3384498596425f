"""MiniMax-01: lightning attention, some attention, and experts.

A folder also has tables of decays in blocks of tokens. They follow from the
decay of each head, and are neither read nor written: transformers computes
those that are missing.
"""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  causal,
  experts,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.moe.mixtures import W_EXPERTS
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Softmax
from ringjax.nn.recurrent_layers.lightning import Lightning
from ringjax.nn.residuals import ScaledResidual


def _residual(r: ConfigReader, part: str) -> ScaledResidual:
  """Sum of a part's normed input and its output, with factors of the file."""
  factor = lambda name: r.number(f"{part}_{name}_factor", default=1.0)
  return ScaledResidual(keep=factor("alpha"), add=factor("beta"), of_norm=True)


def _config(r: ConfigReader) -> TransformerConfig:
  heads, _ = r.heads()
  count = r.layers()
  # How the linear attention is computed, which does not change the function.
  r.ignore("block_size")
  default = [
    "linear_attention" if i % 2 else "full_attention" for i in range(count)
  ]
  kinds = r.layer_types(default)
  # transformers turns all dims of a head, other programs as many as this says.
  r.only("rotary_dim", r.head_dim())
  mixers = {
    "linear_attention": Lightning(
      heads=heads,
      dim=r.head_dim(),
      act=r.act("hidden_act", default="silu"),
      eps=1e-6,
      layers=count,
    ),
    "full_attention": attention(
      r,
      r.rope(theta=1e6),
      mask=causal(r.whole("sliding_window", default=None)),
    ),
  }
  for kind in kinds:
    if kind not in mixers:
      raise r.error("layer_types", kind, f"one of {', '.join(mixers)}", OTHER)
  feedforward = _residual(r, "mlp")
  residuals = {
    kind: (_residual(r, part), feedforward)
    for kind, part in (
      ("linear_attention", "linear_attn"),
      ("full_attention", "full_attn"),
    )
  }
  return model(
    r,
    "minimax",
    [mixers[kind] for kind in kinds],
    experts(r, Softmax(renormalise=True), hidden="intermediate_size"),
    rms(r, default=1e-5),
    layer=[{"residuals": residuals[kind]} for kind in kinds],
  )


def _names(config: TransformerConfig) -> TensorNames:
  lightning = [
    layer.attention.heads
    for layer in config.layers
    if isinstance(layer.attention, Lightning)
  ]
  return llama_names(
    {
      "attention.z": "self_attn.output_gate",
      "attention.norm": "self_attn.norm",
      "attention.out": "self_attn.out_proj",
      "feedforward.router": "block_sparse_moe.gate",
    },
    leaves={"attention.rate": "self_attn.slope_rate"},
    fused={
      "self_attn.qkv_proj": Fusion(
        parts=tuple(f"attention.{x}" for x in "qkv"),
        groups=lightning[0],
        beside="attention.z",
      )
    }
    if lightning
    else {},
    experts=W_EXPERTS,
    buffers=(
      "rotary_emb.inv_freq",
      "self_attn.query_decay",
      "self_attn.key_decay",
      "self_attn.diagonal_decay",
    ),
  )(config)


FAMILIES = (Family(name="minimax", config=_config, names=_names),)
