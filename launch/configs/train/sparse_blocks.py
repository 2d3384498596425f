"""The byte model in ringjax/models/small with attention to blocks (MoBA).

Command   python -m launch.train --config=configs/train/sparse_blocks.py
          --mesh=seq:1 --out=DIR
          and then python -m benchmarks.model.sparse_training
          --models=small,DIR/model
Hardware  two CPU cores that other processes shared
Result    see docs/how/sparse_training.md

In the first two layers each query head reads 8 blocks of 16 keys, its own among
them. The last two read all keys: the third copies single keys, which the means
of blocks hide.
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import sparse_index


def get_config() -> ConfigDict:
  config = sparse_index.get_config()
  config.sparse = "moba:block=16,count=8,full_last=2"
  config.stages = (sparse_index.mixed(150, 1024, 2),)
  return config
