"""The byte model in ringjax/models/small with native sparse attention (NSA).

Command   python -m launch.train --config=configs/train/sparse_native.py
          --mesh=seq:1 --out=DIR
          and then python -m benchmarks.model.sparse_training
          --models=small,DIR/model
Hardware  two CPU cores that other processes shared
Result    see docs/how/sparse_training.md

Each query reads a window of 32 keys, 6 blocks of 16 keys for each kv head, and
one compressed key for every 4 tokens.
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import sparse_index


def get_config() -> ConfigDict:
  config = sparse_index.get_config()
  config.sparse = "nsa:length=8,stride=4,block=16,count=6,window=32"
  config.stages = (sparse_index.mixed(150, 1024, 2),)
  return config
