"""LongCat-Flash: layers of two latent attentions with a shortcut of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import Family, llama_names, model, rms
from ringjax.models.families.moe.deepseek import latent
from ringjax.models.families.predict_layers import LONGCAT
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.shortcut_layer import ShortcutLayer
from ringjax.nn.feedforward import (
  Experts,
  Gated,
  Grouped,
  ShortcutFeedforward,
)


def _longcat(r: ConfigReader) -> TransformerConfig:
  count = r.whole("num_layers", default=28, most=500)
  # Layers as transformers counts them, by their caches.
  r.only("num_hidden_layers", 2 * count)
  # Of the authors' files; transformers has these properties in its code.
  r.only("attention_method", "MLA")
  r.only("zero_expert_type", "identity")
  r.only("mla_scale_q_lora", True)
  r.only("mla_scale_kv_lora", True)
  r.only("router_bias", False)
  r.only("norm_topk_prob", False)
  attend = latent(r, interleaved=True, theta=1e7)
  rotated, head_dim = attend.shared, r.whole("head_dim", default=64)
  if head_dim != rotated:
    got = head_dim if r.has("head_dim") else "nothing, which means 64"
    raise r.error("head_dim", got, f"{rotated}, as qk_rope_head_dim says")
  width = r.whole("hidden_size", default=6144)
  if attend.query_latent is None:
    raise r.error("q_lora_rank", None, "the size of the queries' latents")
  attend = dataclasses.replace(
    attend,
    scale=attend.scale * (width / attend.query_latent) ** 0.5,
    latent_scale=(width / attend.latent) ** 0.5,
  )
  act = r.act("hidden_act", default="silu")
  number = r.whole("n_routed_experts", "num_local_experts", default=512)
  identities = r.whole("zero_expert_num", least=0, default=256)
  sparse = Experts(
    experts=number,
    identities=identities,
    chosen=r.whole(
      "moe_topk", "num_experts_per_tok", default=12, most=number + identities
    ),
    hidden=r.whole(
      "expert_ffn_hidden_size", "moe_intermediate_size", default=2048
    ),
    act=act,
    router=Grouped(
      renormalise=False,
      scale=r.positive("routed_scaling_factor", default=6.0),
      softmax=True,
      judged=1,
    ),
    correction=True,
  )
  dense = Gated(
    hidden=r.whole("ffn_hidden_size", "intermediate_size", default=12288),
    act=act,
  )
  return model(
    r,
    "longcat_flash",
    [attend] * count,
    [ShortcutFeedforward(dense=dense, sparse=sparse)] * count,
    rms(r, default=1e-5),
    kind=ShortcutLayer,
  )


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefixes of heads for further tokens, and of maps of identities.

  transformers has, and saves, first maps of experts that are identities.
  """
  layers, experts, identities = (
    x if isinstance(x := config.get(key), int) else 0
    for key in ("num_layers", "n_routed_experts", "zero_expert_num")
  )
  prefixes = ["model.mtp."]
  prefixes += [
    f"model.layers.{layer}.mlp.experts.{experts + i}."
    for layer in range(min(layers, 1000))
    for i in range(min(identities, 1000))
  ]
  return tuple(prefixes)


_MAPS = ("gate", "up", "down")
_LATENT = {
  "q_down": "q_a_proj",
  "q_norm": "q_a_layernorm",
  "q": "q_b_proj",
  "kv_down": "kv_a_proj_with_mqa",
  "kv_norm": "kv_a_layernorm",
  "kv": "kv_b_proj",
  "o": "o_proj",
}
_PARTS = {
  "feedforward.sparse.router": "mlp.router.classifier",
}
for _i in (0, 1):
  _PARTS |= {
    f"pre_attention.{_i}": f"input_layernorm.{_i}",
    f"pre_feedforward.{_i}": f"post_attention_layernorm.{_i}",
    **{
      f"attention.{_i}.{part}": f"self_attn.{_i}.{name}"
      for part, name in _LATENT.items()
    },
    **{
      f"feedforward.dense.{_i}.{part}": f"mlps.{_i}.{part}_proj"
      for part in _MAPS
    },
  }
FAMILIES = (
  Family(
    name="longcat_flash",
    config=_longcat,
    names=llama_names(
      _PARTS,
      leaves={
        "feedforward.sparse.correction": "mlp.router.e_score_correction_bias"
      },
      experts={
        f"feedforward.sparse.{part}": f"mlp.experts.{{}}.{part}_proj.weight"
        for part in _MAPS
      },
    ),
    unread=_unread,
    predict=LONGCAT,
  ),
)
