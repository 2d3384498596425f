"""The byte model in ringjax/models/small learns by rewards to name all values.

Command   python -m launch.train --config=configs/posttraining/grpo.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      28 minutes on a busy machine
Result    reward 0.17 in the first update, 0.91 in the last 50 (mean); see
          docs/how/posttraining.md, "Rewards"
"""

import pathlib

from ml_collections import ConfigDict

import ringjax
from ringjax.launch.train import default_config

_SMALL = pathlib.Path(ringjax.__file__).parent / "models" / "small"


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(_SMALL)
  config.stages = ({"steps": 150, "length": 220, "batch": 64},)
  config.rewards = {
    "task": {"kind": "multivalue", "values": 2, "length": 210},
    "group": 8,
    # Both values take at most 46 tokens. A penalty of longer answers
    # ("overlong") makes the model stop after the first value.
    "max_new_tokens": 52,
    "objective": {"name": "dr_grpo", "longest": 52},
  }
  config.optimizer = {
    "learning_rate": 3e-4,
    "end_learning_rate": 2e-5,
    "schedule": "wsd",
    "decay": 0.3,
    "warmup": 2,
    "weight_decay": 0.0,
  }
  config.log_every = 1
  config.save_every = 20
  return config
