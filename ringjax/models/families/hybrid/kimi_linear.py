"""Kimi Linear: three delta attentions to one latent attention, and experts."""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  experts,
  gated,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.moe.deepseek import grouped_router
from ringjax.models.families.moe.mixtures import W_EXPERTS, shared_names
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.block import Feedforward
from ringjax.nn.recurrent_layers.channel_delta import ChannelDelta


def _delta(r: ConfigReader) -> tuple[ChannelDelta, list[str]]:
  """The recurrent mixer, and the kind of each layer."""
  count = r.layers()
  part = r.part("linear_attn_config", r.value("linear_attn_config", default={}))
  # In the part, as published, or next to the other keys.
  sizes = {}
  for key, outer_key, default, minimum in (
    ("num_heads", "linear_num_heads", 32, 1),
    ("head_dim", "linear_head_dim", 128, 1),
    ("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 2),
  ):
    sizes[key] = part.whole(
      key,
      least=minimum,
      default=r.whole(outer_key, default=default, least=minimum),
    )
  # Layer numbers begin at 1 there.
  full = part.numbers_of_layers("full_attn_layers", [])
  linear = part.numbers_of_layers("kda_layers", [])
  listed = part.has("full_attn_layers") and part.has("kda_layers")
  if listed and sorted(full + linear) != list(range(1, count + 1)):
    want = f"each of the layers 1 to {count} once, here or in kda_layers"
    raise part.error("full_attn_layers", full, want)
  part.finish()
  if listed:
    is_full = lambda i: i + 1 in full
  else:
    is_full = lambda i: i > 0 and i % 4 == 0
  names = ("linear_attention", "full_attention")
  default = [names[is_full(i)] for i in range(count)]
  kinds = r.kinds("layer_types", names, default)
  mixer = ChannelDelta(
    heads=sizes["num_heads"],
    dim=sizes["head_dim"],
    rank=sizes["head_dim"],
    taps=sizes["short_conv_kernel_size"],
    eps=r.positive("rms_norm_eps", default=1e-5),
  )
  return mixer, kinds


def _latent(r: ConfigReader) -> Latent:
  """Latent attention without a rotary embedding."""
  heads, kv_heads = r.heads()
  if kv_heads != heads:
    raise r.error("num_key_value_heads", kv_heads, f"the {heads} heads")
  r.only("q_lora_rank", None)
  # Other files have keys of a rotation that the published code does not do.
  r.only("mla_use_nope", True)
  r.ignore("head_dim", "qk_head_dim", "rope_theta", "rope_scaling")
  r.ignore("rope_parameters")
  shared = r.whole("qk_rope_head_dim", default=64)
  plain = r.whole("qk_nope_head_dim", default=128)
  return Latent(
    heads=heads,
    plain=plain,
    rope=None,
    unturned=shared,
    value=r.whole("v_head_dim", default=128),
    latent=r.whole("kv_lora_rank", default=512),
    query_latent=None,
    scale=(plain + shared) ** -0.5,
    bias=r.flag("attention_bias", default=False),
    eps=1e-6,
  )


def _feedforwards(r: ConfigReader) -> list[Feedforward]:
  count = ("num_experts", "num_local_experts")
  r.must_be("moe_router_activation_func", "sigmoid", default="sigmoid")
  r.only("moe_layer_freq", 1)
  r.only("use_grouped_topk", True)
  router, max_chosen = grouped_router(
    r,
    count=count,
    group="num_expert_group",
    norm="moe_renormalize",
    scale=2.446,
  )
  hidden = "moe_intermediate_size"
  num_shared = r.whole("num_shared_experts", "n_shared_experts", default=1)
  sparse = experts(
    r,
    router,
    count=count,
    chosen=("num_experts_per_token", "num_experts_per_tok"),
    most=max_chosen,
    correction=True,
    shared=r.whole(hidden) * num_shared,
  )
  first = r.whole("first_k_dense_replace", default=1, least=0)
  names = ("dense", "sparse")
  default = [names[i >= first] for i in range(r.layers())]
  by_kind = {"dense": gated(r), "sparse": sparse}
  kinds = r.kinds("mlp_layer_types", names, default)
  return [by_kind[kind] for kind in kinds]


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  r.must_be("hidden_act", "silu", default="silu")
  if r.has("attn_output_gate"):
    got = r.value("attn_output_gate")
    raise r.error("attn_output_gate", got, "no gate", OTHER)
  delta, kinds = _delta(r)
  mixers = {"linear_attention": delta, "full_attention": _latent(r)}
  attentions = [mixers[kind] for kind in kinds]
  return model(r, "kimi_linear", attentions, _feedforwards(r), norm)


def _spellings(name: str) -> tuple[str, ...]:
  """Names of a tensor: its own, and that of a plain feedforward.

  transformers saves plain feedforwards under the name of experts, the published
  files do not.
  """
  return (name, name.replace(".block_sparse_moe.", ".mlp."))


_LAYER = {
  "attention.q_taps": "self_attn.q_conv1d",
  "attention.k_taps": "self_attn.k_conv1d",
  "attention.v_taps": "self_attn.v_conv1d",
  "attention.beta": "self_attn.b_proj",
  "attention.step_down": "self_attn.f_a_proj",
  "attention.step": "self_attn.f_b_proj",
  "attention.z_down": "self_attn.g_a_proj",
  "attention.z": "self_attn.g_b_proj",
  "attention.norm": "self_attn.o_norm",
  "attention.out": "self_attn.o_proj",
  "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
  "attention.kv_norm": "self_attn.kv_a_layernorm",
  "attention.kv": "self_attn.kv_b_proj",
  **{
    f"feedforward.{part}": f"block_sparse_moe.{part}_proj"
    for part in ("gate", "up", "down")
  },
  "feedforward.router": "block_sparse_moe.gate",
  **shared_names("block_sparse_moe.shared_experts"),
}
_NAMES = llama_names(
  _LAYER,
  leaves={
    "attention.log_rate": "self_attn.A_log",
    "attention.offset": "self_attn.dt_bias",
    "feedforward.correction": "block_sparse_moe.gate.e_score_correction_bias",
  },
  experts=W_EXPERTS,
)
FAMILIES = (
  Family(
    name="kimi_linear", config=_config, names=_NAMES, spellings=_spellings
  ),
)
