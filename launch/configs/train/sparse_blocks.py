"""The byte model in ringjax/models/small with attention to blocks (MoBA).

Command   python -m launch.train --config=configs/train/sparse_blocks.py
          --mesh=seq:1 --out=DIR
          and then python -m benchmarks.model.sparse_training
          --models=small,DIR/model
Hardware  two CPU cores that other processes shared
Result    see docs/how/sparse_training.md

Each query head reads 8 blocks of 16 keys, its own among them.
"""

from ml_collections import ConfigDict

from launch.configs.train import sparse_index


def get_config() -> ConfigDict:
  config = sparse_index.get_config()
  config.sparse = "moba:block=16,count=8"
  config.stages = (sparse_index.mixed(150, 1024, 2),)
  return config
