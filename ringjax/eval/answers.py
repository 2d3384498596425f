"""How well a model answers the examples of a source.

Guarantees: example i of a source is the same for every model. An answer is the
tokens of an example that have weights; it counts if greedy decoding would give
all of it.
Cost: one forward of all examples.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ringjax.checks import positive_int
from ringjax.data.loader import ExampleSource
from ringjax.errors import DataError
from ringjax.eval.finite_losses import check_losses
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.mask import Mask, SameSegment

# Tokens to a multiple of which rows are padded, so that few programs are made.
_UNIT = 32
_SAME = SameSegment()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerScore:
  """How a source's answers are predicted.

  Attributes:
    accuracy: the share of answers that are right.
    loss: mean negative log-likelihood of their tokens, in nats.
    count: how many answers there were.
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
    model: the model.
    source: whose `example` returns ids, weights and mostly segments, as
      `ringjax.data.Continued`.
    segments: how the documents of an example see each other, such as
      `rj.SeparateDocuments()`; by default an example is one document.
    examples: how many.
    batch: rows of a forward.
    seed: of the examples.

  Raises:
    DataError: an example without an answer.
  """
  positive_int("examples", examples)
  positive_int("batch", batch)
  found = [
    source.example(np.random.default_rng([seed, i])) for i in range(examples)
  ]
  answers = [
    np.flatnonzero([] if weights is None else weights)
    for _, weights, *_ in found
  ]
  if not all(len(at) and at[0] for at in answers):
    raise DataError(
      "source",
      "an example without an answer",
      "weights of some tokens behind the first",
      "pass another source",
    )
  length = -(-max(len(ids) for ids, *_ in found) // _UNIT) * _UNIT
  most = max(map(len, answers))
  attend = ContextParallel(segments=segments)
  right, losses = [], []
  for first in range(0, examples, batch):
    part = [
      (found[i], answers[i]) for i in range(first, min(first + batch, examples))
    ]
    tokens, places = np.zeros((2, batch, length), np.int32)
    rows = np.zeros((batch, most), np.int32)
    for n, ((ids, _, *more), at) in enumerate(part):
      tokens[n, : len(ids)] = ids
      one = segments == _SAME or not more
      places[n, : len(ids)] = 1 if one else more[0]
      rows[n, : len(at)] = at - 1
    logits = model(tokens, segment_ids=places, attend=attend, rows=rows)
    scores = np.asarray(jax.nn.log_softmax(logits))
    for n, ((ids, *_), at) in enumerate(part):
      here = scores[n, : len(at)]
      losses.append(-here[np.arange(len(at)), ids[at]])
      check_losses(losses[-1], model, document=first + n, first=int(at[0]))
      right.append(bool(np.all(np.argmax(here, -1) == ids[at])))
  return AnswerScore(
    accuracy=float(np.mean(right)),
    loss=float(np.mean(np.concatenate(losses))),
    count=examples,
  )
