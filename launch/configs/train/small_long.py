"""Continued training of the byte model of small.py, to 16,384 bytes.

Command   python -m launch.train --config=configs/train/small_long.py
          --mesh=seq:1 --init_from=DIR/model --out=LONG
          where DIR is the --out of small.py
Hardware  one CPU core
Time      46 minutes on a busy machine
Result    loss 1.29 in the last stage; one of several keys is found in texts of
          8,192 bytes, see ringjax/models/small/README.md
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import small


def get_config() -> ConfigDict:
  config = small.get_config()
  # The induction heads are trained already.
  config.start = {}
  weights = {"library": 0.15, "copies": 0.1, "questions": 0.1}
  config.stages = (
    small.mixed(400, 4, 1024, facts=2, longest=100, **weights),
    small.mixed(150, 2, 2048, facts=4, longest=160, **weights),
    small.mixed(80, 1, 4096, facts=6, longest=160, **weights),
    small.mixed(25, 1, 8192, facts=8, longest=160, **weights),
    small.mixed(8, 1, 16384, facts=8, longest=160, **weights),
  )
  config.optimizer = {
    **config.optimizer,
    "learning_rate": 1.5e-3,
    "end_learning_rate": 1e-4,
    "warmup": 20,
    "decay": 0.6,
  }
  config.save_every = 10
  config.log_every = 5
  return config
