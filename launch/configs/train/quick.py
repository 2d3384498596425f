"""A byte model that learns to copy out of its context, in minutes.

Command   python -m launch.train --config=configs/train/quick.py --out=DIR
Hardware  two CPU cores, as eight devices
Time      2 minutes (JAX 0.12)
Result    loss 1.8 nats a byte in the last steps
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

MODEL = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 262,
  "hidden_size": 96,
  "intermediate_size": 256,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 512,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
}


def get_config() -> ConfigDict:
  config = default_config()
  config.model = MODEL
  config.stages = (
    {"steps": 200, "length": 512, "batch": 8},
    {
      "steps": 100,
      "length": 2048,
      "batch": 2,
      "rope_scaling": {"context": 2048, "method": "ntk"},
    },
  )
  config.optimizer = {
    "learning_rate": 3e-3,
    "end_learning_rate": 3e-4,
    "warmup": 20,
    "weight_decay": 0.01,
  }
  config.sources = (
    {"kind": "library", "weight": 0.75},
    {"kind": "passkey", "weight": 0.25, "length": 500, "shortest": 300},
  )
  return config
