"""The byte model in ringjax/models/tiny, which finds a line of a long text.

Command   python -m launch.train --config=configs/train/tiny.py --mesh=seq:1
          --out=DIR
Hardware  two CPU cores
Time      11 minutes (JAX 0.12)
Result    loss 0.35 in the last stage; passkeys in held-out text of 4,096 to
          65,536 bytes are found at every depth (python -m launch.evaluate
          needle --model=DIR/model)
"""

from ml_collections import ConfigDict

from ringjax.launch.train import default_config

LAYERS, FULL, WINDOW = 5, (3,), 64
MODEL = {
  "architectures": ["SmolLM3ForCausalLM"],
  "model_type": "smollm3",
  "vocab_size": 262,
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-6,
  "rope_theta": 100.0,
  "attention_bias": True,
  "mlp_bias": False,
  # Layers with a rotary embedding see WINDOW tokens; the one without sees all,
  # and finds tokens at any distance.
  "use_sliding_window": True,
  "sliding_window": WINDOW,
  "no_rope_layers": [int(i not in FULL) for i in range(LAYERS)],
  "layer_types": [
    "full_attention" if i in FULL else "sliding_attention"
    for i in range(LAYERS)
  ],
  "tie_word_embeddings": True,
  "bos_token_id": 256,
  "eos_token_id": 257,
  "pad_token_id": 258,
}


def stage(
  steps: int,
  batch: int,
  length: int,
  copies: float = 0.0,
  pairs: float = 0.0,
  fewest: int = 8,
  facts: int = 1,
  questions: int = 1,
) -> dict:
  """A stage; shares of rows are copies and pairs, the rest are questions."""
  sources = [
    {"kind": "copies", "weight": copies, "fewest": fewest},
    {"kind": "pairs", "weight": pairs},
    {
      "kind": "questions",
      "weight": 1 - copies - pairs,
      "facts": facts,
      "questions": questions,
    },
  ]
  return {
    "steps": steps,
    "batch": batch,
    "length": length,
    "sources": tuple(s for s in sources if float(s["weight"]) > 0),
  }


def get_config() -> ConfigDict:
  config = default_config()
  config.model = MODEL
  config.start = {
    "kind": "lookup",
    "back": ((1, 2, 3, 4), (1, 2, 4, 8), (0, 1, 0, 1), (0, 1, 2, 4)),
  }
  config.stages = (
    stage(100, 16, 192, copies=1.0, fewest=256),
    stage(300, 10, 384, copies=0.2, pairs=0.4, facts=2),
    stage(150, 8, 512, copies=0.1, pairs=0.2, facts=3),
    stage(300, 4, 1024, copies=0.1, pairs=0.1, facts=6, questions=3),
    stage(150, 2, 4096, pairs=0.05, facts=12, questions=6),
    stage(60, 1, 8192, facts=16, questions=8),
    stage(40, 1, 16384, facts=16, questions=8),
  )
  config.optimizer = {
    "learning_rate": 2e-3,
    "end_learning_rate": 5e-5,
    "schedule": "wsd",
    "decay": 0.35,
    "warmup": 100,
    "b2": 0.98,
    "weight_decay": 0.01,
  }
  return config
