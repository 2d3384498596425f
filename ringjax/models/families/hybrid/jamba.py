"""Jamba: selective state spaces, some attention without positions, experts."""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  experts,
  gated,
  model,
  rms,
)
from ringjax.models.families.hybrid.selective_state_space import (
  mixer_names,
  step_rank,
)
from ringjax.models.families.hybrid.state_space import hybrid_names
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Softmax
from ringjax.nn.recurrent_layers.mamba1 import Mamba1


def _every(r: ConfigReader, part: str, period: int, offset: int) -> list[bool]:
  """Whether each layer has a part: the layer at `offset` in each `period`."""
  period = r.whole(f"{part}_layer_period", default=period)
  key = f"{part}_layer_offset"
  offset = r.whole(key, default=offset, least=0, most=period - 1)
  return [i % period == offset for i in range(r.layers())]


def _mixer(r: ConfigReader) -> Mamba1:
  width = r.whole("hidden_size")
  return Mamba1(
    channels=r.whole("mamba_expand", default=2) * width,
    state=r.whole("mamba_d_state", default=16),
    rank=step_rank(r, "mamba_dt_rank"),
    taps=r.whole("mamba_d_conv", default=4, least=2),
    eps=r.positive("rms_norm_eps", default=1e-6),
    bias=r.flag("mamba_proj_bias", default=False),
    conv_bias=r.flag("mamba_conv_bias", default=True),
  )


def _config(r: ConfigReader) -> TransformerConfig:
  r.must_be("hidden_act", "silu", default="silu")
  # An option of other inference code.
  r.ignore("num_logits_to_keep")
  attend, mix = attention(r, None), _mixer(r)
  full = _every(r, "attn", 8, 4)
  sparse = _every(r, "expert", 2, 1)
  expert_keys = ("num_experts", "num_local_experts")
  dense = mixture = gated(r)
  # A mixture of one expert is a plain feedforward.
  if r.whole(*expert_keys, default=16) > 1:
    mixture = experts(
      r,
      Softmax(renormalise=False),
      count=expert_keys,
      hidden="intermediate_size",
    )
  r.ignore("num_experts_per_tok")
  return model(
    r,
    "jamba",
    [attend if is_attention else mix for is_attention in full],
    [mixture if is_sparse else dense for is_sparse in sparse],
    rms(r),
  )


_PARTS, _LEAVES, _FUSED = mixer_names("mamba")
_NAMES = hybrid_names(
  {
    **_PARTS,
    "attention.low_norm": "mamba.dt_layernorm",
    "attention.into_norm": "mamba.b_layernorm",
    "attention.out_of_norm": "mamba.c_layernorm",
    "feedforward.router": "feed_forward.router",
  },
  _LEAVES,
  _FUSED,
  experts={
    f"feedforward.{part}": f"feed_forward.experts.{{}}.{part}_proj.weight"
    for part in ("gate", "up", "down")
  },
)
FAMILIES = (Family(name="jamba", config=_config, names=_NAMES),)
