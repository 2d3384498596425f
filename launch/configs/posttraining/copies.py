"""SmolLM2-135M-Instruct learns by rewards to answer with a number alone.

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/posttraining/copies.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      50 s an update on a busy machine
Result    reward 0.03 in the first update, 0.90 in the sixth, 1.00 from the
          eighth to the twelfth; see docs/how/posttraining.md, "Rewards"
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.posttraining import chat_model


def get_config(model: str = chat_model.DEFAULT) -> ConfigDict:
  config = chat_model.chat_config(model)
  config.merge = False
  config.stages = ({"steps": 12, "length": 40, "batch": 24},)
  config.rewards = {
    "questions": str(chat_model.HERE / "copies.jsonl"),
    "functions": {
      "exact": "ringjax.launch.training.reward_functions:number_share"
    },
    "group": 8,
    "max_new_tokens": 8,
    "objective": {"name": "dr_grpo", "longest": 8},
    **chat_model.template(model),
  }
  config.optimizer = {
    "learning_rate": 3e-4,
    "schedule": "constant",
    "warmup": 2,
    "weight_decay": 0.0,
  }
  config.log_every = 1
  config.save_every = 6
  return config
