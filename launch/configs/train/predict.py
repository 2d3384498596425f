"""A layer that predicts one token further, for the model ringjax/models/small.

Command   python -m launch.train --config=configs/train/predict.py --mesh=seq:1
          --out=DIR
          and then python -m launch.bench speculate --model=DIR/model
          --contestants=mtp
Hardware  one CPU core
Time      minutes
Result    after 100 steps of length 128 the model accepts 0.68 of first drafts;
          see docs/how/speculate.md
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config
from ringjax.models import small


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(small.path())
  config.predict_loss = 1.0
  config.predict_only = True
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
