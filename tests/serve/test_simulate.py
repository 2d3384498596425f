"""A simulated engine decides as an engine does; traces are replayed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, PromptError
from ringjax.serve import (
  Engine,
  Request,
  SimulatedEngine,
  StepCost,
  TraceRequest,
  measure_cost,
  poisson_trace,
  read_trace,
  replay_live,
  replay_simulated,
)
from ringjax.serve.simulate import features
from tests.helpers import refused

COST = StepCost(
  answers=0.01, prompts=0.02, row=1e-4, token=1e-4, key=1e-7, pair=1e-7
)


@pytest.fixture(scope="module")
def model():
  return rj.models.create(
    dict(
      model_type="llama",
      vocab_size=64,
      hidden_size=32,
      intermediate_size=64,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=1,
      max_position_embeddings=128,
    ),
    seed=0,
  )


def engine(model, **options):
  """A small one, which has to preempt rows."""
  settings = dict(rows=4, capacity=128, longest=96, page=16, piece=16, pieces=2)
  return Engine(model, preempt="recompute", **settings | options)


def noting(at):
  """Lets an engine's scheduler note its plans; where they are noted."""
  found, plan_of = [], at.scheduler.plan

  def noted():
    plan = plan_of()
    found.append(
      (
        [(t.row.arrival, t.slot, t.at, t.chooses) for t in plan.turns],
        [(p.row.arrival, p.start, p.count, p.chooses) for p in plan.pieces],
        [(row.arrival, row.hit) for row in plan.admitted],
        [row.arrival for row in plan.preempted],
      )
    )
    return plan

  at.scheduler.plan = noted
  return found


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"share": "nothing", "pieces": 1}])
def test_decisions_are_those_of_an_engine(model, options):
  rng = np.random.default_rng(0)
  common = rng.integers(0, 64, 40).astype(np.int32)
  wanted = []
  for _ in range(30):
    own = rng.integers(0, 64, rng.integers(1, 30)).astype(np.int32)
    prompt = np.append(common[: rng.choice([0, 17, 32, 40])], own)
    wanted.append((prompt, int(rng.integers(1, 26))))
  # How many come before each step.
  counts = rng.choice([0, 0, 0, 1, 3], 400)
  live = engine(model, **options)
  simulated = SimulatedEngine.like(live, COST)
  plans = noting(live), noting(simulated)
  for at, submit in (
    (live, lambda p, n: live.submit(Request(prompt=p, max_new_tokens=n))),
    (simulated, simulated.submit),
  ):
    left = list(wanted)
    for count in counts:
      for prompt, new in left[:count]:
        submit(prompt, new)
      left = left[count:]
      at.step()
    assert not left and not at.busy
    at.scheduler.tree.check()
  assert plans[0] == plans[1]
  assert live.counters.preemptions and len(plans[0]) == 400
  assert bool(live.counters.cached_tokens) == (not options)
  assert simulated.prompt_tokens == live.counters.prompt_tokens
  refused(PromptError, lambda: simulated.submit(common, 90), "96")


def test_the_clock():
  at = SimulatedEngine(COST, rows=2, capacity=64, longest=64, page=16, piece=8)
  times = []
  at.submit(
    np.zeros(10, np.int32),
    3,
    on_token=lambda now, end: times.append((now, end)),
  )
  while at.step():
    pass
  # A call for 10 tokens of a prompt, then two for an answer.
  first = 0.02 + 10e-4 + 55e-7
  second = first + 0.01 + 1e-4 + 11e-7
  third = second + 0.01 + 1e-4 + 12e-7
  np.testing.assert_allclose([t for t, _ in times], [first, second, third])
  assert [end for _, end in times] == [False, False, True]


def test_costs():
  assert StepCost.parse("answers=0.01, token=1e-4") == StepCost(
    answers=0.01, token=1e-4
  )
  for text in ("", "answers", "answers=x", "other=1", "answers=-1", "token=0"):
    refused(OptionError, lambda text=text: StepCost.parse(text))
  rng = np.random.default_rng(1)
  rows = rng.uniform(1, 100, (50, 7)) * [1, 1, 1, 10, 100, 1000, 1]
  rows[:, :2] = rng.integers(0, 2, (50, 2))
  rows[:, 0] = np.maximum(rows[:, 0], 1 - rows[:, 1])
  rows[:, 6] = 1
  rows[:, [2, 4]] *= rows[:, :1]
  rows[:, [3, 5]] *= rows[:, 1:2]
  want = np.array([0.01, 0.02, 2e-5, 0.0, 3e-6, 1e-7, 5e-3])
  found = StepCost.fit(rows, rows @ want)
  np.testing.assert_allclose(dataclasses.astuple(found), want, atol=1e-12)
  refused(OptionError, lambda: StepCost.fit(rows[:7], np.ones(7)), "8")


