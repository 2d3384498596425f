"""Policy objectives: the papers' formulas in float64, and gradients."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.rl import (
  AnswerArrays,
  GroupConfig,
  GroupObjective,
  OverlongPenalty,
)

N, G, T = 3, 4, 11


def drawn(seed: int = 0):
  """Log-probabilities of the policy, others, rewards and a mask."""
  rng = np.random.default_rng(seed)
  mask = np.zeros((N * G, T))
  for row, count in enumerate(rng.integers(1, T, N * G)):
    mask[row, 1 : 1 + count] = 1
  # A token of an environment in the middle of an answer.
  mask[0, 1:4] = 1, 0, 1
  old = -rng.exponential(1, (N * G, T))
  near = lambda x, width: x + rng.normal(0, width, x.shape)
  return dict(
    mask=mask,
    old=old,
    new=near(old, 0.3),
    behaviour=near(old, 0.2),
    reference=near(old, 0.5),
    rewards=rng.normal(0, 1, (N, G)).round(1),
  )


def arrays(objective: GroupObjective, x) -> AnswerArrays:
  f = lambda a: jnp.asarray(a, jnp.float32)
  return AnswerArrays(
    weights=f(objective.token_weights(x["mask"])),
    advantages=f(objective.advantages(x["rewards"]).reshape(-1, 1)),
    behaviour=f(x["behaviour"]),
    old=f(x["old"]),
    reference=f(x["reference"]),
    mask=f(x["mask"]),
    place=jnp.ones((1,), jnp.float32),
  )


def formula(x, *, std, normalise, sequence, low, high, beta, truncate=None):
  """The objective answer by answer, token by token, in float64."""
  losses, total_tokens = [], x["mask"].sum()
  for i in range(N * G):
    rewards = x["rewards"][i // G]
    advantage = x["rewards"].reshape(-1)[i] - rewards.mean()
    if std:
      advantage /= rewards.std(ddof=1) + 1e-4
    tokens = np.flatnonzero(x["mask"][i])
    logs = x["new"][i, tokens] - x["old"][i, tokens]
    if sequence:
      logs = np.full_like(logs, logs.mean())
    loss = 0.0
    for t, log in zip(tokens, logs, strict=True):
      r = np.exp(log)
      gain = min(r * advantage, np.clip(r, 1 - low, 1 + high) * advantage)
      if truncate is not None:
        change = np.exp(x["old"][i, t] - x["behaviour"][i, t])
        gain *= min(change, truncate)
      d = x["reference"][i, t] - x["new"][i, t]
      loss += -gain + beta * (np.exp(d) - d - 1)
    if normalise == "sequence":
      loss /= len(tokens) * N * G
    elif normalise == "token":
      loss /= total_tokens
    else:
      loss /= normalise * N * G
    losses.append(loss)
  return sum(losses)


CASES = {
  "grpo": (
    GroupObjective.named("grpo"),
    dict(std=True, normalise="sequence", sequence=False, low=0.2, high=0.2,
         beta=0.04),
  ),
  "dr_grpo": (
    GroupObjective.named("dr_grpo", longest=T),
    dict(std=False, normalise=T, sequence=False, low=0.2, high=0.2, beta=0),
  ),
  "dapo": (
    GroupObjective.named("dapo"),
    dict(std=True, normalise="token", sequence=False, low=0.2, high=0.28,
         beta=0),
  ),
  "gspo": (
    GroupObjective.named("gspo", clip_low=0.05, clip_high=0.04),
    dict(std=True, normalise="sequence", sequence=True, low=0.05, high=0.04,
         beta=0),
  ),
  "truncated": (
    GroupObjective(truncate=1.1, beta=0.1),
    dict(std=True, normalise="sequence", sequence=False, low=0.2, high=0.2,
         beta=0.1, truncate=1.1),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_papers(name):
  objective, settings = CASES[name]
  x = drawn()
  with jax.enable_x64(False):
    loss, sums = objective.sums(
      jnp.asarray(x["new"], jnp.float32), arrays(objective, x)
    )
  assert float(loss) == pytest.approx(formula(x, **settings), abs=1e-6)
  difference = (x["new"] - x["behaviour"])[x["mask"] > 0]
  statistics = sums.statistics()
  assert float(statistics.mismatch_max) == pytest.approx(
    np.abs(difference).max(), rel=1e-5
  )
  assert float(statistics.mismatch_kl) == pytest.approx(
    np.mean(np.exp(difference) - 1 - difference), rel=1e-4
  )


def test_a_gradient_at_ratio_one_is_that_of_the_likelihood():
  """On-policy the gradient is -advantage x weight, and no token is clipped."""
  objective, x = GroupObjective(), drawn(1)
  x["new"] = x["old"] = x["behaviour"]
  answers = arrays(objective, x)
  gradient = jax.grad(lambda new: objective.sums(new, answers)[0])(answers.old)
  expected = -np.asarray(answers.advantages * answers.weights)
  np.testing.assert_allclose(gradient, expected, atol=1e-7)
  _, sums = objective.sums(answers.old, answers)
  assert float(sums.statistics().mismatch_max) == 0.0
  assert float(sums.clipped_low + sums.clipped_high) == 0.0


def test_tokens_without_a_loss_have_no_gradient():
  objective, x = GroupObjective(beta=0.1), drawn(2)
  x["new"] = np.where(x["mask"] > 0, x["new"], np.nan)
  answers = arrays(objective, x)
  loss, gradient = jax.value_and_grad(
    lambda new: objective.sums(new, answers)[0]
  )(jnp.asarray(x["new"], jnp.float32))
  assert np.isfinite(float(loss))
  assert np.all(np.asarray(gradient)[x["mask"] == 0] == 0)


def test_advantages():
  rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
  group = GroupObjective().advantages(rewards)
  spread = np.std([1, 0, 0, 1], ddof=1) + 1e-4
  np.testing.assert_allclose(group[0], np.array([1, -1, -1, 1]) / 2 / spread)
  assert not group[1].any()
  mean = GroupObjective(advantage="mean").advantages(rewards)
  np.testing.assert_allclose(mean[0], [0.5, -0.5, -0.5, 0.5])
  batch = GroupObjective(advantage="batch").advantages(rewards)
  np.testing.assert_allclose(
    batch[0], mean[0] / (rewards.std(ddof=1) + 1e-4), rtol=1e-6
  )


def test_the_overlong_penalty_is_that_of_the_paper():
  penalty = OverlongPenalty(longest=20, margin=4)
  assert [penalty(n) for n in (3, 16, 17, 20, 25)] == [0, 0, -0.25, -1, -1]


@pytest.mark.parametrize(
  "make",
  [
    lambda: GroupObjective(normalise="constant"),
    lambda: GroupObjective(longest=5),
    lambda: GroupObjective(clip_low=0.0),
    lambda: GroupObjective(beta=-1.0),
    lambda: GroupObjective(truncate=float("nan")),
    lambda: GroupObjective.named("ppo"),
    lambda: GroupConfig(groups=3, minibatches=2),
    lambda: OverlongPenalty(longest=3, margin=4),
  ],
)
def test_contradictions_are_refused(make):
  with pytest.raises(OptionError):
    make()


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("trl") is None, reason="trl is not installed"
)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_trl(name):
  """`GRPOTrainer._compute_loss` of TRL on the same log-probabilities.

  In an environment with trl, torch and transformers beside ringjax:
    python -m pytest -m slow -k trl tests/rl/test_group_objective.py
  """
  from tests.rl.trl_losses import trl_loss

  objective, _ = CASES[name]
  x = drawn(3)
  loss, _ = objective.sums(
    jnp.asarray(x["new"], jnp.float32), arrays(objective, x)
  )
  advantages = np.asarray(objective.advantages(x["rewards"]).reshape(-1))
  assert float(loss) == pytest.approx(
    trl_loss(name, objective, x, advantages, T), abs=1e-5
  )
