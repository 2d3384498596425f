"""The byte model in ringjax/models/small, with full attention in all layers.

Command   python -m launch.train --config=configs/train/small.py --mesh=seq:1
          --out=DIR
          and then configs/train/small_long.py
Hardware  one CPU core
Time      24 minutes on a busy machine
Result    loss 0.96 in the last stage; one of several keys is found in texts of
          1,024 bytes, see ringjax/models/small/README.md
"""

from typing import Any

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

LAYERS = 4
MODEL = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 262,
  "hidden_size": 256,
  "intermediate_size": 384,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-6,
  # A third of the features turn by less than a radian in 32,768 tokens: they
  # find tokens at any distance.
  "rope_theta": 1e7,
  "attention_bias": True,
  "mlp_bias": False,
  "tie_word_embeddings": True,
  "bos_token_id": 256,
  "eos_token_id": 257,
  "pad_token_id": 258,
}


def stage(
  steps: int, batch: int, length: int, **sources: dict[str, Any]
) -> dict[str, Any]:
  """A stage of sources: options and weight of each by the name of its kind."""
  return {
    "steps": steps,
    "batch": batch,
    "length": length,
    "sources": tuple({"kind": k, **options} for k, options in sources.items()),
  }


def mixed(
  steps: int,
  batch: int,
  length: int,
  facts: int,
  longest: int,
  library: float = 0.1,
  copies: float = 0.05,
  questions: float = 0.2,
) -> dict[str, Any]:
  """A stage of all tasks, with `facts` in a row and some of the weights."""
  return stage(
    steps,
    batch,
    length,
    library={"weight": library},
    copies={"weight": copies},
    pairs={"weight": 0.1},
    questions={"weight": questions, "facts": 2 * facts, "questions": facts},
    values={"weight": 0.15, "facts": facts, "questions": facts // 2},
    chains={"weight": 0.15, "facts": facts, "questions": facts // 2},
    links={"weight": 0.1, "facts": facts, "questions": facts // 2},
    quotes={
      "weight": 0.1,
      "facts": facts,
      "questions": facts // 2,
      "longest": longest,
    },
    records={"weight": 0.05, "preamble": longest},
  )


def get_config() -> ConfigDict:
  config = default_config()
  config.model = MODEL
  config.start = {
    "kind": "rotary_lookup",
    "back": ((0, 1, 2, 3, 4, 5, 6, 7), (2, 1, 3, 1, 4, 1, 8, 1)),
  }
  config.stages = (
    stage(40, 16, 192, copies={"fewest": 256}),
    stage(
      200,
      10,
      384,
      library={"weight": 0.1},
      copies={"weight": 0.15},
      pairs={"weight": 0.3},
      questions={"weight": 0.2, "facts": 2, "questions": 1},
      values={"weight": 0.1, "facts": 1, "questions": 1, "values": 2},
      chains={"weight": 0.1, "facts": 2, "questions": 1, "hops": 1},
      links={"weight": 0.05, "facts": 1, "questions": 1},
    ),
    mixed(250, 4, 1024, facts=2, longest=100),
  )
  config.optimizer = {
    "learning_rate": 2e-3,
    "end_learning_rate": 2e-4,
    "schedule": "wsd",
    "decay": 0.35,
    "warmup": 50,
    "b2": 0.98,
    "weight_decay": 0.01,
  }
  config.remat = "all"
  config.save_every = 50
  return config
