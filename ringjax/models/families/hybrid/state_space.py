"""Mamba 2, and Granite 4's and Bamba's hybrids of it with attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ringjax.models.families.dense.llama import granite_scales
from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  experts,
  gated,
  llama_names,
  model,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Gated, NoFeedforward, Softmax
from ringjax.nn.linear import Norm
from ringjax.nn.recurrent_layers.mamba import Mamba2


def step_limit(r: ConfigReader) -> tuple[float, float]:
  """The smallest and the largest time step; infinity may be spelled out."""
  limits = r.value("time_step_limit", default=[0.0, math.inf])
  plain = lambda x: math.inf if x == {"__float__": "Infinity"} else x
  pair = [plain(x) for x in limits] if isinstance(limits, list) else []
  are_numbers = all(isinstance(x, int | float) for x in pair)
  if len(pair) != 2 or not are_numbers or not 0 <= pair[0] <= pair[1]:
    want = "two numbers, of which the second is not below the first"
    raise r.error("time_step_limit", limits, want)
  return float(pair[0]), float(pair[1])


def expanded(r: ConfigReader) -> int:
  """Channels of a state space: a multiple of the model's width."""
  expand = r.whole("expand", "mamba_expand", default=2)
  return expand * r.whole("hidden_size")


def mixer(
  r: ConfigReader,
  heads: int,
  channels: int,
  groups: int,
  inner: int | None,
  *,
  key: str = "num_heads",
  **options: object,
) -> Mamba2:
  """A state-space mixer, if the config's widths agree.

  Args:
    r: Reader of the config.
    heads: Number of heads, N.
    channels: Channels of a head.
    groups: Groups of heads.
    inner: Required number of channels in all; None: any number.
    key: Key of the number of heads.
    **options: Other options of `Mamba2`.
  """
  # How it is computed and was initialised, which does not change the function.
  r.ignore("chunk_size", "mamba_chunk_size", "time_step_rank", "time_step_min")
  r.ignore("time_step_max", "time_step_floor", "rescale_prenorm_residual")
  r.ignore("residual_in_fp32", "initializer_range", "num_logits_to_keep")
  inner = heads * channels if inner is None else inner
  if heads * channels != inner or heads % groups:
    raise r.error(
      key,
      f"{heads} of {channels} in {groups} groups",
      f"{inner} channels in all, and groups that divide the heads",
    )
  return Mamba2(
    groups=groups,
    heads=heads,
    channels=channels,
    **{"step_limit": step_limit(r), **options},  # pyrefly: ignore[bad-argument-type]
  )


def _mamba2(r: ConfigReader) -> TransformerConfig:
  norm = Norm(eps=r.positive("layer_norm_epsilon", default=1e-5))
  r.must_be("hidden_act", "silu", default="silu")
  r.only("rms_norm", True)
  groups = r.whole("n_groups", default=8)
  mix = mixer(
    r,
    r.whole("num_heads", default=128),
    r.whole("head_dim", default=64),
    groups,
    expanded(r),
    state=r.whole("state_size", default=128),
    taps=r.whole("conv_kernel", default=4, least=2),
    eps=norm.eps,
    norm_groups=groups,
    bias=r.flag("use_bias", default=False),
    conv_bias=r.flag("use_conv_bias", default=True),
  )
  return model(r, "mamba2", mix, NoFeedforward(), norm)


def _granite_hybrid(r: ConfigReader) -> TransformerConfig:
  norm = rms(r)
  kinds = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
  }
  types = r.value(
    "layer_types", "layers_block_type", default=["mamba"] * r.layers()
  )
  if (
    not isinstance(types, list)
    or len(types) != r.layers()
    or not all(kind in list(kinds) for kind in types)
  ):
    want = f"{r.layers()} names of {', '.join(kinds)}"
    raise r.error("layer_types", types, want)
  # By default no layer has a rotary embedding.
  position_type = r.text("position_embedding_type", default="nope")
  if position_type not in ("rope", "nope"):
    raise r.error("position_embedding_type", position_type, "rope or nope")
  rope = r.rope()
  scale = r.positive("attention_multiplier", default=1.0)
  mixers = {
    "attention": attention(
      r, rope if position_type == "rope" else None, scale=scale, **biases(r)
    ),
    "mamba": hybrid_mixer(r, norm),
  }
  shared = r.whole("shared_intermediate_size", default=1024)
  act = r.act("hidden_act", default="silu")
  feedforward = Gated(hidden=shared, act=act)
  if r.whole("num_local_experts", default=8, least=0):
    feedforward = experts(
      r,
      Softmax(renormalise=True),
      count=("num_local_experts",),
      hidden="intermediate_size",
      shared=shared,
    )
  r.ignore("num_experts_per_tok", "intermediate_size")
  r.only("normalization_function", "rmsnorm")
  return model(
    r,
    "granitemoehybrid",
    [mixers[kinds[kind]] for kind in types],
    feedforward,
    norm,
    **granite_scales(r),
  )


