"""The byte model in ringjax/models/small with attention to blocks (MoBA).

Command   python -m launch.train --config=configs/train/sparse_blocks.py
          --mesh=seq:1 --out=DIR
          and then python -m benchmarks.model.sparse_training
          --models=small,DIR/model
Hardware  two CPU cores that other processes shared
Result    see docs/how/sparse_training.md

Each query head reads 4 blocks of 32 keys, its own among them.
"""

from ml_collections import ConfigDict

from launch.configs.train import sparse_index


def get_config() -> ConfigDict:
  config = sparse_index.get_config()
  config.sparse = "moba:block=32,count=4"
  config.stages = (
    sparse_index.mixed(60, 1024, 2),
    sparse_index.mixed(20, 2048, 4),
  )
  return config
