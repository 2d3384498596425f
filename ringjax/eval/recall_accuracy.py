"""Accuracy of a model on tokens that the text determines, by source.

Guarantees: example i of a source is the same for every model. An answer counts
if greedy decoding would give all of it.
Cost: one forward pass of each example.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from ringjax.checks import positive_int
from ringjax.data.tasks.recall import Recall
from ringjax.errors import DataError
from ringjax.eval.finite_losses import check_losses
from ringjax.models.transformer import Transformer

# Numbers of logits are rounded up to a multiple, so that few programs compile.
_ROWS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallAccuracy:
  """Accuracy on the recalled tokens of a source.

  Attributes:
    answers: Share of answers (runs of recalled tokens) that are right.
    tokens: Share of recalled tokens that are right after the true tokens.
    count: Number of answers.
  """

  answers: float
  tokens: float
  count: int


def recall_accuracy(
  model: Transformer, source: Recall, *, examples: int = 8, seed: int = 0
) -> RecallAccuracy:
  """Reads examples of a source and compares the likeliest tokens.

  Args:
    model: Model to evaluate.
    source: Source of `ringjax.data.tasks.recall` or of
      `ringjax.data.tasks.recall_tasks`.
    examples: Number of examples.
    seed: Random seed of the examples.

  Raises:
    DataError: If the examples have no recalled tokens.
  """
  positive_int("examples", examples)
  # With text=0 only recalled tokens have a weight.
  source = dataclasses.replace(source, text=0.0)
  right: list[np.ndarray] = []
  for i in range(examples):
    ids, weights = source.example(np.random.default_rng([seed, i]))
    at = np.flatnonzero(weights)
    if not len(at):
      continue
    rows = np.full((1, -(-len(at) // _ROWS) * _ROWS), at[0] - 1)
    rows[0, : len(at)] = at - 1
    logits = jax.device_get(model(ids[None], rows=rows))[0, : len(at)]
    check_losses(logits.max(-1), model, document=i, first=int(at[0]))
    hits = np.argmax(logits, -1) == ids[at]
    right += np.split(hits, np.flatnonzero(np.diff(at) > 1) + 1)
  if not right:
    raise DataError(
      "source",
      "examples without recalled tokens",
      "some in one of the examples",
      "pass more examples, or another source",
    )
  return RecallAccuracy(
    answers=float(np.mean([hits.all() for hits in right])),
    tokens=float(np.mean(np.concatenate(right))),
    count=len(right),
  )
