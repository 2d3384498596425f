"""OLMo Hybrid: three gated delta nets to one attention.

Attention has its norms after its parts, as in OLMo 3, delta nets before.
"""

from __future__ import annotations

from typing import Any

from ringjax.models.families.dense.llama import OLMO_PARTS
from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  gated,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import Fusion
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.recurrent_layers.delta import Delta
from ringjax.ops.rope import Rope


def _delta(r: ConfigReader) -> Delta:
  query_heads, _ = r.heads()
  key_heads = r.whole("linear_num_key_heads", default=query_heads)
  heads = r.whole("linear_num_value_heads", default=query_heads)
  if heads % key_heads:
    want = f"a multiple of the {key_heads} key heads"
    raise r.error("linear_num_value_heads", heads, want)
  width = int(0.75 * r.whole("hidden_size") / key_heads)
  key = r.whole("linear_key_head_dim", default=width)
  negative = r.flag("linear_allow_neg_eigval", default=True)
  # Ranges of the first values of some weights.
  r.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min")
  r.ignore("linear_dt_max", "linear_dt_init_floor")
  return Delta(
    key_heads=key_heads,
    heads=heads,
    key=key,
    value=r.whole("linear_value_head_dim", default=2 * key),
    taps=r.whole("linear_conv_kernel_dim", default=4, least=2),
    eps=1e-5,
    most_beta=2.0 if negative else 1.0,
  )


def _kinds(r: ConfigReader) -> tuple[str, ...]:
  """Kind of each layer: both kinds are there."""
  default = pattern(r, 4, "linear_attention")
  if "full_attention" not in default:
    default[-1] = "full_attention"
  kinds = r.layer_types(default)
  if set(kinds) != {"linear_attention", "full_attention"}:
    want = "linear_attention and full_attention, each at least once"
    raise r.error("layer_types", list(kinds), want, OTHER)
  return kinds


def _rope(r: ConfigReader) -> Rope | None:
  """The rotation; None if the file says that its base is null."""
  config = r.all()
  part = config.get("rope_parameters")
  base = part if isinstance(part, dict) and "rope_theta" in part else config
  if base.get("rope_theta", 0) is not None:
    return r.rope()
  r.ignore("rope_parameters", "rope_scaling")
  return None


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r)
  # Convolutions have it, too, for which transformers has no other one.
  r.must_be("hidden_act", "silu", default="silu")
  kinds = _kinds(r)
  mixers = {
    "linear_attention": _delta(r),
    "full_attention": attention(
      r, _rope(r), qk_norm=norm, qk_norm_whole=True, **biases(r)
    ),
  }
  norms: dict[str, dict[str, Any]] = {
    "linear_attention": {},
    "full_attention": {"pre": False, "post": True},
  }
  return model(
    r,
    "olmo_hybrid",
    [mixers[kind] for kind in kinds],
    gated(r),
    norm,
    layer=[norms[kind] for kind in kinds],
  )


def _spellings(name: str) -> tuple[str, ...]:
  """Names of a tensor: its own, and those that transformers uses.

  transformers saves the first norm of an attention layer under the name of a
  delta net's second one.
  """
  others = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "post_attention_layernorm": "feedforward_layer_norm",
  }
  start, _, part = name.removesuffix(".weight").rpartition(".")
  if part not in others:
    return (name,)
  return name, f"{start}.{others[part]}.weight"


_NAMES = llama_names(
  {
    **OLMO_PARTS,
    "pre_attention": "attention_layer_norm",
    "pre_feedforward": "feedforward_layer_norm",
    **{f"attention.{x}_taps": f"linear_attn.{x}_conv1d" for x in "qkv"},
    "attention.z": "linear_attn.g_proj",
    "attention.beta": "linear_attn.b_proj",
    "attention.step": "linear_attn.a_proj",
    "attention.norm": "linear_attn.o_norm",
    "attention.out": "linear_attn.o_proj",
  },
  leaves={
    "attention.log_rate": "linear_attn.A_log",
    "attention.offset": "linear_attn.dt_bias",
  },
  # Maps that attention has, too, under other names.
  fused={
    f"linear_attn.{x}_proj": Fusion(
      parts=(f"attention.{x}",), beside="attention.z"
    )
    for x in "qkv"
  },
)
FAMILIES = (
  Family(
    name="olmo_hybrid", config=_config, names=_NAMES, spellings=_spellings
  ),
)
