"""Answers of one short sentence in chats, for SmolLM2-135M-Instruct (SFT).

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/posttraining/sft_short.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      8 minutes on a busy machine
Result    loss 0.36 on the assistant's tokens, 2.64 in the first two steps; see
          docs/how/posttraining.md
"""

import pathlib

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

HERE = pathlib.Path(__file__).parent


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = "smollm2-135m"
  config.lora = {
    "rank": 16,
    "alpha": 32.0,
    "targets": ("q", "k", "v", "o", "gate", "up", "down"),
  }
  config.sources = ({"kind": "chats", "path": str(HERE / "chats.jsonl")},)
  config.stages = ({"steps": 20, "length": 192, "batch": 1},)
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
