"""A draft block for the byte model in ringjax/models/small (LongSpec).

Command   python -m launch.train --config=configs/train/longspec.py --mesh=seq:1
          --out=DIR
          --config.draft_training.longest=0 trains at plain positions;
          and then python -m launch.evaluate drafts --draft=DIR/draft
Hardware  one CPU core
Time      7 minutes on a busy machine
Result    the target accepts 0.36 to 0.5 of drafts of 4 bytes, 2.4 to 3 tokens a
          call; see docs/how/speculate_longspec.md
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config
from ringjax.models import small


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(small.path())
  config.draft = {"window": 64}
  config.draft_training = {"longest": 16384, "anchors": 4, "lags": 3}
  config.stages = (
    {
      "steps": 500,
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
  config.remat = "all"
  config.log_every = 20
  config.save_every = 100
  return config
