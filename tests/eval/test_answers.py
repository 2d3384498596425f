"""How well a model answers, against its own logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes, Continued, LinkTokens
from ringjax.errors import DataError
from ringjax.eval import answer_score
from tests.helpers import SMALL

LINKS = LinkTokens(262, 2, 2)
SOURCE = Continued(tokenizer=Bytes(), links=LINKS, documents=2)


@pytest.fixture(scope="module")
def model():
  return rj.models.create(SMALL | {"vocab_size": 266}, seed=0)


@pytest.mark.one_case
@pytest.mark.parametrize("segments", [rj.SameSegment(), rj.SeparateDocuments()])
def test_losses_are_those_of_the_answers(model, segments):
  separate = segments == rj.SeparateDocuments()
  attend = rj.models.ContextParallel(segments=segments)
  losses = []
  for i in range(5):
    ids, weights, own = SOURCE.example(np.random.default_rng([7, i]))
    seg = own[None] if separate else None
    scores = jax.nn.log_softmax(
      model(ids[None], segment_ids=seg, attend=attend)
    )
    at = np.flatnonzero(weights)
    losses += [-float(scores[0, t - 1, ids[t]]) for t in at]
  found = answer_score(
    model, SOURCE, segments=segments, examples=5, batch=3, seed=7
  )
  assert found.count == 5
  assert found.loss == pytest.approx(np.mean(losses), rel=1e-4)


class Fixed:
  """One example, whose answer is `answer`."""

  def __init__(self, ids, answer):
    self.ids, self.answer = ids, answer

  def example(self, rng):
    ids = np.array([*self.ids, *self.answer], np.int32)
    weights = np.zeros(len(ids), np.float32)
    weights[len(self.ids) :] = 1
    return ids, weights


def test_an_answer_counts_if_greedy_decoding_gives_it(model):
  prompt = np.arange(1, 9, dtype=np.int32)
  right = rj.infer.generate(model, prompt[None], max_new_tokens=3)
  right = np.asarray(right.tokens[0])[:3].tolist()
  score = lambda answer: (
    answer_score(model, Fixed(prompt, answer), examples=2).accuracy
  )
  assert score(right) == 1.0
  assert score([*right[:2], (right[2] + 1) % 266]) == 0.0


def test_examples_without_an_answer(model):
  with pytest.raises(DataError, match="without an answer"):
    answer_score(model, Fixed([1, 2], []), examples=1)
