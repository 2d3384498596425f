"""Loaded models, as for the tests of generation, and an engine with texts."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.serve import Engine, Request
from ringjax.serve.calls import compute_step
from tests.infer.conftest import loaded

__all__ = ["loaded"]

# Config of a model of bytes.
BYTES_MODEL = dict(
  model_type="llama",
  vocab_size=262,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=256,
)


@pytest.fixture(scope="package")
def talking():
  """A model of random weights: its bytes are any, often no whole character.

  Its adapter "tuned" is random too.
  """
  model = rj.models.create(BYTES_MODEL, seed=0)
  rng, how = np.random.default_rng(0), rj.train.Lora(rank=2, alpha=4.0)
  fill = lambda x: rng.standard_normal(x.shape).astype(np.float32) * 0.3
  params = {
    name: {"a": x["a"], "b": fill(x["b"])}
    for name, x in how.start(model).items()
  }
  with Engine(
    model,
    rows=4,
    capacity=512,
    longest=160,
    page=16,
    piece=16,
    pieces=2,
    tokenizer=Bytes(),
    adapters={"tuned": (how, params)},
  ) as made:
    before = compute_step._cache_size()
    for _ in range(2):
      made.submit(Request(prompt=[1], max_new_tokens=2, share=False)).result()
    # One for prompts and answers, compiled once.
    assert compute_step._cache_size() == before + 1
    yield made.start()
