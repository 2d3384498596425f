"""Short answers preferred to long ones by SmolLM2-135M-Instruct (DPO).

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/posttraining/dpo_short.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      13 minutes on a busy machine
Result    loss 0.0003, accuracy 1.00, margin of rewards 8.3; 0.63, 0.50 and
          0.13 in the first two steps; see docs/how/posttraining.md
"""

import pathlib

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

HERE = pathlib.Path(__file__).parent


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = "smollm2-135m"
  config.merge = False
  config.lora = {
    "rank": 16,
    "alpha": 32.0,
    "targets": ("q", "k", "v", "o", "gate", "up", "down"),
  }
  config.posttraining = {"loss": "dpo", "beta": 0.1}
  config.sources = (
    {"kind": "preferences", "path": str(HERE / "short_answers.jsonl")},
  )
  config.stages = ({"steps": 14, "length": 160, "batch": 4},)
  config.optimizer = {
    "learning_rate": 2e-4,
    "end_learning_rate": 2e-5,
    "warmup": 2,
    "b2": 0.98,
    "weight_decay": 0.0,
  }
  config.log_every = 2
  config.save_every = 20
  return config
