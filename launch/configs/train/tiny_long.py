"""Continued training of the byte model of tiny.py, to 32,768 bytes.

Command   python -m launch.train --config=configs/train/tiny_long.py
          --mesh=seq:1 --init_from=DIR/model --out=LONG
          where DIR is the --out of tiny.py
Hardware  two CPU cores
Time      14 minutes by the rate of its first steps (JAX 0.12)
Result    loss 0.36 in the last stage; the perplexity of held-out text falls
          with its length, up to 32,768 bytes (python -m launch.evaluate
          perplexity --model=LONG/model); passkeys are found as before
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.train import tiny


def get_config() -> ConfigDict:
  config = tiny.get_config()
  # The induction heads are trained already.
  config.start = {}
  config.stages = (
    tiny.stage(60, 2, 8192, facts=16, questions=8),
    tiny.stage(50, 1, 16384, facts=16, questions=8),
    tiny.stage(50, 1, 32768, facts=16, questions=8),
  )
  config.optimizer = {
    **config.optimizer,
    "learning_rate": 1e-3,
    "warmup": 10,
    "decay": 0.5,
  }
  return config