@pytest.mark.long
def test_a_trace_is_replayed_live_and_simulated(model):
  live = engine(model, capacity=512)
  cost = measure_cost(live)
  trace = poisson_trace(
    rate=500.0,
    requests=12,
    prompt_tokens=20,
    new_tokens=8,
    shared_tokens=32,
    seed=3,
  )
  trace.append(TraceRequest(arrival=0.1, prompt_tokens=200, new_tokens=1))
  for result in (
    replay_live(live, trace),
    replay_simulated(SimulatedEngine.like(live, cost), trace),
  ):
    found = result.summary()
    assert (found["requests"], found["refused"]) == (12, 1)
    assert found["new_tokens"] == sum(r.new_tokens for r in trace[:12])
    assert found["prompt_tokens"] == sum(r.prompt_tokens for r in trace[:12])
    # All but the first find what is common, as far as it is whole.
    assert found["cached_tokens"] >= 11 * 32
    assert len(result.first_s) == len(result.whole_s) == 12
    assert 0 < found["first_s"]["p50"] <= found["whole_s"]["p50"]
    assert found["seconds"] >= max(result.whole_s)
  live.submit(Request(prompt=[1], max_new_tokens=2))
  refused(OptionError, lambda: measure_cost(live), "busy")


MOONCAKE = (
  '{"timestamp": 3000, "input_length": 600, "output_length": 5,'
  ' "hash_ids": [7, 9]}\n'
  '{"timestamp": 1000, "input_length": 512, "output_length": 2,'
  ' "hash_ids": [7]}\n'
)
AZURE = (
  "TIMESTAMP,ContextTokens,GeneratedTokens\n"
  "2023-11-16 18:17:03.9799600,4808,10\n"
  "2023-11-16 18:17:04.4799600,30,8\n"
)


def test_traces_are_read(tmp_path):
  path = tmp_path / "some.jsonl"
  path.write_text(MOONCAKE)
  one, two = read_trace(path)
  assert (one.arrival, one.prompt_tokens, one.new_tokens) == (0, 512, 2)
  assert (two.arrival, two.blocks) == (2.0, (7, 9))
  for vocab in (None, 50):
    a, b = one.prompt(vocab), two.prompt(vocab)
    assert (a.size, b.size, a.dtype) == (512, 600, np.int32)
    assert (a == b[:512]).all() and not (a[:88] == b[512:]).all()
  small = two.shrunk(16)
  assert (small.prompt_tokens, small.block, small.new_tokens) == (38, 32, 1)
  assert (small.prompt(50)[:32] == one.shrunk(16).prompt(50)).all()
  path = tmp_path / "some.csv"
  path.write_text(AZURE)
  one, two = read_trace(path)
  assert two.arrival == pytest.approx(0.5, abs=1e-5)
  assert (one.prompt_tokens, one.new_tokens) == (4808, 10)
  assert not set(one.prompt()) & set(two.prompt())


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("a.txt", MOONCAKE),
    ("a.jsonl", ""),
    ("a.jsonl", AZURE),
    ("a.jsonl", MOONCAKE.replace("[7, 9]", "[7]")),
    ("a.jsonl", MOONCAKE.replace("5,", '"5",')),
    ("a.jsonl", MOONCAKE.replace("3000", "-1")),
    ("a.csv", MOONCAKE),
    ("a.csv", AZURE.replace("30,8", "30,0")),
    ("a.csv", AZURE.replace("30,8", "30")),
    ("a.csv", AZURE.replace("2023-11-16 18:17:04", "yesterday")),
  ],
)
def test_other_files_are_refused(tmp_path, name, text):
  (tmp_path / name).write_text(text)
  refused(OptionError, lambda: read_trace(tmp_path / name), "trace")


def test_arrivals_that_are_made_up():
  trace = poisson_trace(
    rate=2.0, requests=2000, prompt_tokens=100, new_tokens=30, spread=0.8
  )
  mean = lambda name: np.mean([getattr(r, name) for r in trace])
  assert trace[-1].arrival == pytest.approx(1000, rel=0.1)
  assert mean("prompt_tokens") == pytest.approx(100, rel=0.1)
  assert mean("new_tokens") == pytest.approx(30, rel=0.1)
  at_once = poisson_trace(
    rate=math.inf, requests=3, prompt_tokens=9, new_tokens=2, spread=0
  )
  assert {(r.arrival, r.prompt_tokens, r.new_tokens) for r in at_once} == {
    (0, 9, 2)
  }
  refused(
    OptionError,
    lambda: poisson_trace(rate=0, requests=1, prompt_tokens=1, new_tokens=1),
    "rate",
  )


def test_features():
  at = SimulatedEngine(COST, rows=2, capacity=64, longest=64, page=16, piece=8)
  at.submit(np.zeros(10, np.int32), 3)
  plan = at.scheduler.plan()
  assert features(plan) == (0, 1, 0, 10, 0, 55, 1)
  assert COST.seconds(plan) == pytest.approx(0.02 + 10e-4 + 55e-7)
