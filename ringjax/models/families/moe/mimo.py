"""MiMo-V2-Flash: sliding layers with sinks, narrow values, experts.

Sliding layers have twice the kv heads of those with full attention.
"""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  causal,
  gated,
  llama_names,
  model,
)
from ringjax.models.families.moe.mixtures import QWEN_EXPERTS
from ringjax.models.families.predict_layers import MIMO
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import Experts, Gated, Grouped
from ringjax.nn.linear import Norm

_SLIDES = "sliding_attention"


def _attentions(r: ConfigReader) -> list[Attention]:
  count = r.layers()
  heads, kv_heads = r.heads()
  if heads % (2 * kv_heads):
    want = f"half of a divisor of the {heads} query heads"
    raise r.error("num_key_value_heads", kv_heads, want)
  # Whether a layer slides, in the authors' spelling.
  slides = [int(i > 0 and (i + 1) % 6 != 0) for i in range(count)]
  slides = r.flags("hybrid_layer_pattern", slides)
  types = r.layer_types([_SLIDES if x else "full_attention" for x in slides])
  # This key counts only the tokens before the query.
  tokens_before = r.whole("sliding_window_size", default=None)
  window = r.whole("sliding_window", default=129)
  window = window if tokens_before is None else tokens_before + 1
  head_dim, value = r.head_dim(), r.whole("v_head_dim", default=128)
  scale = r.positive("attention_value_scale", absent=0.707)
  # Keys of the authors' files for sliding layers.
  r.only("swa_num_attention_heads", heads)
  r.only("swa_num_key_value_heads", 2 * kv_heads)
  r.only("swa_head_dim", head_dim)
  r.only("swa_v_head_dim", value)
  r.only("add_swa_attention_sink_bias", True)
  r.only("add_full_attention_sink_bias", False)
  # A key of another program.
  r.ignore("attention_chunk_size")
  bias = r.flag("attention_bias", default=False)

  def attention_of(kind: str) -> Attention:
    if kind not in (_SLIDES, "full_attention"):
      want = f"{_SLIDES} or full_attention"
      raise r.error("layer_types", kind, want)
    slides = kind == _SLIDES
    rope = r.rope(
      kind=kind,
      theta=10000.0 if slides else 5000000.0,
      partial=0.334,
      plain=slides,
      theta_key="swa_rope_theta" if slides else "rope_theta",
    )
    return Attention(
      heads=heads,
      kv_heads=2 * kv_heads if slides else kv_heads,
      head_dim=head_dim,
      value_dim=value,
      value_scale=1.0 if scale is None else scale,
      rope=rope,
      mask=causal(window, kind),
      sinks=slides,
      bias=bias,
    )

  return [attention_of(kind) for kind in types]


def _feedforwards(r: ConfigReader) -> list[Experts | Gated]:
  count = r.layers()
  sparse = r.flags("moe_layer_freq", [int(i > 0) for i in range(count)])
  default = ["sparse" if x else "dense" for x in sparse]
  types = r.value("mlp_layer_types", default=default)
  right_length = isinstance(types, list) and len(types) == count
  if not right_length or not all(x in ("dense", "sparse") for x in types):
    want = f"{count} times dense or sparse"
    raise r.error("mlp_layer_types", types, want)
  number = r.whole("n_routed_experts", "num_local_experts", default=256)
  groups = r.whole("n_group", default=1)
  if number % groups or number < 2 * groups:
    want = f"a divisor of the {number} experts, with two or more in a group"
    raise r.error("n_group", groups, want)
  best = r.whole("topk_group", default=1, most=groups)
  r.must_be("scoring_func", "sigmoid", default="sigmoid")
  r.must_be("topk_method", "noaux_tc", default="noaux_tc")
  r.only("n_shared_experts", None)
  dense = gated(r)
  max_chosen = number // groups * best
  sparse_experts = Experts(
    experts=number,
    chosen=r.whole("num_experts_per_tok", default=8, most=max_chosen),
    hidden=r.whole("moe_intermediate_size", default=2048),
    act=r.act("hidden_act", default="silu"),
    router=Grouped(
      groups=groups,
      best=best,
      renormalise=r.flag("norm_topk_prob", default=True),
      scale=r.positive("routed_scaling_factor", default=1.0),
    ),
    correction=True,
  )
  return [sparse_experts if x == "sparse" else dense for x in types]


def _mimo(r: ConfigReader) -> TransformerConfig:
  norm = Norm(eps=r.positive("rms_norm_eps", "layernorm_epsilon", default=1e-5))
  return model(r, "mimo_v2_flash", _attentions(r), _feedforwards(r), norm)


FAMILIES = (
  Family(
    name="mimo_v2_flash",
    config=_mimo,
    names=llama_names(
      {"feedforward.router": "mlp.gate"},
      leaves={
        "attention.sinks": "self_attn.attention_sink_bias",
        "feedforward.correction": "mlp.gate.e_score_correction_bias",
      },
      experts=QWEN_EXPERTS,
    ),
    # Layers that predict the tokens after the next one.
    unread=lambda config: ("model.mtp.",),
    predict=MIMO,
  ),
)
