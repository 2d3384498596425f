"""A model does what an elastic scheduler decides: tokens of one device."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import generate
from ringjax.serve.cluster import (
  ElasticLoop,
  ElasticOptions,
  ElasticRunner,
  ElasticScheduler,
  FixedGroups,
  QuadraticTimes,
  simulate_elastic,
)
from ringjax.serve.traces import TraceRequest
from tests.helpers import SMALL, refused

# Prompts and answers; when they come, in seconds.
ASKED = (
  (30, 9, 0.0), (61, 5, 0.01), (14, 12, 0.3), (45, 1, 0.32), (25, 7, 0.5),
  (9, 7, 2.0), (8, 7, 2.0), (7, 9, 2.0),
)  # fmt: skip


def times(instances):
  return QuadraticTimes(
    prefill_token_s=4e-3 / instances,
    prefill_pair_s=1e-5 / instances,
    decode_fixed_s=0.03,
    decode_row_s=1e-3,
  )


def scheduler(instances=4, **options):
  given = dict(
    slots=40, most_moved_tokens=0, steps=3, wide_rows=1, answer_tokens=6,
    step_s=0.03, window=4,
  )  # fmt: skip
  return ElasticScheduler(
    [times(n) for n in range(1, instances + 1)],
    ElasticOptions(**(given | options)),
  )


def trace():
  return [
    TraceRequest(arrival=at, prompt_tokens=n, new_tokens=new, number=i)
    for i, (n, new, at) in enumerate(ASKED)
  ]


@pytest.fixture(scope="module")
def parts():
  """The model on one device, on a mesh, its prompts and their answers."""
  one = rj.models.create(SMALL | {"vocab_size": 97}, seed=0)
  mesh = rj.make_mesh((4,), ("seq",))
  chance = np.random.default_rng(3)
  prompts = [chance.integers(0, 97, n).astype(np.int32) for n, *_ in ASKED]
  want = [
    generate(one, x[None], max_new_tokens=new).tokens[0].tolist()
    for x, (_, new, _) in zip(prompts, ASKED, strict=True)
  ]
  return rj.models.place(one, mesh), mesh, prompts, want


@pytest.mark.long
def test_a_model_does_what_the_scheduler_decides(parts):
  model, mesh, prompts, want = parts
  runner = ElasticRunner(model, prompts, mesh=mesh)
  ran = runner.serve(trace(), scheduler(), 4, clock=None)
  assert runner.answers == want
  # The same decisions at the same times as without a model.
  alone = simulate_elastic(trace(), scheduler(), 4)
  assert ran == alone
  assert ran.moved_tokens == 0 and ran.shrinks and ran.grows
  # Several instances read what fewer answered, and others joined these.
  sizes = [[len(x) for x in groups] for groups in runner.groups]
  assert any(len({*x}) > 1 for x in sizes), sizes
  names = ["+".join(map(str, groups[0])) for groups in runner.groups]
  assert names == [one.prefill for one in ran.served]
  assert not runner._sessions


@pytest.mark.slow
def test_a_model_serves_by_the_clock(parts):
  model, mesh, prompts, want = parts
  runner, began = ElasticRunner(model, prompts, mesh=mesh), time.monotonic()
  policy = scheduler()
  ran = runner.serve(trace(), policy, 4)
  assert runner.answers == want
  assert 2.0 < ran.seconds <= time.monotonic() - began
  for one, (_, _, at) in zip(ran.served, ASKED, strict=True):
    assert at <= one.prefill_start_s < one.first_token_s <= one.last_token_s
  # It knows how long steps took.
  assert policy.step_s != 0.03


@pytest.mark.long
def test_what_does_not_go_with_a_model(parts):
  model, mesh, prompts, _ = parts
  runner = ElasticRunner(model, prompts[:1], mesh=mesh)
  run = lambda policy: runner.serve(trace(), policy, 4, clock=None)
  refused(
    OptionError,
    lambda: run(scheduler(most_moved_tokens=9)),
    "most_moved_tokens",
  )
  bare = lambda: ElasticLoop(trace(), scheduler(), 4, clock=time.monotonic)
  refused(OptionError, bare, "runner")
  # One that is refused is not read; the next one has no prompt here.
  whole = FixedGroups(times(1), [[0, 1, 2, 3]], scheduler(slots=10).options)
  refused(OptionError, lambda: run(whole), "nothing for request 2")
