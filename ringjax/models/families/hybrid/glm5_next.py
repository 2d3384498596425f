"""GLM-5.3-Flash, its text model: three delta attentions to one latent one.

The latent attention has no rotation, and its queries read the blocks of tokens
that an index chooses by pooled keys. Hyper-connections mix several streams,
whose mean is read at the end. All feedforwards are clamped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  TextModel,
  Wrapper,
  experts,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.moe.deepseek import (
  ROUTED,
  grouped_router,
)
from ringjax.models.families.moe.deepseek_kin import feedforwards, index_types
from ringjax.models.families.moe.mixtures import QWEN_EXPERTS
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import Fusion
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.pooled_latent import PooledIndex, PooledLatent
from ringjax.nn.block import Mixer
from ringjax.nn.feedforward import ClampedProduct, Experts, Gated
from ringjax.nn.recurrent_layers.channel_delta import ChannelDelta
from ringjax.nn.residuals import HyperConnection
from ringjax.nn.streams import MeanStreams

_DELTA, _INDEXED = "linear_attention", "indexed_attention"
_COUNT = ("n_routed_experts", "num_local_experts", "num_experts")


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of each layer's attention."""
  default = [_DELTA if n % 4 != 3 else _INDEXED for n in range(r.layers())]
  names = (_DELTA, _INDEXED, "full_attention")
  kinds = r.kinds("layer_types", names, default)
  return [_DELTA if kind == _DELTA else _INDEXED for kind in kinds]


def _delta(r: ConfigReader, eps: float) -> ChannelDelta:
  """Delta attention; an older object counts before the newer keys."""
  older = r.part(
    "linear_attn_config", r.value("linear_attn_config", default={})
  )
  dim = r.whole("linear_head_dim", default=128)
  heads = r.whole("linear_num_heads", default=64)
  taps = r.whole("linear_conv_kernel_dim", default=4, least=2)
  limit = r.number("linear_lower_bound", absent=-5.0)
  if "gate_lower_bound" in older.all():
    # Null counts, too.
    limit = older.number("gate_lower_bound", default=None)
  if limit is None and older.all():
    limit = -5.0 if older.flag("safe_gate", default=True) else None
  older.ignore("safe_gate", "kda_layers", "full_attn_layers")
  if limit is not None and limit >= 0:
    raise r.error("linear_lower_bound", limit, "a number below 0, or null")
  dim = older.whole("head_dim", default=dim)
  heads = older.whole("num_heads", default=heads)
  taps = older.whole("short_conv_kernel_size", default=taps, least=2)
  older.finish()
  return ChannelDelta(
    heads=heads,
    dim=dim,
    rank=dim,
    taps=taps,
    eps=eps,
    lower_limit=limit,
    flat_rates=True,
  )


def _latent(r: ConfigReader, kinds: list[str], eps: float) -> PooledLatent:
  """Latent attention without a rotation, whose index chooses blocks."""
  heads, kv_heads = r.heads()
  if kv_heads != heads:
    raise r.error("num_key_value_heads", kv_heads, f"the {heads} heads")
  r.must_be("qk_rope_head_dim", 0, default=0)
  # Of a rotation, which no layer has.
  r.ignore("head_dim", "qk_head_dim", "partial_rotary_factor")
  r.ignore("rope_parameters", "rope_scaling", "rope_theta", "rope_interleave")
  r.only("index_kpool_always_select_tail", True)
  types = index_types(r, first_full=False)
  for n, (kind, index) in enumerate(zip(kinds, types, strict=True)):
    if kind == _INDEXED and index != "full":
      want = f"full for layer {n}: indexes are not shared"
      raise r.error("indexer_types", index, want, OTHER)
  count = r.whole("index_topk", default=2048)
  block = r.whole("index_kpool", default=16, most=65536)
  if count % block:
    raise r.error("index_topk", count, f"a multiple of index_kpool, {block}")
  plain = r.whole("qk_nope_head_dim", default=256)
  return PooledLatent(
    heads=heads,
    plain=plain,
    rope=None,
    value=r.whole("v_head_dim", default=256),
    latent=r.whole("kv_lora_rank", default=512),
    query_latent=r.whole("q_lora_rank", default=1536),
    scale=plain**-0.5,
    bias=r.flag("attention_bias", default=False),
    eps=eps,
    pooled=PooledIndex(
      heads=r.whole("index_n_heads", default=32),
      dim=r.whole("index_head_dim", default=128),
      count=count,
      block=block,
    ),
  )


