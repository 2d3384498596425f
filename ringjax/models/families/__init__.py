"""The model families: what each one's config means and its tensors are named.

A family is data and the few lines in which it truly differs.
"""

from __future__ import annotations

from ringjax.models.families import (
  deepseek,
  falcon,
  gemma,
  gemma3n,
  gemma4,
  gpt,
  layer_norm,
  learned,
  llama,
  llama4,
  llama_kin,
  mimo,
  mixtures,
  qwen3_next,
  state_space,
)
from ringjax.models.families.family import Family

_MODULES = (
  deepseek,
  falcon,
  gemma,
  gemma3n,
  gemma4,
  gpt,
  layer_norm,
  learned,
  llama,
  llama4,
  llama_kin,
  mimo,
  mixtures,
  qwen3_next,
  state_space,
)
FAMILIES: dict[str, Family] = {
  family.name: family for module in _MODULES for family in module.FAMILIES
}

__all__ = ["FAMILIES", "Family"]
