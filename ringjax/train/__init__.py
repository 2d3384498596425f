"""Training: recipes, steps over sharded sequences, checkpoints to trust."""

from ringjax.train.checkpoint import Checkpoints
from ringjax.train.extend import Stretch, extended
from ringjax.train.lora import Lora
from ringjax.train.recipe import Optimizer, Recipe, Stage, train
from ringjax.train.step import Objective

__all__ = [
  "Checkpoints",
  "Lora",
  "Objective",
  "Optimizer",
  "Recipe",
  "Stage",
  "Stretch",
  "extended",
  "train",
]
