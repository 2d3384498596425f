"""The model families: how each one's config and tensor names are read.

A family is data, and a few lines of code for its differences.
"""

from __future__ import annotations

from ringjax.models.families.dense import (
  falcon,
  gemma,
  gemma3n,
  gemma4,
  gpt,
  layer_norm,
  learned,
  llama,
  llama_kin,
)
from ringjax.models.families.family import Family, Wrapper
from ringjax.models.families.hybrid import (
  bailing_hybrid,
  falcon_h1,
  glm5_next,
  jamba,
  kimi_linear,
  lfm2,
  minimax,
  nemotron_h,
  olmo_hybrid,
  qwen3_next,
  qwen4_exp,
  recurrent_gemma,
  selective_state_space,
  state_space,
  zamba2,
)
from ringjax.models.families.moe import (
  deepseek,
  deepseek_kin,
  deepseek_v4,
  hunyuan4,
  llama4,
  longcat,
  mimo,
  minimax_m3,
  mistral_large4,
  mixtures,
  muse,
)
from ringjax.models.families.with_images import SHARED

_MODULES = (
  bailing_hybrid,
  deepseek,
  deepseek_kin,
  deepseek_v4,
  falcon,
  falcon_h1,
  gemma,
  gemma3n,
  gemma4,
  glm5_next,
  gpt,
  hunyuan4,
  jamba,
  kimi_linear,
  layer_norm,
  lfm2,
  learned,
  llama,
  llama4,
  llama_kin,
  longcat,
  mimo,
  minimax,
  minimax_m3,
  mistral_large4,
  mixtures,
  muse,
  nemotron_h,
  olmo_hybrid,
  qwen3_next,
  qwen4_exp,
  recurrent_gemma,
  selective_state_space,
  state_space,
  zamba2,
)
FAMILIES: dict[str, Family] = {
  family.name: family for module in _MODULES for family in module.FAMILIES
}
# Models of text and images, by their `model_type`.
WRAPPERS: dict[str, Wrapper] = {
  wrapper.type: wrapper
  for wrapper in (*(x.wrapper for x in FAMILIES.values()), *SHARED)
  if wrapper is not None
}

__all__ = ["FAMILIES", "WRAPPERS", "Family", "Wrapper"]
