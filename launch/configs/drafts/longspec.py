"""A draft block for the byte model in ringjax/models/small (LongSpec).

Command   python -m launch.train --config=configs/drafts/longspec.py
          --mesh=seq:1 --out=DIR
          --config.draft_training.longest=0 trains at plain positions;
          and then python -m launch.evaluate drafts --draft=DIR/draft
Hardware  one CPU core
Time      7 minutes on a busy machine
Result    the target accepts 0.36 to 0.5 of drafts of 4 bytes, 2.4 to 3 tokens a
          call; see docs/how/speculate_longspec.md
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.drafts.draft_base import draft_config


def get_config() -> ConfigDict:
  config = draft_config(steps=500)
  config.draft = {"window": 64}
  config.draft_training = {"longest": 16384, "anchors": 4, "lags": 3}
  config.remat = "all"
  return config
