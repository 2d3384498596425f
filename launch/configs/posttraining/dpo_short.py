"""Short answers preferred to long ones by SmolLM2-135M-Instruct (DPO).

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/posttraining/dpo_short.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      13 minutes on a busy machine
Result    loss 0.0003, accuracy 1.00, margin of rewards 8.3; 0.63, 0.50 and
          0.13 in the first two steps; see docs/how/posttraining.md
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.posttraining import chat_model


def get_config(model: str = chat_model.DEFAULT) -> ConfigDict:
  config = chat_model.chat_config(model)
  config.merge = False
  config.posttraining = {"loss": "dpo", "beta": 0.1}
  path = str(chat_model.HERE / "short_answers.jsonl")
  source = {"kind": "preferences", "path": path}
  config.sources = (source | chat_model.template(model),)
  config.stages = ({"steps": 14, "length": 160, "batch": 4},)
  return config
