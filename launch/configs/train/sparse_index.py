"""The byte model in ringjax/models/small with an index of keys (DeepSeek-V3.2).

Command   python -m launch.train --config=configs/train/sparse_index.py
          --mesh=seq:1 --out=DIR
          and then python -m benchmarks.model.sparse_training
          --models=small,DIR/model
Hardware  two CPU cores that other processes shared
Result    see docs/how/sparse_training.md

First the index alone learns from attention to all keys, then all parameters
learn, and each query reads 128 keys.
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import small
from ringjax.launch.train import default_config
from ringjax.models import small as small_model

_SOURCES = {"library": 0.2, "copies": 0.1, "questions": 0.2}


def mixed(steps: int, length: int, facts: int) -> dict:
  """A stage of rows of one length."""
  return small.mixed(steps, 1, length, facts=facts, longest=120, **_SOURCES)


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(small_model.path())
  config.sparse = "index:heads=4,dim=32,count=128"
  config.stages = (
    {**mixed(100, 1024, 2), "index_warm_up": True},
    mixed(60, 1024, 2),
    mixed(20, 2048, 4),
  )
  config.optimizer = {
    "learning_rate": 1e-3,
    "end_learning_rate": 1e-4,
    "schedule": "wsd",
    "decay": 0.5,
    "warmup": 10,
    "b2": 0.98,
    "weight_decay": 0.01,
  }
  config.remat = "all"
  config.save_every = 20
  config.log_every = 5
  return config
