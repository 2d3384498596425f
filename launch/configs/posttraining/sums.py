"""SmolLM2-135M-Instruct learns by rewards to answer sums with a number alone.

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/posttraining/sums.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      75 s an update on a busy machine
Result    reward 0.06 in the first update, 0.31 in the fifth; not run further
"""

import pathlib

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

HERE = pathlib.Path(__file__).parent


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = "smollm2-135m"
  config.stages = ({"steps": 20, "length": 80, "batch": 16},)
  config.rewards = {
    "questions": str(HERE / "sums.jsonl"),
    "functions": {
      "exact": "ringjax.launch.training.reward_functions:number_alone"
    },
    "group": 8,
    "max_new_tokens": 20,
    "objective": {"name": "dr_grpo", "longest": 20},
  }
  config.optimizer = {
    "learning_rate": 2e-5,
    "schedule": "constant",
    "warmup": 2,
    "weight_decay": 0.0,
  }
  config.log_every = 1
  config.save_every = 10
  return config
