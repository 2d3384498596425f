"""Short continued training of the byte model of small.py with ReLU for SiLU.

Command   python -m launch.train --config=configs/train/small_relu.py
          --mesh=seq:1 --init_from=RELU --out=OUT
          where RELU is ringjax/models/small with "hidden_act": "relu" in its
          config.json (docs/how/flash.py creates it)
Hardware  two CPU cores of a busy machine
Time      4 minutes
Result    1.563 nats a byte of held-out library text, where the model has 1.621
          with SiLU and 1.633 with ReLU untrained; 28 to 44 % of the neurons of
          a layer are active (docs/how/flash.md)
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import small


def get_config() -> ConfigDict:
  config = small.get_config()
  # The induction heads are trained already.
  config.start = {}
  config.stages = (
    small.mixed(
      150, 2, 1024, facts=2, longest=60, library=0.5, copies=0.1, questions=0.1
    ),
  )
  config.optimizer = {
    **config.optimizer,
    "learning_rate": 7e-4,
    "end_learning_rate": 5e-5,
    "warmup": 20,
    "decay": 0.6,
  }
  config.save_every = 50
  config.log_every = 10
  return config
