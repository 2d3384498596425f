"""Answers of one short sentence in chats, for SmolLM2-135M-Instruct (SFT).

Command   python -m launch.fetch smollm2-135m
          python -m launch.train --config=configs/posttraining/sft_short.py
          --mesh=seq:1 --out=DIR
Hardware  two CPU cores
Time      8 minutes on a busy machine
Result    loss 0.36 on the assistant's tokens, 2.64 in the first two steps; see
          docs/how/posttraining.md
"""

from ml_collections import ConfigDict

from ringjax.launch.configs.posttraining import chat_model


def get_config(model: str = chat_model.DEFAULT) -> ConfigDict:
  config = chat_model.chat_config(model)
  source = {"kind": "chats", "path": str(chat_model.HERE / "chats.jsonl")}
  config.sources = (source | chat_model.template(model),)
  config.stages = ({"steps": 20, "length": 192, "batch": 1},)
  return config
