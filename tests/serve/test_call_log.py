"""How long calls of a live engine take: watched, logged, measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.serve import cluster
from ringjax.serve.cluster import MeasuredCall
from tests.helpers import refused


@pytest.fixture(scope="module")
def model():
  return rj.models.create(
    dict(
      model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=64,
      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
      max_position_embeddings=256,
    ),
    seed=0,
  )  # fmt: skip


@pytest.fixture(scope="module")
def engine(model):
  with rj.serve.Engine(
    model, rows=4, capacity=512, longest=160, page=16, piece=16, pieces=2
  ) as made:
    yield made


def ask(n, new=3, **more):
  prompt = (7 * np.arange(n, dtype=np.int32)) % 64
  return rj.serve.Request(prompt=prompt, max_new_tokens=new, **more)


@pytest.mark.long
def test_a_prompt_is_one_call_and_a_token_of_rows_another(engine):
  # Each look at the clock is a second later.
  ticks = itertools.count()
  found = []
  with cluster.watch_calls(
    engine, found.append, clock=lambda: float(next(ticks))
  ):
    engine.submit(ask(100)).result()
    engine.submit(ask(100)).result()
  reads = [x for x in found if x.phase == "prefill"]
  assert [(x.tokens, x.cached, x.devices) for x in reads] == [
    (100, 0, 1),
    (4, 96, 1),
  ]
  # The clock is looked at twice a step, and when the first one begins.
  assert [x.seconds for x in reads] == [4 * 2 + 1, 2 + 1]
  steps = [x for x in found if x.phase == "decode"]
  assert [(x.tokens, x.cached) for x in steps] == [(1, 100), (1, 101)] * 2
  # Nothing is watched any more.
  engine.submit(ask(20)).result()
  assert len(found) == 6


def test_prompts_in_one_step_share_it_and_mixed_steps_are_left_out(engine):
  ticks = itertools.count()
  found = []
  with cluster.watch_calls(
    engine, found.append, clock=lambda: float(next(ticks))
  ):
    both = [engine.submit(ask(n, 2, share=False)) for n in (10, 16)]
    for handle in both:
      handle.result()
    reads = [x for x in found if x.phase == "prefill"]
    assert [x.tokens for x in reads] == [10, 16]
    assert reads[0].seconds / reads[1].seconds == pytest.approx(10 / 16)
    assert found[-1].phase == "decode" and found[-1].tokens == 2
    found.clear()
    first = engine.submit(ask(16, 12, share=False))
    for _ in range(3):
      engine.step()
    engine.submit(ask(90, 1, share=False)).result()
    first.result()
  # The second prompt was read beside the first one's answer.
  assert [x.tokens for x in found if x.phase == "prefill"] == [16]
  assert {x.tokens for x in found if x.phase == "decode"} == {1}


def test_a_log_is_read_as_times(engine, tmp_path):
  path = tmp_path / "calls.csv"
  with cluster.log_calls(engine, path):
    engine.submit(ask(50)).result()
    # It is there at once, for one that looks while it is served.
    assert len(cluster.read_calls(path)) >= 2
  whole = path.read_bytes()
  # A loss of power has cut the last line; the next process goes on behind it.
  path.write_bytes(whole + b"decode,1,1,5")
  before = cluster.read_calls(path)
  with cluster.log_calls(engine, path):
    for n in (70, 100, 130):
      engine.submit(ask(n)).result()
  calls = cluster.read_calls(path)
  assert calls[: len(before)] == before and len(calls) > len(before) + 6
  times = cluster.TensorTimes.fit(calls)
  assert times.at(1).prefill_s([(100, 0)]) > 0
  other = tmp_path / "other.csv"
  other.write_text("a,b\n")

  def log(at):
    with cluster.log_calls(engine, at):
      pass

  refused(OptionError, lambda: log(other), "begins otherwise")
  refused(OptionError, lambda: log(tmp_path / "no" / "x.csv"), "log_calls")
  assert other.read_text() == "a,b\n"


def test_an_engine_measures_itself(engine):
  calls = cluster.measure_calls(engine)
  reads = {x.tokens for x in calls if x.phase == "prefill"}
  assert {32, 64, 128} <= reads
  assert {1, 4} <= {x.tokens for x in calls if x.phase == "decode"}
  assert all(x.cached == 0 for x in calls if x.phase == "prefill")
  times = cluster.instance_times(calls)
  assert times.prefill_s([(100, 0)]) > 0 < times.decode_s(1, 100)
  engine.submit(ask(150, 9))
  refused(OptionError, lambda: cluster.measure_calls(engine), "busy")
  engine.run()


def test_times_of_each_phase_are_fitted_to_its_own_calls():
  want = cluster.QuadraticTimes(
    prefill_fixed_s=0.5,
    prefill_token_s=1e-3,
    prefill_pair_s=1e-6,
    decode_fixed_s=0.01,
    decode_row_s=1e-3,
    decode_token_s=1e-6,
  )
  calls = [
    MeasuredCall(
      phase="prefill", devices=2, tokens=n, cached=c,
      seconds=want.prefill_s([(n, c)]),
    )
    for n in (64, 128, 1024) for c in (0, 512)
  ]  # fmt: skip
  refused(OptionError, lambda: cluster.instance_times(calls), "decode")
  calls += [
    MeasuredCall(
      phase="decode", devices=2, tokens=r, cached=c,
      seconds=want.decode_s(r, c),
    )
    for r in (1, 4, 8) for c in (100, 5000)
  ]  # fmt: skip
  found = cluster.instance_times(calls)
  for a, b in (((300, 20), (8, 900)), ((5000, 0), (1, 1))):
    assert found.prefill_s([a]) == pytest.approx(want.prefill_s([a]))
    assert found.decode_s(*b) == pytest.approx(want.decode_s(*b))


def test_times_of_instances_are_each_its_own():
  times = cluster.InstanceTimes()
  refused(OptionError, lambda: times.decode_s(1, 1), "start one")
  times.tell("a", cluster.QuadraticTimes(prefill_token_s=1.0))
  times.tell("b", cluster.QuadraticTimes(prefill_token_s=3.0))
  costs = cluster.RoutingCosts(times=times)
  assert [costs.prefill_s(x, 11, 1) for x in "abc"] == [10.0, 30.0, 20.0]
  times.tell("b", cluster.QuadraticTimes(prefill_token_s=5.0))
  assert costs.prefill_s("b", 11, 1) == 50.0


@pytest.mark.long
def test_instances_measure_for_a_router_that_predicts(model):
  key = bytes(range(32))
  times = cluster.InstanceTimes()
  costs = cluster.RoutingCosts(times=times)
  policy = cluster.routing_policy("conductor", costs)
  with (
    cluster.ClusterRouter(
      key=key, vocab=64, longest=160, policy=policy, times=times
    ) as router,
    rj.serve.Engine(
      model, rows=2, capacity=512, longest=160, page=16, piece=16, pieces=2,
      store=rj.store.Store(host=1 << 24),
    ) as engine,
    cluster.ClusterWorker(engine, key=key, router=router.address) as worker,
  ):  # fmt: skip
    assert worker.joined.wait(60), worker.refused
    assert times.of(worker.name) == worker.times is not None
    tokens = router.submit(ask(50)).result().tokens.tolist()
  with rj.serve.Engine(
    model, rows=2, capacity=512, longest=160, page=16, piece=16, pieces=2
  ) as alone:
    assert tokens == alone.submit(ask(50)).result().tokens.tolist()
