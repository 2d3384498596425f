"""Ling 3.0: five delta attentions to a gated latent attention, and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  experts,
  gated,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.families.moe.deepseek import (
  ROUTED,
  grouped_router,
  latent,
)
from ringjax.models.families.moe.mixtures import QWEN_EXPERTS
from ringjax.models.families.predict_layers import unread
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.block import Feedforward
from ringjax.nn.recurrent_layers.channel_delta import ChannelDelta

_COUNT = ("num_experts", "num_local_experts")


def _delta(r: ConfigReader) -> ChannelDelta:
  heads, _ = r.heads()
  # A file that transformers wrote has the width of a rotation as `head_dim`.
  dim = r.whole("linear_head_dim", default=r.whole("head_dim", default=128))
  taps = r.whole("short_conv_kernel_size", default=4, least=2)
  limit = r.number("kda_lower_bound", default=-5.0)
  if limit >= 0:
    raise r.error("kda_lower_bound", limit, "a number below 0")
  return ChannelDelta(
    heads=r.whole("linear_num_heads", default=heads),
    dim=dim,
    rank=None,
    taps=r.whole("linear_conv_kernel_dim", default=taps, least=2),
    eps=r.positive("rms_norm_eps", default=1e-6),
    lower_limit=limit if r.flag("kda_safe_gate", default=True) else None,
  )


def _latent(r: ConfigReader) -> Latent:
  r.only("q_lora_rank", None)
  mixer = latent(r, interleaved=True, query_latent=None, theta=6e6)
  return dataclasses.replace(mixer, gated=True)


def _feedforwards(r: ConfigReader) -> list[Feedforward]:
  router, max_chosen = grouped_router(
    r,
    count=_COUNT,
    group="num_expert_group",
    norm="moe_renormalize",
    groups=8,
    best=4,
    scale=2.5,
  )
  shared = r.whole("num_shared_experts", "n_shared_experts", default=1)
  sparse = experts(
    r,
    router,
    count=_COUNT,
    chosen=("num_experts_per_token", "num_experts_per_tok"),
    most=max_chosen,
    correction=True,
    shared=r.whole("moe_intermediate_size") * shared,
  )
  first = r.whole("first_k_dense_replace", default=2, least=0)
  names = ("dense", "sparse")
  default = [names[i >= first] for i in range(r.layers())]
  by_kind: dict[str, Feedforward] = {"dense": gated(r), "sparse": sparse}
  kinds = r.kinds("mlp_layer_types", names, default)
  return [by_kind[kind] for kind in kinds]


def _config(r: ConfigReader) -> TransformerConfig:
  # Convolutions have it, too, for which transformers has no other one.
  r.must_be("hidden_act", "silu", default="silu")
  # The weight of the loss of layers that predict further tokens.
  r.ignore("mtp_loss_scaling_factor")
  mixers = {"linear_attention": _delta(r), "full_attention": _latent(r)}
  every = r.whole("layer_group_size", default=6)
  default = pattern(r, every, "linear_attention")
  kinds = r.kinds(
    "layer_types", ("linear_attention", "full_attention"), default
  )
  attentions = [mixers[kind] for kind in kinds]
  return model(r, "bailing_hybrid", attentions, _feedforwards(r), rms(r))


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefixes of the layers that predict further tokens: one by default."""
  return unread({"num_nextn_predict_layers": 1, **config})


_PARTS = {
  **{f"attention.{x}_taps": f"attention.{x}_conv1d" for x in "qkv"},
  **{f"attention.{x}": f"attention.{x}_proj" for x in "qkv"},
  "attention.beta": "attention.b_proj",
  "attention.step": "attention.f_proj",
  "attention.z": "attention.g_proj",
  "attention.norm": "attention.o_norm",
  "attention.out": "attention.dense",
  "attention.gate": "attention.g_proj",
  "attention.kv_down": "attention.kv_a_proj_with_mqa",
  "attention.kv_norm": "attention.kv_a_layernorm",
  "attention.kv": "attention.kv_b_proj",
  "attention.o": "attention.dense",
  **ROUTED,
}
_NAMES = llama_names(
  _PARTS,
  leaves={
    "attention.log_rate": "attention.A_log",
    "attention.offset": "attention.dt_bias",
    "feedforward.correction": "mlp.gate.expert_bias",
  },
  experts=QWEN_EXPERTS,
  embed="model.word_embeddings",
)
FAMILIES = (
  Family(
    name="bailing_hybrid",
    config=_config,
    names=_NAMES,
    unread=_unread,
  ),
)
