"""Training: recipes, steps over sharded sequences, checkpoints to trust."""

from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.expert_balance import ExpertBalance
from ringjax.train.extend import RopeScaling, extend_context
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.methods.encoder_training import ContextSplit, EncoderTraining
from ringjax.train.methods.lora import Lora
from ringjax.train.methods.peft_folder import load_adapter, save_adapter
from ringjax.train.methods.predictor_training import train_predictors
from ringjax.train.recipe import Mixture, Optimizer, Recipe, Stage, train
from ringjax.train.sparsify import with_sparse_attention
from ringjax.train.step import Objective

__all__ = [
  "Checkpoints",
  "ContextSplit",
  "DraftTraining",
  "EncoderTraining",
  "ExpertBalance",
  "Lora",
  "Mixture",
  "Objective",
  "Optimizer",
  "Recipe",
  "RopeScaling",
  "Stage",
  "extend_context",
  "load_adapter",
  "save_adapter",
  "train",
  "train_predictors",
  "with_sparse_attention",
]
