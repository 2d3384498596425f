"""Falcon-H1: attention and a state space side by side in every layer."""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  gated,
  model,
  rms,
)
from ringjax.models.families.hybrid.state_space import (
  hybrid_mixer,
  hybrid_names,
  mixer_names,
)
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention_and_state import Beside


def _multipliers(r: ConfigReader, key: str, count: int) -> tuple[float, ...]:
  """A list of `count` numbers above 0; default: ones."""
  numbers = r.value(key, default=[1.0] * count)
  if not isinstance(numbers, list) or len(numbers) != count:
    raise r.error(key, numbers, f"a list of {count} numbers above 0")
  reader = r.part(key, {str(i): x for i, x in enumerate(numbers)})
  return tuple(reader.positive(str(i)) for i in range(count))


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  r.must_be("hidden_act", "silu", default="silu")
  multiplier = lambda key: r.positive(f"{key}_multiplier", default=1.0)
  attend = attention(r, r.rope(), **biases(r))
  # Scores are linear in keys, so the multiplier of keys goes to the scale.
  attend = dataclasses.replace(
    attend, scale=attend.logit_scale * multiplier("key")
  )
  normed = r.flag("mamba_rms_norm", default=False)
  last = r.flag("mamba_norm_before_gate", default=True)
  bias = r.flag("mamba_proj_bias", default=False)
  if r.flag("projectors_bias", default=False) != bias:
    want = f"{bias}, as mamba_proj_bias is"
    raise r.error("projectors_bias", not bias, want, OTHER)
  gate, v, k, q, step = _multipliers(r, "ssm_multipliers", 5)
  options = {} if normed else {"norm_groups": 0}
  mix = hybrid_mixer(
    r,
    norm,
    r.whole("mamba_d_ssm", absent=1024),
    gate_last=normed and last,
    scales=(gate, v, k, q, step),
    **options,
  )
  r.ignore("mamba_expand")
  # The width's former definition, and that there is a feedforward.
  r.ignore("mlp_expansion_factor")
  r.only("mamba_use_mlp", True)
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  of_gate, of_down = _multipliers(r, "mlp_multipliers", 2)
  return model(
    r,
    "falcon_h1",
    Beside(
      attention=attend,
      state=mix,
      attention_in=multiplier("attention_in"),
      attention_out=multiplier("attention_out"),
      state_in=multiplier("ssm_in"),
      state_out=multiplier("ssm_out"),
    ),
    dataclasses.replace(feedforward, gate_scale=of_gate, scale=of_down),
    norm,
    embed_scale=multiplier("embedding"),
    logit_scale=multiplier("lm_head"),
  )


_PARTS, _LEAVES, _FUSED = mixer_names("mamba", "attention.state")
_NAMES = hybrid_names(
  _PARTS | {f"attention.attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"},
  _LEAVES,
  _FUSED,
)
FAMILIES = (Family(name="falcon_h1", config=_config, names=_NAMES),)
