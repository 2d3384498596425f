"""Right answers preferred to wrong ones (DPO), after sft.py.

Command   python -m launch.train --config=configs/posttraining/dpo.py
          --mesh=seq:1 --init_from=SFT/model --out=DIR
          --config.posttraining.loss=orpo or ipo for the other losses
Hardware  two CPU cores
Time      4 minutes on a busy machine
Result    loss 0.59, accuracy 0.91, margin of rewards 0.23 on the pairs of
          preferences.jsonl; 0.69, 0.5 and 0 before
"""

import pathlib

from ml_collections import ConfigDict

from ringjax.launch.train import default_config
from ringjax.models import small

HERE = pathlib.Path(__file__).parent


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(small.path())
  config.posttraining = {"loss": "dpo", "beta": 0.1}
  config.sources = (
    {
      "kind": "preferences",
      "path": str(HERE / "preferences.jsonl"),
      "template": str(HERE / "chat.jinja"),
    },
  )
  config.stages = ({"steps": 20, "length": 512, "batch": 4},)
  config.optimizer = {
    "learning_rate": 5e-5,
    "end_learning_rate": 5e-6,
    "warmup": 5,
    "b2": 0.98,
    "weight_decay": 0.0,
  }
  config.remat = "all"
  config.log_every = 5
  config.save_every = 10
  return config
