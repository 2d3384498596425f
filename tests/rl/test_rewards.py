"""Reward functions in threads and processes, and what is refused of them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from launch.training.reward_functions import number_share
from ringjax.errors import OptionError, RewardError
from ringjax.rl import Judge, Listed, RewardConfig
from tests.rl.reward_functions import as_example, exits, fails, length, sleeps


def test_weighted_sums_of_named_functions():
  config = RewardConfig(
    functions={"length": length, "given": as_example},
    weights={"length": 0.5},
    workers=3,
  )
  answers = [("p", "a" * n, np.float32(-n)) for n in range(7)]
  with Judge(config) as judge:
    judged = judge.rewards(answers)
    assert list(judged.parts) == ["length", "given"]
    np.testing.assert_array_equal(judged.parts["length"], np.arange(7))
    np.testing.assert_array_equal(judged.rewards, -0.5 * np.arange(7))
    assert judge.rewards(answers[:2]).rewards.tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
  ("function", "example", "words"),
  [
    (fails, 0, "fails.*KeyError: 'a'"),
    (exits, 0, "exits.*SystemExit: a"),
    (as_example, float("nan"), "as_example.*nan.*finite"),
    (as_example, float("inf"), "finite"),
    (as_example, 1e39, "finite"),
    (as_example, None, "a NoneType"),
    (as_example, "1.0", "a str"),
  ],
)
def test_what_is_no_finite_number_is_refused(function, example, words):
  with (
    Judge(RewardConfig(functions=function)) as judge,
    pytest.raises(RewardError, match=words),
  ):
    judge.rewards([("p", "a", 1.0), ("p", "x", example)])


def test_a_function_that_takes_too_long_is_named():
  config = RewardConfig(
    functions={"quick": length, "slow": sleeps}, timeout_s=0.2
  )
  with Judge(config) as judge:
    with pytest.raises(RewardError, match=r"slow for 0\.2 s"):
      judge.rewards([("p", "a", 0)])
    # Later calls have threads of their own.
    quick = Judge(RewardConfig(functions=length, timeout_s=20))
    assert quick.rewards([("p", "abc", 0)]).rewards.tolist() == [3.0]


def test_sums_that_are_not_finite_are_refused():
  config = RewardConfig(
    functions={"a": as_example, "b": as_example}, weights={"a": 2}
  )
  with Judge(config) as judge, pytest.raises(RewardError, match="a, b.*inf"):
    judge.rewards([("p", "a", 2e38)])


@pytest.mark.long
def test_a_program_ends_though_a_function_does_not():
  script = """
import threading
from ringjax.rl import Judge, RewardConfig
def endless(prompt, answer, example):
  threading.Event().wait()
Judge(RewardConfig(functions=endless, timeout_s=0.1)).rewards([("p", "a", 0)])
"""
  done = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True
  )
  assert done.returncode == 1 and "RewardError" in done.stderr


@pytest.mark.slow
def test_processes():
  config = RewardConfig(
    functions={"length": length, "given": as_example},
    processes=True,
    workers=2,
    timeout_s=5,
  )
  with Judge(config) as judge:
    judged = judge.rewards([("p", "ab", 1.5), ("p", "", -2)])
    assert judged.rewards.tolist() == [3.5, -2.0]
    with pytest.raises(RewardError, match="given"):
      judge.rewards([("p", "ab", None)])
    # An example that can't travel.
    with pytest.raises(RewardError, match=r"length.*lambda"):
      judge.rewards([("p", "ab", lambda: 0)])
  late = RewardConfig(
    functions=sleeps, processes=True, workers=1, timeout_s=0.1
  )
  with Judge(late) as judge, pytest.raises(RewardError, match="sleeps"):
    judge.rewards([("p", "a", 0)] * 3)


@pytest.mark.parametrize(
  "fields",
  [
    dict(functions={}),
    dict(functions=length, weights={"other": 1.0}),
    dict(functions=length, weights={"length": float("nan")}),
    dict(functions=length, workers=0),
    dict(functions=length, timeout_s=0),
    dict(functions=lambda *_: 0.0, processes=True),
  ],
)
def test_configs_are_checked(fields):
  with pytest.raises(OptionError):
    RewardConfig(**fields)


def test_a_list_without_questions_is_refused():
  with pytest.raises(OptionError, match="no questions"):
    Listed(items=[])


def test_numbers_are_rewarded_by_their_share_of_the_answer():
  reward = lambda answer: number_share("", answer, {"answer": "12"})
  answers = ("12", " 12\n", "12.", "7 + 5 = 12", "12 or 7", "no", "")
  rewards = [reward(x) for x in answers]
  assert rewards == [1.0, 1.0, 2 / 3, 0.2, 0.0, 0.0, 0.0]
