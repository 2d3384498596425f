"""Training by rewards: GRPO and its kin, with answers by an engine."""

from ringjax.rl.chat_turns import ChatTurns
from ringjax.rl.group_objective import (
  AnswerArrays,
  GroupObjective,
  PolicyStatistics,
)
from ringjax.rl.group_source import (
  GroupConfig,
  Listed,
  OverlongPenalty,
  QuestionSource,
  RolloutReport,
)
from ringjax.rl.policy_logprobs import policy_logprobs
from ringjax.rl.rewards import Judge, Judged, RewardConfig
from ringjax.rl.rollouts import (
  Environment,
  Question,
  Rollout,
  RolloutConfig,
  Rollouts,
)
from ringjax.rl.training import RewardRecipe, train

__all__ = [
  "AnswerArrays",
  "ChatTurns",
  "Environment",
  "GroupConfig",
  "GroupObjective",
  "Judge",
  "Judged",
  "Listed",
  "OverlongPenalty",
  "PolicyStatistics",
  "Question",
  "QuestionSource",
  "RewardConfig",
  "RewardRecipe",
  "Rollout",
  "RolloutConfig",
  "RolloutReport",
  "Rollouts",
  "policy_logprobs",
  "train",
]
