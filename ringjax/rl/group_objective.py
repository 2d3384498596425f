"""Policy objectives over groups of answers: GRPO and its kin, as one value.

Guarantees: for answers i of N, with tokens t that the policy sampled, behaviour
log-probabilities `old` and current ones `new`, the loss is

  sum_i sum_t w_it (-c_it min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i)
                    + beta (exp(d_it) - d_it - 1)),  d = reference - new,

with ratios r = exp(new - old) of each token, or with ratio="sequence" the
exponential of the mean of new - old over the answer's tokens. Weights w_it are
1 / (N n_i) for normalise="sequence", 1 / sum_i n_i for "token", and
1 / (N longest) for "constant"; n_i counts the tokens that have a loss. The
importance weight c is min(exp(old - behaviour), truncate), or 1.
Ref: Shao et al. 2024 (GRPO), arXiv 2402.03300; Liu et al. 2025 (Dr. GRPO),
arXiv 2503.20783; Yu et al. 2025 (DAPO), arXiv 2503.14476; Zheng et al. 2025
(GSPO), arXiv 2507.18071; Schulman 2020 (the estimator of the divergence).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.typing import ArrayLeaf

ADVANTAGES = ("group", "batch", "mean")
NORMALISATIONS = ("sequence", "token", "constant")
RATIOS = ("token", "sequence")


class PolicySums(NamedTuple):
  """Sums over the answers' tokens of a micro-batch, float32 [].

  Fields:
    tokens: Number of tokens that have a loss.
    divergence: Sum of the estimates of KL(policy, reference).
    clipped_low: Number of tokens whose ratio is clipped from below.
    clipped_high: Number of tokens whose ratio is clipped from above.
    difference: Sum of new - behaviour log-probabilities.
    mismatch: Sum of exp(new - behaviour) - 1 - (new - behaviour), the estimate
      of KL(behaviour, policy).
    largest: Largest absolute difference of each micro-batch, float32 [A], 0 for
      other micro-batches than this one.
  """

  tokens: jax.Array
  divergence: jax.Array
  clipped_low: jax.Array
  clipped_high: jax.Array
  difference: jax.Array
  mismatch: jax.Array
  largest: jax.Array

  def statistics(self) -> PolicyStatistics:
    """Means over the tokens of a step."""
    share = 1 / jnp.maximum(self.tokens, 1)
    return PolicyStatistics(
      divergence=self.divergence * share,
      clipped_low=self.clipped_low * share,
      clipped_high=self.clipped_high * share,
      mismatch_max=jnp.max(self.largest),
      mismatch_mean=self.difference * share,
      mismatch_kl=self.mismatch * share,
    )


class PolicyStatistics(NamedTuple):
  """Statistics of a step's policy, float32 [].

  Fields:
    divergence: Mean estimate of KL(policy, reference); 0 without a reference.
    clipped_low: Share of tokens whose ratio is clipped from below.
    clipped_high: Share of tokens whose ratio is clipped from above.
    mismatch_max: Largest difference of `log p` of a token, without its sign,
      between this step's forward pass and the engine that sampled it.
    mismatch_mean: Mean of these differences, with their signs.
    mismatch_kl: Mean estimate of KL(engine, policy) from these differences.
  """

  divergence: jax.Array | float
  clipped_low: jax.Array | float
  clipped_high: jax.Array | float
  mismatch_max: jax.Array | float
  mismatch_mean: jax.Array | float
  mismatch_kl: jax.Array | float


class AnswerArrays(NamedTuple):
  """Arrays of answers that an objective reads besides their tokens.

  Fields:
    weights: Weight of each token's loss, float32 [B, T]; 0 for tokens without
      one.
    advantages: Advantage of each answer, float32 [B, 1].
    behaviour: Log-probabilities by the engine that sampled, float32 [B, T].
    old: Log-probabilities that ratios are of, float32 [B, T]; those of
      `behaviour`, or of the policy before the batch's first update.
    reference: Log-probabilities of the reference, float32 [B, T], or None.
    mask: 1 for tokens of the answers, float32 [B, T].
    place: 1 at the number of the micro-batch, float32 [1, A].
  """

  weights: Float[ArrayLeaf, "*A B T"]
  advantages: Float[ArrayLeaf, "*A B 1"]
  behaviour: Float[ArrayLeaf, "*A B T"]
  old: Float[ArrayLeaf, "*A B T"]
  reference: Float[ArrayLeaf, "*A B T"] | None
  mask: Float[ArrayLeaf, "*A B T"]
  place: Float[ArrayLeaf, "... A"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupObjective:
  """Policy objective over groups of answers to the same prompt.

  `GroupObjective.named("dapo")` has the settings of a paper.

  Attributes:
    advantage: "group": the reward less its group's mean, over the group's
      standard deviation (with n - 1) plus `eps`; "batch": over that of all
      rewards; "mean": less the mean alone.
    normalise: "sequence": mean over each answer's tokens, then over answers;
      "token": mean over the tokens of all answers; "constant": sum over
      `longest` tokens, mean over answers.
    ratio: "token", or "sequence" for one ratio of an answer (GSPO).
    clip_low: Largest decrease of a ratio that has a gradient.
    clip_high: Largest increase of a ratio that has a gradient.
    beta: Factor of the divergence from the reference; 0 needs no reference.
    truncate: Largest importance weight of tokens whose engine had other
      weights than the policy at the batch's start; None: ratios are to the
      engine's own log-probabilities, and nothing is computed again.
    longest: Tokens that a constant normalisation divides by.
    eps: Number added to a standard deviation.
  """

  advantage: str = "group"
  normalise: str = "sequence"
  ratio: str = "token"
  clip_low: int | float = 0.2
  clip_high: int | float = 0.2
  beta: int | float = 0.0
  truncate: int | float | None = None
  longest: int | None = None
  eps: int | float = 1e-4

  def __post_init__(self) -> None:
    one_of("advantage", self.advantage, ADVANTAGES)
    one_of("normalise", self.normalise, NORMALISATIONS)
    one_of("ratio", self.ratio, RATIOS)
    number("clip_low", self.clip_low, above=0, most=1)
    number("clip_high", self.clip_high, above=0)
    number("beta", self.beta, least=0)
    number("eps", self.eps, least=0)
    if self.truncate is not None:
      number("truncate", self.truncate, above=0)
    if (self.normalise == "constant") != (self.longest is not None):
      raise OptionError(
        "longest",
        f"{self.longest} with normalise={self.normalise!r}",
        "the number of tokens that normalise='constant' divides by, and None "
        "for others",
        "pass both, or leave longest out",
      )
    if self.longest is not None:
      positive_int("longest", self.longest)

  @classmethod
  def named(cls, name: str, **changes: Any) -> GroupObjective:
    """Objective of a paper: "grpo", "dr_grpo", "dapo" or "gspo".

    Args:
      name: Name of the objective.
      **changes: Fields with other values; `longest`, for "dr_grpo".
    """
    one_of("name", name, NAMED)
    return cls(**{**NAMED[name], **changes})

  def advantages(
    self, rewards: Float[np.ndarray, "N G"]
  ) -> Float32[np.ndarray, "N G"]:
    """Advantages of N groups of G answers, float32 [N, G].

    A group whose rewards are equal has advantages of 0.
    """
    rewards = np.asarray(rewards, np.float64)
    advantages = rewards - rewards.mean(1, keepdims=True)
    if self.advantage != "mean":
      spread = rewards.std(1, ddof=1, keepdims=True)
      if self.advantage == "batch":
        spread = rewards.std(ddof=1)
      advantages = advantages / (spread + self.eps)
    return advantages.astype(np.float32)

  def token_weights(
    self, mask: Int[np.ndarray, "N T"] | Float[np.ndarray, "N T"]
  ) -> Float32[np.ndarray, "N T"]:
    """Weights of tokens [N, T] in the loss, from a mask of those that count."""
    mask = np.asarray(mask, np.float64)
    counts = mask.sum(1, keepdims=True)
    if self.normalise == "sequence":
      weights = mask / np.maximum(counts, 1) / mask.shape[0]
    elif self.normalise == "token":
      weights = mask / max(1.0, float(counts.sum()))
    else:
      assert self.longest is not None
      weights = mask / (mask.shape[0] * self.longest)
    return weights.astype(np.float32)

  def sums(
    self, new: Float[Array, "B T"], answers: AnswerArrays
  ) -> tuple[Float[Array, ""], PolicySums]:
    """Loss of a micro-batch, and sums for its statistics.

    Args:
      new: Log-probabilities of the tokens by the policy, differentiable.
      answers: Other arrays of the answers.
    """
    mask, weights = answers.mask, answers.weights
    old = jax.lax.stop_gradient(answers.old)
    # Tokens without a loss may have any log-probability, but no NaN.
    log_ratio = jnp.where(mask > 0, new - old, 0)
    if self.ratio == "sequence":
      counts = jnp.maximum(jnp.sum(mask, 1, keepdims=True), 1)
      log_ratio = jnp.sum(log_ratio * mask, 1, keepdims=True) / counts
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
    advantages = answers.advantages
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    loss = -jnp.broadcast_to(gain, new.shape)
    if self.truncate is not None:
      change = jnp.where(mask > 0, old - answers.behaviour, 0)
      loss = loss * jnp.minimum(jnp.exp(change), self.truncate)
    divergence = jnp.zeros_like(new)
    if self.beta:
      assert answers.reference is not None
      to_reference = jnp.where(mask > 0, answers.reference - new, 0)
      divergence = jnp.expm1(to_reference) - to_reference
      loss = loss + self.beta * divergence
    total = jnp.sum(loss * weights)
    low = (ratio < 1 - self.clip_low) & (advantages < 0)
    high = (ratio > 1 + self.clip_high) & (advantages > 0)
    difference = jnp.where(mask > 0, new - answers.behaviour, 0)
    count = lambda x: jnp.sum(x * mask)
    sums = PolicySums(
      tokens=jnp.sum(mask),
      divergence=count(divergence),
      clipped_low=count(low.astype(jnp.float32)),
      clipped_high=count(high.astype(jnp.float32)),
      difference=count(difference),
      mismatch=count(jnp.expm1(difference) - difference),
      largest=jnp.max(jnp.abs(difference)) * answers.place.reshape(-1),
    )
    return total, jax.lax.stop_gradient(sums)


NAMED: dict[str, dict[str, Any]] = {
  "grpo": dict(beta=0.04),
  "dr_grpo": dict(advantage="mean", normalise="constant"),
  "dapo": dict(normalise="token", clip_high=0.28),
  # The paper's bounds of a ratio of sequences.
  "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
}
