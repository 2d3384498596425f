"""Accuracy of a model's answers to the examples of a source.

Guarantees: example i of a source is the same for every model. An answer is the
tokens of an example that have weights; it counts if greedy decoding would give
all of it.
Cost: one forward pass of all examples.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ringjax.checks import positive_int
from ringjax.data.batches.loader import ExampleSource
from ringjax.errors import DataError
from ringjax.eval.finite_losses import check_losses
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.mask import Mask, SameSegment

# Rows are padded to a multiple of these tokens, so that few programs compile.
_UNIT = 32
_SAME = SameSegment()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerScore:
  """Accuracy and loss of the answers of a source.

  Attributes:
    accuracy: Share of answers that are right.
    loss: Mean negative log-likelihood of their tokens, in nats.
    count: Number of answers.
  """

  accuracy: float
  loss: float
  count: int


def answer_score(
  model: Transformer,
  source: ExampleSource,
  *,
  segments: Mask = _SAME,
  examples: int = 256,
  batch: int = 32,
  seed: int = 0,
) -> AnswerScore:
  """Reads examples of a source and compares the likeliest tokens.

  Args:
    model: Model to evaluate.
    source: Source whose `example` returns ids, weights and usually segments, as
      `ringjax.data.Continued`.
    segments: Mask between the documents of an example, such as
      `rj.SeparateDocuments()`; by default an example is one document.
    examples: Number of examples.
    batch: Rows of a forward pass.
    seed: Random seed of the examples.

  Raises:
    DataError: If an example has no answer.
  """
  positive_int("examples", examples)
  positive_int("batch", batch)
  samples = [
    source.example(np.random.default_rng([seed, i])) for i in range(examples)
  ]
  answers = [
    np.flatnonzero([] if weights is None else weights)
    for _, weights, *_ in samples
  ]
  if not all(len(at) and at[0] for at in answers):
    raise DataError(
      "source",
      "an example without an answer",
      "weights of some tokens after the first",
      "pass another source",
    )
  length = -(-max(len(ids) for ids, *_ in samples) // _UNIT) * _UNIT
  max_answer = max(map(len, answers))
  attend = ContextParallel(segments=segments)
  right, losses = [], []
  for first in range(0, examples, batch):
    part = [
      (samples[i], answers[i])
      for i in range(first, min(first + batch, examples))
    ]
    tokens, places = np.zeros((2, batch, length), np.int32)
    rows = np.zeros((batch, max_answer), np.int32)
    for n, ((ids, _, *maybe_segments), at) in enumerate(part):
      tokens[n, : len(ids)] = ids
      one_document = segments == _SAME or not maybe_segments
      places[n, : len(ids)] = 1 if one_document else maybe_segments[0]
      rows[n, : len(at)] = at - 1
    logits = model(tokens, segment_ids=places, attend=attend, rows=rows)
    scores = np.asarray(jax.nn.log_softmax(logits))
    for n, ((ids, *_), at) in enumerate(part):
      answer_scores = scores[n, : len(at)]
      losses.append(-answer_scores[np.arange(len(at)), ids[at]])
      check_losses(losses[-1], model, document=first + n, first=int(at[0]))
      right.append(bool(np.all(np.argmax(answer_scores, -1) == ids[at])))
  return AnswerScore(
    accuracy=float(np.mean(right)),
    loss=float(np.mean(np.concatenate(losses))),
    count=examples,
  )
