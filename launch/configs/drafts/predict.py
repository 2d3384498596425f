"""A layer that predicts one token further, for the model ringjax/models/small.

Command   python -m launch.train --config=configs/drafts/predict.py --mesh=seq:1
          --out=DIR
          and then python -m launch.bench speculate --model=DIR/model
          --contestants=mtp
Hardware  one CPU core
Time      minutes
Result    after 100 steps of length 128 the model accepts 0.68 of first drafts;
          see docs/how/speculate.md
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.drafts.draft_base import draft_config


def get_config() -> ConfigDict:
  config = draft_config(steps=300)
  config.predict_loss = 1.0
  config.predict_only = True
  return config
