"""An EAGLE-3 head for the byte model in ringjax/models/small.

Command   python -m launch.train --config=configs/drafts/eagle3.py --mesh=seq:1
          --out=DIR
          and then python -m launch.generate --model=ringjax/models/small
          --speculate=eagle3:model=DIR/head
Hardware  one CPU core
Time      minutes
Result    see docs/how/speculate.md
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.drafts.draft_base import draft_config


def get_config() -> ConfigDict:
  config = draft_config(steps=300)
  # The small model has four layers: after the first, second and third one.
  config.eagle = {"taps": (1, 2, 3), "steps": 4, "hidden": 512}
  return config
