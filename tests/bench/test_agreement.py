"""A live engine whose clock is a cost is what simulators of that cost say."""

from __future__ import annotations

import dataclasses

import pytest

import ringjax as rj
from benchmarks.serving.agreement import compare_simulators
from ringjax.errors import OptionError
from ringjax.serve import (
  Engine,
  Request,
  StepCost,
  poisson_trace,
)
from ringjax.serve.simulate import features
from tests.helpers import SMALL, refused

COST = StepCost(
  answers=0.01, prompts=0.02, row=2e-4, token=1e-4, key=1e-5, pair=1e-6
)


class Virtual:
  """Lets an engine's steps take what a cost says; its clock."""

  def __init__(self, engine):
    self.now, self._device, self._flying = 0.0, 0.0, None
    self._plan = engine.scheduler.plan
    engine.scheduler.plan = self.plan

  def plan(self):
    found, before = self._plan(), self._flying
    self._flying, step = None, features(found)
    if any(step):
      # The device begins when it is told to, or has done what was before.
      self._device = max(self.now, self._device) + COST.of(step)
      self._flying = self._device
    if before is not None:
      self.now = max(self.now, before)
    return found

  def __call__(self):
    return self.now


@pytest.mark.slow
def test_simulators_agree_with_an_engine_of_their_cost():
  model = rj.models.create(SMALL, seed=0)
  engine = Engine(
    model, rows=4, capacity=512, longest=96, page=16, piece=16, pieces=2
  )
  ask = lambda seed: poisson_trace(
    rate=6.0, requests=24, prompt_tokens=30, new_tokens=8, seed=seed
  )
  clock = Virtual(engine)
  found = compare_simulators(engine, ask(0), ask(1), rounds=2, clock=clock)
  for one in found.rounds:
    for name, seconds in dataclasses.asdict(COST).items():
      assert getattr(one.cost, name) == pytest.approx(seconds, rel=1e-6)
    assert one.unrest == pytest.approx(0, abs=1e-9)
  assert found.worst("engine") < 1e-9
  # It knows no pages, and not that a row's place is free a step later: of so
  # few requests its p95 is one of them.
  assert found.worst("cluster") < 0.25
  table = "\n".join(found.lines())
  assert "engine 0%" in table and "TPOT" in table
  long = poisson_trace(rate=1.0, requests=9, prompt_tokens=200, new_tokens=8)
  refused(
    OptionError,
    lambda: compare_simulators(engine, long, ask(1), rounds=1, clock=clock),
    "96 tokens",
  )
  short = poisson_trace(
    rate=1.0, requests=9, prompt_tokens=20, new_tokens=1, spread=0.0
  )
  refused(
    OptionError, lambda: compare_simulators(engine, short, ask(1)), "one token"
  )
  engine.submit(Request(prompt=[1], max_new_tokens=2))
  refused(
    OptionError, lambda: compare_simulators(engine, ask(0), ask(1)), "busy"
  )
