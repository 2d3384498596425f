"""The common part of trainings of drafts for the byte model in models/small.

Command   those of the other configs of this folder, which begin with it
Hardware  one CPU core
Time      minutes
Result    see docs/how/speculate.md
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config
from ringjax.models import small


def draft_config(steps: int) -> ConfigDict:
  """Config of a training at the small model, of rows of 256 bytes.

  Args:
    steps: Number of steps.
  """
  config = default_config()
  config.init_from = str(small.path())
  config.stages = (
    {
      "steps": steps,
      "batch": 8,
      "length": 256,
      "sources": (
        {"kind": "library", "weight": 0.8},
        {"kind": "pairs", "weight": 0.1},
        {"kind": "copies", "weight": 0.1},
      ),
    },
  )
  config.optimizer = {
    "learning_rate": 3e-3,
    "end_learning_rate": 3e-4,
    "schedule": "wsd",
    "decay": 0.4,
    "warmup": 10,
    "b2": 0.98,
    "weight_decay": 0.01,
  }
  config.packer = "cut"
  config.log_every = 20
  config.save_every = 100
  return config
