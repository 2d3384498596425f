"""An encoder of contexts for the byte model in ringjax/models/small (CEPE).

Command   python -m launch.train --config=configs/train/cepe.py --mesh=seq:1
          --out=DIR
          and then python -m launch.evaluate chunks --model=DIR/model
Hardware  one CPU core
Time      3 minutes; 16 on a busy machine
Result    nats a byte of 256 bytes, 1.70 without a context, 1.36 after 8 chunks
          of 64 bytes, 1.29 after 32; see docs/how/contexts_cepe.md
"""

from typing import Any

from ml_collections import ConfigDict

from ringjax.launch.train import default_config
from ringjax.models import small


def warm_up(
  steps: int, batch: int, length: int, noise: float
) -> dict[str, Any]:
  """A stage whose context is the decoder's tokens in 4 chunks (CEPE's 1st)."""
  return {
    "steps": steps,
    "batch": batch,
    "length": length,
    "context": {"chunk": length // 4, "chunks": 4, "repeated": True},
    "sources": (
      {"kind": "library"},
      {"kind": "noise", "weight": noise},
    ),
  }


def get_config() -> ConfigDict:
  config = default_config()
  config.init_from = str(small.path())
  config.cepe = {
    "layers": 2,
    "width": 128,
    "heads": 4,
    "hidden": 256,
    "chunk": 64,
  }
  config.start = {"kind": "cross_lookup"}
  config.stages = (
    warm_up(100, 16, 64, noise=1.0),
    warm_up(120, 6, 256, noise=0.25),
    # 8 chunks of 64 bytes, and the 256 bytes that follow (stage 2).
    {
      "steps": 280,
      "batch": 4,
      "length": 768,
      "context": {"chunk": 64, "chunks": 8},
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
    "decay": 0.5,
    "warmup": 10,
    "b2": 0.98,
    "weight_decay": 0.01,
  }
  config.packer = "cut"
  config.remat = "all"
  config.save_every = 50
  config.log_every = 20
  return config
