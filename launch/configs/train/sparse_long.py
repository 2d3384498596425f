"""The byte model in ringjax/models/tiny, sparse for texts of 131,072 bytes.

Command   python -m launch.train --config=configs/train/sparse_long.py:index
          --mesh=seq:1 --out=DIR
          and then python -m launch.evaluate needle --model=DIR/model
          --dtype=float32 --devices=1 --task=passkey,multikey --trials=2
          --lengths=16384,65536,131072 --depths=0.1,0.5,0.9
          After the colon: index, moba or nsa.
Hardware  two CPU cores that other processes shared
Result    see docs/how/sparse_training.md

Of its five layers four have a window of 64 bytes; the one that finds a line at
any distance learns to choose keys, 512 of them by an index, whatever the
length; MoBA's blocks are short, as a line is found by single keys.
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import sparse_index, tiny
from ringjax.models import tiny as tiny_model

SPARSE = {
  "index": "index:heads=4,dim=32,count=512",
  "moba": "moba:block=4,count=512",
  "nsa": "nsa:length=16,stride=8,block=16,count=24,initial=1,local=2,"
  "window=128",
}


def row(steps: int, batch: int, length: int, **more: bool) -> dict:
  """A stage of questions about facts in rows of one length."""
  facts = {1024: 6, 4096: 12, 16384: 16}[length]
  stage = tiny.stage(
    steps, batch, length, pairs=0.05, facts=facts, questions=facts // 2
  )
  return stage | more


def get_config(kind: str = "index") -> ConfigDict:
  if kind not in SPARSE:
    raise ValueError(f"after the colon: got {kind}; wanted one of {[*SPARSE]}")
  config = sparse_index.get_config()
  config.init_from = str(tiny_model.path())
  config.sparse = SPARSE[kind]
  sparse = (row(150, 2, 1024), row(150, 1, 4096), row(15, 1, 16384))
  if kind == "index":
    alone = {"index_warm_up": True}
    sparse = (
      row(100, 2, 1024, **alone), row(40, 1, 4096, **alone),
      row(10, 1, 16384, **alone), row(60, 1, 4096), row(15, 1, 16384),
    )  # fmt: skip
  config.stages = sparse
  config.save_every = 50
  config.log_every = 10
  return config
