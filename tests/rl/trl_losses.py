"""Losses of TRL's `GRPOTrainer` for given log-probabilities."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import numpy as np

LOSS_TYPES = {
  "grpo": "grpo",
  "dr_grpo": "dr_grpo",
  "dapo": "dapo",
  "gspo": "grpo",
  "truncated": "grpo",
}


def trl_loss(
  name: str, objective: Any, x: dict[str, Any], advantages: Any, longest: int
) -> float:
  """Loss that `_compute_loss` returns, without a model or an accelerator."""
  import torch
  from trl import GRPOTrainer

  tensor = lambda a: torch.tensor(np.asarray(a), dtype=torch.float32)
  trainer = mock.MagicMock()
  trainer.loss_type = LOSS_TYPES[name]
  trainer.importance_sampling_level = objective.ratio
  trainer.epsilon_low = objective.clip_low
  trainer.epsilon_high = objective.clip_high
  trainer.beta = objective.beta
  trainer.max_completion_length = longest
  trainer.top_entropy_quantile = 1.0
  trainer.off_policy_mask_threshold = None
  trainer.use_vllm = objective.truncate is not None
  trainer.vllm_importance_sampling_correction = trainer.use_vllm
  trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = False
  trainer.args.delta = None
  trainer.args.use_bias_correction_kl = False
  trainer.accelerator.num_processes = 1
  trainer.accelerator.gather = lambda value: value
  trainer.accelerator.reduce = lambda value, reduction: value
  trainer.model.training = False
  trainer._metrics = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  mask = tensor(x["mask"])
  new = tensor(x["new"])
  trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
    new,
    torch.zeros_like(new),
    None,
  )
  ids = torch.zeros(new.shape, dtype=torch.long)
  inputs = {
    "prompt_ids": ids[:, :1],
    "prompt_mask": ids[:, :1],
    "completion_ids": ids,
    "completion_mask": mask,
    "advantages": tensor(advantages),
    "old_per_token_logps": tensor(x["old"]),
    "ref_per_token_logps": tensor(x["reference"]),
    "num_items_in_batch": mask.sum(),
  }
  if objective.truncate is not None:
    change = torch.exp(tensor(x["old"]) - tensor(x["behaviour"]))
    inputs["importance_sampling_ratio"] = change.clamp(max=objective.truncate)
  return float(GRPOTrainer._compute_loss(trainer, mock.MagicMock(), inputs))
