"""Which recalled tokens a model predicts."""

import dataclasses

import numpy as np
import pytest

from ringjax import models
from ringjax.data import Bytes
from ringjax.data.tasks.filler import Lines
from ringjax.data.tasks.recall import Copies, Questions
from ringjax.errors import DataError, OptionError
from ringjax.eval.recall_accuracy import recall_accuracy
from ringjax.models import tiny

FILLER = Lines(
  text="".join(f"def run_{i}(self, value):\n  return {i}\n" for i in range(99))
)


def questions(length=700):
  return Questions(
    tokenizer=Bytes(), filler=FILLER, length=length, facts=2, questions=2
  )


@pytest.fixture(scope="module")
def model():
  return models.load(tiny.path())


@pytest.mark.long
def test_what_a_model_has_learned(model):
  found = recall_accuracy(model, questions(), examples=3, seed=1)
  # One or two questions an example, whatever weight its text has.
  assert 3 <= found.count <= 6
  assert found.answers >= 0.8 and found.tokens >= 0.95
  heavy = dataclasses.replace(questions(), text=2.0)
  assert recall_accuracy(model, heavy, examples=3, seed=1) == found


@pytest.mark.long
def test_an_answer_is_right_as_a_whole(model):
  """Long copies of random bytes: many tokens are right, no copy is."""
  source = Copies(tokenizer=Bytes(), filler=FILLER, length=700)
  found = recall_accuracy(model, source, examples=2)
  assert found.count == 2
  assert 0.2 < found.tokens < 1 and found.answers in (0, 0.5)


def test_a_model_that_has_learned_nothing(model):
  fresh = models.create(
    {
      "model_type": "llama",
      "vocab_size": 262,
      "hidden_size": 32,
      "intermediate_size": 32,
      "num_hidden_layers": 1,
      "num_attention_heads": 1,
      "max_position_embeddings": 1024,
    },
    seed=0,
  )
  found = recall_accuracy(fresh, questions(), examples=2)
  assert found.answers == 0 and found.tokens < 0.1


def test_nothing_to_recall(model):
  class Plain(Questions):
    def example(self, rng):
      ids, weights = super().example(rng)
      return ids, np.zeros_like(weights)

  plain = Plain(
    tokenizer=Bytes(), filler=FILLER, length=700, facts=2, questions=2
  )
  with pytest.raises(DataError, match="recalled tokens"):
    recall_accuracy(model, plain, examples=1)
  with pytest.raises(OptionError, match="examples: got 0"):
    recall_accuracy(model, questions(), examples=0)