def hybrid_mixer(
  r: ConfigReader, norm: Norm, inner: int | None = None, **options: object
) -> Mamba2:
  """The state space of a hybrid, whose keys begin with "mamba_".

  Args:
    r: Reader of the config.
    norm: Norm of the model.
    inner: Channels in all; default: those of `expanded`.
    **options: Options of `Mamba2` in place of the config's.
  """
  inner = inner or expanded(r)
  heads = r.whole("mamba_n_heads", default=128)
  groups = r.whole("mamba_n_groups", default=1)
  # A number, or "auto" for the channels that make up the width.
  channels = inner // heads
  if r.value("mamba_d_head", default="auto") != "auto":
    channels = r.whole("mamba_d_head")
  settings = dict(
    state=r.whole("mamba_d_state", default=256),
    taps=r.whole("mamba_d_conv", default=4, least=2),
    eps=norm.eps,
    norm_groups=groups,
    bias=r.flag("mamba_proj_bias", default=False),
    conv_bias=r.flag("mamba_conv_bias", default=True),
  )
  settings |= options
  return mixer(
    r, heads, channels, groups, inner, key="mamba_n_heads", **settings
  )


def _bamba(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  r.must_be("hidden_act", "silu", default="silu")
  full = r.numbers_of_layers("attn_layer_indices", [])
  # A training setting.
  r.ignore("z_loss_coefficient")
  attend = attention(r, r.rope(partial=0.5), **biases(r))
  mix = hybrid_mixer(r, norm)
  mixers = [attend if i in full else mix for i in range(r.layers())]
  bias = r.flag("mlp_bias", default=False)
  return model(r, "bamba", mixers, gated(r, bias=bias), norm)


def mixer_names(where: str, path: str = "attention") -> tuple[dict, dict, dict]:
  """Parts, leaves and fused maps of a state space at a path under a prefix."""
  order = ("v", "k", "q")
  return (
    {
      f"{path}.norm": f"{where}.norm",
      f"{path}.out": f"{where}.out_proj",
    },
    {
      f"{path}.log_rate": f"{where}.A_log",
      f"{path}.offset": f"{where}.dt_bias",
      f"{path}.skip": f"{where}.D",
    },
    {
      f"{where}.in_proj": Fusion(
        parts=tuple(f"{path}.{x}" for x in ("z", *order, "step"))
      ),
      f"{where}.conv1d": Fusion(parts=tuple(f"{path}.{x}_taps" for x in order)),
    },
  )


def _mamba2_names(config: TransformerConfig) -> TensorNames:
  del config
  parts, leaves, fused = mixer_names("mixer")
  return TensorNames(
    layer="backbone.layers.{}.",
    parts={**parts, "pre_attention": "norm"},
    leaves=leaves,
    fused=fused,
    embed="backbone.embeddings",
    norm="backbone.norm_f",
  )


def _granite_names(config: TransformerConfig) -> TensorNames:
  parts, leaves, fused = mixer_names("mamba")
  sparse = not isinstance(config.layers[0].feedforward, Gated)
  shared = "feedforward.shared" if sparse else "feedforward"
  fused["shared_mlp.input_linear"] = Fusion(
    parts=(f"{shared}.gate", f"{shared}.up")
  )
  parts[f"{shared}.down"] = "shared_mlp.output_linear"
  if sparse:
    parts["feedforward.router"] = "block_sparse_moe.router.layer"
    leaves["feedforward.down"] = "block_sparse_moe.output_linear.weight"
  columns = {
    "block_sparse_moe.input_linear.weight": (
      ("feedforward.gate", "feedforward.up"),
      False,
    )
  }
  return llama_names(
    parts,
    leaves=leaves,
    fused=fused,
    columns=columns if sparse else {},
    swapped=lambda name: (
      name.startswith("block_sparse_moe.")
      and name.endswith("put_linear.weight")
    ),
  )(config)


def hybrid_names(
  parts: dict[str, str] | None = None,
  leaves: dict[str, str] | None = None,
  fused: dict[str, Fusion] | None = None,
  **options: Any,
) -> Callable[[TransformerConfig], TensorNames]:
  """Tensor names of hybrids that follow Jamba's: Bamba's, Falcon H1's."""
  return llama_names(
    {
      "feedforward.gate": "feed_forward.gate_proj",
      "feedforward.up": "feed_forward.up_proj",
      "feedforward.down": "feed_forward.down_proj",
      "pre_feedforward": "pre_ff_layernorm",
      **(parts or {}),
    },
    leaves=leaves or {},
    fused=fused or {},
    norm="model.final_layernorm",
    **options,
  )


_bamba_names = hybrid_names(*mixer_names("mamba"))


FAMILIES = (
  Family(name="mamba2", config=_mamba2, names=_mamba2_names),
  Family(name="granitemoehybrid", config=_granite_hybrid, names=_granite_names),
  Family(name="bamba", config=_bamba, names=_bamba_names),
)