def _feedforwards(r: ConfigReader) -> list[Experts | Gated]:
  """Feedforward of each layer, by its name; the first three are plain."""
  # Experts and convolutions have this activation whatever the file says.
  r.must_be("hidden_act", "silu", default="silu")
  r.only("scoring_func", "sigmoid")
  r.only("topk_method", "noaux_tc")
  limit = r.positive("swiglu_limit", default=10.0)
  clamped = ClampedProduct(act="silu", limit=limit)
  router, max_chosen = grouped_router(r, count=_COUNT, scale=2.5)
  width = r.whole("moe_intermediate_size", default=2048)
  sparse = experts(
    r,
    router,
    count=_COUNT,
    most=max_chosen,
    shared=width * r.whole("n_shared_experts", default=1),
    correction=True,
    clamped=clamped,
    shared_clamped=True,
  )
  return [
    dataclasses.replace(x, clamped=clamped) if isinstance(x, Gated) else x
    for x in feedforwards(r, sparse, first=3)
  ]


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  # The factor of a loss, and layers that predict further tokens.
  r.ignore("router_aux_loss_coef", "num_nextn_predict_layers")
  count = r.whole("hc_mult", default=4, most=64)
  if ((2 + count) * count) * count * r.whole("hidden_size") > 2**40:
    raise r.error("hc_mult", count, "maps of 2^40 numbers in all")
  connection = HyperConnection(
    count=count,
    iterations=r.whole("hc_sinkhorn_iters", default=20, least=1, most=1000),
    floor=r.positive("hc_eps", default=1e-6),
    eps=norm.eps,
  )
  kinds = _kinds(r)
  mixers: dict[str, Mixer] = {
    _DELTA: _delta(r, norm.eps),
    _INDEXED: _latent(r, kinds, norm.eps),
  }
  return model(
    r,
    "glm5_next",
    [mixers[kind] for kind in kinds],
    _feedforwards(r),
    norm,
    layer={"residuals": (connection, connection)},
    streams=MeanStreams(count=count),
  )


_PARTS = {
  "attention.q_down": "self_attn.q_a_proj",
  "attention.q_norm": "self_attn.q_a_layernorm",
  "attention.q": "self_attn.q_b_proj",
  "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
  "attention.kv_norm": "self_attn.kv_a_layernorm",
  "attention.kv": "self_attn.kv_b_proj",
  "attention.index.q": "self_attn.indexer.wq_b",
  "attention.index.k": "self_attn.indexer.wk",
  "attention.index.k_norm": "self_attn.indexer.k_norm",
  "attention.index.weights": "self_attn.indexer.weights_proj",
  **{f"attention.{x}_taps": f"self_attn.{x}_conv1d" for x in "qkv"},
  "attention.beta": "self_attn.b_proj",
  "attention.step_down": "self_attn.f_a_proj",
  "attention.step": "self_attn.f_b_proj",
  "attention.z_down": "self_attn.g_a_proj",
  "attention.z": "self_attn.g_b_proj",
  "attention.norm": "self_attn.o_norm",
  "attention.out": "self_attn.o_proj",
  **ROUTED,
}
# Both kinds of attention have queries, under different names.
_FUSED = {
  "self_attn.q_proj": Fusion(parts=("attention.q",), beside="attention.beta"),
}
_LEAVES = {
  "attention.index.bias": "self_attn.indexer.index_kpool_compress_ape",
  "attention.index.gate": "self_attn.indexer.index_kpool_compress_gate",
  "attention.log_rate": "self_attn.A_log",
  "attention.offset": "self_attn.dt_bias",
  "feedforward.correction": "mlp.gate.e_score_correction_bias",
}
for _part, _name in (("attention", "attn"), ("feedforward", "ffn")):
  _LEAVES |= {
    f"{_part}_residual.map": f"hc_{_name}_fn",
    f"{_part}_residual.base": f"hc_{_name}_base",
    f"{_part}_residual.scale": f"hc_{_name}_scale",
  }


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefix of the layer that predicts further tokens."""
  return (f"model.layers.{config.get('num_hidden_layers')}.",)


FAMILIES = (
  Family(
    name="glm5_next",
    config=_config,
    names=llama_names(
      {**_PARTS, "attention.o": "self_attn.o_proj"},
      leaves=_LEAVES,
      fused=_FUSED,
      experts=QWEN_EXPERTS,
    ),
    types=("glm5_next_text",),
    unread=_unread,
    wrapper=Wrapper(
      type="glm5_next",
      texts=(
        TextModel(type="glm5_next_text", architecture="Glm5NextTextModel"),
      ),
      flat=True,
    ),
  ),
)
