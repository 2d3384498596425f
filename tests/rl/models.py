"""Config of a small model of bytes."""

CONFIG = dict(
  model_type="llama",
  vocab_size=262,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=256,
)
