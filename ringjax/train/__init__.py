"""Training: checkpoints that can be trusted."""

from ringjax.train.checkpoint import Checkpoints

__all__ = ["Checkpoints"]
