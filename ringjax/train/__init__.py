"""Training: recipes, steps over sharded sequences, checkpoints to trust."""

from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.expert_balance import ExpertBalance
from ringjax.train.extend import RopeScaling, extend_context
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.methods.encoder_training import ContextSplit, EncoderTraining
from ringjax.train.methods.lora import Lora
from ringjax.train.methods.peft_folder import load_adapter, save_adapter
from ringjax.train.methods.predict_training import PredictTraining
from ringjax.train.methods.predictor_training import train_predictors
from ringjax.train.methods.residual_adapters import residual_adapters
from ringjax.train.posttraining.posttraining_loss import (
  LossTerms,
  Mean,
  PosttrainingLoss,
)
from ringjax.train.posttraining.preferences import Dpo, Ipo, Orpo
from ringjax.train.recipe import Mixture, Optimizer, Recipe, Stage, train
from ringjax.train.sparsify import with_sparse_attention
from ringjax.train.stage_rounds import with_stage_rounds
from ringjax.train.step import Objective
from ringjax.train.token_logprobs import LabelStatistics, token_logprobs

__all__ = [
  "Checkpoints",
  "ContextSplit",
  "Dpo",
  "DraftTraining",
  "EncoderTraining",
  "ExpertBalance",
  "Ipo",
  "LabelStatistics",
  "Lora",
  "LossTerms",
  "Mean",
  "Mixture",
  "Objective",
  "Optimizer",
  "Orpo",
  "PosttrainingLoss",
  "PredictTraining",
  "Recipe",
  "RopeScaling",
  "Stage",
  "extend_context",
  "load_adapter",
  "residual_adapters",
  "save_adapter",
  "token_logprobs",
  "train",
  "train_predictors",
  "with_sparse_attention",
  "with_stage_rounds",
]
