"""Base of the recipes that teach a published chat model by adapters.

A recipe takes the model's name after a colon, as sft_short.py:gemma3-270m;
models that were not tuned for chats get a template of this folder.
"""

import pathlib

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

HERE = pathlib.Path(__file__).parent
DEFAULT = "smollm2-135m"
_TEMPLATES = {"gemma3-270m": "gemma.jinja"}


def chat_config(model: str) -> ConfigDict:
  """A config with the initial model, adapters of rank 16, and an optimizer."""
  config = default_config()
  config.init_from = model
  config.lora = {
    "rank": 16,
    "alpha": 32.0,
    "targets": ("q", "k", "v", "o", "gate", "up", "down"),
  }
  config.optimizer = {
    "learning_rate": 2e-4,
    "end_learning_rate": 2e-5,
    "warmup": 2,
    "b2": 0.98,
    "weight_decay": 0.0,
  }
  config.log_every = 2
  config.save_every = 20
  return config


def template(model: str) -> dict[str, str]:
  """Entry of a source or of rewards: the template, if the model has none."""
  if model not in _TEMPLATES:
    return {}
  return {"template": str(HERE / _TEMPLATES[model])}
