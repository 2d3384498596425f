"""Mamba and Falcon-Mamba: selective state spaces, and nothing else."""

from __future__ import annotations

import math
from typing import Any

from ringjax.models.families.family import Family, model
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import NoFeedforward
from ringjax.nn.linear import Norm
from ringjax.nn.recurrent_layers.mamba1 import Mamba1


def step_rank(r: ConfigReader, key: str) -> int:
  """Size of the vector that time steps are computed from.

  Args:
    r: Reader of the config.
    key: Key of the size, whose value may be "auto": a sixteenth of the width.
  """
  # How it is computed, which does not change the result.
  r.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
  if r.value(key, default="auto") == "auto":
    return math.ceil(r.whole("hidden_size") / 16)
  return r.whole(key)


def _mixer(r: ConfigReader, **options: Any) -> Mamba1:
  r.must_be("hidden_act", "silu", default="silu")
  # How it is computed and was initialised, which does not change the function.
  r.ignore("time_step_min", "time_step_max", "time_step_floor")
  r.ignore("time_step_scale", "time_step_init_scheme", "initializer_range")
  r.ignore("rescale_prenorm_residual", "residual_in_fp32")
  # The number of channels, if it is there, counts before the factor.
  expanded = r.whole("expand", default=2) * r.whole("hidden_size")
  return Mamba1(
    channels=r.whole("intermediate_size", default=expanded),
    state=r.whole("state_size", default=16),
    rank=step_rank(r, "time_step_rank"),
    taps=r.whole("conv_kernel", default=4, least=2),
    bias=r.flag("use_bias", default=False),
    conv_bias=r.flag("use_conv_bias", default=True),
    **options,
  )


def _mamba(r: ConfigReader) -> TransformerConfig:
  norm = Norm(eps=r.positive("layer_norm_epsilon", default=1e-5))
  # Keys of the authors' own code, which transformers does not read.
  r.ignore("d_inner", "fused_add_norm", "pad_vocab_size_multiple", "rms_norm")
  r.ignore("ssm_cfg")
  mix = _mixer(r, eps=None)
  return model(r, "mamba", mix, NoFeedforward(), norm, tied=True)


def _falcon_mamba(r: ConfigReader) -> TransformerConfig:
  norm = Norm(eps=r.positive("layer_norm_epsilon", default=1e-5))
  r.ignore("use_falcon_mambapy")
  eps = r.positive("mixer_rms_eps", default=1e-6)
  mix = _mixer(r, eps=eps, norm_weights=False)
  return model(r, "falcon_mamba", mix, NoFeedforward(), norm, tied=True)


def mixer_names(where: str) -> tuple[dict, dict, dict]:
  """Parts, leaves and fused maps of a selective state space under a prefix."""
  return (
    {
      "attention.taps": f"{where}.conv1d",
      "attention.step": f"{where}.dt_proj",
      "attention.out": f"{where}.out_proj",
    },
    {"attention.log_rate": f"{where}.A_log", "attention.skip": f"{where}.D"},
    {
      f"{where}.in_proj": Fusion(parts=("attention.x", "attention.z")),
      f"{where}.x_proj": Fusion(
        parts=("attention.low", "attention.into", "attention.out_of")
      ),
    },
  )


def _names(config: TransformerConfig) -> TensorNames:
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


FAMILIES = (
  Family(name="mamba", config=_mamba, names=_names),
  Family(name="falcon_mamba", config=_falcon_mamba, names=_names),
)
