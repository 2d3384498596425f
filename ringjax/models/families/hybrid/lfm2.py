"""LFM2: short convolutions between gates in most layers, attention in some.

Its mixture chooses experts by sigmoids and a learned offset.
"""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  experts,
  gated,
  llama_names,
  model,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Experts, Gated, Grouped
from ringjax.nn.linear import Norm
from ringjax.nn.recurrent_layers.short_conv import ShortConv


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of token mixer of each layer."""
  count = r.layers()
  full = r.numbers_of_layers("full_attn_idxs", list(range(count)))
  default = ["full_attention" if i in full else "conv" for i in range(count)]
  return r.kinds("layer_types", ("conv", "full_attention"), default)


def _hidden(r: ConfigReader) -> int:
  """Width of the feedforward, which a file may state before two factors."""
  # Published files have both keys, and mean the first.
  key = "block_ff_dim" if r.has("block_ff_dim") else "intermediate_size"
  hidden = r.whole(key, default=12288)
  r.ignore("block_ff_dim", "intermediate_size")
  factor = r.positive("block_ffn_dim_multiplier", absent=1.0)
  unit = r.whole("block_multiple_of", default=256)
  if r.flag("block_auto_adjust_ff_dim", default=True):
    hidden = int(2 * hidden / 3)
    if factor is not None:
      if factor * hidden > 2**40:
        key = "block_ffn_dim_multiplier"
        raise r.error(key, factor, "a feedforward of up to 2^40 numbers")
      hidden = -(-int(factor * hidden) // unit) * unit
  if hidden < 1:
    raise r.error("intermediate_size", hidden, "a width above 0 after factors")
  return hidden


def _lfm2(
  r: ConfigReader,
  name: str,
  feedforward: Gated | list[Experts | Gated],
) -> TransformerConfig:
  norm = Norm(eps=r.positive("norm_eps", "block_norm_eps", default=1e-5))
  width = r.whole("hidden_size")
  mixers = {
    "full_attention": attention(r, r.rope(theta=1e6), qk_norm=norm),
    "conv": ShortConv(
      channels=width,
      taps=r.whole("conv_L_cache", default=3, least=2),
      bias=r.flag("conv_bias", default=False),
    ),
  }
  # Published files repeat other keys with these, or state how the weights were
  # initialised. A width or a number of heads that differs is refused.
  r.only("conv_dim", width)
  r.only("conv_dim_out", width)
  r.only("block_dim", width)
  r.only("num_heads", r.heads()[0])
  r.only("block_use_swiglu", True)
  r.only("conv_use_xavier_init", True)
  r.only("block_use_xavier_init", True)
  r.ignore("block_mlp_init_scale", "block_out_init_scale", "use_pos_enc")
  return model(
    r,
    name,
    [mixers[kind] for kind in _kinds(r)],
    feedforward,
    norm,
    tied=r.flag("tie_embedding", default=True),
  )


def _config(r: ConfigReader) -> TransformerConfig:
  return _lfm2(r, "lfm2", Gated(hidden=_hidden(r), act="silu"))


def _mixture(r: ConfigReader) -> TransformerConfig:
  router = Grouped(
    renormalise=r.flag("norm_topk_prob", default=True),
    scale=r.positive("routed_scaling_factor", default=1.0),
  )
  sparse = experts(
    r,
    router,
    count=("num_experts",),
    correction=r.flag("use_expert_bias", default=True),
  )
  r.only("hidden_act", "silu")
  dense, first = gated(r), r.whole("num_dense_layers", default=2, least=0)
  layers = [dense if i < first else sparse for i in range(r.layers())]
  return _lfm2(r, "lfm2_moe", layers)


_NAMES = llama_names(
  {
    "attention.o": "self_attn.out_proj",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "attention.taps": "conv.conv",
    "attention.out": "conv.out_proj",
    "feedforward.gate": "feed_forward.w1",
    "feedforward.up": "feed_forward.w3",
    "feedforward.down": "feed_forward.w2",
    "feedforward.router": "feed_forward.gate",
    "pre_attention": "operator_norm",
    "pre_feedforward": "ffn_norm",
  },
  fused={
    "conv.in_proj": Fusion(
      parts=("attention.before", "attention.behind", "attention.x")
    )
  },
  norm="model.embedding_norm",
  leaves={"feedforward.correction": "feed_forward.expert_bias"},
  experts={
    "feedforward.gate": "feed_forward.experts.{}.w1.weight",
    "feedforward.up": "feed_forward.experts.{}.w3.weight",
    "feedforward.down": "feed_forward.experts.{}.w2.weight",
  },
)
FAMILIES = (
  Family(name="lfm2", config=_config, names=_NAMES),
  Family(name="lfm2_moe", config=_mixture, names=_NAMES),
)
