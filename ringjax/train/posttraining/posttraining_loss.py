"""Contract of losses after pre-training: from log-probabilities to sums.

A loss is a frozen value that `Objective.posttraining` holds. The trainer
computes the log-probabilities of a micro-batch's labels by blocks of tokens and
hands them over; what the loss returns are sums, which add up over micro-batches
and shards. So it has every mesh, layout, optimizer, adapter and checkpoint that
pre-training has, and sees no logits.

Supervised training of answers needs no value: it is the negative
log-likelihood of `Objective` with a weight of 0 on all other labels.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from ringjax.train.batch import Batch

# Name in `Batch.inputs` of the initial model's log-probabilities.
REFERENCE = "reference"


class Mean(NamedTuple):
  """A mean as two sums, float32 [].

  Fields:
    total: Sum of the values.
    count: Number of values, or the sum of their weights.
  """

  total: jax.Array
  count: jax.Array


class LossTerms(NamedTuple):
  """Sums of a micro-batch.

  Fields:
    loss: Sum of the losses, float32 [].
    weight: Number that the sum over a step is divided by, float32 []: of
      pairs, for instance.
    metrics: Means to report, by their names in a log.
  """

  loss: jax.Array
  weight: jax.Array
  metrics: dict[str, Mean]


@runtime_checkable
class PosttrainingLoss(Protocol):
  """Interface of losses after pre-training."""

  @property
  def reads(self) -> tuple[str, ...]:
    """Names of the arrays of `Batch.inputs` that the loss reads.

    `reference` is computed by the trainer: log-probabilities of the labels
    under the initial model.
    """
    ...

  def check_source(self, source: object) -> None:
    """Refuses a source whose rows are not of the kind that the loss needs.

    Raises:
      OptionError: If it is one.
    """
    ...

  def terms(self, logprobs: Float[Array, "B T"], batch: Batch) -> LossTerms:
    """Computes the sums of a micro-batch.

    Args:
      logprobs: Log-probabilities of the labels, 0 where their weight is 0, in
        the layout's order, float32.
      batch: Micro-batch, whose fields are [B, T].
    """
    ...
