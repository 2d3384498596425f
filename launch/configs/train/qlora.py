"""Adapters over the NF4 codes of SmolLM2-135M (QLoRA).

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/train/qlora.py --out=DIR
          --config.weights= trains them over floats, stored over the file's
          own codes, which are not rounded again
Hardware  one CPU core
Time      3 minutes for 40 steps on a busy machine
Result    loss 3.25 in the first 5 steps and 2.85 in the last of 40, 2.96 and
          2.66 over bfloat16 and int8, 2.69 with --config.residual.rows=16;
          see docs/how/low_bits.md
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = "smollm2-135m"
  config.weights = "nf4"
  config.merge = False
  config.lora = {
    "rank": 16,
    "alpha": 32.0,
    "targets": ("q", "k", "v", "o", "gate", "up", "down"),
  }
  config.stages = ({"steps": 200, "length": 64, "batch": 2},)
  config.optimizer = {
    "learning_rate": 2e-4,
    "end_learning_rate": 2e-5,
    "warmup": 10,
    "weight_decay": 0.0,
  }
  config.log_every = 20
  config.save_every = 100
  return config
