"""DeepSeek-V3: latent attention and grouped routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  experts,
  gated,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.mixtures import QWEN_EXPERTS
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Grouped
from ringjax.nn.latent import Latent
from ringjax.ops.rope import Unscaled, yarn_magnitude


def _config(r: ConfigReader) -> TransformerConfig:
  heads, kv_heads = r.heads()
  if kv_heads != heads:
    raise r.error("num_key_value_heads", kv_heads, f"the {heads} heads")
  rotated = r.whole("qk_rope_head_dim")
  plain = r.whole("qk_nope_head_dim")
  interleaved = r.flag("rope_interleave", default=True)
  rope = r.rope(rotated, interleaved=interleaved)
  r.ignore("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")
  r.only("moe_layer_freq", 1)
  scale = (plain + rotated) ** -0.5
  scaling = r.value("rope_parameters", "rope_scaling", default={})
  if type(rope.scaling) is not Unscaled and scaling.get("mscale_all_dim"):
    factor = yarn_magnitude(
      getattr(rope.scaling, "factor", 1.0), float(scaling["mscale_all_dim"])
    )
    scale *= factor * factor
  attend = Latent(
    heads=heads,
    plain=plain,
    rope=rope,
    value=r.whole("v_head_dim"),
    latent=r.whole("kv_lora_rank"),
    query_latent=r.whole("q_lora_rank", default=None),
    scale=scale,
    bias=r.flag("attention_bias", default=False),
    eps=1e-6,
  )
  r.must_be("scoring_func", "sigmoid", default="sigmoid")
  r.must_be("topk_method", "noaux_tc", default="noaux_tc")
  keys = ("n_routed_experts", "num_local_experts")
  number, groups = r.whole(*keys), r.whole("n_group", default=8)
  if number % groups or number < 2 * groups:
    want = f"a divisor of the {number} experts, with two or more in a group"
    raise r.error("n_group", groups, want)
  best = r.whole("topk_group", default=4, most=groups)
  sparse = experts(
    r,
    Grouped(
      groups=groups,
      best=best,
      renormalise=r.flag("norm_topk_prob", default=True),
      scale=r.positive("routed_scaling_factor", default=2.5),
    ),
    count=keys,
    most=number // groups * best,
    correction=True,
    shared=r.whole("moe_intermediate_size")
    * r.whole("n_shared_experts", default=1),
  )
  dense, first = gated(r), r.whole("first_k_dense_replace", default=3, least=0)
  feedforwards = [dense if i < first else sparse for i in range(r.layers())]
  return model(r, "deepseek_v3", attend, feedforwards, rms(r))


def _names(config: TransformerConfig) -> TensorNames:
  mixer = config.layers[0].attention
  low = isinstance(mixer, Latent) and mixer.query_latent is not None
  return llama_names(
    {
      "attention.q_down": "self_attn.q_a_proj",
      "attention.q_norm": "self_attn.q_a_layernorm",
      "attention.q": "self_attn.q_b_proj" if low else "self_attn.q_proj",
      "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
      "attention.kv_norm": "self_attn.kv_a_layernorm",
      "attention.kv": "self_attn.kv_b_proj",
      "feedforward.router": "mlp.gate",
      "feedforward.shared.gate": "mlp.shared_experts.gate_proj",
      "feedforward.shared.up": "mlp.shared_experts.up_proj",
      "feedforward.shared.down": "mlp.shared_experts.down_proj",
    },
    leaves={"feedforward.correction": "mlp.gate.e_score_correction_bias"},
    experts=QWEN_EXPERTS,
  )(config)


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """The layers behind the last one, which guess the tokens after the next."""
  count, more = (
    config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers")
  )
  if not isinstance(count, int) or not isinstance(more, int):
    return ()
  return tuple(f"model.layers.{count + i}." for i in range(min(more, 1000)))


FAMILIES = (
  Family(name="deepseek_v3", config=_config, names=_names, unread=_unread),
)
