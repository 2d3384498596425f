"""Continued training of Llama 3.1 8B at 128k tokens, in two stages.

Command   python -m launch.train --config=configs/train/llama_8b_128k.py \\
            --init_from=DIR --out=OUT --config.sources[0].path=CORPUS \\
            --mesh=data:2,seq:16
          where DIR is a Llama 3.1 8B and CORPUS the output of launch.tokenize
          with its tokenizer
Hardware  32 TPU v5p or H100; weights and moments are sharded over data
Time      not measured
Result    not measured
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config


def get_config() -> ConfigDict:
  config = default_config()
  config.model = "llama-3.1-8b"
  config.rules = {"embed": "data"}
  config.dtype = "bfloat16"
  config.stages = (
    {"steps": 500, "length": 32768, "batch": 32},
    {"steps": 500, "length": 131072, "batch": 8},
  )
  config.optimizer = {
    "learning_rate": 2e-5,
    "end_learning_rate": 2e-6,
    "warmup": 50,
  }
  config.z_loss = 1e-5
  config.sources = ({"kind": "corpus", "path": "CORPUS", "weight": 1.0},)
  config.save_every = 100
  return config
