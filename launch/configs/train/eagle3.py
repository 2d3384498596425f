"""An EAGLE-3 head for the byte model in ringjax/models/small.

Command   python -m launch.train --config=configs/train/eagle3.py --mesh=seq:1
          --out=DIR
          and then python -m launch.generate --model=ringjax/models/small
          --speculate=eagle3:model=DIR/head
Hardware  one CPU core
Time      minutes
Result    see docs/how/speculate.md
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config
from ringjax.models import small


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(small.path())
  # The small model has four layers: after the first, second and third one.
  config.eagle = {"taps": (1, 2, 3), "steps": 4, "hidden": 512}
  config.stages = (
    {
      "steps": 300,
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
