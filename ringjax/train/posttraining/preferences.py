"""Losses of pairs of answers: DPO, IPO and ORPO.

With the log-probability l of an answer, the sum over its tokens, that of the
initial model r, and d = (l - r of the preferred) - (l - r of the other):

  Dpo   -(1 - e) log sigmoid(b d) - e log sigmoid(-b d); robust:
        (-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)) / (1 - 2 e)
  Ipo   (d' - 1 / (2 b))^2, where d' is d with means over tokens for sums
  Orpo  -m - b log sigmoid(log odds(m) - log odds(m of the other)), where m is
        the mean of log p over the tokens of the preferred answer and
        odds(m) = exp(m) / (1 - exp(m)); without an initial model

Guarantees: the loss of a step is the mean over its pairs, however they are
packed, split into micro-batches and sharded. A pair is two segments of a row,
2n + 1 with the preferred answer and 2n + 2 with the other. All sums are
float32; differences to the initial model are taken token by token.
Ref:  Rafailov et al. 2023, arXiv 2305.18290 (DPO; e: Mitchell 2023, a note on
DPO with noisy preferences; robust: Chowdhury et al. 2024, arXiv 2403.00409);
Azar et al. 2023, arXiv 2310.12036 (IPO; means over
tokens as in TRL); Hong et al. 2024, arXiv 2403.07691 (ORPO).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ringjax.checks import number
from ringjax.data.chats.chat_documents import PairDocuments
from ringjax.errors import OptionError
from ringjax.train.batch import Batch
from ringjax.train.posttraining.posttraining_loss import (
  REFERENCE,
  LossTerms,
  Mean,
)


class _Pairs(NamedTuple):
  """A number for each answer of the pairs of rows, [B, P].

  Fields:
    chosen: Numbers of preferred answers.
    rejected: Numbers of the other answers.
  """

  chosen: Float[Array, "B P"]
  rejected: Float[Array, "B P"]


def _sums(values: Float[Array, "B T"], batch: Batch) -> _Pairs:
  """Sums over the tokens of each answer; 0 of pairs that a row lacks."""
  assert batch.segments is not None
  # An answer has two tokens at least, a pair four.
  pairs = max(1, values.shape[1] // 4)
  add_up = lambda x, segments: jax.ops.segment_sum(x, segments, 2 * pairs + 1)
  sums = jax.vmap(add_up)(values, batch.segments)
  return _Pairs(sums[:, 1::2], sums[:, 2::2])


def _counts(batch: Batch) -> tuple[_Pairs, Bool[Array, "B P"]]:
  """Sums of the weights of each answer, and which pairs exist."""
  sums = _sums(jnp.asarray(batch.weights, jnp.float32), batch)
  exist = (sums.chosen > 0) & (sums.rejected > 0)
  at_least_one = lambda x: jnp.where(exist, x, 1.0)
  return _Pairs(*map(at_least_one, sums)), exist


def _terms(
  losses: Float[Array, "B P"],
  exist: Bool[Array, "B P"],
  metrics: dict[str, Float[Array, "B P"]],
) -> LossTerms:
  """Sums over the pairs that exist."""
  count = jnp.sum(exist.astype(jnp.float32))
  total = lambda x: jnp.sum(jnp.where(exist, x, 0.0))
  means = {
    name: Mean(jax.lax.stop_gradient(total(x)), count)
    for name, x in metrics.items()
  }
  return LossTerms(total(losses), count, means)


def _with_rewards(
  rewards: _Pairs, metrics: dict[str, Float[Array, "B P"]]
) -> dict[str, Float[Array, "B P"]]:
  """Metrics of rewards, and others."""
  margin = rewards.chosen - rewards.rejected
  return {
    "reward_chosen": rewards.chosen,
    "reward_rejected": rewards.rejected,
    "reward_margin": margin,
    "reward_accuracy": (margin > 0).astype(jnp.float32),
    **metrics,
  }


def _check_pairs(name: str, source: object) -> None:
  if not isinstance(source, PairDocuments):
    raise OptionError(
      "sources",
      f"{type(source).__name__} for {name}, which learns from pairs",
      "pairs of answers",
      "pass PairDocuments, of kind 'preferences' in a config",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo:
  """Direct preference optimisation.

  Attributes:
    beta: Factor of the log-ratios to the initial model, above 0.
    label_smoothing: Probability that a pair's preference is wrong, below 0.5.
    robust: Whether the loss is the unbiased one of preferences that are wrong
      with this probability, and not the smoothed one.
  """

  beta: int | float = 0.1
  label_smoothing: int | float = 0.0
  robust: bool = False

  def __post_init__(self) -> None:
    number("beta", self.beta, above=0)
    number("label_smoothing", self.label_smoothing, least=0)
    if self.label_smoothing >= 0.5:
      raise OptionError(
        "label_smoothing",
        self.label_smoothing,
        "a probability below 0.5",
        "exchange chosen and rejected where most preferences are wrong",
      )

  @property
  def reads(self) -> tuple[str, ...]:
    """Name of the log-probabilities of the initial model."""
    return (REFERENCE,)

  def check_source(self, source: object) -> None:
    """Refuses a source that is not of pairs."""
    _check_pairs("Dpo", source)

  def terms(self, logprobs: Float[Array, "B T"], batch: Batch) -> LossTerms:
    """The sums of a micro-batch; see `PosttrainingLoss.terms`."""
    ratios = _log_ratios(logprobs, batch)
    _, exist = _counts(batch)
    rewards = _Pairs(self.beta * ratios.chosen, self.beta * ratios.rejected)
    margin = rewards.chosen - rewards.rejected
    smoothing = self.label_smoothing
    losses = -(1 - smoothing) * jax.nn.log_sigmoid(margin)
    if smoothing and self.robust:
      losses += smoothing * jax.nn.log_sigmoid(-margin)
      losses /= 1 - 2 * smoothing
    elif smoothing:
      losses -= smoothing * jax.nn.log_sigmoid(-margin)
    return _terms(
      losses, exist, _with_rewards(rewards, _logprob_metrics(logprobs, batch))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ipo:
  """Identity preference optimisation, with means over an answer's tokens.

  Attributes:
    beta: Strength of the regularisation to the initial model, above 0: the
      margin that is learned is 1 / (2 beta).
  """

  beta: int | float = 0.1

  def __post_init__(self) -> None:
    number("beta", self.beta, above=0)

  @property
  def reads(self) -> tuple[str, ...]:
    """Name of the log-probabilities of the initial model."""
    return (REFERENCE,)

  def check_source(self, source: object) -> None:
    """Refuses a source that is not of pairs."""
    _check_pairs("Ipo", source)

  def terms(self, logprobs: Float[Array, "B T"], batch: Batch) -> LossTerms:
    """The sums of a micro-batch; see `PosttrainingLoss.terms`."""
    ratios = _log_ratios(logprobs, batch)
    counts, exist = _counts(batch)
    means = _Pairs(
      ratios.chosen / counts.chosen, ratios.rejected / counts.rejected
    )
    margin = means.chosen - means.rejected
    losses = jnp.square(margin - 1 / (2 * self.beta))
    rewards = _Pairs(self.beta * ratios.chosen, self.beta * ratios.rejected)
    return _terms(
      losses, exist, _with_rewards(rewards, _logprob_metrics(logprobs, batch))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orpo:
  """Odds ratio preference optimisation, without an initial model.

  Attributes:
    beta: Factor of the odds ratio's loss, above 0; lambda in the paper.
  """

  beta: int | float = 0.1

  def __post_init__(self) -> None:
    number("beta", self.beta, above=0)

  @property
  def reads(self) -> tuple[str, ...]:
    """Empty: no initial model is needed."""
    return ()

  def check_source(self, source: object) -> None:
    """Refuses a source that is not of pairs."""
    _check_pairs("Orpo", source)

  def terms(self, logprobs: Float[Array, "B T"], batch: Batch) -> LossTerms:
    """The sums of a micro-batch; see `PosttrainingLoss.terms`."""
    counts, exist = _counts(batch)
    sums = _sums(logprobs * batch.weights, batch)
    # Any number below 0 stands for the means of pairs that do not exist.
    mean = lambda total, count: jnp.where(exist, total / count, -1.0)
    means = _Pairs(*map(mean, sums, counts))
    # log(1 - exp(m)), exact for a mean near 0, too.
    log_not = lambda m: jnp.log(-jnp.expm1(m))
    log_odds = (means.chosen - means.rejected) - (
      log_not(means.chosen) - log_not(means.rejected)
    )
    log_ratio = jax.nn.log_sigmoid(log_odds)
    losses = -means.chosen - self.beta * log_ratio
    rewards = _Pairs(self.beta * means.chosen, self.beta * means.rejected)
    metrics = {
      "nll_chosen": -means.chosen,
      "log_odds": log_odds,
      "log_odds_ratio": log_ratio,
      **_logprob_metrics(logprobs, batch),
    }
    return _terms(losses, exist, _with_rewards(rewards, metrics))


def _log_ratios(logprobs: Float[Array, "B T"], batch: Batch) -> _Pairs:
  """log(p / p of the initial model) of each answer."""
  if batch.inputs is None or REFERENCE not in batch.inputs:
    raise OptionError(
      "inputs",
      "a batch without log-probabilities of the initial model",
      "Batch.inputs['reference'], as rj.train.train adds them",
      "pass inputs={'reference': ...} to Batch",
    )
  return _sums((logprobs - batch.inputs[REFERENCE]) * batch.weights, batch)


def _logprob_metrics(
  logprobs: Float[Array, "B T"], batch: Batch
) -> dict[str, Float[Array, "B P"]]:
  sums = _sums(logprobs * batch.weights, batch)
  return {"logprob_chosen": sums.chosen, "logprob_rejected": sums.rejected}


LOSSES: dict[str, type[Dpo] | type[Ipo] | type[Orpo]] = {
  "dpo": Dpo,
  "ipo": Ipo,
  "orpo": Orpo,
}
