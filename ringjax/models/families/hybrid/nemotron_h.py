"""Nemotron-H: layers that are a state space, attention or a feedforward alone.

A layer of the checkpoint that mixes tokens and the feedforward after it, if
there is one, form one layer here.
"""

from __future__ import annotations

import math

from ringjax.models.families.family import (
  Family,
  attention,
  llama_names,
  model,
)
from ringjax.models.families.hybrid.state_space import (
  mixer,
  mixer_names,
  step_limit,
)
from ringjax.models.families.moe.deepseek import grouped_router
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.block import Feedforward, Mixer
from ringjax.nn.feedforward import Experts, NoFeedforward, Plain
from ringjax.nn.linear import Norm

_LETTERS = {
  "M": "linear_attention",
  "*": "full_attention",
  "-": "mlp",
  "E": "moe",
}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of each layer of the checkpoint."""
  keys = ("layers_block_type", "layer_types")
  kinds = r.value(*keys, default=None)
  letters = r.text("hybrid_override_pattern", default="")
  if kinds is None and letters:
    kinds = [_LETTERS.get(x, x) for x in letters]
  if kinds is None:
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
  known_kinds = list(_LETTERS.values())
  plain = lambda x: _OLDER.get(x, x) if isinstance(x, str) else x
  kinds = [plain(x) for x in kinds] if isinstance(kinds, list) else kinds
  if (
    not isinstance(kinds, list)
    or not 0 < len(kinds) <= 1000
    or not all(kind in known_kinds for kind in kinds)
  ):
    want = f"a list of 1 to 1000 of {', '.join(known_kinds)}"
    raise r.error(keys[0], kinds, want)
  count = r.whole("num_hidden_layers", default=len(kinds))
  if count != len(kinds):
    want = f"the {len(kinds)} layers of {keys[0]}"
    raise r.error("num_hidden_layers", count, want)
  return kinds


def _experts(r: ConfigReader) -> Experts:
  # Experts are chosen in the same way, whatever these keys say; the shared one
  # has its width from a separate key.
  r.ignore("n_shared_experts", "moe_shared_expert_overlap")
  count = ("n_routed_experts", "num_local_experts")
  router, max_chosen = grouped_router(r, count=count)
  r.must_be("mlp_bias", False, default=False)
  return Experts(
    experts=r.whole(*count),
    chosen=r.whole("num_experts_per_tok", default=2, most=max_chosen),
    hidden=r.whole("moe_intermediate_size", default=7688),
    act=r.act("mlp_hidden_act", default="relu2"),
    router=router,
    correction=True,
    shared=r.whole("moe_shared_expert_intermediate_size", default=7688),
    gated=False,
    latent=r.whole("moe_latent_size", default=0, least=0),
  )


def _config(r: ConfigReader) -> TransformerConfig:
  norm = Norm(eps=r.positive("layer_norm_epsilon", default=1e-5))
  kinds = _kinds(r)
  r.must_be("mamba_hidden_act", "silu", default="silu")
  if step_limit(r) != (0.0, math.inf):
    limit = r.value("time_step_limit")
    raise r.error("time_step_limit", limit, "0 and infinity", OTHER)
  # Kernels, the dtype of states, which are float32 here, and layers that only
  # predict further tokens. The channels do not follow from `expand`.
  r.ignore("use_mamba_kernels", "mamba_ssm_cache_dtype", "mamba_proj_bias")
  r.ignore("mtp_layers_block_type", "mtp_hybrid_override_pattern", "expand")
  r.ignore("mamba_expand")
  groups = r.whole("n_groups", "mamba_n_groups", default=8)
  mixers: dict[str, Mixer] = {}
  if "linear_attention" in kinds:
    min_step = r.positive("time_step_min", "mamba_dt_min", default=0.001)
    mixers["linear_attention"] = mixer(
      r,
      r.whole("mamba_num_heads", default=128),
      r.whole("mamba_head_dim", default=64),
      groups,
      None,
      key="mamba_num_heads",
      state=r.whole("ssm_state_size", default=128),
      taps=r.whole("conv_kernel", "mamba_d_conv", default=4, least=2),
      eps=norm.eps,
      norm_groups=groups,
      bias=r.flag("use_bias", default=False),
      conv_bias=r.flag("use_conv_bias", "mamba_conv_bias", default=True),
      step_limit=(min_step, math.inf),
    )
  # No layer has a rotary embedding; the norm has a separate key.
  r.ignore("rope_theta", "partial_rotary_factor", "rms_norm_eps", "norm_eps")
  if "full_attention" in kinds:
    r.must_be("attention_bias", False, default=False)
    # Older names of two of the other keys.
    r.only("attention_head_dim", r.head_dim())
    r.only("num_query_groups", r.heads()[1])
    mixers["full_attention"] = attention(r, None)
  others: dict[str, Feedforward] = {}
  if "moe" in kinds:
    others["moe"] = _experts(r)
  if "mlp" in kinds:
    others["mlp"] = Plain(
      hidden=r.whole("intermediate_size", default=21504),
      act=r.act("mlp_hidden_act", default="relu2"),
      bias=r.flag("mlp_bias", default=False),
    )
  mixing: list[Mixer] = []
  feedforwards: list[Feedforward] = []
  for i, kind in enumerate(kinds):
    if kind in mixers:
      mixing.append(mixers[kind])
      feedforwards.append(NoFeedforward())
    elif i == 0 or kinds[i - 1] not in mixers:
      want = f"a layer that mixes tokens before the {kind} of layer {i}"
      raise r.error("layers_block_type", kinds, want, OTHER)
    else:
      feedforwards[-1] = others[kind]
  # Keys of kinds of layers that the model does not have.
  r.ignore(*(key for key in _OF_LAYERS if r.has(key)))
  return model(r, "nemotron_h", mixing, feedforwards, norm)


_OF_LAYERS = (
  "attention_head_dim", "chunk_size", "conv_kernel", "head_dim",
  "intermediate_size", "mamba_head_dim", "mamba_num_heads", "mlp_hidden_act",
  "moe_intermediate_size", "moe_latent_size",
  "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
  "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
  "num_attention_heads", "num_experts_per_tok", "num_key_value_heads",
  "num_local_experts", "num_logits_to_keep", "num_query_groups",
  "rescale_prenorm_residual", "residual_in_fp32", "routed_scaling_factor",
  "ssm_state_size", "time_step_floor", "time_step_max", "time_step_min",
  "topk_group", "use_bias", "use_conv_bias",
)  # fmt: skip


def _names(config: TransformerConfig) -> TensorNames:
  parts, leaves, fused = mixer_names("mixer")
  first, numbers = 0, []
  for layer in config.layers:
    numbers.append(first)
    first += 1 if isinstance(layer.feedforward, NoFeedforward) else 2
  second = ("feedforward.", "pre_feedforward.")
  return llama_names(
    {
      **parts,
      **{f"attention.{x}": f"mixer.{x}_proj" for x in "qkvo"},
      "feedforward.up": "mixer.up_proj",
      "feedforward.down": "mixer.down_proj",
      "feedforward.router": "mixer.gate",
      "feedforward.into": "mixer.fc1_latent_proj",
      "feedforward.out_of": "mixer.fc2_latent_proj",
      "feedforward.shared.up": "mixer.shared_experts.up_proj",
      "feedforward.shared.down": "mixer.shared_experts.down_proj",
      "pre_attention": "norm",
      "pre_feedforward": "norm",
    },
    layer="backbone.layers.{}.",
    number=lambda layer, path: numbers[layer] + path.startswith(second),
    leaves={
      **leaves,
      "feedforward.correction": "mixer.gate.e_score_correction_bias",
    },
    fused=fused,
    experts={
      "feedforward.up": "mixer.experts.{}.up_proj.weight",
      "feedforward.down": "mixer.experts.{}.down_proj.weight",
    },
    embed="backbone.embeddings",
    norm="backbone.norm_f",
  )(config)


FAMILIES = (
  Family(
    name="nemotron_h",
    config=_config,
    names=_names,
    # Layers that predict the tokens after the next one.
    unread=lambda config: ("mtp.",),
  ),
)
