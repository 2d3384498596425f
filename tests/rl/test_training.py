"""Training by rewards: exact log-probabilities, learning, resuming, age."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError, PromptError, RewardError
from ringjax.rl import (
  GroupConfig,
  GroupObjective,
  Listed,
  Question,
  RewardConfig,
  RewardRecipe,
  RolloutConfig,
  train,
)
from ringjax.serve import Engine, EngineConfig
from ringjax.train import Checkpoints, Lora, Optimizer
from ringjax.train.loop import LoopConfig
from tests import eagle_heads
from tests.rl.models import CONFIG


def small_bytes(prompt, answer, example) -> float:
  """Share of an answer's characters that are ASCII, and the example's."""
  assert prompt.startswith("question") and example in (0, 1, 2)
  return sum(ord(c) < 128 for c in answer) / max(1, len(answer))


def question(number: int) -> Question:
  # Of unequal lengths, odd ones among them.
  text = "question" + "?" * (1 + 7 * (number % 3))
  return Question(prompt=Bytes().encode(text), text=text, example=number % 3)


def recipe(**changes) -> RewardRecipe:
  fields = dict(
    steps=3,
    rewards=RewardConfig(functions=small_bytes),
    rollouts=RolloutConfig(group=4, max_new_tokens=9),
    groups=GroupConfig(groups=2, length=45),
    optimizer=Optimizer(
      learning_rate=1e-2, schedule="constant", weight_decay=0.0
    ),
    loop_config=LoopConfig(log_every=1),
  )
  return RewardRecipe(**fields | changes)


def run(settings: RewardRecipe, reports: list[Any] | None = None, **more):
  reports = [] if reports is None else reports
  result = train(
    settings,
    more.pop("model", None) or rj.models.create(CONFIG, seed=3),
    more.pop("questions", question),
    tokenizer=Bytes(),
    report=lambda *both: reports.append(both),
    **more,
  )
  return result, reports


def weights(result) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(result.model)]


def same(a, b) -> bool:
  return all(
    np.array_equal(x, y) for x, y in zip(weights(a), weights(b), strict=True)
  )


@pytest.mark.long
def test_the_policy_is_the_engine_bit_for_bit():
  """Every update sees the log-probabilities of the engine that sampled."""
  result, reports = run(recipe(objective=GroupObjective(beta=0.1)))
  assert result.step == len(reports) == 3
  for training, rollouts in reports:
    assert training.policy.mismatch_max == 0.0
    assert training.policy.mismatch_kl == 0.0
    assert rollouts.age == 0 and rollouts.drawn == 2
  # The reference is the first model.
  assert reports[0][0].policy.divergence == 0.0
  assert reports[2][0].policy.divergence > 0


@pytest.mark.long
def test_a_resumed_run_is_the_same_with_answers_in_flight(tmp_path):
  """Two passes over two parts of each batch, answers of older weights."""
  settings = dict(
    steps=6,
    groups=GroupConfig(groups=2, length=45, minibatches=2, epochs=1, age=1),
    objective=GroupObjective.named("dapo", truncate=2.0, beta=0.1),
    accumulate=2,
    loop_config=LoopConfig(log_every=1, save_every=2),
  )
  whole, reports = run(recipe(**settings))
  assert [rollouts.age for _, rollouts in reports] == [0, 0, 1, 1, 1, 1]
  assert [rollouts.batch for _, rollouts in reports] == [0, 0, 1, 1, 2, 2]
  # Older weights have other log-probabilities, and the first ones the same.
  differences = [training.policy.mismatch_max for training, _ in reports]
  assert differences[0] == 0.0 < differences[2]
  assert reports[-1][0].policy.divergence > 0

  def stop(step: int) -> None:
    # A signal ends the run after the step, within a batch; a crash before it,
    # and what follows the last save is lost.
    if step == 2:
      os.kill(os.getpid(), signal.SIGTERM)
    if step == 5:
      raise KeyboardInterrupt

  resumed = {}
  for number in range(3):
    on_step = stop if number < 2 else lambda step: None
    again: list[Any] = []
    with Checkpoints(tmp_path) as saved:
      options = dict(checkpoints=saved, on_step=on_step, reports=again)
      if number == 1:
        with pytest.raises(KeyboardInterrupt):
          run(recipe(**settings), **options)
      else:
        last, _ = run(recipe(**settings), **options)
    resumed |= {training.step: both for both in again for training in both[:1]}
    assert [both[0].step for both in again] == [[1, 2, 3], [4, 5], [5, 6]][
      number
    ]
    assert (last.stopped is not None) == (number < 2)
  # The same curve, answers and ages.
  for training, rollouts in reports:
    training_again, rollouts_again = resumed[training.step]
    assert rollouts_again == rollouts
    assert training_again.policy == training.policy
    assert training_again.loss == training.loss
  assert same(whole, last)


@pytest.mark.slow
def test_dynamic_sampling_draws_again():
  """Groups without spread are drawn again, up to a limit."""

  def flat_for_some(prompt, answer, example) -> float:
    return 0.0 if example else float(sum(map(ord, answer)) % 97)

  settings = recipe(
    steps=1,
    rewards=RewardConfig(functions=flat_for_some),
    groups=GroupConfig(groups=2, length=45, refill=2),
  )
  _, reports = run(settings)
  (_, rollouts) = reports[0]
  # QuestionSource 0, 1; then 2; then 3: 0 and 3 have the example 0.
  assert (rollouts.drawn, rollouts.useful, rollouts.flat) == (4, 2, 2)
  never = RewardConfig(functions=lambda prompt, answer, example: 1.0)
  result, reports = run(
    recipe(
      steps=1,
      rewards=never,
      groups=GroupConfig(groups=2, length=45, refill=1),
    )
  )
  assert (reports[0][1].drawn, reports[0][1].useful) == (4, 0)
  start = rj.models.create(CONFIG, seed=3)
  assert all(
    np.array_equal(a, b)
    for a, b in zip(weights(result), jax.tree.leaves(start), strict=True)
  )


@pytest.mark.slow
def test_adapters_and_bfloat16():
  """Both have a bound: the merged weights' rounding, and the dtype's."""
  result, reports = run(recipe(lora=Lora(rank=2), steps=2))
  assert result.adapter is not None
  assert all(t.policy.mismatch_max < 1e-5 for t, _ in reports)
  _, reports = run(recipe(dtype="bfloat16", steps=1))
  assert reports[0][0].policy.mismatch_max < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"seq": 2}])
def test_meshes(axes):
  """Several devices sum in other orders: log-probabilities differ by it."""
  (name,) = axes
  mesh = rj.make_mesh((2,), (name,), devices=jax.devices()[:2])
  result, reports = run(
    recipe(steps=2, groups=GroupConfig(groups=2, length=48)),
    model=rj.models.create(CONFIG, seed=3, mesh=mesh),
    mesh=mesh,
    axis="seq" if name == "seq" else None,
  )
  assert result.step == 2
  assert all(t.policy.mismatch_max < 1e-4 for t, _ in reports)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_an_engine_on_a_mesh_of_its_own(sizes):
  """Weights are moved to its devices after each update."""
  mesh, engine_mesh = (
    rj.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in sizes
  )
  _, reports = run(
    recipe(steps=2),
    model=rj.models.create(CONFIG, seed=3, mesh=mesh),
    mesh=mesh,
    engine_mesh=engine_mesh,
  )
  assert len(reports) == 2
  assert all(t.policy.mismatch_max < 1e-4 for t, _ in reports)


@pytest.mark.slow
@pytest.mark.parametrize(
  "config",
  [
    dict(
      CONFIG, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2
    ),
    dict(
      model_type="mamba2",
      vocab_size=262,
      hidden_size=32,
      num_hidden_layers=2,
      state_size=16,
      head_dim=16,
      num_heads=4,
      n_groups=1,
      conv_kernel=4,
      chunk_size=16,
    ),
  ],
  ids=["experts", "recurrent"],
)
def test_layers_without_one_order_differ_by_rounding(config):
  model = rj.models.create(config, seed=3)
  result, reports = run(recipe(steps=2), model=model)
  assert result.step == 2
  assert all(t.policy.mismatch_max < 1e-5 for t, _ in reports)


def test_what_cannot_be_learned_is_refused_before_the_first_step():
  taken = []
  options = dict(on_step=taken.append)
  with pytest.raises(OptionError, match="262"):
    run(
      recipe(), model=rj.models.create(dict(CONFIG, vocab_size=200)), **options
    )
  with pytest.raises(OptionError, match="head that reads several layers"):
    run(recipe(), model=eagle_heads.model(), **options)
  with pytest.raises(OptionError, match="accumulate"):
    recipe(accumulate=3)
  with pytest.raises(OptionError, match="replay_every: got 2 with moments_in"):
    recipe(
      optimizer=rj.train.Optimizer(moments_in="host"),
      loop_config=LoopConfig(replay_every=2),
    )
  with pytest.raises(OptionError, match="truncate"):
    recipe(
      groups=GroupConfig(groups=2, length=45, age=1),
      objective=GroupObjective.named("gspo"),
    )
  long = Question(prompt=[5] * 40)
  with pytest.raises(PromptError, match="40 tokens"):
    run(
      recipe(),
      questions=Listed(items=[question(0), question(1), long]),
      **options,
    )
  assert not taken


@pytest.mark.long
def test_a_reward_that_fails_in_flight_loses_no_save(tmp_path):
  """The batch is sampled again by the resumed run, with newer weights."""
  asked: list[int] = []

  def counted(number: int) -> Question:
    asked.append(number)
    return Question(
      prompt=question(number).prompt, text="question", example=number
    )

  def fails_at_five(prompt, answer, example) -> float:
    if example == 5:
      raise KeyError(example)
    return float(len(answer) % 5)

  settings = dict(
    steps=4,
    groups=GroupConfig(groups=2, length=45, age=1),
    objective=GroupObjective.named("dapo", truncate=2.0),
    loop_config=LoopConfig(log_every=1, save_every=1),
  )
  with Checkpoints(tmp_path) as saved:
    options = dict(checkpoints=saved, questions=counted)
    failing = recipe(rewards=RewardConfig(functions=fails_at_five), **settings)
    with pytest.raises(RewardError, match="fails_at_five"):
      run(failing, **options)
  # Closing waits for the save that was being written.
  asked.clear()
  with Checkpoints(tmp_path) as saved:
    assert max(saved.steps()) == 2
    options["checkpoints"] = saved
    mended = RewardConfig(functions=lambda prompt, answer, example: example % 3)
    result, reports = run(recipe(rewards=mended, **settings), **options)
  assert result.step == 4 and asked[:4] == [4, 5, 6, 7]
  assert [(x.batch, x.age) for _, x in reports] == [(2, 0), (3, 1)]


@pytest.mark.long
def test_a_reward_that_is_no_number_ends_the_training():
  nan = RewardConfig(functions=lambda prompt, answer, example: float("nan"))
  with pytest.raises(RewardError, match="nan"):
    run(recipe(rewards=nan))


def test_stages_need_an_engine_on_another_mesh():
  """An engine's calls have a cache, which stages do not pass on."""
  mesh = rj.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
  model = rj.models.create(CONFIG, seed=3, mesh=mesh)
  for options in ({}, {"engine_mesh": mesh}):
    with pytest.raises(OptionError, match="a mesh without 'stage' for the"):
      run(recipe(), model=model, mesh=mesh, **options)
  with pytest.raises(OptionError, match="for an engine, whose calls have a"):
    Engine(model, EngineConfig(rows=2, longest=32))
